//! Held-out questions that a run shows, answered by the base and by the trained model. All runs
//! show them in their report, the quickstart on the terminal too. With `eval.samples` each
//! evaluation answers them.

use crate::data::{Example, Tokenizer};
use crate::engine::{Engine, RunSummary, TokenSampler};
use crate::error::{Error, ErrorCategory, Result};
use crate::parallel::ShardingStrategy;
use crate::planning::Plan;
use crate::recipe::Offload;
use crate::report::html::AnsweredQuestion;
use crate::report::{EvalReport, HeldOutAnswer, Terminal};
use crate::units;

/// Number of questions without `eval.samples`.
const SHOWN: usize = 2;
/// Largest number of tokens of an answer in the quickstart.
const QUICKSTART_TOKENS: usize = 24;
/// Largest number of tokens of other answers, and the least number that is useful.
const ANSWER_TOKENS: (usize, usize) = (64, 12);
/// Bytes of weights that the answers may read, on a CPU and on a GPU. Each token reads all weights
/// once. The limits are about ten seconds on a CPU and one on a GPU.
const READ: [u64; 2] = [100_000_000_000, 1_000_000_000_000];
/// Largest number of tokens of a question.
const PROMPT_TOKENS: usize = 1024;

/// Prompt and reference answer of a held-out row.
struct Question {
    prompt: Vec<u32>,
    text: String,
    reference: String,
}

/// Questions of a run.
#[derive(Default)]
pub(crate) struct Showcase {
    questions: Vec<Question>,
    /// Largest number of tokens of an answer.
    tokens: usize,
    /// True if the terminal shows them, as in the quickstart.
    on_terminal: bool,
    /// True if each evaluation answers them, so that no separate answers are needed.
    at_evaluations: bool,
}

impl Showcase {
    /// Chooses the questions from the held-out rows of the plan. None without held-out rows, if no
    /// row has a prompt, or if answering would take long.
    ///
    /// # Errors
    /// A row cannot be decoded. The user's: `eval.samples` requests answers, and no held-out row
    /// has a usable prompt.
    pub(crate) fn of(plan: &Plan, is_quickstart: bool) -> Result<Self> {
        let samples = plan.recipe.eval.samples;
        let tokens = match () {
            () if is_quickstart => QUICKSTART_TOKENS,
            () if samples > 0 => ANSWER_TOKENS.0,
            () => affordable_tokens(plan),
        };
        let Some(held_out) = plan.held_out.as_ref().filter(|_| tokens > 0) else {
            return Ok(Showcase::default());
        };
        let tokenizer = &plan.dataset_loader.tokenizer;
        let prompts = held_out.dataset.examples().iter().filter(|example| !example.role.repeats_prompt());
        let asked = prompts.filter_map(|example| {
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
                    units::exact(held_out.dataset.examples().len(), "held-out row")
                ))
                .hint("give held-out rows that have prompts, or remove `eval.samples`"));
        }
        Ok(Showcase { questions, tokens, on_terminal: is_quickstart, at_evaluations: samples > 0 })
    }

    /// Returns the answers before or after training: those of the evaluation `report` if
    /// evaluations answer, else `asked`.
    fn answers_of(&self, report: Option<&EvalReport>, asked: Option<&[String]>) -> Option<Vec<String>> {
        if !self.at_evaluations {
            return asked.map(<[String]>::to_vec);
        }
        // A resumed run may have other held-out rows than its first evaluation.
        let samples = &report?.eval_samples;
        let answer = |question: &Question| {
            let known = samples.iter().find(|sample| sample.prompt == question.text);
            known.map_or_else(|| "–".to_owned(), |sample| sample.answer.clone())
        };
        Some(self.questions.iter().map(answer).collect())
    }

    /// Returns the model's answers before or after training, if evaluations do not answer.
    ///
    /// # Errors
    /// Those of [`Showcase::answers`].
    pub(crate) fn answers_beside_evaluations(
        &self,
        engine: &Engine,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<String>> {
        if self.at_evaluations { Ok(Vec::new()) } else { self.answers(engine, tokenizer) }
    }

    /// Returns the model's answers at an evaluation, if the recipe requests them.
    ///
    /// # Errors
    /// Those of [`Showcase::answers`].
    pub(crate) fn samples(&self, engine: &Engine, tokenizer: &Tokenizer) -> Result<Vec<HeldOutAnswer>> {
        if !self.at_evaluations {
            return Ok(Vec::new());
        }
        let answered = |(question, answer): (&Question, String)| HeldOutAnswer {
            prompt: question.text.clone(),
            expected: question.reference.clone(),
            answer,
        };
        Ok(self.questions.iter().zip(self.answers(engine, tokenizer)?).map(answered).collect())
    }

    /// Returns the model's greedy answers. None if its logits are not finite, which training
    /// reports.
    ///
    /// # Errors
    /// The device or a peer failed.
    fn answers(&self, engine: &Engine, tokenizer: &Tokenizer) -> Result<Vec<String>> {
        let answer = |question: &Question| {
            let mut greedy = TokenSampler::greedy();
            let stop = tokenizer.eos_ids();
            let ids = engine.generate(&question.prompt, self.tokens, &mut greedy, stop, &mut |_| Ok(true))?;
            Ok(tokenizer.decode(&ids, true)?.trim().replace('\n', " "))
        };
        match self.questions.iter().map(answer).collect() {
            Err(error) if Error::kind(&error) == ErrorCategory::Diverged => Ok(Vec::new()),
            answers => answers,
        }
    }

    /// Returns the questions with both answers for the report. `before` and `after` are none if the
    /// model did not answer then.
    pub(crate) fn answered(
        &self,
        summary: &RunSummary,
        [before, after]: [Option<&[String]>; 2],
    ) -> Vec<AnsweredQuestion> {
        let before = self.answers_of(summary.before.as_ref(), before);
        let after = self.answers_of(summary.after.as_ref(), after);
        let answer = |answers: &Option<Vec<String>>, at: usize| answers.as_ref()?.get(at).cloned();
        let one = |(at, question): (usize, &Question)| AnsweredQuestion {
            question: question.text.clone(),
            expected: question.reference.clone(),
            before: answer(&before, at),
            after: answer(&after, at),
        };
        self.questions.iter().enumerate().map(one).collect()
    }

    /// Prints losses and exact match before and after, and the questions with both answers.
    pub(crate) fn show(&self, questions: &[AnsweredQuestion], summary: &RunSummary, terminal: &Terminal) {
        if questions.is_empty() || !self.on_terminal {
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
            for (when, answer) in [("before  ", &one.before), ("after   ", &one.after)] {
                answer.iter().for_each(|answer| terminal.line(format!("{when}  {answer}")));
            }
        }
    }
}

/// Returns the affordable number of tokens of an answer. 0 if it is too small, or if each token
/// would gather the weights from other ranks or the host.
fn affordable_tokens(plan: &Plan) -> usize {
    let sharded = matches!(plan.strategy, ShardingStrategy::Fsdp | ShardingStrategy::Hsdp(_));
    if sharded || plan.recipe.parallel.offload == Offload::Params {
        return 0;
    }
    let (most, least) = ANSWER_TOKENS;
    let affordable =
        READ[usize::from(!plan.engine.device.is_cpu())] / plan.memory.weights.max(1) / SHOWN as u64;
    let tokens = usize::try_from(affordable).unwrap_or(most).min(most);
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
