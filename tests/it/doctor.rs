//! `fi-arch doctor`: a sound environment passes, and each planted fault is found under its code.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;

use crate::support::probes::Probes;
use crate::support::toolkit;
use crate::support::world::{World, codes, copy_flashinfer, find, write};

#[test]
fn a_sound_environment_passes_quickly() {
    let world = World::sound();
    let ran = world.run(&["--sm", "120"]).exits(0);
    let report = ran.json();
    assert_eq!(report["verdict"], "pass");
    assert_eq!(report["problems"], Value::Array(Vec::new()));
    assert_eq!(report["flashinfer"]["version"], "0.7.4");
    assert_eq!(report["flashinfer"]["listed"], true);
    assert_eq!(report["torch"]["cuda"], "13.0");
    assert_eq!(report["toolkits"][0]["fit"], true);
    let elapsed: Vec<f64> = (0..3).map(|_| world.report()["elapsed_s"].as_f64().unwrap()).collect();
    // A small part of that on a quiet machine (docs/measurements.md); tests share theirs, and may not be optimised.
    let limit = if cfg!(debug_assertions) { 15.0 } else { 2.0 };
    assert!(elapsed.iter().any(|seconds| *seconds < limit), "{elapsed:?}");
}

#[test]
fn the_closed_gate_is_named_with_its_line_and_those_closed_on_purpose_are_not_problems() {
    let world = World::with("0.6.16.post4");
    let gate = world.fails_with("gate-closed");
    assert!(gate["path"].as_str().unwrap().ends_with("flashinfer/jit/comm.py"));
    assert_eq!(gate["line"], 192);
    let report = world.report();
    let of = |name: &str| report["gates"].as_array().unwrap().iter().find(|gate| gate["generator"] == name).unwrap().clone();
    assert_eq!(of("gen_trtllm_comm_module")["open"]["sm_120"], false);
    assert_eq!(of("gen_trtllm_comm_module")["owner"], "fi-arch");
    for sibling in ["gen_trtllm_mnnvl_comm_module", "gen_mixed_comm_module"] {
        assert_eq!(of(sibling)["owner"], "on purpose, not touched");
        assert_eq!(of(sibling)["open"]["sm_120"], false);
    }
    assert_eq!(of("gen_dcp_alltoall_module")["owner"], "open");
    assert_eq!(codes(&report["problems"]).iter().filter(|code| *code == "gate-closed").count(), 1);
}

#[test]
fn every_defect_behind_the_gate_is_named_with_its_place() {
    let world = World::with("0.6.4");
    for id in ["hollow-kernels", "dependency-marks", "pointer-stride", "cluster-size", "partial-warps", "optional-header"] {
        let defect = world.fails_with(&format!("defect-{id}"));
        assert!(defect["line"].as_u64().unwrap() > 0 && Path::new(defect["path"].as_str().unwrap()).is_file(), "{defect}");
    }
    assert!(codes(&world.report()["notes"]).contains(&"fault-remains".to_owned()));
}

#[test]
fn a_gate_widened_by_hand_leaves_the_defects_behind_it() {
    let world = World::with("0.6.4");
    let file = world.site().join("flashinfer/jit/comm.py");
    fs::write(&file, fs::read_to_string(&file).unwrap().replace("[9, 10]", "[9, 10, 12]")).unwrap();
    world.fails_with("defect-hollow-kernels");
    let report = world.report();
    assert_eq!(find(&report["problems"], "gate-closed"), None);
    assert_eq!(report["flashinfer"]["listed"], false);
}

#[test]
fn a_gate_that_is_no_list_is_said_to_be_unknown() {
    let world = World::with("0.6.4");
    let file = world.site().join("flashinfer/jit/comm.py");
    fs::write(&file, fs::read_to_string(&file).unwrap().replace("[9, 10]", "MAJORS")).unwrap();
    world.fails_with("gate-unknown");
}

#[test]
fn a_header_edited_by_hand_is_not_taken_for_a_known_one() {
    let world = World::with("0.6.4");
    let file = world.site().join("flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh");
    fs::write(&file, fs::read_to_string(&file).unwrap().replacen("__CUDA_ARCH__ < 1200", "__CUDA_ARCH__ < 1300", 1)).unwrap();
    world.fails_with("flashinfer-unknown");
}

#[test]
fn a_source_tree_with_linked_data_is_seen() {
    let world = World::bare();
    let repo = world.sandbox.path("git/flashinfer");
    copy_flashinfer("0.6.4", &repo.join("flashinfer"), "..");
    fs::create_dir_all(repo.join("flashinfer/data")).unwrap();
    for dir in ["csrc", "include"] {
        symlink(format!("../../{dir}"), repo.join("flashinfer/data").join(dir)).unwrap();
    }
    write(repo.join("version.txt"), "0.6.4\n");
    world.record("flashinfer_python", "0.6.4");
    write(world.site().join("__editable__.flashinfer_python-0.6.4.pth"), &format!("{}\n", repo.display()));
    let gate = world.fails_with("gate-closed");
    assert!(gate["path"].as_str().unwrap().starts_with(repo.to_str().unwrap()), "{gate}");
    let flashinfer = world.report()["flashinfer"].clone();
    assert_eq!((&flashinfer["editable"], &flashinfer["listed"]), (&true.into(), &true.into()));
}

#[test]
fn an_environment_without_flashinfer_is_told() {
    World::bare().fails_with("flashinfer-missing");
}

#[test]
fn an_environment_that_is_gone_is_told() {
    let mut world = World::sound();
    world.set("VIRTUAL_ENV", "/nonexistent/venv");
    world.fails_with("environment-broken");
    world.run(&["--env", "/nonexistent/venv"]).exits(2);
}

#[test]
fn the_folder_that_an_uninstall_leaves_is_told() {
    let world = World::sound();
    world.remove("flashinfer");
    world.remove("flashinfer_python");
    write(world.site().join("flashinfer/data/aot/trtllm_comm/trtllm_comm.so"), "");
    let leftover = world.fails_with("leftover-folder");
    assert_eq!(leftover["path"], world.site().join("flashinfer").display().to_string());
}

#[test]
fn two_records_of_flashinfer_are_told() {
    let world = World::sound();
    world.record("flashinfer_python", "0.6.3");
    world.fails_with("flashinfer-broken");
}

#[test]
fn a_missing_tvm_ffi_and_one_out_of_range_are_told() {
    let world = World::sound();
    world.remove("tvm_ffi");
    world.remove("apache_tvm_ffi");
    world.fails_with("tvm-ffi-missing");
    world.package("tvm_ffi", "apache_tvm_ffi", "0.1.7");
    assert!(world.fails_with("tvm-ffi-out-of-range")["hint"].as_str().unwrap().contains(">=0.1.11"));
}

#[test]
fn a_missing_torch_and_one_without_cuda_are_told() {
    let world = World::sound();
    world.torch("2.11.0+cpu", "None");
    world.fails_with("torch-without-cuda");
    world.remove("torch");
    world.fails_with("torch-missing");
}

#[test]
fn a_toolkit_of_another_major_than_torchs_is_told_and_another_minor_is_a_note() {
    let world = World::sound();
    world.torch("2.9.1+cu128", "'12.8'");
    assert!(world.fails_with("toolkit-torch-major")["message"].as_str().unwrap().contains("libcudart.so.13"));
    world.torch("2.13.0+cu132", "'13.2'");
    world.notes("toolkit-torch-minor");
}

#[test]
fn a_malformed_cuda_home_is_told() {
    let mut world = World::sound();
    world.set("CUDA_HOME", "/usr/local/cuda-12.8:/usr/local/cuda-13.0");
    assert!(world.fails_with("cuda-home-malformed")["message"].as_str().unwrap().contains("is a list"));
    let whole = toolkit::cuda_13_0().display().to_string();
    // fi-arch forgives quotes; FlashInfer does not.
    world.set("CUDA_HOME", &format!("'{whole}'"));
    assert!(world.fails_with("cuda-home-malformed")["hint"].as_str().unwrap().ends_with(&whole));
    world.set("CUDA_HOME", &whole).set("CUDA_PATH", "/nonexistent");
    world.run(&["--sm", "120"]).exits(0);
}

#[test]
fn a_toolkit_that_is_too_old_for_the_target_is_told() {
    let mut world = World::sound();
    world.fake_nvcc("12.6");
    world.fails_with("toolkit-too-old");
}

#[test]
fn a_toolkit_mixed_of_two_releases_is_told() {
    let mut world = World::sound();
    let root = world.fake_nvcc("12.9");
    symlink(toolkit::cuda_13_0().join("include"), root.join("include")).unwrap();
    assert!(world.fails_with("toolkit-mixed")["message"].as_str().unwrap().contains("headers are of CUDA 13.0"));
}

#[test]
fn a_machine_that_can_neither_load_nor_compile_the_module_is_told() {
    let mut world = World::sound();
    world.unset("CUDA_HOME");
    if Path::new("/usr/local/cuda").exists() || Path::new("/usr/bin/nvcc").exists() {
        // A toolkit of the machine cannot be hidden; then it is found.
        assert_eq!(find(&world.report()["problems"], "toolkit-missing"), None);
        return;
    }
    world.fails_with("toolkit-missing");
    let slot = world.site().join("flashinfer/data/aot/trtllm_comm/trtllm_comm.so");
    Probes::get().copy("good", &slot);
    world.notes("toolkit-missing");
}

#[test]
fn a_host_compiler_that_is_none_is_told() {
    let mut world = World::sound();
    world.set("CXX", "/nonexistent/g++");
    world.fails_with("host-compiler");
}

#[test]
fn a_driver_older_than_the_cuda_of_torch_is_told() {
    let world = World::sound();
    world.gpu("NVIDIA GeForce RTX 5090, 12.0, 570.86.10");
    assert!(world.fails_with("driver-too-old")["message"].as_str().unwrap().contains("580"));
    world.gpu("NVIDIA GeForce RTX 5090, 12.0, 580.82.07");
    let report = world.run(&[]).exits(0).json();
    assert_eq!((&report["targets"][0], &report["gpus"][0]["target"]), (&"sm_120".into(), &"sm_120".into()));
}

#[test]
fn an_nvcc_for_which_flashinfer_drops_every_target_is_told() {
    let mut world = World::with("0.6.16.post4");
    world.gpu("NVIDIA GeForce RTX 5090, 12.0, 580.82.07");
    world.fake_nvcc("12.8");
    assert!(world.fails_with("arch-set-empty")["hint"].as_str().unwrap().contains("12.0a"));
    // 0.7.4 takes 12.8 for this GPU.
    let mut world = World::sound();
    world.gpu("NVIDIA GeForce RTX 5090, 12.0, 580.82.07");
    world.fake_nvcc("12.8");
    assert_eq!(find(&world.report()["problems"], "arch-set-empty"), None);
}

#[test]
fn an_arch_list_that_ends_the_import_is_told_with_the_right_one() {
    let mut world = World::sound();
    for raw in ["120", "sm_120", "12.0;9.0a", "12.0  9.0", "12.0 ", ""] {
        world.set("FLASHINFER_CUDA_ARCH_LIST", raw);
        let problem = world.fails_with("arch-list-raises");
        assert!(problem["hint"].as_str().unwrap().contains("=\"12.0f\""), "{raw}: {problem}");
    }
    world.set("FLASHINFER_CUDA_ARCH_LIST", "12.0");
    assert_eq!(world.run(&["--sm", "120"]).exits(0).json()["arch_list"]["becomes"][0], "120f");
}

#[test]
fn an_arch_list_that_nvcc_or_the_target_cannot_use_is_told() {
    let mut world = World::sound();
    world.set("FLASHINFER_CUDA_ARCH_LIST", "12.0+PTX");
    world.fails_with("arch-list-unknown");
    world.set("FLASHINFER_CUDA_ARCH_LIST", "9.0a");
    world.fails_with("arch-list-lacks-target");
    let mut world = World::with("0.6.4");
    world.set("FLASHINFER_CUDA_ARCH_LIST", "12.0");
    world.fails_with("arch-list-bare");
}

#[test]
fn that_sglang_sets_the_arch_list_itself_is_noted() {
    let mut world = World::sound();
    world.set("FLASHINFER_CUDA_ARCH_LIST", "12.0f");
    write(world.site().join("sglang/__init__.py"), "");
    world.notes("arch-list-overwritten");
}

#[test]
fn a_switch_that_any_value_turns_is_told() {
    let mut world = World::sound();
    world.set("FLASHINFER_DISABLE_JIT", "0");
    world.fails_with("jit-disabled");
}

#[test]
fn companions_of_another_release_are_told() {
    let world = World::with("0.6.4");
    world.package("flashinfer_jit_cache", "flashinfer_jit_cache", "0.6.3+cu130");
    world.package("flashinfer_cubin", "flashinfer_cubin", "0.6.4");
    assert!(world.fails_with("companion-version")["message"].as_str().unwrap().contains("ends in an error"));
    assert_eq!(codes(&world.report()["problems"]).iter().filter(|code| *code == "companion-version").count(), 1);
    world.remove("flashinfer_jit_cache");
    world.package("flashinfer_jit_cache", "flashinfer_jit_cache", "0.6.4.post1+cu130");
    assert!(world.fails_with("companion-version")["message"].as_str().unwrap().contains("compares by prefix"));
}

#[test]
fn a_companion_for_another_cuda_is_told() {
    let world = World::with("0.6.4");
    world.package("flashinfer_jit_cache", "flashinfer_jit_cache", "0.6.4+cu129");
    world.fails_with("companion-cuda");
}

#[test]
fn runtimes_of_two_majors_are_told_where_torchs_is_not_among_them() {
    let world = World::sound();
    write(world.site().join("nvidia/cuda_runtime/lib/libcudart.so.12"), "");
    write(world.site().join("nvidia/cu13/lib/libcudart.so.13"), "");
    world.notes("several-runtimes");
    world.torch("2.7.0+cu118", "'11.8'");
    world.fails_with("several-runtimes");
}

#[test]
fn flashinfers_own_build_without_the_target_or_with_hollow_kernels_is_told() {
    let world = World::sound();
    let cached = world.cached("0.7.4", "120f");
    Probes::get().copy("good", &cached);
    assert_eq!(world.run(&["--sm", "120"]).exits(0).json()["prebuilt"][0]["origin"], "cached_ops");
    Probes::get().copy("old", &cached);
    assert_eq!(world.fails_with("cached-lacks-target")["path"], cached.display().to_string());
    Probes::get().copy("hollow", &cached);
    assert!(world.fails_with("cached-hollow")["message"].as_str().unwrap().starts_with("1 of 2 kernels"));
    // What was built for other GPUs is not looked at.
    fs::rename(cached.ancestors().nth(3).unwrap(), world.cached("0.7.4", "90a").ancestors().nth(3).unwrap()).unwrap();
    world.run(&["--sm", "120"]).exits(0);
}

#[test]
fn a_prebuilt_module_of_the_jit_cache_shadows_the_slot_in_old_releases() {
    let world = World::with("0.6.4");
    world.package("flashinfer_jit_cache", "flashinfer_jit_cache", "0.6.4+cu130");
    let cache = world.site().join("flashinfer_jit_cache/jit_cache/trtllm_comm/trtllm_comm.so");
    Probes::get().copy("old", &cache);
    Probes::get().copy("good", &world.site().join("flashinfer/data/aot/trtllm_comm/trtllm_comm.so"));
    let problem = world.fails_with("prebuilt-lacks-target");
    assert_eq!(problem["path"], cache.display().to_string());
    assert!(problem["message"].as_str().unwrap().contains("sm_90a"), "{problem}");
    world.notes("slot-ignored");
}

#[test]
fn a_prebuilt_module_in_the_slot_is_taken_blindly_by_new_releases() {
    let world = World::sound();
    world.package("flashinfer_jit_cache", "flashinfer_jit_cache", "0.7.4+cu130");
    Probes::get().copy("good", &world.site().join("flashinfer_jit_cache_sm120/jit_cache/trtllm_comm/trtllm_comm.so"));
    assert_eq!(world.run(&["--sm", "120"]).exits(0).json()["prebuilt"][0]["first"], true);
    let slot = world.site().join("flashinfer/data/aot/trtllm_comm/trtllm_comm.so");
    Probes::get().copy("old", &slot);
    assert_eq!(world.fails_with("prebuilt-lacks-target")["path"], slot.display().to_string());
    Probes::get().copy("hollow", &slot);
    world.fails_with("prebuilt-hollow");
    write(&slot, "\x7fELF\x02\x01\x01 and no more");
    world.fails_with("prebuilt-unreadable");
}

#[test]
fn a_lock_that_a_killed_build_left_is_told() {
    let world = World::sound();
    let lock = world.sandbox.path("user/.cache/torch_extensions/py311_cu130/c_dlpack/lock");
    write(&lock, "");
    world.notes("stale-lock");
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(7200);
    fs::File::options().write(true).open(&lock).unwrap().set_modified(old).unwrap();
    assert_eq!(world.fails_with("stale-lock")["path"], lock.display().to_string());
}

#[test]
fn another_release_is_weighed_by_what_it_would_change() {
    let world = World::with("0.6.4");
    let ask = |version: &str| world.run(&["--sm", "120", "--what-if", &format!("flashinfer=={version}")]);
    let newer = ask("0.6.17").exits(1).json()["what_if"].clone();
    assert_eq!(newer["edits"], Value::Array(Vec::new()));
    assert!(newer["gone"].as_array().unwrap().contains(&"gate-closed".into()), "{newer}");
    let older = ask("0.6.3").exits(1).json()["what_if"].clone();
    assert_eq!(older["new"], serde_json::json!(["defect-fp4-launch"]));
    ask("9.9.9").exits(4);
    ask("0.3.1").exits(4);
    // A candidate is weighed by its own files: those of 0.6.17rc1 hold the cures already.
    assert_eq!(ask("0.6.17rc1").exits(1).json()["what_if"]["edits"], Value::Array(Vec::new()));
    world.run(&["--what-if", "torch==2.9"]).exits(2);
}

#[test]
fn what_if_says_of_a_release_what_its_files_say() {
    for version in ["0.5.3", "0.6.4", "0.6.16.post4", "0.7.4"] {
        let world = World::with(version);
        let what_if = format!("flashinfer=={version}");
        let report = world.run(&["--sm", "120", "--what-if", &what_if]).json();
        let sorted = |ids: &Value| {
            let mut ids: Vec<_> = ids.as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect();
            ids.sort();
            ids
        };
        assert_eq!(sorted(&report["what_if"]["edits"]), sorted(&report["flashinfer"]["edits"]), "{version}");
    }
}

#[test]
fn every_code_is_explained() {
    /// Words with a dash in src/verify that are no codes.
    const OTHERS: &[&str] = &[
        "fi-arch",
        "auto-enable",
        "in-place",
        "arch-list-",
        "flashinfer-jit-cache",
        "flashinfer-cubin",
        "flashinfer-python",
        "apache-tvm-ffi",
        "no-code",
        "python-",
        "gate-closed",
    ];
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/problems.md")).unwrap();
    let explained: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/verify");
    let mut codes = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let source = fs::read_to_string(entry.path()).unwrap();
        // The reader of command lines names programs and their options, and finds no problem.
        if entry.file_name() == "command_line.rs" {
            continue;
        }
        let source = source.split("#[cfg(test)]").next().unwrap();
        for word in source.split('"').skip(1) {
            let is_word = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
            if word.contains('-') && word.split('-').all(is_word) && !OTHERS.contains(&word) {
                codes.push(word.to_owned());
            }
        }
    }
    for code in ["disabled", "required", "activated", "deterministic"].map(str::to_owned).iter().chain(&codes) {
        assert!(explained.contains(&code.as_str()), "docs/problems.md does not explain {code}");
    }
    // And nothing is explained that is never found.
    let all: String = fs::read_dir(folder).unwrap().flatten().map(|entry| fs::read_to_string(entry.path()).unwrap()).collect();
    for code in
        explained.iter().filter(|code| !code.contains("ID") && !code.starts_with("prebuilt-") && !code.starts_with("cached-"))
    {
        assert!(all.contains(&format!("\"{code}\"")), "docs/problems.md explains {code}, and nothing finds it");
    }
}
