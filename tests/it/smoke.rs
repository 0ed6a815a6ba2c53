//! `fi-arch smoke` where no GPU is: a fake driver, a fake tvm-ffi and a fake artifact stand in for the real ones, so that the
//! workers, their supervisor, the report and the exit codes are the real ones. The numbers are for machines with a GPU.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::gpu::{fakes, no_driver};
use crate::support::sandbox::{Ran, Sandbox};
use crate::support::toolkit::nvcc;

/// A file of the project.
fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// `fi-arch smoke` on the fake artifact and a GPU of sm_90 that is none.
fn smoke(sandbox: &Sandbox, args: &[&str]) -> Command {
    let artifact = fakes().join("artifact.so");
    let mut command = sandbox.command(&["smoke", artifact.to_str().unwrap()]);
    command.args(args).env("LD_LIBRARY_PATH", fakes()).env("FAKE_SM", "90");
    command
}

/// The same on the artifact that reduces, two ranks in one process, in bf16 and one-shot: what the fakes can do.
fn reducing(sandbox: &Sandbox, args: &[&str]) -> Command {
    let artifact = fakes().join("fused.so");
    let mut command = sandbox.command(&["smoke", artifact.to_str().unwrap(), "--transport", "inproc", "--ranks", "2", "--json"]);
    command.args(["--only", "allreduce one-shot bf16 ranks=2 tokens=3 hidden=2880"]).args(args);
    command.env("LD_LIBRARY_PATH", fakes()).env("FAKE_SM", "90");
    command.arg("--nvrtc").arg(fakes().join("libnvrtc-fake.so"));
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
    let dir = no_driver(&sandbox);
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
        assert_eq!((report["compared_by"].as_str(), report["compared_by_why"].is_string()), (Some("host"), true));
        assert!(report["spent_s"]["starting"].as_f64().unwrap() > 0.0, "{}", report["spent_s"]);
        assert!(report["platform"]["iommu"].is_object(), "{}", report["platform"]);
        let xml = fs::read_to_string(sandbox.path("junit.xml")).unwrap();
        assert_eq!((elements(&xml, "testcase"), elements(&xml, "failure")), (3, 0));
        is_junit(&xml);
    }
    let ran = Ran::of(with_tvm_ffi(&mut smoke(&sandbox, &INITIALIZE))).exits(0);
    assert!(ran.stdout.contains("3 passed, 0 failed") && ran.stdout.contains("not called: of_a_later_release"), "{}", ran.stdout);
}

#[test]
fn inputs_are_made_and_compared_by_the_kernels_and_by_the_host_where_it_is_asked_to() {
    let sandbox = Sandbox::new();
    for (compare, word) in [("device", "device"), ("host", "host")] {
        let mut command = reducing(&sandbox, &["--replays", "21", "--compare", compare]);
        let report = Ran::of(with_tvm_ffi(&mut command)).exits(0).json();
        assert_eq!(report["compared_by"], word);
        assert_eq!(report["compared_by_why"].is_null(), word == "device", "{}", report["compared_by_why"]);
        let cases = report["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 2, "with programmatic dependent launch and without");
        for case in cases {
            assert_eq!((case["verdict"].as_str(), case["replays"].as_u64()), (Some("pass"), Some(21)), "{case}");
            assert!(case["of_bound"].as_f64().unwrap() > 0.1 && case["error"].as_f64().unwrap() > 1e-4, "{case}");
        }
        assert!(report["spent_s"]["artifact"].as_f64().unwrap() > 0.0 && report["spent_s"]["checking"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn our_kernels_compile_for_hopper_and_for_blackwell_and_none_is_hollow() {
    let sandbox = Sandbox::new();
    let source = format!("{}{}", read("cuda-src/smoke/check.h"), read("cuda-src/smoke/kernels.cu"));
    fs::write(sandbox.path("kernels.cu"), source).unwrap();
    for arch in ["sm_90", "sm_120"] {
        let flags = [
            "-cubin",
            "-arch",
            arch,
            "-std=c++17",
            "-fmad=false",
            "-Werror",
            "all-warnings",
            "-o",
            "kernels.cubin",
            "kernels.cu",
        ];
        nvcc(&sandbox.path("."), &flags);
        let report = sandbox.run(&["inspect", "kernels.cubin", "--json"]).exits(0).json();
        let image = &report["files"][0]["images"][0];
        assert_eq!(
            (image["target"].as_str(), image["kernels"].as_u64(), image["hollow"].as_u64()),
            (Some(arch), Some(4), Some(0))
        );
    }
}

#[test]
fn the_steps_for_ci_are_those_of_the_script_and_their_flags_are_the_programs() {
    let sandbox = Sandbox::new();
    let script = read("ci/gpu-smoke.sh").replace("\\\n", " ");
    let steps: Vec<&str> =
        script.lines().filter_map(|line| line.strip_prefix("step_")?.split_once("()")).map(|(step, _)| step).collect();
    assert_eq!(steps, ["build", "install", "verify", "smoke", "bench"]);
    let workflow = read("ci/blackwell.yml");
    let run: Vec<&str> = workflow.lines().filter_map(|line| line.trim().strip_prefix("run: ci/gpu-smoke.sh ")).collect();
    assert_eq!(run, steps, "each step once, in order");
    let mut checked = Vec::new();
    for command in script.lines().filter_map(|line| line.trim().strip_prefix("\"$binary\" ")) {
        let verb = command.split(' ').next().unwrap();
        let help = sandbox.run(&[verb, "--help"]).exits(0);
        for flag in command.split(' ').filter(|word| word.starts_with("--")) {
            let has = help.stdout.split(|c: char| c.is_whitespace() || c == ',').any(|word| word == flag);
            assert!(has, "`fi-arch {verb}` has no {flag}");
        }
        checked.push(verb.to_owned());
    }
    assert_eq!(checked, steps);
}

#[test]
fn the_script_for_a_gpu_machine_runs_a_file_and_tells_what_it_lacks() {
    let sandbox = Sandbox::new();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/ci/gpu-smoke.sh");
    let of = |program: &str, args: &[&str]| {
        let mut command = sandbox.command(&[]);
        let mut sh = Command::new("sh");
        sh.arg(script).args(args).env("FI_ARCH", program).env_remove("GPU_ENV").env_remove("VIRTUAL_ENV");
        sh.current_dir(sandbox.path(".")).envs(command.env_clear().get_envs().filter_map(|(name, value)| Some((name, value?))));
        sh.env("FI_ARCH_HOME", sandbox.home()).env("LD_LIBRARY_PATH", fakes()).env("FAKE_SM", "90");
        Ran::of(&mut sh)
    };
    let program = env!("CARGO_BIN_EXE_fi-arch");
    of(program, &[]).exits(2).says("name a step");
    of("/nowhere/fi-arch", &["smoke"]).exits(3).says("no /nowhere/fi-arch");
    of(program, &["verify"]).exits(3).says("GPU_ENV");
    let (artifact, tvm_ffi) = (fakes().join("artifact.so"), fakes().join("libtvm_ffi.so"));
    let args = [artifact.to_str().unwrap(), "--tvm-ffi", tvm_ffi.to_str().unwrap(), INITIALIZE[0], INITIALIZE[1]];
    let ran = of(program, &args).exits(0);
    assert!(ran.stdout.contains("3 passed, 0 failed"), "{}", ran.stdout);
}

#[test]
fn a_wrong_number_and_a_write_behind_an_output_in_a_later_replay_are_found_by_both() {
    let sandbox = Sandbox::new();
    for (how, words) in [
        ("late", "rank 1, call 2, token 0: allreduce_out: 1 elements are wrong; the first, at 5, is"),
        ("behind", "rank 1, call 2: 2 bytes behind SumOut were written"),
    ] {
        let mut told = Vec::new();
        for compare in ["device", "host"] {
            let mut command = reducing(&sandbox, &["--compare", compare]);
            let report = Ran::of(with_tvm_ffi(&mut command).env("FAKE_ARTIFACT", how)).exits(1).json();
            let (code, message) = problem(&report);
            assert!(code == "wrong" && message.contains(": replay 2: ") && message.contains(words), "{how} {compare}: {message}");
            told.push(message.to_owned());
        }
        assert_eq!(told[0], told[1]);
    }
}

#[test]
fn kernels_that_do_not_judge_as_the_host_does_are_our_own_fault() {
    let sandbox = Sandbox::new();
    let ran = Ran::of(with_tvm_ffi(&mut reducing(&sandbox, &[])).env("FI_ARCH_FAULT", "smoke:seed")).exits(70);
    let error = ran.json()["error"].to_string();
    assert!(
        error.contains("do not agree") && error.contains("allreduce one-shot") && error.contains("--compare host"),
        "{error}"
    );
}

#[test]
fn without_kernels_the_host_compares_and_says_why_and_a_named_compiler_must_work() {
    let sandbox = Sandbox::new();
    let ran = Ran::of(with_tvm_ffi(&mut reducing(&sandbox, &[])).env("FAKE_NVRTC", "fails")).exits(3);
    let error = ran.json()["error"].to_string();
    assert!(error.contains("it is too old") && error.contains("NVRTC_ERROR_COMPILATION") && error.contains("sm_90"), "{error}");
    // Found in a toolkit and not named: no obstacle.
    let toolkit = sandbox.path("toolkit");
    fs::create_dir_all(toolkit.join("lib64")).unwrap();
    fs::copy(fakes().join("libnvrtc-fake.so"), toolkit.join("lib64/libnvrtc.so.13")).unwrap();
    for (fails, word) in [(false, "device"), (true, "host")] {
        let mut command = smoke(&sandbox, &INITIALIZE);
        with_tvm_ffi(command.arg("--json")).env("CUDA_HOME", &toolkit);
        if fails {
            command.env("FAKE_NVRTC", "fails");
        }
        let report = Ran::of(&mut command).exits(0).json();
        assert_eq!(report["compared_by"], word);
        assert_eq!(report["compared_by_why"].to_string().contains("it is too old"), fails, "{}", report["compared_by_why"]);
    }
    let mut command = smoke(&sandbox, &INITIALIZE);
    Ran::of(with_tvm_ffi(command.args(["--nvrtc", "/nowhere/libnvrtc.so"]))).exits(2).says("/nowhere/libnvrtc.so");
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
    is_junit(&xml);
}

#[test]
fn an_error_of_the_artifact_and_the_death_of_a_worker_are_told_in_their_own_words() {
    let sandbox = Sandbox::new();
    let run = |how: &str| {
        let mut command = smoke(&sandbox, &INITIALIZE);
        let ran = Ran::of(with_tvm_ffi(command.args(["--json", "--junit", "junit.xml"])).env("FAKE_ARTIFACT", how)).exits(1);
        let xml = fs::read_to_string(sandbox.path("junit.xml")).unwrap();
        // Left out after the loss is no failure, no pass, and nothing that was skipped by choice.
        assert_eq!((elements(&xml, "testcase"), elements(&xml, "failure"), elements(&xml, "error")), (3, 1, 2), "{how}");
        assert_eq!(ran.json()["counts"]["passed"], 0);
        is_junit(&xml);
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
        let ran = Ran::of(with_tvm_ffi(command.args(["--json", "--junit", "junit.xml"])).env("FAKE_IPC", how)).exits(3);
        let report = ran.json();
        assert_eq!(report["verdict"], "platform", "{how}");
        let (code, message) = problem(&report);
        assert!(code == "platform" && message.contains(words), "{how}: {message}");
        assert!(report["cases"].as_array().unwrap().iter().all(|case| case["verdict"] == "not-run"));
        let xml = fs::read_to_string(sandbox.path("junit.xml")).unwrap();
        is_junit(&xml);
        assert_eq!(elements(&xml, "failure"), 0, "it is no fault of the artifact");
        assert!(elements(&xml, "error") > 0 && xml.contains("the platform, not the kernel"), "{xml}");
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

/// Holds a document against what the schemas of Ant's and of Jenkins' reports want of it: attributes, order, and counts that are so.
fn is_junit(xml: &str) {
    let attribute = |tag: &str, name: &str| {
        let (_, rest) = tag.split_once(&format!(" {name}=\"")).unwrap_or_else(|| panic!("no {name} in {tag}"));
        rest.split_once('"').unwrap().0.to_owned()
    };
    let tags = |name: &str| {
        let begin = format!("<{name} ");
        xml.match_indices(&begin).map(|(at, _)| xml[at..].split_once('>').unwrap().0.to_owned()).collect::<Vec<_>>()
    };
    let [suite] = &tags("testsuite")[..] else { panic!("one suite: {xml}") };
    for (name, element) in [("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")] {
        assert_eq!(attribute(suite, name).parse::<usize>().unwrap(), elements(xml, element), "{name}");
    }
    let decimal = |text: String| assert!(text.parse::<f64>().unwrap() >= 0.0 && !text.starts_with('-'), "{text}");
    decimal(attribute(suite, "time"));
    assert!(!attribute(suite, "name").is_empty() && !attribute(suite, "hostname").is_empty());
    let (date, time) = attribute(suite, "timestamp").split_once('T').map(|(d, t)| (d.to_owned(), t.to_owned())).unwrap();
    let digits = |text: &str, separator: char, sizes: [usize; 3]| {
        let parts: Vec<_> = text.split(separator).collect();
        assert!(parts.iter().map(|part| part.len()).eq(sizes) && parts.iter().all(|part| part.parse::<u32>().is_ok()), "{text}");
    };
    digits(&date, '-', [4, 2, 2]);
    digits(&time, ':', [2, 2, 2]);
    for case in tags("testcase") {
        assert!(!attribute(&case, "name").is_empty() && !attribute(&case, "classname").is_empty());
        decimal(attribute(&case, "time"));
    }
    for kind in ["failure", "error"] {
        tags(kind).iter().for_each(|tag| assert!(!attribute(tag, "type").is_empty() && !attribute(tag, "message").is_empty()));
    }
    let places: Vec<_> =
        ["<properties>", "<testcase ", "<system-out>", "<system-err>"].iter().map(|tag| xml.find(tag).unwrap()).collect();
    assert!(places.is_sorted(), "{xml}");
}

/// How often an element stands in a document. Fails where the document is not well-formed.
fn elements(xml: &str, name: &str) -> usize {
    let mut rest = xml.strip_prefix("<?xml version=\"1.0\" encoding=\"UTF-8\"?>").expect("it begins with a declaration");
    let (mut open, mut count) = (Vec::new(), 0);
    while let Some((text, after)) = rest.split_once('<') {
        let holds_text = open.last().is_some_and(|one: &String| one == "system-err");
        assert!(text.trim().is_empty() || holds_text, "text outside of elements: {text}");
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
