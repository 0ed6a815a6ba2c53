//! What on this machine is known to keep GPUs from reading each other's memory. Looked at, not proven: the probe proves.

use std::fs;
use std::path::Path;

/// Remarks on the machine that explain a failed probe.
pub fn remarks() -> Vec<String> {
    remarks_at(Path::new("/"))
}

fn remarks_at(root: &Path) -> Vec<String> {
    let mut remarks = Vec::new();
    let count = |dir: &str| fs::read_dir(root.join(dir)).map_or(0, |entries| entries.count());
    let groups = count("sys/kernel/iommu_groups");
    let command_line = fs::read_to_string(root.join("proc/cmdline")).unwrap_or_default();
    let passes_through = command_line.split_whitespace().any(|word| word == "iommu=pt");
    if groups > 0 && !passes_through {
        remarks.push(format!(
            "an IOMMU translates what devices send ({groups} groups, no iommu=pt): over PCIe, what one GPU writes to another may never arrive, or PCIe ACS may send it the long way"
        ));
    }
    let in_container = [".dockerenv", "run/.containerenv"].iter().any(|file| root.join(file).exists());
    if in_container {
        remarks.push(
            "this is a container: CUDA IPC needs all ranks in one PID and one IPC namespace (--ipc=host or one container)"
                .to_owned(),
        );
    }
    if let Ok(version) = fs::read_to_string(root.join("proc/driver/nvidia/params"))
        && version.lines().any(|line| line.trim() == "DmaRemapPeerMmio: 0")
    {
        remarks.push("the driver was told not to map peers' memory for DMA (DmaRemapPeerMmio: 0)".to_owned());
    }
    remarks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_iommu_without_pass_through_and_a_container_are_told() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(remarks_at(root.path()), [] as [String; 0]);
        fs::create_dir_all(root.path().join("sys/kernel/iommu_groups/0")).unwrap();
        fs::create_dir_all(root.path().join("proc")).unwrap();
        fs::write(root.path().join("proc/cmdline"), "quiet iommu=pt\n").unwrap();
        assert_eq!(remarks_at(root.path()), [] as [String; 0]);
        fs::write(root.path().join("proc/cmdline"), "quiet\n").unwrap();
        fs::write(root.path().join(".dockerenv"), "").unwrap();
        let remarks = remarks_at(root.path());
        assert!(remarks.len() == 2 && remarks[0].contains("IOMMU") && remarks[1].contains("container"));
    }
}
