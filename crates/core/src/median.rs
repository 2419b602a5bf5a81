//! The median, for times: one slow run or step does not change it.

/// The middle value, or the mean of the two middle values; none for an empty input.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = *sorted.get((sorted.len() - 1) / 2)?;
    Some((upper + lower) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 9.0]), Some(3.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median([]), None);
    }
}
