//! `fi-arch status`.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::install::{edits, state_lines};
use super::output::Output;
use crate::activate::{self, Found, InPlace, Is, Mode, Process, Site, Standing};
use crate::digest::Digest;
use crate::env;
use crate::error::{Error, Result};
use crate::exit::Exit;
use crate::memo::Memo;
use crate::survey::{self, Environment};

/// Show what fi-arch changed in an environment: when, by which edits, and how each file is now
///
/// Also ends what an interrupted `install` or `uninstall` left half done. `fi-arch verify` judges it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The Python environment [default: the active one, else that of python3 on PATH]
    #[arg(long, value_name = "DIR")]
    env: Option<PathBuf>,

    /// Print the unified diff of what is served against the originals, with the reason of each edit
    #[arg(long, conflicts_with = "pid")]
    diff: bool,

    /// Say what a running process has loaded instead, from its memory map
    #[arg(long, value_name = "PID", conflicts_with = "env")]
    pid: Option<u32>,

    /// The module to look for in a process
    #[arg(long, default_value = "trtllm_comm", value_name = "NAME", requires = "pid")]
    module: String,
}

pub fn run(args: Args, output: &Output) -> Result<Exit> {
    if let Some(pid) = args.pid {
        let process = activate::process(pid, &args.module)?;
        output.result(|| process_json(&process), || process_text(&process, &args.module));
        return Ok(Exit::Right);
    }
    let memo = env::home().map(|home| Memo::load(&home)).unwrap_or_default();
    let environment = survey::environment(args.env.as_deref(), &memo)?
        .ok_or_else(|| Error::machine("no Python environment was found").hint("name one with --env DIR"))?;
    let interrupted = recover(&environment)?;
    let found = activate::look(&environment, &memo)?;
    let in_place = activate::in_place(&environment)?;
    let diff = match (&found, args.diff) {
        (Some(found), true) => Some(activate::diff(found, &environment)?),
        _ => None,
    };
    output.result(
        || {
            let mut json = to_json(found.as_ref(), in_place.as_ref());
            json["interrupted"] = json!(interrupted);
            if let Some(diff) = &diff {
                json["diff"] = json!(diff);
            }
            json
        },
        || {
            let remark = interrupted.as_ref().map(|text| format!("{text}\n")).unwrap_or_default();
            remark + &diff.clone().unwrap_or_else(|| text(&environment, found.as_ref(), in_place.as_ref()))
        },
    );
    Ok(Exit::Right)
}

/// Ends what was interrupted, where this user may; says what was done, or why not.
fn recover(environment: &Environment) -> Result<Option<String>> {
    for site in environment.site_packages.iter().filter(|site| site.join(activate::FOLDER).is_dir()) {
        let interrupted = activate::peek(site)?.1;
        match Site::lock(site)?.recover() {
            Ok(None) => {}
            Ok(Some(recovered)) => return Ok(Some(recovered.says().to_owned())),
            Err(error) if interrupted => return Ok(Some(error.to_string())),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn to_json(found: Option<&Found>, in_place: Option<&(PathBuf, InPlace)>) -> Value {
    let lies = in_place.map(|(site, in_place)| {
        let files = in_place.files.iter();
        json!({
            "site": site,
            "created": in_place.created,
            "files": files.map(|file| json!({ "path": site.join(&file.path), "distribution": file.distribution })).collect::<Vec<_>>(),
        })
    });
    let Some(found) = found else {
        let verdict = if lies.is_some() { "left" } else { "not-installed" };
        return json!({ "verdict": verdict, "in_place": lies });
    };
    let state = match &found.state {
        Ok(state) => state,
        Err(why) => return json!({ "verdict": "damaged", "site": found.site, "why": why, "in_place": lies }),
    };
    let packages = state.packages.iter().zip(&found.packages).map(|(package, now)| {
        let files = package.files.iter().zip(&now.files).map(|(file, now)| {
            json!({
                "path": now.path, "state": now.is.word(), "right": now.is.is_right(file, state.mode), "edits": file.edits,
                "pre": file.pre, "post": file.post,
            })
        });
        json!({
            "name": package.name, "distribution": package.distribution, "version": package.version, "version_now": now.version,
            "files": files.collect::<Vec<_>>(), "edits": package.edits,
        })
    });
    let artifacts = state.artifacts.iter().map(|artifact| {
        let path = found.package().join(&artifact.file);
        let mut json = serde_json::to_value(artifact).expect("a state is always JSON");
        json["path"] = json!(path);
        json["state"] = json!(artifact_state(&path, artifact.sha256));
        json
    });
    json!({
        "verdict": "installed",
        "site": found.site,
        "mode": state.mode,
        "created": state.created,
        "fi_arch": state.fi_arch,
        "packages": packages.collect::<Vec<_>>(),
        "edits": edits(state),
        "artifacts": artifacts.collect::<Vec<_>>(),
        "policy": state.policy,
        "on_miss": state.on_miss,
        "in_place": lies,
    })
}

fn artifact_state(path: &std::path::Path, sha256: Digest) -> &'static str {
    match std::fs::read(path).map(|bytes| Digest::of(&bytes)) {
        Ok(digest) if digest == sha256 => "sound",
        Ok(_) => "altered",
        Err(_) => "missing",
    }
}

fn text(environment: &Environment, found: Option<&Found>, in_place: Option<&(PathBuf, InPlace)>) -> String {
    let Some(found) = found else {
        return match in_place {
            None => format!("nothing of fi-arch is installed in {}\n", environment.prefix.display()),
            Some((site, in_place)) => {
                let files = in_place.files.iter().map(|file| format!("  {}\n", site.join(&file.path).display()));
                format!(
                    "the package is gone from {}, but {} files that were written over or added are not taken back:\n{}\
                     `fi-arch uninstall` gives the originals back\n",
                    site.display(),
                    in_place.files.len(),
                    files.collect::<String>()
                )
            }
        };
    };
    let state = match &found.state {
        Ok(state) => state,
        Err(why) => {
            return format!(
                "{} is damaged: {why}\n`fi-arch install` writes it anew, `fi-arch uninstall` takes it back\n",
                found.package().display()
            );
        }
    };
    let mode = match state.mode {
        Mode::Shim => "shim: served at import",
        Mode::InPlace => "in place: written over the originals",
        Mode::Run => "run: for one process tree",
    };
    let mut text =
        format!("{}\n  by        fi-arch {} on {}\n  mode      {mode}\n", found.site.display(), state.fi_arch, state.created);
    for (package, now) in state.packages.iter().zip(&found.packages) {
        let version = match &now.version {
            Some(version) if *version == package.version => version.clone(),
            Some(version) => format!("{}, and now {version} is installed", package.version),
            None => format!("{}, which is gone now", package.version),
        };
        writeln!(text, "  {:<9} {version}", package.name).expect("a string takes all");
        for (file, now) in package.files.iter().zip(&now.files) {
            let wrong = if now.is.is_right(file, state.mode) { "" } else { "  <- wrong" };
            let edits = if file.edits.is_empty() { "watched".to_owned() } else { file.edits.join(", ") };
            writeln!(text, "    {:<9} {} ({edits}){wrong}", now.is.word(), file.path).expect("a string takes all");
        }
        for edit in &package.edits {
            writeln!(text, "    edit      {} at {}:{}: {}", edit.id, edit.path, edit.line, edit.reason)
                .expect("a string takes all");
        }
    }
    state_lines(state, &mut |name, what| writeln!(text, "  {name:<9} {what}").expect("a string takes all"));
    for artifact in &state.artifacts {
        let path = found.package().join(&artifact.file);
        let is = artifact_state(&path, artifact.sha256);
        writeln!(text, "  file      {} ({is})", path.display()).expect("a string takes all");
    }
    text
}

fn standing(standing: &Standing) -> (&'static str, Option<&str>) {
    match standing {
        Standing::Installed => ("installed", None),
        Standing::Stale(why) => ("stale", Some(why)),
        Standing::Foreign => ("foreign", None),
    }
}

/// The module in a process, in a word: the best that is there.
fn verdict(process: &Process) -> &'static str {
    let of = |wanted: fn(&Standing) -> bool| {
        process.libraries.iter().any(|library| matches!(&library.is, Is::Module(standing) if wanted(standing)))
    };
    match () {
        () if of(|standing| matches!(standing, Standing::Stale(_))) => "stale",
        () if of(|standing| *standing == Standing::Foreign) => "foreign",
        () if of(|standing| *standing == Standing::Installed) => "installed",
        () => "not-loaded",
    }
}

fn process_json(process: &Process) -> Value {
    let libraries = process.libraries.iter().map(|library| {
        let (kind, standing) = match &library.is {
            Is::Module(of) => ("module", Some(standing(of))),
            Is::Cudart => ("cudart", None),
            Is::TvmFfi => ("tvm_ffi", None),
        };
        json!({
            "path": library.path, "kind": kind, "sha256": library.sha256,
            "standing": standing.map(|(word, _)| word), "why": standing.and_then(|(_, why)| why),
        })
    });
    let variables: serde_json::Map<String, Value> =
        process.variables.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    json!({ "verdict": verdict(process), "pid": process.pid, "libraries": libraries.collect::<Vec<_>>(), "variables": variables })
}

fn process_text(process: &Process, module: &str) -> String {
    let mut text = format!("process {}\n", process.pid);
    let mut line = |name: &str, what: String| writeln!(text, "  {name:<9} {what}").expect("a string takes all");
    if verdict(process) == "not-loaded" {
        line("module", format!("no {module}.so is loaded (yet): FlashInfer loads it with the first all-reduce"));
    }
    for library in &process.libraries {
        let path = library.path.display();
        match &library.is {
            Is::Module(Standing::Installed) => line("module", format!("{path}: the installed artifact")),
            Is::Module(Standing::Stale(why)) => line("module", format!("{path}: {why}")),
            Is::Module(Standing::Foreign) => {
                line("module", format!("{path}: not fi-arch's; FlashInfer compiled it or brought it"))
            }
            Is::Cudart => line("cudart", path.to_string()),
            Is::TvmFfi => line("tvm_ffi", path.to_string()),
        }
    }
    for (name, value) in &process.variables {
        line("variable", format!("{name}={value}"));
    }
    text
}
