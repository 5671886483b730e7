//! What goes over the wire where all is cut evenly, and what rounds take of memory.

use super::case::deal;
use super::folding::one_each;
use super::{Case, Host};
use crate::exchange::{Counting, FileOwners, FileVisibility, Load, Moves, ReductionMethod, Round, Rounds, Topology};
use crate::exec::tests::*;
use crate::layout::ReduceOp;

/// Bytes over the wire of an evenly cut tensor of 64 KiB: each rank sees a file of its own, and writes one.
fn wire(from: Layout, to: Layout, summands: Option<(u64, ReduceOp)>, ranks: u32, bucket_bytes: u64) -> Vec<(u64, u64)> {
    let case = Case::new(&[(vec![64, 256], (Dtype::F32, Dtype::F32), from, to, summands)], false);
    assert_eq!((case.files.ids().count(), case.reservation.files.len()), (ranks as usize, ranks as usize));
    let seen = (0..ranks).map(|rank| std::iter::once(rank).collect()).collect();
    let parties = Topology {
        sight: FileVisibility::PerRank(seen),
        nodes: vec![0; ranks as usize],
        counting: Counting::Any,
        reducing: ReductionMethod::InRankOrder,
    };
    let todos = deal(&case.reservation, &[], ranks);
    let (together, loads) = case.together(&Host, &parties, &todos, bucket_bytes);
    assert!(together == case.alone());
    let mut wire: Vec<(u64, u64)> = loads.iter().map(|load| (load.sent(), load.received())).collect();
    wire.sort_unstable();
    wire
}

/// All of the tensor, in bytes.
const WHOLE: u64 = 64 << 10;

pub(super) fn placed(mesh: &[u64], placements: &[Placement]) -> Layout {
    Layout { mesh: mesh.to_vec(), placements: placements.to_vec() }
}

#[test]
fn what_all_need_is_sent_once() {
    use crate::layout::Placement::{Replicate, Shard};
    let (from, to) = (placed(&[4], &[Shard(TensorDim(0))]), placed(&[4], &[Replicate]));
    for bucket_bytes in [3000, 1 << 20] {
        let each = (WHOLE / 4, WHOLE / 4 * 3);
        assert_eq!(wire(from.clone(), to.clone(), None, 4, bucket_bytes), [each; 4]);
    }
}

#[test]
fn summands_go_to_who_makes_the_value() {
    use crate::layout::Placement::{Replicate, Shard};
    let summands = Some((4, ReduceOp::Sum));
    let one = placed(&[1], &[Replicate]);
    for bucket_bytes in [3000, 40 << 10] {
        // All but its own part of its summand, and the value of that once; the same parts of the others' summands, and the
        // other parts of the value.
        let each = (WHOLE, WHOLE / 2 * 3);
        assert_eq!(wire(one.clone(), placed(&[4], &[Replicate]), summands, 4, bucket_bytes), [each; 4]);
        let each = (WHOLE / 4 * 3, WHOLE / 4 * 3);
        let rows = placed(&[4], &[Shard(TensorDim(0))]);
        assert_eq!(wire(one.clone(), rows, summands, 4, bucket_bytes), [each; 4]);
    }
    // Two summands of each half, which two ranks need: half of a half goes each way, twice.
    let halves = || placed(&[2], &[Shard(TensorDim(0))]);
    let replicas = placed(&[2, 2], &[Shard(TensorDim(0)), Replicate]);
    let each = (WHOLE / 2, WHOLE / 2);
    assert_eq!(wire(halves(), replicas, Some((2, ReduceOp::Max)), 4, 3000), [each; 4]);
}

#[test]
fn buffers_are_no_longer_than_the_bucket() {
    use crate::layout::Placement::{Replicate, Shard};
    let rows = placed(&[3], &[Shard(TensorDim(0))]);
    let one = placed(&[1], &[Replicate]);
    let specs = [(rows.clone(), None), (one, Some((3, ReduceOp::Sum)))]
        .map(|(from, summands)| (vec![60, 60], (Dtype::F32, Dtype::F32), from, placed(&[3], &[Replicate]), summands));
    let case = Case::new(&specs, false);
    let (parties, todos) = case.parties(3, &[], Some(1));
    let owners = FileOwners::new(&case.reservation.files, &todos);
    let rounds_of = |parties: &Topology| -> Vec<Moves> {
        let rounds = Rounds::new(&case.catalog, &case.reservation.tensors, &owners, parties, 2000);
        rounds.map(Result::unwrap).flat_map(|round| (0..3).map(move |rank| Moves::new(&round, rank))).collect()
    };
    let by_nccl = rounds_of(&one_each(&case, 3));
    assert!(by_nccl.iter().any(|moves| !moves.folds.is_empty()));
    for moves in rounds_of(&parties).into_iter().chain(by_nccl) {
        // Places are aligned.
        let most = 2000 + 16 * (moves.arriving.len() + moves.reads.len() + moves.folds.len() + 1);
        let (outgoing, incoming) = moves.wire_lens();
        let longest = moves.stage_len.max(outgoing).max(incoming).max(moves.unpacked_len);
        assert!(longest <= most, "{longest} of {most}");
    }
}

/// Of which a round has one at last.
#[test]
fn single_elements_are_rounds_of_their_own() {
    let replicas = |ranks| placed(&[ranks], &[Placement::Replicate]);
    let case = Case::new(&[(vec![5], (Dtype::F32, Dtype::F32), replicas(1), replicas(4), None)], false);
    let (parties, todos) = case.parties(4, &[], Some(1));
    let owners = FileOwners::new(&case.reservation.files, &todos);
    for bucket_bytes in [1, 4] {
        let rounds = Rounds::new(&case.catalog, &case.reservation.tensors, &owners, &parties, bucket_bytes);
        let most = |round: Round<'_>| round.loads.iter().map(Load::received).max();
        let rounds: Vec<_> = rounds.map(|round| most(round.unwrap())).collect();
        assert_eq!(rounds, [Some(4); 5]);
    }
}

/// So many ranks hear it that all of them together copy more than a round has room for.
#[test]
fn what_is_told_counts_once() {
    use crate::layout::Placement::{Replicate, Shard};
    let (chunks, ranks) = (600, 16);
    let (from, to) = (placed(&[chunks], &[Shard(TensorDim(0))]), placed(&[ranks], &[Replicate]));
    let case = Case::new(&[(vec![chunks], (Dtype::F32, Dtype::F32), from, to, None)], false);
    let (parties, todos) = case.parties(16, &[], None);
    let owners = FileOwners::new(&case.reservation.files, &todos);
    let rounds = Rounds::new(&case.catalog, &case.reservation.tensors, &owners, &parties, 1 << 20);
    let rounds: Vec<Round<'_>> = rounds.map(Result::unwrap).collect();
    assert_eq!(rounds.len(), 1);
    for rank in 0..16 {
        let moves = Moves::new(&rounds[0], rank);
        let packs = moves.first.tells.len() + moves.first.packs.iter().map(Vec::len).sum::<usize>();
        assert!(packs <= rounds[0].drafts[0].copies, "{packs} of {}", rounds[0].drafts[0].copies);
    }
}
