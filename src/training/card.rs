//! Model card of a run.

use std::path::Path;

use super::output_folder::last_name;
use crate::engine::RunSummary;
use crate::loading::ResolvedSource;
use crate::loading::dataset::LoadedDataset;
use crate::planning::Plan;
use crate::recipe::{DataSource, quoted_for_shell};
use crate::report::card::{Artifact, Card, CardBase, CardData};

/// Returns the model card of the run of `plan`.
pub(crate) fn card(plan: &Plan, summary: &RunSummary, title: String) -> Card {
    let sets = |loaded: &LoadedDataset| -> Vec<CardData> {
        let data = |source: &ResolvedSource| CardData {
            name: if source.on_hub {
                source.id.clone()
            } else {
                last_name(Path::new(&source.id), &source.id)
            },
            on_hub: source.on_hub,
            rows: loaded.dataset.report().rows as u64,
        };
        loaded.sources.iter().map(data).collect()
    };
    let base = &plan.base.source;
    Card {
        title,
        artifact: if plan.adapter_setup.is_some() { Artifact::Adapter } else { Artifact::Model },
        base: match (&plan.base.files, base.on_hub) {
            (None, _) => CardBase::Scratch,
            _ if is_builtin(plan) => CardBase::Builtin { id: base.id.clone() },
            (_, true) => CardBase::Hub { id: base.id.clone(), commit: base.commit.clone() },
            (_, false) => CardBase::Folder {
                name: last_name(Path::new(&base.id), &base.id),
                word: quoted_for_shell(&base.id),
                path: base.id.clone(),
            },
        },
        tag: plan.method().tag().into(),
        method: plan.method().to_string(),
        train_data: sets(&plan.train),
        eval_data: plan.held_out.as_ref().map(sets).unwrap_or_default(),
        recipe: plan.portable_recipe().to_toml(),
        steps: summary.steps,
        tokens: summary.tokens,
        trainable_params: plan.parameters().0,
        final_train_loss: summary.last_loss,
        before: summary.before.clone(),
        after: summary.after.clone(),
        last: summary.last.clone(),
        chat: is_chat(plan),
    }
}

/// Returns whether a chat template rendered the rows, so that prompts need the template too.
pub(crate) fn is_chat(plan: &Plan) -> bool {
    plan.train.dataset.report().rendered
}

/// Returns whether the base model is built into the binary.
fn is_builtin(plan: &Plan) -> bool {
    matches!(plan.recipe.model.id, Some(DataSource::Builtin(_)))
}
