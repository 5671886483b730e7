//! Frames: the bytes of an archive that determine the location of one of the archive's zip records.
//!
//! A DCP data file is a sequence of archives that have nearly equal bytes, except for tensor data. Locating the tensor
//! in each of a million archives takes a million reads of a directory and a pickle. Archives with equal frames have
//! their tensor data at the same offset. So the directory and the pickle are read only in the first archive with a
//! frame. In a later archive, the tensor is located by comparing the archive with the frame.
//!
//! A frame contains everything that the reader looked at: the directory, the zip records that were read, and the local
//! header of the located zip record. Of the CRC-32s in the directory, only the CRC-32s of the zip records that were
//! read belong to the frame. The CRC-32 of the located zip record is returned with its location, and the CRC-32s of the
//! other zip records are ignored.
//!
//! Offsets are in bytes from the start of the archive. Invariant: an archive with the frame has the same reading result
//! as the archive from which the frame was made, except for the CRC-32 of the located zip record.

use std::ops::Range;

use super::Archive;
use super::error::ArchiveError;
use super::read::Record;
use crate::ReadAt;

/// The bytes of an archive that determine the location of one zip record, the *located zip record*. Archives with equal
/// frames have this zip record at the same offset.
#[derive(Debug)]
pub struct Frame {
    /// The length of the archive in bytes.
    len: u64,
    /// All bytes of the archive before the data of the located zip record.
    head: End,
    /// The last bytes of the archive, from the directory on. If the reader also read bytes between the located zip
    /// record and the directory, the tail starts earlier and contains these bytes.
    tail: End,
    /// The offset, in the archive, of the directory field with the CRC-32 of the located zip record.
    crc_at: u64,
    /// The offset of the local header of the located zip record. The next field is the byte range of the data of this
    /// zip record.
    header: u64,
    data: Range<u64>,
}

/// The first or the last bytes of an archive: its head or its tail.
#[derive(Debug)]
struct End {
    /// The offset of the first byte of `bytes` in the archive.
    at: u64,
    bytes: Vec<u8>,
    /// The ranges of `bytes` that belong to the frame. Bytes outside these ranges may differ between archives with this
    /// frame.
    fixed: Vec<Range<usize>>,
}

/// The maximum length of a head or tail in bytes. An archive with a longer head or tail gets no frame, because its
/// frame would take too much memory.
const MAX_END_BYTES: u64 = 4 << 10;

/// The maximum length, in bytes, of an archive that is looked up as one range of a mapped file. If an archive is
/// longer, only its head and its tail are read.
const SMALL_BYTES: u64 = 64 << 10;

/// The length in bytes of a directory entry, without its name, extra field and comment (APPNOTE.TXT 4.3.12).
const ENTRY_BYTES: usize = 46;

/// The length in bytes of the end record of an archive, without a comment (APPNOTE.TXT 4.3.16).
const END_BYTES: usize = 22;

impl Frame {
    /// Returns the frame of the archive in the bytes `range` of a source. `read` has the names of the zip records whose
    /// content the reader read. `located` is the name of the zip record whose offset the frame determines. Returns
    /// `None` for an archive with an unusual structure, because frames are only an optimisation.
    ///
    /// # Errors
    /// `Io`.
    pub fn of<S: ReadAt + ?Sized>(
        source: &S,
        range: Range<u64>,
        archive: &Archive,
        read: &[&str],
        located: &str,
    ) -> Result<Option<Self>, ArchiveError> {
        let Some((data, record)) = archive.locate(source, located)? else { return Ok(None) };
        let (base, len) = (range.start, range.end - range.start);
        let data = data - base..data - base + record.len;
        let header = record.header - base;
        let (mut looked_at, mut headers) = (Vec::new(), Vec::new());
        looked_at.push(header..data.start);
        for name in read {
            if let Some((start, read)) = archive.locate(source, name)? {
                headers.push(read.header - base);
                looked_at.push(read.header - base..start - base + read.len);
            }
        }
        looked_at.sort_unstable_by_key(|range| range.start);
        let Some(directory) = archive.directory().checked_sub(base).filter(|at| *at >= data.end) else {
            return Ok(None);
        };
        let after = looked_at.iter().find(|range| range.start >= data.end).map_or(directory, |range| range.start);
        if data.start > MAX_END_BYTES || after > len || len - after > MAX_END_BYTES {
            return Ok(None);
        }
        let end = |range: Range<u64>| -> Result<End, ArchiveError> {
            let mut bytes = vec![0; usize::try_from(range.end - range.start).expect("a short end")];
            source.read_exact_at(&mut bytes, base + range.start)?;
            Ok(End { at: range.start, bytes, fixed: Vec::new() })
        };
        let (mut head, mut tail) = (end(0..data.start)?, end(after..len)?);
        for range in looked_at {
            let end = if range.end <= data.start { &mut head } else { &mut tail };
            let Some(range) = end.within(&range) else { return Ok(None) };
            end.fixed.push(range);
        }
        if !tail.names(directory) {
            return Ok(None);
        }
        let Some(crc_at) = tail.fix_directory(directory, header, &headers) else { return Ok(None) };
        Ok(Some(Self { len, head, tail, crc_at, header, data }))
    }

    /// Compares the archive in the bytes `range` of a source with this frame. If the archive has this frame, returns
    /// its located zip record, and the offset of the data of this zip record in the source; otherwise returns `None`.
    /// `buffer` is memory that calls can reuse.
    ///
    /// # Errors
    /// `Io`.
    pub fn find<S: ReadAt + ?Sized>(
        &self,
        source: &S,
        range: Range<u64>,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<(u64, Record)>, ArchiveError> {
        if range.end.checked_sub(range.start) != Some(self.len) {
            return Ok(None);
        }
        let base = range.start;
        if self.len <= SMALL_BYTES {
            let ends = |archive: &[u8]| self.record(base, self.head.part_of(archive), self.tail.part_of(archive));
            if let Some(record) = source.mapped(base, self.len, ends)? {
                return Ok(record);
            }
        }
        buffer.resize(self.head.bytes.len() + self.tail.bytes.len(), 0);
        let (head, tail) = buffer.split_at_mut(self.head.bytes.len());
        source.read_exact_at(head, base + self.head.at)?;
        source.read_exact_at(tail, base + self.tail.at)?;
        Ok(self.record(base, head, tail))
    }

    /// Compares the archive that starts at `base` with this frame. `head` and `tail` are the first and the last bytes
    /// of this archive. If they match, returns its located zip record, and the offset of the data of this zip record in
    /// the source.
    fn record(&self, base: u64, head: &[u8], tail: &[u8]) -> Option<(u64, Record)> {
        let crc_at = usize::try_from(self.crc_at - self.tail.at).expect("within a short end");
        let crc = tail[crc_at..].first_chunk().filter(|_| self.head.is_like(head) && self.tail.is_like(tail))?;
        let (start, len) = (base + self.data.start, self.data.end - self.data.start);
        let record = Record { header: base + self.header, len, crc: u32::from_le_bytes(*crc) };
        Some((start, record))
    }
}

impl End {
    /// Converts a range of offsets in the archive to a range of `bytes`; `None` if this head or tail does not contain
    /// the range.
    fn within(&self, range: &Range<u64>) -> Option<Range<usize>> {
        let start = usize::try_from(range.start.checked_sub(self.at)?).ok()?;
        let end = usize::try_from(range.end.checked_sub(self.at)?).ok()?;
        (start <= end && end <= self.bytes.len()).then_some(start..end)
    }

    /// Returns the head or tail of another archive of the same length: the bytes at the offsets of this head or tail.
    fn part_of<'a>(&self, archive: &'a [u8]) -> &'a [u8] {
        let start = usize::try_from(self.at).expect("within a small archive");
        &archive[start..start + self.bytes.len()]
    }

    fn is_like(&self, other: &[u8]) -> bool {
        self.fixed.iter().all(|range| self.bytes[range.clone()] == other[range.clone()])
    }

    /// Returns whether the end record of the archive states the offset `directory` at which the reader found the
    /// directory. If the end record states another offset, the reader also read bytes at that offset, and these bytes
    /// are not part of the frame. In that case the other offsets in the directory are not valid either, so the archive
    /// gets no frame.
    fn names(&self, directory: u64) -> bool {
        let Some([b'P', b'K', 5, 6, .., d0, d1, d2, d3, 0, 0]) = self.bytes.last_chunk::<END_BYTES>() else {
            return false;
        };
        u64::from(u32::from_le_bytes([*d0, *d1, *d2, *d3])) == directory
    }

    /// Adds the directory to the frame, except for the CRC-32s of zip records that were not read. `located` is the
    /// offset of the local header of the located zip record, and `read` has the offsets of the local headers of the zip
    /// records that were read. Returns the offset of the CRC-32 of the located zip record, or `None` if the directory
    /// does not list this zip record.
    fn fix_directory(&mut self, directory: u64, located: u64, read: &[u64]) -> Option<u64> {
        let mut fixed = usize::try_from(directory.checked_sub(self.at)?).ok()?;
        let (mut entry, mut crc_at) = (fixed, None);
        while let Some(bytes) = self.bytes.get(entry..).and_then(|bytes| bytes.first_chunk::<ENTRY_BYTES>()) {
            let short = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
            if bytes[..4] != *b"PK\x01\x02" {
                break;
            }
            let header = u64::from(u32::from_le_bytes([bytes[42], bytes[43], bytes[44], bytes[45]]));
            if header == located {
                crc_at = Some(self.at + entry as u64 + 16);
            }
            if !read.contains(&header) {
                self.fixed.push(fixed..entry + 16);
                fixed = entry + 20;
            }
            entry += ENTRY_BYTES + short(28) + short(30) + short(32);
        }
        self.fixed.push(fixed..self.bytes.len());
        crc_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, header: u32, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; ENTRY_BYTES];
        bytes[..4].copy_from_slice(b"PK\x01\x02");
        bytes[20..24].copy_from_slice(&len.to_le_bytes());
        bytes[24..28].copy_from_slice(&len.to_le_bytes());
        bytes[28] = u8::try_from(name.len()).unwrap();
        bytes[42..46].copy_from_slice(&header.to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes
    }

    /// Returns an archive with one zip record `a/x` of 100 bytes, after `before` bytes that do not belong to the
    /// archive. The offsets in the directory do not count these `before` bytes.
    fn archive(before: usize) -> Vec<u8> {
        let mut bytes = vec![0; before];
        bytes.extend([b"PK\x03\x04".as_slice(), &[0; 22], &[3, 0, 0, 0], b"a/x", &[7; 100]].concat());
        let directory = u32::try_from(bytes.len() - before).unwrap();
        let entry = entry("a/x", 0, 100);
        let len = u32::try_from(entry.len()).unwrap();
        bytes.extend(entry);
        bytes.extend([b"PK\x05\x06".as_slice(), &[0; 4], &[1, 0, 1, 0]].concat());
        bytes.extend([len.to_le_bytes(), directory.to_le_bytes()].concat());
        bytes.extend([0; 2]);
        bytes
    }

    #[test]
    fn archive_with_shifted_offsets_has_no_frame() {
        for (before, has_frame) in [(0, true), (50, false)] {
            let bytes = archive(before);
            let source = bytes.as_slice();
            let archive = Archive::read(source).unwrap();
            assert_eq!(archive.get("x").unwrap().header, before as u64);
            let frame = Frame::of(source, 0..source.len_bytes(), &archive, &[], "x").unwrap();
            assert_eq!(frame.is_some(), has_frame, "{before}");
        }
    }
}
