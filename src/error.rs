//! The one error type: what failed, why, and what to do about it.

use std::fmt;
use std::path::Path;

use crate::exit::Exit;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An expected failure. It says what (`what`), why (`why`, outermost first) and what to do (`hints`).
/// A broken promise of our own code is a panic instead, and ends with [`Exit::Bug`].
#[derive(Debug)]
pub struct Error(Box<Inner>);

// Boxed: errors are rare, and a small `Result` keeps the common path cheap.
#[derive(Debug)]
struct Inner {
    exit: Exit,
    what: String,
    why: Vec<String>,
    hints: Vec<String>,
}

impl Error {
    pub fn new(exit: Exit, what: impl Into<String>) -> Self {
        Self(Box::new(Inner { exit, what: what.into(), why: Vec::new(), hints: Vec::new() }))
    }

    /// The command line asks for something that makes no sense (exit 2).
    pub fn usage(what: impl Into<String>) -> Self {
        Self::new(Exit::Usage, what)
    }

    /// The machine lacks something (exit 3).
    pub fn machine(what: impl Into<String>) -> Self {
        Self::new(Exit::Machine, what)
    }

    /// Unknown, unsupported, or beyond this nvcc (exit 4).
    pub fn unsupported(what: impl Into<String>) -> Self {
        Self::new(Exit::Unsupported, what)
    }

    /// The build failed or the product was refused (exit 5).
    pub fn refused(what: impl Into<String>) -> Self {
        Self::new(Exit::Refused, what)
    }

    /// A file operation failed (exit 3). `doing` reads like "read", "write", "rename".
    pub fn io(doing: &str, path: &Path, source: std::io::Error) -> Self {
        let err = Self::machine(format!("cannot {doing} {}", path.display()));
        let hint = match source.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                Some("free some disk space, or set FI_ARCH_HOME to a folder on another disk")
            }
            std::io::ErrorKind::ReadOnlyFilesystem => Some("set FI_ARCH_HOME to a folder that can be written"),
            std::io::ErrorKind::PermissionDenied => {
                Some("run as a user who may do that, or set FI_ARCH_HOME to a folder of your own")
            }
            _ => None,
        };
        let err = err.because(source);
        match hint {
            Some(hint) => err.hint(hint),
            None => err,
        }
    }

    /// Adds a cause; call it from the outermost cause inwards.
    #[must_use]
    pub fn because(mut self, why: impl fmt::Display) -> Self {
        self.0.why.push(why.to_string());
        self
    }

    /// Adds something the user can do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hints.push(hint.into());
        self
    }

    /// Puts a wider `what` around this error and keeps the old one as its first cause.
    #[must_use]
    pub fn within(mut self, what: impl Into<String>) -> Self {
        let inner = std::mem::replace(&mut self.0.what, what.into());
        self.0.why.insert(0, inner);
        self
    }

    pub fn exit(&self) -> Exit {
        self.0.exit
    }

    pub fn what(&self) -> &str {
        &self.0.what
    }

    pub fn why(&self) -> &[String] {
        &self.0.why
    }

    pub fn hints(&self) -> &[String] {
        &self.0.hints
    }

    /// The error as one JSON object, for `--json`.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "error": { "exit": self.0.exit as u8, "what": self.0.what, "why": self.0.why, "hints": self.0.hints }
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.what)?;
        for why in &self.0.why {
            write!(f, "\n  because: {}", why.replace('\n', "\n    "))?;
        }
        for hint in &self.0.hints {
            write!(f, "\n  hint: {}", hint.replace('\n', "\n    "))?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}
