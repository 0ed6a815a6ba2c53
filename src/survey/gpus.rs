//! The GPUs of this machine, as nvidia-smi tells them.

use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::process;
use crate::digest::Digest;
use crate::error::Error;
use crate::memo::Memo;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    pub name: String,
    /// 120 for compute capability 12.0.
    pub sm: u32,
    /// The driver's version, such as `580.82.07`.
    pub driver: String,
}

/// The GPUs of this machine, in nvidia-smi's order. Empty without a driver, or when it does not answer within 5 s.
pub fn gpus() -> Vec<Gpu> {
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]);
    match process::run(&mut command, Duration::from_secs(5)) {
        Ok(ran) if ran.ok => ran.stdout.lines().filter_map(parse).collect(),
        Ok(ran) => {
            tracing::info!("nvidia-smi: {}", ran.last_line());
            Vec::new()
        }
        Err(error) => {
            tracing::debug!("nvidia-smi: {error}");
            Vec::new()
        }
    }
}

/// As [`gpus`], and asked only once in a boot of this machine: starting a driver's program takes longer than reading all files.
pub fn gpus_of_this_boot(memo: &Memo) -> Vec<Gpu> {
    let (Some(program), Some(driver)) = (process::on_path("nvidia-smi").into_iter().next(), driver_state()) else {
        return gpus();
    };
    let ask = || {
        let found = gpus();
        // Nobody says whether there is none, or none yet.
        if found.is_empty() {
            return Err(Error::machine("no GPU"));
        }
        Ok(serde_json::to_string(&found).expect("GPUs are always JSON"))
    };
    let told = memo.fact(&program, &format!("GPUs, {driver}"), ask);
    told.ok().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
}

/// A digest of all that says which GPUs the driver shows here; none where no driver is loaded.
fn driver_state() -> Option<String> {
    let read = |path: &str| std::fs::read(path).ok();
    let mut state = read("/proc/driver/nvidia/version")?;
    state.extend(read("/proc/sys/kernel/random/boot_id")?);
    for (dir, prefix) in [("/proc/driver/nvidia/gpus", ""), ("/dev", "nvidia")] {
        let mut names: Vec<_> = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name()).collect();
        names.retain(|name| name.as_encoded_bytes().starts_with(prefix.as_bytes()));
        names.sort();
        names.iter().for_each(|name| state.extend([name.as_encoded_bytes(), b"\n"].concat()));
    }
    Some(Digest::of(&state).short())
}

/// One line, such as `NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 580.82.07`. Read from its end: a name may hold commas.
fn parse(line: &str) -> Option<Gpu> {
    let mut fields = line.rsplitn(3, ',').map(str::trim);
    let (driver, capability, name) = (fields.next()?, fields.next()?, fields.next()?);
    let (major, minor) = capability.split_once('.')?;
    let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
    Some(Gpu { name: name.to_owned(), sm: major.checked_mul(10)?.checked_add(minor)?, driver: driver.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_nvidia_smi_becomes_a_gpu_and_anything_else_none() {
        let gpu = parse("NVIDIA GeForce RTX 5090, 12.0, 580.82.07").unwrap();
        assert_eq!((gpu.name.as_str(), gpu.sm, gpu.driver.as_str()), ("NVIDIA GeForce RTX 5090", 120, "580.82.07"));
        assert_eq!(parse("Odd, name, 9.0, 570.1").unwrap().name, "Odd, name");
        assert_eq!(parse("NVIDIA GB10, [N/A], 580.1"), None);
        assert_eq!(parse("No devices were found"), None);
    }
}
