//! What a series of times says, and when two series differ.

use serde::{Deserialize, Serialize};

use crate::smoke::quantiles::{median, quantile};

/// What the clock of events cannot tell apart, in microseconds.
const RESOLUTION: f64 = 1.0;

/// Times of one call, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Series {
    pub median_us: f64,
    pub p99_us: f64,
    pub min_us: f64,
    /// How far medians of the same thing lay apart: those of the legs of one start, and of all starts.
    pub noise_us: f64,
    pub replays: usize,
}

/// Which of two is faster, beyond the noise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Difference {
    Faster,
    Slower,
    None,
}

/// The times of the replays of each leg, for all timed calls, of one start of the workers.
pub type Start<'l> = Vec<&'l [f64]>;

/// What all legs of one thing say together: the median over starts of each start's median, so that no start counts for more than
/// another. A graph holds `calls` timed calls.
pub fn series(starts: &[Start], calls: usize) -> Option<Series> {
    let legs = || starts.iter().flatten().copied();
    let all = per_call(legs().flatten(), calls);
    // The median of a start lies between those of its legs: how far legs lie apart is never less than how far starts do.
    let medians: Vec<f64> = legs().filter_map(|leg| median(&per_call(leg, calls))).collect();
    let most = medians.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let least = medians.iter().copied().fold(f64::INFINITY, f64::min);
    Some(Series {
        median_us: median(&medians_of_starts(starts, calls))?,
        p99_us: quantile(&all, 0.99)?,
        min_us: quantile(&all, 0.0)?,
        noise_us: (most - least).max(RESOLUTION / calls as f64),
        replays: all.len(),
    })
}

/// The median of one call, in each start that has a figure.
pub fn medians_of_starts(starts: &[Start], calls: usize) -> Vec<f64> {
    starts.iter().filter_map(|legs| median(&per_call(legs.iter().copied().flatten(), calls))).collect()
}

fn per_call<'m>(micros: impl IntoIterator<Item = &'m f64>, calls: usize) -> Vec<f64> {
    micros.into_iter().map(|micros| micros / calls as f64).collect()
}

/// Whether `one` is faster than `other`, where the medians lie further apart than the noise of either.
pub fn difference(one: &Series, other: &Series) -> Difference {
    let apart = other.median_us - one.median_us;
    let noise = one.noise_us.max(other.noise_us);
    match apart {
        apart if apart > noise => Difference::Faster,
        apart if -apart > noise => Difference::Slower,
        _ => Difference::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(median_us: f64, noise_us: f64) -> Series {
        Series { median_us, p99_us: median_us, min_us: median_us, noise_us, replays: 1 }
    }

    #[test]
    fn the_noise_is_how_far_the_medians_of_the_legs_lie_apart() {
        let (first, again) = ([1000.0, 1010.0, 990.0], [1100.0, 1090.0, 5000.0]);
        let found = series(&[vec![&first, &again]], 100).unwrap();
        assert_eq!((found.median_us, found.min_us, found.p99_us, found.replays), (10.5, 9.9, 50.0, 6));
        assert!((found.noise_us - 1.0).abs() < 1e-9, "{found:?}");
        let single = series(&[vec![&first]], 100).unwrap();
        assert_eq!(single.noise_us, RESOLUTION / 100.0, "the clock's own");
        assert_eq!(series(&[], 100), None);
        assert_eq!(series(&[vec![&[]]], 100), None);
    }

    #[test]
    fn what_starts_say_is_the_median_of_their_medians_and_the_noise_is_no_less_than_their_spread() {
        // As seen on two H200: each start is quiet, and another start is 15 % away.
        let starts: [&[f64]; 3] = [&[6880.0, 6870.0, 6890.0], &[7880.0; 9], &[6900.0; 3]];
        let each: Vec<Start> = starts.iter().map(|start| vec![*start]).collect();
        let found = series(&each, 100).unwrap();
        assert_eq!((found.median_us, found.replays), (69.0, 15), "though more replays say 78.8");
        assert!((found.noise_us - 10.0).abs() < 1e-9, "{found:?}");
        assert_eq!(medians_of_starts(&each, 100), [68.8, 78.8, 69.0]);
        assert_eq!(medians_of_starts(&[vec![], vec![&[100.0]]], 100), [1.0]);
    }

    #[test]
    fn a_difference_within_the_noise_is_none() {
        assert_eq!(difference(&flat(5.0, 0.1), &flat(16.0, 0.5)), Difference::Faster);
        assert_eq!(difference(&flat(16.0, 0.5), &flat(5.0, 0.1)), Difference::Slower);
        assert_eq!(difference(&flat(15.6, 0.1), &flat(16.0, 0.5)), Difference::None);
        assert_eq!(difference(&flat(15.6, 0.5), &flat(16.0, 0.1)), Difference::None, "the noise of either counts");
        assert_eq!(difference(&flat(5.0, 0.0), &flat(5.0, 0.0)), Difference::None);
    }
}
