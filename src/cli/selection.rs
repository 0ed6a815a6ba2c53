//! What to activate: the flags that `install` and `run` share.

use std::path::PathBuf;

use crate::activate::{OnMiss, Selection};
use crate::build::provision;
use crate::error::{Error, Result};
use crate::policy::Policy;
use crate::target;

#[derive(Debug, clap::Args)]
pub struct Flags {
    /// The Python environment: a venv, a conda prefix, a site-packages or dist-packages folder
    #[arg(long, value_name = "DIR")]
    pub env: Option<PathBuf>,

    /// The GPUs: 120, 12.0, 12.0f, sm_120, or a list of them [default: those of the bundles, else of this machine]
    #[arg(long, value_name = "TARGETS")]
    sm: Option<String>,

    /// The module
    #[arg(long, default_value = "trtllm_comm", value_name = "NAME")]
    module: String,

    /// Take the artifact from a bundle that `build --export` wrote: needs no toolkit, no store, no network. May be repeated
    #[arg(long, value_name = "BUNDLE")]
    from: Vec<PathBuf>,

    /// Also open this engine's own gates: sglang, vllm. May be repeated
    #[arg(long, value_name = "NAME")]
    engine: Vec<String>,

    /// Let the engine use the fused path without its flag, as it does on GPUs that it lists
    #[arg(long, requires = "engine")]
    auto_enable: bool,

    /// The limits under which the fused path is used, as TOML: tokens, one-shot, ranks [default: 2 ranks]
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,

    /// What a process does that finds no artifact for its GPU: one clear error, or a build, once for all ranks
    #[arg(long, value_name = "WHAT", default_value = "error")]
    on_miss: Miss,

    /// Who will load the artifact: torch==2.9.1+cu128, cu128, cuda==12.8 [default: the torch of the environment]
    #[arg(long = "for", value_name = "WHO")]
    consumer: Option<String>,

    /// The CUDA toolkit to build with, and no other
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    toolkit: Option<PathBuf>,

    /// Compile jobs at once [default: what cores and available memory allow]
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,

    /// Never use the network: what is missing is an error
    #[arg(long)]
    offline: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Miss {
    Error,
    Build,
}

impl Flags {
    pub fn selection(&self) -> Result<Selection> {
        Ok(Selection {
            env: self.env.clone(),
            targets: self.sm.as_deref().map(target::parse_list).transpose()?.unwrap_or_default(),
            module: self.module.clone(),
            from: self.from.clone(),
            engines: self.engine.clone(),
            auto_enable: self.auto_enable,
            policy: self.policy()?,
            on_miss: match self.on_miss {
                Miss::Error => OnMiss::Error,
                Miss::Build => OnMiss::Build,
            },
            consumer: self.consumer.clone(),
            toolkit: self.toolkit.clone(),
            jobs: self.jobs.map(usize::from),
            network: if self.offline { provision::Mode::Offline } else { provision::Mode::Online },
        })
    }

    fn policy(&self) -> Result<Policy> {
        let Some(file) = &self.policy else { return Ok(Policy::default()) };
        let text = std::fs::read_to_string(file).map_err(|e| Error::io("read", file, e))?;
        Policy::parse(&text).map_err(|error| error.within(format!("{} is not used", file.display())))
    }
}
