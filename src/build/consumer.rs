//! Who will load the artifact. That decides which CUDA runtime is right: two files of one process that both need a libcudart
//! must need the same one.

use std::path::PathBuf;
use std::str::FromStr;

use pep440_rs::Version;

use super::toolchain;
use crate::error::{Error, Result};
use crate::memo::Memo;
use crate::survey::{self, Environment};
use crate::tables;
use crate::target::CudaVersion;

/// The process that will load an artifact, as far as a build has to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Consumer {
    /// What people call it: `torch 2.9.1+cu128`, `CUDA 12.8`.
    pub name: String,
    /// The CUDA it was built with.
    pub cuda: CudaVersion,
    /// Its libcudart, where that file is at hand.
    pub cudart: Option<PathBuf>,
    /// Which `std::string` its libraries use; none where it does not say.
    pub cxx11_abi: Option<bool>,
}

impl Consumer {
    /// The consumer that `--for` names: `torch==2.9.1+cu128`, `torch==2.9.1`, `cu128`, `cuda==12.8`.
    pub fn parse(text: &str) -> Result<Self> {
        let nonsense = || {
            Error::usage(format!("`{text}` names nobody who could load an artifact"))
                .hint("for example: --for torch==2.9.1+cu128, --for cu128, --for cuda==12.8")
        };
        let word = text.trim().to_ascii_lowercase();
        let rest = |prefix: &str| word.strip_prefix(prefix).map(|rest| rest.trim_start_matches(['=', '-', ' ']));
        if let Some(version) = rest("torch") {
            let release = Version::from_str(version).map_err(|_| nonsense())?;
            return Self::new(format!("torch {version}"), cuda_of_torch(version, &release)?);
        }
        let cuda = if let Some(version) = rest("cuda") {
            CudaVersion::parse(version).or_else(|| Some(CudaVersion::new(version.parse().ok()?, 0)))
        } else {
            word.strip_prefix("cu").and_then(cuda_of_digits)
        };
        let cuda = cuda.ok_or_else(nonsense)?;
        Self::new(format!("CUDA {cuda}"), cuda)
    }

    /// The torch of an environment; none where there is no torch, or one without CUDA.
    ///
    /// Several runtimes may lie in one environment (a compiler's from wheels beside torch's own): torch loads the one of the
    /// CUDA that it states.
    pub fn of(env: &Environment, memo: &Memo) -> Result<Option<Self>> {
        let Some(torch) = survey::torch(env)? else { return Ok(None) };
        let stated = torch.cuda.or_else(|| cuda_of_digits(torch.version.split_once('+')?.1.strip_prefix("cu")?));
        let Some(cuda) = stated else { return Ok(None) };
        let soname = |file: &PathBuf| memo.fact(file, "SONAME", || toolchain::soname(file)).ok();
        let own = |file: &PathBuf| soname(file).and_then(|name| major_of(&name)) == Some(cuda.major);
        let cudart = survey::cudarts(env).into_iter().find(own);
        Ok(Some(Self { cudart, cxx11_abi: torch.cxx11_abi, ..Self::new(format!("torch {}", torch.version), cuda)? }))
    }

    fn new(name: String, cuda: CudaVersion) -> Result<Self> {
        if !tables::knows_cuda(cuda.major) {
            return Err(Error::unsupported(format!("nothing is known of CUDA {}", cuda.major))
                .because(format!("{name} loads its runtime"))
                .hint("CUDA 12 and 13 are known"));
        }
        Ok(Self { name, cuda, cudart: None, cxx11_abi: None })
    }

    /// The runtime that is loaded in its process: `libcudart.so.12`.
    pub fn soname(&self) -> String {
        format!("libcudart.so.{}", self.cuda.major)
    }
}

/// The major version in `libcudart.so.12`.
fn major_of(soname: &str) -> Option<u32> {
    soname.strip_prefix("libcudart.so.")?.split('.').next()?.parse().ok()
}

/// `12.8` of the digits in `cu128`; of two digits, both are the major version.
fn cuda_of_digits(digits: &str) -> Option<CudaVersion> {
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let (major, minor) = digits.split_at_checked(2)?;
    Some(CudaVersion::new(major.parse().ok()?, if minor.is_empty() { 0 } else { minor.parse().ok()? }))
}

fn cuda_of_torch(text: &str, version: &Version) -> Result<CudaVersion> {
    let hint =
        |error: Error| error.hint("say which CUDA it has: --for torch==2.9.1+cu128, or --env DIR of an environment with it");
    if let Some((_, local)) = text.split_once('+') {
        if let Some(cuda) = local.strip_prefix("cu").and_then(cuda_of_digits) {
            return Ok(cuda);
        }
        let why = match ["cpu", "rocm", "xpu"].iter().any(|word| local.starts_with(word)) {
            true => format!("`+{local}` is a torch without CUDA, and what fi-arch builds runs on CUDA alone"),
            false => format!("`+{local}` does not tell"),
        };
        return Err(hint(Error::unsupported(format!("the CUDA of torch {text} is not known")).because(why)));
    }
    let [major, minor] = [0, 1].map(|index| version.release().get(index).copied().unwrap_or(0));
    // A nightly of a release may have another CUDA than the release.
    let released = !version.any_prerelease();
    released.then(|| tables::cuda_of_torch(major, minor)).flatten().ok_or_else(|| {
        let machine = std::env::consts::ARCH;
        hint(
            Error::unsupported(format!("the CUDA of torch {text} is not known"))
                .because(format!("the tables do not list that release for {machine}")),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_consumer_is_understood() {
        for (text, name, cuda) in [
            ("torch==2.9.1+cu128", "torch 2.9.1+cu128", (12, 8)),
            ("torch 2.10.0+cu130", "torch 2.10.0+cu130", (13, 0)),
            ("cu128", "CUDA 12.8", (12, 8)),
            ("CU13", "CUDA 13.0", (13, 0)),
            ("cuda==12.8", "CUDA 12.8", (12, 8)),
            ("cuda 13", "CUDA 13.0", (13, 0)),
        ] {
            let consumer = Consumer::parse(text).unwrap();
            assert_eq!((consumer.name.as_str(), consumer.cuda), (name, CudaVersion::new(cuda.0, cuda.1)), "{text}");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_cuda_of_a_plain_torch_release_comes_from_the_tables() {
        assert_eq!(Consumer::parse("torch==2.9.1").unwrap().soname(), "libcudart.so.12");
        assert_eq!(Consumer::parse("torch==2.11.0").unwrap().soname(), "libcudart.so.13");
    }

    #[test]
    fn a_consumer_whose_cuda_nobody_knows_is_refused_and_never_guessed() {
        for text in ["torch==9.9", "torch==2.11.0.dev20260101", "torch==2.9.0a0+145a3a7.nv25.10", "torch==2.9.1+cpu", "cu118"] {
            assert_eq!(Consumer::parse(text).unwrap_err().exit() as u8, 4, "{text}");
        }
        assert!(Consumer::parse("torch==9.9").unwrap_err().to_string().contains("+cu128"));
        for text in ["torch", "torch==x", "cuda==", "cux", "vllm==0.9", ""] {
            assert_eq!(Consumer::parse(text).unwrap_err().exit() as u8, 2, "{text}");
        }
    }
}
