//! Relays: takers that pass on what its reader would else send to each of them.
//!
//! What all others need is told at once. What several need, and not all, is sent several times by its reader, while those
//! that hold nothing send nothing. So one of the takers gets it, and passes it on in the second hop of the round; who does,
//! changes from transfer to transfer, so that all takers pass on about as much.
//!
//! ```text
//!     2 of 8 hold what 4 each need, in parts each        direct    relayed
//!     sent by a holder                                   4 x 4     4
//!     sent by a taker                                    -         3
//! ```
//!
//! A relay is a hop more, for the same bytes in all: where every rank sends as much as it receives, nothing is won. So a
//! round goes by relays where its hops together, each as long as that of its busiest rank, then take less by more than an
//! eighth.
//!
//! Takers on a node, of which there are several, have a relay of their own, and so have those together that are alone on
//! theirs: bytes come to a node once, and never to one on which the reader has them already. A reader that needs some of it
//! itself is no taker here. Values that were made of summands are passed on by who made them.
//!
//! Counts bytes.

use std::collections::BTreeMap;

use super::demand::Ranks;
use super::transfers::{Target, Transfer, Unit};
use crate::plan::Piece;

/// What is longer is cut, so that each taker has some of it to pass on; what is not goes along with others of its kind.
const PART_BYTES: u64 = 64 << 10;

/// The widest access of a device, which nothing is cut within.
const ALIGNMENT: u64 = 16;

/// Transfers of which those have relays that would be sent several times, cut into what goes the same way.
pub fn named(unit: &Unit<'_>, targets: &[Target], transfers: Vec<Transfer>, nodes: &[u32]) -> Vec<Transfer> {
    let mut passed = vec![0; nodes.len()];
    let mut named = Vec::with_capacity(transfers.len());
    for mut transfer in transfers {
        let is_made = targets[transfer.to].wanted.reducer.is_some();
        let groups = if is_made { Vec::new() } else { groups(transfer.from.reader.rank, &transfer.takers, nodes) };
        transfer.takers.retain(|taker| !groups.iter().any(|group| group.contains(taker)));
        for takers in groups {
            let turn = unit.turn(transfer.from.range, nodes.len());
            for piece in cut(&transfer.piece, takers.len() as u64) {
                let in_turn = (0..takers.len()).map(|nth| takers[(turn + nth) % takers.len()]);
                let relay = in_turn.min_by_key(|taker| passed[*taker as usize]).expect("a group is of several");
                passed[relay as usize] += piece.len_bytes() * (takers.len() as u64 - 1);
                named.push(Transfer { takers: takers.clone(), relay: Some(relay), piece, ..transfer.clone() });
            }
        }
        if !transfer.takers.is_empty() {
            named.push(transfer);
        }
    }
    named
}

/// A piece in so many parts of the same length, but for the last; in fewer where they would be short.
fn cut(piece: &Piece, parts: u64) -> impl Iterator<Item = Piece> {
    let parts = parts.min(piece.len_bytes() / PART_BYTES).max(1);
    let (count, step) = match piece.levels.first() {
        Some(level) => (level.count, level.count.div_ceil(parts)),
        None => (piece.run_bytes, piece.run_bytes.div_ceil(parts).next_multiple_of(ALIGNMENT)),
    };
    let starts = (0..parts).map(move |number| number * step).take_while(move |start| *start < count);
    starts.map(move |start| {
        let mut part = piece.clone();
        let len = step.min(count - start);
        let (source_step, target_step) = match part.levels.first_mut() {
            Some(level) => {
                level.count = len;
                (level.source_step, level.target_step)
            }
            None => {
                part.run_bytes = len;
                (1, 1)
            }
        };
        part.source += start * source_step;
        part.target += start * target_step;
        part
    })
}

/// Takers that have a relay, each with others.
fn groups(reader: u32, takers: &[u32], nodes: &[u32]) -> Vec<Ranks> {
    let node = |rank: u32| nodes[rank as usize];
    let others = || takers.iter().copied().filter(|taker| *taker != reader);
    let count = others().count();
    // Of two ranks one has no others, and all others are told.
    if count < 2 || count + 1 == nodes.len() {
        return Vec::new();
    }
    let mut of_nodes: BTreeMap<u32, Ranks> = BTreeMap::new();
    others().for_each(|taker| of_nodes.entry(node(taker)).or_default().push(taker));
    let is_alone = |group: &Ranks| group.len() == 1 && node(group[0]) != node(reader);
    let (alone, mut groups): (Vec<Ranks>, Vec<Ranks>) = of_nodes.into_values().partition(is_alone);
    let mut alone: Ranks = alone.into_iter().flatten().collect();
    alone.sort_unstable();
    groups.push(alone);
    groups.retain(|group| group.len() > 1);
    groups
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::plan::lower::Level;

    #[test]
    fn bytes_come_to_a_node_once() {
        let of = |reader: u32, takers: &[u32], nodes: &[u32]| -> Vec<Vec<u32>> {
            groups(reader, takers, nodes).into_iter().map(|group| group.to_vec()).collect()
        };
        let (one, pairs, single) = ([0; 8], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(of(0, &[1, 3, 5], &one), [[1, 3, 5]]);
        assert_eq!(of(0, &[0, 3, 5], &single), [[3, 5]]);
        // Two of one node, and two of which each is alone.
        assert_eq!(of(0, &[2, 3, 4, 6], &pairs), [[2, 3], [4, 6]]);
        // To who is on the reader's node nothing comes from elsewhere.
        assert_eq!(of(0, &[1, 2, 4], &pairs), [[2, 4]]);
        assert_eq!(of(2, &[0, 1, 2, 3], &[0, 0, 0, 0, 1, 1, 1, 1]), [[0, 1, 3]]);
        // Nothing is sent twice, or all are told.
        let none = Vec::<Vec<u32>>::new();
        assert_eq!(of(0, &[0, 1], &one), none);
        assert_eq!(of(0, &[1, 2], &pairs), none);
        assert_eq!(of(0, &[1, 2, 3], &[0; 4]), none);
    }

    #[test]
    fn parts_are_all_of_a_piece() {
        let level = |count, source_step, target_step| Level { count, source_step, target_step };
        let levels =
            [smallvec![], smallvec![level(5, 90_000, 70_000)], smallvec![level(9, 50_000, 40_000), level(2, 300, 200)]];
        for (run_bytes, levels) in [200_001, 70_000, 100].into_iter().zip(levels) {
            let piece = Piece { overlap: 0, source: 7, target: 3, run_bytes, levels };
            // From where to where each byte goes.
            let runs = |piece: &Piece| -> Vec<(u64, u64)> {
                let mut runs = vec![(piece.source, piece.target)];
                for level in &piece.levels {
                    let step =
                        |(from, to): &(u64, u64), nth| (from + nth * level.source_step, to + nth * level.target_step);
                    runs = runs.iter().flat_map(|run| (0..level.count).map(move |nth| step(run, nth))).collect();
                }
                let bytes = |(from, to): (u64, u64)| (0..piece.run_bytes).map(move |byte| (from + byte, to + byte));
                runs.into_iter().flat_map(bytes).collect()
            };
            for parts in 1..6 {
                let cut: Vec<Piece> = cut(&piece, parts).collect();
                assert_eq!(cut.iter().flat_map(runs).collect::<Vec<_>>(), runs(&piece));
                assert!(cut.len() as u64 <= parts && (run_bytes == 100) == (cut.len() == 1 && parts > 1) || parts == 1);
            }
        }
        let whole = Piece { overlap: 0, source: 0, target: 0, run_bytes: 4 * PART_BYTES, levels: smallvec![] };
        assert_eq!(cut(&whole, 4).map(|part| part.run_bytes).collect::<Vec<_>>(), [PART_BYTES; 4]);
        assert_eq!(cut(&whole, 64).count(), 4);
    }
}
