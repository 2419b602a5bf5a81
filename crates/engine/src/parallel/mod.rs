//! Storage of parameters and reduction of their gradients, for all sharding strategies.
//!
//! Parameters are stored in flat buckets, one per segment and kind (frozen, quantized, trainable,
//! adapter), and a segment's weights are views on them. The engine gets the weights of a segment
//! from the [`ParamStore`], uses them once, releases them, and hands in the gradients. One table
//! ([`ShardingStrategy`], in `placement`) determines the parts that a rank keeps, gathers and sums.
//! Its rows give the number of ranks along each axis of the [`DeviceMesh`] and the tensors that
//! they shard; the row of a single rank sends nothing.

mod bucket;
mod buffer_pool;
mod comm_volume;
mod communicators;
mod gather;
mod grad_reduce;
mod local_range;
mod mesh;
mod mesh_shape;
mod offload;
mod param;
mod param_store;
mod placement;
mod quantized_bucket;
mod rank_sums;
mod shared_frozen;
mod trainable_entries;
mod views;

pub use bucket::{Bucket, BucketEntry, FillParam, LoadTarget};
pub use comm_volume::{SentBytes, TrainedRun};
pub use communicators::communicator_count;
pub use grad_reduce::GradReduceOptions;
pub use local_range::LocalRange;
pub use mesh::DeviceMesh;
pub use mesh_shape::{MeshAxis, MeshShape};
pub use offload::OffloadTarget;
pub use param::{LrGroup, ParamDesc, ParamKind, UpdateRule, per_layer_inputs_train};
pub(crate) use param_store::FiniteCheck;
pub use param_store::{GatherGuard, ParamStore, StoreOptions};
pub use placement::{ParamRole, Placements, ShardingSpec, ShardingStrategy};
pub use shared_frozen::{SharedFrozen, is_shareable, trains_rows};
pub(crate) use trainable_entries::EntryIndex;
pub use views::{Adapters, LoraSpec, TOKEN_ROWS};
