//! The keys of `[objective]`: their values under each kind, and keys without effect.

use super::Recipe;
use super::enums::{DataFormat, FDivergence, LossType, ObjectiveKind, ObjectiveRows};
use super::key_conflict::KeyConflict;
use super::sections::ObjectiveSection;
use super::train_on::TrainOn;

impl ObjectiveSection {
    /// The losses of the objective, in the order of the recipe; empty for a kind without a choice
    /// of losses.
    pub fn losses(&self) -> Vec<LossType> {
        match (&self.loss_type, losses_of(self.kind)) {
            (Some(losses), _) => losses.clone(),
            (None, known) => known.first().copied().into_iter().collect(),
        }
    }

    /// The factor of each of [`Self::losses`].
    pub fn weights(&self) -> Vec<f64> {
        let weights = self.loss_weights.clone().unwrap_or_default();
        (0..self.losses().len()).map(|at| weights.get(at).copied().unwrap_or(1.0)).collect()
    }

    /// True if the loss compares the model with a reference.
    pub fn has_reference(&self) -> bool {
        matches!(self.kind, ObjectiveKind::Dpo | ObjectiveKind::Kto)
    }

    /// Number of examples that a row becomes at most, which stay together in a micro-batch.
    pub fn examples_of_row(&self) -> usize {
        match self.kind.rows() {
            ObjectiveRows::Single => 1,
            ObjectiveRows::Pairs => 2,
            ObjectiveRows::Labelled => 1 + usize::from(self.needs_mismatched()),
        }
    }

    /// True if the rows need mismatched answers: those of KTO, for its estimate of the divergence.
    pub fn needs_mismatched(&self) -> bool {
        self.kind == ObjectiveKind::Kto && self.losses() == [LossType::Kto]
    }
}

/// The losses of a kind, the default first.
fn losses_of(kind: ObjectiveKind) -> &'static [LossType] {
    use LossType::{
        Aot, AotUnpaired, ApoDown, ApoZero, ApoZeroUnpaired, BcoPair, Discopop, ExoPair, Hinge, Ipo, Kto,
        NcaPair, Robust, Sft, Sigmoid, SigmoidNorm, Simpo, SppoHard,
    };
    match kind {
        ObjectiveKind::Dpo => &[
            Sigmoid,
            Hinge,
            Ipo,
            SigmoidNorm,
            Robust,
            ExoPair,
            NcaPair,
            BcoPair,
            SppoHard,
            Aot,
            AotUnpaired,
            ApoZero,
            ApoDown,
            Discopop,
            Sft,
        ],
        ObjectiveKind::Kto => &[Kto, ApoZeroUnpaired],
        ObjectiveKind::Cpo => &[Sigmoid, Hinge, Ipo, Simpo],
        ObjectiveKind::CrossEntropy | ObjectiveKind::Orpo | ObjectiveKind::Simpo => &[],
    }
}

/// True if a loss under `kind` reads `label_smoothing`.
fn smooths_labels(kind: ObjectiveKind, loss: LossType) -> bool {
    use LossType::{Aot, AotUnpaired, ExoPair, Robust, Sigmoid, Simpo};
    match kind {
        ObjectiveKind::Dpo => matches!(loss, Robust | ExoPair | Aot | AotUnpaired),
        ObjectiveKind::Cpo => matches!(loss, Sigmoid | Simpo),
        _ => false,
    }
}

/// True if a loss of dpo is defined for each divergence, and not only for the default one.
fn has_divergences(loss: LossType) -> bool {
    use LossType::{Discopop, ExoPair, Hinge, Ipo, Robust, Sft, Sigmoid, SigmoidNorm};
    matches!(loss, Sigmoid | SigmoidNorm | Hinge | Ipo | ExoPair | Robust | Discopop | Sft)
}

/// Adds the conflicts of `[objective]`, and those of `[data]` with its kind.
pub(super) fn conflicts(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    let objective = &recipe.objective;
    let known = conflicts.len();
    without_effect(objective, conflicts);
    losses(objective, conflicts);
    data(recipe, conflicts);
    if conflicts.len() == known {
        values(objective, conflicts);
    }
}

/// A key that some kinds of objective read.
struct KindKey {
    key: &'static str,
    /// True if its value is not the default.
    is_written: bool,
    /// The kinds that have it.
    kinds: &'static [ObjectiveKind],
    /// True if the losses, or another key, give it an effect under these kinds.
    is_read: bool,
}

/// The keys beside `kind`, for the values of `objective`.
fn kind_keys(objective: &ObjectiveSection) -> Vec<KindKey> {
    use ObjectiveKind::{Cpo, Dpo, Kto, Orpo, Simpo};
    let ObjectiveSection { kind, loss_type, loss_weights, .. } = objective;
    let (default, losses) = (ObjectiveSection::default(), objective.losses());
    let key = |key, is_written, kinds, is_read| KindKey { key, is_written, kinds, is_read };
    let compares = losses != [LossType::Sft];
    let smooths = *kind == Simpo || losses.iter().any(|loss| smooths_labels(*kind, *loss));
    let gamma = *kind == Simpo || losses.contains(&LossType::Simpo);
    let divergence = objective.f_divergence_type;
    let alpha = divergence == FDivergence::AlphaDivergence;
    let alpha_is_written = objective.f_alpha_divergence_coef != default.f_alpha_divergence_coef;
    vec![
        key("loss_type", loss_type.is_some(), &[Dpo, Kto, Cpo], true),
        key("loss_weights", loss_weights.is_some(), &[Dpo], true),
        key("beta", objective.beta != default.beta, &[Dpo, Kto, Orpo, Cpo, Simpo], compares),
        key("label_smoothing", objective.label_smoothing != 0.0, &[Dpo, Cpo, Simpo], smooths),
        key("ld_alpha", objective.ld_alpha.is_some(), &[Dpo], compares),
        key("f_divergence_type", divergence != default.f_divergence_type, &[Dpo], compares),
        key("f_alpha_divergence_coef", alpha_is_written, &[Dpo], alpha),
        key("use_weighting", objective.use_weighting, &[Dpo], compares),
        key(
            "discopop_tau",
            objective.discopop_tau != default.discopop_tau,
            &[Dpo],
            losses.contains(&LossType::Discopop),
        ),
        key("precompute_ref_log_probs", objective.precompute_ref_log_probs, &[Dpo, Kto], true),
        key("desirable_weight", objective.desirable_weight != 1.0, &[Kto], true),
        key("undesirable_weight", objective.undesirable_weight != 1.0, &[Kto], true),
        key("cpo_alpha", objective.cpo_alpha != default.cpo_alpha, &[Cpo], true),
        key("simpo_gamma", objective.simpo_gamma != default.simpo_gamma, &[Cpo, Simpo], gamma),
    ]
}

/// Keys that the kind, or the losses, leave without effect.
fn without_effect(objective: &ObjectiveSection, conflicts: &mut Vec<KeyConflict>) {
    let kind = objective.kind;
    for KindKey { key, kinds, is_read, .. } in kind_keys(objective).into_iter().filter(|key| key.is_written) {
        if !kinds.contains(&kind) {
            let kinds: Vec<String> = kinds.iter().map(|kind| format!("`kind = \"{kind}\"`")).collect();
            let hint = format!("remove `{key}`, or write {}", kinds.join(" or "));
            let text = format!("has no effect with `kind = \"{kind}\"`");
            conflicts.push(KeyConflict::new("objective", key, text, hint).overruled_by("objective", "kind"));
        } else if !is_read {
            let (other, hint) = wanted(key, kind);
            let text = format!("has no effect with {}", written(objective, other));
            conflicts.push(KeyConflict::new("objective", key, text, hint));
        }
    }
}

/// The key that leaves `key` without effect although the kind has it, and the fix to write.
fn wanted(key: &str, kind: ObjectiveKind) -> (&'static str, String) {
    match key {
        "label_smoothing" if kind == ObjectiveKind::Dpo => {
            ("loss_type", "write `loss_type = [\"robust\"]`, or remove `label_smoothing`".into())
        }
        "label_smoothing" => {
            ("loss_type", "write `loss_type = [\"sigmoid\"]`, or remove `label_smoothing`".into())
        }
        "f_alpha_divergence_coef" => (
            "f_divergence_type",
            "write `f_divergence_type = \"alpha_divergence\"`, or remove `f_alpha_divergence_coef`".into(),
        ),
        "discopop_tau" => {
            ("loss_type", "write `loss_type = [\"discopop\"]`, or remove `discopop_tau`".into())
        }
        "simpo_gamma" => ("loss_type", "write `loss_type = [\"simpo\"]`, or remove `simpo_gamma`".into()),
        key => ("loss_type", format!("write `loss_type = [\"sigmoid\", \"sft\"]`, or remove `{key}`")),
    }
}

/// A key of the objective with its value, as a recipe writes it.
fn written(objective: &ObjectiveSection, key: &str) -> String {
    match key {
        "f_divergence_type" => format!("`f_divergence_type = \"{}\"`", objective.f_divergence_type),
        _ => format!("`loss_type = [{}]`", quoted(&objective.losses())),
    }
}

fn quoted(losses: &[LossType]) -> String {
    losses.iter().map(|loss| format!("\"{loss}\"")).collect::<Vec<_>>().join(", ")
}

/// Losses that the kind does not have, or that are written twice, and weights of another number.
fn losses(objective: &ObjectiveSection, conflicts: &mut Vec<KeyConflict>) {
    let (kind, known) = (objective.kind, losses_of(objective.kind));
    let mut add =
        |key, text: String, hint: String| conflicts.push(KeyConflict::new("objective", key, text, hint));
    if let (Some(losses), false) = (&objective.loss_type, known.is_empty()) {
        let several = "dpo alone adds losses up".to_owned();
        if losses.is_empty() {
            add("loss_type", "is an empty list".into(), format!("write `loss_type = [\"{}\"]`", known[0]));
        } else if let Some(other) = losses.iter().find(|loss| !known.contains(loss)) {
            let text = format!("has \"{other}\", which `kind = \"{kind}\"` does not have");
            add("loss_type", text, format!("accepted: {}", quoted(known)));
        } else if losses.len() > 1 && kind != ObjectiveKind::Dpo {
            add("loss_type", format!("has {} losses; `kind = \"{kind}\"` takes one", losses.len()), several);
        } else if let Some(twice) = losses.iter().enumerate().find(|(at, loss)| losses[..*at].contains(loss))
        {
            add("loss_type", format!("has \"{}\" twice", twice.1), "write a weight in `loss_weights`".into());
        }
    }
    let (losses, is_dpo) = (objective.losses().len(), kind == ObjectiveKind::Dpo);
    if let Some(weights) = objective.loss_weights.as_ref().filter(|weights| is_dpo && weights.len() != losses)
    {
        let text = format!("has {} weights, but `loss_type` has {losses} losses", weights.len());
        let ones: Vec<&str> = (0..losses).map(|_| "1.0").collect();
        add(
            "loss_weights",
            text,
            format!("write one weight for each loss, such as `loss_weights = [{}]`", ones.join(", ")),
        );
    }
}

/// Values that a loss of dpo cannot use.
fn values(objective: &ObjectiveSection, conflicts: &mut Vec<KeyConflict>) {
    if objective.kind != ObjectiveKind::Dpo {
        return;
    }
    let losses = objective.losses();
    if losses.contains(&LossType::ExoPair) && objective.label_smoothing == 0.0 {
        let text = "is 0, but the loss \"exo_pair\" needs a number above 0";
        let hint = "write `label_smoothing = 1e-3`, for example";
        conflicts.push(KeyConflict::new("objective", "label_smoothing", text, hint));
    }
    let divergence = objective.f_divergence_type;
    if divergence == FDivergence::ReverseKl {
        return;
    }
    if let Some(loss) = losses.iter().find(|loss| !has_divergences(**loss)) {
        let text = format!("is \"{divergence}\", for which the loss \"{loss}\" is not defined");
        let hint = "remove `f_divergence_type`, or write `loss_type = [\"sigmoid\"]`";
        conflicts.push(KeyConflict::new("objective", "f_divergence_type", text, hint));
    }
}

/// Keys of `[data]` that an objective of pairs or labelled answers leaves without effect.
fn data(recipe: &Recipe, conflicts: &mut Vec<KeyConflict>) {
    let kind = recipe.objective.kind;
    if kind.rows() == ObjectiveRows::Single {
        return;
    }
    if recipe.data.train_on != TrainOn::default() {
        let text = format!("has no effect with `objective.kind = \"{kind}\"`, which reads the answers alone");
        let conflict = KeyConflict::new("data", "train_on", text, "remove `train_on`");
        conflicts.push(conflict.overruled_by("objective", "kind"));
    }
    if recipe.data.format == DataFormat::PreferenceChosen {
        let text = format!("is \"preference_chosen\", but `objective.kind = \"{kind}\"` needs both answers");
        conflicts.push(KeyConflict::new("data", "format", text, "write `format = \"preference\"`"));
    }
}
