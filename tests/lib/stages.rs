//! A model that is cut into stages computes the loss and the gradients of the whole, to the bit.

use std::path::Path;

use candle_core::{DType, Device};
use finetune::data::{Batch, IGNORE, Sample};
use finetune::engine::{Engine, MicroStep, Stage, StageOutput};
use finetune::error::Result;
use finetune::loading::{EngineOptions, Trains};
use finetune::objectives::{CrossEntropy, StepTotals};
use finetune::recipe::enums::{Attention, Recompute};

use crate::logits;

/// Two samples of 5 and 7 tokens.
fn batch() -> Batch {
    let ids: Vec<u32> = (0..12).map(|i| i * 31 % 300 + 3).collect();
    let mut targets: Vec<u32> = ids[1..].to_vec();
    targets.push(IGNORE);
    targets[4] = IGNORE;
    let segments = vec![
        Sample { start: 0, len: 5, ..Sample::default() },
        Sample { start: 5, len: 7, ..Sample::default() },
    ];
    Batch { ids, targets, samples: segments, first_token: 0, num_samples: 2 }
}

fn micro_step(recompute: Recompute) -> MicroStep<'static> {
    MicroStep {
        objective: &CrossEntropy,
        scale: 0.1,
        totals: StepTotals::default(),
        reference: None,
        recompute,
        dropout: None,
        noise: None,
        balance: None,
        last: true,
        graphs: None,
    }
}

/// The loss and the norm of the gradients, by stages that are cut before these layers.
fn by_stages(engine: &Engine, cuts: &[usize], recompute: Recompute) -> Result<(f64, f64)> {
    let layers = engine.config.num_layers();
    let starts: Vec<usize> = [0].iter().chain(cuts).copied().collect();
    let ends = cuts.iter().copied().chain([layers]);
    let stages = starts.iter().zip(ends).map(|(&start, end)| Stage {
        blocks: start..end,
        has_embedding: start == 0,
        has_head: end == layers,
    });
    let (batch, step) = (batch(), micro_step(recompute));
    engine.store.zero_gradients()?;
    let (mut hidden, mut loss, mut states) = (None, None, Vec::new());
    for stage in stages {
        let (output, state) = engine.forward(&stage, &batch, hidden.take(), step)?;
        match output {
            StageOutput::Hidden(output) => hidden = Some(output),
            StageOutput::Loss(sums) => loss = Some(sums.loss.read()?),
        }
        states.push((stage, state));
    }
    let mut dx = None;
    for (stage, state) in states.into_iter().rev() {
        dx = engine.backward(&stage, &batch, state, dx, step)?;
    }
    engine.store.finish_reductions()?;
    Ok((loss.unwrap(), engine.store.gradient_norm()?))
}

/// Asserts that `model`, cut into stages before each of these lists of layers, computes the loss
/// and the gradients of the whole.
fn assert_stages(model: &str, cuts: &[&[usize]]) -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(model);
    let options = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
    let engine = logits::base(&folder).engine(Trains::All, &options)?;
    let mut first_result = None;
    for recompute in ["none", "selective", "first:1", "block", "every:2"] {
        let recompute: Recompute = recompute.parse()?;
        engine.store.zero_gradients()?;
        let sums = engine.micro_step(&batch(), micro_step(recompute))?;
        let whole = (sums.loss.read()?, engine.store.gradient_norm()?);
        assert!(whole.0 > 0.0 && whole.1 > 0.0, "{whole:?}");
        assert_eq!(*first_result.get_or_insert(whole), whole, "{model} {recompute:?}");
        for cuts in cuts {
            assert_eq!(by_stages(&engine, cuts, recompute)?, whole, "{model} {cuts:?} {recompute:?}");
        }
    }
    Ok(())
}

#[test]
fn stages_compute_what_the_whole_model_does() -> Result<()> {
    assert_stages("models/tiny-llama", &[&[], &[1]])
}

/// Per-layer inputs go to every stage. Keys and values of blocks 1 and 2 go to blocks 3 to 6, and
/// their gradients come back.
#[test]
fn the_state_beside_the_hidden_states_goes_from_stage_to_stage() -> Result<()> {
    assert_stages("families/models/tiny-gemma4-e2b", &[&[], &[1], &[2], &[3], &[5], &[1, 2, 4, 6]])
}

#[test]
fn a_stage_without_its_input_is_an_internal_error() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/tiny-llama");
    let options = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
    let engine = logits::base(&folder).engine(Trains::All, &options)?;
    let last = Stage { blocks: 1..engine.config.num_layers(), has_embedding: false, has_head: true };
    let error = engine.forward(&last, &batch(), None, micro_step(Recompute::None)).unwrap_err();
    assert!(error.to_string().contains("no hidden states"), "{error}");
    Ok(())
}
