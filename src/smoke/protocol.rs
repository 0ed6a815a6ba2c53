//! What the supervisor and its workers say to each other: one JSON object a line, over one socket a worker.
//!
//! Every order is a phase: the next one is given when all workers have answered. Workers share memory once, when they start:
//! `Load` → `Loaded`, `Share` → `Shared`, `Map` → `Probed`; every case then takes its buffers out of what is shared, and `Unmap` → `Closed` comes
//! before anything of it is freed. A case goes so: `Begin` → `Begun` (its buffers are as the first call wants them, and nobody
//! has written to another's), `Connect` → `Ready` (or `Skipped`, `Failed`), `Go` → `At` for each replay → `Ended`. A case that
//! goes in step has a `Stepped` after each replay but the last, and a `Go` before each. A worker that finds its GPU hung says
//! `Hung` and ends without giving anything back.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Instant;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::cases::Case;
use super::ffi::driver::DeviceInfo;

/// What the supervisor asks for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// Load everything; answered by `Opened`, `Lacks` or `Broken`.
    Open { artifact: PathBuf, tvm_ffi: PathBuf, cudart: Option<PathBuf>, device: usize, deadline_ms: u64 },
    /// Allocate what `rank` shares, for as long as the worker lives. Answered by `Shared`.
    Share { rank: usize, bytes: usize },
    /// Map what the others share, by rank. Answered by `Probed`.
    Map { handles: Vec<String> },
    /// Let go of what the others share. Answered by `Closed`.
    Unmap,
    /// Load the kernels that make inputs and check outputs. Answered by `Loaded` or `Skipped`.
    Load { cubin: PathBuf },
    /// Bring the buffers of the hosted `ranks`, in the `shared_bytes` of each, into the state before the first call.
    /// `past_wrong`: go on after wrong numbers.
    Begin { number: u64, case: Case, ranks: Vec<usize>, shared_bytes: usize, past_wrong: bool },
    /// Make the graph.
    Connect,
    /// What `bench` asks for.
    Bench(super::bench::protocol::Order),
    /// Run the replays (all of them, or the next one where a case goes in step).
    Go,
    /// Write a pattern into what is shared, for the others to read. Answered by `Probed`.
    Probe,
    /// Copy from and to what the others share. Answered by `Probed`.
    ProbePeers,
    /// Look at what the others wrote. Answered by `Probed`.
    ProbeOwn,
}

/// What a worker answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    Opened {
        devices: Vec<DeviceInfo>,
        driver: String,
        tvm_ffi: Option<String>,
        unknown: Vec<Unknown>,
        free_bytes: u64,
        /// How long it took.
        seconds: f64,
    },
    /// The machine cannot run any case.
    Lacks(String),
    /// The artifact cannot be loaded.
    Broken(String),
    /// The IPC handle of what the rank shares.
    Shared {
        handle: String,
    },
    Begun,
    Ready {
        kernels: Vec<Launch>,
    },
    /// The case cannot be run here, and why.
    Skipped(String),
    /// A rank begins a replay, counted from 0.
    At {
        rank: usize,
        replay: u32,
    },
    /// A replay of a case that goes in step has ended, and it was not the last.
    Stepped,
    Ended(Outcome),
    Closed,
    Loaded,
    Bench(super::bench::protocol::Answer),
    /// What is wrong with the memory of each peer that was looked at, if anything.
    Probed {
        faults: Vec<String>,
    },
    /// CUDA or the artifact raised an error; the GPU cannot be trusted with the next case.
    Failed(String),
    /// Host and GPU do not judge alike, so that no verdict can be trusted: a fault of this program.
    Ours(String),
    /// The GPU did not finish in time; where each hosted rank stands.
    Hung {
        replay: u32,
        standing: Vec<String>,
    },
}

/// A function that is not called, since its parameters are unknown.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Unknown {
    pub function: String,
    pub why: String,
}

/// A kernel of the graph, and how it is launched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Mangled.
    pub kernel: String,
    pub grid: u32,
    pub block: u32,
    pub cluster: u32,
    /// How often it stands in the graph.
    pub count: usize,
}

/// What came of the replays.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The first thing that was wrong.
    pub wrong: Option<String>,
    /// Something was wrong in a way that no order of threads explains: an output that was never written, a write elsewhere.
    pub beyond_a_race: bool,
    /// Replays whose numbers were all right.
    pub right: u32,
    /// The most bytes that this worker had allocated at one time, and what the GPU had left with the case's memory in place.
    pub allocated_bytes: u64,
    pub free_bytes: u64,
    pub error: f64,
    pub of_bound: f64,
    /// Of each replay, in microseconds a call.
    pub micros: Vec<f64>,
    pub spent: Spent,
}

/// Where workers' time went, in seconds. What kernels of ours do is told by the GPU's clock; in the first replay of a case the
/// host works beside them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// Starting: the driver, the libraries, the artifact.
    pub starting: f64,
    /// Waiting for the next order, while other workers are not so far.
    pub waiting: f64,
    /// The memory of cases, and their graphs.
    pub setting_up: f64,
    pub making_inputs: f64,
    /// Copies between host and GPU, and putting work on the stream.
    pub copying: f64,
    /// Waiting for the artifact's kernels, and so for the ranks that share the GPU.
    pub artifact: f64,
    /// The reference, and comparing with it.
    pub checking: f64,
}

impl Spent {
    pub fn add(&mut self, other: &Self) {
        self.starting += other.starting;
        self.waiting += other.waiting;
        self.setting_up += other.setting_up;
        self.making_inputs += other.making_inputs;
        self.copying += other.copying;
        self.artifact += other.artifact;
        self.checking += other.checking;
    }

    /// Each part with its name.
    pub fn parts(&self) -> [(&'static str, f64); 7] {
        [
            ("starting", self.starting),
            ("waiting for each other", self.waiting),
            ("setting up", self.setting_up),
            ("making inputs", self.making_inputs),
            ("copying", self.copying),
            ("the artifact's kernels", self.artifact),
            ("checking", self.checking),
        ]
    }
}

/// Tells how long each step took.
#[derive(Debug)]
pub struct Clock(Instant);

impl Clock {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Seconds since the start, or since the last time that this was asked.
    pub fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let seconds = (now - self.0).as_secs_f64();
        self.0 = now;
        seconds
    }
}

/// One end of the socket.
#[derive(Debug)]
pub struct Line {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Line {
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        Ok(Self { writer: socket.try_clone()?, reader: BufReader::new(socket) })
    }

    pub fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(message)?;
        text.push(b'\n');
        self.writer.write_all(&text)
    }

    /// The next message; none at the end.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut text = String::new();
        if self.reader.read_line(&mut text)? == 0 {
            return Ok(None);
        }
        Ok(Some(serde_json::from_str(&text)?))
    }

    /// The two ends of one line, one to read from in a thread of its own.
    pub fn split(self) -> (BufReader<UnixStream>, UnixStream) {
        (self.reader, self.writer)
    }
}

/// Bytes as they stand in a message.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// 64 bytes from their text.
pub fn unhex(text: &str) -> Option<[u8; 64]> {
    let mut bytes = [0; 64];
    if text.len() != 128 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_pass_whole_and_the_end_is_no_error() {
        let (one, other) = UnixStream::pair().unwrap();
        let (mut one, mut other) = (Line::new(one).unwrap(), Line::new(other).unwrap());
        one.send(&Order::Share { rank: 3, bytes: 7 }).unwrap();
        one.send(&Order::Go).unwrap();
        assert!(matches!(other.receive().unwrap(), Some(Order::Share { rank: 3, bytes: 7 })));
        assert!(matches!(other.receive().unwrap(), Some(Order::Go)));
        drop(one);
        assert!(other.receive::<Order>().unwrap().is_none());
    }

    #[test]
    fn handles_survive_being_text() {
        let bytes: [u8; 64] = std::array::from_fn(|at| (at * 5) as u8);
        assert_eq!(unhex(&hex(&bytes)), Some(bytes));
        assert_eq!(unhex("00"), None);
        assert_eq!(unhex(&"zz".repeat(64)), None);
    }
}
