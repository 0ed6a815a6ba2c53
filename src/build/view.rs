//! The folder that a build runs in. Everything that a compiler reads has a fixed relative name in it, so that neither the
//! product nor its dependency files know where anything lies: two machines with equal inputs, and as many units,
//! write equal bytes.
//!
//! ```text
//! <build folder>/
//!   data, tvm_ffi, cuda, …   links to what is installed (`cuda` is a folder where code is moved to another GPU)
//!   overlay/                 the overlay's files, written out
//!   ours/                    stand-ins for headers, and what sources are split into
//!   obj/ keep/ tmp/ logs/    what the compilers write
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use super::closure::Located;
use super::retarget::Retarget;
use super::units::is_made;
use crate::error::{Error, Result};
use crate::overlay::Overlay;

/// The link called `data`: `flashinfer/data` of the FlashInfer to build from.
pub const DATA: &str = "data";
/// The link to the `tvm_ffi` package.
pub const TVM_FFI: &str = "tvm_ffi";
/// The link to the toolkit's root.
pub const CUDA: &str = "cuda";
/// The link to the toolkit's headers, where they are not in the root's `include` (conda).
pub const CUDA_INCLUDE: &str = "cuda_include";
/// The link to the folder of the CUDA runtime, where it is not below the toolkit's root.
pub const CUDA_LIB: &str = "cuda_lib";
/// The folder of the overlay's files.
pub const OVERLAY: &str = "overlay";
/// The folder of files of our own that are no part of an overlay: stand-ins for headers, and what sources are split into.
pub const OURS: &str = "ours";
/// The root of everything outside: the host compiler's and the system's own headers, by absolute path.
pub const HOST: &str = "host";

/// What the names of a build folder stand for.
#[derive(Debug, Clone)]
pub struct View {
    links: Vec<(&'static str, PathBuf)>,
    retarget: Option<Retarget>,
}

impl View {
    /// `links`: the name of each link and the folder it leads to.
    pub fn new(links: Vec<(&'static str, PathBuf)>) -> Self {
        Self { links, retarget: None }
    }

    /// The same names, with a toolkit in which `retarget`'s programs stand.
    #[must_use]
    pub fn with_retarget(self, retarget: Option<&Retarget>) -> Self {
        Self { retarget: retarget.cloned(), ..self }
    }

    /// Makes the folders and links of a build in `dir`, and writes the overlay's files.
    pub fn lay_out(&self, dir: &Path, overlay: &Overlay) -> Result<()> {
        for name in ["obj", "keep", "tmp", "logs", OVERLAY] {
            let folder = dir.join(name);
            fs::create_dir_all(&folder).map_err(|e| Error::io("create", &folder, e))?;
        }
        for (name, to) in &self.links {
            let link = dir.join(name);
            if let Some(retarget) = self.retarget.as_ref().filter(|_| *name == CUDA) {
                retarget.lay_out(&link, to)?;
                continue;
            }
            super::link(to, &link)?;
        }
        overlay.write_to(&dir.join(OVERLAY))
    }

    /// What the names that start a path in commands stand for on this machine.
    pub fn folders(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        self.links.iter().map(|(name, to)| (*name, to.as_path()))
    }

    /// Splits a name that a compiler wrote down into its root and the rest.
    pub fn locate(&self, name: &str) -> Located {
        let name = name.strip_prefix("./").unwrap_or(name);
        if let Some((root, rest)) = name.split_once('/')
            && (is_made(root) || self.links.iter().any(|(link, _)| *link == root))
        {
            return Located { root: root.to_owned(), path: rest.to_owned() };
        }
        Located { root: HOST.to_owned(), path: name.to_owned() }
    }

    /// Where a located file lies on this machine; None for the overlay's and our own, which are on no disk outside a build.
    pub fn path_of(&self, file: &Located) -> Option<PathBuf> {
        if file.root == HOST {
            return Some(PathBuf::from(&file.path));
        }
        self.links.iter().find(|(link, _)| *link == file.root).map(|(_, to)| to.join(&file.path))
    }
}
