//! What is known of FlashInfer: `arch-tables/flashinfer/` read into types. Data, not code.

pub mod calls;
mod dispatching;
mod engines;
mod flags;
mod releases;
mod speed;
mod toolkits;
mod torch;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;

use pep440_rs::{Version, VersionSpecifiers};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::target::CudaVersion;

pub use dispatching::chooses_its_kernels;
pub use engines::{
    Advice, Engine, EngineForm, EngineGate, EnginePlace, Helper, Note, NoteKind, engine, engines, notes, policy_edits,
};
pub use flags::{Fusion, LaunchFlag, Launcher, Means, Variable, launchers};
pub use speed::{Shard, Shards, StandIn, speed};
pub use toolkits::{knows_cuda, min_driver};
pub use torch::cuda_of_torch;

/// The files of a release that decide its recipe, relative to the folder that holds `flashinfer/`.
pub const RECIPE_FILES: [&str; 3] = ["flashinfer/jit/core.py", "flashinfer/jit/cpp_ext.py", "flashinfer/compilation_context.py"];

/// The tables of FlashInfer as they stand in `arch-tables/`: file name and text.
pub const TEXTS: [(&str, &str); 4] = [
    ("flashinfer/modules.toml", include_str!("../../arch-tables/flashinfer/modules.toml")),
    ("flashinfer/releases.toml", include_str!("../../arch-tables/flashinfer/releases.toml")),
    ("flashinfer/defects.toml", include_str!("../../arch-tables/flashinfer/defects.toml")),
    ("flashinfer/recipes.toml", include_str!("../../arch-tables/flashinfer/recipes.toml")),
];

/// All tables of FlashInfer.
#[derive(Debug)]
pub struct Tables {
    pub modules: Vec<Module>,
    /// In the order of the table: older releases first.
    pub releases: Vec<Release>,
    pub faults: Vec<Fault>,
    pub defects: Vec<Defect>,
    pub recipes: Vec<Recipe>,
}

/// A JIT module that fi-arch builds. Paths are relative to the folder that holds `flashinfer/`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Module {
    pub name: String,
    /// What the module is, in one line.
    pub about: String,
    pub sources: Vec<String>,
    pub generator: Generator,
    /// The generator passes its own arch list.
    pub gated: bool,
    /// It calls the CUDA driver itself, so it is linked to libcuda.
    #[serde(default)]
    pub driver_api: bool,
    pub dependency_marks: DependencyMarks,
    /// Kernels whose mangled name contains one of these need no dependency marks.
    pub launched_plainly: Vec<String>,
    /// The files whose digests name a release for this module.
    pub files: Vec<String>,
    /// Ids of the defects that are looked for.
    pub defects: Vec<String>,
}

/// The Python function that describes a module to FlashInfer's JIT.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Generator {
    pub file: String,
    pub function: String,
}

/// What the judge wants of a module's kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DependencyMarks {
    Required,
    None,
}

/// A release of FlashInfer: a name for the digests of its files.
#[derive(Debug, Clone)]
pub struct Release {
    pub version: Version,
    /// The id of its recipe.
    pub recipe: String,
    /// The range of apache-tvm-ffi that it asks for.
    pub tvm_ffi: String,
    /// Ids of known faults that the edits do not cure.
    pub remains: Vec<String>,
    pub notes: String,
    /// The digest of every file that the tables follow, by its path.
    pub files: BTreeMap<String, Digest>,
}

/// A known fault that fi-arch leaves in.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    pub id: String,
    /// The releases that have it.
    #[serde(deserialize_with = "from_str")]
    pub releases: VersionSpecifiers,
    pub text: String,
}

/// A fault in FlashInfer's sources, how to find it and what to write in its place.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Defect {
    pub id: String,
    /// The listed releases that have it. For people and for `tables check`: an overlay goes by what it finds.
    #[serde(deserialize_with = "from_str")]
    pub releases: VersionSpecifiers,
    pub causes: String,
    pub cure: String,
    pub upstream: String,
    /// Our own headers that the edited files include, relative to `cuda-src/include`.
    #[serde(default)]
    pub adds: Vec<String>,
    #[serde(rename = "place")]
    pub places: Vec<Place>,
}

/// Where a defect is looked for: the gate of the module's generator, or one file that has one of several forms.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Place {
    Gate(GatePlace),
    File(FilePlace),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatePlace {
    pub gate: Gate,
}

/// `call(keyword=[9, 10])` in the module's generator: the majors that FlashInfer admits.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    pub call: String,
    pub keyword: String,
    /// The major version that the edit lets in.
    pub add: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilePlace {
    pub file: String,
    #[serde(rename = "form")]
    pub forms: Vec<Form>,
}

/// One way in which a file may be written. It fits when every anchor is found as often as it says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Form {
    pub name: String,
    #[serde(default)]
    pub expect: Vec<Anchor>,
    /// Empty: the defect is cured in this form.
    #[serde(default)]
    pub edits: Vec<Anchor>,
}

/// A piece of text in its place. Compared token by token: spaces, line breaks and comments don't matter.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Anchor {
    pub find: String,
    /// How often it must be found, exactly.
    pub count: usize,
    /// Counts only in the body of this function.
    pub within: Option<String>,
    /// Counts only outside the body of this function.
    pub outside: Option<String>,
    /// Python, and `find` is one chain of `and` or of `or`: its operands may stand in any order.
    #[serde(default)]
    pub any_order: bool,
    /// What an edit writes in place of what was found, or before and after it; `$` stands for the found text.
    pub replace: Option<String>,
    pub before: Option<String>,
    pub after: Option<String>,
}

/// The flags that a FlashInfer uses itself, in its own order.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    pub id: String,
    cuda_flags: Vec<Flag>,
    pub includes: Vec<Include>,
    ldflags: Vec<Flag>,
}

/// A folder of headers; `dir` starts with a root: `@cuda`, `@tvm_ffi` or `@data`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Include {
    /// `-I` or `-isystem`.
    pub flag: String,
    pub dir: String,
    /// FlashInfer leaves the folder out where its root is this one.
    pub except_root: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Flag {
    Plain(String),
    When(FlagWhen),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FlagWhen {
    flag: String,
    #[serde(default, deserialize_with = "cuda_version")]
    min_nvcc: Option<CudaVersion>,
    gated: Option<bool>,
    #[serde(default = "yes")]
    needed: bool,
}

/// A word for the linker; `needed` is false where the module has no undefined symbol of that library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkFlag<'a> {
    pub flag: &'a str,
    pub needed: bool,
}

impl Recipe {
    /// The compiler's flags for nvcc of version `nvcc`, in FlashInfer's order, with the placeholders `{abi}`,
    /// `{includes}` and `{gencode}` still in place.
    pub fn cuda_flags(&self, nvcc: CudaVersion, module: &Module) -> Vec<&str> {
        self.cuda_flags
            .iter()
            .filter(|flag| match flag {
                Flag::Plain(_) => true,
                Flag::When(when) => {
                    when.min_nvcc.is_none_or(|least| nvcc >= least) && when.gated.is_none_or(|gated| gated == module.gated)
                }
            })
            .map(Flag::text)
            .collect()
    }

    /// The linker's flags in FlashInfer's order, with `@cuda` for the toolkit.
    pub fn ldflags(&self) -> Vec<LinkFlag<'_>> {
        let needed = |flag: &Flag| !matches!(flag, Flag::When(FlagWhen { needed: false, .. }));
        self.ldflags.iter().map(|flag| LinkFlag { flag: flag.text(), needed: needed(flag) }).collect()
    }
}

impl Flag {
    fn text(&self) -> &str {
        match self {
            Self::Plain(flag) => flag,
            Self::When(when) => &when.flag,
        }
    }
}

impl Tables {
    /// The tables that this fi-arch was built with.
    pub fn load() -> &'static Self {
        static TABLES: OnceLock<Tables> = OnceLock::new();
        TABLES.get_or_init(|| {
            let modules: ModuleRows = parse("modules", TEXTS[0].1);
            let releases: releases::Rows = parse("releases", TEXTS[1].1);
            let defects: DefectRows = parse("defects", TEXTS[2].1);
            let recipes: RecipeRows = parse("recipes", TEXTS[3].1);
            Tables {
                modules: modules.module,
                releases: releases.releases(),
                faults: releases.fault,
                defects: defects.defect,
                recipes: recipes.recipe,
            }
        })
    }

    /// The module of that name.
    pub fn module(&self, name: &str) -> Result<&Module> {
        self.modules.iter().find(|module| module.name == name).ok_or_else(|| {
            let known: Vec<_> = self.modules.iter().map(|module| module.name.as_str()).collect();
            Error::usage(format!("`{name}` is no module that fi-arch builds")).hint(format!("known: {}", known.join(", ")))
        })
    }

    /// The release of that version. `None` when it is not listed, or when the text is no version.
    pub fn release(&self, version: &str) -> Option<&Release> {
        let version = Version::from_str(version).ok()?;
        self.releases.iter().find(|release| release.version == version)
    }

    /// The release whose files have these digests: all that are given, and at least one. Of several, `prefer`.
    pub fn release_by_digests(&self, digests: &BTreeMap<String, Digest>, prefer: &str) -> Option<&Release> {
        let fits = |release: &&Release| {
            !digests.is_empty() && digests.iter().all(|(path, digest)| release.files.get(path) == Some(digest))
        };
        self.release(prefer).filter(fits).or_else(|| self.releases.iter().find(fits))
    }

    /// Every file that the tables follow, by its path.
    pub fn paths(&self) -> BTreeSet<&str> {
        let of_modules = self.modules.iter().flat_map(|module| &module.files).map(String::as_str);
        of_modules.chain(RECIPE_FILES).collect()
    }

    /// The defect of that id.
    pub fn defect(&self, id: &str) -> &Defect {
        self.defects.iter().find(|defect| defect.id == id).expect("the tables' own test resolves every id")
    }

    /// The ids of the defects that `release` has in `module`, as the tables say.
    pub fn defects_in<'t>(&'t self, release: &'t Release, module: &'t Module) -> impl Iterator<Item = &'t str> {
        let defects = module.defects.iter().map(|id| self.defect(id));
        defects.filter(|defect| defect.releases.contains(&release.version)).map(|defect| defect.id.as_str())
    }

    /// The known faults that stay in a release after the edits.
    pub fn remaining(&self, release: &Release) -> Vec<&Fault> {
        self.faults.iter().filter(|fault| release.remains.contains(&fault.id)).collect()
    }

    /// The recipe of the FlashInfer in `package` (…/flashinfer), by the digests of the files that make its flags.
    /// With unknown ones, the recipe of the nearest older release (of the oldest, where none is older);
    /// [`Tables::recipe_is_listed`] tells which of the two it is.
    pub fn recipe_for(&self, package: &Path, version: &str) -> Result<&Recipe> {
        if let Some(release) = self.release_by_digests(&recipe_digests(package)?, version) {
            return Ok(self.recipe(&release.recipe));
        }
        let wanted = Version::from_str(version).map_err(|_| {
            Error::unsupported(format!("`{version}` is no version number"))
                .because("the files that make FlashInfer's compiler flags are none of a listed release, so its number must tell")
        })?;
        let older = self.releases.iter().filter(|release| release.version <= wanted).max_by_key(|release| &release.version);
        let release = older.or(self.releases.first()).expect("the table of releases is not empty");
        tracing::warn!("the compiler flags of FlashInfer {version} are not listed; those of {} are used", release.version);
        Ok(self.recipe(&release.recipe))
    }

    /// Whether the flags of the FlashInfer in `package` are those of a listed release.
    pub fn recipe_is_listed(&self, package: &Path, version: &str) -> Result<bool> {
        Ok(self.release_by_digests(&recipe_digests(package)?, version).is_some())
    }

    /// The listed releases, for people.
    pub fn known_releases(&self) -> String {
        let [first, .., last] = &self.releases[..] else { panic!("the table of releases is not empty") };
        format!("{} to {}, as `fi-arch tables ls` lists them", first.version, last.version)
    }

    fn recipe(&self, id: &str) -> &Recipe {
        self.recipes.iter().find(|recipe| recipe.id == id).expect("the tables' own test resolves every id")
    }

    /// What is inconsistent in the tables; empty when nothing is.
    pub fn lint(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut check = |right: bool, what: String| {
            if !right {
                faults.push(what);
            }
        };
        let defects: BTreeSet<_> = self.defects.iter().map(|defect| defect.id.as_str()).collect();
        for module in &self.modules {
            for id in &module.defects {
                check(defects.contains(id.as_str()), format!("module {}: no defect {id}", module.name));
            }
            for path in module.sources.iter().chain([&module.generator.file]) {
                check(module.files.contains(path), format!("module {}: {path} is not among its files", module.name));
            }
            for release in &self.releases {
                for path in &module.files {
                    let listed = release.files.contains_key(path);
                    check(listed, format!("release {}: no digest of {path}", release.version));
                }
            }
        }
        let in_order = self.releases.is_sorted_by(|one, next| one.version < next.version);
        check(in_order, "releases are not in order, or one stands there twice".to_owned());
        for release in &self.releases {
            let recipe = self.recipes.iter().any(|recipe| recipe.id == release.recipe);
            check(recipe, format!("release {}: no recipe {}", release.version, release.recipe));
            for path in RECIPE_FILES {
                check(release.files.contains_key(path), format!("release {}: no digest of {path}", release.version));
            }
        }
        for defect in &self.defects {
            for place in &defect.places {
                let Place::File(place) = place else { continue };
                for form in &place.forms {
                    let at = format!("defect {}, {}, form `{}`", defect.id, place.file, form.name);
                    let empty = form.expect.is_empty() && form.edits.is_empty();
                    check(!empty, format!("{at}: nothing tells it"));
                    for anchor in &form.expect {
                        let plain = [&anchor.replace, &anchor.before, &anchor.after].iter().all(|text| text.is_none());
                        check(plain, format!("{at}: `{}` is expected, not edited", anchor.find));
                    }
                    for anchor in &form.edits {
                        let around = anchor.before.is_some() || anchor.after.is_some();
                        let one = anchor.replace.is_some() != around;
                        check(one, format!("{at}: `{}` needs `replace`, or `before` and `after`", anchor.find));
                        check(anchor.count > 0, format!("{at}: `{}` is edited nowhere", anchor.find));
                    }
                }
            }
        }
        faults
    }
}

fn recipe_digests(package: &Path) -> Result<BTreeMap<String, Digest>> {
    RECIPE_FILES
        .iter()
        .map(|path| {
            let file = package.join(path.strip_prefix("flashinfer/").expect("paths of the tables start so"));
            Ok(((*path).to_owned(), Digest::of_file(&file)?))
        })
        .collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModuleRows {
    module: Vec<Module>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DefectRows {
    defect: Vec<Defect>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RecipeRows {
    recipe: Vec<Recipe>,
}

fn parse<T: DeserializeOwned>(name: &str, text: &str) -> T {
    toml_edit::de::from_str(text).unwrap_or_else(|error| panic!("arch-tables/flashinfer/{name}.toml: {error}"))
}

fn from_str<'de, D: Deserializer<'de>, T: FromStr<Err: std::fmt::Display>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

fn cuda_version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<CudaVersion>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let version = CudaVersion::parse(&text);
    version.map(Some).ok_or_else(|| serde::de::Error::custom(format!("`{text}` is no MAJOR.MINOR")))
}

fn yes() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_consistent() {
        assert_eq!(Tables::load().lint(), Vec::<String>::new());
    }

    #[test]
    fn an_unknown_key_in_a_table_is_an_error() {
        let text = "[[recipe]]\nid = \"x\"\ncuda_flags = []\nincludes = []\nldflags = []\ncflags = []\n";
        assert!(toml_edit::de::from_str::<RecipeRows>(text).is_err());
        let text = "[[recipe]]\nid = \"x\"\ncuda_flags = [{ flag = \"-x\", max_nvcc = \"1.0\" }]\nincludes = []\nldflags = []\n";
        assert!(toml_edit::de::from_str::<RecipeRows>(text).is_err());
    }

    #[test]
    fn an_unknown_module_is_a_usage_error_that_names_the_known_ones() {
        let error = Tables::load().module("trtllm_com").unwrap_err();
        assert_eq!(error.exit() as u8, 2);
        assert_eq!(error.hints(), ["known: trtllm_comm, vllm_comm"]);
    }

    #[test]
    fn flags_follow_the_version_of_nvcc_and_the_gate() {
        let tables = Tables::load();
        let recipe = tables.recipe("vendored-cccl-smallest");
        let gated = tables.module("trtllm_comm").unwrap();
        let free = tables.module("vllm_comm").unwrap();
        let at = |flags: &[&str], flag: &str| flags.iter().position(|f| *f == flag);

        let new = recipe.cuda_flags(CudaVersion::new(13, 0), gated);
        assert!(at(&new, "{gencode}") > at(&new, "-O3"));
        assert!(at(&new, "--compress-mode=size").is_some());
        let old = recipe.cuda_flags(CudaVersion::new(12, 6), gated);
        assert_eq!(at(&old, "--compress-mode=size"), None);
        assert_eq!(at(&old, "-static-global-template-stub=false"), None);
        let free = recipe.cuda_flags(CudaVersion::new(13, 0), free);
        assert!(at(&free, "{gencode}") < at(&free, "-std=c++17"));
        assert_eq!(free.iter().filter(|flag| **flag == "{gencode}").count(), 1);

        let link = recipe.ldflags();
        assert_eq!(link.iter().filter(|l| !l.needed).map(|l| l.flag).collect::<Vec<_>>(), ["-lcuda"]);
    }
}
