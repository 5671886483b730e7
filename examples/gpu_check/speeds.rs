//! Speeds of a device, in bytes that are copied a second: each is read once and written once. Of arithmetic half of the
//! bytes that are read and written are counted, so that it compares.
//!
//! A clock of the host runs around calls that wait, each of which takes many milliseconds; what is told is the median.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dtshard::catalog::Dtype;
use dtshard::comm::{Communicator, Local, Part};
use dtshard::error::{Error, Result};
use dtshard::exec::cast::Cast;
use dtshard::exec::division::stretch;
use dtshard::exec::exchange::{Counting, Moves, Owners, Parties, Rounds, Shuffle, Sight, StridedCopy};
use dtshard::exec::reduce::Reducer;
use dtshard::gpu::{Conversion, DeviceShuffle, Gpu, Nccl, Packer, Pinned, Reduction, Sharing, Trial};
use dtshard::layout::ReduceOp;
use dtshard::plan::lower::Level;

use super::random::Random;
use super::support::model::{Job, tensors};
use super::support::tables::tables;
use super::{Verdict, figure, packers};

const RUNS: [u64; 6] = [16, 64, 256, 1 << 10, 4 << 10, 64 << 10];
/// Ranks between which rows become columns.
const RANKS: u64 = 4;
const BUCKET_BYTES: u64 = 64 << 20;
/// Launches that are measured together.
const TIMES: u32 = 50;
/// What is measured takes at least so long.
const LONG: Duration = Duration::from_millis(40);

/// Of so many MiB, which should be more than caches have.
pub fn all(gpu: &Gpu, megabytes: usize) -> Verdict {
    let len = megabytes << 20;
    let mut source = Pinned::rooms(&gpu.device).room(len)?;
    Random::new(4).fill(&mut source);
    let trial = |packer: Packer| {
        let mut trial = Trial::new(&gpu.device, packer, len, len)?;
        trial.bring(&source).map(|()| trial)
    };
    let whole = StridedCopy { source: 0, target: 0, run_bytes: len as u64, levels: [].into_iter().collect() };
    let copy = copied(&mut trial(Packer::Copies("as fast as it gets".into()))?, &[(whole, 0)])?;
    figure("copy within the device", copy, None);
    for (name, packer) in packers(gpu) {
        let mut trial = trial(packer)?;
        for run in RUNS {
            for (what, copies) in [("pack", packs(run, len)), ("unpack", unpacks(run, len))] {
                figure(&format!("{what} by the {name}, runs of {run} B"), copied(&mut trial, &copies)?, Some(copy));
            }
        }
    }
    arithmetic(gpu, trial(gpu.packer.clone())?, len as u64, copy)?;
    let (mut one, two) = (trial(gpu.packer.clone())?, trial(gpu.packer.clone())?);
    let up = rate(len as u64, || one.bring(&source))?;
    figure("from pinned memory to the device", up, None);
    let mut room = Pinned::rooms(&gpu.device).room(len)?;
    let down = rate(len as u64, || two.fetch(&mut room))?;
    figure("from the device to pinned memory", down, None);
    let both = thread::scope(|scope| {
        let down = scope.spawn(|| rate(len as u64, || two.fetch(&mut room)));
        let up = rate(len as u64, || one.bring(&source))?;
        Ok::<_, Error>(up.min(down.join().expect("no panic")?))
    })?;
    figure("both at once, each", both, Some(up.min(down)));
    drop((one, two, room, source));
    rounds(gpu, up.min(down))?;
    Ok(true)
}

/// A sum of four parts in bf16, and a cast of f32 to bf16, as far as memory goes.
fn arithmetic(gpu: &Gpu, mut trial: Trial, len: u64, copy: f64) -> Result<()> {
    let Ok(arithmetic) = gpu.arithmetic() else { return Ok(()) };
    let reducer = Reducer::new(Dtype::Bf16, ReduceOp::Sum, 1).expect("a sum of floats");
    let job = Reduction { reducer, parts: 4, numel: len / 8, summands: 0, target: 0 };
    let times = |read: u32, written: u32| u64::from(TIMES) * len / u64::from(read) * u64::from(read + written) / 2;
    // What is summed are random bits: no floats can fail.
    let sums = rate(times(4, 1), || trial.reduce(arithmetic, &[job], TIMES).map(drop))?;
    figure("sum of 4 parts in bf16", sums, Some(copy));
    let cast = Cast::new(Dtype::F32, Dtype::Bf16).expect("floats");
    let job = Conversion { cast, numel: len / 4, counted: 0..len / 4, source: 0, target: 0 };
    let casts = rate(times(2, 1), || trial.convert(arithmetic, std::slice::from_ref(&job), TIMES).map(drop))?;
    figure("cast of f32 to bf16", casts, Some(copy));
    Ok(())
}

/// Rows of as many runs as there are ranks: each rank's runs behind each other.
fn packs(run: u64, len: usize) -> Vec<(StridedCopy, usize)> {
    let each = len as u64 / RANKS;
    let level = Level { count: each / run, source_step: RANKS * run, target_step: run };
    let copy = |rank| StridedCopy {
        source: rank * run,
        target: rank * each,
        run_bytes: run,
        levels: [level].into_iter().collect(),
    };
    (0..RANKS).map(|rank| (copy(rank), 0)).collect()
}

/// The way back.
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

fn copied(trial: &mut Trial, copies: &[(StridedCopy, usize)]) -> Result<f64> {
    let bytes: u64 = copies.iter().map(|(copy, _)| copy.len_bytes()).sum();
    let begun = Instant::now();
    trial.copy(copies, 1)?;
    trial.copy(copies, 1)?;
    let once = begun.elapsed().as_secs_f64() / 2.0;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small number")]
    let times = (LONG.as_secs_f64() / once).ceil().clamp(1.0, 200.0) as u32;
    rate(bytes * u64::from(times), || trial.copy(copies, times))
}

/// How many bytes a second, where work is done with so many.
fn rate(bytes: u64, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    work()?;
    let mut seconds = Vec::new();
    for _ in 0..5 {
        let begun = Instant::now();
        work()?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    seconds.sort_unstable_by(f64::total_cmp);
    #[expect(clippy::cast_precision_loss, reason = "a few digits are printed")]
    let bytes = bytes as f64;
    Ok(bytes / seconds[seconds.len() / 2])
}

/// Rounds of one process that makes columns of rows, with nothing to read or write: up, pack, down, one behind the
/// other. `slowest` is how fast the slowest of them is alone.
fn rounds(gpu: &Gpu, slowest: f64) -> Result<()> {
    let rank = Local::fleet(1).remove(0);
    let peers = Nccl::meet(gpu, Sharing::Refused, rank)?;
    // The first ones are square matrices of 1 GiB.
    let (catalog, reservation) = tables(&Job::fsdp(RANKS), &Job::columns(RANKS), tensors(1).take(2));
    let owners = Owners::new(&reservation.files, &[stretch(&reservation.files, Part { index: 0, of: 1 })]);
    let parties = Parties { sight: Sight::Shared, nodes: vec![0], counting: Counting::Any };
    let rounds = Rounds::new(&catalog, &reservation.tensors, &owners, &parties, BUCKET_BYTES);
    let moves = rounds.map(|round| Ok(Arc::new(Moves::new(&round?, 0)))).collect::<Result<Vec<_>>>()?;
    {
        let mut shuffle = DeviceShuffle::new(gpu, &peers)?;
        let rooms = shuffle.rooms();
        let mut rates = Vec::new();
        for _ in 0..3 {
            let begun = Instant::now();
            let mut bytes = 0;
            let mut under_way = None;
            for moves in &moves {
                let next = (moves, shuffle.begin(moves, rooms.room(moves.stage_len)?)?);
                if let Some((before, begun)) = under_way.replace(next) {
                    bytes += shuffle.finish(before, begun)?.len();
                }
            }
            if let Some((last, begun)) = under_way {
                bytes += shuffle.finish(last, begun)?.len();
            }
            #[expect(clippy::cast_precision_loss, reason = "a few digits are printed")]
            rates.push(bytes as f64 / begun.elapsed().as_secs_f64());
        }
        figure("rounds of 64 MB: up, unpack and down together", rates[2], Some(slowest));
    }
    peers.leave()
}
