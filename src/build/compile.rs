//! Runs commands side by side: as many as the machine can carry, the longest first, all ended together on a failure or Ctrl-C.

use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::diagnose::{Diagnosis, diagnose};
use crate::cancel;
use crate::env;
use crate::error::{Error, Result};

/// How often running jobs are looked at. Short beside a job of seconds, long beside the look.
const LOOK: Duration = Duration::from_millis(50);

/// How long a job may take to end after it was asked to, before it is killed.
const GRACE: Duration = Duration::from_millis(500);

/// One command, run in the build's folder.
#[derive(Debug, Clone)]
pub struct Job {
    /// What people call it, such as `trtllm_allreduce`.
    pub label: String,
    pub argv: Vec<String>,
    /// nvcc's folder of intermediate files, relative to the build's folder: its content tells how far the job is.
    pub keep: Option<PathBuf>,
    /// Seconds that this job is expected to take beside the others: the longest starts first.
    pub weight: u32,
}

/// How far a job is, for a progress display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobStatus {
    pub label: String,
    /// `waiting`, a stage of nvcc (`front end`, `cicc`, `ptxas`, `host compiler`), or `done`.
    pub stage: &'static str,
    pub elapsed: Duration,
    pub done: bool,
}

struct Running {
    index: usize,
    child: Child,
    started: Instant,
}

/// Runs all `jobs` in `dir`, at most `parallel` at once, and returns when all succeeded. The output of job i goes to
/// `logs/<label>.log`. The first failure ends the others and is returned with the first real error of its output.
pub fn run_all(jobs: &[Job], dir: &Path, logs: &Path, parallel: usize, watch: &mut dyn FnMut(&[JobStatus])) -> Result<()> {
    fs::create_dir_all(logs).map_err(|e| Error::io("create", logs, e))?;
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(jobs[i].weight));
    let mut waiting = order.into_iter();
    let mut running: Vec<Running> = Vec::new();
    let waiting_status =
        |job: &Job| JobStatus { label: job.label.clone(), stage: "waiting", elapsed: Duration::ZERO, done: false };
    let mut status: Vec<JobStatus> = jobs.iter().map(waiting_status).collect();

    let result = loop {
        while running.len() < parallel.max(1) {
            let Some(index) = waiting.next() else { break };
            match spawn(&jobs[index], dir, logs) {
                Ok(child) => running.push(Running { index, child, started: Instant::now() }),
                Err(error) => {
                    end(&mut running);
                    return Err(error);
                }
            }
        }
        if running.is_empty() {
            break Ok(());
        }
        if let Err(error) = cancel::check() {
            break Err(error);
        }
        let mut failed = None;
        running.retain_mut(|run| {
            let (job, state) = (&jobs[run.index], &mut status[run.index]);
            state.elapsed = run.started.elapsed();
            match run.child.try_wait() {
                Ok(None) => {
                    state.stage = stage(job, dir);
                    true
                }
                Ok(Some(exit)) if exit.success() => {
                    (state.stage, state.done) = ("done", true);
                    false
                }
                Ok(Some(exit)) => {
                    failed.get_or_insert_with(|| failure(job, exit, logs));
                    false
                }
                Err(e) => {
                    failed.get_or_insert_with(|| Error::machine(format!("cannot wait for {}", job.argv[0])).because(e));
                    false
                }
            }
        });
        watch(&status);
        if let Some(error) = failed {
            break Err(error);
        }
        std::thread::sleep(LOOK);
    };
    end(&mut running);
    result
}

fn spawn(job: &Job, dir: &Path, logs: &Path) -> Result<Child> {
    let log_path = log_path(logs, &job.label);
    let log = File::create(&log_path).map_err(|e| Error::io("create", &log_path, e))?;
    let log2 = log.try_clone().map_err(|e| Error::io("open", &log_path, e))?;
    let mut command = Command::new(program(&job.argv[0], dir));
    command.args(&job.argv[1..]).current_dir(dir).stdin(Stdio::null()).stdout(log).stderr(log2);
    // nvcc calls its tools through a shell, by names that start with its own and with TMPDIR, and quotes none of them: it gets to know
    // nothing of the folder that the build folder lies in.
    command.arg0(&job.argv[0]).env("TMPDIR", "tmp");
    // A group of its own, so that one signal reaches nvcc and everything that nvcc started.
    command.process_group(0);
    for name in env::SILENT_INPUTS {
        if std::env::var_os(name).is_some() {
            tracing::info!("{name} is set; builds do not read it, since the product would then depend on it unseen");
        }
        command.env_remove(name);
    }
    command.env("LC_ALL", "C").env("SOURCE_DATE_EPOCH", "0");
    command.spawn().map_err(|e| {
        Error::machine(format!("cannot start {}", job.argv[0]))
            .because(e)
            .hint("is the toolkit or the host compiler whole, and may it be executed?")
    })
}

/// The program to start: a relative name is meant within the build's folder, whatever this process's own folder is.
fn program(name: &str, dir: &Path) -> PathBuf {
    if name.contains('/') { dir.join(name) } else { PathBuf::from(name) }
}

fn log_path(logs: &Path, label: &str) -> PathBuf {
    logs.join(format!("{label}.log"))
}

/// How far nvcc is, read from the intermediate files that it has begun to write.
fn stage(job: &Job, dir: &Path) -> &'static str {
    let Some(keep) = &job.keep else { return "running" };
    let Ok(entries) = fs::read_dir(dir.join(keep)) else { return "front end" };
    let names: Vec<String> = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    let has = |end: &str| names.iter().any(|name| name.ends_with(end));
    if has(".fatbin.c") {
        "host compiler"
    } else if has(".ptx") {
        "ptxas"
    } else if has(".cpp1.ii") {
        "cicc"
    } else {
        "front end"
    }
}

fn failure(job: &Job, exit: ExitStatus, logs: &Path) -> Error {
    let log = log_path(logs, &job.label);
    let output = fs::read(&log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    // A shell between us and the compiler reports a signal as 128 more.
    let signal = exit.signal().or(exit.code().filter(|code| matches!(code, 137 | 143)).map(|code| code - 128));
    let Diagnosis { first_error, hint } = diagnose(&output, signal);
    let how = match (exit.code(), exit.signal()) {
        (Some(code), _) => format!("it exited with {code}"),
        (None, Some(signal)) => format!("signal {signal} ended it"),
        (None, None) => "it ended without a status".into(),
    };
    let last =
        || output.lines().rev().find(|line| !line.trim().is_empty()).map(|line| format!("its last words: {}", line.trim()));
    let mut error = Error::refused(format!("{} did not compile", job.label)).because(how);
    if let Some(line) = first_error.or_else(last) {
        error = error.because(line);
    }
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// Ends what still runs: asks first, then kills; waits until it is gone, so that no child writes into a folder being removed.
fn end(running: &mut Vec<Running>) {
    let signal_all = |running: &[Running], signal: Signal| {
        for run in running {
            if let Some(group) = Pid::from_raw(run.child.id() as i32) {
                let _ = rustix::process::kill_process_group(group, signal);
            }
        }
    };
    signal_all(running, Signal::TERM);
    let asked = Instant::now();
    while asked.elapsed() < GRACE && running.iter_mut().any(|run| matches!(run.child.try_wait(), Ok(None))) {
        std::thread::sleep(Duration::from_millis(10));
    }
    // The leader may be gone while a grandchild still runs: the group gets the last signal in any case.
    signal_all(running, Signal::KILL);
    for run in running.iter_mut() {
        let _ = run.child.wait();
    }
    running.clear();
}
