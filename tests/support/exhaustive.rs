//! The share of a large set of cases that one run of the tests tries.

/// Returns true if every case is tried: `FINETUNE_EXHAUSTIVE` is set, as `.ci/run exhaustive` does.
pub(crate) fn is_exhaustive() -> bool {
    std::env::var_os("FINETUNE_EXHAUSTIVE").is_some()
}

/// Returns a third of `cases`, always the same, or all of them if [`is_exhaustive`]. `inner` is the
/// length of the innermost loop that made them: of three rounds of that loop, each case has a place
/// in one.
pub(crate) fn third<T>(cases: Vec<T>, inner: usize) -> Vec<T> {
    chosen(cases, |i| (i % inner + i / inner).is_multiple_of(3))
}

/// Returns each third case of a list, from case `first` on, or all of them if [`is_exhaustive`].
pub(crate) fn each_third<T>(cases: impl IntoIterator<Item = T>, first: usize) -> Vec<T> {
    chosen(cases, |i| i % 3 == first % 3)
}

fn chosen<T>(cases: impl IntoIterator<Item = T>, is_chosen: impl Fn(usize) -> bool) -> Vec<T> {
    let all = is_exhaustive();
    let cases = cases.into_iter().enumerate();
    cases.filter(|(i, _)| all || is_chosen(*i)).map(|(_, case)| case).collect()
}
