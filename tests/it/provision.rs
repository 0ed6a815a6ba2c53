//! Provisioning: real wheels through the real pip, and the faults of networks, indexes and processes.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fi_arch::build::provision::{self, Mode, Set};
use fi_arch::build::toolchain;
use fi_arch::memo::Memo;
use fi_arch::survey;

use crate::survey::{in_child, is_child};

/// A home that no other test knows: what pip starts may make folders in it.
const NO_HOME: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/no-home");

fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.ends_with(".lock"));
    names.sort();
    names
}

#[test]
fn a_bare_machine_gets_a_flashinfer_a_tvm_ffi_and_a_toolkit_once() {
    let home = tempfile::tempdir().unwrap();
    let mut said = Vec::new();
    let flashinfer =
        provision::flashinfer(home.path(), Some("0.5.3"), Mode::Online, &mut |line| said.push(line.to_owned())).unwrap();
    assert!(said[0].contains("fetching flashinfer-python 0.5.3") && said.len() > 1, "{said:?}");
    let found = survey::flashinfer_at(&flashinfer).unwrap();
    assert_eq!(found.version, "0.5.3");

    let mut quiet = |_: &str| {};
    let tvm_ffi = provision::tvm_ffi(home.path(), Mode::Online, &mut quiet).unwrap();
    assert!(tvm_ffi.join("tvm_ffi/include/tvm/ffi/c_api.h").is_file() && tvm_ffi.join("tvm_ffi/lib/libtvm_ffi.so").is_file());

    let cuda = provision::cuda(home.path(), Mode::Online, &mut quiet).unwrap();
    let toolkit = toolchain::at(&cuda, "test", &Memo::default()).unwrap();
    assert_eq!(toolkit.full_version, "13.0.88");

    // From now on nothing is fetched: not online, and offline either.
    let mut never = |line: &str| panic!("{line}");
    assert_eq!(provision::cuda(home.path(), Mode::Offline, &mut never).unwrap(), cuda);
    assert_eq!(provision::flashinfer(home.path(), Some("0.5.3"), Mode::Online, &mut never).unwrap(), flashinfer);
    assert_eq!(Set::tvm_ffi().unwrap().installed(home.path()), Some(tvm_ffi));
    assert_eq!(names_in(&home.path().join("wheels")).len(), 3);
}

#[test]
fn offline_says_what_would_have_been_fetched() {
    let home = tempfile::tempdir().unwrap();
    let error = provision::cuda(home.path(), Mode::Offline, &mut |line| panic!("{line}")).unwrap_err();
    assert_eq!(error.exit() as u8, 3);
    assert!(error.to_string().contains("nvidia-cuda-nvcc 13.0.88, nvidia-nvvm 13.0.88"), "{error}");
    assert!(!home.path().join("wheels").exists());
}

#[test]
fn child_fetch() {
    if !is_child() {
        return;
    }
    match provision::flashinfer(&fi_arch::env::home().unwrap(), Some("0.5.3"), Mode::Online, &mut |_| {}) {
        Ok(path) => println!("RESULT {}", path.display()),
        Err(error) => println!("RESULT exit {}: {}", error.exit() as u8, error.to_string().replace('\n', " ")),
    }
}

fn fetch_in_child(home: &Path, vars: &[(&str, &OsStr)]) -> String {
    let path = std::env::var_os("PATH").unwrap();
    let mut all = vec![("PATH", path.as_os_str()), ("FI_ARCH_HOME", home.as_os_str())];
    all.extend(vars);
    in_child("provision::child_fetch", &all)
}

#[test]
fn a_wheel_of_another_content_is_refused_with_both_hashes() {
    let dir = tempfile::tempdir().unwrap();
    let links = dir.path().join("links");
    fs::create_dir(&links).unwrap();
    fs::write(links.join("flashinfer_python-0.5.3-py3-none-any.whl"), "not the wheel").unwrap();
    let home = dir.path().join("home");
    let answer = fetch_in_child(&home, &[("PIP_NO_INDEX", OsStr::new("1")), ("PIP_FIND_LINKS", links.as_os_str())]);
    assert!(answer.starts_with("exit 5: the wheel of flashinfer-python==0.5.3 is not the one that is pinned"), "{answer}");
    assert!(answer.contains("expected SHA-256 b601293b72f9138bad173edc28df84b9f239a013be974e2e79d4ba98aeb38cf5"), "{answer}");
    assert!(answer.contains(&fi_arch::digest::Digest::of(b"not the wheel").to_string()), "{answer}");
    assert_eq!(names_in(&home.join("wheels")), Vec::<String>::new());
}

#[test]
fn an_index_that_cannot_be_reached_is_told_apart_from_one_without_the_wheel() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let vars = [("PIP_INDEX_URL", OsStr::new("http://127.0.0.1:9/simple")), ("PIP_RETRIES", OsStr::new("0"))];
    let answer = fetch_in_child(&home, &vars);
    assert!(answer.starts_with("exit 3: cannot fetch flashinfer-python 0.5.3"), "{answer}");
    assert!(answer.contains("cannot be reached") && answer.contains("HTTPS_PROXY"), "{answer}");
    let vars = [("PIP_NO_INDEX", OsStr::new("1")), ("PIP_FIND_LINKS", dir.path().as_os_str())];
    let answer = fetch_in_child(&home, &vars);
    assert!(answer.starts_with("exit 3") && answer.contains("No matching distribution found"), "{answer}");
    assert!(answer.contains("PIP_FIND_LINKS") && !answer.contains("cannot be reached"), "{answer}");
    assert_eq!(names_in(&home.join("wheels")), Vec::<String>::new());
}

/// A folder with a `python3` that behaves as `body` says; `$target` is where pip should install.
fn fake_python(dir: &Path, body: &str) -> OsString {
    let bin = dir.join("bin");
    fs::create_dir_all(&bin).unwrap();
    let python = bin.join("python3");
    let find = "while [ $# -gt 0 ]; do [ \"$1\" = --target ] && target=$2; shift; done";
    fs::write(&python, format!("#!/bin/sh\n{find}\n{body}\n")).unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let mut path = bin.into_os_string();
    path.push(":/usr/bin:/bin");
    path
}

const INSTALLS: &str = "mkdir -p \"$target/flashinfer\" && : > \"$target/flashinfer/__init__.py\"";

fn start_fetch(home: &Path, path: &OsStr) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "provision::child_fetch", "--nocapture"])
        .env_clear()
        .envs([("HOME", OsStr::new(NO_HOME)), ("FI_ARCH_TEST_CHILD", OsStr::new("1"))])
        .envs([("FI_ARCH_HOME", home.as_os_str()), ("PATH", path)])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn callers_at_the_same_time_fetch_once() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let runs = dir.path().join("runs");
    let path = fake_python(dir.path(), &format!("echo run >> '{}'; sleep 1; {INSTALLS}", runs.display()));
    let children: Vec<Child> = (0..4).map(|_| start_fetch(&home, &path)).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("RESULT /"), "{text}");
    }
    assert_eq!(fs::read_to_string(&runs).unwrap().lines().count(), 1);
    assert_eq!(names_in(&home.join("wheels")).len(), 1);
}

#[test]
fn a_fetch_that_was_killed_leaves_nothing_that_the_next_one_trusts() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let wheels = home.join("wheels");
    let path = fake_python(dir.path(), &format!("{INSTALLS}; : > \"$target/half\"; sleep 2"));
    let mut child = start_fetch(&home, &path);
    let end = Instant::now() + Duration::from_secs(20);
    let half = || {
        let partial = names_in(&wheels).into_iter().find(|name| name.ends_with(".partial"));
        partial.is_some_and(|name| wheels.join(name).join("packages/half").is_file())
    };
    while !half() {
        assert!(Instant::now() < end, "pip was never started");
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(names_in(&wheels).len(), 1, "only the partial folder is there");
    assert_eq!(Set::flashinfer(Some("0.5.3")).unwrap().installed(&home), None);

    // The orphan still writes for two seconds; the next caller waits for it, clears what it left and fetches anew.
    let path = fake_python(&dir.path().join("second"), INSTALLS);
    let output = start_fetch(&home, &path).wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("RESULT /"), "{text}");
    let names = names_in(&wheels);
    assert!(names.len() == 1 && !names[0].ends_with(".partial"), "{names:?}");
    assert!(!wheels.join(&names[0]).join("half").exists());
}

#[test]
fn a_damaged_folder_is_fetched_anew() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let path = fake_python(dir.path(), INSTALLS);
    let fetch = || start_fetch(&home, &path).wait_with_output().unwrap().status.success();
    assert!(fetch());
    let set = Set::flashinfer(Some("0.5.3")).unwrap();
    let folder = set.installed(&home).unwrap();
    fs::remove_file(folder.join("flashinfer/__init__.py")).unwrap();
    assert_eq!(set.installed(&home), None);
    assert!(fetch());
    assert_eq!(set.installed(&home), Some(folder));
}

#[test]
fn without_pip_the_error_names_the_packages_that_bring_it() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let path = fake_python(dir.path(), "echo \"$0: No module named pip\" >&2; exit 1");
    let bin = std::env::split_paths(&path).next().unwrap();
    let answer = fetch_in_child(&home, &[("PATH", bin.as_os_str())]);
    assert!(answer.starts_with("exit 3") && answer.contains("no Python on PATH has pip"), "{answer}");
    assert!(answer.contains("ensurepip") && answer.contains("python3-pip"), "{answer}");
    let answer = fetch_in_child(&home, &[("PATH", OsStr::new("/nonexistent"))]);
    assert!(answer.starts_with("exit 3") && answer.contains("no python3 on PATH"), "{answer}");
}
