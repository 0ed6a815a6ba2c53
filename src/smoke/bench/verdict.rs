//! From rows to a decision: with which ranks the fused path pays, up to how many tokens, and how far one-shot.

use serde::Serialize;

use super::plan::{Mode, Scenario};
use super::rows::{Of, Row};
use super::stats::Difference;
use crate::policy::{FORMAT, Policy, Ranks};

/// What is to be done with one number of ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decision {
    pub ranks: usize,
    /// The fused path is to be used.
    pub fused: bool,
    /// Up to how many tokens; the largest that was measured where it is faster everywhere.
    pub max_tokens: Option<usize>,
    /// One-shot up to here, two-shot beyond; none where FlashInfer's own rule may decide.
    pub oneshot_tokens: Option<usize>,
    pub reason: String,
}

/// The decision for each number of ranks. `machine` is named in the reasons.
pub fn decide(rows: &[Row], machine: &str) -> Vec<Decision> {
    let mut counts: Vec<usize> = rows.iter().map(|row| row.ranks).collect();
    counts.sort();
    counts.dedup();
    counts.into_iter().map(|ranks| decision(rows, ranks, machine)).collect()
}

/// What was measured at one number of tokens.
struct At<'r> {
    tokens: usize,
    nccl: Option<&'r Row>,
    apart: Option<&'r Row>,
    oneshot: Option<&'r Row>,
    twoshot: Option<&'r Row>,
}

impl<'r> At<'r> {
    /// NCCL apart, where it is faster than in line: then it is what the fused path must be faster than.
    fn stronger_apart(&self) -> Option<&'r Row> {
        self.apart.filter(|apart| apart.difference == Some(Difference::Faster))
    }

    /// Whether a fused row is faster than the stronger of the two.
    fn differs(&self, row: &Row) -> Option<Difference> {
        if self.stronger_apart().is_some() { row.difference_apart } else { row.difference }
    }
}

fn decision(rows: &[Row], ranks: usize, machine: &str) -> Decision {
    let no = |reason: String| Decision { ranks, fused: false, max_tokens: None, oneshot_tokens: None, reason };
    let own = |row: &&Row| row.ranks == ranks && row.of != Of::Against;
    if let Some(fault) = rows.iter().filter(own).find_map(|row| row.fault.as_ref().map(|fault| (row, fault))) {
        return no(format!("{}: {}", fault.0.name(), fault.1));
    }
    let mut points = by_tokens(rows.iter().filter(own));
    // A point without both sides says nothing, and what lies beyond it neither.
    points.truncate(points.iter().take_while(|at| at.nccl.is_some() && at.oneshot.or(at.twoshot).is_some()).count());
    if points.is_empty() {
        return no("nothing was measured on both sides".to_owned());
    }
    // One-shot goes on while two-shot is not faster beyond the noise.
    let oneshot = points.iter().take_while(|at| at.oneshot.is_some() && !is_faster(at.twoshot, at.oneshot)).last();
    let oneshot = oneshot.map_or(0, |at| at.tokens);
    let chosen = |at: &At| {
        if at.tokens <= oneshot { at.oneshot } else { at.twoshot }.is_some_and(|row| at.differs(row) == Some(Difference::Faster))
    };
    let won = points.iter().take_while(|at| chosen(at)).count();
    let figures = |at: &At| {
        let row = if at.tokens <= oneshot { at.oneshot } else { at.twoshot.or(at.oneshot) };
        let micros = |row: Option<&Row>| row.and_then(|row| row.series).map_or(f64::NAN, |series| series.median_us);
        let mode = row.map_or("", |row| row.mode.word());
        let (rival, name) = match at.stronger_apart() {
            Some(apart) => (Some(apart), "NCCL apart"),
            None => (at.nccl, "NCCL + norm"),
        };
        format!("{mode} {:.1} µs, {name} {:.1} µs at {} tokens", micros(row), micros(rival), at.tokens)
    };
    let Some(last) = won.checked_sub(1).map(|last| &points[last]) else {
        return no(format!("{}; {machine}, `fi-arch bench`", figures(&points[0])));
    };
    let end = match points.get(won) {
        Some(next) => format!("no longer: {}", figures(next)),
        None => figures(last),
    };
    // The case that the project began with says more than one token does.
    let telling = points[..won].iter().find(|at| at.tokens == super::plan::STEP_TOKENS).unwrap_or(&points[0]);
    let begin = figures(telling);
    let figures = if telling.tokens == last.tokens && won == points.len() { begin } else { format!("{begin}; {end}") };
    // Two-shot deals tokens out to the ranks, so one-shot it is up to as many in any case.
    let oneshot = oneshot.max(ranks).min(last.tokens);
    Decision {
        ranks,
        fused: true,
        max_tokens: Some(last.tokens),
        oneshot_tokens: (oneshot >= ranks).then_some(oneshot),
        reason: format!("{figures}; {machine}, `fi-arch bench`"),
    }
}

/// The points by tokens. Where a sweep and a step were both measured, the sweep counts.
fn by_tokens<'r>(rows: impl Iterator<Item = &'r Row> + Clone) -> Vec<At<'r>> {
    let mut tokens: Vec<usize> = rows.clone().map(|row| row.tokens).collect();
    tokens.sort();
    tokens.dedup();
    let find = |tokens: usize, mode: Mode| {
        let found = |scenario| {
            let is_it = |row: &&Row| (row.scenario, row.tokens, row.mode) == (scenario, tokens, mode);
            rows.clone().find(|row| is_it(row) && row.series.is_some())
        };
        found(Scenario::Sweep).or_else(|| found(Scenario::Step))
    };
    let at = |tokens: usize| At {
        tokens,
        nccl: find(tokens, Mode::Nccl),
        apart: find(tokens, Mode::NcclApart),
        oneshot: find(tokens, Mode::OneShot),
        twoshot: find(tokens, Mode::TwoShot),
    };
    tokens.into_iter().map(at).collect()
}

fn is_faster(one: Option<&Row>, other: Option<&Row>) -> bool {
    let series = |row: Option<&Row>| row.and_then(|row| row.series);
    match (series(one), series(other)) {
        (Some(one), Some(other)) => super::stats::difference(&one, &other) == Difference::Faster,
        _ => false,
    }
}

/// The policy that the decisions amount to. Numbers of ranks for which the fused path does not pay are not in it.
pub fn policy(decisions: &[Decision]) -> Policy {
    let tokens = |tokens: Option<usize>| tokens.and_then(|tokens| u32::try_from(tokens).ok());
    let ranks = decisions.iter().filter(|decision| decision.fused).map(|decision| Ranks {
        count: decision.ranks as u32,
        max_tokens: tokens(decision.max_tokens),
        oneshot_tokens: tokens(decision.oneshot_tokens),
        reason: decision.reason.clone(),
    });
    Policy { format: FORMAT, workspace_tokens: None, ranks: ranks.collect() }
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Point, Way};
    use super::super::rows::tests::{measured, point};
    use super::*;

    /// The rows of a sweep: tokens, NCCL, one-shot, two-shot.
    fn sweep(ranks: usize, figures: &[(usize, f64, f64, Option<f64>)]) -> Vec<Row> {
        let of = |(tokens, nccl, oneshot, twoshot): &(usize, f64, f64, Option<f64>)| {
            measured(&point(ranks, *tokens), *nccl, Some(*oneshot), *twoshot)
        };
        figures.iter().flat_map(of).collect()
    }

    fn only(rows: &[Row]) -> Decision {
        let decisions = decide(rows, "2 × NVIDIA H200, driver 580, NVLink");
        policy(&decisions).check().unwrap();
        decisions.into_iter().next().unwrap()
    }

    #[test]
    fn it_is_used_up_to_the_last_number_of_tokens_at_which_the_better_mode_is_faster() {
        // As seen on two H200, and slower at 2048.
        let decision = only(&sweep(
            2,
            &[
                (1, 16.0, 4.9, None),
                (3, 16.0, 5.3, Some(69.6)),
                (64, 24.0, 7.8, Some(18.9)),
                (1024, 91.0, 80.0, Some(76.9)),
                (2048, 150.0, 160.0, Some(155.0)),
            ],
        ));
        assert_eq!((decision.fused, decision.max_tokens, decision.oneshot_tokens), (true, Some(1024), Some(64)));
        assert!(decision.reason.contains("one-shot 5.3 µs, NCCL + norm 16.0 µs at 3 tokens"), "{}", decision.reason);
        assert!(decision.reason.contains("no longer: two-shot 155.0 µs, NCCL + norm 150.0 µs at 2048"), "{}", decision.reason);
        assert!(decision.reason.contains("H200"), "{}", decision.reason);
    }

    #[test]
    fn a_gap_ends_it_even_where_it_is_faster_beyond() {
        let decision = only(&sweep(2, &[(1, 16.0, 4.9, None), (4, 16.0, 16.1, Some(20.0)), (8, 16.0, 5.0, Some(20.0))]));
        assert_eq!(decision.max_tokens, Some(1));
        assert_eq!(decision.oneshot_tokens, None, "FlashInfer's own rule has nothing else there");
    }

    #[test]
    fn what_is_not_faster_beyond_the_noise_is_not_used_and_says_the_figures() {
        for oneshot in [20.0, 15.9] {
            let decision = only(&sweep(4, &[(1, 16.0, oneshot, None), (8, 16.0, 5.0, Some(20.0))]));
            assert_eq!((decision.fused, decision.max_tokens), (false, None));
            assert!(
                decision.reason.contains(&format!("one-shot {oneshot:.1} µs, NCCL + norm 16.0 µs at 1 tokens")),
                "{}",
                decision.reason
            );
            assert!(policy(&[decision]).ranks.is_empty());
        }
    }

    #[test]
    fn one_shot_goes_at_least_as_far_as_two_shot_is_refused() {
        let decision = only(&sweep(4, &[(1, 30.0, 5.0, None), (8, 30.0, 20.0, Some(10.0)), (64, 60.0, 50.0, Some(20.0))]));
        assert_eq!((decision.max_tokens, decision.oneshot_tokens), (Some(64), Some(4)));
    }

    #[test]
    fn a_fault_of_the_artifact_or_of_nccl_ends_it_and_one_of_the_second_artifact_does_not() {
        let mut rows = sweep(2, &[(3, 16.0, 5.3, Some(69.6))]);
        rows[3].fault = Some("wrong numbers".to_owned());
        let decision = only(&rows);
        assert!(!decision.fused && decision.reason.contains("two-shot 2 ranks 3 tokens: wrong numbers"), "{}", decision.reason);
        rows[3].of = Of::Against;
        assert!(only(&rows).fused);
    }

    #[test]
    fn nccl_apart_decides_only_where_it_is_the_stronger() {
        let mut rows = sweep(2, &[(1, 16.0, 15.0, None)]);
        assert!(only(&rows).fused);
        // Apart it takes 18 µs there: what the fused row is beside that does not count.
        rows[2].difference_apart = Some(Difference::None);
        assert!(only(&rows).fused);
        rows[1].difference = Some(Difference::Faster);
        let decision = only(&rows);
        assert!(!decision.fused && decision.reason.contains("NCCL apart 18.0 µs"), "{}", decision.reason);
    }

    #[test]
    fn without_nccl_nothing_is_said() {
        let mut rows = sweep(2, &[(3, 16.0, 5.3, Some(69.6))]);
        rows[0].series = None;
        assert!(!only(&rows).fused);
        assert!(decide(&[], "").is_empty());
    }

    #[test]
    fn every_number_of_ranks_is_decided_by_itself_and_a_step_alone_is_enough() {
        let mut rows = sweep(2, &[(3, 16.0, 5.3, Some(69.6))]);
        let step = Point { scenario: Scenario::Step, ..point(4, 3) };
        rows.extend(measured(&step, 16.0, Some(5.0), None));
        rows.extend(sweep(8, &[(3, 16.0, 25.3, None)]));
        let decisions = decide(&rows, "somewhere");
        let found: Vec<_> = decisions.iter().map(|decision| (decision.ranks, decision.fused, decision.max_tokens)).collect();
        assert_eq!(found, [(2, true, Some(3)), (4, true, Some(3)), (8, false, None)]);
        let policy = policy(&decisions);
        policy.check().unwrap();
        assert_eq!(policy.counts(), "2 and 4");
        assert_eq!(Way::Nccl.word(), "nccl");
    }
}
