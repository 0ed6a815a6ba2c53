//! `fi-arch build` on real wheels with real nvcc. The small module `vllm_comm` (one source, seconds) stands for all that does
//! not depend on the module; one test builds `trtllm_comm` whole.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::sandbox::{Ran, Sandbox, copy_dir};
use crate::support::wheels;

/// The release that most tests build from: small, patched in every way that matters.
const RELEASE: &str = "0.6.4";

const SMALL: &[&str] = &["--module", "vllm_comm", "--sm", "120"];

fn small<'a>(more: &[&'a str]) -> Vec<&'a str> {
    SMALL.iter().copied().chain(more.iter().copied()).collect()
}

/// A copy of FlashInfer that a test may change.
fn own_flashinfer(sandbox: &Sandbox, name: &str) -> PathBuf {
    let to = sandbox.path(name);
    copy_dir(&wheels::unpacked("flashinfer-python", RELEASE), &to);
    to
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn trtllm_comm_is_built_proven_and_answered_from_the_store() {
    let (sandbox, built) = Sandbox::with_trtllm_build();
    assert_eq!(built["verdict"], "pass");
    assert_eq!(built["module"], "trtllm_comm");
    assert_eq!(built["flashinfer"], "0.6.16.post4", "the newest release whose gate excludes SM12x is the default");
    assert_eq!(built["target"], "sm_120f");
    assert_eq!(built["hollow"], 0);
    assert_eq!(built["min_driver"], "580");
    assert_eq!(
        built["edits"],
        serde_json::json!(["gate", "hollow-kernels", "dependency-marks", "pointer-stride", "cluster-size"])
    );
    let kernels = built["kernels"].as_u64().unwrap();
    assert_eq!(kernels, built["with_dependency_marks"].as_u64().unwrap() + 3);
    assert_eq!(built["need_no_marks"], 3);

    // What `inspect` reads of the artifact is what `build` said of it.
    let artifact = built["artifact"].as_str().unwrap();
    let inspected = sandbox.run(&["inspect", "--json", artifact]).exits(0).json();
    let images = inspected["files"][0]["images"].as_array().unwrap();
    assert!(images.iter().all(|image| image["target"] == "sm_120f" && image["kind"] == "sass"));
    assert_eq!(images.iter().map(|image| image["kernels"].as_u64().unwrap()).sum::<u64>(), kernels);

    let again = sandbox.build(&["--sm", "12.0f", "--offline"]);
    assert_eq!(again["cache"], "hit");
    assert_eq!(again["key"], built["key"]);
    assert_eq!(again["sha256"], built["sha256"]);

    // What is local to a unit is named after its path in the build folder: after no folder of this machine, and no process.
    let planned = sandbox.build(&["--sm", "120", "--offline", "--dry-run"]);
    let commands = planned["commands"].as_array().unwrap().iter().map(|command| command.as_array().unwrap());
    let sources =
        commands.filter_map(|words| words.iter().position(|word| word == "-c").map(|at| words[at + 1].as_str().unwrap()));
    let checksums: Vec<String> = sources.map(|path| format!("{:08x}", crc32fast::hash(path.as_bytes()))).collect();
    let bytes = fs::read(artifact).unwrap();
    let names = locals(&bytes);
    assert!(names.len() > 3, "{names:?}");
    for name in names {
        assert!(checksums.contains(&name[..8].to_owned()), "{name} is of none of {checksums:?}");
        let (_, behind) = name.split_once("_cu_").unwrap();
        assert_ne!(behind.as_bytes()[8], b'_', "{name} names a process");
    }
}

/// What stands behind `_INTERNAL_` in the names of things that are local to a unit.
fn locals(bytes: &[u8]) -> Vec<String> {
    const MARK: &[u8] = b"_INTERNAL_";
    let places = (0..bytes.len() - MARK.len()).filter(|&at| bytes[at..].starts_with(MARK));
    places
        .map(|at| {
            let name = &bytes[at + MARK.len()..];
            String::from_utf8(name[..name.iter().position(|byte| *byte == 0).unwrap()].to_vec()).unwrap()
        })
        .collect()
}

#[test]
fn only_a_changed_content_is_a_miss() {
    let sandbox = Sandbox::new();
    let site = own_flashinfer(&sandbox, "site");
    let header = site.join("flashinfer/data/include/flashinfer/comm/vllm_custom_all_reduce.cuh");
    let build = |site: &Path| sandbox.build(&small(&["--flashinfer", text(site)]));
    let first = build(&site);
    assert_eq!((&first["cache"], &first["verdict"]), (&"miss".into(), &"pass".into()));
    assert_eq!(build(&site)["cache"], "hit");

    // A touched file is a hit.
    let original = fs::read(&header).unwrap();
    fs::write(&header, &original).unwrap();
    fs::File::options().write(true).open(&header).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(build(&site)["cache"], "hit");

    // One changed byte in any header of the closure is a miss, whatever its time stamp says.
    let mtime = fs::metadata(&header).unwrap().modified().unwrap();
    let mut changed = original.clone();
    let at = changed.windows(2).position(|pair| pair == b"//").unwrap() + 2;
    changed[at] ^= 1;
    fs::write(&header, &changed).unwrap();
    fs::File::options().write(true).open(&header).unwrap().set_modified(mtime).unwrap();
    let other = build(&site);
    assert_eq!(other["cache"], "miss");
    assert_ne!(other["key"], first["key"]);

    // The old content is the old artifact again.
    fs::write(&header, &original).unwrap();
    assert_eq!((&build(&site)["cache"], &build(&site)["key"]), (&"hit".into(), &first["key"]));

    // A moved folder is a hit.
    let moved = sandbox.path("else/where");
    fs::create_dir_all(moved.parent().unwrap()).unwrap();
    fs::rename(&site, &moved).unwrap();
    assert_eq!((&build(&moved)["cache"], &build(&moved)["key"]), (&"hit".into(), &first["key"]));

    // A header that would now be read in place of another is a miss, although no file that was read has changed.
    let real = first_match(&sandbox.home().join("wheels"), "tvm_ffi/include/tvm/ffi/c_api.h");
    let earlier = moved.join("flashinfer/data/include/flashinfer/comm/tvm/ffi/c_api.h");
    fs::create_dir_all(earlier.parent().unwrap()).unwrap();
    fs::copy(&real, &earlier).unwrap();
    assert_eq!(build(&moved)["cache"], "miss");
}

#[test]
fn another_byte_in_any_tool_or_header_is_a_miss() {
    let sandbox = Sandbox::with_small_build();
    let dry = |toolkit: &Path, tvm_ffi: Option<&Path>| {
        let flashinfer = sandbox.path("site");
        if !flashinfer.exists() {
            copy_dir(&wheels::unpacked("flashinfer-python", RELEASE), &flashinfer);
        }
        // A tvm_ffi beside FlashInfer is the one that is taken.
        let beside = flashinfer.join("tvm_ffi");
        let _ = fs::remove_dir_all(&beside);
        if let Some(tvm_ffi) = tvm_ffi {
            copy_dir(tvm_ffi, &beside);
        }
        sandbox.build(&small(&["--dry-run", "--offline", "--flashinfer", text(&flashinfer), "--toolkit", text(toolkit)]))
    };
    let wheels = sandbox.home().join("wheels");
    let fetched = first_match(&wheels, "nvidia/cu13/bin/nvcc").ancestors().nth(2).unwrap().to_owned();
    let toolkit = sandbox.path("toolkit");
    copy_dir(&fetched, &toolkit);
    assert_eq!(dry(&toolkit, None)["cache"], "hit", "where the toolkit lies does not matter");
    let change = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        bytes.push(b'\n');
        fs::write(path, bytes).unwrap();
    };
    for file in [
        "bin/ptxas",
        "bin/fatbinary",
        "nvvm/bin/cicc",
        "nvvm/libdevice/libdevice.10.bc",
        "include/cuda_runtime.h",
        "include/cuda_bf16.hpp",
    ] {
        let original = fs::read(toolkit.join(file)).unwrap();
        change(&toolkit.join(file));
        assert_eq!(dry(&toolkit, None)["cache"], "miss", "{file}");
        fs::write(toolkit.join(file), original).unwrap();
        assert_eq!(dry(&toolkit, None)["cache"], "hit", "{file} as it was");
    }

    let tvm_ffi = sandbox.path("tvm_ffi");
    copy_dir(first_match(&wheels, "tvm_ffi/include/tvm/ffi/c_api.h").ancestors().nth(4).unwrap(), &tvm_ffi);
    change(&tvm_ffi.join("include/tvm/ffi/c_api.h"));
    assert_eq!(dry(&toolkit, Some(&tvm_ffi))["cache"], "miss");
}

/// The file `tail` in the first folder of `dir` that has it.
fn first_match(dir: &Path, tail: &str) -> PathBuf {
    let mut found = fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path().join(tail)).filter(|path| path.is_file());
    found.next().unwrap_or_else(|| panic!("{tail} is nowhere below {}", dir.display()))
}

#[test]
fn sixteen_processes_on_an_empty_store_compile_once_and_all_succeed() {
    let sandbox = Sandbox::new();
    // The wheels are there first, so that the processes meet at the compile.
    sandbox.build(&small(&["--dry-run", "--flashinfer", RELEASE]));
    let args: Vec<&str> = ["build", "--json"].into_iter().chain(small(&["--flashinfer", RELEASE])).collect();
    let spawn = || sandbox.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let children: Vec<Child> = (0..16).map(|_| spawn()).collect();
    let results: Vec<serde_json::Value> = children
        .into_iter()
        .map(|child| {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            serde_json::from_slice(&output.stdout).unwrap()
        })
        .collect();
    assert_eq!(results.iter().filter(|result| result["cache"] == "miss").count(), 1);
    assert!(results.iter().all(|result| result["key"] == results[0]["key"] && result["verdict"] == "pass"));
    assert_eq!(sandbox.artifacts(), 1);
}

/// Starts a small build and waits until nvcc works for it.
fn start_and_wait_for_nvcc(sandbox: &Sandbox) -> Child {
    sandbox.build(&small(&["--dry-run", "--flashinfer", RELEASE]));
    let args: Vec<&str> = ["build"].into_iter().chain(small(&["--flashinfer", RELEASE])).collect();
    let mut child = sandbox.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    while nvcc_processes(sandbox).is_empty() {
        assert!(started.elapsed() < Duration::from_secs(120), "nvcc did not start");
        assert!(child.try_wait().unwrap().is_none(), "the build ended before nvcc was seen");
        std::thread::sleep(Duration::from_millis(20));
    }
    child
}

/// The processes that work in a build folder of the sandbox's store.
fn nvcc_processes(sandbox: &Sandbox) -> Vec<u32> {
    let staging = sandbox.home().join("store/v1/staging");
    let in_staging = |pid: &u32| fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(&staging));
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(in_staging).collect()
}

#[test]
fn ctrl_c_ends_every_child_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    let mut child = start_and_wait_for_nvcc(&sandbox);
    signal(child.id(), "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(nvcc_processes(&sandbox), Vec::<u32>::new());
    assert_eq!(sandbox.staged(), Vec::<String>::new());
    assert_eq!(sandbox.artifacts(), 0);
}

#[test]
fn after_kill_9_in_the_middle_the_next_build_works() {
    let sandbox = Sandbox::new();
    let mut child = start_and_wait_for_nvcc(&sandbox);
    signal(child.id(), "KILL");
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    let built = sandbox.build(&small(&["--flashinfer", RELEASE]));
    assert_eq!((&built["cache"], &built["verdict"]), (&"miss".into(), &"pass".into()));
    assert_eq!(sandbox.staged(), Vec::<String>::new(), "what the killed build left is swept");
}

fn signal(pid: u32, name: &str) {
    assert!(Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap().success());
}

#[test]
fn an_altered_artifact_is_never_handed_out() {
    let sandbox = Sandbox::new();
    let args = small(&["--flashinfer", RELEASE]);
    let built = sandbox.build(&args);
    let artifact = PathBuf::from(built["artifact"].as_str().unwrap());
    let good = fs::read(&artifact).unwrap();
    let mtime = fs::metadata(&artifact).unwrap().modified().unwrap();
    fs::set_permissions(&artifact, fs::Permissions::from_mode(0o644)).unwrap();
    let mut bad = good.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 0xff;
    fs::write(&artifact, &bad).unwrap();
    fs::File::options().write(true).open(&artifact).unwrap().set_modified(mtime).unwrap();

    let ran = sandbox.run(&[&["build", "--json"], &args[..]].concat()).exits(0);
    let again = ran.json();
    assert_eq!(again["cache"], "miss");
    assert_eq!(fs::read(again["artifact"].as_str().unwrap()).unwrap(), good, "the same plan gives the same bytes");
}

/// The words before a command that make it run as another user, who then owns `sandbox`; none where that may not be.
fn another_user(sandbox: &Sandbox) -> &'static [&'static str] {
    const PREFIX: &[&str] = &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let ok = |command: &mut Command| command.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    // A checkout in a home folder may be closed to others.
    if !ok(Command::new(PREFIX[0]).args(&PREFIX[1..]).args(["test", "-x", env!("CARGO_BIN_EXE_fi-arch")])) {
        return &[];
    }
    assert!(ok(Command::new("chown").args(["-Rh", "65534:65534"]).arg(sandbox.path(""))));
    PREFIX
}

#[test]
fn a_module_with_a_hollow_kernel_is_refused_and_not_stored() {
    let sandbox = Sandbox::new();
    let site = own_flashinfer(&sandbox, "site");
    let source = site.join("flashinfer/data/csrc/vllm_custom_all_reduce.cu");
    let mut code = fs::read_to_string(&source).unwrap();
    code.push_str("\n__global__ void emptied(float* out) {}\nvoid launch(float* out) { emptied<<<1, 1>>>(out); }\n");
    fs::write(&source, code).unwrap();
    let mut command = sandbox.command(&[&["build", "--json"], &small(&["--flashinfer", text(&site)])[..]].concat());
    // What would slip flags into a compile unseen is taken away: with this one, nvcc would not even start.
    command.env("NVCC_APPEND_FLAGS", "--no-such-flag");
    let ran = Ran::of(&mut command).exits(5).says("hollow-kernel: 1 of 25 kernels").says("emptied").says("the full log is in");
    assert_eq!(ran.json()["error"]["exit"], 5);
    assert_eq!((sandbox.artifacts(), sandbox.staged()), (0, Vec::new()));
}

#[test]
fn two_folders_give_the_same_bytes() {
    let (one, two) = (Sandbox::new(), Sandbox::new());
    let site = own_flashinfer(&two, "a/longer/name for a site");
    let tmp = two.path("tmp");
    fs::create_dir_all(&tmp).unwrap();
    // A name that a shell would take apart.
    let home = two.path("$(false) $HOME, 'home' & \"b\"");
    fs::create_dir_all(&home).unwrap();
    std::os::unix::fs::symlink(two.home().join("wheels"), home.join("wheels")).unwrap();
    // The runtime that the consumer brings, and the one that is linked in for it.
    for consumer in ["cu130", "cu128"] {
        let first = one.build(&small(&["--flashinfer", RELEASE, "--for", consumer]));
        // Another user, with other habits; without the right to become one, the habits alone.
        let args = [&["build", "--json"], &small(&["--flashinfer", text(&site), "--for", consumer])[..]].concat();
        let theirs = two.command(&args);
        let mut command = Command::new("sh");
        command.args(["-c", "umask 077; exec \"$@\"", "sh"]).args(another_user(&two));
        command.arg(theirs.get_program()).args(theirs.get_args()).current_dir(two.path(""));
        for (name, value) in theirs.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("FI_ARCH_HOME", &home);
        command.env("HOME", &tmp).env("TMPDIR", &tmp).env("LC_ALL", "C.UTF-8").env("TZ", "Asia/Tokyo").env("USER", "other");
        // A folder that compilers would search unasked, with a header of a common name that nobody can compile.
        fs::create_dir_all(two.path("poison")).unwrap();
        fs::write(two.path("poison/cstdint"), "#error CPATH was searched\n").unwrap();
        command.env("CPATH", two.path("poison")).env("CPLUS_INCLUDE_PATH", two.path("poison"));
        let second = Ran::of(&mut command).exits(0).json();
        assert_eq!((&second["cache"], &first["key"]), (&"miss".into(), &second["key"]));
        assert_eq!(first["sha256"], second["sha256"], "{consumer}");
        let bytes = fs::read(first["artifact"].as_str().unwrap()).unwrap();
        for home in [&one.home(), &home] {
            let needle = text(home).as_bytes();
            assert!(!bytes.windows(needle.len()).any(|window| window == needle), "no build path is in the artifact");
        }
    }
}

/// A toolkit that is the fetched one but for its nvcc, a shell script; `$real` is the real nvcc.
fn toolkit_with_nvcc(sandbox: &Sandbox, script: &str) -> PathBuf {
    sandbox.build(&small(&["--dry-run", "--flashinfer", RELEASE]));
    let fetched = first_match(&sandbox.home().join("wheels"), "nvidia/cu13/bin/nvcc");
    let real_root = fetched.ancestors().nth(2).unwrap().to_owned();
    let root = sandbox.path("toolkit");
    fs::create_dir_all(root.join("bin")).unwrap();
    for entry in fs::read_dir(&real_root).unwrap().flatten().filter(|entry| entry.file_name() != "bin") {
        std::os::unix::fs::symlink(entry.path(), root.join(entry.file_name())).unwrap();
    }
    for entry in fs::read_dir(real_root.join("bin")).unwrap().flatten().filter(|entry| entry.file_name() != "nvcc") {
        std::os::unix::fs::symlink(entry.path(), root.join("bin").join(entry.file_name())).unwrap();
    }
    let nvcc = root.join("bin/nvcc");
    fs::write(&nvcc, format!("#!/bin/sh\nreal='{}'\n{script}\n", text(&fetched))).unwrap();
    fs::set_permissions(&nvcc, fs::Permissions::from_mode(0o755)).unwrap();
    root
}

/// Makes sure that the toolkit's wheels are there, with a build of the small module.
fn fetch_toolkit(sandbox: &Sandbox) {
    sandbox.build(&small(&["--flashinfer", RELEASE]));
}

#[test]
fn an_nvcc_that_dies_on_the_third_file_shows_its_first_real_error_and_the_log() {
    let sandbox = Sandbox::new();
    fetch_toolkit(&sandbox);
    let root = toolkit_with_nvcc(
        &sandbox,
        r#"case "$*" in
  *trtllm_moe_allreduce_fusion.cu*)
    echo 'x.cuh(12): warning #177-D: variable "a" was declared but never referenced'
    echo 'x.cuh(77): error: identifier "foo" is undefined'
    echo '1 error detected in the compilation of "x.cu".'
    exit 2 ;;
  *csrc/trtllm*)
    for word; do case "$word" in obj/*.o) : > "$word" ;; obj/*.d) echo 'x.o : x.cu' > "$word" ;; esac; done
    exit 0 ;;
esac
exec "$real" "$@""#,
    );
    let ran = sandbox.run(&["build", "--json", "--sm", "120", "--flashinfer", RELEASE, "--toolkit", text(&root), "--jobs", "1"]);
    let ran = ran
        .exits(5)
        .says("trtllm_moe_allreduce_fusion did not compile")
        .says("x.cuh(77): error: identifier \"foo\" is undefined");
    assert_eq!(ran.json()["error"]["exit"], 5);
    let log = ran.stderr.split("the full log is in ").nth(1).expect("the log is named").trim();
    assert!(fs::read_to_string(log).unwrap().contains("1 error detected in the compilation"), "the full log is kept");
    assert_eq!(sandbox.staged(), Vec::<String>::new());
}

#[test]
fn a_compiler_killed_for_memory_is_told_from_a_compile_error() {
    let sandbox = Sandbox::new();
    fetch_toolkit(&sandbox);
    let root = toolkit_with_nvcc(&sandbox, "case \"$*\" in *csrc/vllm*) kill -9 $$ ;; esac\nexec \"$real\" \"$@\"");
    let args = small(&["--flashinfer", RELEASE, "--toolkit", text(&root)]);
    sandbox.run(&[&["build"], &args[..]].concat()).exits(5).says("signal 9 ended it").says("--jobs 1");
}

#[test]
fn a_nvcc_too_old_for_the_target_is_refused_with_what_it_can_do() {
    let sandbox = Sandbox::new();
    fetch_toolkit(&sandbox);
    for (release, sm, exit, word) in
        [("12.6", "120", 4, "CUDA 12.8 or newer"), ("12.8", "121", 4, "CUDA 12.9 or newer"), ("12.8", "120f", 4, "sm_120a")]
    {
        let root = sandbox.path("toolkit");
        let _ = fs::remove_dir_all(&root);
        toolkit_with_nvcc(&sandbox, &format!("echo 'Cuda compilation tools, release {release}, V{release}.93'"));
        let ran = sandbox.run(&["build", "--sm", sm, "--flashinfer", RELEASE, "--toolkit", text(&root)]);
        ran.exits(exit).says(word);
    }
}

#[test]
fn a_toolkit_without_headers_is_named_before_anything_is_compiled() {
    let sandbox = Sandbox::new();
    fetch_toolkit(&sandbox);
    let root = toolkit_with_nvcc(&sandbox, "exec \"$real\" \"$@\"");
    fs::remove_file(root.join("include")).unwrap();
    let ran = sandbox.run(&["build", "--sm", "120", "--flashinfer", RELEASE, "--toolkit", text(&root)]);
    ran.exits(3).says("cuda_runtime_api.h").says("hint:");
}

#[test]
fn releases_that_do_not_exist_or_have_another_layout_are_refused() {
    let sandbox = Sandbox::new();
    let run = |version: &str| sandbox.run(&["build", "--sm", "120", "--flashinfer", version]).exits(4);
    run("9.9.9").says("9.9.9").says("hint:");
    run("0.2.14").says("torch bindings");
    run("0.3.1").says("torch bindings");
    sandbox.run(&["build", "--sm", "75"]).exits(4).says("120");
    sandbox.run(&["build", "--sm", "12.x"]).exits(2).says("hint:");
    sandbox.run(&["build", "--sm", "120", "--module", "nothing"]).exits(2).says("trtllm_comm");
}

#[test]
fn a_tvm_ffi_that_flashinfer_excludes_is_refused_before_anything_is_compiled() {
    let sandbox = Sandbox::new();
    let site = own_flashinfer(&sandbox, "site");
    fetch_toolkit(&sandbox);
    let tvm_ffi = first_match(&sandbox.home().join("wheels"), "tvm_ffi/__init__.py").parent().unwrap().to_owned();
    copy_dir(&tvm_ffi, &site.join("tvm_ffi"));
    fs::create_dir_all(site.join("apache_tvm_ffi-0.1.8.dist-info")).unwrap();
    let metadata = "Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: 0.1.8\n";
    fs::write(site.join("apache_tvm_ffi-0.1.8.dist-info/METADATA"), metadata).unwrap();
    let args = small(&["--flashinfer", text(&site)]);
    sandbox.run(&[&["build"], &args[..]].concat()).exits(4).says("0.1.8 is outside of").says("hint:");
    sandbox.run(&[&["build", "--dry-run"], &args[..]].concat()).exits(0).says("a build would be refused");
}

#[test]
fn a_bare_machine_without_network_says_what_it_could_not_fetch() {
    let sandbox = Sandbox::bare();
    // Nothing listens on the discard port of this machine.
    let mut command = sandbox.command(&["build", "--sm", "120"]);
    command.env("PIP_INDEX_URL", "http://127.0.0.1:9/simple").env("PIP_RETRIES", "0").env("PIP_TIMEOUT", "2");
    Ran::of(&mut command).exits(3).says("flashinfer").says("hint:");
    sandbox.run(&["build", "--sm", "120", "--offline"]).exits(3).says("--offline");
}

#[test]
fn a_full_disk_is_told_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    sandbox.build(&small(&["--dry-run", "--flashinfer", RELEASE]));
    // A limit on file size makes every large write fail, as a full disk does, without a file system of its own.
    let program = env!("CARGO_BIN_EXE_fi-arch");
    let script = format!("ulimit -f 64; exec '{program}' build --sm 120 --module vllm_comm --flashinfer {RELEASE}");
    let mut command = Command::new("bash");
    command.args(["-c", &script]).env("FI_ARCH_HOME", sandbox.home()).env("VIRTUAL_ENV", sandbox.path("venv"));
    let ran = Ran::of(&mut command);
    assert!(matches!(ran.code, Some(3 | 5)), "exit {:?}\n{}", ran.code, ran.stderr);
    assert_eq!(sandbox.staged(), Vec::<String>::new());
    assert_eq!(sandbox.artifacts(), 0);
}

#[test]
fn a_home_that_cannot_be_written_is_told() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&["build", "--sm", "120", "--offline"]);
    command.env("FI_ARCH_HOME", "/proc/fi-arch");
    Ran::of(&mut command).exits(3).says("hint:");
    let name = OsStr::from_bytes(b"a\xff");
    let mut command = sandbox.command(&["cache", "ls", "--json"]);
    command.env("FI_ARCH_HOME", sandbox.path("").join(name));
    Ran::of(&mut command).exits(3).says("its name is not UTF-8").says("set FI_ARCH_HOME");
}

#[test]
fn many_jobs_split_the_sources_and_ask_for_the_same_artifact() {
    let sandbox = Sandbox::new();
    let dry = |jobs: &str| sandbox.build(&["--dry-run", "--sm", "120", "--flashinfer", RELEASE, "--jobs", jobs]);
    let compiles = |dry: &serde_json::Value| -> Vec<Vec<String>> {
        let commands: Vec<Vec<String>> = serde_json::from_value(dry["commands"].clone()).unwrap();
        commands.into_iter().filter(|command| command.contains(&"-c".to_owned())).collect()
    };
    let (whole, by_type, finest) = (dry("1"), dry("5"), dry("16"));
    assert_eq!([&whole, &by_type, &finest].map(|dry| compiles(dry).len()), [3, 3 + 8, 3 + 17]);
    assert_eq!(whole["request"], finest["request"], "a store answers whoever asks, of many cores or few");
    assert_eq!(whole["request"], by_type["request"]);
    for dry in [&whole, &by_type, &finest] {
        for command in compiles(dry) {
            let unit = command.iter().find(|word| word.ends_with(".cu")).unwrap();
            let as_released = unit.contains("trtllm_moe");
            assert_eq!(command.iter().any(|word| word == "-O3"), as_released, "{unit}");
            assert_eq!(command.iter().any(|word| word == "-O1"), !as_released, "{unit}");
        }
    }
    // What is made elsewhere is declared in front of each source that was split and of each of its units, and of no other.
    let before = |command: &Vec<String>| command.iter().any(|word| word.starts_with("ours/before/"));
    assert_eq!(compiles(&whole).iter().filter(|command| before(command)).count(), 0);
    assert_eq!(compiles(&finest).iter().filter(|command| before(command)).count(), 3 + 17);
}
