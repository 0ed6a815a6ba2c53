//! A bundle whose artifact is a small shared object with real code, for the real sources of a FlashInfer: what `install` takes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use fi_arch::cubin;
use fi_arch::digest::Digest;
use fi_arch::judge::{self, Expectation, Owner};
use fi_arch::overlay::{self, Options};
use fi_arch::store::{Bundle, Fields, FileRecord, Inputs, Manifest, OverlayFile, VerdictRecord};
use fi_arch::tables::Tables;
use fi_arch::target::{Suffix, Target};

use super::toolkit::{cuda_13_0, nvcc};

/// A kernel that waits and triggers as trtllm_comm's do, and a function of tvm-ffi that it calls.
const SOURCE: &str = r#"
extern "C" int TVMFFIProbe(void);
__global__ void marked(int* p) {
  asm volatile("griddepcontrol.wait;");
  p[threadIdx.x] = 1;
  asm volatile("griddepcontrol.launch_dependents;");
}
extern "C" int __tvm_ffi_probe(int* p) {
  marked<<<1, 32>>>(p);
  return TVMFFIProbe();
}
"#;

/// Compiles the artifact for `arch` (`120f`) into the folder `dir`.
pub fn artifact(dir: &Path, arch: &str) -> PathBuf {
    fs::write(dir.join("probe.cu"), SOURCE).unwrap();
    let name = format!("trtllm_comm_{arch}.so");
    let lib = cuda_13_0().join("lib");
    let code = format!("-gencode=arch=compute_{arch},code=sm_{arch}");
    let runtime = ["-Xlinker", "-l:libcudart.so.13", "-Xcompiler", "-fPIC"];
    nvcc(
        dir,
        &[&["-shared", "-cudart", "none", &code, "probe.cu", "-o", &name, "-L", lib.to_str().unwrap()][..], &runtime].concat(),
    );
    dir.join(name)
}

/// A bundle with `artifact` for `sm_120f` and the FlashInfer in `package`.
pub fn bundle(artifact: &Path, package: &Path, version: &str, to: &Path) {
    let module = Tables::load().module("trtllm_comm").unwrap();
    let overlay = overlay::compute(package, module, version, &Options { serve: true, ..Options::default() }).unwrap();
    let bytes = fs::read(artifact).unwrap();
    let inventory = cubin::read_bytes(&bytes).unwrap();
    let linkage = cubin::linkage(artifact).unwrap();
    let cudart = Owner { name: "libcudart.so.13".to_owned(), exports: linkage.undefined.clone() };
    let target = Target { sm: 120, suffix: Suffix::F };
    let expected = Expectation {
        target,
        exports: &BTreeSet::new(),
        marks_required: true,
        launched_plainly: &[],
        cudart: Some(&cudart),
        owners: &[],
    };
    let verdict = judge::judge(&inventory, &expected);
    let faults: Vec<_> = verdict.faults.iter().filter(|fault| fault.code != "no-owner").collect();
    assert!(faults.is_empty(), "{faults:?}");

    let nvcc = "a compiler of tests";
    let mut request = Fields::new("test 1");
    request.text("module", &module.name).text("target", &target.to_string()).text("nvcc", nvcc);
    let data: Vec<_> = overlay.files.iter().filter(|file| file.data_path().is_some()).collect();
    for file in &data {
        request.digest(&format!("overlay {}", file.data_path().unwrap()), Digest::of(&file.post));
    }
    let inputs = Inputs { request, files: Vec::new() };
    let text = inputs.to_text();
    let record =
        |file: &str, bytes: &[u8]| FileRecord { file: file.to_owned(), sha256: Digest::of(bytes), bytes: bytes.len() as u64 };
    let manifest = Manifest {
        format: fi_arch::store::MANIFEST_FORMAT,
        key: inputs.key(),
        request: inputs.request.key(),
        module: module.name.clone(),
        target: target.to_string(),
        run_on: None,
        flashinfer: version.to_owned(),
        tvm_ffi: "0.1.15.post2".to_owned(),
        artifact: record("trtllm_comm.so", &bytes),
        nvcc: nvcc.to_owned(),
        host_compiler: "a compiler of tests".to_owned(),
        flags: Vec::new(),
        units: None,
        edits: Vec::new(),
        verdict: VerdictRecord {
            verdict: "pass".to_owned(),
            kernels: verdict.kernels,
            hollow: verdict.hollow,
            with_dependency_marks: verdict.with_dependency_marks,
            need_no_marks: verdict.need_no_marks,
            needed: linkage.needed.clone(),
            exports: vec!["__tvm_ffi_probe".to_owned()],
            glibc_floor: linkage.glibc_floor.clone(),
            libstdcxx_floor: linkage.libstdcxx_floor.clone(),
        },
        inputs: Some(record("inputs.json", text.as_bytes())),
        cudart: "shared".to_owned(),
        min_driver: Some("580".to_owned()),
        created: "2026-01-01T00:00:00Z".to_owned(),
        fi_arch: env!("CARGO_PKG_VERSION").to_owned(),
        elapsed_s: 1.0,
        test_only: false,
    };
    let files = data.iter().map(|file| OverlayFile {
        path: file.path.clone(),
        pre: file.pre,
        post: file.post.clone(),
        edits: file.edits.clone(),
    });
    let bundle = Bundle {
        flashinfer: version.to_owned(),
        manifest,
        inputs,
        overlay: files.collect(),
        artifact: bytes,
        tables: Vec::new(),
        notice: "made by a test".to_owned(),
    };
    bundle.write(to).unwrap();
}
