//! The activation in an environment: will it start, is all of it as recorded, and can its artifact be loaded here.
//!
//! Everything or nothing is in force, as the shim decides it: one file that is not as recorded, and nothing is served.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::command_line::PythonFlags;
use super::{Finding, Report, names};
use crate::activate::{
    self, ARTIFACT_DIR, ArtifactState, FILE, FileIs, FileState, Found, Mode, OVERLAY_DIR, OnMiss, PACKAGE, PackageFound,
    PackageState, State, shim,
};
use crate::build::consumer::Consumer;
use crate::cubin::{self, Kind, Linkage};
use crate::digest::Digest;
use crate::env;
use crate::judge;
use crate::memo::Memo;
use crate::store::{self, Manifest};

/// Where FlashInfer's package stands in a state.
const FLASHINFER: &str = "flashinfer";
/// The id of the edit that opens a generator's gate, and has it ask for the artifact.
const GATE: &str = "gate";

/// What was found of an activation.
#[derive(Debug)]
pub struct Activation {
    pub found: Found,
    /// Every part of it is right: what is recorded is what a process gets.
    pub in_force: bool,
    pub artifacts: Vec<ArtifactReport>,
    /// The package's own files by path below site-packages, as they lie there; of what is gone there is no digest.
    pub own: BTreeMap<String, Option<Digest>>,
}

/// An artifact as it lies in the package.
#[derive(Debug)]
pub struct ArtifactReport {
    pub state: ArtifactState,
    pub path: PathBuf,
    /// Of the file as it is; none where it cannot be read.
    pub sha256: Option<Digest>,
    /// What the manifest beside it says; none where that cannot be read.
    pub manifest: Option<Manifest>,
    /// What the file holds code for: `sm_120f`.
    pub targets: Vec<String>,
    /// Of the asked targets, those that its machine code runs on as it is.
    pub usable: Vec<u32>,
}

/// How a process will be started, as far as it decides whether the shim is.
#[derive(Debug, Default)]
pub struct Start {
    pub flags: PythonFlags,
    /// `fi-arch run` starts it, and activates by itself.
    pub through_run: bool,
}

impl Activation {
    pub fn state(&self) -> Option<&State> {
        self.found.state.as_ref().ok()
    }

    pub fn mode(&self) -> Option<Mode> {
        self.state().map(|state| state.mode)
    }

    /// The edited file `path` of FlashInfer or an engine as a process gets it: served, or from disk.
    pub fn served(&self, path: &str) -> Option<PathBuf> {
        let state = self.state().filter(|state| self.in_force && state.mode != Mode::InPlace)?;
        let file = state.packages.iter().flat_map(|package| &package.files).find(|file| file.path == path)?;
        (file.pre != Some(file.post)).then(|| self.found.package().join(OVERLAY_DIR).join(path))
    }

    /// FlashInfer loads its module from our artifact. One that is right as it is has no gate that we open.
    pub fn brings_artifact(&self) -> bool {
        let gate = |file: &FileState| file.edits.iter().any(|edit| edit == GATE);
        let opened = |package: &PackageState| package.name == FLASHINFER && package.files.iter().any(gate);
        self.state().is_some_and(|state| state.packages.iter().any(opened))
    }

    /// The artifact that a GPU gets: of those that fit, the one made for the fewest.
    pub fn artifact_for(&self, sm: u32) -> Option<&ArtifactReport> {
        let capability = [sm / 10, sm % 10];
        let fit = self.artifacts.iter().filter(|artifact| artifact.state.runs_on.contains(&capability));
        fit.min_by_key(|artifact| artifact.state.runs_on.len())
    }

    pub fn package<'s>(&'s self, name: &str) -> Option<(&'s PackageState, &'s PackageFound)> {
        let state = self.state()?;
        state.packages.iter().zip(&self.found.packages).find(|(package, _)| package.name == name)
    }
}

/// Looks at the activation of the report's environment; none where there is none.
pub fn look(report: &mut Report, start: &Start, memo: &Memo) -> Option<Activation> {
    let environment = report.environment.clone()?;
    let found = match activate::look(&environment, memo) {
        Ok(found) => found?,
        Err(error) => {
            report.findings.problem(Finding::of("activation-unreadable", &error));
            return None;
        }
    };
    let before = report.findings.problems.len();
    let mut activation = Activation { found, in_force: false, artifacts: Vec::new(), own: BTreeMap::new() };
    if let Err(why) = &activation.found.state {
        let file = activation.found.package().join(FILE);
        report.findings.problem(
            Finding::new("state-damaged", format!("the record of what was activated cannot be used: {why}; nothing is served"))
                .hint("`fi-arch install` writes it anew")
                .at(file),
        );
        return Some(activation);
    }
    starts(report, &activation, start);
    own_files(report, &mut activation);
    packages(report, &activation);
    artifacts(report, &mut activation, memo);
    // All that was found so far keeps a process from being served; what follows is about what it can load.
    activation.in_force = report.findings.problems.len() == before;
    if activation.brings_artifact() {
        for sm in report.sms() {
            loads(report, &activation, sm, memo);
        }
    }
    activation.in_force = report.findings.problems.len() == before;
    if !activation.in_force && report.vars.is_switched(env::FI_ARCH_REQUIRE) {
        report.findings.note(
            Finding::new(
                "required",
                "FI_ARCH_REQUIRE is set: every process that comes to FlashInfer ends at once, with the reason",
            )
            .hint("cure the problems first; without the variable such a process goes on with FlashInfer's own code"),
        );
    }
    Some(activation)
}

/// What activates anew, by how it was activated.
fn cure(mode: Mode) -> &'static str {
    match mode {
        Mode::Shim => "`fi-arch install` activates anew",
        Mode::InPlace => "`fi-arch install --in-place` activates anew",
        Mode::Run => "start again with `fi-arch run -- …`",
    }
}

/// Whether Python comes to start it.
fn starts(report: &mut Report, activation: &Activation, start: &Start) {
    let Some(state) = activation.state() else { return };
    let (found, mode) = (&activation.found, state.mode);
    let environment = report.environment.clone().expect("an activation was found in it");
    let findings = &mut report.findings;
    if report.vars.is_switched(env::FI_ARCH_DISABLE) {
        let (message, hint) = match report.vars.is_switched(env::FI_ARCH_REQUIRE) {
            true => ("FI_ARCH_DISABLE and FI_ARCH_REQUIRE are both set: every process ends at once", "unset one of the two"),
            false => ("FI_ARCH_DISABLE is set: nothing is served", "unset FI_ARCH_DISABLE"),
        };
        findings.problem(Finding::new("disabled", message).hint(hint));
    }
    if let Some(earlier) = &found.shadowed_by {
        let message = format!(
            "Python finds this `{PACKAGE}` before that in {}, and it has no record of an activation",
            found.site.display()
        );
        findings.problem(Finding::new("shim-shadowed", message).hint("remove it, or take its folder off PYTHONPATH").at(earlier));
    }
    for other in &found.others {
        let message = format!("a second activation lies behind the one in {}: Python never comes to it", found.site.display());
        let hint = "take one of the two back: `fi-arch uninstall --env DIR`";
        findings.note(Finding::new("second-activation", message).hint(hint).at(other.join(PACKAGE)));
    }
    let is_site = environment.site_packages.contains(&found.site);
    match mode {
        Mode::InPlace => {}
        Mode::Shim => {
            let pth = found.site.join(shim::PTH_FILE);
            if start.flags.no_site {
                findings.problem(
                    Finding::new(
                        "python-without-site",
                        "Python is started with -S: it reads no .pth file, and the shim never starts",
                    )
                    .hint("leave out -S"),
                );
            }
            if !is_site {
                let message = "the shim lies in a folder of PYTHONPATH, where Python reads no .pth file: it never starts";
                findings.problem(
                    Finding::new("pth-not-read", message)
                        .hint("`fi-arch install --env DIR` puts it into an environment")
                        .at(&found.site),
                );
            } else if !pth.is_file() {
                let message = "the file that starts the shim is gone: nothing is served";
                findings.problem(Finding::new("pth-missing", message).hint(cure(mode)).at(pth));
            }
        }
        Mode::Run => {
            // With -E or -I Python would not even come to look into that folder.
            if start.flags.no_site {
                let message = "Python is started with -S: it runs no sitecustomize, and the shim of `fi-arch run` never starts";
                findings.problem(Finding::new("python-ignores-run", message).hint("leave out -S"));
            }
            let own = found.site.join(shim::SITECUSTOMIZE_FILE);
            let first = environment.folders().map(|folder| folder.join(shim::SITECUSTOMIZE_FILE)).find(|file| file.is_file());
            if first.as_ref() != Some(&own) {
                let other = first.clone().unwrap_or_else(|| own.clone());
                let message = match first {
                    Some(_) => "this sitecustomize.py stands before that of `fi-arch run`, so the shim never starts",
                    None => "the sitecustomize.py of `fi-arch run` is gone: the shim never starts",
                };
                let hint = "put the folder of `fi-arch run` first on PYTHONPATH, or start with `fi-arch run -- …`";
                findings.problem(Finding::new("sitecustomize-shadowed", message).hint(hint).at(other));
            }
        }
    }
}

/// The package's own files: as RECORD has them, and no further code among them.
fn own_files(report: &mut Report, activation: &mut Activation) {
    let Some(mode) = activation.mode() else { return };
    let site = activation.found.site.clone();
    let expected = match record(&site) {
        Some(expected) => expected,
        None if mode == Mode::Run => embedded(activation),
        None => {
            let message =
                "no installed distribution records the shim: pip cannot remove it, and nobody can tell whether it is whole";
            report.findings.problem(Finding::new("record-missing", message).hint(cure(mode)).at(site.join(PACKAGE)));
            embedded(activation)
        }
    };
    let checked = format!("{PACKAGE}/{ARTIFACT_DIR}/");
    for (path, hash) in &expected {
        // Artifacts are held against the state, which says more of them.
        if path.starts_with(&checked) || path.ends_with(".pyc") || path.contains(".dist-info/") {
            continue;
        }
        let file = site.join(path);
        let digest = Digest::of_file(&file).ok();
        // What is to be served is held against the state as well.
        let served = mode != Mode::InPlace && path.starts_with(&format!("{PACKAGE}/{OVERLAY_DIR}/"));
        // The state bears the moment at which it was written; what it says is looked at field by field.
        if *path != format!("{PACKAGE}/{FILE}") {
            activation.own.insert(path.clone(), digest);
        }
        let is_start = *path == shim::PTH_FILE;
        match digest {
            _ if served => {}
            None if is_start && mode == Mode::Shim => {}
            None => report.findings.problem(
                Finding::new("shim-incomplete", "a file of the shim is gone: nothing is served").hint(cure(mode)).at(file),
            ),
            Some(digest) if hash.is_some_and(|hash| hash != digest) => report.findings.problem(
                Finding::new("shim-altered", "a file of the shim is not the one that was installed").hint(cure(mode)).at(file),
            ),
            Some(_) => {}
        }
    }
    for file in strangers(&site, &expected) {
        activation.own.insert(relative(&site, &file), Digest::of_file(&file).ok());
        let message = "this file is none of the shim's, and Python could take it for one";
        report.findings.problem(Finding::new("shim-altered", message).hint("remove it").at(file));
    }
}

/// The files of the distribution that owns the shim in a site-packages folder, with their digests; none where none does.
fn record(site: &Path) -> Option<BTreeMap<String, Option<Digest>>> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(site).ok()?.flatten().map(|entry| entry.path()).collect();
    folders.retain(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("fi_arch") && name.ends_with(".dist-info")
    });
    folders.sort();
    let state = format!("{PACKAGE}/{FILE},");
    let text = folders.iter().find_map(|dir| {
        let text = std::fs::read_to_string(dir.join("RECORD")).ok()?;
        text.lines().any(|line| line.starts_with(&state)).then_some(text)
    })?;
    Some(text.lines().filter_map(row).collect())
}

/// A row of RECORD: `path,sha256=…,size`.
fn row(line: &str) -> Option<(String, Option<Digest>)> {
    let mut fields = line.rsplitn(3, ',');
    let (_, hash, path) = (fields.next()?, fields.next()?, fields.next()?);
    let digest = hash.strip_prefix("sha256=").and_then(base64);
    Some((path.trim_matches('"').to_owned(), digest))
}

/// A digest in RECORD's spelling: URL-safe base64 without padding.
fn base64(text: &str) -> Option<Digest> {
    let mut bytes = Vec::with_capacity(33);
    let (mut bits, mut count) = (0u32, 0);
    for byte in text.bytes() {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'-' => 62,
            b'_' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from((bits >> count) & 0xff).expect("it is one byte"));
        }
    }
    bytes.try_into().ok().map(Digest)
}

/// The shim's files as this program carries them, where the activation is this release's.
fn embedded(activation: &Activation) -> BTreeMap<String, Option<Digest>> {
    let same = activation.state().is_some_and(|state| state.fi_arch == env!("CARGO_PKG_VERSION"));
    let files = shim::FILES.iter().map(|(name, text)| (format!("{PACKAGE}/{name}"), same.then(|| Digest::of(text.as_bytes()))));
    files.collect()
}

/// Code in the package that no record has.
fn strangers(site: &Path, expected: &BTreeMap<String, Option<Digest>>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![site.join(PACKAGE)];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let top = folder.ends_with(PACKAGE);
            if path.is_dir() && name != "__pycache__" && !(top && matches!(name, OVERLAY_DIR | ARTIFACT_DIR)) {
                folders.push(path);
            } else if [".py", ".so", ".pyc"].iter().any(|ending| name.ends_with(ending))
                && !expected.contains_key(&relative(site, &path))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn relative(site: &Path, file: &Path) -> String {
    file.strip_prefix(site).unwrap_or(file).display().to_string()
}

/// The packages of the set: there, of the recorded release, each file as it must be.
fn packages(report: &mut Report, activation: &Activation) {
    let Some(state) = activation.state() else { return };
    let overlay = activation.found.package().join(OVERLAY_DIR);
    for (package, found) in state.packages.iter().zip(&activation.found.packages) {
        let whose = format!("{} {}", package.distribution, package.version);
        let Some(root) = &found.root else {
            let message = format!("{} is not installed any more ({whose} was recorded)", package.name);
            // An engine that is not there has no gate. Without FlashInfer nothing is behind an engine's.
            let is_problem = package.name == FLASHINFER;
            let hint = "install it again, or take all back: `fi-arch uninstall`";
            report.findings.add(is_problem, Finding::new("package-missing", message).hint(hint));
            continue;
        };
        let changed = found.version.as_ref().filter(|version| **version != package.version);
        if let Some(version) = changed {
            let message =
                format!("{} {version} is installed, and {whose} was activated: nothing is served", package.distribution);
            let at = root.join(&package.name);
            report.findings.problem(Finding::new("package-version", message).hint(cure(state.mode)).at(at));
        }
        for (file, is) in package.files.iter().zip(&found.files) {
            let edited = file.pre != Some(file.post);
            if !is.is.is_right(file, state.mode) {
                // Of another release the files are others; that is said above.
                if changed.is_none() {
                    report.findings.problem(wrong_file(is.is, state.mode, &whose).at(&is.path));
                }
            } else if edited && state.mode != Mode::InPlace {
                let post = overlay.join(&file.path);
                let digest = Digest::of_file(&post);
                if digest.as_ref().ok() != Some(&file.post) {
                    let what = if digest.is_ok() { "is not the one that was recorded" } else { "cannot be read" };
                    let message = format!("what is to be served for {} {what}: nothing is served", file.path);
                    report.findings.problem(Finding::new("overlay-damaged", message).hint(cure(state.mode)).at(post));
                }
            }
        }
    }
    half_open(report, activation, state);
}

fn wrong_file(is: FileIs, mode: Mode, whose: &str) -> Finding {
    let (code, message) = match (is, mode) {
        (FileIs::Missing, _) => ("file-missing", format!("a file of {whose} is gone")),
        (FileIs::Original, _) => {
            ("file-reverted", format!("this file is without its edits again, as {whose} comes: it was installed anew"))
        }
        (FileIs::Ours, _) => ("file-edited", "this file bears the edits on disk, where the shim would serve them".to_owned()),
        (FileIs::Drifted, Mode::InPlace) => {
            ("file-drifted", format!("this file is neither {whose}'s nor ours: somebody changed it since"))
        }
        (FileIs::Drifted, _) => {
            ("file-drifted", format!("this file is not the one of {whose} that was recorded: somebody changed it"))
        }
    };
    let hint = match is {
        FileIs::Original => cure(mode).to_owned(),
        FileIs::Missing | FileIs::Ours => format!("install {whose} again; then {}", cure(mode)),
        FileIs::Drifted => format!("`fi-arch status` shows the difference; install {whose} again, then {}", cure(mode)),
    };
    Finding::new(code, format!("{message}; nothing is served")).hint(hint)
}

/// On disk some gates of a set can be open and others closed.
fn half_open(report: &mut Report, activation: &Activation, state: &State) {
    if state.mode != Mode::InPlace {
        return;
    }
    let is_open = |name: &str| {
        let (package, found) = activation.package(name)?;
        let mut edited = package.files.iter().zip(&found.files).filter(|(file, _)| file.pre != Some(file.post)).peekable();
        edited.peek()?;
        found.root.as_ref()?;
        Some(edited.all(|(_, found)| found.is == FileIs::Ours))
    };
    let Some(flashinfer) = is_open(FLASHINFER) else { return };
    for engine in state.packages.iter().map(|package| package.name.as_str()).filter(|name| *name != FLASHINFER) {
        let message = match (flashinfer, is_open(engine)) {
            (false, Some(true)) => format!(
                "{engine} bears its edits and FlashInfer does not: its gate asks fi-arch, which answers no, so {engine} stays on its own path"
            ),
            (true, Some(false)) => {
                format!("FlashInfer bears its edits and {engine} does not: {engine} never comes to the fused path")
            }
            _ => continue,
        };
        let at = activation.package(engine).and_then(|(_, found)| found.root.as_ref()).map(|root| root.join(engine));
        report.findings.problem(Finding::new("half-open", message).hint(cure(state.mode)).at(at.unwrap_or_default()));
    }
}

/// Each artifact: the file that was proven, with machine code for what it says.
fn artifacts(report: &mut Report, activation: &mut Activation, memo: &Memo) {
    let Some(state) = activation.state().cloned() else { return };
    let sms = report.sms();
    for artifact in state.artifacts {
        let path = activation.found.package().join(&artifact.file);
        let mut say = |code: &str, message: String| {
            let hint = cure(state.mode);
            report.findings.problem(Finding::new(code, format!("{message}; nothing is served")).hint(hint).at(&path));
        };
        let size = path.metadata().map(|about| about.len());
        let digest = memo.digest(&path).ok();
        match (&size, digest) {
            (Err(_), _) | (_, None) => {
                say("artifact-missing", format!("the artifact for {} is gone or cannot be read", artifact.target))
            }
            (Ok(size), _) if *size != artifact.bytes => {
                say("artifact-altered", format!("the artifact has {size} bytes, and {} were proven", artifact.bytes));
            }
            (_, Some(digest)) if digest != artifact.sha256 => {
                say(
                    "artifact-altered",
                    format!("the artifact is not the one that was proven: its SHA-256 begins {}", digest.short()),
                );
            }
            _ => {}
        }
        let (targets, usable) = match cubin::skim(&path) {
            _ if digest.is_none() => (Vec::new(), Vec::new()),
            Ok(Some(skim)) => {
                let mut targets: Vec<String> = skim.images.iter().map(|image| image.target()).collect();
                targets.sort();
                targets.dedup();
                let runs = |sm: &u32| {
                    let fits = |image: &cubin::Outline| {
                        image.kind == Kind::Sass && cubin::usable::usable(image.kind, image.sm, &image.suffix, *sm).is_some()
                    };
                    skim.images.iter().any(fits)
                };
                // What it says it runs on is held against its code, asked for or not.
                let claimed = artifact.runs_on.iter().map(|[major, minor]| major * 10 + minor);
                let lacking: Vec<u32> = claimed.filter(|sm| !runs(sm)).collect();
                if !lacking.is_empty() {
                    let has = if targets.is_empty() { "no GPU code at all".to_owned() } else { targets.join(", ") };
                    say(
                        "artifact-lacks-target",
                        format!("the artifact has no machine code for {} (it has {has})", names(&lacking)),
                    );
                }
                (targets, sms.iter().copied().filter(runs).collect())
            }
            Ok(None) => {
                say("artifact-unreadable", "the artifact is no shared object".to_owned());
                (Vec::new(), Vec::new())
            }
            Err(unread) => {
                say("artifact-unreadable", format!("the artifact is damaged: {}", unread.error.what()));
                (Vec::new(), Vec::new())
            }
        };
        let manifest = manifest(report, &path, &artifact, state.mode);
        activation.artifacts.push(ArtifactReport { state: artifact, path, sha256: digest, manifest, targets, usable });
    }
}

/// What the manifest beside an artifact says, once it is held against the state.
fn manifest(report: &mut Report, artifact: &Path, state: &ArtifactState, mode: Mode) -> Option<Manifest> {
    let path = artifact.with_file_name("manifest.json");
    let mut say = |code: &str, message: String| {
        report.findings.problem(Finding::new(code, message).hint(cure(mode)).at(&path));
    };
    let read = std::fs::read(&path).map_err(|error| error.to_string()).and_then(|text| {
        let value = store::unseal_value(&text)?;
        serde_json::from_value::<Manifest>(value).map_err(|error| error.to_string())
    });
    let manifest = match read {
        Ok(manifest) => manifest,
        Err(why) => {
            say("manifest-damaged", format!("the artifact's manifest cannot be used, so nothing says that it was proven: {why}"));
            return None;
        }
    };
    if manifest.test_only {
        say("artifact-test-only", "the artifact was made by a test and is never to be loaded".to_owned());
    }
    if manifest.verdict.verdict != "pass" || manifest.verdict.hollow > 0 {
        let verdict = &manifest.verdict;
        say(
            "artifact-unproven",
            format!("the judge said `{}` of the artifact ({} hollow kernels)", verdict.verdict, verdict.hollow),
        );
    }
    let pairs = [
        ("SHA-256", manifest.artifact.sha256.to_string(), state.sha256.to_string()),
        ("key", manifest.key.to_string(), state.key.clone()),
        ("target", manifest.target.clone(), state.target.clone()),
        ("module", manifest.module.clone(), state.module.clone()),
        ("CUDA runtime", manifest.cudart.clone(), state.cudart.clone()),
    ];
    let differ: Vec<&str> = pairs.iter().filter(|(_, a, b)| a != b).map(|(what, _, _)| *what).collect();
    if !differ.is_empty() {
        say(
            "manifest-disagrees",
            format!("the manifest is of another artifact than the recorded one: {} differ", differ.join(", ")),
        );
    }
    Some(manifest)
}

/// Whether what is in force can be loaded on a GPU of this machine, by this torch.
fn loads(report: &mut Report, activation: &Activation, sm: u32, memo: &Memo) {
    let state = activation.state().expect("it was read");
    let Some(artifact) = activation.artifact_for(sm) else { return absent(report, state, sm) };
    driver(report, artifact, sm);
    let Ok(linkage) = cubin::linkage(&artifact.path) else { return };
    runtime(report, artifact, &linkage, memo);
    tvm_ffi(report, artifact, &linkage);
}

fn absent(report: &mut Report, state: &State, sm: u32) {
    let have: Vec<&str> = state.artifacts.iter().map(|artifact| artifact.target.as_str()).collect();
    let have = if have.is_empty() { "none".to_owned() } else { have.join(", ") };
    let name = names(&[sm]);
    let (is_problem, code, message, hint) = match (sm / 10, state.on_miss) {
        (12, OnMiss::Error) => {
            let message = format!("there is no artifact for {name} (there is {have}): its first use ends in an error");
            (true, "artifact-absent", message, format!("`fi-arch install --sm {sm}`"))
        }
        (12, OnMiss::Build) => {
            let message = format!("there is no artifact for {name}: it is built when it is first needed, which takes minutes");
            (false, "artifact-built-later", message, format!("`fi-arch install --sm {sm}` builds it now"))
        }
        _ => {
            let message = format!("there is no artifact for {name}: FlashInfer compiles the repaired sources itself");
            (false, "artifact-built-later", message, format!("`fi-arch install --sm {sm}` builds it now"))
        }
    };
    report.findings.add(is_problem, Finding::new(code, message).hint(hint));
}

fn driver(report: &mut Report, artifact: &ArtifactReport, sm: u32) {
    let Some(floor) = &artifact.state.min_driver else { return };
    if report.gpus.is_empty() {
        let message = format!("the artifact needs NVIDIA driver {floor} or newer, and no driver is seen here");
        let finding = Finding::new("driver-unknown", message).hint("run `fi-arch verify` on the machine that serves");
        if !report.findings.notes.contains(&finding) {
            report.findings.note(finding);
        }
        return;
    }
    let old = report.gpus.iter().find(|gpu| gpu.sm == sm && super::gpus::older(&gpu.driver, floor)).cloned();
    if let Some(gpu) = old {
        let message = format!("{} runs driver {}, and the artifact needs {floor} or newer", gpu.name, gpu.driver);
        let hint = format!("install driver {floor} or newer, or build for an older CUDA: `fi-arch install --toolkit DIR`");
        report.findings.problem(Finding::new("artifact-driver-too-old", message).hint(hint).at(&artifact.path));
    }
}

/// The CUDA runtime that it needs against the one that torch loads.
fn runtime(report: &mut Report, artifact: &ArtifactReport, linkage: &Linkage, memo: &Memo) {
    let Some(environment) = &report.environment else { return };
    let Ok(Some(consumer)) = Consumer::of(environment, memo) else { return };
    let owner = consumer.cudart.as_deref().and_then(|file| {
        let exports = cubin::linkage(file).ok()?.exports;
        Some(judge::Owner { name: consumer.soname(), exports })
    });
    let faults = match (artifact.state.cudart.as_str(), &owner) {
        ("static", _) => judge::runtime_faults(linkage, None),
        (_, Some(owner)) => judge::runtime_faults(linkage, Some(owner)),
        // torch's own libcudart is not at hand; by name it can be told all the same.
        (_, None) => {
            let by_name = judge::Owner { name: consumer.soname(), exports: linkage.undefined.clone() };
            judge::runtime_faults(linkage, Some(&by_name))
        }
    };
    if let Some(fault) = faults.first() {
        let message = format!("the artifact does not fit {}: {}", consumer.name, fault.message);
        let hint = "`fi-arch install` takes or builds one for the torch that is installed now";
        report.findings.problem(Finding::new("artifact-wrong-runtime", message).hint(hint).at(&artifact.path));
    }
}

/// The functions of tvm-ffi that it calls against those of the installed one.
fn tvm_ffi(report: &mut Report, artifact: &ArtifactReport, linkage: &Linkage) {
    let Some(found) = report.tvm_ffi.clone() else { return };
    let Ok(library) = cubin::linkage(&found.package.join("lib/libtvm_ffi.so")) else {
        if found.version != artifact.state.tvm_ffi {
            let message = format!(
                "the artifact was built against apache-tvm-ffi {}, and {} is installed",
                artifact.state.tvm_ffi, found.version
            );
            report
                .findings
                .note(Finding::new("tvm-ffi-differs", message).hint("nothing, while it lies in FlashInfer's own range"));
        }
        return;
    };
    let calls = linkage.undefined.iter().filter(|symbol| !symbol.weak && symbol.name.starts_with("TVMFFI"));
    let missing: Vec<&str> = calls
        .filter(|call| !library.exports.iter().any(|export| export.name == call.name))
        .map(|call| call.name.as_str())
        .collect();
    if !missing.is_empty() {
        let message = format!(
            "the artifact calls {} of apache-tvm-ffi {}, which the installed {} does not have",
            missing.join(", "),
            artifact.state.tvm_ffi,
            found.version
        );
        let hint = format!("pip install 'apache-tvm-ffi=={}'", artifact.state.tvm_ffi);
        report.findings.problem(Finding::new("artifact-tvm-ffi", message).hint(hint).at(&artifact.path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_record_gives_back_the_digest() {
        let (path, digest) = row("fi_arch_shim/a.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0").unwrap();
        assert_eq!((path.as_str(), digest), ("fi_arch_shim/a.py", Some(Digest::of(b""))));
        assert_eq!(row("fi_arch_shim/__pycache__/a.pyc,,").unwrap().1, None);
        assert_eq!(base64("47DEQpj8HBSa"), None);
        assert_eq!(base64("!"), None);
    }
}
