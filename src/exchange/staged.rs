//! Staging: what a process reads in a round.

use std::sync::{Arc, Mutex};

use rayon::prelude::*;

use super::buffers::{BufferPool, HostMemory, PooledBuffer, pieces};
use super::moves::{Moves, SourceRead};
use crate::error::Result;
use crate::exec::source_crc::{CrcRecorder, SourceCrcs};
use crate::exec::{DEFAULT_WRITE_BLOCK_BYTES, Input, PreparedTile, Scratch, Stop};

/// A round that has been read.
pub struct Staged<M: HostMemory> {
    pub moves: Moves,
    pub bytes: PooledBuffer<M>,
    /// Whether nothing that was read so far is part of a record of which more is to come, with a sum to be checked.
    pub is_checked: bool,
}

/// Reads rounds, and checks the sums of records that pass.
pub struct Stage<'a, M> {
    input: Input<'a>,
    rooms: Arc<BufferPool<M>>,
    passing: SourceCrcs,
    /// How many read at a time, each with its scratch.
    threads: usize,
    stop: &'a Stop,
}

impl<'a, M: HostMemory> Stage<'a, M> {
    #[must_use]
    pub fn new(input: Input<'a>, rooms: Arc<BufferPool<M>>, threads: usize, stop: &'a Stop) -> Self {
        Self { input, rooms, passing: SourceCrcs::default(), threads, stop }
    }

    /// # Errors
    /// `Io` and `Malformed` from reading; `Stopped`.
    pub fn read(&self, moves: Moves) -> Result<Staged<M>> {
        let mut bytes = self.rooms.buffer(moves.stage_len)?;
        let places = moves.reads.iter().map(|read| (read.stage.start, read.stage.len()));
        let places = pieces(&mut bytes, places);
        // Where a chunk lies its file may have to tell.
        let whole = |read: &SourceRead| {
            let entry = self.input.catalog.tensor(read.tensor);
            PreparedTile::chunk(self.input, entry, read.chunk).map(|whole| (entry.dtype.itemsize(), Arc::new(whole)))
        };
        let wholes: Vec<Result<_>> = moves.reads.par_iter().map(whole).collect();
        let mut strips = Vec::new();
        for ((read, place), whole) in moves.reads.iter().zip(places).zip(wholes) {
            let (itemsize, whole) = whole?;
            let elements = DEFAULT_WRITE_BLOCK_BYTES / itemsize;
            let strip = usize::try_from(elements * itemsize).expect("a strip fits memory");
            let firsts = (0..).map(|index| read.first + index * elements);
            strips.extend(firsts.zip(place.chunks_mut(strip)).map(|(first, strip)| (Arc::clone(&whole), first, strip)));
        }
        let workers = self.threads.min(strips.len());
        let strips = Mutex::new(strips.into_iter());
        let next = || strips.lock().expect("nobody fails with the lock").next();
        (0..workers).into_par_iter().with_max_len(1).try_for_each(|_worker| -> Result<()> {
            let mut scratch = Scratch::default();
            while let Some((whole, first, strip)) = next() {
                self.stop.check()?;
                let noting = CrcRecorder { source_crcs: &self.passing, parts: &mut Vec::new() };
                whole.read_with_checksums(self.input, first, strip, &mut scratch, Some(noting))?;
            }
            Ok(())
        })?;
        if moves.ends_whole {
            self.passing.check_complete(self.input.files)?;
        }
        let is_checked = self.passing.is_empty();
        Ok(Staged { moves, bytes, is_checked })
    }
}
