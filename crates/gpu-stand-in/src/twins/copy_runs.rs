//! The twin of `copy_runs`, which copies nests of runs: block by block, thread by thread, with the index maths of the
//! kernel. An access that is not aligned is illegal, as it is on a device.

use std::ptr;

use super::{Launch, Twin};
use crate::memory::Illegal;

/// `(const Copy* copies, u32 count, u32 block_units)`
pub const TWIN: Twin = Twin { name: "copy_runs", arguments: &[8, 4, 4], run };

/// Bytes of a `struct Copy`, and where its loops begin; bytes of a `struct Loop`.
const RECORD: usize = 136;
const LOOPS: usize = 40;
const LOOP: usize = 24;
/// Units that a thread loads before it stores.
const BATCH: u32 = 4;

struct Copy {
    source: u64,
    target: u64,
    first_block: u32,
    lane: u32,
    units: u32,
    run_units: u32,
    loops: Vec<Loop>,
}

struct Loop {
    source_step: u64,
    target_step: u64,
    count: u32,
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

impl Copy {
    fn of(record: &[u8]) -> Self {
        let looped = |nth: usize| {
            let at = LOOPS + nth * LOOP;
            Loop { source_step: long(record, at), target_step: long(record, at + 8), count: word(record, at + 16) }
        };
        Self {
            source: long(record, 0),
            target: long(record, 8),
            first_block: word(record, 16),
            lane: word(record, 20),
            units: word(record, 24),
            run_units: word(record, 28),
            loops: (0..word(record, 32) as usize).map(looped).collect(),
        }
    }

    /// Where a unit is, at both ends.
    fn unit(&self, unit: u32) -> (u64, u64) {
        let mut run = unit / self.run_units;
        let within = u64::from(unit % self.run_units) * u64::from(self.lane);
        let (mut source, mut target) = (self.source + within, self.target + within);
        for Loop { source_step, target_step, count } in self.loops.iter().rev() {
            let turn = u64::from(run % count);
            source += turn * source_step;
            target += turn * target_step;
            run /= count;
        }
        (source, target)
    }
}

fn run(launch: &Launch<'_>) -> Result<(), Illegal> {
    let (table, count) = (long(&launch.arguments[0], 0), word(&launch.arguments[1], 0));
    let block_units = word(&launch.arguments[2], 0);
    let bytes = count as usize * RECORD;
    // SAFETY: the range was looked up now.
    let records = unsafe { std::slice::from_raw_parts(launch.locate(table, bytes)?, bytes) };
    let copies: Vec<Copy> = records.chunks(RECORD).map(Copy::of).collect();
    let threads = launch.block[0];
    for block in 0..launch.grid[0] {
        let found = copies.partition_point(|copy| copy.first_block <= block).checked_sub(1).ok_or(Illegal)?;
        let copy = &copies[found];
        let begin = (block - copy.first_block) * block_units;
        let end = copy.units.min(begin + block_units);
        for thread in 0..threads {
            let mut first = begin + thread;
            while first < end {
                for unit in (0..BATCH).map(|nth| first + nth * threads).filter(|unit| *unit < end) {
                    move_lane(launch, copy.unit(unit), copy.lane)?;
                }
                first += BATCH * threads;
            }
        }
    }
    Ok(())
}

fn move_lane(launch: &Launch<'_>, (source, target): (u64, u64), lane: u32) -> Result<(), Illegal> {
    let is_known = matches!(lane, 1 | 2 | 4 | 8 | 16);
    if !is_known || !source.is_multiple_of(u64::from(lane)) || !target.is_multiple_of(u64::from(lane)) {
        eprintln!("gpu-stand-in: copy_runs moves {lane} B from {source:#x} to {target:#x}");
        return Err(Illegal);
    }
    let bytes = lane as usize;
    let (source, target) = (launch.locate(source, bytes)?, launch.locate(target, bytes)?);
    // SAFETY: both ranges were looked up now.
    unsafe { ptr::copy(source, target, bytes) };
    Ok(())
}
