//! Cutting output files into destination strips, and the order in which those are filled.
//!
//! A strip is a contiguous stretch of one output file, assembled in memory and written by one positional write. It
//! holds parts of tensors and the literals between them, so files of many small tensors are written in large pieces
//! too. Strips are the unit of work, of the memory bound and of interruption.
//!
//! Only what is to be done is cut. That may begin or end within an element: strips hold whole elements, and what is
//! beyond is not written.
//!
//! All units are bytes.

use std::ops::Range;

use super::Extents;
use super::row_groups::{Band, Cut, OutputRange, cuts};
use crate::catalog::OutputFile;
use crate::storage::direct::ALIGNMENT;

/// What a segment of a strip holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SegmentContent {
    /// `bytes` of literal `literal` of the file.
    Literal { literal: usize, bytes: Range<u64> },
    /// `bytes` of the tile prepared as `slot`.
    Payload { slot: usize, bytes: Range<u64> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Offset in the file.
    pub offset: u64,
    pub content: SegmentContent,
}

impl Segment {
    /// Where it goes in the file.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len()
    }

    #[must_use]
    pub fn len(&self) -> u64 {
        match &self.content {
            SegmentContent::Literal { bytes, .. } | SegmentContent::Payload { bytes, .. } => bytes.end - bytes.start,
        }
    }
}

/// Segments of a strip, so that a window of tensors that are small has strips for several workers.
const MOST_SEGMENTS: usize = 1 << 10;

/// Consecutive segments without a hole between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteBlock {
    pub file: u32,
    /// What it is to be filled with.
    pub band: Option<Band>,
    pub range: Range<u64>,
    pub segments: Vec<Segment>,
}

impl WriteBlock {
    /// Bytes, as the size of a buffer.
    #[must_use]
    pub fn len(&self) -> usize {
        usize::try_from(self.range.end - self.range.start).expect("a strip fits memory")
    }

    /// Where this range of the file, which is within the strip, lies in its buffer.
    #[must_use]
    pub fn place(&self, range: &Range<u64>) -> Range<usize> {
        let within = |offset: u64| usize::try_from(offset - self.range.start).expect("a strip fits memory");
        within(range.start)..within(range.end)
    }
}

/// Cuts strips, window by window; remembers which literals are already in one.
#[derive(Debug)]
pub struct Cutter<'a> {
    files: &'a [OutputFile],
    todo: &'a Extents,
    /// For each file the first literal that is in no strip yet.
    next_literal: Vec<usize>,
    strip_bytes: u64,
}

impl<'a> Cutter<'a> {
    #[must_use]
    pub fn new(files: &'a [OutputFile], todo: &'a Extents, strip_bytes: u64) -> Self {
        Self { files, todo, next_literal: vec![0; files.len()], strip_bytes }
    }

    /// The strips of these payloads, with the literals before each of them.
    #[must_use]
    pub fn cut(&mut self, mut payloads: Vec<OutputRange>) -> Vec<WriteBlock> {
        payloads.sort_unstable_by_key(|payload| (payload.file, payload.offset));
        let mut strips = WriteBlocks::new(self.todo, self.strip_bytes, cuts(&payloads, self.strip_bytes));
        for payload in payloads {
            self.literals_before(payload.file, payload.offset, &mut strips);
            strips.push(payload.file, payload.offset, payload.len, payload.itemsize, |bytes| SegmentContent::Payload {
                slot: payload.slot,
                bytes,
            });
        }
        strips.done
    }

    /// The strips of all literals that no payload came after.
    #[must_use]
    pub fn finish(mut self) -> Vec<WriteBlock> {
        let mut strips = WriteBlocks::new(self.todo, self.strip_bytes, Vec::new());
        for file in 0..self.files.len() {
            self.literals_before(u32::try_from(file).expect("fewer than 2^32 files"), u64::MAX, &mut strips);
        }
        strips.done
    }

    fn literals_before(&mut self, file: u32, offset: u64, strips: &mut WriteBlocks<'_>) {
        let next = &mut self.next_literal[file as usize];
        let literals = &self.files[file as usize].literals;
        while let Some(literal) = literals.get(*next).filter(|literal| literal.offset < offset) {
            let index = *next;
            strips.push(file, literal.offset, literal.bytes.len() as u64, 1, |bytes| SegmentContent::Literal {
                literal: index,
                bytes,
            });
            *next += 1;
        }
    }
}

struct WriteBlocks<'a> {
    todo: &'a Extents,
    done: Vec<WriteBlock>,
    capacity: u64,
    /// In file order.
    cuts: Vec<Cut>,
    /// Cuts that were passed.
    passed: usize,
}

impl<'a> WriteBlocks<'a> {
    fn new(todo: &'a Extents, capacity: u64, cuts: Vec<Cut>) -> Self {
        Self { todo, done: Vec::new(), capacity, cuts, passed: 0 }
    }

    /// Add what is to be done of a stretch of a file, in whole elements.
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
            // The element in which the stretch before has ended is there.
            let start = pushed.max((todo.start - offset) / itemsize * itemsize);
            let end = (todo.end - offset).next_multiple_of(itemsize).min(len);
            if start < end {
                self.push_elements(file, offset, start..end, itemsize, &content);
                pushed = end;
            }
        }
    }

    /// Add these bytes of what lies at `offset`, to the current strip where they go on there, cut where a strip is full or
    /// has to begin.
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
            let (band, until) = self.pass(file, at);
            let fits = (self.done.last())
                .filter(|strip| strip.file == file && strip.range.end == at && strip.band == band)
                .map_or(0, |strip| self.room_in(strip));
            // Up to the next cut, or the end of the element that it is in.
            let rest = len - done;
            let rest = if until - at < rest { (until - at).next_multiple_of(itemsize).min(rest) } else { rest };
            let mut take = cut(at, rest, fits, itemsize);
            if take == 0 {
                self.done.push(WriteBlock { file, band, range: at..at, segments: Vec::new() });
                take = cut(at, rest, self.capacity, itemsize).max(itemsize.min(rest));
            }
            let strip = self.done.last_mut().expect("just pushed or found");
            strip.segments.push(Segment { offset: at, content: content(done..done + take) });
            strip.range.end += take;
            done += take;
        }
    }

    /// Bytes that still go into a strip: one of many small parts is as long as it is, up to the next boundary of blocks.
    fn room_in(&self, strip: &WriteBlock) -> u64 {
        let end = strip.range.end;
        let left = self.capacity.saturating_sub(end - strip.range.start);
        if strip.segments.len() < MOST_SEGMENTS { left } else { left.min(end.next_multiple_of(ALIGNMENT) - end) }
    }

    /// The band at `at`, and where it ends. Who asks goes through the files in order.
    fn pass(&mut self, file: u32, at: u64) -> (Option<Band>, u64) {
        while self.cuts.get(self.passed).is_some_and(|cut| (cut.file, cut.offset) <= (file, at)) {
            self.passed += 1;
        }
        let here = |cut: &&Cut| cut.file == file;
        let last = self.passed.checked_sub(1).and_then(|last| self.cuts.get(last)).filter(here);
        let next = self.cuts.get(self.passed).filter(here);
        (last.and_then(|cut| cut.band), next.map_or(u64::MAX, |cut| cut.offset))
    }
}

/// How much of the next `rest` bytes from `at` fits: all of it, or as far as a boundary of blocks, so that neighbouring
/// strips are written without touching the same block, or as far as an element's end where none of those is a boundary.
/// Nothing fits where `at` is the last boundary within reach: the strip ends there, short of what it could hold.
fn cut(at: u64, rest: u64, fits: u64, itemsize: u64) -> u64 {
    if fits >= rest {
        return rest;
    }
    let to_boundary = ((at + fits) / ALIGNMENT * ALIGNMENT).checked_sub(at);
    to_boundary.filter(|len| len.is_multiple_of(itemsize)).unwrap_or(fits - fits % itemsize)
}

/// Put strips into the order of work, and give what is done in one go.
pub fn order(strips: &mut [WriteBlock]) -> Vec<&[WriteBlock]> {
    strips.sort_by_key(|strip| strip.band);
    strips.chunk_by(|one, other| one.band.is_some() && one.band == other.band).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// header (10) | a (100) | frame (5) | b (16) | tail (3)
    fn file() -> OutputFile {
        let mut file = OutputFile::new("f");
        file.push_literal(vec![1; 10]);
        file.push_payload(100);
        file.push_literal(vec![2; 5]);
        file.push_payload(16);
        file.push_literal(vec![3; 3]);
        file
    }

    fn payloads() -> Vec<OutputRange> {
        vec![
            OutputRange { file: 0, offset: 115, len: 16, slot: 1, itemsize: 8, group: None },
            OutputRange { file: 0, offset: 10, len: 100, slot: 0, itemsize: 4, group: None },
        ]
    }

    #[test]
    fn strips_cover_the_file_once_and_in_order() {
        for strip_bytes in [1, 7, 16, 64, 1000] {
            let files = [file()];
            let todo = Extents::of_files(&files);
            let mut cutter = Cutter::new(&files, &todo, strip_bytes);
            let mut strips = cutter.cut(payloads());
            strips.extend(cutter.finish());
            let mut end = 0;
            for strip in &strips {
                assert_eq!(strip.range.start, end);
                assert!(strip.range.end - strip.range.start <= strip_bytes.max(8), "{strip:?}");
                for segment in &strip.segments {
                    assert_eq!(segment.offset, end);
                    end += segment.len();
                    if let SegmentContent::Payload { slot, bytes } = &segment.content {
                        assert_eq!(bytes.start % [4, 8][*slot], 0);
                    }
                }
                assert_eq!(strip.range.end, end);
            }
            assert_eq!(end, files[0].len);
        }
    }

    #[test]
    fn strips_end_where_blocks_do_wherever_the_first_begins() {
        let mut file = OutputFile::new("f");
        file.push_literal(vec![1; 1000]);
        file.push_payload(1_000_000);
        file.push_literal(vec![2; 24]);
        file.push_payload(500_000);
        let len = file.len;
        let files = [file];
        let todo = Extents::of_files(&files);
        let mut cutter = Cutter::new(&files, &todo, 65_536);
        let payload = |offset, len| OutputRange { file: 0, offset, len, slot: 0, itemsize: 2, group: None };
        // A window begins where the one before it ended, which is at no boundary.
        let mut strips = cutter.cut(vec![payload(1000, 1_000_000)]);
        strips.extend(cutter.cut(vec![payload(1_001_024, 500_000)]));
        let ragged = strips.iter().filter(|strip| !strip.range.end.is_multiple_of(ALIGNMENT));
        let ends: Vec<u64> = ragged.map(|strip| strip.range.end).collect();
        assert_eq!(ends, [1_001_000, len]);
        assert!(strips.iter().all(|strip| strip.len() <= 65_536));
    }

    #[test]
    fn a_window_of_small_tensors_has_strips_for_several_workers() {
        let mut file = OutputFile::new("f");
        file.push_literal(vec![1; 1000]);
        let offsets: Vec<u64> = (0..4096).map(|_| file.push_payload(1024)).collect();
        let (len, files) = (file.len, [file]);
        let todo = Extents::of_files(&files);
        let payload = |offset| OutputRange { file: 0, offset, len: 1024, slot: 0, itemsize: 2, group: None };
        let strips = Cutter::new(&files, &todo, 4 << 20).cut(offsets.into_iter().map(payload).collect());
        assert_eq!(strips.len(), 5);
        assert!(strips.iter().all(|strip| strip.segments.len() <= MOST_SEGMENTS + 4));
        // Still they meet where blocks do.
        let ends: Vec<u64> = strips.iter().map(|strip| strip.range.end).collect();
        assert!(ends[..4].iter().all(|end| end.is_multiple_of(ALIGNMENT)) && ends[4] == len, "{ends:?}");
    }

    #[test]
    fn an_element_of_which_two_parts_are_to_be_done_is_in_one_strip() {
        let files = [file()];
        let mut todo = Extents::new();
        [10..11, 13..20, 21..22].into_iter().for_each(|part| todo.insert(0, part));
        let strips = Cutter::new(&files, &todo, 32).cut(payloads());
        let ranges: Vec<_> = strips.iter().map(|strip| strip.range.clone()).collect();
        assert_eq!(ranges, vec![10..22]);
    }

    #[test]
    fn windows_in_another_order_lose_nothing() {
        let files = [file()];
        let todo = Extents::of_files(&files);
        let mut cutter = Cutter::new(&files, &todo, 32);
        let [second, first] = payloads().try_into().unwrap();
        let mut strips = cutter.cut(vec![second]);
        strips.extend(cutter.cut(vec![first]));
        strips.extend(cutter.finish());
        let total: u64 = strips.iter().map(|strip| strip.range.end - strip.range.start).sum();
        assert_eq!(total, files[0].len);
    }
}
