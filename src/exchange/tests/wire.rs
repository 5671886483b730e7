//! Tests of the number of bytes that are sent for evenly sharded tensors, and of the memory that rounds need.

use super::case::split_output;
use super::nccl_reduction::one_partial_value_per_rank;
use super::{Case, Host};
use crate::exchange::{
    FileOwners, FileVisibility, Load, Moves, ReductionMethod, ReplicaChoice, Round, Rounds, Topology,
};
use crate::exec::tests::*;
use crate::layout::ReduceOp;

/// Runs an exchange of an evenly sharded tensor of 64 KiB. Each process reads one file and writes one file. Returns the
/// number of sent and of received bytes of each process, sorted.
fn wire_bytes(
    from: Layout,
    to: Layout,
    partial_values: Option<(u64, ReduceOp)>,
    ranks: u32,
    bucket_bytes: u64,
) -> Vec<(u64, u64)> {
    let case = Case::new(&[(vec![64, 256], (Dtype::F32, Dtype::F32), from, to, partial_values)], false);
    assert_eq!((case.files.ids().count(), case.reservation.files.len()), (ranks as usize, ranks as usize));
    let seen = (0..ranks).map(|rank| std::iter::once(rank).collect()).collect();
    let topology = Topology {
        visibility: FileVisibility::PerRank(seen),
        nodes: vec![0; ranks as usize],
        replica_choice: ReplicaChoice::Any,
        reducing: ReductionMethod::InRankOrder,
    };
    let todos = split_output(&case.reservation, &[], ranks);
    let (exchanged, loads) = case.exchange(&Host, &topology, &todos, bucket_bytes);
    assert!(exchanged == case.convert_alone());
    let mut wire: Vec<(u64, u64)> = loads.iter().map(|load| (load.sent(), load.received())).collect();
    wire.sort_unstable();
    wire
}

/// The length of the entire tensor in bytes.
const TENSOR_BYTES: u64 = 64 << 10;

pub(super) fn layout_of(mesh: &[u64], placements: &[Placement]) -> Layout {
    Layout { mesh: mesh.to_vec(), placements: placements.to_vec() }
}

#[test]
fn replicated_target_sends_each_byte_once() {
    use crate::layout::Placement::{Replicate, Shard};
    let (from, to) = (layout_of(&[4], &[Shard(TensorDim(0))]), layout_of(&[4], &[Replicate]));
    for bucket_bytes in [3000, 1 << 20] {
        let each = (TENSOR_BYTES / 4, TENSOR_BYTES / 4 * 3);
        assert_eq!(wire_bytes(from.clone(), to.clone(), None, 4, bucket_bytes), [each; 4]);
    }
}

#[test]
fn partial_values_are_sent_to_the_reducing_rank() {
    use crate::layout::Placement::{Replicate, Shard};
    let partial_values = Some((4, ReduceOp::Sum));
    let one = layout_of(&[1], &[Replicate]);
    for bucket_bytes in [3000, 40 << 10] {
        // A rank keeps its own part of its partial value and sends the rest, and it sends its reduced part once. It
        // receives its part of the other partial values, and the reduced parts of the other ranks.
        let each = (TENSOR_BYTES, TENSOR_BYTES / 2 * 3);
        assert_eq!(wire_bytes(one.clone(), layout_of(&[4], &[Replicate]), partial_values, 4, bucket_bytes), [each; 4]);
        let each = (TENSOR_BYTES / 4 * 3, TENSOR_BYTES / 4 * 3);
        let rows = layout_of(&[4], &[Shard(TensorDim(0))]);
        assert_eq!(wire_bytes(one.clone(), rows, partial_values, 4, bucket_bytes), [each; 4]);
    }
    // Each half of the tensor has two partial values, and two ranks need each half. Each of these ranks sends half of
    // its data twice: as a partial value, and as a reduced value.
    let halves = || layout_of(&[2], &[Shard(TensorDim(0))]);
    let replicas = layout_of(&[2, 2], &[Shard(TensorDim(0)), Replicate]);
    let each = (TENSOR_BYTES / 2, TENSOR_BYTES / 2);
    assert_eq!(wire_bytes(halves(), replicas, Some((2, ReduceOp::Max)), 4, 3000), [each; 4]);
}

#[test]
fn buffers_fit_the_bucket_size() {
    use crate::layout::Placement::{Replicate, Shard};
    let rows = layout_of(&[3], &[Shard(TensorDim(0))]);
    let one = layout_of(&[1], &[Replicate]);
    let specs = [(rows.clone(), None), (one, Some((3, ReduceOp::Sum)))].map(|(from, partial_values)| {
        (vec![60, 60], (Dtype::F32, Dtype::F32), from, layout_of(&[3], &[Replicate]), partial_values)
    });
    let case = Case::new(&specs, false);
    let (topology, todos) = case.topology(3, &[], Some(1));
    let owners = FileOwners::new(&case.reservation.files, &todos);
    let rounds_of = |topology: &Topology| -> Vec<Moves> {
        let rounds = Rounds::new(&case.catalog, &case.reservation.tensors, &owners, topology, 2000);
        rounds.map(Result::unwrap).flat_map(|round| (0..3).map(move |rank| Moves::new(&round, rank))).collect()
    };
    let by_nccl = rounds_of(&one_partial_value_per_rank(&case, 3));
    assert!(by_nccl.iter().any(|moves| !moves.nccl_reductions.is_empty()));
    for moves in rounds_of(&topology).into_iter().chain(by_nccl) {
        // Ranges are aligned, so buffers may be longer than the bucket size.
        let most = 2000 + 16 * (moves.arriving_tiles.len() + moves.reads.len() + moves.nccl_reductions.len() + 1);
        let (outgoing, incoming) = moves.wire_buffer_lens();
        let longest = moves.stage_len.max(outgoing).max(incoming).max(moves.unpacked_len);
        assert!(longest <= most, "{longest} of {most}");
    }
}

/// With a bucket size of 1 or of 4 bytes, each round transfers one element of 4 bytes.
#[test]
fn tiny_bucket_gives_one_element_per_round() {
    let replicas = |ranks| layout_of(&[ranks], &[Placement::Replicate]);
    let case = Case::new(&[(vec![5], (Dtype::F32, Dtype::F32), replicas(1), replicas(4), None)], false);
    let (topology, todos) = case.topology(4, &[], Some(1));
    let owners = FileOwners::new(&case.reservation.files, &todos);
    for bucket_bytes in [1, 4] {
        let rounds = Rounds::new(&case.catalog, &case.reservation.tensors, &owners, &topology, bucket_bytes);
        let most = |round: Round<'_>| round.loads.iter().map(Load::received).max();
        let rounds: Vec<_> = rounds.map(|round| most(round.unwrap())).collect();
        assert_eq!(rounds, [Some(4); 5]);
    }
}

/// 600 chunks are sent to 15 other processes each. As point-to-point messages, these would be more copies than a round
/// may have. Asserts that all-gathers need only one round, and no process packs more copies than planned.
#[test]
fn all_gathered_bytes_count_as_one_copy() {
    use crate::layout::Placement::{Replicate, Shard};
    let (chunks, ranks) = (600, 16);
    let (from, to) = (layout_of(&[chunks], &[Shard(TensorDim(0))]), layout_of(&[ranks], &[Replicate]));
    let case = Case::new(&[(vec![chunks], (Dtype::F32, Dtype::F32), from, to, None)], false);
    let (topology, todos) = case.topology(16, &[], None);
    let owners = FileOwners::new(&case.reservation.files, &todos);
    let rounds = Rounds::new(&case.catalog, &case.reservation.tensors, &owners, &topology, 1 << 20);
    let rounds: Vec<Round<'_>> = rounds.map(Result::unwrap).collect();
    assert_eq!(rounds.len(), 1);
    for rank in 0..16 {
        let moves = Moves::new(&rounds[0], rank);
        let packs =
            moves.first_phase.all_gather_packs.len() + moves.first_phase.packs.iter().map(Vec::len).sum::<usize>();
        assert!(packs <= rounds[0].plans[0].copies, "{packs} of {}", rounds[0].plans[0].copies);
    }
}
