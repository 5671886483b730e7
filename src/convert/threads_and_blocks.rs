//! Computes the number of threads and the length of write blocks that fit into the memory limit.
//! [`estimate`](super::estimate) computes the memory of a whole conversion.
//!
//! All sizes and offsets are in bytes. `--max-memory` bounds the buffers, and the headers and tables of DST. The
//! reported peak (`peak_bytes`) also includes the catalog, whose size grows with the number of chunks and has no bound.
//! Invariant: no run uses more memory than the reported peak.

use std::path::Path;
use std::sync::{Arc, Mutex};

use super::bucket::Bucket;
use crate::convert::options::SourceOptions;
use crate::error::{Error, Result};
use crate::exec::{
    DEFAULT_WRITE_BLOCK_BYTES, Options, REDUCING_BYTES, SCRATCH_BYTES, STAGING_BYTES, TRANSPOSED_BLOCK_BYTES,
};
use crate::launch::cpus::cpus;
use crate::launch::process_environment;
use crate::quantity::{count, human_bytes};
use crate::storage::filesystem::{nearest_folder, suits_direct_writes};
use crate::storage::{BOUNCE_BYTES, IoMode};

/// The resource that limits the speed of the worker threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// The threads wait for the processor most of the time.
    Processor,
    /// The threads sleep until a disk has stored the data that they write.
    Disk,
}

impl Bottleneck {
    /// Returns the bottleneck of a single process that writes `destination` and syncs it to disk. Without a
    /// destination, as in some dry runs, returns `Disk`.
    pub fn of_synced(destination: Option<&Path>) -> Self {
        let is_on_disk = |destination: &Path| suits_direct_writes(nearest_folder(destination)).is_ok_and(|suits| suits);
        if destination.is_none_or(is_on_disk) { Self::Disk } else { Self::Processor }
    }
}

/// Starts the worker threads of a run. Returns them, and options with the number of threads and the length of write
/// blocks. `rounds` is the bucket size of the exchange rounds, or `None` if processes exchange no data.
///
/// # Errors
/// `Usage` if the number of threads is invalid, or if the memory limit is too low for this number of threads.
pub fn work_options(
    args: &SourceOptions,
    sync: bool,
    pace: Bottleneck,
    rounds: Option<Bucket>,
) -> Result<(Options, Workers)> {
    let io = args.io;
    let max_memory = args.max_memory;
    let scratch = scratch_bytes(io, ReadTiming::of(rounds.is_some()));
    // The memory goes first to the threads that the user requested, or to one thread, and then to rounds.
    let least = args.threads.unwrap_or(1).min(MAX_THREADS);
    let workers = least as u64 * (DEFAULT_WRITE_BLOCK_BYTES + scratch);
    let room = max_memory.saturating_sub(BASE_BYTES + workers).saturating_sub(sums_bytes(least));
    let taken = rounds.map_or(0, |bucket| bucket.within(room).held_bytes());
    let reducing = if rounds.is_some() { REDUCING_BYTES } else { 0 };
    let threads = match args.threads {
        None => threads_within(max_memory.saturating_sub(taken), scratch + reducing, pace),
        Some(0) => {
            return Err(Error::usage(
                "options::threads 0: at least one thread is needed",
                "omit options::threads to use one thread per core",
            ));
        }
        Some(threads) if threads > MAX_THREADS => {
            return Err(Error::usage(
                format!("options::threads {threads}: at most {MAX_THREADS} threads are allowed"),
                "omit options::threads to use one thread per core",
            ));
        }
        Some(threads) => threads,
    };
    let workers = Workers::start(threads);
    let taken = taken.saturating_add(threads as u64 * reducing);
    let write_block_bytes = write_block_bytes(max_memory, taken, scratch, threads)?;
    // A conversion whose plan is known gets longer blocks for transposed views.
    let transposed_block_bytes = write_block_bytes;
    Ok((Options { threads, write_block_bytes, transposed_block_bytes, sync }, workers))
}

/// Threads that share the work of one operation.
#[derive(Debug)]
pub struct Workers(Option<rayon::ThreadPool>);

impl Workers {
    /// Starts `requested` threads, or fewer if the system does not allow so many threads for this process.
    pub fn start(requested: usize) -> Self {
        let threads = startable_threads(requested);
        let pool = (threads > 0).then(|| rayon::ThreadPoolBuilder::new().num_threads(threads).build().ok());
        Self(pool.flatten())
    }

    /// Runs `work` on these threads. Without worker threads, the calling thread does all the work, as the only thread
    /// of a new pool. Rayon's global pool belongs to the calling program and is not used.
    pub fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        if let Some(pool) = &self.0 {
            return pool.install(work);
        }
        // Building the pool fails only if this thread already belongs to a pool; the work then runs in that pool. A
        // pool of the current thread starts no threads, so there is no other reason to fail.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
        let done = work();
        drop(pool);
        done
    }
}

/// Returns how many of `requested` threads the system can start, if it also starts the threads for signals, leases and
/// progress.
fn startable_threads(requested: usize) -> usize {
    const OTHERS: usize = 4;
    let gate = Arc::new(Mutex::new(()));
    let closed = gate.lock();
    let start = |_| {
        let gate = Arc::clone(&gate);
        std::thread::Builder::new().spawn(move || drop(gate.lock())).ok()
    };
    let started: Vec<_> = (0..requested + OTHERS).map_while(start).collect();
    drop(closed);
    let count = started.len();
    started.into_iter().for_each(|thread| drop(thread.join()));
    count.saturating_sub(OTHERS)
}

/// Upper limit for `--threads`, above the core count of any machine.
const MAX_THREADS: usize = 4096;

/// Memory that a process uses in addition to buffers, in bytes: the program, its stacks, and a catalog of ordinary
/// size.
pub const BASE_BYTES: u64 = 32 << 20;

/// Shortest useful length of a write block, in bytes. For a shorter block, the system call would cost more than the
/// write.
pub const MIN_WRITE_BLOCK_BYTES: u64 = 64 << 10;

/// Number of threads that keep a disk busy, independent of the number of cores. Some threads sleep until their write
/// blocks are written, while others prepare the next blocks.
const DISK_THREADS: usize = 4;

/// Returns the number of worker threads: one per core that this process may use, or fewer if memory is short. If the
/// disk is the bottleneck, returns at least [`DISK_THREADS`], because threads sleep while the disk writes; but not more
/// than can have write blocks of full length. If Slurm limits the CPUs of the process, there is no such minimum for a
/// disk.
fn threads_within(max_memory: u64, scratch: u64, pace: Bottleneck) -> usize {
    let given = cpus(&process_environment);
    let cores = cores(given);
    let affordable = |write_block_bytes: u64| affordable(max_memory, scratch, write_block_bytes);
    let for_disk = if pace == Bottleneck::Disk && given.is_none() { DISK_THREADS } else { 1 };
    let for_disk = for_disk.min(affordable(DEFAULT_WRITE_BLOCK_BYTES));
    cores.min(affordable(MIN_WRITE_BLOCK_BYTES)).max(for_disk).clamp(1, MAX_THREADS)
}

/// Returns the number of cores that this process may use. `given` is the number that Slurm allocated, if known.
pub fn cores(given: Option<usize>) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    given.map_or(cores, |given| cores.min(given))
}

/// Returns how many threads fit into `max_memory`, if each needs a write block of `write_block_bytes` and `scratch`
/// bytes.
pub fn affordable(max_memory: u64, scratch: u64, write_block_bytes: u64) -> usize {
    let threads = max_memory.saturating_sub(BASE_BYTES) / (write_block_bytes + scratch);
    usize::try_from(threads).unwrap_or(usize::MAX)
}

/// Whether workers read the data of a write block just before they write the block, or one exchange round earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadTiming {
    /// A worker reads the data of a block just before it writes the block.
    AsTheyWrite,
    /// Some workers read the data for the next exchange round while other workers write the data of the current round.
    Ahead,
}

impl ReadTiming {
    /// Returns when workers read: ahead if there are exchange rounds, otherwise just before they write.
    pub fn of(has_rounds: bool) -> Self {
        if has_rounds { Self::Ahead } else { Self::AsTheyWrite }
    }
}

/// Returns the memory in bytes that one worker needs in addition to its write block. For `Ahead`, the result includes
/// the buffers for reading the next round.
pub fn scratch_bytes(io: Option<IoMode>, reads: ReadTiming) -> u64 {
    let bounce = if io == Some(IoMode::Direct) { BOUNCE_BYTES } else { 0 };
    match reads {
        ReadTiming::AsTheyWrite => SCRATCH_BYTES + bounce,
        ReadTiming::Ahead => SCRATCH_BYTES + STAGING_BYTES + 2 * bounce,
    }
}

/// Returns the smallest memory limit, in bytes, with which `threads` threads can run if there are no exchange rounds.
/// Each thread then has a write block of the shortest length, and `scratch` bytes of other buffers.
pub fn least_bytes(scratch: u64, threads: usize) -> u64 {
    BASE_BYTES + threads as u64 * (MIN_WRITE_BLOCK_BYTES + scratch)
}

/// Returns the largest length of write blocks, in bytes, with which `threads` threads fit into `max_memory` beside
/// `taken` bytes for other purposes. The result is at most the default length.
///
/// # Errors
/// `Usage` if even the shortest write blocks do not fit.
pub fn write_block_bytes(max_memory: u64, taken: u64, scratch: u64, threads: usize) -> Result<u64> {
    let floor = taken.saturating_add(least_bytes(scratch, threads));
    if max_memory < floor {
        let (workers, need) = (count(threads, "thread"), if threads == 1 { "needs" } else { "need" });
        let (rounds, need) = if taken > 0 { (" and six times options::bucket_size", "need") } else { ("", need) };
        let fewer = if threads == 1 { "" } else { ", or use fewer options::threads" };
        return Err(Error::usage(
            format!(
                "options::max_memory {} is too low: {workers}{rounds} {need} at least {}",
                human_bytes(max_memory),
                human_bytes(floor)
            ),
            format!("use at least options::max_memory {floor}{fewer}"),
        ));
    }
    Ok(block_bytes(max_memory, taken, scratch, threads).clamp(MIN_WRITE_BLOCK_BYTES, DEFAULT_WRITE_BLOCK_BYTES))
}

/// Returns the largest length of the write blocks of transposed views, in bytes, with which `threads` threads fit into `max_memory`
/// beside `taken` bytes for other purposes. The result is at least `write_block_bytes`, the length of other blocks.
pub fn transposed_block_bytes(
    max_memory: u64,
    taken: u64,
    scratch: u64,
    threads: usize,
    write_block_bytes: u64,
) -> u64 {
    block_bytes(max_memory, taken, scratch, threads).min(TRANSPOSED_BLOCK_BYTES).max(write_block_bytes)
}

/// Returns the memory in bytes that each thread has for a write block. If `taken` is so large that the sums saturate, nothing is
/// left.
fn block_bytes(max_memory: u64, taken: u64, scratch: u64, threads: usize) -> u64 {
    let left = max_memory.saturating_sub(taken).saturating_sub(BASE_BYTES) / threads as u64;
    left.saturating_sub(scratch)
}

/// Returns the memory in bytes that exchange rounds and reduction buffers need. Each of `threads` threads has a
/// reduction buffer, even if fewer threads read and write because memory is short.
pub fn exchange_bytes(bucket: Bucket, threads: usize) -> u64 {
    bucket.held_bytes().saturating_add(sums_bytes(threads))
}

/// Returns the bytes of the reduction buffers of `threads` threads.
pub fn sums_bytes(threads: usize) -> u64 {
    threads as u64 * REDUCING_BYTES
}

/// Returns an upper bound of the memory in bytes that exchange rounds may use. The headers of DST, which reduce this
/// memory, are not laid out yet.
pub fn room_before_layout(args: &SourceOptions, options: &Options) -> u64 {
    room_beside_workers(args.io, options, args.max_memory)
}

/// Returns the memory in bytes that is left for exchange rounds beside the buffers of the workers and the reduction
/// buffers.
pub fn room_beside_workers(io: Option<IoMode>, options: &Options, max_memory: u64) -> u64 {
    let workers = options.threads as u64 * (options.write_block_bytes + scratch_bytes(io, ReadTiming::Ahead));
    max_memory.saturating_sub(BASE_BYTES + workers).saturating_sub(sums_bytes(rayon::current_num_threads()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Dtype;
    use crate::exec::reduce::Reducer;
    use crate::layout::ReduceOp;

    #[test]
    fn lower_memory_limit_gives_shorter_write_blocks() {
        assert_eq!(write_block_bytes(512_000_000, 0, SCRATCH_BYTES, 2).unwrap(), DEFAULT_WRITE_BLOCK_BYTES);
        let small = write_block_bytes(40 << 20, 0, SCRATCH_BYTES, 2).unwrap();
        assert_eq!(transposed_block_bytes(512_000_000, 0, SCRATCH_BYTES, 2, 4 << 20), TRANSPOSED_BLOCK_BYTES);
        assert_eq!(transposed_block_bytes(40 << 20, 0, SCRATCH_BYTES, 2, small), small);
        assert_eq!(transposed_block_bytes(32 << 20, 0, SCRATCH_BYTES, 2, small), small);
        assert!(small < DEFAULT_WRITE_BLOCK_BYTES && 2 * (small + SCRATCH_BYTES) + BASE_BYTES <= 40 << 20);
        assert!(write_block_bytes(32 << 20, 0, SCRATCH_BYTES, 2).is_err());
        // Direct reads need one more buffer, which the minimum includes.
        let direct = scratch_bytes(Some(IoMode::Direct), ReadTiming::AsTheyWrite);
        let floor = least_bytes(direct, 2);
        assert_eq!(write_block_bytes(floor, 0, direct, 2).unwrap(), MIN_WRITE_BLOCK_BYTES);
        let short = write_block_bytes(floor - 1, 0, direct, 2).unwrap_err();
        assert!(short.to_string().ends_with(&format!(" need at least {}", human_bytes(floor))), "{short}");
        assert!(short.hint().unwrap().contains(&floor.to_string()));
        assert_eq!(threads_within(36 << 20, SCRATCH_BYTES, Bottleneck::Disk), 1);
        assert_eq!(write_block_bytes(u64::MAX, u64::MAX, SCRATCH_BYTES, 2).unwrap(), MIN_WRITE_BLOCK_BYTES);
    }

    /// Checks two things. Each worker has more scratch memory if there are exchange rounds, because some workers then
    /// read the next round while others write. With the largest number of threads, all buffers fit into the memory
    /// limit.
    #[test]
    fn rounds_need_additional_scratch_buffers() {
        let (alone, ahead) = (scratch_bytes(None, ReadTiming::AsTheyWrite), scratch_bytes(None, ReadTiming::Ahead));
        assert_eq!(ahead, alone + STAGING_BYTES);
        let (rounds, max) = (100 << 20, 512 << 20);
        let threads = affordable(max - rounds, ahead, MIN_WRITE_BLOCK_BYTES);
        let block = write_block_bytes(max, rounds, ahead, threads).unwrap();
        assert!(block >= MIN_WRITE_BLOCK_BYTES);
        assert!(BASE_BYTES + rounds + threads as u64 * (block + alone + STAGING_BYTES) <= max);
        assert!(write_block_bytes(max, rounds, ahead, threads + 1).is_err());
    }

    /// Checks that every thread of the pool counts with a reduction buffer, and that a reduction needs no larger
    /// buffer. The pool may have more threads than workers, because a process starts them before it connects to other
    /// processes.
    #[test]
    fn reduction_buffers_count_all_threads() {
        let bucket = Bucket::Asked(1 << 20);
        assert_eq!(exchange_bytes(bucket, 8), bucket.held_bytes() + 8 * REDUCING_BYTES);
        let sums = vec![0; 1 << 20];
        let reducer = Reducer::new(Dtype::F32, ReduceOp::Sum, 1).unwrap();
        let (mut value, mut scratch) = (vec![0; reducer.block_bytes()], Vec::new());
        reducer.reduce([&sums[..value.len()]; 2].into_iter(), &mut value, &mut scratch).unwrap();
        assert!(scratch.capacity() as u64 <= REDUCING_BYTES);
    }

    #[test]
    fn disk_gets_more_threads_than_cores_if_write_blocks_keep_their_length() {
        let cores = threads_within(u64::MAX, SCRATCH_BYTES, Bottleneck::Processor);
        assert_eq!(threads_within(512_000_000, SCRATCH_BYTES, Bottleneck::Disk), cores.max(DISK_THREADS));
        let three = BASE_BYTES + 3 * (DEFAULT_WRITE_BLOCK_BYTES + SCRATCH_BYTES);
        let threads = |pace| threads_within(three, SCRATCH_BYTES, pace);
        assert_eq!(threads(Bottleneck::Disk), threads(Bottleneck::Processor).max(3));
        assert_eq!(write_block_bytes(three, 0, SCRATCH_BYTES, 3).unwrap(), DEFAULT_WRITE_BLOCK_BYTES);
    }

    #[test]
    fn caller_without_workers_runs_in_its_own_pool() {
        use rayon::prelude::*;
        let work = || {
            std::thread::spawn(|| {
                let caller = std::thread::current().id();
                let workers = Workers(None);
                // In the second iteration, the thread already belongs to a pool.
                (0..2).all(|_| {
                    workers.install(|| {
                        let ids: Vec<_> = (0..64).into_par_iter().map(|_| std::thread::current().id()).collect();
                        rayon::current_num_threads() == 1 && ids.iter().all(|id| *id == caller)
                    })
                })
            })
        };
        assert!(work().join().unwrap() && work().join().unwrap());
    }

    #[test]
    fn bottleneck_of_a_missing_folder_is_that_of_its_nearest_parent() {
        let disk = if suits_direct_writes(Path::new(".")).unwrap() { Bottleneck::Disk } else { Bottleneck::Processor };
        for destination in ["out", "no/such/folder/out", "out/"] {
            assert_eq!(Bottleneck::of_synced(Some(Path::new(destination))), disk, "{destination}");
        }
        assert_eq!(Bottleneck::of_synced(Some(Path::new("/proc/out"))), Bottleneck::Processor);
        assert_eq!(Bottleneck::of_synced(None), Bottleneck::Disk);
    }
}
