//! What was measured, one row for each way through a point, and what each says beside NCCL.

use serde::{Deserialize, Serialize};

use super::measure::{Came, Leg};
use super::plan::{Point, Scenario, Way};
use super::stats::{Difference, Series, difference, series};
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

/// How the sums are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    Nccl,
    OneShot,
    TwoShot,
    /// What FlashInfer takes where nobody chooses: one of the two, with its figures.
    Auto,
}

impl Mode {
    pub fn word(self) -> &'static str {
        match self {
            Self::Nccl => "nccl",
            Self::OneShot => "one-shot",
            Self::TwoShot => "two-shot",
            Self::Auto => "auto",
        }
    }
}

impl From<Way> for Mode {
    fn from(way: Way) -> Self {
        match way {
            Way::Nccl => Self::Nccl,
            Way::OneShot => Self::OneShot,
            Way::TwoShot => Self::TwoShot,
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
    /// Of all calls of the graph, where it is a whole step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_us: Option<f64>,
    /// Its median by that of NCCL + norm.
    pub ratio: Option<f64>,
    /// Whether it is faster than NCCL + norm, beyond the noise.
    pub difference: Option<Difference>,
    /// Its median by that of the second artifact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against_ratio: Option<f64>,
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
            step_us: None,
            ratio: None,
            difference: None,
            against_ratio: None,
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

    /// For people: `one-shot 2 ranks 3 tokens`.
    pub fn name(&self) -> String {
        format!("{} {} {} ranks {} tokens", self.scenario.word(), self.mode.word(), self.ranks, self.tokens)
    }
}

/// What came of all legs of a point: whose they are, and what they came to. A way that was left out has a reason in their place.
#[derive(Debug, Default)]
pub struct Legs {
    pub came: Vec<(Of, Way, Came)>,
    pub skipped: Vec<(Way, String)>,
}

/// The rows of a point. `rule` tells what `auto` is.
pub fn rows(point: &Point, legs: &Legs, against: bool, rule: Option<&OneShot>) -> Vec<Row> {
    let nccl = row(point, Of::Nccl, Way::Nccl, legs);
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
            // What is measured once has no spread of its own: NCCL's stands for it.
            own.noise_us = own.noise_us.max(nccl.noise_us);
            row.ratio = Some(own.median_us / nccl.median_us);
            row.difference = Some(difference(&own, nccl));
            row.series = Some(own);
        }
        let other = others.iter().find(|other| row.of == Of::Artifact && other.is_like(row));
        row.against_ratio = other.and_then(|other| other.series).map(|other| own.median_us / other.median_us);
    }
    rows.insert(0, nccl);
    rows
}

fn row(point: &Point, of: Of, way: Way, legs: &Legs) -> Row {
    let mut row = Row::new(point, of, way.into());
    let skipped = legs.skipped.iter().find(|(skipped, _)| *skipped == way);
    row.skipped = skipped.map(|(_, why)| why.clone());
    let mut measured: Vec<&Leg> = Vec::new();
    for (_, _, came) in legs.came.iter().filter(|(whose, one, _)| (*whose, *one) == (of, way)) {
        match came {
            Came::Measured(leg) => measured.push(leg),
            Came::Fault(fault) => _ = row.fault.get_or_insert_with(|| fault.clone()),
            Came::Left(why) => row.skipped = Some(why.clone()),
        }
    }
    // A figure of something that is wrong is none, nor is one that lacks a leg.
    if row.fault.is_none() && row.skipped.is_none() {
        let micros: Vec<&[f64]> = measured.iter().map(|leg| &leg.micros[..]).collect();
        row.series = series(&micros, point.calls);
        let whole = || row.series.as_ref().map(|series| series.median_us * point.calls as f64);
        row.step_us = (point.scenario == Scenario::Step).then(whole).flatten();
        if row.series.is_some() {
            let distance = measured.iter().map(|leg| leg.distance).fold(Distance::default(), Distance::max);
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

    /// The rows of a point whose medians are these; NCCL's two legs lie 0.2 µs apart.
    pub fn measured(point: &Point, nccl: f64, oneshot: Option<f64>, twoshot: Option<f64>) -> Vec<Row> {
        let mut legs = Legs::default();
        legs.came.push((Of::Nccl, Way::Nccl, leg(Way::Nccl, nccl - 0.1)));
        for (way, micros) in [(Way::OneShot, oneshot), (Way::TwoShot, twoshot)] {
            match micros {
                Some(micros) => legs.came.push((Of::Artifact, way, leg(way, micros))),
                None => legs.skipped.push((way, "left out".to_owned())),
            }
        }
        legs.came.push((Of::Nccl, Way::Nccl, leg(Way::Nccl, nccl + 0.1)));
        rows(point, &legs, false, calls().oneshot(super::super::plan::FUNCTION, None))
    }

    #[test]
    fn every_way_has_a_row_with_its_ratio_and_auto_is_one_of_them() {
        let rows = measured(&point(2, 3), 16.0, Some(5.3), Some(69.6));
        assert_eq!(rows.iter().map(|row| row.mode.word()).collect::<Vec<_>>(), ["nccl", "one-shot", "two-shot", "auto"]);
        let close = |found: Option<f64>, right: f64| assert!((found.unwrap() - right).abs() < 1e-9, "{found:?}");
        close(rows[1].ratio, 5.3 / 16.0);
        assert_eq!((rows[1].difference, rows[2].difference), (Some(Difference::Faster), Some(Difference::Slower)));
        assert_eq!((rows[3].taken, rows[3].series), (Some(Mode::OneShot), rows[1].series));
        close(rows[0].series.map(|series| series.noise_us), 0.2);
        assert_eq!((rows[0].ratio, rows[0].step_us, rows[1].error), (None, None, Some(3e-3)));
    }

    #[test]
    fn what_was_left_out_says_why_and_has_no_figure() {
        let rows = measured(&point(4, 3), 16.0, Some(5.3), None);
        assert_eq!((rows[2].series, rows[2].skipped.as_deref(), rows[2].ratio), (None, Some("left out"), None));
    }

    #[test]
    fn a_way_with_a_fault_in_any_leg_has_no_figure() {
        let (point, mut legs) = (point(2, 3), Legs::default());
        legs.came.push((Of::Nccl, Way::Nccl, leg(Way::Nccl, 16.0)));
        legs.came.push((Of::Artifact, Way::OneShot, leg(Way::OneShot, 5.0)));
        legs.came.push((Of::Artifact, Way::OneShot, Came::Fault("wrong".to_owned())));
        let rows = rows(&point, &legs, false, None);
        assert_eq!((rows[1].series, rows[1].fault.as_deref(), rows[1].error), (None, Some("wrong"), None));
        assert!(rows[0].series.is_some() && rows.len() == 3, "no rule, no auto");
    }

    #[test]
    fn a_second_artifact_has_rows_of_its_own_and_the_first_says_its_ratio() {
        let (point, mut legs) = (point(2, 3), Legs::default());
        for (of, micros) in [(Of::Artifact, 5.0), (Of::Against, 4.0), (Of::Artifact, 5.0)] {
            legs.came.push((of, Way::OneShot, leg(Way::OneShot, micros)));
        }
        let rows = rows(&point, &legs, true, None);
        let [one, other] =
            [Of::Artifact, Of::Against].map(|of| rows.iter().find(|row| row.of == of && row.mode == Mode::OneShot).unwrap());
        assert_eq!((one.against_ratio, other.against_ratio), (Some(1.25), None));
        assert_eq!(one.ratio, None, "NCCL was not measured");
    }

    #[test]
    fn a_step_says_its_whole_time() {
        let point = Point { scenario: Scenario::Step, ..point(2, 3) };
        let rows = measured(&point, 16.0, Some(5.0), Some(70.0));
        assert_eq!(rows[1].step_us, Some(500.0));
    }

    #[test]
    fn a_row_survives_being_json() {
        for row in measured(&point(4, 3), 16.0, Some(5.3), None) {
            let value = serde_json::to_value(&row).unwrap();
            assert_eq!(serde_json::from_value::<Row>(value.clone()).unwrap(), row, "{value}");
            assert_eq!(value.get("median_us").is_some(), row.series.is_some());
        }
    }
}
