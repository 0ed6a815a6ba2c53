//! `fi-arch cache`.

use super::output::Output;
use crate::error::{Error, Result};
use crate::exit::Exit;

#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: Args, _output: &Output) -> Result<Exit> {
    Err(Error::new(Exit::Bug, "not here yet"))
}
