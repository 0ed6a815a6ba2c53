//! `verify`: what a process of an environment will really load, and whether that is right. Files alone are read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::activation::{self, Activation, Start};
use super::command_line::{self, CommandLine};
use super::launch::{self, Launch};
use super::{
    Finding, Owner, Report, arch_list, gates, gpus, names, packages, prebuilt, state_digest, targets, toolchain, variables,
};
use crate::activate::{self, FileIs, Mode};
use crate::digest::Digest;
use crate::env;
use crate::error::{Error, Result};
use crate::memo::Memo;
use crate::overlay::{self, EngineOptions};
use crate::sites::{self, python};
use crate::survey::{self, Environment, Package};
use crate::tables::{self, Engine, Module, NoteKind, Tables};
use crate::target;

/// What to prove.
#[derive(Debug, Default)]
pub struct Request {
    /// `--env DIR`; without it the environment of the command's Python, or the active one.
    pub env: Option<PathBuf>,
    /// The GPUs that matter. Empty: those of this machine, and SM 120 where there is none.
    pub targets: Vec<target::Request>,
    /// The words of a command line; empty where none is given.
    pub command: Vec<String>,
}

/// What was proven.
#[derive(Debug)]
pub struct Proof {
    pub report: Report,
    pub command: Option<CommandLine>,
    pub activation: Option<Activation>,
    pub engines: Vec<(String, Package)>,
    pub launch: Option<Launch>,
    pub files: Vec<FileReport>,
    pub gates: Vec<EffectiveGate>,
    /// What becomes of it with `FI_ARCH_DISABLE=1`.
    pub if_disabled: String,
    /// The digest of everything that decides; the same on every machine that is set up alike.
    pub state: Digest,
}

/// A file of the set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileReport {
    pub package: String,
    pub path: PathBuf,
    pub is: FileIs,
    /// It is only watched: nothing in it is edited.
    pub watched: bool,
    /// Where Python gets it from in its place, where that is another file.
    pub served: Option<PathBuf>,
}

/// A gate as a process meets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EffectiveGate {
    pub package: String,
    /// The generator of a module, or the id of an engine's gate.
    pub name: String,
    pub path: PathBuf,
    pub line: usize,
    /// For each target, whether the file on disk lets it in.
    pub on_disk: Vec<(u32, bool)>,
    /// For each target, whether a process lets it in.
    pub open: Vec<(u32, bool)>,
    pub owner: Owner,
}

/// Findings of `doctor` about compiling, which nothing has to do where our artifact is loaded.
const ABOUT_COMPILING: [&str; 16] = [
    "toolkit-missing",
    "toolkit-unfit",
    "toolkit-too-old",
    "toolkit-mixed",
    "toolkit-torch-major",
    "toolkit-torch-minor",
    "cuda-home-malformed",
    "host-compiler",
    "arch-list-unknown",
    "arch-list-bare",
    "arch-list-lacks-target",
    "arch-set-empty",
    "jit-disabled",
    "companion-cuda",
    "prebuilt-lacks-target",
    "slot-ignored",
];

/// The id of the engine's gate behind which a server ends that was told to use the fused path.
const BACKEND: &str = "backend";

/// Proves it. An error is a wrong command line; whatever is wrong with the machine is a finding.
pub fn prove(request: &Request, memo: &Memo) -> Result<Proof> {
    let module = Tables::load().module(super::MODULE)?;
    let command = (!request.command.is_empty()).then(|| command_line::read(&request.command));
    let mut report = Report { vars: command.as_ref().map(|line| line.vars.clone()).unwrap_or_default(), ..Report::default() };
    let start = Start {
        flags: command.as_ref().and_then(|line| line.python).unwrap_or_default(),
        through_run: command.as_ref().is_some_and(CommandLine::through_run),
    };
    let (mut engines, mut launch) = (Vec::new(), None);
    std::thread::scope(|scope| {
        // What a driver answers takes longer than all the files here; and with --sm it only says what stands beside.
        let gpus = scope.spawn(|| survey::gpus_of_this_boot(memo));
        environment(&mut report, request, command.as_ref(), &start, memo)?;
        packages::look(&mut report);
        engines = installed_engines(&report);
        report.gpus = gpus.join().unwrap_or_default();
        Ok::<(), Error>(())
    })?;
    only_visible(&mut report);
    targets(&mut report, &target_request(request))?;
    variables::look(&mut report, &engines);
    if let Some(line) = &command {
        shadowed(&mut report, line);
        launch = launch::read(&mut report, line);
    }
    let activation = activation::look(&mut report, &start, memo);
    let loads_ours = activation.as_ref().is_some_and(|activation| activation.in_force && activation.brings_artifact());
    let before = report.findings.problems.len();
    toolchain::look(&mut report, memo);
    gpus::look(&mut report);
    arch_list::look(&mut report);
    prebuilt::locks(&mut report);
    match &activation {
        Some(_) if loads_ours => {
            gates::remaining(&mut report);
            prebuilt::passed_over(&mut report, module);
        }
        Some(activation) if activation.brings_artifact() || activation.state().is_none() => {}
        _ => flashinfer_itself(&mut report, module, &start, memo),
    }
    if loads_ours || start.through_run {
        demote(&mut report, before);
    }
    let mut gates = effective_gates(&report, module, activation.as_ref());
    gates.extend(engine_gates(&mut report, &engines, launch.as_ref(), activation.as_ref()));
    if let Some(launch) = &launch {
        launch::look(&mut report, launch, activation.as_ref());
    }
    let files = activation.as_ref().map(files).unwrap_or_default();
    let if_disabled = if_disabled(&report, module, activation.as_ref(), &engines);
    let state = state_digest::of(&report, module, activation.as_ref(), &engines);
    Ok(Proof { report, command, activation, engines, launch, files, gates, if_disabled, state })
}

fn target_request(request: &Request) -> super::Request {
    super::Request { targets: request.targets.clone(), ..super::Request::default() }
}

/// The environment that the process will have.
fn environment(report: &mut Report, request: &Request, command: Option<&CommandLine>, start: &Start, memo: &Memo) -> Result<()> {
    let python = command.and_then(|line| program(report, line));
    match (&request.env, &python) {
        (None, Some(python)) => match survey::environment(Some(python), memo) {
            Ok(found) => {
                report.environment = found.map(|found| Environment { origin: "the command's Python".to_owned(), ..found });
            }
            Err(error) => report.findings.problem(Finding::of("environment-broken", &error)),
        },
        _ => packages::environment(report, &super::Request { env: request.env.clone(), ..super::Request::default() }, memo)?,
    }
    if let (Some(_), Some(python)) = (&request.env, &python) {
        let theirs = survey::environment(Some(python), memo).ok().flatten();
        let ours = report.environment.as_ref();
        let same = |theirs: &Environment, ours: &Environment| {
            real(&theirs.prefix) == real(&ours.prefix)
                || theirs.site_packages.iter().any(|site| ours.site_packages.first() == Some(site))
        };
        if let (Some(theirs), Some(ours)) = (theirs, ours)
            && !same(&theirs, ours)
        {
            let message = format!(
                "the command starts the Python of {}, and {} is looked at",
                theirs.prefix.display(),
                ours.prefix.display()
            );
            let hint = "leave --env out, or start that environment's own Python";
            report.findings.problem(Finding::new("other-environment", message).hint(hint).at(python));
        }
    }
    let vars = report.vars.clone();
    let Some(environment) = &mut report.environment else { return Ok(()) };
    environment.python_path = match vars.var(env::PYTHONPATH).filter(|_| !start.flags.ignores_variables()) {
        Some(value) => survey::python_path(&value),
        None => Vec::new(),
    };
    if start.flags.ignores_variables() {
        let all = vars.var(env::PYTHONPATH).map(|value| survey::python_path(&value)).unwrap_or_default();
        let lost = all.into_iter().map(|dir| dir.join(activate::PACKAGE)).find(|dir| dir.join(activate::FILE).exists());
        if let Some(lost) = lost {
            let flag = if start.flags.isolated { "-I" } else { "-E" };
            let message = format!("Python is started with {flag}: it reads no PYTHONPATH, on which `fi-arch run` puts the shim");
            let hint = format!("leave out {flag}, or activate with `fi-arch install`");
            report.findings.problem(Finding::new("python-ignores-run", message).hint(hint).at(lost));
        }
    }
    let variables_off = !start.flags.ignores_variables() && vars.is_set(env::PYTHONNOUSERSITE);
    if start.flags.ignores_user_site() || variables_off {
        let base = vars.var(env::PYTHONUSERBASE).map(PathBuf::from).or_else(|| dirs::home_dir().map(|home| home.join(".local")));
        let (user, rest): (Vec<PathBuf>, Vec<PathBuf>) =
            environment.site_packages.drain(..).partition(|site| base.as_ref().is_some_and(|base| site.starts_with(base)));
        environment.site_packages = rest;
        let lost = user.iter().map(|site| site.join(activate::PACKAGE)).find(|dir| dir.is_dir());
        if let Some(lost) = lost {
            let why = if variables_off { "PYTHONNOUSERSITE is set" } else { "Python is started with -s or -I" };
            let message = format!("the shim lies among the user's own packages, and {why}: it never starts");
            report.findings.problem(
                Finding::new("user-site-off", message).hint("`fi-arch install --env DIR` puts it into an environment").at(lost),
            );
        }
    }
    Ok(())
}

/// The Python of a command line; a finding where there is no such program.
fn program(report: &mut Report, line: &CommandLine) -> Option<PathBuf> {
    if line.program.is_empty() || line.elsewhere() {
        return None;
    }
    if line.executable().is_none() {
        let message = format!("there is no program `{}`", line.program);
        report
            .findings
            .problem(Finding::new("program-missing", message).hint("name it by its full path, or activate its environment"));
    }
    line.python_program().and_then(|python| std::path::absolute(python).ok())
}

fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Leaves of this machine's GPUs those that the process will see.
fn only_visible(report: &mut Report) {
    let Some(numbers) = variables::visible_numbers(&report.vars) else { return };
    let gpus = std::mem::take(&mut report.gpus);
    // A number without a GPU is told when the ranks are counted.
    report.gpus = numbers.iter().filter_map(|number| gpus.get(*number).cloned()).collect();
}

/// `python -m` searches the working folder before everything else.
fn shadowed(report: &mut Report, line: &CommandLine) {
    let Some(flags) = line.python else { return };
    let safe = flags.safe_path || flags.isolated || (!flags.no_variables && report.vars.is_set(env::PYTHONSAFEPATH));
    if !flags.module || safe {
        return;
    }
    let folder = std::path::absolute(line.folder.clone().unwrap_or_default().join(".")).unwrap_or_default();
    if let Some(other) = variables::shadowing_folder(report, folder, &["flashinfer", "sglang", "vllm"]) {
        let message =
            "`python -m` searches the working folder first, and this package there is imported instead of the installed one";
        report.findings.problem(
            Finding::new("shadowed-by-folder", message).hint("start it from another folder, or with `python -P`").at(other),
        );
    }
}

fn installed_engines(report: &Report) -> Vec<(String, Package)> {
    let Some(environment) = &report.environment else { return Vec::new() };
    let find = |name: &String| Some((name.clone(), survey::package(environment, name, name).ok().flatten()?));
    tables::launchers().iter().map(|launcher| &launcher.name).filter_map(find).collect()
}

/// FlashInfer as it is by itself: where nothing is activated, or nothing of ours stands in its place.
fn flashinfer_itself(report: &mut Report, module: &Module, start: &Start, memo: &Memo) {
    let before = report.findings.problems.len();
    gates::look(report, module, None);
    let is_closed = report.findings.problems[before..].iter().any(|problem| problem.code == "gate-closed");
    if is_closed && start.through_run {
        report.findings.problems.retain(|problem| problem.code != "gate-closed" && !problem.code.starts_with("defect-"));
        let message =
            "`fi-arch run` activates for its own process tree, and proves what it activates; what stands here is without it";
        return report.findings.note(Finding::new("activated-by-run", message).hint("nothing"));
    }
    for problem in &mut report.findings.problems[before..] {
        if problem.code == "gate-closed" {
            problem.code = "not-installed".to_owned();
            problem.message = format!("nothing is activated here, and {}", problem.message);
        }
        if problem.code == "not-installed" || problem.code.starts_with("defect-") {
            problem.hint = "`fi-arch install`".to_owned();
        }
    }
    if is_closed {
        // What stands behind a closed gate is cured with it.
        report.findings.problems.retain(|problem| !problem.code.starts_with("defect-"));
    } else {
        edits_alone(report, module);
    }
    prebuilt::look(report, module, memo);
    if is_closed {
        // Nothing is looked for behind a closed gate.
        let kept = report.findings.problems.len();
        let mut at = 0;
        report.findings.problems.retain(|problem| {
            at += 1;
            at <= before || at > kept || !ABOUT_COMPILING.contains(&problem.code.as_str())
        });
    }
}

/// Our edits on disk without the package that they ask.
fn edits_alone(report: &mut Report, module: &Module) {
    let Some(package) = report.flashinfer.as_ref().map(|found| found.package.clone()) else { return };
    let path = sites::file_in(&package, &module.generator.file);
    let generator = super::text(&path);
    if generator.contains("from fi_arch_shim import") {
        let message = "this file bears fi-arch's edits, and the package that they ask is gone: FlashInfer compiles for itself";
        let hint =
            "`fi-arch install --in-place` activates anew; `fi-arch uninstall` gives the originals back where they were kept";
        report.findings.problem(Finding::new("edits-alone", message).hint(hint).at(path));
    }
}

/// Makes notes of what concerns compiling alone.
fn demote(report: &mut Report, from: usize) {
    let behind = report.findings.problems.split_off(from);
    for finding in behind {
        let about_compiling = ABOUT_COMPILING.contains(&finding.code.as_str());
        report.findings.add(!about_compiling, finding);
    }
}

/// The gates of FlashInfer's generators as a process meets them.
fn effective_gates(report: &Report, module: &Module, activation: Option<&Activation>) -> Vec<EffectiveGate> {
    let (Some(package), Some(gate)) = (report.package(), sites::gate_of(module)) else { return Vec::new() };
    let file = &module.generator.file;
    let path = sites::file_in(package, file);
    let generators =
        |path: &Path| sites::read(path).ok().and_then(|source| python::generators(&source, gate).ok()).unwrap_or_default();
    let on_disk = generators(&path);
    let served = activation.and_then(|activation| activation.served(file));
    let effective: BTreeMap<String, python::Generator> = served
        .as_deref()
        .map(generators)
        .unwrap_or_else(|| on_disk.clone())
        .into_iter()
        .map(|found| (found.name.clone(), found))
        .collect();
    let sms = report.sms();
    let open = |found: &python::Generator| -> Vec<(u32, bool)> {
        let is_open = |sm: u32| found.majors.as_ref().is_none_or(|majors| majors.is_empty() || majors.contains(&(sm / 10)));
        sms.iter().map(|sm| (*sm, is_open(*sm))).collect()
    };
    let gates = on_disk.iter().filter(|found| found.majors.is_some()).map(|found| {
        let now = effective.get(&found.name).map_or_else(|| open(found), open);
        let ours = Tables::load().modules.iter().any(|module| module.generator.function == found.name && module.gated);
        let owner = match (ours, now.iter().all(|(_, open)| *open)) {
            (true, _) => Owner::FiArch,
            (false, true) => Owner::Nobody,
            (false, false) => Owner::OnPurpose,
        };
        let (name, line) = (found.name.clone(), found.line);
        EffectiveGate { package: "flashinfer".to_owned(), name, path: path.clone(), line, on_disk: open(found), open: now, owner }
    });
    let engines = activation.map(|activation| edited_gates(activation, &sms)).unwrap_or_default();
    gates.chain(engines).collect()
}

/// The engines' gates that the activation opens.
fn edited_gates(activation: &Activation, sms: &[u32]) -> Vec<EffectiveGate> {
    let Some(state) = activation.state() else { return Vec::new() };
    let engines = state.packages.iter().zip(&activation.found.packages).filter(|(package, _)| package.name != "flashinfer");
    let mut gates = Vec::new();
    for (package, found) in engines {
        for edit in &package.edits {
            let Some(at) = package.files.iter().position(|file| file.path == edit.path) else { continue };
            let on_disk = found.files[at].is == FileIs::Ours;
            let each = |open: bool| sms.iter().map(|sm| (*sm, open && sm / 10 == 12)).collect::<Vec<_>>();
            gates.push(EffectiveGate {
                package: package.name.clone(),
                name: edit.id.clone(),
                path: found.files[at].path.clone(),
                line: edit.line,
                on_disk: each(on_disk),
                open: each(activation.in_force),
                owner: Owner::FiArch,
            });
        }
    }
    gates
}

/// Engines whose own gates are closed: a problem for who starts them, else worth knowing. Returns those gates.
fn engine_gates(
    report: &mut Report,
    engines: &[(String, Package)],
    launch: Option<&Launch>,
    activation: Option<&Activation>,
) -> Vec<EffectiveGate> {
    let sms = report.sms();
    let mut gates = Vec::new();
    if !sms.iter().any(|sm| sm / 10 == 12) {
        return gates;
    }
    for (name, package) in engines {
        let is_started = launch.is_some_and(|launch| launch.launcher.name == *name);
        let activated = activation.is_some_and(|activation| activation.package(name).is_some());
        let Ok(engine) = tables::engine(name) else { continue };
        if is_started || activated {
            notes(report, engine, package);
        }
        if activated {
            continue;
        }
        let overlay = match overlay::engine(&package.package, engine, &package.version, &EngineOptions::default()) {
            Ok(overlay) => overlay,
            Err(error) => {
                let finding = Finding::of("engine-gate-unknown", &error).at(&package.package);
                report.findings.add(is_started, finding);
                continue;
            }
        };
        // An engine that is told on its command line how far to go has no gate of its own.
        let Some(first) = overlay.edits.first() else { continue };
        let closed: Vec<(u32, bool)> = sms.iter().map(|sm| (*sm, sm / 10 != 12)).collect();
        let place = |edit: &overlay::Edit| package.package.parent().unwrap_or(&package.package).join(&edit.path);
        let launcher = tables::launchers().iter().find(|launcher| launcher.name == *name);
        let closed_means =
            launcher.and_then(|launcher| launcher.fusion_of(&package.version)).map_or("", |row| row.closed.as_str());
        let message = format!("{name} {} keeps SM 12.x out by itself: {closed_means}", package.version);
        let hint = format!("`fi-arch install --engine {name}` opens its gates too");
        let finding = Finding::new("engine-gate-closed", message).hint(hint).at(place(first)).line(first.line);
        report.findings.add(is_started, finding);
        gates.extend(overlay.edits.iter().map(|edit| EffectiveGate {
            package: name.clone(),
            name: edit.id.clone(),
            path: place(edit),
            line: edit.line,
            on_disk: closed.clone(),
            open: closed.clone(),
            owner: Owner::FiArch,
        }));
    }
    gates
}

/// What stays wrong or slow in a pair of engine and FlashInfer, and what does better. What our artifact has cured is no news.
fn notes(report: &mut Report, engine: &Engine, package: &Package) {
    let flashinfer = report.flashinfer.as_ref().map_or("unknown", |found| found.version.as_str()).to_owned();
    let mut told: Vec<&str> = Vec::new();
    for sm in report.sms().into_iter().filter(|sm| sm / 10 == 12) {
        for note in tables::notes(engine, &package.version, &flashinfer, Some(sm)) {
            // That one is said where the variable is set.
            if note.kind == NoteKind::Repaired || note.id == variables::EXPANDABLE || told.contains(&note.id.as_str()) {
                continue;
            }
            told.push(&note.id);
            let message =
                format!("{} {} on FlashInfer {flashinfer}, {}: {}", engine.title, package.version, note.kind.name(), note.text);
            report.findings.note(Finding::new("engine-note", message).hint("keep it in mind"));
        }
    }
}

fn files(activation: &Activation) -> Vec<FileReport> {
    let Some(state) = activation.state() else { return Vec::new() };
    let mut files = Vec::new();
    for (package, found) in state.packages.iter().zip(&activation.found.packages) {
        for (file, is) in package.files.iter().zip(&found.files) {
            files.push(FileReport {
                package: package.name.clone(),
                path: is.path.clone(),
                is: is.is,
                watched: file.pre == Some(file.post),
                served: activation.served(&file.path),
            });
        }
    }
    files
}

/// What becomes of FlashInfer and of the engines without us.
fn if_disabled(report: &Report, module: &Module, activation: Option<&Activation>, engines: &[(String, Package)]) -> String {
    let sms = report.sms();
    let Some(activation) = activation.filter(|activation| activation.in_force) else {
        return "nothing of fi-arch is in force, so FI_ARCH_DISABLE=1 changes nothing".to_owned();
    };
    let in_place = activation.mode() == Some(Mode::InPlace);
    let mut text = String::new();
    if activation.brings_artifact() {
        let majors = report.package().and_then(|package| sites::gate(package, module).ok()).and_then(|gate| gate.majors);
        text = match majors.filter(|_| !in_place) {
            Some(majors) => format!(
                "FlashInfer's own code: {} ends in \"No supported CUDA architectures found for major versions {majors:?}\"",
                names(&sms)
            ),
            None => format!("FlashInfer's own code: {} ends in an error, as without the edits", names(&sms)),
        };
    }
    for (name, package) in engines.iter().filter(|(name, _)| activation.package(name).is_some()) {
        let row = tables::launchers().iter().find(|launcher| launcher.name == *name).and_then(|l| l.fusion_of(&package.version));
        if let Some(row) = row {
            // On disk the edited gates ask us, and we say no: all but one let the engine go on without the fused path.
            let ends = activation.package(name).is_some_and(|(package, _)| package.edits.iter().any(|edit| edit.id == BACKEND));
            let goes_on = in_place && !ends;
            let effect = if goes_on { "its edited gates answer no, and it stays on its own path" } else { &row.closed };
            let between = if text.is_empty() { "" } else { "; " };
            text.push_str(&format!("{between}{name} {}: {effect}", package.version));
        }
    }
    if text.is_empty() {
        text = "FlashInfer needs nothing of fi-arch; FI_ARCH_DISABLE=1 changes nothing".to_owned();
    }
    text
}
