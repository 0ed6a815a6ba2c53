//! How many compile jobs this machine can carry: cores and *available* memory, cgroup limits included.

use std::fs;
use std::path::{Path, PathBuf};

use crate::env;

/// What one job may need, in MiB: nvcc's largest child (cicc, ptxas or the host compiler) peaked at 1,090 MB on the
/// three sources of `trtllm_comm`; the rest is room for the other programs of the same job.
const JOB_MIB: u64 = 1536;

/// Memory left to everything else on the machine, in MiB.
const HEADROOM_MIB: u64 = 512;

/// The number of jobs to run at once, at least 1, and why it is no larger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Jobs {
    pub count: usize,
    pub reason: String,
}

/// Decides the number of jobs for `work` pieces of work. `asked` is the user's `--jobs`.
pub fn jobs(work: usize, asked: Option<usize>) -> Jobs {
    // available_parallelism() respects affinity and cgroup CPU quotas.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let asked_mib = env::var(env::FI_ARCH_MEMORY_MIB).and_then(|text| text.to_str()?.parse().ok());
    decide(work, asked, cores, available_mib(Path::new("/")), asked_mib)
}

fn decide(work: usize, asked: Option<usize>, cores: usize, available_mib: Option<u64>, cap_mib: Option<u64>) -> Jobs {
    if let Some(asked) = asked {
        return Jobs { count: asked.clamp(1, work.max(1)), reason: "--jobs".into() };
    }
    let memory = match (available_mib, cap_mib) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    };
    let by_memory = memory.map(|mib| (mib.saturating_sub(HEADROOM_MIB) / JOB_MIB).max(1) as usize);
    let (count, reason) = [
        (Some(work.max(1)), format!("{work} units")),
        // Jobs differ in length: one more than cores keeps them busy to the end.
        (Some(if cores > 1 { cores + 1 } else { 1 }), format!("{cores} cores")),
        (by_memory, format!("{} MiB of memory available, {JOB_MIB} a job", memory.unwrap_or(0))),
    ]
    .into_iter()
    .filter_map(|(limit, reason)| limit.map(|limit| (limit, reason)))
    .min_by_key(|(limit, _)| *limit)
    .expect("there are always two limits");
    Jobs { count, reason }
}

/// Memory that can be taken now without swapping, in MiB: the smallest of the machine's `MemAvailable` and what each
/// cgroup above this process still allows. `root` is `/` outside tests. None where nothing can be read.
fn available_mib(root: &Path) -> Option<u64> {
    let machine = fs::read_to_string(root.join("proc/meminfo")).ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib / 1024)
    });
    cgroups(root).iter().filter_map(|dir| cgroup_available_mib(dir)).chain(machine).min()
}

/// The cgroup folders of this process, from its own up to the root, of version 2 and of version 1's memory controller.
fn cgroups(root: &Path) -> Vec<PathBuf> {
    let Ok(text) = fs::read_to_string(root.join("proc/self/cgroup")) else { return Vec::new() };
    let mut dirs = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let mount = match controllers {
            "" => root.join("sys/fs/cgroup"),
            c if c.split(',').any(|c| c == "memory") => root.join("sys/fs/cgroup/memory"),
            _ => continue,
        };
        // Inside a container the path may name folders of the host that are not mounted: those reads fail and are passed over.
        let inner = Path::new(path.trim_start_matches('/'));
        dirs.extend(inner.ancestors().map(|dir| mount.join(dir)));
    }
    dirs
}

fn cgroup_available_mib(dir: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = match number("memory.max") {
        Some(limit) => (limit, number("memory.current")?),
        None => (number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?),
    };
    // The page cache counts as used but gives way at once.
    let cache = fs::read_to_string(dir.join("memory.stat")).map_or(0, |text| {
        let value = |name: &str| text.lines().find_map(|l| l.strip_prefix(name)?.trim().parse::<u64>().ok());
        value("inactive_file ").or_else(|| value("total_inactive_file ")).unwrap_or(0)
    });
    Some(limit.saturating_sub(used.saturating_sub(cache)) >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_never_exceed_work_cores_or_memory() {
        let count = |work, cores, mib| decide(work, None, cores, mib, None).count;
        assert_eq!(count(3, 32, Some(64_000)), 3);
        assert_eq!(count(9, 2, Some(64_000)), 3);
        assert_eq!(count(9, 1, Some(64_000)), 1);
        assert_eq!(count(3, 32, Some(4_000)), 2);
        assert_eq!(count(3, 32, Some(100)), 1, "one job always runs");
        assert_eq!(count(3, 32, None), 3);
        assert_eq!(decide(3, Some(9), 1, Some(100), None).count, 3);
        assert_eq!(decide(3, None, 32, Some(64_000), Some(2_100)).count, 1);
    }

    #[test]
    fn a_cgroup_limit_counts_wherever_it_is_set() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let file = root.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        write("proc/meminfo", "MemTotal: 99 kB\nMemAvailable:   67108864 kB\n");
        assert_eq!(available_mib(root.path()), Some(65_536));
        write("proc/self/cgroup", "0::/kubepods/pod1/inner\n");
        write("sys/fs/cgroup/kubepods/pod1/inner/memory.max", "max\n");
        assert_eq!(available_mib(root.path()), Some(65_536));
        write("sys/fs/cgroup/kubepods/pod1/memory.max", "4294967296\n");
        write("sys/fs/cgroup/kubepods/pod1/memory.current", "3221225472\n");
        write("sys/fs/cgroup/kubepods/pod1/memory.stat", "anon 5\ninactive_file 1073741824\n");
        assert_eq!(available_mib(root.path()), Some(2048), "page cache gives way");
        write("proc/self/cgroup", "9:memory:/job\n");
        write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1073741824");
        write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "536870912");
        assert_eq!(available_mib(root.path()), Some(512));
    }
}
