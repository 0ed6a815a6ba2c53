//! `fi-arch verify`: what is activated passes, and each planted fault is found under its code and changes the digest.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use fi_arch::activate::shim as shim_files;
use fi_arch::digest::Digest;
use fi_arch::{store, tables};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::activation;
use crate::support::sandbox::{Ran, copy_dir};
use crate::support::toolkit::nvcc;
use crate::support::wheels;
use crate::support::world::{World, codes, copy_flashinfer, find, write};

const RELEASE: &str = "0.6.4";

/// Environments in which the real `install` has put a small artifact.
struct Installed {
    dir: TempDir,
}

impl Installed {
    fn get() -> &'static Self {
        static INSTALLED: OnceLock<Installed> = OnceLock::new();
        INSTALLED.get_or_init(|| {
            let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let artifact = activation::artifact(dir.path(), "120f");
            activation::artifact(dir.path(), "90a");
            for (name, flags) in [("shim", &[][..]), ("in-place", &["--in-place"])] {
                let world = World::with(RELEASE);
                let bundle = dir.path().join("probe.fia");
                activation::bundle(&artifact, &world.site().join("flashinfer"), RELEASE, &bundle);
                let mut all = vec!["install", "--from", bundle.to_str().unwrap()];
                all.extend(flags);
                world.fi_arch(&all).exits(0);
                copy_dir(&world.sandbox.path("venv"), &dir.path().join(name));
            }
            Self { dir }
        })
    }

    /// An environment of its own, activated as `name` says, whose verb is `verify`.
    fn world(name: &str) -> World {
        let mut world = World::bare();
        let venv = world.sandbox.path("venv");
        fs::remove_dir_all(&venv).unwrap();
        copy_dir(&Self::get().dir.path().join(name), &venv);
        fs::create_dir_all(venv.join("bin")).unwrap();
        fs::write(venv.join("bin/python"), "\x7fELF").unwrap();
        world.verb = "verify";
        world
    }

    fn artifact(arch: &str) -> PathBuf {
        Self::get().dir.path().join(format!("trtllm_comm_{arch}.so"))
    }
}

fn shim() -> World {
    Installed::world("shim")
}

fn package(world: &World) -> PathBuf {
    world.site().join("fi_arch_shim")
}

fn artifact(world: &World) -> PathBuf {
    package(world).join("artifact/sm_120f/trtllm_comm.so")
}

/// Changes a sealed file, and seals it again.
fn resealed(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = store::unseal_value(&fs::read(file).unwrap()).unwrap();
    change(&mut value);
    fs::remove_file(file).unwrap();
    fs::write(file, store::seal_manifest(value)).unwrap();
}

fn state(world: &World, change: impl FnOnce(&mut Value)) {
    resealed(&package(world).join("state.json"), change);
}

fn manifest(world: &World, change: impl FnOnce(&mut Value)) {
    resealed(&artifact(world).with_file_name("manifest.json"), change);
}

fn append(file: &Path, text: &str) {
    let mut bytes = fs::read(file).unwrap();
    bytes.extend_from_slice(text.as_bytes());
    // Never through the inode: it may be another environment's too.
    fs::remove_file(file).unwrap();
    fs::write(file, bytes).unwrap();
}

/// Puts another artifact in the place of the proven one, with a state and a manifest that agree with it.
fn other_artifact(world: &World, bytes: &[u8]) {
    let file = artifact(world);
    fs::remove_file(&file).unwrap();
    fs::write(&file, bytes).unwrap();
    let (digest, size) = (Digest::of(bytes).to_string(), bytes.len());
    state(world, |state| {
        state["artifacts"][0]["sha256"] = json!(digest);
        state["artifacts"][0]["bytes"] = json!(size);
    });
    manifest(world, |manifest| {
        manifest["artifact"]["sha256"] = json!(digest);
        manifest["artifact"]["bytes"] = json!(size);
    });
}

fn python(world: &World) -> String {
    world.sandbox.path("venv/bin/python").display().to_string()
}

/// Installs a package by its record and an `__init__.py` alone.
fn engine(world: &World, name: &str, version: &str) {
    world.package(name, name, version);
}

/// The files of a real SGLang in which its gates stand.
fn real_sglang(world: &World) {
    let from = wheels::unpacked("sglang", "0.5.9");
    engine(world, "sglang", "0.5.9");
    let gates = &tables::engine("sglang").unwrap().gates;
    for form in gates.iter().flat_map(|gate| &gate.places).flat_map(|place| &place.forms) {
        let (from, to) = (from.join(&form.file), world.site().join(&form.file));
        if from.is_file() && !to.is_file() {
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(from, to).unwrap();
        }
    }
}

/// `verify -- python WORDS…`
fn launch(world: &World, words: &str) -> Ran {
    let python = python(world);
    let mut all = vec!["--sm", "120", "--", &python];
    all.extend(words.split_whitespace());
    world.run(&all)
}

#[test]
fn what_install_has_activated_passes_in_every_mode() {
    for (name, on_disk) in [("shim", false), ("in-place", true)] {
        let world = Installed::world(name);
        let report = world.run(&["--sm", "120"]).exits(0).json();
        assert_eq!((&report["verdict"], &report["mode"], &report["in_force"]), (&json!("pass"), &json!(name), &json!(true)));
        assert_eq!(report["problems"], json!([]));
        let gate = report["gates"].as_array().unwrap().iter().find(|gate| gate["name"] == "gen_trtllm_comm_module").unwrap();
        assert_eq!((&gate["open"]["sm_120"], &gate["on_disk"]["sm_120"]), (&json!(true), &json!(on_disk)), "{name}");
        let artifact = &report["artifact"];
        assert_eq!((&artifact["target"], &artifact["verdict"]), (&json!("sm_120f"), &json!("pass")));
        assert_eq!((&artifact["usable"], &artifact["sha256"]), (&json!(["sm_120"]), &artifact["recorded_sha256"]));
        let expected = if on_disk { "ours" } else { "original" };
        for file in report["files"].as_array().unwrap() {
            assert_eq!((&file["state"], file["served"].is_null()), (&json!(expected), on_disk), "{file}");
        }
        assert!(report["if_disabled"].as_str().unwrap().contains("FlashInfer's own code"));
    }
}

#[test]
fn the_last_line_for_people_is_the_digest_of_the_state() {
    let world = shim();
    let state = world.report()["state"].as_str().unwrap().to_owned();
    assert_eq!(state.len(), 64);
    let text = world.fi_arch(&["verify", "--sm", "120"]).exits(0).stdout;
    assert_eq!(text.lines().last(), Some(format!("state {state}").as_str()));
}

#[test]
fn environments_at_different_places_have_one_digest_and_another_mode_another() {
    let (one, two) = (shim(), shim());
    // Another moment of installing, and another home: neither decides anything.
    state(&two, |state| state["created"] = json!("2027-01-01T00:00:00Z"));
    let record =
        fs::read_dir(two.site()).unwrap().flatten().find(|entry| entry.file_name().to_string_lossy().starts_with("fi_arch-"));
    let record = record.unwrap().path().join("RECORD");
    let text = fs::read_to_string(&record).unwrap();
    let text: String =
        text.lines().filter(|line| !line.starts_with("fi_arch_shim/state.json")).map(|line| format!("{line}\n")).collect();
    fs::remove_file(&record).unwrap();
    fs::write(&record, format!("fi_arch_shim/state.json,,\n{text}")).unwrap();
    let digest = |world: &World| world.run(&["--sm", "120"]).exits(0).json()["state"].clone();
    assert_eq!(digest(&one), digest(&two));
    assert_ne!(digest(&one), digest(&Installed::world("in-place")));
    // GPUs and their driver belong to the machine.
    one.gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 580.82.07");
    assert_eq!(digest(&one), digest(&two));
    // A policy decides.
    state(&two, |state| state["policy"]["ranks"][0]["max_tokens"] = json!(64));
    assert_ne!(digest(&one), digest(&two));
}

/// A fault: the code under which it is found, and how it is planted.
type Fault = (&'static str, &'static str, fn(&mut World));

const FAULTS: &[Fault] = &[
    ("disabled", "shim", |world| _ = world.set("FI_ARCH_DISABLE", "1")),
    ("disabled", "in-place", |world| _ = world.set("FI_ARCH_DISABLE", "1").set("FI_ARCH_REQUIRE", "1")),
    ("state-damaged", "shim", |world| append(&package(world).join("state.json"), " x")),
    ("state-damaged", "shim", |world| state(world, |state| state["format"] = json!(2))),
    ("state-damaged", "shim", |world| state(world, |state| state["policy"]["ranks"][0]["count"] = json!(3))),
    ("pth-missing", "shim", |world| fs::remove_file(world.site().join("fi_arch_shim.pth")).unwrap()),
    ("shim-altered", "shim", |world| append(&world.site().join("fi_arch_shim.pth"), "import other\n")),
    ("shim-altered", "shim", |world| append(&package(world).join("_overlay.py"), "\n")),
    ("shim-altered", "in-place", |world| append(&package(world).join("_specs.py"), "\n")),
    ("shim-incomplete", "shim", |world| fs::remove_file(package(world).join("_imports.py")).unwrap()),
    ("shim-altered", "shim", |world| write(package(world).join("_imports/__init__.py"), "")),
    ("record-missing", "shim", |world| world.remove("fi_arch")),
    ("shim-shadowed", "shim", |world| {
        let earlier = world.sandbox.path("earlier");
        write(earlier.join("fi_arch_shim/__init__.py"), "");
        world.set("PYTHONPATH", earlier.to_str().unwrap());
    }),
    ("pth-not-read", "shim", |world| {
        let away = world.sandbox.path("away");
        fs::create_dir(&away).unwrap();
        for name in ["fi_arch_shim", "fi_arch_shim.pth"] {
            fs::rename(world.site().join(name), away.join(name)).unwrap();
        }
        world.set("PYTHONPATH", away.to_str().unwrap());
    }),
    ("file-drifted", "shim", |world| append(&world.site().join("flashinfer/jit/comm.py"), "# edited by hand\n")),
    ("file-drifted", "in-place", |world| append(&world.site().join("flashinfer/data/csrc/trtllm_allreduce.cu"), "\n")),
    ("file-missing", "shim", |world| {
        fs::remove_file(world.site().join("flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh")).unwrap();
    }),
    ("file-edited", "shim", |world| {
        let file = world.site().join("flashinfer/jit/comm.py");
        fs::remove_file(&file).unwrap();
        fs::copy(package(world).join("overlay/flashinfer/jit/comm.py"), &file).unwrap();
    }),
    ("file-reverted", "in-place", |world| {
        let original = World::with(RELEASE);
        let file = world.site().join("flashinfer/jit/comm.py");
        fs::remove_file(&file).unwrap();
        fs::copy(original.site().join("flashinfer/jit/comm.py"), &file).unwrap();
    }),
    ("overlay-damaged", "shim", |world| append(&package(world).join("overlay/flashinfer/jit/comm.py"), "\n")),
    ("overlay-damaged", "shim", |world| fs::remove_file(package(world).join("overlay/flashinfer/jit/comm.py")).unwrap()),
    ("package-version", "shim", |world| {
        world.remove("flashinfer_python");
        world.record("flashinfer_python", "0.6.5");
    }),
    ("package-missing", "shim", |world| {
        world.remove("flashinfer");
        world.remove("flashinfer_python");
    }),
    ("half-open", "in-place", |world| {
        engine(world, "sglang", "0.5.9");
        write(world.site().join("sglang/communicator.py"), "edited\n");
        state(world, |state| {
            let digest = |text: &str| json!(Digest::of(text.as_bytes()));
            let file = json!({
                "path": "sglang/communicator.py", "module": "sglang.communicator",
                "pre": digest("stock\n"), "post": digest("edited\n"), "edits": ["predicate"],
            });
            let package = json!({ "name": "sglang", "distribution": "sglang", "version": "0.5.9", "files": [file], "edits": [] });
            state["packages"].as_array_mut().unwrap().push(package);
        });
        let original = World::with(RELEASE);
        let file = world.site().join("flashinfer/jit/comm.py");
        fs::remove_file(&file).unwrap();
        fs::copy(original.site().join("flashinfer/jit/comm.py"), &file).unwrap();
    }),
    ("edits-alone", "in-place", |world| fs::remove_dir_all(package(world)).unwrap()),
    ("not-installed", "shim", |world| {
        fs::remove_dir_all(package(world)).unwrap();
        fs::remove_file(world.site().join("fi_arch_shim.pth")).unwrap();
    }),
    ("artifact-missing", "shim", |world| fs::remove_file(artifact(world)).unwrap()),
    ("artifact-altered", "shim", |world| append(&artifact(world), "x")),
    ("artifact-altered", "in-place", |world| {
        let mut bytes = fs::read(artifact(world)).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::remove_file(artifact(world)).unwrap();
        fs::write(artifact(world), bytes).unwrap();
    }),
    ("artifact-unreadable", "shim", |world| other_artifact(world, b"no shared object")),
    ("artifact-unreadable", "shim", |world| {
        let whole = fs::read(artifact(world)).unwrap();
        other_artifact(world, &whole[..whole.len() / 2]);
    }),
    ("artifact-lacks-target", "shim", |world| other_artifact(world, &fs::read(Installed::artifact("90a")).unwrap())),
    ("manifest-damaged", "shim", |world| append(&artifact(world).with_file_name("manifest.json"), "{")),
    ("manifest-disagrees", "shim", |world| manifest(world, |manifest| manifest["key"] = json!(Digest::of(b"another")))),
    ("artifact-test-only", "shim", |world| manifest(world, |manifest| manifest["test_only"] = json!(true))),
    ("artifact-unproven", "shim", |world| manifest(world, |manifest| manifest["verdict"]["verdict"] = json!("fail"))),
    ("artifact-unproven", "shim", |world| manifest(world, |manifest| manifest["verdict"]["hollow"] = json!(3))),
    ("artifact-wrong-runtime", "shim", |world| world.torch("2.9.1+cu128", "'12.8'")),
    ("artifact-wrong-runtime", "shim", |world| {
        // The right name, without the functions.
        let lib = world.site().join("nvidia/cu13/lib");
        fs::create_dir_all(&lib).unwrap();
        library(&lib, "libcudart.so.13", "extern \"C\" int nothing() { return 0; }");
    }),
    ("artifact-tvm-ffi", "shim", |world| {
        let lib = world.site().join("tvm_ffi/lib");
        fs::create_dir_all(&lib).unwrap();
        library(&lib, "libtvm_ffi.so", "extern \"C\" int TVMFFIOther() { return 0; }");
    }),
    ("tvm-ffi-out-of-range", "shim", |world| {
        world.remove("apache_tvm_ffi");
        world.record("apache_tvm_ffi", "0.2.0");
    }),
    ("torch-without-cuda", "shim", |world| world.torch("2.11.0+cpu", "None")),
    ("arch-list-raises", "shim", |world| _ = world.set("FLASHINFER_CUDA_ARCH_LIST", "sm_120")),
    ("expandable-segments", "shim", |world| _ = world.set("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")),
    ("expandable-segments", "in-place", |world| _ = world.set("PYTORCH_ALLOC_CONF", "a:1,expandable_segments:true")),
    ("companion-version", "shim", |world| world.package("flashinfer_cubin", "flashinfer_cubin", "0.6.3")),
];

/// A shared library of the source, without GPU code.
fn library(dir: &Path, name: &str, source: &str) {
    fs::write(dir.join("library.cpp"), source).unwrap();
    nvcc(
        dir,
        &["-shared", "-cudart", "none", "-Xcompiler", "-fPIC", "-Xlinker", &format!("-soname={name}"), "library.cpp", "-o", name],
    );
}

#[test]
fn every_planted_fault_is_found_under_its_code_and_changes_the_digest() {
    let sound = |name: &str| Installed::world(name).run(&["--sm", "120"]).exits(0).json()["state"].clone();
    let sound = [("shim", sound("shim")), ("in-place", sound("in-place"))];
    for (number, (code, name, plant)) in FAULTS.iter().enumerate() {
        let mut world = Installed::world(name);
        plant(&mut world);
        let ran = world.run(&["--sm", "120"]);
        assert_eq!(ran.code, Some(1), "fault {number}, {code}:\n{}\n{}", ran.stdout, ran.stderr);
        let report = ran.json();
        let found =
            find(&report["problems"], code).unwrap_or_else(|| panic!("fault {number}: no {code} in {:#}", report["problems"]));
        assert!(!found["hint"].as_str().unwrap().is_empty(), "{found}");
        let sound = &sound.iter().find(|(known, _)| known == name).unwrap().1;
        assert_ne!(report["state"], *sound, "fault {number}, {code}: the digest does not tell it");
        // What is about a file names it.
        if ["file-", "shim-altered", "shim-incomplete", "overlay-", "artifact-altered", "state-"]
            .iter()
            .any(|begin| code.starts_with(begin))
        {
            let path = found["path"].as_str().unwrap_or_else(|| panic!("{found}"));
            assert!(Path::new(path).starts_with(world.site()), "{found}");
        }
    }
}

#[test]
fn one_bad_file_keeps_the_whole_set_from_being_served() {
    let world = shim();
    append(&world.site().join("flashinfer/data/csrc/trtllm_allreduce.cu"), "\n");
    let report = world.run(&["--sm", "120"]).exits(1).json();
    assert_eq!(report["in_force"], false);
    assert!(report["files"].as_array().unwrap().iter().all(|file| file["served"].is_null()));
    let gate = report["gates"].as_array().unwrap().iter().find(|gate| gate["name"] == "gen_trtllm_comm_module").unwrap();
    assert_eq!(gate["open"]["sm_120"], false);
}

#[test]
fn where_nothing_is_installed_the_gate_is_named_with_its_line() {
    let mut world = World::with(RELEASE);
    world.verb = "verify";
    let problem = world.fails_with("not-installed");
    assert_eq!((&problem["hint"], problem["line"].as_u64().unwrap() > 0), (&json!("`fi-arch install`"), true));
    assert_eq!(codes(&world.report()["problems"]), ["not-installed"]);
}

#[test]
fn a_flashinfer_that_is_right_as_it_is_passes_and_the_engines_gate_is_told() {
    let mut world = World::sound();
    world.verb = "verify";
    world.run(&["--sm", "120"]).exits(0);
    real_sglang(&world);
    let note = world.notes("engine-gate-closed");
    assert!(note["hint"].as_str().unwrap().contains("--engine sglang"));
    assert!(note["path"].as_str().unwrap().ends_with(".py") && note["line"].as_u64().unwrap() > 0, "{note}");
    let gates = world.report()["gates"].as_array().unwrap().clone();
    assert!(gates.iter().any(|gate| gate["package"] == "sglang" && gate["open"]["sm_120"] == false), "{gates:?}");
    // Who starts it meets it.
    fs::create_dir_all(world.sandbox.path("venv/bin")).unwrap();
    fs::write(world.sandbox.path("venv/bin/python"), "\x7fELF").unwrap();
    let words = "-m sglang.launch_server --tp 2 --enable-flashinfer-allreduce-fusion";
    assert_eq!(codes(&launch(&world, words).exits(1).json()["problems"]), ["engine-gate-closed"]);
    // A place that is not as it should be is no open gate.
    let file = world.site().join("sglang/srt/layers/communicator.py");
    fs::write(&file, fs::read_to_string(&file).unwrap().replace("_is_sm100_supported", "_is_newer")).unwrap();
    assert_eq!(codes(&launch(&world, words).exits(1).json()["problems"]), ["engine-gate-unknown"]);
}

#[test]
fn a_gate_that_sed_has_opened_is_no_repair() {
    let mut world = World::with(RELEASE);
    world.verb = "verify";
    let file = world.site().join("flashinfer/jit/comm.py");
    fs::write(&file, fs::read_to_string(&file).unwrap().replace("[9, 10]", "[9, 10, 12]")).unwrap();
    assert_eq!(world.fails_with("defect-hollow-kernels")["hint"], "`fi-arch install`");
}

#[test]
fn the_artifact_must_fit_the_gpus_and_their_driver() {
    let world = shim();
    world.gpu("NVIDIA GeForce RTX 5090, 12.0, 580.82.07");
    let report = world.run(&[]).exits(0).json();
    assert_eq!(report["targets"], json!(["sm_120"]));
    assert_eq!(find(&report["notes"], "driver-unknown"), None);
    world.gpu("NVIDIA GeForce RTX 5090, 12.0, 575.51.03");
    let report = world.run(&[]).exits(1).json();
    assert!(find(&report["problems"], "artifact-driver-too-old").unwrap()["message"].as_str().unwrap().contains("575.51.03"));
    // One for a single chip does not run on its sibling.
    state(&world, |state| state["artifacts"][0]["runs_on"] = json!([[12, 0]]));
    world.gpu("NVIDIA GB10, 12.1, 580.95.05");
    let report = world.run(&[]).exits(1).json();
    assert!(find(&report["problems"], "artifact-absent").unwrap()["hint"].as_str().unwrap().contains("--sm 121"));
    // Another generation compiles for itself.
    let hopper = world.run(&["--sm", "90"]).json();
    assert!(find(&hopper["notes"], "artifact-built-later").is_some(), "{hopper:#}");
}

#[test]
fn no_driver_is_a_note() {
    let world = shim();
    assert!(world.notes("driver-unknown")["message"].as_str().unwrap().contains("580"));
}

#[test]
fn what_only_concerns_compiling_is_no_problem_while_the_artifact_is_in_force() {
    let mut world = shim();
    world.set("CUDA_HOME", "/nonexistent").set("FLASHINFER_CUDA_ARCH_LIST", "9.0a");
    let slot = world.site().join("flashinfer/data/aot/trtllm_comm/trtllm_comm.so");
    write(&slot, "a shadow");
    let report = world.run(&["--sm", "120"]).exits(0).json();
    assert!(find(&report["notes"], "cuda-home-malformed").is_some());
    assert!(find(&report["notes"], "arch-list-lacks-target").is_some());
    assert_eq!(find(&report["notes"], "prebuilt-passed-over").unwrap()["path"], slot.display().to_string());
}

#[test]
fn the_variables_that_hide_gpus_are_read() {
    let mut world = shim();
    world.gpu("NVIDIA GeForce RTX 5090, 12.0, 580.82.07");
    for value in ["", "-1"] {
        world.set("CUDA_VISIBLE_DEVICES", value);
        world.fails_with("no-visible-gpu");
    }
    world.set("CUDA_VISIBLE_DEVICES", "0");
    world.run(&["--sm", "120"]).exits(0);
}

#[test]
fn a_user_site_that_python_does_not_read_is_told() {
    let world = shim();
    // A Python outside of virtual environments, whose user has the shim among the own packages.
    let (prefix, user) = (world.sandbox.path("python"), world.sandbox.path("user/.local/lib/python3.11"));
    fs::create_dir_all(prefix.join("lib/python3.11")).unwrap();
    fs::create_dir_all(prefix.join("bin")).unwrap();
    fs::write(prefix.join("bin/python3.11"), "\x7fELF").unwrap();
    fs::write(prefix.join("lib/python3.11/os.py"), "").unwrap();
    copy_dir(&world.site(), &user.join("site-packages"));
    let program = prefix.join("bin/python3.11").display().to_string();
    let run = |world: &World, flag: &str| world.run(&["--sm", "120", "--", &program, flag, "-m", "json.tool"]);
    run(&world, "-u").exits(0);
    assert!(find(&run(&world, "-I").exits(1).json()["problems"], "user-site-off").is_some());
    assert!(find(&run(&world, "-s").exits(1).json()["problems"], "user-site-off").is_some());
    run(&world, "-E").exits(0);
}

#[test]
fn options_of_python_count_only_where_they_turn_the_shim_off() {
    let world = shim();
    let code = |flag: &str| {
        let ran = launch(&world, &format!("{flag} -m json.tool"));
        (ran.code, codes(&ran.json()["problems"]))
    };
    assert_eq!(code("-S"), (Some(1), vec!["python-without-site".to_owned()]));
    for flag in ["-I", "-E", "-s", "-u"] {
        assert_eq!(code(flag), (Some(0), Vec::new()), "{flag}: .pth files are read all the same");
    }
    // In place nothing has to start.
    let world = Installed::world("in-place");
    assert_eq!(launch(&world, "-I -m json.tool").code, Some(0));
}

#[test]
fn the_environment_is_that_of_the_commands_python() {
    let (world, other) = (shim(), World::with(RELEASE));
    fs::create_dir_all(other.sandbox.path("venv/bin")).unwrap();
    let theirs = other.sandbox.path("venv/bin/python3");
    fs::write(&theirs, "\x7fELF").unwrap();
    let theirs = theirs.to_str().unwrap();
    // The active environment is sound; the one that is started is not.
    let report = world.run(&["--sm", "120", "--", theirs, "-m", "json.tool"]).exits(1).json();
    assert!(find(&report["problems"], "not-installed").is_some(), "{report:#}");
    let ours = world.sandbox.path("venv").display().to_string();
    let report = world.run(&["--sm", "120", "--env", &ours, "--", theirs, "-m", "json.tool"]).exits(1).json();
    assert_eq!(codes(&report["problems"]), ["other-environment"]);
    let report = world.run(&["--sm", "120", "--", "/nonexistent/python", "-m", "json.tool"]).exits(1).json();
    assert!(find(&report["problems"], "program-missing").is_some());
}

#[test]
fn a_package_in_the_working_folder_is_told() {
    let world = shim();
    write(world.sandbox.path("flashinfer/__init__.py"), "");
    let codes_of = |words: &str| codes(&launch(&world, words).json()["problems"]);
    assert_eq!(codes_of("-m json.tool"), ["shadowed-by-folder"]);
    assert_eq!(codes_of("-P -m json.tool"), [""; 0]);
}

#[test]
fn what_run_puts_on_the_python_path_is_read_as_python_reads_it() {
    let mut world = shim();
    // As in a process that `fi-arch run` has started: the package in a folder of its own, nothing in the environment.
    let folder = world.sandbox.path("run");
    fs::create_dir(&folder).unwrap();
    fs::rename(package(&world), folder.join("fi_arch_shim")).unwrap();
    world.remove("fi_arch");
    fs::remove_file(world.site().join("fi_arch_shim.pth")).unwrap();
    resealed(&folder.join("fi_arch_shim/state.json"), |state| state["mode"] = json!("run"));
    write(folder.join("sitecustomize.py"), shim_files::SITECUSTOMIZE);
    world.run(&["--sm", "120"]).exits(1);
    world.set("PYTHONPATH", folder.to_str().unwrap());
    let report = world.run(&["--sm", "120"]).exits(0).json();
    assert_eq!((&report["mode"], &report["in_force"]), (&json!("run"), &json!(true)));
    let codes_of = |world: &World, flag: &str| codes(&launch(world, &format!("{flag} -m json.tool")).json()["problems"]);
    assert_eq!(codes_of(&world, "-u"), [""; 0]);
    for flag in ["-S", "-s -S"] {
        assert_eq!(codes_of(&world, flag), ["python-ignores-run"], "{flag}");
    }
    for flag in ["-E", "-I"] {
        assert_eq!(codes_of(&world, flag), ["python-ignores-run", "not-installed"], "{flag}");
    }
    // Another sitecustomize before ours is the one that Python runs.
    let other = world.sandbox.path("other");
    write(other.join("sitecustomize.py"), "");
    world.set("PYTHONPATH", &format!("{}:{}", other.display(), folder.display()));
    world.fails_with("sitecustomize-shadowed");
    world.set("PYTHONPATH", &format!("{}:{}", folder.display(), other.display()));
    world.run(&["--sm", "120"]).exits(0);
    append(&folder.join("fi_arch_shim/_overlay.py"), "\n");
    world.fails_with("shim-altered");
}

#[test]
fn a_process_that_fi_arch_run_starts_needs_nothing_installed() {
    let mut world = World::with(RELEASE);
    world.verb = "verify";
    fs::create_dir_all(world.sandbox.path("venv/bin")).unwrap();
    fs::write(world.sandbox.path("venv/bin/python"), "\x7fELF").unwrap();
    let report = world.run(&["--sm", "120", "--", "fi-arch", "run", "--", &python(&world), "-m", "json.tool"]).exits(0).json();
    assert!(find(&report["notes"], "activated-by-run").is_some());
}

/// SGLang with its own gates recorded as opened.
fn sglang(version: &str) -> World {
    let world = shim();
    engine(&world, "sglang", version);
    write(world.site().join("sglang/communicator.py"), "stock\n");
    write(package(&world).join("overlay/sglang/communicator.py"), "edited\n");
    state(&world, |state| {
        let digest = |text: &str| json!(Digest::of(text.as_bytes()));
        let file = json!({
            "path": "sglang/communicator.py", "module": "sglang.communicator",
            "pre": digest("stock\n"), "post": digest("edited\n"), "edits": ["predicate"],
        });
        let edit = json!({ "id": "predicate", "path": "sglang/communicator.py", "line": 1, "sites": 1, "reason": "a test" });
        let package = json!({ "name": "sglang", "distribution": "sglang", "version": version, "files": [file], "edits": [edit] });
        state["packages"].as_array_mut().unwrap().push(package);
    });
    // RECORD says what the state was.
    let record =
        fs::read_dir(world.site()).unwrap().flatten().find(|entry| entry.file_name().to_string_lossy().starts_with("fi_arch-"));
    let record = record.unwrap().path().join("RECORD");
    let text = fs::read_to_string(&record).unwrap();
    let rest: String =
        text.lines().filter(|line| !line.starts_with("fi_arch_shim/state.json")).map(|line| format!("{line}\n")).collect();
    fs::remove_file(&record).unwrap();
    fs::write(&record, format!("fi_arch_shim/state.json,,\n{rest}")).unwrap();
    world
}

#[test]
fn a_right_command_line_passes_whatever_stands_before_it() {
    let world = sglang("0.5.9");
    let python = python(&world);
    for words in [
        format!("{python} -m sglang.launch_server --enable-flashinfer-allreduce-fusion --tp 2"),
        format!("env A=1 nohup {python} -m sglang.launch_server --tp-size=2 --enable-flashinfer-allreduce-fusion"),
        format!("numactl -m 0 {python} -u -m sglang.launch_server --tensor-parallel-size 2 --enable-flashinfer-allreduce-fusion"),
    ] {
        let mut all = vec!["--sm", "120", "--"];
        all.extend(words.split_whitespace());
        let report = world.run(&all).exits(0).json();
        assert_eq!((&report["command"]["engine"], &report["command"]["ranks"]), (&json!("sglang"), &json!(2)), "{words}");
        assert!(report["if_disabled"].as_str().unwrap().contains("silently does nothing"), "{}", report["if_disabled"]);
        let gates = report["gates"].as_array().unwrap();
        assert!(gates.iter().any(|gate| gate["package"] == "sglang" && gate["open"]["sm_120"] == true), "{gates:?}");
    }
    let script = format!("export B=1; {python} -m sglang.launch_server --tp 2 --enable-flashinfer-allreduce-fusion");
    world.run(&["--sm", "120", "--", "bash", "-c", &script]).exits(0);
}

#[test]
fn every_fault_of_an_sglang_command_line_is_told() {
    let world = sglang("0.5.9");
    world.gpu("NVIDIA GeForce RTX 5090, 12.0, 580.82.07'; echo 'NVIDIA GeForce RTX 5090, 12.0, 580.82.07");
    const RIGHT: &str = "--enable-flashinfer-allreduce-fusion";
    launch(&world, &format!("-m sglang.launch_server --tp 2 {RIGHT}")).exits(0);
    for (code, words) in [
        ("fusion-flag-absent", "--tp 2".to_owned()),
        ("one-rank", RIGHT.to_owned()),
        ("one-rank", format!("{RIGHT} --tp 1")),
        ("ranks-not-admitted", format!("{RIGHT} --tp 4")),
        ("more-ranks-than-gpus", format!("{RIGHT} --tp=8")),
        ("pipeline-parallel", format!("{RIGHT} --tp 2 --pp-size 2")),
        ("several-nodes", format!("{RIGHT} --tp 2 --nnodes 2")),
        ("dp-attention", format!("{RIGHT} --tp 2 --enable-dp-attention --dp 2")),
        ("hybrid-ep", format!("{RIGHT} --tp 8 --ep 2")),
        ("context-parallel", format!("{RIGHT} --tp 2 --attn-cp-size 2")),
    ] {
        let ran = launch(&world, &format!("-m sglang.launch_server {words}"));
        let found = find(&ran.json()["problems"], code);
        assert!(ran.code == Some(1) && found.is_some(), "{code}: {words}\n{}", ran.stdout);
        assert!(!found.unwrap()["hint"].as_str().unwrap().is_empty());
    }
    // Without groups of data parallelism SGLang itself switches it off again.
    launch(&world, &format!("-m sglang.launch_server --tp 2 {RIGHT} --enable-dp-attention")).exits(0);
    let variable =
        format!("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {} -m sglang.launch_server --tp 2 {RIGHT}", python(&world));
    let mut all = vec!["--sm", "120", "--"];
    all.extend(variable.split_whitespace());
    assert_eq!(codes(&world.run(&all).exits(1).json()["problems"]), ["expandable-segments"]);
}

#[test]
fn newer_versions_are_told_their_own_flag() {
    let world = sglang("0.5.14");
    let absent = launch(&world, "-m sglang.launch_server --tp 2").exits(1).json();
    let hint = find(&absent["problems"], "fusion-flag-absent").unwrap()["hint"].clone();
    assert!(hint.as_str().unwrap().contains("--flashinfer-allreduce-fusion-backend trtllm"), "{hint}");
    launch(&world, "-m sglang.launch_server --tp 2 --flashinfer-allreduce-fusion-backend trtllm").exits(0);
    let other = launch(&world, "-m sglang.launch_server --tp 2 --flashinfer-allreduce-fusion-backend=mnnvl").exits(1).json();
    assert_eq!(codes(&other["problems"]), ["fusion-backend"]);
    let off = "--enforce-disable-flashinfer-allreduce-fusion --flashinfer-allreduce-fusion-backend trtllm";
    let off = launch(&world, &format!("-m sglang.launch_server --tp 2 {off}")).exits(1).json();
    assert_eq!(codes(&off["problems"]), ["fusion-off"]);
    // A version with the flag on by itself for some models: worth knowing.
    let older = sglang("0.5.7");
    let report = launch(&older, "-m sglang.launch_server --tp 2").exits(0).json();
    assert!(find(&report["notes"], "fusion-flag-absent").is_some());
}

#[test]
fn an_engine_that_is_started_and_not_activated_is_told() {
    let world = shim();
    let report = launch(&world, "-m sglang.launch_server --tp 2").exits(1).json();
    assert_eq!(codes(&report["problems"]), ["engine-missing"]);
    real_sglang(&world);
    let report = launch(&world, "-m sglang.launch_server --tp 2 --enable-flashinfer-allreduce-fusion").exits(1).json();
    assert_eq!(codes(&report["problems"]), ["engine-gate-closed"]);
}

#[test]
fn an_engine_whose_gates_install_has_opened_passes_and_what_stays_is_told() {
    for (mode, flags) in [("shim", &[][..]), ("in-place", &["--in-place"])] {
        let mut world = World::with(RELEASE);
        real_sglang(&world);
        fs::create_dir_all(world.sandbox.path("venv/bin")).unwrap();
        fs::write(world.sandbox.path("venv/bin/python"), "\x7fELF").unwrap();
        let bundle = Installed::get().dir.path().join("probe.fia");
        let mut all = vec!["install", "--engine", "sglang", "--from", bundle.to_str().unwrap()];
        all.extend(flags);
        world.fi_arch(&all).exits(0);
        world.verb = "verify";
        let words = "-m sglang.launch_server --tp 2 --enable-flashinfer-allreduce-fusion";
        let report = launch(&world, words).exits(0).json();
        assert_eq!((&report["mode"], &report["in_force"]), (&json!(mode), &json!(true)));
        let gates = report["gates"].as_array().unwrap();
        assert!(gates.iter().any(|gate| gate["package"] == "sglang" && gate["open"]["sm_120"] == true), "{gates:?}");
        assert!(find(&report["notes"], "engine-note").is_some());
        // An upgrade of FlashInfer leaves nothing half open, and is told.
        world.remove("flashinfer");
        world.remove("flashinfer_python");
        copy_flashinfer("0.6.16.post4", &world.site().join("flashinfer"), "data");
        world.record("flashinfer_python", "0.6.16.post4");
        let report = launch(&world, words).exits(1).json();
        let found = codes(&report["problems"]);
        assert!(found.contains(&"package-version".to_owned()), "{found:?}");
        assert_eq!(found.contains(&"half-open".to_owned()), mode == "in-place", "{found:?}");
        assert!(
            report["gates"].as_array().unwrap().iter().all(|gate| gate["open"]["sm_120"] == false || gate["owner"] == "open")
        );
    }
}

#[test]
fn the_settings_of_vllms_passes_are_read_as_json_and_key_by_key() {
    let world = shim();
    engine(&world, "vllm", "0.16.0");
    let run = |words: &[&str]| {
        let python = python(&world);
        let mut all = vec!["--sm", "120", "--", &python, "-m", "vllm.entrypoints.openai.api_server"];
        all.extend(words);
        let ran = world.run(&all);
        (ran.code, codes(&ran.json()["problems"]))
    };
    let right = r#"{"pass_config": {"fuse_allreduce_rms": true, "fi_allreduce_fusion_max_size_mb": 64}}"#;
    let on = "-cc.pass_config.fuse_allreduce_rms=true";
    let limit = "-cc.pass_config.fi_allreduce_fusion_max_size_mb=64";
    assert_eq!(run(&["-tp", "2", "-cc", right]), (Some(0), vec![]));
    assert_eq!(run(&["--tensor_parallel_size=2", on, limit]), (Some(0), vec![]));
    for (code, words) in [
        ("fusion-flag-absent", &["-tp=2"][..]),
        ("fusion-limit-absent", &["-tp=2", on]),
        ("fusion-off", &["-tp=2", "-cc", right, "-cc.pass_config.fuse_allreduce_rms=false"]),
        ("compilation-config", &["-tp=2", "-cc", "{not json"]),
        ("passes-off", &["-tp=2", "-cc", right, "--enforce-eager"]),
        ("passes-off", &["-tp=2", "-cc", right, "-O0"]),
        ("pipeline-parallel", &["-tp=2", "-cc", right, "-pp", "2"]),
        ("data-parallel", &["-tp=2", "-cc", right, "-dp", "2"]),
        ("ranks-not-admitted", &["-tp=8", "-cc", right]),
    ] {
        let (exit, found) = run(words);
        assert_eq!((exit, found), (Some(1), vec![code.to_owned()]), "{words:?}");
    }
}

#[test]
fn vllms_own_switch_for_the_backend_is_read() {
    let mut world = World::sound();
    world.verb = "verify";
    fs::create_dir_all(world.sandbox.path("venv/bin")).unwrap();
    fs::write(world.sandbox.path("venv/bin/python"), "\x7fELF").unwrap();
    engine(&world, "vllm", "0.33.0");
    let words = "-m vllm.entrypoints.openai.api_server -tp 2 -cc.pass_config.fuse_allreduce_rms=true \
                 -cc.pass_config.fi_allreduce_fusion_max_size_mb=64";
    assert!(find(&launch(&world, words).exits(0).json()["notes"], "engine-variable").is_some());
    world.set("VLLM_FLASHINFER_ALLREDUCE_BACKEND", "trtllm");
    assert_eq!(find(&launch(&world, words).exits(0).json()["notes"], "engine-variable"), None);
    world.set("VLLM_FLASHINFER_ALLREDUCE_BACKEND", "mnnvl");
    assert_eq!(codes(&launch(&world, words).exits(1).json()["problems"]), ["engine-variable"]);
}

#[test]
fn a_command_line_that_cannot_be_read_is_said_to_be() {
    let world = shim();
    let report = launch(&world, "train.py").exits(0).json();
    assert!(find(&report["notes"], "command-unread").is_some());
    let report = world.run(&["--sm", "120", "--", "docker", "run", "image"]).json();
    assert!(find(&report["notes"], "command-elsewhere").is_some());
}

#[test]
fn wrong_words_of_its_own_are_a_usage_error() {
    let world = shim();
    world.run(&["--sm", "nonsense"]).exits(2);
    world.run(&["--env", "/nonexistent"]).exits(2);
    world.run(&["python", "-m", "sglang.launch_server"]).exits(2);
}

#[test]
fn doctor_knows_of_an_activation() {
    for name in ["shim", "in-place"] {
        let mut world = Installed::world(name);
        world.verb = "doctor";
        let report = world.run(&["--sm", "120"]).exits(0).json();
        assert!(find(&report["notes"], "activated").is_some(), "{name}");
        assert_eq!(find(&report["notes"], "edited-in-place"), None, "{name}");
        append(&package(&world).join("_overlay.py"), "\n");
        assert!(world.fails_with("activation-broken")["hint"].as_str().unwrap().contains("fi-arch verify"), "{name}");
    }
    let mut world = shim();
    world.verb = "doctor";
    fs::remove_file(world.site().join("fi_arch_shim.pth")).unwrap();
    world.fails_with("gate-closed");
}

#[test]
fn it_answers_quickly() {
    let world = shim();
    let elapsed: Vec<f64> = (0..3).map(|_| world.report()["elapsed_s"].as_f64().unwrap()).collect();
    // A small part of that on a quiet machine (docs/measurements.md); tests share theirs, and may not be optimised.
    let limit = if cfg!(debug_assertions) { 5.0 } else { 0.3 };
    assert!(elapsed.iter().any(|seconds| *seconds < limit), "{elapsed:?}");
}
