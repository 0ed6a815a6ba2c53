//! A GPU machine that is none: a driver, tvm-ffi, NCCL, NVRTC and artifacts that run on the host.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::toolkit::nvcc;

const SUPPORT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/support");

/// The folder of `libcuda.so`, `libtvm_ffi.so`, `libnccl.so.2`, `libnvrtc.so.13`, and of the artifacts `artifact.so` and `fused.so`,
/// which are for sm_90. Made once.
pub fn fakes() -> &'static Path {
    static FAKES: OnceLock<PathBuf> = OnceLock::new();
    FAKES.get_or_init(|| {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap().keep();
        let cc = |name: &str, from: &Path, with: &[&str]| {
            let mut cc = Command::new("cc");
            cc.args(["-shared", "-fPIC", "-O1", "-L"]).arg(&dir).arg("-o").arg(dir.join(name)).arg(from).args(with);
            assert!(cc.status().expect("cc starts").success(), "{name}");
        };
        let support = Path::new(SUPPORT);
        cc("libcuda.so", &support.join("driver.c"), &[]);
        // Found as `libcuda.so.1` too, before any that the machine has.
        std::os::unix::fs::symlink("libcuda.so", dir.join("libcuda.so.1")).unwrap();
        cc("libtvm_ffi.so", &support.join("tvm_ffi.c"), &[]);
        cc("libnccl.so.2", &support.join("nccl.c"), &["-lcuda"]);
        cc("libnvrtc.so.13", &support.join("nvrtc.c"), &[]);
        for name in ["artifact", "fused"] {
            let source = format!("{SUPPORT}/{name}.cu");
            let object = format!("{name}.o");
            nvcc(&dir, &["-c", "-Xcompiler", "-fPIC", "-gencode", "arch=compute_90,code=sm_90", "-o", &object, &source]);
            cc(&format!("{name}.so"), &dir.join(object), &["-lstdc++", "-lcuda"]);
        }
        dir
    })
}
