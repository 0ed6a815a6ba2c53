//! `run`: one process tree, nothing installed.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::support::environment::World;
use crate::support::sandbox::Ran;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// `run` with the world's Python and `code`.
fn python(world: &World, flags: &[&str], code: &str) -> Ran {
    let python = world.python();
    let args = [&["run", "--sm", "120", "--offline", "--", text(&python)], flags, &["-c", code]].concat();
    world.run(&args)
}

fn folders(world: &World) -> Vec<PathBuf> {
    let Ok(items) = fs::read_dir(world.sandbox.home().join("run")) else { return Vec::new() };
    items.flatten().map(|item| item.path()).collect()
}

#[test]
fn a_process_tree_has_the_shim_and_the_environment_is_untouched() {
    let world = World::with_python();
    // Python writes byte code wherever it may: before the first look.
    python(&world, &[], "pass").exits(0);
    let before = world.look();
    let code = "import fi_arch_shim, subprocess, sys; print(fi_arch_shim.__file__, fi_arch_shim.started()); sys.stdout.flush(); \
                subprocess.run([sys.executable, '-c', 'import fi_arch_shim; print(fi_arch_shim.started())'])";
    let ran = python(&world, &[], code).exits(0);
    let folder = folders(&world);
    assert_eq!(folder.len(), 1, "one set, one folder: {folder:?}");
    assert_eq!(ran.stdout, format!("{}/fi_arch_shim/__init__.py True\nTrue\n", folder[0].display()));
    let judged = python(&world, &["-m", "fi_arch_shim"], "").exits(0).json();
    assert_eq!((&judged["mode"], &judged["serves"]), (&"run".into(), &true.into()), "{judged:#}");
    world.look().is(&before, "nothing was installed");
    // Nobody's writing into it is needed, now or later.
    let first = crate::support::environment::look(&folder[0]);
    python(&world, &[], code).exits(0);
    crate::support::environment::look(&folder[0]).is(&first, "immutable");
}

#[test]
fn a_damaged_folder_is_never_used() {
    let world = World::with_python();
    python(&world, &[], "pass").exits(0);
    let state = folders(&world)[0].join("fi_arch_shim/state.json");
    fs::write(&state, "{}").unwrap();
    let judged = python(&world, &["-m", "fi_arch_shim"], "").exits(0).json();
    assert_eq!(judged["serves"], true, "{judged:#}");
}

#[test]
fn a_sitecustomize_that_was_there_runs_as_before() {
    let world = World::with_python();
    fs::write(world.site.join("sitecustomize.py"), "import os; os.environ['NCCL_P2P_LEVEL'] = 'SYS'\n").unwrap();
    let code = "import os, sys, fi_arch_shim; print(os.environ['NCCL_P2P_LEVEL'], sys.modules['sitecustomize'].__file__, fi_arch_shim.started())";
    let ran = python(&world, &[], code).exits(0);
    assert_eq!(ran.stdout, format!("SYS {} True\n", world.site.join("sitecustomize.py").display()));
    // And one on PYTHONPATH, which stays on it.
    let own = world.path("own");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("sitecustomize.py"), "import os; os.environ['NCCL_P2P_LEVEL'] = 'PHB'\n").unwrap();
    let python = world.python();
    let mut command = world.sandbox.command(&["run", "--sm", "120", "--offline", "--", text(&python), "-c", code]);
    let ran = Ran::of(command.env("PYTHONPATH", &own)).exits(0);
    assert_eq!(ran.stdout, format!("PHB {} True\n", own.join("sitecustomize.py").display()));
}

#[test]
fn signals_and_the_exit_code_are_the_commands_own() {
    let world = World::with_python();
    assert_eq!(python(&world, &[], "raise SystemExit(7)").code, Some(7));
    let python = world.python();
    let code = "import os; print(os.getpid(), flush=True); import time; time.sleep(60)";
    let mut command = world.sandbox.command(&["run", "--sm", "120", "--offline", "--", text(&python), "-c", code]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
    assert_eq!(line.trim(), child.id().to_string(), "it is the very process");
    std::process::Command::new("kill").args(["-TERM", line.trim()]).status().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(15));
    world.run(&["run", "--sm", "120", "--offline", "--", "no-such-program"]).exits(2).says("cannot be run");
    world.run(&["run", "--sm", "120"]).exits(2);
}

#[test]
fn the_environment_is_that_of_the_python_in_the_command_or_in_its_first_line() {
    let world = World::with_python();
    let script = world.path("launch");
    let code = "import fi_arch_shim, json, sys; print(sys.prefix, fi_arch_shim.started())";
    fs::write(&script, format!("#!{}\n{code}\n", world.python().display())).unwrap();
    fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = world.sandbox.command(&["run", "--sm", "120", "--offline", "--", text(&script)]);
    let ran = Ran::of(command.env_remove("VIRTUAL_ENV")).exits(0);
    assert_eq!(ran.stdout, format!("{} True\n", world.path("venv").display()));
}

#[test]
fn a_python_that_would_not_listen_is_told_of_before_it_starts() {
    let world = World::with_python();
    for flag in ["-I", "-E", "-S"] {
        python(&world, &[flag], "pass").exits(0).says(&format!("started with {flag}")).says("nothing will be in force");
    }
    assert!(!python(&world, &["-B"], "pass").exits(0).stderr.contains("nothing will be in force"));
}

#[test]
fn where_it_is_installed_the_command_simply_runs() {
    let world = World::with_python();
    world.install(&[]);
    let ran = python(&world, &[], "import fi_arch_shim; print(fi_arch_shim.__file__)").exits(0).says("fi-arch is installed in");
    assert_eq!(ran.stdout, format!("{}\n", world.site.join("fi_arch_shim/__init__.py").display()));
    assert!(folders(&world).is_empty());
}

#[test]
fn of_many_at_once_all_run_on_one_folder() {
    let world = World::with_python();
    let python = world.python();
    let start = |_| {
        let mut command = world.sandbox.command(&[
            "run",
            "--sm",
            "120",
            "--offline",
            "--",
            text(&python),
            "-c",
            "import fi_arch_shim; print(fi_arch_shim.__file__)",
        ]);
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    };
    let all: Vec<_> = (0..4).map(start).collect();
    let said: Vec<_> =
        all.into_iter().map(|child| String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()).collect();
    assert!(said.iter().all(|one| *one == said[0] && one.contains("/run/")), "{said:?}");
    assert_eq!(folders(&world).len(), 1);
}
