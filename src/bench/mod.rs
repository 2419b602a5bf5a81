//! Measurements of `finetune bench`: operations, communication between ranks, and how speed grows
//! with ranks.

pub(crate) mod communication;
pub(crate) mod op_speeds;
pub(crate) mod scaling;
