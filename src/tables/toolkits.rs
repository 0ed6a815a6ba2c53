//! What code of a CUDA release needs of the machine that runs it.

use std::sync::OnceLock;

use serde::Deserialize;

use crate::target::{CudaVersion, Target};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    toolkit: Vec<Toolkit>,
    gpu: Vec<Gpu>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Toolkit {
    major: u32,
    min_driver: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Gpu {
    sm: u32,
    min_driver: String,
}

fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| super::parse("toolkits", include_str!("../../arch-tables/toolkits.toml")))
}

/// Do the tables know CUDA releases of this major version?
pub fn knows_cuda(major: u32) -> bool {
    table().toolkit.iter().any(|row| row.major == major)
}

/// The oldest Linux driver that runs code for `target` built with CUDA `version`; None where the tables don't know it.
pub fn min_driver(version: CudaVersion, target: Target) -> Option<&'static str> {
    let table = table();
    let of_toolkit = table.toolkit.iter().find(|row| row.major == version.major)?;
    let of_gpu = table.gpu.iter().find(|row| row.sm == target.sm);
    let drivers = std::iter::once(of_toolkit.min_driver.as_str()).chain(of_gpu.map(|row| row.min_driver.as_str()));
    drivers.max_by_key(|driver| driver.split('.').map(|part| part.parse::<u32>().unwrap_or(0)).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Suffix;

    #[test]
    fn the_driver_must_know_both_the_runtime_and_the_gpu() {
        let driver = |major, sm| min_driver(CudaVersion::new(major, 0), Target { sm, suffix: Suffix::A });
        assert_eq!(driver(13, 120), Some("580"));
        assert_eq!(driver(12, 120), Some("570.26"));
        assert_eq!(driver(12, 90), Some("525.60.13"));
        assert_eq!(driver(99, 120), None);
    }
}
