//! The command line: one file a verb. Flags, and the human and JSON forms of results; no logic of its own.

mod bench;
mod build;
mod cache;
mod doctor;
mod explain;
mod findings;
mod gpu;
mod inspect;
mod install;
mod output;
mod progress;
mod retarget;
mod run;
mod scan;
mod selection;
mod smoke;
mod status;
mod tables;
mod uninstall;
mod verify;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::build::retarget::VERB as RETARGET;
use crate::env;
use crate::error::{Error, Result};
use crate::exit::Exit;
use output::Output;

/// Make FlashInfer's JIT modules work on GPUs that the installed FlashInfer does not list: build, prove, ship.
#[derive(Debug, Parser)]
#[command(name = "fi-arch", version, arg_required_else_help = true, after_help = EXIT_CODES)]
struct Cli {
    /// Print one JSON object on stdout; text for people goes to stderr
    #[arg(long, global = true)]
    json: bool,

    /// Say more on stderr (-v info, -vv debug, -vvv trace); FI_ARCH_LOG sets finer filters
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,

    #[command(subcommand)]
    verb: Verb,
}

const EXIT_CODES: &str = "\
Exit codes:
  0    what was asked for is so
  1    doctor, verify, inspect, scan, smoke, bench, cache verify or tables check found a fault; uninstall left a file that somebody else changed
  2    the command line is wrong
  3    the machine lacks something: nvcc, headers, disk, network, GPU
  4    a release, target or arch is unknown, unsupported or beyond this nvcc
  5    the build failed, or the judge (or the hash of a wheel or bundle) refused
  70   a fault of fi-arch itself
  130  interrupted; nothing was left behind";

#[derive(Debug, Subcommand)]
enum Verb {
    Doctor(doctor::Args),
    Verify(verify::Args),
    Build(build::Args),
    Install(install::Args),
    Uninstall(uninstall::Args),
    Run(run::Args),
    Status(status::Args),
    Inspect(inspect::Args),
    Scan(scan::Args),
    Cache(cache::Args),
    Smoke(smoke::Args),
    Bench(bench::Args),
    Tables(tables::Args),
    /// A process of `smoke` and `bench`, started by them
    #[command(name = crate::smoke::supervise::WORKER_VERB, hide = true)]
    SmokeWorker,
    #[command(name = RETARGET, hide = true)]
    Retarget(retarget::Args),
}

/// Runs the command line of this process and says how it ended. Never panics outwards.
pub fn main() -> Exit {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors; clap knows which stream each belongs on.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage } else { Exit::Right };
        }
    };
    start_logging(cli.verbose);
    let output = Output::new(cli.json);
    // A panic is a broken promise of our own code. Rust has printed its message and place by the time it arrives here.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| dispatch(cli.verb, &output))) {
        Ok(Ok(exit)) => exit,
        Ok(Err(error)) => {
            output.error(&error);
            error.exit()
        }
        Err(_) => {
            output.error(
                &Error::new(Exit::Bug, "fi-arch itself failed")
                    .because("the message above is a bug in fi-arch, not in your machine or in FlashInfer")
                    .hint("please report it with the command line and the message"),
            );
            Exit::Bug
        }
    }
}

fn dispatch(verb: Verb, output: &Output) -> Result<Exit> {
    match verb {
        Verb::Doctor(args) => doctor::run(args, output),
        Verb::Verify(args) => verify::run(args, output),
        Verb::Build(args) => build::run(args, output),
        Verb::Install(args) => install::run(args, output),
        Verb::Uninstall(args) => uninstall::run(args, output),
        Verb::Run(args) => run::run(args, output),
        Verb::Status(args) => status::run(args, output),
        Verb::Inspect(args) => inspect::run(args, output),
        Verb::Scan(args) => scan::run(args, output),
        Verb::Cache(args) => cache::run(args, output),
        Verb::Smoke(args) => smoke::run(args, output),
        Verb::Bench(args) => bench::run(args, output),
        Verb::Tables(args) => tables::run(args, output),
        Verb::SmokeWorker => smoke::worker(),
        Verb::Retarget(args) => Err(retarget::run(args)),
    }
}

fn start_logging(verbose: u8) {
    let default = match verbose {
        0 => "warn",
        1 => "fi_arch=info",
        2 => "fi_arch=debug",
        _ => "fi_arch=trace",
    };
    let filter = std::env::var(env::FI_ARCH_LOG)
        .ok()
        .and_then(|text| EnvFilter::try_new(text).ok())
        .unwrap_or_else(|| EnvFilter::new(default));
    let colour = std::io::IsTerminal::is_terminal(&std::io::stderr()) && env::var(env::NO_COLOR).is_none();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colour).without_time().init();
}
