//! A GPU machine that is none: a driver, tvm-ffi, NCCL, NVRTC and artifacts that run on the host.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::sandbox::Sandbox;
use super::toolkit::nvcc;

const SUPPORT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/support");
/// What the fake driver runs of our own kernels.
const KERNELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda-src/smoke");

/// The folder of `libcuda.so`, `libtvm_ffi.so`, `libnccl.so.2` and `libnvrtc-fake.so` (which nobody finds by its name), and of the
/// artifacts `artifact.so` and `fused.so`, which are for sm_90. Made once.
pub fn fakes() -> &'static Path {
    static FAKES: OnceLock<PathBuf> = OnceLock::new();
    FAKES.get_or_init(|| {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap().keep();
        let cc = |name: &str, from: &[PathBuf], with: &[&str]| {
            let mut cc = Command::new("cc");
            cc.args(["-O2", "-ffp-contract=off", "-shared", "-fPIC", "-I", KERNELS, "-L"]).arg(&dir);
            cc.arg("-o").arg(dir.join(name)).args(from).args(with);
            assert!(cc.status().expect("cc starts").success(), "{name}");
        };
        let support = Path::new(SUPPORT);
        cc("libcuda.so", &[support.join("driver.c"), support.join("kernels.cpp")], &["-lstdc++", "-pthread"]);
        // Found as `libcuda.so.1` too, before any that the machine has.
        std::os::unix::fs::symlink("libcuda.so", dir.join("libcuda.so.1")).unwrap();
        cc("libtvm_ffi.so", &[support.join("tvm_ffi.c")], &[]);
        cc("libnccl.so.2", &[support.join("nccl.c")], &["-lcuda"]);
        cc("libnvrtc-fake.so", &[support.join("nvrtc.c")], &[]);
        for name in ["artifact", "fused"] {
            let (source, object) = (format!("{SUPPORT}/{name}.cu"), format!("{name}.o"));
            nvcc(&dir, &["-c", "-Xcompiler", "-fPIC", "-gencode", "arch=compute_90,code=sm_90", "-o", &object, &source]);
            cc(&format!("{name}.so"), &[dir.join(object)], &["-lstdc++", "-lcuda"]);
        }
        dir
    })
}

/// The path of one of the fakes.
pub fn fake(name: &str) -> String {
    fakes().join(name).to_str().unwrap().to_owned()
}

/// A folder for `LD_LIBRARY_PATH` that hides the machine's own driver by files that are no libraries.
pub fn no_driver(sandbox: &Sandbox) -> PathBuf {
    let dir = sandbox.path("no-driver");
    std::fs::create_dir(&dir).unwrap();
    for name in ["libcuda.so", "libcuda.so.1", "libnvcuda.so", "libnvcuda.so.1"] {
        std::fs::write(dir.join(name), "no library").unwrap();
    }
    dir
}
