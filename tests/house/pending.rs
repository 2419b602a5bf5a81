//! Faults that were there when a rule was made: they may only become fewer.

use std::collections::BTreeMap;

/// The rule, the file, and how many faults it has still; a number that is too large is a fault as well.
const PENDING: &[(&str, &str, usize)] = &[
    ("docs", "commands/bench.rs", 1),
    ("docs", "commands/data.rs", 1),
    ("docs", "commands/eval.rs", 1),
    ("docs", "commands/export.rs", 1),
    ("docs", "commands/generate.rs", 1),
    ("docs", "commands/inspect.rs", 1),
    ("docs", "commands/merge.rs", 1),
    ("docs", "commands/quantize.rs", 1),
    ("docs", "commands/train.rs", 1),
    ("docs", "engine/evaluate.rs", 2),
    ("docs", "engine/mod.rs", 3),
    ("docs", "engine/train_loop.rs", 6),
    ("docs", "engine/trainer.rs", 5),
    ("docs", "ops/attention/mod.rs", 3),
    ("docs", "ops/cross_entropy.rs", 2),
    ("docs", "ops/rotary.rs", 1),
    ("docs", "run/merge_check.rs", 1),
    ("docs", "sharding/bucket.rs", 3),
    ("docs", "sharding/offload.rs", 1),
    ("docs", "sharding/param_store.rs", 2),
    ("docs", "sharding/placement.rs", 4),
    ("errors", "engine/state.rs", 2),
    ("errors", "engine/trainer.rs", 1),
    ("errors", "ops/attention/mod.rs", 2),
    ("errors", "ops/cross_entropy.rs", 2),
    ("errors", "ops/rms_norm.rs", 2),
    ("errors", "ops/rotary.rs", 2),
    ("errors", "sharding/bucket.rs", 2),
    ("errors", "sharding/param_store.rs", 12),
    ("shapes", "ops/attention/mod.rs", 2),
    ("shapes", "ops/cross_entropy.rs", 3),
    ("shapes", "ops/rotary.rs", 4),
];

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
