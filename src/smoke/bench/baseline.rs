//! Figures beside those of an earlier run on a machine of the same kind.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::machine::Machine;
use super::report::Report;
use super::rows::{Of, Row};
use crate::error::{Error, Result};

/// What the comparison showed.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Compared {
    pub path: PathBuf,
    /// There was none for this machine; this run stands there now.
    pub saved: bool,
    /// Why it cannot be compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unusable: Option<String>,
    /// How many rows both runs have.
    pub rows: usize,
    pub tolerance_percent: f64,
    pub regressions: Vec<Regression>,
    /// NCCL's own figures that rose as much: the machine is another than it was, or is not idle.
    pub drifts: Vec<Regression>,
}

/// A row that was faster in the baseline.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Regression {
    pub name: String,
    pub was_us: f64,
    pub is_us: f64,
}

impl Regression {
    /// For people.
    pub fn text(&self) -> String {
        let percent = (self.is_us / self.was_us - 1.0) * 100.0;
        format!("{}: {:.2} µs, was {:.2} µs in the baseline ({percent:+.0} %)", self.name, self.is_us, self.was_us)
    }
}

/// The file of the baseline: `named` itself, or the file of this machine in it where it is a folder.
pub fn file(named: &Path, machine: &Machine) -> PathBuf {
    if named.is_dir() { named.join(machine.file_name()) } else { named.to_owned() }
}

/// Holds a run against a baseline. A figure is a regression where it lies above the old one by more than the noise of both runs and
/// the tolerance. None where there is no such file yet.
pub fn compare(report: &Report, named: &Path, tolerance_percent: f64) -> Result<Option<Compared>> {
    let path = file(named, &report.machine);
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read(&path).map_err(|error| Error::io("read", &path, error))?;
    let no = |why: String| {
        Error::usage(format!("{} is no baseline of this machine", path.display()))
            .because(why)
            .hint("`fi-arch bench --save-baseline DIR` writes one")
    };
    let value: Value = serde_json::from_slice(&text).map_err(|error| no(error.to_string()))?;
    let machine: Machine =
        serde_json::from_value(value["machine"].clone()).map_err(|error| no(format!("it names no machine: {error}")))?;
    if !machine.is_like(&report.machine) {
        return Err(no(format!("it is of {}, and this is {}", machine.line(), report.machine.line())));
    }
    let rows = value["scenarios"].as_array().into_iter().flatten().flat_map(|one| one["rows"].as_array()).flatten();
    let old: Vec<Row> = rows
        .map(|row| serde_json::from_value(row.clone()))
        .collect::<Result<_, _>>()
        .map_err(|error| no(format!("a row of it cannot be read: {error}")))?;
    let compared = against(&report.rows, &old, tolerance_percent);
    if compared.rows == 0 {
        return Err(no("it has no row that this run has: other tokens, ranks, hidden size or type".to_owned()));
    }
    Ok(Some(Compared { path, ..compared }))
}

fn against(rows: &[Row], old: &[Row], tolerance_percent: f64) -> Compared {
    let mut compared = Compared { tolerance_percent, ..Compared::default() };
    for row in rows.iter().filter(|row| row.of != Of::Against) {
        let old = old.iter().find(|old| old.of == row.of && old.is_like(row)).and_then(|old| old.series);
        let (Some(now), Some(old)) = (row.series, old) else { continue };
        compared.rows += 1;
        let room = now.noise_us.max(old.noise_us) + old.median_us * tolerance_percent / 100.0;
        if now.median_us > old.median_us + room {
            let regression = Regression { name: row.name(), was_us: old.median_us, is_us: now.median_us };
            let list = if row.of == Of::Nccl { &mut compared.drifts } else { &mut compared.regressions };
            list.push(regression);
        }
    }
    compared
}

/// Writes a run as a baseline. One with a fault is none.
pub fn save(report: &Report, path: &Path) -> Result<()> {
    if report.has_fault() {
        return Err(Error::new(crate::exit::Exit::Fault, "a run with a fault is no baseline"));
    }
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(|error| Error::io("create", dir, error))?;
    }
    fs::write(path, format!("{:#}\n", report.to_json())).map_err(|error| Error::io("write", path, error))
}

#[cfg(test)]
mod tests {
    use super::super::machine::Topology;
    use super::super::report::tests::{good, report};
    use super::super::rows::tests::{measured, point, started};
    use super::*;

    #[test]
    fn a_run_equals_itself_and_a_missing_baseline_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let report = good();
        assert_eq!(compare(&report, dir.path(), 10.0).unwrap(), None);
        let path = file(dir.path(), &report.machine);
        assert!(path.ends_with(report.machine.file_name()));
        save(&report, &path).unwrap();
        for named in [dir.path(), &path] {
            let compared = compare(&report, named, 10.0).unwrap().unwrap();
            assert_eq!((compared.rows, compared.regressions.len(), compared.drifts.len()), (14, 0, 0));
        }
    }

    #[test]
    fn slower_beyond_noise_and_tolerance_is_a_regression_and_within_it_is_none() {
        let old = measured(&point(2, 3), 16.0, Some(5.0), Some(70.0));
        let found = |oneshot: f64, nccl: f64, tolerance: f64| {
            let compared = against(&measured(&point(2, 3), nccl, Some(oneshot), Some(70.0)), &old, tolerance);
            (compared.regressions.iter().map(|one| one.name.clone()).collect::<Vec<_>>(), compared.drifts.len())
        };
        // The noise is 0.2 µs.
        assert_eq!(found(5.6, 16.0, 10.0).0, [] as [String; 0]);
        assert_eq!(found(5.8, 16.0, 10.0).0, ["sweep one-shot 2 ranks 3 tokens", "sweep auto 2 ranks 3 tokens"]);
        assert_eq!(found(5.8, 16.0, 20.0).0, [] as [String; 0]);
        assert_eq!(found(4.0, 16.0, 0.0).0, [] as [String; 0], "faster is none");
        assert_eq!(found(5.0, 20.0, 10.0), (Vec::new(), 2), "NCCL's own is no fault of the artifact");
    }

    #[test]
    fn what_lies_within_the_spread_of_the_starts_of_either_run_is_no_regression() {
        let run = |twoshot: &[f64]| {
            let starts: Vec<_> = twoshot.iter().map(|micros| (9.0, Some(4.8), Some(*micros))).collect();
            started(&point(2, 3), &starts)
        };
        let regressions = |now: &[f64], old: &[f64]| against(&run(now), &run(old), 10.0).regressions.len();
        // As seen on two H200, the same artifact in two runs.
        assert_eq!(regressions(&[78.8], &[68.8]), 1, "one start knows of no spread");
        assert_eq!(regressions(&[78.8, 68.9, 78.9], &[68.8, 68.7, 69.0]), 0);
        assert_eq!(regressions(&[78.8, 78.7, 78.9], &[68.8, 78.6, 68.9]), 0, "the baseline's own counts too");
        assert_eq!(regressions(&[98.8, 88.9, 98.9], &[68.8, 68.7, 69.0]), 1);
    }

    #[test]
    fn a_baseline_of_another_machine_or_of_other_shapes_or_no_json_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("baseline.json");
        save(&good(), &path).unwrap();
        let mut other = good();
        other.machine.topology = Topology::Pcie;
        assert!(compare(&other, &path, 10.0).unwrap_err().to_string().contains("and this is"));
        let shapes = report(measured(&point(4, 3), 16.0, Some(5.0), None));
        assert!(compare(&shapes, &path, 10.0).unwrap_err().to_string().contains("no row that this run has"));
        fs::write(&path, "{").unwrap();
        let error = compare(&good(), &path, 10.0).unwrap_err();
        assert_eq!(error.exit() as u8, 2);
        fs::write(&path, "{}").unwrap();
        assert!(compare(&good(), &path, 10.0).unwrap_err().to_string().contains("names no machine"));
    }

    #[test]
    fn a_run_with_a_fault_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut wrong = good();
        wrong.rows[1].fault = Some("off".to_owned());
        let path = dir.path().join("b.json");
        assert!(save(&wrong, &path).is_err() && !path.exists());
    }

    #[test]
    fn a_regression_says_both_figures() {
        let one = Regression { name: "x".to_owned(), was_us: 5.0, is_us: 6.0 };
        assert_eq!(one.text(), "x: 6.00 µs, was 5.00 µs in the baseline (+20 %)");
    }
}
