//! What was measured, one row for each way through a point, and what each says beside NCCL.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::measure::{Came, Leg};
use super::plan::{Mode, Point, Scenario, Way};
use super::stats::{Difference, Series, Start, difference, medians_of_starts, series};
use crate::smoke::numbers::DType;
use crate::smoke::reference::Distance;
use crate::tables::calls::OneShot;

/// Whose code a row is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Of {
    Artifact,
    /// The second artifact, of `--against`.
    Against,
    Nccl,
}

impl Of {
    pub fn word(self) -> &'static str {
        match self {
            Self::Artifact => "artifact",
            Self::Against => "against",
            Self::Nccl => "nccl",
        }
    }
}

/// One way through a point. Times are of one call, in microseconds; those of a row without figures are in neither.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub scenario: Scenario,
    pub of: Of,
    pub mode: Mode,
    /// What `auto` is here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken: Option<Mode>,
    pub ranks: usize,
    pub tokens: usize,
    pub hidden: usize,
    pub dtype: DType,
    /// Timed calls in a graph.
    pub calls: usize,
    #[serde(default, flatten)]
    pub series: Option<Series>,
    /// The median of each start of the workers, where there were several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub starts_us: Vec<f64>,
    /// Of all calls of the graph, where it is a whole step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_us: Option<f64>,
    /// Its median by that of NCCL + norm.
    pub ratio: Option<f64>,
    /// Whether it is faster than NCCL + norm, beyond the noise.
    pub difference: Option<Difference>,
    /// The same of a fused row by NCCL apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_apart: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub difference_apart: Option<Difference>,
    /// Its median by that of the second artifact, and whether it is faster than that, beyond the noise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against_ratio: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against_difference: Option<Difference>,
    /// The largest error, relative to the largest exact value of its row; the largest part of its bound that one took up.
    pub error: Option<f64>,
    pub of_bound: Option<f64>,
    /// Why it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// What is wrong with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

impl Row {
    fn new(point: &Point, of: Of, mode: Mode) -> Self {
        let Point { scenario, ranks, tokens, hidden, dtype, calls } = *point;
        Self {
            scenario,
            of,
            mode,
            taken: None,
            ranks,
            tokens,
            hidden,
            dtype,
            calls,
            series: None,
            starts_us: Vec::new(),
            step_us: None,
            ratio: None,
            difference: None,
            ratio_apart: None,
            difference_apart: None,
            against_ratio: None,
            against_difference: None,
            error: None,
            of_bound: None,
            skipped: None,
            fault: None,
        }
    }

    /// Whether the two are about the same thing, in two runs or of two artifacts.
    pub fn is_like(&self, other: &Self) -> bool {
        let what = |row: &Self| (row.scenario, row.mode, row.ranks, row.tokens, row.hidden, row.dtype, row.calls);
        what(self) == what(other)
    }

    /// For people: `sweep one-shot 2 ranks 3 tokens`.
    pub fn name(&self) -> String {
        let Self { scenario, ranks, tokens, hidden, dtype, calls, .. } = *self;
        Point { scenario, ranks, tokens, hidden, dtype, calls }.name(self.mode.word())
    }
}

/// One leg of a point: whose it is, in which start of the workers it was, and what it came to.
#[derive(Debug)]
pub struct Ran {
    pub of: Of,
    pub start: usize,
    pub way: Way,
    pub came: Came,
}

/// All legs of a point. A way that was left out has a reason in their place.
#[derive(Debug, Default)]
pub struct Legs {
    pub ran: Vec<Ran>,
    pub skipped: Vec<(Way, String)>,
}

impl Legs {
    /// What is wrong with a way, once it is known.
    pub fn fault(&self, of: Of, way: Way) -> Option<&str> {
        self.ran.iter().find_map(|ran| match &ran.came {
            Came::Fault(fault) if (ran.of, ran.way) == (of, way) => Some(&fault[..]),
            _ => None,
        })
    }

    pub fn has_fault(&self) -> bool {
        self.ran.iter().any(|ran| matches!(ran.came, Came::Fault(_)))
    }
}

/// The rows of a point. `rule` tells what `auto` is.
pub fn rows(point: &Point, legs: &Legs, against: bool, rule: Option<&OneShot>) -> Vec<Row> {
    let [nccl, mut apart] = Way::RIVALS.map(|way| row(point, Of::Nccl, way, legs));
    let mut rows = Vec::new();
    let whose: &[Of] = if against { &[Of::Artifact, Of::Against] } else { &[Of::Artifact] };
    for &of in whose {
        let fused = Way::FUSED.map(|way| row(point, of, way, legs));
        let auto = point.auto(rule).map(|way| {
            let taken = &fused[usize::from(way == Way::TwoShot)];
            Row { mode: Mode::Auto, taken: Some(taken.mode), ..taken.clone() }
        });
        rows.extend(fused.into_iter().chain(auto));
    }
    let others: Vec<Row> = rows.iter().filter(|row| row.of == Of::Against).cloned().collect();
    for row in &mut rows {
        let Some(mut own) = row.series else { continue };
        if let Some(nccl) = &nccl.series {
            // What is measured once a start has no spread of its own there: NCCL's stands for it.
            own.noise_us = own.noise_us.max(nccl.noise_us);
            (row.ratio, row.difference) = beside(&own, nccl);
            row.series = Some(own);
        }
        if let Some(apart) = &apart.series {
            (row.ratio_apart, row.difference_apart) = beside(&own, apart);
        }
        let other = others.iter().find(|other| row.of == Of::Artifact && other.is_like(row));
        if let Some(other) = other.and_then(|other| other.series) {
            (row.against_ratio, row.against_difference) = beside(&own, &other);
        }
    }
    if let (Some(own), Some(nccl)) = (&apart.series, &nccl.series) {
        (apart.ratio, apart.difference) = beside(own, nccl);
    }
    rows.splice(..0, [nccl, apart]);
    rows
}

/// How much of the other's time one takes, and whether it is faster.
fn beside(one: &Series, other: &Series) -> (Option<f64>, Option<Difference>) {
    (Some(one.median_us / other.median_us), Some(difference(one, other)))
}

fn row(point: &Point, of: Of, way: Way, legs: &Legs) -> Row {
    let mut row = Row::new(point, of, way.into());
    let skipped = legs.skipped.iter().find(|(skipped, _)| *skipped == way);
    row.skipped = skipped.map(|(_, why)| why.clone());
    let mut measured: BTreeMap<usize, Vec<&Leg>> = BTreeMap::new();
    for ran in legs.ran.iter().filter(|ran| (ran.of, ran.way) == (of, way)) {
        match &ran.came {
            Came::Measured(leg) => measured.entry(ran.start).or_default().push(leg),
            Came::Fault(fault) => _ = row.fault.get_or_insert_with(|| fault.clone()),
            Came::Left(why) => row.skipped = Some(why.clone()),
        }
    }
    // A figure of something that is wrong is none, nor is one that lacks a leg.
    if row.fault.is_none() && row.skipped.is_none() {
        let starts: Vec<Start> = measured.values().map(|legs| legs.iter().map(|leg| &leg.micros[..]).collect()).collect();
        row.series = series(&starts, point.calls);
        row.starts_us = Some(medians_of_starts(&starts, point.calls)).filter(|medians| medians.len() > 1).unwrap_or_default();
        let whole = || row.series.as_ref().map(|series| series.median_us * point.calls as f64);
        row.step_us = (point.scenario == Scenario::Step).then(whole).flatten();
        if row.series.is_some() {
            let distance = measured.values().flatten().map(|leg| leg.distance).fold(Distance::default(), Distance::max);
            (row.error, row.of_bound) = (Some(distance.relative), Some(distance.of_bound));
        }
    }
    row
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::tables::calls::calls;

    pub fn point(ranks: usize, tokens: usize) -> Point {
        let scenario = Scenario::Sweep;
        Point { scenario, ranks, tokens, hidden: 7168, dtype: DType::Bf16, calls: 100 }
    }

    /// A leg in which every call took so many microseconds.
    pub fn leg(way: Way, micros: f64) -> Came {
        let distance = Distance { relative: 3e-3, of_bound: 0.5 };
        Came::Measured(Leg { way, micros: vec![micros * 100.0; 3], distance, kernels: Vec::new(), overlaps: true })
    }

    /// Legs of the first start.
    fn of(legs: impl IntoIterator<Item = (Of, Way, Came)>) -> Legs {
        let ran = legs.into_iter().map(|(of, way, came)| Ran { of, start: 0, way, came }).collect();
        Legs { ran, skipped: Vec::new() }
    }

    /// The rows of a point whose medians are these. NCCL's two legs lie 0.2 µs apart; apart it takes 2 µs more.
    pub fn measured(point: &Point, nccl: f64, oneshot: Option<f64>, twoshot: Option<f64>) -> Vec<Row> {
        started(point, &[(nccl, oneshot, twoshot)])
    }

    /// The same with several starts.
    pub fn started(point: &Point, starts: &[(f64, Option<f64>, Option<f64>)]) -> Vec<Row> {
        let mut legs = Legs::default();
        for (start, &(nccl, oneshot, twoshot)) in starts.iter().enumerate() {
            let mut run = |of, way, micros| legs.ran.push(Ran { of, start, way, came: leg(way, micros) });
            for way in [Way::Nccl, Way::NcclApart] {
                for micros in [nccl - 0.1, nccl + 0.1] {
                    run(Of::Nccl, way, micros + if way == Way::NcclApart { 2.0 } else { 0.0 });
                }
            }
            for (way, micros) in [(Way::OneShot, oneshot), (Way::TwoShot, twoshot)] {
                match micros {
                    Some(micros) => run(Of::Artifact, way, micros),
                    None => legs.skipped.push((way, "left out".to_owned())),
                }
            }
        }
        rows(point, &legs, false, calls().oneshot(super::super::plan::FUNCTION, None))
    }

    /// The row of a mode.
    pub fn row_of(rows: &[Row], mode: Mode) -> &Row {
        rows.iter().find(|row| row.mode == mode).unwrap()
    }

    #[test]
    fn every_way_has_a_row_with_its_ratio_and_auto_is_one_of_them() {
        let rows = measured(&point(2, 3), 16.0, Some(5.3), Some(69.6));
        let modes: Vec<_> = rows.iter().map(|row| row.mode.word()).collect();
        assert_eq!(modes, ["nccl", "nccl-apart", "one-shot", "two-shot", "auto"]);
        let [nccl, apart, oneshot, twoshot, auto] = &rows[..] else { panic!("{rows:?}") };
        let close = |found: Option<f64>, right: f64| assert!((found.unwrap() - right).abs() < 1e-9, "{found:?}");
        close(oneshot.ratio, 5.3 / 16.0);
        assert_eq!((oneshot.difference, twoshot.difference), (Some(Difference::Faster), Some(Difference::Slower)));
        assert_eq!((auto.taken, auto.series), (Some(Mode::OneShot), oneshot.series));
        close(nccl.series.map(|series| series.noise_us), 0.2);
        assert_eq!((nccl.ratio, nccl.step_us, oneshot.error), (None, None, Some(3e-3)));
        close(oneshot.ratio_apart, 5.3 / 18.0);
        close(apart.ratio, 18.0 / 16.0);
        assert_eq!((oneshot.difference_apart, apart.difference), (Some(Difference::Faster), Some(Difference::Slower)));
        assert_eq!((nccl.ratio_apart, apart.ratio_apart), (None, None), "they are no rows of the fused path");
    }

    #[test]
    fn the_noise_of_nccl_apart_is_its_own_and_decides_of_its_own_difference_alone() {
        let legs = of([
            (Of::Nccl, Way::Nccl, leg(Way::Nccl, 16.0)),
            (Of::Nccl, Way::NcclApart, leg(Way::NcclApart, 16.0)),
            (Of::Artifact, Way::OneShot, leg(Way::OneShot, 14.0)),
            (Of::Nccl, Way::NcclApart, leg(Way::NcclApart, 20.0)),
            (Of::Nccl, Way::Nccl, leg(Way::Nccl, 16.0)),
        ]);
        let rows = rows(&point(2, 3), &legs, false, None);
        let oneshot = row_of(&rows, Mode::OneShot);
        assert_eq!((oneshot.difference, oneshot.difference_apart), (Some(Difference::Faster), Some(Difference::None)));
        assert_eq!(row_of(&rows, Mode::NcclApart).series.unwrap().noise_us, 4.0);
        assert!(oneshot.series.unwrap().noise_us < 0.1);
    }

    #[test]
    fn starts_are_told_and_how_far_they_lie_apart_is_noise() {
        let figures = [(16.0, Some(5.0), Some(68.8)), (16.0, Some(5.0), Some(78.8)), (16.0, Some(5.1), Some(69.0))];
        let rows = started(&point(2, 3), &figures);
        let twoshot = row_of(&rows, Mode::TwoShot);
        assert_eq!(twoshot.starts_us, [68.8, 78.8, 69.0]);
        let series = twoshot.series.unwrap();
        assert!(series.median_us == 69.0 && series.noise_us >= 10.0 && series.replays == 9, "{series:?}");
        assert!(row_of(&rows, Mode::OneShot).series.unwrap().noise_us < 0.3, "each way has its own");
        assert!(measured(&point(2, 3), 16.0, Some(5.0), None)[2].starts_us.is_empty(), "one start says nothing of others");
    }

    #[test]
    fn what_was_left_out_says_why_and_has_no_figure() {
        let rows = measured(&point(4, 3), 16.0, Some(5.3), None);
        let row = row_of(&rows, Mode::TwoShot);
        assert_eq!((row.series, row.skipped.as_deref(), row.ratio), (None, Some("left out"), None));
    }

    #[test]
    fn a_way_with_a_fault_in_any_leg_has_no_figure() {
        let legs = of([
            (Of::Nccl, Way::Nccl, leg(Way::Nccl, 16.0)),
            (Of::Artifact, Way::OneShot, leg(Way::OneShot, 5.0)),
            (Of::Artifact, Way::OneShot, Came::Fault("wrong".to_owned())),
        ]);
        let rows = rows(&point(2, 3), &legs, false, None);
        let row = row_of(&rows, Mode::OneShot);
        assert_eq!((row.series, row.fault.as_deref(), row.error), (None, Some("wrong"), None));
        assert!(rows[0].series.is_some() && rows.len() == 4, "no rule, no auto");
        assert!(legs.has_fault() && legs.fault(Of::Artifact, Way::OneShot).is_some());
        assert_eq!(legs.fault(Of::Against, Way::OneShot), None);
    }

    #[test]
    fn a_second_artifact_has_rows_of_its_own_and_the_first_says_its_ratio() {
        let legs =
            of([(Of::Artifact, 5.0), (Of::Against, 4.0)].map(|(of, micros)| (of, Way::OneShot, leg(Way::OneShot, micros))));
        let rows = rows(&point(2, 3), &legs, true, None);
        let [one, other] =
            [Of::Artifact, Of::Against].map(|of| rows.iter().find(|row| row.of == of && row.mode == Mode::OneShot).unwrap());
        assert_eq!((one.against_ratio, other.against_ratio), (Some(1.25), None));
        assert_eq!(one.against_difference, Some(Difference::Slower));
        assert_eq!(one.ratio, None, "NCCL was not measured");
    }

    #[test]
    fn a_step_says_its_whole_time() {
        let point = Point { scenario: Scenario::Step, ..point(2, 3) };
        let rows = measured(&point, 16.0, Some(5.0), Some(70.0));
        assert_eq!(row_of(&rows, Mode::OneShot).step_us, Some(500.0));
    }

    #[test]
    fn a_row_survives_being_json() {
        let once = measured(&point(4, 3), 16.0, Some(5.3), None);
        for row in once.into_iter().chain(started(&point(4, 3), &[(16.0, Some(5.3), None); 2])) {
            let value = serde_json::to_value(&row).unwrap();
            assert_eq!(serde_json::from_value::<Row>(value.clone()).unwrap(), row, "{value}");
            assert_eq!(value.get("median_us").is_some(), row.series.is_some());
        }
    }
}
