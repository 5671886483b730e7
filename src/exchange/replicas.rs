//! Replicas that no process sees all of, compared by hashes.
//!
//! Each chunk is read once, by a rank that sees its file, and all hear a hash of it. Where two that should be equal are
//! not, their readers tell the hashes of their blocks, and then the first block that differs. So what is found is what one
//! process finds that reads both, for 32 bytes a chunk on the wire.
//!
//! Counts bytes. Invariant: all ranks ask and answer in the same order, and come to the same result.

use indexmap::IndexMap;
use rayon::prelude::*;

use super::readers::FileVisibility;
use crate::catalog::{TensorEntry, TensorId};
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::exec::compare::{Difference, ReplicaDifference, Values};
use crate::exec::{Input, Reporter, Scratch, Silent, Stop};
use crate::layout::Tile;

/// What is hashed at a time, and told where it differs.
const BLOCK_BYTES: u64 = 256 << 10;

const HASH_BYTES: usize = blake3::OUT_LEN;

/// The first difference between the replicas of each of the tensors that has one, as
/// [`replica_difference`](crate::exec::compare::replica_difference) finds it. Collective.
///
/// # Errors
/// As reading, and `Comm` naming the rank that cannot.
pub fn differing(
    communicator: &impl Communicator,
    sight: &FileVisibility,
    input: Input<'_>,
    tensors: &[TensorId],
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Vec<(TensorId, ReplicaDifference)>> {
    let mut lists = ReplicaLists { sight, ranks: communicator.size(), replicas: Vec::new() };
    for (subject, id) in tensors.iter().enumerate() {
        let entry = input.catalog.tensor(*id);
        for holders in entry.tilings()?.iter().flat_map(|tiling| &tiling.holders).filter(|holders| holders.len() > 1) {
            let list: Vec<_> = holders.iter().map(|chunk| (entry, *chunk)).collect();
            lists.push(subject, &list)?;
        }
    }
    let found = first_differences(communicator, input, &lists.replicas, reporter, stop)?;
    let of_tensor = |found: DifferingPair| {
        let [first, second] = found.between.map(|index| lists.replicas[index].chunk);
        (tensors[found.subject], ReplicaDifference { first, second, element: found.element })
    };
    Ok(found.into_iter().map(of_tensor).collect())
}

/// The first chunk in which two tensors differ that lie in files in the same way, and the element of it. Collective.
///
/// # Errors
/// `Unsupported` where they do not lie in the same way; as [`differing`].
pub fn differing_pair(
    communicator: &impl Communicator,
    sight: &FileVisibility,
    input: Input<'_>,
    pair: [TensorId; 2],
    stop: &Stop,
) -> Result<Option<(u32, u64)>> {
    let [left, right] = pair.map(|id| input.catalog.tensor(id));
    let mut lists = ReplicaLists { sight, ranks: communicator.size(), replicas: Vec::new() };
    let lying = |entry: &TensorEntry| -> Result<IndexMap<Tile, u32>> {
        let tilings = entry.tilings()?;
        let held = tilings.iter().flat_map(|tiling| &tiling.holders).map(|holders| holders[0]);
        Ok(held.map(|chunk| (entry.chunks.tile(chunk as usize), chunk)).collect())
    };
    let (ours, theirs) = (lying(left)?, lying(right)?);
    let is_plain = left.partial_values.is_none() && right.partial_values.is_none() && left.dtype == right.dtype;
    if !is_plain || ours.len() != theirs.len() || !ours.keys().all(|tile| theirs.contains_key(tile)) {
        return Err(Error::unsupported(
            format!("{} and {} have to be the same, and no process sees all of both", left.fqn, right.fqn),
            "convert with one process that sees all of SRC, or options::exclude one of them",
        ));
    }
    for (tile, chunk) in &ours {
        lists.push(0, &[(left, *chunk), (right, theirs[tile])])?;
    }
    let found = first_differences(communicator, input, &lists.replicas, &Silent, stop)?;
    Ok(found.first().map(|found| (lists.replicas[found.between[0]].chunk, found.element)))
}

/// What should be equal, and who reads it.
struct ReplicaLists<'a> {
    sight: &'a FileVisibility,
    ranks: u32,
    replicas: Vec<Replica<'a>>,
}

impl<'a> ReplicaLists<'a> {
    fn push(&mut self, subject: usize, equal: &[(&'a TensorEntry, u32)]) -> Result<()> {
        let first = self.replicas.len();
        for &(entry, chunk) in equal {
            let reader = reader(self.sight, self.ranks, entry, chunk, self.replicas.len())?;
            self.replicas.push(Replica { subject, entry, first, chunk, reader });
        }
        Ok(())
    }
}

/// Two replicas that differ, by their numbers.
struct DifferingPair {
    subject: usize,
    between: [usize; 2],
    /// Of the chunk.
    element: u64,
}

/// The first difference of each subject that has one.
fn first_differences(
    communicator: &impl Communicator,
    input: Input<'_>,
    replicas: &[Replica<'_>],
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Vec<DifferingPair>> {
    let rank = communicator.rank();
    let read: Result<Vec<Option<Vec<u8>>>> = replicas
        .par_iter()
        .map(|replica| {
            let hashes = (replica.reader == rank).then(|| replica.hashes(input, reporter, stop));
            hashes.transpose()
        })
        .collect();
    let own = communicator.settle(read)?;
    let said: Vec<u8> = own.iter().flatten().flat_map(|blocks| *blake3::hash(blocks).as_bytes()).collect();
    let mut heard: Vec<std::vec::IntoIter<u8>> = communicator.gather(&said)?.into_iter().map(Vec::into_iter).collect();
    let hashes: Vec<Vec<u8>> =
        replicas.iter().map(|replica| heard[replica.reader as usize].by_ref().take(HASH_BYTES).collect()).collect();

    let mut found: Vec<DifferingPair> = Vec::new();
    for (index, replica) in replicas.iter().enumerate() {
        let Replica { subject, first, .. } = *replica;
        let is_known = found.last().is_some_and(|found| found.subject == subject);
        if is_known || hashes[index] == hashes[first] {
            continue;
        }
        let pair = Pair { communicator, input, left: &replicas[first], right: replica };
        let element = pair.first_element([own[first].as_deref(), own[index].as_deref()])?;
        found.push(DifferingPair { subject, between: [first, index], element });
    }
    Ok(found)
}

/// A chunk that others should be equal to.
struct Replica<'a> {
    /// What it is looked at for.
    subject: usize,
    entry: &'a TensorEntry,
    /// The number of the one that it is compared with.
    first: usize,
    chunk: u32,
    reader: u32,
}

impl Replica<'_> {
    /// Those of its blocks, one behind the other.
    fn hashes(&self, input: Input<'_>, reporter: &dyn Reporter, stop: &Stop) -> Result<Vec<u8>> {
        let values = Values::chunk(input, self.entry, self.chunk)?;
        let blocks: Vec<(u64, u64)> = values.blocks(BLOCK_BYTES).collect();
        let hashes: Result<Vec<[u8; HASH_BYTES]>> = blocks
            .into_par_iter()
            .map_init(<(Vec<u8>, Scratch)>::default, |(buffer, scratch), (first, len)| {
                stop.check()?;
                values.read(first, len, buffer, scratch)?;
                reporter.advance(len);
                Ok(*blake3::hash(buffer).as_bytes())
            })
            .collect();
        Ok(hashes?.concat())
    }

    fn block(&self, input: Input<'_>, number: usize) -> Result<Vec<u8>> {
        let values = Values::chunk(input, self.entry, self.chunk)?;
        let mut buffer = Vec::new();
        if let Some((first, len)) = values.blocks(BLOCK_BYTES).nth(number) {
            values.read(first, len, &mut buffer, &mut Scratch::default())?;
        }
        Ok(buffer)
    }
}

/// Two replicas that differ.
struct Pair<'a, C> {
    communicator: &'a C,
    input: Input<'a>,
    left: &'a Replica<'a>,
    right: &'a Replica<'a>,
}

impl<C: Communicator> Pair<'_, C> {
    /// The first element that differs; `blocks` are the hashes of each side that this rank read.
    fn first_element(&self, blocks: [Option<&[u8]>; 2]) -> Result<u64> {
        let [left, right] = self.hear(blocks)?;
        let (left, right) = (left.as_chunks::<HASH_BYTES>().0, right.as_chunks::<HASH_BYTES>().0);
        let number = left.iter().zip(right).take_while(|(left, right)| left == right).count();
        let rank = self.communicator.rank();
        let read =
            |replica: &Replica<'_>| (replica.reader == rank).then(|| replica.block(self.input, number)).transpose();
        let own = read(self.left).and_then(|left| Ok([left, read(self.right)?]));
        let own = self.communicator.settle(own)?;
        let [left, right] = self.hear([own[0].as_deref(), own[1].as_deref()])?;
        let dtype = self.left.entry.dtype;
        let elements = BLOCK_BYTES / dtype.itemsize() * number as u64;
        let difference = Difference::between(dtype, elements, &left, &right);
        // Equal only where a file changes under the hands of its reader, which is found out before publishing.
        Ok(difference.map_or(elements, |difference| difference.element))
    }

    /// What the readers of both sides have; each has its own, or both.
    fn hear(&self, own: [Option<&[u8]>; 2]) -> Result<[Vec<u8>; 2]> {
        let [left, right] = own.map(|own| self.communicator.gather(own.unwrap_or_default()));
        let take = |mut heard: Vec<Vec<u8>>, replica: &Replica<'_>| heard.swap_remove(replica.reader as usize);
        Ok([take(left?, self.left), take(right?, self.right)])
    }
}

/// Who reads a chunk: those that see it do so in turn.
fn reader(sight: &FileVisibility, ranks: u32, entry: &TensorEntry, chunk: u32, turn: usize) -> Result<u32> {
    let file = entry.chunks.location(chunk as usize).file();
    let seen_by: &[u32] = match (sight, file) {
        (FileVisibility::PerRank(seen), Some(file)) => &seen[file.0 as usize],
        _ => return Ok(u32::try_from(turn % ranks as usize).expect("fewer than 2^32 ranks")),
    };
    let reader = seen_by.get(turn % seen_by.len().max(1)).copied();
    reader.ok_or_else(|| {
        let what = format!("{}: no process sees a file that holds {}", entry.fqn, entry.chunk_name(chunk));
        Error::comm(0, "compare", what)
    })
}
