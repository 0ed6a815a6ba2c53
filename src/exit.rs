//! The exit codes of every verb, in one place. README.md lists the same table.

/// What the process tells its caller when it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// What was asked for is so.
    Right = 0,
    /// `doctor`, `inspect`, `verify`, `scan`, `smoke` or `bench` looked and found a fault; `uninstall` left a file that somebody else
    /// changed.
    Fault = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The machine lacks something: nvcc, headers, disk, network, GPU.
    Machine = 3,
    /// A release, target or arch is unknown, unsupported or beyond this nvcc.
    Unsupported = 4,
    /// The build failed, or the judge (or the hash of a wheel or bundle) refused.
    Refused = 5,
    /// A fault of fi-arch itself.
    Bug = 70,
    /// Ended by Ctrl-C or a termination signal; nothing was left behind.
    Interrupted = 130,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
