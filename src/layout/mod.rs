//! The layout of sharded tensors: which rank holds which elements.
//!
//! This module counts elements and knows no bytes, files or dtypes. A layout is a [`DeviceMesh`] and one [`Placement`]
//! per mesh dim. [`local_shard`] computes the [`Tile`] that one rank holds of a global tensor. [`Cover`] proves that a
//! set of tiles holds every element exactly once, and finds the tiles that overlap a given tile.
//!
//! Invariants: intervals are half-open, offsets are global unless called *local* or *position*, order is row-major,
//! and an empty intersection is `None`, never a box of size 0.
//!
//! The rules are PyTorch's: `torch/distributed/tensor/placement_types.py` and `_utils.py`.
//!
//! A `(4, 4)` tensor on the mesh `dp=2,tp=2` as `(S(0), S(1))`:
//!
//! ```text
//!            tp=0  tp=1
//!     dp=0   0 0 | 1 1       rank 1 sits at coordinate (0, 1)
//!            0 0 | 1 1       and holds the tile [0:2, 2:4]
//!            ----+----
//!     dp=1   2 2 | 3 3
//!            2 2 | 3 3
//! ```

use std::fmt;

use smallvec::{SmallVec, smallvec};

mod cover;
pub mod cut;
pub mod distinct_tiles;
mod error;
pub mod file;
pub mod flat;
mod intervals;
mod mesh;
pub mod parallelize;
pub mod partial;
mod pattern;
mod placement;
mod region;
pub mod rules;
mod shard;
mod split;
pub mod strided;
mod tile;
pub mod whole;

#[cfg(test)]
mod tests;

pub use cover::{Cover, CoverError};
pub use error::LayoutError;
pub use intervals::{CommonRange, Intervals, Segments};
pub use mesh::DeviceMesh;
pub use pattern::Pattern;
pub use placement::{Placement, PlacementSpec, ReduceOp, comma_list, parse_placements};
pub use region::Region;
pub use shard::{chunk, from_shard_order, local_part, local_shard};
pub use split::Split;
pub use tile::Tile;

/// One number for each dim of a tensor or of a mesh.
pub type Dims = SmallVec<[u64; 4]>;

/// A dim of a tensor. The separate type prevents confusion with a [`MeshDim`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorDim(pub usize);

/// A dim of a [`DeviceMesh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MeshDim(pub usize);

/// The number of a process in the training job: PyTorch's *global* rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl fmt::Display for TensorDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for MeshDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Returns the number of elements of a tensor of this shape: 1 for `[]`, and `None` if the number exceeds `u64`.
///
/// If any size is 0, the result is 0, even if the product of the other sizes overflows.
pub fn numel(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1, |n: u64, &size| n.checked_mul(size))
}

/// Returns the coordinate of the cell `index` of a row-major array. `index` counts from 0 and must be below the number
/// of cells.
pub fn unravel(mut index: u64, shape: &[u64]) -> Dims {
    let mut coordinate: Dims = smallvec![0; shape.len()];
    for (place, &size) in coordinate.iter_mut().zip(shape).rev() {
        *place = index % size;
        index /= size;
    }
    coordinate
}

/// Returns the row-major index of a coordinate. The inverse function is [`unravel`].
fn ravel(coordinate: &[u64], shape: &[u64]) -> u64 {
    (coordinate.iter().zip(shape)).fold(0, |index, (&at, &size)| index * size + at)
}

/// A shape that is displayed as a Python tuple: `()`, `(4,)`, `(4, 2)`.
struct AsTuple<'a>(&'a [u64]);

impl fmt::Display for AsTuple<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [one] => write!(f, "({one},)"),
            many => {
                f.write_str("(")?;
                for (i, size) in many.iter().enumerate() {
                    let comma = if i == 0 { "" } else { ", " };
                    write!(f, "{comma}{size}")?;
                }
                f.write_str(")")
            }
        }
    }
}
