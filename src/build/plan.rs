//! What a build will do, exactly: the commands, with every path relative to the build folder. Pure: the same basis gives the
//! same plan, and the plan holds nothing that differs between machines but [`View`], which never reaches a command.

use std::path::{Path, PathBuf};

use super::compile::Job;
use super::retarget::Retarget;
use super::toolchain::{Cudart, HostCompiler, Toolkit, link_flags};
use super::units::{self, Layout, Unit};
use super::view::{CUDA, CUDA_INCLUDE, CUDA_LIB, DATA, OVERLAY, TVM_FFI, View};
use crate::error::{Error, Result};
use crate::overlay::Overlay;
use crate::survey::{FlashInfer, TvmFfi};
use crate::tables::{Module, Recipe, StandIn, speed};
use crate::target::Target;

/// Stands for the host compiler's path wherever commands are shown, compared or put into a key.
pub const HOST_COMPILER: &str = "@host";

/// Everything that decides a plan, but for how its sources are split.
#[derive(Debug)]
pub struct Basis {
    pub module: &'static Module,
    pub recipe: &'static Recipe,
    pub overlay: Overlay,
    pub flashinfer: FlashInfer,
    pub tvm_ffi: TvmFfi,
    /// torch's `_GLIBCXX_USE_CXX11_ABI`.
    pub cxx11_abi: bool,
    pub toolkit: Toolkit,
    pub cudart: Cudart,
    pub host: HostCompiler,
    pub target: Target,
    /// Where the code is to run on another GPU than the target. Changes no command: the view holds other programs.
    pub retarget: Option<Retarget>,
    /// Headers of ours that stand in for FlashInfer's.
    pub stand_ins: Vec<&'static StandIn>,
}

/// A source of the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The name without folder and ending, such as `trtllm_allreduce`.
    pub name: String,
    /// Its path in the build folder: below `overlay` when it is edited, else below `data`.
    pub path: String,
}

/// What a build will do.
#[derive(Debug, Clone)]
pub struct Plan {
    pub sources: Vec<Source>,
    /// What is compiled, that with the most work first.
    pub units: Vec<Unit>,
    /// Files of our own that are read beside the overlay: their paths below `ours`.
    pub ours: Vec<String>,
    /// One nvcc command a unit; `@host` stands for the host compiler.
    pub compile: Vec<Vec<String>>,
    /// The commands that link, in order.
    pub link: Vec<Vec<String>>,
    /// Include folders in search order, as names in the build folder.
    pub include_dirs: Vec<String>,
    /// The artifact's path in the build folder.
    pub artifact: String,
    pub view: View,
}

/// Makes the plan that `basis` leads to.
pub fn plan(basis: &Basis, layout: Layout) -> Result<Plan> {
    let Basis { module, recipe, overlay, toolkit, cudart, host, .. } = basis;
    let package = &basis.flashinfer.package;
    // Where links lead now: one that is turned to another folder in the middle (`/usr/local/cuda`) changes nothing.
    let real = |path: PathBuf| path.canonicalize().unwrap_or(path);
    let mut links = vec![
        (DATA, real(package.join("data"))),
        (TVM_FFI, real(basis.tvm_ffi.package.clone())),
        (CUDA, real(toolkit.root.clone())),
    ];
    if toolkit.include != toolkit.root.join("include") {
        links.push((CUDA_INCLUDE, toolkit.include.clone()));
    }
    let libraries = cudart.file().parent().unwrap_or(&toolkit.root);
    let libraries_name = match libraries.strip_prefix(&toolkit.root) {
        Ok(below) => format!("{CUDA}/{}", below.display()),
        Err(_) => {
            links.push((CUDA_LIB, libraries.to_owned()));
            CUDA_LIB.to_owned()
        }
    };
    let view = View::new(links).with_retarget(basis.retarget.as_ref());

    // The overlay comes first. Its headers name their neighbours as "../x.h", which resolves only through the folder that the
    // originals lie in. `-isystem` keeps the silence that FlashInfer's own flags give to these headers.
    let mut includes = vec![
        ("-isystem".to_owned(), format!("{OVERLAY}/include")),
        ("-isystem".to_owned(), format!("{DATA}/include/flashinfer/comm")),
    ];
    for include in
        recipe.includes.iter().filter(|include| include.except_root.as_ref().is_none_or(|root| toolkit.root != Path::new(root)))
    {
        includes.push((include.flag.clone(), place(&include.dir, toolkit)?));
    }

    let mut flags = Vec::new();
    for stand_in in &basis.stand_ins {
        flags.extend(["-include".to_owned(), units::stand_in_path(stand_in)]);
    }
    for flag in recipe.cuda_flags(toolkit.version, module) {
        match flag {
            "{gencode}" => flags.push(basis.target.gencode()),
            "{abi}" => flags.push(format!("-D_GLIBCXX_USE_CXX11_ABI={}", u8::from(basis.cxx11_abi))),
            "{includes}" => flags.extend(includes.iter().flat_map(|(flag, dir)| match flag.as_str() {
                "-I" => vec![format!("-I{dir}")],
                _ => vec![flag.clone(), dir.clone()],
            })),
            text => flags.push(text.to_owned()),
        }
    }

    let sources: Vec<Source> = module
        .sources
        .iter()
        .map(|source| {
            let below = source.strip_prefix("flashinfer/data/").unwrap_or(source);
            let edited = super::closure::overlay_file(overlay, below).is_some();
            Source { name: units::stem(source), path: format!("{}/{below}", if edited { OVERLAY } else { DATA }) }
        })
        .collect();
    if sources.is_empty() {
        return Err(Error::unsupported(format!("module {} has no sources in the tables", module.name)));
    }

    flags.extend(host.args.iter().map(|arg| format!("-Xcompiler={arg}")));

    let named: Vec<(&str, String)> =
        module.sources.iter().map(String::as_str).zip(sources.iter().map(|source| source.path.clone())).collect();
    let (units, mut ours) = units::units(layout, &named, overlay, package);
    ours.extend(basis.stand_ins.iter().map(|one| format!("include/{}", one.header)));
    let compile = units.iter().map(|unit| compile_command(unit, &flags)).collect();
    let artifact = format!("{}.so", module.name);
    // FlashInfer's own link flags name folders that pip toolkits do not have, and a libcuda that nothing here needs (the judge
    // finds an owner for every undefined symbol): what the probe linked is what is linked.
    let mut link = vec![HOST_COMPILER.to_owned()];
    link.extend(host.args.iter().cloned());
    link.extend(["-shared".to_owned()]);
    link.extend(units.iter().map(|unit| format!("obj/{}.o", unit.name)));
    if units.len() > sources.len() {
        // The headers define functions that are neither templates nor inline. Each unit of a source has them, from the same text: the
        // linker takes the first.
        link.push("-Wl,-z,muldefs".to_owned());
    }
    link.extend(link_flags(cudart, &libraries_name));
    let mut commands = Vec::new();
    if module.driver_api {
        commands.push(driver_stub_command());
        link.extend(["-Wl,--push-state,--no-as-needed", DRIVER_STUB, "-Wl,--pop-state"].map(Into::into));
    }
    link.extend(["-o".to_owned(), artifact.clone()]);
    commands.push(link);

    // Compilers search all `-I` folders before all `-isystem` ones.
    includes.sort_by_key(|(flag, _)| flag != "-I");
    let include_dirs = includes.into_iter().map(|(_, dir)| dir).collect();
    Ok(Plan { sources, units, ours, compile, link: commands, include_dirs, artifact, view })
}

/// Stands for libcuda at the link: the driver's library is on no build machine for sure, and only its name is needed.
const DRIVER_STUB: &str = "obj/libcuda.so.1";

/// Makes an empty library of the driver's name. It has no symbols, so the linker must be told to keep it.
fn driver_stub_command() -> Vec<String> {
    let words = [HOST_COMPILER, "-nostdlib", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c++", "/dev/null", "-o", DRIVER_STUB];
    words.map(Into::into).to_vec()
}

/// `-ccbin` names one host compiler for nvcc and for the link; intermediate files keep fixed names, since nvcc's random ones
/// end up in the object.
fn compile_command(unit: &Unit, flags: &[String]) -> Vec<String> {
    let Unit { name, path, source, flags: first } = unit;
    let mut argv: Vec<String> = ["cuda/bin/nvcc", "-ccbin", HOST_COMPILER, "--keep", "--keep-dir"].map(Into::into).to_vec();
    argv.push(format!("keep/{name}"));
    argv.extend(["--generate-dependencies-with-compile".to_owned(), "--dependency-output".to_owned(), depfile(name)]);
    let optimisation = &speed().host_optimisation;
    let quick = |flag: &String| *flag == optimisation.from && !optimisation.except.contains(source);
    argv.extend(first.iter().chain(flags).map(|flag| if quick(flag) { optimisation.to.clone() } else { flag.clone() }));
    // What is local to a unit is named after its path, by default the whole one: the same inputs must give the same bytes anywhere.
    argv.extend(["-Xcudafe".to_owned(), format!("--orig_src_path_name,{path}")]);
    argv.extend(["-c".to_owned(), path.clone(), "-o".to_owned(), format!("obj/{name}.o")]);
    argv
}

fn depfile(name: &str) -> String {
    format!("obj/{name}.d")
}

/// A folder of the tables (`@data/include`) as a name in the build folder.
fn place(dir: &str, toolkit: &Toolkit) -> Result<String> {
    let unknown = || Error::unsupported(format!("the tables name the folder {dir}, whose root fi-arch does not know"));
    let (root, rest) = dir.strip_prefix('@').ok_or_else(unknown)?.split_once('/').ok_or_else(unknown)?;
    match (root, rest.split_once('/').unwrap_or((rest, ""))) {
        ("data", _) => Ok(format!("{DATA}/{rest}")),
        ("tvm_ffi", _) => Ok(format!("{TVM_FFI}/{rest}")),
        ("cuda", ("include", below)) if toolkit.include != toolkit.root.join("include") => {
            Ok(if below.is_empty() { CUDA_INCLUDE.to_owned() } else { format!("{CUDA_INCLUDE}/{below}") })
        }
        ("cuda", _) => Ok(format!("{CUDA}/{rest}")),
        _ => Err(unknown()),
    }
}

impl Plan {
    /// The compile jobs, with the host compiler's real command in place of `@host`.
    pub fn compile_jobs(&self, host: &HostCompiler) -> Vec<Job> {
        let jobs = self.units.iter().zip(&self.compile).enumerate();
        jobs.map(|(index, (unit, argv))| Job {
            label: unit.name.clone(),
            argv: with_host(argv, host),
            keep: Some(PathBuf::from(format!("keep/{}", unit.name))),
            weight: u32::MAX - index as u32,
        })
        .collect()
    }

    /// The link jobs, to be run one after another.
    pub fn link_jobs(&self, host: &HostCompiler) -> Vec<Job> {
        let jobs = self.link.iter().enumerate();
        jobs.map(|(index, argv)| Job { label: format!("link-{}", index + 1), argv: with_host(argv, host), keep: None, weight: 0 })
            .collect()
    }

    /// The dependency files that the compile jobs write, in `dir`.
    pub fn depfiles(&self, dir: &Path) -> Vec<PathBuf> {
        self.units.iter().map(|unit| dir.join(depfile(&unit.name))).collect()
    }

    /// Every command, for people and for a key: no path of this machine in it.
    pub fn commands(&self) -> impl Iterator<Item = &Vec<String>> {
        self.compile.iter().chain(&self.link)
    }
}

fn with_host(argv: &[String], host: &HostCompiler) -> Vec<String> {
    let path = host.path.to_string_lossy();
    argv.iter().map(|word| if word == HOST_COMPILER { path.clone().into_owned() } else { word.clone() }).collect()
}
