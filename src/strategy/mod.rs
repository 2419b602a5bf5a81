//! Where parameters live and how their gradients meet.
//!
//! Parameters lie in flat buckets, one per segment and kind (frozen, quantized, trainable, adapter), and a segment's
//! weights are views on them. The engine
//! asks a strategy for the weights of a segment, uses them once and lets go; with one device ([`Single`]) that is a
//! borrow. Sharded strategies come with their issue and keep this interface.

mod bucket;
mod packed;
mod single;

pub use bucket::{Bucket, Entry, Fill, Slot};
pub use packed::Packed;
pub use single::{Adapters, LoraSpec, Single, TOKEN_ROWS};
