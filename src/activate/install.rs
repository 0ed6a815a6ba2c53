//! Plans an activation for one environment, and puts it into the environment: all of it, or nothing.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use super::journal::{ByteCode, Doing, InPlace, Op, Original, Recovered, Site, Transaction, digest};
use super::package::{Artifact, Package, Served};
use super::state::{self, Mode, OnMiss};
use super::{byte_code, fit, originals, record, shim, steps, uninstall};
use crate::build::provision;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::memo::Memo;
use crate::overlay::{self, EngineOptions, File, Overlay};
use crate::pipeline::{self, Context, Event, Observer};
use crate::policy::Policy;
use crate::store::{self, Bundle};
use crate::survey::{self, Environment, FlashInfer};
use crate::tables::{self, Engine, Module, Tables};
use crate::target;

/// What a user asks of `install` and `run` alike.
#[derive(Debug, Clone)]
pub struct Selection {
    pub env: Option<PathBuf>,
    /// Empty: those of the bundles, else of the GPUs of this machine.
    pub targets: Vec<target::Request>,
    pub module: String,
    /// Bundles; empty: from the store, or built.
    pub from: Vec<PathBuf>,
    /// Engines whose own gates are opened: `sglang`, `vllm`.
    pub engines: Vec<String>,
    pub auto_enable: bool,
    pub policy: Policy,
    pub on_miss: OnMiss,
    pub consumer: Option<String>,
    pub toolkit: Option<PathBuf>,
    pub jobs: Option<usize>,
    pub network: provision::Mode,
}

/// What an activation will be.
#[derive(Debug)]
pub struct Plan {
    pub environment: Environment,
    pub flashinfer: FlashInfer,
    pub package: Package,
    /// FlashInfer first.
    pub served: Vec<Served>,
    pub engines: Vec<Asked>,
    /// The folder that holds each package, in the same order.
    roots: Vec<PathBuf>,
}

/// An engine that was named, as it is installed.
#[derive(Debug, Clone)]
pub struct Asked {
    pub engine: &'static Engine,
    pub version: String,
}

/// What came of planning.
#[derive(Debug)]
pub enum Planned {
    /// This FlashInfer is right as it is, and no engine that was named has a gate to open.
    NothingToDo {
        flashinfer: FlashInfer,
        engines: Vec<Asked>,
    },
    Plan(Box<Plan>),
}

/// The environment that a selection names. It must have a FlashInfer of its own.
pub fn environment(env: Option<&Path>, memo: &Memo) -> Result<(Environment, FlashInfer)> {
    let hint = "name the environment with --env DIR: a venv, a conda prefix, or a site-packages folder";
    let environment = survey::environment(env, memo)?
        .ok_or_else(|| Error::machine("no Python environment was found").because("there is no python3 on PATH").hint(hint))?;
    let flashinfer = survey::flashinfer(&environment)?.ok_or_else(|| {
        Error::machine(format!("no FlashInfer is installed in {}", environment.prefix.display()))
            .because(format!("this environment was found by {}", environment.origin))
            .hint(hint)
    })?;
    Ok((environment, flashinfer))
}

/// Plans an activation: overlays, and artifacts from bundles, the store or a build. Changes nothing in the environment, but puts
/// right what an interrupted call left in it.
pub fn plan(selection: &Selection, mode: Mode, observe: Observer) -> Result<Planned> {
    if mode == Mode::InPlace && selection.on_miss == OnMiss::Build {
        return Err(Error::usage("--in-place and --on-miss build do not go together")
            .because("a server cannot build from a FlashInfer whose files are edited already")
            .hint("name every target with --sm, so that no process misses one"));
    }
    let module = Tables::load().module(&selection.module)?;
    let mut told = BTreeSet::new();
    let observe: Observer = &mut |event| match &event {
        // The same release is met several times on the way.
        Event::Warning(text) if !told.insert(text.clone()) => {}
        _ => observe(event),
    };
    // With a bundle nothing of ours is needed on this machine, a home neither.
    let memo = crate::env::home().map(|home| Memo::load(&home)).unwrap_or_default();
    let (environment, flashinfer) = environment(selection.env.as_deref(), &memo)?;
    for site in environment.site_packages.iter().filter(|site| site.join(super::journal::FOLDER).is_dir()) {
        if let Some(recovered) = Site::lock(site)?.recover()? {
            observe(Event::Warning(recovered.says().to_owned()));
        }
    }

    let view = originals::flashinfer(&environment, &flashinfer)?;
    let package = view.as_ref().map_or(flashinfer.package.clone(), originals::View::package);
    let (asked, engines) = engines(selection, &environment, observe)?;
    let options = overlay::Options { serve: true, policy: !engines.is_empty(), ..Default::default() };
    let overlay = overlay::compute(&package, module, &flashinfer.version, &options)?;
    overlay.warnings.iter().for_each(|warning| observe(Event::Warning(warning.clone())));
    if overlay.is_empty() && engines.is_empty() {
        return Ok(Planned::NothingToDo { flashinfer, engines: asked });
    }
    // What only asks the policy repairs nothing: such a FlashInfer compiles the module itself, and right.
    let repaired = overlay.edits.iter().any(|edit| module.defects.contains(&edit.id));
    let artifacts = match (repaired, selection.from.as_slice()) {
        (false, []) => Vec::new(),
        (false, [bundle, ..]) => {
            return Err(Error::usage(format!("{} is of no use here", bundle.display()))
                .because(format!("FlashInfer {} is right as it is, and compiles {} itself", flashinfer.version, module.name))
                .hint("leave --from out"));
        }
        (true, []) => from_store(selection, &environment, view.as_ref(), observe)?,
        (true, files) => from_bundles(files, selection, module, &overlay, &package, &environment, &memo)?,
    };

    let watched = if repaired { Vec::new() } else { watched(&package, module)? };
    let mut served =
        vec![Served { name: "flashinfer".to_owned(), distribution: "flashinfer-python".to_owned(), overlay, watched }];
    let mut roots = vec![holder(&flashinfer.package)];
    for (engine, root) in engines {
        served.push(engine);
        roots.push(root);
    }
    let package = Package::new(mode, selection.on_miss, selection.policy.clone(), &served, &artifacts)?;
    Ok(Planned::Plan(Box::new(Plan { environment, flashinfer, package, served, engines: asked, roots })))
}

fn holder(package: &Path) -> PathBuf {
    package.parent().unwrap_or(Path::new("/")).to_owned()
}

/// An overlay, and the folder that holds its package.
type Opened = (Served, PathBuf);

/// The engines that were named, and what those have that have gates.
fn engines(selection: &Selection, environment: &Environment, observe: Observer) -> Result<(Vec<Asked>, Vec<Opened>)> {
    let (mut asked, mut opened) = (Vec::new(), Vec::new());
    for name in &selection.engines {
        let engine = tables::engine(name)?;
        let installed = survey::package(environment, &engine.name, &engine.distribution)?.ok_or_else(|| {
            Error::machine(format!("no {} is installed in {}", engine.title, environment.prefix.display()))
                .hint(format!("leave `--engine {name}` out, or name its environment with --env DIR"))
        })?;
        asked.push(Asked { engine, version: installed.version.clone() });
        let view = originals::package(environment, &installed.package)?;
        let package = view.as_ref().map_or(installed.package.clone(), originals::View::package);
        let options = EngineOptions { auto_enable: selection.auto_enable };
        let overlay = overlay::engine(&package, engine, &installed.version, &options)?;
        overlay.warnings.iter().for_each(|warning| observe(Event::Warning(warning.clone())));
        if !overlay.is_empty() {
            let (name, distribution) = (engine.name.clone(), engine.distribution.clone());
            opened.push((Served { name, distribution, overlay, watched: Vec::new() }, holder(&installed.package)));
        }
    }
    Ok((asked, opened))
}

/// The file with the gate of a FlashInfer that needs no edit: an engine's gate may be open only as long as that is so.
fn watched(package: &Path, module: &Module) -> Result<Vec<(String, Digest)>> {
    let path = &module.generator.file;
    let digest = Digest::of_file(&crate::sites::file_in(package, path))?;
    Ok(vec![(path.clone(), digest)])
}

fn from_store(
    selection: &Selection,
    environment: &Environment,
    view: Option<&originals::View>,
    observe: Observer,
) -> Result<Vec<Artifact>> {
    let context = Context::open()?;
    let artifact = |target: &target::Request| -> Result<Artifact> {
        let request = pipeline::Request {
            module: selection.module.clone(),
            target: *target,
            flashinfer: view.map(|view| view.root().to_string_lossy().into_owned()),
            // The view lies elsewhere: the environment has to be named then.
            env: selection.env.clone().or_else(|| view.map(|_| environment.prefix.clone())),
            consumer: selection.consumer.clone(),
            toolkit: selection.toolkit.clone(),
            jobs: selection.jobs,
            mode: selection.network,
            explain: false,
            only: None,
            run_on: None,
        };
        let built = pipeline::build(&request, &context, observe)?;
        let entry = built.entry;
        let bytes = fs::read(&entry.artifact).map_err(|e| Error::io("read", &entry.artifact, e))?;
        Ok(Artifact { manifest: entry.manifest, bytes })
    };
    let targets = if selection.targets.is_empty() { pipeline::targets_here()? } else { selection.targets.clone() };
    targets.iter().map(artifact).collect()
}

fn from_bundles(
    files: &[PathBuf],
    selection: &Selection,
    module: &Module,
    overlay: &Overlay,
    package: &Path,
    environment: &Environment,
    memo: &Memo,
) -> Result<Vec<Artifact>> {
    let mut artifacts = Vec::new();
    for file in files {
        let bundle = pipeline::open_bundle(file)?;
        let fits = fit::Fit { module, overlay, package, environment, consumer: selection.consumer.as_deref(), memo };
        fits.check(&bundle).map_err(|error| error.within(format!("{} is not used", file.display())))?;
        let Bundle { manifest, artifact, .. } = bundle;
        artifacts.push(Artifact { manifest, bytes: artifact });
    }
    for target in &selection.targets {
        let is_it = |artifact: &Artifact| {
            target::parse(&artifact.manifest.target)
                .is_ok_and(|of| of.sm == target.sm && (target.suffix.is_none() || of.suffix == target.suffix))
        };
        if !artifacts.iter().any(is_it) {
            let have: Vec<&str> = artifacts.iter().map(|artifact| artifact.manifest.target.as_str()).collect();
            return Err(Error::usage(format!("no bundle is for {target}"))
                .because(format!("named were those for {}", have.join(", ")))
                .hint("leave --sm out, or name a bundle for it with another --from"));
        }
    }
    Ok(artifacts)
}

/// What an installation did.
#[derive(Debug)]
pub struct Installed {
    pub site: PathBuf,
    /// It was there already, the very same; nothing was touched.
    pub already: bool,
    /// Files of other packages that were written over or added, or would be served.
    pub files: Vec<(PathBuf, &'static str)>,
    /// Files of an earlier installation in place that are not as they were before it.
    pub left: Vec<uninstall::FoundFile>,
    /// Why no byte code could be made.
    pub no_byte_code: Option<String>,
    pub recovered: Option<Recovered>,
}

/// Puts `plan` into its environment. Interrupted at any moment, the next call of ours takes it back.
pub fn install(plan: &Plan) -> Result<Installed> {
    let mode = plan.package.state.mode;
    let site = site_for(plan, mode)?;
    if mode == Mode::InPlace {
        check_in_place(plan)?;
    }
    let site = Site::lock(&site)?;
    let recovered = site.recover()?;
    let in_place = site.in_place()?;
    let files = files_of(plan, mode);
    if is_whole(&site, plan, in_place.as_ref()) {
        let site = site.dir().to_owned();
        return Ok(Installed { site, already: true, files, left: Vec::new(), no_byte_code: None, recovered });
    }
    check_unchanged(&site, plan, in_place.as_ref())?;
    let transaction = site.begin()?;
    let staged = stage(&site, &transaction, plan).and_then(|no_byte_code| {
        let (ops, after, left) = ops(&site, &transaction, plan, in_place)?;
        Ok((ops, after, left, no_byte_code))
    });
    let (ops, after, left, no_byte_code) = match staged {
        Ok(staged) => staged,
        Err(error) => {
            transaction.abandon();
            return Err(error.because("nothing was changed"));
        }
    };
    transaction.commit(Doing::Install, ops, after)?;
    Ok(Installed { site: site.dir().to_owned(), already: false, files, left, no_byte_code, recovered })
}

/// What was planned holds for the files that were looked at then; a build may have taken minutes since.
fn check_unchanged(site: &Site, plan: &Plan, in_place: Option<&InPlace>) -> Result<()> {
    let as_planned = |file: &File, path: &Path| {
        let now = digest(path);
        let ours = in_place.is_some_and(|all| {
            let known = all.files.iter().find(|known| site.at(&known.path) == path);
            known.is_some_and(|known| known.pre == file.pre && now == Some(known.post))
        });
        now == file.pre || ours
    };
    let files = plan
        .served
        .iter()
        .zip(&plan.roots)
        .flat_map(|(served, root)| served.overlay.files.iter().map(|file| (file, root.join(&file.path))).collect::<Vec<_>>());
    match files.into_iter().find(|(file, path)| !as_planned(file, path)) {
        None => Ok(()),
        Some((_, path)) => Err(Error::refused(format!("{} was changed while this was being prepared", path.display()))
            .because("nothing was installed")
            .hint("let whatever installs there finish, then try again")),
    }
}

/// The site-packages folder to install into: where something of ours lies already, else FlashInfer's own, else the environment's.
fn site_for(plan: &Plan, mode: Mode) -> Result<PathBuf> {
    let environment = &plan.environment;
    let sites = &environment.site_packages;
    let same = |a: &Path, b: &Path| a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if mode == Mode::Shim && sites.iter().any(|site| same(site, &environment.prefix)) {
        return Err(Error::usage(format!("{} is no folder that Python starts code from", environment.prefix.display()))
            .because("Python reads .pth files in its own site-packages folders alone")
            .hint("name the environment whose Python uses that folder, or use --in-place, or `fi-arch run -- CMD…`"));
    }
    if let Some(site) = sites.iter().find(|site| uninstall::bears_anything(site)) {
        return steps::probe(site).map(|()| site.clone()).map_err(|e| uninstall::not_writable(site, e));
    }
    let own = sites.iter().find(|site| same(site, &plan.roots[0]));
    let pure = sites.iter().find(|site| site.starts_with(&environment.prefix)).or(sites.first());
    let mut refused = None;
    for site in own.into_iter().chain(pure) {
        match steps::probe(site) {
            Ok(()) => return Ok(site.clone()),
            Err(error) => refused = refused.or(Some(uninstall::not_writable(site, error))),
        }
    }
    Err(refused.unwrap_or_else(|| Error::machine(format!("{} has no site-packages folder", environment.prefix.display()))))
}

/// Refuses to write over files that are not the environment's own, or cannot be replaced.
fn check_in_place(plan: &Plan) -> Result<()> {
    for (served, root) in plan.served.iter().zip(&plan.roots) {
        if plan.environment.python_path.contains(root) {
            return Err(Error::usage(format!("{} comes from PYTHONPATH: {}", served.name, root.display()))
                .because("what PYTHONPATH names belongs to no environment, and may serve others")
                .hint("name that folder with --env, or unset PYTHONPATH"));
        }
        for file in &served.overlay.files {
            let folder = root.join(&file.path);
            let folder = folder.ancestors().skip(1).find(|dir| dir.is_dir()).unwrap_or(root);
            steps::probe(folder).map_err(|e| uninstall::not_writable(folder, e))?;
        }
    }
    Ok(())
}

fn files_of(plan: &Plan, mode: Mode) -> Vec<(PathBuf, &'static str)> {
    let word = |file: &File| match (mode, file.pre) {
        (Mode::InPlace, None) => "added",
        (Mode::InPlace, Some(_)) => "written over",
        (Mode::Shim | Mode::Run, _) => "served",
    };
    let files = plan.served.iter().zip(&plan.roots).flat_map(|(served, root)| {
        let changed = served.overlay.files.iter().map(|file| (root.join(&file.path), word(file)));
        let watched = served.watched.iter().map(|(path, _)| (root.join(path), "watched"));
        changed.chain(watched).collect::<Vec<_>>()
    });
    files.collect()
}

/// Whether just this lies there already.
fn is_whole(site: &Site, plan: &Plan, in_place: Option<&InPlace>) -> bool {
    let holds = |name: &str, text: &str| fs::read_to_string(site.dir().join(name)).is_ok_and(|found| found == text);
    let wanted = shim::starters(site.dir());
    let starts = wanted.iter().all(|(name, text)| holds(name, text))
        && (site.dir().join(shim::START_FILE).exists() == wanted.iter().any(|(name, _)| *name == shim::START_FILE));
    let started = [shim::PTH_FILE, shim::START_FILE].iter().any(|name| site.dir().join(name).exists());
    let lies = |served: &Served, root: &Path| {
        served.overlay.files.iter().all(|file| {
            let path = root.join(&file.path);
            let known = in_place.is_some_and(|all| all.files.iter().any(|one| site.at(&one.path) == path));
            known && digest(&path) == Some(Digest::of(&file.post))
        })
    };
    let right = match plan.package.state.mode {
        Mode::InPlace => !started && plan.served.iter().zip(&plan.roots).all(|(served, root)| lies(served, root)),
        Mode::Shim | Mode::Run => starts && in_place.is_none(),
    };
    right
        && record::ours(site.dir()) == [site.dir().join(record::folder())]
        && site.dir().join(record::folder()).join("RECORD").is_file()
        && plan.package.digest_on_disk(&site.dir().join(state::PACKAGE)) == Some(plan.package.digest())
}

const STAGED_PACKAGE: &str = "stage/package";
const STAGED_RECORD: &str = "stage/record";

/// Writes everything that will be renamed into place. Says why there is no byte code, if there is none.
fn stage(site: &Site, transaction: &Transaction<'_>, plan: &Plan) -> Result<Option<String>> {
    let mut sources = Vec::new();
    for (path, bytes) in plan.package.files() {
        let staged = format!("{STAGED_PACKAGE}/{path}");
        transaction.stage(&staged, &bytes, 0o644)?;
        if path.ends_with(".py") {
            sources.push((transaction.path(&staged), site.dir().join(state::PACKAGE).join(&path)));
        }
    }
    if plan.package.state.mode == Mode::InPlace {
        for (number, (file, path)) in in_place_files(plan).enumerate() {
            let original = fs::metadata(&path).ok();
            let staged = staged_file(number, &path);
            transaction.stage(&staged, &file.post, original.as_ref().map_or(0o644, |meta| meta.mode() & 0o7777))?;
            let staged = transaction.path(&staged);
            if let Some(meta) = &original {
                steps::own_as(&staged, meta).map_err(|e| steps::failed("set the owner of", &staged, e))?;
            }
            // Where there was none of the original, somebody wants none.
            if !byte_code::of(&path).is_empty() {
                sources.push((staged, path));
            }
        }
    }
    let no_byte_code = byte_code::compile(&plan.environment, &sources).err();
    for (source, _) in &sources {
        for code in byte_code::of(source) {
            steps::sync_file(&code).map_err(|e| steps::failed("write", &code, e))?;
        }
    }

    let mut listed: Vec<(String, Vec<u8>)> = Vec::new();
    for (name, text) in record::files() {
        transaction.stage(&format!("{STAGED_RECORD}/{name}"), text.as_bytes(), 0o644)?;
        listed.push((format!("{}/{name}", record::folder()), text.into_bytes()));
    }
    let staged = transaction.path(STAGED_PACKAGE);
    for item in WalkDir::new(&staged).sort_by_file_name().into_iter().flatten().filter(|item| item.file_type().is_file()) {
        let inside = item.path().strip_prefix(&staged).expect("it was found there").to_string_lossy();
        let bytes = fs::read(item.path()).map_err(|e| Error::io("read", item.path(), e))?;
        listed.push((format!("{}/{inside}", state::PACKAGE), bytes));
    }
    if plan.package.state.mode == Mode::Shim {
        for (name, text) in shim::starters(site.dir()) {
            transaction.stage(&format!("stage/{name}"), text.as_bytes(), 0o644)?;
            listed.push((name.to_owned(), text.as_bytes().to_vec()));
        }
    }
    let text = record::text(listed.iter().map(|(path, bytes)| (path.as_str(), bytes.as_slice())));
    transaction.stage(&format!("{STAGED_RECORD}/RECORD"), text.as_bytes(), 0o644)?;
    for item in WalkDir::new(transaction.path("stage")).into_iter().flatten().filter(|item| item.file_type().is_dir()) {
        steps::sync_dir(item.path()).map_err(|e| steps::failed("sync", item.path(), e))?;
    }
    Ok(no_byte_code)
}

/// The files that are written over or added, in the order in which they are: what opens a gate comes last.
fn in_place_files(plan: &Plan) -> impl Iterator<Item = (&File, PathBuf)> {
    plan.served.iter().zip(&plan.roots).flat_map(|(served, root)| {
        let mut files: Vec<_> = served.overlay.files.iter().map(|file| (file, root.join(&file.path))).collect();
        files.sort_by_key(|(file, _)| file.path.ends_with(".py"));
        files
    })
}

fn staged_file(number: usize, path: &Path) -> String {
    format!("stage/files/{number}/{}", path.file_name().unwrap_or_default().to_string_lossy())
}

type Ops = (Vec<Op>, Option<InPlace>, Vec<uninstall::FoundFile>);

/// Every change of the site-packages folder, in order, with what lies in place behind it.
fn ops(site: &Site, transaction: &Transaction<'_>, plan: &Plan, before: Option<InPlace>) -> Result<Ops> {
    let mode = plan.package.state.mode;
    let mut ops = Vec::new();
    if mode == Mode::InPlace {
        for name in [shim::PTH_FILE, shim::START_FILE] {
            ops.extend(uninstall::removal(site, transaction, &site.dir().join(name)));
        }
    }

    // Files that an earlier installation wrote and this one writes again keep their backup; the others become what they were.
    let wanted = |file: &Original| {
        let path = site.at(&file.path);
        let of_plan = in_place_files(plan).find(|(_, wanted)| mode == Mode::InPlace && *wanted == path);
        of_plan.is_some_and(|(of_plan, _)| of_plan.pre == file.pre) && digest(&path) == Some(file.post)
    };
    let (mut lies, mut left) = (InPlace::default(), Vec::new());
    if let Some(before) = before {
        let (stay, go): (Vec<_>, Vec<_>) = before.files.into_iter().partition(wanted);
        let stays = |folder: &String| stay.iter().any(|file| site.at(&file.path).starts_with(site.at(folder)));
        let (folders_stay, folders_go): (Vec<_>, Vec<_>) = before.folders.into_iter().partition(stays);
        let going = InPlace { files: go, folders: folders_go, ..InPlace::default() };
        let (more, after, found) = uninstall::restore(site, transaction, &going, &plan.environment)?;
        ops.extend(more);
        left = found.into_iter().filter(|file| file.left.is_some()).collect();
        if let Some(file) = left.iter().find(|left| in_place_files(plan).any(|(_, path)| path == left.path)) {
            return Err(Error::refused(format!("{} cannot be written over once more", file.path.display()))
                .because(file.left.clone().unwrap_or_default())
                .hint("`fi-arch uninstall` restores all that can be, and says what is left to do"));
        }
        lies = InPlace { files: after.map(|after| after.files).unwrap_or_default(), folders: folders_stay, ..lies };
        lies.files.extend(stay);
    }

    place_dir(&mut ops, site, transaction, STAGED_RECORD, &site.dir().join(record::folder()))?;
    place_dir(&mut ops, site, transaction, STAGED_PACKAGE, &site.dir().join(state::PACKAGE))?;
    for other in record::ours(site.dir()).into_iter().filter(|dir| !dir.ends_with(record::folder())) {
        ops.extend(uninstall::removal(site, transaction, &other));
    }
    if mode == Mode::Shim {
        let starters = shim::starters(site.dir());
        if !starters.iter().any(|(name, _)| *name == shim::START_FILE) {
            ops.extend(uninstall::removal(site, transaction, &site.dir().join(shim::START_FILE)));
        }
        for (name, text) in starters {
            place_file(&mut ops, site, transaction, &format!("stage/{name}"), &site.dir().join(name), text.as_bytes());
        }
    }
    if mode == Mode::InPlace {
        place_in_place(&mut ops, &mut lies, site, transaction, plan);
    }
    let after = (!lies.files.is_empty()).then(|| InPlace {
        created: store::timestamp(),
        fi_arch: env!("CARGO_PKG_VERSION").to_owned(),
        ..lies
    });
    Ok((ops, after, left))
}

fn place_dir(ops: &mut Vec<Op>, site: &Site, transaction: &Transaction<'_>, staged: &str, path: &Path) -> Result<()> {
    let (path_name, new) = (site.name_of(path), transaction.name(staged));
    if path.symlink_metadata().is_err() {
        ops.push(Op::Create { path: path_name, new });
        return Ok(());
    }
    if path.extension().is_some_and(|ext| ext == "dist-info") && !record::ours(site.dir()).iter().any(|dir| dir == path) {
        return Err(Error::machine(format!("{} belongs to another distribution called fi-arch", path.display()))
            .hint("uninstall that one first, or install into another environment"));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let of = transaction.path(staged);
    let inode = fs::metadata(&of).map_err(|e| Error::io("look at", &of, e))?.ino();
    ops.push(Op::ReplaceDir { path: path_name, new, inode, old: transaction.name(&format!("trash/{name}")) });
    Ok(())
}

fn place_file(ops: &mut Vec<Op>, site: &Site, transaction: &Transaction<'_>, staged: &str, path: &Path, bytes: &[u8]) {
    let (name, new, to) = (site.name_of(path), transaction.name(staged), Digest::of(bytes));
    match digest(path) {
        None => ops.push(Op::Create { path: name, new }),
        Some(from) if from == to => {}
        Some(from) => {
            let old = transaction.name(&format!("trash/{}", path.file_name().unwrap_or_default().to_string_lossy()));
            ops.push(Op::Replace { path: name, from, to, new, old, distribution: None });
        }
    }
}

/// The overlay's files over the originals. `lies` is what stays from before, and takes up the new ones.
fn place_in_place(ops: &mut Vec<Op>, lies: &mut InPlace, site: &Site, transaction: &Transaction<'_>, plan: &Plan) {
    let distribution_of = |file: &File| {
        let of = plan.served.iter().find(|served| served.overlay.files.iter().any(|known| known.path == file.path));
        of.map(|served| served.distribution.clone()).unwrap_or_default()
    };
    for (number, (file, path)) in in_place_files(plan).enumerate() {
        let (post, name, distribution) = (Digest::of(&file.post), site.name_of(&path), distribution_of(file));
        let new = transaction.name(&staged_file(number, &path));
        let known = lies.files.iter().position(|known| known.path == name);
        if let Some(known) = known {
            let known = &mut lies.files[known];
            if known.post != post {
                replace_byte_code(ops, site, transaction, number, &path, "trash");
                let old = transaction.name(&format!("trash/{number}"));
                let from = std::mem::replace(&mut known.post, post);
                ops.push(Op::Replace { path: name, from, to: post, new, old, distribution: Some(distribution) });
            }
            continue;
        }
        let Some(pre) = file.pre else {
            for folder in path.ancestors().skip(1).take_while(|dir| !dir.is_dir()).collect::<Vec<_>>().into_iter().rev() {
                let folder = site.name_of(folder);
                if !lies.folders.contains(&folder) {
                    ops.push(Op::Mkdir { path: folder.clone() });
                    lies.folders.push(folder);
                }
            }
            ops.push(Op::Create { path: name.clone(), new });
            lies.files.push(Original { distribution, path: name, pre: None, post, backup: None, byte_code: Vec::new() });
            continue;
        };
        let old = transaction.name(&format!("backup/{number}"));
        let byte_code = replace_byte_code(ops, site, transaction, number, &path, "backup");
        let backup = Some(old.clone());
        ops.push(Op::Replace { path: name.clone(), from: pre, to: post, new, old, distribution: Some(distribution.clone()) });
        lies.files.push(Original { distribution, path: name, pre: Some(pre), post, backup, byte_code });
    }
}

/// The byte code of a file goes into the transaction's folder `keep`, and that of the new file takes its place where it was made.
fn replace_byte_code(
    ops: &mut Vec<Op>,
    site: &Site,
    transaction: &Transaction<'_>,
    number: usize,
    path: &Path,
    keep: &str,
) -> Vec<ByteCode> {
    let made = byte_code::of(&transaction.path(&staged_file(number, path)));
    let mut kept = Vec::new();
    for (index, code) in byte_code::of(path).iter().enumerate() {
        let Some(pre) = digest(code) else { continue };
        let (name, backup) = (site.name_of(code), transaction.name(&format!("{keep}/{number}-{index}.pyc")));
        let made = made.iter().find(|made| made.file_name() == code.file_name());
        match made.and_then(|made| Some((made.file_name()?.to_string_lossy(), digest(made)?))) {
            Some((_, to)) if to == pre => continue,
            Some((file, to)) => ops.push(Op::Replace {
                path: name.clone(),
                from: pre,
                to,
                new: transaction.name(&format!("stage/files/{number}/__pycache__/{file}")),
                old: backup.clone(),
                distribution: None,
            }),
            None => ops.push(Op::Remove { path: name.clone(), old: backup.clone() }),
        }
        kept.push(ByteCode { path: name, pre, backup });
    }
    kept
}
