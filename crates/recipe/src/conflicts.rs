//! Keys that have no effect, or miss a required key, given the other keys. Such a key is an error,
//! because its author expects an effect.
//!
//! A key with its default value never conflicts, so that a resolved recipe, which contains every
//! default, can be read again.

use std::collections::HashSet;

use super::Recipe;
use super::enums::{
    AdapterInit, BaseProducts, ComputeDtype, MasterWeights, Offload, OnNan, SchedulerKind, Strategy,
};
use super::key_conflict::KeyConflict;
use super::objective_keys;
use super::sections::{ProfileSection, TrainSection};
use super::source::DataSource;
use super::step_interval::StepInterval;

/// Returns every conflict in `recipe`.
pub(super) fn conflicts(recipe: &Recipe) -> Vec<KeyConflict> {
    let mut conflicts = Vec::new();
    schedule(recipe, &mut conflicts);
    adapter(recipe, &mut conflicts);
    packed(recipe, &mut conflicts);
    base_products(recipe, &mut conflicts);
    masters(recipe, &mut conflicts);
    places(recipe, &mut conflicts);
    divergence(recipe, &mut conflicts);
    retention(recipe, &mut conflicts);
    evaluation(recipe, &mut conflicts);
    profile(recipe, &mut conflicts);
    alerts(recipe, &mut conflicts);
    objective_keys::conflicts(recipe, &mut conflicts);
    conflicts
}

fn schedule(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    let scheduler = &recipe.scheduler;
    let kind = scheduler.kind;
    let mut add = |wrong: bool, key: &'static str, text: String, hint: &str| {
        if wrong {
            // A missing key, or one that excludes another, cannot be reset to its default.
            let overruled_by = text.starts_with("has no effect").then_some(("scheduler", "kind"));
            conflicts.push(KeyConflict {
                section: "scheduler",
                key,
                text,
                hint: hint.to_owned(),
                overruled_by,
            });
        }
    };
    let no_effect = format!("has no effect with `kind = \"{kind}\"`");

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
    let decay = scheduler.num_decay_steps.is_some();
    let of_one_kind = [
        (scheduler.num_cycles != 1, "num_cycles", SchedulerKind::CosineWithRestarts),
        (scheduler.power != 1.0, "power", SchedulerKind::Polynomial),
        (decay, "num_decay_steps", SchedulerKind::WarmupStableDecay),
    ];
    for (is_written, key, wanted) in of_one_kind {
        let hint = format!("write `kind = \"{wanted}\"`");
        add(is_written && kind != wanted, key, no_effect.clone(), &hint);
    }
    add(
        !decay && kind == SchedulerKind::WarmupStableDecay,
        "num_decay_steps",
        needs,
        "write `num_decay_steps = 100`, for example",
    );
}

fn adapter(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    match &recipe.adapter {
        Some(adapter) => {
            if adapter.init != AdapterInit::Default && adapter.path.is_some() {
                let text = "has no effect with `path`: a saved adapter brings its own weights";
                let conflict = KeyConflict::new("adapter", "init", text, "remove `init` or `path`");
                conflicts.push(conflict.overruled_by("adapter", "path"));
            }
            if adapter.init == AdapterInit::Loftq && recipe.quantization.is_none() {
                let text = "is \"loftq\", which needs a quantized base";
                let hint = if recipe.model.dequantize {
                    "add `[quantization]`, or remove `init`"
                } else {
                    "add `[quantization]` and remove `model.dequantize`, or remove `init`"
                };
                conflicts.push(KeyConflict::new("adapter", "init", text, hint));
            }
        }
        None if recipe.optimizer.lora_plus_ratio != 1.0 => {
            let hint = "add `[adapter]`, or remove `lora_plus_ratio`";
            let text = "has no effect without [adapter]";
            conflicts.push(KeyConflict::new("optimizer", "lora_plus_ratio", text, hint));
        }
        None => {}
    }
}

fn packed(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    if !recipe.model.dequantize && recipe.quantization.is_some() {
        let text = "is false, which keeps packed weights as they are; `[quantization]` changes them";
        let hint = "remove `dequantize` or `[quantization]`";
        conflicts.push(KeyConflict::new("model", "dequantize", text, hint));
    }
}

fn base_products(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    if recipe.train.base_products != BaseProducts::Fp8 {
        return;
    }
    if recipe.adapter.is_none() {
        let text = "has no effect without [adapter]: weights that train are not multiplied in fp8";
        let hint = "add `[adapter]`, or remove `base_products`";
        conflicts.push(KeyConflict::new("train", "base_products", text, hint));
    }
    if recipe.quantization.as_ref().is_some_and(|quantization| quantization.bf16_copy) {
        let text = "has no effect with `train.base_products = \"fp8\"`, which keeps codes of fp8 instead";
        let hint = "remove `bf16_copy`, or `base_products` under `[train]`";
        let conflict = KeyConflict::new("quantization", "bf16_copy", text, hint);
        conflicts.push(conflict.overruled_by("train", "base_products"));
    }
}

fn masters(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    if recipe.optimizer.master != MasterWeights::None {
        return;
    }
    if recipe.adapter.is_some() {
        let text = "has no effect with [adapter]: adapter weights always have f32 masters";
        conflicts.push(KeyConflict::new("optimizer", "master", text, "remove `master`"));
    } else if recipe.model.dtype == ComputeDtype::F32 {
        let text = "has no effect with `model.dtype = \"f32\"`: f32 weights need no masters";
        let hint = "write `dtype = \"bf16\"` under `[model]`, or remove `master`";
        let conflict = KeyConflict::new("optimizer", "master", text, hint);
        conflicts.push(conflict.overruled_by("model", "dtype"));
    }
}

fn divergence(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    let train = &recipe.train;
    if train.nan_limit != TrainSection::default().nan_limit && train.on_nan == OnNan::Stop {
        let hint = "write `on_nan = \"skip\"`, or remove `nan_limit`";
        let text = "has no effect with `on_nan = \"stop\"`";
        conflicts.push(KeyConflict::new("train", "nan_limit", text, hint).overruled_by("train", "on_nan"));
    }
    if train.on_nan == OnNan::Rollback && recipe.checkpoint.save_steps == StepInterval::Never {
        let hint = "write `save_steps = 100` under `[checkpoint]`, for example, or `on_nan = \"skip\"`";
        let text = "is \"rollback\", which needs checkpoints";
        conflicts.push(KeyConflict::new("train", "on_nan", text, hint));
    }
}

fn retention(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    let Some(every) = recipe.checkpoint.keep_every else { return };
    match recipe.checkpoint.save_steps {
        StepInterval::Every(steps) if every.is_multiple_of(steps) => {}
        StepInterval::Every(steps) => {
            let text = format!("is {every}; accepted: a multiple of `save_steps`, which is {steps}");
            let hint = format!("write `keep_every = {}`", every.next_multiple_of(steps));
            conflicts.push(KeyConflict::new("checkpoint", "keep_every", text, hint));
        }
        _ => {
            let text = "needs a number of steps between checkpoints in `save_steps`";
            let hint = format!("write `save_steps = {every}`, or remove `keep_every`");
            let conflict = KeyConflict::new("checkpoint", "keep_every", text, hint);
            conflicts.push(conflict.overruled_by("checkpoint", "save_steps"));
        }
    }
}

fn evaluation(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    let eval = &recipe.eval;
    let mut add = |key, text: &str, hint: &str| conflicts.push(KeyConflict::new("eval", key, text, hint));
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

fn profile(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
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
        let text = "has no effect with `active = 0`, which disables tracing";
        let hint = format!("write `active = 3` under `[profile]`, for example, or remove `{key}`");
        conflicts.push(KeyConflict::new("profile", key, text, hint).overruled_by("profile", "active"));
    }
}

fn alerts(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    let own = &recipe.alerts;
    if own.rules.as_ref().is_none_or(|rules| !rules.is_empty()) {
        return;
    }
    let keys = [("command", own.command.is_some()), ("webhook", own.webhook.is_some())];
    for (key, _) in keys.into_iter().filter(|(_, written)| *written) {
        let text = "has no effect with `rules = []`, which disables all alerts";
        let hint = format!("remove `rules` to watch for all of them, or remove `{key}`");
        conflicts.push(KeyConflict::new("alerts", key, text, hint).overruled_by("alerts", "rules"));
    }
}

fn held_out(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    let Some(size) = recipe.data.eval_split else { return };
    if !recipe.data.eval.is_empty() {
        let text = "has no effect beside `data.eval`";
        let conflict = KeyConflict::new("data", "eval_split", text, "remove one of the two");
        conflicts.push(conflict.overruled_by("data", "eval"));
    }
    if size >= 1.0 && size.fract() != 0.0 {
        let text = format!("is {size}; accepted: a fraction below 1, or a whole number of rows");
        let hint = format!("write `eval_split = {}`", size.round());
        conflicts.push(KeyConflict::new("data", "eval_split", text, hint));
    }
}

fn places(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    let parallel = &recipe.parallel;
    if parallel.shard_size.is_some() && parallel.strategy != Strategy::Hsdp {
        let text = format!("has no effect with `strategy = \"{}\"`", parallel.strategy);
        let hint = "write `strategy = \"hsdp\"`, or remove `shard_size`";
        let conflict = KeyConflict::new("parallel", "shard_size", text, hint);
        conflicts.push(conflict.overruled_by("parallel", "strategy"));
    }
    if parallel.offload_folder.is_some() && parallel.offload != Offload::Params {
        let text = format!("has no effect with `offload = \"{}\"`", parallel.offload);
        let hint = "write `offload = \"params\"`, or remove `offload_folder`";
        let conflict = KeyConflict::new("parallel", "offload_folder", text, hint);
        conflicts.push(conflict.overruled_by("parallel", "offload"));
    }
    held_out(recipe, conflicts);
    let mut seen = HashSet::new();
    if let Some(twice) = recipe.model.new_tokens.iter().find(|text| !seen.insert(*text)) {
        let text = format!("has {twice:?} twice");
        conflicts.push(KeyConflict::new("model", "new_tokens", text, "name each token once"));
    }
    let local = matches!(recipe.model.id, Some(DataSource::Path(_) | DataSource::Builtin(_)));
    if local && recipe.model.revision != "main" {
        let text = "has no effect with a model that is not on the hub";
        let conflict = KeyConflict::new("model", "revision", text, "remove `revision`");
        conflicts.push(conflict.overruled_by("model", "id"));
    }
}
