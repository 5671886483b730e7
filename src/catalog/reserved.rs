//! A target whose files are laid out to the last byte before any tensor byte moves.
//!
//! A format *reserves*: it serialises everything that is not tensor data (headers, pickles, indexes) and says where
//! each chunk of tensor data goes. The executor *fills* without knowing the format. What depends on the data, the
//! CRC-32 of each span that wants one, has a fixed place and is patched in when the span is complete.
//!
//! All units are bytes.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use smallvec::SmallVec;

use super::{Catalog, Dtype, FileLocation, TensorEntry, TensorId};
use crate::layout::Rank;
use crate::layout::partial::Share;
use crate::layout::shards::SharedTensor;

/// Everything an executor needs to write a checkpoint.
#[derive(Debug, Default)]
pub struct Reservation {
    pub files: Vec<OutputFile>,
    /// In the order their bytes lie in the files. Chunks are contiguous row-major, at [`Place::Bytes`] of `files`.
    pub tensors: Vec<Reserved>,
    /// Names of objects that the format cannot hold.
    pub left_out: Vec<String>,
    /// What the user should know about the result.
    pub notes: Vec<String>,
}

/// A target tensor and the source tensor its content comes from.
#[derive(Debug)]
pub struct Reserved {
    pub source: TensorId,
    pub entry: TensorEntry,
    /// What each chunk gets of the source's summands; empty where it gets the value.
    pub shares: Vec<Arc<Share>>,
    /// How ranks share it, where they do.
    pub shared: Option<Box<SharedTensor>>,
}

/// One file to write.
#[derive(Debug, Default)]
pub struct OutputFile {
    /// Relative to the destination folder; a single-file format has one file.
    pub path: PathBuf,
    /// Who writes it in PyTorch, where files are those of ranks.
    pub rank: Option<Rank>,
    pub len: u64,
    /// Ascending, disjoint. Together with the chunks of the tensors they cover the file.
    pub literals: Vec<HeaderBytes>,
    /// Ascending by range, disjoint.
    pub sums: Vec<ChecksumSpan>,
}

/// Bytes known in advance. Shared: items of equal shape and dtype have equal frames. Those of a header may be many, so they
/// stay where they were put together.
#[derive(Clone, Debug)]
pub struct HeaderBytes {
    pub offset: u64,
    pub bytes: Arc<Vec<u8>>,
}

/// The length of a CRC-32, and so of a place for one.
pub const SITE_BYTES: u64 = 4;

/// A span of tensor data whose CRC-32 (IEEE, little-endian) goes to `sites`. A literal lies in it wholly or not at all.
/// All sums of a file have as many sites, and the first ones ascend as the spans do, as do the second ones.
#[derive(Clone, Debug)]
pub struct ChecksumSpan {
    pub range: Range<u64>,
    pub sites: SmallVec<[u64; 2]>,
}

impl OutputFile {
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), ..Self::default() }
    }

    #[must_use]
    pub fn of_rank(rank: Rank, path: impl Into<PathBuf>) -> Self {
        Self { rank: Some(rank), ..Self::new(path) }
    }

    /// Append bytes that are known now.
    pub fn push_literal(&mut self, bytes: impl Into<Arc<Vec<u8>>>) {
        let bytes = bytes.into();
        let offset = self.len;
        self.len += bytes.len() as u64;
        if !bytes.is_empty() {
            self.literals.push(HeaderBytes { offset, bytes });
        }
    }

    /// Append room for tensor data and give its offset.
    pub fn push_payload(&mut self, len: u64) -> u64 {
        let offset = self.len;
        self.len += len;
        offset
    }

    /// Append all that another file holds, tensor data included; gives where it begins here.
    pub fn append(&mut self, other: &Self) -> u64 {
        let base = self.len;
        self.len += other.len;
        let moved =
            |literal: &HeaderBytes| HeaderBytes { offset: base + literal.offset, bytes: Arc::clone(&literal.bytes) };
        self.literals.extend(other.literals.iter().map(moved));
        self.sums.extend(other.sums.iter().map(|sum| ChecksumSpan {
            range: base + sum.range.start..base + sum.range.end,
            sites: sum.sites.iter().map(|site| base + site).collect(),
        }));
        base
    }

    /// The sum of the span that the byte at this offset lies in.
    #[must_use]
    pub fn sum_at(&self, offset: u64) -> Option<&ChecksumSpan> {
        let next = self.sums.partition_point(|sum| sum.range.end <= offset);
        self.sums.get(next).filter(|sum| sum.range.start <= offset)
    }

    /// Whether the byte at this offset lies in a span that is summed.
    #[must_use]
    pub fn sums_at(&self, offset: u64) -> bool {
        self.sum_at(offset).is_some()
    }

    /// The places for sums that reach into a range, ascending.
    #[must_use]
    pub fn sites(&self, range: &Range<u64>) -> Vec<u64> {
        let sums = self.sums.as_slice();
        let most_sites = sums.first().map_or(0, |sum| sum.sites.len());
        let mut sites: Vec<u64> = Vec::new();
        for nth in 0..most_sites {
            let first = sums.partition_point(|sum| sum.sites[nth] + SITE_BYTES <= range.start);
            sites.extend(sums[first..].iter().map(|sum| sum.sites[nth]).take_while(|site| *site < range.end));
        }
        sites.sort_unstable();
        sites
    }
}

impl Reservation {
    /// Memory that what is known now takes until it is written: literals, each once however often it is used, the tables
    /// of chunks, and the plan of the tensor that has most of them.
    #[must_use]
    pub fn held_bytes(&self, source: &Catalog) -> u64 {
        /// Bounds, place and rank of a chunk of two dims.
        const CHUNK_BYTES: u64 = 64;
        /// A chunk on its way: where all that is in it comes from. Tensors are planned whole.
        const PLANNED_BYTES: u64 = 1400;
        let mut seen = HashSet::new();
        let literals = self.files.iter().flat_map(|file| &file.literals);
        let distinct = literals.filter(|literal| seen.insert(literal.bytes.as_ptr()));
        let literals: u64 = distinct.map(|literal| literal.bytes.len() as u64).sum();
        let chunks: u64 = self.tensors.iter().map(|tensor| tensor.entry.chunks.len() as u64).sum();
        let planned = self.tensors.iter().map(|tensor| tensor.tiles_read(source.tensor(tensor.source)) as u64);
        literals + chunks * CHUNK_BYTES + planned.max().unwrap_or(0).saturating_mul(PLANNED_BYTES)
    }

    /// Memory that sums take while they wait for each other, where strips have this length: those of spans that lie, with
    /// their sites, within a strip do not wait.
    #[must_use]
    pub fn waiting_bytes(&self, strip_bytes: u64) -> u64 {
        /// Its value; its part and its open sites, in lists that have grown to hold them.
        const VALUE_BYTES: u64 = 4;
        const WAITING_BYTES: u64 = 2 * (40 + 2 * 24);
        let of_sum = |sum: &ChecksumSpan| {
            let last = sum.sites.iter().copied().fold(sum.range.end, u64::max);
            let length = last.saturating_sub(sum.range.start);
            // A short one meets the end of a strip as often as its length has it, a long one is in every strip it crosses.
            let per_mille = length.saturating_mul(1000) / strip_bytes;
            VALUE_BYTES * 1000
                + WAITING_BYTES
                    * per_mille.min(1000 + sum.range.end.saturating_sub(sum.range.start) / strip_bytes * 1000)
        };
        self.files.iter().flat_map(|file| &file.sums).map(of_sum).sum::<u64>() / 1000
    }

    /// Take in what another part of the checkpoint reserves: its files come to lie in `folder`, behind the ones here.
    ///
    /// # Panics
    /// At 2^32 files.
    pub fn append(&mut self, folder: &Path, other: Self) {
        let shift = u32::try_from(self.files.len()).expect("fewer than 2^32 files");
        self.files.extend(other.files.into_iter().map(|mut file| {
            file.path = folder.join(file.path);
            file
        }));
        self.tensors.extend(other.tensors.into_iter().map(|mut tensor| {
            tensor.entry.chunks.shift_files(shift);
            tensor
        }));
        self.left_out.extend(other.left_out);
        self.notes.extend(other.notes);
    }

    /// Bytes of tensor data.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.tensors.iter().map(Reserved::payload_bytes).sum()
    }

    /// Bytes of all files.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.len).sum()
    }
}

impl Reserved {
    /// A tensor of which every chunk gets the value.
    #[must_use]
    pub fn new(source: TensorId, entry: TensorEntry) -> Self {
        Self { source, entry, shares: Vec::new(), shared: None }
    }

    /// Bytes this tensor takes in the output, all chunks together.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        (0..self.entry.chunks.len()).map(|index| self.chunk_bytes(index)).sum()
    }

    #[must_use]
    pub fn chunk_bytes(&self, index: usize) -> u64 {
        self.entry.chunks.numel(index) * self.dtype().itemsize()
    }

    /// How many tiles of the source tensor make up the chunks: one each, or one a summand.
    #[must_use]
    pub fn tiles_read(&self, source: &TensorEntry) -> usize {
        (0..self.entry.chunks.len()).map(|index| self.tiles_of(index, source)).fold(0, usize::saturating_add)
    }

    /// How many of them make up this chunk.
    #[must_use]
    pub fn tiles_of(&self, index: usize, source: &TensorEntry) -> usize {
        let whole = || source.summands.as_ref().map_or(1, |summands| summands.reduction.count());
        let tiles = self.shares.get(index).map_or_else(whole, |share| share.summands.len() as u64);
        usize::try_from(tiles).unwrap_or(usize::MAX)
    }

    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.entry.dtype
    }

    /// File index and byte offset of a chunk; `None` where it is empty.
    #[must_use]
    pub fn place(&self, index: usize) -> Option<(u32, u64)> {
        match self.entry.chunks.place(index) {
            FileLocation::Bytes { file, offset } => Some((file.0, offset)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::FileId;

    fn part(name: &str, offset: u64) -> Reservation {
        let mut file = OutputFile::new(name);
        file.push_literal(vec![0; usize::try_from(offset).unwrap()]);
        let at = file.push_payload(8);
        let entry = TensorEntry::whole("w".into(), Dtype::F32, smallvec::smallvec![2], FileId(0), at);
        Reservation {
            files: vec![file, OutputFile::new("empty")],
            tensors: vec![Reserved::new(TensorId(3), entry)],
            left_out: vec![format!("{name} object")],
            notes: vec![format!("{name} note")],
        }
    }

    #[test]
    fn parts_join_with_their_files_behind_each_other() {
        let mut whole = Reservation::default();
        whole.append(Path::new("model"), part("a", 16));
        whole.append(Path::new(""), part("b", 32));
        let paths: Vec<&Path> = whole.files.iter().map(|file| file.path.as_path()).collect();
        assert_eq!(paths, ["model/a", "model/empty", "b", "empty"].map(Path::new));
        let places: Vec<_> = whole.tensors.iter().map(|tensor| tensor.place(0).unwrap()).collect();
        assert_eq!(places, [(0, 16), (2, 32)]);
        assert_eq!(whole.tensors[1].source, TensorId(3));
        assert_eq!((whole.left_out, whole.notes.len()), (vec!["a object".into(), "b object".into()], 2));
    }
}
