//! Plans copies: which bytes of the source make up which bytes of the target.
//!
//! One tensor is planned at a time, so the memory for plans depends on the tensor with the most chunks, and not on the
//! size of the model. [`intersect`] counts elements; [`lower`] converts its result to runs of bytes. PyTorch's
//! counterpart is the load plan of `torch/distributed/checkpoint`.

pub mod intersect;
pub mod lower;

pub use intersect::{Overlap, SourceTensor, TilePlan};
pub use lower::{Piece, Pieces};
