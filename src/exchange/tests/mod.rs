//! Tests of the exchange: several processes together must write the same bytes as one process.

mod bounds;
mod case;
mod means;
pub(crate) mod nccl_reduction;
mod records;
mod wire;

pub(crate) use case::Case;
pub(crate) use means::Means;

use case::split_output;
use means::Host;

use crate::error::Error;
use crate::exchange::{FileOwners, FileVisibility, Load, ReductionMethod, ReplicaChoice, Rounds, Topology};
use crate::exec::tests::*;
use crate::layout::ReduceOp;
use crate::storage::FileId;

/// A tensor to convert: its shape, its dtypes and layouts in source and target, and for partial values their number and
/// reduction operation.
pub(crate) type Spec = (Vec<u64>, (Dtype, Dtype), Layout, Layout, Option<(u64, ReduceOp)>);

/// Returns one element of a partial value. The sum of four such elements does not overflow the dtype, but
/// may be rounded.
fn term(dtype: Dtype, index: u64, partial: u64) -> Vec<u8> {
    let number = u8::try_from((index * (partial + 1) + 5 * partial) % 63).unwrap();
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

/// Returns an element whose value a cast may lose: some elements are NaN or outside the range of the target dtype.
fn lossy_element(dtype: Dtype, index: u64, partial: Option<u64>) -> Vec<u8> {
    let of_single = |single: f32| casting::cast(Dtype::F32, dtype, &single.to_le_bytes()).0;
    match (index % 13, partial) {
        (_, None) if dtype.is_float() => casting::element_of(dtype, index),
        (_, None) => element(index, dtype.itemsize()),
        (_, Some(partial)) if !dtype.is_float() => term(dtype, index, partial),
        (3, Some(1)) => of_single(f32::NAN),
        // The sum of two such values overflows f16, and a single value overflows the 8-bit floats.
        (5 | 6, Some(_)) => of_single(40_000.0),
        (_, Some(partial)) => casting::cast(Dtype::F32, dtype, &term(Dtype::F32, index, partial)).0,
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
            let partial_values = prop_oneof![1 => Just(None), 1 => (1..5_u64, op(dtypes.0)).prop_map(Some)];
            (Just(shape.clone()), Just(dtypes), layout(ndim), layout(ndim), partial_values)
        })
    })
}

/// Generates a reduction operation whose result the dtype can represent for all partial values.
fn op(dtype: Dtype) -> impl Strategy<Value = ReduceOp> {
    use ReduceOp::{Avg, Band, Bor, Bxor, Max, Min, Product, Sum};
    prop::sample::select(match dtype {
        Dtype::U8 => vec![Sum, Max, Min, Band, Bor, Bxor],
        Dtype::I64 => vec![Sum, Product, Max, Min, Band, Bor, Bxor],
        _ => vec![Sum, Avg, Product, Max, Min],
    })
}

/// Returns true if the lengths of the tensor in bytes fit in 64 bits, in source and target.
pub(crate) fn has_valid_length((shape, (from, to), ..): &Spec) -> bool {
    checked_len_bytes(shape, *from).is_some() && checked_len_bytes(shape, *to).is_some()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]

    #[test]
    fn exchange_writes_the_bytes_of_one_process(
        specs in prop::collection::vec(spec(), 1..4),
        transpose in any::<bool>(),
        shares in any::<bool>(),
        ranks in 1..6_u32,
        cuts in prop::collection::vec(any::<u64>(), 0..4),
        bucket_bytes in prop_oneof![Just(1_u64), 16..400_u64, Just(1 << 20)],
        visibility_seed in prop::option::of(any::<u64>()),
    ) {
        prop_assume!(specs.iter().all(has_valid_length));
        let case = Case::lossy(&specs, transpose);
        let case = if shares { case.with_shares() } else { case };
        let (topology, todos) = case.topology(ranks, &cuts, visibility_seed);
        let (exchanged, loads) = case.exchange(&Host, &topology, &todos, bucket_bytes);
        prop_assert!(exchanged == case.convert_alone());
        let sum = |of: fn(&Load) -> u64| loads.iter().map(of).sum::<u64>();
        let received = sum(Load::received);
        prop_assert!(sum(Load::sent) <= received && received <= case.max_wire_bytes(&todos));
        if shares || case.catalog.tensors.iter().any(|entry| entry.partial_values.is_some()) {
            return Ok(());
        }
        let stored = case.catalog.tensors.iter().map(|entry| {
            entry.numel() * entry.dtype.itemsize() * entry.partial_values.as_ref().map_or(1, |of| of.reduction.count())
        });
        match &topology.visibility {
            // Each source byte is read once, by any of the ranks.
            FileVisibility::Shared => prop_assert_eq!(loads.iter().map(|load| load.read).sum::<u64>(), stored.sum::<u64>()),
            // No rank receives bytes that it can read itself, and no rank receives bytes twice.
            FileVisibility::PerRank(seen) => for (rank, (todo, load)) in (0..).zip(todos.iter().zip(&loads)) {
                prop_assert_eq!(load.received(), case.missing_bytes(todo, &|FileId(file)| seen[file as usize].contains(&rank)));
            },
        }
    }
}

/// Checks with row-sharded tensors that rounds complete the tensors in order. Three large tensors take several rounds
/// each; the two small tensors between them share one round.
#[test]
fn rounds_complete_tensors_in_order() {
    let rows = |ranks| Layout { mesh: vec![ranks], placements: vec![Placement::Shard(TensorDim(0))] };
    let tensor = |rows_of: u64| (vec![rows_of, 8], (Dtype::F32, Dtype::F32), rows(2), rows(3), None);
    let case = Case::new(&[tensor(64), tensor(64), tensor(2), tensor(2), tensor(64)], false);
    let todos = split_output(&case.reservation, &[], 2);
    let owners = FileOwners::new(&case.reservation.files, &todos);
    let topology = Topology {
        visibility: FileVisibility::Shared,
        nodes: vec![0, 0],
        replica_choice: ReplicaChoice::Any,
        reducing: ReductionMethod::InRankOrder,
    };
    let rounds = Rounds::new(&case.catalog, &case.reservation.tensors, &owners, &topology, 300);
    let rounds: Vec<(Vec<usize>, bool)> = rounds
        .map(|round| {
            let round = round.unwrap();
            (round.plans.iter().map(|plan| plan.unit.number).collect(), round.completes_tensors)
        })
        .collect();
    let ends: Vec<&Vec<usize>> = rounds.iter().filter(|(_, ends)| *ends).map(|(numbers, _)| numbers).collect();
    assert!(ends.iter().all(|numbers| !numbers.is_empty()));
    let completed: Vec<usize> = ends.iter().filter_map(|numbers| numbers.last()).copied().collect();
    assert_eq!(completed, [0, 1, 3, 4]);
    assert!(rounds.len() > 8, "{rounds:?}");
}

/// Splits the output between two processes, once at each byte. A cut may be inside an element whose value a cast loses.
/// Asserts that the output and the counts of lost values are the same as for one process.
pub(crate) fn check_each_cut(means: &impl Means) {
    let one = Layout { mesh: vec![1], placements: vec![Placement::Replicate] };
    let twice = Layout { mesh: vec![2], placements: vec![Placement::Replicate] };
    let specs = [(vec![9], (Dtype::F32, Dtype::F16), one, twice, Some((2, ReduceOp::Sum)))];
    let expected = Case::lossy(&specs, false).convert_alone();
    for cut in 0..u64::try_from(expected.files[0].len()).unwrap() {
        let case = Case::lossy(&specs, false);
        let (topology, todos) = case.topology(2, &[cut], None);
        assert!(case.exchange(means, &topology, &todos, 1000).0 == expected, "cut at {cut}");
    }
}

#[test]
fn cast_loss_in_a_shared_element_counts_once() {
    check_each_cut(&Host);
}

/// If a sum overflows, at least one process reports the same error as a conversion with one process. The other
/// processes may report a communication error.
#[test]
fn overflowing_sum_names_the_tensor() {
    check_faults(&Host);
}

pub(crate) fn check_faults(means: &impl Means) {
    let rows = |ranks| Layout { mesh: vec![ranks], placements: vec![Placement::Shard(TensorDim(0))] };
    let whole = Layout { mesh: vec![2], placements: vec![Placement::Replicate] };
    // The sum of five partial values of up to 62 overflows a byte.
    let sum = Some((5, ReduceOp::Sum));
    let case = Case::new(&[(vec![64, 8], (Dtype::U8, Dtype::U8), rows(2), whole, sum)], false);
    let (topology, todos) = case.topology(2, &[], Some(7));
    let message = case.try_convert_alone().unwrap_err().to_string();
    assert!(message.starts_with("t0: the sum of its partial values is "), "{message}");
    let failed = case.try_exchange(means, &topology, &todos, 100);
    let failed: Vec<Error> = failed.into_iter().map(Result::unwrap_err).collect();
    let names_tensor = |error: &Error| error.to_string().starts_with("t0: the sum of its partial values is ");
    assert!(failed.iter().any(names_tensor), "{failed:?}");
    assert!(failed.iter().all(|error| names_tensor(error) || matches!(error, Error::Comm(_))), "{failed:?}");
}
