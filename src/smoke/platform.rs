//! What on this machine can keep GPUs from reading each other's memory, looked at before any kernel runs. Looked at, not proven: the
//! probe proves. Where the probe fails, this says what to do about the platform.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

/// What is seen of the platform. What cannot be read is none, and `unreadable` says why.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Platform {
    pub iommu: Iommu,
    pub acs: Acs,
    pub container: Container,
    /// The driver was told not to map peers' memory for DMA.
    pub peer_mapping_off: bool,
    pub unreadable: Vec<String>,
}

/// Whether something translates the addresses that devices send.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Iommu {
    /// Units that the kernel drives, and groups of devices.
    pub units: usize,
    pub groups: usize,
    /// The kinds of the groups that the GPUs are in, by the GPU: `identity` passes through, `DMA` and `DMA-FQ` translate.
    pub kinds: BTreeMap<String, String>,
    /// What the kernel's command line says of it.
    pub options: Vec<String>,
}

/// Whether bridges above the GPUs send what one GPU writes to another up to the root (PCIe Access Control Services).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Acs {
    /// Bridges whose settings were read.
    pub read: usize,
    pub redirecting: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Container {
    /// A file says that this is one.
    pub is_told: bool,
    /// The namespaces of this process that are not the machine's own.
    pub own_namespaces: Vec<String>,
    pub shm_bytes: Option<u64>,
}

/// The platform, with what the probe found.
#[derive(Debug, Clone, Default)]
pub struct Probed {
    pub seen: Platform,
    /// What does not work between the GPUs, whatever is run on them.
    pub faults: Vec<String>,
    /// Ranks are on several GPUs, so that what lies between them counts.
    pub several: bool,
}

impl Probed {
    /// What explains the faults, and what to do; nothing where there are none.
    pub fn explanations(&self) -> Vec<Remark> {
        if self.faults.is_empty() { Vec::new() } else { self.seen.remarks(self.several) }
    }

    /// The faults and what explains them, as JSON tells problems.
    pub fn problems(&self) -> Vec<Value> {
        let faults = self.faults.iter().map(|fault| json!({ "code": "platform", "message": fault }));
        let explained = self.explanations().into_iter();
        let explained = explained.map(|remark| json!({ "code": "platform-remark", "message": remark.what, "hint": remark.hint }));
        faults.chain(explained).collect()
    }

    /// The same for people, a line each.
    pub fn text(&self) -> String {
        let faults = self.faults.iter().map(|fault| format!("  the platform, not the kernel: {fault}\n"));
        let explained = self.explanations().into_iter();
        let explained = explained.map(|remark| format!("  the platform: {}\n    hint: {}\n", remark.what, remark.hint));
        faults.chain(explained).collect()
    }
}

/// Something that explains a failed probe, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remark {
    pub what: String,
    pub hint: String,
}

/// The namespaces that CUDA IPC depends on, with the numbers that the kernel always gives the machine's own.
const NAMESPACES: [(&str, u64); 2] = [("ipc", 0xefff_ffff), ("pid", 0xefff_fffc)];
/// Below this, engines that pass data through shared memory run out of it.
const LITTLE_SHM: u64 = 1 << 30;

/// Looks at the platform of the GPUs with these PCI addresses.
pub fn look(gpus: &[String]) -> Platform {
    let mut platform = look_at(Path::new("/"), gpus);
    platform.container.shm_bytes = rustix::fs::statvfs("/dev/shm").ok().map(|stat| stat.f_blocks * stat.f_frsize);
    platform
}

fn look_at(root: &Path, gpus: &[String]) -> Platform {
    let mut platform = Platform::default();
    let count = |dir: &str| fs::read_dir(root.join(dir)).map_or(0, |entries| entries.count());
    platform.iommu.units = count("sys/class/iommu");
    platform.iommu.groups = count("sys/kernel/iommu_groups");
    match fs::read_to_string(root.join("proc/cmdline")) {
        Ok(line) => {
            let tells = |word: &&str| word.contains("iommu") || word.starts_with("pcie_acs_override") || word.starts_with("pci=");
            platform.iommu.options = line.split_whitespace().filter(tells).map(str::to_owned).collect();
        }
        Err(error) => platform.unreadable.push(format!("the kernel's command line ({error})")),
    }
    let mut seen = BTreeSet::new();
    for gpu in gpus {
        let (address, device) = (gpu.to_ascii_lowercase(), in_sysfs(root, gpu));
        if let Ok(kind) = fs::read_to_string(device.join("iommu_group/type")) {
            platform.iommu.kinds.insert(address.clone(), kind.trim().to_owned());
        }
        match fs::canonicalize(&device) {
            Ok(device) => look_above(&device, &mut platform, &mut seen),
            Err(error) => platform.unreadable.push(format!("GPU {address} in sysfs ({error})")),
        }
    }
    platform.container.is_told = [".dockerenv", "run/.containerenv"].iter().any(|file| root.join(file).exists());
    let of_machine =
        |(name, number): &(&str, u64)| namespace(root, "self", name).is_none_or(|own| own == format!("{name}:[{number}]"));
    platform.container.own_namespaces =
        NAMESPACES.iter().filter(|one| !of_machine(one)).map(|(name, _)| (*name).to_owned()).collect();
    if let Ok(params) = fs::read_to_string(root.join("proc/driver/nvidia/params")) {
        platform.peer_mapping_off = params.lines().any(|line| line.trim() == "DmaRemapPeerMmio: 0");
    }
    platform
}

/// The folder of a device in sysfs, which writes addresses in lower case.
pub(super) fn in_sysfs(root: &Path, pci: &str) -> PathBuf {
    root.join("sys/bus/pci/devices").join(pci.to_ascii_lowercase())
}

/// The bridges above a device, each looked at once.
fn look_above(device: &Path, platform: &mut Platform, seen: &mut BTreeSet<PathBuf>) {
    let is_bridge = |path: &&Path| path.join("config").exists();
    for bridge in device.ancestors().skip(1).take_while(is_bridge) {
        let name = bridge.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !seen.insert(bridge.to_owned()) {
            continue;
        }
        match fs::read(bridge.join("config")) {
            Ok(config) => match acs_control(&config) {
                Some(control) => {
                    platform.acs.read += 1;
                    if control & REDIRECT != 0 {
                        platform.acs.redirecting.push(name);
                    }
                }
                // Others than root see the first 64 bytes alone.
                None if config.len() <= 256 => {
                    platform.unreadable.push(format!("the access control of bridge {name} (root alone may read it)"));
                }
                // It has none: nothing is redirected.
                None => platform.acs.read += 1,
            },
            Err(error) => platform.unreadable.push(format!("the access control of bridge {name} ({error})")),
        }
    }
}

/// Request redirect and completion redirect in the control register.
const REDIRECT: u16 = 0b1100;

/// The control register of the access control services in a bridge's configuration space; none where it has none, or where that
/// part was not read.
fn acs_control(config: &[u8]) -> Option<u16> {
    const ID: u32 = 0x000d;
    let word = |at: usize| Some(u32::from_le_bytes(config.get(at..at + 4)?.try_into().ok()?));
    let mut at = 0x100;
    // There is room for so many capabilities; a ring of them must end too.
    for _ in 0..(4096 - 256) / 8 {
        let head = word(at)?;
        if head & 0xffff == ID {
            return Some((word(at + 4)? >> 16) as u16);
        }
        at = (head >> 20) as usize & !3;
        if at < 0x100 {
            return None;
        }
    }
    None
}

/// The namespace of a process, such as `ipc:[4026531839]`.
fn namespace(root: &Path, process: &str, name: &str) -> Option<String> {
    let link: PathBuf = fs::read_link(root.join("proc").join(process).join("ns").join(name)).ok()?;
    Some(link.to_string_lossy().into_owned())
}

/// The namespaces that processes do not share with this one: CUDA IPC would not work between them.
pub fn namespaces_apart(processes: &[u32]) -> Vec<String> {
    apart(Path::new("/"), processes)
}

fn apart(root: &Path, processes: &[u32]) -> Vec<String> {
    let differs = |name: &str, process: &u32| {
        let (own, other) = (namespace(root, "self", name), namespace(root, &process.to_string(), name));
        own.is_some() && other.is_some() && own != other
    };
    let of = |(name, _): &(&str, u64)| {
        let rank = processes.iter().position(|process| differs(name, process))?;
        Some(format!("rank {rank} is in another {name} namespace than this process"))
    };
    NAMESPACES.iter().filter_map(of).collect()
}

impl Platform {
    /// What explains that GPUs cannot read each other's memory. `several`: ranks are on several GPUs, so that what lies between them counts.
    pub fn remarks(&self, several: bool) -> Vec<Remark> {
        let mut remarks = Vec::new();
        let mut remark = |what: String, hint: &str| remarks.push(Remark { what, hint: hint.to_owned() });
        let Iommu { units, groups, kinds, options } = &self.iommu;
        let passes = if kinds.is_empty() {
            options
                .iter()
                .any(|option| matches!(option.as_str(), "iommu=pt" | "iommu.passthrough=1" | "intel_iommu=off" | "amd_iommu=off"))
        } else {
            kinds.values().all(|kind| kind == "identity")
        };
        if several && (*units > 0 || *groups > 0) && !passes {
            let kinds: Vec<_> = kinds.iter().map(|(gpu, kind)| format!("{gpu} {kind}")).collect();
            let told = if kinds.is_empty() { "no iommu=pt on the kernel's command line".to_owned() } else { kinds.join(", ") };
            remark(
                format!(
                    "an IOMMU translates what devices send ({groups} groups; {told}): over PCIe, what one GPU writes to another may never arrive"
                ),
                "boot with iommu=pt (amd_iommu=on or intel_iommu=on where it is needed), or switch the IOMMU off in the firmware",
            );
        }
        if several && !self.acs.redirecting.is_empty() {
            remark(
                format!(
                    "PCIe access control sends what one GPU writes to another up to the root, at {}",
                    self.acs.redirecting.join(", ")
                ),
                "switch ACS off in the firmware, or clear it on these bridges (setpci -s BRIDGE ECAP_ACS+6.w=0000, as root, after every boot)",
            );
        }
        if self.container.is_told || !self.container.own_namespaces.is_empty() {
            let own = match &self.container.own_namespaces[..] {
                [] => String::new(),
                own => format!(" with namespaces of its own ({})", own.join(", ")),
            };
            remark(
                format!("this is a container{own}: CUDA IPC needs all ranks in one PID and one IPC namespace"),
                "run all ranks in one container, or start it with --ipc=host --pid=host",
            );
        }
        if let Some(bytes) = self.container.shm_bytes.filter(|bytes| *bytes < LITTLE_SHM) {
            remark(
                format!("/dev/shm has {} MiB: engines and NCCL pass data through it", bytes >> 20),
                "start the container with --shm-size=16g or --ipc=host",
            );
        }
        if self.peer_mapping_off {
            remark(
                "the driver was told not to map peers' memory for DMA (DmaRemapPeerMmio: 0)".to_owned(),
                "take NVreg_DmaRemapPeerMmio=0 out of the driver's options",
            );
        }
        if several && !self.unreadable.is_empty() {
            remark(
                format!("could not be looked at: {}", self.unreadable.join("; ")),
                "run as root on the machine itself to see it",
            );
        }
        remarks
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A machine with a GPU behind two bridges.
    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let path = root.path();
        let gpu = "sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0/0000:4a:00.0";
        for dir in [gpu, "sys/bus/pci/devices", "proc/self/ns", "proc/7/ns", "sys/kernel/iommu_groups/12"] {
            fs::create_dir_all(path.join(dir)).unwrap();
        }
        symlink(format!("../../../../{gpu}"), path.join("sys/bus/pci/devices/0000:4a:00.0")).unwrap();
        for device in [gpu, &gpu[..gpu.len() - 13], &gpu[..gpu.len() - 26]] {
            fs::write(path.join(device).join("config"), [0; 64]).unwrap();
        }
        symlink("../../../../../kernel/iommu_groups/12", path.join(gpu).join("iommu_group")).unwrap();
        fs::write(path.join("proc/cmdline"), "quiet\n").unwrap();
        for (name, number) in NAMESPACES {
            for process in ["self", "7"] {
                symlink(format!("{name}:[{number}]"), path.join("proc").join(process).join("ns").join(name)).unwrap();
            }
        }
        root
    }

    fn remarks(root: &Path, several: bool) -> Vec<String> {
        let told = look_at(root, &["0000:4A:00.0".to_owned()]).remarks(several);
        assert!(told.iter().all(|remark| !remark.hint.is_empty()));
        told.into_iter().map(|remark| remark.what).collect()
    }

    /// A configuration space with two extended capabilities, the second of them ACS.
    fn config(control: u16) -> Vec<u8> {
        let mut config = vec![0; 4096];
        config[0x100..0x104].copy_from_slice(&(0x0001u32 | 1 << 16 | 0x148 << 20).to_le_bytes());
        config[0x148..0x14c].copy_from_slice(&(0x000du32 | 1 << 16).to_le_bytes());
        config[0x14e..0x150].copy_from_slice(&control.to_le_bytes());
        config
    }

    #[test]
    fn an_iommu_that_translates_is_told_by_the_group_of_the_gpu_else_by_the_command_line() {
        let root = machine();
        let kind = root.path().join("sys/kernel/iommu_groups/12/type");
        assert!(remarks(root.path(), true)[0].contains("no iommu=pt"));
        fs::write(root.path().join("proc/cmdline"), "quiet iommu=pt\n").unwrap();
        assert!(!remarks(root.path(), true).iter().any(|what| what.contains("IOMMU")));
        fs::write(&kind, "DMA-FQ\n").unwrap();
        assert!(remarks(root.path(), true)[0].contains("0000:4a:00.0 DMA-FQ"), "what is so counts more than what was asked for");
        assert!(!remarks(root.path(), false).iter().any(|what| what.contains("IOMMU")), "one GPU alone");
        fs::write(&kind, "identity\n").unwrap();
        fs::write(root.path().join("proc/cmdline"), "quiet\n").unwrap();
        assert!(!remarks(root.path(), true).iter().any(|what| what.contains("IOMMU")));
    }

    #[test]
    fn a_bridge_that_redirects_is_named_and_one_that_cannot_be_read_is_told() {
        let root = machine();
        let upper = root.path().join("sys/devices/pci0000:40/0000:40:01.0/config");
        let lower = root.path().join("sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0/config");
        let told = remarks(root.path(), true).pop().unwrap();
        assert!(told.contains("0000:40:01.0 (root alone") && told.contains("0000:41:00.0"), "{told}");
        fs::write(&upper, config(0x1d)).unwrap();
        fs::write(&lower, config(0x01)).unwrap();
        let platform = look_at(root.path(), &["0000:4a:00.0".to_owned(), "0000:4a:00.0".to_owned()]);
        assert_eq!(platform.acs, Acs { read: 2, redirecting: vec!["0000:40:01.0".to_owned()] });
        assert_eq!(platform.unreadable, [] as [String; 0]);
        let told = remarks(root.path(), true).pop().unwrap();
        assert!(told.contains("up to the root, at 0000:40:01.0"), "{told}");
        fs::write(&upper, vec![0; 4096]).unwrap();
        assert_eq!(look_at(root.path(), &["0000:4a:00.0".to_owned()]).acs, Acs { read: 2, redirecting: Vec::new() });
    }

    #[test]
    fn the_access_control_is_found_behind_other_capabilities_and_a_damaged_list_ends() {
        assert_eq!(acs_control(&config(0x5d)), Some(0x5d));
        assert_eq!(acs_control(&[0; 4096]), None);
        assert_eq!(acs_control(&[0; 64]), None);
        let mut ring = vec![0; 4096];
        ring[0x100..0x104].copy_from_slice(&(0x0001u32 | 0x100 << 20).to_le_bytes());
        assert_eq!(acs_control(&ring), None);
        assert_eq!(acs_control(&[0xff; 4096]), None);
        assert_eq!(acs_control(&config(3)[..0x14a]), None);
    }

    #[test]
    fn a_container_is_told_by_its_file_or_by_namespaces_of_its_own() {
        let root = machine();
        fs::write(root.path().join(".dockerenv"), "").unwrap();
        assert!(remarks(root.path(), false)[0].contains("this is a container:"));
        fs::remove_file(root.path().join(".dockerenv")).unwrap();
        assert_eq!(remarks(root.path(), false), [] as [String; 0]);
        let ipc = root.path().join("proc/self/ns/ipc");
        fs::remove_file(&ipc).unwrap();
        symlink("ipc:[4026532999]", &ipc).unwrap();
        assert!(remarks(root.path(), false)[0].contains("namespaces of its own (ipc)"));
        assert_eq!(apart(root.path(), &[7]), ["rank 0 is in another ipc namespace than this process"]);
        assert_eq!(apart(root.path(), &[8]), [] as [String; 0], "it is gone");
    }

    #[test]
    fn little_shared_memory_and_a_driver_that_maps_no_peers_are_told() {
        let container = Container { shm_bytes: Some(64 << 20), ..Container::default() };
        let platform = Platform { container, peer_mapping_off: true, ..Platform::default() };
        let told = platform.remarks(false);
        assert!(told[0].what.contains("64 MiB") && told[1].what.contains("DmaRemapPeerMmio"), "{told:?}");
    }
}
