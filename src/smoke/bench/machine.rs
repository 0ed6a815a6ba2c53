//! The machine that figures are of: GPUs, driver, the links between the GPUs.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::smoke::ffi::driver::{DeviceInfo, LinkInfo};
use crate::smoke::platform::in_sysfs;

/// What figures depend on beside the code.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The model of the GPUs.
    pub gpu: String,
    pub gpus: Vec<Gpu>,
    /// The release of the driver, where the kernel tells it.
    pub driver: Option<String>,
    /// The newest CUDA that the driver speaks.
    pub cuda: String,
    pub topology: Topology,
    pub links: Vec<LinkInfo>,
    pub nccl: Option<String>,
    /// What NCCL was told of NVLink multicast (`NCCL_NVLS_ENABLE`).
    pub nvls: String,
    /// What compiled our norm.
    pub nvrtc: Option<String>,
    pub tvm_ffi: Option<String>,
}

/// A GPU that a rank was on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    #[serde(flatten)]
    pub device: DeviceInfo,
    /// The NUMA node that it hangs on, where the kernel tells it.
    pub numa: Option<u32>,
}

/// How the GPUs reach each other, the slowest pair counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Topology {
    /// Peer access with native atomics.
    Nvlink,
    /// Peer access without.
    Pcie,
    /// The driver says that some GPU cannot read another's memory.
    NoPeerAccess,
    /// Nobody was asked.
    Unknown,
}

impl Topology {
    pub fn of(links: &[LinkInfo]) -> Self {
        match links {
            [] => Self::Unknown,
            links if links.iter().any(|link| !link.peer_access) => Self::NoPeerAccess,
            links if links.iter().all(|link| link.native_atomics) => Self::Nvlink,
            _ => Self::Pcie,
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Nvlink => "nvlink",
            Self::Pcie => "pcie",
            Self::NoPeerAccess => "no-peer-access",
            Self::Unknown => "unknown",
        }
    }

    /// For people.
    pub fn text(self) -> &'static str {
        match self {
            Self::Nvlink => "NVLink (peer access with native atomics)",
            Self::Pcie => "PCIe (peer access without native atomics)",
            Self::NoPeerAccess => "no peer access between all GPUs, says the driver",
            Self::Unknown => "unknown links",
        }
    }
}

impl Gpu {
    pub fn of(device: &DeviceInfo) -> Self {
        Self { device: device.clone(), numa: numa_of(Path::new("/"), &device.pci) }
    }
}

/// The release of the kernel's driver, such as 580.159.04.
pub fn driver_release() -> Option<String> {
    let text = fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn numa_of(root: &Path, pci: &str) -> Option<u32> {
    let file = in_sysfs(root, pci).join("numa_node");
    // A machine with one node says −1.
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

impl Machine {
    /// For people, and for the reasons of a policy: `2 × NVIDIA H200, driver 580.159.04, NVLink`.
    pub fn line(&self) -> String {
        let driver = self.driver.as_ref().map_or_else(|| format!("CUDA {}", self.cuda), |driver| format!("driver {driver}"));
        let link = self.topology.text().split(" (").next().unwrap_or_default();
        let nccl = self.nccl.as_ref().map_or_else(String::new, |nccl| format!(", NCCL {nccl}"));
        format!("{} × {}, {driver}, {link}{nccl}", self.gpus.len(), self.gpu)
    }

    /// A file name for figures of machines like this one.
    pub fn file_name(&self) -> String {
        let driver = self.driver.clone().unwrap_or_else(|| format!("cuda{}", self.cuda));
        let text = format!("{}x-{}-driver-{driver}-{}.json", self.gpus.len(), self.gpu, self.topology.word());
        let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-') { c } else { '-' };
        text.chars().map(plain).collect()
    }

    /// Whether figures of the other are to be compared with those of this.
    pub fn is_like(&self, other: &Self) -> bool {
        self.file_name() == other.file_name()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn link(peer_access: bool, native_atomics: bool) -> LinkInfo {
        LinkInfo { from: 0, to: 1, peer_access, native_atomics, performance_rank: 0 }
    }

    pub fn machine() -> Machine {
        let device = |ordinal| DeviceInfo {
            ordinal,
            name: "NVIDIA H200".to_owned(),
            sm: 90,
            memory_bytes: 1 << 37,
            multiprocessors: 132,
            pci: format!("0000:0{ordinal}:00.0"),
        };
        let gpu = |ordinal| Gpu { device: device(ordinal), numa: Some(0) };
        Machine {
            gpu: "NVIDIA H200".to_owned(),
            gpus: vec![gpu(0), gpu(1)],
            driver: Some("580.159.04".to_owned()),
            cuda: "13.0".to_owned(),
            topology: Topology::Nvlink,
            links: vec![link(true, true)],
            nccl: Some("2.28.9".to_owned()),
            nvls: "0".to_owned(),
            nvrtc: Some("13.0".to_owned()),
            tvm_ffi: None,
        }
    }

    #[test]
    fn the_slowest_link_tells_the_topology() {
        assert_eq!(Topology::of(&[link(true, true), link(true, true)]), Topology::Nvlink);
        assert_eq!(Topology::of(&[link(true, true), link(true, false)]), Topology::Pcie);
        assert_eq!(Topology::of(&[link(true, true), link(false, false)]), Topology::NoPeerAccess);
        assert_eq!(Topology::of(&[]), Topology::Unknown);
    }

    #[test]
    fn a_file_name_is_made_of_gpu_driver_and_topology_and_is_plain() {
        assert_eq!(machine().file_name(), "2x-NVIDIA-H200-driver-580.159.04-nvlink.json");
        let odd = Machine { gpu: "a/b c".to_owned(), driver: None, ..machine() };
        assert_eq!(odd.file_name(), "2x-a-b-c-driver-cuda13.0-nvlink.json");
        assert!(machine().is_like(&Machine { nccl: None, ..machine() }));
        assert!(!machine().is_like(&Machine { topology: Topology::Pcie, ..machine() }));
        assert!(!machine().is_like(&Machine { driver: Some("590.1".to_owned()), ..machine() }));
    }

    #[test]
    fn the_line_names_gpu_driver_and_link() {
        assert_eq!(machine().line(), "2 × NVIDIA H200, driver 580.159.04, NVLink, NCCL 2.28.9");
    }

    #[test]
    fn the_numa_node_is_read_where_there_is_more_than_one() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("sys/bus/pci/devices/0000:ab:00.0");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("numa_node"), "1\n").unwrap();
        assert_eq!(numa_of(root.path(), "0000:AB:00.0"), Some(1));
        std::fs::write(dir.join("numa_node"), "-1\n").unwrap();
        assert_eq!((numa_of(root.path(), "0000:AB:00.0"), numa_of(root.path(), "0000:00:00.0")), (None, None));
    }
}
