//! Parses, dispatches, exits; nothing else.

use std::process::ExitCode;

fn main() -> ExitCode {
    fi_arch::cli::main().into()
}
