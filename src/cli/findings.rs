//! How problems and notes are shown, by all verbs alike.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::verify::{Finding, Findings};

/// `pass`, or `fail` where there is a problem.
pub fn verdict(findings: &Findings) -> &'static str {
    if findings.problems.is_empty() { "pass" } else { "fail" }
}

pub fn to_json(findings: &[Finding]) -> Value {
    findings
        .iter()
        .map(|finding| {
            json!({
                "code": finding.code,
                "message": finding.message,
                "hint": finding.hint,
                "path": finding.path.as_ref().map(|path| path.display().to_string()),
                "line": finding.line,
            })
        })
        .collect()
}

/// The notes, the problems, and their number in one line, which for no problem says `sound`.
pub fn text(findings: &Findings, sound: &str) -> String {
    let mut text = String::new();
    for (name, findings) in [("note", &findings.notes), ("problem", &findings.problems)] {
        for finding in findings {
            let _ = writeln!(text, "\n{name} [{}]: {}", finding.code, finding.message);
            if let Some(path) = &finding.path {
                let line = finding.line.map(|line| format!(":{line}")).unwrap_or_default();
                let _ = writeln!(text, "  at: {}{line}", path.display());
            }
            if !finding.hint.is_empty() {
                let _ = writeln!(text, "  hint: {}", finding.hint);
            }
        }
    }
    let _ = match findings.problems.len() {
        0 => writeln!(text, "\npass: {sound}"),
        1 => writeln!(text, "\nfail: 1 problem"),
        count => writeln!(text, "\nfail: {count} problems"),
    };
    text
}
