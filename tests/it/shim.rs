//! The Python package in site-packages: its promises on fakes (`tests/shim`), and on the real files of FlashInfer.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fi_arch::activate::{FORMAT, FileState, Mode, OnMiss, PackageState, State, shim};
use fi_arch::digest::Digest;
use fi_arch::overlay::{self, Options};
use fi_arch::policy::Policy;
use fi_arch::store;
use fi_arch::tables::{Module, Tables};

use crate::support::wheels;

/// Runs the tests of one class of `tests/shim/test_shim.py`; all must pass, and there must be some.
fn python_tests(class: &str) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shim/test_shim.py");
    let output = Command::new("python3").arg(script).args(["-v", class]).output().expect("python3 starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let ran = said.lines().find_map(|line| line.strip_prefix("Ran ")?.split(' ').next()?.parse::<u32>().ok());
    assert!(ran.is_some_and(|ran| ran > 0), "no test ran:\n{said}");
}

#[test]
fn the_overlay_is_served_as_if_it_lay_there() {
    python_tests("Serving");
}

#[test]
fn all_of_the_set_is_served_or_none() {
    python_tests("OneSet");
}

#[test]
fn a_fault_of_the_shim_never_breaks_an_interpreter() {
    python_tests("Faults");
}

#[test]
fn the_switches_disable_and_require() {
    python_tests("Switches");
}

#[test]
fn the_generator_hands_out_the_artifact_or_one_clear_error() {
    python_tests("Generator");
}

#[test]
fn a_missing_artifact_is_built_where_that_was_asked_for() {
    python_tests("OnMiss");
}

#[test]
fn the_policy_is_answered_where_all_is_in_force() {
    python_tests("Limits");
}

#[test]
fn a_run_lets_the_next_sitecustomize_run() {
    python_tests("Run");
}

#[test]
fn the_report_says_what_this_interpreter_would_do() {
    python_tests("Report");
}

#[test]
fn every_python_file_of_the_shim_is_carried_in_the_program() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/activate/shim");
    let mut files: Vec<String> =
        fs::read_dir(dir).unwrap().map(|item| item.unwrap().file_name().into_string().unwrap()).collect();
    files.retain(|name| name.ends_with(".py") && name != shim::SITECUSTOMIZE_FILE);
    files.sort();
    assert_eq!(files, shim::FILES.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>());
    assert_eq!(shim::PTH.lines().count(), 1, "Python takes each line of a .pth by itself");
    assert_eq!(Path::new(shim::PTH_FILE).file_stem(), Path::new(shim::START_FILE).file_stem());
}

/// What FlashInfer's `jit/comm.py` imports, of its own package and of others, in a few lines.
const STUBS: &[(&str, &str)] = &[
    ("flashinfer/__init__.py", ""),
    ("flashinfer/jit/__init__.py", ""),
    ("flashinfer/jit/utils.py", "def write_if_different(path, text): raise AssertionError\n"),
    ("jinja2/__init__.py", ""),
    ("tvm_ffi/__init__.py", "def load_module(path):\n    return 'loaded ' + open(path).read()\n"),
    (
        "flashinfer/jit/env.py",
        "import pathlib\nFLASHINFER_CSRC_DIR = pathlib.Path(__file__).resolve().parents[1] / 'data' / 'csrc'\n",
    ),
    (
        "flashinfer/jit/core.py",
        r#"
import os
class Context:
    TARGET_CUDA_ARCHS = {tuple(word.split(".")) for word in os.environ["FLASHINFER_CUDA_ARCH_LIST"].split()}
    TARGET_CUDA_ARCHS = {(int(major), minor) for major, minor in TARGET_CUDA_ARCHS}
    def get_nvcc_flags_list(self, supported_major_versions):
        flags = ["-gencode=arch=compute_%d%s" % arch for arch in self.TARGET_CUDA_ARCHS if arch[0] in supported_major_versions]
        if not flags:
            raise RuntimeError("No supported CUDA architectures found for major versions %s." % supported_major_versions)
        return flags
current_compilation_context = Context()
class JitSpec:
    def build_and_load(self):
        return "compiled"
def gen_jit_spec(name, sources, extra_cuda_cflags=None, **others):
    spec = JitSpec()
    spec.name, spec.sources, spec.extra_cuda_cflags, spec.extra_include_dirs = name, sources, extra_cuda_cflags, None
    return spec
"#,
    ),
];

/// A folder like a site-packages with the module's own files of a FlashInfer release, stubs around them, and our package as a
/// program writes it.
fn activated(version: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let put = |path: &str, bytes: &[u8]| {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    let module = trtllm_comm();
    let wheel = wheels::unpacked("flashinfer-python", version);
    for path in &module.files {
        put(path, &fs::read(wheel.join(path)).unwrap());
    }
    for source in ["trtllm_allreduce_fusion.cu", "trtllm_moe_allreduce_fusion.cu"] {
        put(&format!("flashinfer/data/csrc/{source}"), b"");
    }
    STUBS.iter().for_each(|(path, text)| put(path, text.as_bytes()));

    let options = Options { serve: true, ..Options::default() };
    let overlay = overlay::compute(&wheel.join("flashinfer"), module, version, &options).unwrap();
    let mut files = BTreeMap::new();
    for file in &overlay.files {
        if file.pre.is_some() {
            put(&file.path, &file.original);
        }
        put(&format!("fi_arch_shim/overlay/{}", file.path), &file.post);
        let module = file.path.strip_suffix(".py").map(|stem| stem.replace('/', "."));
        let (pre, post) = (file.pre, Digest::of(&file.post));
        files.insert(file.path.clone(), FileState { path: file.path.clone(), module, pre, post, edits: file.edits.clone() });
    }
    shim::FILES.iter().for_each(|(name, text)| put(&format!("fi_arch_shim/{name}"), text.as_bytes()));
    put("fi_arch_shim/artifact/sm_120f/trtllm_comm.so", b"the artifact");
    let artifact = serde_json::json!({
        "module": "trtllm_comm", "target": "sm_120f", "runs_on": [[12, 0], [12, 1]],
        "file": "artifact/sm_120f/trtllm_comm.so", "sha256": Digest::of(b"the artifact"), "bytes": 12,
        "key": "k", "cudart": "static", "tvm_ffi": "0.1",
    });
    let state = State {
        format: FORMAT,
        // Any text must be read alike by both sides.
        fi_arch: "0.1 \u{7f} µ \u{1f} \"\\/ 漢 \u{1f600}\n".to_owned(),
        created: store::timestamp(),
        mode: Mode::Run,
        on_miss: OnMiss::Error,
        packages: vec![PackageState {
            name: "flashinfer".to_owned(),
            distribution: "flashinfer-python".to_owned(),
            version: version.to_owned(),
            files: files.into_values().collect(),
            edits: Vec::new(),
        }],
        artifacts: vec![serde_json::from_value(artifact).unwrap()],
        policy: Policy::default(),
    };
    put("fi_arch_shim/state.json", store::seal_manifest(serde_json::to_value(&state).unwrap()).as_bytes());
    put(shim::SITECUSTOMIZE_FILE, shim::SITECUSTOMIZE.as_bytes());
    dir
}

fn trtllm_comm() -> &'static Module {
    Tables::load().module("trtllm_comm").unwrap()
}

fn python(site: &Path, code: &str, env: &[(&str, &str)]) -> Output {
    let mut command = Command::new("python3");
    command.arg("-c").arg(code).env("PYTHONPATH", site).env_remove("FI_ARCH_DISABLE").env_remove("FI_ARCH_REQUIRE");
    command.envs(env.iter().copied()).output().expect("python3 starts")
}

/// What code that must end well and say nothing has printed.
#[track_caller]
fn printed(site: &Path, code: &str, env: &[(&str, &str)]) -> String {
    let output = python(site, code, env);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.is_empty(), "{said}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

const LOAD: &str = "
from flashinfer.jit.comm import gen_trtllm_comm_module as generator
try:
    spec = generator()
    print(spec.name, spec.build_and_load())
    print(*spec.sources, *spec.extra_include_dirs or [], sep='\\n')
except RuntimeError as error:
    print(error)
";

const RELEASES: [&str; 3] = ["0.5.3", "0.6.3", "0.6.16.post4"];

#[test]
fn the_real_generator_loads_the_artifact_for_sm_120() {
    for version in RELEASES {
        let site = activated(version);
        let env = ("FLASHINFER_CUDA_ARCH_LIST", "12.0f");
        let before = printed(site.path(), LOAD, &[env, ("FI_ARCH_DISABLE", "1")]);
        assert_eq!(before, "No supported CUDA architectures found for major versions [9, 10].", "{version}");
        let after = printed(site.path(), LOAD, &[env]);
        assert!(after.starts_with("trtllm_comm loaded the artifact\n"), "{version}: {after}");
    }
}

#[test]
fn the_real_generator_compiles_the_repaired_sources_for_sm_90() {
    for version in RELEASES {
        let site = activated(version);
        let said = printed(site.path(), LOAD, &[("FLASHINFER_CUDA_ARCH_LIST", "9.0a")]);
        let mut lines = said.lines();
        let first = lines.next().unwrap();
        assert!(first.starts_with("trtllm_comm_fi_arch_") && first.ends_with(" compiled"), "{version}: {said}");
        let real = site.path().canonicalize().unwrap();
        let paths: Vec<PathBuf> = lines.map(|line| Path::new(line).strip_prefix(&real).unwrap().to_owned()).collect();
        let expected = [
            "fi_arch_shim/overlay/flashinfer/data/csrc/trtllm_allreduce.cu",
            "flashinfer/data/csrc/trtllm_allreduce_fusion.cu",
            "flashinfer/data/csrc/trtllm_moe_allreduce_fusion.cu",
            "fi_arch_shim/overlay/flashinfer/data/include",
            "flashinfer/data/include/flashinfer/comm",
        ];
        assert_eq!(paths, expected.map(PathBuf::from), "{version}");
        assert!(paths.iter().all(|path| real.join(path).exists()), "{version}");
    }
}

#[test]
fn the_state_is_read_alike_by_the_program_and_by_python() {
    let site = activated("0.6.3");
    let ask = "from fi_arch_shim import _overlay as o; print(o.judged().ok, ascii(o.judged().state['fi_arch']))";
    assert_eq!(printed(site.path(), ask, &[]), r#"True '0.1 \x7f \xb5 \x1f "\\/ \u6f22 \U0001f600\n'"#);
    let path = site.path().join("fi_arch_shim/state.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("0.6.3", "0.6.4", 1)).unwrap();
    let output = python(site.path(), LOAD, &[("FLASHINFER_CUDA_ARCH_LIST", "12.0f")]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("its checksum differs") && said.lines().count() == 1, "{said}");
}
