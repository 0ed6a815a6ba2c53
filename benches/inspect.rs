//! Times the reading of one file, in-process. `FI_ARCH_BENCH_SO` names the file:
//!
//! ```sh
//! FI_ARCH_BENCH_SO=…/trtllm_comm.so cargo bench --bench inspect
//! ```

use std::hint::black_box;
use std::path::PathBuf;

use criterion::Criterion;
use fi_arch::cubin;

const FILE: &str = "FI_ARCH_BENCH_SO";

fn main() {
    let Some(path) = std::env::var_os(FILE).map(PathBuf::from) else {
        eprintln!("error: {FILE} is not set\n  hint: let it name a .so, .o or .cubin with GPU code");
        std::process::exit(2);
    };
    // A file that cannot be read would give a splendid time.
    let inventory = cubin::read(&path).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        std::process::exit(error.exit() as i32);
    });
    let kernels: usize = inventory.images.iter().map(|image| image.kernels.len()).sum();
    println!("{}: {} images, {kernels} kernels", path.display(), inventory.images.len());

    let bytes = std::fs::read(&path).expect("it was read a moment ago");
    let mut criterion = Criterion::default().configure_from_args();
    criterion.bench_function("read a file", |bench| bench.iter(|| black_box(cubin::read(&path))));
    criterion.bench_function("read bytes in memory", |bench| bench.iter(|| black_box(cubin::read_bytes(&bytes))));
    criterion.bench_function("linkage of a file", |bench| bench.iter(|| black_box(cubin::linkage(&path))));
    criterion.final_summary();
}
