//! Tensors whose elements are computed while they are read, such as 8-bit weights times their scales.
//!
//! A computed tensor is a *computed file*: a file that is stored nowhere and has the elements of the tensor, row-major. The
//! catalog has an ordinary tensor whose only chunk is in this file, so plans, views, digests and copies treat a computed tensor
//! like a stored tensor. When a range of the file is read, [`crate::exec`] reads the source tensors and computes the range.
//! Unit of shapes: elements.

use smallvec::SmallVec;

use super::{Catalog, ChunkTable, Dtype, TensorEntry, TensorId};
use crate::layout::Dims;
use crate::storage::{FileId, Files};

/// The number of elements in a group of [`Calculation::Mxfp4`], which share an exponent.
pub const MXFP4_GROUP: u64 = 32;

/// A computed file, and how its elements are computed.
#[derive(Clone, Debug, PartialEq)]
pub struct ComputedTensor {
    pub file: FileId,
    /// The dtype of the elements.
    pub dtype: Dtype,
    /// The shape of the elements.
    pub shape: Dims,
    pub calculation: Calculation,
    /// The tensors that the calculation reads.
    pub sources: SmallVec<[TensorId; 2]>,
}

/// A calculation of the elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Calculation {
    /// An 8-bit float times the scale of its block. The blocks divide the last two dims; the last block of a dim may be
    /// shorter. The sources are the floats and the scales.
    ScaledBlocks {
        /// The numbers of rows and columns of a block.
        block: [u64; 2],
    },
    /// A 4-bit float (two in a byte, the lower four bits first) times the power of two of its group of 32 elements. The
    /// sources are the packed bytes and the 8-bit exponents.
    Mxfp4,
    /// The element of the source plus a number.
    Add(f64),
    /// Zeros. There are no sources.
    Zeros,
}

impl Calculation {
    /// Passes numbers that encode the calculation to `emit`, for a hash.
    pub fn encode(self, emit: &mut impl FnMut(u64)) {
        match self {
            Self::ScaledBlocks { block: [rows, columns] } => [1, rows, columns].into_iter().for_each(emit),
            Self::Mxfp4 => emit(2),
            Self::Add(number) => [3, number.to_bits()].into_iter().for_each(emit),
            Self::Zeros => emit(4),
        }
    }
}

impl ComputedTensor {
    /// Makes a computed tensor and adds its file to `files`. Messages name the file `like`, which must be a file of the tensors from
    /// which the elements are computed.
    #[must_use]
    pub fn new(
        files: &mut Files,
        like: FileId,
        (dtype, shape): (Dtype, Dims),
        calculation: Calculation,
        sources: &[TensorId],
    ) -> Self {
        let file = files.add_computed(like, shape.iter().product::<u64>() * dtype.itemsize());
        Self { file, dtype, shape, calculation, sources: sources.into() }
    }

    /// Returns the chunks of the tensor: one chunk, which is the whole file.
    pub fn chunks(&self) -> ChunkTable {
        TensorEntry::whole("".into(), self.dtype, self.shape.clone(), self.file, 0).chunks
    }
}

impl TensorEntry {
    /// Returns the first file that has elements of the tensor, or `None` if the tensor is empty.
    pub fn first_file(&self) -> Option<FileId> {
        (0..self.chunks.len()).find_map(|chunk| self.chunks.location(chunk).file())
    }
}

impl Catalog {
    /// Returns the computed tensor of a file, or `None` if the file is stored.
    pub fn computed(&self, file: FileId) -> Option<&ComputedTensor> {
        // Files get ascending ids in the order in which they are added.
        let index = self.computed.binary_search_by_key(&file, |computed| computed.file).ok()?;
        Some(&self.computed[index])
    }

    /// Returns tensors and, for those that are computed, the tensors from which they are computed, ascending.
    pub fn with_sources(&self, tensors: &[TensorId]) -> Vec<TensorId> {
        let mut stored = tensors.to_vec();
        if self.computed.is_empty() {
            return stored;
        }
        let mut next = 0;
        while let Some(id) = stored.get(next) {
            let chunks = &self.tensor(*id).chunks;
            let files = (0..chunks.len()).filter_map(|chunk| chunks.location(chunk).file());
            let found: Vec<TensorId> =
                files.filter_map(|file| self.computed(file)).flat_map(|computed| computed.sources.clone()).collect();
            stored.extend(found);
            next += 1;
        }
        stored.sort_unstable();
        stored.dedup();
        stored
    }
}
