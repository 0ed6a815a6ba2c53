//! `fi-arch smoke` where no GPU is: a fake driver, a fake tvm-ffi and a fake artifact stand in for the real ones, so that the
//! workers, their supervisor, the report and the exit codes are the real ones. The numbers are for machines with a GPU.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::support::gpu::fakes;
use crate::support::sandbox::{Ran, Sandbox};

/// `fi-arch smoke` on the fake artifact and a GPU of sm_90 that is none.
fn smoke(sandbox: &Sandbox, args: &[&str]) -> Command {
    let artifact = fakes().join("artifact.so");
    let mut command = sandbox.command(&["smoke", artifact.to_str().unwrap()]);
    command.args(args).env("LD_LIBRARY_PATH", fakes()).env("FAKE_SM", "90");
    command
}

fn with_tvm_ffi(command: &mut Command) -> &mut Command {
    command.arg("--tvm-ffi").arg(fakes().join("libtvm_ffi.so"))
}

const INITIALIZE: [&str; 2] = ["--only", "lamport-initialize "];

/// The one case that a problem names, and what it says.
fn problem(report: &Value) -> (&str, &str) {
    let problem = &report["problems"][0];
    (problem["code"].as_str().unwrap(), problem["message"].as_str().unwrap())
}

#[test]
fn without_a_driver_it_says_so_and_what_to_do() {
    let sandbox = Sandbox::new();
    // The machine's own is hidden by files that are no libraries.
    let dir = sandbox.path("none");
    fs::create_dir(&dir).unwrap();
    for name in ["libcuda.so", "libcuda.so.1", "libnvcuda.so", "libnvcuda.so.1"] {
        fs::write(dir.join(name), "no library").unwrap();
    }
    let ran = Ran::of(with_tvm_ffi(&mut smoke(&sandbox, &[])).env("LD_LIBRARY_PATH", &dir));
    ran.exits(3).says("no NVIDIA driver is on this machine").says("because").says("libcuda.so.1").says("hint: ");
    let ran = Ran::of(with_tvm_ffi(&mut smoke(&sandbox, &["--json"])).env("LD_LIBRARY_PATH", &dir)).exits(3);
    assert!(ran.json()["error"].is_object() || ran.json()["error"].is_string(), "{}", ran.stdout);
}

#[test]
fn without_a_gpu_or_with_an_old_driver_it_says_which_it_is() {
    let sandbox = Sandbox::new();
    let mut command = smoke(&sandbox, &[]);
    let ran = Ran::of(with_tvm_ffi(&mut command).env("FAKE_GPUS", "0").env("CUDA_VISIBLE_DEVICES", ""));
    ran.exits(3)
        .says("the driver shows no GPU")
        .says("CUDA_ERROR_NO_DEVICE")
        .says("CUDA_VISIBLE_DEVICES is set to ``")
        .says("hint: ");
    let ran = Ran::of(with_tvm_ffi(&mut smoke(&sandbox, &[])).env("FAKE_VERSION", "12020"));
    ran.exits(3).says("the driver speaks CUDA 12.2").says("12.8");
    Ran::of(with_tvm_ffi(&mut smoke(&sandbox, &["--gpus", "3"]))).exits(3).says("there is no GPU 3");
}

#[test]
fn what_is_no_artifact_is_refused_before_any_gpu_is_asked() {
    let sandbox = Sandbox::new();
    let tvm_ffi = fakes().join("libtvm_ffi.so");
    let ran = sandbox.run(&["smoke", tvm_ffi.to_str().unwrap()]);
    ran.exits(1).says("has no function that can be called").says("hint: ");
    fs::write(sandbox.path("text.so"), "no library").unwrap();
    let ran = sandbox.run(&["smoke", "text.so"]);
    assert!(ran.code == Some(1) || ran.code == Some(2), "{:?} {}", ran.code, ran.stderr);
    assert!(ran.stderr.contains("text.so"), "{}", ran.stderr);
    Ran::of(&mut sandbox.command(&["smoke"])).exits(2).says("ARTIFACT");
}

#[test]
fn an_artifact_for_another_arch_is_refused_with_both_names() {
    let sandbox = Sandbox::new();
    let ran = Ran::of(with_tvm_ffi(&mut smoke(&sandbox, &[])).env("FAKE_SM", "120"));
    ran.exits(1)
        .says("has no machine code for this GPU")
        .says("it is for sm_90, and the GPU is of sm_120")
        .says("fi-arch build --sm 120");
}

#[test]
fn without_libtvm_ffi_it_names_the_ways_to_give_one_and_a_wrong_one_is_told() {
    let sandbox = Sandbox::new();
    // Its folder of wheels is the tests' own, which may hold one.
    let home = sandbox.path("no-home");
    let ran = Ran::of(smoke(&sandbox, &[]).env("FI_ARCH_HOME", &home));
    ran.exits(3).says("no libtvm_ffi.so is here").says("--tvm-ffi").says("--env");
    Ran::of(smoke(&sandbox, &[]).args(["--tvm-ffi", "/nowhere"])).exits(2).says("/nowhere");
    let not_one = fakes().join("libcuda.so");
    let ran = Ran::of(smoke(&sandbox, &[]).arg("--tvm-ffi").arg(not_one));
    ran.exits(1).says("the artifact cannot be loaded").says("TVMFFI").says("hint: ");
}

#[test]
fn the_environment_gives_its_own_libtvm_ffi() {
    let sandbox = Sandbox::new();
    let site = sandbox.path("venv/lib/python3.11/site-packages");
    let info = site.join("apache_tvm_ffi-0.1.9.dist-info");
    fs::create_dir_all(&info).unwrap();
    fs::write(info.join("METADATA"), "Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: 0.1.9\n").unwrap();
    fs::write(info.join("RECORD"), "tvm_ffi/__init__.py,,\ntvm_ffi/lib/libtvm_ffi.so,,\n").unwrap();
    fs::create_dir_all(site.join("tvm_ffi/lib")).unwrap();
    fs::write(site.join("tvm_ffi/__init__.py"), "").unwrap();
    fs::copy(fakes().join("libtvm_ffi.so"), site.join("tvm_ffi/lib/libtvm_ffi.so")).unwrap();
    let venv = sandbox.path("venv");
    for environment in [&["--env", venv.to_str().unwrap()][..], &[]] {
        let mut command = smoke(&sandbox, &INITIALIZE);
        let ran = Ran::of(command.arg("--json").args(environment).env("FI_ARCH_HOME", sandbox.path("no-home"))).exits(0);
        assert_eq!(ran.json()["tvm_ffi"], "0.1.99", "the one of the fakes");
    }
}

#[test]
fn a_run_that_passes_tells_every_case_and_what_was_not_called() {
    let sandbox = Sandbox::new();
    for transport in ["ipc", "inproc"] {
        let mut command = smoke(&sandbox, &INITIALIZE);
        let ran = Ran::of(with_tvm_ffi(command.args(["--json", "--junit", "junit.xml", "--transport", transport]))).exits(0);
        let report = ran.json();
        assert_eq!((report["verdict"].as_str(), report["transport"].as_str()), (Some("pass"), Some(transport)));
        assert_eq!(report["transport_proven"], false);
        let cases = report["cases"].as_array().unwrap();
        let names: Vec<_> = cases.iter().map(|case| case["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["lamport-initialize bf16", "lamport-initialize fp16", "lamport-initialize fp32"]);
        for case in cases {
            for key in
                ["pattern", "dtype", "tokens", "hidden", "ranks", "oneshot", "pdl", "error", "replays", "median_us", "verdict"]
            {
                assert!(case.get(key).is_some(), "{key}");
            }
            assert_eq!((case["verdict"].as_str(), case["replays"].as_u64()), (Some("pass"), Some(1)));
        }
        let not_called: Vec<_> =
            report["not_called"].as_array().unwrap().iter().map(|one| one["function"].as_str().unwrap()).collect();
        assert_eq!(not_called, ["of_a_later_release", "trtllm_custom_all_reduce"]);
        assert_eq!(report["not_called"][0]["why"], "the tables do not know it");
        assert!(report["memory"][0]["allocated_mib"].as_f64().unwrap() > 1.0, "{}", report["memory"]);
        let xml = fs::read_to_string(sandbox.path("junit.xml")).unwrap();
        assert_eq!((elements(&xml, "testcase"), elements(&xml, "failure")), (3, 0));
    }
    let ran = Ran::of(with_tvm_ffi(&mut smoke(&sandbox, &INITIALIZE))).exits(0);
    assert!(ran.stdout.contains("3 passed, 0 failed") && ran.stdout.contains("not called: of_a_later_release"), "{}", ran.stdout);
}

#[test]
fn an_artifact_that_does_nothing_fails_in_every_case() {
    let sandbox = Sandbox::new();
    let mut command = smoke(&sandbox, &INITIALIZE);
    let ran = Ran::of(with_tvm_ffi(command.args(["--json", "--junit", "junit.xml"])).env("FAKE_ARTIFACT", "lazy")).exits(1);
    let report = ran.json();
    assert_eq!((report["verdict"].as_str(), report["counts"]["failed"].as_u64()), (Some("fail"), Some(3)));
    let (code, message) = problem(&report);
    assert!(
        code == "wrong" && message.contains("the Lamport initialization left") && message.contains("as they were"),
        "{message}"
    );
    let xml = fs::read_to_string(sandbox.path("junit.xml")).unwrap();
    assert_eq!((elements(&xml, "testcase"), elements(&xml, "failure")), (3, 3));
}

#[test]
fn an_error_of_the_artifact_and_the_death_of_a_worker_are_told_in_their_own_words() {
    let sandbox = Sandbox::new();
    let run = |how: &str| {
        let mut command = smoke(&sandbox, &INITIALIZE);
        let ran = Ran::of(with_tvm_ffi(command.args(["--json", "--junit", "junit.xml"])).env("FAKE_ARTIFACT", how)).exits(1);
        let xml = fs::read_to_string(sandbox.path("junit.xml")).unwrap();
        // Left out after the loss is no failure, and no pass.
        assert_eq!((elements(&xml, "testcase"), elements(&xml, "failure"), elements(&xml, "skipped")), (3, 1, 2), "{how}");
        assert_eq!(ran.json()["counts"]["passed"], 0);
        problem(&ran.json()).1.to_owned()
    };
    let raised = run("raises");
    assert!(raised.contains("the artifact raised ValueError: it does not like <this> & that"), "{raised}");
    let died = run("dies");
    assert!(died.contains("the process of rank 0 ended") && died.contains("signal: 6"), "{died}");
}

#[test]
fn a_gpu_that_never_ends_is_given_up_after_the_deadline() {
    let sandbox = Sandbox::new();
    let mut command = smoke(&sandbox, &INITIALIZE);
    let started = std::time::Instant::now();
    let ran = Ran::of(with_tvm_ffi(command.args(["--json", "--deadline", "1"])).env("FAKE_HUNG", "1")).exits(1);
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
    let report = ran.json();
    let (_, message) = problem(&report);
    assert!(
        message.contains("the GPU did not finish") && message.contains("within 1 s") && message.contains("rank 0"),
        "{message}"
    );
}

#[test]
fn memory_that_ranks_cannot_share_is_a_fault_of_the_platform() {
    let sandbox = Sandbox::new();
    for (how, words) in [("refused", "cannot map the memory of rank"), ("lost", "reads other bytes from rank")] {
        let mut command = smoke(&sandbox, &["--only", "custom-norm-lamport", "--ranks", "2"]);
        let ran = Ran::of(with_tvm_ffi(command.arg("--json")).env("FAKE_IPC", how)).exits(3);
        let report = ran.json();
        assert_eq!(report["verdict"], "platform", "{how}");
        let (code, message) = problem(&report);
        assert!(code == "platform" && message.contains(words), "{how}: {message}");
        assert!(report["cases"].as_array().unwrap().iter().all(|case| case["verdict"] == "not-run"));
    }
}

#[test]
fn cases_are_listed_with_the_reason_where_they_are_not_run() {
    let sandbox = Sandbox::new();
    // Needs no driver: the target is named.
    let artifact = fakes().join("artifact.so");
    let ran =
        sandbox.run(&["smoke", artifact.to_str().unwrap(), "--list", "90", "--json", "--only", "custom-pre-post-norm"]).exits(0);
    let report = ran.json();
    let cases = report["cases"].as_array().unwrap();
    let why = |name: &str| cases.iter().find(|case| case["name"] == name).unwrap()["not_run"].clone();
    assert_eq!(why("custom-pre-post-norm one-shot bf16 ranks=2 tokens=8 hidden=7168"), Value::Null);
    let two_shot = why("custom-pre-post-norm two-shot bf16 ranks=2 tokens=8 hidden=7168");
    assert!(two_shot.as_str().unwrap().contains("known fault of the release"), "{two_shot}");
    sandbox
        .run(&["smoke", artifact.to_str().unwrap(), "--list", "90", "--only", "no such case"])
        .exits(2)
        .says("there is no such case");
}

/// How often an element stands in a document. Fails where the document is not well-formed.
fn elements(xml: &str, name: &str) -> usize {
    let mut rest = xml.strip_prefix("<?xml version=\"1.0\" encoding=\"UTF-8\"?>").expect("it begins with a declaration");
    let (mut open, mut count) = (Vec::new(), 0);
    while let Some((text, after)) = rest.split_once('<') {
        assert!(text.trim().is_empty(), "text outside of elements: {text}");
        // Attributes hold no bare angle bracket, so the first one ends the tag.
        let (tag, after) = after.split_once('>').expect("a tag ends");
        rest = after;
        assert!(!tag.contains('<') && tag.matches('"').count().is_multiple_of(2), "{tag}");
        let entities = tag
            .match_indices('&')
            .all(|(at, _)| ["&amp;", "&lt;", "&gt;", "&quot;"].iter().any(|entity| tag[at..].starts_with(entity)));
        assert!(entities, "{tag}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name.to_owned()));
            continue;
        }
        let this = tag.split([' ', '/']).next().unwrap().to_owned();
        count += usize::from(this == name);
        if !tag.ends_with('/') {
            open.push(this);
        }
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest}");
    count
}
