//! The memory that a run may take, and the threads and strips that it has room for. [`estimate`](super::estimate) is of a
//! whole conversion.
//!
//! Counts bytes. `--max-memory` bounds buffers, and the headers and tables of DST; what is told (`peak_bytes`) also has
//! the catalog, which follows the number of chunks and has no bound. Invariant: no run takes more than is told.

use std::path::Path;
use std::sync::{Arc, Mutex};

use super::bucket::Bucket;
use crate::convert::options::SourceOptions;
use crate::error::{Error, Result};
use crate::exec::{DEFAULT_WRITE_BLOCK_BYTES, Options, REDUCING_BYTES, SCRATCH_BYTES, STAGING_BYTES};
use crate::launch::cpus::cpus;
use crate::launch::process_environment;
use crate::quantity::{count, human_bytes};
use crate::storage::filesystem::{nearest_folder, suits_direct_writes};
use crate::storage::{BOUNCE_BYTES, IoMode};

/// What threads wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// For the processor, most of the time.
    Processor,
    /// For a disk, which has them sleep until what they write is on it.
    Disk,
}

impl Bottleneck {
    /// Of writing `destination`, where all of it is to be on disk in the end and nobody else has a part in it. A dry run
    /// may not know where to: then it promises for a disk.
    pub fn of_synced(destination: Option<&Path>) -> Self {
        let is_on_disk = |destination: &Path| suits_direct_writes(nearest_folder(destination)).is_ok_and(|suits| suits);
        if destination.is_none_or(is_on_disk) { Self::Disk } else { Self::Processor }
    }
}

/// Threads and buffers for a run with these rounds, if it has them.
///
/// # Errors
/// `Usage` where there is no such number of threads, or too little memory for them.
pub fn work_options(
    args: &SourceOptions,
    sync: bool,
    pace: Bottleneck,
    rounds: Option<Bucket>,
) -> Result<(Options, Workers)> {
    let io = args.io;
    let max_memory = args.max_memory;
    let scratch = scratch_bytes(io, ReadTiming::of(rounds.is_some()));
    // Rounds give way to threads that are asked for, and to one at least.
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
                "leave it out for one thread a core",
            ));
        }
        Some(threads) if threads > MAX_THREADS => {
            return Err(Error::usage(
                format!("options::threads {threads}: more than {MAX_THREADS}"),
                "leave it out for one thread a core",
            ));
        }
        Some(threads) => threads,
    };
    let workers = Workers::start(threads);
    let taken = taken.saturating_add(threads as u64 * reducing);
    Ok((Options { threads, write_block_bytes: strip_bytes(max_memory, taken, scratch, threads)?, sync }, workers))
}

/// Threads that share the work of one operation.
#[derive(Debug)]
pub struct Workers(Option<rayon::ThreadPool>);

impl Workers {
    /// Starts as many of `wanted` threads as the system lets this process have.
    pub fn start(wanted: usize) -> Self {
        let threads = startable_threads(wanted);
        let pool = (threads > 0).then(|| rayon::ThreadPoolBuilder::new().num_threads(threads).build().ok());
        Self(pool.flatten())
    }

    /// Runs `work` on these threads. Without any, the thread of the caller does all work, as the only one of a pool of its
    /// own. Rayon's global pool belongs to the program, and is not used.
    pub fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        if let Some(pool) = &self.0 {
            return pool.install(work);
        }
        // A thread that belongs to a pool cannot join another one: it works in its own. A pool of this thread starts none, so
        // there is no other reason to fail.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
        let done = work();
        drop(pool);
        done
    }
}

/// Returns how many of `wanted` threads the system can start beside those for signals, leases and progress.
fn startable_threads(wanted: usize) -> usize {
    const OTHERS: usize = 4;
    let gate = Arc::new(Mutex::new(()));
    let closed = gate.lock();
    let start = |_| {
        let gate = Arc::clone(&gate);
        std::thread::Builder::new().spawn(move || drop(gate.lock())).ok()
    };
    let started: Vec<_> = (0..wanted + OTHERS).map_while(start).collect();
    drop(closed);
    let count = started.len();
    started.into_iter().for_each(|thread| drop(thread.join()));
    count.saturating_sub(OTHERS)
}

/// More than any machine has cores.
const MAX_THREADS: usize = 4096;

/// Memory that is not buffers: the program, its stacks, and a catalog of ordinary size.
pub const BASE_BYTES: u64 = 32 << 20;

/// The smallest strip that is worth a system call.
pub const LEAST_STRIP_BYTES: u64 = 64 << 10;

/// Threads that keep a disk busy, whatever the cores: while some sleep until their strips are written, others gather.
const DISK_THREADS: usize = 4;

/// One thread a core that this process may use, or as many as the memory allows. Those that a disk is worth beyond are not
/// worth shorter strips, and where Slurm counts CPUs there are none.
fn threads_within(max_memory: u64, scratch: u64, pace: Bottleneck) -> usize {
    let given = cpus(&process_environment);
    let cores = cores(given);
    let affordable = |strip_bytes: u64| affordable(max_memory, scratch, strip_bytes);
    let for_disk = if pace == Bottleneck::Disk && given.is_none() { DISK_THREADS } else { 1 };
    let for_disk = for_disk.min(affordable(DEFAULT_WRITE_BLOCK_BYTES));
    cores.min(affordable(LEAST_STRIP_BYTES)).max(for_disk).clamp(1, MAX_THREADS)
}

/// Those that this process may use, of which Slurm may have given some.
pub fn cores(given: Option<usize>) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    given.map_or(cores, |given| cores.min(given))
}

/// How many threads with strips of this length there is memory for.
pub fn affordable(max_memory: u64, scratch: u64, strip_bytes: u64) -> usize {
    let threads = max_memory.saturating_sub(BASE_BYTES) / (strip_bytes + scratch);
    usize::try_from(threads).unwrap_or(usize::MAX)
}

/// When workers read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadTiming {
    AsTheyWrite,
    /// For rounds, while others write.
    Ahead,
}

impl ReadTiming {
    pub fn of(has_rounds: bool) -> Self {
        if has_rounds { Self::Ahead } else { Self::AsTheyWrite }
    }
}

/// What a worker that reads in this way takes besides its strip, with what its like takes that reads for rounds.
pub fn scratch_bytes(io: Option<IoMode>, reads: ReadTiming) -> u64 {
    let bounce = if io == Some(IoMode::Direct) { BOUNCE_BYTES } else { 0 };
    match reads {
        ReadTiming::AsTheyWrite => SCRATCH_BYTES + bounce,
        ReadTiming::Ahead => SCRATCH_BYTES + STAGING_BYTES + 2 * bounce,
    }
}

/// Below this, these threads cannot work.
pub fn least_bytes(scratch: u64, threads: usize) -> u64 {
    BASE_BYTES + threads as u64 * (LEAST_STRIP_BYTES + scratch)
}

/// Strips small enough for the memory that is allowed, less what other things take.
pub fn strip_bytes(max_memory: u64, taken: u64, scratch: u64, threads: usize) -> Result<u64> {
    let floor = taken.saturating_add(least_bytes(scratch, threads));
    if max_memory < floor {
        let (workers, need) = (count(threads, "thread"), if threads == 1 { "needs" } else { "need" });
        let (rounds, need) = if taken > 0 { (" and six times options::bucket_size", "need") } else { ("", need) };
        let fewer = if threads == 1 { "" } else { ", or use fewer options::threads" };
        return Err(Error::usage(
            format!(
                "options::max_memory {}: {workers}{rounds} {need} at least {}",
                human_bytes(max_memory),
                human_bytes(floor)
            ),
            format!("allow options::max_memory {floor}{fewer}"),
        ));
    }
    // Where so much is taken that sums end at what 64 bits hold, nothing is left.
    let left = max_memory.saturating_sub(taken).saturating_sub(BASE_BYTES) / threads as u64;
    Ok(left.saturating_sub(scratch).clamp(LEAST_STRIP_BYTES, DEFAULT_WRITE_BLOCK_BYTES))
}

/// Rounds, which are reduced by as many threads as there are: also by those that are not to read and write, since there is
/// no memory for that.
pub fn exchange_bytes(bucket: Bucket, threads: usize) -> u64 {
    bucket.held_bytes().saturating_add(sums_bytes(threads))
}

/// What so many threads reduce in.
pub fn sums_bytes(threads: usize) -> u64 {
    threads as u64 * REDUCING_BYTES
}

/// The same, as long as nothing is laid out: it may be less.
pub fn room_before_layout(args: &SourceOptions, options: &Options) -> u64 {
    room_beside_workers(args.io, options, args.max_memory)
}

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
    fn strips_shrink_with_the_memory_that_is_allowed() {
        assert_eq!(strip_bytes(512_000_000, 0, SCRATCH_BYTES, 2).unwrap(), DEFAULT_WRITE_BLOCK_BYTES);
        let small = strip_bytes(40 << 20, 0, SCRATCH_BYTES, 2).unwrap();
        assert!(small < DEFAULT_WRITE_BLOCK_BYTES && 2 * (small + SCRATCH_BYTES) + BASE_BYTES <= 40 << 20);
        assert!(strip_bytes(32 << 20, 0, SCRATCH_BYTES, 2).is_err());
        // Direct reads take a buffer more, which the floor has.
        let direct = scratch_bytes(Some(IoMode::Direct), ReadTiming::AsTheyWrite);
        let floor = least_bytes(direct, 2);
        assert_eq!(strip_bytes(floor, 0, direct, 2).unwrap(), LEAST_STRIP_BYTES);
        let short = strip_bytes(floor - 1, 0, direct, 2).unwrap_err();
        assert!(short.to_string().ends_with(&format!(" need at least {}", human_bytes(floor))), "{short}");
        assert!(short.hint().unwrap().contains(&floor.to_string()));
        assert_eq!(threads_within(36 << 20, SCRATCH_BYTES, Bottleneck::Disk), 1);
        assert_eq!(strip_bytes(u64::MAX, u64::MAX, SCRATCH_BYTES, 2).unwrap(), LEAST_STRIP_BYTES);
    }

    /// Some write a round while others read the next one.
    #[test]
    fn rounds_take_scratch_of_their_own() {
        let (alone, ahead) = (scratch_bytes(None, ReadTiming::AsTheyWrite), scratch_bytes(None, ReadTiming::Ahead));
        assert_eq!(ahead, alone + STAGING_BYTES);
        let (rounds, max) = (100 << 20, 512 << 20);
        let threads = affordable(max - rounds, ahead, LEAST_STRIP_BYTES);
        let strip = strip_bytes(max, rounds, ahead, threads).unwrap();
        assert!(strip >= LEAST_STRIP_BYTES);
        assert!(BASE_BYTES + rounds + threads as u64 * (strip + alone + STAGING_BYTES) <= max);
        assert!(strip_bytes(max, rounds, ahead, threads + 1).is_err());
    }

    /// There may be more of those than workers: a process that joins others has made them by then.
    #[test]
    fn all_threads_reduce() {
        let bucket = Bucket::Asked(1 << 20);
        assert_eq!(exchange_bytes(bucket, 8), bucket.held_bytes() + 8 * REDUCING_BYTES);
        let sums = vec![0; 1 << 20];
        let reducer = Reducer::new(Dtype::F32, ReduceOp::Sum, 1).unwrap();
        let (mut value, mut scratch) = (vec![0; reducer.block_bytes()], Vec::new());
        reducer.reduce([&sums[..value.len()]; 2].into_iter(), &mut value, &mut scratch).unwrap();
        assert!(scratch.capacity() as u64 <= REDUCING_BYTES);
    }

    #[test]
    fn a_disk_gets_threads_beyond_cores_as_far_as_strips_stay_long() {
        let cores = threads_within(u64::MAX, SCRATCH_BYTES, Bottleneck::Processor);
        assert_eq!(threads_within(512_000_000, SCRATCH_BYTES, Bottleneck::Disk), cores.max(DISK_THREADS));
        let three = BASE_BYTES + 3 * (DEFAULT_WRITE_BLOCK_BYTES + SCRATCH_BYTES);
        let threads = |pace| threads_within(three, SCRATCH_BYTES, pace);
        assert_eq!(threads(Bottleneck::Disk), threads(Bottleneck::Processor).max(3));
        assert_eq!(strip_bytes(three, 0, SCRATCH_BYTES, 3).unwrap(), DEFAULT_WRITE_BLOCK_BYTES);
    }

    #[test]
    fn caller_without_threads_works_in_a_pool_of_its_own() {
        use rayon::prelude::*;
        let work = || {
            std::thread::spawn(|| {
                let caller = std::thread::current().id();
                let workers = Workers(None);
                // Twice: the second time, the thread belongs to a pool already.
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
    fn pace_is_that_of_the_folder_that_there_is() {
        let disk = if suits_direct_writes(Path::new(".")).unwrap() { Bottleneck::Disk } else { Bottleneck::Processor };
        for destination in ["out", "no/such/folder/out", "out/"] {
            assert_eq!(Bottleneck::of_synced(Some(Path::new(destination))), disk, "{destination}");
        }
        assert_eq!(Bottleneck::of_synced(Some(Path::new("/proc/out"))), Bottleneck::Processor);
        assert_eq!(Bottleneck::of_synced(None), Bottleneck::Disk);
    }
}
