//! `build --run-on`: the target's code, assembled for another GPU, for tests alone. Real nvcc, the small module.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use fi_arch::cubin;
use serde_json::Value;

use crate::support::sandbox::{Ran, SMALL, Sandbox};
use crate::support::toolkit;

const ON_HOPPER: &[&str] = &["--run-on", "90", "--offline"];

fn on_hopper<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [SMALL, ON_HOPPER, more].concat()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The targets of all images of a file, each with what it is.
fn images(file: &Path) -> Vec<String> {
    cubin::read(file).unwrap().images.iter().map(|image| format!("{} {}", image.target, image.kind)).collect()
}

#[test]
fn code_for_another_gpu_is_marked_and_answers_no_other_build() {
    let sandbox = Sandbox::with_small_build();
    let plain = sandbox.build(&[SMALL, &["--offline"]].concat());
    assert_eq!((&plain["cache"], &plain["run_on"], &plain["test_only"]), (&"hit".into(), &Value::Null, &false.into()));

    let built = sandbox.build(&on_hopper(&[]));
    assert_eq!((&built["cache"], &built["verdict"]), (&"miss".into(), &"pass".into()));
    assert_eq!(
        (&built["target"], &built["run_on"], &built["test_only"]),
        (&"sm_120f".into(), &"sm_90a".into(), &true.into()),
        "the target is what nvcc compiled for"
    );
    assert_ne!(built["key"], plain["key"]);
    let artifact = Path::new(built["artifact"].as_str().unwrap());
    assert_eq!(images(artifact), ["sm_90a sass"]);
    assert_eq!(built["kernels"], plain["kernels"]);
    let manifest: Value = serde_json::from_slice(&fs::read(artifact.with_file_name("manifest.json")).unwrap()).unwrap();
    assert_eq!((&manifest["test_only"], &manifest["run_on"]), (&true.into(), &"sm_90a".into()));
    assert_eq!(manifest["flags"], plain_flags(&plain), "nvcc is called as for the target");

    assert_eq!(sandbox.build(&on_hopper(&[]))["cache"], "hit");
    let again = sandbox.build(&[SMALL, &["--offline"]].concat());
    assert_eq!((&again["cache"], &again["key"]), (&"hit".into(), &plain["key"]));
    let hopper = ["--sm", "90", "--module", "vllm_comm", "--flashinfer", "0.6.4", "--offline", "--dry-run"];
    assert_eq!(sandbox.build(&hopper)["cache"], "miss");

    let listed = sandbox.run(&["cache", "ls"]).exits(0).stdout;
    assert!(listed.contains("sm_120f on sm_90a") && listed.contains("(test only)"), "{listed}");
    sandbox.run(&["cache", "verify"]).exits(0);
}

fn plain_flags(plain: &Value) -> Value {
    let manifest = Path::new(plain["artifact"].as_str().unwrap()).with_file_name("manifest.json");
    serde_json::from_slice::<Value>(&fs::read(manifest).unwrap()).unwrap()["flags"].clone()
}

#[test]
fn it_does_not_leave_the_machine() {
    let sandbox = Sandbox::new();
    let bundle = sandbox.path("a.fia");
    let args = on_hopper(&["--export", text(&bundle)]);
    sandbox.run(&[&["build"], &args[..]].concat()).exits(2).says("--export");
    assert!(!bundle.exists());
    assert!(!sandbox.home().join("store").exists());
}

#[test]
fn a_file_is_written_past_the_store() {
    let sandbox = Sandbox::with_small_build();
    let file = sandbox.path("small.so");
    let built = sandbox.build(&on_hopper(&["--output", text(&file)]));
    assert_eq!((&built["verdict"], &built["test_only"], &built["run_on"]), (&"pass".into(), &true.into(), &"sm_90a".into()));
    assert_eq!(
        (&built["key"], &built["left_out"], &built["faults"]),
        (&Value::Null, &Value::Array(vec![]), &Value::Array(vec![]))
    );
    assert_eq!(images(&file), ["sm_90a sass"]);
    assert_eq!((sandbox.artifacts(), sandbox.staged()), (1, vec![]), "the plain one alone is in the store");
}

#[test]
fn what_makes_no_sense_is_said_before_anything_is_compiled() {
    let sandbox = Sandbox::with_small_build();
    let build = |args: &[&str]| sandbox.run(&[&["build"], args].concat());
    let file = sandbox.path("a.so");
    let output = ["--output", text(&file)];

    build(&[SMALL, &output].concat()).exits(2).says("--run-on");
    build(&on_hopper(&["--only", "gate"])).exits(2).says("--output");
    build(&["--run-on", "90"]).exits(2).says("--sm");
    build(&[SMALL, &["--run-on", "90 120"]].concat()).exits(2).says("one GPU");
    build(&[&["--sm", "120 121", "--run-on", "90"], &output[..]].concat()).exits(2).says("one artifact");
    let trtllm = ["--sm", "120", "--run-on", "90", "--flashinfer", "0.6.4", "--offline"];
    let unknown = [&trtllm[..], &["--only", "gate,hollow"], &output].concat();
    build(&unknown).exits(2).says("no defect `hollow`").says("hollow-kernels");

    // What a GPU lacks is known of Hopper alone, and there is nothing to move onto the target itself.
    build(&[SMALL, &["--run-on", "100", "--dry-run"]].concat()).exits(4).says("cannot be made to run on sm_100a");
    build(&["--sm", "90", "--run-on", "90", "--dry-run", "--module", "vllm_comm", "--flashinfer", "0.6.4"]).exits(4);
    assert!(!file.exists());
    assert_eq!(sandbox.artifacts(), 1);
}

#[test]
fn a_toolkit_whose_nvcc_is_a_script_is_refused() {
    let sandbox = Sandbox::new();
    let (real, own) = (toolkit::cuda_13_0(), sandbox.path("toolkit"));
    fs::create_dir_all(own.join("bin")).unwrap();
    let link_all = |from: &Path, to: &Path, but: &str| {
        for entry in fs::read_dir(from).unwrap().flatten().filter(|entry| entry.file_name() != but) {
            symlink(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    link_all(&real, &own, "bin");
    link_all(&real.join("bin"), &own.join("bin"), "nvcc");
    let nvcc = own.join("bin/nvcc");
    fs::write(&nvcc, format!("#!/bin/sh\nexec '{}' \"$@\"\n", real.join("bin/nvcc").display())).unwrap();
    fs::set_permissions(&nvcc, fs::Permissions::from_mode(0o755)).unwrap();
    let args = [&["build", "--dry-run", "--toolkit", text(&own)], SMALL, &["--run-on", "90"]].concat();
    sandbox.run(&args).exits(3).says("is no program but a script");
    let plain = [&["build", "--dry-run", "--toolkit", text(&own)], SMALL].concat();
    sandbox.run(&plain).exits(0);
}

/// The conversions of FlashInfer and of CUDA's own header, in the forms in which they come out of nvcc.
const FP4: &str = r#"
#include <cuda_fp4.h>
__global__ void fp4(unsigned* out, const float* in, unsigned char* storage) {
  unsigned four, one;
  asm volatile("{\n.reg .b8 byte0;\n.reg .b8 byte1;\n"
               "cvt.rn.satfinite.e2m1x2.f32   byte0, %2, %1;\n"
               "cvt.rn.satfinite.e2m1x2.f32   byte1, %4, %3;\n"
               "mov.b32 %0, {byte0, byte1, byte1, byte0};\n}"
               : "=r"(four) : "f"(in[0]), "f"(in[1]), "f"(in[2]), "f"(in[3]));
  asm volatile("{.reg .b8 x; cvt.rn.satfinite.e2m1x2.f32 x, %1, 0f3FC00000; mov.b32 %0, {x, 0, 0, 0};}" : "=r"(one) : "f"(in[4]));
  out[0] = four;
  out[1] = one;
  storage[0] = __nv_cvt_float2_to_fp4x2(make_float2(in[5], in[6]), __NV_E2M1, cudaRoundNearest);
}
"#;

#[test]
fn ptxas_assembles_the_replaced_conversion_for_hopper() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("a.cu"), FP4).unwrap();
    toolkit::nvcc(sandbox.path("").as_path(), &["-arch=compute_120f", "-ptx", "-o", "a.ptx", "a.cu"]);
    let before = fs::read_to_string(sandbox.path("a.ptx")).unwrap();
    assert_eq!(before.matches("cvt.rn.satfinite.e2m1x2.f32").count(), 4);

    let program = toolkit::cuda_13_0().join("bin/ptxas");
    let alone = Command::new(&program).args(["-arch=sm_90a", "-o", "b.cubin", "a.ptx"]).current_dir(sandbox.path("")).output();
    assert!(!alone.unwrap().status.success(), "as nvcc made it, it is not for sm_90a");

    let ours = ["__retarget", "ptxas", "--from", "sm_120f", "--to", "sm_90a", "--program", text(&program), "--"];
    let nvccs = ["-arch=sm_120f", "-m64", "a.ptx", "-o", "a.cubin"];
    sandbox.run(&[&ours[..], &nvccs].concat()).exits(0);
    assert_eq!(images(&sandbox.path("a.cubin")), ["sm_90a sass"]);
    assert_eq!(fs::read_to_string(sandbox.path("a.ptx")).unwrap(), before, "what nvcc made stays");
    let after = fs::read_to_string(sandbox.path("a.sm_90a.ptx")).unwrap();
    assert!(after.contains(".target sm_90a\n") && !after.contains("e2m1x2"));

    let refused = sandbox.run(&[&ours[..], &["-arch=sm_120a", "a.ptx"]].concat()).exits(5);
    refused.says("in a way that this fi-arch does not know");
}

#[test]
fn an_instruction_that_hopper_lacks_ends_the_build_with_ptxas_own_words() {
    let sandbox = Sandbox::with_small_build();
    let site = sandbox.own_flashinfer();
    let source = site.join("flashinfer/data/csrc/vllm_custom_all_reduce.cu");
    let more = "\n__global__ void widen(unsigned* out) {\n  unsigned r;\n  asm volatile(\"{.reg .b8 x; cvt.u8.u32 x, 5; \
                cvt.rn.f16x2.e2m1x2 %0, x;}\" : \"=r\"(r));\n  *out = r;\n}\nvoid launch(unsigned* out) { widen<<<1, 1>>>(out); }\n";
    fs::write(&source, fs::read_to_string(&source).unwrap() + more).unwrap();
    let args = ["build", "--sm", "120", "--module", "vllm_comm", "--flashinfer", text(&site), "--run-on", "90", "--offline"];
    let ran: Ran = sandbox.run(&args).exits(5);
    ran.says("cvt with .e2m1x2' not supported on .target 'sm_90a'").says("cannot be run there").says("the full log is in");
    assert_eq!((sandbox.artifacts(), sandbox.staged()), (1, vec![]));
}
