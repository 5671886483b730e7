//! Values that NCCL makes of summands: near those of one process, and the same bits where nothing is rounded.

use super::case::{Written, deal};
use super::{Case, Means, Spec, fits, op, term};
use crate::catalog::Reserved;
use crate::exchange::{Counting, FileVisibility, Load, ReductionMethod, Topology, partial_replicas};
use crate::exec::cast::Cast;
use crate::exec::tests::*;
use crate::layout::ReduceOp;
use crate::storage::FileId;

/// What summands are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Terms {
    Any,
    /// Whole numbers, so few and so small that nothing that is made of them has to be rounded.
    Whole,
}

/// Tensors of which NCCL can make some, with so many ranks.
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
        let summands = prop_oneof![1 => Just(None), 6 => (count, op(dtypes.0)).prop_map(Some)];
        let (from, to) = (layout(shape.len()), layout(shape.len()));
        (Just(shape), Just(dtypes), from, to, summands).prop_filter("too long", fits)
    });
    prop::collection::vec(spec, 1..5)
}

/// Ranks that see another summand each, and share the output; what each sends, receives and has.
pub(crate) fn together<M: Means>(
    means: &M,
    case: &Case,
    ranks: u32,
    cuts: &[u64],
    bucket_bytes: u64,
) -> (Written, Vec<Load>) {
    case.together(means, &one_each(case, ranks), &deal(&case.reservation, cuts, ranks), bucket_bytes)
}

/// The files of summand N are seen by rank N, where there are as many.
pub(super) fn one_each(case: &Case, ranks: u32) -> Topology {
    let files = u32::try_from(case.files.ids().count()).unwrap();
    let seen = (0..files).map(|file| std::iter::once(file % ranks).collect()).collect();
    let nodes = vec![0; ranks as usize];
    Topology { sight: FileVisibility::PerRank(seen), nodes, counting: Counting::Any, reducing: ReductionMethod::Nccl }
}

impl Case {
    pub(crate) fn of(specs: &[Spec], transpose: bool, terms: Terms) -> Self {
        match terms {
            Terms::Any => Self::new(specs, transpose),
            Terms::Whole => Self::of_terms(specs, transpose, &whole),
        }
    }

    /// Replicas in `found` are the same, and floats are those of `wanted`, but for what is lost where each of four steps
    /// rounds.
    #[track_caller]
    pub(crate) fn assert_near(&self, found: Written, wanted: &Written) {
        let (mut found, wanted) = (found.files, &wanted.files);
        let chunks =
            || self.reservation.tensors.iter().flat_map(|of| (0..of.entry.chunks.len()).map(move |at| (of, at)));
        for (tensor, chunk) in chunks().filter(|(tensor, _)| tensor.shares.is_empty()) {
            let alike = |other: &usize| tensor.entry.chunks.tile(*other) == tensor.entry.chunks.tile(chunk);
            for replica in (0..chunk).filter(alike) {
                assert!(part(&found, tensor, chunk) == part(&found, tensor, replica), "replicas are made once");
            }
        }
        for (tensor, chunk) in chunks().filter(|(tensor, _)| tensor.dtype().is_float()) {
            let dtypes = [self.catalog.tensors[tensor.source.0 as usize].dtype, tensor.dtype()];
            let step = dtypes.map(epsilon).into_iter().fold(0.0, f64::max);
            let exact = part(wanted, tensor, chunk);
            let near = part_mut(&mut found, tensor, chunk);
            for (near, exact) in doubles(tensor.dtype(), near).into_iter().zip(doubles(tensor.dtype(), exact)) {
                assert!((near - exact).abs() <= 4.0 * step * exact.abs().max(64.0), "{near} is not {exact}");
            }
            near.copy_from_slice(exact);
        }
        assert!(found == *wanted);
    }
}

/// The bytes of a chunk in the files it is written to.
fn place(tensor: &Reserved, chunk: usize) -> Option<(usize, std::ops::Range<usize>)> {
    let (file, offset) = tensor.file_offset(chunk)?;
    let at = |offset: u64| usize::try_from(offset).unwrap();
    Some((file as usize, at(offset)..at(offset + tensor.chunk_bytes(chunk))))
}

fn part<'f>(files: &'f [Vec<u8>], tensor: &Reserved, chunk: usize) -> &'f [u8] {
    place(tensor, chunk).map_or(&[], |(file, bytes)| &files[file][bytes])
}

fn part_mut<'f>(files: &'f mut [Vec<u8>], tensor: &Reserved, chunk: usize) -> &'f mut [u8] {
    place(tensor, chunk).map_or(&mut [], |(file, bytes)| &mut files[file][bytes])
}

fn doubles(dtype: Dtype, values: &[u8]) -> Vec<f64> {
    let count = values.len() / usize::try_from(dtype.itemsize()).unwrap();
    let mut wide = vec![0; count * 8];
    match Cast::new(dtype, Dtype::F64) {
        Some(cast) => drop(cast.convert(values, &mut wide)),
        None => wide.copy_from_slice(values),
    }
    wide.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

/// From 1 to the next number.
fn epsilon(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bf16 => 2.0_f64.powi(-7),
        Dtype::F16 => 2.0_f64.powi(-10),
        Dtype::F32 => 2.0_f64.powi(-23),
        _ => 2.0_f64.powi(-52),
    }
}

fn whole(dtype: Dtype, index: u64, summand: u64) -> Vec<u8> {
    let number = u8::try_from((index + summand * 3) % 4).unwrap();
    let float = f32::from(number).to_le_bytes();
    match dtype {
        Dtype::F32 => float.to_vec(),
        Dtype::Bf16 => float[2..].to_vec(),
        Dtype::F64 => f64::from(number).to_le_bytes().to_vec(),
        Dtype::F16 => [0x0000_u16, 0x3C00, 0x4000, 0x4200][usize::from(number)].to_le_bytes().to_vec(),
        _ => term(dtype, index, summand),
    }
}

/// What goes over the wire, and that it is by NCCL: as a rank has it that has a summand of all, and gets a row of values,
/// a column, or all.
pub(crate) fn evenly_cut(means: &impl Means) {
    use crate::layout::Placement::{Replicate, Shard};
    for ranks in 2..=4_u32 {
        let one = Layout { mesh: vec![1], placements: vec![Replicate] };
        for (placement, hops) in [(Shard(TensorDim(0)), 1), (Shard(TensorDim(1)), 1), (Replicate, 2)] {
            let to = Layout { mesh: vec![u64::from(ranks)], placements: vec![placement] };
            let sum = Some((u64::from(ranks), ReduceOp::Sum));
            let case = Case::of(&[(vec![48, 24], (Dtype::F32, Dtype::F32), one.clone(), to, sum)], false, Terms::Whole);
            let alone = case.alone();
            let (whole, n) = (48 * 24 * 4, u64::from(ranks));
            for bucket_bytes in [3000, 1 << 20] {
                let (found, loads) = together(means, &case, ranks, &[], bucket_bytes);
                case.forget_together();
                assert!(found == alone);
                // All that is reduced goes from rank to rank, to the last of them; and from there to the others.
                let received = whole * (n - 1) * hops;
                let of_all = |of: fn(&Load) -> u64| loads.iter().map(of).sum::<u64>();
                assert_eq!((of_all(Load::received), of_all(|load| load.kept)), (received, whole));
                // What all others get is sent once.
                assert_eq!(of_all(Load::sent), whole * (n - 1) + whole * (hops - 1));
                // In rounds of several ranges all have the same to do.
                let even = |load: &Load| (load.received() * n, load.kept * n) == (received, whole);
                assert!(bucket_bytes > 3000 || loads.iter().all(even), "{placement:?} of {ranks}: {loads:?}");
            }
        }
    }
}

/// One of each kind that NCCL does not reduce, beside one that it does.
pub(crate) fn what_is_not_folded(means: &impl Means) {
    use crate::layout::Placement::Replicate;
    let one = || Layout { mesh: vec![1], placements: vec![Replicate] };
    let spec = |dtype, count, op| (vec![6, 8], (dtype, dtype), one(), one(), Some((count, op)));
    let folded = |case: &Case| {
        let (found, loads) = together(means, case, 3, &[], 1 << 20);
        case.assert_near(found, &case.alone());
        loads.iter().map(|load| load.kept).sum::<u64>()
    };
    let yes = spec(Dtype::F32, 3, ReduceOp::Max);
    for no in [
        spec(Dtype::I64, 3, ReduceOp::Sum),
        spec(Dtype::F32, 2, ReduceOp::Sum),
        spec(Dtype::F32, 4, ReduceOp::Sum),
        spec(Dtype::I64, 3, ReduceOp::Bxor),
    ] {
        assert_eq!(folded(&Case::of(std::slice::from_ref(&no), false, Terms::Any)), 0, "{no:?}");
        assert_eq!(folded(&Case::of(&[no, yes.clone()], false, Terms::Any)), 6 * 8 * 4);
    }
    // What is nothing elsewhere.
    assert_eq!(folded(&Case::of(&[yes], false, Terms::Any).with_shares()), 0);
    // Two summands that one rank sees.
    let case = Case::of(&[spec(Dtype::F32, 3, ReduceOp::Sum)], false, Terms::Any);
    let mut parties = one_each(&case, 3);
    let FileVisibility::PerRank(seen) = &mut parties.sight else { unreachable!() };
    seen[FileId(1).0 as usize] = seen[0].clone();
    let (found, loads) = case.together(means, &parties, &deal(&case.reservation, &[], 3), 1 << 20);
    assert!(found == case.alone() && loads.iter().all(|load| load.kept == 0));
}

/// A copy that is missing takes what others have of the same elements with it; what is no copy stays done.
#[test]
fn copies_of_what_is_missing_are_made_again() {
    use crate::layout::Placement::{Replicate, Shard};
    let one = || Layout { mesh: vec![1], placements: vec![Replicate] };
    let to = |placement| Layout { mesh: vec![2], placements: vec![placement] };
    let spec = |to, summands| (vec![4, 4], (Dtype::F32, Dtype::F32), one(), to, summands);
    let sum = Some((2, ReduceOp::Sum));
    let copies = [spec(to(Replicate), sum), spec(to(Shard(TensorDim(0))), sum), spec(to(Replicate), None)];
    let case = Case::new(&copies, false);
    let all = Extents::of_files(&case.reservation.files);
    let torn = |missing: &[(u32, std::ops::Range<u64>)]| {
        let mut gone = Extents::new();
        missing.iter().for_each(|(file, range)| gone.insert(*file, range.clone()));
        partial_replicas(&case.catalog, &case.reservation, &all.without(&gone)).iter().collect::<Vec<_>>()
    };
    assert_eq!(torn(&[]), []);
    // Each file has 3 bytes, 64 of a copy, 4 bytes, 32 of a half, 5 bytes, 64 of a copy of what is not reduced.
    assert_eq!(torn(&[(1, 13..23)]), [(0, 13..23), (1, 13..23)]);
    assert_eq!(torn(&[(0, 0..5), (1, 60..173)]), [(0, 3..5), (0, 60..67), (1, 3..5), (1, 60..67)]);
    assert_eq!(torn(&[(0, 71..172)]), []);
}
