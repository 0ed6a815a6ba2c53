//! What a run showed, and its form as JUnit XML.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use super::ffi::driver::DeviceInfo;
use super::kernels::Compiled;
use super::platform::Probed;
use super::protocol::{Spent, Unknown};
use super::quantiles::median;
use super::supervise::{Played, Taken, Transport, Verdict, used};

/// A whole run.
#[derive(Debug)]
pub struct Report {
    pub artifact: PathBuf,
    /// From the manifest beside the artifact, where there is one.
    pub flashinfer: Option<String>,
    pub targets: Vec<String>,
    pub transport: Transport,
    /// Did every rank have a GPU of its own, in every case that was run?
    pub transport_proven: bool,
    pub devices: Vec<DeviceInfo>,
    /// Ordinals of the GPUs that were used.
    pub gpus: Vec<usize>,
    pub driver: String,
    pub tvm_ffi: Option<String>,
    pub played: Vec<Played>,
    /// Exported functions that were not called, and why.
    pub not_called: Vec<Unknown>,
    /// Codes of patterns that the artifact has and the tables do not know.
    pub unknown_patterns: Vec<i64>,
    pub platform: Probed,
    pub remarks: Vec<String>,
    /// The memory that was taken, by the ordinal of the GPU.
    pub memory: BTreeMap<usize, Taken>,
    pub compared_by: ComparedBy,
    /// Where the time of all workers together went.
    pub spent: Spent,
    /// When it began.
    pub at: jiff::Timestamp,
    pub elapsed_s: f64,
}

/// Who makes inputs and compares outputs.
#[derive(Debug)]
pub enum ComparedBy {
    /// The GPU, by kernels of ours; and the host too in the first replay of each case.
    Device(Compiled),
    /// The host alone, for the reason given.
    Host(String),
}

impl ComparedBy {
    pub fn word(&self) -> &'static str {
        match self {
            Self::Device(_) => "device",
            Self::Host(_) => "host",
        }
    }
}

/// How many cases ended how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub passed: usize,
    pub failed: usize,
    /// Run, and said to be wrong by the release itself: neither a pass nor a fault of the artifact.
    pub known_faults: usize,
    pub skipped: usize,
    pub not_run: usize,
    /// Left out because workers were lost, or because of the platform.
    pub lost: usize,
}

impl Report {
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for played in &self.played {
            match played.verdict {
                Verdict::Pass => counts.passed += 1,
                Verdict::Fail(_) => counts.failed += 1,
                Verdict::KnownFault(_) => counts.known_faults += 1,
                Verdict::Skipped(_) => counts.skipped += 1,
                Verdict::NotRun(_) => counts.not_run += 1,
                Verdict::Lost(_) => counts.lost += 1,
            }
        }
        counts
    }

    /// Success needs a case that passed, and none that failed or was left out after a loss.
    pub fn passed(&self) -> bool {
        let counts = self.counts();
        counts.passed > 0 && counts.failed == 0 && counts.lost == 0 && self.platform.faults.is_empty()
    }

    /// `pass`, `fail`, or `platform`: the fault is the machine's, not the artifact's.
    pub fn word(&self) -> &'static str {
        match (self.passed(), self.platform.faults.is_empty()) {
            (true, _) => "pass",
            (false, false) => "platform",
            (false, true) => "fail",
        }
    }

    /// The GPUs that were used.
    pub fn used(&self) -> Vec<&DeviceInfo> {
        used(&self.devices, &self.gpus)
    }

    /// The sizes of the clusters that kernels were launched in, with how many cases had each.
    pub fn clusters(&self) -> BTreeMap<u32, usize> {
        let mut clusters = BTreeMap::new();
        for played in self.played.iter().filter(|played| played.verdict == Verdict::Pass) {
            let sizes: std::collections::BTreeSet<u32> = played.launches.iter().map(|launch| launch.cluster).collect();
            sizes.into_iter().for_each(|size| *clusters.entry(size).or_default() += 1);
        }
        clusters
    }
}

impl Played {
    /// `pass`, `fail`, `known-fault`, `skipped` or `not-run`.
    pub fn word(&self) -> &'static str {
        match self.verdict {
            Verdict::Pass => "pass",
            Verdict::Fail(_) => "fail",
            Verdict::KnownFault(_) => "known-fault",
            Verdict::Skipped(_) => "skipped",
            Verdict::NotRun(_) | Verdict::Lost(_) => "not-run",
        }
    }

    /// Why it is not a pass.
    pub fn why(&self) -> Option<&str> {
        match &self.verdict {
            Verdict::Pass => None,
            Verdict::Fail(why) | Verdict::KnownFault(why) | Verdict::Skipped(why) | Verdict::NotRun(why) | Verdict::Lost(why) => {
                Some(why)
            }
        }
    }

    /// Microseconds a call, the median over the replays; none where none was run.
    pub fn median_us(&self) -> Option<f64> {
        median(&self.outcome.micros)
    }
}

/// The run as JUnit XML: one suite, one test case a case. Valid by the schema of Ant's own reports and by that of Jenkins.
pub fn junit(report: &Report) -> String {
    let counts = report.counts();
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _ = writeln!(
        xml,
        "<testsuite name=\"fi-arch smoke {}\" timestamp=\"{}\" hostname=\"{}\" tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{:.3}\">",
        report.transport.word(),
        report.at.strftime("%Y-%m-%dT%H:%M:%S"),
        escape(&hostname()),
        report.played.len(),
        counts.failed,
        counts.lost,
        counts.known_faults + counts.skipped + counts.not_run,
        report.elapsed_s
    );
    xml.push_str("  <properties>\n");
    for (name, value) in properties(report) {
        let _ = writeln!(xml, "    <property name=\"{name}\" value=\"{}\"/>", escape(&value));
    }
    xml.push_str("  </properties>\n");
    for played in &report.played {
        let _ = write!(
            xml,
            "  <testcase classname=\"{}\" name=\"{}\" time=\"{:.3}\"",
            escape(played.case.what.function()),
            escape(&played.case.to_string()),
            played.seconds
        );
        let (tag, kind, why) = match (&played.verdict, played.why()) {
            (_, None) => {
                xml.push_str("/>\n");
                continue;
            }
            (Verdict::Fail(_), Some(why)) => ("failure", " type=\"wrong\"", why),
            // Nothing is proven of it, and not by choice.
            (Verdict::Lost(_), Some(why)) => ("error", " type=\"not-run\"", why),
            (_, Some(why)) => ("skipped", "", why),
        };
        let _ = writeln!(xml, ">\n    <{tag}{kind} message=\"{}\"/>\n  </testcase>", escape(why));
    }
    let faults: Vec<_> = report.platform.faults.iter().map(|fault| escape(fault)).collect();
    let _ = writeln!(xml, "  <system-out></system-out>\n  <system-err>{}</system-err>\n</testsuite>", faults.join(" | "));
    xml
}

/// What a reader of the results must know of the run.
fn properties(report: &Report) -> Vec<(&'static str, String)> {
    let gpus: Vec<_> = report.used().into_iter().map(|gpu| format!("{} (sm_{})", gpu.name, gpu.sm)).collect();
    vec![
        ("verdict", report.word().to_owned()),
        ("artifact", report.artifact.display().to_string()),
        ("flashinfer", report.flashinfer.clone().unwrap_or_else(|| "unknown".to_owned())),
        ("targets", report.targets.join(", ")),
        ("gpus", gpus.join(", ")),
        ("driver_cuda", report.driver.clone()),
        ("transport_proven", report.transport_proven.to_string()),
        ("compared_by", report.compared_by.word().to_owned()),
    ]
}

/// The name of this machine, as its kernel tells it.
fn hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

/// Text as it may stand in an attribute. What XML cannot hold is left out.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' | '\t' | '\r' => escaped.push(' '),
            control if control.is_control() => {}
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::smoke::cases::{Case, Custom, REPLAYS, What};
    use crate::smoke::numbers::DType;
    use crate::smoke::protocol::Outcome;

    fn played(tokens: usize, verdict: Verdict) -> Played {
        let what = What::Custom { path: Custom::NormLamport, bias: false };
        let case = Case { what, dtype: DType::Bf16, ranks: 2, tokens, hidden: 7168, pdl: true, replays: REPLAYS };
        let outcome = Outcome { micros: vec![5.0, 1.0, 9.0], ..Outcome::default() };
        Played { case, verdict, outcome, launches: Vec::new(), seconds: 0.25, fault: None }
    }

    fn report(verdicts: Vec<Verdict>) -> Report {
        Report {
            artifact: "a<b>.so".into(),
            flashinfer: None,
            targets: Vec::new(),
            transport: Transport::Ipc,
            transport_proven: false,
            devices: Vec::new(),
            gpus: Vec::new(),
            driver: String::new(),
            tvm_ffi: None,
            played: verdicts.into_iter().enumerate().map(|(at, verdict)| played(at + 1, verdict)).collect(),
            not_called: Vec::new(),
            unknown_patterns: Vec::new(),
            platform: Probed::default(),
            remarks: Vec::new(),
            memory: BTreeMap::new(),
            compared_by: ComparedBy::Host("no reason".into()),
            spent: Spent::default(),
            at: jiff::Timestamp::UNIX_EPOCH,
            elapsed_s: 1.5,
        }
    }

    #[test]
    fn success_needs_a_pass_and_no_fault_and_nothing_lost() {
        let skip = || Verdict::Skipped("x".into());
        assert!(report(vec![Verdict::Pass, skip(), Verdict::NotRun("y".into())]).passed());
        assert!(!report(vec![skip()]).passed());
        let known = || Verdict::KnownFault("k".into());
        assert!(report(vec![Verdict::Pass, known()]).passed());
        assert!(!report(vec![known()]).passed(), "it proves nothing");
        assert!(!report(vec![]).passed());
        assert!(!report(vec![Verdict::Pass, Verdict::Fail("z".into())]).passed());
        assert!(!report(vec![Verdict::Pass, Verdict::Lost("z".into())]).passed());
        let faulty = Report { platform: Probed { faults: vec!["p".into()], ..Probed::default() }, ..report(vec![Verdict::Pass]) };
        assert_eq!((faulty.passed(), faulty.word()), (false, "platform"));
    }

    #[test]
    fn junit_has_one_test_case_a_case_and_escapes_what_it_quotes() {
        let xml = junit(&report(vec![Verdict::Pass, Verdict::Fail("1 < 2 & \"3\"\u{1}".into()), Verdict::Skipped("s".into())]));
        assert_eq!(xml.matches("<testcase ").count(), 3);
        assert!(xml.contains("tests=\"3\" failures=\"1\" errors=\"0\" skipped=\"1\""), "{xml}");
        assert!(xml.contains("<failure type=\"wrong\" message=\"1 &lt; 2 &amp; &quot;3&quot;\"/>"), "{xml}");
        assert!(xml.contains("a&lt;b&gt;.so"), "{xml}");
    }

    #[test]
    fn the_median_is_of_the_replays() {
        assert_eq!(played(1, Verdict::Pass).median_us(), Some(5.0));
    }
}
