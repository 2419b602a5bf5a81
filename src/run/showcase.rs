//! What the quickstart shows beside its figures: two held-out questions, answered by the base and by what came of
//! training.

use crate::data::Tokenizer;
use crate::engine::{Engine, LogitsProcessor, RunSummary, Sampling};
use crate::error::Result;
use crate::plan::Plan;
use crate::report::Terminal;
use crate::report::html::AnsweredQuestion;

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

/// The questions with both answers, as the report shows them; `before` and `after` are none where nobody asked.
pub(crate) fn answered(
    questions: &[Question],
    [before, after]: [Option<&[String]>; 2],
) -> Vec<AnsweredQuestion> {
    let answer = |answers: Option<&[String]>, at: usize| answers.and_then(|all| all.get(at).cloned());
    let one = |(at, question): (usize, &Question)| AnsweredQuestion {
        question: question.text.clone(),
        expected: question.reference.clone(),
        before: answer(before, at),
        after: answer(after, at),
    };
    questions.iter().enumerate().map(one).collect()
}

/// Prints the figures before and after, and the questions with both answers.
pub(crate) fn show(questions: &[AnsweredQuestion], summary: &RunSummary, terminal: &Terminal) {
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
    for one in questions {
        terminal.heading(&one.question);
        terminal.line(format!("expected  {}", one.expected));
        let answers = [("before  ", &one.before), ("after   ", &one.after)];
        for (when, answer) in answers.into_iter().filter_map(|(when, answer)| Some((when, answer.as_ref()?)))
        {
            terminal.line(format!("{when}  {answer}"));
        }
    }
}
