//! The held-out questions that a run shows beside its figures, answered by the base and by what came of training. All runs
//! have them in their report, the quickstart on the terminal too. With `eval.samples` each evaluation answers them.

use crate::data::{Example, Tokenizer};
use crate::engine::{Engine, LogitsProcessor, RunSummary, Sampling};
use crate::error::{Error, ErrorCategory, Result};
use crate::parallel::ShardingStrategy;
use crate::planning::Plan;
use crate::recipe::Offload;
use crate::report::html::AnsweredQuestion;
use crate::report::{EvalReport, HeldOutAnswer, Terminal};
use crate::units;

/// How many questions are shown.
const SHOWN: usize = 2;
/// Tokens that the quickstart's base may ramble on.
const QUICKSTART_TOKENS: usize = 24;
/// Tokens of an answer elsewhere, at most, and those without which it tells nothing.
const ANSWER_TOKENS: (usize, usize) = (64, 12);
/// Bytes of weights that may be read for the answers, of which each token takes one reading: some ten seconds on a processor, one on
/// a GPU.
const READ: [u64; 2] = [100_000_000_000, 1_000_000_000_000];
/// The longest question, in tokens.
const PROMPT_TOKENS: usize = 1024;

/// A held-out row: what is asked, and the answer that its author gave.
struct Question {
    prompt: Vec<u32>,
    text: String,
    reference: String,
}

/// The questions of a run.
#[derive(Default)]
pub(crate) struct Showcase {
    questions: Vec<Question>,
    /// Tokens of an answer, at most.
    tokens: usize,
    /// Shown on the terminal, as the quickstart's are.
    on_terminal: bool,
    /// Each evaluation answers them, so that nothing else asks before and after.
    at_evaluations: bool,
}

impl Showcase {
    /// The questions to show, of the held-out rows of the plan: none where there are none, where rows are no answers to anything, and
    /// where to answer would take long.
    ///
    /// # Errors
    /// A row cannot be decoded. The user's: `eval.samples` asks for answers, and no held-out row asks anything.
    pub(crate) fn of(plan: &Plan, is_quickstart: bool) -> Result<Self> {
        let samples = plan.recipe.eval.samples;
        let tokens = match () {
            () if is_quickstart => QUICKSTART_TOKENS,
            () if samples > 0 => ANSWER_TOKENS.0,
            () => affordable_tokens(plan),
        };
        let Some((held_out, _)) = plan.held_out.as_ref().filter(|_| tokens > 0) else {
            return Ok(Showcase::default());
        };
        let tokenizer = &plan.rows.tokenizer;
        let asked = held_out.examples().iter().filter_map(|example| {
            let start = example.trained.iter().position(|trained| *trained)?;
            (2..=PROMPT_TOKENS).contains(&start).then_some((example, start))
        });
        let shown = if samples > 0 { samples } else { SHOWN };
        let questions = asked.take(shown).map(|(example, start)| question(example, start, tokenizer));
        let questions = questions.collect::<Result<Vec<_>>>()?;
        if samples > 0 && questions.is_empty() {
            return Err(Error::user("no held-out row can be answered")
                .because(format!(
                    "`eval.samples` is {samples}, and of {} each is trained from its beginning, or asks with more than \
                     {PROMPT_TOKENS} tokens",
                    units::exact(held_out.examples().len(), "held-out row")
                ))
                .hint("give held-out rows that have prompts, or remove `eval.samples`"));
        }
        Ok(Showcase { questions, tokens, on_terminal: is_quickstart, at_evaluations: samples > 0 })
    }

    /// The answers before or after the training, which the evaluations have where they answer.
    fn answers_of(&self, report: Option<&EvalReport>, asked: Option<&[String]>) -> Option<Vec<String>> {
        if !self.at_evaluations {
            return asked.map(<[String]>::to_vec);
        }
        // A resumed run may have other held-out rows than its first evaluation.
        let samples = &report?.eval_samples;
        let answer = |question: &Question| {
            let found = samples.iter().find(|sample| sample.prompt == question.text);
            found.map_or_else(|| "–".to_owned(), |sample| sample.answer.clone())
        };
        Some(self.questions.iter().map(answer).collect())
    }
}

/// Tokens of an answer for which the weights may be read; 0 where they are too few, or gathered from other ranks each time.
fn affordable_tokens(plan: &Plan) -> usize {
    let sharded = matches!(plan.strategy, ShardingStrategy::Fsdp | ShardingStrategy::Hsdp(_));
    if sharded || plan.recipe.parallel.offload == Offload::Params {
        return 0;
    }
    let (most, least) = ANSWER_TOKENS;
    let room = READ[usize::from(!plan.engine.device.is_cpu())] / plan.memory.weights.max(1) / SHOWN as u64;
    let tokens = usize::try_from(room).unwrap_or(most).min(most);
    if tokens < least { 0 } else { tokens }
}

fn question(example: &Example, start: usize, tokenizer: &Tokenizer) -> Result<Question> {
    let (prompt, answer) = example.ids.split_at(start);
    let end = example.trained[start..].iter().position(|trained| !trained).unwrap_or(answer.len());
    Ok(Question {
        prompt: prompt.to_vec(),
        text: tokenizer.decode(prompt, true)?.trim().to_owned(),
        reference: tokenizer.decode(&answer[..end], true)?.trim().to_owned(),
    })
}

/// The model's answers before or after the training, where no evaluation answers.
///
/// # Errors
/// As [`answers`].
pub(crate) fn answers_beside_evaluations(
    showcase: &Showcase,
    engine: &Engine,
    tokenizer: &Tokenizer,
) -> Result<Vec<String>> {
    if showcase.at_evaluations { Ok(Vec::new()) } else { answers(showcase, engine, tokenizer) }
}

/// The model's answers at an evaluation, where the recipe asks for them.
///
/// # Errors
/// As [`answers`].
pub(crate) fn samples(
    showcase: &Showcase,
    engine: &Engine,
    tokenizer: &Tokenizer,
) -> Result<Vec<HeldOutAnswer>> {
    if !showcase.at_evaluations {
        return Ok(Vec::new());
    }
    let answered = |(question, answer): (&Question, String)| HeldOutAnswer {
        prompt: question.text.clone(),
        expected: question.reference.clone(),
        answer,
    };
    Ok(showcase.questions.iter().zip(answers(showcase, engine, tokenizer)?).map(answered).collect())
}

/// What the model answers, always the likeliest token: nothing where its numbers are none, which training will say.
///
/// # Errors
/// The device failed, or a peer.
fn answers(showcase: &Showcase, engine: &Engine, tokenizer: &Tokenizer) -> Result<Vec<String>> {
    let answer = |question: &Question| {
        let mut greedy = LogitsProcessor::from_sampling(0, Sampling::ArgMax);
        let stop = tokenizer.eos_ids();
        let ids = engine.generate(&question.prompt, showcase.tokens, &mut greedy, stop, &mut |_| Ok(true))?;
        Ok(tokenizer.decode(&ids, true)?.trim().replace('\n', " "))
    };
    match showcase.questions.iter().map(answer).collect() {
        Err(error) if Error::kind(&error) == ErrorCategory::Diverged => Ok(Vec::new()),
        answers => answers,
    }
}

/// The questions with both answers, as the report shows them; `before` and `after` are none where nobody asked.
pub(crate) fn answered(
    showcase: &Showcase,
    summary: &RunSummary,
    [before, after]: [Option<&[String]>; 2],
) -> Vec<AnsweredQuestion> {
    let before = showcase.answers_of(summary.before.as_ref(), before);
    let after = showcase.answers_of(summary.after.as_ref(), after);
    let answer = |answers: &Option<Vec<String>>, at: usize| answers.as_ref()?.get(at).cloned();
    let one = |(at, question): (usize, &Question)| AnsweredQuestion {
        question: question.text.clone(),
        expected: question.reference.clone(),
        before: answer(&before, at),
        after: answer(&after, at),
    };
    showcase.questions.iter().enumerate().map(one).collect()
}

/// Prints the figures before and after, and the questions with both answers.
pub(crate) fn show(
    showcase: &Showcase,
    questions: &[AnsweredQuestion],
    summary: &RunSummary,
    terminal: &Terminal,
) {
    if questions.is_empty() || !showcase.on_terminal {
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
