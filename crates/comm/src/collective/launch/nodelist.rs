//! Slurm's compressed lists: hosts (`node[001-003,007],login`) and tasks per node (`2(x3),1`).
//!
//! Expands lists like `scontrol show hostnames`, which is often missing in containers. As there,
//! the width of a range's first number pads all of it, several bracket groups expand in Slurm's
//! order, and order and duplicates stay. Unlike there, an empty item is an error. A text after the
//! last bracket is accepted, as in newer versions of Slurm. The list is untrusted, so its size is
//! computed before the expansion.

use crate::error::{Error, Result};

/// Maximum number of hosts in a list.
pub(crate) const MAX_HOSTS: usize = 65_536;

/// Maximum bytes of a list; the longest real ones (thousands of single hosts) have about 100 kB.
const MAX_LIST_BYTES: usize = 1 << 20;

/// Maximum bytes of a host name (RFC 1035).
const MAX_NAME_BYTES: usize = 255;

/// Maximum number of bracket groups of an item; real clusters have up to five.
const MAX_GROUPS: usize = 32;

/// Maximum digits of a number in brackets, so that it fits u64.
const MAX_DIGITS: usize = 18;

/// A part of a host's name: a text, or the numbers of a bracket group.
enum NodePart<'a> {
    Text(&'a str),
    Group(Vec<NodeRange>),
}

/// `first..=last`, written with at least `width` digits.
struct NodeRange {
    first: u64,
    last: u64,
    width: usize,
}

impl NodeRange {
    fn len(&self) -> u64 {
        self.last - self.first + 1
    }
}

/// Returns the hosts in `list`, in its order.
///
/// # Errors
/// [`crate::error::ErrorCategory::User`] if the list is malformed or has more than `MAX_HOSTS`
/// hosts; the message quotes the fault.
pub fn expand(list: &str) -> Result<Vec<String>> {
    let fault =
        |why: String| Error::user(format!("cannot read the host list `{}`", excerpt(list))).because(why);
    if list.len() > MAX_LIST_BYTES {
        return Err(fault(format!("it has {} bytes; accepted: up to {MAX_LIST_BYTES}", list.len())));
    }
    let items = items(list).map_err(fault)?;
    let mut parsed = Vec::new();
    let mut hosts = 0_u64;
    for item in items {
        let pieces = pieces(item).map_err(fault)?;
        hosts = hosts.saturating_add(count(&pieces));
        if hosts > MAX_HOSTS as u64 {
            return Err(fault(format!("it names more than {MAX_HOSTS} hosts")));
        }
        parsed.push(pieces);
    }
    let mut names = Vec::new();
    for pieces in &parsed {
        names.extend(product(pieces));
    }
    match names.iter().find(|name| name.len() > MAX_NAME_BYTES) {
        Some(name) => {
            Err(fault(format!("a host name of {} bytes; accepted: up to {MAX_NAME_BYTES}", name.len())))
        }
        None => Ok(names),
    }
}

/// Tasks of each node from `SLURM_TASKS_PER_NODE`: `2(x3),1` is 2, 2, 2, 1.
///
/// # Errors
/// [`crate::error::ErrorCategory::User`] if the text is malformed or covers more than `MAX_HOSTS`
/// nodes.
pub fn tasks_per_node(text: &str) -> Result<Vec<usize>> {
    let fault = |why: &str| {
        Error::user(format!("cannot read the tasks per node `{}`", excerpt(text)))
            .because(format!("{why}; accepted: such as `2(x3),1`"))
    };
    if text.len() > MAX_LIST_BYTES {
        return Err(fault("it is too long"));
    }
    let mut tasks = Vec::new();
    for item in text.split(',') {
        let (number, times) = match item.split_once("(x") {
            Some((number, times)) => (number, times.strip_suffix(')').ok_or_else(|| fault("no `)`"))?),
            None => (item, "1"),
        };
        let number = digits(number).ok_or_else(|| fault("a number is missing"))?;
        let times = digits(times).ok_or_else(|| fault("no number after `(x`"))?;
        if number > MAX_HOSTS as u64 || times.saturating_add(tasks.len() as u64) > MAX_HOSTS as u64 {
            return Err(fault("a number is too large"));
        }
        tasks.extend(std::iter::repeat_n(number as usize, times as usize));
    }
    Ok(tasks)
}

/// Splits at the commas outside brackets.
fn items(list: &str) -> Result<Vec<&str>, String> {
    let mut items = Vec::new();
    let (mut start, mut inside) = (0, false);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if inside => return Err("a bracket inside brackets".to_owned()),
            b'[' => inside = true,
            b']' if !inside => return Err("`]` without `[`".to_owned()),
            b']' => inside = false,
            b',' if !inside => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("`[` without `]`".to_owned());
    }
    items.push(&list[start..]);
    if items.iter().any(|item| item.is_empty()) {
        Err("an empty item between commas".to_owned())
    } else {
        Ok(items)
    }
}

/// Splits one item at its (balanced) brackets.
fn pieces(item: &str) -> Result<Vec<NodePart<'_>>, String> {
    let mut pieces = Vec::new();
    let mut rest = item;
    while let Some((text, behind)) = rest.split_once('[') {
        let (group, after) = behind.split_once(']').ok_or("`[` without `]`")?;
        pieces.push(NodePart::Text(checked(text)?));
        pieces.push(NodePart::Group(group.split(',').map(range).collect::<Result<_, _>>()?));
        rest = after;
        if pieces.len() > 2 * MAX_GROUPS {
            return Err(format!("more than {MAX_GROUPS} bracket groups in one item"));
        }
    }
    pieces.push(NodePart::Text(checked(rest)?));
    Ok(pieces)
}

/// Checks that a text contains only characters of a host name.
fn checked(text: &str) -> Result<&str, String> {
    let stranger = |c: &char| !(c.is_ascii_alphanumeric() || "-._".contains(*c));
    match text.chars().find(stranger) {
        Some(c) => Err(format!("{c:?} in a host name; accepted: letters, digits, `-`, `.`, `_`")),
        None if text.len() > MAX_NAME_BYTES => {
            Err(format!("a host name of more than {MAX_NAME_BYTES} bytes"))
        }
        None => Ok(text),
    }
}

fn range(text: &str) -> Result<NodeRange, String> {
    let fault = || format!("`{}` in brackets; accepted: a number or a range such as `01-12`", excerpt(text));
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let width = first.len();
    let (first, last) = (digits(first).ok_or_else(fault)?, digits(last).ok_or_else(fault)?);
    if first > last {
        return Err(format!("the range `{text}` in brackets is descending"));
    }
    Ok(NodeRange { first, last, width })
}

/// A number of plain digits (no sign, no space).
fn digits(text: &str) -> Option<u64> {
    let plain = !text.is_empty() && text.len() <= MAX_DIGITS && text.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

/// Number of hosts of an item.
fn count(pieces: &[NodePart<'_>]) -> u64 {
    let of = |piece: &NodePart<'_>| match piece {
        NodePart::Text(_) => 1,
        NodePart::Group(ranges) => ranges.iter().fold(0_u64, |sum, range| sum.saturating_add(range.len())),
    };
    pieces.iter().fold(1_u64, |product, piece| product.saturating_mul(of(piece)))
}

/// All names of an item. The last group varies fastest, then the first, the second and so on, as in
/// Slurm (`_push_range_list` of its src/common/hostlist.c): tasks are distributed over the hosts in
/// this order.
fn product(pieces: &[NodePart<'_>]) -> Vec<String> {
    let written = |piece: &NodePart<'_>| match piece {
        NodePart::Text(text) => vec![(*text).to_owned()],
        NodePart::Group(ranges) => {
            let numbers = ranges.iter().flat_map(|r| (r.first..=r.last).map(|n| (n, r.width)));
            numbers.map(|(number, width)| format!("{number:0width$}")).collect()
        }
    };
    let choices: Vec<Vec<String>> = pieces.iter().map(written).collect();
    let last = pieces.iter().rposition(|piece| matches!(piece, NodePart::Group(_))).unwrap_or(0);
    let mut fastest_first: Vec<usize> = (0..choices.len()).filter(|&at| at != last).collect();
    fastest_first.insert(0, last);
    let name = |mut number: usize| {
        let mut chosen = vec![""; choices.len()];
        for &at in &fastest_first {
            chosen[at] = &choices[at][number % choices[at].len()];
            number /= choices[at].len();
        }
        chosen.concat()
    };
    (0..count(pieces) as usize).map(name).collect()
}

/// Beginning of an untrusted text, for a message.
fn excerpt(text: &str) -> String {
    let shown: String = text.chars().take(60).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(60).is_some() { shown + "..." } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slurm's lists and the output of `scontrol show hostnames` for them (checked with Slurm
    /// 22.05).
    const LISTS: &[(&str, &str)] = &[
        ("localhost", "localhost"),
        ("n1", "n1"),
        ("node[1-4]", "node1 node2 node3 node4"),
        (
            "node[001-003,007],gpu-a[1-2]-ib[0-1],login",
            "node001 node002 node003 node007 gpu-a1-ib0 gpu-a1-ib1 gpu-a2-ib0 gpu-a2-ib1 login",
        ),
        ("tux[0-2,12,20-21]", "tux0 tux1 tux2 tux12 tux20 tux21"),
        ("linux[1-3,6]", "linux1 linux2 linux3 linux6"),
        ("nid[000012-000015]", "nid000012 nid000013 nid000014 nid000015"),
        ("nid00[0012-0014]", "nid000012 nid000013 nid000014"),
        ("nid[001000,001004]", "nid001000 nid001004"),
        ("r4i2n[2-4]", "r4i2n2 r4i2n3 r4i2n4"),
        ("r[1-2]i[0-1]n[3-4]", "r1i0n3 r1i0n4 r2i0n3 r2i0n4 r1i1n3 r1i1n4 r2i1n3 r2i1n4"),
        ("a[1-2]b[1-2]c[1-2]d[1]", "a1b1c1d1 a2b1c1d1 a1b2c1d1 a2b2c1d1 a1b1c2d1 a2b1c2d1 a1b2c2d1 a2b2c2d1"),
        ("rack[01-02]node[1-2,4]", "rack01node1 rack01node2 rack01node4 rack02node1 rack02node2 rack02node4"),
        ("gpu[09-11]", "gpu09 gpu10 gpu11"),
        ("gpu[9-11]", "gpu9 gpu10 gpu11"),
        ("n[98-102]", "n98 n99 n100 n101 n102"),
        ("n[099-101]", "n099 n100 n101"),
        ("n[00-02]", "n00 n01 n02"),
        ("n[0-0]", "n0"),
        ("n[5]", "n5"),
        ("n[5-5]", "n5"),
        ("n[1-010]", "n1 n2 n3 n4 n5 n6 n7 n8 n9 n10"),
        ("n[08-011]", "n08 n09 n10 n11"),
        ("n[1,01,001]", "n1 n01 n001"),
        ("n[2,1]", "n2 n1"),
        ("n[1,1]", "n1 n1"),
        ("a,a", "a a"),
        ("b,a,c", "b a c"),
        ("n[1-2][1-2]", "n11 n12 n21 n22"),
        ("[1-3]", "1 2 3"),
        ("n1-2", "n1-2"),
        ("gpu-[1-2]", "gpu-1 gpu-2"),
        ("gpu_[1-2]", "gpu_1 gpu_2"),
        ("dgx-a100-[01-02],dgx-h100-03", "dgx-a100-01 dgx-a100-02 dgx-h100-03"),
        ("c1-[4,6-7],c2-1", "c1-4 c1-6 c1-7 c2-1"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1 10.0.0.2"),
        ("ip-10-0-0-[5-6]", "ip-10-0-0-5 ip-10-0-0-6"),
        ("queue1-dy-p4d24xlarge-[1-2]", "queue1-dy-p4d24xlarge-1 queue1-dy-p4d24xlarge-2"),
        ("login.cluster.example.org", "login.cluster.example.org"),
        ("holygpu8a[19301,19405-19406]", "holygpu8a19301 holygpu8a19405 holygpu8a19406"),
        ("x1000c0s0b0n[0-1],x1000c0s1b1n0", "x1000c0s0b0n0 x1000c0s0b0n1 x1000c0s1b1n0"),
        ("jwb[0001,0003],jwb1248", "jwb0001 jwb0003 jwb1248"),
        ("frontier[00001-00003]", "frontier00001 frontier00002 frontier00003"),
        ("g[1-2],h[1-2],i", "g1 g2 h1 h2 i"),
        ("N[1],n[1]", "N1 n1"),
    ];

    #[test]
    fn lists_expand_as_scontrol_does() {
        for (list, hosts) in LISTS {
            let hosts: Vec<&str> = hosts.split(' ').collect();
            assert_eq!(expand(list).unwrap(), hosts, "{list}");
        }
    }

    /// Slurm 22.05 refuses a text after the brackets; newer versions write such lists.
    #[test]
    fn a_text_may_follow_the_brackets() {
        assert_eq!(expand("n[1-2]-ib").unwrap(), ["n1-ib", "n2-ib"]);
        assert_eq!(expand("n[1-2].example.org").unwrap(), ["n1.example.org", "n2.example.org"]);
    }

    #[test]
    fn malformed_lists_are_refused_with_the_reason() {
        let bad = [
            ("", "an empty item"),
            ("a,,b", "an empty item"),
            ("a,", "an empty item"),
            (",a", "an empty item"),
            ("n[1-2", "`[` without `]`"),
            ("n1-2]", "`]` without `[`"),
            ("n[1-2]]", "`]` without `[`"),
            ("n[1,[2-3]]", "inside brackets"),
            ("n[3-1]", "is descending"),
            ("udc-an[28-1,34-1]", "is descending"),
            ("n[]", "`` in brackets"),
            ("n[1,,2]", "`` in brackets"),
            ("n[1-]", "`1-` in brackets"),
            ("n[-2]", "`-2` in brackets"),
            ("n[a-b]", "`a-b` in brackets"),
            ("n[1-2-3]", "`1-2-3` in brackets"),
            ("n[ 1-2]", "` 1-2` in brackets"),
            ("n[+1-2]", "`+1-2` in brackets"),
            ("bgl[123x456]", "`123x456` in brackets"),
            ("n[1-9999999999999999999]", "in brackets"),
            ("a b", "' ' in a host name"),
            ("(null)", "'(' in a host name"),
            ("node\u{e9}1", "in a host name"),
            ("a;rm", "';' in a host name"),
        ];
        for (list, why) in bad {
            let error = expand(list).unwrap_err();
            assert_eq!(error.kind(), crate::error::ErrorCategory::User);
            assert!(error.causes()[0].contains(why), "{list}: {error}");
        }
    }

    #[test]
    fn hostile_lists_cost_no_memory() {
        let groups = "[0-99]".repeat(30);
        assert!(expand(&"[1]".repeat(33)).unwrap_err().causes()[0].contains("32 bracket groups"));
        for list in ["n[0-999999999999]", "n[1-40000],m[1-40000]", &groups, "n[0-65536]"] {
            let error = expand(list).unwrap_err();
            assert!(error.causes()[0].contains("more than 65536 hosts"), "{error}");
        }
        assert_eq!(expand("n[0-65535]").unwrap().len(), MAX_HOSTS);
        assert!(expand(&"a".repeat(256)).unwrap_err().causes()[0].contains("255 bytes"));
        assert!(expand(&format!("{}[1-2]", "a".repeat(255))).unwrap_err().causes()[0].contains("256 bytes"));
        assert!(expand(&"a,".repeat(1 << 20)).unwrap_err().causes()[0].contains("bytes; accepted"));
    }

    #[test]
    fn tasks_per_node_are_run_lengths() {
        assert_eq!(tasks_per_node("4").unwrap(), [4]);
        assert_eq!(tasks_per_node("2(x3),1").unwrap(), [2, 2, 2, 1]);
        assert_eq!(tasks_per_node("5,4(x3)").unwrap(), [5, 4, 4, 4]);
        for bad in ["", "2(x3", "2(3)", "x", "2,,1", "2(x)", "1(x70000)", "-1", "1(x40000),1(x40000)"] {
            assert!(tasks_per_node(bad).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "[n0-9,\\[\\]\\-x() \u{0}\u{e9}]{0,40}") {
            let _ = expand(&text);
            let _ = tasks_per_node(&text);
        }
    }
}
