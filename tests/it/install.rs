//! `install` and `uninstall`: on a real FlashInfer with a real artifact, and every file of the environment looked at before and
//! after. What makes a step fail is the test's own hook in the program (`FI_ARCH_FAULT`), which counts every change of a file.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::support::environment::{Look, RELEASE, World, look};
use crate::support::sandbox::{Ran, Sandbox, copy_dir};
use crate::support::wheels;

const IN_PLACE: &[&str] = &["--in-place"];
const SHIM: &[&str] = &[];
const OURS: [&str; 4] = ["fi_arch_shim", "fi_arch_shim.pth", "fi_arch_shim.start", "fi_arch-"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Whether a path in an environment is of the distribution `fi-arch`.
fn is_ours(path: &str) -> bool {
    let inside = path.split_once("site-packages/").map_or(path, |(_, inside)| inside);
    OURS.iter().any(|name| inside.starts_with(name))
}

/// A policy file in the world's sandbox, so that an installation has another content.
fn policy(world: &World, tokens: u32) -> PathBuf {
    let file = world.path(&format!("policy-{tokens}.toml"));
    let text = format!("format = 1\n[[ranks]]\ncount = 2\nmax_tokens = {tokens}\nreason = \"a test\"\n");
    fs::write(&file, text).unwrap();
    file
}

#[test]
fn an_installation_adds_its_own_files_alone_and_taking_it_back_leaves_nothing() {
    let world = World::new();
    let (before, twin) = (world.look(), look(&world.path("twin")));
    let installed = world.install(SHIM);
    assert_eq!(installed["verdict"], "installed");
    assert_eq!(installed["mode"], "shim");
    assert_eq!(installed["targets"], json!(["sm_120f"]));
    assert_eq!(installed["flashinfer"], RELEASE);
    assert_eq!(installed["edits"][0], "gate");
    assert_eq!(installed["policy"]["ranks"][0]["count"], 2);
    assert!(Path::new(installed["artifact"].as_str().unwrap()).is_file());

    let after = world.look();
    let changed = before.changes(&after);
    assert!(changed.iter().all(|path| is_ours(path)), "{changed:#?}");
    // Whoever runs the server can read all of it.
    for path in changed {
        let meta = fs::metadata(world.path("venv").join(&path)).unwrap();
        assert_eq!(meta.mode() & 0o777, if meta.is_dir() { 0o755 } else { 0o644 }, "{path}");
    }
    assert_eq!(world.uninstall()["verdict"], "uninstalled");
    world.look().is(&before, "uninstalled");
    look(&world.path("twin")).is(&twin, "the twin");
    assert_eq!(world.uninstall()["verdict"], "nothing-to-do");
}

#[test]
fn in_place_only_names_are_changed_and_every_original_comes_back_as_the_same_inode() {
    let world = World::new();
    fs::set_permissions(&world.changed()[0], Permissions::from_mode(0o664)).unwrap();
    let (before, twin) = (world.look(), look(&world.path("twin")));
    let installed = world.install(IN_PLACE);
    assert_eq!(installed["mode"], "in-place");

    let after = world.look();
    for path in world.changed() {
        let name = path.strip_prefix(world.path("venv")).unwrap();
        assert_ne!(after.get(name), before.get(name), "{}", path.display());
    }
    assert_eq!(fs::metadata(&world.changed()[0]).unwrap().mode() & 0o777, 0o664, "the original's mode");
    assert!(!world.site.join("fi_arch_shim.pth").exists() && !world.site.join("fi_arch_shim.start").exists());
    let stranger = |path: &String| {
        let path = path.split_once("site-packages/").map_or(path.as_str(), |(_, inside)| inside);
        !is_ours(path) && !path.starts_with(".fi_arch") && !path.starts_with("flashinfer/")
    };
    assert!(!before.changes(&after).iter().any(stranger));
    // The twin's names lead to the originals still; what they lead to has one name more, the backup's, and one less.
    look(&world.path("twin")).is_as_good_as(&twin, "the twin, installed");

    world.uninstall();
    world.look().is(&before, "uninstalled");
    look(&world.path("twin")).is(&twin, "the twin");
}

#[test]
fn byte_code_that_python_wrote_in_between_goes_with_the_file_that_it_was_made_of() {
    let world = World::new();
    let before = world.look();
    world.install(IN_PLACE);
    let code = world.site.join("flashinfer/jit/__pycache__");
    assert!(!code.join("comm.cpython-39.pyc").exists(), "it is of the original");
    assert!(code.join("core.cpython-39.pyc").exists());
    fs::write(code.join("comm.cpython-39.pyc"), "made of the edited file").unwrap();
    fs::write(code.join("comm.cpython-312.pyc"), "made of the edited file by another").unwrap();
    world.uninstall();
    world.look().is(&before, "uninstalled");
}

#[test]
fn installing_again_does_nothing_and_another_choice_replaces_the_first() {
    let world = World::new();
    let before = world.look();
    let other = policy(&world, 64);
    for mode in [SHIM, IN_PLACE] {
        world.install(mode);
        let first = world.look();
        assert_eq!(world.install(mode)["verdict"], "already-installed");
        world.look().is(&first, "nothing was touched");
        let replaced = world.install(&[mode, &["--policy", text(&other)]].concat());
        assert_eq!(replaced["verdict"], "installed");
        assert_eq!(world.status()["policy"]["ranks"][0]["max_tokens"], 64);
        // Back and forth, and whatever is damaged is put right.
        world.install(if mode.is_empty() { IN_PLACE } else { SHIM });
        world.install(mode);
        let state = world.site.join("fi_arch_shim/state.json");
        fs::write(&state, fs::read_to_string(&state).unwrap().replace("sm_120f", "sm_121f")).unwrap();
        assert_eq!(world.status()["verdict"], "damaged");
        assert_eq!(world.install(mode)["verdict"], "installed");
        assert_eq!(world.status()["verdict"], "installed");
        world.uninstall();
        world.look().is(&before, "uninstalled");
    }
}

#[test]
fn in_place_another_set_of_edits_is_computed_from_the_originals() {
    let world = World::new();
    let before = world.look();
    world.install(IN_PLACE);
    // As an older release might have left it: one file with other edits.
    let path = &world.changed()[1];
    let older = [fs::read(path).unwrap(), b"// an older edit\n".to_vec()].concat();
    let journal = world.site.join(".fi_arch/journal.json");
    let was = fi_arch::digest::Digest::of_file(path).unwrap().to_string();
    let is = fi_arch::digest::Digest::of(&older).to_string();
    fs::remove_file(path).unwrap();
    fs::write(path, older).unwrap();
    reseal(&journal, &was, &is);
    assert_eq!(world.install(IN_PLACE)["verdict"], "installed");
    assert_eq!(fi_arch::digest::Digest::of_file(path).unwrap().to_string(), was);
    world.uninstall();
    world.look().is(&before, "uninstalled");
}

/// Replaces a word in a sealed file.
fn reseal(file: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(file).unwrap();
    assert!(text.contains(from));
    let value: Value = serde_json::from_str(&text.replace(from, to)).unwrap();
    fs::write(file, fi_arch::store::seal_manifest(value)).unwrap();
}

#[test]
fn a_flashinfer_that_is_right_is_left_alone() {
    let sandbox = Sandbox::new();
    let site = sandbox.path("venv/lib/python3.11/site-packages");
    for item in fs::read_dir(wheels::unpacked("flashinfer-python", "0.7.4")).unwrap().flatten() {
        copy_dir(&item.path(), &site.join(item.file_name()));
    }
    let before = look(&sandbox.path("venv"));
    for mode in [SHIM, IN_PLACE] {
        let ran = sandbox.run(&[&["install", "--json"], mode].concat()).exits(0).json();
        assert_eq!(ran["verdict"], "nothing-to-do");
        look(&sandbox.path("venv")).is(&before, "nothing to do");
    }
    // The environment's own FlashInfer is required; none is fetched.
    fs::remove_dir_all(site.join("flashinfer")).unwrap();
    fs::remove_dir_all(site.join("flashinfer_python-0.7.4.dist-info")).unwrap();
    sandbox.run(&["install", "--sm", "120"]).exits(3).says("no FlashInfer is installed").says("hint: name the environment");
}

// --- killed, full, two at once ----------------------------------------------------------------------------------------

/// Runs `args` with that fault.
fn faulty(world: &World, args: &[&str], fault: &str) -> Ran {
    let mut command = world.sandbox.command(args);
    let output = command.env("FI_ARCH_FAULT", fault).output().unwrap();
    Ran {
        code: output.status.code().or(output.status.signal().map(|signal| -signal)),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

const KILLED: i32 = -9;

/// The steps to fail at, one by one. Where nothing is changed yet, or any more, they are passed over in strides.
struct Steps {
    step: u32,
    stride: u32,
    longest: u32,
    /// The last step at which nothing was changed.
    dull: u32,
}

impl Steps {
    fn all() -> Self {
        Self { step: 1, stride: 1, longest: 1, dull: 0 }
    }

    fn of_the_change() -> Self {
        Self { step: 1, stride: 1, longest: 16, dull: 0 }
    }

    fn next(&mut self, dull: bool) {
        if dull {
            (self.dull, self.stride) = (self.step, self.longest);
        } else if self.stride > 1 {
            (self.step, self.stride) = (self.dull, 1);
        }
        self.step += self.stride;
    }
}

/// Kills `args` at each of `steps` until it runs through, and calls `then` after each; it says whether that step was dull.
fn killed_at(mut steps: Steps, world: &World, args: &[&str], mut then: impl FnMut(u32, bool) -> bool) {
    loop {
        let step = steps.step;
        let ran = faulty(world, args, &format!("step:{step}:kill"));
        assert!([Some(KILLED), Some(0)].contains(&ran.code), "step {step}: {:?}\n{}", ran.code, ran.stderr);
        let through = ran.code == Some(0);
        let dull = then(step, through);
        if through && steps.stride == 1 {
            assert!(step > 10, "the hook counts steps");
            return;
        }
        steps.next(dull && !through);
    }
}

fn an_installation_that_is_killed(mode: &[&str]) {
    let world = World::new();
    let before = world.look();
    let install = [&["install", "--sm", "120", "--offline"], mode].concat();
    let mut whole = None;
    killed_at(Steps::all(), &world, &install, |step, through| {
        match step % 3 {
            // Whoever looks at it ends it, one way or the other.
            0 if !through => {
                let found = world.status();
                assert!(["not-installed", "installed"].contains(&found["verdict"].as_str().unwrap()), "step {step}: {found}");
                if found["verdict"] == "not-installed" {
                    world.look().is(&before, &format!("step {step}, status"));
                }
            }
            1 if !through => {
                world.install(mode);
                let now = world
                    .look()
                    .only(|path| !path.contains(".fi_arch/") && !path.ends_with("RECORD") && !path.ends_with("state.json"));
                let first = whole.get_or_insert(now.clone());
                now.is_as_good_as(first, &format!("step {step}, installed"));
            }
            _ => {}
        }
        world.run(&["uninstall"]).exits(0);
        world.look().is(&before, &format!("step {step}, uninstalled"));
        false
    });
}

#[test]
fn an_installation_killed_at_any_step_is_finished_or_taken_back_by_the_next_call() {
    an_installation_that_is_killed(SHIM);
}

#[test]
fn an_installation_in_place_killed_at_any_step_is_finished_or_taken_back_by_the_next_call() {
    an_installation_that_is_killed(IN_PLACE);
}

fn a_removal_that_is_killed(mode: &[&str]) {
    let world = World::new();
    let before = world.look();
    world.install(mode);
    killed_at(Steps::all(), &world, &["uninstall"], |step, through| {
        if step % 2 == 0 && !through {
            world.status();
        }
        world.run(&["uninstall"]).exits(0);
        world.look().is(&before, &format!("step {step}"));
        if !through {
            world.install(mode);
        }
        false
    });
}

#[test]
fn a_removal_killed_at_any_step_is_finished_by_the_next_call() {
    a_removal_that_is_killed(SHIM);
    a_removal_that_is_killed(IN_PLACE);
}

#[test]
fn a_replacement_killed_at_any_step_leaves_the_old_or_the_new_one_whole() {
    let world = World::new();
    let before = world.look();
    let (one, two) = (policy(&world, 1), policy(&world, 2));
    for (from, to) in [(SHIM, SHIM), (SHIM, IN_PLACE), (IN_PLACE, IN_PLACE), (IN_PLACE, SHIM)] {
        let first = [from, &["--policy", text(&one)]].concat();
        let second = [&["install", "--sm", "120", "--offline", "--policy", text(&two)], to].concat();
        world.install(&first);
        let mut whole = [0, 0];
        killed_at(Steps::of_the_change(), &world, &second, |step, through| {
            let status = world.status();
            assert_eq!(status["verdict"], "installed", "step {step}: {status}");
            let tokens = status["policy"]["ranks"][0]["max_tokens"].as_u64().unwrap();
            whole[tokens as usize - 1] += 1;
            let right = status["packages"][0]["files"].as_array().unwrap().iter().all(|file| file["right"] == true);
            assert!(right, "step {step}: {status:#}");
            if tokens == 2 {
                world.install(&first);
            }
            status["interrupted"].is_null() && !through
        });
        assert!(whole[0] > 5 && whole[1] > 1, "{whole:?}");
        world.uninstall();
        world.look().is(&before, "uninstalled");
    }
}

#[test]
fn on_a_full_disk_an_installation_changes_nothing_at_whatever_step() {
    let world = World::new();
    let before = world.look();
    let all = [
        (SHIM, "enospc", Steps::all()),
        (IN_PLACE, "enospc", Steps::of_the_change()),
        (IN_PLACE, "full", Steps::of_the_change()),
    ];
    for (mode, how, mut steps) in all {
        let install = [&["install", "--sm", "120", "--offline"], mode].concat();
        // Sweeping up is not worth a failure; a later call sweeps. So it is done when many steps in a row went well.
        let mut well = 0;
        while well < 15 {
            let step = steps.step;
            let ran = faulty(&world, &install, &format!("step:{step}:{how}"));
            if ran.code == Some(0) {
                well += 1;
                world.run(&["uninstall"]).exits(0);
            } else {
                well = 0;
                assert_eq!(ran.code, Some(3), "step {step}: {}", ran.stderr);
            }
            world.look().is(&before, &format!("step {step}, {how}\n{}", ran.stderr));
            steps.next(ran.stderr.contains("nothing was changed"));
        }
        assert!(steps.step > 60, "{}", steps.step);
    }
}

#[test]
fn on_a_full_disk_a_removal_changes_nothing_or_is_whole() {
    let world = World::new();
    let before = world.look();
    for (mode, how) in [(SHIM, "enospc"), (IN_PLACE, "enospc"), (IN_PLACE, "full")] {
        world.install(mode);
        let installed = world.look();
        let journal = |path: &str| !path.contains(".fi_arch");
        for step in 1.. {
            let ran = faulty(&world, &["uninstall"], &format!("step:{step}:{how}"));
            if ran.code == Some(0) {
                world.run(&["uninstall"]).exits(0);
                world.look().is(&before, &format!("step {step}, {how}"));
                if step > 30 {
                    break;
                }
                world.install(mode);
                continue;
            }
            assert_eq!(ran.code, Some(3), "step {step}: {}", ran.stderr);
            let now = world.look().only(journal);
            now.is_as_good_as(&installed.only(journal).but_state(&now), &format!("step {step}, {how}\n{}", ran.stderr));
        }
        world.run(&["uninstall"]).exits(0);
    }
}

#[test]
fn of_many_at_once_one_is_whole_at_the_end() {
    let world = World::new();
    let before = world.look();
    for mode in [SHIM, IN_PLACE] {
        let start = |tokens: u32| -> Child {
            let policy = policy(&world, tokens);
            let args = [&["install", "--sm", "120", "--offline", "--policy", text(&policy)], mode].concat();
            world.sandbox.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        };
        let all: Vec<Child> = (1..=4).map(start).collect();
        let ended: Vec<_> = all.into_iter().map(|mut child| child.wait().unwrap().code()).collect();
        assert_eq!(ended, [Some(0); 4]);
        let status = world.status();
        assert_eq!(status["verdict"], "installed");
        assert_eq!(status["artifacts"][0]["state"], "sound");
        assert!(status["packages"][0]["files"].as_array().unwrap().iter().all(|file| file["right"] == true), "{status:#}");
        let tokens = status["policy"]["ranks"][0]["max_tokens"].as_u64().unwrap() as u32;
        let again = world.install(&[mode, &["--policy", text(&policy(&world, tokens))]].concat());
        assert_eq!(again["verdict"], "already-installed");
        world.uninstall();
        world.look().is(&before, "uninstalled");
    }
}

// --- what others do meanwhile -----------------------------------------------------------------------------------------

#[test]
fn a_file_that_somebody_changed_since_is_left_and_named_and_its_original_is_kept() {
    let world = World::new();
    let before = world.look();
    world.install(IN_PLACE);
    let path = &world.changed()[2];
    let mut edited = fs::read(path).unwrap();
    edited.extend_from_slice(b"// somebody's own line\n");
    fs::remove_file(path).unwrap();
    fs::write(path, &edited).unwrap();
    let status = world.status();
    let of = |status: &Value, key: &str| -> Value {
        let files = status["packages"][0]["files"].as_array().or(status["files"].as_array()).unwrap().clone();
        files.iter().find(|file| file["path"] == text(path)).unwrap()[key].clone()
    };
    assert_eq!(of(&status, "state"), "drifted");

    let ran = world.run(&["uninstall", "--json"]).exits(1).json();
    assert_eq!(ran["verdict"], "left");
    assert_eq!(of(&ran, "was"), "drifted");
    let said = of(&ran, "left");
    let left: Vec<&Value> = ran["files"].as_array().unwrap().iter().filter(|file| !file["left"].is_null()).collect();
    assert_eq!(left.len(), 1);
    assert_eq!(fs::read(path).unwrap(), edited, "left as it is");
    let gone = world.look();
    let name = path.strip_prefix(world.path("venv")).unwrap().to_str().unwrap();
    assert_eq!(
        before.only(|p| p != name && !p.contains(".fi_arch")).changes(&gone.only(|p| p != name && !p.contains(".fi_arch"))),
        [""; 0]
    );
    assert_eq!(world.status()["verdict"], "left");

    // With the original back in its place nothing is left to do.
    let (_, backup) = said.as_str().unwrap().split_once("the original is ").unwrap();
    fs::remove_file(path).unwrap();
    fs::hard_link(backup, path).unwrap();
    world.run(&["uninstall"]).exits(0);
    world.look().is(&before, "uninstalled");
}

/// pip in the world's own environment.
fn pip(world: &World, args: &[&str]) -> String {
    let mut command = Command::new(world.python());
    command.args(["-m", "pip", "--disable-pip-version-check", "--no-color"]).args(args).env_remove("PYTHONPATH");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "pip {args:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// All of an environment but pip itself, and what it writes of its own.
fn without_pip(look: &Look) -> Look {
    look.only(|path| !path.contains("/pip/") && !path.contains("/setuptools/") && !path.contains("/_distutils_hack/"))
}

#[test]
fn pip_lists_it_and_removes_all_of_it() {
    let world = World::with_python();
    pip(&world, &["list"]);
    let before = without_pip(&world.look());
    world.install(SHIM);
    let listed: Vec<Value> = serde_json::from_str(&pip(&world, &["list", "--format", "json"])).unwrap();
    assert!(listed.iter().any(|one| one["name"] == "fi-arch" && one["version"] == env!("CARGO_PKG_VERSION")), "{listed:?}");
    // RECORD is right: every file of ours stands in it, with its hash.
    let verify = "import base64, csv, hashlib, pathlib, sys\n\
                  site = pathlib.Path(sys.argv[1]); record = next(site.glob('fi_arch-*.dist-info')) / 'RECORD'\n\
                  rows = list(csv.reader(record.open()))\n\
                  for path, digest, size in rows:\n\
                  \x20   data = (site / path).read_bytes()\n\
                  \x20   if digest:\n\
                  \x20       sha = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()\n\
                  \x20       assert digest == 'sha256=' + sha and int(size) == len(data), path\n\
                  ours = {str(f.relative_to(site)) for f in site.rglob('*') if f.is_file() and str(f.relative_to(site)).startswith('fi_arch')}\n\
                  assert ours == {row[0] for row in rows}, ours ^ {row[0] for row in rows}\n";
    let checked = Command::new("python3").args(["-c", verify, text(&world.site)]).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    // Byte code is there from the start, for this interpreter.
    let codes = world.look().paths().filter(|path| text(path).contains("fi_arch_shim") && text(path).ends_with(".pyc")).count();
    assert!(codes > 5, "{codes}");
    pip(&world, &["uninstall", "--yes", "fi-arch"]);
    without_pip(&world.look()).is(&before, "pip uninstall");
}

#[test]
fn what_lies_in_place_can_be_taken_back_after_pip_has_removed_the_package() {
    let world = World::with_python();
    pip(&world, &["list"]);
    let before = without_pip(&world.look());
    world.install(IN_PLACE);
    pip(&world, &["uninstall", "--yes", "fi-arch"]);
    assert_eq!(world.status()["verdict"], "left");
    let edited = fs::read_to_string(&world.changed()[0]).unwrap();
    assert!(edited.contains("except ImportError"), "it works without the package");
    world.uninstall();
    without_pip(&world.look()).is(&before, "uninstalled");
}

#[test]
fn what_pip_put_in_place_anew_stays_and_nothing_of_ours_is_left_beside_it() {
    let wheels = [RELEASE, "0.6.4"].map(|version| wheels::file("flashinfer-python", version));
    for wheel in wheels {
        let world = World::with_python();
        world.install(IN_PLACE);
        let name = fs::read_dir(&wheel).unwrap().flatten().next().unwrap().path();
        pip(&world, &["install", "--no-deps", "--no-index", "--force-reinstall", text(&name)]);
        let reinstalled = without_pip(&world.look());
        world.run(&["uninstall"]).exits(0);
        let after = without_pip(&world.look());
        let changed = reinstalled.changes(&after);
        let ours = |path: &String| is_ours(path) || path.contains("/.fi_arch") || path.contains("include/fi_arch");
        assert!(changed.iter().all(ours), "{changed:#?}");
        assert!(!after.paths().any(|path| text(path).contains("fi_arch")), "nothing of ours is left");
        // And it can be installed into again.
        if text(&wheel).ends_with(RELEASE) {
            world.install(IN_PLACE);
            world.uninstall();
            without_pip(&world.look()).is_as_good_as(&after, "again");
        }
    }
}

// --- where it may not, or cannot be like everywhere -------------------------------------------------------------------

/// The command as a user who owns nothing here.
fn as_nobody(world: &World, args: &[&str]) -> Ran {
    let command = world.sandbox.command(args);
    if !rustix_is_root() {
        panic!("this test changes its user, and so must be run as root");
    }
    let mut nobody = Command::new("setpriv");
    nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => nobody.env(name, value),
            None => nobody.env_remove(name),
        };
    }
    Ran::of(nobody.current_dir("/"))
}

fn rustix_is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

#[test]
fn who_may_not_write_is_told_so_and_what_else_there_is() {
    let world = World::new();
    let root = world.path("");
    fs::set_permissions(&root, Permissions::from_mode(0o755)).unwrap();
    let before = world.look();
    for mode in [SHIM, IN_PLACE] {
        let args = [&["install", "--sm", "120", "--offline"], mode].concat();
        let ran = as_nobody(&world, &args).exits(3).says("nothing can be written into").says("hint: `fi-arch run -- CMD…`");
        ran.says("hint: or do it as the user who owns");
        world.look().is(&before, "as nobody");
    }
    // Not even root may write here.
    let script = "mount --bind \"$0\" \"$0\" && mount -o remount,ro,bind \"$0\" && exec \"$@\"";
    let command = world.sandbox.command(&["install", "--sm", "120", "--offline"]);
    let mut unshared = Command::new("unshare");
    unshared.args(["--mount", "sh", "-c", script]).arg(&world.site).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs().filter_map(|(name, value)| Some((name, value?))) {
        unshared.env(name, value);
    }
    Ran::of(&mut unshared).exits(3).says("Read-only file system").says("fi-arch run");
    world.look().is(&before, "read-only");

    // What is installed cannot be taken back by somebody else, and is as it was after the attempt.
    world.install(IN_PLACE);
    let installed = world.look();
    as_nobody(&world, &["uninstall"]).exits(3).says("nothing can be written into");
    world.look().is(&installed, "as nobody");
    assert_eq!(as_nobody(&world, &["status", "--json"]).exits(0).json()["verdict"], "installed");
}

/// The world's FlashInfer moved into a source tree elsewhere, installed editable.
fn editable(world: &World, tree: &Path) {
    copy_dir(&world.site.join("flashinfer"), &tree.join("flashinfer"));
    fs::remove_dir_all(world.site.join("flashinfer")).unwrap();
    let record = world.site.join(format!("flashinfer_python-{RELEASE}.dist-info"));
    fs::remove_file(record.join("RECORD")).unwrap();
    let url = json!({ "url": format!("file://{}", tree.display()), "dir_info": { "editable": true } });
    fs::write(record.join("direct_url.json"), url.to_string()).unwrap();
}

#[test]
fn a_source_tree_on_another_disk_is_given_back_with_its_contents_modes_and_times() {
    let world = World::new();
    let disk = tempfile::tempdir_in("/dev/shm").expect("this test needs a second file system");
    assert_ne!(fs::metadata(disk.path()).unwrap().dev(), fs::metadata(&world.site).unwrap().dev());
    editable(&world, disk.path());
    let (site, tree) = (world.look(), look(disk.path()));
    let header = disk.path().join("flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh");
    let was = fs::metadata(&header).unwrap();
    for mode in [SHIM, IN_PLACE] {
        let installed = world.install(mode);
        assert_eq!(installed["site"], text(&world.site), "the environment's own folder");
        assert_eq!(world.install(mode)["verdict"], "already-installed");
        let edited = look(disk.path()).changes(&tree).len();
        assert_eq!(edited > 0, mode == IN_PLACE);
        world.uninstall();
        look(disk.path()).is_as_good_as(&tree, "the tree");
        world.look().is(&site, "the environment");
    }
    let is = fs::metadata(&header).unwrap();
    assert_eq!((is.mtime(), is.mtime_nsec(), is.uid()), (was.mtime(), was.mtime_nsec(), was.uid()));

    // Killed while files are copied from one disk to the other.
    let install = ["install", "--sm", "120", "--offline", "--in-place"];
    for step in (1..).step_by(7) {
        let ran = faulty(&world, &install, &format!("step:{step}:kill"));
        world.run(&["uninstall"]).exits(0);
        look(disk.path()).is_as_good_as(&tree, &format!("step {step}"));
        world.look().is(&site, &format!("step {step}"));
        if ran.code == Some(0) {
            break;
        }
    }
}

#[test]
fn a_folder_that_python_starts_nothing_from_is_refused_for_the_shim() {
    let world = World::new();
    let site = world.path("target");
    copy_dir(&world.path("twin"), &site);
    let before = look(&site);
    let args = ["install", "--sm", "120", "--offline", "--env", text(&site)];
    world.run(&args).exits(2).says("Python reads .pth files").says("--in-place");
    look(&site).is(&before, "refused");
    world.run(&[&args[..], IN_PLACE].concat()).exits(0);
    world.run(&["uninstall", "--env", text(&site)]).exits(0);
    look(&site).is(&before, "uninstalled");
}

// --- bundles ----------------------------------------------------------------------------------------------------------

fn bundle(world: &World) -> PathBuf {
    let file = world.path("a.fia");
    world.run(&["build", "--sm", "120", "--offline", "--export", text(&file)]).exits(0);
    file
}

#[test]
fn a_bundle_is_installed_where_there_is_no_home_no_network_and_no_program() {
    let world = World::new();
    let file = bundle(&world);
    let before = world.look();
    for mode in [SHIM, IN_PLACE] {
        let args = [&["install", "--json", "--from", text(&file)], mode].concat();
        let command = world.sandbox.command(&args);
        let mut bare = Command::new("/usr/bin/env");
        bare.args(["-i", &format!("VIRTUAL_ENV={}", world.path("venv").display()), "/usr/bin/unshare", "--net"]);
        bare.arg(command.get_program()).args(command.get_args()).current_dir("/");
        let ran = Ran::of(&mut bare).exits(0).json();
        assert_eq!(ran["targets"], json!(["sm_120f"]));
        assert_eq!(world.install(&[mode, &["--from", text(&file)]].concat())["verdict"], "already-installed");
        // It is the store's own artifact.
        assert_eq!(world.install(mode)["verdict"], "already-installed");
        world.uninstall();
        world.look().is(&before, "uninstalled");
    }
}

#[test]
fn a_bundle_that_does_not_fit_is_refused_and_nothing_is_changed() {
    let world = World::new();
    let file = bundle(&world);
    let before = world.look();
    let refused = |exit: i32, says: &str, args: &[&str]| {
        let now = world.look();
        world.run(&[&["install", "--from", text(&file)], args].concat()).exits(exit).says(says).says("hint: ");
        world.look().is(&now, says);
    };
    refused(2, "no bundle is for sm_90", &["--sm", "90"]);
    refused(5, "two CUDA runtimes", &["--for", "cu128"]);

    // A header that the compilers read, and that no edit touches.
    let header = world.site.join("flashinfer/data/csrc/tvm_ffi_utils.h");
    let was = fs::read(&header).unwrap();
    fs::remove_file(&header).unwrap();
    fs::write(&header, [was.clone(), b"\n".to_vec()].concat()).unwrap();
    refused(5, "tvm_ffi_utils.h", &[]);
    fs::remove_file(&header).unwrap();
    fs::hard_link(world.path("twin/flashinfer/data/csrc/tvm_ffi_utils.h"), &header).unwrap();

    // A torch with another CUDA runtime, and a tvm-ffi that this FlashInfer does not take.
    fs::create_dir_all(world.site.join("torch")).unwrap();
    fs::write(world.site.join("torch/__init__.py"), "").unwrap();
    fs::write(world.site.join("torch/version.py"), "__version__ = '2.9.1+cu128'\ncuda = '12.8'\n").unwrap();
    refused(5, "libcudart.so.13", &[]);
    fs::remove_dir_all(world.site.join("torch")).unwrap();
    let metadata = fs::read_dir(&world.site).unwrap().flatten().map(|item| item.path());
    let metadata = metadata.into_iter().find(|path| text(path).contains("apache_tvm_ffi")).unwrap().join("METADATA");
    let said = fs::read_to_string(&metadata).unwrap();
    let version = said.lines().find(|line| line.starts_with("Version:")).unwrap().to_owned();
    fs::remove_file(&metadata).unwrap();
    fs::write(&metadata, said.replace(&version, "Version: 0.3.0")).unwrap();
    world.run(&["install", "--from", text(&file)]).exits(4).says("apache-tvm-ffi 0.3.0 is outside of");
    fs::remove_file(&metadata).unwrap();
    let name = metadata.strip_prefix(&world.site).unwrap();
    fs::hard_link(world.path("twin").join(name), &metadata).unwrap();
    world.look().is(&before, "all is as before");
    world.install(&["--from", text(&file)]);
}

// --- status -----------------------------------------------------------------------------------------------------------

#[test]
fn status_shows_every_file_the_rows_and_the_diff_in_either_mode() {
    let world = World::new();
    assert_eq!(world.status()["verdict"], "not-installed");
    let edits = world.run(&["build", "--show-edits", "--json"]).exits(0).json();
    // Of CUDA files: what is served to Python differs, since it asks the shim.
    let data = |diff: &str| -> Vec<String> {
        let plain: Vec<&str> = diff.lines().filter(|line| !line.starts_with('#')).collect();
        let files = format!("\n{}", plain.join("\n"));
        let of_data = |file: &&str| file.lines().nth(1).is_some_and(|line| line.starts_with("+++ b/flashinfer/data/"));
        files.split("\n--- ").filter(of_data).map(|file| file.trim_end().to_owned()).collect()
    };
    for (mode, state) in [(SHIM, "original"), (IN_PLACE, "ours")] {
        world.install(mode);
        let status = world.status();
        let repairs = edits["edits"].as_array().unwrap();
        assert_eq!(status["edits"].as_array().unwrap()[..repairs.len()], repairs[..]);
        let files = status["packages"][0]["files"].as_array().unwrap();
        assert!(files.iter().all(|file| file["state"] == state && file["right"] == true), "{status:#}");
        assert!(
            status["packages"][0]["edits"].as_array().unwrap().iter().all(|edit| edit["reason"].as_str().unwrap().len() > 20)
        );
        assert_eq!(status["artifacts"][0]["state"], "sound");
        let shown = world.run(&["status", "--diff", "--json"]).exits(0).json();
        let diff = shown["diff"].as_str().unwrap();
        assert!(data(diff).len() > 4, "{diff}");
        assert_eq!(data(diff), data(edits["diff"].as_str().unwrap()), "the same as `build --show-edits`");
        assert!(diff.contains("+    from fi_arch_shim import serve"));
    }
    world.uninstall();
}

#[test]
fn status_of_a_process_says_whether_it_has_the_installed_artifact() {
    let world = World::new();
    world.install(SHIM);
    let artifact = world.site.join("fi_arch_shim/artifact/sm_120f/trtllm_comm.so");
    let hold = "import mmap, sys; file = open(sys.argv[1]); held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); print(1, flush=True); sys.stdin.read()";
    let start = |path: &Path| {
        let mut command = Command::new("python3");
        command.args(["-c", hold, text(path)]).env("FI_ARCH_REQUIRE", "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut one = [0; 2];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut one).unwrap();
        child
    };
    let status = |child: &Child| world.run(&["status", "--json", "--pid", &child.id().to_string()]).exits(0).json();
    let mut holder = start(&artifact);
    let now = status(&holder);
    assert_eq!(now["verdict"], "installed", "{now:#}");
    assert_eq!(now["libraries"][0]["path"], text(&artifact));
    assert_eq!(now["variables"]["FI_ARCH_REQUIRE"], "1");
    if rustix_is_root() {
        fs::set_permissions(world.path(""), Permissions::from_mode(0o755)).unwrap();
        as_nobody(&world, &["status", "--pid", &holder.id().to_string()]).exits(3).says("belongs to another user");
    }
    world.uninstall();
    assert_eq!(status(&holder)["verdict"], "stale");
    holder.kill().unwrap();
    holder.wait().unwrap();
    world.run(&["status", "--pid", "4194304"]).exits(2).says("there is no process");

    let foreign = world.path("cached_ops/trtllm_comm/trtllm_comm.so");
    fs::create_dir_all(foreign.parent().unwrap()).unwrap();
    fs::write(&foreign, "as FlashInfer would have it").unwrap();
    let mut holder = start(&foreign);
    assert_eq!(status(&holder)["verdict"], "foreign");
    holder.kill().unwrap();
    holder.wait().unwrap();
}
