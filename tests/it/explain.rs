//! `build --explain`: what changed is named, and nothing else.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::sandbox::{SMALL, Sandbox};

fn explain(sandbox: &Sandbox, args: &[&str]) -> Value {
    sandbox.build(&[&["--dry-run", "--explain"], args].concat())
}

/// Explains a build from the FlashInfer in `site`.
fn explain_from(sandbox: &Sandbox, site: &Path) -> Value {
    explain(sandbox, &["--sm", "120", "--module", "vllm_comm", "--flashinfer", site.to_str().unwrap()])
}

fn texts(explained: &Value) -> Vec<&str> {
    let changes = explained["explain"]["changes"].as_array().unwrap();
    changes.iter().map(|change| change["text"].as_str().unwrap()).collect()
}

/// Changes one letter in the first comment of a file.
fn change_comment(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let at = bytes.windows(2).position(|pair| pair == b"/*" || pair == b"//").unwrap() + 3;
    bytes[at] = if bytes[at] == b'x' { b'y' } else { b'x' };
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_hit_says_what_it_rests_on_and_without_the_flag_nothing_is_said() {
    let sandbox = Sandbox::with_small_build();
    let hit = explain(&sandbox, SMALL);
    assert_eq!((&hit["cache"], &hit["explain"]["nearest"]["key"]), (&json!("hit"), &hit["key"]));
    assert_eq!(texts(&hit), [""; 0]);
    assert!(hit["explain"]["same"]["header"].as_u64().unwrap() > 100);
    assert_eq!(sandbox.build(SMALL)["explain"], Value::Null);
    let ran = sandbox.run(&[&["build", "--explain"], SMALL].concat()).exits(0);
    assert!(ran.stdout.contains("a hit: every input is what it was"), "{}", ran.stdout);
}

#[test]
fn an_edited_header_or_source_is_named_and_no_other_input() {
    let sandbox = Sandbox::with_small_build();
    let site = sandbox.own_flashinfer();
    assert_eq!(explain_from(&sandbox, &site)["cache"], "hit", "a copy elsewhere");
    let header = site.join("flashinfer/data/include/flashinfer/comm/vllm_custom_all_reduce.cuh");
    let original = fs::read(&header).unwrap();
    change_comment(&header);
    let miss = explain_from(&sandbox, &site);
    assert_eq!(miss["cache"], "miss");
    assert_eq!(texts(&miss), ["header data/include/flashinfer/comm/vllm_custom_all_reduce.cuh changed"]);

    fs::write(&header, original).unwrap();
    assert_eq!(explain_from(&sandbox, &site)["cache"], "hit", "the old content again");
    change_comment(&site.join("flashinfer/data/csrc/vllm_custom_all_reduce.cu"));
    assert_eq!(texts(&explain_from(&sandbox, &site)), ["source vllm_custom_all_reduce changed"]);
}

#[test]
fn a_header_that_now_comes_first_is_named_though_no_file_changed() {
    let sandbox = Sandbox::with_small_build();
    let site = sandbox.own_flashinfer();
    let before = site.join("flashinfer/data/include/flashinfer/comm/tvm/ffi/c_api.h");
    fs::create_dir_all(before.parent().unwrap()).unwrap();
    fs::write(before, "").unwrap();
    let miss = explain_from(&sandbox, &site);
    let [text] = texts(&miss)[..] else { panic!("{miss}") };
    assert!(text.starts_with("header data/include/flashinfer/comm/tvm/ffi/c_api.h now comes before"), "{text}");
}

#[test]
fn another_target_is_named_with_the_flags_that_came_and_went() {
    let sandbox = Sandbox::with_small_build();
    let miss = explain(&sandbox, &["--sm", "90", "--module", "vllm_comm", "--flashinfer", "0.6.4"]);
    let expected = [
        "target sm_120f → sm_90a",
        "flag -gencode=arch=compute_120f,code=sm_120f removed",
        "flag -gencode=arch=compute_90a,code=sm_90a added",
    ];
    assert_eq!(texts(&miss), expected);
    let ran = sandbox.run(&["build", "--dry-run", "--explain", "--sm", "90", "--module", "vllm_comm", "--flashinfer", "0.6.4"]);
    assert!(ran.exits(0).stdout.contains("target sm_120f → sm_90a"));
}

#[test]
fn an_empty_store_and_a_removed_artifact_are_told_apart() {
    let sandbox = Sandbox::with_small_build();
    fs::remove_dir_all(sandbox.home().join("store/v1/artifacts")).unwrap();
    let gone = explain(&sandbox, SMALL);
    assert!(gone["explain"]["gone"].is_string() && gone["explain"]["nearest"].is_null(), "{gone}");
    fs::remove_dir_all(sandbox.home().join("store")).unwrap();
    let empty = explain(&sandbox, SMALL);
    assert!(empty["explain"]["gone"].is_null() && empty["explain"]["nearest"].is_null(), "{empty}");
}
