//! A block of source bytes that a worker reads once and copies from many times.
//!
//! All sizes and offsets are in bytes. If the write blocks of a [row group](super::row_groups) need short runs of the
//! same rows, the worker first reads all needed ranges into the source block, then fills each write block from the
//! source block. A range that is not in the source block is read directly, so the result does not depend on the content
//! of the source block. Invariant: `bytes` contains the bytes of `ranges` in the order of this list and without gaps,
//! and is at most [`BLOCK_BYTES`] long.

use std::collections::HashMap;
use std::sync::Arc;

use super::computed::ComputedSource;
use super::{BLOCK_BYTES, Input, sized_buffer};
use crate::error::Result;
use crate::storage::{FileId, FileRange};

/// The largest gap, in bytes, between two ranges that are read by one call. Reading such a gap takes no extra time,
/// because a disk block is at least this long.
const GAP_BYTES: u64 = 4 << 10;

/// Source bytes in memory, and the file ranges from which they were read.
#[derive(Debug, Default)]
pub struct SourceBlock {
    bytes: Vec<u8>,
    ranges: Vec<FileRange>,
}

impl SourceBlock {
    /// Reads as many of the wanted ranges as fit into the block.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn load(&mut self, input: Input<'_>, wanted: WantedRanges) -> Result<()> {
        self.ranges.clear();
        let mut bytes_left = BLOCK_BYTES;
        let mut fits = |range: &FileRange| {
            let left = bytes_left.checked_sub(range.len);
            bytes_left = left.unwrap_or(bytes_left);
            left.is_some()
        };
        let (ranges, computed) = wanted.merged();
        let ranges: Vec<FileRange> = ranges.into_iter().filter(|range| fits(range)).collect();
        let mut rest = sized_buffer(&mut self.bytes, as_size(ranges.iter().map(|range| range.len).sum()));
        for range in &ranges {
            let (target, after) = rest.split_at_mut(as_size(range.len));
            match computed.get(&range.file) {
                Some(computed) => computed.read(input, range.offset, target)?,
                None => input.files.open(range.file)?.read_exact_at(target, range.offset)?,
            }
            rest = after;
        }
        self.ranges = ranges;
        Ok(())
    }

    /// Returns the bytes of a range, or `None` if the block does not contain the complete range.
    pub fn get(&self, range: FileRange) -> Option<&[u8]> {
        let mut start = 0;
        for loaded in &self.ranges {
            if loaded.file == range.file && loaded.offset <= range.offset {
                let within = range.offset - loaded.offset;
                if within + range.len <= loaded.len {
                    return Some(&self.bytes[as_size(start + within)..][..as_size(range.len)]);
                }
            }
            start += loaded.len;
        }
        None
    }

    /// Returns `len` bytes of the buffer for another use; the block contains no range afterwards.
    pub fn reuse(&mut self, len: u64) -> &mut [u8] {
        self.ranges.clear();
        sized_buffer(&mut self.bytes, as_size(len))
    }

    /// Returns the number of bytes that the block has allocated.
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }
}

/// The byte ranges of the source that the write blocks of a row group need.
#[derive(Debug, Default)]
pub struct WantedRanges {
    ranges: Vec<FileRange>,
    /// How the bytes of computed files are computed.
    computed: HashMap<FileId, Arc<ComputedSource>>,
}

impl WantedRanges {
    /// Adds a range. Nearly all ranges that a write block needs are added in the order of their source bytes and are
    /// merged, so the list stays short.
    pub fn add(&mut self, next: FileRange, computed: Option<&Arc<ComputedSource>>) {
        if !self.ranges.last_mut().is_some_and(|last| merge(last, &next)) {
            self.ranges.push(next);
            self.computed.extend(computed.map(|computed| (next.file, Arc::clone(computed))));
        }
    }

    /// Returns the ranges in file order, and the computed files. Ranges with a small gap between them are merged.
    fn merged(mut self) -> (Vec<FileRange>, HashMap<FileId, Arc<ComputedSource>>) {
        self.ranges.sort_unstable_by_key(|range| (range.file, range.offset));
        self.ranges.dedup_by(|next, last| merge(last, next));
        (self.ranges, self.computed)
    }
}

/// Merges `next` into `last` if the gap between them is small. Returns true if they were merged. `next` must not begin
/// before `last`.
fn merge(last: &mut FileRange, next: &FileRange) -> bool {
    let end = last.offset + last.len;
    let joins = last.file == next.file && last.offset <= next.offset && next.offset <= end + GAP_BYTES;
    if joins {
        last.len = end.max(next.offset + next.len) - last.offset;
    }
    joins
}

fn as_size(bytes: u64) -> usize {
    usize::try_from(bytes).expect("bounded by the size of a block")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Catalog, StridedLocation, TensorEntry};
    use crate::storage::{Files, IoMode};

    #[test]
    fn wanted_ranges_are_read_once_as_far_as_they_fit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let content: Vec<u8> = (0..3_000_000_u32).flat_map(|n| u8::try_from(n % 251)).collect();
        std::fs::write(&path, &content).unwrap();
        let mut files = Files::new(IoMode::Read);
        let file = files.add(&path).unwrap();
        let range = |offset, len| FileRange { file, offset, len };
        let mut block = SourceBlock::default();
        let mut wanted = WantedRanges::default();
        let ranges = [range(20_000, 10), range(5, 100), range(50, 200), range(100_000, 2 << 20)];
        ranges.into_iter().for_each(|range| wanted.add(range, None));
        let catalog = Catalog::empty();
        let resolve = |_: &Files, _: &TensorEntry, _: u32| -> Result<StridedLocation> { unreachable!("no tensor") };
        block.load(Input { files: &files, catalog: &catalog, resolve: &resolve }, wanted).unwrap();
        assert_eq!(block.ranges, [range(5, 245), range(20_000, 10)]);
        assert_eq!(block.get(range(60, 190)).unwrap(), &content[60..250]);
        assert_eq!(block.get(range(20_001, 9)).unwrap(), &content[20_001..20_010]);
        assert_eq!(files.bytes_read(), 255);
        for beyond in [range(0, 6), range(240, 11), range(20_001, 10), range(100_000, 1)] {
            assert_eq!(block.get(beyond), None);
        }
        block.reuse(3);
        assert_eq!(block.get(range(60, 1)), None);
    }
}
