//! The lists of a block's products are in the order in which its passes multiply.

use super::*;
use crate::model::panels_ahead::TAKEN;
use crate::ops::matmul_quantized::{Quantized, QuantizedRun};
use crate::quant::{QuantBuffer, QuantFormat, RunDtype};
use crate::recipe::enums::QuantKind;

/// A token mixer with latents, which is not among [`MODELS`], before an MLP.
const LATENT: &str = r#""model_type": "deepseek_v3", "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 8, "n_shared_experts": 1, "first_k_dense_replace": 1"#;

/// Random parameters, of which all matrices are quantized.
struct QuantizedParams(RandomParams);

impl ParamLookup for QuantizedParams {
    fn param(&self, name: &str) -> Result<Param> {
        self.0.param(name)
    }

    fn grad(&self, _: &str) -> Result<Option<TensorMut>> {
        Ok(None)
    }

    fn matrix(&self, name: &str) -> Result<WeightMatrix> {
        let value = self.param(name)?.value;
        let (shape, format) = (value.dims2()?, QuantFormat::of_kind(QuantKind::Nf4, 64, false));
        let values = value.flatten_all()?.to_vec1::<f32>()?;
        let stored = QuantBuffer::new(format, values.len(), &|start, part| {
            part.copy_from_slice(&values[start..start + part.len()]);
            Ok(())
        })?;
        let run = |of: crate::quant::QuantRun| -> Result<QuantizedRun> {
            let values = match of.meaning.dtype() {
                RunDtype::U8 => Tensor::from_slice(stored.runs.bytes(of.meaning), of.elements, &Device::Cpu)?,
                RunDtype::F32 => {
                    Tensor::from_slice(stored.runs.floats(of.meaning), of.elements, &Device::Cpu)?
                }
            };
            Ok(QuantizedRun { meaning: of.meaning, values })
        };
        let runs = format.scheme().runs(values.len()).into_iter().map(run).collect::<Result<_>>()?;
        Ok(WeightMatrix::Quantized(Quantized { format, shape, runs, offset: stored.runs.offset }))
    }

    fn merged(&self, _: &[String]) -> Result<Option<Param>> {
        Ok(None)
    }

    fn lora(&self, _: &str, _: u64) -> Result<Option<Lora>> {
        Ok(None)
    }

    fn rows(&self, _: &str) -> Result<Option<TokenRows>> {
        Ok(None)
    }

    fn dtype(&self) -> DType {
        self.0.dtype()
    }

    fn has_own_head(&self) -> bool {
        false
    }
}

/// Returns the addresses of the weights of products.
fn addresses(products: Vec<&MergedLinear>) -> Vec<usize> {
    panels_of(products).map(|weights| std::ptr::from_ref(weights[0]).addr()).collect()
}

/// Returns the products of `pass` among `all`, in their order.
fn taken<T>(all: &[usize], pass: impl FnOnce() -> Result<T>) -> Result<(Vec<usize>, T)> {
    TAKEN.take();
    let result = pass()?;
    Ok((TAKEN.take().into_iter().filter(|address| all.contains(address)).collect(), result))
}

#[test]
fn products_are_listed_in_the_order_of_the_passes() -> Result<()> {
    for model in MODELS.into_iter().chain([LATENT]) {
        let text = format!("{{{model}, {WIDTHS}}}");
        // Latents have keys of each head.
        let [few, all] = [2, 4].map(|heads| format!(r#""num_key_value_heads": {heads}"#));
        let text = if model == LATENT { text.replace(&few, &all) } else { text };
        let config = ModelConfig::from_json(&text, "config.json")?;
        let params = QuantizedParams(RandomParams::new(&config, DType::F32, |_| None));
        let w = assemble::block(&config, 0, &params)?;
        let spans = [Span::sequence(0, TOKENS)];
        let tables = RotaryTables::new(&config.ropes, &Device::Cpu).of_spans(&config.ropes, &spans)?;
        let context = BlockContext {
            spans: &spans,
            tables: &tables,
            attention: Attention::Flash,
            adapter: AdapterSwitch::Off,
            dropout: None,
            balance: None,
        };
        let x = normal("x", &[TOKENS, config.hidden_size], DType::F32)?.value;
        let all = addresses(w.products());
        assert!(all.len() >= 2, "{model}");
        let width = config.per_layer_width(config.num_layers());
        let rows = (width > 0).then(|| normal("rows", &[TOKENS, width], DType::F32)).transpose()?;
        let mut carried = Carried::new(rows.map(|rows| rows.value));
        let (products, (y, saved)) =
            taken(&all, || forward(&config, 0, &w, &x, &context, &mut carried, None))?;
        assert_eq!(products, all, "forward of {model}");
        // Before a norm of its output, and before a per-layer input, `down_proj` is computed again.
        let is_read = w.channel_norms.after.is_some() || w.per_layer.is_some();
        let again = if is_read { w.products() } else { w.products_of_recompute() };
        let (products, _) = taken(&all, || recompute(&config, 0, &w, &x, &context, &carried))?;
        assert_eq!(products, addresses(again), "recomputing of {model}");
        for need_dx in [true, false] {
            let mut gradients = CarriedGradients::new(true);
            let mut state = CarriedBackward { carried: &carried, gradients: &mut gradients };
            let pass = || backward(&config, 0, &w, &saved, (&y, need_dx), &context, &mut state);
            let (products, _) = taken(&all, pass)?;
            assert_eq!(
                products,
                addresses(w.products_of_backward(need_dx)),
                "backward of {model}, {need_dx}"
            );
        }
    }
    Ok(())
}
