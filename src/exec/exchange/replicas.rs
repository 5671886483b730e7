//! Replicas that no process sees all of, compared by hashes.
//!
//! Each chunk is read once, by a rank that sees its file, and all hear a hash of it. Where two that should be equal are
//! not, their readers tell the hashes of their blocks, and then the first block that differs. So what is found is what one
//! process finds that reads both, for 32 bytes a chunk on the wire.
//!
//! Counts bytes. Invariant: all ranks ask and answer in the same order, and come to the same result.

use rayon::prelude::*;

use super::readers::Sight;
use crate::catalog::{TensorEntry, TensorId};
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::exec::compare::{Difference, ReplicaDifference, Values};
use crate::exec::{Input, Reporter, Scratch, Stop};

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
    sight: &Sight,
    input: Input<'_>,
    tensors: &[TensorId],
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Vec<(TensorId, ReplicaDifference)>> {
    let mut replicas: Vec<Replica<'_>> = Vec::new();
    for id in tensors {
        let entry = input.catalog.tensor(*id);
        for holders in entry.tilings()?.iter().flat_map(|tiling| &tiling.holders).filter(|holders| holders.len() > 1) {
            for &chunk in holders {
                let turn = replicas.len();
                let reader = reader(sight, communicator.size(), entry, chunk, turn)?;
                replicas.push(Replica { id: *id, entry, first: holders[0], chunk, reader });
            }
        }
    }
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

    let mut found: Vec<(TensorId, ReplicaDifference)> = Vec::new();
    let mut first = 0;
    for (index, replica) in replicas.iter().enumerate() {
        if replica.chunk == replica.first {
            first = index;
        }
        let is_known = found.last().is_some_and(|(id, _)| *id == replica.id);
        if is_known || hashes[index] == hashes[first] {
            continue;
        }
        let pair = Pair { communicator, input, left: &replicas[first], right: replica };
        let element = pair.first_element([own[first].as_deref(), own[index].as_deref()])?;
        found.push((replica.id, ReplicaDifference { first: replica.first, second: replica.chunk, element }));
    }
    Ok(found)
}

/// A chunk that others should be equal to.
struct Replica<'a> {
    id: TensorId,
    entry: &'a TensorEntry,
    /// The one that it is compared with.
    first: u32,
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
fn reader(sight: &Sight, ranks: u32, entry: &TensorEntry, chunk: u32, turn: usize) -> Result<u32> {
    let file = entry.chunks.place(chunk as usize).file();
    let seen_by: &[u32] = match (sight, file) {
        (Sight::PerRank(seen), Some(file)) => &seen[file.0 as usize],
        _ => return Ok(u32::try_from(turn % ranks as usize).expect("fewer than 2^32 ranks")),
    };
    let reader = seen_by.get(turn % seen_by.len().max(1)).copied();
    reader.ok_or_else(|| {
        let what = format!("{}: no process sees a file that holds {}", entry.fqn, entry.chunk_name(chunk));
        Error::comm(0, "compare", what)
    })
}
