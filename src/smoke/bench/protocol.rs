//! What `bench` and its workers say to each other, beside what `smoke` does.
//!
//! `Load` → `Loaded` once a worker of the crew that knows NCCL; `Unique` → `Unique` from rank 0, then `Join` → `Joined` from all, once a number of ranks. A point
//! goes so: `Begin` → `Begun`; then for each way `Capture` → `Captured`, `Check` → `Checked`, `Time` → `Timed`, `Check` → `Checked`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::plan::{Point, Way};
use crate::smoke::ffi::driver::LinkInfo;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// Load what the artifact is compared with: NCCL, and our norm as it was compiled; tell the links between the GPUs.
    Load { nccl: PathBuf, norm: PathBuf, gpus: Vec<usize> },
    /// Name a new communicator.
    Unique,
    /// Join the communicator.
    Join { id: Vec<u8>, rank: usize, ranks: usize },
    /// Lay out memory and inputs of a point, and bring the workspace into the state before the first call.
    Begin { point: Point, seed: u64, rank: usize, shared_bytes: usize },
    /// Make the graph of a way.
    Capture { way: Way },
    /// Replay it once on poisoned outputs, and hold them against the reference.
    Check,
    /// Replay it `warm_up` times, then `replays` times with the clock.
    Time { warm_up: u32, replays: u32 },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    Loaded {
        nccl: String,
        links: Vec<LinkInfo>,
    },
    Unique {
        id: Vec<u8>,
    },
    Joined,
    Begun,
    Captured {
        /// The kernels in the graph, with how often each stands there.
        kernels: Vec<(String, usize)>,
        /// Our norm may start before the kernel ahead of it has ended.
        overlaps: bool,
    },
    /// How far the outputs are from the reference, or what is wrong with them.
    Checked {
        error: f64,
        of_bound: f64,
        wrong: Option<String>,
    },
    Timed {
        /// Of each replay, for all timed calls, in microseconds.
        micros: Vec<f64>,
    },
}
