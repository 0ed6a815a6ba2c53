//! A worker process: hosts ranks on one GPU, does what its supervisor orders, and can be killed at any time.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::bench::worker::Bench;
use super::fault;
use super::protocol::{Answer, Clock, Line, Order};
use super::stage::{Play, Stage, Trouble, Unopened};

/// Serves the supervisor whose socket is this process's standard input, until it goes away.
pub fn serve() -> io::Result<()> {
    // The supervisor may be killed without a word; then nothing else would end a worker whose GPU hangs.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut line = Line::new(socket)?;
    let mut worker = Worker::default();
    let mut clock = Clock::start();
    while let Some(order) = line.receive::<Order>()? {
        worker.waited += clock.lap();
        let obeyed = worker.obey(order, &mut line);
        clock.lap();
        match obeyed {
            Ok(()) => {}
            Err(End::Io(error)) => return Err(error),
            Err(End::Lost) => {
                // What CUDA holds cannot be given back by a process whose GPU hangs or failed: nothing of it may be dropped,
                // and no exit handler of the driver may run.
                let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
                std::process::abort();
            }
        }
    }
    Ok(())
}

enum End {
    Io(io::Error),
    /// The GPU cannot be trusted any more.
    Lost,
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

#[derive(Default)]
struct Worker {
    bench: Bench,
    stage: Option<Stage>,
    play: Option<Play>,
    /// Seconds of waiting for orders that no outcome has told yet.
    waited: f64,
}

impl Worker {
    fn obey(&mut self, order: Order, line: &mut Line) -> Result<(), End> {
        if let Order::Open { artifact, tvm_ffi, cudart, device, deadline_ms } = &order {
            let deadline = Duration::from_millis(*deadline_ms);
            self.waited = 0.0;
            let mut clock = Clock::start();
            return match Stage::open(artifact, tvm_ffi, cudart.as_deref(), *device, deadline) {
                Ok(stage) => {
                    let answer = Answer::Opened {
                        devices: stage.devices.clone(),
                        driver: format!("{}.{}", stage.driver.0, stage.driver.1),
                        tvm_ffi: stage.tvm_ffi_version(),
                        unknown: stage.unknown.clone(),
                        free_bytes: stage.free_bytes,
                        seconds: clock.lap(),
                    };
                    self.stage = Some(stage);
                    Ok(line.send(&answer)?)
                }
                Err(Unopened::Lacks(why)) => Ok(line.send(&Answer::Lacks(why))?),
                Err(Unopened::Broken(why)) => Ok(line.send(&Answer::Broken(why))?),
            };
        }
        let Some(stage) = &mut self.stage else {
            return Ok(line.send(&Answer::Failed("no artifact is open".to_owned()))?);
        };
        let answer = match order {
            Order::Open { .. } => unreachable!("answered above"),
            Order::Share { rank, bytes } => stage.share(rank, bytes).map(|handle| Answer::Shared { handle }),
            Order::Map { handles } => stage.map(&handles).map(|faults| Answer::Probed { faults }),
            Order::Unmap => {
                self.play = None;
                self.bench.release();
                stage.unmap();
                Ok(Answer::Closed)
            }
            Order::Begin { number, case, ranks, shared_bytes, past_wrong } => {
                // The memory of the case before goes first.
                self.play = None;
                Play::begin(stage, number, &case, &ranks, shared_bytes, past_wrong).map(|play| {
                    self.play = Some(play);
                    Answer::Begun
                })
            }
            Order::Connect => with(&mut self.play, |play| play.connect(stage).map(|kernels| Answer::Ready { kernels })),
            Order::Go => return go(stage, &mut self.play, line, &mut self.waited),
            Order::Load { cubin } => stage.load(&cubin).map(|()| Answer::Loaded),
            Order::Bench(order) => self.bench.obey(stage, order, &mut |rank, replay| {
                // A supervisor that went away is seen at the next order.
                let _ = line.send(&Answer::At { rank, replay });
            }),
            Order::Probe => stage.probe().map(|()| Answer::Probed { faults: Vec::new() }),
            Order::ProbePeers => stage.probe_peers().map(|faults| Answer::Probed { faults }),
            Order::ProbeOwn => stage.probe_own().map(|faults| Answer::Probed { faults }),
        };
        settle(answer, line)
    }
}

fn with(play: &mut Option<Play>, does: impl FnOnce(&mut Play) -> Result<Answer, Trouble>) -> Result<Answer, Trouble> {
    does(play.as_mut().ok_or_else(|| Trouble::Failed("no case was begun".to_owned()))?)
}

/// Sends an answer, or the trouble in its place.
fn settle(answer: Result<Answer, Trouble>, line: &mut Line) -> Result<(), End> {
    let (answer, lost) = match answer {
        Ok(answer) => (answer, false),
        Err(Trouble::Skip(why)) => (Answer::Skipped(why), false),
        Err(Trouble::Ours(what)) => (Answer::Ours(what), false),
        Err(Trouble::Wrong(what)) => {
            let outcome = super::protocol::Outcome { wrong: Some(what), beyond_a_race: true, ..Default::default() };
            (Answer::Ended(outcome), false)
        }
        Err(Trouble::Failed(why)) => (Answer::Failed(why), true),
        Err(Trouble::Hung { replay, standing }) => (Answer::Hung { replay, standing }, true),
    };
    line.send(&answer)?;
    if lost { Err(End::Lost) } else { Ok(()) }
}

/// All replays, or one where the case goes in step with other workers. `waited`: seconds of waiting for orders so far.
fn go(stage: &Stage, play: &mut Option<Play>, line: &mut Line, waited: &mut f64) -> Result<(), End> {
    let Some(play) = play else { return settle(Err(Trouble::Failed("no case was begun".to_owned())), line) };
    loop {
        for rank in play.hosted().collect::<Vec<_>>() {
            line.send(&Answer::At { rank, replay: play.replays_done() })?;
            fault::strike(rank, play.replays_done());
        }
        match play.replay(stage) {
            Ok(true) => {
                let waited = std::mem::take(waited);
                return settle(play.outcome(stage, waited).map(Answer::Ended), line);
            }
            Ok(false) if play.case().in_step() => {
                line.send(&Answer::Stepped)?;
                let mut clock = Clock::start();
                let Some(Order::Go) = line.receive::<Order>()? else { return Err(End::Lost) };
                *waited += clock.lap();
            }
            Ok(false) => {}
            Err(trouble) => return settle(Err(trouble), line),
        }
    }
}
