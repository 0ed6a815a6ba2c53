//! `fi-arch scan`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Value, json};

use super::output::Output;
use crate::cubin::scan::{self, Kernels, Options, Scan, Scanned};
use crate::cubin::usable::Usable;
use crate::error::Result;
use crate::exit::Exit;
use crate::{tables, target};

/// Show which libraries below a folder have code that a GPU can run, and which kernels of it are hollow
///
/// Reads every .so, .cubin and .fatbin below DIR; needs no CUDA toolkit. Ends with 1 when a file has GPU code and none
/// for a target, or when a kernel for it is hollow that is not so for another target. Libraries that choose among their own kernels
/// (cuBLAS, cuDNN and the like) may hold hollow ones: those are shown, and are no fault. Links count once. Files that cannot be
/// understood are reported, and count as faults only where they are known to hold GPU code.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder: an environment, a site-packages, an unpacked image
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// The GPUs to run on: 120, 12.0, sm_121, or a list of them
    #[arg(long, value_name = "TARGETS")]
    sm: String,

    /// List also the files that are in order, and those without GPU code
    #[arg(long)]
    all: bool,

    /// Look for hollow kernels in every file, however large [default: where the code for the targets is below 256 MiB, packed]
    #[arg(long)]
    hollow: bool,
}

/// How many names of kernels a summary shows.
const FEW: usize = 5;

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    let started = Instant::now();
    scan::check_folder(&args.dir)?;
    let mut sms: Vec<u32> = target::parse_list(&args.sm)?.iter().map(|request| request.sm).collect();
    sms.dedup();
    let scan = scan::scan(&args.dir, &Options { sms: sms.clone(), read_all: args.hollow });
    let sum = Sum::of(&scan);
    let exit = if sum.without > 0 || sum.hollow > 0 || sum.damaged > 0 { Exit::Fault } else { Exit::Right };
    let elapsed = started.elapsed().as_secs_f64();
    output.result(
        || {
            let files = scan.files.iter().filter(|file| args.all || !is_silent(file)).map(file_json).collect::<Vec<_>>();
            json!({
                "verdict": if exit == Exit::Right { "right" } else { "fault" },
                "targets": sms.iter().map(|sm| format!("sm_{sm}")).collect::<Vec<_>>(),
                "files": files,
                "unlisted": scan.unlisted.iter().map(|error| error.to_json()["error"].clone()).collect::<Vec<_>>(),
                "looked_at": sum.files,
                "with_gpu_code": sum.with_code,
                "without_usable_code": sum.without,
                "with_hollow_kernels": sum.hollow,
                "with_hollow_kernels_not_chosen": sum.hollow_not_chosen,
                "kernels_not_read": sum.not_read,
                "unreadable": sum.unreadable,
                "elapsed_s": elapsed,
            })
        },
        || text(&scan, &sum, &args, elapsed),
    );
    Ok(exit)
}

/// A file that says nothing: no GPU code, and no fault.
fn is_silent(file: &Scanned) -> bool {
    file.found.as_ref().is_ok_and(|found| !found.has_gpu_code())
}

#[derive(Default)]
struct Sum {
    files: usize,
    with_code: usize,
    /// Files with GPU code that lack a target.
    without: usize,
    /// Files with hollow kernels that somebody may launch.
    hollow: usize,
    /// Files with hollow kernels that choose among their kernels themselves.
    hollow_not_chosen: usize,
    not_read: usize,
    unreadable: usize,
    /// Unreadable, and known to hold GPU code.
    damaged: usize,
}

impl Sum {
    fn of(scan: &Scan) -> Self {
        let mut sum = Self { files: scan.files.len(), ..Self::default() };
        for file in &scan.files {
            match &file.found {
                Ok(found) => {
                    sum.with_code += usize::from(found.has_gpu_code());
                    sum.without += usize::from(found.missing().next().is_some());
                    let count = if chooses(file) { &mut sum.hollow_not_chosen } else { &mut sum.hollow };
                    *count += usize::from(!found.hollow().is_empty());
                    sum.not_read += usize::from(matches!(found.kernels, Kernels::NotRead { .. }));
                }
                Err(unread) => {
                    sum.unreadable += 1;
                    sum.damaged += usize::from(unread.holds_code);
                }
            }
        }
        sum
    }
}

/// Whether a file launches only those of its kernels that it has chosen for the GPU.
fn chooses(file: &Scanned) -> bool {
    file.path.file_name().and_then(|name| name.to_str()).is_some_and(tables::chooses_its_kernels)
}

fn word(usable: Option<Usable>) -> &'static str {
    match usable {
        Some(Usable::Directly) => "sass",
        Some(Usable::ThroughDriver) => "ptx",
        None => "none",
    }
}

fn file_json(file: &Scanned) -> Value {
    let mut value = json!({ "path": file.path.display().to_string(), "bytes": file.bytes });
    match &file.found {
        Err(unread) => value["error"] = unread.error.to_json()["error"].clone(),
        Ok(found) => {
            value["targets"] = found.targets.iter().map(|(target, images)| (target.clone(), json!(images))).collect();
            value["usable"] = found.usable.iter().map(|(sm, how)| (format!("sm_{sm}"), json!(word(*how)))).collect();
            let [kernels, hollow, everywhere] = match &found.kernels {
                Kernels::None => [Some(0); 3],
                Kernels::NotRead { .. } => [None; 3],
                Kernels::Read { count, hollow, hollow_everywhere } => [*count, hollow.len(), *hollow_everywhere].map(Some),
            };
            (value["kernels"], value["hollow"], value["hollow_everywhere"]) = (json!(kernels), json!(hollow), json!(everywhere));
            value["hollow_kernels"] = json!(found.hollow());
            value["chooses_its_kernels"] = json!(chooses(file));
        }
    }
    value
}

fn text(scan: &Scan, sum: &Sum, args: &Args, elapsed: f64) -> String {
    let mut text = String::new();
    for file in &scan.files {
        let path = file.path.strip_prefix(&args.dir).unwrap_or(&file.path).display();
        let found = match &file.found {
            Err(unread) => {
                let why = unread.error.why().join(": ");
                let _ = writeln!(text, "unreadable  {path}: {}", if why.is_empty() { unread.error.what() } else { &why });
                continue;
            }
            Ok(found) => found,
        };
        let targets = || found.targets.keys().map(String::as_str).collect::<Vec<_>>().join(" ");
        let missing: Vec<String> = found.missing().map(|sm| format!("sm_{sm}")).collect();
        if !missing.is_empty() {
            let _ = writeln!(text, "no code     {path}: nothing for {}; it has {}", missing.join(", "), targets());
        }
        let hollow = found.hollow();
        if let (Kernels::Read { count, .. }, false) = (&found.kernels, hollow.is_empty()) {
            let (word, remark) = match chooses(file) {
                true => ("its choice ", "; the library itself decides what it launches"),
                false => ("hollow     ", ""),
            };
            let _ = writeln!(text, "{word} {path}: {} of {count} kernels cannot write any result here{remark}", hollow.len());
            hollow.iter().take(FEW).for_each(|name| _ = writeln!(text, "              {name}"));
            if hollow.len() > FEW {
                let _ = writeln!(text, "              and {} more (--json lists them all)", hollow.len() - FEW);
            }
        }
        if args.all && missing.is_empty() && hollow.is_empty() {
            let _ = match (&found.kernels, found.has_gpu_code()) {
                (_, false) => writeln!(text, "no GPU code {path}"),
                (Kernels::Read { count, .. }, true) => {
                    writeln!(text, "right       {path}: {count} kernels; it has {}", targets())
                }
                (Kernels::NotRead { .. }, true) => writeln!(text, "has code    {path}: it has {}", targets()),
                (Kernels::None, true) => writeln!(text, "through PTX {path}: it has {}", targets()),
            };
        }
    }
    for error in &scan.unlisted {
        let _ = writeln!(text, "unreadable  {}: {}", error.what(), error.why().join(": "));
    }
    let through_driver: Vec<_> = scan
        .files
        .iter()
        .filter(|file| {
            file.found.as_ref().is_ok_and(|found| found.usable.iter().any(|(_, how)| *how == Some(Usable::ThroughDriver)))
        })
        .collect();
    let _ = writeln!(
        text,
        "{} files, {} with GPU code: {} without code for the target, {} with hollow kernels, {} unreadable ({elapsed:.1} s)",
        sum.files,
        sum.with_code,
        sum.without,
        sum.hollow,
        sum.unreadable + scan.unlisted.len(),
    );
    if !through_driver.is_empty() {
        let _ =
            writeln!(text, "{} of them run only through PTX, which the driver compiles at the first start", through_driver.len());
    }
    if sum.not_read > 0 {
        let _ = writeln!(text, "not looked at: the kernels of {} large files (--hollow reads them too)", sum.not_read);
        for file in &scan.files {
            if let Ok(scan::Found { kernels: Kernels::NotRead { packed_bytes }, .. }) = &file.found {
                let path = file.path.strip_prefix(&args.dir).unwrap_or(&file.path).display();
                let _ = writeln!(text, "              {path}: {} MiB of code for the target", packed_bytes >> 20);
            }
        }
    }
    text
}
