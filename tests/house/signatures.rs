//! A public signature has no tuple of more than two elements.

use super::Source;
use super::items::{functions, largest_tuple};

/// The largest tuple in a public signature.
const ELEMENTS: usize = 2;

/// Returns public functions with large tuples, whose positions have no names.
pub(super) fn tuples(source: &Source) -> Vec<String> {
    let mut faults = Vec::new();
    for one in functions(source).into_iter().filter(|one| one.public) {
        let elements = largest_tuple(&one.parameters).max(largest_tuple(&one.returns));
        if elements > ELEMENTS {
            faults.push(format!("{}: fn {} has a tuple of {elements}", source.path, one.name));
        }
    }
    faults
}

#[test]
fn tuples_in_signatures() {
    let bad = [
        "pub fn f(a: (u8, u8, u8)) {}",
        "pub fn f() -> Result<(A, B, C)> {}",
        "pub trait T {\n    fn f(&self) -> Vec<(A, B, C)>;\n}",
    ];
    for text in bad {
        assert_eq!(tuples(&Source::new("data/a.rs", text)).len(), 1, "{text}");
    }
    let good = [
        "pub fn f(a: (u8, u8), b: u8, c: u8) {}",
        "pub(crate) fn f() -> (A, B, C) {}",
        "// pub fn f() -> (A, B, C) {}",
    ];
    for text in good {
        assert_eq!(tuples(&Source::new("data/a.rs", text)), [""; 0], "{text}");
    }
}
