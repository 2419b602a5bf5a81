//! Golden models and runs of all families. Those of the second set are in tests/golden/families, made
//! by tests/golden/scripts/make_families.py.

use std::path::{Path, PathBuf};

/// Returns the path of a file or folder of a golden model or run: `models/tiny-llama`.
pub(crate) fn golden_of_family(path: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    [golden.join(path), golden.join("families").join(path)]
        .into_iter()
        .find(|path| path.exists())
        .expect(path)
}

/// Returns the values of a parameter that make_families.py stores as a tensor of shape `stored`: all,
/// or of more than 512 values every k-th of them.
pub(crate) fn sample(values: Vec<f32>, stored: &[usize]) -> Vec<f32> {
    let (count, wanted) = (values.len(), stored.iter().product::<usize>());
    let step = if wanted == count { 1 } else { 3 * ((count / 256) | 1) };
    values.into_iter().step_by(step).collect()
}
