//! Times `verify` of one environment, in-process. `FI_ARCH_BENCH_ENV` names it:
//!
//! ```sh
//! FI_ARCH_BENCH_ENV=/path/to/venv cargo bench --bench verify
//! ```

use std::hint::black_box;
use std::path::{Path, PathBuf};

use criterion::Criterion;
use fi_arch::memo::Memo;
use fi_arch::target;
use fi_arch::verify::proof::{self, Request};

const ENV: &str = "FI_ARCH_BENCH_ENV";

fn main() {
    let Some(env) = std::env::var_os(ENV).map(PathBuf::from) else {
        eprintln!("error: {ENV} is not set\n  hint: let it name an environment in which `fi-arch install` was");
        std::process::exit(2);
    };
    let targets = target::parse_list("120").expect("it is a target");
    let request = |command: &str| Request {
        env: Some(env.clone()),
        targets: targets.clone(),
        command: command.split_whitespace().map(str::to_owned).collect(),
    };
    let prove = |request: &Request, memo: &Memo| {
        proof::prove(request, memo).unwrap_or_else(|error| {
            eprintln!("error: {error}");
            std::process::exit(error.exit() as i32);
        })
    };
    // A broken environment would give another time than the sound one that people wait for.
    let memo = Memo::default();
    let proof = prove(&request(""), &memo);
    let codes: Vec<&str> = proof.report.findings.problems.iter().map(|problem| problem.code.as_str()).collect();
    println!("{}: problems: {}; {} files of the set", env.display(), codes.join(" "), proof.files.len());

    let python = Path::new(&env).join("bin/python");
    let command = format!("{} -m sglang.launch_server --tp 2 --enable-flashinfer-allreduce-fusion", python.display());
    let mut criterion = Criterion::default().configure_from_args();
    criterion.bench_function("nothing remembered", |bench| bench.iter(|| black_box(prove(&request(""), &Memo::default()))));
    criterion.bench_function("digests remembered", |bench| bench.iter(|| black_box(prove(&request(""), &memo))));
    criterion.bench_function("a command line", |bench| bench.iter(|| black_box(prove(&request(&command), &memo))));
    criterion.final_summary();
}
