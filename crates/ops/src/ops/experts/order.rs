//! A router's settings, its choice, and the order of the rows of all experts.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::backends::gpu;
use crate::error::{Error, Result};
use crate::runtime::copy::to_device;

/// The settings of a router.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Router {
    /// The number of experts of a token, k.
    pub chosen: usize,
    /// The scores of the experts.
    pub scores: RouterScores,
    /// True if the weights of a token's experts sum to `factor`.
    pub renormalize: bool,
    /// The groups that restrict the choice; `None`: each expert can be chosen.
    pub groups: Option<ExpertGroups>,
    /// Factor on the weights.
    pub factor: f32,
    /// Added to the sum of a token's scores that divides them if `renormalize` is true, for scores
    /// that are sigmoids, have a bias or are in groups.
    pub sum_offset: f32,
}

/// The usual [`Router::sum_offset`] (DeepSeek-V3).
pub const SUM_OFFSET: f32 = 1e-20;

/// The function of a token's logits that gives the scores of its experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterScores {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each logit (DeepSeek-V3).
    Sigmoid,
}

/// Groups of consecutive experts, of which a token uses only the best. The score of a group is the
/// sum of its two best experts' (DeepSeek-V3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// The number of groups, at most [`super::MOST_GROUPS`]; it divides the number of experts.
    pub count: usize,
    /// The number of groups of a token.
    pub chosen: usize,
}

impl Router {
    /// Returns a router of softmax scores that chooses `chosen` of all experts.
    pub fn softmax(chosen: usize, renormalize: bool) -> Self {
        Router {
            chosen,
            scores: RouterScores::Softmax,
            renormalize,
            groups: None,
            factor: 1.0,
            sum_offset: SUM_OFFSET,
        }
    }
}

/// The experts of each token.
#[derive(Debug, Clone)]
pub struct ExpertChoice {
    /// The experts, the best one first: `[N, k]` u32.
    pub ids: Tensor,
    /// Their weights: `[N, k]` f32.
    pub weights: Tensor,
}

/// The rows of all experts, those of the first expert first, the tokens of an expert in order.
///
/// The copy `j` of token `n` has the number `n·k + j`.
#[derive(Debug, Clone)]
pub struct ExpertRows(Arc<Order>);

/// The rows of one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsOfExpert {
    /// The number of the expert.
    pub expert: usize,
    /// The first of its rows.
    pub start: usize,
    /// The number of its rows.
    pub len: usize,
}

#[derive(Debug)]
struct Order {
    /// Rows of expert e: `starts[e]..starts[e + 1]`.
    starts: Vec<usize>,
    /// The token of each row: `[R]`.
    tokens: Vec<u32>,
    /// The number of the copy in each row: `[R]`.
    copies: Vec<u32>,
    /// The rows of each token in ascending order: `[N, k]`.
    places: Vec<u32>,
    /// `copies` and `places` on the device, u32.
    on_device: [Tensor; 2],
}

impl ExpertRows {
    /// Orders the rows of `experts` experts by `choice`; waits for the device.
    ///
    /// # Errors
    /// Internal: an expert's number is too large. Or an operation of the device failed.
    pub fn of(choice: &ExpertChoice, experts: usize) -> Result<Self> {
        let (tokens, k) = choice.ids.dims2()?;
        let ids: Vec<u32> = gpu::read(&choice.ids.flatten_all()?)?;
        let mut starts = vec![0usize; experts + 1];
        for &id in &ids {
            let end = starts
                .get_mut(id as usize + 1)
                .ok_or_else(|| Error::internal(format!("a router chose expert {id} of {experts}")))?;
            *end += 1;
        }
        for e in 0..experts {
            starts[e + 1] += starts[e];
        }
        let mut next = starts.clone();
        let (mut copies, mut places) = (vec![0u32; ids.len()], vec![0u32; ids.len()]);
        for (copy, &id) in ids.iter().enumerate() {
            let row = next[id as usize];
            next[id as usize] += 1;
            (copies[row], places[copy]) = (copy as u32, row as u32);
        }
        places.chunks_mut(k.max(1)).for_each(<[u32]>::sort_unstable);
        let of_rows = copies.iter().map(|copy| copy / k as u32).collect();
        let device = choice.ids.device();
        let on_device =
            [gpu::upload(&copies, copies.len(), device)?, gpu::upload(&places, (tokens, k), device)?];
        Ok(ExpertRows(Arc::new(Order { starts, tokens: of_rows, copies, places, on_device })))
    }

    /// Returns one row for each of `tokens` tokens, in their order: those of one expert.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn of_tokens(tokens: usize, device: &Device) -> Result<Self> {
        let all: Vec<u32> = (0..tokens as u32).collect();
        let on_device = [gpu::upload(&all, tokens, device)?, gpu::upload(&all, (tokens, 1), device)?];
        let (tokens, copies) = (all.clone(), all.clone());
        Ok(ExpertRows(Arc::new(Order { starts: vec![0, all.len()], tokens, copies, places: all, on_device })))
    }

    /// Returns the token of each row, `[R]`.
    pub fn tokens(&self) -> &[u32] {
        &self.0.tokens
    }

    /// Returns the number of the copy in each row, `[R]`.
    pub fn copies(&self) -> &[u32] {
        &self.0.copies
    }

    /// Returns the number of rows of each expert, `[E]`.
    pub fn loads(&self) -> Vec<usize> {
        self.0.starts.windows(2).map(|ends| ends[1] - ends[0]).collect()
    }

    /// Returns the rows of each expert that has some.
    pub fn of_experts(&self) -> impl Iterator<Item = RowsOfExpert> + '_ {
        let ends = self.0.starts.windows(2).enumerate();
        let rows = ends.map(|(expert, ends)| RowsOfExpert { expert, start: ends[0], len: ends[1] - ends[0] });
        rows.filter(|rows| rows.len > 0)
    }

    /// Returns its tensors on the device, `[R]` and `[N, k]` u32, for counts of memory.
    pub fn tensors(&self) -> &[Tensor; 2] {
        &self.0.on_device
    }

    /// Returns the rows of each token in ascending order, `[N, k]`.
    pub(super) fn places(&self) -> &[u32] {
        &self.0.places
    }

    pub(super) fn copies_on_device(&self) -> &Tensor {
        &self.0.on_device[0]
    }

    pub(super) fn places_on_device(&self) -> &Tensor {
        &self.0.on_device[1]
    }

    /// Returns the number of copies of a token, k.
    pub(super) fn per_token(&self) -> Result<usize> {
        Ok(self.0.on_device[1].dim(1)?)
    }

    /// Returns the index of rows in a list, for candle.
    pub(super) fn index(list: &[u32], device: &Device) -> Result<Tensor> {
        to_device(&Tensor::from_slice(list, list.len(), &Device::Cpu)?, device)
    }
}
