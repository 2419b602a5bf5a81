//! Changes to files, drawn from a fixed seed: flipped bits, extreme numbers, pieces cut, doubled,
//! moved and taken from other files, and words with a meaning for a parser.

/// Numbers at the limits of integer and float types.
const NUMBERS: [&str; 16] = [
    "0",
    "-1",
    "1",
    "255",
    "65536",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "1099511627776",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "1e308",
    "-1e-400",
    "NaN",
];

/// Words with a meaning for one of the parsers.
const WORDS: [&str; 36] = [
    "null",
    "true",
    "{}",
    "[]",
    "\"\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\u{1b}[2J",
    "\0",
    "\u{FEFF}",
    "\u{202E}",
    "\u{FFFD}",
    "{{",
    "}}",
    "{%",
    "%}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% set x = x ~ x %}",
    "range(99999)",
    "|tojson(indent=999999999)",
    "|replace('', 'aaaaaaaa')",
    " * 9999999",
    "~ messages",
    "[x, x]",
    "\"",
    "\n",
    "\r",
    ",",
    "[0-9]",
    "node[1-99999999]",
    "[[train]]",
    " = ",
    "__metadata__",
    "F64",
    "data_offsets",
];

/// Binary numbers at the limits.
const EDGES: [u64; 9] =
    [0, 1, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 0x7fff_ffff_ffff_ffff, 0xffff_ffff_ffff_ffff];

/// Generates broken files from real ones.
pub(crate) struct Mutator<'a> {
    state: u64,
    seeds: &'a [Vec<u8>],
    largest: usize,
}

impl<'a> Mutator<'a> {
    pub(crate) fn new(name: &str, seeds: &'a [Vec<u8>], largest: usize) -> Self {
        let digest = blake3::hash(name.as_bytes());
        let state = u64::from_le_bytes(digest.as_bytes()[..8].try_into().unwrap()) | 1;
        Mutator { state, seeds, largest }
    }

    /// Draws the next number of xorshift64*.
    fn draw(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.draw() % bound.max(1) as u64) as usize
    }

    fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    /// Returns the next file.
    pub(crate) fn next_input(&mut self) -> Vec<u8> {
        let seed = self.below(self.seeds.len());
        let mut bytes = self.seeds[seed].clone();
        // Usually one change: of several changes, a parser often refuses the first and never
        // reaches the others.
        for _ in 0..1 + self.below(8).saturating_sub(4) {
            self.change(&mut bytes);
            bytes.truncate(self.largest);
        }
        bytes
    }

    fn part(&mut self, bytes: &[u8]) -> std::ops::Range<usize> {
        let start = self.below(bytes.len() + 1);
        let most = if self.below(3) == 0 { bytes.len() } else { 24 };
        start..(start + self.below(most + 1)).min(bytes.len())
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        let at = self.below(bytes.len());
        match self.below(12) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
            1 if !bytes.is_empty() => bytes[at] = self.one_of(&EDGES) as u8,
            2 => {
                let part = self.part(bytes);
                bytes.drain(part);
            }
            3 => bytes.truncate(at),
            4 => {
                let (part, times) = (self.part(bytes), 1 + self.below(3));
                let copy = bytes[part.clone()].repeat(times);
                bytes.splice(part.end..part.end, copy);
            }
            5 => {
                // Deep or long repetition.
                let (part, times) = (self.part(bytes), 1 + self.below(20_000));
                let most = (self.largest / 2) / (part.len() + 1);
                let copy = bytes[part.clone()].repeat(times.min(most));
                bytes.splice(part.start..part.start, copy);
            }
            6 => {
                let word = self.one_of(&WORDS);
                bytes.splice(at..at, word.bytes());
            }
            7 | 8 => self.change_number(bytes),
            9 => {
                let other = self.below(self.seeds.len());
                let other = self.seeds[other].clone();
                let (from, to) = (self.part(&other), self.part(bytes));
                bytes.splice(to, other[from].iter().copied());
            }
            10 => {
                let (edge, width) = (self.one_of(&EDGES), self.one_of(&[2, 4, 8]));
                let end = (at + width).min(bytes.len());
                bytes.splice(at..end, edge.to_le_bytes()[..width].iter().copied());
            }
            _ => {
                let nested = self.one_of(&[("[", "]"), ("{\"a\":", "}"), ("(", ")"), ("[x,", "]")]);
                let times = 1 + self.below(20_000);
                let part = self.part(bytes);
                let inner = bytes[part.clone()].to_vec();
                let all =
                    [nested.0.repeat(times).as_bytes(), &inner, nested.1.repeat(times).as_bytes()].concat();
                bytes.splice(part, all);
            }
        }
    }

    /// Replaces a decimal number.
    fn change_number(&mut self, bytes: &mut Vec<u8>) {
        let from = self.below(bytes.len());
        let Some(start) = (from..bytes.len()).find(|at| bytes[*at].is_ascii_digit()) else { return };
        let end = (start..bytes.len()).find(|at| !bytes[*at].is_ascii_digit()).unwrap_or(bytes.len());
        let number = self.one_of(&NUMBERS);
        bytes.splice(start..end, number.bytes());
    }
}

#[test]
fn the_same_name_gives_the_same_files() {
    let seeds = [b"{\"a\": 12}".to_vec(), b"x,y\n1,2\n".to_vec()];
    let files = |name| {
        let mut mutator = Mutator::new(name, &seeds, 1 << 16);
        (0..200).map(|_| mutator.next_input()).collect::<Vec<_>>()
    };
    assert_eq!(files("a"), files("a"));
    assert_ne!(files("a"), files("b"));
    assert!(files("a").iter().filter(|file| !seeds.contains(file)).count() > 180, "most are changed");
}
