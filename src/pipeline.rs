//! The one place that knows build, judge and store: survey, plan, look up, lock, compile, judge, publish.

mod bundle;
mod explain;
mod gc;
mod unstored;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rayon::prelude::*;

use crate::build::closure::{self, Located};
use crate::build::compile::{self, JobStatus};
use crate::build::consumer::Consumer;
use crate::build::plan::{self, Basis, Plan};
use crate::build::provision::{self, Mode};
use crate::build::retarget::Retarget;
use crate::build::toolchain::{self, Cudart, Toolkit};
use crate::build::units::{self, Layout};
use crate::build::{limits, view};
use crate::cancel;
use crate::cubin;
use crate::digest::Digest;
use crate::env;
use crate::error::{Error, Result};
use crate::judge::{self, Expectation, Owner, Verdict};
use crate::memo::Memo;
use crate::overlay::{self, Overlay};
use crate::store::{
    self, Closure, EditRecord, Entry, Fields, FileRecord, Input, Inputs, Key, MANIFEST_FORMAT, Manifest, Store, VerdictRecord,
};
use crate::survey::{self, Environment, FlashInfer, TvmFfi};
use crate::tables::{self, DependencyMarks, Module, StandIn, Tables};
use crate::target::{self, CudaVersion, Target};

pub use bundle::{Exported, Imported, export, import, open as open_bundle};
pub use explain::{Change, Explanation};
pub use gc::{Freed, gc};
pub use unstored::{Unstored, build_into};

/// The version of the way in which builds are done, beyond what commands and contents say. Part of every key.
const PLAN_FORMAT: &str = "fi-arch plan 3";

/// What a user asks of `build`.
#[derive(Debug, Clone)]
pub struct Request {
    pub module: String,
    pub target: target::Request,
    /// A release (`0.6.4`) or a folder that holds FlashInfer.
    pub flashinfer: Option<String>,
    pub env: Option<PathBuf>,
    /// Who will load the artifact, as `--for` says it; without it, the torch of the environment.
    pub consumer: Option<String>,
    pub toolkit: Option<PathBuf>,
    pub jobs: Option<usize>,
    pub mode: Mode,
    /// Say why the store's answer is what it is.
    pub explain: bool,
    /// The edits of these defects alone, by id. Shows what a part of the overlay gives; it is never stored.
    pub only: Option<Vec<String>>,
    /// The GPU that the code is to run on, where it is not the target. For tests.
    pub run_on: Option<target::Request>,
}

/// What happens on the way, for a display.
#[derive(Debug)]
pub enum Event<'a> {
    /// A step begins: `fetching CUDA 13.0`, `judging`, …
    Step(String),
    /// Something the user should know, although it stops nothing.
    Warning(String),
    /// How far the compile jobs are.
    Jobs(&'a [JobStatus]),
}

/// Receives events. Libraries never print.
pub type Observer<'a> = &'a mut dyn FnMut(Event);

/// Everything that is known before compiling.
#[derive(Debug)]
pub struct Prepared {
    pub basis: Basis,
    /// Who will load the artifact, where that is known.
    pub consumer: Option<Consumer>,
    /// The ids of the defects that this FlashInfer has and that the request leaves as they are.
    pub left_out: Vec<String>,
    /// With whole sources: what is asked for is the same on machines of many and of few cores.
    pub plan: Plan,
    /// The key of everything known before compiling.
    pub request: Key,
    /// What that key was made of.
    fields: Fields,
    /// The oldest Linux driver that can run the product.
    pub min_driver: Option<&'static str>,
    sources: Vec<Vec<u8>>,
}

/// What `build` gives back.
#[derive(Debug)]
pub struct Built {
    pub prepared: Prepared,
    pub entry: Entry,
    /// Was it in the store already (whoever put it there)?
    pub hit: bool,
    /// Where the request asked for one.
    pub explanation: Option<Explanation>,
}

/// The folders and memory that one process works with.
#[derive(Debug)]
pub struct Context {
    pub home: PathBuf,
    pub memo: Memo,
}

impl Context {
    pub fn open() -> Result<Self> {
        let home = env::home()?;
        let memo = Memo::load(&home);
        Ok(Self { home, memo })
    }
}

/// The targets of a machine whose user has named none: its GPUs.
pub fn targets_here() -> Result<Vec<target::Request>> {
    let gpus: Vec<String> = survey::gpus().iter().map(|gpu| gpu.sm.to_string()).collect();
    if gpus.is_empty() {
        return Err(Error::usage("no target is named")
            .because("--sm is missing, and no GPU is visible here")
            .hint("for example `--sm 120`"));
    }
    target::parse_list(&gpus.join(" "))
}

/// Answers from the store, or compiles, judges and publishes.
pub fn build(request: &Request, context: &Context, observe: Observer) -> Result<Built> {
    let started = Instant::now();
    let prepared = prepare(request, context, observe)?;
    check_fit(&prepared)?;
    let store = Store::open(&context.home)?;
    let why = |hit: Option<&Entry>| request.explain.then(|| explain::explain(&prepared, &store, hit, &context.memo));
    let mut explanation = None;
    let found = match look_up(&prepared, &store, &context.memo)? {
        Some(entry) => ControlFlow::Break(entry),
        None => {
            explanation = why(None);
            context.memo.save();
            wait_for_others(&prepared, &store, &context.memo, observe)?
        }
    };
    let held = match found {
        ControlFlow::Continue(lock) => lock,
        ControlFlow::Break(entry) => {
            let explanation = why(Some(&entry));
            context.memo.save();
            return Ok(Built { prepared, entry, hit: true, explanation });
        }
    };

    let staging = store.staging()?;
    let dir = staging.path().join("build");
    let entry = compile_and_publish(request, &prepared, context, &store, &dir, started, observe);
    let entry = match entry {
        Ok(entry) => entry,
        Err(error) if error.exit() == crate::exit::Exit::Interrupted => return Err(error),
        Err(error) => return Err(keep_logs(error, &prepared, request.jobs, &dir, &context.home)),
    };
    context.memo.save();
    drop(held);
    Ok(Built { prepared, entry, hit: false, explanation })
}

/// Waits for those who build the same: ends in what one of them has built, or in the lock to build it.
fn wait_for_others(
    prepared: &Prepared,
    store: &Store,
    memo: &Memo,
    observe: Observer,
) -> Result<ControlFlow<Entry, store::Lock>> {
    let (mut held, waited) = lock(prepared, store, observe)?;
    if waited {
        // Those who waited find the work done, as a rule: they look all at once, not one behind the other.
        drop(held);
        if let Some(entry) = look_up(prepared, store, memo)? {
            return Ok(ControlFlow::Break(entry));
        }
        (held, _) = lock(prepared, store, observe)?;
    }
    Ok(look_up(prepared, store, memo)?.map_or(ControlFlow::Continue(held), ControlFlow::Break))
}

/// The lock of those who build the same, and whether another held it.
fn lock(prepared: &Prepared, store: &Store, observe: Observer) -> Result<(store::Lock, bool)> {
    let mut waited = false;
    let lock = store.lock(&prepared.request.to_string(), &mut |holder| {
        if !std::mem::replace(&mut waited, true) {
            let who = holder.map_or("another process".to_owned(), |pid| format!("process {pid}"));
            observe(Event::Step(format!("waiting for {who}, which builds the same")));
        }
        cancel::check()
    })?;
    Ok((lock, waited))
}

/// What a build stands on: FlashInfer, found on this machine or fetched, and the environment that it was found in.
#[derive(Debug)]
struct Ground {
    environment: Option<Environment>,
    flashinfer: FlashInfer,
    /// Is it the environment's own FlashInfer?
    own: bool,
    consumer: Option<Consumer>,
}

/// Finds or fetches FlashInfer.
fn ground(request: &Request, context: &Context, observe: Observer) -> Result<Ground> {
    let named = request.consumer.as_deref().map(Consumer::parse).transpose()?;
    let environment = survey::environment(request.env.as_deref(), &context.memo)?;
    let installed = match &environment {
        Some(environment) => survey::flashinfer(environment)?,
        None => None,
    };
    let fetched = |version: Option<&str>, observe: Observer| -> Result<FlashInfer> {
        let site =
            provision::flashinfer(&context.home, version, request.mode, &mut |step| observe(Event::Step(step.to_owned())))?;
        survey::flashinfer_at(&site)
    };
    let (flashinfer, own) = match (&request.flashinfer, installed) {
        (Some(path), _) if is_path(path) => (survey::flashinfer_at(Path::new(path))?, false),
        (Some(version), Some(installed)) if same_release(version, &installed.version) => (installed, true),
        (Some(version), _) => (fetched(Some(version), observe)?, false),
        (None, Some(installed)) => (installed, true),
        (None, None) if request.env.is_some() => {
            let dir = request.env.as_ref().map(|dir| dir.display().to_string()).unwrap_or_default();
            return Err(Error::machine(format!("no FlashInfer is installed in {dir}"))
                .hint("name a release with --flashinfer VERSION and its pinned wheel is fetched, or leave --env out"));
        }
        (None, None) => (fetched(None, observe)?, false),
    };
    let consumer = match named {
        Some(named) => Some(named),
        None => consumer(request, environment.as_ref(), &flashinfer, &context.memo)?,
    };
    Ok(Ground { environment, flashinfer, own, consumer })
}

/// Who will load the artifact where nobody said so: the torch of `--env`, else the one beside a FlashInfer that was named by its
/// path, else that of the active environment.
fn consumer(
    request: &Request,
    environment: Option<&Environment>,
    flashinfer: &FlashInfer,
    memo: &Memo,
) -> Result<Option<Consumer>> {
    let by_path = request.env.is_none() && request.flashinfer.as_deref().is_some_and(is_path);
    let beside = flashinfer.package.parent().filter(|_| by_path).map(Environment::of_folder);
    for place in beside.as_ref().into_iter().chain(environment) {
        if let Some(consumer) = Consumer::of(place, memo)? {
            return Ok(Some(consumer));
        }
    }
    Ok(None)
}

fn is_path(text: &str) -> bool {
    text.contains('/') || text == "." || text == ".." || Path::new(text).is_dir()
}

fn same_release(a: &str, b: &str) -> bool {
    let parse = |text: &str| text.parse::<pep440_rs::Version>();
    matches!((parse(a), parse(b)), (Ok(a), Ok(b)) if a == b)
}

/// The overlay of what `request` names, and the FlashInfer that it is for. Needs no toolkit.
pub fn edits(request: &Request, context: &Context, observe: Observer) -> Result<(FlashInfer, Overlay)> {
    let module = Tables::load().module(&request.module)?;
    let ground = ground(request, context, observe)?;
    let overlay = overlay_of(module, &ground.flashinfer, request, &context.memo, observe)?;
    Ok((ground.flashinfer, overlay))
}

fn overlay_of(
    module: &'static Module,
    flashinfer: &FlashInfer,
    request: &Request,
    memo: &Memo,
    observe: Observer,
) -> Result<Overlay> {
    let overlay = match request.only.as_deref() {
        None => overlay::remembered(&flashinfer.package, module, &flashinfer.version, memo)?,
        only => {
            let options = overlay::Options { only, ..Default::default() };
            overlay::compute(&flashinfer.package, module, &flashinfer.version, &options)?
        }
    };
    for warning in &overlay.warnings {
        observe(Event::Warning(warning.clone()));
    }
    Ok(overlay)
}

/// The ids of the defects that `request` leaves as they are, although this FlashInfer has them.
fn left_out(module: &'static Module, flashinfer: &FlashInfer, overlay: &Overlay, request: &Request) -> Result<Vec<String>> {
    if request.only.is_none() {
        return Ok(Vec::new());
    }
    let whole = overlay::compute(&flashinfer.package, module, &flashinfer.version, &overlay::Options::default())?;
    let done = |id: &String| overlay.edits.iter().any(|edit| edit.id == *id);
    let mut ids: Vec<String> = whole.edits.into_iter().map(|edit| edit.id).filter(|id| !done(id)).collect();
    ids.dedup();
    Ok(ids)
}

/// A build as far as it is known without fetching a toolkit or compiling.
#[derive(Debug)]
pub struct DryRun {
    pub flashinfer: FlashInfer,
    pub overlay: Overlay,
    pub target: Target,
    /// The GPU that the code is to run on, where it is not the target.
    pub run_on: Option<Target>,
    /// Who will load the artifact, where that is known.
    pub consumer: Option<Consumer>,
    /// `shared` or `static`.
    pub cudart: &'static str,
    pub min_driver: Option<&'static str>,
    /// None where this machine has no fit toolkit or no tvm-ffi yet.
    pub planned: Option<Planned>,
    /// What a real run would fetch first.
    pub would_fetch: Vec<String>,
}

/// The plan of a dry run, and the store's answer to it.
#[derive(Debug)]
pub struct Planned {
    pub plan: Plan,
    pub request: Key,
    pub entry: Option<Entry>,
    /// Where the request asked for one.
    pub explanation: Option<Explanation>,
}

/// Plans and looks up, compiles nothing. FlashInfer's own wheel is fetched where it is missing: without it nothing is known.
pub fn dry_run(request: &Request, context: &Context, observe: Observer) -> Result<DryRun> {
    let module = Tables::load().module(&request.module)?;
    let ground = ground(request, context, observe)?;
    let overlay = overlay_of(module, &ground.flashinfer, request, &context.memo, observe)?;

    let offline = Request { mode: Mode::Offline, ..request.clone() };
    let mut would_fetch = Vec::new();
    if tvm_ffi(&ground, &offline, context, &mut |_| ()).is_err() {
        would_fetch.push("apache-tvm-ffi".to_owned());
    }
    let consumer = ground.consumer.clone();
    let found = find_toolkit(&ground, request, &context.memo)?;
    let version = match found.toolkit {
        Some(toolkit) => toolkit.version,
        None => {
            if provision::cuda(&context.home, Mode::Offline, &mut |_| ()).is_err() {
                would_fetch.push(format!("CUDA {} (nvcc, headers, runtime)", provision::cuda_version()));
            }
            provision::cuda_version()
        }
    };
    let target = request.target.resolve(version)?;
    let run_on = request.run_on.map(|run_on| run_on.resolve(version)).transpose()?;
    if !would_fetch.is_empty() {
        let min_driver = tables::min_driver(version, run_on.unwrap_or(target));
        let cudart = if consumer.as_ref().is_none_or(|one| one.cuda.major == version.major) { "shared" } else { "static" };
        let flashinfer = ground.flashinfer;
        return Ok(DryRun { flashinfer, overlay, target, run_on, consumer, cudart, min_driver, planned: None, would_fetch });
    }
    let prepared = prepare_on(ground, overlay, module, &offline, context, observe)?;
    if let Some(why) = misfit(&prepared.basis.flashinfer, &prepared.basis.tvm_ffi) {
        observe(Event::Warning(format!("a build would be refused: {why}")));
    }
    let store = Store::open(&context.home)?;
    let entry = look_up(&prepared, &store, &context.memo)?;
    let explanation = offline.explain.then(|| explain::explain(&prepared, &store, entry.as_ref(), &context.memo));
    context.memo.save();
    let (plan, _) = work(&prepared, offline.jobs)?;
    let Prepared { basis: Basis { flashinfer, overlay, cudart, .. }, request, min_driver, .. } = prepared;
    let (cudart, planned) = (cudart.word(), Some(Planned { plan, request, entry, explanation }));
    Ok(DryRun { flashinfer, overlay, target, run_on, consumer, cudart, min_driver, planned, would_fetch })
}

fn wanted(request: &Request) -> impl Fn(CudaVersion) -> Result<()> + use<> {
    let target = request.target;
    move |version| target.resolve(version).map(drop)
}

/// Surveys, fetches what is missing, and plans.
fn prepare(request: &Request, context: &Context, observe: Observer) -> Result<Prepared> {
    let module = Tables::load().module(&request.module)?;
    let ground = ground(request, context, observe)?;
    let overlay = overlay_of(module, &ground.flashinfer, request, &context.memo, observe)?;
    prepare_on(ground, overlay, module, request, context, observe)
}

fn prepare_on(
    ground: Ground,
    overlay: Overlay,
    module: &'static Module,
    request: &Request,
    context: &Context,
    observe: Observer,
) -> Result<Prepared> {
    let memo = &context.memo;
    let tvm_ffi = tvm_ffi(&ground, request, context, observe)?;
    let toolkit = toolkit(&ground, request, context, observe)?;
    let cudart = toolkit.cudart_for(ground.consumer.as_ref()).map_err(|why| unfit_toolkit(&toolkit.root, why))?;
    let host = toolchain::host_compiler(memo)?;
    let target = request.target.resolve(toolkit.version)?;
    let run_on = request.run_on.map(|run_on| run_on.resolve(toolkit.version)).transpose()?;
    let retarget = run_on.map(|run_on| Retarget::new(&toolkit, target, run_on)).transpose()?;
    let flashinfer = ground.flashinfer;
    let left_out = left_out(module, &flashinfer, &overlay, request)?;
    let recipe = Tables::load().recipe_for(&flashinfer.package, &flashinfer.version)?;
    let consumer = ground.consumer;
    let cxx11_abi = consumer.as_ref().and_then(|consumer| consumer.cxx11_abi).unwrap_or(true);
    let stand_ins = stand_ins(&flashinfer, memo);
    let min_driver = tables::min_driver(toolkit.version, run_on.unwrap_or(target));
    let basis =
        Basis { module, recipe, overlay, flashinfer, tvm_ffi, cxx11_abi, toolkit, cudart, host, target, retarget, stand_ins };
    let plan = plan::plan(&basis, Layout::Whole)?;
    let sources = plan
        .sources
        .iter()
        .map(|source| contents(&plan.view.locate(&source.path), &plan, &basis.overlay))
        .collect::<Result<Vec<_>>>()?;
    let fields = request_fields(&basis, &plan, &sources, memo)?;
    Ok(Prepared { basis, consumer, left_out, plan, request: fields.key(), fields, min_driver, sources })
}

/// The headers that can stand in for those of this FlashInfer.
fn stand_ins(flashinfer: &FlashInfer, memo: &Memo) -> Vec<&'static StandIn> {
    let known = |one: &&StandIn| {
        let file = flashinfer.package.join(one.file.strip_prefix("flashinfer/").expect("paths of the tables start so"));
        memo.digest(&file).is_ok_and(|digest| one.sha256.contains(&digest))
    };
    tables::speed().stand_ins.iter().filter(known).collect()
}

/// What is really run, and how many jobs at once: sources are split where the machine can carry enough jobs.
fn work(prepared: &Prepared, asked: Option<usize>) -> Result<(Plan, limits::Jobs)> {
    // What is moved to another GPU goes through programs of ours, which know the flags of whole sources.
    let layout = match prepared.basis.retarget {
        Some(_) => Layout::Whole,
        None => Layout::ForJobs(limits::jobs(usize::MAX, asked).count),
    };
    let plan = plan::plan(&prepared.basis, layout)?;
    let jobs = limits::jobs(plan.units.len(), asked);
    Ok((plan, jobs))
}

/// The content of a file of the build folder, before there is one.
fn contents(file: &Located, plan: &Plan, overlay: &Overlay) -> Result<Vec<u8>> {
    if file.root == view::OVERLAY {
        let known = closure::overlay_file(overlay, &file.path).expect("the plan names only files of its overlay there");
        return Ok(known.post.clone());
    }
    let path = plan.view.path_of(file).expect("the plan names only roots of its view");
    fs::read(&path)
        .map_err(|e| Error::io("read", &path, e).hint("the installed FlashInfer lacks a source of this module: is it whole?"))
}

/// The tvm-ffi beside the chosen FlashInfer, else the environment's, else a pinned one.
fn tvm_ffi(ground: &Ground, request: &Request, context: &Context, observe: Observer) -> Result<TvmFfi> {
    let beside = ground.flashinfer.package.parent().map(survey::tvm_ffi_in).transpose()?.flatten();
    let of_environment = match &ground.environment {
        Some(environment) if ground.own || request.env.is_some() => survey::tvm_ffi(environment)?,
        _ => None,
    };
    let found = match beside.or(of_environment) {
        Some(found) => found,
        None => {
            let site = provision::tvm_ffi(&context.home, request.mode, &mut |step| observe(Event::Step(step.to_owned())))?;
            survey::tvm_ffi_in(&site)?.ok_or_else(|| {
                Error::refused("the fetched apache-tvm-ffi holds no tvm_ffi package")
                    .hint(format!("remove {} and run again", site.display()))
            })?
        }
    };
    Ok(found)
}

fn misfit(flashinfer: &FlashInfer, tvm_ffi: &TvmFfi) -> Option<String> {
    outside_of_range(&flashinfer.version, &tvm_ffi.version)
}

/// Why a tvm-ffi does not fit a FlashInfer, by the range that this FlashInfer asks for.
pub fn outside_of_range(flashinfer: &str, tvm_ffi: &str) -> Option<String> {
    let asked = &Tables::load().release(flashinfer)?.tvm_ffi;
    let range: pep440_rs::VersionSpecifiers = asked.parse().ok()?;
    let version: pep440_rs::Version = tvm_ffi.parse().ok()?;
    let outside = || format!("apache-tvm-ffi {version} is outside of {range}, which FlashInfer {flashinfer} asks for");
    (!range.contains(&version)).then(outside)
}

/// Its headers are compiled in, and its library is called: another version fails after minutes, or later.
fn check_fit(prepared: &Prepared) -> Result<()> {
    let Basis { flashinfer, tvm_ffi, .. } = &prepared.basis;
    let Some(why) = misfit(flashinfer, tvm_ffi) else { return Ok(()) };
    Err(Error::unsupported("this FlashInfer and this apache-tvm-ffi do not fit each other")
        .because(why)
        .hint(format!("install one that fits where FlashInfer is; the one found is {}", tvm_ffi.package.display())))
}

fn fetched_toolkit(root: &Path, memo: &Memo) -> Result<Toolkit> {
    toolchain::at(root, "fetched wheels", memo).map_err(|why| unfit_toolkit(root, why))
}

fn unfit_toolkit(root: &Path, why: String) -> Error {
    let error = Error::machine("the fetched CUDA toolkit is not fit").because(why);
    error.hint(format!("remove {} and run again", root.display()))
}

fn find_toolkit(ground: &Ground, request: &Request, memo: &Memo) -> Result<toolchain::Found> {
    let (env, consumer) = (ground.environment.as_ref(), ground.consumer.as_ref());
    toolchain::find(request.toolkit.as_deref(), env, consumer, &wanted(request), memo)
}

/// The machine's own toolkit if a fit one is there, else the pinned one.
fn toolkit(ground: &Ground, request: &Request, context: &Context, observe: Observer) -> Result<Toolkit> {
    let memo = &context.memo;
    let found = find_toolkit(ground, request, memo)?;
    for one in &found.rejected {
        observe(Event::Warning(format!("the toolkit {} ({}) is not used: {}", one.root.display(), one.origin, one.why)));
    }
    if let Some(toolkit) = found.toolkit {
        return Ok(toolkit);
    }
    let root = provision::cuda(&context.home, request.mode, &mut |step| observe(Event::Step(step.to_owned())))?;
    let toolkit = fetched_toolkit(&root, memo)?;
    wanted(request)(toolkit.version)?;
    Ok(toolkit)
}

/// Everything that is known before compiling: commands, tools, sources, overlay. Contents and modes, no paths.
fn request_fields(basis: &Basis, plan: &Plan, sources: &[Vec<u8>], memo: &Memo) -> Result<Fields> {
    let Basis { module, tvm_ffi, toolkit, cudart, host, target, retarget, overlay, cxx11_abi, stand_ins, .. } = basis;
    let mut fields = Fields::new(PLAN_FORMAT);
    fields
        .text("judge", judge::RULES)
        .text("module", &module.name)
        .text("target", &target.to_string())
        .text("tvm_ffi", &tvm_ffi.version)
        .text("cxx11_abi", if *cxx11_abi { "1" } else { "0" })
        .text("cudart", cudart.word())
        .text("nvcc", &toolkit.full_version)
        .text("host compiler", &host.version);
    if let Some(retarget) = retarget {
        fields.text("run on", &retarget.to.to_string()).digest("retarget", retarget.rules());
    }
    for command in plan.commands() {
        for word in command {
            fields.text("word", word);
        }
        fields.text("command", "end");
    }
    for (source, content) in plan.sources.iter().zip(sources) {
        fields.digest(&format!("source {}", source.name), Digest::of(content));
    }
    for file in &overlay.files {
        if let Some(inside) = file.data_path() {
            fields.digest(&format!("overlay {inside}"), Digest::of(&file.post));
        }
    }
    // What a source is split into is known of each compile, like the headers that it read.
    for one in stand_ins {
        let text = units::file(&format!("include/{}", one.header)).expect("the tables' stand-ins are carried in the program");
        fields.digest(&format!("stand-in {}", one.header), Digest::of(text.as_bytes()));
    }
    let tools: Vec<&Path> = toolkit.tools.iter().chain(&host.tools).map(PathBuf::as_path).chain([cudart.file()]).collect();
    let digests = tools.par_iter().map(|tool| memo.digest(tool)).collect::<Result<Vec<_>>>()?;
    for (tool, digest) in tools.iter().zip(digests) {
        let name = tool.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        fields.digest(&format!("tool {name}"), digest);
    }
    Ok(fields)
}

/// All inputs of an artifact whose compile reads `files`, as they are now.
fn inputs(prepared: &Prepared, files: &[Located], memo: &Memo) -> Result<Inputs> {
    let files = files.par_iter().map(|file| Ok(Input { file: file.clone(), sha256: content(prepared, file, memo)? }));
    Ok(Inputs { request: prepared.fields.clone(), files: files.collect::<Result<_>>()? })
}

/// The content of a file that a compile read, as it is now.
fn content(prepared: &Prepared, file: &Located, memo: &Memo) -> Result<Digest> {
    if file.root == view::OURS {
        let text = units::file(&file.path);
        let text = text.ok_or_else(|| Error::refused(format!("this fi-arch has no {}", file.path)))?;
        return Ok(Digest::of(text.as_bytes()));
    }
    if file.root == view::OVERLAY {
        let known = closure::overlay_file(&prepared.basis.overlay, &file.path);
        let known = known.ok_or_else(|| Error::refused(format!("the overlay has no {} any more", file.path)))?;
        return Ok(Digest::of(&known.post));
    }
    let path = prepared.plan.view.path_of(file);
    memo.digest(&path.ok_or_else(|| Error::refused(format!("unknown root {}", file.root)))?)
}

/// The store's answer: an artifact whose every input has the same content today.
fn look_up(prepared: &Prepared, store: &Store, memo: &Memo) -> Result<Option<Entry>> {
    for Closure { files } in store.closures(&prepared.request) {
        if let Some(shadow) = closure::shadow(&files, &prepared.plan.include_dirs, &prepared.plan.view, &prepared.basis.overlay) {
            tracing::info!("a stored artifact does not fit any more: {shadow}");
            continue;
        }
        let inputs = match inputs(prepared, &files, memo) {
            Ok(inputs) => inputs,
            // A file that is gone belongs to another state of the machine: no hit, and no failure.
            Err(error) => {
                tracing::info!("a stored artifact does not fit any more: {error}");
                continue;
            }
        };
        let key = inputs.key();
        if let Some(entry) = store.lookup(&key, memo) {
            return check_consumer(prepared, &entry).map(|()| Some(entry));
        }
        tracing::info!("what such a compile read is there, and makes {}, which is not in the store", key.short());
    }
    Ok(None)
}

/// Disk space (MiB) that a build's intermediate files may need for each source.
const SOURCE_MIB: u64 = 256;

fn check_disk(dir: &Path, sources: usize) -> Result<()> {
    let Ok(stat) = rustix::fs::statvfs(dir) else { return Ok(()) };
    let free_mib = (stat.f_bavail * stat.f_frsize) >> 20;
    let needed_mib = SOURCE_MIB * sources as u64;
    if free_mib < needed_mib {
        return Err(Error::machine(format!("too little disk space to build in {}", dir.display()))
            .because(format!("{free_mib} MiB are free, {needed_mib} MiB may be needed for a while"))
            .hint("free some disk space, or set FI_ARCH_HOME to a folder on another disk"));
    }
    Ok(())
}

fn compile_and_publish(
    request: &Request,
    prepared: &Prepared,
    context: &Context,
    store: &Store,
    dir: &Path,
    started: Instant,
    observe: Observer,
) -> Result<Entry> {
    let inputs = compile(request, prepared, context, dir, observe)?;
    observe(Event::Step("judging".to_owned()));
    let artifact = dir.join(&prepared.plan.artifact);
    let inventory = cubin::read(&artifact)?;
    let verdict = judge_it(prepared, &inventory)?;
    if !verdict.passed() {
        return Err(refusal(prepared, &verdict.faults));
    }
    let twice = twice(&inventory);
    if twice > 0 {
        observe(Event::Warning(format!(
            "{twice} kernels are there twice: the tables split the sources wrongly for this FlashInfer"
        )));
    }
    if !prepared.left_out.is_empty() {
        // What is wrong in it need not show in the machine code.
        let module = &prepared.basis.module.name;
        return Err(Error::refused(format!("an artifact with a part of the edits is not stored: {module}"))
            .because(format!("left out: {}", prepared.left_out.join(", "))));
    }
    let key = inputs.key();
    let manifest = manifest(prepared, &inputs, &inventory, &verdict, &artifact, started)?;
    let entry = store.publish(&key, &artifact, &manifest, Some(&inputs))?;
    store.remember_closure(&prepared.request, &inputs.closure())?;
    Ok(entry)
}

/// How many kernels are in more than one image: two units made the same.
fn twice(inventory: &cubin::Inventory) -> usize {
    let mut seen = BTreeSet::new();
    let kernels = inventory.images.iter().flat_map(|image| image.kernels.iter().map(move |kernel| (&image.target, &kernel.name)));
    kernels.filter(|kernel| !seen.insert(*kernel)).count()
}

/// Compiles and links in `dir`, and returns everything that the compilers read.
fn compile(request: &Request, prepared: &Prepared, context: &Context, dir: &Path, observe: Observer) -> Result<Inputs> {
    let Basis { module, toolkit, cudart, host, target, retarget, .. } = &prepared.basis;
    let (plan, jobs) = work(prepared, request.jobs)?;
    fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, e))?;
    check_disk(dir, plan.sources.len())?;
    plan.view.lay_out(dir, &prepared.basis.overlay)?;
    for path in &plan.ours {
        let (file, text) = (dir.join(view::OURS).join(path), units::file(path).expect("a plan names files that there are"));
        let folder = file.parent().expect("it lies below the build folder");
        fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
        fs::write(&file, text).map_err(|e| Error::io("write", &file, e))?;
    }
    for unit in &plan.units {
        let keep = dir.join("keep").join(&unit.name);
        fs::create_dir_all(&keep).map_err(|e| Error::io("create", &keep, e))?;
    }
    observe(Event::Step(format!("probing nvcc {} and the link", toolkit.full_version)));
    toolchain::probe_link(toolkit, cudart, host, &dir.join("tmp"))?;
    toolchain::probe_nvcc(toolkit, host, *target, &dir.join("tmp"))?;

    observe(Event::Step(format!(
        "compiling {} for {target}{}: {} sources in {} units, {} at once ({})",
        module.name,
        retarget.as_ref().map_or(String::new(), |retarget| format!(", to run on {}", retarget.to)),
        plan.sources.len(),
        plan.units.len(),
        jobs.count,
        jobs.reason
    )));
    let begun = begin(dir)?;
    let logs = dir.join("logs");
    compile::run_all(&plan.compile_jobs(host), dir, &logs, jobs.count, &mut |status| observe(Event::Jobs(status)))?;
    observe(Event::Step("linking".to_owned()));
    for job in plan.link_jobs(host) {
        compile::run_all(&[job], dir, &logs, 1, &mut |_| ())?;
    }

    let files = closure::read(&plan.depfiles(dir), &plan.view)?;
    unchanged_since(&begun, &files, &plan)?;
    inputs(prepared, &files, &context.memo)
}

/// The moment before the compilers start, by the clock of the build folder's file system.
fn begin(dir: &Path) -> Result<fs::Metadata> {
    let marker = dir.join("begun");
    fs::write(&marker, "").map_err(|e| Error::io("write", &marker, e))?;
    fs::metadata(&marker).map_err(|e| Error::io("look at", &marker, e))
}

/// An input that changed while it was compiled would be keyed by what it is now, not by what was read.
fn unchanged_since(begun: &fs::Metadata, files: &[Located], plan: &Plan) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let begun = (begun.ctime(), begun.ctime_nsec());
    for file in files {
        let Some(path) = plan.view.path_of(file) else { continue };
        let meta = fs::metadata(&path).map_err(|e| Error::io("look at", &path, e))?;
        if (meta.ctime(), meta.ctime_nsec()) >= begun {
            return Err(Error::refused("an input changed while it was being compiled")
                .because(format!("{} was touched after the compilers started", path.display()))
                .hint("let the installation finish, then build again"));
        }
    }
    Ok(())
}

/// The driver's library. It comes with the GPU, so its functions are known from the toolkit's header.
const DRIVER: &str = "libcuda.so.1";

/// Judges an artifact against the module's rules and the libraries that will own its symbols.
fn judge_it(prepared: &Prepared, inventory: &cubin::Inventory) -> Result<Verdict> {
    let Basis { module, tvm_ffi, toolkit, host, target, retarget, .. } = &prepared.basis;
    let cudart = cudart_of_consumer(prepared)?;
    let mut owners = Vec::new();
    let mut own = |name: &str, path: &Path| -> Result<()> {
        owners.push(Owner { name: name.to_owned(), exports: cubin::linkage(path)?.exports });
        Ok(())
    };
    own("libtvm_ffi.so", &tvm_ffi.package.join("lib/libtvm_ffi.so"))?;
    let needed = inventory.linkage.as_ref().map(|linkage| linkage.needed.clone()).unwrap_or_default();
    for name in needed.iter().filter(|name| *name != DRIVER && !name.starts_with("libcudart")) {
        // A NEEDED library that the host compiler cannot find owns nothing; its symbols then have no owner, and that is said.
        if let Some(path) = toolchain::host_library(host, name) {
            own(name, &path)?;
        }
    }
    if needed.iter().any(|name| name == DRIVER) {
        owners.push(Owner { name: DRIVER.to_owned(), exports: unversioned(toolchain::driver_functions(toolkit)?) });
    }
    let exports = judge::exports_of(&prepared.sources);
    Ok(judge::judge(
        inventory,
        &Expectation {
            target: retarget.as_ref().map_or(*target, |retarget| retarget.to),
            exports: &exports,
            marks_required: module.dependency_marks == DependencyMarks::Required,
            launched_plainly: &module.launched_plainly,
            cudart: cudart.as_ref(),
            owners: &owners,
        },
    ))
}

/// The libcudart that the artifact will meet: the consumer's own where that file is at hand, else the toolkit's, which has the
/// same SONAME. None for an artifact that holds its own.
fn cudart_of_consumer(prepared: &Prepared) -> Result<Option<Owner>> {
    let Cudart::Shared { file, soname } = &prepared.basis.cudart else { return Ok(None) };
    let theirs = prepared.consumer.as_ref().and_then(|consumer| consumer.cudart.as_ref());
    Ok(Some(Owner { name: soname.clone(), exports: cubin::linkage(theirs.unwrap_or(file))?.exports }))
}

/// Refuses an artifact of the store that lacks something in the process of this consumer: it was judged for another's runtime.
fn check_consumer(prepared: &Prepared, entry: &Entry) -> Result<()> {
    let Some(consumer) = prepared.consumer.as_ref().filter(|consumer| consumer.cudart.is_some()) else { return Ok(()) };
    let Some(cudart) = cudart_of_consumer(prepared)? else { return Ok(()) };
    let faults = judge::runtime_faults(&cubin::linkage(&entry.artifact)?, Some(&cudart));
    if faults.is_empty() { Ok(()) } else { Err(refusal(prepared, &faults).within(format!("it does not fit {}", consumer.name))) }
}

fn unversioned(names: BTreeSet<String>) -> Vec<cubin::Symbol> {
    names.into_iter().map(|name| cubin::Symbol { name, version: None, weak: false }).collect()
}

/// How many names of a fault are shown; the log has them all.
const SHOWN_NAMES: usize = 3;

fn refusal(prepared: &Prepared, faults: &[judge::Fault]) -> Error {
    let mut error = Error::refused(format!("the judge refused {} for {}", prepared.basis.module.name, prepared.basis.target));
    for fault in faults {
        let more = fault.names.len().saturating_sub(SHOWN_NAMES);
        let mut names = fault.names.iter().take(SHOWN_NAMES).cloned().collect::<Vec<_>>().join("\n");
        if more > 0 {
            names.push_str(&format!("\nand {more} more"));
        }
        let names = if names.is_empty() { names } else { format!("\n{names}") };
        error = error.because(format!("{}: {}{names}", fault.code, fault.message));
    }
    error.hint("nothing was stored; an artifact like this would give wrong results without an error")
}

fn manifest(
    prepared: &Prepared,
    inputs: &Inputs,
    inventory: &cubin::Inventory,
    verdict: &Verdict,
    artifact: &Path,
    started: Instant,
) -> Result<Manifest> {
    let basis = &prepared.basis;
    let bytes = fs::read(artifact).map_err(|e| Error::io("read", artifact, e))?;
    let linkage = inventory.linkage.as_ref().expect("an artifact without linkage does not pass the judge");
    let overlay = &basis.overlay;
    let by_path: BTreeMap<&str, &overlay::File> = overlay.files.iter().map(|file| (file.path.as_str(), file)).collect();
    let edits = overlay.edits.iter().map(|edit| EditRecord {
        id: edit.id.clone(),
        path: edit.path.clone(),
        reason: edit.reason.clone(),
        sites: edit.sites,
        pre: by_path.get(edit.path.as_str()).and_then(|file| file.pre),
        post: Digest::of(&by_path[edit.path.as_str()].post),
    });
    let flags = prepared.plan.compile.first().cloned().unwrap_or_default();
    Ok(Manifest {
        format: MANIFEST_FORMAT,
        key: inputs.key(),
        request: prepared.request,
        module: basis.module.name.clone(),
        target: basis.target.to_string(),
        run_on: basis.retarget.as_ref().map(|retarget| retarget.to.to_string()),
        flashinfer: basis.flashinfer.version.clone(),
        tvm_ffi: basis.tvm_ffi.version.clone(),
        artifact: FileRecord { file: prepared.plan.artifact.clone(), sha256: Digest::of(&bytes), bytes: bytes.len() as u64 },
        nvcc: basis.toolkit.full_version.clone(),
        host_compiler: basis.host.version.clone(),
        flags,
        units: Some(units::count(prepared.plan.sources.len(), inputs.files.iter().map(|input| &input.file))),
        edits: edits.collect(),
        verdict: verdict_record(verdict, linkage),
        cudart: basis.cudart.word().to_owned(),
        min_driver: prepared.min_driver.map(str::to_owned),
        inputs: None,
        created: store::timestamp(),
        fi_arch: env!("CARGO_PKG_VERSION").to_owned(),
        elapsed_s: started.elapsed().as_secs_f64(),
        test_only: basis.retarget.is_some(),
    })
}

/// What a manifest keeps of a verdict.
fn verdict_record(verdict: &Verdict, linkage: &cubin::Linkage) -> VerdictRecord {
    VerdictRecord {
        verdict: verdict.word().to_owned(),
        kernels: verdict.kernels,
        hollow: verdict.hollow,
        with_dependency_marks: verdict.with_dependency_marks,
        need_no_marks: verdict.need_no_marks,
        needed: linkage.needed.clone(),
        exports: linkage.exports.iter().map(|s| s.name.clone()).filter(|n| n.starts_with("__tvm_ffi_")).collect(),
        glibc_floor: linkage.glibc_floor.clone(),
        libstdcxx_floor: linkage.libstdcxx_floor.clone(),
    }
}

/// Keeps the full output of a failed build under `home/logs` and names it in the error.
fn keep_logs(error: Error, prepared: &Prepared, asked: Option<usize>, dir: &Path, home: &Path) -> Error {
    let basis = &prepared.basis;
    let name = format!("{}-{}-{}.log", basis.module.name, basis.target, prepared.request.short());
    let to = home.join("logs").join(name);
    let mut text = String::new();
    let plan = work(prepared, asked).map_or_else(|_| prepared.plan.clone(), |(plan, _)| plan);
    for job in plan.compile_jobs(&basis.host).into_iter().chain(plan.link_jobs(&basis.host)) {
        let Ok(output) = fs::read(dir.join("logs").join(format!("{}.log", job.label))) else { continue };
        text.push_str(&format!("$ {}\n{}\n", job.argv.join(" "), String::from_utf8_lossy(&output)));
    }
    text.push_str(&format!("{error}\n"));
    let written = fs::create_dir_all(home.join("logs")).and_then(|()| fs::write(&to, text));
    match written {
        Ok(()) => error.hint(format!("the full log is in {}", to.display())),
        // The disk may be full: the error itself matters more than its log.
        Err(_) => error,
    }
}
