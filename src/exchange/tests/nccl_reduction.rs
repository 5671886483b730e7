//! Tests of NCCL reductions: results are close to the results of one process, and have the same bits if nothing is
//! rounded.

use super::case::{ConvertedOutput, split_output};
use super::{Case, Means, Spec, has_valid_length, op, term};
use crate::catalog::Reserved;
use crate::exchange::{FileVisibility, Load, ReductionMethod, ReplicaChoice, Topology, partial_replicas};
use crate::exec::cast::Cast;
use crate::exec::tests::*;
use crate::layout::ReduceOp;
use crate::storage::FileId;

/// The kind of elements that partial values have in a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Terms {
    /// The elements are arbitrary floats.
    Any,
    /// The elements are integers that are so small that no sum and no product of them is rounded.
    Integers,
}

/// Generates tensors with partial values for an exchange between `ranks` processes. NCCL can reduce some of these
/// tensors.
pub(crate) fn specs(ranks: u32) -> impl Strategy<Value = Vec<Spec>> {
    let dtypes = prop::sample::select(vec![
        (Dtype::F32, Dtype::F32),
        (Dtype::F32, Dtype::Bf16),
        (Dtype::Bf16, Dtype::Bf16),
        (Dtype::F16, Dtype::F16),
        (Dtype::F64, Dtype::F64),
        (Dtype::I64, Dtype::I64),
    ]);
    let spec = (dtypes, prop::collection::vec(0..9_u64, 0..4)).prop_flat_map(move |(dtypes, shape)| {
        let count = prop_oneof![3 => Just(u64::from(ranks)), 1 => 1..5_u64];
        let partial_values = prop_oneof![1 => Just(None), 6 => (count, op(dtypes.0)).prop_map(Some)];
        let (from, to) = (layout(shape.len()), layout(shape.len()));
        (Just(shape), Just(dtypes), from, to, partial_values).prop_filter("too long", has_valid_length)
    });
    prop::collection::vec(spec, 1..5)
}

/// Runs an exchange in which each process sees different partial values and writes a part of the output. Returns the
/// output and the load of each process.
pub(crate) fn exchange_partial_values<M: Means>(
    means: &M,
    case: &Case,
    ranks: u32,
    cuts: &[u64],
    bucket_bytes: u64,
) -> (ConvertedOutput, Vec<Load>) {
    case.exchange(
        means,
        &one_partial_value_per_rank(case, ranks),
        &split_output(&case.reservation, cuts, ranks),
        bucket_bytes,
    )
}

/// Returns a topology in which process N sees the source files N, N + `ranks`, and so on. If file N has partial value
/// N, each process sees its own partial value.
pub(super) fn one_partial_value_per_rank(case: &Case, ranks: u32) -> Topology {
    let files = u32::try_from(case.files.ids().count()).unwrap();
    let seen = (0..files).map(|file| std::iter::once(file % ranks).collect()).collect();
    let nodes = vec![0; ranks as usize];
    Topology {
        visibility: FileVisibility::PerRank(seen),
        nodes,
        replica_choice: ReplicaChoice::Any,
        reducing: ReductionMethod::Nccl,
    }
}

impl Case {
    pub(crate) fn with_terms(specs: &[Spec], transpose: bool, terms: Terms) -> Self {
        match terms {
            Terms::Any => Self::new(specs, transpose),
            Terms::Integers => Self::from_terms(specs, transpose, &integer_term),
        }
    }

    /// Asserts that replicas in `found` are equal, and that floats differ from `expected` by at most four rounding
    /// errors.
    #[track_caller]
    pub(crate) fn assert_near(&self, found: ConvertedOutput, expected: &ConvertedOutput) {
        let (mut found, expected) = (found.files, &expected.files);
        let chunks =
            || self.reservation.tensors.iter().flat_map(|of| (0..of.entry.chunks.len()).map(move |at| (of, at)));
        for (tensor, chunk) in chunks().filter(|(tensor, _)| tensor.shares.is_empty()) {
            let alike = |other: &usize| tensor.entry.chunks.tile(*other) == tensor.entry.chunks.tile(chunk);
            for replica in (0..chunk).filter(alike) {
                assert!(
                    chunk_bytes(&found, tensor, chunk) == chunk_bytes(&found, tensor, replica),
                    "replicas are equal"
                );
            }
        }
        for (tensor, chunk) in chunks().filter(|(tensor, _)| tensor.dtype().is_float()) {
            let dtypes = [self.catalog.tensors[tensor.source.0 as usize].dtype, tensor.dtype()];
            let step = dtypes.map(epsilon).into_iter().fold(0.0, f64::max);
            let exact = chunk_bytes(expected, tensor, chunk);
            let near = chunk_bytes_mut(&mut found, tensor, chunk);
            for (near, exact) in to_f64(tensor.dtype(), near).into_iter().zip(to_f64(tensor.dtype(), exact)) {
                assert!((near - exact).abs() <= 4.0 * step * exact.abs().max(64.0), "{near} is not {exact}");
            }
            near.copy_from_slice(exact);
        }
        assert!(found == *expected);
    }
}

/// Returns the index of the file that contains a chunk, and the chunk's byte range in the file.
fn chunk_range(tensor: &Reserved, chunk: usize) -> Option<(usize, std::ops::Range<usize>)> {
    let (file, offset) = tensor.file_offset(chunk)?;
    let at = |offset: u64| usize::try_from(offset).unwrap();
    Some((file as usize, at(offset)..at(offset + tensor.chunk_bytes(chunk))))
}

fn chunk_bytes<'f>(files: &'f [Vec<u8>], tensor: &Reserved, chunk: usize) -> &'f [u8] {
    chunk_range(tensor, chunk).map_or(&[], |(file, bytes)| &files[file][bytes])
}

fn chunk_bytes_mut<'f>(files: &'f mut [Vec<u8>], tensor: &Reserved, chunk: usize) -> &'f mut [u8] {
    chunk_range(tensor, chunk).map_or(&mut [], |(file, bytes)| &mut files[file][bytes])
}

fn to_f64(dtype: Dtype, values: &[u8]) -> Vec<f64> {
    let count = values.len() / usize::try_from(dtype.itemsize()).unwrap();
    let mut wide = vec![0; count * 8];
    match Cast::new(dtype, Dtype::F64) {
        Some(cast) => drop(cast.convert(values, &mut wide)),
        None => wide.copy_from_slice(values),
    }
    wide.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

/// Returns the distance from 1 to the next larger number of the dtype.
fn epsilon(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bf16 => 2.0_f64.powi(-7),
        Dtype::F16 => 2.0_f64.powi(-10),
        Dtype::F32 => 2.0_f64.powi(-23),
        _ => 2.0_f64.powi(-52),
    }
}

fn integer_term(dtype: Dtype, index: u64, partial: u64) -> Vec<u8> {
    let number = u8::try_from((index + partial * 3) % 4).unwrap();
    let float = f32::from(number).to_le_bytes();
    match dtype {
        Dtype::F32 => float.to_vec(),
        Dtype::Bf16 => float[2..].to_vec(),
        Dtype::F64 => f64::from(number).to_le_bytes().to_vec(),
        Dtype::F16 => [0x0000_u16, 0x3C00, 0x4000, 0x4200][usize::from(number)].to_le_bytes().to_vec(),
        _ => term(dtype, index, partial),
    }
}

/// Checks how many bytes NCCL reductions send. Each process has one partial value of the whole tensor, and writes some
/// rows, some columns, or the whole tensor.
pub(crate) fn check_wire_bytes(means: &impl Means) {
    use crate::layout::Placement::{Replicate, Shard};
    for ranks in 2..=4_u32 {
        let one = Layout { mesh: vec![1], placements: vec![Replicate] };
        for (placement, phases) in [(Shard(TensorDim(0)), 1), (Shard(TensorDim(1)), 1), (Replicate, 2)] {
            let to = Layout { mesh: vec![u64::from(ranks)], placements: vec![placement] };
            let sum = Some((u64::from(ranks), ReduceOp::Sum));
            let case = Case::with_terms(
                &[(vec![48, 24], (Dtype::F32, Dtype::F32), one.clone(), to, sum)],
                false,
                Terms::Integers,
            );
            let alone = case.convert_alone();
            let (whole, n) = (48 * 24 * 4, u64::from(ranks));
            for bucket_bytes in [3000, 1 << 20] {
                let (found, loads) = exchange_partial_values(means, &case, ranks, &[], bucket_bytes);
                case.remove_exchanged();
                assert!(found == alone);
                // Partial sums are sent from rank to rank up to the root. The root sends the result to the other ranks.
                let received = whole * (n - 1) * phases;
                let sum = |of: fn(&Load) -> u64| loads.iter().map(of).sum::<u64>();
                assert_eq!((sum(Load::received), sum(|load| load.own_partial_values)), (received, whole));
                // Bytes for all other ranks are sent once.
                assert_eq!(sum(Load::sent), whole * (n - 1) + whole * (phases - 1));
                // If a round has several ranges, all ranks have equal loads.
                let even = |load: &Load| (load.received() * n, load.own_partial_values * n) == (received, whole);
                assert!(bucket_bytes > 3000 || loads.iter().all(even), "{placement:?} of {ranks}: {loads:?}");
            }
        }
    }
}

/// Checks each kind of tensor that NCCL cannot reduce, alone and together with a tensor that NCCL reduces.
pub(crate) fn check_not_reduced_by_nccl(means: &impl Means) {
    use crate::layout::Placement::Replicate;
    let one = || Layout { mesh: vec![1], placements: vec![Replicate] };
    let spec = |dtype, count, op| (vec![6, 8], (dtype, dtype), one(), one(), Some((count, op)));
    let nccl_bytes = |case: &Case| {
        let (found, loads) = exchange_partial_values(means, case, 3, &[], 1 << 20);
        case.assert_near(found, &case.convert_alone());
        loads.iter().map(|load| load.own_partial_values).sum::<u64>()
    };
    let yes = spec(Dtype::F32, 3, ReduceOp::Max);
    for no in [
        spec(Dtype::I64, 3, ReduceOp::Sum),
        spec(Dtype::F32, 2, ReduceOp::Sum),
        spec(Dtype::F32, 4, ReduceOp::Sum),
        spec(Dtype::I64, 3, ReduceOp::Bxor),
    ] {
        assert_eq!(nccl_bytes(&Case::with_terms(std::slice::from_ref(&no), false, Terms::Any)), 0, "{no:?}");
        assert_eq!(nccl_bytes(&Case::with_terms(&[no, yes.clone()], false, Terms::Any)), 6 * 8 * 4);
    }
    // Each rank gets a share of the partial values that is zero outside its part of the tensor.
    assert_eq!(nccl_bytes(&Case::with_terms(&[yes], false, Terms::Any).with_shares()), 0);
    // One rank sees two partial values.
    let case = Case::with_terms(&[spec(Dtype::F32, 3, ReduceOp::Sum)], false, Terms::Any);
    let mut topology = one_partial_value_per_rank(&case, 3);
    let FileVisibility::PerRank(seen) = &mut topology.visibility else { unreachable!() };
    seen[FileId(1).0 as usize] = seen[0].clone();
    let (found, loads) = case.exchange(means, &topology, &split_output(&case.reservation, &[], 3), 1 << 20);
    assert!(found == case.convert_alone() && loads.iter().all(|load| load.own_partial_values == 0));
}

/// Removes bytes from completed output. For tensors that are reduced and have replicas, asserts that
/// [`partial_replicas`] returns the missing bytes and the same elements in the other replica. Nothing else is returned.
#[test]
fn missing_replica_invalidates_the_others() {
    use crate::layout::Placement::{Replicate, Shard};
    let one = || Layout { mesh: vec![1], placements: vec![Replicate] };
    let to = |placement| Layout { mesh: vec![2], placements: vec![placement] };
    let spec = |to, partial_values| (vec![4, 4], (Dtype::F32, Dtype::F32), one(), to, partial_values);
    let sum = Some((2, ReduceOp::Sum));
    let copies = [spec(to(Replicate), sum), spec(to(Shard(TensorDim(0))), sum), spec(to(Replicate), None)];
    let case = Case::new(&copies, false);
    let all = Extents::of_files(&case.reservation.files);
    let invalidated = |missing: &[(u32, std::ops::Range<u64>)]| {
        let mut gone = Extents::new();
        missing.iter().for_each(|(file, range)| gone.insert(*file, range.clone()));
        partial_replicas(&case.catalog, &case.reservation, &all.without(&gone)).iter().collect::<Vec<_>>()
    };
    assert_eq!(invalidated(&[]), []);
    // Each file has 3 bytes, 64 bytes of a replica, 4 bytes, 32 bytes of half a replica, 5 bytes, and 64 bytes of a
    // replica that is not reduced.
    assert_eq!(invalidated(&[(1, 13..23)]), [(0, 13..23), (1, 13..23)]);
    assert_eq!(invalidated(&[(0, 0..5), (1, 60..173)]), [(0, 3..5), (0, 60..67), (1, 3..5), (1, 60..67)]);
    assert_eq!(invalidated(&[(0, 71..172)]), []);
}
