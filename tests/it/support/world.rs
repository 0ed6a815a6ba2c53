//! A machine with one environment, in which faults are planted.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use fi_arch::tables::{RECIPE_FILES, Tables};
use serde_json::Value;

use super::sandbox::{Ran, Sandbox};
use super::{toolkit, wheels};

/// A machine with one environment. As made, nothing is wrong in it: FlashInfer 0.7.4, whose gate is open.
pub struct World {
    pub sandbox: Sandbox,
    /// The verb that is run: `doctor`, `verify`.
    pub verb: &'static str,
    vars: Vec<(String, String)>,
}

pub fn write(path: impl AsRef<Path>, text: &str) {
    let path = path.as_ref();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

pub fn program(path: &Path, body: &str) {
    write(path, &format!("#!/bin/sh\n{body}\n"));
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

impl World {
    pub fn sound() -> Self {
        Self::with("0.7.4")
    }

    /// The real files of FlashInfer `version` that fi-arch reads, and packages that fit it.
    pub fn with(version: &str) -> Self {
        let world = Self::bare();
        copy_flashinfer(version, &world.site().join("flashinfer"), "data");
        world.record("flashinfer_python", version);
        world.package("tvm_ffi", "apache_tvm_ffi", "0.1.15.post2");
        world.torch("2.11.0+cu130", "'13.0'");
        world
    }

    /// No package, a toolkit, and no GPU.
    pub fn bare() -> Self {
        let mut world = Self { sandbox: Sandbox::new(), verb: "doctor", vars: Vec::new() };
        program(&world.sandbox.path("bin/nvidia-smi"), "exit 9");
        let path = format!("{}:/usr/bin:/bin", world.sandbox.path("bin").display());
        world.set("PATH", &path);
        world.set("HOME", &world.sandbox.path("user").display().to_string());
        world.set("CUDA_HOME", &toolkit::cuda_13_0().display().to_string());
        world
    }

    pub fn site(&self) -> PathBuf {
        self.sandbox.path("venv/lib/python3.11/site-packages")
    }

    pub fn set(&mut self, name: &str, value: &str) -> &mut Self {
        self.vars.retain(|(known, _)| known != name);
        self.vars.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn unset(&mut self, name: &str) -> &mut Self {
        self.vars.retain(|(known, _)| known != name);
        self
    }

    pub fn record(&self, name: &str, version: &str) {
        let text = format!("Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\n");
        write(self.site().join(format!("{name}-{version}.dist-info/METADATA")), &text);
    }

    pub fn package(&self, module: &str, name: &str, version: &str) {
        write(self.site().join(module).join("__init__.py"), "raise SystemExit('doctor must not import')\n");
        self.record(name, version);
    }

    pub fn torch(&self, version: &str, cuda: &str) {
        let _ = fs::remove_dir_all(self.site().join("torch"));
        write(self.site().join("torch/__init__.py"), "raise SystemExit('doctor must not import')\n");
        write(self.site().join("torch/version.py"), &format!("__version__ = '{version}'\ncuda = {cuda}\n"));
    }

    pub fn remove(&self, name: &str) {
        for entry in fs::read_dir(self.site()).unwrap().flatten() {
            let file = entry.file_name().to_string_lossy().into_owned();
            if file == name || file.starts_with(&format!("{name}-")) {
                fs::remove_dir_all(entry.path()).unwrap();
            }
        }
    }

    pub fn gpu(&self, line: &str) {
        program(&self.sandbox.path("bin/nvidia-smi"), &format!("echo '{line}'"));
    }

    /// A toolkit of which only nvcc's version is there.
    pub fn fake_nvcc(&mut self, release: &str) -> PathBuf {
        let root = self.sandbox.path(&format!("cuda-{release}"));
        program(&root.join("bin/nvcc"), &format!("echo 'Cuda compilation tools, release {release}, V{release}.1'"));
        self.set("CUDA_HOME", &root.display().to_string());
        root
    }

    /// Where FlashInfer keeps what it compiled for `archs`.
    pub fn cached(&self, version: &str, archs: &str) -> PathBuf {
        self.sandbox.path(&format!("user/.cache/flashinfer/{version}/{archs}/cached_ops/trtllm_comm/trtllm_comm.so"))
    }

    /// Runs the world's verb with `--json`.
    pub fn run(&self, args: &[&str]) -> Ran {
        let mut all = vec![self.verb, "--json"];
        all.extend(args);
        self.fi_arch(&all)
    }

    /// Runs `fi-arch` with `args` alone.
    pub fn fi_arch(&self, args: &[&str]) -> Ran {
        let mut command: Command = self.sandbox.command(args);
        for (name, _) in std::env::vars() {
            let of_users =
                ["FLASHINFER_", "TORCH_", "PYTORCH_", "SGLANG_", "VLLM_", "PYTHON", "CUDA_VISIBLE", "NVCC_CCBIN", "LD_LIB"];
            if of_users.iter().any(|prefix| name.starts_with(prefix)) || (name.starts_with("FI_ARCH_") && name != "FI_ARCH_HOME")
            {
                command.env_remove(name);
            }
        }
        Ran::of(command.envs(self.vars.iter().map(|(name, value)| (name, value))))
    }

    pub fn report(&self) -> Value {
        self.run(&["--sm", "120"]).json()
    }

    /// The problem of that code, which must be there.
    #[track_caller]
    pub fn fails_with(&self, code: &str) -> Value {
        let ran = self.run(&["--sm", "120"]).exits(1);
        let report = ran.json();
        assert_eq!(report["verdict"], "fail");
        find(&report["problems"], code).unwrap_or_else(|| panic!("no {code} in {:#}", report["problems"]))
    }

    /// The note of that code, which must be there; it is no problem.
    #[track_caller]
    pub fn notes(&self, code: &str) -> Value {
        let report = self.report();
        assert_eq!(find(&report["problems"], code), None);
        find(&report["notes"], code).unwrap_or_else(|| panic!("no {code} in {:#}", report["notes"]))
    }
}

pub fn find(findings: &Value, code: &str) -> Option<Value> {
    let found = findings.as_array().unwrap().iter().find(|finding| finding["code"] == code).cloned();
    if let Some(finding) = &found {
        for key in ["code", "message", "hint", "path", "line"] {
            assert!(finding.get(key).is_some(), "{key} is missing in {finding}");
        }
    }
    found
}

pub fn codes(findings: &Value) -> Vec<String> {
    findings.as_array().unwrap().iter().map(|finding| finding["code"].as_str().unwrap().to_owned()).collect()
}

/// Copies what fi-arch reads of a real FlashInfer. `data` is where its data folder lies, relative to `package`.
pub fn copy_flashinfer(version: &str, package: &Path, data: &str) {
    let from = wheels::unpacked("flashinfer-python", version);
    let tables = Tables::load();
    let listed = tables.modules.iter().flat_map(|module| &module.files).map(String::as_str);
    let others = ["flashinfer/__init__.py", "flashinfer/jit/env.py", "flashinfer/_build_meta.py", "flashinfer/comm/trtllm_ar.py"];
    for path in listed.chain(RECIPE_FILES).chain(others) {
        let inside = path.strip_prefix("flashinfer/").unwrap();
        let to = match inside.strip_prefix("data/") {
            Some(rest) => package.join(data).join(rest),
            None => package.join(inside),
        };
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from.join(path), &to).unwrap();
    }
}
