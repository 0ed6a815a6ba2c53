//! A whole folder: what in it has code for a target, and what of that is hollow.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use walkdir::WalkDir;

use super::usable::{Usable, usable};
use super::{Image, Kind, Outline, Skim, Unread, skim};
use crate::error::{Error, Result};

/// Kernels are read in files whose code for the asked targets takes no more than this, packed: one or two seconds for one core.
/// No library of a PyTorch environment has so much; prebuilt collections of kernels may.
pub const READ_MAX: u64 = 256 << 20;
/// Images without kernels are small; only where all are, it is worth to look whether a file has GPU code in name only.
const EMPTY_MAX: u64 = 64 << 10;

/// What to look for.
#[derive(Debug, Clone)]
pub struct Options {
    /// The GPUs to run on: 120 for SM 12.0.
    pub sms: Vec<u32>,
    /// Read the kernels of every file, however large.
    pub read_all: bool,
}

/// What a folder holds.
#[derive(Debug)]
pub struct Scan {
    /// Every file that may hold GPU code, by path; each once, however many names it has.
    pub files: Vec<Scanned>,
    /// Folders that could not be listed.
    pub unlisted: Vec<Error>,
}

/// One file.
#[derive(Debug)]
pub struct Scanned {
    pub path: PathBuf,
    pub bytes: u64,
    pub found: Result<Found, Unread>,
}

/// What one file has for the asked targets.
#[derive(Debug, Default)]
pub struct Found {
    /// How many images there are of each target, with or without kernels in them.
    pub targets: BTreeMap<String, usize>,
    /// For each asked SM, in order, how it can run this file's code.
    pub usable: Vec<(u32, Option<Usable>)>,
    pub kernels: Kernels,
}

/// The kernels that the asked GPUs would run directly.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Kernels {
    /// There is no machine code for them.
    #[default]
    None,
    /// Not looked at: more packed bytes than [`READ_MAX`].
    NotRead { packed_bytes: u64 },
    Read {
        count: usize,
        /// The names of those that cannot write memory outside their thread block, and are not so for other targets of this
        /// file, or there is none to compare with. This is what a wrong guard around a kernel's body leaves.
        hollow: Vec<String>,
        /// How many are hollow for another target too: by design (probes of the hardware, waits, kernels for other GPUs).
        /// Math libraries have hundreds.
        hollow_everywhere: usize,
    },
}

impl Found {
    pub fn has_gpu_code(&self) -> bool {
        !self.targets.is_empty()
    }

    /// The asked SMs that can run nothing of this file, though it has GPU code.
    pub fn missing(&self) -> impl Iterator<Item = u32> {
        let has_code = self.has_gpu_code();
        self.usable.iter().filter(move |(_, how)| has_code && how.is_none()).map(|(sm, _)| *sm)
    }

    pub fn hollow(&self) -> &[String] {
        match &self.kernels {
            Kernels::Read { hollow, .. } => hollow,
            _ => &[],
        }
    }
}

/// Looks at every shared object, cubin and fat binary below `dir`.
pub fn scan(dir: &Path, options: &Options) -> Scan {
    let mut unlisted = Vec::new();
    // By device and inode: hard links and symbolic links are other names of a file that is looked at once.
    let mut seen: HashMap<(u64, u64), (PathBuf, u64, bool)> = HashMap::new();
    for entry in WalkDir::new(dir).follow_links(true).sort_by_file_name() {
        let entry = match entry {
            Ok(entry) => entry,
            // A link that leads back into its own folder hides nothing; nor does one that leads nowhere.
            Err(error) if error.loop_ancestor().is_some() || is_dangling(&error) => continue,
            Err(error) => {
                let path = error.path().unwrap_or(dir).to_owned();
                unlisted.push(Error::io("look into", &path, error.into()));
                continue;
            }
        };
        if !entry.file_type().is_file() || !may_hold_code(entry.path()) {
            continue;
        }
        let Ok(about) = entry.metadata() else { continue };
        let linked = entry.path_is_symlink();
        let name = || (entry.path().to_owned(), about.len(), linked);
        let known = seen.entry((about.dev(), about.ino())).or_insert_with(name);
        if known.2 && !linked {
            *known = name();
        }
    }
    let mut files: Vec<_> = seen.into_values().collect();
    // The largest first, so that none is left over for one core alone at the end.
    files.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let mut files: Vec<Scanned> = files
        .into_par_iter()
        .with_max_len(1)
        .map(|(path, bytes, _)| Scanned { found: file(&path, options), path, bytes })
        .collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Scan { files, unlisted }
}

/// What one file has for the asked targets.
pub fn file(path: &Path, options: &Options) -> Result<Found, Unread> {
    let Some(Skim { images, .. }) = skim(path)? else { return Ok(Found::default()) };
    let mut targets = BTreeMap::new();
    for image in &images {
        *targets.entry(image.target()).or_default() += 1;
    }
    let how = |image: &Outline, sm: u32| usable(image.kind, image.sm, &image.suffix, sm);
    let best = |sm: u32| images.iter().filter_map(|image| how(image, sm)).max();
    let mut found = Found { targets, usable: options.sms.iter().map(|&sm| (sm, best(sm))).collect(), kernels: Kernels::None };

    let runs = |image: &Outline| options.sms.iter().any(|&sm| how(image, sm) == Some(Usable::Directly));
    let (wanted, others): (Vec<&Outline>, Vec<&Outline>) = images.iter().partition(|image| runs(image));
    let packed = |images: &[&Outline]| images.iter().map(|image| image.stored_bytes).sum::<u64>();
    let mut is_empty = false;
    if !wanted.is_empty() {
        let packed_bytes = packed(&wanted);
        if packed_bytes > READ_MAX && !options.read_all {
            found.kernels = Kernels::NotRead { packed_bytes };
            return Ok(found);
        }
        let images = read(path, &wanted)?;
        let count = images.iter().map(|image| image.kernels.len()).sum();
        let mut hollow: Vec<String> = images.iter().flat_map(Image::hollow).map(|kernel| kernel.name.clone()).collect();
        hollow.sort_unstable();
        hollow.dedup();
        is_empty = count == 0;
        let all = hollow.len();
        retain_hollow_here(path, &mut hollow, &others, options)?;
        found.kernels = Kernels::Read { count, hollow_everywhere: all - hollow.len(), hollow };
    }
    if is_empty || found.missing().next().is_some() {
        // Every object that nvcc compiles has images, those without a kernel too.
        if others.is_empty() || (packed(&others) <= EMPTY_MAX && !read(path, &others)?.iter().any(has_kernels)) {
            if is_empty || wanted.is_empty() {
                return Ok(Found::default());
            }
        } else if is_empty {
            // Only what is compiled by the driver may still hold the kernels.
            let left = |sm: u32| others.iter().filter_map(|image| how(image, sm)).max();
            found.usable = options.sms.iter().map(|&sm| (sm, left(sm))).collect();
        }
    }
    Ok(found)
}

/// Keeps of `hollow` the kernels that are hollow for neither the oldest nor the newest of the other targets.
///
/// A kernel made for newer GPUs alone is hollow on the oldest too, one made for older ones alone on the newest too, and neither is
/// launched where it is hollow. Hollow here and between two targets where it is not: that is what a wrong guard leaves.
fn retain_hollow_here(path: &Path, hollow: &mut Vec<String>, others: &[&Outline], options: &Options) -> Result<(), Unread> {
    let mut targets: BTreeMap<(u32, &str), Vec<&Outline>> = BTreeMap::new();
    for image in others.iter().filter(|image| image.kind == Kind::Sass && image.sm >= super::sass::FIRST_SM) {
        targets.entry((image.sm, &image.suffix)).or_default().push(image);
    }
    let packed = |images: &[&Outline]| images.iter().map(|image| image.stored_bytes).sum::<u64>();
    // A target for which only a few kernels were compiled says nothing of the others; one that is too large is not read.
    let largest = targets.values().map(|images| packed(images)).max().unwrap_or(0);
    let fits = |bytes: u64| bytes >= largest / 4 && (options.read_all || bytes <= READ_MAX);
    let targets: Vec<_> = targets.values().filter(|images| fits(packed(images))).collect();
    let ends = targets.first().into_iter().chain(targets.last().filter(|_| targets.len() > 1));
    for images in ends {
        if hollow.is_empty() {
            break;
        }
        let images = read(path, images)?;
        let there: HashSet<&str> = images.iter().flat_map(Image::hollow).map(|kernel| kernel.name.as_str()).collect();
        hollow.retain(|name| !there.contains(name.as_str()));
    }
    Ok(())
}

fn has_kernels(image: &Image) -> bool {
    // What is neither machine code nor PTX is not understood, so it counts.
    !image.kernels.is_empty() || !image.ptx_entries.is_empty() || !matches!(image.kind, Kind::Sass | Kind::Ptx)
}

fn read(path: &Path, outlines: &[&Outline]) -> Result<Vec<Image>, Unread> {
    let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
    let read = |outline: &&Outline| {
        outline.read(&file).map_err(|e| e.within(format!("the {} at offset {:#x} is damaged", outline.target(), outline.offset)))
    };
    let images: Result<Vec<Image>> = outlines.par_iter().map(read).collect();
    images.map_err(|e| Unread::code(e.within(format!("cannot understand {}", path.display()))))
}

/// `libx.so`, `libx.so.12`, `x.cubin`, `x.fatbin`.
fn may_hold_code(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let is_version = |text: &str| text.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
    name.ends_with(".so")
        || name.ends_with(".cubin")
        || name.ends_with(".fatbin")
        || name.rsplit_once(".so.").is_some_and(|(_, version)| is_version(version))
}

fn is_dangling(error: &walkdir::Error) -> bool {
    let is_link = error.path().is_some_and(Path::is_symlink);
    is_link && error.io_error().is_some_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

/// A folder that is none is a mistake on the command line.
pub fn check_folder(dir: &Path) -> Result<()> {
    match dir.metadata() {
        Ok(about) if about.is_dir() => Ok(()),
        Ok(_) => Err(Error::usage(format!("{} is a file", dir.display())).hint("use `fi-arch inspect` for single files")),
        Err(error) => Err(Error::usage(format!("there is no folder {}", dir.display())).because(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_told_by_name_with_and_without_a_version() {
        for name in ["libx.so", "libx.so.12", "libx.so.12.8.93", "_C.cpython-312-x86_64-linux-gnu.so", "k.cubin", "k.fatbin"] {
            assert!(may_hold_code(Path::new(name)), "{name}");
        }
        for name in ["x.so.py", "x.sol", "so", "libx.so.", "libx.a", "x.so.12.bak"] {
            assert!(!may_hold_code(Path::new(name)), "{name}");
        }
    }
}
