//! Plans copies: which bytes of the source make up which bytes of the target.
//!
//! Planning is done tensor by tensor, so memory depends on the largest chunk list of a tensor and not on the model.
//! [`intersect`] counts elements; [`lower`] converts its result to runs of bytes. PyTorch's counterpart is the load
//! plan of `torch/distributed/checkpoint`.

pub mod intersect;
pub mod lower;

pub use intersect::{Overlap, SourceTensor, TilePlan};
pub use lower::{Piece, Pieces};
