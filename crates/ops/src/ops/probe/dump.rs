//! A dump of the probe: its text form, and the comparison with another dump.

use std::fmt::Write;

use super::launches::{Agreement, ProbeInstruction, launches};
use crate::error::{Error, Result};

/// The first lines of a dump file.
pub(crate) const HEAD: &str = "\
# What each instruction of kernels/probe.cu leaves in the registers of the threads that run it:
# a line a register, in it a word for each thread. `finetune doctor --selftest --probe FILE` writes such a file.
";

/// The words that one instruction left in its registers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DumpedInstruction {
    /// The name in `kernels/compat.cuh`, and the input.
    pub(crate) name: String,
    /// Number of words of each thread.
    pub(crate) registers: usize,
    /// The registers of thread 0, those of thread 1, and so on.
    pub(crate) words: Vec<u32>,
}

/// The results of all instructions of the probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProbeDump {
    /// The device that ran it: the emulator, or a GPU by name.
    pub(crate) origin: String,
    /// The instructions, in the order in which they ran.
    pub(crate) instructions: Vec<DumpedInstruction>,
}

impl ProbeDump {
    /// Returns the text of a dump file.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("{HEAD}origin: {}\n", self.origin);
        // Writing to a string cannot fail.
        for one in &self.instructions {
            let _ = writeln!(text, "\n[{}]", one.name);
            for register in 0..one.registers {
                let of_threads = one.words.iter().skip(register).step_by(one.registers);
                let words: Vec<String> = of_threads.map(|word| format!("{word:08x}")).collect();
                let _ = writeln!(text, "{}", words.join(" "));
            }
        }
        text
    }

    /// Parses the text of [`ProbeDump::text`].
    ///
    /// # Errors
    /// Fails if a line does not belong to a dump, or registers of one instruction have different
    /// numbers of threads.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let refuse = |line: &str| Error::user("cannot read a dump of the probe").because(format!("{line:?}"));
        let mut dump = ProbeDump { origin: String::new(), instructions: Vec::new() };
        let mut lines: Vec<Vec<u32>> = Vec::new();
        // Lines of the file are registers; words here are ordered by thread.
        let close = |dump: &mut ProbeDump, lines: &mut Vec<Vec<u32>>| {
            let Some(one) = dump.instructions.last_mut() else { return };
            one.registers = lines.len();
            let threads = lines.iter().map(Vec::len).min().unwrap_or(0);
            one.words = (0..threads).flat_map(|thread| lines.iter().map(move |line| line[thread])).collect();
            lines.clear();
        };
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if let Some(origin) = line.strip_prefix("origin: ") {
                dump.origin = origin.to_owned();
            } else if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                close(&mut dump, &mut lines);
                let name = name.to_owned();
                dump.instructions.push(DumpedInstruction { name, registers: 0, words: Vec::new() });
            } else {
                let words = line.split(' ').map(|word| u32::from_str_radix(word, 16));
                let words = words.collect::<Result<Vec<u32>, _>>().map_err(|_| refuse(line))?;
                if dump.instructions.is_empty()
                    || lines.first().is_some_and(|first| first.len() != words.len())
                {
                    return Err(refuse(line));
                }
                lines.push(words);
            }
        }
        close(&mut dump, &mut lines);
        Ok(dump)
    }

    /// Returns one line per instruction that differs from `recorded`; empty if all agree.
    pub(crate) fn differences(&self, recorded: &ProbeDump) -> Vec<String> {
        let known = launches().into_iter().flat_map(|launch| launch.instructions);
        known.filter_map(|one| self.difference(&one, recorded)).collect()
    }

    fn find(&self, name: &str) -> Option<&DumpedInstruction> {
        self.instructions.iter().find(|one| one.name == name)
    }

    fn difference(&self, one: &ProbeInstruction, recorded: &ProbeDump) -> Option<String> {
        let name = &one.name;
        let (Some(actual), Some(wanted)) = (self.find(name), recorded.find(name)) else {
            return Some(format!("{name} is missing from one dump: record the older dump again"));
        };
        if (actual.registers, actual.words.len()) != (wanted.registers, wanted.words.len()) {
            return Some(format!(
                "{name} has another number of registers or threads: record the older dump again"
            ));
        }
        let pairs =
            || actual.words.iter().zip(&wanted.words).map(|(&actual, &wanted)| Word { actual, wanted });
        let wrong = |(_, word): &(usize, Word)| !word.agrees(one.agreement);
        let (at, first) = pairs().enumerate().find(wrong)?;
        let count = pairs().enumerate().filter(wrong).count();
        let (thread, register) = (at / one.registers, at % one.registers);
        let thread_name = match one.threads {
            32 => format!("lane {thread}"),
            _ => format!("lane {} of warp {}", thread % 32, thread / 32),
        };
        let what = first.what(one.agreement);
        let of = actual.words.len();
        Some(format!("{name}: {thread_name}, register {register} {what} ({count} of {of} words differ)"))
    }
}

/// A found word and the recorded one.
#[derive(Debug, Clone, Copy)]
struct Word {
    actual: u32,
    wanted: u32,
}

impl Word {
    fn agrees(self, agreement: Agreement) -> bool {
        let [actual, wanted] = [self.actual, self.wanted].map(f32::from_bits);
        match agreement {
            Agreement::Bits => self.actual == self.wanted,
            _ if actual.is_nan() || wanted.is_nan() => actual.is_nan() && wanted.is_nan(),
            Agreement::Number => self.actual == self.wanted,
            Agreement::Ulps(ulps) => self.ulps_apart().is_some_and(|apart| apart <= ulps),
        }
    }

    /// Returns the distance in units in the last place; none across zero, since the sign is
    /// specified.
    fn ulps_apart(self) -> Option<u32> {
        (self.actual >> 31 == self.wanted >> 31).then(|| self.actual.abs_diff(self.wanted))
    }

    fn what(self, agreement: Agreement) -> String {
        let Word { actual, wanted } = self;
        let text = |bits: u32| match agreement {
            Agreement::Bits => format!("{bits:#010x}"),
            _ => format!("{bits:#010x} ({:e})", f32::from_bits(bits)),
        };
        let apart = match (agreement, self.ulps_apart()) {
            (Agreement::Ulps(ulps), Some(apart)) => {
                format!(", {apart} units in the last place apart (specified: at most {ulps})")
            }
            _ => String::new(),
        };
        format!("holds {}, recorded: {}{apart}", text(actual), text(wanted))
    }
}
