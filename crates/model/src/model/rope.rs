//! Rotary frequencies and the tables of a micro-batch, for every `rope_type` in files of these
//! families. Formulas follow transformers' `modeling_rope_utils.py`. Angles are in f32, as there.
//!
//! The frequencies of dynamic and longrope depend on a length. finetune uses that of each sequence,
//! so a sample has the same logits alone, in a micro-batch and packed. transformers uses the
//! longest position of the batch, padding included, for all rows (for dynamic the longest batch so
//! far). For a batch of one row both agree.

use candle_core::{DType, Device, Tensor};

use super::config_reader::{ConfigReader, refused};
use crate::error::{Error, Result};
use crate::ops::attention::Span;
use crate::ops::rotary::RotaryTable;
use crate::runtime::copy::to_device;

/// The dependence of frequencies on the sequence's length.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeKind {
    /// Frequencies that do not depend on the sequence: default, linear, llama3, yarn.
    Fixed,
    /// NTK-aware: the base grows with sequences longer than the trained context.
    Dynamic {
        /// `factor` of the config.
        factor: f64,
    },
    /// Two sets of divisors, one up to the original context, one beyond it (phi3).
    LongRope {
        /// Divisors per frequency up to the original context.
        short: Vec<f32>,
        /// Divisors per frequency beyond it.
        long: Vec<f32>,
    },
}

/// One rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Angle per position of each pair, `[rotary_dim / 2]`.
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin (yarn, longrope).
    pub attention_factor: f32,
    /// The change of frequencies for long sequences.
    pub kind: RopeKind,
    /// The base of the frequencies.
    pub theta: f64,
    /// The context length before stretching, beyond which `kind` takes effect.
    pub trained_positions: usize,
    /// True if neighbours in a head are pairs, not its halves.
    pub interleaved: bool,
    /// The growth of queries with their positions, if any.
    pub query_growth: Option<QueryGrowth>,
    /// The settings of config.json, as text that does not depend on their notation there.
    pub(super) settings: String,
}

/// A factor on the query at `position`: `1 + beta · ln(1 + ⌊(position + first) / original⌋)`
/// (transformers 5.24, `get_llama_4_attn_scale` and `Llama4TextAttention`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    /// The growth of the factor with the logarithm.
    pub beta: f64,
    /// The number of positions without growth.
    pub original: usize,
    /// The number of the first position.
    pub first: usize,
    /// True if the factor multiplies in f32, else in the dtype of the query.
    pub(super) multiplies_in_f32: bool,
}

impl QueryGrowth {
    /// Returns `q: [N, H head_dim]`, or its gradient, times `factors: [N, 1]` f32, in the dtype of
    /// `q`.
    pub(super) fn times(self, q: &Tensor, factors: &Tensor) -> Result<Tensor> {
        if self.multiplies_in_f32 {
            return Ok(q.to_dtype(DType::F32)?.broadcast_mul(factors)?.to_dtype(q.dtype())?);
        }
        Ok(q.broadcast_mul(&factors.to_dtype(q.dtype())?)?)
    }

    fn factor(self, position: usize) -> f32 {
        (1.0 + self.beta * (1.0 + ((position + self.first) / self.original) as f64).ln()) as f32
    }
}

/// The settings outside the scaling object of config.json.
#[derive(Debug, Clone, Copy)]
pub(super) struct RopeContext {
    pub(super) head_dim: usize,
    pub(super) theta: f64,
    pub(super) partial: f64,
    pub(super) max_positions: usize,
    pub(super) original_max_positions: Option<usize>,
}

impl RopeContext {
    /// Returns the context length before stretching. The key outside the scaling object has
    /// priority over the one inside.
    fn original(&self, s: &ConfigReader<'_>) -> Result<usize> {
        let inside = s.opt_usize("original_max_position_embeddings")?;
        match self.original_max_positions.or(inside).unwrap_or(self.max_positions) {
            0 => Err(refused("original_max_position_embeddings", 0, "above 0")),
            original => Ok(original),
        }
    }

    /// Returns `factor`, or else the ratio of the maximum length to the original context.
    fn stretch(&self, s: &ConfigReader<'_>) -> Result<f64> {
        match s.opt_f64("factor")? {
            Some(_) => needed(s, "factor"),
            None => Ok(self.max_positions as f64 / self.original(s)? as f64),
        }
    }
}

impl Rope {
    /// Reads `rope_scaling` or `rope_parameters` (which also carries theta).
    pub(super) fn read(scaling: Option<&ConfigReader<'_>>, context: &RopeContext) -> Result<Self> {
        let inside = |key, outside| scaling.map_or(Ok(outside), |s| s.f64_or(key, outside));
        let theta = inside("rope_theta", context.theta)?;
        let partial = inside("partial_rotary_factor", context.partial)?;
        if !(theta as f32).is_normal() || theta < 0.0 {
            return Err(refused("rope_theta", theta, "above 0, in the range of f32"));
        }
        let rotary_dim = (context.head_dim as f64 * partial) as usize / 2 * 2;
        if !(2..=context.head_dim).contains(&rotary_dim) {
            let accepted = format!("at most 1, and at least 2 of the {} columns of a head", context.head_dim);
            return Err(refused("partial_rotary_factor", partial, &accepted));
        }
        let plain: Vec<f32> = (0..rotary_dim / 2)
            .map(|i| 1.0 / (theta as f32).powf((2 * i) as f32 / rotary_dim as f32))
            .collect();
        let mut rope = Rope {
            inv_freq: plain,
            attention_factor: 1.0,
            kind: RopeKind::Fixed,
            theta,
            trained_positions: context.max_positions,
            interleaved: false,
            query_growth: None,
            settings: settings(scaling, context, (theta, rotary_dim)),
        };
        let Some(s) = scaling else { return Ok(rope) };
        let name = match s.opt_str("rope_type")? {
            Some(name) => name,
            None => s.opt_str("type")?.unwrap_or("default"),
        };
        match name {
            "default" => {}
            "linear" => {
                let factor = needed(s, "factor")? as f32;
                rope.inv_freq.iter_mut().for_each(|f| *f /= factor);
            }
            "dynamic" => rope.kind = RopeKind::Dynamic { factor: needed(s, "factor")? },
            "llama3" => rope.llama3(s, context)?,
            // The first Phi-3 files use this name for longrope.
            "yarn" if s.mentions("short_factor") => rope.longrope(s, context)?,
            "yarn" => rope.yarn(s, context, rotary_dim)?,
            "proportional" => rope.proportional(s, context.head_dim)?,
            "longrope" | "su" => rope.longrope(s, context)?,
            other => {
                return Err(Error::user(format!("`rope_scaling` has type \"{other}\""))
                    .because("accepted: default, linear, dynamic, llama3, yarn, longrope, proportional"));
            }
        }
        rope.check(name)?;
        Ok(rope)
    }

    /// Returns the rope of layers without positions: it turns two columns of a head by 0.
    pub(super) fn without_positions() -> Self {
        Rope {
            inv_freq: vec![0.0],
            attention_factor: 1.0,
            kind: RopeKind::Fixed,
            theta: 1.0,
            trained_positions: usize::MAX,
            interleaved: false,
            query_growth: None,
            settings: "no positions".to_owned(),
        }
    }

    /// Sets the growth of queries by `beta` at each `every` positions, the first of which is number
    /// 1 (Llama 4).
    pub(super) fn with_growth_from_one(self, beta: f64, every: usize) -> Self {
        let settings = format!("{}, queries grow by {beta:?} at each {every}", self.settings);
        let growth = QueryGrowth { beta, original: every, first: 1, multiplies_in_f32: true };
        Rope { query_growth: Some(growth), settings, ..self }
    }

    /// Returns whether it turns any columns.
    pub fn has_positions(&self) -> bool {
        self.inv_freq.iter().any(|frequency| *frequency != 0.0)
    }

    /// Sets the growth of queries by `llama_4_scaling_beta` and `original_max_position_embeddings`;
    /// models without growth have a beta of 0.
    pub(super) fn with_query_growth(mut self, s: &ConfigReader<'_>) -> Result<Self> {
        let beta = s.f64_or("llama_4_scaling_beta", 0.0)?;
        if beta < 0.0 {
            return Err(refused("llama_4_scaling_beta", beta, "0 or above"));
        }
        if beta > 0.0 {
            let original = needed(s, "original_max_position_embeddings")? as usize;
            let original = original.max(1);
            self.query_growth = Some(QueryGrowth { beta, original, first: 0, multiplies_in_f32: false });
        }
        Ok(self)
    }

    /// Refuses settings with frequencies or a factor that are not finite or are negative.
    fn check(&self, name: &str) -> Result<()> {
        let mut numbers = self.inv_freq.iter().chain(std::iter::once(&self.attention_factor));
        let Some(number) = numbers.find(|number| !number.is_finite() || **number < 0.0) else {
            return Ok(());
        };
        Err(Error::user(format!("cannot compute angles from `rope_scaling` of type \"{name}\"")).because(format!(
            "its numbers give {number} as a frequency or attention factor; accepted: finite ones of 0 or above"
        )))
    }

    fn llama3(&mut self, s: &ConfigReader<'_>, context: &RopeContext) -> Result<()> {
        let factor = needed(s, "factor")?;
        let (low, high) = (needed(s, "low_freq_factor")?, needed(s, "high_freq_factor")?);
        let original = context.original(s)? as f64;
        for f in &mut self.inv_freq {
            let wavelength = std::f64::consts::TAU / f64::from(*f);
            let kept = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
            *f = ((1.0 - kept) * f64::from(*f) / factor + kept * f64::from(*f)) as f32;
        }
        Ok(())
    }

    /// Applies YaRN's scaling (arXiv 2309.00071).
    fn yarn(&mut self, s: &ConfigReader<'_>, context: &RopeContext, dim: usize) -> Result<()> {
        self.trained_positions = context.original(s)?;
        let original = self.trained_positions as f64;
        let factor = context.stretch(s)?;
        let mscale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        self.attention_factor = match s.opt_f64("attention_factor")? {
            Some(given) => given,
            None => match (s.opt_f64("mscale")?, s.opt_f64("mscale_all_dim")?) {
                (Some(m), Some(all)) if m != 0.0 && all != 0.0 => mscale(m) / mscale(all),
                _ => mscale(1.0),
            },
        } as f32;
        let turns_at = |turns: f64| {
            dim as f64 * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
        };
        // A zero counts as absent.
        let turns = |key, default| Ok(s.opt_f64(key)?.filter(|turns| *turns != 0.0).unwrap_or(default));
        let fast: Result<f64> = turns("beta_fast", 32.0);
        let (mut low, mut high) = (turns_at(fast?), turns_at(turns("beta_slow", 1.0)?));
        if s.bool_or("truncate", true)? {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        for (i, f) in self.inv_freq.iter_mut().enumerate() {
            let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            *f = (f64::from(*f) / factor * interpolated + f64::from(*f) * (1.0 - interpolated)) as f32;
        }
        Ok(())
    }

    /// Spreads the rotated pairs over whole heads (Gemma 4): the frequencies are those of a rope on
    /// all columns, and the pairs beyond the rotated ones turn by 0.
    fn proportional(&mut self, s: &ConfigReader<'_>, head_dim: usize) -> Result<()> {
        let factor = if s.mentions("factor") { needed(s, "factor")? as f32 } else { 1.0 };
        let (rotated, theta) = (self.inv_freq.len(), self.theta as f32);
        let frequency = |i: usize| theta.powf((2 * i) as f32 / head_dim as f32).recip() / factor;
        self.inv_freq = (0..head_dim / 2).map(|i| if i < rotated { frequency(i) } else { 0.0 }).collect();
        Ok(())
    }

    fn longrope(&mut self, s: &ConfigReader<'_>, context: &RopeContext) -> Result<()> {
        let divisors = |key: &str| -> Result<Vec<f32>> {
            let list = s
                .f64_list(key)?
                .ok_or_else(|| Error::user(format!("`{key}` of `rope_scaling` is missing")))?;
            if list.len() != self.inv_freq.len() {
                return Err(Error::user(format!("`{key}` has {} entries", list.len()))
                    .because(format!("accepted: {}, half the rotary width", self.inv_freq.len())));
            }
            if let Some(divisor) = list.iter().find(|divisor| **divisor <= 0.0) {
                return Err(
                    Error::user(format!("`{key}` has {divisor}")).because("accepted: numbers above 0")
                );
            }
            Ok(list.into_iter().map(|x| x as f32).collect())
        };
        let kind = RopeKind::LongRope { short: divisors("short_factor")?, long: divisors("long_factor")? };
        let original = context.original(s)?;
        let factor = context.stretch(s)?;
        let natural = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
        self.attention_factor = s.f64_or("attention_factor", natural)? as f32;
        self.kind = kind;
        self.trained_positions = original;
        Ok(())
    }

    /// Returns the frequencies of a sequence of `len` tokens.
    fn frequencies(&self, len: usize) -> Vec<f32> {
        match &self.kind {
            RopeKind::Fixed => self.inv_freq.clone(),
            RopeKind::Dynamic { .. } if len <= self.trained_positions => self.inv_freq.clone(),
            RopeKind::Dynamic { factor } => {
                let dim = 2.0 * self.inv_freq.len() as f64;
                let stretch = factor * len as f64 / self.trained_positions as f64 - (factor - 1.0);
                let base = (self.theta * stretch.powf(dim / (dim - 2.0))) as f32;
                (0..self.inv_freq.len()).map(|i| 1.0 / base.powf((2 * i) as f32 / dim as f32)).collect()
            }
            RopeKind::LongRope { short, long } => {
                let divisors = if len > self.trained_positions { long } else { short };
                self.inv_freq.iter().zip(divisors).map(|(f, d)| f / d).collect()
            }
        }
    }

    /// Returns whether sequences of these two lengths have different frequencies.
    pub fn differs(&self, one: usize, other: usize) -> bool {
        self.kind != RopeKind::Fixed && self.frequencies(one) != self.frequencies(other)
    }

    /// Returns the factors on the queries of each span, `[N, 1]` f32, or none if all are 1.
    pub(super) fn query_factors(&self, spans: &[Span], device: &Device) -> Result<Option<Tensor>> {
        let Some(growth) = self.query_growth else { return Ok(None) };
        let positions = spans.iter().flat_map(|span| span.k_len - span.q_len..span.k_len);
        let factors: Vec<f32> = positions.map(|position| growth.factor(position)).collect();
        if factors.iter().all(|factor| *factor == 1.0) {
            return Ok(None);
        }
        let rows = factors.len();
        to_device(&Tensor::from_vec(factors, (rows, 1), &Device::Cpu)?, device).map(Some)
    }

    /// Returns cos and sin for the queries of each span. A span's tokens are at positions `k_len −
    /// q_len ..`.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn table(&self, spans: &[Span], device: &Device) -> Result<RotaryTable> {
        let half = self.inv_freq.len();
        let rows: usize = spans.iter().map(|span| span.q_len).sum();
        let (mut cos, mut sin) = (Vec::with_capacity(rows * half), Vec::with_capacity(rows * half));
        for span in spans {
            let frequencies = self.frequencies(span.k_len);
            for position in span.k_len - span.q_len..span.k_len {
                for f in &frequencies {
                    let (s, c) = (position as f32 * f).sin_cos();
                    cos.push(c * self.attention_factor);
                    sin.push(s * self.attention_factor);
                }
            }
        }
        let tensor =
            |values: Vec<f32>| to_device(&Tensor::from_vec(values, (rows, half), &Device::Cpu)?, device);
        Ok(RotaryTable { cos: tensor(cos)?, sin: tensor(sin)?, interleaved: self.interleaved })
    }
}

/// Returns base, width and, for a scaled rope, all scaling settings as one text.
fn settings(
    scaling: Option<&ConfigReader<'_>>,
    context: &RopeContext,
    (theta, columns): (f64, usize),
) -> String {
    // The text has these already, or they name the kind under its older key.
    let elsewhere = ["rope_theta", "partial_rotary_factor", "type", "rope_type"];
    let said = format!("theta {theta:?} on {columns} columns");
    let kind = scaling.and_then(|s| s.get("rope_type").or(s.get("type"))?.as_str());
    let (Some(s), Some(kind)) = (scaling, kind.filter(|kind| *kind != "default")) else { return said };
    let RopeContext { max_positions, original_max_positions: original, .. } = context;
    let lengths = format!("of {max_positions} positions, {} before", original.unwrap_or(0));
    let others = s.texts().into_iter().filter(|(key, _)| !elsewhere.contains(&key.as_str()));
    let others = others.map(|(key, value)| format!(", {key} {value}")).collect::<String>();
    format!("{said}, {kind} {lengths}{others}")
}

fn needed(s: &ConfigReader<'_>, key: &str) -> Result<f64> {
    match s.opt_f64(key)? {
        Some(value) if value > 0.0 && value.is_finite() => Ok(value),
        Some(value) => {
            Err(Error::user(format!("`{key}` of `rope_scaling` is {value}")).because("accepted: above 0"))
        }
        None => Err(Error::user(format!("`{key}` of `rope_scaling` is missing"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growing_queries_are_rounded_once_or_with_their_factors() -> Result<()> {
        let q: Vec<f32> = (1..=64).map(|i| i as f32 / 7.0).collect();
        let q = Tensor::from_vec(q, (1, 64), &Device::Cpu)?.to_dtype(DType::BF16)?;
        let factors = Tensor::new(&[[1.069_314_7f32]], &Device::Cpu)?;
        let rounded = factors.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
        let values = |tensor: &Tensor| -> Result<Vec<f32>> {
            Ok(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
        };
        let growth = |multiplies_in_f32| QueryGrowth { beta: 0.1, original: 4, first: 0, multiplies_in_f32 };
        let product = |factors: &Tensor| -> Result<Vec<f32>> {
            values(&q.to_dtype(DType::F32)?.broadcast_mul(factors)?.to_dtype(DType::BF16)?)
        };
        let [once, twice] = [product(&factors)?, product(&rounded)?];
        assert_ne!(once, twice);
        assert_eq!(values(&growth(true).times(&q, &factors)?)?, once);
        assert_eq!(values(&growth(false).times(&q, &factors)?)?, twice);
        Ok(())
    }
}
