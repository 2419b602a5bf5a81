//! Puts the examples of answers into groups: the two of a pair, or a labelled answer with its
//! mismatched one.
//!
//! The order of labelled answers and the choice of mismatched ones are TRL's. Of each 1000 pairs in
//! a row, all good answers come first, then all bad ones. In each block, the mismatched answer of a
//! row is that of the row before, and the first row gets the last one.

use super::DataOptions;
use super::DataReport;
use super::encode::Example;
use super::example::EncodedAnswers;
use super::role::Role;

/// The number of pairs whose answers are labelled together.
const PAIRS_OF_A_BLOCK: usize = 1000;

/// An example, and all tokens of its answer.
struct Labelled {
    example: Example,
    completion: Vec<u32>,
}

/// The examples of answers, in the order of the rows.
pub(super) struct AnswerGroups {
    examples: Vec<Example>,
    labelled: Vec<Labelled>,
    /// Bad answers of the pairs since the last block.
    undesirable: Vec<Labelled>,
    pairs: usize,
    max_seq_len: usize,
    mismatched_block: Option<usize>,
    next_group: u32,
}

impl AnswerGroups {
    pub(super) fn new(options: &DataOptions) -> Self {
        AnswerGroups {
            examples: Vec::new(),
            labelled: Vec::new(),
            undesirable: Vec::new(),
            pairs: 0,
            max_seq_len: options.max_seq_len,
            mismatched_block: options.mismatched_block,
            next_group: 0,
        }
    }

    /// Adds the answers of the next row.
    pub(super) fn add(&mut self, row: EncodedAnswers) {
        let is_labelled = |example: &Example| matches!(example.role, Role::Desirable | Role::Undesirable);
        if !row.examples.iter().all(is_labelled) {
            let group = self.group();
            self.examples.extend(row.examples.into_iter().map(|example| Example { group, ..example }));
            return;
        }
        let is_pair = row.examples.len() > 1;
        if !is_pair {
            self.end_block();
        }
        let completions = row.completions.into_iter().chain(std::iter::repeat(Vec::new()));
        for (example, completion) in row.examples.into_iter().zip(completions) {
            let is_later = is_pair && example.role == Role::Undesirable;
            let list = if is_later { &mut self.undesirable } else { &mut self.labelled };
            list.push(Labelled { example, completion });
        }
        self.pairs += usize::from(is_pair);
        if self.pairs == PAIRS_OF_A_BLOCK {
            self.end_block();
        }
    }

    /// The number of the next group.
    fn group(&mut self) -> Option<u32> {
        self.next_group += 1;
        Some(self.next_group - 1)
    }

    fn end_block(&mut self) {
        self.labelled.append(&mut self.undesirable);
        self.pairs = 0;
    }

    /// All examples, with the mismatched ones.
    pub(super) fn into_examples(mut self, report: &mut DataReport) -> Vec<Example> {
        self.end_block();
        let labelled = std::mem::take(&mut self.labelled);
        let Some(block) = self.mismatched_block else {
            self.examples.extend(labelled.into_iter().map(|one| one.example));
            return self.examples;
        };
        for block in labelled.chunks(block.max(1)) {
            for (at, Labelled { example, .. }) in block.iter().enumerate() {
                let other = &block[(at + block.len() - 1) % block.len()].completion;
                let mismatched = mismatched(example, other, self.max_seq_len);
                let group = self.group();
                let own = Example { group, ..example.clone() };
                self.examples.extend([own, Example { group, ..mismatched }]);
            }
        }
        if !labelled.is_empty() {
            report
                .notes
                .push("each answer has a mismatched one beside it, the answer to the row before".to_owned());
        }
        self.examples
    }
}

/// The prompt of an example with another answer.
fn mismatched(example: &Example, completion: &[u32], max_seq_len: usize) -> Example {
    let prompt = example.trained.iter().take_while(|trained| !**trained).count();
    let mut ids = [&example.ids[..prompt], completion].concat();
    ids.truncate(max_seq_len);
    let trained = (0..ids.len()).map(|at| at >= prompt).collect();
    Example { ids, trained, origin: example.origin.clone(), group: None, role: Role::Mismatched }
}
