//! What `smoke` and `bench` share: what runs, on which GPUs, with which libraries; how far a run is; the platform in their reports.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::output::Output;
use crate::build::provision::Mode;
use crate::error::{Error, Result};
use crate::pipeline::{self, Context};
use crate::smoke::Setup;
use crate::smoke::cases::RANKS;
use crate::smoke::ffi::driver::Driver;
use crate::target;

#[derive(Debug, clap::Args)]
pub struct Flags {
    /// The artifact: a trtllm_comm.so of fi-arch's store, or built by FlashInfer itself
    #[arg(value_name = "ARTIFACT", required_unless_present = "env")]
    artifact: Option<PathBuf>,

    /// A Python environment: its artifact in the store where none is named, and its libraries [default for the libraries: the active one]
    #[arg(long, value_name = "DIR")]
    pub env: Option<PathBuf>,

    /// The GPUs that ranks go to in turn, by the driver's numbers [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    gpus: Vec<usize>,

    /// How long the GPU may take for one replay before it counts as hung, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    deadline: u64,

    /// libtvm_ffi.so, or a folder that holds it [default: the environment's, else the one that a build fetched]
    #[arg(long, value_name = "FILE|DIR")]
    tvm_ffi: Option<PathBuf>,

    /// The CUDA runtime that the artifact needs, such as libcudart.so.13 [default: the environment's, else that of CUDA_HOME, else the system's]
    #[arg(long, value_name = "FILE")]
    cudart: Option<PathBuf>,

    /// libnvrtc.so.13 or .12, which compiles our own kernels [default: the environment's, else that of CUDA_HOME, else the system's]
    #[arg(long, value_name = "FILE")]
    nvrtc: Option<PathBuf>,
}

impl Flags {
    /// What was asked for; the artifact out of the store where none was named.
    pub fn setup(&self, context: &Context) -> Result<Setup> {
        let artifact = match &self.artifact {
            Some(artifact) => artifact.clone(),
            None => stored(self.env.as_deref(), &self.gpus, context)?,
        };
        Ok(Setup {
            artifact,
            gpus: self.gpus.clone(),
            deadline: Duration::from_secs(self.deadline),
            tvm_ffi: self.tvm_ffi.clone(),
            cudart: self.cudart.clone(),
            nvrtc: self.nvrtc.clone(),
        })
    }
}

/// Refuses numbers of ranks for which the kernels are not built.
pub fn check_ranks(ranks: &[usize]) -> Result<()> {
    match ranks.iter().find(|ranks| !RANKS.contains(ranks)) {
        Some(odd) => Err(Error::usage(format!("{odd} ranks are none of the sizes that the kernels know")).hint("2, 4 and 8 are")),
        None => Ok(()),
    }
}

/// The artifact in the store for an environment and the first of the GPUs of this machine.
fn stored(env: Option<&Path>, gpus: &[usize], context: &Context) -> Result<PathBuf> {
    let driver = Driver::open().map_err(|why| Error::machine("this machine cannot run an artifact").because(why))?;
    let devices = driver.devices().map_err(|error| Error::machine("the driver does not tell its GPUs").because(error))?;
    let wanted = gpus.first().copied().unwrap_or(0);
    let device = devices.get(wanted).ok_or_else(|| Error::usage(format!("there is no GPU {wanted}")))?;
    let request = pipeline::Request {
        module: "trtllm_comm".to_owned(),
        target: target::parse(&device.sm.to_string())?,
        flashinfer: None,
        env: env.map(Path::to_owned),
        consumer: None,
        toolkit: None,
        jobs: None,
        mode: Mode::Offline,
        explain: false,
        only: None,
        run_on: None,
    };
    let planned = pipeline::dry_run(&request, context, &mut |_| ())?.planned;
    planned.and_then(|planned| planned.entry).map(|entry| entry.artifact).ok_or_else(|| {
        let dir = env.unwrap_or(Path::new(".")).display();
        Error::machine("the store has no artifact for this environment and this GPU")
            .hint(format!("`fi-arch build --sm {} --env {dir}` makes one, or name an artifact", device.sm))
    })
}

/// Shows how far a run is, on stderr: a bar on a terminal, lines elsewhere, nothing with `--json` on a pipe.
pub struct Display {
    bar: Option<ProgressBar>,
    quiet: bool,
}

impl Display {
    pub fn new(output: &Output) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = terminal.then(|| {
            let bar = ProgressBar::new(0);
            if let Ok(style) = ProgressStyle::with_template("{spinner} {pos}/{len} {elapsed:.dim} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Self { bar, quiet: output.is_json() && !terminal }
    }

    pub fn step(&self, text: String) {
        match &self.bar {
            Some(bar) => bar.set_message(text),
            None if !self.quiet => eprintln!("{text} …"),
            None => {}
        }
    }

    /// A line that stays.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None if !self.quiet => eprintln!("{text}"),
            None => {}
        }
    }

    /// Number `at` of `of`, which is called `name`, has ended. `counted`: what is told where there is no bar.
    pub fn ended(&self, at: usize, of: usize, name: String, counted: Option<String>) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(name);
                bar.set_length(of as u64);
                bar.set_position(at as u64);
            }
            None => counted.iter().for_each(|text| self.line(text)),
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
