//! Weight maps: the conventions in which the weights of one model family are stored, as data.
//!
//! A map file lists *sides* (conventions) and *rows*. A row is an equation between tensors of the sides: elements with equal
//! coordinates on the row's axes are equal. This module knows names and shapes; it knows no files and no bytes.

mod cell;
mod cut;
mod cut_rules;
mod error;
mod families;
mod file;
mod mapping;
mod names;
mod pieces;
mod row;
mod sizes;
mod views;

pub use cut_rules::{CutRule, CutTensor};
pub use error::{MapError, is_scale};
pub use families::{Family, families};
pub use file::{Side, SizeRule, WeightMap};
pub use mapping::{Application, AppliedTensor, Fit, Mapping, SourceTensor};
pub use names::NameMatch;
pub use pieces::{Piece, Progression, TooManyPieces, copies, following_dims, padding, pieces};
pub use row::Row;
pub use sizes::{KnownSize, SizeConflict, SizeOrigin, Sizes};
pub use views::{ChunkView, views};
