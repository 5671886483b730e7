//! Tests of strided copies on a device, by the kernel and by the driver. The bytes must equal the bytes of copies on
//! the host.

use proptest::prelude::*;

use super::*;
use crate::exchange::StridedCopy;
use crate::gpu::copies::LoopNest;
use crate::gpu::{DeviceBytes, TransferTrial};
use crate::plan::lower::LoopLevel;

#[test]
fn kernel_copies_equal_host_copies_stand_in() {
    run_test_with_kernels("copying::random_copies_equal_the_host", 1, &[("GPU_STAND_IN_DELAY_US", "0")]);
}

#[test]
fn driver_copies_equal_host_copies_stand_in() {
    run_test("copying::random_copies_equal_the_host", 1, &[("GPU_STAND_IN_DELAY_US", "0"), ("KERNELS", "off")]);
}

/// The loops of a random copy. The first part has, for each loop, its number of iterations, and the gaps after each
/// iteration in the source and in the target. The second part is the order of the loops in the source.
type Shape = (Vec<(u64, u64, u64)>, Vec<usize>);

/// Generates a copy of runs of whole elements, which do not overlap in the target. Also returns the lengths in bytes of
/// the source buffer and of the target buffer.
pub fn copy() -> impl Strategy<Value = (StridedCopy, u64, u64)> {
    let itemsize = prop_oneof![Just(1_u64), Just(2), Just(3), Just(4), Just(6), Just(8), Just(12), Just(16)];
    let run = prop_oneof![4 => 1..6_u64, 2 => 6..40_u64, 1 => 3000..6000_u64];
    let shape = (0..6_usize).prop_flat_map(|loops| {
        let order = Just((0..loops).collect::<Vec<_>>()).prop_shuffle();
        (prop::collection::vec((1..4_u64, 0..3_u64, 0..3_u64), loops), order)
    });
    let starts = (0..5_u64, 0..5_u64, 0..17_u64, 0..17_u64);
    (itemsize, run, shape, starts).prop_map(|(itemsize, run, shape, starts)| strided(itemsize, run, shape, starts))
}

fn strided(itemsize: u64, run: u64, (turns, order): Shape, starts: (u64, u64, u64, u64)) -> (StridedCopy, u64, u64) {
    let run_bytes = run * itemsize;
    let mut levels = vec![LoopLevel { count: 1, source_step: 0, target_step: 0 }; turns.len()];
    let (mut source_span, mut target_span) = (run_bytes, run_bytes);
    for (nth, (count, _, gap)) in turns.iter().enumerate().rev() {
        let step = target_span + gap * itemsize;
        levels[nth] = LoopLevel { count: *count, source_step: 0, target_step: step };
        target_span = step * count;
    }
    for nth in order {
        let (count, gap, _) = turns[nth];
        levels[nth].source_step = source_span + gap * itemsize;
        source_span = levels[nth].source_step * count;
    }
    // Elements may or may not be aligned.
    let (source, target) = (starts.0 * itemsize + starts.2 / 16, starts.1 * itemsize + starts.3 / 16);
    let copy = StridedCopy { source, target, run_bytes, levels: levels.into_iter().collect() };
    (copy, source + source_span, target + target_span)
}

/// Makes all copies on the device in order, and returns the content of the target buffer. The number beside a copy is
/// added to its target offset.
fn copy_on_device(gpu: &Gpu, source: &[u8], target_len: usize, copies: &[(StridedCopy, usize)]) -> Vec<u8> {
    let mut trial = TransferTrial::new(&gpu.device, gpu.packer.clone(), source.len(), target_len).unwrap();
    let mut got = vec![0; target_len];
    trial.upload(source).unwrap();
    trial.copy(copies, 1).unwrap();
    trial.fetch(&mut got).unwrap();
    got
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    #[test]
    #[ignore = "runs as a child process that another test starts"]
    fn random_copies_equal_the_host(copies in prop::collection::vec(copy(), 0..5)) {
        let longest = copies.iter().map(|(_, source, _)| *source).max().unwrap_or(0);
        prop_assume!(longest < 4 << 20 && copies.iter().all(|(_, _, target)| *target < 4 << 20));
        let source: Vec<u8> = (0..longest).map(|at| u8::try_from(at * 7 % 251).unwrap() | 1).collect();
        let mut expected = Vec::new();
        let mut placed = Vec::new();
        for (copy, _, len) in copies {
            let base = expected.len().next_multiple_of(16);
            expected.resize(base + usize::try_from(len).unwrap(), 0);
            copy.copy(&source, &mut expected[base..]);
            placed.push((copy, base));
        }
        let gpu = open(kernels(), 0).unwrap();
        prop_assert!(copy_on_device(&gpu, &source, expected.len(), &placed) == expected);
    }
}

#[test]
fn copy_beyond_its_buffer_panics_stand_in() {
    run_test("copying::copy_beyond_its_buffer_panics", 1, &[]);
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn copy_beyond_its_buffer_panics() {
    let gpu = open(kernels(), 0).unwrap();
    let memory = || DeviceBytes::new(&gpu.device, 64, "a test").unwrap();
    let (from, into) = (memory(), memory());
    let (copy, source, target) = strided(4, 2, (vec![(3, 1, 0)], vec![0]), (0, 0, 0, 0));
    assert_eq!((source, target), (36, 24));
    assert!(LoopNest::new(&copy, &from, &into, 40).is_some());
    let beyond = || LoopNest::new(&copy, &from, &into, 41);
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(beyond)).unwrap_err();
}
