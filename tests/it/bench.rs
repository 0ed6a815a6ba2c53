//! `fi-arch bench` where no GPU is: fakes stand in for the driver, NCCL, NVRTC and the artifact, and run on the host. They tell a time
//! of their own: 5 µs a one-shot call, 70 two-shot, 16 NCCL and norm, 18 with NCCL apart. The numbers that they compute are
//! real, and so is the comparison.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::support::gpu::{fake, fakes, no_driver};
use crate::support::sandbox::{Ran, Sandbox};
use crate::support::toolkit::nvcc;

/// `fi-arch bench` on the fake artifact and two GPUs of sm_90 that are none.
fn bench(sandbox: &Sandbox, args: &[&str]) -> Command {
    let fakes = fakes();
    let shared = sandbox.path("shared");
    fs::create_dir_all(&shared).unwrap();
    let mut command = sandbox.command(&["bench"]);
    command.arg(fakes.join("fused.so")).args(args);
    for (flag, value) in [
        ("--hidden", "512".to_owned()),
        ("--replays", "3".to_owned()),
        ("--tvm-ffi", fake("libtvm_ffi.so")),
        ("--nccl", fake("libnccl.so.2")),
        ("--nvrtc", fake("libnvrtc-fake.so")),
    ] {
        if !args.contains(&flag) {
            command.arg(flag).arg(value);
        }
    }
    command.env("LD_LIBRARY_PATH", fakes).env("FAKE_SM", "90").env("FAKE_GPUS", "2").env("FAKE_SHARED", shared);
    command
}

const SHORT: [&str; 4] = ["--scenario", "sweep", "--tokens", "3"];

/// The row of a way at a number of tokens.
fn row<'v>(report: &'v Value, scenario: &str, mode: &str, tokens: u64) -> &'v Value {
    let of_scenario = report["scenarios"].as_array().unwrap().iter().find(|one| one["name"] == scenario).unwrap();
    let is_it = |row: &&Value| row["mode"] == mode && row["tokens"] == tokens && row["of"] != "against";
    of_scenario["rows"].as_array().unwrap().iter().find(is_it).unwrap_or_else(|| panic!("no {scenario} {mode} {tokens}"))
}

/// How many starts stand in the row of a one-shot call.
fn oneshot_starts(report: &Value) -> Option<usize> {
    row(report, "sweep", "one-shot", 3)["starts_us"].as_array().map(Vec::len)
}

/// A time of the fakes, which went through a float of 32 bits, in hundredths of a microsecond.
fn hundredths(value: &Value) -> Option<i64> {
    value.as_f64().map(|micros| (micros * 100.0).round() as i64)
}

#[test]
fn a_run_ends_in_figures_a_policy_and_a_report() {
    let sandbox = Sandbox::new();
    let mut command = bench(&sandbox, &["--json", "--tokens", "1,3,8", "--html", "report.html", "--write-policy", "policy.toml"]);
    let report = Ran::of(&mut command).exits(0).json();
    assert_eq!((report["verdict"].as_str(), report["problems"].as_array().map(Vec::len)), (Some("use"), Some(0)), "{report}");
    assert_eq!(report["target"], "sm_90");
    let machine = &report["machine"];
    assert_eq!((machine["gpu"].as_str(), machine["topology"].as_str()), (Some("No GPU"), Some("nvlink")));
    assert_eq!(
        (machine["nccl"].as_str(), machine["nvls"].as_str(), machine["nvrtc"].as_str()),
        (Some("2.28.9"), Some("0"), Some("13.0"))
    );

    for tokens in [1, 3, 8] {
        assert_eq!(hundredths(&row(&report, "sweep", "nccl", tokens)["median_us"]), Some(1600));
        let oneshot = row(&report, "sweep", "one-shot", tokens);
        assert_eq!((hundredths(&oneshot["median_us"]), hundredths(&oneshot["ratio"])), (Some(500), Some(31)));
        let apart = row(&report, "sweep", "nccl-apart", tokens);
        assert_eq!((hundredths(&apart["median_us"]), hundredths(&apart["ratio"])), (Some(1800), Some(113)));
        assert_eq!((hundredths(&oneshot["ratio_apart"]), oneshot["difference_apart"].as_str()), (Some(28), Some("faster")));
        assert!(apart["of_bound"].as_f64().unwrap() > 0.0, "its numbers too: {apart}");
        assert_eq!((oneshot["difference"].as_str(), oneshot["replays"].as_u64()), (Some("faster"), Some(3)));
        assert!(oneshot["of_bound"].as_f64().unwrap() > 0.0, "the numbers were compared: {oneshot}");
        assert_eq!(row(&report, "sweep", "auto", tokens)["taken"], "one-shot");
    }
    for mode in ["nccl", "nccl-apart"] {
        assert_eq!(row(&report, "sweep", mode, 3)["replays"], 6, "before and after the others");
    }
    assert!(row(&report, "step", "nccl-apart", 3)["step_us"].is_number());
    assert!(row(&report, "sweep", "two-shot", 1)["skipped"].as_str().unwrap().contains("more tokens than ranks"));
    assert_eq!(row(&report, "sweep", "two-shot", 8)["difference"], "slower");
    let step = row(&report, "step", "one-shot", 3);
    assert_eq!((step["calls"].as_u64(), hundredths(&step["step_us"])), (Some(122), Some(61_000)));
    assert_eq!(report["settings"]["nccl_kernels"], serde_json::json!(["ncclDevKernel_AllReduce_Sum_bf16_FAKE"]));
    assert_eq!((report["settings"]["restarts"].as_u64(), oneshot_starts(&report)), (Some(1), None));

    let policy = fs::read_to_string(sandbox.path("policy.toml")).unwrap();
    for line in ["count = 2", "max_tokens = 8", "oneshot_tokens = 8", "# Measured by `fi-arch bench` on 2 × No GPU"] {
        assert!(policy.contains(line), "{policy}");
    }
    let html = fs::read_to_string(sandbox.path("report.html")).unwrap();
    assert!(html.contains("<svg") && html.contains("policy.toml") && !html.contains("<script"), "the command is in it");
}

#[test]
fn people_get_a_table_and_the_decision() {
    let sandbox = Sandbox::new();
    let ran = Ran::of(&mut bench(&sandbox, &SHORT)).exits(0);
    for held in [
        "2 × No GPU",
        "NCCL + norm",
        "16.00",
        "18.00",
        "5.00",
        "one-shot 0.31 × (0.28 × apart), faster",
        "2 ranks: use it, up to 3 tokens",
    ] {
        assert!(ran.stdout.contains(held), "`{held}` is not in {}", ran.stdout);
    }
    let long = ran.stdout.lines().find(|line| !line.contains("artifact ") && line.chars().count() > 120);
    assert_eq!(long, None);
}

#[test]
fn where_it_does_not_pay_the_policy_has_no_ranks_and_the_run_is_right() {
    let sandbox = Sandbox::new();
    let mut command = bench(&sandbox, &[&SHORT[..], &["--json", "--write-policy", "policy.toml"]].concat());
    let report = Ran::of(command.env("FAKE_ONESHOT_US", "25")).exits(0).json();
    assert_eq!(report["verdict"], "do-not-use");
    let policy = fs::read_to_string(sandbox.path("policy.toml")).unwrap();
    assert!(policy.contains("ranks = []") && policy.contains("# Not with 2 ranks: one-shot 25.0 µs"), "{policy}");
}

#[test]
fn wrong_numbers_have_no_figure_and_no_policy_follows() {
    for (variable, how, modes) in [
        ("FAKE_ARTIFACT", "wrong", &["two-shot"][..]),
        ("FAKE_NCCL", "wrong", &["nccl", "nccl-apart"]),
        ("FAKE_NORM", "wrong", &["nccl"]),
        ("FAKE_NORM", "lone", &["nccl-apart"]),
        ("FI_ARCH_FAULT", "smoke:stride", &["one-shot", "two-shot", "auto"]),
    ] {
        let sandbox = Sandbox::new();
        let mut command =
            bench(&sandbox, &[&SHORT[..], &["--json", "--write-policy", "policy.toml", "--save-baseline", "kept"]].concat());
        let report = Ran::of(command.env(variable, how)).exits(1).json();
        assert_eq!((report["verdict"].as_str(), report["problems"][0]["code"].as_str()), (Some("fault"), Some("wrong")));
        for mode in ["nccl", "nccl-apart", "one-shot", "two-shot", "auto"] {
            let row = row(&report, "sweep", mode, 3);
            let is_wrong = modes.contains(&mode);
            assert_eq!((row["fault"].is_string(), row["median_us"].is_number()), (is_wrong, !is_wrong), "{how} {row}");
        }
        assert!(report["decisions"][0]["fused"] == false && report["policy"]["ranks"].as_array().unwrap().is_empty());
        assert!(!sandbox.path("policy.toml").exists() && !sandbox.path("kept").exists(), "{variable}");
    }
}

#[test]
fn an_output_that_is_never_written_is_told_as_that() {
    let sandbox = Sandbox::new();
    let ran = Ran::of(bench(&sandbox, &SHORT).env("FAKE_NORM", "wrong")).exits(1);
    assert!(ran.stdout.contains("never written") && ran.stdout.contains("FAULT"), "{}", ran.stdout);
}

#[test]
fn a_rank_that_does_not_come_or_dies_is_named() {
    for (fault, says) in [("smoke:absent:1", "gave no answer"), ("smoke:dies:1", "rank 1 ended")] {
        let sandbox = Sandbox::new();
        let mut command = bench(&sandbox, &[&SHORT[..], &["--json", "--deadline", "1"]].concat());
        let report = Ran::of(command.env("FI_ARCH_FAULT", fault)).exits(1).json();
        let message = report["problems"][0]["message"].as_str().unwrap();
        assert!(message.contains(says) && message.contains("rank 1"), "{message}");
        assert!(!message.contains("lamportInitialize"), "what it tells of its work is no reason: {message}");
        assert!(fault != "smoke:dies:1" || message.contains("rank 1 ended: signal: 6 (SIGABRT)"), "{message}");
        assert_eq!(report["verdict"], "fault");
    }
}

#[test]
fn a_gpu_that_never_ends_is_told_within_the_deadline() {
    let sandbox = Sandbox::new();
    let mut command = bench(&sandbox, &[&SHORT[..], &["--json", "--deadline", "1"]].concat());
    let report = Ran::of(command.env("FAKE_HUNG", "1")).exits(3).json();
    assert!(report["problems"][0]["message"].as_str().unwrap().contains("did not end within 1 s"), "{report}");
}

#[test]
fn a_second_artifact_takes_turns_with_the_first() {
    let sandbox = Sandbox::new();
    let other = fakes().join("fused.so");
    let args = [&SHORT[..], &["--json", "--restarts", "2", "--against", other.to_str().unwrap()]].concat();
    // Every other start is slower: where they take turns, each of the second artifact's.
    let report = Ran::of(bench(&sandbox, &args).env("FAKE_STARTS_US", "1")).exits(0).json();
    let oneshot = row(&report, "sweep", "one-shot", 3);
    assert_eq!((hundredths(&oneshot["against_ratio"]), oneshot["against_difference"].as_str()), (Some(83), Some("faster")));
    assert_eq!((oneshot_starts(&report), oneshot["replays"].as_u64()), (Some(2), Some(4)), "3 replays make 2 in each start");
    let twoshot = row(&report, "sweep", "two-shot", 3);
    assert_eq!((twoshot["against_ratio"].as_f64(), twoshot["against_difference"].as_str()), (Some(1.0), Some("none")));
    let nccl = row(&report, "sweep", "nccl", 3);
    assert_eq!(nccl["replays"], 16, "before and after both artifacts, in both starts");
    let rows = report["scenarios"][0]["rows"].as_array().unwrap();
    assert!(rows.iter().any(|row| row["of"] == "against" && hundredths(&row["median_us"]) == Some(600)));
    assert_eq!(report["digest"], report["against"]["digest"]);
    assert_eq!(report["against_ratios"]["most"], 1.0);
}

#[test]
fn a_baseline_is_made_where_there_is_none_and_a_slower_run_is_a_regression() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("kept")).unwrap();
    let run = |micros: &str, args: &[&str]| {
        Ran::of(bench(&sandbox, &[&SHORT[..], &["--json"], args].concat()).env("FAKE_ONESHOT_US", micros))
    };
    let first = run("5", &["--baseline", "kept"]).exits(0).json();
    assert_eq!(first["baseline"]["saved"], true);
    let kept: Vec<_> = fs::read_dir(sandbox.path("kept")).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert!(kept.len() == 1 && kept[0].to_string_lossy().starts_with("2x-No-GPU-driver-"), "{kept:?}");
    assert_eq!((first["settings"]["restarts"].as_u64(), oneshot_starts(&first)), (Some(3), Some(3)));
    let again = run("5", &["--baseline", "kept", "--restarts", "1"]).exits(0).json();
    assert_eq!((again["baseline"]["rows"].as_u64(), again["baseline"]["saved"].as_bool()), (Some(5), Some(false)));
    let slower = run("7", &["--baseline", "kept", "--restarts", "1"]).exits(1).json();
    assert_eq!((slower["verdict"].as_str(), slower["problems"][0]["code"].as_str()), (Some("regression"), Some("regression")));
    assert_eq!(hundredths(&row(&slower, "sweep", "one-shot", 3)["median_us"]), Some(700), "the figures are told all the same");
    run("7", &["--baseline", "kept", "--restarts", "1", "--tolerance", "50"]).exits(0);
    fs::write(sandbox.path("no.json"), "{}").unwrap();
    let none = run("5", &["--baseline", "no.json", "--restarts", "1"]).exits(2).json();
    assert_eq!((none["verdict"].as_str(), none["problems"][0]["code"].as_str()), (Some("no-baseline"), Some("baseline")));
}

#[test]
fn starts_that_differ_are_noise_and_no_regression() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("kept")).unwrap();
    // Every other start is 30 % slower, as if its memory lay elsewhere.
    let run = |args: &[&str]| {
        let args = [&SHORT[..], &["--json", "--baseline", "kept"], args].concat();
        Ran::of(bench(&sandbox, &args).env("FAKE_ONESHOT_US", "10").env("FAKE_STARTS_US", "3"))
    };
    let first = run(&["--restarts", "2"]).exits(0).json();
    let oneshot = row(&first, "sweep", "one-shot", 3);
    let starts: Vec<_> = oneshot["starts_us"].as_array().unwrap().iter().map(hundredths).collect();
    assert_eq!((starts, hundredths(&oneshot["median_us"])), (vec![Some(1000), Some(1300)], Some(1150)));
    assert!(oneshot["noise_us"].as_f64().unwrap() >= 2.99, "{oneshot}");
    assert_eq!(oneshot["replays"], 4, "3 replays make 2 in each start");

    let text = fs::read_to_string(fs::read_dir(sandbox.path("kept")).unwrap().next().unwrap().unwrap().path()).unwrap();
    assert!(text.contains("starts_us"), "the baseline tells its own");
    let once = run(&["--restarts", "1"]).exits(0).json();
    assert!(once["remarks"].to_string().contains("the workers were started once"), "{once}");
    Ran::of(&mut bench(&sandbox, &[&SHORT[..], &["--restarts", "0"]].concat())).exits(2).says("--restarts");
}

#[test]
fn after_a_fault_workers_are_not_started_anew() {
    let sandbox = Sandbox::new();
    let args = [&SHORT[..], &["--json", "--restarts", "3"]].concat();
    let report = Ran::of(bench(&sandbox, &args).env("FAKE_NCCL", "wrong")).exits(1).json();
    assert_eq!(row(&report, "sweep", "one-shot", 3)["replays"], 1, "{report}");
    assert!(report["remarks"].to_string().contains("2 of 3 starts were left out"), "{report}");
}

#[test]
fn what_the_machine_lacks_is_told_with_a_hint() {
    let sandbox = Sandbox::new();
    let ran = Ran::of(bench(&sandbox, &SHORT).env("LD_LIBRARY_PATH", no_driver(&sandbox)));
    ran.exits(3).says("no NVIDIA driver is on this machine").says("hint: ");
    let ran = Ran::of(bench(&sandbox, &SHORT).env("FAKE_GPUS", "1"));
    ran.exits(3).says("there are 1 GPUs, and 2 ranks were asked for").says("NCCL takes one rank a GPU").says("hint: ");
    let ran = Ran::of(&mut bench(&sandbox, &[&SHORT[..], &["--ranks", "4"]].concat()));
    ran.exits(3).says("there are 2 GPUs, and 4 ranks were asked for");
    let ran = Ran::of(bench(&sandbox, &SHORT).env("FAKE_NVRTC", "fails"));
    ran.exits(3).says("does not compile add_rms_norm.cu for sm_90").says("it is too old").says("--nvrtc");
    let ran = Ran::of(bench(&sandbox, &SHORT).env("FAKE_NCCL", "refused"));
    ran.exits(3).says("2 ranks could not be brought together").says("ncclCommInitRank: unhandled system error (it is a fake)");
    let ran = Ran::of(bench(&sandbox, &[&SHORT[..], &["--json"]].concat()).env("FAKE_IPC", "refused")).exits(3);
    let (report, code) = (ran.json(), "platform");
    assert_eq!((report["verdict"].as_str(), report["problems"][0]["code"].as_str()), (Some(code), Some(code)), "{report}");
    assert!(report["problems"][0]["message"].as_str().unwrap().contains("cannot map the memory of rank"), "{report}");
    assert!(report["platform"]["iommu"].is_object() && report["machine"]["topology"] == "unknown", "{report}");
    let wrong = fakes().join("libtvm_ffi.so");
    let ran = Ran::of(&mut bench(&sandbox, &[&SHORT[..], &["--nccl", wrong.to_str().unwrap()]].concat()));
    ran.exits(3).says("ncclGetVersion").says("--nccl");
}

#[test]
fn a_wrong_command_line_and_a_wrong_artifact_are_refused_before_anything_is_measured() {
    let sandbox = Sandbox::new();
    for (args, says) in [
        (&["--ranks", "3"][..], "none of the sizes"),
        (&["--hidden", "100"], "multiple of 8"),
        (&["--tokens", "0"], "--tokens"),
        (&["--tolerance", "-1"], "tolerance"),
        (&["--gpus", "0,0"], "named twice"),
        (&["--nccl", "/nowhere/libnccl.so.2"], "/nowhere/libnccl.so.2"),
        (&["--nvrtc", "/nowhere/libnvrtc.so.13"], "/nowhere/libnvrtc.so.13"),
        (&["--flashinfer", "new"], "--flashinfer"),
    ] {
        Ran::of(&mut bench(&sandbox, args)).exits(2).says(says);
    }
    Ran::of(&mut sandbox.command(&["bench"])).exits(2).says("ARTIFACT");
    let mut command = sandbox.command(&["bench"]);
    Ran::of(command.arg(fakes().join("artifact.so"))).exits(1).says("it exports no trtllm_allreduce_fusion").says("hint: ");
}

#[test]
fn our_norm_compiles_without_a_header_and_no_kernel_of_it_is_hollow() {
    let sandbox = Sandbox::new();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda-src/bench/add_rms_norm.cu");
    for target in ["sm_90", "sm_120"] {
        let cubin = format!("{target}.cubin");
        nvcc(&sandbox.path(""), &["-cubin", &format!("-arch={target}"), "-o", &cubin, source]);
        let image = &sandbox.run(&["inspect", &cubin, "--json"]).exits(0).json()["files"][0]["images"][0];
        assert_eq!(
            (image["target"].as_str(), image["kernels"].as_u64(), image["hollow"].as_u64()),
            (Some(target), Some(14), Some(0))
        );
    }
}
