//! The block of source bytes that a worker holds: read once, copied out of many times.
//!
//! Counts bytes. Where the strips of a [band](super::bands) want short runs of the same rows, all that they want is read
//! into the block first, and each takes its runs out of it. Whoever wants what is not held reads for itself, so nothing
//! depends on what is. Invariant: `bytes` holds the stretches of `held`, in their order and without gaps, and is at most
//! [`BLOCK_BYTES`] long.

use super::{BLOCK_BYTES, room};
use crate::error::Result;
use crate::storage::{FileRange, Files};

/// Stretches with less than this between them are read in one go: it takes no longer, and disks have no shorter blocks.
const GAP_BYTES: u64 = 4 << 10;

#[derive(Debug, Default)]
pub struct Block {
    bytes: Vec<u8>,
    held: Vec<FileRange>,
}

impl Block {
    /// Read what is wanted, as far as there is room.
    ///
    /// # Errors
    /// As reading.
    pub fn hold(&mut self, files: &Files, wanted: WantedRange) -> Result<()> {
        self.held.clear();
        let mut room_left = BLOCK_BYTES;
        let mut fits = |stretch: &FileRange| {
            let left = room_left.checked_sub(stretch.len);
            room_left = left.unwrap_or(room_left);
            left.is_some()
        };
        let held: Vec<FileRange> = wanted.stretches().into_iter().filter(|stretch| fits(stretch)).collect();
        let mut rest = room(&mut self.bytes, as_size(held.iter().map(|stretch| stretch.len).sum()));
        for stretch in &held {
            let (place, after) = rest.split_at_mut(as_size(stretch.len));
            files.open(stretch.file)?.read_exact_at(place, stretch.offset)?;
            rest = after;
        }
        self.held = held;
        Ok(())
    }

    /// The bytes of a stretch, where they are held.
    #[must_use]
    pub fn get(&self, wanted: FileRange) -> Option<&[u8]> {
        let mut start = 0;
        for held in &self.held {
            if held.file == wanted.file && held.offset <= wanted.offset {
                let within = wanted.offset - held.offset;
                if within + wanted.len <= held.len {
                    return Some(&self.bytes[as_size(start + within)..][..as_size(wanted.len)]);
                }
            }
            start += held.len;
        }
        None
    }

    /// Room for something else, after which nothing is held.
    pub fn room(&mut self, len: u64) -> &mut [u8] {
        self.held.clear();
        room(&mut self.bytes, as_size(len))
    }

    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }
}

/// What is to be held.
#[derive(Debug, Default)]
pub struct WantedRange(Vec<FileRange>);

impl WantedRange {
    /// Pieces of one strip come in the order of their source, nearly all of them: so there are few stretches at any time.
    pub fn add(&mut self, next: FileRange) {
        if !self.0.last_mut().is_some_and(|last| joined(last, &next)) {
            self.0.push(next);
        }
    }

    /// In the order of files, none near another.
    fn stretches(mut self) -> Vec<FileRange> {
        self.0.sort_unstable_by_key(|stretch| (stretch.file, stretch.offset));
        self.0.dedup_by(|next, last| joined(last, next));
        self.0
    }
}

/// Whether `next`, which begins no earlier than `last`, became a part of it.
fn joined(last: &mut FileRange, next: &FileRange) -> bool {
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
    use crate::storage::IoMode;

    #[test]
    fn what_is_wanted_is_read_once_as_far_as_it_fits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let content: Vec<u8> = (0..3_000_000_u32).flat_map(|n| u8::try_from(n % 251)).collect();
        std::fs::write(&path, &content).unwrap();
        let mut files = Files::new(IoMode::Read);
        let file = files.add(&path).unwrap();
        let stretch = |offset, len| FileRange { file, offset, len };
        let mut block = Block::default();
        let mut wanted = WantedRange::default();
        let stretches = [stretch(20_000, 10), stretch(5, 100), stretch(50, 200), stretch(100_000, 2 << 20)];
        stretches.into_iter().for_each(|stretch| wanted.add(stretch));
        block.hold(&files, wanted).unwrap();
        assert_eq!(block.held, [stretch(5, 245), stretch(20_000, 10)]);
        assert_eq!(block.get(stretch(60, 190)).unwrap(), &content[60..250]);
        assert_eq!(block.get(stretch(20_001, 9)).unwrap(), &content[20_001..20_010]);
        assert_eq!(files.bytes_read(), 255);
        for beyond in [stretch(0, 6), stretch(240, 11), stretch(20_001, 10), stretch(100_000, 1)] {
            assert_eq!(block.get(beyond), None);
        }
        block.room(3);
        assert_eq!(block.get(stretch(60, 1)), None);
    }
}
