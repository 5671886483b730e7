//! Cuts output files into write blocks, and orders the blocks for the workers.
//!
//! A write block is a contiguous range of one output file, assembled in memory and written by one positional write. It
//! holds tensor data and the header bytes between tensors, so that a file of many small tensors is written with few
//! large writes. A worker fills and writes one write block at a time, a stop request takes effect between two write
//! blocks, and the memory limit determines the length of a write block.
//!
//! Only ranges that are to be written are cut into blocks. Such a range may begin or end within an element: write
//! blocks hold whole elements, and the bytes outside the range are not written.
//!
//! All sizes and offsets are in bytes.

use std::ops::Range;

use super::Extents;
use super::row_groups::{Boundary, OutputRange, RowGroup, boundaries};
use crate::catalog::OutputFile;
use crate::storage::direct::ALIGNMENT;

/// The content of a segment of a write block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SegmentContent {
    /// Header bytes: the bytes at the offsets `bytes` of the item with the index `index` in
    /// [`OutputFile::header_bytes`].
    HeaderBytes { index: usize, bytes: Range<u64> },
    /// Tensor data: the bytes at the offsets `bytes` of the tile with the index `index` in the list of planned tiles.
    Tile { index: usize, bytes: Range<u64> },
}

/// A byte range of a write block whose bytes come from one source: from header bytes, or from a tile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The offset of the segment in the file.
    pub offset: u64,
    /// The bytes to put at this offset.
    pub content: SegmentContent,
}

impl Segment {
    /// Returns the range of the segment in the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len()
    }

    /// Returns the length of the segment in bytes.
    pub fn len(&self) -> u64 {
        match &self.content {
            SegmentContent::HeaderBytes { bytes, .. } | SegmentContent::Tile { bytes, .. } => bytes.end - bytes.start,
        }
    }
}

/// The maximum number of segments in a write block. The limit exists because small tensors would otherwise share one
/// long write block, and only one worker would be busy.
const MAX_SEGMENTS: usize = 1 << 10;

/// A write block: consecutive segments of a file, without gaps between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteBlock {
    /// The number of the output file.
    pub file: u32,
    /// The row group of the block. One worker fills all blocks of a row group.
    pub row_group: Option<RowGroup>,
    /// The byte range of the block in the file.
    pub range: Range<u64>,
    /// The segments, in file order.
    pub segments: Vec<Segment>,
}

impl WriteBlock {
    /// Returns the length of the block in bytes, as the size of a buffer.
    pub fn len(&self) -> usize {
        usize::try_from(self.range.end - self.range.start).expect("a write block fits memory")
    }

    /// Returns the position in the block's buffer of a byte range of the file. The range must be within the block.
    pub fn buffer_range(&self, range: &Range<u64>) -> Range<usize> {
        let within = |offset: u64| usize::try_from(offset - self.range.start).expect("a write block fits memory");
        within(range.start)..within(range.end)
    }
}

/// Cuts output files into write blocks, window by window (a window is a group of tensors that are planned together).
#[derive(Debug)]
pub struct BlockCutter<'a> {
    files: &'a [OutputFile],
    todo: &'a Extents,
    /// For each file, the index of the first header bytes that are in no write block yet.
    next_header: Vec<usize>,
    block_bytes: u64,
    transposed_bytes: u64,
}

impl<'a> BlockCutter<'a> {
    /// Prepares to cut the ranges of `files` that are in `todo`. A write block has at most `block_bytes` bytes, or
    /// `transposed_bytes` bytes if it is one of a transposed view. If one element is longer, the write block has one element.
    #[must_use]
    pub fn new(files: &'a [OutputFile], todo: &'a Extents, block_bytes: u64, transposed_bytes: u64) -> Self {
        Self { files, todo, next_header: vec![0; files.len()], block_bytes, transposed_bytes }
    }

    /// Returns the write blocks of these output ranges and of the header bytes before each range. Bytes that this run
    /// does not write are left out.
    pub fn cut(&mut self, mut output_ranges: Vec<OutputRange>) -> Vec<WriteBlock> {
        output_ranges.sort_unstable_by_key(|output_range| (output_range.file, output_range.offset));
        let boundaries = boundaries(&output_ranges, self.block_bytes, self.transposed_bytes);
        let mut blocks = WriteBlocks::new(self.todo, [self.block_bytes, self.transposed_bytes], boundaries);
        for output_range in output_ranges {
            self.push_headers_before(output_range.file, output_range.offset, &mut blocks);
            blocks.push(output_range.file, output_range.offset, output_range.len, output_range.itemsize, |bytes| {
                SegmentContent::Tile { index: output_range.tile_index, bytes }
            });
        }
        blocks.blocks
    }

    /// Returns the write blocks of all header bytes after the last tensor data.
    pub fn finish(mut self) -> Vec<WriteBlock> {
        let mut blocks = WriteBlocks::new(self.todo, [self.block_bytes, self.transposed_bytes], Vec::new());
        for file in 0..self.files.len() {
            self.push_headers_before(u32::try_from(file).expect("fewer than 2^32 files"), u64::MAX, &mut blocks);
        }
        blocks.blocks
    }

    fn push_headers_before(&mut self, file: u32, offset: u64, blocks: &mut WriteBlocks<'_>) {
        let next = &mut self.next_header[file as usize];
        let headers = &self.files[file as usize].header_bytes;
        while let Some(header) = headers.get(*next).filter(|header| header.offset < offset) {
            let index = *next;
            blocks.push(file, header.offset, header.bytes.len() as u64, 1, |bytes| SegmentContent::HeaderBytes {
                index,
                bytes,
            });
            *next += 1;
        }
    }
}

struct WriteBlocks<'a> {
    todo: &'a Extents,
    blocks: Vec<WriteBlock>,
    /// The maximum sizes of a write block, and of one of a transposed view.
    capacities: [u64; 2],
    /// The positions at which a write block has to begin, in file order.
    boundaries: Vec<Boundary>,
    /// The number of boundaries before the current position.
    passed: usize,
}

impl<'a> WriteBlocks<'a> {
    fn new(todo: &'a Extents, capacities: [u64; 2], boundaries: Vec<Boundary>) -> Self {
        Self { todo, blocks: Vec::new(), capacities, boundaries, passed: 0 }
    }

    /// Adds the subranges of a file range that are to be written. Each subrange is extended to complete elements.
    fn push(
        &mut self,
        file: u32,
        offset: u64,
        len: u64,
        itemsize: u64,
        content: impl Fn(Range<u64>) -> SegmentContent,
    ) {
        let mut pushed = 0;
        for todo in self.todo.within(file, offset..offset + len) {
            // The element that contains the end of the previous range has already been added.
            let start = pushed.max((todo.start - offset) / itemsize * itemsize);
            let end = (todo.end - offset).next_multiple_of(itemsize).min(len);
            if start < end {
                self.push_elements(file, offset, start..end, itemsize, &content);
                pushed = end;
            }
        }
    }

    /// Adds the range `bytes` of a content that starts at `offset`. The range is added to the current block if it
    /// begins at the end of that block. A new block starts if the current block is full, and at each boundary.
    fn push_elements(
        &mut self,
        file: u32,
        offset: u64,
        bytes: Range<u64>,
        itemsize: u64,
        content: &impl Fn(Range<u64>) -> SegmentContent,
    ) {
        let (mut done, len) = (bytes.start, bytes.end);
        while done < len {
            let at = offset + done;
            let (row_group, until) = self.row_group_at(file, at);
            let capacity = self.capacities[usize::from(self.is_transposed(file))];
            let is_boundary = self.is_at_boundary(file, at);
            let fits = (self.blocks.last())
                .filter(|block| block.file == file && block.range.end == at && block.row_group == row_group)
                .filter(|_| !is_boundary)
                .map_or(0, |block| remaining_capacity(block, capacity));
            // The bytes up to the next boundary, or up to the end of the element that contains the boundary.
            let rest = len - done;
            let rest = if until - at < rest { (until - at).next_multiple_of(itemsize).min(rest) } else { rest };
            let mut take = fitting(at, rest, fits, itemsize);
            if take == 0 {
                self.blocks.push(WriteBlock { file, row_group, range: at..at, segments: Vec::new() });
                take = fitting(at, rest, capacity, itemsize).max(itemsize.min(rest));
            }
            let block = self.blocks.last_mut().expect("just pushed or found");
            block.segments.push(Segment { offset: at, content: content(done..done + take) });
            block.range.end += take;
            done += take;
        }
    }

    /// Returns whether the boundary of a file that was passed last begins write blocks of a transposed view.
    fn is_transposed(&self, file: u32) -> bool {
        let last = self.passed.checked_sub(1).and_then(|last| self.boundaries.get(last));
        last.is_some_and(|boundary| boundary.file == file && boundary.is_transposed)
    }

    /// Returns whether the boundary that was passed last is the offset `at` of a file.
    fn is_at_boundary(&self, file: u32, at: u64) -> bool {
        let last = self.passed.checked_sub(1).and_then(|last| self.boundaries.get(last));
        last.is_some_and(|boundary| (boundary.file, boundary.offset) == (file, at))
    }

    /// Returns the row group at the offset `at` of a file, and the offset at which the next write block has to begin.
    /// Calls must be in ascending order of file and offset.
    fn row_group_at(&mut self, file: u32, at: u64) -> (Option<RowGroup>, u64) {
        while self.boundaries.get(self.passed).is_some_and(|boundary| (boundary.file, boundary.offset) <= (file, at)) {
            self.passed += 1;
        }
        let here = |boundary: &&Boundary| boundary.file == file;
        let last = self.passed.checked_sub(1).and_then(|last| self.boundaries.get(last)).filter(here);
        let next = self.boundaries.get(self.passed).filter(here);
        (last.and_then(|boundary| boundary.row_group), next.map_or(u64::MAX, |boundary| boundary.offset))
    }
}

/// Returns the number of bytes that can still be added to a write block, which has at most `capacity` bytes. A block that already
/// has the maximum number of segments takes only the bytes up to the next file block boundary (a multiple of [`ALIGNMENT`]).
fn remaining_capacity(block: &WriteBlock, capacity: u64) -> u64 {
    let end = block.range.end;
    let left = capacity.saturating_sub(end - block.range.start);
    if block.segments.len() < MAX_SEGMENTS { left } else { left.min(end.next_multiple_of(ALIGNMENT) - end) }
}

/// Returns how many of the next `rest` bytes of a file, starting at offset `at`, are put into a write block that can
/// take `fits` bytes.
///
/// If not all fit, the result reaches to the last file block boundary (a multiple of [`ALIGNMENT`]) within reach, so
/// that neighbouring write blocks do not share a file block. If no boundary is within reach, or an element crosses the
/// boundary, the result is the length of all complete elements that fit. The result is 0 if `at` is itself the last
/// boundary within reach; the write block then ends at `at`.
fn fitting(at: u64, rest: u64, fits: u64, itemsize: u64) -> u64 {
    if fits >= rest {
        return rest;
    }
    let to_boundary = ((at + fits) / ALIGNMENT * ALIGNMENT).checked_sub(at);
    to_boundary.filter(|len| len.is_multiple_of(itemsize)).unwrap_or(fits - fits % itemsize)
}

/// Sorts write blocks into the order of work, and returns them in groups. One worker fills the blocks of a group one
/// after the other. A write block that is in no row group is a group of its own.
pub fn sort_into_row_groups(blocks: &mut [WriteBlock]) -> Vec<&[WriteBlock]> {
    blocks.sort_by_key(|block| block.row_group);
    blocks.chunk_by(|one, other| one.row_group.is_some() && one.row_group == other.row_group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a file with these byte ranges one after the other: header (10 bytes), tensor a (100), header bytes (5),
    /// tensor b (16) and header bytes (3).
    fn file() -> OutputFile {
        let mut file = OutputFile::new("f");
        file.push_header(vec![1; 10]);
        file.push_payload(100);
        file.push_header(vec![2; 5]);
        file.push_payload(16);
        file.push_header(vec![3; 3]);
        file
    }

    fn output_ranges() -> Vec<OutputRange> {
        vec![
            OutputRange {
                file: 0,
                offset: 115,
                len: 16,
                tile_index: 1,
                itemsize: 8,
                transposed_row: None,
                group: None,
            },
            OutputRange {
                file: 0,
                offset: 10,
                len: 100,
                tile_index: 0,
                itemsize: 4,
                transposed_row: None,
                group: None,
            },
        ]
    }

    #[test]
    fn blocks_cover_the_file_once_and_in_order() {
        for block_bytes in [1, 7, 16, 64, 1000] {
            let files = [file()];
            let todo = Extents::of_files(&files);
            let mut cutter = BlockCutter::new(&files, &todo, block_bytes, block_bytes);
            let mut blocks = cutter.cut(output_ranges());
            blocks.extend(cutter.finish());
            let mut end = 0;
            for block in &blocks {
                assert_eq!(block.range.start, end);
                assert!(block.range.end - block.range.start <= block_bytes.max(8), "{block:?}");
                for segment in &block.segments {
                    assert_eq!(segment.offset, end);
                    end += segment.len();
                    if let SegmentContent::Tile { index, bytes } = &segment.content {
                        assert_eq!(bytes.start % [4, 8][*index], 0);
                    }
                }
                assert_eq!(block.range.end, end);
            }
            assert_eq!(end, files[0].len);
        }
    }

    #[test]
    fn write_blocks_end_at_file_block_boundaries() {
        let mut file = OutputFile::new("f");
        file.push_header(vec![1; 1000]);
        file.push_payload(1_000_000);
        file.push_header(vec![2; 24]);
        file.push_payload(500_000);
        let len = file.len;
        let files = [file];
        let todo = Extents::of_files(&files);
        let mut cutter = BlockCutter::new(&files, &todo, 16_384, 65_536);
        let output_range = |offset, len| OutputRange {
            file: 0,
            offset,
            len,
            tile_index: 0,
            itemsize: 2,
            transposed_row: None,
            group: None,
        };
        // The second window begins where the first window ended, which is not a file block boundary.
        let mut blocks = cutter.cut(vec![output_range(1000, 1_000_000)]);
        blocks.extend(cutter.cut(vec![output_range(1_001_024, 500_000)]));
        let ragged = blocks.iter().filter(|block| !block.range.end.is_multiple_of(ALIGNMENT));
        let ends: Vec<u64> = ragged.map(|block| block.range.end).collect();
        assert_eq!(ends, [1_001_000, len]);
        assert!(blocks.iter().all(|block| block.len() <= 65_536));
    }

    #[test]
    fn write_blocks_of_a_transposed_view_have_complete_rows() {
        let mut file = OutputFile::new("f");
        file.push_header(vec![1; 1000]);
        file.push_payload(1_000_000);
        file.push_header(vec![2; 24]);
        let (len, files) = (file.len, [file]);
        let todo = Extents::of_files(&files);
        let of_rows = |row| {
            let range = OutputRange {
                file: 0,
                offset: 1000,
                len: 1_000_000,
                tile_index: 0,
                itemsize: 2,
                transposed_row: Some(row),
                group: None,
            };
            let mut cutter = BlockCutter::new(&files, &todo, 16_384, 65_536);
            let mut blocks = cutter.cut(vec![range]);
            blocks.extend(cutter.finish());
            blocks
        };
        let blocks = of_rows(2000);
        let starts: Vec<u64> = blocks.iter().map(|block| block.range.start).collect();
        let expected: Vec<u64> = (0..16).map(|block| 1000 + block * 64_000).collect();
        assert_eq!((starts[0], &starts[1..17], starts[17]), (0, expected.as_slice(), 1_001_000));
        assert_eq!(blocks.last().map(|block| block.range.end), Some(len));
        // A row that is longer than a write block is cut at file block boundaries.
        let blocks = of_rows(100_000);
        assert!(blocks[1..blocks.len() - 1].iter().all(|block| block.range.start % ALIGNMENT == 0));
    }

    #[test]
    fn window_of_small_tensors_has_blocks_for_several_workers() {
        let mut file = OutputFile::new("f");
        file.push_header(vec![1; 1000]);
        let offsets: Vec<u64> = (0..4096).map(|_| file.push_payload(1024)).collect();
        let (len, files) = (file.len, [file]);
        let todo = Extents::of_files(&files);
        let output_range = |offset| OutputRange {
            file: 0,
            offset,
            len: 1024,
            tile_index: 0,
            itemsize: 2,
            transposed_row: None,
            group: None,
        };
        let blocks =
            BlockCutter::new(&files, &todo, 4 << 20, 16 << 20).cut(offsets.into_iter().map(output_range).collect());
        assert_eq!(blocks.len(), 5);
        assert!(blocks.iter().all(|block| block.segments.len() <= MAX_SEGMENTS + 4));
        // The blocks of both windows still meet at file block boundaries.
        let ends: Vec<u64> = blocks.iter().map(|block| block.range.end).collect();
        assert!(ends[..4].iter().all(|end| end.is_multiple_of(ALIGNMENT)) && ends[4] == len, "{ends:?}");
    }

    #[test]
    fn element_with_two_ranges_to_write_is_in_one_block() {
        let files = [file()];
        let mut todo = Extents::new();
        [10..11, 13..20, 21..22].into_iter().for_each(|part| todo.insert(0, part));
        let blocks = BlockCutter::new(&files, &todo, 32, 32).cut(output_ranges());
        let ranges: Vec<_> = blocks.iter().map(|block| block.range.clone()).collect();
        assert_eq!(ranges, vec![10..22]);
    }

    #[test]
    fn windows_in_another_order_cover_the_file() {
        let files = [file()];
        let todo = Extents::of_files(&files);
        let mut cutter = BlockCutter::new(&files, &todo, 32, 32);
        let [second, first] = output_ranges().try_into().unwrap();
        let mut blocks = cutter.cut(vec![second]);
        blocks.extend(cutter.cut(vec![first]));
        blocks.extend(cutter.finish());
        let total: u64 = blocks.iter().map(|block| block.range.end - block.range.start).sum();
        assert_eq!(total, files[0].len);
    }
}
