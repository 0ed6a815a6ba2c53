//! What the overlay does to real wheels of FlashInfer, and to wheels that somebody has edited.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use fi_arch::digest::Digest;
use fi_arch::error::Result;
use fi_arch::memo::Memo;
use fi_arch::overlay::{self, Options, Overlay};
use fi_arch::sites;
use fi_arch::tables::{Module, RECIPE_FILES, Tables};

use crate::support::wheels;

const PYTHON: &str = "flashinfer/jit/comm.py";
const MULTICAST: &str = "flashinfer/comm/mnnvl.py";
const HEADER: &str = "flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh";
const FUSION: &str = "flashinfer/data/include/flashinfer/comm/trtllm_allreduce_fusion.cuh";
const MOE: &str = "flashinfer/data/include/flashinfer/comm/trtllm_moe_allreduce_fusion.cuh";
const SOURCE: &str = "flashinfer/data/csrc/trtllm_allreduce.cu";

fn module() -> &'static Module {
    Tables::load().module("trtllm_comm").unwrap()
}

fn site_packages(version: &str) -> PathBuf {
    wheels::unpacked("flashinfer-python", version)
}

fn compute_in(root: &Path, version: &str) -> Result<Overlay> {
    overlay::compute(&root.join("flashinfer"), module(), version, &Options::default())
}

/// The overlay of a release as it comes from PyPI.
fn overlay_of(version: &str) -> Overlay {
    compute_in(&site_packages(version), version).unwrap()
}

/// A copy of the files that matter, to be spoilt.
fn copy_of(version: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let from = site_packages(version);
    for path in module().files.iter().map(String::as_str).chain(RECIPE_FILES) {
        fs::create_dir_all(dir.path().join(path).parent().unwrap()).unwrap();
        fs::copy(from.join(path), dir.path().join(path)).unwrap();
    }
    dir
}

/// Replaces `old` in a file of a copy; the text must be there.
fn spoil(root: &Path, path: &str, old: &str, new: &str) {
    let text = fs::read_to_string(root.join(path)).unwrap();
    assert!(text.contains(old), "{path} has no `{old}`");
    fs::write(root.join(path), text.replacen(old, new, 1)).unwrap();
}

/// `id path sites` of each edit, with the file's name alone.
fn edits(overlay: &Overlay) -> Vec<String> {
    let name = |path: &str| path.rsplit('/').next().unwrap().to_owned();
    overlay.edits.iter().map(|edit| format!("{} {} {}", edit.id, name(&edit.path), edit.sites)).collect()
}

fn post<'o>(overlay: &'o Overlay, path: &str) -> &'o str {
    let file = overlay.files.iter().find(|file| file.path == path).unwrap_or_else(|| panic!("the overlay has no {path}"));
    std::str::from_utf8(&file.post).unwrap()
}

fn refusal(result: Result<Overlay>) -> String {
    let error = result.expect_err("it must be refused");
    assert_eq!(error.exit() as u8, 4, "{error}");
    assert!(!error.hints().is_empty(), "{error}");
    error.to_string()
}

/// Releases of every shape, few enough to be fetched by each run. `fi-arch tables check` looks at all.
const SAMPLE: [&str; 7] = ["0.5.0", "0.5.3", "0.6.3", "0.6.4", "0.6.9", "0.6.16.post4", "0.7.4"];
/// Those that need edits.
const FAULTY: [&str; 6] = ["0.5.0", "0.5.3", "0.6.3", "0.6.4", "0.6.9", "0.6.16.post4"];

#[test]
fn the_listed_digests_are_those_of_the_wheels() {
    for version in SAMPLE {
        let root = site_packages(version);
        let release = Tables::load().release(version).unwrap();
        for (path, digest) in &release.files {
            assert_eq!(Digest::of_file(&root.join(path)).unwrap(), *digest, "{version} {path}");
        }
    }
}

#[test]
fn the_defects_that_are_found_are_those_that_the_tables_state() {
    for version in SAMPLE {
        let overlay = overlay_of(version);
        let mut found: Vec<&str> = overlay.edits.iter().map(|edit| edit.id.as_str()).collect();
        found.dedup();
        let tables = Tables::load();
        let stated: Vec<&str> = tables.defects_in(tables.release(version).unwrap(), module()).collect();
        assert_eq!(found, stated, "{version}");
    }
}

#[test]
fn every_defect_of_a_release_is_found_with_its_exact_count() {
    const COMMON: [&str; 4] = [
        "gate comm.py 1",
        "hollow-kernels trtllm_allreduce.cuh 1",
        "dependency-marks trtllm_allreduce.cuh 12",
        "pointer-stride trtllm_allreduce.cu 2",
    ];
    const OLD: [&str; 3] = [
        "partial-warps trtllm_allreduce_fusion.cuh 2",
        "optional-header trtllm_allreduce_fusion.cuh 6",
        "optional-header trtllm_moe_allreduce_fusion.cuh 6",
    ];
    let cluster = |fusion: usize| {
        [
            "cluster-size trtllm_allreduce.cuh 3".to_owned(),
            format!("cluster-size trtllm_allreduce_fusion.cuh {fusion}"),
            "cluster-size trtllm_moe_allreduce_fusion.cuh 3".to_owned(),
        ]
    };
    let expected = |fusion: usize, more: &[&str]| {
        let more = more.iter().map(|s| (*s).to_owned());
        COMMON.iter().map(|s| (*s).to_owned()).chain(cluster(fusion)).chain(more).collect::<Vec<_>>()
    };
    const FP4: &str = "fp4-launch trtllm_allreduce_fusion.cuh 3";
    const MULTICAST: &str = "multicast-check mnnvl.py 3";
    let [sum, optional, moe_optional] = OLD;
    assert_eq!(edits(&overlay_of("0.5.0")), expected(3, &OLD));
    assert_eq!(edits(&overlay_of("0.5.3")), expected(3, &OLD));
    assert_eq!(edits(&overlay_of("0.6.3")), expected(3, &[FP4, sum, optional, moe_optional, MULTICAST]));
    assert_eq!(edits(&overlay_of("0.6.4")), expected(4, &[sum, optional, moe_optional, MULTICAST]));
    assert_eq!(edits(&overlay_of("0.6.9")), expected(4, &[sum, MULTICAST]));
    assert_eq!(edits(&overlay_of("0.6.16.post4")), expected(4, &[]));
}

#[test]
fn a_listed_release_gives_no_warning() {
    for version in SAMPLE {
        let overlay = overlay_of(version);
        assert!(overlay.listed, "{version}");
        assert_eq!(overlay.warnings, Vec::<String>::new(), "{version}");
    }
}

#[test]
fn a_release_that_is_right_is_left_alone() {
    let overlay = overlay_of("0.7.4");
    assert!(overlay.is_empty());
    assert!(overlay.edits.is_empty());
    assert_eq!(overlay.diff(), "");
    assert_eq!(overlay.summary(), "FlashInfer 0.7.4: nothing to patch");
}

#[test]
fn a_module_without_a_gate_has_an_empty_overlay() {
    let module = Tables::load().module("vllm_comm").unwrap();
    let package = site_packages("0.6.4").join("flashinfer");
    let overlay = overlay::compute(&package, module, "0.6.4", &Options::default()).unwrap();
    assert!(overlay.is_empty() && overlay.listed);
    let gate = sites::gate(&package, module).unwrap();
    assert_eq!(gate.majors, None);
    assert!(gate.open_for(12));
}

#[test]
fn the_gate_is_reported_with_its_line_and_majors() {
    let state = |version: &str| sites::gate(&site_packages(version).join("flashinfer"), module()).unwrap();
    let closed = state("0.6.4");
    assert_eq!(closed.majors.as_deref(), Some(&[9, 10][..]));
    assert!(closed.open_for(10) && !closed.open_for(12));
    let text = fs::read_to_string(&closed.path).unwrap();
    assert!(text.lines().nth(closed.line - 1).unwrap().contains("supported_major_versions=[9, 10]"));
    assert!(state("0.7.4").open_for(12));
}

#[test]
fn sibling_generators_that_exclude_sm12x_on_purpose_stay_as_they_are() {
    let overlay = overlay_of("0.6.16.post4");
    let before = fs::read_to_string(site_packages("0.6.16.post4").join(PYTHON)).unwrap();
    let after = post(&overlay, PYTHON);
    assert_eq!(before.matches("supported_major_versions=[9, 10]\n").count(), 3);
    assert_eq!(after.matches("supported_major_versions=[9, 10]\n").count(), 2);
    let changed: Vec<_> = before.lines().zip(after.lines()).filter(|(a, b)| a != b).collect();
    assert_eq!(changed, [("        supported_major_versions=[9, 10]", "        supported_major_versions=[9, 10, 12]")]);
    let (_, behind) = after.split_once("def gen_trtllm_comm_module()").unwrap();
    assert!(behind[..behind.find("\ndef ").unwrap()].contains("[9, 10, 12]"));
}

#[test]
fn the_guards_lose_their_upper_bound_and_nothing_else() {
    let overlay = overlay_of("0.6.4");
    let file = overlay.files.iter().find(|file| file.path == HEADER).unwrap();
    let before = String::from_utf8(file.original.clone()).unwrap();
    let after = String::from_utf8(file.post.clone()).unwrap();
    assert_eq!(before.matches("< 1200").count(), 13);
    assert_eq!(after.matches("1200").count(), 0);
    let guard = "#if (defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900))\n";
    assert_eq!(after.matches(guard).count(), 13);
    assert_eq!(file.edits, ["hollow-kernels", "dependency-marks", "cluster-size"]);
}

#[test]
fn multicast_is_asked_for_only_where_it_is_enabled() {
    let overlay = overlay_of("0.6.9");
    let file = overlay.files.iter().find(|file| file.path == MULTICAST).unwrap();
    let before = String::from_utf8(file.original.clone()).unwrap();
    let after = post(&overlay, MULTICAST);
    let new: Vec<&str> = after.lines().filter(|line| !before.contains(line)).map(str::trim).collect();
    assert_eq!(
        new,
        [
            "self._enable_multicast = enable_multicast",
            "if enable_multicast and multicast_supported == 0:",
            ") if self._enable_multicast else alloc_granularity",
        ]
    );
    // Python takes it, and the line that is new stands in the block of the one before it.
    assert!(after.contains("\n        self.device_idx = device_idx\n        self._enable_multicast = enable_multicast\n"));
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("mnnvl.py"), after).unwrap();
    let output = Command::new("python3").args(["-m", "py_compile", "mnnvl.py"]).current_dir(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_pointers_are_written_at_the_stride_of_the_kernels() {
    let overlay = overlay_of("0.5.3");
    let source = post(&overlay, SOURCE);
    assert!(!source.contains("i + tp_size"));
    assert!(source.contains("[i + MAX_RANKS_PER_NODE]") && source.contains("[i + MAX_RANKS_PER_NODE * 2]"));
}

#[test]
fn no_launcher_takes_a_cluster_of_eight_for_granted() {
    for version in FAULTY {
        let overlay = overlay_of(version);
        for path in [HEADER, FUSION, MOE] {
            let text = post(&overlay, path);
            assert_eq!(text.matches("#include <fi_arch/cluster_size.cuh>").count(), 1, "{version} {path}");
            assert!(!text.contains("int cluster_size = 8;"), "{version} {path}");
            assert!(!text.contains("candidate_cluster_size > 8"), "{version} {path}");
        }
        assert_eq!(post(&overlay, MOE).matches("fi_arch::cluster_size_pow2(").count(), 2);
    }
}

#[test]
fn an_overlay_bears_its_own_headers_exactly_when_they_are_included() {
    let added = |version: &str| {
        let overlay = overlay_of(version);
        let ours: Vec<_> = overlay.files.into_iter().filter(|file| file.pre.is_none()).collect();
        ours.into_iter().map(|file| (file.path, file.edits)).collect::<Vec<_>>()
    };
    let cluster = ("flashinfer/data/include/fi_arch/cluster_size.cuh".to_owned(), vec!["cluster-size".to_owned()]);
    let sum = ("flashinfer/data/include/fi_arch/block_sum.cuh".to_owned(), vec!["partial-warps".to_owned()]);
    assert_eq!(added("0.6.4"), [sum.clone(), cluster.clone()]);
    assert_eq!(added("0.6.9"), [sum, cluster.clone()]);
    assert_eq!(added("0.6.16.post4"), [cluster]);
}

#[test]
fn the_diff_gives_back_the_original_when_it_is_reversed() {
    for version in FAULTY {
        let overlay = overlay_of(version);
        let dir = tempfile::tempdir().unwrap();
        for file in &overlay.files {
            fs::create_dir_all(dir.path().join(&file.path).parent().unwrap()).unwrap();
            fs::write(dir.path().join(&file.path), &file.post).unwrap();
        }
        fs::write(dir.path().join("overlay.diff"), overlay.diff()).unwrap();
        let output = Command::new("git")
            .args(["apply", "--reverse", "overlay.diff"])
            .current_dir(dir.path())
            // Not a part of whatever repository lies around the folder of temporary files.
            .env("GIT_CEILING_DIRECTORIES", dir.path().parent().unwrap())
            .output()
            .expect("git starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for file in &overlay.files {
            let path = dir.path().join(&file.path);
            match file.pre {
                Some(pre) => assert_eq!(Digest::of_file(&path).unwrap(), pre, "{version} {}", file.path),
                None => assert!(!path.exists(), "{version} {}", file.path),
            }
        }
        for edit in &overlay.edits {
            assert!(overlay.diff().contains(&format!("# {}: {}", edit.id, edit.reason)), "{}", edit.id);
        }
    }
}

#[test]
fn the_overlay_is_written_as_the_compiler_wants_it() {
    let overlay = overlay_of("0.6.4");
    let dir = tempfile::tempdir().unwrap();
    overlay.write_to(dir.path()).unwrap();
    for path in ["include/flashinfer/comm/trtllm_allreduce.cuh", "csrc/trtllm_allreduce.cu", "include/fi_arch/block_sum.cuh"] {
        assert!(dir.path().join(path).is_file(), "{path}");
    }
    // Sources without an edit come from the installed FlashInfer; Python is no business of the compiler.
    assert_eq!(fs::read_dir(dir.path().join("csrc")).unwrap().count(), 1);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn a_gate_that_is_written_otherwise_is_opened_in_its_own_style() {
    let copy = copy_of("0.6.4");
    let gate = "supported_major_versions=[9, 10]";
    spoil(copy.path(), PYTHON, gate, "supported_major_versions = [ 9,   # Hopper\n            10,  # Blackwell\n        ]");
    let overlay = compute_in(copy.path(), "0.6.4").unwrap();
    assert!(post(&overlay, PYTHON).contains("[ 9,   # Hopper\n            10, 12,  # Blackwell\n        ]"));
    assert!(!overlay.listed);
    assert!(overlay.warnings[0].starts_with("unlisted: ") && overlay.warnings[0].contains(PYTHON), "{:?}", overlay.warnings);
}

#[test]
fn a_gate_opened_by_hand_is_left_and_the_rest_is_still_cured() {
    let copy = copy_of("0.6.4");
    spoil(copy.path(), PYTHON, "[9, 10]", "[9, 10, 12]");
    let overlay = compute_in(copy.path(), "0.6.4").unwrap();
    assert!(!overlay.files.iter().any(|file| file.path == PYTHON));
    assert_eq!(overlay.edits.len(), overlay_of("0.6.4").edits.len() - 1);
}

#[test]
fn one_thing_out_of_place_refuses_the_whole_overlay() {
    let guard = "(__CUDA_ARCH__ >= 900) && (__CUDA_ARCH__ < 1200)";
    let cases = [
        // A dependency guard removed, or its text changed: eleven are not twelve.
        (HEADER, guard.to_owned(), "(__CUDA_ARCH__ >= 900)".to_owned(), "expected 12 × `__CUDA_ARCH__ < 1200`"),
        (HEADER, guard.to_owned(), format!("{guard} && 1 /* {guard} */ && {guard}"), "expected 12"),
        // An anchor twice.
        (SOURCE, "[i + tp_size * 2]".to_owned(), "[i + tp_size * 2 + 0 * (i + tp_size)]".to_owned(), "`i + tp_size`, found 3"),
        (MOE, "int cluster_size = 8;".to_owned(), "int cluster_size = 8; { int cluster_size = 8; }".to_owned(), "found 3"),
        // An anchor gone.
        (FUSION, "cluster_size = 8;".to_owned(), "cluster_size = 4;".to_owned(), "expected 1 × `(SM >= 90) { cluster_size = 8;`"),
        (FUSION, "std::nullopt".to_owned(), "{}".to_owned(), "expected 2 × `std::nullopt`, found 1"),
        (FUSION, "utils::blockReduceSumV2".to_owned(), "::flashinfer::blockReduceSumV2".to_owned(), "partial-warps"),
        // The same in Python: a check that is written otherwise, and one more of its kind.
        (
            MULTICAST,
            "multicast_supported == 0".to_owned(),
            "multicast_supported < 1".to_owned(),
            "`multicast_supported == 0` in SymmDeviceMemory.__init__, found 0",
        ),
        (
            MULTICAST,
            "self.device_idx = device_idx".to_owned(),
            "self.device_idx = device_idx; self.device_idx = device_idx".to_owned(),
            "found 2",
        ),
        (HEADER, "ping * MAX_RANKS_PER_NODE".to_owned(), "ping * RanksPerNode".to_owned(), "pointer-stride"),
        (
            PYTHON,
            "supported_major_versions=[9, 10]".to_owned(),
            "supported_major_versions=MAJORS".to_owned(),
            "a list of integers",
        ),
        (PYTHON, "supported_major_versions=[9, 10]".to_owned(), String::new(), "expected 1 call"),
        (PYTHON, "def gen_trtllm_comm_module".to_owned(), "def gen_trtllm".to_owned(), "expected 1 function"),
    ];
    for (path, old, new, why) in cases {
        let copy = copy_of("0.6.4");
        spoil(copy.path(), path, &old, &new);
        let text = refusal(compute_in(copy.path(), "0.6.4"));
        assert!(text.contains(why), "{path}, `{old}` → `{new}`:\n{text}");
    }
}

#[test]
fn the_hollow_kernel_is_told_from_the_other_guards_by_its_function() {
    // Somebody has freed the body of the one kernel by hand: the twelve other guards are still faulty.
    let copy = copy_of("0.6.4");
    let text = fs::read_to_string(copy.path().join(HEADER)).unwrap();
    let (head, tail) = text.split_once("lamport_style_one_shot_all_reduce_norm_kernel(").unwrap();
    let tail = tail.replacen(" && (__CUDA_ARCH__ < 1200)", "", 1);
    let moved = format!("\n\n\n{head}lamport_style_one_shot_all_reduce_norm_kernel({tail}");
    fs::write(copy.path().join(HEADER), moved).unwrap();
    let overlay = compute_in(copy.path(), "0.6.4").unwrap();
    let of_header: Vec<_> = edits(&overlay).into_iter().filter(|edit| edit.contains("trtllm_allreduce.cuh")).collect();
    assert_eq!(of_header, ["dependency-marks trtllm_allreduce.cuh 12", "cluster-size trtllm_allreduce.cuh 3"]);
}

#[test]
fn an_unlisted_release_with_every_anchor_in_place_is_handled_with_a_warning() {
    let copy = copy_of("0.6.4");
    spoil(copy.path(), HEADER, "#include <tuple>", "// a release candidate\n#include <tuple>");
    spoil(copy.path(), "flashinfer/jit/core.py", "import os", "import os  # another");
    let overlay = compute_in(copy.path(), "0.6.5.dev20260301").unwrap();
    assert!(!overlay.listed);
    assert_eq!(edits(&overlay), edits(&overlay_of("0.6.4")));
    assert_eq!(overlay.warnings.len(), 2, "{:?}", overlay.warnings);
    assert!(overlay.warnings.iter().all(|warning| warning.starts_with("unlisted: ")), "{:?}", overlay.warnings);
    assert!(overlay.warnings[1].contains("recipe `plain`"), "{:?}", overlay.warnings);
    // The recipe of the nearest older release; of the oldest, for one that is older than all.
    let recipe = |version: &str| Tables::load().recipe_for(&copy.path().join("flashinfer"), version);
    assert_eq!(recipe("0.6.17.post1").unwrap().id, "vendored-cccl");
    assert_eq!(recipe("0.6.11.post9").unwrap().id, "vendored-cccl-uncompressed");
    assert_eq!(recipe("0.4.0rc1").unwrap().id, "plain");
    assert_eq!(recipe("nightly").unwrap_err().exit() as u8, 4);
}

#[test]
fn the_digests_decide_whatever_the_version_says() {
    let overlay = compute_in(&site_packages("0.6.4"), "0.6.99.dev1").unwrap();
    assert!(overlay.listed);
    assert_eq!(overlay.warnings, Vec::<String>::new());
}

#[test]
fn files_that_bear_our_edits_are_never_edited_twice() {
    let copy = copy_of("0.6.4");
    for file in overlay_of("0.6.4").files {
        fs::create_dir_all(copy.path().join(&file.path).parent().unwrap()).unwrap();
        fs::write(copy.path().join(&file.path), &file.post).unwrap();
    }
    let text = refusal(compute_in(copy.path(), "0.6.4"));
    assert!(text.contains("bears fi-arch's edits already") && text.contains("install that FlashInfer again"), "{text}");
}

#[test]
fn an_old_layout_is_refused_by_its_name_or_by_its_missing_files() {
    let empty = tempfile::tempdir().unwrap();
    assert!(refusal(compute_in(empty.path(), "0.2.5")).contains("another layout (torch bindings)"));
    assert!(refusal(compute_in(empty.path(), "0.6.4")).contains("comm.py"));
}

#[test]
fn gate_only_edits_nothing_but_the_gate_and_says_so() {
    let package = site_packages("0.6.4").join("flashinfer");
    let only = ["gate".to_owned()];
    let overlay = overlay::compute(&package, module(), "0.6.4", &Options { only: Some(&only), ..Default::default() }).unwrap();
    assert_eq!(edits(&overlay), ["gate comm.py 1"]);
    assert_eq!(overlay.files.len(), 1);
    assert!(overlay.warnings[0].starts_with("partial: "));
}

#[test]
fn the_same_files_give_the_same_overlay() {
    let copy = copy_of("0.6.4");
    let (here, there) = (overlay_of("0.6.4"), compute_in(copy.path(), "0.6.4").unwrap());
    assert_eq!(here.digest_fields(), there.digest_fields());
    assert!(here.files.is_sorted_by_key(|file| &file.path));
}

#[test]
fn a_remembered_overlay_is_the_computed_one_until_a_byte_changes() {
    let copy = copy_of("0.6.4");
    let package = copy.path().join("flashinfer");
    // What was written a moment ago is not remembered.
    std::thread::sleep(std::time::Duration::from_millis(2100));
    let home = tempfile::tempdir().unwrap();
    let remembered = |memo: &Memo| overlay::remembered(&package, module(), "0.6.4", memo);
    let computed = compute_in(copy.path(), "0.6.4").unwrap();
    let same = |overlay: &Overlay| {
        assert_eq!((&overlay.files, &overlay.edits), (&computed.files, &computed.edits));
        assert_eq!((&overlay.warnings, overlay.listed), (&computed.warnings, computed.listed));
    };
    let memo = Memo::load(home.path());
    same(&remembered(&memo).unwrap());
    memo.save();
    let text = fs::read_to_string(home.path().join("memo.json")).unwrap();
    assert!(text.contains("hollow-kernels"), "it is in the memory");
    // The memory alone answers: what it says of an edit comes back.
    fs::write(home.path().join("memo.json"), text.replace("hollow-kernels", "remembered-here")).unwrap();
    let again = remembered(&Memo::load(home.path())).unwrap();
    assert!(again.edits.iter().any(|edit| edit.id == "remembered-here"));
    fs::write(home.path().join("memo.json"), text).unwrap();
    same(&remembered(&Memo::load(home.path())).unwrap());

    let header = copy.path().join(HEADER);
    let changed = fs::read_to_string(&header).unwrap().replacen("__CUDA_ARCH__ < 1200", "__CUDA_ARCH__ < 1201", 1);
    fs::write(&header, changed).unwrap();
    assert!(refusal(remembered(&Memo::load(home.path()))).contains("expected"));
}
