//! The judge on real products of nvcc: each way in which an artifact can be wrong is found, and a right one passes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use fi_arch::cubin;
use fi_arch::judge::{Expectation, Owner, Verdict, judge};
use fi_arch::target::{Suffix, Target};
use tempfile::TempDir;

use crate::support::toolkit;

const RIGHT: &str = r#"
__global__ void marked(float* out) {
  asm volatile("griddepcontrol.wait;");
  out[threadIdx.x] = 1.f;
  asm volatile("griddepcontrol.launch_dependents;");
}
__global__ void initialize(float* out) { out[threadIdx.x] = 0.f; }
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_run(float* out) {
  initialize<<<1, 32>>>(out);
  marked<<<1, 32>>>(out);
  return cudaGetLastError();
}
"#;

struct Product {
    dir: TempDir,
}

impl Product {
    /// Compiles `source` into a shared object with the code that `gencode` names.
    fn new(source: &str, gencode: &[&str]) -> Self {
        let product = Self { dir: tempfile::tempdir().unwrap() };
        fs::write(product.path("a.cu"), source).unwrap();
        let args = ["-std=c++17", "-O3", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC", "-o", "a.so", "a.cu"];
        let runtime = cudart();
        let link = ["-Xlinker", runtime.to_str().unwrap()];
        toolkit::nvcc(product.dir.path(), &[&args[..], gencode, &link[..]].concat());
        product
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn judge(&self, change: impl FnOnce(&mut Expectation)) -> Verdict {
        self.judge_beside(&own(&cudart()), change)
    }

    /// Like [`Product::judge`], where `cudart` is the runtime of the process that will load it.
    fn judge_beside(&self, cudart: &Owner, change: impl FnOnce(&mut Expectation)) -> Verdict {
        let exports = BTreeSet::from(["__tvm_ffi_run".to_owned()]);
        let owners = owners();
        let plainly = ["initialize".to_owned()];
        let mut expectation = Expectation {
            target: Target { sm: 120, suffix: Suffix::F },
            exports: &exports,
            marks_required: true,
            launched_plainly: &plainly,
            owners: &owners,
            cudart: Some(cudart),
        };
        change(&mut expectation);
        judge(&cubin::read(&self.path("a.so")).unwrap(), &expectation)
    }
}

fn cudart() -> PathBuf {
    toolkit::cuda_13_0().join("lib/libcudart.so.13")
}

fn own(path: &Path) -> Owner {
    let linkage = cubin::linkage(path).unwrap();
    Owner { name: linkage.soname.clone().unwrap(), exports: linkage.exports }
}

fn owners() -> Vec<Owner> {
    let host = ["libc.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6"].map(|name| {
        let output = std::process::Command::new("c++").arg(format!("-print-file-name={name}")).output().unwrap();
        PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
    });
    host.iter().map(|path| own(path)).collect()
}

const SM_120F: &[&str] = &["-gencode=arch=compute_120f,code=sm_120f"];

fn codes(verdict: &Verdict) -> Vec<&str> {
    verdict.faults.iter().map(|fault| fault.code).collect()
}

#[test]
fn a_right_artifact_passes_and_its_figures_are_those_of_the_source() {
    let verdict = Product::new(RIGHT, SM_120F).judge(|_| ());
    assert_eq!(codes(&verdict), [""; 0], "{verdict:?}");
    assert_eq!((verdict.kernels, verdict.hollow, verdict.with_dependency_marks, verdict.need_no_marks), (2, 0, 1, 1));
    assert!(verdict.passed());
}

#[test]
fn a_kernel_that_the_preprocessor_emptied_is_found_and_named() {
    let source = RIGHT.replace("out[threadIdx.x] = 1.f;", "if (threadIdx.x == 99) __syncthreads();");
    let verdict = Product::new(&source, SM_120F).judge(|_| ());
    assert_eq!(codes(&verdict), ["hollow-kernel"]);
    assert!(verdict.faults[0].names[0].contains("marked"), "{verdict:?}");
}

#[test]
fn a_lost_wait_or_trigger_is_found_unless_the_kernel_is_launched_plainly() {
    for mark in ["wait", "launch_dependents"] {
        let source = RIGHT.replace(&format!("asm volatile(\"griddepcontrol.{mark};\");"), "");
        let product = Product::new(&source, SM_120F);
        assert_eq!(codes(&product.judge(|_| ())), ["missing-marks"], "{mark}");
        assert_eq!(codes(&product.judge(|e| e.marks_required = false)), [""; 0]);
    }
    let verdict = Product::new(RIGHT, SM_120F).judge(|e| e.launched_plainly = &[]);
    assert_eq!(codes(&verdict), ["missing-marks"]);
}

#[test]
fn code_for_another_target_or_ptx_beside_the_right_code_is_refused() {
    let other = Product::new(RIGHT, &["-gencode=arch=compute_90a,code=sm_90a"]).judge(|_| ());
    assert_eq!(codes(&other)[..2], ["wrong-target", "no-code"], "{other:?}");
    // cuobjdump and the driver call both sm_120: the suffix is in the fat binary alone.
    let suffix = Product::new(RIGHT, &["-gencode=arch=compute_120a,code=sm_120a"]).judge(|_| ());
    assert!(codes(&suffix).contains(&"wrong-target"), "{suffix:?}");
    let both = Product::new(RIGHT, &[SM_120F[0], "-gencode=arch=compute_90a,code=sm_90a"]).judge(|_| ());
    assert_eq!(codes(&both), ["wrong-target"]);
    let ptx = Product::new(RIGHT, &["-gencode=arch=compute_120f,code=[sm_120f,compute_120f]"]).judge(|_| ());
    assert_eq!(codes(&ptx), ["ptx"]);
}

#[test]
fn a_function_that_is_not_exported_is_found() {
    let exports = BTreeSet::from(["__tvm_ffi_run".to_owned(), "__tvm_ffi_other".to_owned()]);
    let product = Product::new(RIGHT, SM_120F);
    let inventory = cubin::read(&product.path("a.so")).unwrap();
    let (owners, cudart) = (owners(), own(&cudart()));
    let plainly = ["initialize".to_owned()];
    let target = Target { sm: 120, suffix: Suffix::F };
    let expectation = Expectation {
        target,
        exports: &exports,
        marks_required: true,
        launched_plainly: &plainly,
        owners: &owners,
        cudart: Some(&cudart),
    };
    let verdict = judge(&inventory, &expectation);
    assert_eq!(codes(&verdict), ["missing-export"]);
    assert_eq!(verdict.faults[0].names, ["__tvm_ffi_other"]);
}

#[test]
fn an_undefined_symbol_without_an_owner_is_found() {
    let source = RIGHT.replace("return cudaGetLastError();", "extern int nobody(); return nobody() + cudaGetLastError();");
    let verdict = Product::new(&source, SM_120F).judge(|_| ());
    assert_eq!(codes(&verdict), ["no-owner"]);
    assert!(verdict.faults[0].names[0].contains("nobody"));
    let none = Owner { name: "libcudart.so.13".to_owned(), exports: Vec::new() };
    let verdict = Product::new(RIGHT, SM_120F).judge_beside(&none, |_| ());
    assert_eq!(codes(&verdict), ["no-owner"], "the runtime's own functions need an owner too");
    let other = Owner { name: "libcudart.so.12".to_owned(), exports: own(&cudart()).exports };
    let verdict = Product::new(RIGHT, SM_120F).judge_beside(&other, |_| ());
    assert_eq!(codes(&verdict), ["wrong-runtime"]);
}

#[test]
fn a_registered_kernel_whose_code_was_cut_out_is_found() {
    let product = Product::new(RIGHT, SM_120F);
    let bytes = fs::read(product.path("a.so")).unwrap();
    // The name stands in the host's symbols, in what it registers, and in the image: renamed in one of them at a time, as in an
    // object that was half replaced.
    let name = b"_Z6markedPf\0";
    let places: Vec<usize> = (0..bytes.len() - name.len()).filter(|&at| bytes[at..].starts_with(name)).collect();
    assert!(!places.is_empty(), "the host code holds the kernel's name");
    let mut lost = Vec::new();
    for at in places {
        let mut renamed = bytes.clone();
        renamed[at + 3] = b'M';
        fs::write(product.path("a.so"), renamed).unwrap();
        let verdict = product.judge(|_| ());
        let missing = verdict.faults.iter().filter(|fault| fault.code == "missing-kernel");
        lost.extend(missing.flat_map(|fault| fault.names.clone()));
    }
    // Renamed where it is registered, the new name has no code; renamed in the image, the old one has none.
    for name in ["_Z6MarkedPf", "_Z6markedPf"] {
        assert!(lost.iter().any(|lost| lost == name), "{name}: {lost:?}");
    }
}
