//! Keys that have no effect, or miss a required key, given the other keys. Such a key is an error,
//! because its author expects an effect.
//!
//! A key with its default value never conflicts, so that a resolved recipe, which contains every
//! default, can be read again.

use std::collections::HashSet;

use super::Recipe;
use super::enums::{AdapterInit, ComputeDtype, MasterWeights, Offload, OnNan, SchedulerKind, Strategy};
use super::sections::{ProfileSection, TrainSection};
use super::source::DataSource;
use super::step_interval::StepInterval;

/// A key that conflicts with another.
pub(super) struct KeyConflict {
    pub(super) section: &'static str,
    pub(super) key: &'static str,
    /// The problem, written after the key's name.
    pub(super) text: String,
    /// The fix to write.
    pub(super) hint: String,
    /// Section and name of the single key that leaves this one without effect, if there is one.
    pub(super) overruled_by: Option<(&'static str, &'static str)>,
}

/// Returns every conflict in `recipe`.
pub(super) fn conflicts(recipe: &Recipe) -> Vec<KeyConflict> {
    let mut found = Vec::new();
    schedule(recipe, &mut found);
    adapter(recipe, &mut found);
    masters(recipe, &mut found);
    places(recipe, &mut found);
    divergence(recipe, &mut found);
    evaluation(recipe, &mut found);
    profile(recipe, &mut found);
    alerts(recipe, &mut found);
    found
}

fn schedule(recipe: &Recipe, found: &mut Vec<KeyConflict>) {
    let scheduler = &recipe.scheduler;
    let kind = scheduler.kind;
    let mut add = |wrong: bool, key: &'static str, text: String, hint: &str| {
        if wrong {
            // A missing key, or one that excludes another, cannot be reset to its default.
            let overruled_by = text.starts_with("has no effect").then_some(("scheduler", "kind"));
            found.push(KeyConflict { section: "scheduler", key, text, hint: hint.to_owned(), overruled_by });
        }
    };
    let no_effect = format!("has no effect with `kind = \"{kind}\"`");
    let without = |wanted: SchedulerKind| kind != wanted;

    let steps = scheduler.warmup_steps.is_some_and(|steps| steps > 0);
    let ratio = scheduler.warmup_ratio.is_some_and(|ratio| ratio > 0.0);
    let both = scheduler.warmup_steps.is_some() && scheduler.warmup_ratio.is_some();
    add(both, "warmup_steps", "and `warmup_ratio` exclude each other".into(), "remove one of the two");
    let warm = "write `kind = \"constant_with_warmup\"`";
    add(!kind.has_warmup() && steps, "warmup_steps", no_effect.clone(), warm);
    add(!kind.has_warmup() && ratio, "warmup_ratio", no_effect.clone(), warm);

    let floor = scheduler.min_lr_ratio > 0.0;
    add(
        floor && !kind.has_floor(),
        "min_lr_ratio",
        no_effect.clone(),
        "remove it, or write `kind = \"cosine\"`",
    );
    let needs = format!("is not set, but `kind = \"{kind}\"` needs it");
    add(
        !floor && kind == SchedulerKind::CosineWithMinLr,
        "min_lr_ratio",
        needs.clone(),
        "write `min_lr_ratio = 0.1` or `kind = \"cosine\"`",
    );
    add(
        scheduler.num_cycles != 1 && without(SchedulerKind::CosineWithRestarts),
        "num_cycles",
        no_effect.clone(),
        "write `kind = \"cosine_with_restarts\"`",
    );
    add(
        scheduler.power != 1.0 && without(SchedulerKind::Polynomial),
        "power",
        no_effect.clone(),
        "write `kind = \"polynomial\"`",
    );
    let decay = scheduler.num_decay_steps.is_some();
    let stable = "write `kind = \"warmup_stable_decay\"`";
    add(decay && without(SchedulerKind::WarmupStableDecay), "num_decay_steps", no_effect, stable);
    add(
        !decay && kind == SchedulerKind::WarmupStableDecay,
        "num_decay_steps",
        needs,
        "write `num_decay_steps = 100`, for example",
    );
}

fn adapter(recipe: &Recipe, found: &mut Vec<KeyConflict>) {
    match &recipe.adapter {
        Some(adapter) => {
            if adapter.init != AdapterInit::Default && adapter.path.is_some() {
                found.push(KeyConflict {
                    section: "adapter",
                    key: "init",
                    text: "has no effect with `path`: a saved adapter brings its own weights".into(),
                    hint: "remove `init` or `path`".into(),
                    overruled_by: Some(("adapter", "path")),
                });
            }
            if adapter.init == AdapterInit::Loftq && recipe.quantization.is_none() {
                found.push(KeyConflict {
                    section: "adapter",
                    key: "init",
                    text: "is \"loftq\", which needs a quantized base".into(),
                    hint: "add `[quantization]`, or remove `init`".into(),
                    overruled_by: None,
                });
            }
        }
        None if recipe.optimizer.lora_plus_ratio != 1.0 => found.push(KeyConflict {
            section: "optimizer",
            key: "lora_plus_ratio",
            text: "has no effect without [adapter]".into(),
            hint: "add `[adapter]`, or remove `lora_plus_ratio`".into(),
            overruled_by: None,
        }),
        None => {}
    }
}

fn masters(recipe: &Recipe, found: &mut Vec<KeyConflict>) {
    if recipe.optimizer.master != MasterWeights::None {
        return;
    }
    let (text, hint) = if recipe.adapter.is_some() {
        ("has no effect with [adapter]: adapter weights always have f32 masters", "remove `master`")
    } else if recipe.model.dtype == ComputeDtype::F32 {
        (
            "has no effect with `model.dtype = \"f32\"`: f32 weights need no masters",
            "write `dtype = \"bf16\"` under `[model]`, or remove `master`",
        )
    } else {
        return;
    };
    found.push(KeyConflict {
        section: "optimizer",
        key: "master",
        text: text.into(),
        hint: hint.into(),
        overruled_by: recipe.adapter.is_none().then_some(("model", "dtype")),
    });
}

fn divergence(recipe: &Recipe, found: &mut Vec<KeyConflict>) {
    let train = &recipe.train;
    if train.nan_limit != TrainSection::default().nan_limit && train.on_nan == OnNan::Stop {
        found.push(KeyConflict {
            section: "train",
            key: "nan_limit",
            text: "has no effect with `on_nan = \"stop\"`".into(),
            hint: "write `on_nan = \"skip\"`, or remove `nan_limit`".into(),
            overruled_by: Some(("train", "on_nan")),
        });
    }
    if train.on_nan == OnNan::Rollback && recipe.checkpoint.save_steps == StepInterval::Never {
        found.push(KeyConflict {
            section: "train",
            key: "on_nan",
            text: "is \"rollback\", which needs checkpoints".into(),
            hint: "write `save_steps = 100` under `[checkpoint]`, for example, or `on_nan = \"skip\"`".into(),
            overruled_by: None,
        });
    }
}

fn evaluation(recipe: &Recipe, found: &mut Vec<KeyConflict>) {
    let eval = &recipe.eval;
    let mut add = |key: &'static str, text: &str, hint: &str| {
        let (text, hint) = (text.to_owned(), hint.to_owned());
        found.push(KeyConflict { section: "eval", key, text, hint, overruled_by: None });
    };
    let keeps = if eval.keep_best { "keep_best" } else { "patience" };
    if recipe.data.eval.is_empty() && recipe.data.eval_split.is_none() {
        let rows = "add `--eval-dataset DATASET`, or write `data.eval_split = 0.05`";
        if eval.steps != StepInterval::Auto {
            add("steps", "has no effect without `data.eval` or `data.eval_split`", rows);
        } else if eval.keeps_best() || eval.samples > 0 {
            let key = if eval.keeps_best() { keeps } else { "samples" };
            add(key, "needs held-out rows, but neither `data.eval` nor `data.eval_split` is set", rows);
        }
        return;
    }
    if !eval.keeps_best() {
        return;
    }
    if eval.steps == StepInterval::Never {
        let hint = format!("write `steps = \"epoch\"`, or remove `{keeps}`");
        add(keeps, "has no effect with `steps = \"never\"`", &hint);
    }
    if !eval.at_end {
        let text = format!("is false, but `{keeps}` needs the evaluation of the last weights");
        add("at_end", &text, &format!("remove `at_end`, or `{keeps}`"));
    }
    if recipe.checkpoint.save_steps == StepInterval::Never {
        let text = "needs checkpoints, but `checkpoint.save_steps` is \"never\"";
        add(keeps, text, "write `save_steps = \"epoch\"` under `[checkpoint]`");
    }
}

fn profile(recipe: &Recipe, found: &mut Vec<KeyConflict>) {
    let (own, default) = (&recipe.profile, ProfileSection::default());
    if own.active > 0 {
        return;
    }
    let keys = [
        ("wait", own.wait != default.wait),
        ("warmup", own.warmup != default.warmup),
        ("repeat", own.repeat != default.repeat),
    ];
    for (key, _) in keys.into_iter().filter(|(_, written)| *written) {
        found.push(KeyConflict {
            section: "profile",
            key,
            text: "has no effect with `active = 0`, which disables tracing".into(),
            hint: format!("write `active = 3` under `[profile]`, for example, or remove `{key}`"),
            overruled_by: Some(("profile", "active")),
        });
    }
}

fn alerts(recipe: &Recipe, found: &mut Vec<KeyConflict>) {
    let own = &recipe.alerts;
    if own.rules.as_ref().is_none_or(|rules| !rules.is_empty()) {
        return;
    }
    let keys = [("command", own.command.is_some()), ("webhook", own.webhook.is_some())];
    for (key, _) in keys.into_iter().filter(|(_, written)| *written) {
        found.push(KeyConflict {
            section: "alerts",
            key,
            text: "has no effect with `rules = []`, which disables all alerts".into(),
            hint: format!("remove `rules` to watch for all of them, or remove `{key}`"),
            overruled_by: Some(("alerts", "rules")),
        });
    }
}

fn held_out(recipe: &Recipe, found: &mut Vec<KeyConflict>) {
    let Some(size) = recipe.data.eval_split else { return };
    let mut conflict = |text: String, hint: String| {
        found.push(KeyConflict { section: "data", key: "eval_split", text, hint, overruled_by: None });
    };
    if !recipe.data.eval.is_empty() {
        conflict("has no effect beside `data.eval`".into(), "remove one of the two".into());
    }
    if size >= 1.0 && size.fract() != 0.0 {
        let text = format!("is {size}; accepted: a fraction below 1, or a whole number of rows");
        conflict(text, format!("write `eval_split = {}`", size.round()));
    }
}

fn places(recipe: &Recipe, found: &mut Vec<KeyConflict>) {
    let parallel = &recipe.parallel;
    if parallel.shard_size.is_some() && parallel.strategy != Strategy::Hsdp {
        found.push(KeyConflict {
            section: "parallel",
            key: "shard_size",
            text: format!("has no effect with `strategy = \"{}\"`", parallel.strategy),
            hint: "write `strategy = \"hsdp\"`, or remove `shard_size`".into(),
            overruled_by: Some(("parallel", "strategy")),
        });
    }
    if parallel.offload_folder.is_some() && parallel.offload != Offload::Params {
        found.push(KeyConflict {
            section: "parallel",
            key: "offload_folder",
            text: format!("has no effect with `offload = \"{}\"`", parallel.offload),
            hint: "write `offload = \"params\"`, or remove `offload_folder`".into(),
            overruled_by: Some(("parallel", "offload")),
        });
    }
    held_out(recipe, found);
    let mut seen = HashSet::new();
    if let Some(twice) = recipe.model.new_tokens.iter().find(|text| !seen.insert(*text)) {
        found.push(KeyConflict {
            section: "model",
            key: "new_tokens",
            text: format!("has {twice:?} twice"),
            hint: "name each token once".into(),
            overruled_by: None,
        });
    }
    let local = matches!(recipe.model.id, Some(DataSource::Path(_) | DataSource::Builtin(_)));
    if local && recipe.model.revision != "main" {
        found.push(KeyConflict {
            section: "model",
            key: "revision",
            text: "has no effect with a model that is not on the hub".into(),
            hint: "remove `revision`".into(),
            overruled_by: Some(("model", "id")),
        });
    }
}
