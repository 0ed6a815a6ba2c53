//! Which CUDA a torch from PyPI is built with.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;

use crate::target::CudaVersion;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    torch: Vec<Torch>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Torch {
    release: String,
    /// By the machine's architecture.
    cuda: BTreeMap<String, String>,
}

/// The CUDA of torch `major.minor` as PyPI has it for machines like this one; None where the tables don't know it.
pub fn cuda_of_torch(major: u64, minor: u64) -> Option<CudaVersion> {
    static TABLE: OnceLock<Table> = OnceLock::new();
    let table = TABLE.get_or_init(|| super::parse("torch", include_str!("../../arch-tables/torch.toml")));
    let release = format!("{major}.{minor}");
    let row = table.torch.iter().find(|row| row.release == release)?;
    CudaVersion::parse(row.cuda.get(std::env::consts::ARCH)?)
}
