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

/// The folder that holds the files `members` out of the wheel of `name` of `version` from PyPI, as far as it has them, and nothing
/// else of it. Needs the network on the first call. Panics, so that the test fails, when the wheel cannot be had.
pub fn members(name: &str, version: &str, members: &[&str]) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("wheels");
    fs::create_dir_all(&root).unwrap();
    let label = format!("{name}-{version}-members");
    let done = root.join(&label);
    let lock = File::create(root.join(format!("{label}.lock"))).unwrap();
    lock.lock().unwrap();
    // A list that has grown since is fetched anew.
    let list = members.join("\n");
    if fs::read_to_string(done.join("MEMBERS")).is_ok_and(|had| had == list) {
        return done;
    }
    let staging = root.join(format!("{label}.partial"));
    for old in [&staging, &done] {
        let _ = fs::remove_dir_all(old);
    }
    fs::create_dir(&staging).unwrap();
    let output = Command::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"])
        .args(["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--platform", "manylinux_2_34_x86_64"])
        .arg("--dest")
        .arg(&staging)
        .arg(format!("{name}=={version}"))
        .output()
        .expect("python3 starts");
    assert!(
        output.status.success(),
        "this test needs the network: pip could not fetch {name}=={version}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let wheel = fs::read_dir(&staging).unwrap().next().expect("pip has put a wheel there").unwrap().path();
    let mut zip = zip::ZipArchive::new(File::open(&wheel).unwrap()).unwrap();
    for member in members {
        let Ok(mut packed) = zip.by_name(member) else { continue };
        let to = staging.join(member);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::io::copy(&mut packed, &mut File::create(to).unwrap()).unwrap();
    }
    fs::remove_file(wheel).unwrap();
    fs::write(staging.join("MEMBERS"), list).unwrap();
    fs::rename(&staging, &done).unwrap();
    done
}
