//! Tests of arithmetic on a device: the results must have the same bits as the results of the host. The kernels run on
//! the CPU, in the `gpu-stand-in` library that replaces the CUDA driver.

use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::catalog::Dtype;
use crate::exec::cast::{Cast, LossCounts};
use crate::exec::reduce::{ReduceError, Reducer};
use crate::gpu::{CastJob, ReductionJob, TransferTrial};
use crate::layout::ReduceOp;

const PROMPT: [(&str, &str); 1] = [("GPU_STAND_IN_DELAY_US", "0")];

#[test]
fn device_reductions_equal_host_reductions_stand_in() {
    run_test_with_kernels("arithmetic::random_reductions_equal_the_host", 1, &PROMPT);
}

#[test]
fn device_reduction_errors_equal_host_errors_stand_in() {
    run_test_with_kernels("arithmetic::errors_equal_the_host", 1, &PROMPT);
}

#[test]
fn device_casts_of_edge_values_equal_host_casts_stand_in() {
    run_test_with_kernels("arithmetic::casts_of_edge_values_equal_the_host", 1, &PROMPT);
}

#[test]
fn device_casts_of_random_elements_equal_host_casts_stand_in() {
    run_test_with_kernels("arithmetic::random_casts_equal_the_host", 1, &PROMPT);
}

#[test]
fn without_kernels_there_is_no_arithmetic_stand_in() {
    run_test("arithmetic::missing_kernels_are_an_error", 1, &[("KERNELS", "off")]);
}

const FLOATS: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::Bf16];
const REDUCIBLE: [Dtype; 20] = [
    Dtype::Bool,
    Dtype::U8,
    Dtype::U16,
    Dtype::U32,
    Dtype::U64,
    Dtype::I8,
    Dtype::I16,
    Dtype::I32,
    Dtype::I64,
    Dtype::F16,
    Dtype::Bf16,
    Dtype::F32,
    Dtype::F64,
    Dtype::C32,
    Dtype::C64,
    Dtype::C128,
    Dtype::F8E4m3fn,
    Dtype::F8E5m2,
    Dtype::F8E4m3fnuz,
    Dtype::F8E5m2fnuz,
];

fn size(dtype: Dtype) -> usize {
    usize::try_from(dtype.itemsize()).unwrap()
}

/// Returns an endless sequence of numbers that look random but depend only on the seed.
fn words(mut seed: u64) -> impl Iterator<Item = u64> {
    seed |= 1;
    std::iter::repeat_with(move || {
        seed ^= seed >> 12;
        seed ^= seed << 25;
        seed ^= seed >> 27;
        seed.wrapping_mul(0x2545_F491_4F6C_DD1D)
    })
}

/// Returns elements for tests: many are edge cases (zeros, the largest and smallest, infinities, NaNs), others are
/// close to 1 or small integers, and some are random bits.
fn elements(dtype: Dtype, numel: usize, seed: u64) -> Vec<u8> {
    let (scalar, count) = match dtype {
        Dtype::C32 => (Dtype::F16, 2 * numel),
        Dtype::C64 => (Dtype::F32, 2 * numel),
        Dtype::C128 => (Dtype::F64, 2 * numel),
        real => (real, numel),
    };
    // The number of bits in the mantissa, and the bit pattern of the number 1.
    let (mantissa, one): (u32, u64) = match scalar {
        Dtype::F64 => (52, 0x3ff0 << 48),
        Dtype::F32 => (23, 0x3f80 << 16),
        Dtype::F16 => (10, 0x3c00),
        Dtype::Bf16 => (7, 0x3f80),
        Dtype::F8E4m3fn => (3, 0x38),
        Dtype::F8E4m3fnuz => (3, 0x40),
        Dtype::F8E5m2 => (2, 0x3c),
        Dtype::F8E5m2fnuz => (2, 0x40),
        _ => (3, 0),
    };
    let sign = 1_u64 << (8 * size(scalar) - 1);
    let ones = sign - 1;
    let infinity = ones >> mantissa << mantissa;
    let edges = [
        0,
        1,
        ones,
        infinity,
        infinity + 1,
        infinity - 1,
        infinity + 1 + ones / 3 % (1 << mantissa),
        one,
        1 << mantissa,
        ones - 1,
    ];
    let mut words = words(seed);
    let mut word = || words.next().unwrap();
    let elements = (0..count).map(|_| match word() % 8 {
        0 => edges[usize::try_from(word() % 10).unwrap()] | if word() % 2 == 0 { sign } else { 0 },
        1 => word(),
        2 if scalar >= Dtype::I8 && scalar <= Dtype::I64 => 0_u64.wrapping_sub(word() % 20),
        _ => (one + (word() & ((8 << mantissa) - 1))) | if one > 0 && word() % 2 == 0 { sign } else { 0 },
    });
    elements.flat_map(|element| element.to_le_bytes().into_iter().take(size(scalar))).collect()
}

/// Runs a reduction job on the host, and returns the bytes of the result.
fn reduce_on_host(job: &ReductionJob, memory: &[u8]) -> Result<Vec<u8>, ReduceError> {
    let len = usize::try_from(job.numel).unwrap() * size(job.reducer.dtype());
    let (mut sums, mut value) = (vec![0x5a; len * job.reducer.widening()], vec![0; len]);
    for part in 0..job.partial_count as usize {
        let begin = job.partial_values + part * len;
        job.reducer.add(part == 0, &memory[begin..begin + len], &mut sums);
    }
    job.reducer.finish(&mut sums, &mut value).map(|()| value)
}

/// Returns a GPU and two buffers on it: a source buffer with the bytes `from`, and a target buffer of `into` bytes,
/// which are all 0.
fn trial(from: &[u8], into: usize) -> (Gpu, TransferTrial) {
    let gpu = open(kernels(), 0).unwrap();
    let mut trial = TransferTrial::new(&gpu.device, gpu.packer.clone(), from.len(), into).unwrap();
    trial.upload(from).unwrap();
    (gpu, trial)
}

fn fetch(trial: &TransferTrial, len: usize) -> Vec<u8> {
    let mut got = vec![0xa5; len];
    trial.fetch(&mut got).unwrap();
    got
}

/// A randomly generated reduction: the reducer; the number of partial values, their number of elements and their seed;
/// and the distances in bytes of the partial values and of the result from an aligned offset.
type Job = (Reducer, u32, usize, u64, [usize; 2]);

fn job() -> impl Strategy<Value = Job> {
    let divisor = prop_oneof![4 => Just(1), 1 => Just(2), 1 => Just(3), 1 => Just(7), 1 => Just((1 << 62) + 1)];
    let reducer = (prop::sample::select(&REDUCIBLE[..]), prop::sample::select(&ReduceOp::ALL[..]), divisor);
    let reducer =
        reducer.prop_filter_map("it has no meaning", |(dtype, op, divisor)| Reducer::new(dtype, op, divisor).ok());
    let numel = prop_oneof![0..20_usize, 0..20_usize, 500..3000_usize, Just(4096)];
    let start = || prop_oneof![Just(0_usize), 0..16_usize];
    (reducer, 1..6_u32, numel, any::<u64>(), [start(), start()])
}

/// Returns the reduction jobs, the bytes of their source buffer, and the length of their target buffer.
fn lay_out(jobs: &[Job]) -> (Vec<ReductionJob>, Vec<u8>, usize) {
    let (mut memory, mut end) = (Vec::new(), 0_usize);
    let mut reductions = Vec::new();
    for &(reducer, parts, numel, seed, [partial_values, target]) in jobs {
        let len = numel * size(reducer.dtype());
        let partial_values = memory.len().next_multiple_of(16) + partial_values;
        memory.resize(partial_values, 0);
        memory.extend(elements(reducer.dtype(), numel * parts as usize, seed));
        let target = end.next_multiple_of(16) + target;
        end = target + len;
        reductions.push(ReductionJob { reducer, partial_count: parts, numel: numel as u64, partial_values, target });
    }
    (reductions, memory, end)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    #[ignore = "runs as a child process that another test starts"]
    fn random_reductions_equal_the_host(jobs in prop::collection::vec(job(), 0..6)) {
        let (jobs, memory, end) = lay_out(&jobs);
        let (gpu, mut trial) = trial(&memory, end);
        let outcome = trial.reduce(gpu.arithmetic().unwrap(), &jobs, 1).unwrap();
        let wanted: Vec<_> = jobs.iter().map(|job| reduce_on_host(job, &memory)).collect();
        let failed = wanted.iter().position(Result::is_err);
        let wanted_outcome = failed.map_or(Ok(()), |job| Err((job, wanted[job].clone().unwrap_err())));
        prop_assert_eq!(outcome, wanted_outcome);
        let got = fetch(&trial, end);
        let mut before = 0;
        for (job, wanted) in jobs.iter().zip(wanted) {
            prop_assert!(got[before..job.target].iter().all(|byte| *byte == 0), "beside {:?}", job);
            before = job.target + usize::try_from(job.numel).unwrap() * size(job.reducer.dtype());
            if let Ok(wanted) = wanted {
                prop_assert!(got[job.target..before] == wanted, "{:?}", job);
            }
        }
    }
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn errors_equal_the_host() {
    let reducer = |op, divisor| Reducer::new(Dtype::I64, op, divisor).unwrap();
    let i64s = |values: &[i64]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    // Two elements overflow. The element with the higher index is in a later block, but in an earlier thread of its
    // block.
    let mut partial_values = [vec![i64::MAX; 5000], vec![0; 5000], vec![0; 5000]];
    (partial_values[1][4100], partial_values[1][1700], partial_values[2][1700]) = (1, 5, -3);
    let memory = i64s(&partial_values.concat());
    let (gpu, mut trial) = trial(&memory, 3 * 40_000);
    let mut outcome = |jobs: &[ReductionJob]| trial.reduce(gpu.arithmetic().unwrap(), jobs, 1).unwrap();
    let job =
        |reducer, parts, target| ReductionJob { reducer, partial_count: parts, numel: 5000, partial_values: 0, target };
    let sum = ReduceError::Overflow { dtype: Dtype::I64, op: ReduceOp::Sum, value: i128::from(i64::MAX) + 2 };
    let remainder = ReduceError::Remainder { value: i128::from(i64::MAX), divisor: 2 };
    assert_eq!(outcome(&[job(reducer(ReduceOp::Max, 1), 3, 0)]), Ok(()));
    assert_eq!(
        outcome(&[job(reducer(ReduceOp::Max, 1), 3, 0), job(reducer(ReduceOp::Sum, 1), 3, 40_000)]),
        Err((1, sum))
    );
    let both = [job(reducer(ReduceOp::Avg, 2), 2, 0), job(reducer(ReduceOp::Sum, 1), 3, 40_000)];
    assert_eq!(outcome(&both), Err((0, remainder)), "the first of its job, and the first job");
    // The product overflows 128 bits, unless it is multiplied by 0.
    let product = ReduceError::Overflow { dtype: Dtype::I64, op: ReduceOp::Product, value: i128::MAX };
    let most = ReductionJob { numel: 1, ..job(reducer(ReduceOp::Product, 1), 3, 0) };
    assert_eq!(outcome(&[most]), Err((0, product)));
    assert_eq!(outcome(&[ReductionJob { numel: 5000, ..most }]).unwrap_err().0, 0);
}

/// Casts all elements on the device, and compares the result with the result of the host.
fn assert_cast_matches_host(cast: Cast, source: &[u8]) {
    let numel = source.len() / size(cast.from());
    let mut wanted = vec![0; numel * size(cast.to())];
    let counts = cast.convert(source, &mut wanted);
    let (gpu, mut trial) = trial(source, wanted.len());
    let job = CastJob { cast, numel: numel as u64, counted: 0..numel as u64, source: 0, target: 0 };
    assert_eq!(trial.cast(gpu.arithmetic().unwrap(), &[job], 1).unwrap(), [counts], "{cast:?}");
    let got = fetch(&trial, wanted.len());
    if got != wanted {
        let (from, to) = (size(cast.from()), size(cast.to()));
        let all = source.chunks(from).zip(got.chunks(to).zip(wanted.chunks(to)));
        let wrong = all.into_iter().find(|(_, (got, wanted))| got != wanted);
        panic!("{cast:?}: {wrong:02x?}");
    }
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn casts_of_edge_values_equal_the_host() {
    // Generates every sign, exponent and upper part of a mantissa, followed by bits that are close to a rounding
    // boundary.
    let singles = |head: u16| {
        let tails = [0, 0x1000, 0x2000, 0x3000, 0x4000, 0x6000, 0x8000, 0xa000, 0xc000, 0xf000];
        tails.into_iter().flat_map(move |tail: u32| {
            let middle = (u32::from(head) << 16) + tail;
            [middle.wrapping_sub(1), middle, middle + 1]
        })
    };
    let doubles = |head: u16| {
        let tails = (26..48).map(|bit| 1_u64 << bit).chain([0, 3 << 28, 5 << 28, (1 << 48) - 2]);
        tails.flat_map(move |tail| {
            let middle = (u64::from(head) << 48) + tail;
            [middle.wrapping_sub(1), middle, middle + 1]
        })
    };
    for from in FLOATS {
        let source: Vec<u8> = match from {
            Dtype::F64 => (0..=u16::MAX).flat_map(doubles).flat_map(u64::to_le_bytes).collect(),
            Dtype::F32 => (0..=u16::MAX).flat_map(singles).flat_map(u32::to_le_bytes).collect(),
            _ => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
        };
        for cast in Dtype::CAST_TARGETS.iter().filter_map(|to| Cast::new(from, *to)) {
            assert_cast_matches_host(cast, &source);
        }
    }
}

/// A randomly generated cast: source and target dtype, number of elements, seed, distances in bytes of source and
/// target from an aligned offset, and the range of elements in which lost values are counted.
type Casting = (Dtype, Dtype, usize, u64, [usize; 2], Range<u64>);

fn casting() -> impl Strategy<Value = Casting> {
    let dtypes = (prop::sample::select(&FLOATS[..]), prop::sample::select(&Dtype::CAST_TARGETS[..]));
    let numel = prop_oneof![0..20_usize, 1000..3000_usize, Just(4096)];
    let start = || prop_oneof![Just(0_usize), 0..16_usize];
    let counted = (0..3000_u64, 0..3000_u64).prop_map(|(begin, len)| begin..begin + len);
    (dtypes, numel, any::<u64>(), [start(), start()], counted)
        .prop_map(|((from, to), numel, seed, starts, counted)| (from, to, numel, seed, starts, counted))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    #[ignore = "runs as a child process that another test starts"]
    fn random_casts_equal_the_host(castings in prop::collection::vec(casting(), 0..6)) {
        let (mut memory, mut wanted, mut counts, mut jobs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (from, to, numel, seed, [source, target], counted) in castings {
            let Some(cast) = Cast::new(from, to) else { continue };
            let (source, target) = (memory.len().next_multiple_of(16) + source, wanted.len().next_multiple_of(16_usize) + target);
            let elements = elements(from, numel, seed);
            memory.resize(source, 0);
            memory.extend(&elements);
            wanted.resize(target + numel * size(to), 0);
            cast.convert(&elements, &mut wanted[target..]);
            let within = |at: u64| usize::try_from(at).unwrap().min(numel) * size(from);
            let own = &elements[within(counted.start)..within(counted.end)];
            counts.push(cast.convert(own, &mut vec![0; own.len() / size(from) * size(to)]));
            jobs.push(CastJob { cast, numel: numel as u64, counted, source, target });
        }
        let (gpu, mut trial) = trial(&memory, wanted.len());
        let got: Vec<LossCounts> = trial.cast(gpu.arithmetic().unwrap(), &jobs, 1).unwrap();
        prop_assert_eq!(got, counts);
        prop_assert!(fetch(&trial, wanted.len()) == wanted, "{:?}", jobs);
    }
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn missing_kernels_are_an_error() {
    let gpu = open(kernels(), 0).unwrap();
    assert!(gpu.arithmetic().unwrap_err().contains("switched off"));
    let gpu = open(Kernels::Ptx(PTX.replace("cast", "cost")), 0).unwrap();
    assert!(gpu.arithmetic().unwrap_err().contains("load a kernel"), "{gpu:?}");
}
