//! A mixture of experts around its products: the router's choice of experts for each token
//! (forward and backward), the loss that balances their load, and the ways of rows to the experts
//! and back.
//!
//! ```text
//! p = softmax(logits), or sigmoid(logits)
//! the k experts of the largest p (+ bias), in the best groups, are chosen
//! w = factor · p, or factor · p / Σ p of the chosen experts (renormalized)
//! ```
//!
//! Softmax over the chosen logits alone is the renormalized choice. The bias moves only the choice
//! and has no gradient (DeepSeek-V3, arXiv 2412.19437). Symbols: E experts, k chosen experts of a
//! token, R = N·k rows of all experts.

mod balance;
pub(super) mod cases;
mod choice;
mod cuda;
mod order;
mod rows;

pub use balance::balance_experts;
pub(crate) use balance::reference as balance_reference;
pub use choice::{choose_experts, choose_experts_backward};
pub(crate) use choice::{reference as choice_reference, reference_backward as choice_reference_backward};
pub use order::{ExpertChoice, ExpertGroups, ExpertRows, Router, RouterScores, RowsOfExpert, SUM_OFFSET};
pub(crate) use rows::{combine_reference, scale_reference, scale_reference_backward};
pub use rows::{combine_rows, scale_rows, scale_rows_backward};

/// Maximum number of experts that a kernel chooses from.
pub const MOST_EXPERTS: usize = 1024;
/// Maximum number of experts of a token.
pub const MOST_CHOSEN: usize = 32;
/// Maximum number of groups of experts.
pub const MOST_GROUPS: usize = 32;
