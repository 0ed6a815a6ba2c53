//! The real CUDA 13.0 compiler and disassembler, out of wheels: no toolkit of the machine is used.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::wheels::unpacked_set;

/// The folder of a CUDA 13.0 toolkit that can compile and link: `bin/nvcc`, `include`, `lib`.
pub fn cuda_13_0() -> PathBuf {
    let wheels = [
        ("nvidia-cuda-nvcc", "13.0.88"),
        ("nvidia-nvvm", "13.0.88"),
        ("nvidia-cuda-crt", "13.0.88"),
        ("nvidia-cuda-runtime", "13.0.96"),
        ("nvidia-cuda-cccl", "13.0.85"),
    ];
    unpacked_set("toolkit-13.0", &wheels).join("nvidia/cu13")
}

/// The folder that holds `bin/cuobjdump` and `bin/nvdisasm`.
pub fn disassembler() -> PathBuf {
    let wheels = [("nvidia-cuda-cuobjdump", "13.2.78"), ("nvidia-cuda-nvdisasm", "13.2.78")];
    unpacked_set("disassembler-13.2", &wheels).join("nvidia/cu13")
}

/// Compiles with the real nvcc in the folder `dir`. Panics with its output when it fails.
pub fn nvcc(dir: &Path, args: &[&str]) {
    run(Command::new(cuda_13_0().join("bin/nvcc")).current_dir(dir).args(args));
}

/// The text that `cuobjdump` prints.
pub fn cuobjdump(args: &[&str], file: &Path) -> String {
    let bin = disassembler().join("bin");
    // It calls nvdisasm by its bare name.
    let path = std::env::join_paths(
        std::iter::once(bin.clone()).chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
    )
    .unwrap();
    run(Command::new(bin.join("cuobjdump")).env("PATH", path).args(args).arg(file))
}

fn run(command: &mut Command) -> String {
    let output = command.output().expect("the tool starts");
    assert!(
        output.status.success(),
        "{command:?}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}
