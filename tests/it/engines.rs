//! What the overlays do to the engines' own gates in real wheels, and in wheels that somebody has edited. The edited expressions
//! are evaluated in Python, before and after (tests/engines).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use fi_arch::digest::Digest;
use fi_arch::error::Result;
use fi_arch::overlay::{self, EngineOptions, Overlay};
use fi_arch::tables::{self, Engine, NoteKind};
use rayon::prelude::*;
use similar::{ChangeTag, TextDiff};

use crate::support::wheels;

const COMMUNICATOR: &str = "sglang/srt/layers/communicator.py";
const ADD_NORM: &str = "sglang/srt/layers/layer_boundary/residual/add_norm.py";
const NORM: &str = "sglang/srt/layers/layernorm.py";
const FUSION: &str = "sglang/srt/layers/flashinfer_comm_fusion.py";
const SERVER: &str = "sglang/srt/server_args.py";
const OVERRIDES: &str = "sglang/srt/arg_groups/overrides.py";
const FILES: [&str; 6] = [COMMUNICATOR, ADD_NORM, NORM, FUSION, SERVER, OVERRIDES];

/// Releases of every form of the predicate, few enough to be fetched by each run.
const SAMPLE: [&str; 7] = ["0.5.4", "0.5.7", "0.5.9", "0.5.10.post1", "0.5.14", "0.5.18", "0.5.23"];

fn sglang() -> &'static Engine {
    tables::engine("sglang").unwrap()
}

/// The folder that holds `sglang/` of a release, as it comes from PyPI.
fn released(version: &str) -> PathBuf {
    wheels::members("sglang", version, &FILES)
}

fn compute_in(root: &Path, version: &str, auto_enable: bool) -> Result<Overlay> {
    overlay::engine(&root.join("sglang"), sglang(), version, &EngineOptions { auto_enable })
}

fn overlay_of(version: &str) -> Overlay {
    compute_in(&released(version), version, false).unwrap()
}

/// A copy of a release's files, to be spoilt.
fn copy_of(version: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for path in FILES.iter().filter(|path| released(version).join(path).exists()) {
        fs::create_dir_all(dir.path().join(path).parent().unwrap()).unwrap();
        fs::copy(released(version).join(path), dir.path().join(path)).unwrap();
    }
    dir
}

/// The file that holds a release's predicate.
fn predicate_file(root: &Path) -> PathBuf {
    let old = root.join(COMMUNICATOR);
    if old.exists() { old } else { root.join(ADD_NORM) }
}

/// Replaces `old` in a file; the text must be there.
fn spoil(path: &Path, old: &str, new: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(old), "{} has no `{old}`", path.display());
    fs::write(path, text.replacen(old, new, 1)).unwrap();
}

/// `id file sites` of each edit.
fn edits(overlay: &Overlay) -> Vec<String> {
    let name = |path: &str| path.rsplit('/').next().unwrap().trim_end_matches(".py").to_owned();
    overlay.edits.iter().map(|edit| format!("{} {} {}", edit.id, name(&edit.path), edit.sites)).collect()
}

/// The folder of the post-images.
fn written(overlay: &Overlay) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in &overlay.files {
        let path = dir.path().join(&file.path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, &file.post).unwrap();
    }
    dir
}

/// Evaluates the files in `before` and the overlay's in Python; returns how many cases were evaluated, by gate.
fn evaluate(script: &str, before: &Path, overlay: &Overlay, more: &[&str]) -> String {
    let after = written(overlay);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/engines").join(script);
    let mut command = Command::new("python3");
    command.arg("-B").arg(script).arg(before).arg(after.path()).args(more);
    let output = command.output().expect("python3 starts");
    assert!(output.status.success(), "{}: {}", before.display(), String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// How many cases must have been evaluated for a release, by gate: a gate whose function was not found would have none.
fn evaluated(report: &str, gates: &[&str]) {
    let cases: BTreeMap<String, usize> = serde_json::from_str(report).unwrap();
    let expected: Vec<&str> = ["predicate", "sum", "fallback", "workspace"].iter().chain(gates).copied().collect();
    for gate in &expected {
        assert!(cases.get(*gate).is_some_and(|cases| *cases > 20), "{gate}: {report}");
    }
    assert_eq!(cases.len(), expected.len(), "{report}");
}

/// What a release has beyond the gates that all have.
fn further_gates(version: &str) -> &'static [&'static str] {
    match version {
        "0.5.14" => &["backend", "preflight"],
        "0.5.18" | "0.5.23" => &["backend", "preflight", "plain-all-reduce"],
        _ => &[],
    }
}

fn refusal(result: Result<Overlay>) -> String {
    let error = result.expect_err("it must be refused");
    assert_eq!(error.exit() as u8, 4, "{error}");
    assert!(!error.hints().is_empty(), "{error}");
    error.to_string()
}

#[test]
fn every_gate_of_a_release_is_found_with_its_exact_count() {
    let old = ["predicate communicator 3", "fallback layernorm 1", "workspace flashinfer_comm_fusion 1"].map(str::to_owned);
    let with = |more: &[&str]| {
        let more = more.iter().map(|gate| format!("{gate} flashinfer_comm_fusion 1"));
        old.iter().cloned().chain(more).collect::<Vec<_>>()
    };
    for version in SAMPLE {
        let mut expected = with(further_gates(version));
        if version == "0.5.23" {
            // The fallback is cured there, and both halves ask one predicate.
            expected.remove(1);
            expected[0] = "predicate add_norm 2".to_owned();
        }
        let overlay = overlay_of(version);
        assert_eq!(edits(&overlay), expected, "{version}");
        assert!(overlay.listed && overlay.warnings.is_empty(), "{version}: {:?}", overlay.warnings);
    }
}

#[test]
fn the_edited_expressions_decide_as_they_must_on_every_gpu() {
    SAMPLE.par_iter().for_each(|version| {
        let report = evaluate("sglang_gates.py", &released(version), &overlay_of(version), &[]);
        evaluated(&report, further_gates(version));
    });
}

#[test]
fn an_edit_that_does_less_or_more_is_seen_by_the_evaluation() {
    // The files of 0.5.9 with one half of an edit each.
    let overlay = overlay_of("0.5.9");
    let wrong = [
        (NORM, "x = _fi_arch_all_reduce(x)", "pass"),
        (NORM, "post_residual_addition = None\n\n", "pass\n\n"),
        (COMMUNICATOR, " or _fi_arch_admits())", ")"),
        (COMMUNICATOR, "_fi_arch_admits(batch_size)", "_fi_arch_admits()"),
        (COMMUNICATOR, "_fi_arch_admits(batch_size, self.input_layernorm)", "_fi_arch_admits(batch_size)"),
        (COMMUNICATOR, "return _fi_arch_shim.admits(tokens, ranks)", "return True"),
        (COMMUNICATOR, "except ImportError:\n    _fi_arch_shim = None", "except ZeroDivisionError:\n    pass"),
        (COMMUNICATOR, "torch.distributed.get_world_size() != ranks", "False"),
        (FUSION, "return _fi_arch_shim.workspace_tokens(tokens)", "return tokens"),
        (FUSION, "if max_token_num < 1:", "if False:"),
        (FUSION, "    _fi_arch_shim.admits()\n", "    pass\n"),
    ];
    wrong.par_iter().for_each(|(path, right, other)| {
        let mut spoilt = overlay.clone();
        let file = spoilt.files.iter_mut().find(|file| file.path == *path).unwrap();
        let text = String::from_utf8(file.post.clone()).unwrap();
        assert!(text.contains(right), "{path} has no `{right}`");
        file.post = text.replacen(right, other, 1).into_bytes();
        let after = written(&spoilt);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/engines/sglang_gates.py");
        let mut command = Command::new("python3");
        command.arg("-B").arg(script).arg(released("0.5.9")).arg(after.path()).arg("--few");
        let output = command.output().expect("python3 starts");
        assert!(!output.status.success(), "{path}: `{right}` may as well be `{other}`");
    });
}

#[test]
fn no_line_moves_and_no_more_than_the_gates_change() {
    for version in SAMPLE {
        let overlay = overlay_of(version);
        let (mut removed, mut added) = (0, 0);
        for file in &overlay.files {
            let (old, new) = (String::from_utf8_lossy(&file.original), String::from_utf8_lossy(&file.post));
            // What is appended behind the last line is our helper, or nothing.
            let end = new.find("\n\n\n# fi-arch: what the edit").map_or(new.len(), |at| at + 1);
            assert_eq!(new[end..].is_empty(), file.path == NORM, "{version} {}", file.path);
            assert!(new[..end].contains("_fi_arch_"), "{version} {}: the edits call nothing", file.path);
            let diff = TextDiff::from_lines(&*old, &new[..end]);
            for change in diff.iter_all_changes() {
                match change.tag() {
                    ChangeTag::Delete => removed += 1,
                    ChangeTag::Insert => added += 1,
                    ChangeTag::Equal => {}
                }
            }
        }
        // An expression that is edited changes a line; a statement of ours adds lines.
        let (expressions, statements) = match version {
            "0.5.4" | "0.5.7" => (3, 3 + 3),
            "0.5.9" => (3, 4 + 3),
            "0.5.10.post1" => (3, 8 + 3),
            "0.5.14" => (5, 8 + 3),
            "0.5.18" => (5, 8 + 3 + 2),
            "0.5.23" => (4, 3 + 2),
            other => panic!("{other}"),
        };
        assert_eq!((removed, added), (expressions, expressions + statements), "{version}\n{}", overlay.diff());
    }
}

#[test]
fn the_original_is_kept_byte_for_byte() {
    for version in SAMPLE {
        let root = copy_of(version);
        let overlay = compute_in(root.path(), version, false).unwrap();
        for file in &overlay.files {
            let path = root.path().join(&file.path);
            let before = fs::read(&path).unwrap();
            assert_eq!((&file.original, file.pre), (&before, Some(Digest::of(&before))), "{version} {}", file.path);
            fs::write(&path, &file.post).unwrap();
            fs::write(&path, &file.original).unwrap();
            assert_eq!(
                fs::read(&path).unwrap(),
                fs::read(released(version).join(&file.path)).unwrap(),
                "{version} {}",
                file.path
            );
        }
        // The same again: nothing is left of the first time.
        assert_eq!(compute_in(root.path(), version, false).unwrap().files, overlay.files, "{version}");
    }
}

#[test]
fn a_file_that_bears_our_edits_is_refused_whichever_it_is() {
    for version in SAMPLE {
        for file in overlay_of(version).files {
            let root = copy_of(version);
            fs::write(root.path().join(&file.path), &file.post).unwrap();
            let message = refusal(compute_in(root.path(), version, false));
            assert!(message.contains("bears fi-arch's edits already") && message.contains(&file.path), "{message}");
        }
    }
}

/// The pair of GPUs that a release's predicate asks for, as it is written there.
fn pair(root: &Path) -> &'static str {
    let text = fs::read_to_string(predicate_file(root)).unwrap();
    let found = ["(_is_sm90_supported or _is_sm100_supported)", "(_is_sm100_supported or _is_sm90_supported)"];
    found.into_iter().find(|pair| text.contains(pair)).unwrap()
}

#[test]
fn small_foreign_edits_are_handled_and_mean_the_same() {
    let changed = |version: &str, which: usize| {
        let root = copy_of(version);
        let file = predicate_file(root.path());
        let pair = pair(root.path());
        match which {
            // A comment inside the expression.
            0 => spoil(&file, pair, &pair.replace(" or ", "  # ours\n        or ")),
            // Other spaces.
            1 => {
                spoil(&file, pair, &pair.replace(" or ", "   or   ").replace('(', "(  ").replace(')', " )"));
                let text = fs::read_to_string(&file).unwrap();
                fs::write(
                    &file,
                    text.replace("batch_size <= FUSE_ALLREDUCE_MAX_BATCH_SIZE", "batch_size<=FUSE_ALLREDUCE_MAX_BATCH_SIZE"),
                )
                .unwrap();
                let fusion = root.path().join(FUSION);
                spoil(&fusion, "    if world_size <= 1:\n        return False", "    if world_size<=1: return False  # one");
            }
            // The atoms swapped.
            2 => {
                let (one, two) = pair.trim_matches(['(', ')']).split_once(" or ").unwrap();
                spoil(&file, pair, &format!("({two} or {one})"));
            }
            // A third GPU that the user has let in: the policy still has its say.
            _ => spoil(&file, pair, &pair.replace(')', " or (torch is None))")),
        }
        root
    };
    let all: Vec<(&str, usize)> = SAMPLE.iter().flat_map(|version| (0..4).map(move |which| (*version, which))).collect();
    all.par_iter().for_each(|(version, which)| {
        let root = changed(version, *which);
        let overlay = compute_in(root.path(), version, false).unwrap();
        assert_eq!(edits(&overlay), edits(&overlay_of(version)), "{version}");
        evaluated(&evaluate("sglang_gates.py", root.path(), &overlay, &["--few"]), further_gates(version));
    });
}

#[test]
fn a_place_that_is_not_as_it_was_is_refused_by_name_and_nothing_is_half_done() {
    for version in SAMPLE {
        let pair = pair(&released(version));
        let atom = "_is_sm90_supported";
        let predicate: [(&str, &str); 5] = [
            (pair, "True"),
            (pair, "_is_sm90_supported"),
            (pair, &pair.replace(" or ", " and ")),
            (pair, &pair.replace(" or ", " or (torch is None) or ")),
            // A second place of the same kind.
            (pair, &format!("{pair} and {pair}")),
        ];
        for (old, new) in predicate {
            let root = copy_of(version);
            spoil(&predicate_file(root.path()), old, new);
            let message = refusal(compute_in(root.path(), version, false));
            assert!(message.contains("`predicate` is nowhere as fi-arch knows it") && message.contains(atom), "{message}");
        }
        let mut others = vec![
            (FUSION, "if world_size <= 1:", "if world_size < 2:", "workspace"),
            (NORM, "if fused_result[0] is not None:", "if fused_result[1] is not None:", "fallback"),
        ];
        if further_gates(version).contains(&"backend") {
            let platform = fs::read_to_string(released(version).join(FUSION)).unwrap().contains("get_platform().is_sm90 or");
            let (old, new) = match platform {
                true => {
                    ("get_platform().is_sm90 or get_platform().is_sm100", "get_platform().is_sm90 and get_platform().is_sm100")
                }
                false => ("is_sm90_supported() or is_sm100_supported()", "is_sm90_supported() and is_sm100_supported()"),
            };
            others.push((FUSION, old, new, "backend"));
            others.push((
                FUSION,
                "ceil_align(allocation_size, mc_granularity)",
                "ceil_align(allocation_size, 2 * mc_granularity)",
                "preflight",
            ));
        }
        if further_gates(version).contains(&"plain-all-reduce") {
            others.push((
                FUSION,
                "token_num, hidden_dim = input_.shape",
                "token_num, hidden_dim = input_.size()",
                "plain-all-reduce",
            ));
        }
        for (path, old, new, gate) in others {
            let root = copy_of(version);
            spoil(&root.path().join(path), old, new);
            let message = refusal(compute_in(root.path(), version, false));
            assert!(message.contains(&format!("`{gate}` is nowhere")) && message.contains(path), "{message}");
        }
    }
}

#[test]
fn a_release_without_one_of_its_files_is_refused() {
    for version in SAMPLE {
        for path in [COMMUNICATOR, ADD_NORM, NORM, FUSION] {
            let root = copy_of(version);
            if fs::remove_file(root.path().join(path)).is_ok() {
                let message = refusal(compute_in(root.path(), version, false));
                assert!(message.contains("it has no ") && message.contains(path), "{message}");
            }
        }
    }
}

#[test]
fn a_file_that_is_no_python_is_refused() {
    let root = copy_of("0.5.9");
    fs::write(root.path().join(COMMUNICATOR), b"\x80\x00((((").unwrap();
    assert!(refusal(compute_in(root.path(), "0.5.9", false)).contains("`predicate` is nowhere"));
}

#[test]
fn a_number_that_is_not_listed_is_handled_by_its_content_and_says_so() {
    for version in ["0.5.24", "0.5.9.dev1203+g1a2b3c4", "nightly"] {
        let overlay = compute_in(&released("0.5.23"), version, false).unwrap();
        assert_eq!(edits(&overlay), edits(&overlay_of("0.5.23")));
        assert!(!overlay.listed && overlay.warnings[0].starts_with("unlisted: SGLang"), "{:?}", overlay.warnings);
    }
}

#[test]
fn the_server_switches_it_on_by_itself_only_where_that_was_asked_for() {
    let asked = |version: &str| compute_in(&released(version), version, true);
    ["0.5.7", "0.5.9", "0.5.10.post1", "0.5.14", "0.5.18", "0.5.23"].par_iter().for_each(|version| {
        let overlay = asked(version).unwrap();
        // 0.5.7 does it on SM 12.x already, which is what ended its servers.
        let edited = overlay.edits.iter().any(|edit| edit.id == "auto-enable");
        assert_eq!(edited, *version != "0.5.7", "{version}");
        assert!(overlay_of(version).edits.iter().all(|edit| edit.id != "auto-enable"), "{version}");
        let gates: Vec<&str> = further_gates(version).iter().copied().chain(["auto-enable"]).collect();
        evaluated(&evaluate("sglang_gates.py", &released(version), &overlay, &["--auto-enable"]), &gates);
    });
    // There the same condition chooses the attention's backend too.
    let message = refusal(asked("0.5.4"));
    assert!(message.contains("`auto-enable` is nowhere") && message.contains("leave --auto-enable out"), "{message}");
}

#[test]
fn one_shot_is_the_policys_choice_in_every_form_of_flashinfer() {
    let path = "flashinfer/comm/trtllm_ar.py";
    let evaluate_in = |root: &Path, version: &str| {
        let overlay =
            overlay::engine(&root.join("flashinfer"), tables::policy_edits(), version, &EngineOptions::default()).unwrap();
        assert_eq!(edits(&overlay), ["oneshot-limit trtllm_ar 1"], "{version}");
        let cases: usize = evaluate("oneshot.py", root, &overlay, &[]).parse().unwrap();
        assert!(cases > 1000, "{version}: {cases}");
    };
    ["0.5.0", "0.5.3", "0.6.3", "0.6.9", "0.6.16.post4", "0.7.4"].par_iter().for_each(|version| {
        evaluate_in(&wheels::unpacked("flashinfer-python", version), version);
    });
    // 0.4.x has no wheel: its form, made of the oldest wheel there is.
    let root = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(wheels::unpacked("flashinfer-python", "0.5.0").join(path)).unwrap();
    let choice = text.find("_should_use_oneshot(\n            token_num").expect("the choice");
    let end = choice + text[choice..].find(')').unwrap() + 1;
    let table = text.find("def _should_use_oneshot(").expect("the rule");
    let next = table + text[table..].find("\n\n\ndef ").unwrap();
    let text = [&text[..table], &text[next..choice], "token_num <= 128", &text[end..]].concat();
    fs::create_dir_all(root.path().join("flashinfer/comm")).unwrap();
    fs::write(root.path().join(path), text).unwrap();
    evaluate_in(root.path(), "0.4.1");
}

#[test]
fn the_policys_edit_belongs_to_activation_and_to_no_build() {
    let module = tables::Tables::load().module("trtllm_comm").unwrap();
    let options = |serve, policy| overlay::Options { serve, policy, ..Default::default() };
    let compute = |version: &str, options| {
        overlay::compute(&wheels::unpacked("flashinfer-python", version).join("flashinfer"), module, version, &options).unwrap()
    };
    let has = |overlay: &Overlay| overlay.files.iter().any(|file| file.path == "flashinfer/comm/trtllm_ar.py");
    for version in ["0.5.3", "0.6.3", "0.6.16.post4"] {
        let built = compute(version, options(false, false));
        let served = compute(version, options(true, false));
        assert!(!has(&built) && has(&served), "{version}");
        // What enters a key are the files below `data`.
        let data =
            |overlay: &Overlay| overlay.files.iter().filter(|file| file.data_path().is_some()).cloned().collect::<Vec<_>>();
        assert_eq!(data(&built), data(&served), "{version}");
        assert!(served.files.is_sorted_by(|one, next| one.path < next.path), "{version}");
    }
    // A release that is right is left alone, but for an engine that is opened over it.
    assert!(compute("0.7.4", options(true, false)).is_empty());
    let over = compute("0.7.4", options(true, true));
    assert_eq!(over.files.iter().map(|file| file.path.as_str()).collect::<Vec<_>>(), ["flashinfer/comm/trtllm_ar.py"]);
}

#[test]
fn vllm_needs_no_edit_and_its_user_is_told_what_to_give() {
    let vllm = tables::engine("vllm").unwrap();
    let none = overlay::engine(Path::new("/nowhere/vllm"), vllm, "0.16.0", &EngineOptions::default()).unwrap();
    assert!(none.is_empty() && none.warnings.is_empty());
    let flags = |version: &str| vllm.advice(version).map(|advice| (advice.flags.join(" "), advice.env.join(" ")));
    assert!(flags("0.11.0").unwrap().0.contains("enable_fi_allreduce_fusion"));
    let (line, variables) = flags("0.16.0").unwrap();
    assert!(line.contains("fuse_allreduce_rms") && line.contains("fi_allreduce_fusion_max_size_mb") && variables.is_empty());
    assert_eq!(flags("0.33.0").unwrap().1, "VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm");
    assert!(flags("0.33.1.dev5+g1").is_some());
    assert_eq!(flags("nightly"), None);

    let line = |version: &str| sglang().advice(version).unwrap().flags.join(" ");
    assert_eq!(line("0.5.9"), "--enable-flashinfer-allreduce-fusion");
    assert_eq!(line("0.5.12.post1"), "--enable-flashinfer-allreduce-fusion");
    assert_eq!(line("0.5.14"), "--flashinfer-allreduce-fusion-backend trtllm");
    assert_eq!(line("0.5.23"), "--flashinfer-allreduce-fusion-backend trtllm");
}

#[test]
fn a_pair_of_releases_has_the_notes_that_are_about_it() {
    let ids = |engine: &str, version: &str, flashinfer: &str, sm: Option<u32>| {
        let notes = tables::notes(tables::engine(engine).unwrap(), version, flashinfer, sm);
        notes.into_iter().map(|note| note.id.as_str()).collect::<Vec<_>>()
    };
    let always = ["ranks-over-pcie", "no-peer-access"];
    let has = |found: &[&str], wanted: &[&str]| {
        let mut wanted: Vec<&str> = wanted.iter().chain(&always).copied().collect();
        let mut found = found.to_vec();
        wanted.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, wanted);
    };
    has(&ids("sglang", "0.5.7", "0.5.3", Some(120)), &["partial-warps", "expandable-segments", "pipeline"]);
    has(
        &ids("sglang", "0.5.9", "0.6.3", Some(121)),
        &["partial-warps", "blackwell-slow-down", "one-gpu-a-box", "expandable-segments", "pipeline"],
    );
    has(
        &ids("sglang", "0.5.16", "0.6.14", Some(120)),
        &["partial-warps", "hybrid-experts", "low-scores", "blackwell-slow-down", "stub-of-libcudart"],
    );
    has(&ids("sglang", "0.5.23", "0.7.2", Some(120)), &["blackwell-slow-down", "pcie-ipc"]);
    has(&ids("vllm", "0.33.0", "0.7.2.post1", Some(120)), &["blackwell-slow-down", "pcie-ipc"]);
    has(
        &ids("vllm", "0.16.0", "0.6.3", None),
        &["partial-warps", "fp4-launch", "blackwell-slow-down", "one-gpu-a-box", "expandable-segments", "jit-cache-image"],
    );
    // A number that says nothing keeps nothing back.
    let all = tables::notes(sglang(), "nightly", "0.0.0+unknown.x", None);
    assert!(all.iter().any(|note| note.kind == NoteKind::Wrong));

    // Those that say "repaired" name a defect that the overlay of such a FlashInfer cures.
    let tables = tables::Tables::load();
    for engine in tables::engines() {
        for note in engine.notes.iter().filter(|note| note.kind == NoteKind::Repaired) {
            let range = note.flashinfer.as_ref().unwrap();
            let listed = tables.releases.iter().filter(|release| range.contains(&release.version));
            let mut any = 0;
            for release in listed {
                any += 1;
                assert!(tables.defect(&note.id).releases.contains(&release.version), "{} {}", note.id, release.version);
            }
            assert!(any > 0, "{}: no listed FlashInfer", note.id);
        }
    }
}
