//! Where results go: one JSON object on stdout with `--json`, text for people otherwise. Never both on one stream.

use std::io::Write;

use crate::error::Error;

/// How a verb hands over its result.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    json: bool,
}

impl Output {
    pub fn new(json: bool) -> Self {
        Self { json }
    }

    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Prints the result of a verb: `json()` with `--json`, else `text()`. Only the one asked for is made.
    pub fn result(&self, json: impl FnOnce() -> serde_json::Value, text: impl FnOnce() -> String) {
        let body = if self.json { format!("{}\n", json()) } else { text() };
        // A reader that went away (`| head`) is no failure of ours.
        let _ = std::io::stdout().lock().write_all(body.as_bytes());
    }

    /// Prints an error for people on stderr and, with `--json`, as the one object on stdout.
    pub fn error(&self, error: &Error) {
        if self.json {
            let _ = writeln!(std::io::stdout().lock(), "{}", error.to_json());
        }
        let _ = writeln!(std::io::stderr().lock(), "error: {error}");
    }
}
