//! What the quickstart shows beside its figures: two held-out questions, answered by the base and by what came of
//! training.

use crate::data::Tokenizer;
use crate::engine::{Engine, LogitsProcessor, RunSummary, Sampling};
use crate::error::Result;
use crate::plan::Plan;
use crate::report::Terminal;

/// How many questions are shown.
const SHOWN: usize = 2;
/// Tokens that the base may ramble on.
const ANSWER_TOKENS: usize = 24;

/// A held-out row: what is asked, and the answer that its author gave.
pub(crate) struct Question {
    prompt: Vec<u32>,
    text: String,
    reference: String,
}

/// The questions to show, of the held-out rows of the plan; none where there are none.
pub(crate) fn questions(plan: &Plan) -> Result<Vec<Question>> {
    let Some((held_out, _)) = &plan.held_out else {
        return Ok(Vec::new());
    };
    let tokenizer = &plan.rows.tokenizer;
    held_out
        .examples()
        .iter()
        .take(SHOWN)
        .map(|example| {
            let start = example.trained.iter().position(|trained| *trained).unwrap_or(example.ids.len());
            let (prompt, answer) = example.ids.split_at(start);
            let end = example.trained[start..].iter().position(|trained| !trained).unwrap_or(answer.len());
            Ok(Question {
                prompt: prompt.to_vec(),
                text: tokenizer.decode(prompt, true)?.trim().to_owned(),
                reference: tokenizer.decode(&answer[..end], true)?.trim().to_owned(),
            })
        })
        .collect()
}

/// What the model answers, always the likeliest token.
pub(crate) fn answers(questions: &[Question], engine: &Engine, tokenizer: &Tokenizer) -> Result<Vec<String>> {
    let answer = |question: &Question| {
        let mut greedy = LogitsProcessor::from_sampling(0, Sampling::ArgMax);
        let stop = tokenizer.eos_ids();
        let ids = engine.generate(&question.prompt, ANSWER_TOKENS, &mut greedy, stop, &mut |_| Ok(true))?;
        Ok(tokenizer.decode(&ids, true)?.trim().replace('\n', " "))
    };
    questions.iter().map(answer).collect()
}

/// Prints the figures before and after, and the questions with both answers.
pub(crate) fn show(
    questions: &[Question],
    [before, after]: [&[String]; 2],
    summary: &RunSummary,
    terminal: &Terminal,
) {
    if questions.is_empty() {
        return;
    }
    if let (Some(first), Some(last)) = (&summary.before, &summary.after) {
        terminal.heading("held-out questions, before and after");
        terminal.line(format!("loss         {:.4} -> {:.4}", first.eval_loss, last.eval_loss));
        let percent = |share: Option<f64>| 100.0 * share.unwrap_or(0.0);
        let (was, is) = (percent(first.eval_exact_match), percent(last.eval_exact_match));
        terminal.line(format!("exact match  {was:.1} % -> {is:.1} %"));
    }
    for ((question, before), after) in questions.iter().zip(before).zip(after) {
        terminal.heading(&question.text);
        terminal.line(format!("expected  {}", question.reference));
        terminal.line(format!("before    {before}"));
        terminal.line(format!("after     {after}"));
    }
}
