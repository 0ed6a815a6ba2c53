//! The survey: real wheels as they are installed, and broken environments as they occur.

use std::fs;
use std::path::{Path, PathBuf};

use fi_arch::survey::{self, Environment};

use crate::support::wheels;

fn environment_of(dir: &Path) -> Environment {
    survey::environment(Some(dir), &fi_arch::memo::Memo::default()).unwrap().unwrap()
}

fn write(path: PathBuf, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A site-packages folder of a virtual environment that does not exist otherwise.
fn venv(root: &Path) -> PathBuf {
    let site = root.join("venv/lib/python3.12/site-packages");
    fs::create_dir_all(&site).unwrap();
    write(root.join("venv/pyvenv.cfg"), "home = /nowhere\nversion = 3.12.1\n");
    site
}

/// A FlashInfer as far as the survey looks.
fn fake_package(dir: &Path) {
    write(dir.join("__init__.py"), "");
    write(dir.join("data/csrc/x.cu"), "");
    write(dir.join("jit/core.py"), "");
}

fn record(site: &Path, name: &str, version: &str) {
    write(
        site.join(format!("{name}-{version}.dist-info/METADATA")),
        &format!("Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nVersion: 99\n"),
    );
}

#[test]
fn a_real_wheel_is_found_through_every_path_that_names_it() {
    let site = wheels::unpacked("flashinfer-python", "0.6.4");
    let installed = survey::flashinfer(&environment_of(&site)).unwrap().unwrap();
    assert_eq!(installed.version, "0.6.4");
    assert_eq!(installed.package, site.join("flashinfer"));
    assert!(installed.dist_info.as_ref().unwrap().join("METADATA").is_file());
    for path in [site.clone(), site.join("flashinfer")] {
        assert_eq!(survey::flashinfer_at(&path).unwrap(), installed);
    }
}

#[test]
fn a_real_tvm_ffi_is_found_with_its_headers() {
    let site = wheels::unpacked("apache-tvm-ffi", "0.1.15.post2");
    let found = survey::tvm_ffi(&environment_of(&site)).unwrap().unwrap();
    assert_eq!(found.version, "0.1.15.post2");
    assert!(found.package.join("include/tvm/ffi").is_dir());
    assert_eq!(survey::flashinfer(&environment_of(&site)).unwrap(), None);
}

#[test]
fn what_pip_uninstall_leaves_behind_is_no_flashinfer() {
    let root = tempfile::tempdir().unwrap();
    let site = venv(root.path());
    write(site.join("flashinfer/data/aot/trtllm_comm/trtllm_comm.so"), "");
    write(site.join("flashinfer/jit/__pycache__/core.pyc"), "");
    write(site.join("~lashinfer_python-0.6.3.dist-info/METADATA"), "Version: 0.6.3\n");
    fs::create_dir_all(site.join("flashinfer_python-0.6.4.dist-info")).unwrap();
    assert_eq!(survey::flashinfer(&environment_of(&root.path().join("venv"))).unwrap(), None);
    assert_eq!(survey::flashinfer_at(&site).unwrap_err().exit() as u8, 2);
}

#[test]
fn two_records_of_one_package_are_a_fault_that_is_told() {
    let root = tempfile::tempdir().unwrap();
    let site = venv(root.path());
    fake_package(&site.join("flashinfer"));
    record(&site, "flashinfer_python", "0.6.3");
    record(&site, "flashinfer_python", "0.6.4");
    let error = survey::flashinfer(&environment_of(&site)).unwrap_err();
    assert_eq!(error.exit() as u8, 3);
    let text = error.to_string();
    assert!(text.contains("flashinfer_python-0.6.3.dist-info") && text.contains("flashinfer_python-0.6.4.dist-info"), "{text}");
}

#[test]
fn a_record_without_files_is_a_fault_that_is_told() {
    let root = tempfile::tempdir().unwrap();
    let site = venv(root.path());
    record(&site, "flashinfer_python", "0.6.4");
    let error = survey::flashinfer(&environment_of(&site)).unwrap_err();
    assert_eq!(error.exit() as u8, 3);
}

#[test]
fn an_editable_install_is_found_however_it_is_linked() {
    let root = tempfile::tempdir().unwrap();
    let tree = root.path().join("src tree");
    fake_package(&tree.join("flashinfer"));
    write(tree.join("version.txt"), "0.6.5\n");
    let tree_text = tree.display().to_string();
    let url = format!("{{\"dir_info\": {{\"editable\": true}}, \"url\": \"file://{}\"}}", tree_text.replace(' ', "%20"));
    let finder = "__editable___flashinfer_python_0_6_4_finder";
    let ways: [(&str, Vec<(String, String)>); 4] = [
        ("path", vec![("__editable__.flashinfer_python-0.6.4.pth".into(), format!("{tree_text}\n"))]),
        (
            "finder",
            vec![
                ("__editable__.flashinfer_python-0.6.4.pth".into(), format!("import {finder}; {finder}.install()\n")),
                (format!("{finder}.py"), format!("MAPPING: dict[str, str] = {{'flashinfer': '{tree_text}/flashinfer'}}\n")),
            ],
        ),
        ("direct_url", vec![("flashinfer_python-0.6.4.dist-info/direct_url.json".into(), url)]),
        ("egg-link", vec![("flashinfer-python.egg-link".into(), format!("{tree_text}\n."))]),
    ];
    for (way, files) in ways {
        let _ = fs::remove_dir_all(root.path().join("venv"));
        let site = venv(root.path());
        if way != "egg-link" {
            record(&site, "flashinfer_python", "0.6.4");
        }
        for (name, text) in files {
            write(site.join(name), &text);
        }
        let found = survey::flashinfer(&environment_of(&site)).unwrap().unwrap_or_else(|| panic!("{way}: not found"));
        assert_eq!(found.package, tree.join("flashinfer"), "{way}");
        assert_eq!(found.version, "0.6.5", "{way}: the tree has moved on since it was installed");
    }
}

#[test]
fn a_source_tree_that_was_never_installed_is_refused_with_the_cure() {
    let root = tempfile::tempdir().unwrap();
    write(root.path().join("flashinfer/__init__.py"), "");
    write(root.path().join("flashinfer/jit/core.py"), "");
    write(root.path().join("csrc/x.cu"), "");
    let error = survey::flashinfer_at(root.path()).unwrap_err();
    assert_eq!(error.exit() as u8, 3);
    assert!(error.to_string().contains("pip install --no-build-isolation -e ."), "{error}");
}

#[test]
fn torch_tells_its_cuda_and_its_abi() {
    let root = tempfile::tempdir().unwrap();
    let site = venv(root.path());
    record(&site, "torch", "2.9.1");
    write(site.join("torch/__init__.py"), "raise SystemExit('the survey must not import torch')");
    write(
        site.join("torch/version.py"),
        "from typing import Optional\n__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n",
    );
    let torch = survey::torch(&environment_of(&site)).unwrap().unwrap();
    assert_eq!((torch.version.as_str(), torch.cxx11_abi), ("2.9.1+cu128", None));
    assert_eq!(torch.cuda.unwrap().to_string(), "12.8");
    write(
        site.join("torch/share/cmake/Torch/TorchConfig.cmake"),
        "if(NOT MSVC)\n  set(TORCH_CXX_FLAGS \"-D_GLIBCXX_USE_CXX11_ABI=1\")\nendif()\n",
    );
    assert_eq!(survey::torch(&environment_of(&site)).unwrap().unwrap().cxx11_abi, Some(true));
}

/// Runs the test `name` of this binary in a process of its own, with exactly `vars` set besides `HOME`, and returns what
/// it printed behind `RESULT `. A test must not change the variables of the process that the others run in.
pub fn in_child(name: &str, vars: &[(&str, &std::ffi::OsStr)]) -> String {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env_clear()
        .env("HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/no-home"))
        .envs(vars.iter().copied())
        .env("FI_ARCH_TEST_CHILD", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let result = text.split_once("RESULT ").unwrap_or_else(|| panic!("{text}\n{}", String::from_utf8_lossy(&output.stderr)));
    result.1.lines().next().unwrap().to_owned()
}

/// Whether this process was started by [`in_child`]; tests that are only there to be started so return at once otherwise.
pub fn is_child() -> bool {
    std::env::var_os("FI_ARCH_TEST_CHILD").is_some()
}

#[test]
fn child_flashinfer() {
    if !is_child() {
        return;
    }
    let memo = fi_arch::memo::Memo::load(&fi_arch::env::home().unwrap());
    let found = survey::environment(None, &memo).unwrap().and_then(|env| survey::flashinfer(&env).unwrap());
    println!("RESULT {}", found.map_or("none".to_owned(), |f| format!("{} {}", f.version, f.package.display())));
}

#[test]
fn a_flashinfer_on_pythonpath_hides_the_installed_one_and_is_not_mistaken_for_it() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path().canonicalize().unwrap();
    let site = venv(&root);
    fake_package(&site.join("flashinfer"));
    record(&site, "flashinfer_python", "0.6.3");
    let (tree, target) = (root.join("tree"), root.join("target"));
    fake_package(&tree.join("flashinfer"));
    write(tree.join("version.txt"), "0.6.12\n");
    fake_package(&target.join("flashinfer"));
    record(&target, "flashinfer_python", "0.6.4");
    let (venv, home) = (root.join("venv"), root.join("home"));
    let found = |pythonpath: &str| {
        let vars = [("FI_ARCH_HOME", home.as_os_str()), ("VIRTUAL_ENV", venv.as_os_str()), ("PYTHONPATH", pythonpath.as_ref())];
        in_child("survey::child_flashinfer", &vars)
    };
    assert_eq!(found(""), format!("0.6.3 {}", site.join("flashinfer").display()));
    assert_eq!(found(&format!("/nonexistent:{}", tree.display())), format!("0.6.12 {}", tree.join("flashinfer").display()));
    let both = format!("{}:{}", target.display(), tree.display());
    assert_eq!(found(&both), format!("0.6.4 {}", target.join("flashinfer").display()));
    // The record of the installed one says nothing of a tree that states no version.
    fs::remove_file(tree.join("version.txt")).unwrap();
    assert_eq!(found(tree.to_str().unwrap()), format!("unknown {}", tree.join("flashinfer").display()));
}

#[test]
fn child_environment() {
    if !is_child() {
        return;
    }
    let memo = fi_arch::memo::Memo::load(&fi_arch::env::home().unwrap());
    match survey::environment(None, &memo) {
        Ok(Some(found)) => println!("RESULT {}|{}|{:?}", found.origin, found.prefix.display(), found.site_packages),
        Ok(None) => println!("RESULT none"),
        Err(error) => println!("RESULT exit {}", error.exit() as u8),
    }
    memo.save();
}

fn environment_in_child(home: &Path, vars: &[(&str, &Path)]) -> String {
    let mut all = vec![("FI_ARCH_HOME", home.as_os_str())];
    all.extend(vars.iter().map(|(name, value)| (*name, value.as_os_str())));
    in_child("survey::child_environment", &all)
}

#[test]
fn the_active_environment_goes_before_python_on_path_and_a_stale_one_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path().canonicalize().unwrap();
    venv(&root);
    let (venv, home) = (root.join("venv"), root.join("home"));
    let conda = root.join("conda");
    fs::create_dir_all(conda.join("lib/python3.13/site-packages")).unwrap();
    let both = environment_in_child(&home, &[("VIRTUAL_ENV", &venv), ("CONDA_PREFIX", &conda)]);
    assert!(both.starts_with(&format!("VIRTUAL_ENV|{}|", venv.display())), "{both}");
    let conda_alone = environment_in_child(&home, &[("CONDA_PREFIX", &conda)]);
    assert!(conda_alone.starts_with(&format!("CONDA_PREFIX|{}|", conda.display())), "{conda_alone}");
    assert_eq!(environment_in_child(&home, &[("CONDA_PREFIX", &root.join("no-python"))]), "none");
    assert_eq!(environment_in_child(&home, &[("VIRTUAL_ENV", &root.join("gone"))]), "exit 3");
}

#[test]
fn a_shim_is_asked_once_and_again_when_the_version_it_stands_for_changes() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path().canonicalize().unwrap();
    for version in ["3.11", "3.12"] {
        let prefix = root.join(version);
        fs::create_dir_all(prefix.join(format!("lib/python{version}/site-packages"))).unwrap();
        write(prefix.join(format!("lib/python{version}/os.py")), "");
        write(prefix.join(format!("bin/python{version}")), "\x7fELF");
    }
    // A shim that counts how often it is run, and answers for the version that PYENV_VERSION names.
    let shim = root.join("shims/python3");
    write(
        shim.clone(),
        &format!(
            "#!/bin/sh\necho run >> {0}/runs\necho \"{{\\\"executable\\\": \\\"{0}/$PYENV_VERSION/bin/python$PYENV_VERSION\\\", \\\"prefix\\\": \\\"\\\", \\\"sites\\\": []}}\"\n",
            root.display()
        ),
    );
    fs::set_permissions(&shim, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    // A file younger than two seconds is not remembered.
    std::thread::sleep(std::time::Duration::from_millis(2200));
    let ask = |version: &str| {
        let vars = [("PATH", shim.parent().unwrap()), ("PYENV_VERSION", Path::new(version))];
        environment_in_child(&root.join("home"), &vars)
    };
    let runs = || fs::read_to_string(root.join("runs")).unwrap().lines().count();
    for _ in 0..3 {
        assert!(ask("3.11").starts_with(&format!("python3 on PATH|{}/3.11|", root.display())));
    }
    assert_eq!(runs(), 1);
    assert!(ask("3.12").contains("/3.12|"));
    assert_eq!(runs(), 2);
}
