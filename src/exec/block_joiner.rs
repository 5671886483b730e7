//! Joins the two parts of a file block that two write blocks share, so that direct writes (`O_DIRECT`) write complete
//! file blocks. A file block is the [`ALIGNMENT`] bytes of a file between two multiples of [`ALIGNMENT`].
//!
//! A write block that begins or ends inside a file block has one part of this file block, and the neighbouring write
//! block has the other part. If such a part were written through the page cache, the write would lock the file and wait
//! for all direct writes of other threads; a few bytes would cost more time than the megabytes between them. Therefore
//! the joiner keeps these parts in memory. The worker that adds the last part writes the complete file block, in one
//! call with the other file blocks of its write block.
//!
//! All sizes and offsets are in bytes. Invariant: each byte is added once, so a file block is complete when
//! [`ALIGNMENT`] bytes have been added; at most [`MAX_PENDING`] file blocks are kept. The last file block of a file is
//! rarely complete; all incomplete file blocks are written when the file is synced.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use indexmap::IndexMap;
use smallvec::SmallVec;

use crate::storage::direct::ALIGNMENT;

/// The maximum number of incomplete file blocks in memory. If one more file block is added, the joiner evicts the
/// oldest one, and the caller writes the parts of the evicted file block.
const MAX_PENDING: usize = 512;

/// The maximum memory of a joiner in bytes. The factor 2 is for the alignment of blocks: an allocator may leave as much
/// memory unused as the block has.
pub const BLOCK_JOINER_BYTES: u64 = MAX_PENDING as u64 * 2 * ALIGNMENT;

const BLOCK: usize = 4096;
const _: () = assert!(BLOCK as u64 == ALIGNMENT, "a block is what a direct write is aligned to");

/// A file block in memory. Its address is aligned, so that a direct write (`O_DIRECT`) can use it.
#[derive(Clone, Debug)]
#[repr(align(4096))]
pub struct DirectBlock([u8; BLOCK]);

impl DirectBlock {
    /// Returns the bytes of the block.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The number of an output file, and the number of the file block in it.
type BlockKey = (u32, u64);

/// The incomplete file blocks of all output files, in the order in which they were begun.
#[derive(Debug, Default)]
pub struct BlockJoiner(Mutex<IndexMap<BlockKey, PendingBlock>>);

#[derive(Debug)]
struct PendingBlock {
    block: Box<DirectBlock>,
    /// The ranges of the file block that have been added.
    parts: SmallVec<[Range<usize>; 2]>,
}

/// The result of adding a part of a file block.
#[derive(Debug)]
pub enum Joined {
    /// The file block is still incomplete; there is nothing to write yet.
    Incomplete,
    /// The part completed this file block, which the caller must write.
    Complete(Box<DirectBlock>),
    /// The file block is still incomplete. The joiner evicted this older block to make room, and the caller must write
    /// the parts of the evicted block.
    Evicted(BlockRemainder),
}

/// The parts of an incomplete file block, which the caller must write separately.
#[derive(Debug)]
pub struct BlockRemainder {
    key: BlockKey,
    pending: PendingBlock,
}

impl BlockRemainder {
    /// Returns the number of the output file.
    pub fn file(&self) -> u32 {
        self.key.0
    }

    /// Returns each part with its offset in the file.
    pub fn parts(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let start = self.key.1 * ALIGNMENT;
        self.pending.parts.iter().map(move |part| (start + part.start as u64, &self.pending.block.0[part.clone()]))
    }
}

impl BlockJoiner {
    /// Adds a part of a file block: `bytes` at `offset` of the file. The part must be within one file block.
    pub fn add_part(&self, file: u32, offset: u64, bytes: &[u8]) -> Joined {
        let start = usize::try_from(offset % ALIGNMENT).expect("less than a block");
        let key = (file, offset / ALIGNMENT);
        let mut blocks = self.lock();
        let entry = blocks
            .entry(key)
            .or_insert_with(|| PendingBlock { block: Box::new(DirectBlock([0; BLOCK])), parts: SmallVec::new() });
        entry.block.0[start..start + bytes.len()].copy_from_slice(bytes);
        entry.parts.push(start..start + bytes.len());
        if entry.parts.iter().map(Range::len).sum::<usize>() == BLOCK {
            let whole = blocks.shift_remove(&key).expect("just there");
            return Joined::Complete(whole.block);
        }
        match (blocks.len() > MAX_PENDING).then(|| blocks.shift_remove_index(0)).flatten() {
            Some((key, pending)) => Joined::Evicted(BlockRemainder { key, pending }),
            None => Joined::Incomplete,
        }
    }

    /// Removes and returns all incomplete file blocks of a file.
    pub fn take_file(&self, file: u32) -> Vec<BlockRemainder> {
        let mut blocks = self.lock();
        let (taken, kept) = std::mem::take(&mut *blocks).into_iter().partition(|(key, _)| key.0 == file);
        *blocks = kept;
        let taken: IndexMap<BlockKey, PendingBlock> = taken;
        taken.into_iter().map(|(key, pending)| BlockRemainder { key, pending }).collect()
    }

    fn lock(&self) -> MutexGuard<'_, IndexMap<BlockKey, PendingBlock>> {
        self.0.lock().expect("no panic while the lock is held")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_part_of_a_block_completes_it() {
        let joiner = BlockJoiner::default();
        let parts = [(4096 + 100, [2; 3996].as_slice()), (4096, &[1; 50]), (4096 + 50, &[3; 50])];
        for (offset, bytes) in &parts[..2] {
            assert!(matches!(joiner.add_part(7, *offset, bytes), Joined::Incomplete));
            assert!(matches!(joiner.add_part(8, *offset, bytes), Joined::Incomplete));
        }
        let Joined::Complete(block) = joiner.add_part(7, parts[2].0, parts[2].1) else { panic!("complete") };
        assert_eq!(block.bytes(), [[1; 50].as_slice(), &[3; 50], &[2; 3996]].concat());
        assert_eq!(block.bytes().as_ptr().addr() as u64 % ALIGNMENT, 0);
        // Only blocks of the other file are incomplete.
        assert!(joiner.take_file(7).is_empty());
        let rest = joiner.take_file(8);
        assert_eq!(rest.iter().flat_map(BlockRemainder::parts).collect::<Vec<_>>(), parts[..2]);
        assert!(joiner.take_file(8).is_empty());
    }

    #[test]
    fn oldest_block_is_evicted_beyond_the_limit() {
        let joiner = BlockJoiner::default();
        for block in 0..MAX_PENDING as u64 {
            assert!(matches!(joiner.add_part(0, block * ALIGNMENT, &[1]), Joined::Incomplete));
        }
        let Joined::Evicted(rest) = joiner.add_part(1, 5, &[2]) else { panic!("one too many") };
        assert_eq!((rest.file(), rest.parts().collect::<Vec<_>>()), (0, vec![(0, [1].as_slice())]));
        assert_eq!(joiner.take_file(0).len(), MAX_PENDING - 1);
    }
}
