//! What a series of times comes to.

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
