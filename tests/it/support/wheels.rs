//! Real wheels from PyPI, unpacked once into the build folder.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

/// The folder (like a site-packages) that holds `name` of `version` from PyPI, without what it depends on.
/// Needs the network on the first call. Panics, so that the test fails, when the wheel cannot be had.
pub fn unpacked(name: &str, version: &str) -> PathBuf {
    unpacked_set(&format!("{name}-{version}"), &[(name, version)])
}

/// Like [`unpacked`], for several wheels in one folder called `label`.
pub fn unpacked_set(label: &str, wheels: &[(&str, &str)]) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("wheels");
    fs::create_dir_all(&root).unwrap();
    let done = root.join(label);
    // Tests run as threads and as processes: the lock is the kernel's, so a killed test leaves none behind.
    let lock = File::create(root.join(format!("{label}.lock"))).unwrap();
    lock.lock().unwrap();
    if done.is_dir() {
        return done;
    }
    let staging = root.join(format!("{label}.partial"));
    let _ = fs::remove_dir_all(&staging);
    let pins: Vec<String> = wheels.iter().map(|(name, version)| format!("{name}=={version}")).collect();
    let output = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"])
        .args(["--only-binary=:all:", "--root-user-action=ignore", "--target"])
        .arg(&staging)
        .args(&pins)
        .output()
        .expect("python3 starts");
    assert!(
        output.status.success(),
        "this test needs the network: pip could not fetch {pins:?}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    fs::rename(&staging, &done).unwrap();
    done
}

/// The folder that holds the wheel of `name` of `version` as a file, for pip itself to install.
pub fn file(name: &str, version: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("wheel-files");
    fs::create_dir_all(&root).unwrap();
    let done = root.join(format!("{name}-{version}"));
    let lock = File::create(root.join(format!("{name}-{version}.lock"))).unwrap();
    lock.lock().unwrap();
    if !done.is_dir() {
        let staging = root.join(format!("{name}-{version}.partial"));
        let _ = fs::remove_dir_all(&staging);
        let output = Command::new("python3")
            .args([
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--only-binary=:all:",
                "--dest",
            ])
            .arg(&staging)
            .arg(format!("{name}=={version}"))
            .output()
            .expect("python3 starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "this test needs the network: pip could not fetch {name} {version}\n{said}");
        fs::rename(&staging, &done).unwrap();
    }
    done
}
