//! A forward without the adapter equals the base model's to the bit. It is refused if the base is
//! not stored below the adapter.

use std::path::{Path, PathBuf};

use crate::logits;
use crate::training::{batch, trainer_options};
use candle_core::{DType, Device, Tensor};
use finetune::data::Step;
use finetune::engine::{Engine, SaveAssignment, Trainer, TrainerOptions};
use finetune::error::Result;
use finetune::loading::{AdapterSetup, EngineOptions, Trains};
use finetune::model::AdapterSwitch;
use finetune::optim::Schedule;
use finetune::recipe::enums::{AdapterInit, AdapterKind, Attention, Recompute};
use finetune::recipe::{AdapterSection, TargetModules};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

/// Loads a model below `tests/golden/models`, with or without an adapter.
fn engine(model: &str, adapter: Option<&AdapterSetup>) -> Engine {
    let options = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
    logits::base(&golden("models").join(model)).engine(Trains::adapter_or_nothing(adapter), &options).unwrap()
}

/// Creates a new adapter for the model.
fn fresh(model: &str, section: &AdapterSection) -> AdapterSetup {
    let base = logits::base(&golden("models").join(model));
    AdapterSetup::from_recipe(section, ("base", &base.config), &[]).unwrap()
}

/// Loads an adapter that PEFT saved below `tests/golden/train`.
fn saved(model: &str, case: &str) -> AdapterSetup {
    let base = logits::base(&golden("models").join(model));
    AdapterSetup::saved_in(&golden("train").join(case).join("adapter_final"), &base.config).unwrap()
}

/// Trains two steps, which change every matrix of an adapter, including an embedding's zero A.
fn trained(engine: Engine) -> Result<Engine> {
    let default = trainer_options();
    let options = TrainerOptions {
        schedule: Schedule { learning_rate: 1e-2, ..default.schedule },
        max_grad_norm: None,
        recompute: Recompute::None,
        save_assignment: SaveAssignment::Rank0,
        has_graphs: false,
        ..default
    };
    let mut trainer = Trainer::new(engine, options)?;
    for _ in 0..2 {
        trainer.step(&Step::new(vec![batch(0)], 1.0))?;
    }
    Ok(trainer.engine)
}

fn bits(logits: &Tensor) -> Result<Vec<u32>> {
    Ok(logits.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
}

/// Models not stored in bf16: beside an adapter their matrices stay in the stored dtype, in a base
/// alone they are widened.
#[test]
fn switched_off_it_is_the_base_to_the_bit() -> Result<()> {
    let named = |names: &[&str]| TargetModules::Named(names.iter().map(|&name| name.into()).collect());
    let tables = AdapterSection {
        target_modules: named(&["embed_tokens", "lm_head", "q_proj", "down_proj"]),
        ..AdapterSection::default()
    };
    let dora = AdapterSection { kind: AdapterKind::Dora, ..AdapterSection::default() };
    for (model, adapter) in [
        ("tiny-llama", saved("tiny-llama", "lora")),
        ("tiny-llama", saved("tiny-llama", "dora")),
        ("tiny-llama", fresh("tiny-llama", &tables)),
        ("tiny-qwen2", fresh("tiny-qwen2", &tables)),
        ("tiny-llama", saved("tiny-llama", "lora_tables")),
        ("tiny-qwen2", fresh("tiny-qwen2", &dora)),
        ("tiny-phi3", fresh("tiny-phi3", &AdapterSection::default())),
    ] {
        let (base, adapted) = (engine(model, None), trained(engine(model, Some(&adapter)))?);
        let wanted = base.logits(&batch(0), AdapterSwitch::On)?;
        let off = adapted.logits(&batch(0), AdapterSwitch::Off)?;
        assert!(bits(&off)? == bits(&wanted)?, "{model}: logits without the adapter");
        let on = adapted.logits(&batch(0), AdapterSwitch::On)?;
        let distance = (on - &wanted)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(distance > 1e-3, "{model}: the adapter changes the logits by {distance}");
        let scores = base.score(&batch(0), AdapterSwitch::Off)?;
        assert_eq!(adapted.score(&batch(0), AdapterSwitch::Off)?, scores, "{model}");
        assert_ne!(adapted.score(&batch(0), AdapterSwitch::On)?, scores, "{model}");
    }
    Ok(())
}

#[test]
fn where_the_base_is_not_below_the_adapter_it_is_refused() -> Result<()> {
    let whole = AdapterSection { modules_to_save: vec!["lm_head".into()], ..AdapterSection::default() };
    let pissa = AdapterSection { init: AdapterInit::Pissa, r: 2, ..AdapterSection::default() };
    let options = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
    let all = logits::base(&golden("models/tiny-llama")).engine(Trains::All, &options)?;
    for (engine, cause) in [
        (all, "is trained in place in the model"),
        (engine("tiny-llama", Some(&fresh("tiny-llama", &whole))), "`lm_head.weight` is trained in place"),
        (engine("tiny-llama", Some(&fresh("tiny-llama", &pissa))), "PiSSA took the adapter's first values"),
        (engine("tiny-qwen2", Some(&saved("tiny-qwen2", "lora_tokens"))), "rows of `model.embed_tokens`"),
    ] {
        engine.logits(&batch(0), AdapterSwitch::On)?;
        let error = engine.logits(&batch(0), AdapterSwitch::Off).unwrap_err();
        assert!(error.causes()[0].contains(cause), "{error}");
        assert!(engine.score(&batch(0), AdapterSwitch::Off).is_err());
    }
    Ok(())
}
