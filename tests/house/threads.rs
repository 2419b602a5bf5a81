//! Threads are started by `threads::start` and `threads::start_in`, which name the limit of the system that they meet.

use super::Source;

/// Sources that start threads themselves: the two functions, and a thread for each unknown peer, which has a small stack
/// and is done without.
const STARTERS: &[&str] = &["threads.rs", "rendezvous/listener.rs"];

pub(super) fn starts(source: &Source) -> Vec<String> {
    if STARTERS.iter().any(|own| source.path.ends_with(own)) {
        return Vec::new();
    }
    let by_hand = regex!(r"\bthread::(?:\{[^}]*\b)?(?:spawn|Builder)\b|\bspawn_scoped\b");
    let in_scope = regex!(r"\bthread::scope\b(?s:.*)\bscope\s*\.\s*spawn\(");
    if by_hand.is_match(&source.code) || in_scope.is_match(&source.code) {
        return vec![format!("{}: a thread that `threads::start` does not start", source.path)];
    }
    Vec::new()
}

#[test]
fn threads_that_are_started_by_hand_are_found() {
    let faults = |code: &str| starts(&Source::new("run/a.rs", code)).len();
    for code in [
        "fn f() { std::thread::spawn(g); }",
        "use std::thread::{Builder, JoinHandle};",
        "fn f() { thread::scope(|scope| { scope.spawn(g); }); }",
    ] {
        assert_eq!(faults(code), 1, "{code}");
    }
    assert_eq!(faults("fn f() { threads::start(\"a\", g); rayon::scope(|scope| scope.spawn(h)); }"), 0);
    assert_eq!(starts(&Source::new("threads.rs", "use std::thread::Builder;")).len(), 0);
}
