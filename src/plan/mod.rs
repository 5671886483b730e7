//! The intersection of two catalogs: which bytes of the source make up which bytes of the target.
//!
//! Planning goes tensor by tensor, so memory follows the largest tensor's chunk list and not the model.
//! [`intersect`] counts in elements; [`lower`] turns its answer into runs of bytes.

pub mod intersect;
pub mod lower;

pub use intersect::{Overlap, SourceTensor, TilePlan};
pub use lower::{Piece, Pieces};
