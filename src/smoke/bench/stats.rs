//! What a series of times says, and when two series differ.

use serde::{Deserialize, Serialize};

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

/// The value at a share of the sorted values: the smallest that at least that share does not exceed.
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

/// The middle value; the mean of the two middle ones where there is none.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        even if even % 2 == 0 => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
        _ => Some(sorted[middle]),
    }
}

/// The slowest rank's time of each replay.
pub fn slowest(ranks: &[Vec<f64>]) -> Vec<f64> {
    let replays = ranks.iter().map(Vec::len).min().unwrap_or(0);
    (0..replays).map(|replay| ranks.iter().map(|rank| rank[replay]).fold(0.0, f64::max)).collect()
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
    fn quantiles_are_values_of_the_series_and_the_median_is_its_middle() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(
            (quantile(&hundred, 0.99), quantile(&hundred, 0.0), quantile(&hundred, 1.0)),
            (Some(99.0), Some(1.0), Some(100.0))
        );
        assert_eq!((median(&hundred), median(&[3.0, 1.0, 9.0])), (Some(50.5), Some(3.0)));
        assert_eq!((quantile(&[7.0], 0.99), quantile(&[], 0.5), median(&[])), (Some(7.0), None, None));
    }

    #[test]
    fn the_time_of_a_replay_is_that_of_its_slowest_rank() {
        assert_eq!(slowest(&[vec![1.0, 5.0], vec![2.0, 3.0]]), [2.0, 5.0]);
        assert!(slowest(&[vec![1.0], vec![]]).is_empty() && slowest(&[]).is_empty());
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
