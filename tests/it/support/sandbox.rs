//! A place to run the binary in: its own store, no environment but an empty one, and nothing of the machine's CUDA set-up.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::TempDir;

/// The arguments that build the small module: one source, seconds.
pub const SMALL: &[&str] = &["--sm", "120", "--module", "vllm_comm", "--flashinfer", "0.6.4"];

/// The fetched wheels are shared between tests; everything else of a sandbox is its own and goes with it.
pub struct Sandbox {
    dir: TempDir,
}

impl Sandbox {
    pub fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let sandbox = Self { dir };
        let wheels = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fetched");
        fs::create_dir_all(&wheels).unwrap();
        fs::create_dir_all(sandbox.home()).unwrap();
        std::os::unix::fs::symlink(&wheels, sandbox.home().join("wheels")).unwrap();
        sandbox.make_empty_environment();
        sandbox
    }

    /// A sandbox that has to fetch its wheels anew.
    pub fn bare() -> Self {
        let sandbox = Self { dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() };
        sandbox.make_empty_environment();
        sandbox
    }

    /// A sandbox whose store holds the small module, built once for all tests: by its key, so that any change that matters
    /// builds it anew.
    pub fn with_small_build() -> Self {
        static HOME: OnceLock<PathBuf> = OnceLock::new();
        let sandbox = Self::new();
        let home = HOME.get_or_init(|| {
            let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("small-build");
            fs::create_dir_all(&home).unwrap();
            // It may be there already.
            let _ = std::os::unix::fs::symlink("../fetched", home.join("wheels"));
            let build = || {
                let mut command = sandbox.command(&[&["build"], SMALL].concat());
                Ran::of(command.env("FI_ARCH_HOME", &home)).exits(0);
            };
            build();
            // Tests count artifacts: one of an earlier state of this program must not stand beside that of the present one.
            if fs::read_dir(home.join("store/v1/artifacts")).unwrap().count() > 1 {
                fs::remove_dir_all(home.join("store")).unwrap();
                build();
            }
            home
        });
        copy_dir(&home.join("store"), &sandbox.home().join("store"));
        sandbox
    }

    /// A sandbox whose store holds `trtllm_comm` of the default release for SM 12.0, and what `build` said of it. It takes minutes,
    /// once for all tests and test runs: by its key, as the small one.
    pub fn with_trtllm_build() -> (Self, Value) {
        static BUILT: OnceLock<(PathBuf, Value)> = OnceLock::new();
        let sandbox = Self::new();
        let (home, built) = BUILT.get_or_init(|| {
            let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("trtllm-build");
            fs::create_dir_all(&home).unwrap();
            let _ = std::os::unix::fs::symlink("../fetched", home.join("wheels"));
            let mut command = sandbox.command(&["build", "--sm", "120", "--json"]);
            let built = Ran::of(command.env("FI_ARCH_HOME", &home)).exits(0).json();
            (home, built)
        });
        copy_dir(&home.join("store"), &sandbox.home().join("store"));
        (sandbox, built.clone())
    }

    /// A copy of the FlashInfer that the small module is built from, which a test may change.
    pub fn own_flashinfer(&self) -> PathBuf {
        let to = self.path("own");
        let wheels = fs::read_dir(self.home().join("wheels")).unwrap().flatten().map(|item| item.path());
        let is_it =
            |path: &PathBuf| path.is_dir() && path.file_name().unwrap().to_string_lossy().starts_with("flashinfer-python-0.6.4-");
        copy_dir(&wheels.into_iter().find(is_it).expect("the small build has fetched it"), &to);
        to
    }

    /// A virtual environment with nothing in it, so that what is installed on the machine is not seen.
    fn make_empty_environment(&self) {
        fs::create_dir_all(self.path("venv/lib/python3.11/site-packages")).unwrap();
        fs::write(self.path("venv/pyvenv.cfg"), "include-system-site-packages = false\n").unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn home(&self) -> PathBuf {
        self.path("home")
    }

    /// The command `fi-arch` with `args`, to be changed and run.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fi-arch"));
        command.args(args).env("FI_ARCH_HOME", self.home()).env("VIRTUAL_ENV", self.path("venv")).current_dir(self.dir.path());
        for name in [
            "CUDA_HOME",
            "CUDA_PATH",
            "CONDA_PREFIX",
            "PYTHONPATH",
            "CXX",
            "CC",
            "NVCC_APPEND_FLAGS",
            "NVCC_PREPEND_FLAGS",
            "FI_ARCH_LOG",
            "FI_ARCH_FAULT",
        ] {
            command.env_remove(name);
        }
        command
    }

    /// Runs `fi-arch` with `args`.
    pub fn run(&self, args: &[&str]) -> Ran {
        Ran::of(&mut self.command(args))
    }

    /// Builds with `args` and returns the JSON; the build must succeed.
    pub fn build(&self, args: &[&str]) -> Value {
        let mut all = vec!["build", "--json"];
        all.extend(args);
        self.run(&all).exits(0).json()
    }

    /// The names in the store's staging folder.
    pub fn staged(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.home().join("store/v1/staging")) else { return Vec::new() };
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// The number of artifacts in the store.
    pub fn artifacts(&self) -> usize {
        fs::read_dir(self.home().join("store/v1/artifacts")).map_or(0, |entries| entries.flatten().count())
    }
}

/// How a run ended.
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn of(command: &mut Command) -> Self {
        let output = command.output().expect("fi-arch starts");
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("stdout is UTF-8"),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Checks the exit code, and shows everything when it differs.
    #[track_caller]
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Checks that stderr says `text`.
    #[track_caller]
    pub fn says(self, text: &str) -> Self {
        assert!(self.stderr.contains(text), "`{text}` is not in stderr:\n{}", self.stderr);
        self
    }

    /// stdout as the one JSON object that it must be.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e} in stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr))
    }
}

/// Copies a folder with everything in it.
pub fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    let status = Command::new("cp").arg("-a").arg(from).arg(to).status().expect("cp starts");
    assert!(status.success(), "cp -a {} {}", from.display(), to.display());
}
