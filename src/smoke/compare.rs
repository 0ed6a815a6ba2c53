//! What was found when the outputs of a replay were held against the reference, row by row; and doing so on the host.

use rayon::prelude::*;

use super::arrays::Array;
use super::cases::Case;
use super::inputs::Inputs;
use super::reference::{Distance, Expected, Outputs, Wrong};

/// The first rank whose outputs of a row are wrong.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    pub call: usize,
    pub rank: usize,
    pub token: usize,
    pub wrong: Wrong,
}

/// What was found of one token of one call, over all hosted ranks.
pub type Row = Result<Distance, Fault>;

/// What is wrong with a replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Fails {
    pub what: String,
    /// It is wrong in a way that no order of threads explains: an output that was never written, a write elsewhere.
    pub beyond_a_race: bool,
}

/// An array that was written where it must not be, the first of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Changed {
    pub rank: usize,
    pub call: usize,
    pub array: Array,
    /// Words of an input, or bytes behind an output.
    pub count: u64,
}

impl Changed {
    pub fn fails(&self) -> Fails {
        let Self { rank, call, array, count } = self;
        let what = if array.is_output() {
            format!("rank {rank}, call {call}: {count} bytes behind {array:?} were written")
        } else {
            format!("rank {rank}, call {call}: the input {array:?} was overwritten ({count} words)")
        };
        Fails { what, beyond_a_race: true }
    }
}

/// What was found in one replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    pub rows: Vec<Row>,
    pub changed: Option<Changed>,
}

impl Found {
    /// The distance of all rows; else what is wrong.
    pub fn verdict(&self, hidden: usize) -> Result<Distance, Fails> {
        match &self.changed {
            Some(changed) => Err(changed.fails()),
            None => verdict(&self.rows, hidden),
        }
    }

    /// How two findings about the same replay differ, the first difference in words; none where they say the same.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let place = |found: &Self| found.changed.map(|changed| (changed.rank, changed.call, changed.array));
        if place(self) != place(other) {
            return Some(format!("changed where it must not be: {:?} and {:?}", self.changed, other.changed));
        }
        difference(&self.rows, &other.rows)
    }
}

/// Holds the outputs of the `hosted` ranks (by rank and call) against the reference, on the host's cores, in as many calls
/// as there are `inputs` of, which are by call and rank.
pub fn on_host(case: &Case, inputs: &[Vec<Inputs>], hosted: &[usize], outputs: &[Vec<Outputs>]) -> Vec<Row> {
    let rows: Vec<(usize, usize)> = (0..inputs.len()).flat_map(|call| (0..case.tokens).map(move |token| (call, token))).collect();
    rows.into_par_iter()
        .map(|(call, token)| {
            let expected = Expected::new(case, &inputs[call], token);
            hosted.iter().zip(outputs).try_fold(Distance::default(), |distance, (&rank, outputs)| {
                let found = expected.check(rank, &outputs[call]);
                found.map(|found| distance.max(found)).map_err(|wrong| Fault { call, rank, token, wrong })
            })
        })
        .collect()
}

/// The distance of all rows; else what is wrong, the first in words.
pub fn verdict(rows: &[Row], hidden: usize) -> Result<Distance, Fails> {
    let faults = || rows.iter().filter_map(|row| row.as_ref().err());
    let Some(Fault { call, rank, token, wrong }) = faults().next() else {
        return Ok(rows.iter().flatten().copied().fold(Distance::default(), Distance::max));
    };
    let (wrong_rows, rows) = (faults().count(), rows.len());
    Err(Fails {
        what: format!(
            "rank {rank}, call {call}, token {token}: {} ({wrong_rows} of {rows} tokens are wrong)",
            describe(wrong, hidden)
        ),
        beyond_a_race: faults().any(|fault| fault.wrong.unwritten > 0),
    })
}

fn difference(one: &[Row], other: &[Row]) -> Option<String> {
    if one.len() != other.len() {
        return Some(format!("{} rows and {} rows", one.len(), other.len()));
    }
    let at = one.iter().zip(other).position(|(one, other)| match (one, other) {
        (Ok(one), Ok(other)) => !(near(one.relative, other.relative) && near(one.of_bound, other.of_bound)),
        (Err(one), Err(other)) => {
            let place = |fault: &Fault| (fault.call, fault.rank, fault.token, fault.wrong.output, fault.wrong.column);
            let counts = |fault: &Fault| (fault.wrong.count, fault.wrong.unwritten);
            place(one) != place(other) || counts(one) != counts(other)
        }
        _ => true,
    })?;
    Some(format!("row {at}: {:?} and {:?}", one[at], other[at]))
}

fn near(one: f64, other: f64) -> bool {
    (one - other).abs() <= 1e-9 * one.abs().max(other.abs())
}

fn describe(wrong: &Wrong, hidden: usize) -> String {
    let Wrong { output, count, unwritten, column, got, least, most } = wrong;
    if unwritten == count {
        return format!("{output}: {count} elements of {hidden} were never written, the first at {column}");
    }
    let never = if *unwritten > 0 { format!(", {unwritten} of them never written") } else { String::new() };
    format!(
        "{output}: {count} elements are wrong{never}; the first, at {column}, is {got:.6e} and must be in {least:.6e} to {most:.6e}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(count: usize, unwritten: usize) -> Row {
        let wrong = Wrong { output: "norm_out", count, unwritten, column: 7, got: 2.0, least: 0.5, most: 1.5 };
        Err(Fault { call: 1, rank: 2, token: 3, wrong })
    }

    fn right(of_bound: f64) -> Row {
        Ok(Distance { relative: of_bound / 100.0, of_bound })
    }

    #[test]
    fn the_first_fault_is_told_with_how_many_tokens_are_wrong_and_whether_any_was_never_written() {
        assert_eq!(verdict(&[right(0.5), right(0.75)], 64).unwrap(), right(0.75).unwrap());
        let fails = verdict(&[right(0.5), wrong(2, 0), wrong(3, 3)], 64).unwrap_err();
        assert!(
            fails.beyond_a_race && fails.what.contains("rank 2, call 1, token 3: norm_out: 2 elements are wrong"),
            "{}",
            fails.what
        );
        assert!(fails.what.contains("(2 of 3 tokens are wrong)"), "{}", fails.what);
        let fails = verdict(&[wrong(64, 64)], 64).unwrap_err();
        assert!(fails.what.contains("64 elements of 64 were never written"), "{}", fails.what);
        assert!(!verdict(&[wrong(2, 0)], 64).unwrap_err().beyond_a_race);
    }

    #[test]
    fn findings_differ_by_verdict_place_count_and_distance() {
        let rows = || vec![right(0.5), wrong(2, 1)];
        assert_eq!(difference(&rows(), &rows()), None);
        for other in [
            vec![right(0.5), right(0.5)],
            vec![right(0.5), wrong(2, 2)],
            vec![right(0.5), wrong(3, 1)],
            vec![right(0.500001), wrong(2, 1)],
            vec![right(0.5)],
        ] {
            assert!(difference(&rows(), &other).is_some(), "{other:?}");
        }
    }
}
