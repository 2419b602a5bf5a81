//! Faults that were there when a rule was made: they may only become fewer.

use std::collections::BTreeMap;

/// The rule, the file, and how many faults it has still; a number that is too large is a fault as well.
const PENDING: &[(&str, &str, usize)] = &[];

/// What of `faults`, by files, is not on the list, and what of the list is no more.
pub(super) fn not_pending(rule: &str, faults: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    left(PENDING, rule, faults)
}

fn left(pending: &[(&str, &str, usize)], rule: &str, faults: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let mine = || pending.iter().filter(|(name, _, _)| *name == rule);
    let mut left = Vec::new();
    for (path, found) in faults {
        let allowed = mine().find(|(_, file, _)| file == path).map_or(0, |(_, _, allowed)| *allowed);
        if found.len() > allowed {
            left.extend(found.iter().map(|fault| format!("[{rule}] {fault}")));
        } else if found.len() < allowed {
            left.push(format!("PENDING should be (\"{rule}\", \"{path}\", {})", found.len()));
        }
    }
    let gone = mine().filter(|(_, path, _)| !faults.contains_key(*path));
    left.extend(gone.map(|(_, path, _)| format!("PENDING names {path}, which is no file")));
    left
}

#[test]
fn the_list_is_honest() {
    let list = [("docs", "a.rs", 2), ("docs", "b.rs", 1), ("errors", "c.rs", 1)];
    let faults = |counts: &[(&str, usize)]| -> BTreeMap<String, Vec<String>> {
        counts.iter().map(|(path, count)| ((*path).to_owned(), vec!["fault".to_owned(); *count])).collect()
    };
    assert_eq!(left(&list, "docs", &faults(&[("a.rs", 2), ("b.rs", 1), ("d.rs", 0)])), [""; 0]);
    assert_eq!(left(&list, "docs", &faults(&[("a.rs", 1), ("b.rs", 1)])).len(), 1);
    assert_eq!(left(&list, "docs", &faults(&[("a.rs", 2), ("b.rs", 2)])), ["[docs] fault"; 2]);
    assert_eq!(left(&list, "docs", &faults(&[("a.rs", 2), ("b.rs", 1), ("d.rs", 1)])), ["[docs] fault"]);
    assert_eq!(left(&list, "docs", &faults(&[("a.rs", 2)])).len(), 1);
}
