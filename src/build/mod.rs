//! From an overlay to an artifact: toolchain, provisioning, plan, compile scheduler.
//!
//! | file | what it does |
//! | --- | --- |
//! | `toolchain` | finds nvcc, its headers, libcudart and the host compiler; probes them before minutes are spent |
//! | `consumer` | who will load the artifact, and so which CUDA runtime it may need |
//! | `provision` | fetches pinned wheels where the machine lacks something |
//! | `plan` | overlay + recipe + toolchain → the exact commands and the request key; pure |
//! | `units` | translation units: sources whole, or split where there are cores for it; stand-ins for headers |
//! | `view` | the folder that a build runs in: fixed relative names for everything, so that no path reaches the product |
//! | `retarget` | code of one target on a GPU of another, for tests |
//! | `compile` | runs a plan: as many jobs as cores and memory allow, all ended on Ctrl-C |
//! | `limits` | how many jobs the machine can carry |
//! | `diagnose` | the first real error in a compiler's output, and what to do about it |
//! | `closure` | what the compilers read, from their dependency files |

pub mod closure;
pub mod compile;
pub mod consumer;
pub mod diagnose;
pub mod limits;
pub mod plan;
pub mod provision;
pub mod retarget;
pub mod toolchain;
pub mod units;
pub mod view;

use std::os::unix::fs::symlink;
use std::path::Path;

use crate::error::{Error, Result};

/// Makes `link` a symbolic link to `to`.
fn link(to: &Path, link: &Path) -> Result<()> {
    symlink(to, link).map_err(|e| Error::io("create the link", link, e))
}
