//! What a few ranks hold goes to several others, and not to all.

use proptest::prelude::*;

use super::super::*;
use super::case::deal;
use super::wire::placed;
use super::{Case, Host, Means, Spec, fits, spec};
use crate::exec::exchange::{Counting, Load, Loads, Moves, Owners, Parties, Reducing, Rounds, Sight, Way};
use crate::layout::ReduceOp;
use crate::storage::FileId;

/// Ranks of which the first few see the source's files, in turn, and which have so many to a node.
fn few(case: &Case, ranks: u32, holders: u32, to_a_node: u32) -> (Parties, Vec<Extents>) {
    let seen =
        (0..u32::try_from(case.files.ids().count()).unwrap()).map(|file| std::iter::once(file % holders).collect());
    let parties = Parties {
        sight: Sight::PerRank(seen.collect()),
        nodes: (0..ranks).map(|rank| rank / to_a_node).collect(),
        counting: Counting::Any,
        reducing: Reducing::InRankOrder,
    };
    (parties, deal(&case.reservation, &[], ranks))
}

/// What each rank has to do in all rounds, without relays and as it goes.
fn loads(case: &Case, parties: &Parties, todos: &[Extents], bucket_bytes: u64) -> [Vec<Load>; 2] {
    let owners = Owners::new(&case.reservation.files, todos);
    let (mut all, mut best) = (Loads::none(todos.len()), vec![Load::default(); todos.len()]);
    for round in Rounds::new(&case.catalog, &case.reservation.tensors, &owners, parties, bucket_bytes) {
        let round = round.unwrap();
        for (rank, load) in (0..).zip(&round.loads) {
            let (outgoing, incoming) = Moves::new(&round, rank).wire_lens();
            assert!(load.largest() <= bucket_bytes && outgoing.max(incoming) as u64 <= load.largest(), "{load:?}");
        }
        round.drafts.iter().for_each(|draft| all.add(&draft.loads(todos.len())));
        best.iter_mut().zip(&round.loads).for_each(|(sum, load)| *sum = sum.plus(*load));
    }
    [all.by(Way::Direct), best]
}

fn most_sent(loads: &[Load]) -> u64 {
    loads.iter().map(Load::sent).max().unwrap()
}

/// Tensors of so many rows of 16 KiB.
fn case<const N: usize>(rows: u64, from: &Layout, to: &Layout) -> Case {
    let spec = || (vec![rows, 4096], (Dtype::F32, Dtype::F32), from.clone(), to.clone(), None);
    Case::new(&std::array::from_fn::<Spec, N, _>(|_| spec()), false)
}

const HALF: u64 = 256 << 10;
use Placement::{Replicate, Shard};
const ROWS: Placement = Shard(TensorDim(0));
const COLUMNS: Placement = Shard(TensorDim(1));

#[test]
fn holders_send_once_what_takers_can_pass_on() {
    // Two of eight ranks hold a half each, of which four others need each; and three of them where a holder needs its own.
    for (target, bucket_bytes) in
        [(ROWS, 300_000), (ROWS, 1 << 20), (ROWS, 1 << 23), (COLUMNS, 300_000), (COLUMNS, 1 << 23)]
    {
        let case = case::<1>(32, &placed(&[2], &[ROWS]), &placed(&[2, 4], &[target, Replicate]));
        let (parties, todos) = few(&case, 8, 2, 8);
        let [direct, relayed] = loads(&case, &parties, &todos, bucket_bytes);
        assert!(most_sent(&direct) >= HALF * 3, "{direct:?}");
        // Once what it holds, and what it passes on of what others hold.
        assert!(most_sent(&relayed) <= HALF * 2, "{target:?}: {relayed:?}");
        for (direct, relayed) in direct.iter().zip(&relayed) {
            assert_eq!((direct.received(), direct.read), (relayed.received(), relayed.read));
        }
        let sum = |loads: &[Load]| loads.iter().map(Load::sent).sum::<u64>();
        assert_eq!(sum(&direct), sum(&relayed));
        if bucket_bytes > HALF {
            assert!(case.together(&Host, &parties, &todos, bucket_bytes).0 == case.alone());
        }
    }
}

/// Of small tensors that go together each has another relay.
#[test]
fn small_tensors_are_relayed_in_turn() {
    let to = placed(&[4], &[Replicate]);
    let small = || (vec![32], (Dtype::F32, Dtype::F32), placed(&[1], &[Replicate]), to.clone(), None);
    let case = Case::new(&std::array::from_fn::<Spec, 16, _>(|_| small()), false);
    // The last ranks write nothing.
    let (parties, mut todos) = few(&case, 6, 1, 6);
    todos.rotate_right(1);
    let [direct, relayed] = loads(&case, &parties, &todos, 1 << 20);
    assert_eq!(most_sent(&direct), 16 * 128 * 4);
    assert_eq!(most_sent(&relayed), 16 * 128);
    assert!(case.together(&Host, &parties, &todos, 1 << 20).0 == case.alone());
}

#[test]
fn who_sends_as_much_as_it_gets_needs_no_relay() {
    let hsdp = |shards: u64, replicas: u64| placed(&[shards, replicas], &[ROWS, Replicate]);
    for (from, to) in
        [(hsdp(4, 2), hsdp(2, 4)), (hsdp(8, 1), hsdp(2, 4)), (hsdp(8, 1), hsdp(4, 2)), (hsdp(2, 4), hsdp(8, 1))]
    {
        // Ranges of a large tensor, and tensors that go together.
        for (case, bucket_bytes) in [(case::<1>(64, &from, &to), 160_000), (case::<8>(8, &from, &to), 1 << 23)] {
            let (parties, todos) = few(&case, 8, 8, 4);
            let [direct, best] = loads(&case, &parties, &todos, bucket_bytes);
            assert_eq!(direct, best, "{from:?} to {to:?}");
        }
    }
}

/// Rows, columns, casts, and sums that are passed on as well, in one round and in many.
pub(crate) fn check_relays(means: &impl Means) {
    let specs: Vec<Spec> = vec![
        (vec![7, 40], (Dtype::F32, Dtype::Bf16), placed(&[3], &[ROWS]), placed(&[2, 2], &[COLUMNS, Replicate]), None),
        (vec![6, 9], (Dtype::F32, Dtype::F32), placed(&[2], &[COLUMNS]), placed(&[3], &[Replicate]), None),
        (vec![9], (Dtype::U8, Dtype::U8), placed(&[1], &[Replicate]), placed(&[2, 2], &[Replicate, ROWS]), None),
        (
            vec![8, 8],
            (Dtype::Bf16, Dtype::F32),
            placed(&[1], &[ROWS]),
            placed(&[4], &[Replicate]),
            Some((3, ReduceOp::Sum)),
        ),
    ];
    for (bucket_bytes, to_a_node) in [(400, 5), (1 << 20, 2)] {
        let case = Case::hard(&specs, true);
        let (parties, mut todos) = few(&case, 5, 1, to_a_node);
        todos.rotate_right(1);
        let [direct, relayed] = loads(&case, &parties, &todos, bucket_bytes);
        assert!(most_sent(&relayed) < most_sent(&direct), "{relayed:?}");
        assert!(case.together(means, &parties, &todos, bucket_bytes).0 == case.alone());
    }
}

#[test]
fn relays_go_with_everything_else() {
    check_relays(&Host);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    #[test]
    fn replicas_of_what_few_hold_are_those_of_one_process(
        specs in prop::collection::vec((spec(), 0..3_usize, 1..4_u64), 1..4),
        transpose in any::<bool>(),
        ranks in 4..9_u32,
        holders in 1..4_u32,
        to_a_node in 1..6_u32,
        turn in 0..8_usize,
        bucket_bytes in prop_oneof![100..1000_u64, Just(1 << 20)],
    ) {
        let specs: Vec<Spec> = specs.into_iter().map(|(mut spec, dim, replicas)| {
            let Layout { mesh, placements } = &mut spec.3;
            let dim = dim.min(mesh.len());
            mesh.insert(dim, replicas);
            placements.insert(dim, Replicate);
            spec
        }).collect();
        prop_assume!(specs.iter().all(fits));
        let case = Case::hard(&specs, transpose);
        let (parties, mut todos) = few(&case, ranks, holders, to_a_node);
        todos.rotate_right(turn % ranks as usize);
        let (together, loads) = case.together(&Host, &parties, &todos, bucket_bytes);
        prop_assert!(together == case.alone());
        if case.catalog.tensors.iter().all(|entry| entry.summands.is_none()) {
            for (rank, (todo, load)) in (0..).zip(todos.iter().zip(&loads)) {
                prop_assert_eq!(load.received(), case.lacking(todo, &|FileId(file)| file % holders == rank));
            }
        }
    }
}
