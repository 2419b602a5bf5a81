//! Splits the rows of an optimizer step, which all ranks share, into micro-batches of each rank.

use crate::checkpoint::SavedCheckpoint;
use crate::data::{Dataset, Sampler, SamplerOptions};
use crate::error::{Error, Result};
use crate::recipe::{AutoOr, Recipe};
use crate::units;

/// Fewest steps that "auto" leaves in an epoch, if the rows allow it.
const LEAST_STEPS: usize = 30;
/// Most rows of a step over all ranks that "auto" chooses.
const MOST_ROWS: usize = 8;

/// Decides the accumulation over `ranks` ranks as far as it does not depend on the rows. The
/// sources are `train.global_batch_size` or the checkpoint to resume, whose steps stay the same on
/// other ranks. "auto" also takes accumulation and row length from the checkpoint. Removes
/// `train.global_batch_size` from the recipe and returns it.
///
/// # Errors
/// The ranks do not divide the rows of a step.
pub fn decide_rows(
    recipe: &mut Recipe,
    ranks: usize,
    resumed: Option<&SavedCheckpoint>,
) -> Result<Option<usize>> {
    if let (AutoOr::Auto, Some(tokens)) =
        (recipe.data.max_seq_len, resumed.and_then(|saved| saved.state.max_seq_len()))
    {
        recipe.data.max_seq_len = AutoOr::Fixed(tokens);
    }
    if let Some(rows) = recipe.train.global_batch_size.take() {
        let size = recipe.train.micro_batch_rows();
        recipe.train.gradient_accumulation_steps = AutoOr::Fixed(share_of_rank(rows, size, ranks)?);
        return Ok(Some(rows));
    }
    let is_open = recipe.train.gradient_accumulation_steps == AutoOr::Auto;
    match resumed.filter(|saved| is_open || saved.state.ranks != ranks) {
        Some(saved) => split_saved_steps(recipe, ranks, saved).map(|()| None),
        None => Ok(None),
    }
}

/// Decides `train.gradient_accumulation_steps = "auto"` for the rows of `data`. Without data,
/// assumes enough rows for an epoch of many steps.
///
/// # Errors
/// Those of [`Sampler::new`].
pub fn decide_accumulation(recipe: &mut Recipe, data: Option<&Dataset>, ranks: usize) -> Result<()> {
    if recipe.train.gradient_accumulation_steps == AutoOr::Auto {
        let options = sampler_options(recipe, ranks);
        let rows = data.map(|data| Ok::<_, Error>(Sampler::new(data, options)?.num_units())).transpose()?;
        let rows_of_micro_batches = recipe.train.micro_batch_rows().saturating_mul(ranks);
        recipe.train.gradient_accumulation_steps = AutoOr::Fixed(accumulation(rows, rows_of_micro_batches));
    }
    Ok(())
}

/// Returns the options of a sampler over the steps of all ranks.
pub fn sampler_options(recipe: &Recipe, ranks: usize) -> SamplerOptions {
    SamplerOptions {
        seed: recipe.train.seed,
        shuffle: recipe.data.shuffle,
        packing: recipe.data.packing,
        max_seq_len: recipe.longest_group(),
        micro_batch_size: recipe.train.micro_batch_rows(),
        gradient_accumulation_steps: recipe.train.accumulation().saturating_mul(ranks),
        epochs: recipe.train.epochs,
        max_steps: recipe.train.max_steps,
    }
}

/// Returns the largest accumulation with at most [`MOST_ROWS`] rows a step that leaves
/// [`LEAST_STEPS`] steps in an epoch of `rows` rows; else 1. One micro-batch of every rank has
/// `micro_batches` rows in total.
fn accumulation(rows: Option<usize>, micro_batches: usize) -> usize {
    let most = (MOST_ROWS / micro_batches.max(1)).max(1);
    let is_short = |times: usize| rows.is_some_and(|rows| rows.div_ceil(times * micro_batches) < LEAST_STEPS);
    (1..=most).rev().find(|times| !is_short(*times)).unwrap_or(1)
}

/// Returns the number of micro-batches of `size` rows for each of `ranks` ranks in a step of `rows`
/// rows.
///
/// # Errors
/// The user's: the ranks cannot share the rows evenly.
fn share_of_rank(rows: usize, size: usize, ranks: usize) -> Result<usize> {
    let unit = size.saturating_mul(ranks);
    if rows.is_multiple_of(unit) {
        return Ok(rows / unit);
    }
    let below = rows / unit * unit;
    let nearest: Vec<usize> =
        [below, below.saturating_add(unit)].into_iter().filter(|rows| *rows > 0).collect();
    let nearest = nearest.iter().map(usize::to_string).collect::<Vec<_>>().join(" and ");
    Err(Error::user(format!("cannot make steps of {rows} rows"))
        .because(format!(
            "`train.global_batch_size` is {rows}; accepted: multiples of {unit}, which is \
             `train.micro_batch_size` {size} x {}; nearest: {nearest}",
            units::exact(ranks, "rank")
        ))
        .hint(format!("write one of the nearest ({nearest}), or another `train.micro_batch_size`")))
}

/// Splits the steps of the checkpoint `saved` over `ranks` ranks. The accumulation changes so that
/// the resumed run makes the same steps.
///
/// # Errors
/// The ranks do not divide the micro-batches of a step.
fn split_saved_steps(recipe: &mut Recipe, ranks: usize, saved: &SavedCheckpoint) -> Result<()> {
    let Some(steps) = saved.state.micro_batches() else {
        return Err(Error::user(format!("cannot resume {}", saved.folder.display()))
            .because(format!(
                "it does not record the number of micro-batches per step, and its run had {}",
                units::exact(saved.state.ranks, "rank")
            ))
            .hint(format!("resume with `--ranks {}`", saved.state.ranks)));
    };
    let size = recipe.train.micro_batch_rows();
    let then = saved.state.micro_batch_size().unwrap_or(size);
    let rows = steps.saturating_mul(then);
    if !rows.is_multiple_of(size) {
        return Err(Error::user(format!("cannot resume {}", saved.folder.display()))
            .because(format!(
                "its steps are {steps} micro-batches of {then}, which `train.micro_batch_size` {size} cannot share evenly"
            ))
            .hint(format!("use a divisor of {rows}")));
    }
    let steps = rows / size;
    if !steps.is_multiple_of(ranks) {
        let counts: Vec<String> =
            (1..=steps).filter(|count| steps.is_multiple_of(*count)).map(|count| count.to_string()).collect();
        return Err(Error::user(format!("cannot resume {} with {ranks} ranks", saved.folder.display()))
            .because(format!(
                "its steps are {steps} micro-batches of {size}, which {ranks} ranks cannot share evenly"
            ))
            .hint(format!("use one of these numbers of ranks: {}", counts.join(", "))));
    }
    recipe.train.gradient_accumulation_steps = AutoOr::Fixed(steps / ranks);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_keeps_thirty_steps_where_its_rows_allow() {
        for (rows, micro_batches, wanted) in [
            (29, 1, 1),
            (58, 1, 1),
            (59, 1, 2),
            (60, 1, 2),
            (120, 1, 4),
            (233, 1, 8),
            (232, 1, 7),
            (100_000, 1, 8),
            (60, 2, 1),
            (120, 2, 2),
            (100_000, 2, 4),
            (100_000, 8, 1),
            (100_000, 64, 1),
        ] {
            assert_eq!(accumulation(Some(rows), micro_batches), wanted, "{rows} rows of {micro_batches}");
        }
        assert_eq!(accumulation(None, 1), 8);
    }

    #[test]
    fn rows_of_a_step_are_shared_evenly() {
        assert_eq!(share_of_rank(12, 2, 3).ok(), Some(2));
        let error = share_of_rank(10, 2, 2).expect_err("an odd number of micro-batches").to_string();
        assert!(error.contains("nearest: 8 and 12"), "{error}");
        let error = share_of_rank(3, 2, 2).expect_err("too few rows").to_string();
        assert!(error.contains("nearest: 4") && !error.contains("0 and"), "{error}");
    }
}
