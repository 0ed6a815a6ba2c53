//! Who will load the artifact decides its CUDA runtime: fakes of environments and older toolkits, the real CUDA 13 for what is
//! compiled. The small module `vllm_comm` stands for all.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use fi_arch::build::consumer::Consumer;
use fi_arch::cubin;
use fi_arch::memo::Memo;
use fi_arch::survey;
use serde_json::Value;

use crate::support::sandbox::Sandbox;
use crate::support::toolkit::cuda_13_0;
use crate::toolchain::fake_toolkit;

const SMALL: &[&str] = &["--module", "vllm_comm", "--sm", "120", "--flashinfer", "0.6.4"];

/// A shared library called `soname` that exports the functions `exports`.
fn library(file: &Path, soname: &str, exports: &[&str]) {
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    let source = file.with_extension("c.txt");
    fs::write(&source, exports.iter().map(|name| format!("void {name}(void) {{}}\n")).collect::<String>()).unwrap();
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-nostdlib", "-x", "c"]).arg(&source).arg(format!("-Wl,-soname,{soname}"));
    assert!(command.arg("-o").arg(file).status().unwrap().success());
}

/// A virtual environment with a torch that states `version` and `cuda`; returns its site-packages too.
fn environment(sandbox: &Sandbox, name: &str, version: &str, cuda: &str) -> (PathBuf, PathBuf) {
    let (venv, site) = (sandbox.path(name), sandbox.path(name).join("lib/python3.11/site-packages"));
    fs::create_dir_all(site.join("torch")).unwrap();
    fs::write(venv.join("pyvenv.cfg"), "include-system-site-packages = false\n").unwrap();
    fs::write(site.join("torch/__init__.py"), "").unwrap();
    let text = format!("__version__ = '{version}'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n");
    fs::write(site.join("torch/version.py"), text).unwrap();
    (venv, site)
}

fn cu12(site: &Path) -> PathBuf {
    site.join("nvidia/cuda_runtime/lib/libcudart.so.12")
}

fn cu13(site: &Path) -> PathBuf {
    site.join("nvidia/cu13/lib/libcudart.so.13")
}

fn build(sandbox: &Sandbox, more: &[&str]) -> Value {
    sandbox.build(&[SMALL, more].concat())
}

fn consumer_of(dir: &Path) -> Option<Consumer> {
    let memo = Memo::default();
    let environment = survey::environment(Some(dir), &memo).unwrap().unwrap();
    Consumer::of(&environment, &memo).unwrap()
}

#[test]
fn a_torch_of_cuda_12_gets_an_artifact_that_no_libcudart_can_be_missing_for() {
    let sandbox = Sandbox::new();
    let (venv, site) = environment(&sandbox, "cu128", "2.9.1+cu128", "'12.8'");
    library(&cu12(&site), "libcudart.so.12", &[]);
    let built = build(&sandbox, &["--env", venv.to_str().unwrap()]);
    assert_eq!((&built["cudart"], &built["min_driver"]), (&"static".into(), &"580".into()));
    assert_eq!(built["consumer"], "torch 2.9.1+cu128");
    let artifact = PathBuf::from(built["artifact"].as_str().unwrap());
    let linkage = cubin::linkage(&artifact).unwrap();
    assert!(!linkage.needed.iter().any(|name| name.starts_with("libcudart")), "{:?}", linkage.needed);
    let of_runtime = |symbol: &&cubin::Symbol| symbol.name.trim_start_matches('_').starts_with("cuda");
    assert_eq!(linkage.undefined.iter().find(of_runtime), None);
    assert_eq!(linkage.exports.iter().find(of_runtime), None, "the runtime inside is nobody else's");
    let manifest: Value = serde_json::from_slice(&fs::read(artifact.parent().unwrap().join("manifest.json")).unwrap()).unwrap();
    assert_eq!((&manifest["cudart"], &manifest["min_driver"]), (&"static".into(), &"580".into()));

    // Named instead of found, it is the same consumer; people read what the loading machine must have.
    let args = [&["build"], SMALL, &["--for", "cuda==12.8"]].concat();
    let told = sandbox.run(&args).exits(0).stdout;
    assert!(told.contains("its CUDA runtime is linked in (static), driver 580 or newer"), "{told}");
    assert!(told.contains("from the store"), "{told}");
    let shown = sandbox.run(&["cache", "show", built["key"].as_str().unwrap()]).exits(0).stdout;
    assert!(shown.contains("linked in (static)"), "{shown}");
}

#[test]
fn a_runtime_that_lacks_a_function_is_found_out_before_the_artifact_is_handed_over() {
    let sandbox = Sandbox::new();
    // Nobody is known who will load it: the toolkit's own runtime is meant, which a torch of CUDA 13 has too.
    let bare = build(&sandbox, &[]);
    assert_eq!((&bare["cudart"], &bare["consumer"]), (&"shared".into(), &Value::Null));
    let named = build(&sandbox, &["--for", "torch==2.11.0+cu130"]);
    assert_eq!((&named["cache"], &named["key"]), (&"hit".into(), &bare["key"]));
    let (venv, site) = environment(&sandbox, "whole", "2.11.0+cu130", "'13.0'");
    fs::create_dir_all(cu13(&site).parent().unwrap()).unwrap();
    fs::copy(cuda_13_0().join("lib/libcudart.so.13"), cu13(&site)).unwrap();
    assert_eq!(build(&sandbox, &["--env", venv.to_str().unwrap()])["cache"], "hit");

    let (venv, site) = environment(&sandbox, "older", "2.11.0+cu130", "'13.0'");
    library(&cu13(&site), "libcudart.so.13", &["cudaMalloc"]);
    let ran = sandbox.run(&[&["build"], SMALL, &["--env", venv.to_str().unwrap()]].concat());
    ran.exits(5).says("it does not fit torch 2.11.0+cu130").says("no-owner").says("libcudart.so.13");
}

#[test]
fn of_two_runtimes_in_one_environment_the_one_that_torch_was_built_with_counts() {
    let sandbox = Sandbox::new();
    // A compiler from wheels brings CUDA 13 into an environment whose torch is of CUDA 12.
    let (venv, site) = environment(&sandbox, "both", "2.9.1", "'12.8'");
    library(&cu12(&site), "libcudart.so.12", &[]);
    library(&cu13(&site), "libcudart.so.13", &[]);
    assert_eq!(consumer_of(&venv).unwrap().cudart, Some(cu12(&site)));
    fs::remove_file(cu12(&site)).unwrap();
    let consumer = consumer_of(&venv).unwrap();
    assert_eq!((consumer.soname().as_str(), consumer.cudart), ("libcudart.so.12", None));
    // A file that bears the name of another runtime is not taken for it.
    fs::copy(cu13(&site), cu12(&site)).unwrap();
    assert_eq!(consumer_of(&venv).unwrap().cudart, None);

    // A conda prefix has it in its own lib.
    library(&venv.join("lib/libcudart.so.12.8.90"), "libcudart.so.12", &[]);
    assert_eq!(consumer_of(&venv).unwrap().cudart, Some(venv.join("lib/libcudart.so.12.8.90")));
}

#[test]
fn a_torch_without_cuda_is_nobody_who_loads_an_artifact() {
    let sandbox = Sandbox::new();
    let (venv, _) = environment(&sandbox, "cpu", "2.9.1+cpu", "None");
    assert_eq!(consumer_of(&venv), None);
    assert_eq!(consumer_of(&sandbox.path("venv")), None, "nor is an environment without torch");
}

#[test]
fn a_torch_whose_cuda_nobody_knows_is_asked_for_and_nothing_is_fetched() {
    let sandbox = Sandbox::bare();
    sandbox.run(&["build", "--sm", "120", "--for", "torch==99.0"]).exits(4).says("+cu128").says("--env DIR");
    sandbox.run(&["build", "--sm", "120", "--for", "jax==1.0"]).exits(2).says("hint:");
    assert!(!sandbox.home().join("wheels").exists());
}

/// A toolkit of CUDA 12.8 as far as a dry run looks.
fn cuda_12_8(sandbox: &Sandbox) -> PathBuf {
    let root = sandbox.path("cuda-12.8");
    fake_toolkit(&root, "12.8", 12080);
    fs::remove_file(root.join("lib64/libcudart.so")).unwrap();
    library(&root.join("lib64/libcudart.so"), "libcudart.so.12", &[]);
    root
}

fn dry_run(sandbox: &Sandbox, cuda_home: &Path, cuda_path: &Path, consumer: &str) -> Value {
    let args = [&["build", "--json", "--dry-run"], SMALL, &["--for", consumer]].concat();
    let mut command = sandbox.command(&args);
    command.env("CUDA_HOME", cuda_home).env("CUDA_PATH", cuda_path);
    crate::support::sandbox::Ran::of(&mut command).exits(0).json()
}

fn links(dry: &Value, word: &str) -> bool {
    let commands = dry["commands"].as_array().unwrap();
    commands.last().unwrap().as_array().unwrap().iter().any(|flag| flag == word)
}

#[test]
fn a_toolkit_with_the_consumers_runtime_goes_before_one_that_stands_earlier() {
    let sandbox = Sandbox::new();
    build(&sandbox, &["--dry-run"]);
    let (older, newer) = (cuda_12_8(&sandbox), cuda_13_0());
    let dry = dry_run(&sandbox, &newer, &older, "cu128");
    assert_eq!((&dry["cudart"], &dry["target"], &dry["min_driver"]), (&"shared".into(), &"sm_120a".into(), &"570.26".into()));
    assert!(links(&dry, "-l:libcudart.so"), "{dry}");
    let dry = dry_run(&sandbox, &older, &newer, "cu130");
    assert_eq!((&dry["cudart"], &dry["target"]), (&"shared".into(), &"sm_120f".into()));
    assert!(links(&dry, "-l:libcudart.so.13"), "{dry}");
    // Without one that has it, CUDA 13 is linked in; nothing says so but the command and the mode.
    let dry = dry_run(&sandbox, &newer, &newer, "cu128");
    assert_eq!((&dry["cudart"], &dry["min_driver"]), (&"static".into(), &"580".into()));
    assert!(links(&dry, "-l:libcudart_static.a") && links(&dry, "-Wl,--exclude-libs,libcudart_static.a"), "{dry}");
}

#[test]
fn a_toolkit_of_cuda_12_is_never_used_for_a_consumer_of_cuda_13() {
    let sandbox = Sandbox::new();
    build(&sandbox, &["--dry-run"]);
    let older = cuda_12_8(&sandbox);
    let dry = dry_run(&sandbox, &older, &older, "cu130");
    assert_eq!((&dry["cudart"], &dry["target"], &dry["min_driver"]), (&"shared".into(), &"sm_120f".into(), &"580".into()));
    let args = [&["build"], SMALL, &["--for", "cu130", "--toolkit", older.to_str().unwrap()]].concat();
    sandbox.run(&args).exits(3).says("its runtime is libcudart.so.12, and CUDA 13.0 has libcudart.so.13").says("hint:");
}
