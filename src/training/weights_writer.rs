//! Writers of trained weights: a PEFT adapter or a Hugging Face model.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::adapter::{self, AdapterTensor, LowRankFactors};
use crate::checkpoint::{SnapshotPart, SnapshotTensor, WriteWeights};
use crate::engine::Trainer;
use crate::error::{Error, Result};
use crate::export::hf;
use crate::loading::initial_values::AdapterPart;
use crate::loading::param_layout::tied_module;
use crate::loading::pissa::{saved_config, saved_matrix};
use crate::parallel::ParamDesc;
use crate::planning::{Plan, StoredAs};
use crate::recipe::{Dtype, MasterWeights};
use crate::weights::{ClassNames, ModelIdentity, RetainedTensors, StoredDtype, WriteEntry, Written};

/// Returns the writer of the trained weights of this run: a PEFT adapter, or a Hugging Face model
/// whose tensors the ranks of `trainer` share. With `exact`, which checkpoints need, the dtype is
/// that of the update, else `checkpoint.output_dtype`.
///
/// # Errors
/// Those of [`Plan::identity`].
pub fn weights_writer(plan: &Plan, exact: bool, trainer: &Trainer) -> Result<WriteWeights> {
    let given = match plan.engine.master {
        _ if !exact => plan.recipe.checkpoint.output_dtype,
        MasterWeights::F32 => Dtype::F32,
        MasterWeights::None => Dtype::Bf16,
    };
    let tokenizer = plan.base.result_tokenizer(&plan.dataset_loader);
    let Some(adapter_setup) = &plan.adapter_setup else {
        // Checkpoints hold the parameters alone.
        let alone = || RetainedTensors::default().named_by(plan.base.config.family.class_names);
        let unused = if exact { alone() } else { plan.base.retained.clone() };
        let stored = StoredAs { given, dtypes: plan.stored_dtypes.clone(), retained_bytes: unused.bytes() };
        let stacks = plan.base.stacks();
        let entry = |desc: ParamDesc| WriteEntry {
            dtype: stored.dtype(&desc.name),
            shape: desc.global_shape().to_vec(),
            stack: stacks.get(&desc.name).cloned(),
            name: desc.name,
        };
        let shares = trainer.shares().into_iter().map(|descs| descs.into_iter().map(entry).collect());
        let untied = plan.base.head_apart;
        let source = plan.base.source.folder.clone();
        let parts = hf::ExportParts::new(shares.collect(), source, Some(tokenizer), untied, unused);
        return Ok(Arc::new(
            move |folder: &Path, tensors: &[SnapshotTensor], part: SnapshotPart| match part {
                SnapshotPart::Tensors(rank) => write_tensors(&parts, rank, folder, tensors),
                SnapshotPart::Rest => parts.write_rest(folder),
            },
        ));
    };
    let initial = plan.initial.get().cloned().unwrap_or_default();
    let config = if adapter_setup.is_pissa() {
        saved_config(&adapter_setup.config)
    } else {
        adapter_setup.config.clone()
    };
    let dtype = StoredAs { given, dtypes: BTreeMap::new(), retained_bytes: 0 }
        .given_to_all()
        .unwrap_or(StoredDtype::F32);
    let tied = plan.base.config.tie_word_embeddings && !adapter_setup.unties();
    let class = plan.base.config.family.class_names;
    let adapter = AdapterOutput { config, class, base: plan.identity()?.clone(), tied, initial, dtype };
    Ok(Arc::new(move |folder: &Path, tensors: &[SnapshotTensor], part: SnapshotPart| match part {
        SnapshotPart::Tensors(0) => adapter.write(folder, tensors),
        SnapshotPart::Tensors(_) => Ok(Vec::new()),
        SnapshotPart::Rest => tokenizer.write(folder).map(|()| Vec::new()),
    }))
}

/// Writer of an adapter.
struct AdapterOutput {
    config: adapter::AdapterConfig,
    /// The names of modules in files.
    class: &'static ClassNames,
    base: ModelIdentity,
    /// True if embedding and head are one parameter.
    tied: bool,
    /// Factors that PiSSA took from the weights, by module.
    initial: Arc<BTreeMap<String, LowRankFactors>>,
    dtype: StoredDtype,
}

impl AdapterOutput {
    fn write(&self, folder: &Path, tensors: &[SnapshotTensor]) -> Result<Vec<Written>> {
        let mut values: BTreeMap<AdapterTensor, Cow<'_, [f32]>> = BTreeMap::new();
        for tensor in tensors {
            let AdapterPart { module, kind } = AdapterPart::of(&tensor.name)?;
            let (shape, data) = match self.initial.get(module) {
                None => (tensor.shape.clone(), tensor.values.to_f32()),
                Some(factors) => {
                    let (shape, data) = saved_matrix(kind, &tensor.shape, &tensor.values.to_f32(), factors);
                    (shape, Cow::Owned(data))
                }
            };
            values.insert(AdapterTensor { module: module.to_owned(), kind, shape }, data);
        }
        // A tied pair trains as one parameter; PEFT reads it under both names.
        let twins: Vec<_> = values
            .iter()
            .filter_map(|(tensor, values)| {
                let module = tied_module(&tensor.module).filter(|_| self.tied && tensor.kind.is_saved())?;
                Some((AdapterTensor { module: module.to_owned(), ..tensor.clone() }, values.clone()))
            })
            .collect();
        values.extend(twins);
        let list: Vec<AdapterTensor> = values.keys().cloned().collect();
        adapter::write(folder, (&self.config, self.class), &self.base, &list, self.dtype, |tensor, sink| {
            match values.get(tensor) {
                Some(values) => sink.write_values(values),
                None => Err(Error::internal(format!("no values for {}", tensor.name()))),
            }
        })
    }
}

fn write_tensors(
    parts: &hf::ExportParts,
    rank: usize,
    folder: &Path,
    tensors: &[SnapshotTensor],
) -> Result<Vec<Written>> {
    let by_name: BTreeMap<&str, &SnapshotTensor> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    parts.write(rank, folder, |entry, sink| match by_name.get(entry.name.as_str()) {
        Some(tensor) => tensor.values.write(sink),
        None => Err(Error::internal(format!("no values for {}", entry.name))),
    })
}
