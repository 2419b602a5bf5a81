//! The keys of `[objective]`: their defaults, and every combination that has no effect.

use finetune::recipe::{LossType, ObjectiveKind, Recipe, RecipeLayers, RecipeText, key_of_peers};

const BASE: &str =
    "[model]\nid = \"org/m\"\n[data]\ntrain = [\"org/d\"]\n[optimizer]\nlearning_rate = 1e-3\n";

fn load(objective: &str, set: &[&str]) -> Result<Recipe, String> {
    let text = format!("{BASE}[objective]\n{objective}");
    let layers = RecipeLayers {
        recipe: Some(RecipeText { name: "my.toml".into(), text, folder: "/nowhere".into() }),
        set: set.iter().map(ToString::to_string).collect(),
        folder: "/nowhere".into(),
        ..RecipeLayers::default()
    };
    Recipe::load(&layers).map_err(|error| error.to_string())
}

fn recipe(objective: &str) -> Recipe {
    load(objective, &[]).unwrap()
}

#[test]
fn defaults_are_those_of_trl() {
    let objective = recipe("kind = \"dpo\"\n").objective;
    assert_eq!(objective.losses(), [LossType::Sigmoid]);
    assert_eq!((objective.weights(), objective.beta, objective.label_smoothing), (vec![1.0], 0.1, 0.0));
    assert_eq!((objective.ld_alpha, objective.f_alpha_divergence_coef), (None, 0.5));
    assert_eq!((objective.discopop_tau, objective.use_weighting), (0.05, false));
    let kto = recipe("kind = \"kto\"\n").objective;
    assert_eq!((kto.losses(), kto.needs_mismatched()), (vec![LossType::Kto], true));
    assert_eq!((kto.desirable_weight, kto.undesirable_weight, kto.beta), (1.0, 1.0, 0.1));
    assert!(!recipe("kind = \"kto\"\nloss_type = \"apo_zero_unpaired\"\n").objective.needs_mismatched());
    let cpo = recipe("kind = \"cpo\"\n").objective;
    assert_eq!((cpo.losses(), cpo.cpo_alpha, cpo.simpo_gamma), (vec![LossType::Sigmoid], 1.0, 0.5));
    for kind in [ObjectiveKind::Orpo, ObjectiveKind::Simpo, ObjectiveKind::CrossEntropy] {
        assert!(recipe(&format!("kind = \"{kind}\"\n")).objective.losses().is_empty(), "{kind}");
    }
}

#[test]
fn losses_add_up_with_their_weights() {
    let text =
        "kind = \"dpo\"\nloss_type = [\"sigmoid\", \"bco_pair\", \"sft\"]\nloss_weights = [0.8, 0.2, 1]\n";
    let objective = recipe(text).objective;
    assert_eq!(objective.losses(), [LossType::Sigmoid, LossType::BcoPair, LossType::Sft]);
    assert_eq!(objective.weights(), [0.8, 0.2, 1.0]);
    // The resolved recipe reads as it was written.
    let written = load("", &["objective.kind=dpo", "objective.loss_type=[\"ipo\"]"]).unwrap().to_toml();
    assert!(written.contains("loss_type = [\"ipo\"]"), "{written}");
}

/// The keys of `[objective]`, what the error says of them, and what it advises.
const WITHOUT_EFFECT: &[(&str, &str, &str)] = &[
    ("beta = 0.2\n", "`objective.beta` has no effect with `kind = \"cross_entropy\"`", "`kind = \"dpo\"`"),
    (
        "kind = \"dpo\"\nlabel_smoothing = 0.1\n",
        "`objective.label_smoothing` has no effect with `loss_type = [\"sigmoid\"]`",
        "write `loss_type = [\"robust\"]`",
    ),
    (
        "kind = \"cpo\"\nloss_type = \"hinge\"\nlabel_smoothing = 0.1\n",
        "`objective.label_smoothing` has no effect with `loss_type = [\"hinge\"]`",
        "write `loss_type = [\"sigmoid\"]`",
    ),
    (
        "kind = \"orpo\"\nlabel_smoothing = 0.1\n",
        "`objective.label_smoothing` has no effect with `kind",
        "`kind = \"cpo\"`",
    ),
    (
        "kind = \"dpo\"\nf_alpha_divergence_coef = 0.3\n",
        "`objective.f_alpha_divergence_coef` has no effect with `f_divergence_type = \"reverse_kl\"`",
        "write `f_divergence_type = \"alpha_divergence\"`",
    ),
    (
        "kind = \"dpo\"\ndiscopop_tau = 0.1\n",
        "`objective.discopop_tau` has no effect",
        "write `loss_type = [\"discopop\"]`",
    ),
    (
        "kind = \"cpo\"\nsimpo_gamma = 1\n",
        "`objective.simpo_gamma` has no effect",
        "write `loss_type = [\"simpo\"]`",
    ),
    (
        "kind = \"simpo\"\ncpo_alpha = 0.5\n",
        "`objective.cpo_alpha` has no effect with `kind",
        "`kind = \"cpo\"`",
    ),
    (
        "kind = \"dpo\"\ndesirable_weight = 2\n",
        "`objective.desirable_weight` has no effect",
        "`kind = \"kto\"`",
    ),
    ("kind = \"orpo\"\nloss_type = \"sigmoid\"\n", "`objective.loss_type` has no effect", "`kind = \"cpo\"`"),
    (
        "kind = \"orpo\"\nprecompute_ref_log_probs = true\n",
        "has no effect with `kind = \"orpo\"`",
        "`kind = \"kto\"`",
    ),
    ("kind = \"kto\"\nloss_weights = [1]\n", "`objective.loss_weights` has no effect", "`kind = \"dpo\"`"),
    (
        "kind = \"dpo\"\nloss_type = \"sft\"\nld_alpha = 0.5\n",
        "`objective.ld_alpha` has no effect with `loss_type = [\"sft\"]`",
        "write `loss_type = [\"sigmoid\", \"sft\"]`",
    ),
];

#[test]
fn keys_without_effect_are_errors() {
    for (text, why, advice) in WITHOUT_EFFECT {
        let error = load(text, &[]).expect_err(text);
        assert!(error.contains(why) && error.contains(advice), "{text}: {error}");
    }
}

#[test]
fn losses_and_weights_are_checked() {
    for (text, why) in [
        (
            "kind = \"kto\"\nloss_type = \"sigmoid\"\n",
            "has \"sigmoid\", which `kind = \"kto\"` does not have",
        ),
        ("kind = \"cpo\"\nloss_type = [\"sigmoid\", \"ipo\"]\n", "has 2 losses; `kind = \"cpo\"` takes one"),
        ("kind = \"dpo\"\nloss_type = []\n", "is an empty list"),
        ("kind = \"dpo\"\nloss_type = [\"ipo\", \"ipo\"]\n", "has \"ipo\" twice"),
        ("kind = \"dpo\"\nloss_weights = [1, 2]\n", "has 2 weights, but `loss_type` has 1 losses"),
        ("kind = \"dpo\"\nloss_type = \"exo_pair\"\n", "needs a number above 0"),
        ("kind = \"dpo\"\nloss_type = \"robust\"\nlabel_smoothing = 0.5\n", "a number from 0 to below 0.5"),
        (
            "kind = \"dpo\"\nloss_type = \"apo_zero\"\nf_divergence_type = \"forward_kl\"\n",
            "for which the loss \"apo_zero\" is not defined",
        ),
        ("kind = \"dpo\"\nld_alpha = 1.5\n", "a number from 0 to 1"),
    ] {
        let error = load(text, &[]).expect_err(text);
        assert!(error.contains(why), "{text}: {error}");
    }
    recipe("kind = \"dpo\"\nloss_type = [\"exo_pair\"]\nlabel_smoothing = 1e-3\n");
    recipe("kind = \"dpo\"\nloss_type = [\"hinge\", \"sft\"]\nf_divergence_type = \"js_divergence\"\n");
}

#[test]
fn keys_of_data_without_effect_are_errors() {
    let error = load("kind = \"dpo\"\n", &["data.train_on=all"]).unwrap_err();
    assert!(error.contains("`data.train_on` has no effect with `objective.kind = \"dpo\"`"), "{error}");
    let error = load("kind = \"dpo\"\n", &["data.format=preference_chosen"]).unwrap_err();
    assert!(
        error.contains("needs both answers") && error.contains("write `format = \"preference\"`"),
        "{error}"
    );
}

/// A kind from the command line drops the keys of the recipe's kind.
#[test]
fn a_kind_of_a_higher_layer_overrules_keys_of_a_lower_one() {
    let recipe = load("kind = \"dpo\"\nld_alpha = 0.5\n", &["objective.kind=orpo"]).unwrap();
    assert_eq!((recipe.objective.kind, recipe.objective.ld_alpha), (ObjectiveKind::Orpo, None));
    let [line] = recipe.written.overruled() else { panic!("{:?}", recipe.written) };
    assert!(line.contains("`objective.ld_alpha` has no effect with `kind = \"orpo\"`"), "{line}");
}

#[test]
fn names_of_other_trainers_are_known() {
    for (theirs, section, key) in [
        ("rl", "objective", "kind"),
        ("rl_beta", "objective", "beta"),
        ("pref_loss", "objective", "loss_type"),
        ("orpo_alpha", "objective", "beta"),
        ("kto_chosen_weight", "objective", "desirable_weight"),
    ] {
        let ours = key_of_peers(theirs).map(|actual| format!("{actual:?}"));
        assert!(
            ours.as_ref().is_some_and(|ours| ours.contains(section) && ours.contains(key)),
            "{theirs}: {ours:?}"
        );
        let error = load(&format!("{theirs} = 1\n"), &[]).unwrap_err();
        assert!(
            error.contains(&format!("{section}.{key}")) || error.contains(&format!("`{key}")),
            "{theirs}: {error}"
        );
    }
    for (value, hint) in
        [("ipo", "loss_type = [\"ipo\"]"), ("rm", "not available"), ("grpo", "not available")]
    {
        let error = load(&format!("kind = \"{value}\"\n"), &[]).unwrap_err();
        assert!(error.contains(hint), "{value}: {error}");
    }
}
