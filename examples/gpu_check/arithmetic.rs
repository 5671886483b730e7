//! Compares reductions and casts on a device with those on the host, bit for bit.

use std::time::{Duration, Instant};

use dtshard::catalog::Dtype;
use dtshard::error::Result;
use dtshard::exec::cast::Cast;
use dtshard::exec::reduce::Reducer;
use dtshard::gpu::{Arithmetic, CastJob, Gpu, ReductionJob, TransferTrial};
use dtshard::layout::ReduceOp;
use serde_json::json;

use super::random::Random;
use super::{CheckResult, line};

/// Usual largest number of elements in a job, rare largest number, and jobs in a launch.
const USUAL_ELEMENTS: u64 = 1 << 15;
const MAX_ELEMENTS: u64 = 1 << 21;
const MAX_JOBS: u64 = 12;

const INTEGERS: [Dtype; 9] =
    [Dtype::Bool, Dtype::U8, Dtype::U16, Dtype::U32, Dtype::U64, Dtype::I8, Dtype::I16, Dtype::I32, Dtype::I64];
const COMPLEX: [(Dtype, Dtype); 3] = [(Dtype::C32, Dtype::F16), (Dtype::C64, Dtype::F32), (Dtype::C128, Dtype::F64)];

/// Checks random lists of reductions, then of casts, each for `seconds`.
pub fn random(gpu: &Gpu, seconds: u64, seed: u64) -> CheckResult {
    let checks: [(&str, Check); 2] = [("reductions", reductions), ("casts", casts)];
    let mut is_right = true;
    for (name, check) in checks {
        let mut random = Random::new(seed);
        let (mut lists, mut elements) = (0_u64, 0);
        let mut wrong = gpu.arithmetic().err().map(String::from);
        let until = Instant::now() + Duration::from_secs(seconds);
        while let (None, Ok(arithmetic)) = (&wrong, gpu.arithmetic()) {
            if Instant::now() > until {
                break;
            }
            let checked = check(gpu, arithmetic, &mut random)?;
            (wrong, elements, lists) = (checked.wrong, elements + checked.elements, lists + 1);
        }
        let is_this_right = wrong.is_none();
        is_right &= is_this_right;
        let detail = wrong.unwrap_or_else(|| format!("{elements} elements in {lists} lists"));
        line(&json!({ "check": format!("{name} by the kernel"), "is_right": is_this_right, "detail": detail }));
    }
    Ok(is_right)
}

/// A check of one launch of random jobs.
type Check = fn(&Gpu, &Arithmetic, &mut Random) -> Result<Checked>;

#[derive(Default)]
struct Checked {
    elements: u64,
    wrong: Option<String>,
}

fn size(dtype: Dtype) -> usize {
    usize::try_from(dtype.itemsize()).expect("a few bytes")
}

/// Returns elements of random bits, or numbers of small magnitude.
fn elements(dtype: Dtype, numel: usize, random: &mut Random) -> Vec<u8> {
    if let Some((_, part)) = COMPLEX.iter().find(|(complex, _)| *complex == dtype) {
        return elements(*part, 2 * numel, random);
    }
    let mut bytes = vec![0; numel * size(dtype)];
    random.fill(&mut bytes);
    if random.below(3) == 0 {
        return bytes;
    }
    if INTEGERS.contains(&dtype) {
        bytes.chunks_mut(size(dtype)).for_each(|element| {
            let small = random.below(12).to_le_bytes();
            element.copy_from_slice(&small[..element.len()]);
        });
        return bytes;
    }
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "any number is valid")]
    let numbers =
        (0..numel).flat_map(|_| ((random.below(1 << 24) as f64 / f64::from(1 << 22) - 2.0) as f32).to_le_bytes());
    let numbers: Vec<u8> = numbers.collect();
    match Cast::new(Dtype::F32, dtype) {
        Some(cast) => drop(cast.convert(&numbers, &mut bytes)),
        None => bytes = numbers,
    }
    bytes
}

fn numel(random: &mut Random) -> u64 {
    let most = if random.below(60) == 0 { MAX_ELEMENTS } else { [20, 2000, USUAL_ELEMENTS][random.index(3)] };
    random.below(most)
}

/// Returns an offset after `end`: 16-byte aligned, or arbitrary.
fn start(end: usize, random: &mut Random) -> usize {
    end.next_multiple_of(16) + if random.below(2) == 0 { 0 } else { random.index(16) }
}

fn reducer(random: &mut Random) -> Reducer {
    let mut dtypes = INTEGERS.to_vec();
    dtypes.extend(Dtype::CAST_TARGETS);
    dtypes.extend(COMPLEX.map(|(complex, _)| complex));
    loop {
        let divisor = [1, 1, 2, 3, 1024][random.index(5)];
        if let Ok(reducer) = Reducer::new(dtypes[random.index(dtypes.len())], ReduceOp::ALL[random.index(8)], divisor) {
            return reducer;
        }
    }
}

fn reductions(gpu: &Gpu, arithmetic: &Arithmetic, random: &mut Random) -> Result<Checked> {
    let (mut memory, mut end, mut jobs, mut checked) = (Vec::new(), 0, Vec::new(), Checked::default());
    for _ in 0..=random.below(MAX_JOBS) {
        let (reducer, numel, parts) = (reducer(random), numel(random), 1 + random.index(5));
        let count = usize::try_from(numel).expect("few");
        let (partial_values, target) = (start(memory.len(), random), start(end, random));
        memory.resize(partial_values, 0);
        (0..parts).for_each(|_| memory.extend(elements(reducer.dtype(), count, random)));
        end = target + count * size(reducer.dtype());
        jobs.push(ReductionJob {
            reducer,
            partial_count: u32::try_from(parts).expect("few"),
            numel,
            partial_values,
            target,
        });
        checked.elements += numel * parts as u64;
    }
    let mut trial = TransferTrial::new(&gpu.device, gpu.packer.clone(), memory.len(), end)?;
    trial.upload(&memory)?;
    let outcome = trial.reduce(arithmetic, &jobs, 1)?;
    let mut got = vec![0xA5; end];
    trial.fetch(&mut got)?;
    // Bytes that are not written stay 0.
    let (mut expected_outcome, mut expected) = (Ok(()), vec![0; end]);
    for (nth, job) in jobs.iter().enumerate() {
        let len = usize::try_from(job.numel).expect("few") * size(job.reducer.dtype());
        let (mut sums, value) = (vec![0; len * job.reducer.widening()], job.target..job.target + len);
        for part in 0..job.partial_count as usize {
            job.reducer.add(part == 0, &memory[job.partial_values + part * len..][..len], &mut sums);
        }
        if let Err(fault) = job.reducer.finish(&mut sums, &mut expected[value.clone()]) {
            expected_outcome = expected_outcome.and(Err((nth, fault)));
            expected[value.clone()].copy_from_slice(&got[value]);
        }
    }
    if let Some(at) = got.iter().zip(&expected).position(|(got, expected)| got != expected) {
        let job = jobs.iter().rfind(|job| job.target <= at);
        checked.wrong = Some(format!("byte {at} is {}, expected {}: {job:?}", got[at], expected[at]));
    } else if outcome != expected_outcome {
        checked.wrong = Some(format!("{outcome:?}, expected {expected_outcome:?}"));
    }
    Ok(checked)
}

fn casts(gpu: &Gpu, arithmetic: &Arithmetic, random: &mut Random) -> Result<Checked> {
    let (mut memory, mut expected, mut jobs, mut checked) = (Vec::new(), Vec::new(), Vec::new(), Checked::default());
    let mut counts = Vec::new();
    for _ in 0..=random.below(MAX_JOBS) {
        let from = Dtype::CAST_TARGETS[random.index(4)];
        let Some(cast) = Cast::new(from, Dtype::CAST_TARGETS[random.index(8)]) else { continue };
        let numel = numel(random);
        let elements = elements(from, usize::try_from(numel).expect("few"), random);
        let (source, target) = (start(memory.len(), random), start(expected.len(), random));
        memory.resize(source, 0);
        memory.extend(&elements);
        expected.resize(target + elements.len() / size(from) * size(cast.to()), 0);
        counts.push(cast.convert(&elements, &mut expected[target..]));
        jobs.push(CastJob { cast, numel, counted: 0..numel, source, target });
        checked.elements += numel;
    }
    let mut trial = TransferTrial::new(&gpu.device, gpu.packer.clone(), memory.len(), expected.len())?;
    trial.upload(&memory)?;
    let got_counts = trial.cast(arithmetic, &jobs, 1)?;
    let mut got = vec![0xA5; expected.len()];
    trial.fetch(&mut got)?;
    if let Some(at) = got.iter().zip(&expected).position(|(got, expected)| got != expected) {
        let job = jobs.iter().rfind(|job| job.target <= at);
        checked.wrong = Some(format!("byte {at} is {}, expected {}: {job:?}", got[at], expected[at]));
    } else if got_counts != counts {
        checked.wrong = Some(format!("{got_counts:?}, expected {counts:?}: {jobs:?}"));
    }
    Ok(checked)
}
