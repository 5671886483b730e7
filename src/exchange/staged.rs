//! Reads the source ranges of a round into one buffer, called the stage, on several threads. Checks the CRC of each zip
//! record that is read completely. All sizes and offsets are in bytes.

use std::sync::{Arc, Mutex};

use rayon::prelude::*;

use super::buffers::{BufferPool, HostMemory, PooledBuffer, disjoint_slices};
use super::moves::{Moves, SourceRead};
use crate::error::Result;
use crate::exec::source_crc::{CrcRecorder, SourceCrcs};
use crate::exec::{DEFAULT_WRITE_BLOCK_BYTES, Input, PreparedTile, Scratch, Stop};

/// A round whose source ranges are in memory.
pub struct Staged<M: HostMemory> {
    /// The reads and copies of this process in the round.
    pub moves: Moves,
    /// The stage buffer, which contains the bytes that were read.
    pub bytes: PooledBuffer<M>,
    /// True if the CRCs of all zip records that this process has read so far have been checked. False if a later round
    /// must read the remaining bytes of a zip record.
    pub is_checked: bool,
}

/// Reader of the source ranges of rounds. It also checks the CRCs of zip records.
pub struct Stage<'a, M> {
    input: Input<'a>,
    pool: Arc<BufferPool<M>>,
    crcs: SourceCrcs,
    /// The number of threads that read. Each thread has its own scratch memory.
    threads: usize,
    stop: &'a Stop,
}

impl<'a, M: HostMemory> Stage<'a, M> {
    /// Returns a reader that reads `input` on `threads` threads, into buffers of `pool`.
    #[must_use]
    pub fn new(input: Input<'a>, pool: Arc<BufferPool<M>>, threads: usize, stop: &'a Stop) -> Self {
        Self { input, pool, crcs: SourceCrcs::default(), threads, stop }
    }

    /// Reads the source ranges of a round.
    ///
    /// # Errors
    /// Returns `Io` and `Malformed` from reading, and `Stopped`.
    pub fn read(&self, moves: Moves) -> Result<Staged<M>> {
        let mut bytes = self.pool.buffer(moves.stage_len)?;
        let ranges = moves.reads.iter().map(|read| (read.stage.start, read.stage.len()));
        let ranges = disjoint_slices(&mut bytes, ranges);
        // Preparing a chunk may read the header of its file, so it is done in parallel.
        let chunk = |read: &SourceRead| {
            let entry = self.input.catalog.tensor(read.tensor);
            PreparedTile::chunk(self.input, entry, read.chunk).map(|chunk| (entry.dtype.itemsize(), Arc::new(chunk)))
        };
        let chunks: Vec<Result<_>> = moves.reads.par_iter().map(chunk).collect();
        let mut blocks = Vec::new();
        for ((read, range), chunk) in moves.reads.iter().zip(ranges).zip(chunks) {
            let (itemsize, chunk) = chunk?;
            let elements = DEFAULT_WRITE_BLOCK_BYTES / itemsize;
            let block = usize::try_from(elements * itemsize).expect("a block fits memory");
            let firsts = (0..).map(|index| read.first_element + index * elements);
            blocks.extend(firsts.zip(range.chunks_mut(block)).map(|(first, block)| (Arc::clone(&chunk), first, block)));
        }
        let workers = self.threads.min(blocks.len());
        let blocks = Mutex::new(blocks.into_iter());
        let next = || blocks.lock().expect("no thread panics while it holds the lock").next();
        (0..workers).into_par_iter().with_max_len(1).try_for_each(|_worker| -> Result<()> {
            let mut scratch = Scratch::default();
            while let Some((chunk, first, block)) = next() {
                self.stop.check()?;
                let recorder = CrcRecorder { source_crcs: &self.crcs, parts: &mut Vec::new() };
                chunk.read_with_checksums(self.input, first, block, &mut scratch, Some(recorder))?;
            }
            Ok(())
        })?;
        if moves.completes_tensors {
            self.crcs.check_complete(self.input.files)?;
        }
        let is_checked = self.crcs.is_empty();
        Ok(Staged { moves, bytes, is_checked })
    }
}
