//! An overlay as a unified diff that says why.

use std::fmt::Write as _;

use similar::TextDiff;

use super::Overlay;

/// All files of the overlay, in the order of their paths. `git apply` and `patch` read it; `#` starts a remark.
pub fn of(overlay: &Overlay) -> String {
    let mut text = String::new();
    for file in &overlay.files {
        for edit in overlay.edits.iter().filter(|edit| edit.path == file.path) {
            let sites = if edit.sites == 1 { "1 site".to_owned() } else { format!("{} sites", edit.sites) };
            writeln!(text, "# {}: {} ({sites}, first at line {})", edit.id, edit.reason, edit.line).expect("a string takes all");
        }
        let old_name = match file.pre {
            Some(_) => format!("a/{}", file.path),
            None => {
                writeln!(text, "# {}: a header of fi-arch", file.edits.join(", ")).expect("a string takes all");
                "/dev/null".to_owned()
            }
        };
        let old = String::from_utf8_lossy(&file.original);
        let new = String::from_utf8_lossy(&file.post);
        let diff = TextDiff::from_lines(&*old, &*new);
        let mut unified = diff.unified_diff();
        write!(text, "{}", unified.header(&old_name, &format!("b/{}", file.path))).expect("a string takes all");
    }
    text
}
