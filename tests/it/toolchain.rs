//! The toolchain: the real CUDA 13 wheels, and fakes of the faults that people have.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use fi_arch::build::consumer::Consumer;
use fi_arch::build::toolchain::{self, Cudart, Found, Toolkit};
use fi_arch::error::Error;
use fi_arch::memo::Memo;
use fi_arch::target;

use crate::support::toolkit::cuda_13_0;
use crate::survey::{in_child, is_child};

fn script(path: &Path, body: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A toolkit with the layout of a system's, whose nvcc prints `release`, and whose libcudart is the real one of CUDA 13.
pub fn fake_toolkit(root: &Path, release: &str, cudart_version: u32) {
    script(&root.join("bin/nvcc"), &format!("echo 'Cuda compilation tools, release {release}, V{release}.61'"));
    for tool in ["bin/cudafe++", "bin/ptxas", "bin/fatbinary", "nvvm/bin/cicc"] {
        script(&root.join(tool), "exit 1");
    }
    for file in ["bin/nvcc.profile", "nvvm/libdevice/libdevice.10.bc", "include/crt/host_config.h", "include/crt/host_runtime.h"]
    {
        fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
        fs::write(root.join(file), "").unwrap();
    }
    fs::create_dir_all(root.join("include/cuda/std")).unwrap();
    fs::write(root.join("include/cuda_runtime_api.h"), format!("/* */\n#define CUDART_VERSION  {cudart_version}\n")).unwrap();
    fs::create_dir_all(root.join("lib64")).unwrap();
    symlink(cuda_13_0().join("lib/libcudart.so.13"), root.join("lib64/libcudart.so")).unwrap();
}

fn reason(root: &Path) -> String {
    toolchain::at(root, "test", &Memo::default()).map(|t| format!("fit: {t:?}")).unwrap_err()
}

#[test]
fn the_real_wheels_are_a_toolkit_that_links_and_compiles() {
    let root = cuda_13_0();
    let memo = Memo::default();
    let toolkit = toolchain::at(&root, "test", &memo).unwrap();
    assert_eq!((toolkit.full_version.as_str(), toolkit.cudart_soname.as_str()), ("13.0.88", "libcudart.so.13"));
    assert_eq!(toolkit.cudart, root.join("lib/libcudart.so.13"));
    let cudart = toolkit.cudart_for(None).unwrap();
    assert_eq!(toolchain::link_flags(&cudart, "lib"), ["-Llib", "-l:libcudart.so.13"]);
    assert!(toolkit.tools.iter().all(|tool| tool.is_file()) && toolkit.tools.len() == 7, "{:?}", toolkit.tools);
    let host = toolchain::host_compiler(&memo).unwrap();
    let staging = tempfile::tempdir().unwrap();
    let theirs = Consumer::parse("cu128").unwrap();
    let linked_in = toolkit.cudart_for(Some(&theirs)).unwrap();
    assert_eq!(linked_in, Cudart::Static { file: root.join("lib/libcudart_static.a") });
    for cudart in [&cudart, &linked_in] {
        toolchain::probe_link(&toolkit, cudart, &host, staging.path()).unwrap();
    }
    let target = target::parse("120").unwrap().resolve(toolkit.version).unwrap();
    toolchain::probe_nvcc(&toolkit, &host, target, staging.path()).unwrap();
    assert_eq!(fs::read_dir(staging.path()).unwrap().count(), 0, "probes leave nothing behind");
}

#[test]
fn a_host_compiler_that_nvcc_does_not_take_is_told_before_the_build() {
    let dir = tempfile::tempdir().unwrap();
    let memo = Memo::default();
    let toolkit = toolchain::at(&cuda_13_0(), "test", &memo).unwrap();
    let mut host = toolchain::host_compiler(&memo).unwrap();
    let wrapper = dir.path().join("g++-99");
    script(&wrapper, &format!("exec '{}' -U__GNUC__ -D__GNUC__=99 \"$@\"", host.path.display()));
    host.path = wrapper;
    let target = target::parse("120").unwrap().resolve(toolkit.version).unwrap();
    let error = toolchain::probe_nvcc(&toolkit, &host, target, dir.path()).unwrap_err();
    assert_eq!(error.exit() as u8, 3);
    assert!(error.why()[0].contains("unsupported GNU version"), "{error}");
    assert!(error.hints()[0].contains("set CXX to an older one"), "{error}");
}

#[test]
fn a_libcudart_that_does_not_link_is_told_before_the_build() {
    let dir = tempfile::tempdir().unwrap();
    let memo = Memo::default();
    let mut toolkit = toolchain::at(&cuda_13_0(), "test", &memo).unwrap();
    let host = toolchain::host_compiler(&memo).unwrap();
    toolkit.cudart = dir.path().join("libcudart.so.13");
    toolkit.cudart_static = Some(dir.path().join("libcudart_static.a"));
    let theirs = Consumer::parse("cu128").unwrap();
    for (consumer, name) in [(None, "libcudart.so.13"), (Some(&theirs), "libcudart_static.a")] {
        let cudart = toolkit.cudart_for(consumer).unwrap();
        let error = toolchain::probe_link(&toolkit, &cudart, &host, dir.path()).unwrap_err();
        assert_eq!(error.exit() as u8, 3);
        assert!(error.why()[0].contains(&format!("cannot find -l:{name}")), "{error}");
        assert!(error.hints()[0].contains("--toolkit"), "{error}");
    }
}

#[test]
fn every_part_that_a_toolkit_lacks_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("cuda");
    let whole = || {
        let _ = fs::remove_dir_all(&root);
        fake_toolkit(&root, "13.0", 13000);
    };
    whole();
    assert_eq!(toolchain::at(&root, "test", &Memo::default()).unwrap().cudart, root.join("lib64/libcudart.so"));
    for (part, told) in [
        ("bin/nvcc", "it has no bin/nvcc"),
        ("bin/ptxas", "it has no ptxas"),
        ("nvvm/bin/cicc", "it has no cicc"),
        ("nvvm/libdevice/libdevice.10.bc", "it has no libdevice.10.bc"),
        ("include/cuda_runtime_api.h", "it has no headers"),
        ("include/crt/host_runtime.h", "it has no crt/host_runtime.h"),
        ("lib64/libcudart.so", "it has no libcudart.so.13"),
    ] {
        whole();
        fs::remove_file(root.join(part)).unwrap();
        assert!(reason(&root).contains(told), "{part}: {}", reason(&root));
    }
    whole();
    fs::remove_dir_all(root.join("include/cuda")).unwrap();
    assert!(reason(&root).contains("it has no CCCL headers"));
    whole();
    fs::set_permissions(root.join("bin/nvcc"), fs::Permissions::from_mode(0o644)).unwrap();
    assert!(reason(&root).contains("is not executable"));
    script(&root.join("bin/nvcc"), "echo 'nvcc: cannot find libc' >&2; exit 127");
    assert!(reason(&root).contains("nvcc: cannot find libc"), "{}", reason(&root));
    script(&root.join("bin/nvcc"), "echo hello");
    assert!(reason(&root).contains("no `release`"), "{}", reason(&root));
}

#[test]
fn headers_and_libcudart_must_be_of_nvccs_own_version() {
    let dir = tempfile::tempdir().unwrap();
    fake_toolkit(&dir.path().join("a"), "13.0", 12080);
    assert!(reason(&dir.path().join("a")).contains("its headers are of CUDA 12.8, its nvcc of 13.0"));
    fake_toolkit(&dir.path().join("b"), "12.8", 12080);
    assert!(
        reason(&dir.path().join("b")).contains("is libcudart.so.13, its nvcc is of CUDA 12.8"),
        "{}",
        reason(&dir.path().join("b"))
    );
    fs::remove_file(dir.path().join("b/lib64/libcudart.so")).unwrap();
    fs::write(dir.path().join("b/lib64/libcudart.so"), "INPUT(libcudart.so.12)").unwrap();
    assert!(reason(&dir.path().join("b")).contains("it is no 64-bit ELF library"), "{}", reason(&dir.path().join("b")));
}

#[test]
fn a_toolkit_named_by_hand_is_used_or_the_error_says_why_not() {
    let dir = tempfile::tempdir().unwrap();
    fake_toolkit(&dir.path().join("cuda"), "13.0", 13000);
    let find = |path: &Path, sm: &'static str| {
        let wanted = move |version| target::parse(sm).and_then(|request| request.resolve(version)).map(drop);
        toolchain::find(Some(path), None, None, &wanted, &Memo::default())
    };
    for path in ["cuda", "cuda/bin", "cuda/bin/nvcc"] {
        let found = find(&dir.path().join(path), "120").unwrap();
        let Some(Toolkit { root, .. }) = &found.toolkit else { panic!("{found:?}") };
        assert_eq!(root.canonicalize().unwrap(), dir.path().join("cuda").canonicalize().unwrap());
    }
    let exit = |result: Result<Found, Error>| result.map(drop).unwrap_err().exit() as u8;
    assert_eq!(exit(find(&dir.path().join("nowhere"), "120")), 3);
    assert_eq!(exit(find(dir.path(), "120")), 3);
    fs::remove_dir_all(dir.path().join("cuda")).unwrap();
    fake_toolkit(&dir.path().join("cuda"), "13.0", 13000);
    let refuses = |_| Err(Error::unsupported("cannot emit that"));
    assert_eq!(exit(toolchain::find(Some(&dir.path().join("cuda")), None, None, &refuses, &Memo::default())), 4);
}

#[test]
fn child_find() {
    if !is_child() {
        return;
    }
    let memo = Memo::load(&fi_arch::env::home().unwrap());
    // The machine may have toolkits of its own: to see every reason, none may be fit in the end.
    let refuse = std::env::var_os("FI_ARCH_TEST_REFUSE").is_some();
    let wanted = |version| {
        target::parse("120").and_then(|request| request.resolve(version))?;
        if refuse { Err(Error::unsupported("refused by the test")) } else { Ok(()) }
    };
    let found = toolchain::find(None, None, None, &wanted, &memo).unwrap();
    match (found.toolkit, found.rejected) {
        (Some(toolkit), _) => println!("RESULT {} from {}", toolkit.root.display(), toolkit.origin),
        (None, rejected) => {
            let told: Vec<String> = rejected.iter().map(|r| format!("{}: {}", r.origin, r.why)).collect();
            println!("RESULT none; {}", told.join("; "));
        }
    }
    memo.save();
}

fn find_in_child(home: &Path, vars: &[(&str, &OsStr)]) -> String {
    let mut all = vec![("FI_ARCH_HOME", home.as_os_str())];
    all.extend(vars);
    in_child("toolchain::child_find", &all)
}

#[test]
fn toolkits_are_tried_in_order_and_each_that_is_passed_over_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let home = dir.join("home");
    let fresh = |name: &str, release: &str, headers: u32| {
        fake_toolkit(&dir.join(name), release, headers);
        dir.join(name)
    };
    let good = fresh("good", "13.0", 13000);
    let other = fresh("other", "13.0", 13000);
    let found = |vars: &[(&str, &OsStr)]| find_in_child(&home, vars);
    let path = |root: &Path| root.join("bin").into_os_string();
    let answer = found(&[("CUDA_HOME", good.as_os_str()), ("CUDA_PATH", other.as_os_str())]);
    assert_eq!(answer, format!("{} from CUDA_HOME", good.display()));
    // A broken CUDA_HOME does not hide the toolkit behind it.
    let list = OsStr::new("/usr/local/cuda-12.8:/usr/local/cuda").to_owned();
    assert_eq!(found(&[("CUDA_HOME", &list), ("PATH", &path(&good))]), format!("{} from nvcc on PATH", good.display()));
    // `/usr/bin/nvcc` is often a link into the toolkit.
    fs::create_dir_all(dir.join("links/bin")).unwrap();
    symlink(good.join("bin/nvcc"), dir.join("links/bin/nvcc")).unwrap();
    assert_eq!(found(&[("PATH", &path(&dir.join("links")))]), format!("{} from nvcc on PATH", good.display()));
    let vars = [
        ("CUDA_HOME", &*list),
        ("CUDA_PATH", OsStr::new("/nonexistent")),
        ("PATH", &path(&good)),
        ("FI_ARCH_TEST_REFUSE", OsStr::new("1")),
    ];
    let none = found(&vars);
    assert!(none.starts_with("none; CUDA_HOME: `/usr/local/cuda-12.8:/usr/local/cuda` is a list"), "{none}");
    assert!(none.contains("; CUDA_PATH: there is no /nonexistent; nvcc on PATH: refused by the test"), "{none}");
}

#[test]
fn a_toolkit_too_old_for_the_target_is_passed_over_with_that_reason() {
    let dir = tempfile::tempdir().unwrap();
    let old = dir.path().join("old");
    fake_toolkit(&old, "12.6", 12060);
    let answer =
        find_in_child(&dir.path().join("home"), &[("CUDA_HOME", old.as_os_str()), ("FI_ARCH_TEST_REFUSE", OsStr::new("1"))]);
    assert!(answer.starts_with("none; CUDA_HOME: nvcc 12.6 cannot emit code for sm_120: "), "{answer}");
    assert!(answer.contains("needs CUDA 12.8 or newer"), "{answer}");
}

#[test]
fn child_host() {
    if !is_child() {
        return;
    }
    let memo = Memo::load(&fi_arch::env::home().unwrap());
    match toolchain::host_compiler(&memo) {
        Ok(host) => println!("RESULT {}|{:?}|{}|{}", host.path.display(), host.args, host.version, host.tools.len()),
        Err(error) => println!("RESULT exit {}: {}", error.exit() as u8, error.to_string().replace('\n', " ")),
    }
    memo.save();
}

#[test]
fn the_host_compiler_is_the_one_that_cxx_means() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let home = dir.join("home");
    let path = OsStr::new("/usr/local/bin:/usr/bin:/bin");
    let ask = |vars: &[(&str, &str)]| {
        let mut all = vec![("FI_ARCH_HOME", home.as_os_str()), ("PATH", path)];
        all.extend(vars.iter().map(|(name, value)| (*name, OsStr::new(*value))));
        in_child("toolchain::child_host", &all)
    };
    let default = ask(&[]);
    assert!(default.contains("/c++|[]|") && default.ends_with("|5"), "{default}");
    // A compiler in a folder with a space, quoted, unquoted, with arguments, and behind a cache.
    let spaced = dir.join("my gcc/g++");
    script(&spaced, "exec /usr/bin/g++ \"$@\"");
    let spaced = spaced.display().to_string();
    for value in [format!("{spaced} -m64"), format!("'{spaced}' -m64"), format!("ccache \"{spaced}\" -m64")] {
        let answer = ask(&[("CXX", &value)]);
        assert!(answer.starts_with(&format!("{spaced}|[\"-m64\"]|")), "{value}: {answer}");
    }
    assert!(ask(&[("CXX", &spaced)]).starts_with(&format!("{spaced}|[]|")));
    assert!(ask(&[("NVCC_CCBIN", &spaced)]).starts_with(&format!("{spaced}|[]|")));
    for (value, why) in [("nosuch++", "there is no program nosuch++"), ("ccache", "without a compiler"), ("'g++", "not closed")] {
        let answer = ask(&[("CXX", value)]);
        assert!(answer.starts_with("exit 3") && answer.contains(why) && answer.contains("hint:"), "{value}: {answer}");
    }
    let none = in_child("toolchain::child_host", &[("FI_ARCH_HOME", home.as_os_str()), ("PATH", OsStr::new("/nonexistent"))]);
    assert!(none.starts_with("exit 3") && none.contains("gcc-c++"), "{none}");
}

#[test]
fn a_look_up_that_changed_nothing_starts_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let runs = dir.join("runs");
    let root = dir.join("cuda");
    fake_toolkit(&root, "13.0", 13000);
    script(&root.join("bin/nvcc"), &format!("echo nvcc >> '{}'; echo 'release 13.0, V13.0.88'", runs.display()));
    let compiler = dir.join("g++");
    script(&compiler, &format!("echo g++ >> '{}'; exec /usr/bin/g++ \"$@\"", runs.display()));
    // Younger files are not remembered.
    std::thread::sleep(std::time::Duration::from_millis(2200));
    let home = dir.join("home");
    let count = || fs::read_to_string(&runs).unwrap().lines().count();
    let look = || {
        let vars = [
            ("FI_ARCH_HOME", home.as_os_str()),
            ("CUDA_HOME", root.as_os_str()),
            ("CXX", compiler.as_os_str()),
            ("PATH", OsStr::new("/usr/bin:/bin")),
        ];
        assert!(in_child("toolchain::child_find", &vars).contains("from CUDA_HOME"));
        assert!(in_child("toolchain::child_host", &vars).contains("|[]|"));
    };
    look();
    let first = count();
    look();
    assert!(first > 0);
    assert_eq!(count(), first);
}
