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
    /// How far medians of the same thing, measured at different times of the run, lay apart.
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

/// What all legs of one thing say together; each leg holds the times of its replays, for `calls` calls.
pub fn series(legs: &[&[f64]], calls: usize) -> Option<Series> {
    let per_call = |micros: &f64| micros / calls as f64;
    let all: Vec<f64> = legs.iter().copied().flatten().map(per_call).collect();
    let medians: Vec<f64> = legs.iter().filter_map(|leg| median(&leg.iter().map(per_call).collect::<Vec<_>>())).collect();
    let most = medians.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let least = medians.iter().copied().fold(f64::INFINITY, f64::min);
    Some(Series {
        median_us: median(&all)?,
        p99_us: quantile(&all, 0.99)?,
        min_us: quantile(&all, 0.0)?,
        noise_us: (most - least).max(RESOLUTION / calls as f64),
        replays: all.len(),
    })
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
        let found = series(&[&first, &again], 100).unwrap();
        assert_eq!((found.median_us, found.min_us, found.p99_us, found.replays), (10.5, 9.9, 50.0, 6));
        assert!((found.noise_us - 1.0).abs() < 1e-9, "{found:?}");
        let single = series(&[&first], 100).unwrap();
        assert_eq!(single.noise_us, RESOLUTION / 100.0, "the clock's own");
        assert_eq!(series(&[], 100), None);
        assert_eq!(series(&[&[]], 100), None);
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
