//! `fi-arch inspect`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::output::Output;
use crate::cubin::compare::{self, Comparison, Difference, What};
use crate::cubin::{self, Image, Inventory, Kernel, Kind};
use crate::error::{Error, Result};
use crate::exit::Exit;

/// Show the GPU code in files: targets, kernels, what they can do, and what the file needs to load.
///
/// Reads shared objects, objects, cubins and fat binaries; needs no CUDA toolkit. Ends with 1 when a kernel is hollow (nothing
/// that it can reach can write memory outside its thread block, so it changes no result) or when a file is no such
/// file or is damaged. Kernels without dependency marks are counted and are no fault: most kernels need none.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Files to read: .so, .o, .cubin, .fatbin
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Compare each FILE with OTHER, kernel by kernel; ends with 0 when they are equal, with 1 when they differ
    #[arg(long, value_name = "OTHER")]
    against: Option<PathBuf>,

    /// List every kernel
    #[arg(long)]
    kernels: bool,
}

/// How many names a summary shows.
const FEW: usize = 5;

/// One file, read or not.
struct Report<'a> {
    path: &'a Path,
    inventory: Result<Inventory>,
    comparison: Option<Comparison>,
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    let other = args.against.as_deref().map(cubin::read).transpose()?;
    let reports: Vec<Report<'_>> = args
        .files
        .iter()
        .map(|path| {
            let inventory = cubin::read(path);
            let comparison = match (&inventory, &other) {
                (Ok(inventory), Some(other)) => Some(compare::compare(inventory, other)),
                _ => None,
            };
            Report { path, inventory, comparison }
        })
        .collect();
    let exit = reports.iter().map(Report::exit).max_by_key(|exit| *exit as u8).unwrap_or(Exit::Right);
    let against = args.against.as_deref();
    output.result(
        || {
            json!({
                "verdict": if exit == Exit::Right { "right" } else { "fault" },
                "files": reports.iter().map(|report| report.json(against, args.kernels)).collect::<Vec<_>>(),
            })
        },
        || reports.iter().map(|report| report.text(against, args.kernels)).collect::<Vec<_>>().join("\n"),
    );
    for error in reports.iter().filter_map(|report| report.inventory.as_ref().err()) {
        eprintln!("error: {error}");
    }
    Ok(exit)
}

impl Report<'_> {
    fn exit(&self) -> Exit {
        match (&self.inventory, &self.comparison) {
            (Err(error), _) => error.exit(),
            (_, Some(comparison)) if comparison.is_equal() => Exit::Right,
            (_, Some(_)) => Exit::Fault,
            (Ok(inventory), None) if inventory.images.iter().any(|image| image.hollow().next().is_some()) => Exit::Fault,
            (Ok(_), None) => Exit::Right,
        }
    }

    fn json(&self, against: Option<&Path>, list: bool) -> Value {
        let mut file = match &self.inventory {
            Ok(inventory) => inventory_json(inventory, list),
            Err(error) => error_json(error),
        };
        if let Value::Object(fields) = &mut file {
            fields.shift_insert(0, "path".into(), self.path.display().to_string().into());
            if let (Some(comparison), Some(other)) = (&self.comparison, against) {
                fields.insert("against".into(), comparison_json(comparison, other));
            }
        }
        file
    }

    fn text(&self, against: Option<&Path>, list: bool) -> String {
        let Ok(inventory) = &self.inventory else { return format!("{}: not understood\n", self.path.display()) };
        let mut text = format!("{}: {}", self.path.display(), inventory.format);
        match inventory.images.len() {
            0 => text.push_str(", no GPU code\n"),
            1 => text.push_str(", 1 image\n"),
            count => _ = writeln!(text, ", {count} images"),
        }
        // Large libraries hold hundreds of images that the linker left empty.
        let (full, empty): (Vec<_>, Vec<_>) =
            inventory.images.iter().partition(|image| !image.kernels.is_empty() || !image.ptx_entries.is_empty());
        full.iter().for_each(|image| image_text(&mut text, image, list));
        if !empty.is_empty() {
            let targets: BTreeSet<_> = empty.iter().map(|image| image.target.as_str()).collect();
            let targets = targets.into_iter().collect::<Vec<_>>().join(", ");
            let _ = writeln!(text, "  {} without kernels ({targets})", count(empty.len(), "image"));
        }
        linkage_text(&mut text, inventory);
        if let (Some(comparison), Some(other)) = (&self.comparison, against) {
            comparison_text(&mut text, comparison, other);
        }
        text
    }
}

fn error_json(error: &Error) -> Value {
    let mut file = error.to_json();
    if let Value::Object(fields) = &mut file {
        fields.insert("images".into(), json!([]));
        fields.insert("needed".into(), json!([]));
        fields.insert("exports".into(), json!([]));
    }
    file
}

fn inventory_json(inventory: &Inventory, list: bool) -> Value {
    let linkage = inventory.linkage.as_ref();
    json!({
        "format": inventory.format.to_string(),
        "images": inventory.images.iter().map(|image| image_json(image, list)).collect::<Vec<_>>(),
        "registered": inventory.registered,
        "needed": linkage.map_or(&[][..], |linkage| &linkage.needed),
        "soname": linkage.and_then(|linkage| linkage.soname.as_ref()),
        "runpath": linkage.and_then(|linkage| linkage.runpath.as_ref().or(linkage.rpath.as_ref())),
        "exports": linkage.map_or(&[][..], |linkage| &linkage.exports).iter().map(|symbol| &symbol.name).collect::<Vec<_>>(),
        "undefined": linkage
            .map_or(&[][..], |linkage| &linkage.undefined)
            .iter()
            .map(|symbol| json!({ "name": symbol.name, "version": symbol.version, "weak": symbol.weak }))
            .collect::<Vec<_>>(),
        "glibc_floor": linkage.and_then(|linkage| linkage.glibc_floor.as_ref()),
        "libstdcxx_floor": linkage.and_then(|linkage| linkage.libstdcxx_floor.as_ref()),
        "cxxabi_floor": linkage.and_then(|linkage| linkage.cxxabi_floor.as_ref()),
    })
}

fn image_json(image: &Image, list: bool) -> Value {
    let mut value = json!({
        "target": image.target,
        "kind": image.kind.to_string(),
        "codec": image.codec.to_string(),
        "toolkit": image.toolkit,
        // PTX is listed and not judged.
        "kernels": image.kernels.len() + image.ptx_entries.len(),
        "hollow": image.hollow().count(),
        "without_dependency_marks": image.without_dependency_marks().count(),
        "opaque": image.kernels.iter().filter(|kernel| kernel.opaque).count(),
        "max_registers": largest(image, |kernel| kernel.registers.into()),
        "max_shared_bytes": largest(image, |kernel| kernel.shared_bytes),
        "max_stack_bytes": largest(image, |kernel| kernel.stack_bytes),
        "code_bytes": image.kernels.iter().map(|kernel| kernel.code_bytes).sum::<u64>(),
        "bytes": image.bytes,
        "stored_bytes": image.stored_bytes,
    });
    if list {
        value["kernel_list"] = match image.kind {
            Kind::Ptx => image.ptx_entries.iter().map(|name| json!({ "name": name })).collect(),
            _ => image.kernels.iter().map(kernel_json).collect(),
        };
    }
    value
}

fn kernel_json(kernel: &Kernel) -> Value {
    json!({
        "name": kernel.name,
        "hollow": kernel.hollow,
        "opaque": kernel.opaque,
        "waits": kernel.waits,
        "triggers": kernel.triggers,
        "registers": kernel.registers,
        "shared_bytes": kernel.shared_bytes,
        "stack_bytes": kernel.stack_bytes,
        "local_loads": kernel.local_loads,
        "local_stores": kernel.local_stores,
        "code_bytes": kernel.code_bytes,
        "code": kernel.code.to_string(),
    })
}

fn comparison_json(comparison: &Comparison, other: &Path) -> Value {
    let difference = |difference: &Difference| {
        let mut value = json!({
            "target": difference.target,
            "kind": difference.kind.to_string(),
            "kernel": difference.kernel,
            "what": word(&difference.what),
        });
        if let What::Resources { other, this } = difference.what {
            let resources = |[registers, shared, stack]: [u64; 3]| json!({ "registers": registers, "shared_bytes": shared, "stack_bytes": stack });
            value["other"] = resources(other);
            value["this"] = resources(this);
        }
        value
    };
    json!({
        "path": other.display().to_string(),
        "equal": comparison.is_equal(),
        "equal_kernels": comparison.equal,
        "differences": comparison.differences.iter().map(difference).collect::<Vec<_>>(),
    })
}

fn word(what: &What) -> &'static str {
    match what {
        What::Missing => "missing",
        What::Added => "added",
        What::Code => "code",
        What::Resources { .. } => "resources",
        What::BecameHollow => "became hollow",
        What::NoLongerHollow => "no longer hollow",
    }
}

fn largest(image: &Image, of: impl Fn(&Kernel) -> u64) -> u64 {
    image.kernels.iter().map(of).max().unwrap_or(0)
}

fn image_text(text: &mut String, image: &Image, list: bool) {
    let _ = write!(text, "  {} {} ({}", image.target, image.kind, image.codec);
    if let Some(toolkit) = &image.toolkit {
        let _ = write!(text, ", CUDA {toolkit}");
    }
    let _ = write!(text, "): {}", count(image.kernels.len() + image.ptx_entries.len(), "kernel"));
    if image.kind != Kind::Sass {
        text.push('\n');
        if list {
            image.ptx_entries.iter().for_each(|name| _ = writeln!(text, "    {name}"));
        }
        return;
    }
    let _ = writeln!(
        text,
        ", {} hollow, {} without dependency marks; at most {} registers, {} bytes of shared memory, {} of stack",
        image.hollow().count(),
        image.without_dependency_marks().count(),
        largest(image, |kernel| kernel.registers.into()),
        largest(image, |kernel| kernel.shared_bytes),
        largest(image, |kernel| kernel.stack_bytes),
    );
    if list {
        for kernel in &image.kernels {
            let marks = [
                (kernel.hollow, "hollow"),
                (kernel.opaque, "calls code that is not here"),
                (kernel.waits, "waits"),
                (kernel.triggers, "triggers"),
            ];
            let marks: String = marks.iter().filter(|(is, _)| *is).map(|(_, word)| format!(", {word}")).collect();
            let _ = writeln!(
                text,
                "    {}: {} registers, {} shared, {} stack, {} bytes of code{marks}",
                kernel.name, kernel.registers, kernel.shared_bytes, kernel.stack_bytes, kernel.code_bytes
            );
        }
        return;
    }
    let hollow: Vec<_> = image.hollow().collect();
    for kernel in hollow.iter().take(FEW) {
        let _ = writeln!(text, "    hollow: {}", kernel.name);
    }
    if hollow.len() > FEW {
        let _ = writeln!(text, "    hollow: and {} more (--kernels lists them all)", hollow.len() - FEW);
    }
}

fn linkage_text(text: &mut String, inventory: &Inventory) {
    if !inventory.registered.is_empty() {
        let _ = writeln!(text, "  host code names {}", count(inventory.registered.len(), "kernel"));
    }
    let Some(linkage) = &inventory.linkage else { return };
    let needed = if linkage.needed.is_empty() { "nothing".to_owned() } else { linkage.needed.join(", ") };
    let _ = writeln!(text, "  needs {needed}");
    let _ = writeln!(text, "  exports {}, {} undefined", count(linkage.exports.len(), "symbol"), linkage.undefined.len());
    let floors = [("glibc", &linkage.glibc_floor), ("libstdc++ (GLIBCXX)", &linkage.libstdcxx_floor)];
    let floors: Vec<_> =
        floors.iter().filter_map(|(what, floor)| floor.as_ref().map(|floor| format!("{what} {floor}"))).collect();
    if !floors.is_empty() {
        let _ = writeln!(text, "  asks for {} or newer", floors.join(" and "));
    }
}

fn comparison_text(text: &mut String, comparison: &Comparison, other: &Path) {
    let other = other.display();
    if comparison.is_equal() {
        let _ = writeln!(text, "  equal to {other}: {}", count(comparison.equal, "kernel"));
        return;
    }
    let _ = writeln!(
        text,
        "  differs from {other}: {}; equal: {}",
        count(comparison.differences.len(), "difference"),
        count(comparison.equal, "kernel"),
    );
    for difference in &comparison.differences {
        let name = if difference.kernel.is_empty() { difference.kind.to_string() } else { difference.kernel.clone() };
        let _ = write!(text, "    {} {name}: {}", difference.target, word(&difference.what));
        if let What::Resources { other, this } = difference.what {
            for ((what, other), this) in ["registers", "shared", "stack"].iter().zip(other).zip(this) {
                if other != this {
                    let _ = write!(text, ", {what} {other} → {this}");
                }
            }
        }
        text.push('\n');
    }
}

/// `1 kernel`, `2 kernels`.
fn count(number: usize, word: &str) -> String {
    format!("{number} {word}{}", if number == 1 { "" } else { "s" })
}
