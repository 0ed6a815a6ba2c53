//! What a run of `bench` showed, and its form as JSON, in which it is also kept as a baseline.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Value, json};

use super::baseline::Compared;
use super::machine::Machine;
use super::plan::Scenario;
use super::rows::{Of, Row};
use super::verdict::{Decision, policy};
use crate::digest::Digest;
use crate::policy::Policy;
use crate::smoke::platform::Probed;
use crate::smoke::quantiles::{median, quantile};

/// A whole run.
#[derive(Debug)]
pub struct Report {
    pub artifact: Named,
    pub against: Option<Named>,
    pub machine: Machine,
    pub rows: Vec<Row>,
    pub decisions: Vec<Decision>,
    pub platform: Probed,
    pub remarks: Vec<String>,
    /// How it was measured.
    pub settings: Settings,
    /// Beside an earlier run; none where none was asked for.
    pub baseline: Option<Compared>,
    /// The command line.
    pub command: String,
    pub elapsed_s: f64,
}

/// An artifact.
#[derive(Debug, Clone, Serialize)]
pub struct Named {
    pub artifact: PathBuf,
    pub digest: Digest,
    /// The release of FlashInfer that it was built from, where its manifest or the user says so.
    pub flashinfer: Option<String>,
    /// What it is built for, by its machine code.
    pub target: Vec<String>,
}

/// How it was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Settings {
    /// How many times the workers were to be started.
    pub restarts: u32,
    /// Of a graph in all starts together; `warm_up` more in each.
    pub replays: u32,
    pub warm_up: u32,
    /// Sets of inputs and outputs that calls use in turn.
    pub sets: usize,
    /// The order of the legs of a point, in each start.
    pub order: String,
    pub pdl: bool,
    pub fp32_acc: bool,
    /// Our norm started before NCCL's kernel had ended.
    pub norm_overlaps: bool,
    /// The kernels of NCCL that were in the graphs.
    pub nccl_kernels: Vec<String>,
}

/// What it comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// With some number of ranks the fused path pays.
    Use,
    DoNotUse,
    /// The fused path is slower than in the baseline.
    Regression,
    /// The baseline that was named cannot be compared with.
    NoBaseline,
    /// Wrong numbers, a hang, an error.
    Fault,
    /// The GPUs cannot reach each other.
    Platform,
}

impl Word {
    pub fn word(self) -> &'static str {
        match self {
            Self::Use => "use",
            Self::DoNotUse => "do-not-use",
            Self::Regression => "regression",
            Self::NoBaseline => "no-baseline",
            Self::Fault => "fault",
            Self::Platform => "platform",
        }
    }
}

impl Report {
    pub fn word(&self) -> Word {
        if !self.platform.faults.is_empty() {
            Word::Platform
        } else if self.has_fault() {
            Word::Fault
        } else if self.baseline.as_ref().is_some_and(|compared| compared.unusable.is_some()) {
            Word::NoBaseline
        } else if self.baseline.as_ref().is_some_and(|compared| !compared.regressions.is_empty()) {
            Word::Regression
        } else if self.decisions.iter().any(|decision| decision.fused) {
            Word::Use
        } else {
            Word::DoNotUse
        }
    }

    /// Something was wrong, or nothing was measured.
    pub fn has_fault(&self) -> bool {
        self.rows.iter().any(|row| row.fault.is_some()) || !self.rows.iter().any(|row| row.of != Of::Nccl && row.ratio.is_some())
    }

    pub fn policy(&self) -> Policy {
        policy(&self.decisions)
    }

    /// The policy as a file, with what it was measured on above it.
    pub fn policy_text(&self) -> String {
        let Named { digest, flashinfer, target, .. } = &self.artifact;
        let mut heading = vec![
            format!("Measured by `fi-arch bench` on {}.", self.machine.line()),
            format!(
                "Artifact {} for {}, FlashInfer {}.",
                digest.short(),
                target.join(", "),
                flashinfer.as_deref().unwrap_or("of an unknown release")
            ),
        ];
        let left_out = self.decisions.iter().filter(|decision| !decision.fused);
        heading.extend(left_out.map(|decision| format!("Not with {} ranks: {}.", decision.ranks, decision.reason)));
        self.policy().to_toml(&heading)
    }

    /// The artifact's medians by those of the second one: the middle and the largest of all rows; none without a second one.
    pub fn against_ratios(&self) -> Option<(f64, f64)> {
        let rows = self.rows.iter().filter(|row| row.taken.is_none());
        let ratios: Vec<f64> = rows.filter_map(|row| row.against_ratio).collect();
        Some((median(&ratios)?, quantile(&ratios, 1.0)?))
    }

    /// The rows of each scenario.
    pub fn by_scenario(&self) -> Vec<(Scenario, Vec<&Row>)> {
        let of = |scenario| (scenario, self.rows.iter().filter(|row| row.scenario == scenario).collect::<Vec<_>>());
        [Scenario::Sweep, Scenario::Step].map(of).into_iter().filter(|(_, rows)| !rows.is_empty()).collect()
    }

    /// One object with everything.
    pub fn to_json(&self) -> Value {
        let problem = |code: &str, message: String| json!({ "code": code, "message": message });
        let mut problems = self.platform.problems();
        // What `auto` takes has a row of its own.
        let rows = self.rows.iter().filter(|row| row.taken.is_none());
        let faults = rows.filter_map(|row| row.fault.as_ref().map(|fault| format!("{}: {fault}", row.name())));
        problems.extend(faults.map(|fault| problem("wrong", fault)));
        if let Some(compared) = &self.baseline {
            problems.extend(compared.unusable.iter().map(|why| problem("baseline", why.clone())));
            problems.extend(compared.regressions.iter().map(|one| problem("regression", one.text())));
        }
        if problems.is_empty() && self.has_fault() {
            problems.push(problem("nothing-measured", "no point was measured on both sides".to_owned()));
        }
        json!({
            "verdict": self.word().word(),
            "artifact": self.artifact.artifact.display().to_string(),
            "digest": self.artifact.digest,
            "flashinfer": self.artifact.flashinfer,
            "target": self.artifact.target.join(", "),
            "against": self.against,
            "against_ratios": self.against_ratios().map(|(median, most)| json!({ "median": median, "most": most })),
            "machine": self.machine,
            "platform": self.platform.seen,
            "scenarios": self.by_scenario().into_iter().map(|(scenario, rows)| {
                json!({ "name": scenario.word(), "rows": rows })
            }).collect::<Vec<_>>(),
            "decisions": self.decisions,
            "policy": self.policy(),
            "baseline": self.baseline,
            "problems": problems,
            "remarks": self.remarks,
            "settings": self.settings,
            "command": self.command,
            "elapsed_s": self.elapsed_s,
        })
    }
}

#[cfg(test)]
pub mod tests {
    use super::super::machine::tests::machine;
    use super::super::rows::tests::{measured, point};
    use super::super::verdict::decide;
    use super::*;

    pub fn report(rows: Vec<Row>) -> Report {
        Report {
            artifact: Named {
                artifact: "trtllm_comm.so".into(),
                digest: Digest::of(b"it"),
                flashinfer: Some("0.6.4".to_owned()),
                target: vec!["sm_90a".to_owned()],
            },
            against: None,
            machine: machine(),
            decisions: decide(&rows, &machine().line()),
            rows,
            platform: Probed::default(),
            remarks: Vec::new(),
            settings: Settings {
                restarts: 1,
                replays: 100,
                warm_up: 10,
                sets: 2,
                order: "nccl, nccl-apart, one-shot, two-shot, nccl-apart, nccl".to_owned(),
                pdl: true,
                fp32_acc: true,
                norm_overlaps: true,
                nccl_kernels: Vec::new(),
            },
            baseline: None,
            command: "fi-arch bench trtllm_comm.so".to_owned(),
            elapsed_s: 1.0,
        }
    }

    pub fn good() -> Report {
        let mut rows = measured(&point(2, 1), 16.0, Some(4.9), None);
        rows.extend(measured(&point(2, 3), 16.0, Some(5.3), Some(69.6)));
        rows.extend(measured(&point(2, 64), 24.0, Some(7.8), Some(18.9)));
        report(rows)
    }

    #[test]
    fn the_verdict_is_the_worst_that_was_found() {
        assert_eq!(good().word(), Word::Use);
        assert_eq!(report(measured(&point(2, 3), 16.0, Some(25.3), None)).word(), Word::DoNotUse);
        let mut wrong = good();
        wrong.rows[2].fault = Some("off".to_owned());
        assert_eq!(wrong.word(), Word::Fault);
        wrong.platform.faults.push("no way".to_owned());
        assert_eq!(wrong.word(), Word::Platform);
        assert_eq!(report(Vec::new()).word(), Word::Fault, "nothing was measured");
    }

    #[test]
    fn json_has_what_scripts_rely_on() {
        let value = good().to_json();
        for key in ["verdict", "artifact", "digest", "flashinfer", "target", "machine", "scenarios", "policy", "problems"] {
            assert!(value.get(key).is_some(), "{key}");
        }
        for key in ["gpu", "driver", "cuda", "topology", "nccl", "nvls"] {
            assert!(value["machine"].get(key).is_some(), "{key}");
        }
        let row = &value["scenarios"][0]["rows"][2];
        for key in ["mode", "ranks", "tokens", "hidden", "dtype", "median_us", "p99_us", "min_us", "noise_us", "replays", "ratio"]
        {
            assert!(row.get(key).is_some(), "{key}");
        }
        assert_eq!((row["mode"].as_str(), row.get("ratio_apart").is_some()), (Some("one-shot"), true));
        assert_eq!(value["policy"]["ranks"][0]["count"], 2);
        let empty = report(Vec::new()).to_json();
        assert_eq!(empty["problems"][0]["code"], "nothing-measured");
    }

    #[test]
    fn the_policy_says_on_what_it_was_measured_and_what_is_left_out() {
        let mut rows = good().rows;
        rows.extend(measured(&point(4, 3), 16.0, Some(25.3), None));
        let text = report(rows).policy_text();
        assert!(
            text.contains("# Measured by `fi-arch bench` on 2 × NVIDIA H200") && text.contains("# Not with 4 ranks: "),
            "{text}"
        );
        let policy = Policy::parse(&text).unwrap();
        assert_eq!(policy.counts(), "2");
        assert_eq!(policy.of(2).unwrap().max_tokens, Some(64));
    }
}
