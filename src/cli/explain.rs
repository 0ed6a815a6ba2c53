//! The human and JSON forms of `build --explain`.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::pipeline::{Change, Explanation};

/// So many changes of one kind are shown one by one; `--json` has them all.
const SHOWN: usize = 6;

pub fn to_json(explanation: &Explanation) -> Value {
    let nearest = explanation.nearest.as_ref();
    json!({
        "nearest": nearest.map(|n| json!({ "key": n.key, "created": n.created, "flashinfer": n.flashinfer })),
        "gone": explanation.gone,
        "changes": explanation.changes.iter().map(|c| json!({
            "kind": c.kind, "name": c.name, "from": c.from, "to": c.to, "text": sentence(c),
        })).collect::<Vec<_>>(),
        "same": explanation.same,
    })
}

pub fn to_text(explanation: &Explanation) -> String {
    let Explanation { hit, nearest, gone, changes, same } = explanation;
    let told = ["header", "source", "overlay", "flag", "tool"];
    let counts = told.iter().filter_map(|kind| Some(plural(*same.get(kind)?, kind)));
    let same = counts.collect::<Vec<_>>().join(", ");
    let mut text = String::new();
    match (hit, nearest, gone) {
        (true, Some(nearest), _) => {
            let _ = writeln!(text, "  why       a hit: every input is what it was at {} ({same})", nearest.created);
        }
        (_, _, Some(key)) => {
            let _ = writeln!(
                text,
                "  why       a miss: the artifact of exactly these inputs ({}) was removed, or was broken and moved aside",
                key.short()
            );
        }
        (_, None, None) => text.push_str("  why       a miss: the store holds nothing of this module that could be compared\n"),
        (_, Some(nearest), None) => {
            let _ = writeln!(
                text,
                "  why       a miss: {} since {}, the nearest in the store (FlashInfer {}, {})",
                plural(changes.len(), "change"),
                nearest.key.short(),
                nearest.flashinfer,
                nearest.created
            );
            let mut kinds: Vec<&str> = Vec::new();
            for change in changes {
                if !kinds.contains(&change.kind) {
                    kinds.push(change.kind);
                }
            }
            for kind in kinds {
                let of_kind: Vec<&Change> = changes.iter().filter(|change| change.kind == kind).collect();
                for change in of_kind.iter().take(SHOWN) {
                    let _ = writeln!(text, "            {}", sentence(change));
                }
                if of_kind.len() > SHOWN {
                    let _ = writeln!(text, "            and {} more (--json has them)", plural(of_kind.len() - SHOWN, kind));
                }
            }
            let _ = writeln!(text, "            the same: {}", if same.is_empty() { "nothing" } else { &same });
        }
    }
    text
}

fn plural(count: usize, kind: &str) -> String {
    let kind = if kind == "overlay" { "edited file" } else { kind };
    format!("{count} {kind}{}", if count == 1 { "" } else { "s" })
}

/// One change in words: `header cuda/include/x.h changed`, `nvcc 13.0.88 → 13.1.80`, `flag --foo added`.
fn sentence(change: &Change) -> String {
    let Change { kind, name, from, to } = change;
    let what = if name.is_empty() { kind.replace('-', " ") } else { format!("{kind} {name}") };
    match (*kind, from, to) {
        ("shadow", ..) => format!("header {name}"),
        ("tool" | "source" | "overlay" | "header", Some(_), Some(_)) | ("flag", Some(_), Some(_)) => format!("{what} changed"),
        (_, Some(from), Some(to)) => format!("{what} {from} → {to}"),
        (_, None, _) => format!("{what} added"),
        (_, _, None) => format!("{what} removed"),
    }
}
