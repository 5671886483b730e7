//! Estimates of the memory that a conversion uses: the memory left for exchange rounds, and the largest memory use.
//!
//! All sizes are in bytes of anonymous memory. Headers and tables of DST are laid out in memory before data moves, so
//! they reduce the memory for rounds and write blocks.

use super::peers::Peers;
use super::prepared::Prepared;
use super::threads_and_blocks::{
    BASE_BYTES, MIN_WRITE_BLOCK_BYTES, ReadTiming, affordable, cores, exchange_bytes, least_bytes, room_beside_workers,
    scratch_bytes, sums_bytes, transposed_block_bytes, write_block_bytes,
};
use crate::error::{Error, Result};
use crate::exec::copy::Stats;
use crate::exec::{BLOCK_JOINER_BYTES, Options};
use crate::launch::cpus::cpus;
use crate::launch::process_environment;
use crate::quantity::{count, human_bytes};
use crate::storage::memory::AnonymousMemory;

/// Returns whether the workers read the data of a write block just before they write the block, or one exchange round
/// earlier.
fn reads(conversion: &Prepared) -> ReadTiming {
    ReadTiming::of(conversion.source.is_exchanged())
}

/// Returns the memory in bytes by which the headers, pickles and tables of DST exceed 16 MiB. Other estimates already
/// contain these 16 MiB.
fn laid_out_bytes(conversion: &Prepared) -> u64 {
    const ALLOWED: u64 = 16 << 20;
    let laid_out = conversion.reservation.planning_bytes(&conversion.source.checkpoint.catalog);
    laid_out.saturating_sub(ALLOWED)
}

/// Returns the memory in bytes that the exchange rounds of this process need: buffers and plans of the rounds, and the
/// reduction buffers of all threads. Returns 0 if the processes exchange no data.
fn rounds_bytes(conversion: &Prepared) -> u64 {
    let peers = conversion.source.peers.as_ref().filter(|peers| peers.exchange_bytes());
    let bucket = peers.map(Peers::bucket);
    bucket.map_or(0, |bucket| exchange_bytes(bucket, rayon::current_num_threads()))
}

/// Returns the memory in bytes that is not available for write blocks: the memory of the exchange rounds, and the
/// memory by which the headers and tables of DST exceed 16 MiB.
fn held_bytes(conversion: &Prepared) -> u64 {
    rounds_bytes(conversion).saturating_add(laid_out_bytes(conversion))
}

/// Returns the memory in bytes that exchange rounds may use, so that the write blocks keep the length that `options`
/// sets.
pub fn room_for_rounds(conversion: &Prepared, options: &Options, max_memory: u64) -> u64 {
    let room = room_beside_workers(Some(conversion.source.checkpoint.files.io()), options, max_memory);
    room.saturating_sub(laid_out_bytes(conversion))
}

/// Returns whether some chunks of the source are not stored row by row, or are views, so that tiles may be transposed.
fn may_transpose(conversion: &Prepared) -> bool {
    conversion.source.checkpoint.catalog.tensors.iter().any(|entry| entry.chunks.has_strides_or_views())
}

/// Returns `options` with write blocks that are short enough for the memory limit. If processes exchange data, the
/// number of threads may also be reduced.
///
/// # Errors
/// `Usage` if the memory limit is too low; the error names the lowest limit that is enough.
pub fn within_memory(conversion: &Prepared, options: Options, max_memory: u64) -> Result<Options> {
    let held = held_bytes(conversion);
    let scratch = scratch_bytes(Some(conversion.source.checkpoint.files.io()), reads(conversion));
    let most = affordable(max_memory.saturating_sub(held), scratch, MIN_WRITE_BLOCK_BYTES).max(1);
    let threads = if conversion.source.is_exchanged() { options.threads.min(most) } else { options.threads };
    let options = Options { threads, ..options };
    match write_block_bytes(max_memory, held, scratch, options.threads) {
        Ok(write_block_bytes) => {
            let write_block_bytes = write_block_bytes.min(options.write_block_bytes);
            let transposed_block_bytes = if conversion.source.is_exchanged() || !may_transpose(conversion) {
                write_block_bytes
            } else {
                transposed_block_bytes(max_memory, held, scratch, options.threads, write_block_bytes)
            };
            Ok(Options { write_block_bytes, transposed_block_bytes, ..options })
        }
        Err(_) => {
            // A higher limit may start more threads, and each needs a reduction buffer.
            let more = cores(cpus(&process_environment)).saturating_sub(rayon::current_num_threads());
            let more = if conversion.source.is_exchanged() { sums_bytes(more) } else { 0 };
            let needed = held.saturating_add(more).saturating_add(least_bytes(scratch, options.threads));
            Err(Error::usage(
                format!(
                    "options::max_memory {} is too low: the headers and tables of {}{} need {} in total",
                    human_bytes(max_memory),
                    count(conversion.reservation.files.len(), "file"),
                    if conversion.source.is_exchanged() { ", and six times options::bucket_size" } else { "" },
                    human_bytes(needed)
                ),
                format!("use at least options::max_memory {needed}"),
            ))
        }
    }
}

/// Returns an estimate of the largest anonymous memory that the process uses, in bytes, rounded up. The maximum occurs
/// either while metadata is read, or while data is copied. `before` is the memory that was measured after planning,
/// before any tensor data is copied; if it is `None`, a fixed amount for program and metadata is assumed.
pub fn peak_bytes(conversion: &Prepared, options: &Options, before: Option<AnonymousMemory>, stats: &Stats) -> u64 {
    /// Memory in bytes for the stack of one worker and for the unused part of its allocations.
    const WORKER_BYTES: u64 = 1 << 20;
    let scratch = scratch_bytes(Some(conversion.source.checkpoint.files.io()), reads(conversion));
    let buffers = options.threads as u64 * (options.transposed_block_bytes + scratch);
    let Some(before) = before else {
        return BASE_BYTES + buffers + held_bytes(conversion) + stats.planned_bytes;
    };
    let workers = buffers + options.threads as u64 * WORKER_BYTES;
    let waiting = conversion.reservation.pending_checksum_bytes(options.write_block_bytes);
    let rounds = rounds_bytes(conversion);
    let edges = if options.sync { BLOCK_JOINER_BYTES } else { 0 };
    let peak = before.peak.max(before.now + workers + edges + stats.planned_bytes + waiting + rounds);
    // Runs differ by a few pages, so the estimate is rounded up.
    (peak + peak / 32 + (1 << 20)).next_multiple_of(1 << 20)
}

/// Returns a warning if the estimated memory `peak` is above the limit, both in bytes.
pub fn beyond(peak: u64, max_memory: u64) -> Option<String> {
    (peak > max_memory).then(|| {
        format!(
            "this run may use {} of memory, more than options::max_memory {}: this option limits the buffers and the \
             headers of DST, but neither the description of SRC in memory nor the plans for many chunks",
            human_bytes(peak),
            human_bytes(max_memory)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_above_the_limit_gives_a_warning() {
        assert_eq!(beyond(1 << 30, 1 << 30), None);
        let warning = beyond(1_100_000_000, 1_000_000_000).unwrap();
        assert!(warning.contains("1.10 GB of memory, more than options::max_memory 1.00 GB"), "{warning}");
    }
}
