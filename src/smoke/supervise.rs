//! Over the workers: starts them, passes cases, and kills what does not answer. Nothing here can hang with a GPU.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::cases::{Case, Planned};
use super::ffi::driver::DeviceInfo;
use super::protocol::{Answer, Launch, Line, Order, Outcome, Unknown};
use crate::cancel;
use crate::env;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::tables::calls::{Fault, FaultKind};

/// How long a worker may take to start: the driver, the libraries, the artifact.
pub(super) const START: Duration = Duration::from_secs(120);
/// How long a worker has, after its own deadline, to say so.
pub(super) const GRACE: Duration = Duration::from_secs(5);
/// After so many lost sets of workers nothing more is tried: each costs a deadline and a start.
const LOST_AT_MOST: usize = 6;

/// The hidden verb with which this program runs as a worker.
pub const WORKER_VERB: &str = "smoke-worker";

/// Where ranks live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// All ranks in one process, each a stream of one graph, on one GPU.
    InProcess,
    /// Each rank in a process of its own, with CUDA IPC between them.
    Ipc,
}

impl Transport {
    pub fn word(self) -> &'static str {
        match self {
            Self::InProcess => "inproc",
            Self::Ipc => "ipc",
        }
    }
}

/// What workers need to know.
#[derive(Debug, Clone)]
pub struct Crew {
    pub artifact: PathBuf,
    pub tvm_ffi: PathBuf,
    pub cudart: Option<PathBuf>,
    pub transport: Transport,
    /// Ordinals of the GPUs that ranks go to in turn; all of them where empty.
    pub gpus: Vec<usize>,
    /// How long the GPU may take for one replay.
    pub deadline: Duration,
    /// The most ranks of any case.
    pub ranks: usize,
}

/// What came of a case.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    Pass,
    /// Wrong numbers, a wrong graph, an error or a hang.
    Fail(String),
    /// It was run and met what its release is known to do wrong: that says nothing of the artifact.
    KnownFault(String),
    /// It cannot be run with these GPUs.
    Skipped(String),
    /// It was left out, for the reason given.
    NotRun(String),
    /// Left out because workers were lost, or because of the platform: nothing is proven of it, and not by choice.
    Lost(String),
}

/// A case and what came of it.
#[derive(Debug, Clone)]
pub struct Played {
    pub case: Case,
    pub verdict: Verdict,
    pub outcome: Outcome,
    pub launches: Vec<Launch>,
    /// How long it took, from its first order to its last answer.
    pub seconds: f64,
    /// What its release is known to do wrong in it.
    pub fault: Option<&'static Fault>,
}

impl Played {
    pub fn new(planned: &Planned, verdict: Verdict) -> Self {
        let Planned { case, fault, .. } = planned;
        Self { case: case.clone(), verdict, outcome: Outcome::default(), launches: Vec::new(), seconds: 0.0, fault: *fault }
    }
}

/// What the first worker said of the machine.
#[derive(Debug, Clone)]
pub struct Machine {
    pub devices: Vec<DeviceInfo>,
    pub driver: String,
    pub tvm_ffi: Option<String>,
    pub unknown: Vec<Unknown>,
}

/// The GPUs of these ordinals, in their order.
pub fn used<'d>(devices: &'d [DeviceInfo], gpus: &[usize]) -> Vec<&'d DeviceInfo> {
    gpus.iter().filter_map(|at| devices.iter().find(|device| device.ordinal == *at)).collect()
}

/// The workers of one run.
pub struct Supervisor {
    crew: Crew,
    workers: Vec<Worker>,
    answers: Receiver<(u64, Option<Answer>)>,
    sender: Sender<(u64, Option<Answer>)>,
    started: u64,
    lost: usize,
    /// The group of cases in which workers were lost.
    dead_group: Option<String>,
    machine: Option<Machine>,
    /// IPC handles of what the workers share, by rank, as far as they were asked for.
    handles: Vec<String>,
    /// Bytes that a rank shares with the others; 0 while the cases are not known.
    shared_bytes: usize,
    memory: BTreeMap<usize, Taken>,
    /// Seconds that workers took to start.
    starting: f64,
    /// The kernels that make inputs and check outputs, compiled; without them the host does both.
    cubin: Option<PathBuf>,
}

/// The memory of a GPU that a run took.
#[derive(Debug, Clone, Copy, Default)]
pub struct Taken {
    /// What workers allocated, at most.
    pub allocated_bytes: u64,
    /// By how much the GPU's free memory fell after the first worker had loaded the artifact: contexts of later workers count.
    pub fallen_bytes: u64,
    free_at_first: u64,
}

struct Worker {
    /// Tells its answers from those of a worker that was in its place before.
    id: u64,
    child: Child,
    orders: UnixStream,
    log: File,
    /// Where its ranks stood when it last said so.
    standing: Vec<(usize, u32)>,
    /// The most that it had allocated, as it last said.
    allocated_bytes: u64,
}

/// Why workers are no more.
pub(super) enum Gone {
    /// Nothing can be run on this machine, or with this artifact.
    Never(Error),
    /// These workers are lost; what it was, in words.
    Lost(String),
}

impl From<Error> for Gone {
    fn from(error: Error) -> Self {
        Self::Never(error)
    }
}

impl Supervisor {
    pub fn new(crew: Crew) -> Self {
        let (sender, answers) = mpsc::channel();
        Self {
            crew,
            workers: Vec::new(),
            answers,
            sender,
            started: 0,
            lost: 0,
            dead_group: None,
            machine: None,
            handles: Vec::new(),
            shared_bytes: 0,
            memory: BTreeMap::new(),
            starting: 0.0,
            cubin: None,
        }
    }

    /// Starts the first worker and asks it for the machine.
    pub fn machine(&mut self) -> Result<Machine> {
        match self.staff(1) {
            Ok(()) => Ok(self.machine.clone().expect("a worker that opened said so")),
            Err(Gone::Never(error)) => Err(error),
            Err(Gone::Lost(how)) => Err(Error::machine("no worker could be started").because(how)),
        }
    }

    /// Says how much memory ranks will share, before any of them does: as much as the largest case needs.
    pub fn will_share(&mut self, bytes: usize) {
        self.shared_bytes = bytes;
    }

    /// Whether every rank has a GPU of its own.
    pub fn one_gpu_a_rank(&self, ranks: usize) -> bool {
        self.crew.transport == Transport::Ipc && self.gpus().len() >= ranks
    }

    /// The GPUs that ranks go to in turn.
    pub fn gpus(&self) -> Vec<usize> {
        match (&self.crew.gpus[..], &self.machine) {
            ([], Some(machine)) => machine.devices.iter().map(|device| device.ordinal).collect(),
            ([], None) => vec![0],
            (gpus, _) => gpus.to_vec(),
        }
    }

    /// How many processes a case with so many ranks takes.
    fn processes(&self, ranks: usize) -> usize {
        if self.crew.transport == Transport::Ipc { ranks } else { 1 }
    }

    /// Has each of `ranks` processes read and write the others' memory. What does not work is the platform's fault.
    pub fn probe(&mut self, ranks: usize) -> Result<Vec<String>> {
        match self.try_probe(ranks) {
            Ok(faults) => Ok(faults),
            Err(Gone::Never(error)) => Err(error),
            Err(Gone::Lost(how)) => Ok(vec![how]),
        }
    }

    fn try_probe(&mut self, ranks: usize) -> Result<Vec<String>, Gone> {
        self.staff(ranks)?;
        let steps: [fn() -> Order; 3] = [|| Order::Probe, || Order::ProbePeers, || Order::ProbeOwn];
        for step in steps {
            self.order(ranks, |_| step());
            let faults = probed(self.gather(ranks)?);
            if !faults.is_empty() {
                // A copy may still be under way.
                self.dismiss("the probe found faults");
                return Ok(faults);
            }
        }
        Ok(Vec::new())
    }

    /// Has workers that came anew share their memory, and every worker map what it has not mapped.
    fn exchange(&mut self, count: usize) -> Result<(), Gone> {
        let first = self.handles.len();
        for rank in first..count {
            self.order_one(rank, &Order::Share { rank, bytes: self.shared_bytes });
        }
        for answer in self.gather_within(first..count, self.crew.deadline + GRACE)? {
            match answer {
                Answer::Shared { handle } => self.handles.push(handle),
                other => return Err(self.dismiss(&format!("a rank cannot share its memory: {}", said(&other)))),
            }
        }
        let handles = self.handles.clone();
        self.order(count, |_| Order::Map { handles: handles.clone() });
        let faults = probed(self.gather(count)?);
        if faults.is_empty() { Ok(()) } else { Err(self.dismiss(&faults.join("; "))) }
    }

    /// The processes of the workers that are there.
    pub fn processes_of_ranks(&self) -> Vec<u32> {
        self.workers.iter().map(|worker| worker.child.id()).collect()
    }

    /// Seconds that all workers took to start, together.
    pub fn starting(&self) -> f64 {
        self.starting
    }

    /// Has all workers, and those that come later, make inputs and check outputs on the GPU, with these compiled kernels. Where
    /// that does not work, the inner error says why, and the host goes on doing both.
    pub fn load(&mut self, cubin: PathBuf) -> Result<Result<(), String>> {
        self.cubin = Some(cubin);
        match self.load_in(0) {
            Err(Gone::Never(error)) => Err(error),
            Err(Gone::Lost(how)) => {
                self.cubin = None;
                Ok(Err(how))
            }
            Ok(()) => Ok(Ok(())),
        }
    }

    /// Has the workers from `first` on load the kernels.
    fn load_in(&mut self, first: usize) -> Result<(), Gone> {
        let (Some(cubin), count) = (self.cubin.clone(), self.workers.len()) else { return Ok(()) };
        for at in first..count {
            self.order_one(at, &Order::Load { cubin: cubin.clone() });
        }
        for answer in self.gather_within(first..count, self.crew.deadline + GRACE)? {
            if !matches!(answer, Answer::Loaded) {
                return Err(self.dismiss(&said(&answer)));
            }
        }
        Ok(())
    }

    /// The memory that was taken, by the ordinal of the GPU.
    pub fn memory(&self) -> &BTreeMap<usize, Taken> {
        &self.memory
    }

    /// Ends the workers in order: nothing that one of them shares is freed while another has it mapped.
    pub fn finish(&mut self) {
        let count = self.workers.len();
        self.order(count, |_| Order::Unmap);
        if self.gather(count).is_ok() {
            for worker in &mut self.workers {
                // The end of its orders ends a worker.
                let _ = worker.orders.shutdown(std::net::Shutdown::Both);
            }
            let until = Instant::now() + GRACE;
            let running = |worker: &mut Worker| matches!(worker.child.try_wait(), Ok(None));
            while self.workers.iter_mut().any(running) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// Runs a case.
    pub fn play(&mut self, number: u64, planned: &Planned) -> Result<Played> {
        let case = &planned.case;
        let mut played = Played::new(planned, Verdict::Pass);
        if let Some(why) = &planned.not_run {
            played.verdict = Verdict::NotRun(why.clone());
            return Ok(played);
        }
        if self.lost >= LOST_AT_MOST {
            played.verdict = Verdict::Lost(format!("workers were lost {} times before", self.lost));
            return Ok(played);
        }
        let group = group(case);
        let never_right = planned.fault.filter(|fault| fault.kind == FaultKind::Wrong);
        if self.dead_group.as_ref() == Some(&group) {
            let why = "an earlier case of its kind took its workers with it".to_owned();
            played.verdict = if never_right.is_some() { Verdict::NotRun(why) } else { Verdict::Lost(why) };
            return Ok(played);
        }
        let started = Instant::now();
        let ended = self.try_play(number, planned, &mut played);
        played.seconds = started.elapsed().as_secs_f64();
        match ended {
            Ok(()) => {}
            Err(Gone::Never(error)) => return Err(error),
            Err(Gone::Lost(how)) => {
                self.dead_group = Some(group);
                played.verdict = match never_right {
                    Some(fault) => Verdict::KnownFault(format!("{how}; {}", fault.why)),
                    None => {
                        self.lost += 1;
                        Verdict::Fail(how)
                    }
                };
            }
        }
        Ok(played)
    }

    fn try_play(&mut self, number: u64, planned: &Planned, played: &mut Played) -> Result<(), Gone> {
        let case = &planned.case;
        let count = self.processes(case.ranks);
        self.staff(count)?;
        let own_processes = self.crew.transport == Transport::Ipc;
        let hosted = |worker: usize| if own_processes { vec![worker] } else { (0..case.ranks).collect() };
        let (shared_bytes, past_wrong) = (self.shared_bytes, planned.fault.is_some());
        self.order(count, |worker| Order::Begin { number, case: case.clone(), ranks: hosted(worker), shared_bytes, past_wrong });
        let answers = self.gather(count)?;
        if !self.all(answers, |answer| matches!(answer, Answer::Begun), played)? {
            return Ok(());
        }
        self.order(count, |_| Order::Connect);
        let answers = self.gather(count)?;
        for answer in &answers {
            if let Answer::Ready { kernels } = answer {
                played.launches.extend(kernels.iter().filter(|one| !played.launches.contains(one)).cloned().collect::<Vec<_>>());
            }
        }
        if !self.all(answers, |answer| matches!(answer, Answer::Ready { .. }), played)? {
            return Ok(());
        }
        loop {
            self.order(count, |_| Order::Go);
            let answers = self.gather(count)?;
            if answers.iter().all(|answer| matches!(answer, Answer::Stepped)) {
                continue;
            }
            for (worker, answer) in answers.iter().enumerate() {
                match answer {
                    Answer::Ended(outcome) => {
                        merge(&mut played.outcome, outcome);
                        self.note_memory(worker, outcome);
                    }
                    other => return Err(self.dismiss(&said(other))),
                }
            }
            played.verdict = verdict(&played.outcome, planned);
            return Ok(());
        }
    }

    fn note_memory(&mut self, worker: usize, outcome: &Outcome) {
        let gpus = self.gpus();
        let of_gpu = |at: usize| gpus[at % gpus.len()];
        self.workers[worker].allocated_bytes = outcome.allocated_bytes;
        let on_it = self.workers.iter().enumerate().filter(|(at, _)| of_gpu(*at) == of_gpu(worker));
        let allocated = on_it.map(|(_, worker)| worker.allocated_bytes).sum();
        let taken = self.memory.entry(of_gpu(worker)).or_default();
        taken.allocated_bytes = taken.allocated_bytes.max(allocated);
        taken.fallen_bytes = taken.fallen_bytes.max(taken.free_at_first.saturating_sub(outcome.free_bytes));
    }

    /// Whether every worker answered as hoped. Else says so in `played` and lets the workers go on to the next case.
    fn all(&mut self, answers: Vec<Answer>, hoped: impl Fn(&Answer) -> bool, played: &mut Played) -> Result<bool, Gone> {
        let mut skipped = None;
        for answer in &answers {
            match answer {
                answer if hoped(answer) => {}
                Answer::Skipped(why) => skipped = Some(Verdict::Skipped(why.clone())),
                Answer::Ended(Outcome { wrong: Some(what), .. }) => skipped = Some(Verdict::Fail(what.clone())),
                other => return Err(self.dismiss(&said(other))),
            }
        }
        let Some(verdict) = skipped else { return Ok(true) };
        played.verdict = verdict;
        Ok(false)
    }

    /// Starts workers until there are `count`.
    pub(super) fn staff(&mut self, count: usize) -> Result<(), Gone> {
        let gpus = self.gpus();
        let first = self.workers.len();
        for at in first..count {
            let worker = self.start()?;
            self.workers.push(worker);
            // The first one tells how many GPUs there are.
            let gpus = if at == 0 { gpus.clone() } else { self.gpus() };
            self.order_one(
                at,
                &Order::Open {
                    artifact: self.crew.artifact.clone(),
                    tvm_ffi: self.crew.tvm_ffi.clone(),
                    cudart: self.crew.cudart.clone(),
                    device: gpus[at % gpus.len()],
                    deadline_ms: self.crew.deadline.as_millis() as u64,
                },
            );
            if at == 0 {
                self.opened(0, 1)?;
            }
        }
        self.opened(first.max(1), count)?;
        self.load_in(first)?;
        let to_share = self.crew.transport == Transport::Ipc && self.shared_bytes > 0 && self.handles.len() < count;
        if to_share { self.exchange(count) } else { Ok(()) }
    }

    /// Takes the answers of workers that were told to open.
    fn opened(&mut self, from: usize, to: usize) -> Result<(), Gone> {
        if from >= to {
            return Ok(());
        }
        for (answer, at) in self.gather_within(from..to, START)?.into_iter().zip(from..) {
            match answer {
                Answer::Opened { devices, driver, tvm_ffi, unknown, free_bytes, seconds } => {
                    self.starting += seconds;
                    self.machine.get_or_insert(Machine { devices, driver, tvm_ffi, unknown });
                    let gpus = self.gpus();
                    let first = || Taken { free_at_first: free_bytes, ..Taken::default() };
                    self.memory.entry(gpus[at % gpus.len()]).or_insert_with(first);
                }
                Answer::Lacks(why) => {
                    return Err(Gone::Never(
                        Error::machine("this machine cannot run the artifact")
                            .because(why)
                            .hint("smoke needs an NVIDIA GPU and its driver; everything else of fi-arch works without"),
                    ));
                }
                Answer::Broken(why) => {
                    return Err(Gone::Never(
                        Error::new(Exit::Fault, "the artifact cannot be loaded")
                            .because(why)
                            .hint("`fi-arch inspect ARTIFACT` shows what it needs; --cudart and --tvm-ffi name other libraries"),
                    ));
                }
                other => return Err(self.dismiss(&said(&other))),
            }
        }
        Ok(())
    }

    fn start(&mut self) -> Result<Worker> {
        let failed = |doing: &str, error: std::io::Error| Error::machine(format!("cannot {doing}")).because(error);
        let (ours, theirs) = UnixStream::pair().map_err(|error| failed("make a socket for a worker", error))?;
        let log = tempfile::tempfile().map_err(|error| failed("make a log file for a worker", error))?;
        let program = std::env::current_exe().map_err(|error| failed("find this program's own file", error))?;
        let copy = || log.try_clone().map_err(|error| failed("share a worker's log file", error));
        let mut command = Command::new(program);
        command.arg(WORKER_VERB).stdin(Stdio::from(OwnedFd::from(theirs))).stdout(copy()?).stderr(copy()?);
        // Branches of a graph must not share a queue: one that waits would hold up the one it waits for.
        command.env(env::CUDA_DEVICE_MAX_CONNECTIONS, "32");
        // NVLink multicast is no part of what an engine needs, and a fault in it can outlast the process.
        if !env::is_set(env::NCCL_NVLS_ENABLE) {
            command.env(env::NCCL_NVLS_ENABLE, "0");
        }
        // Workers do their host's work at the same time: each gets its part of the cores.
        if !env::is_set(env::RAYON_NUM_THREADS) {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            command.env(env::RAYON_NUM_THREADS, cores.div_ceil(self.processes(self.crew.ranks).max(1)).to_string());
        }
        // A group of its own: Ctrl-C goes to the supervisor, which ends its workers itself.
        command.process_group(0);
        let child = command.spawn().map_err(|error| failed("start a worker", error))?;
        self.started += 1;
        let id = self.started;
        let line = Line::new(ours).map_err(|error| failed("use a worker's socket", error))?;
        let (mut reader, orders) = line.split();
        let sender = self.sender.clone();
        std::thread::spawn(move || {
            let mut text = String::new();
            while reader.read_line(&mut text).is_ok_and(|read| read > 0) {
                let Ok(answer) = serde_json::from_str(&text) else { break };
                if sender.send((id, Some(answer))).is_err() {
                    return;
                }
                text.clear();
            }
            let _ = sender.send((id, None));
        });
        Ok(Worker { id, child, orders, log, standing: Vec::new(), allocated_bytes: 0 })
    }

    pub(super) fn order(&mut self, count: usize, order: impl Fn(usize) -> Order) {
        for at in 0..count {
            self.order_one(at, &order(at));
        }
    }

    /// Sends an order. That a worker is gone is seen when its answer is awaited.
    pub(super) fn order_one(&mut self, at: usize, order: &Order) {
        let mut text = serde_json::to_vec(order).expect("an order is always JSON");
        text.push(b'\n');
        let worker = &mut self.workers[at];
        if matches!(order, Order::Begin { .. } | Order::Bench(_)) {
            worker.standing.clear();
        }
        let _ = worker.orders.write_all(&text);
    }

    fn gather(&mut self, count: usize) -> Result<Vec<Answer>, Gone> {
        self.gather_within(0..count, self.crew.deadline + GRACE)
    }

    /// One answer of each worker in `who`, in their order. `patience` counts from the last sign of life of any of them.
    pub(super) fn gather_within(&mut self, who: std::ops::Range<usize>, patience: Duration) -> Result<Vec<Answer>, Gone> {
        let mut found: Vec<Option<Answer>> = who.clone().map(|_| None).collect();
        let mut until = Instant::now() + patience;
        while let Some(missing) = found.iter().position(Option::is_none) {
            if cancel::is_asked() {
                self.dismiss("interrupted");
                cancel::check()?;
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.answers.recv_timeout(left.min(Duration::from_millis(100))) {
                Ok((id, answer)) => {
                    let Some(at) = self.workers.iter().position(|worker| worker.id == id) else { continue };
                    match answer {
                        None => {
                            let standing = self.standing();
                            let how = self.end(at);
                            return Err(self.dismiss(&format!("the process of {} ended: {how}{standing}", self.name(at))));
                        }
                        Some(Answer::At { rank, replay }) => {
                            let standing = &mut self.workers[at].standing;
                            standing.retain(|(one, _)| *one != rank);
                            standing.push((rank, replay));
                            until = Instant::now() + patience;
                        }
                        Some(Answer::Hung { replay, standing }) => return Err(self.hung(at, replay, standing)),
                        Some(Answer::Failed(why)) => {
                            let standing = self.standing();
                            return Err(self.dismiss(&format!("{}: {why}{standing}", self.name(at))));
                        }
                        Some(Answer::Ours(why)) => {
                            let told = Error::new(Exit::Bug, "this program's own kernels and its own reference do not agree")
                                .because(why)
                                .hint("that is a fault of fi-arch, not of the artifact: please report it; --compare host runs without the kernels");
                            self.dismiss("no verdict can be trusted");
                            return Err(Gone::Never(told));
                        }
                        Some(answer) if who.contains(&at) => {
                            found[at - who.start] = Some(answer);
                            until = Instant::now() + patience;
                        }
                        Some(_) => {}
                    }
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(_) => {
                    let (name, standing) = (self.name(who.start + missing), self.standing());
                    return Err(self.dismiss(&format!("{name} gave no answer for {:.0} s{standing}", patience.as_secs_f64())));
                }
            }
        }
        Ok(found.into_iter().flatten().collect())
    }

    /// One worker found its GPU hung: the others wait for it and will say so too.
    fn hung(&mut self, first: usize, replay: u32, standing: Vec<String>) -> Gone {
        let mut lines = standing;
        let mut open: Vec<u64> = self.workers.iter().enumerate().filter(|(at, _)| *at != first).map(|(_, one)| one.id).collect();
        let until = Instant::now() + Duration::from_secs(3);
        while !open.is_empty() {
            match self.answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((id, Some(Answer::Hung { standing, .. }))) => {
                    lines.extend(standing);
                    open.retain(|one| *one != id);
                }
                Ok((id, None | Some(Answer::Ended(_)))) => open.retain(|one| *one != id),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        let silent = self.workers.iter().enumerate().filter(|(_, worker)| open.contains(&worker.id));
        lines.extend(silent.map(|(at, _)| format!("{}: it gives no answer", self.name(at))));
        let known = self.standing();
        lines.sort();
        self.dismiss(&format!(
            "the GPU did not finish replay {} within {:.0} s: {}{known}",
            replay + 1,
            self.crew.deadline.as_secs_f64(),
            lines.join("; ")
        ))
    }

    fn name(&self, at: usize) -> String {
        if self.crew.transport == Transport::Ipc { format!("rank {at}") } else { "the worker".to_owned() }
    }

    /// Where each rank stood when it last said so.
    fn standing(&self) -> String {
        let mut ranks: Vec<(usize, u32)> = self.workers.iter().flat_map(|worker| worker.standing.iter().copied()).collect();
        ranks.sort();
        if ranks.is_empty() {
            return String::new();
        }
        let each: Vec<_> = ranks.iter().map(|(rank, replay)| format!("rank {rank} in replay {}", replay + 1)).collect();
        format!(" ({})", each.join(", "))
    }

    /// Ends a worker and says how it ended, with what it printed of the reason.
    fn end(&mut self, at: usize) -> String {
        let worker = &mut self.workers[at];
        // One that ended by itself is about to: the driver takes seconds to tear down what it had on the GPU.
        let until = Instant::now() + Duration::from_secs(5);
        let ended = loop {
            match worker.child.try_wait() {
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                other => break other.ok().flatten(),
            }
        };
        let how = ended.map_or_else(|| "killed".to_owned(), |status| status.to_string());
        kill(worker);
        let mut text = String::new();
        let _ = worker.log.seek(SeekFrom::Start(0)).and_then(|_| worker.log.read_to_string(&mut text));
        match last_words(&text) {
            Some(words) => format!("{how}: {words}"),
            None => how,
        }
    }

    /// Ends all workers: what one of them shares with the others cannot be trusted any more.
    pub(super) fn dismiss(&mut self, why: &str) -> Gone {
        self.handles.clear();
        self.workers.iter_mut().for_each(kill);
        for mut worker in self.workers.drain(..) {
            // Tearing down a context with a kernel that spins takes the driver seconds.
            let until = Instant::now() + Duration::from_secs(30);
            while matches!(worker.child.try_wait(), Ok(None)) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Gone::Lost(why.to_owned())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Nothing is left of those that ended in order.
        self.dismiss("done");
    }
}

fn kill(worker: &mut Worker) {
    if !matches!(worker.child.try_wait(), Ok(None)) {
        // Its number may be another's by now.
        return;
    }
    // Its group: whatever it started goes with it.
    if let Some(group) = rustix::process::Pid::from_raw(worker.child.id() as i32) {
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let _ = worker.child.kill();
}

/// The last line of what a process printed that may tell why it ended. Libraries tell there what they do as well, at levels that are
/// no complaint.
fn last_words(text: &str) -> Option<&str> {
    let chatters = |line: &str| {
        let line = line.to_ascii_lowercase();
        // `note: ` is how Rust ends a panic: what it was stands above.
        ["[info]", "[debug]", "[trace]", " nccl info "].iter().any(|level| line.contains(level)) || line.starts_with("note: ")
    };
    text.lines().map(str::trim).rfind(|line| !line.is_empty() && !chatters(line))
}

/// Cases that stand or fall together: where one took its workers with it, the next would too.
fn group(case: &Case) -> String {
    format!("{} {:?} {} {}", case.pattern(), case.oneshot(), case.hidden, case.ranks)
}

/// What the faults that workers found were.
fn probed(answers: Vec<Answer>) -> Vec<String> {
    let faults = |answer| match answer {
        Answer::Probed { faults } => faults,
        other => vec![said(&other)],
    };
    answers.into_iter().flat_map(faults).collect()
}

/// What the numbers say. Where the release is known to race, they are a fault of the artifact only when they are wrong in a way
/// that no race explains, or in every replay: on an H200 the races of 0.6.4 let 7 of 20 replays and more come out right.
fn verdict(outcome: &Outcome, planned: &Planned) -> Verdict {
    let replays = planned.case.replays;
    match (&outcome.wrong, planned.fault) {
        (None, None) => Verdict::Pass,
        (Some(wrong), None) => Verdict::Fail(wrong.clone()),
        (None, Some(fault)) => {
            Verdict::KnownFault(format!("right in all {replays} replays, which proves nothing ({}): {}", fault.id, fault.why))
        }
        (Some(wrong), Some(fault)) if fault.kind == FaultKind::Race => {
            if outcome.beyond_a_race || outcome.right == 0 {
                return Verdict::Fail(format!("{wrong} (right in {} of {replays} replays)", outcome.right));
            }
            let times = replays - outcome.right;
            Verdict::KnownFault(format!("wrong in {times} of {replays} replays ({}): {}; {wrong}", fault.id, fault.why))
        }
        (Some(wrong), Some(fault)) => Verdict::KnownFault(format!("{wrong} ({}): {}", fault.id, fault.why)),
    }
}

/// The outcome of all workers: of the slowest in time, of the worst in numbers.
fn merge(all: &mut Outcome, one: &Outcome) {
    if all.wrong.is_none() {
        all.wrong.clone_from(&one.wrong);
    }
    all.beyond_a_race |= one.beyond_a_race;
    all.spent.add(&one.spent);
    all.right = if all.micros.is_empty() { one.right } else { all.right.min(one.right) };
    all.error = all.error.max(one.error);
    all.of_bound = all.of_bound.max(one.of_bound);
    for (at, micros) in one.micros.iter().enumerate() {
        match all.micros.get_mut(at) {
            Some(slowest) => *slowest = slowest.max(*micros),
            None => all.micros.push(*micros),
        }
    }
}

/// An answer that was not hoped for, in words.
pub(super) fn said(answer: &Answer) -> String {
    match answer {
        Answer::Skipped(why) | Answer::Failed(why) | Answer::Lacks(why) | Answer::Broken(why) | Answer::Ours(why) => why.clone(),
        Answer::Ended(Outcome { wrong: Some(what), .. }) => what.clone(),
        other => format!("a worker answered out of turn ({other:?})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::smoke::cases::{Custom, What};
    use crate::smoke::numbers::DType;

    #[test]
    fn the_last_words_of_a_process_are_its_last_line_that_is_no_chatter() {
        let info = "[2026-11-29 22:33:46.392] [info] lamportInitialize start: buffer: 0x7f0d9cc00000, size: 1048576";
        assert_eq!(last_words(&format!("{info}\n{info}\n")), None);
        assert_eq!(last_words(""), None);
        let thrown = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  no such kernel\n";
        assert_eq!(last_words(&format!("{info}\n{thrown}\n{info}\n\n")), Some("what():  no such kernel"));
        assert_eq!(last_words("[TensorRT-LLM][INFO] on\n[TensorRT-LLM][ERROR] off\n"), Some("[TensorRT-LLM][ERROR] off"));
        assert_eq!(last_words("host:1 NCCL WARN gone\nhost:1:1 [0] NCCL INFO bye\n"), Some("host:1 NCCL WARN gone"));
        let panic = "thread 'main' panicked at src/main.rs:1:1:\nit is broken\nnote: run with `RUST_BACKTRACE=1`\n";
        assert_eq!(last_words(panic), Some("it is broken"));
    }

    #[test]
    fn a_race_of_the_release_hides_neither_a_pass_nor_a_fault_of_the_artifact() {
        let case = |path| Case {
            what: What::Custom { path, bias: false },
            dtype: DType::Bf16,
            ranks: 2,
            tokens: 8,
            hidden: 7168,
            pdl: false,
            replays: 20,
        };
        let planned = |path| {
            let case = case(path);
            Planned { fault: case.known_fault(None), case, not_run: None }
        };
        let outcome = |right, wrong: bool, beyond_a_race| Outcome {
            right,
            wrong: wrong.then(|| "off".to_owned()),
            beyond_a_race,
            micros: vec![1.0],
            ..Outcome::default()
        };
        let (racing, sound) = (planned(Custom::OneShotPush), planned(Custom::NormLamport));
        assert_eq!(verdict(&outcome(20, false, false), &sound), Verdict::Pass);
        assert!(matches!(verdict(&outcome(19, true, false), &sound), Verdict::Fail(_)));
        assert!(matches!(verdict(&outcome(20, false, false), &racing), Verdict::KnownFault(_)));
        assert!(matches!(verdict(&outcome(19, true, false), &racing), Verdict::KnownFault(_)));
        assert!(matches!(verdict(&outcome(19, true, true), &racing), Verdict::Fail(_)), "an output that was never written");
        assert!(matches!(verdict(&outcome(1, true, false), &racing), Verdict::KnownFault(_)));
        assert!(matches!(verdict(&outcome(0, true, false), &racing), Verdict::Fail(_)), "wrong always");
        let never_right = planned(Custom::PrePostTwoShot);
        assert!(matches!(verdict(&outcome(0, true, false), &never_right), Verdict::KnownFault(_)));
    }
}
