//! Reservations: the exact layout of the output files, before any tensor data is copied.
//!
//! All sizes and offsets are in bytes. A format *reserves* its files: it serialises everything except tensor data
//! (headers, pickles, indexes) and gives each chunk of tensor data an offset. The executor then *fills* the files
//! without knowledge of the format. CRC-32 values depend on the data; they have fixed offsets, and each is written when
//! all bytes of its range are written. Invariant: every byte of a file belongs either to the header bytes or to exactly
//! one chunk.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use smallvec::SmallVec;

use super::{Catalog, Dtype, FileLocation, TensorEntry, TensorId};
use crate::layout::Rank;
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::partial::Share;

/// The result of laying out a checkpoint: everything that the executor needs to write the files.
#[derive(Debug, Default)]
pub struct Reservation {
    pub files: Vec<OutputFile>,
    /// The tensors, in the order of their bytes in the files. Each chunk is contiguous and row-major. The location of a
    /// chunk is [`FileLocation::Bytes`], whose file id is an index in `files`.
    pub tensors: Vec<Reserved>,
    /// The names of objects that are not written, because the format cannot store them.
    pub left_out: Vec<String>,
    /// Notes about the result for the user.
    pub notes: Vec<String>,
}

/// A tensor of the result, and the source tensor from which its values come.
#[derive(Debug)]
pub struct Reserved {
    pub source: TensorId,
    pub entry: TensorEntry,
    /// For each chunk, the partial values of the source that are read for the chunk, and how these are reduced. The
    /// list is empty if every chunk gets the complete value of the source tensor.
    pub shares: Vec<Arc<Share>>,
    /// The placements of the target tensor, if the tensor is sharded or replicated over ranks; otherwise `None`.
    pub shared: Option<Box<SharedTensor>>,
}

/// An output file: its path, its length, and its content except tensor data.
#[derive(Debug, Default)]
pub struct OutputFile {
    /// The path relative to the destination folder; if the destination is a single file, the path is the name of this
    /// file.
    pub path: PathBuf,
    /// The rank that writes this file in PyTorch, if the format has files for ranks.
    pub rank: Option<Rank>,
    pub len: u64,
    /// The bytes that are known before tensor data is copied, as disjoint ranges with ascending offsets. All other
    /// bytes of the file belong to chunks of tensors.
    pub header_bytes: Vec<HeaderBytes>,
    /// The ranges for which the file stores a CRC-32. The ranges are disjoint and ascend.
    pub checksums: Vec<ChecksumSpan>,
}

/// Bytes of an output file that are known before tensor data is copied. Clones share one copy of the bytes, because
/// headers may be large and many items (tensors with equal shape and dtype) have equal headers.
#[derive(Clone, Debug)]
pub struct HeaderBytes {
    pub offset: u64,
    pub bytes: Arc<Vec<u8>>,
}

/// The length of a CRC-32 in bytes.
pub const CRC_BYTES: u64 = 4;

/// A range of a file whose CRC-32 (IEEE, little-endian) is written at each offset in `crc_offsets`. Each entry of
/// `header_bytes` is completely inside or completely outside the range. All ranges of a file have equally many CRC
/// offsets. In the order of the ranges, the first CRC offsets of all ranges ascend, and so do the second CRC offsets.
#[derive(Clone, Debug)]
pub struct ChecksumSpan {
    pub range: Range<u64>,
    pub crc_offsets: SmallVec<[u64; 2]>,
}

impl OutputFile {
    /// Makes an output file of length 0.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), ..Self::default() }
    }

    /// Makes an empty file that this rank writes in PyTorch.
    #[must_use]
    pub fn of_rank(rank: Rank, path: impl Into<PathBuf>) -> Self {
        Self { rank: Some(rank), ..Self::new(path) }
    }

    /// Appends header bytes to the file: bytes that are known before tensor data is copied.
    pub fn push_header(&mut self, bytes: impl Into<Arc<Vec<u8>>>) {
        let bytes = bytes.into();
        let offset = self.len;
        self.len += bytes.len() as u64;
        if !bytes.is_empty() {
            self.header_bytes.push(HeaderBytes { offset, bytes });
        }
    }

    /// Reserves `len` bytes of tensor data at the end of the file and returns the offset of these bytes.
    pub fn push_payload(&mut self, len: u64) -> u64 {
        let offset = self.len;
        self.len += len;
        offset
    }

    /// Appends the layout of another file, including its tensor data, and returns the offset in this file at which the
    /// other file starts.
    pub fn append(&mut self, other: &Self) -> u64 {
        let base = self.len;
        self.len += other.len;
        let moved =
            |literal: &HeaderBytes| HeaderBytes { offset: base + literal.offset, bytes: Arc::clone(&literal.bytes) };
        self.header_bytes.extend(other.header_bytes.iter().map(moved));
        self.checksums.extend(other.checksums.iter().map(|sum| ChecksumSpan {
            range: base + sum.range.start..base + sum.range.end,
            crc_offsets: sum.crc_offsets.iter().map(|site| base + site).collect(),
        }));
        base
    }

    /// Returns the checksum range that contains this offset.
    pub fn checksum_at(&self, offset: u64) -> Option<&ChecksumSpan> {
        let next = self.checksums.partition_point(|sum| sum.range.end <= offset);
        self.checksums.get(next).filter(|sum| sum.range.start <= offset)
    }

    /// Returns whether a checksum range contains this offset.
    pub fn is_checksummed(&self, offset: u64) -> bool {
        self.checksum_at(offset).is_some()
    }

    /// Returns the offsets of the CRC-32 values that overlap a byte range, ascending.
    pub fn crc_offsets_in(&self, range: &Range<u64>) -> Vec<u64> {
        let sums = self.checksums.as_slice();
        let most_sites = sums.first().map_or(0, |sum| sum.crc_offsets.len());
        let mut sites: Vec<u64> = Vec::new();
        for nth in 0..most_sites {
            let first = sums.partition_point(|sum| sum.crc_offsets[nth] + CRC_BYTES <= range.start);
            sites.extend(sums[first..].iter().map(|sum| sum.crc_offsets[nth]).take_while(|site| *site < range.end));
        }
        sites.sort_unstable();
        sites
    }
}

impl Reservation {
    /// Estimates the memory in bytes that the reservation needs until the files are written: header bytes (shared bytes
    /// count once), chunk tables, and the plan of the tensor for which the most source tiles are read.
    pub fn planning_bytes(&self, source: &Catalog) -> u64 {
        /// The number of bytes that a chunk table needs for one chunk with two dims: bounds, location and rank.
        const CHUNK_BYTES: u64 = 64;
        /// The number of bytes that the plan needs for one source tile that is read. A tensor is planned as a whole.
        const PLANNED_BYTES: u64 = 1400;
        let mut seen = HashSet::new();
        let literals = self.files.iter().flat_map(|file| &file.header_bytes);
        let distinct = literals.filter(|literal| seen.insert(literal.bytes.as_ptr()));
        let literals: u64 = distinct.map(|literal| literal.bytes.len() as u64).sum();
        let chunks: u64 = self.tensors.iter().map(|tensor| tensor.entry.chunks.len() as u64).sum();
        let planned = self.tensors.iter().map(|tensor| tensor.tiles_read(source.tensor(tensor.source)) as u64);
        literals + chunks * CHUNK_BYTES + planned.max().unwrap_or(0).saturating_mul(PLANNED_BYTES)
    }

    /// Estimates the memory in bytes that checksums need: 4 bytes for each checksum, and further bytes for each pending
    /// checksum. A checksum is pending while some, but not all, of the write blocks with its data or its value are
    /// written. `write_block_bytes` is the size of a write block.
    pub fn pending_checksum_bytes(&self, write_block_bytes: u64) -> u64 {
        /// The number of bytes of a CRC-32 value.
        const VALUE_BYTES: u64 = 4;
        /// The number of further bytes that a pending checksum needs: its range, and the offsets where it is not yet
        /// written. Lists may have twice the needed capacity.
        const WAITING_BYTES: u64 = 2 * (40 + 2 * 24);
        let of_sum = |sum: &ChecksumSpan| {
            let last = sum.crc_offsets.iter().copied().fold(sum.range.end, u64::max);
            let length = last.saturating_sub(sum.range.start);
            // A short range crosses the end of a write block with a probability given by its length. A long range is
            // pending in every write block that it overlaps.
            let per_mille = length.saturating_mul(1000) / write_block_bytes;
            VALUE_BYTES * 1000
                + WAITING_BYTES
                    * per_mille.min(1000 + sum.range.end.saturating_sub(sum.range.start) / write_block_bytes * 1000)
        };
        self.files.iter().flat_map(|file| &file.checksums).map(of_sum).sum::<u64>() / 1000
    }

    /// Appends `other`, the reservation of another part of the checkpoint. The files of `other` are moved into `folder`.
    ///
    /// # Panics
    /// If there are 2^32 files.
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

    /// Returns the number of bytes of tensor data.
    pub fn payload_bytes(&self) -> u64 {
        self.tensors.iter().map(Reserved::payload_bytes).sum()
    }

    /// Returns the number of bytes of all files.
    pub fn len_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.len).sum()
    }
}

impl Reserved {
    /// Makes a target tensor whose chunks get the complete value instead of partial values.
    #[must_use]
    pub fn new(source: TensorId, entry: TensorEntry) -> Self {
        Self { source, entry, shares: Vec::new(), shared: None }
    }

    /// Returns the number of bytes of all chunks of this tensor in the output.
    pub fn payload_bytes(&self) -> u64 {
        (0..self.entry.chunks.len()).map(|index| self.chunk_bytes(index)).sum()
    }

    /// Returns the number of bytes of a chunk.
    pub fn chunk_bytes(&self, index: usize) -> u64 {
        self.entry.chunks.numel(index) * self.dtype().itemsize()
    }

    /// Returns the number of source tiles that are read for all chunks of this tensor: one tile for each chunk, or, if
    /// the source has partial values, one tile for each partial value of each chunk.
    pub fn tiles_read(&self, source: &TensorEntry) -> usize {
        (0..self.entry.chunks.len()).map(|index| self.tiles_read_by_chunk(index, source)).fold(0, usize::saturating_add)
    }

    /// Returns the number of source tiles that are read for one chunk: one tile, or, if the source has partial values,
    /// one tile for each partial value that the chunk needs.
    pub fn tiles_read_by_chunk(&self, index: usize, source: &TensorEntry) -> usize {
        let whole = || source.partial_values.as_ref().map_or(1, |partial| partial.reduction.count());
        let tiles = self.shares.get(index).map_or_else(whole, |share| share.partial_values.len() as u64);
        usize::try_from(tiles).unwrap_or(usize::MAX)
    }

    /// Returns the dtype in which the tensor is written.
    pub fn dtype(&self) -> Dtype {
        self.entry.dtype
    }

    /// Returns the file index and byte offset of a chunk, or `None` for an empty chunk.
    pub fn file_offset(&self, index: usize) -> Option<(u32, u64)> {
        match self.entry.chunks.location(index) {
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
        file.push_header(vec![0; usize::try_from(offset).unwrap()]);
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
    fn append_puts_files_after_existing_files() {
        let mut whole = Reservation::default();
        whole.append(Path::new("model"), part("a", 16));
        whole.append(Path::new(""), part("b", 32));
        let paths: Vec<&Path> = whole.files.iter().map(|file| file.path.as_path()).collect();
        assert_eq!(paths, ["model/a", "model/empty", "b", "empty"].map(Path::new));
        let places: Vec<_> = whole.tensors.iter().map(|tensor| tensor.file_offset(0).unwrap()).collect();
        assert_eq!(places, [(0, 16), (2, 32)]);
        assert_eq!(whole.tensors[1].source, TensorId(3));
        assert_eq!((whole.left_out, whole.notes.len()), (vec!["a object".into(), "b object".into()], 2));
    }
}
