//! Compares strided copies on a device with those on the host.

use std::time::{Duration, Instant};

use dtshard::error::Result;
use dtshard::exchange::StridedCopy;
use dtshard::gpu::{Gpu, Packer, TransferTrial};
use dtshard::plan::lower::LoopLevel;
use serde_json::json;

use super::random::Random;
use super::{CheckResult, line, packers};

/// Longest run, in bytes.
const LONGEST_RUN: u64 = 64 << 10;
/// Most bytes in a copy, and most copies in a list.
const MAX_BYTES: u64 = 1 << 20;
const MAX_COPIES: u64 = 40;

/// A copy, with the lengths of its source and target.
struct Shape {
    copy: StridedCopy,
    source_len: u64,
    target_len: u64,
}

/// Returns a copy of runs of whole elements, at random offsets; source and target may have different loop orders.
fn shape(random: &mut Random) -> Shape {
    let itemsize = [1, 2, 3, 4, 6, 8, 12, 16][random.index(8)];
    let longest = 1 << random.below(LONGEST_RUN.ilog2().into());
    let run_bytes = (1 + random.below(2 * longest)).next_multiple_of(itemsize);
    let mut levels: Vec<LoopLevel> = Vec::new();
    let mut left = (MAX_BYTES / run_bytes).min(8192);
    for _ in 0..random.below(6) {
        let most = left.min(1 << random.below(10)).max(1);
        let level = LoopLevel { count: 1 + random.below(most), source_step: 0, target_step: 0 };
        left /= level.count;
        levels.push(level);
    }
    let mut order: Vec<usize> = (0..levels.len()).collect();
    (1..order.len()).for_each(|at| order.swap(at, random.index(at + 1)));
    let (mut source_span, mut target_span) = (run_bytes, run_bytes);
    for (level, nth) in order.into_iter().enumerate() {
        let outer = &mut levels[nth];
        outer.source_step = source_span + random.below(3) * itemsize;
        source_span = outer.source_step * outer.count;
        let own = levels.len() - 1 - level;
        let outer = &mut levels[own];
        outer.target_step = target_span + random.below(3) * itemsize;
        target_span = outer.target_step * outer.count;
    }
    // Aligned to elements, to 16 bytes, or not at all.
    let alignment = [itemsize, 16, 1][random.index(3)];
    let (source, target) = (random.below(40) * alignment, random.below(40) * alignment);
    let copy = StridedCopy { source, target, run_bytes, levels: levels.into_iter().collect() };
    Shape { copy, source_len: source + source_span, target_len: target + target_span }
}

/// Checks lists of random copies, for `seconds` with each packer.
pub fn random(gpu: &Gpu, seconds: u64, seed: u64) -> CheckResult {
    let mut is_right = true;
    for (name, packer) in packers(gpu) {
        let mut random = Random::new(seed);
        let (mut lists, mut copies, mut bytes) = (0_u64, 0, 0);
        let mut wrong = None;
        let until = Instant::now() + Duration::from_secs(seconds);
        while wrong.is_none() && Instant::now() < until {
            let shapes: Vec<Shape> = (0..=random.below(MAX_COPIES)).map(|_| shape(&mut random)).collect();
            wrong = difference(gpu, &packer, &shapes, &mut random)?;
            lists += 1;
            copies += shapes.len();
            bytes += shapes.iter().map(|shape| shape.copy.len_bytes()).sum::<u64>();
        }
        let is_this_right = wrong.is_none();
        is_right &= is_this_right;
        let detail = wrong.unwrap_or_else(|| format!("{copies} copies of {} MB in {lists} lists", bytes / 1_000_000));
        line(&json!({ "check": format!("strided copies by the {name}"), "is_right": is_this_right, "detail": detail }));
    }
    Ok(is_right)
}

/// Returns the first byte in which device and host differ after the same copies.
fn difference(gpu: &Gpu, packer: &Packer, shapes: &[Shape], random: &mut Random) -> Result<Option<String>> {
    let longest = shapes.iter().map(|shape| shape.source_len).max().unwrap_or(0);
    let mut source = vec![0; len(longest)];
    random.fill(&mut source);
    // Bytes that are not written stay 0.
    source.iter_mut().for_each(|byte| *byte |= 1);
    let mut expected = Vec::new();
    let mut placed = Vec::new();
    for shape in shapes {
        let base = expected.len().next_multiple_of(16);
        expected.resize(base + len(shape.target_len), 0);
        shape.copy.copy(&source, &mut expected[base..]);
        placed.push((shape.copy.clone(), base));
    }
    let mut trial = TransferTrial::new(&gpu.device, packer.clone(), source.len(), expected.len())?;
    trial.upload(&source)?;
    trial.copy(&placed, 1)?;
    let mut got = vec![0xA5; expected.len()];
    trial.fetch(&mut got)?;
    let Some(at) = got.iter().zip(&expected).position(|(got, expected)| got != expected) else { return Ok(None) };
    let (copy, base) = &placed[placed.partition_point(|(_, base)| *base <= at) - 1];
    Ok(Some(format!("byte {} of {copy:?} is {}, expected {}", at - base, got[at], expected[at])))
}

/// Checks copies of more than 4 GiB, in the narrowest and the widest lanes, and one copy of very many runs.
pub fn large(gpu: &Gpu) -> CheckResult {
    let run_bytes = (4_u64 << 30) + 4096;
    let mut source = vec![0; len(run_bytes + 16)];
    Random::new(2).fill(&mut source);
    let mut got = vec![0; source.len()];
    let mut is_right = true;
    for (name, packer) in packers(gpu) {
        let mut trial = TransferTrial::new(&gpu.device, packer, source.len(), source.len())?;
        trial.upload(&source)?;
        for start in [0, 1] {
            let copy = StridedCopy { source: start, target: 0, run_bytes, levels: [].into_iter().collect() };
            trial.copy(&[(copy, 0)], 1)?;
            trial.fetch(&mut got)?;
            let same = got[..len(run_bytes)] == source[len(start)..len(start + run_bytes)];
            is_right &= same;
            let check = format!("4.3 GB from byte {start} on by the {name}");
            line(&json!({ "check": check, "is_right": same, "detail": "" }));
        }
        let half = run_bytes / 2;
        trial.copy(&[0, 1].map(|part| (every_other(part, half), 0)), 1)?;
        trial.fetch(&mut got)?;
        let (even, odd) = got[..len(run_bytes)].split_at(len(half));
        let runs = even.chunks_exact(RUN).zip(odd.chunks_exact(RUN)).zip(source.chunks_exact(2 * RUN));
        let mut all = runs.map(|((even, odd), both)| even == &both[..RUN] && odd == &both[RUN..]);
        let same = all.all(|same| same);
        is_right &= same;
        let check = format!("4.3 GB in runs of {RUN} B by the {name}");
        line(&json!({ "check": check, "is_right": same, "detail": "" }));
    }
    Ok(is_right)
}

const RUN: usize = 16;

/// Returns a copy of every other run, of `bytes` in all.
fn every_other(part: u64, bytes: u64) -> StridedCopy {
    let run = RUN as u64;
    let runs = LoopLevel { count: bytes / run, source_step: 2 * run, target_step: run };
    StridedCopy { source: part * run, target: part * bytes, run_bytes: run, levels: [runs].into_iter().collect() }
}

fn len(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a length in memory")
}
