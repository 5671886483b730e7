//! The blocks that strips share, on their way past the page cache.
//!
//! A strip that begins or ends within a block of its file has a part of that block, and the strip beside it has the rest.
//! Written through the page cache, each part takes the file's lock alone and waits for all direct writes of others: ends
//! of a few bytes cost more than the megabytes between them. So they are held here, and whoever brings the last part of a
//! block writes all of it, in one call with its own blocks.
//!
//! Counts bytes. Invariant: each byte comes once, so a block is complete when it has [`ALIGNMENT`] bytes; what is held is at
//! most [`MOST_HELD`] blocks. The last block of a file is hardly ever complete, and is written with what is left.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use indexmap::IndexMap;
use smallvec::SmallVec;

use crate::storage::direct::ALIGNMENT;

/// Blocks held at a time; beyond, the oldest goes, as it is.
const MOST_HELD: usize = 512;

/// Memory that this takes: an allocator may leave as much unused to align a block as it has.
pub const HELD_BYTES: u64 = MOST_HELD as u64 * 2 * ALIGNMENT;

const BLOCK: usize = 4096;
const _: () = assert!(BLOCK as u64 == ALIGNMENT, "a block is what a direct write is aligned to");

/// A block of a file in memory that a direct write takes.
#[derive(Clone, Debug)]
#[repr(align(4096))]
pub struct DirectBlock([u8; BLOCK]);

impl DirectBlock {
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Which block of which file.
type Place = (u32, u64);

/// Held blocks, the oldest first.
#[derive(Debug, Default)]
pub struct BlockJoiner(Mutex<IndexMap<Place, PendingBlock>>);

#[derive(Debug)]
struct PendingBlock {
    block: Box<DirectBlock>,
    /// What is there of it.
    parts: SmallVec<[Range<usize>; 2]>,
}

/// What became of a part.
#[derive(Debug)]
pub enum Joined {
    /// It waits for the others.
    Waits,
    /// It was the last one.
    Whole(Box<DirectBlock>),
    /// It waits, and this block had to go.
    Instead(BlockRemainder),
}

/// Parts of a block that are to be written as they are.
#[derive(Debug)]
pub struct BlockRemainder {
    place: Place,
    held: PendingBlock,
}

impl BlockRemainder {
    #[must_use]
    pub fn file(&self) -> u32 {
        self.place.0
    }

    /// Offsets in the file, and what goes there.
    pub fn parts(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let start = self.place.1 * ALIGNMENT;
        self.held.parts.iter().map(move |part| (start + part.start as u64, &self.held.block.0[part.clone()]))
    }
}

impl BlockJoiner {
    /// Hold a part of a block: `bytes` at `offset` of the file, which reach into no other.
    pub fn join(&self, file: u32, offset: u64, bytes: &[u8]) -> Joined {
        let start = usize::try_from(offset % ALIGNMENT).expect("less than a block");
        let place = (file, offset / ALIGNMENT);
        let mut held = self.held();
        let entry = held
            .entry(place)
            .or_insert_with(|| PendingBlock { block: Box::new(DirectBlock([0; BLOCK])), parts: SmallVec::new() });
        entry.block.0[start..start + bytes.len()].copy_from_slice(bytes);
        entry.parts.push(start..start + bytes.len());
        if entry.parts.iter().map(Range::len).sum::<usize>() == BLOCK {
            let whole = held.shift_remove(&place).expect("just there");
            return Joined::Whole(whole.block);
        }
        match (held.len() > MOST_HELD).then(|| held.shift_remove_index(0)).flatten() {
            Some((place, held)) => Joined::Instead(BlockRemainder { place, held }),
            None => Joined::Waits,
        }
    }

    /// All that is held of a file.
    pub fn take(&self, file: u32) -> Vec<BlockRemainder> {
        let mut held = self.held();
        let (taken, kept) = std::mem::take(&mut *held).into_iter().partition(|(place, _)| place.0 == file);
        *held = kept;
        let taken: IndexMap<Place, PendingBlock> = taken;
        taken.into_iter().map(|(place, held)| BlockRemainder { place, held }).collect()
    }

    fn held(&self) -> MutexGuard<'_, IndexMap<Place, PendingBlock>> {
        self.0.lock().expect("no panic while the lock is held")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_of_a_block_gets_all_of_it() {
        let edges = BlockJoiner::default();
        let parts = [(4096 + 100, [2; 3996].as_slice()), (4096, &[1; 50]), (4096 + 50, &[3; 50])];
        for (offset, bytes) in &parts[..2] {
            assert!(matches!(edges.join(7, *offset, bytes), Joined::Waits));
            assert!(matches!(edges.join(8, *offset, bytes), Joined::Waits));
        }
        let Joined::Whole(block) = edges.join(7, parts[2].0, parts[2].1) else { panic!("complete") };
        assert_eq!(block.bytes(), [[1; 50].as_slice(), &[3; 50], &[2; 3996]].concat());
        assert_eq!(block.bytes().as_ptr().addr() as u64 % ALIGNMENT, 0);
        // Of the other file there is what came.
        assert!(edges.take(7).is_empty());
        let rest = edges.take(8);
        assert_eq!(rest.iter().flat_map(BlockRemainder::parts).collect::<Vec<_>>(), parts[..2]);
        assert!(edges.take(8).is_empty());
    }

    #[test]
    fn the_oldest_goes_where_too_many_wait() {
        let edges = BlockJoiner::default();
        for block in 0..MOST_HELD as u64 {
            assert!(matches!(edges.join(0, block * ALIGNMENT, &[1]), Joined::Waits));
        }
        let Joined::Instead(rest) = edges.join(1, 5, &[2]) else { panic!("one too many") };
        assert_eq!((rest.file(), rest.parts().collect::<Vec<_>>()), (0, vec![(0, [1].as_slice())]));
        assert_eq!(edges.take(0).len(), MOST_HELD - 1);
    }
}
