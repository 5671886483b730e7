//! Measures speeds of a device, in bytes copied per second: each byte is read once and written once. For arithmetic,
//! half of the bytes that are read and written count, so that speeds compare.
//!
//! The host's clock measures calls that wait for the device, each of many milliseconds. Compared works take turns,
//! after a warm-up in which clocks rise; the figures are medians. All data is random bytes, many times larger than
//! caches.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dtshard::catalog::Dtype;
use dtshard::comm::{Communicator, Local};
use dtshard::error::{Error, Result};
use dtshard::exchange::{
    FileOwners, FileVisibility, Moves, PooledBuffer, ReductionMethod, ReplicaChoice, Rounds, Shuffle, StridedCopy,
    Topology,
};
use dtshard::exec::cast::Cast;
use dtshard::exec::division::even_share;
use dtshard::exec::reduce::Reducer;
use dtshard::gpu::{CastJob, DeviceShuffle, Gpu, Nccl, Packer, Pinned, ReductionJob, Sharing, TransferTrial};
use dtshard::launch::Part;
use dtshard::layout::ReduceOp;
use dtshard::plan::lower::LoopLevel;

use super::random::Random;
use super::support::model::{Job, tensors};
use super::support::tables::tables;
use super::{CheckResult, figure, packers};

const RUNS: [u64; 6] = [16, 64, 256, 1 << 10, 4 << 10, 64 << 10];
/// Ranks that exchange rows for columns.
const RANKS: u64 = 4;
const BUCKET_BYTES: u64 = 64 << 20;
/// Shortest time of a measured call.
const LONG: Duration = Duration::from_millis(40);
/// Time of the measured rounds; a device finishes all rounds in less time, its replacement only some.
const LONG_ROUNDS: Duration = Duration::from_millis(500);
/// Rounds in flight at a time.
const FEW_ROUNDS: usize = 2;
/// Warm-up before measuring.
const WARM: Duration = Duration::from_millis(300);
const TURNS: usize = 7;

/// Copies, with the offset of each target.
type Copies = Vec<(StridedCopy, usize)>;

/// Measured work, and the bytes that it counts.
struct Work<'a> {
    bytes: u64,
    call: Box<dyn FnMut() -> Result<()> + 'a>,
}

impl<'a> Work<'a> {
    fn new(bytes: u64, call: impl FnMut() -> Result<()> + 'a) -> Self {
        Self { bytes, call: Box::new(call) }
    }

    /// Repeats `call` in one measurement until it takes long enough; `call` gets the number of repetitions.
    fn many(bytes: u64, mut call: impl FnMut(u32) -> Result<()> + 'a) -> Result<Self> {
        call(1)?;
        let begun = Instant::now();
        call(1)?;
        let times = times(LONG, begun.elapsed());
        Ok(Self::new(bytes * u64::from(times), move || call(times)))
    }

    fn copies(trial: &'a mut TransferTrial, copies: Copies) -> Result<Self> {
        let bytes = copies.iter().map(|(copy, _)| copy.len_bytes()).sum();
        Self::many(bytes, move |times| trial.copy(&copies, times))
    }
}

/// Returns how many calls of duration `once` take as long as `long`.
fn times(long: Duration, once: Duration) -> u32 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small number")]
    let times = (long.as_secs_f64() / once.as_secs_f64()).ceil().clamp(1.0, 500.0) as u32;
    times
}

/// Returns bytes per second of each work; the works take turns.
fn rates<const N: usize>(mut works: [Work<'_>; N]) -> Result<[f64; N]> {
    let begun = Instant::now();
    while begun.elapsed() < WARM {
        works.iter_mut().try_for_each(|work| (work.call)())?;
    }
    let mut seconds = [const { Vec::new() }; N];
    for _ in 0..TURNS {
        for (work, seconds) in works.iter_mut().zip(&mut seconds) {
            let begun = Instant::now();
            (work.call)()?;
            seconds.push(begun.elapsed().as_secs_f64());
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "a few digits are printed")]
    let rate = |nth: usize, seconds: &mut Vec<f64>| {
        seconds.sort_unstable_by(f64::total_cmp);
        works[nth].bytes as f64 / seconds[TURNS / 2]
    };
    let mut nths = 0..N;
    Ok(seconds.map(|mut seconds| rate(nths.next().expect("as many"), &mut seconds)))
}

/// Returns random bytes in host memory that the device can access.
fn random(gpu: &Gpu, len: usize) -> Result<PooledBuffer<Pinned>> {
    let mut bytes = Pinned::pool(&gpu.device).buffer(len)?;
    Random::new(4).fill(&mut bytes);
    Ok(bytes)
}

fn trial(gpu: &Gpu, packer: Packer, bytes: &[u8]) -> Result<TransferTrial> {
    let mut trial = TransferTrial::new(&gpu.device, packer, bytes.len(), bytes.len())?;
    trial.upload(bytes).map(|()| trial)
}

/// Returns the reference for all copies within the device: the driver copies everything at once.
fn reference(gpu: &Gpu, bytes: &[u8]) -> Result<(TransferTrial, Copies)> {
    let whole = StridedCopy { source: 0, target: 0, run_bytes: bytes.len() as u64, levels: [].into_iter().collect() };
    Ok((trial(gpu, Packer::Driver("reference copy by the driver".into()), bytes)?, vec![(whole, 0)]))
}

/// Measures pack and unpack, each against a copy of the same size.
pub fn copies(gpu: &Gpu, len: usize) -> CheckResult {
    let bytes = random(gpu, len)?;
    let (mut plain, whole) = reference(gpu, &bytes)?;
    let [copy] = rates([Work::copies(&mut plain, whole.clone())?])?;
    figure("copy within the device", copy, None);
    for (name, packer) in packers(gpu) {
        let mut trial = trial(gpu, packer, &bytes)?;
        for run in RUNS {
            for (what, copies) in [("pack", packs(run, len)), ("unpack", unpacks(run, len))] {
                let works = [Work::copies(&mut plain, whole.clone())?, Work::copies(&mut trial, copies)?];
                let [copy, rate] = rates(works)?;
                figure(&format!("{what} by the {name}, runs of {run} B"), rate, Some(copy));
            }
        }
    }
    Ok(true)
}

/// Measures a sum of four parts in bf16, and a cast of f32 to bf16, against a copy.
pub fn arithmetic(gpu: &Gpu, len: usize) -> CheckResult {
    let arithmetic = gpu.arithmetic().map_err(|why| Error::usage(why.to_owned(), "check the kernel"))?;
    let bytes = random(gpu, len)?;
    let (mut plain, whole) = reference(gpu, &bytes)?;
    let mut trial = trial(gpu, gpu.packer.clone(), &bytes)?;
    let len = len as u64;
    let moved = |read: u64, written: u64| len / read * (read + written) / 2;
    let reducer = Reducer::new(Dtype::Bf16, ReduceOp::Sum, 1).expect("a sum of floats");
    let sum = ReductionJob { reducer, partial_count: 4, numel: len / 8, partial_values: 0, target: 0 };
    // The sum is of random bits: float sums cannot fail.
    let sums = Work::many(moved(4, 1), |times| trial.reduce(arithmetic, &[sum], times).map(drop))?;
    let [copy, rate] = rates([Work::copies(&mut plain, whole.clone())?, sums])?;
    figure("sum of 4 parts in bf16", rate, Some(copy));
    let cast = Cast::new(Dtype::F32, Dtype::Bf16).expect("floats");
    let cast = [CastJob { cast, numel: len / 4, counted: 0..len / 4, source: 0, target: 0 }];
    let casts = Work::many(moved(2, 1), |times| trial.cast(arithmetic, &cast, times).map(drop))?;
    let [copy, rate] = rates([Work::copies(&mut plain, whole)?, casts])?;
    figure("cast of f32 to bf16", rate, Some(copy));
    Ok(true)
}

/// Measures transfers between pinned memory and the device: to it, from it, and both at once.
pub fn transfers(gpu: &Gpu, len: usize) -> CheckResult {
    let bytes = random(gpu, len)?;
    let mut target = Pinned::pool(&gpu.device).buffer(len)?;
    let (mut one, two) = (trial(gpu, gpu.packer.clone(), &bytes)?, trial(gpu, gpu.packer.clone(), &bytes)?);
    let len = len as u64;
    let works = [Work::new(len, || one.upload(&bytes)), Work::new(len, || two.fetch(&mut target))];
    let [up, down] = rates(works)?;
    figure("from pinned memory to the device", up, None);
    figure("from the device to pinned memory", down, None);
    let both = || {
        thread::scope(|scope| {
            let down = scope.spawn(|| two.fetch(&mut target));
            one.upload(&bytes)?;
            down.join().expect("no panic")
        })
    };
    let [both] = rates([Work::new(len, both)])?;
    figure("both at once, each", both, Some(up.min(down)));
    Ok(true)
}

/// Returns copies that pack rows of `RANKS` runs: the runs of each rank one after the other.
fn packs(run: u64, len: usize) -> Vec<(StridedCopy, usize)> {
    let each = len as u64 / RANKS;
    let level = LoopLevel { count: each / run, source_step: RANKS * run, target_step: run };
    let copy = |rank| StridedCopy {
        source: rank * run,
        target: rank * each,
        run_bytes: run,
        levels: [level].into_iter().collect(),
    };
    (0..RANKS).map(|rank| (copy(rank), 0)).collect()
}

/// Returns the inverse copies.
fn unpacks(run: u64, len: usize) -> Vec<(StridedCopy, usize)> {
    let mut copies = packs(run, len);
    for (copy, _) in &mut copies {
        (copy.source, copy.target) = (copy.target, copy.source);
        for level in &mut copy.levels {
            (level.source_step, level.target_step) = (level.target_step, level.source_step);
        }
    }
    copies
}

/// Measures rounds of one process that turns rows into columns, without reading or writing files: transfer, unpack,
/// transfer back, one round after the other, against the transfers alone.
pub fn rounds(gpu: &Gpu, len: usize) -> CheckResult {
    let bytes = random(gpu, len)?;
    let mut target = Pinned::pool(&gpu.device).buffer(len)?;
    let (mut one, two) = (trial(gpu, gpu.packer.clone(), &bytes)?, trial(gpu, gpu.packer.clone(), &bytes)?);
    let peers = Nccl::meet(gpu, Sharing::Refused, &Arc::new(Local::fleet(1).remove(0)))?;
    // The first two tensors are square matrices of 1 GiB.
    let (catalog, reservation) = tables(&Job::fsdp(RANKS), &Job::columns(RANKS), tensors(1).take(2));
    let owners = FileOwners::new(&reservation.files, &[even_share(&reservation.files, Part { index: 0, of: 1 })]);
    let topology = Topology {
        visibility: FileVisibility::Shared,
        nodes: vec![0],
        replica_choice: ReplicaChoice::Any,
        reducing: ReductionMethod::InRankOrder,
    };
    let rounds = Rounds::new(&catalog, &reservation.tensors, &owners, &topology, BUCKET_BYTES);
    let moves = rounds.map(|round| Ok(Arc::new(Moves::new(&round?, 0)))).collect::<Result<Vec<_>>>()?;
    {
        let mut shuffle = DeviceShuffle::new(gpu, &peers, None)?;
        let rooms = shuffle.buffer_pool();
        let mut run = |moves: &[Arc<Moves>]| {
            let mut given = 0;
            let mut in_flight = None;
            for moves in moves {
                let next = (moves, shuffle.begin(moves, rooms.buffer(moves.stage_len)?)?);
                if let Some((before, begun)) = in_flight.replace(next) {
                    given += shuffle.finish(before, begun)?.values.len();
                }
            }
            if let Some((last, begun)) = in_flight {
                given += shuffle.finish(last, begun)?.values.len();
            }
            Ok(given as u64)
        };
        // All rounds, unless they take very long.
        let few = &moves[..moves.len().min(FEW_ROUNDS)];
        run(few)?;
        let begun = Instant::now();
        run(few)?;
        let moves = &moves[..moves.len().min(FEW_ROUNDS * times(LONG_ROUNDS, begun.elapsed()) as usize)];
        let given = run(moves)?;
        let len = len as u64;
        let works = [
            Work::new(len, || one.upload(&bytes)),
            Work::new(len, || two.fetch(&mut target)),
            Work::new(given, || run(moves).map(drop)),
        ];
        let [up, down, rounds] = rates(works)?;
        figure("rounds of 64 MB: up, unpack and down together", rounds, Some(up.min(down)));
    }
    peers.leave().map(|()| true)
}
