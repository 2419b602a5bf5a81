//! The delta rule in candle's primitives, token by token: the definition.

use candle_core::{D, DType, Tensor};

use super::{CHUNK, DeltaHeads, DeltaInputs, DeltaOutput, GateGrads, NORM_EPS, Span};
use crate::error::Result;
use crate::ops::matmul::{ColumnView, ColumnViewMut};
use crate::runtime::TensorMut;

/// The inputs of the rule by value heads, f32.
struct Prepared {
    /// Normed queries over √Dk and normed keys, `[N, V, Dk]`.
    q: Tensor,
    k: Tensor,
    /// `[N, V, Dv]`.
    v: Tensor,
    /// The factor on the state, β: `[N, V]`.
    decay: Tensor,
    beta: Tensor,
    /// Of the gradients: −exp(a_log) `[V]`, a + dt_bias `[N, V]` and its softplus.
    rate: Tensor,
    shifted: Tensor,
    softplus: Tensor,
}

impl Prepared {
    fn of(inputs: &DeltaInputs<'_>, heads: DeltaHeads) -> Result<Self> {
        let (n, values) = (inputs.qkv.dim(0)?, heads.num_value_heads);
        let repeated = |x: Tensor| -> Result<Tensor> {
            let shape = (n, heads.num_key_heads, heads.group(), heads.key_dim);
            Ok(x.unsqueeze(2)?.broadcast_as(shape)?.reshape((n, values, heads.key_dim))?)
        };
        let normed = |start: usize| -> Result<Tensor> {
            let x = keys(inputs.qkv, start, heads)?;
            Ok(x.broadcast_mul(&inverse_norm(&x)?)?)
        };
        let scale = (heads.key_dim as f64).sqrt().recip();
        let v = inputs.qkv.narrow(1, 2 * heads.key_width(), heads.value_width())?.contiguous()?;
        let shifted = in_f32(inputs.a)?.broadcast_add(&inputs.dt_bias.to_dtype(DType::F32)?)?;
        // The softplus without overflow.
        let softplus = (shifted.relu()? + (shifted.abs()?.neg()?.exp()? + 1.0)?.log()?)?;
        let rate = inputs.a_log.to_dtype(DType::F32)?.exp()?.neg()?;
        Ok(Prepared {
            q: repeated((normed(0)? * scale)?)?,
            k: repeated(normed(heads.key_width())?)?,
            v: v.to_dtype(DType::F32)?.reshape((n, values, heads.value_dim))?,
            decay: softplus.broadcast_mul(&rate)?.exp()?,
            beta: sigmoid(&in_f32(inputs.b)?)?,
            rate,
            shifted,
            softplus,
        })
    }

    fn token(&self, row: usize) -> Result<TokenInputs> {
        let factor = |x: &Tensor| x.get(row)?.unsqueeze(1)?.unsqueeze(2);
        Ok(TokenInputs {
            q: self.q.get(row)?.unsqueeze(1)?,
            k: self.k.get(row)?.unsqueeze(1)?,
            v: self.v.get(row)?.unsqueeze(1)?,
            decay: factor(&self.decay)?,
            beta: factor(&self.beta)?,
        })
    }
}

/// One token: q and k `[V, 1, Dk]`, v `[V, 1, Dv]`, decay and β `[V, 1, 1]`.
struct TokenInputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
}

/// The steps of a token.
struct TokenStep {
    /// The decayed state.
    decayed: Tensor,
    /// v − Sᵀk, `[V, 1, Dv]`.
    missing: Tensor,
    /// The state after the token.
    after: Tensor,
}

impl TokenInputs {
    fn step(&self, before: &Tensor) -> Result<TokenStep> {
        let decayed = before.broadcast_mul(&self.decay)?;
        let missing = (&self.v - self.k.matmul(&decayed)?)?;
        let added = transposed(&self.k)?.matmul(&missing.broadcast_mul(&self.beta)?)?;
        Ok(TokenStep { after: (&decayed + added)?, decayed, missing })
    }
}

pub(crate) fn reference(
    inputs: DeltaInputs<'_>,
    heads: DeltaHeads,
    spans: &[Span],
    state: Option<&TensorMut>,
) -> Result<DeltaOutput> {
    let (rows, dtype, device) = (inputs.qkv.dim(0)?, inputs.qkv.dtype(), inputs.qkv.device());
    let shape = (heads.num_value_heads, heads.key_dim, heads.value_dim);
    let prepared = Prepared::of(&inputs, heads)?;
    let zeros = Tensor::zeros(shape, DType::F32, device)?;
    let no_row = Tensor::zeros((1, heads.value_width()), DType::F32, device)?;
    let (mut out, mut states) = (vec![no_row; rows], Vec::new());
    for span in spans {
        let mut s = state.map_or_else(|| Ok(zeros.clone()), |state| state.copy())?;
        for i in 0..span.q_len {
            if i > 0 && i % CHUNK == 0 && state.is_none() {
                states.push(s.clone());
            }
            let token = prepared.token(span.q_start + i)?;
            s = token.step(&s)?.after;
            out[span.q_start + i] = token.q.matmul(&s)?.reshape((1, heads.value_width()))?;
        }
        if let Some(state) = state {
            state.slice_set(&s.contiguous()?, 0, 0)?;
        }
    }
    let states = if states.is_empty() {
        Tensor::zeros((0, shape.0, shape.1, shape.2), DType::F32, device)?
    } else {
        Tensor::stack(&states, 0)?
    };
    let out = if out.is_empty() {
        Tensor::zeros((0, heads.value_width()), dtype, device)?
    } else {
        Tensor::cat(&out, 0)?.to_dtype(dtype)?
    };
    Ok(DeltaOutput { out, states })
}

/// The gradients of the inputs of each token.
struct TokenGrads {
    q: Vec<Tensor>,
    k: Vec<Tensor>,
    v: Vec<Tensor>,
    /// Of the logarithm of the decay, and of β: `[V]`.
    log_decay: Vec<Tensor>,
    beta: Vec<Tensor>,
}

impl TokenGrads {
    fn zeros(rows: usize, like: &Tensor, heads: DeltaHeads) -> Result<Self> {
        let zeros = |width: usize| -> Result<Vec<Tensor>> {
            let shape = (heads.num_value_heads, 1, width);
            Ok(vec![Tensor::zeros(shape, DType::F32, like.device())?; rows])
        };
        let (key, value, one) = (zeros(heads.key_dim)?, zeros(heads.value_dim)?, zeros(1)?);
        Ok(TokenGrads { q: key.clone(), k: key, v: value, log_decay: one.clone(), beta: one })
    }

    /// Writes the gradients of `row` and returns that of the state before it, given that of the
    /// state after it without the row's output, whose gradient is `dout`.
    fn add_row(
        &mut self,
        row: usize,
        token: &TokenInputs,
        step: &TokenStep,
        d: (&Tensor, &Tensor),
    ) -> Result<Tensor> {
        let (ds, dout) = d;
        let ds = (ds + transposed(&token.q)?.matmul(dout)?)?;
        self.q[row] = dout.matmul(&transposed(&step.after)?)?;
        let added = step.missing.broadcast_mul(&token.beta)?;
        let dadded = token.k.matmul(&ds)?;
        self.beta[row] = (&dadded * &step.missing)?.sum_keepdim(D::Minus1)?;
        let dv = dadded.broadcast_mul(&token.beta)?;
        let by_added = added.matmul(&transposed(&ds)?)?;
        self.k[row] = (by_added - dv.matmul(&transposed(&step.decayed)?)?)?;
        let ddecayed = (ds - transposed(&token.k)?.matmul(&dv)?)?;
        self.v[row] = dv;
        let products = (&ddecayed * &step.decayed)?;
        self.log_decay[row] = products.sum_keepdim(2)?.sum_keepdim(1)?;
        Ok(ddecayed.broadcast_mul(&token.decay)?)
    }
}

pub(crate) fn reference_backward(
    inputs: DeltaInputs<'_>,
    output: &DeltaOutput,
    dout: &Tensor,
    heads: DeltaHeads,
    spans: &[Span],
    gates: GateGrads<'_>,
) -> Result<Tensor> {
    let rows = inputs.qkv.dim(0)?;
    let prepared = Prepared::of(&inputs, heads)?;
    let shape = (rows, heads.num_value_heads, heads.value_dim);
    let dout = dout.to_dtype(DType::F32)?.reshape(shape)?;
    let mut grads = TokenGrads::zeros(rows, inputs.qkv, heads)?;
    let state_shape = (heads.num_value_heads, heads.key_dim, heads.value_dim);
    let zeros = Tensor::zeros(state_shape, DType::F32, dout.device())?;
    let mut chunk = 0;
    for span in spans {
        let starts: Vec<usize> = (0..span.q_len).step_by(CHUNK).collect();
        let mut ds = zeros.clone();
        for (i, start) in starts.iter().enumerate().rev() {
            let from = span.q_start + start;
            let to = (from + CHUNK).min(span.q_start + span.q_len);
            let tokens = (from..to).map(|row| prepared.token(row)).collect::<Result<Vec<_>>>()?;
            let mut steps: Vec<TokenStep> = Vec::new();
            for token in &tokens {
                let before = match steps.last() {
                    Some(step) => step.after.clone(),
                    None if i == 0 => zeros.clone(),
                    None => output.states.get(chunk + i - 1)?,
                };
                steps.push(token.step(&before)?);
            }
            for (row, (token, step)) in (from..to).zip(tokens.iter().zip(&steps)).rev() {
                ds = grads.add_row(row, token, step, (&ds, &dout.get(row)?.unsqueeze(1)?))?;
            }
        }
        chunk += starts.len().saturating_sub(1);
    }
    prepared.finish(&inputs, heads, &grads, gates)
}

impl Prepared {
    /// Returns the gradient of `qkv` and writes those of the gates.
    fn finish(
        &self,
        inputs: &DeltaInputs<'_>,
        heads: DeltaHeads,
        grads: &TokenGrads,
        gates: GateGrads<'_>,
    ) -> Result<Tensor> {
        let (n, dtype) = (inputs.qkv.dim(0)?, inputs.qkv.dtype());
        if n == 0 {
            return Ok(inputs.qkv.zeros_like()?);
        }
        let of_gates =
            |grads: &[Tensor]| -> Result<Tensor> { Ok(Tensor::stack(grads, 0)?.reshape((n, ()))?) };
        let dlog_decay = of_gates(&grads.log_decay)?;
        let rated = dlog_decay.broadcast_mul(&self.rate)?;
        let da = (&rated * sigmoid(&self.shifted)?)?;
        let slope = (&self.beta * (1.0 - &self.beta)?)?;
        write(gates.da, &da)?;
        write(gates.db, &(of_gates(&grads.beta)? * slope)?)?;
        add_rows(gates.params.dt_bias, &da)?;
        add_rows(gates.params.a_log, &(rated * &self.softplus)?)?;

        let of_keys = |grads: &[Tensor], start: usize, scale: f64| -> Result<Tensor> {
            let shape = (n, heads.num_key_heads, heads.group(), heads.key_dim);
            let d = (Tensor::stack(grads, 0)?.reshape(shape)?.sum(2)? * scale)?;
            let x = keys(inputs.qkv, start, heads)?;
            let inverse = inverse_norm(&x)?;
            let normed = x.broadcast_mul(&inverse)?;
            let along = (&d * &normed)?.sum_keepdim(D::Minus1)?;
            let d = (d - normed.broadcast_mul(&along)?)?.broadcast_mul(&inverse)?;
            Ok(d.reshape((n, heads.key_width()))?)
        };
        let dq = of_keys(&grads.q, 0, (heads.key_dim as f64).sqrt().recip())?;
        let dk = of_keys(&grads.k, heads.key_width(), 1.0)?;
        let dv = Tensor::stack(&grads.v, 0)?.reshape((n, heads.value_width()))?;
        Ok(Tensor::cat(&[dq, dk, dv], 1)?.to_dtype(dtype)?)
    }
}

/// Returns the queries or keys that begin at a column, `[N, K, Dk]` f32.
fn keys(qkv: &Tensor, start: usize, heads: DeltaHeads) -> Result<Tensor> {
    let x = qkv.narrow(1, start, heads.key_width())?.contiguous()?.to_dtype(DType::F32)?;
    Ok(x.reshape((qkv.dim(0)?, heads.num_key_heads, heads.key_dim))?)
}

fn inverse_norm(x: &Tensor) -> Result<Tensor> {
    Ok((x.sqr()?.sum_keepdim(D::Minus1)? + f64::from(NORM_EPS))?.sqrt()?.recip()?)
}

fn in_f32(x: ColumnView<'_>) -> Result<Tensor> {
    Ok(x.narrow()?.contiguous()?.to_dtype(DType::F32)?)
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    Ok((x.neg()?.exp()? + 1.0)?.recip()?)
}

fn transposed(x: &Tensor) -> Result<Tensor> {
    Ok(x.transpose(1, 2)?.contiguous()?)
}

fn write(to: ColumnViewMut<'_>, d: &Tensor) -> Result<()> {
    Ok(to.tensor.slice_set(&d.to_dtype(to.tensor.dtype())?.contiguous()?, 1, to.start)?)
}

fn add_rows(grad: Option<&TensorMut>, d: &Tensor) -> Result<()> {
    let Some(grad) = grad else { return Ok(()) };
    let sum = (d.sum(0)? + grad.to_dtype(DType::F32)?)?.to_dtype(grad.dtype())?;
    Ok(grad.slice_set(&sum.contiguous()?, 0, 0)?)
}
