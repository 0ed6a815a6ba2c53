//! Whether a bundle is right for an environment: made from the very sources that lie there, for the libraries that lie there.

use std::path::Path;

use crate::build::consumer::Consumer;
use crate::build::view;
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::memo::Memo;
use crate::overlay::Overlay;
use crate::pipeline;
use crate::store::Bundle;
use crate::survey::{self, Environment};
use crate::tables::Module;

/// What a bundle has to fit.
pub struct Fit<'a> {
    pub module: &'a Module,
    pub overlay: &'a Overlay,
    /// FlashInfer's folder, as it was before us.
    pub package: &'a Path,
    pub environment: &'a Environment,
    /// What `--for` says.
    pub consumer: Option<&'a str>,
    pub memo: &'a Memo,
}

const SHOWN: usize = 3;

impl Fit<'_> {
    pub fn check(&self, bundle: &Bundle) -> Result<()> {
        let manifest = &bundle.manifest;
        if manifest.module != self.module.name {
            return Err(Error::usage(format!("it holds {}, and {} was asked for", manifest.module, self.module.name))
                .hint(format!("--module {}", manifest.module)));
        }
        self.check_sources(bundle)?;
        self.check_runtime(bundle)?;
        self.check_tvm_ffi(bundle)
    }

    /// The overlay's files, and all that the compilers read of FlashInfer, must be what lies here.
    fn check_sources(&self, bundle: &Bundle) -> Result<()> {
        let ours = self.overlay.files.iter().filter(|file| file.data_path().is_some());
        let ours: Vec<_> = ours.map(|file| (file.path.as_str(), file.pre, Digest::of(&file.post))).collect();
        let theirs = bundle.overlay.iter().filter(|file| file.path.starts_with("flashinfer/data/"));
        let theirs: Vec<_> = theirs.map(|file| (file.path.as_str(), file.pre, Digest::of(&file.post))).collect();
        let mut differ: Vec<&str> = Vec::new();
        differ.extend(ours.iter().filter(|file| !theirs.contains(file)).map(|(path, ..)| *path));
        differ.extend(theirs.iter().filter(|file| !ours.iter().any(|(path, ..)| *path == file.0)).map(|(path, ..)| *path));
        let data = self.package.join("data");
        let of_flashinfer = bundle.inputs.files.iter().filter(|input| input.file.root == view::DATA);
        for input in of_flashinfer {
            let same = self.memo.digest(&data.join(&input.file.path)).is_ok_and(|digest| digest == input.sha256);
            if !same {
                differ.push(&input.file.path);
            }
        }
        if differ.is_empty() {
            return Ok(());
        }
        differ.sort_unstable();
        differ.dedup();
        let more = differ.len().saturating_sub(SHOWN);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        Err(Error::refused(format!(
            "it was made for other sources than those of the FlashInfer {} here (the bundle is for {})",
            self.overlay.release, bundle.flashinfer
        ))
        .because(format!("these differ: {}{more}", differ[..differ.len().min(SHOWN)].join(", ")))
        .hint(
            "make a bundle for this FlashInfer, with this release of fi-arch: `fi-arch build --flashinfer VERSION --export FILE`",
        ))
    }

    /// Two files of one process that both need a libcudart must need the same one.
    fn check_runtime(&self, bundle: &Bundle) -> Result<()> {
        let Some(needed) = bundle.manifest.verdict.needed.iter().find(|name| name.starts_with("libcudart")) else {
            return Ok(());
        };
        let consumer = match self.consumer {
            Some(text) => Some(Consumer::parse(text)?),
            None => Consumer::of(self.environment, self.memo)?,
        };
        let Some(consumer) = consumer else { return Ok(()) };
        if consumer.soname() == *needed {
            return Ok(());
        }
        Err(Error::refused(format!("its artifact needs {needed}, and {} loads {}", consumer.name, consumer.soname()))
            .because("one process would hold two CUDA runtimes, each with a state of its own")
            .hint(format!("make one for it: `fi-arch build --for {} --export FILE`", self.for_word(&consumer))))
    }

    fn for_word(&self, consumer: &Consumer) -> String {
        consumer.name.replacen("torch ", "torch==", 1).replacen("CUDA ", "cuda==", 1)
    }

    fn check_tvm_ffi(&self, bundle: &Bundle) -> Result<()> {
        let Some(tvm_ffi) = survey::tvm_ffi(self.environment)? else {
            return Err(Error::machine("no apache-tvm-ffi is installed in this environment")
                .because("FlashInfer cannot load a module without it")
                .hint("install FlashInfer with what it depends on"));
        };
        match pipeline::outside_of_range(&self.overlay.release, &tvm_ffi.version) {
            Some(why) => Err(Error::unsupported("this FlashInfer and this apache-tvm-ffi do not fit each other")
                .because(why)
                .because(format!("the artifact was built with {}", bundle.manifest.tvm_ffi))),
            None => Ok(()),
        }
    }
}
