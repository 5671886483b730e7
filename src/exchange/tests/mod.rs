//! Ranks that exchange what they read together write what one process writes.

mod bounds;
mod case;
pub(crate) mod folding;
mod means;
mod records;
mod wire;

pub(crate) use case::Case;
pub(crate) use means::Means;

use case::deal;
use means::Host;

use super::*;
use crate::error::Error;
use crate::exchange::{Counting, FileOwners, FileVisibility, Load, ReductionMethod, Rounds, Topology};
use crate::exec::tests::*;
use crate::layout::ReduceOp;
use crate::storage::FileId;

/// A tensor to convert: shape, dtypes, both layouts, and how many summands ranks hold of it, if they do.
pub(crate) type Spec = (Vec<u64>, (Dtype, Dtype), Layout, Layout, Option<(u64, ReduceOp)>);

/// An element of a summand: four of them add up to what the dtype holds.
fn term(dtype: Dtype, index: u64, summand: u64) -> Vec<u8> {
    let number = u8::try_from((index * (summand + 1) + 5 * summand) % 63).unwrap();
    let float = (f32::from(number) * 0.37 - 9.0).to_le_bytes();
    match dtype {
        Dtype::F32 => float.to_vec(),
        Dtype::Bf16 => float[2..].to_vec(),
        Dtype::F64 => f64::from(f32::from_le_bytes(float)).to_le_bytes().to_vec(),
        _ => element(u64::from(number), dtype.itemsize())
            .into_iter()
            .enumerate()
            .map(|(at, byte)| if at == 0 { byte } else { 0 })
            .collect(),
    }
}

/// An element that a cast may not keep: now and then it is no number, or beyond the target.
fn hard(dtype: Dtype, index: u64, summand: Option<u64>) -> Vec<u8> {
    let of_single = |single: f32| casting::cast(Dtype::F32, dtype, &single.to_le_bytes()).0;
    match (index % 13, summand) {
        (_, None) if dtype.is_float() => casting::element_of(dtype, index),
        (_, None) => element(index, dtype.itemsize()),
        (_, Some(summand)) if !dtype.is_float() => term(dtype, index, summand),
        (3, Some(1)) => of_single(f32::NAN),
        // Two of these are more than f16 holds, and one is more than 8 bits do.
        (5 | 6, Some(_)) => of_single(40_000.0),
        (_, Some(summand)) => casting::cast(Dtype::F32, dtype, &term(Dtype::F32, index, summand)).0,
    }
}

pub(crate) fn spec() -> impl Strategy<Value = Spec> {
    let dtypes = prop::sample::select(vec![
        (Dtype::U8, Dtype::U8),
        (Dtype::Bf16, Dtype::Bf16),
        (Dtype::I64, Dtype::I64),
        (Dtype::F32, Dtype::Bf16),
        (Dtype::F32, Dtype::F16),
        (Dtype::Bf16, Dtype::F8E4m3fn),
        (Dtype::F16, Dtype::F64),
    ]);
    prop::collection::vec(0..9_u64, 0..4).prop_flat_map(move |shape| {
        let ndim = shape.len();
        dtypes.clone().prop_flat_map(move |dtypes| {
            let summands = prop_oneof![1 => Just(None), 1 => (1..5_u64, op(dtypes.0)).prop_map(Some)];
            (Just(shape.clone()), Just(dtypes), layout(ndim), layout(ndim), summands)
        })
    })
}

/// One that has a value, whatever the summands.
fn op(dtype: Dtype) -> impl Strategy<Value = ReduceOp> {
    use ReduceOp::{Avg, Band, Bor, Bxor, Max, Min, Product, Sum};
    prop::sample::select(match dtype {
        Dtype::U8 => vec![Sum, Max, Min, Band, Bor, Bxor],
        Dtype::I64 => vec![Sum, Product, Max, Min, Band, Bor, Bxor],
        _ => vec![Sum, Avg, Product, Max, Min],
    })
}

/// Whether its lengths can be told.
pub(crate) fn fits((shape, (from, to), ..): &Spec) -> bool {
    checked_len_bytes(shape, *from).is_some() && checked_len_bytes(shape, *to).is_some()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]

    #[test]
    fn ranks_together_write_what_one_process_writes(
        specs in prop::collection::vec(spec(), 1..4),
        transpose in any::<bool>(),
        shares in any::<bool>(),
        ranks in 1..6_u32,
        cuts in prop::collection::vec(any::<u64>(), 0..4),
        bucket_bytes in prop_oneof![Just(1_u64), 16..400_u64, Just(1 << 20)],
        wish in prop::option::of(any::<u64>()),
    ) {
        prop_assume!(specs.iter().all(fits));
        let case = Case::hard(&specs, transpose);
        let case = if shares { case.with_shares() } else { case };
        let (parties, todos) = case.parties(ranks, &cuts, wish);
        let (together, loads) = case.together(&Host, &parties, &todos, bucket_bytes);
        prop_assert!(together == case.alone());
        let of_all = |of: fn(&Load) -> u64| loads.iter().map(of).sum::<u64>();
        let received = of_all(Load::received);
        prop_assert!(of_all(Load::sent) <= received && received <= case.at_most(&todos));
        if shares || case.catalog.tensors.iter().any(|entry| entry.partial_values.is_some()) {
            return Ok(());
        }
        let stored = case.catalog.tensors.iter().map(|entry| {
            entry.numel() * entry.dtype.itemsize() * entry.partial_values.as_ref().map_or(1, |of| of.reduction.count())
        });
        match &parties.sight {
            // Every byte is read once, whoever reads it.
            FileVisibility::Shared => prop_assert_eq!(loads.iter().map(|load| load.read).sum::<u64>(), stored.sum::<u64>()),
            // Nobody gets what it has, nor anything twice.
            FileVisibility::PerRank(seen) => for (rank, (todo, load)) in (0..).zip(todos.iter().zip(&loads)) {
                prop_assert_eq!(load.received(), case.lacking(todo, &|FileId(file)| seen[file as usize].contains(&rank)));
            },
        }
    }
}

/// Rows of one rank each, of tensors that take several rounds, and of small ones between them.
#[test]
fn tensors_are_through_one_after_the_other() {
    let rows = |ranks| Layout { mesh: vec![ranks], placements: vec![Placement::Shard(TensorDim(0))] };
    let tensor = |rows_of: u64| (vec![rows_of, 8], (Dtype::F32, Dtype::F32), rows(2), rows(3), None);
    let case = Case::new(&[tensor(64), tensor(64), tensor(2), tensor(2), tensor(64)], false);
    let todos = deal(&case.reservation, &[], 2);
    let owners = FileOwners::new(&case.reservation.files, &todos);
    let parties = Topology {
        sight: FileVisibility::Shared,
        nodes: vec![0, 0],
        counting: Counting::Any,
        reducing: ReductionMethod::InRankOrder,
    };
    let rounds = Rounds::new(&case.catalog, &case.reservation.tensors, &owners, &parties, 300);
    let rounds: Vec<(Vec<usize>, bool)> = rounds
        .map(|round| {
            let round = round.unwrap();
            (round.drafts.iter().map(|draft| draft.unit.number).collect(), round.ends_whole)
        })
        .collect();
    let ends: Vec<&Vec<usize>> = rounds.iter().filter(|(_, ends)| *ends).map(|(numbers, _)| numbers).collect();
    assert!(ends.iter().all(|numbers| !numbers.is_empty()));
    let through: Vec<usize> = ends.iter().filter_map(|numbers| numbers.last()).copied().collect();
    assert_eq!(through, [0, 1, 3, 4]);
    assert!(rounds.len() > 8, "{rounds:?}");
}

/// Wherever the work of two is cut, also within an element that a cast does not keep.
pub(crate) fn check_each_cut(means: &impl Means) {
    let one = Layout { mesh: vec![1], placements: vec![Placement::Replicate] };
    let twice = Layout { mesh: vec![2], placements: vec![Placement::Replicate] };
    let specs = [(vec![9], (Dtype::F32, Dtype::F16), one, twice, Some((2, ReduceOp::Sum)))];
    let wanted = Case::hard(&specs, false).alone();
    for cut in 0..u64::try_from(wanted.files[0].len()).unwrap() {
        let case = Case::hard(&specs, false);
        let (parties, todos) = case.parties(2, &[cut], None);
        assert!(case.together(means, &parties, &todos, 1000).0 == wanted, "cut at {cut}");
    }
}

#[test]
fn an_element_that_two_write_counts_once() {
    check_each_cut(&Host);
}

/// In the words of a process that is alone, where they are made.
#[test]
fn summands_that_have_no_value_are_named() {
    check_faults(&Host);
}

pub(crate) fn check_faults(means: &impl Means) {
    let rows = |ranks| Layout { mesh: vec![ranks], placements: vec![Placement::Shard(TensorDim(0))] };
    let whole = Layout { mesh: vec![2], placements: vec![Placement::Replicate] };
    // Five summands of up to 62 are too much for a byte.
    let sum = Some((5, ReduceOp::Sum));
    let case = Case::new(&[(vec![64, 8], (Dtype::U8, Dtype::U8), rows(2), whole, sum)], false);
    let (parties, todos) = case.parties(2, &[], Some(7));
    let told = case.attempt_alone().unwrap_err().to_string();
    assert!(told.starts_with("t0: the sum of its partial values is "), "{told}");
    let failed = case.attempt(means, &parties, &todos, 100);
    let failed: Vec<Error> = failed.into_iter().map(Result::unwrap_err).collect();
    let is_it = |error: &Error| error.to_string().starts_with("t0: the sum of its partial values is ");
    assert!(failed.iter().any(is_it), "{failed:?}");
    assert!(failed.iter().all(|error| is_it(error) || matches!(error, Error::Comm(_))), "{failed:?}");
}
