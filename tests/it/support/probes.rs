//! Small shared objects with real GPU code, compiled once.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::TempDir;

use super::toolkit::nvcc;

pub struct Probes {
    dir: TempDir,
}

const SOURCE: &str = "
__global__ void writes(int* p) { p[threadIdx.x] = 1; }
__global__ void guarded(int* p) {
#if !defined(HOLLOW) || __CUDA_ARCH__ < 1200
  p[threadIdx.x] = 2;
#endif
}
void launch(int* p) { writes<<<1, 32>>>(p); guarded<<<1, 32>>>(p); }
";

impl Probes {
    /// `good` (sm_120f), `old` (sm_90a alone), `hollow` (sm_120f and sm_90a, one kernel hollow on the first), `ptx` (PTX for 9.0)
    /// and `cubin` (sm_120a).
    pub fn get() -> &'static Self {
        static PROBES: OnceLock<Probes> = OnceLock::new();
        PROBES.get_or_init(|| {
            let probes = Self { dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() };
            fs::write(probes.dir.path().join("probe.cu"), SOURCE).unwrap();
            let shared = ["-shared", "-Xcompiler", "-fPIC", "-cudart", "none", "probe.cu", "-o"];
            let make = |name: &str, more: &[&str]| nvcc(probes.dir.path(), &[&shared[..], &[name], more].concat());
            let sass = |arch: &str| format!("-gencode=arch=compute_{arch},code=sm_{arch}");
            make("good", &[&sass("120f")]);
            make("old", &[&sass("90a")]);
            make("hollow", &[&sass("120f"), &sass("90a"), "-DHOLLOW"]);
            make("ptx", &["-gencode=arch=compute_90,code=compute_90", "-Xfatbin=-compress-all"]);
            nvcc(probes.dir.path(), &["-cubin", "-arch=sm_120a", "probe.cu", "-o", "cubin"]);
            probes
        })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Puts a copy at `to`, in place of what is there.
    pub fn copy(&self, name: &str, to: &Path) {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        let _ = fs::remove_file(to);
        fs::copy(self.path(name), to).unwrap();
    }
}
