//! Compares replicas of tensors in sources that no process sees completely. One process that sees the file of a chunk
//! reads the chunk, and all processes gather the 32-byte hash of each chunk. If two replicas differ, their readers send
//! the hashes of their blocks, and then the first block that differs. The result is the result that one process would
//! get if it could read both replicas. All sizes and offsets are in bytes. Invariant: all processes call the same
//! collectives in the same order, and get the same result.

use indexmap::IndexMap;
use rayon::prelude::*;

use super::readers::FileVisibility;
use crate::catalog::{TensorEntry, TensorId};
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::exec::compare::{Difference, ReplicaDifference, Values};
use crate::exec::{Input, Reporter, Scratch, Silent, Stop};
use crate::layout::Tile;

/// The length in bytes of a block: a part of a chunk that has its own hash. The last block of a chunk may be shorter.
const BLOCK_BYTES: u64 = 256 << 10;

const HASH_BYTES: usize = blake3::OUT_LEN;

/// Returns, for each tensor whose replicas differ, the first difference.
/// [`replica_difference`](crate::exec::compare::replica_difference) would give this result in a process that sees all
/// files. Collective.
///
/// # Errors
/// Returns the errors of reading, and `Comm` naming the process that failed.
pub fn differing_replicas(
    communicator: &impl Communicator,
    visibility: &FileVisibility,
    input: Input<'_>,
    tensors: &[TensorId],
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Vec<(TensorId, ReplicaDifference)>> {
    let mut lists = ReplicaLists { visibility, ranks: communicator.size(), replicas: Vec::new() };
    for (tensor_index, id) in tensors.iter().enumerate() {
        let entry = input.catalog.tensor(*id);
        for holders in entry.tilings()?.iter().flat_map(|tiling| &tiling.holders).filter(|holders| holders.len() > 1) {
            let list: Vec<_> = holders.iter().map(|chunk| (entry, *chunk)).collect();
            lists.push(tensor_index, &list)?;
        }
    }
    let found = first_differences(communicator, input, &lists.replicas, reporter, stop)?;
    let of_tensor = |found: DifferingPair| {
        let [first, second] = found.between.map(|index| lists.replicas[index].chunk);
        (tensors[found.tensor_index], ReplicaDifference { first, second, element: found.element })
    };
    Ok(found.into_iter().map(of_tensor).collect())
}

/// Compares two tensors with the same tiles. Returns the index of the first chunk of `pair[0]` that differs, and the
/// index of its first different element. `None` if the tensors are equal. Collective.
///
/// # Errors
/// Returns `Unsupported` if the tensors have different tiles, and the errors of [`differing_replicas`].
pub fn differing_pair(
    communicator: &impl Communicator,
    visibility: &FileVisibility,
    input: Input<'_>,
    pair: [TensorId; 2],
    stop: &Stop,
) -> Result<Option<(u32, u64)>> {
    let [left, right] = pair.map(|id| input.catalog.tensor(id));
    let mut lists = ReplicaLists { visibility, ranks: communicator.size(), replicas: Vec::new() };
    let chunks_by_tile = |entry: &TensorEntry| -> Result<IndexMap<Tile, u32>> {
        let tilings = entry.tilings()?;
        let first_holders = tilings.iter().flat_map(|tiling| &tiling.holders).map(|holders| holders[0]);
        Ok(first_holders.map(|chunk| (entry.chunks.tile(chunk as usize), chunk)).collect())
    };
    let (ours, theirs) = (chunks_by_tile(left)?, chunks_by_tile(right)?);
    let is_plain = left.partial_values.is_none() && right.partial_values.is_none() && left.dtype == right.dtype;
    if !is_plain || ours.len() != theirs.len() || !ours.keys().all(|tile| theirs.contains_key(tile)) {
        return Err(Error::unsupported(
            format!(
                "cannot compare `{}` with `{}`, which must be equal, because no process sees all files of both",
                left.fqn, right.fqn
            ),
            "convert with one process that sees all files of SRC, or drop one of them with options::exclude",
        ));
    }
    for (tile, chunk) in &ours {
        lists.push(0, &[(left, *chunk), (right, theirs[tile])])?;
    }
    let found = first_differences(communicator, input, &lists.replicas, &Silent, stop)?;
    Ok(found.first().map(|found| (lists.replicas[found.between[0]].chunk, found.element)))
}

/// The chunks to compare, each with the process that reads it.
struct ReplicaLists<'a> {
    visibility: &'a FileVisibility,
    ranks: u32,
    replicas: Vec<Replica<'a>>,
}

impl<'a> ReplicaLists<'a> {
    /// Adds a list of chunks that should be equal, and chooses the process that reads each chunk.
    fn push(&mut self, tensor_index: usize, equal: &[(&'a TensorEntry, u32)]) -> Result<()> {
        let first = self.replicas.len();
        for &(entry, chunk) in equal {
            let reader = choose_reader(self.visibility, self.ranks, entry, chunk, self.replicas.len())?;
            self.replicas.push(Replica { tensor_index, entry, first, chunk, reader });
        }
        Ok(())
    }
}

/// Two replicas that differ, and their first different element.
struct DifferingPair {
    tensor_index: usize,
    /// The indices of the two replicas in the list of replicas.
    between: [usize; 2],
    /// The index of the first different element, in the chunk's local tensor.
    element: u64,
}

/// Returns the first difference of each tensor whose replicas differ.
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
            let hashes = (replica.reader == rank).then(|| replica.block_hashes(input, reporter, stop));
            hashes.transpose()
        })
        .collect();
    let own = communicator.all_ok(read)?;
    let own_hashes: Vec<u8> = own.iter().flatten().flat_map(|blocks| *blake3::hash(blocks).as_bytes()).collect();
    let mut gathered: Vec<std::vec::IntoIter<u8>> =
        communicator.gather(&own_hashes)?.into_iter().map(Vec::into_iter).collect();
    let hashes: Vec<Vec<u8>> =
        replicas.iter().map(|replica| gathered[replica.reader as usize].by_ref().take(HASH_BYTES).collect()).collect();

    let mut found: Vec<DifferingPair> = Vec::new();
    for (index, replica) in replicas.iter().enumerate() {
        let Replica { tensor_index, first, .. } = *replica;
        let is_known = found.last().is_some_and(|found| found.tensor_index == tensor_index);
        if is_known || hashes[index] == hashes[first] {
            continue;
        }
        let pair = Pair { communicator, input, left: &replicas[first], right: replica };
        let element = pair.first_element([own[first].as_deref(), own[index].as_deref()])?;
        found.push(DifferingPair { tensor_index, between: [first, index], element });
    }
    Ok(found)
}

/// A replica to compare: a chunk, and the process that reads it.
struct Replica<'a> {
    /// The index of the tensor to which the replica belongs.
    tensor_index: usize,
    entry: &'a TensorEntry,
    /// The index, in the list of replicas, of the first chunk with the same elements. The replica is compared with that
    /// chunk.
    first: usize,
    chunk: u32,
    reader: u32,
}

impl Replica<'_> {
    /// Returns the hashes of all blocks of the chunk, one after the other, with [`HASH_BYTES`] bytes each.
    fn block_hashes(&self, input: Input<'_>, reporter: &dyn Reporter, stop: &Stop) -> Result<Vec<u8>> {
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

    /// Reads block `number` of the chunk. Returns no bytes if the chunk has fewer blocks.
    fn read_block(&self, input: Input<'_>, number: usize) -> Result<Vec<u8>> {
        let values = Values::chunk(input, self.entry, self.chunk)?;
        let mut buffer = Vec::new();
        if let Some((first, len)) = values.blocks(BLOCK_BYTES).nth(number) {
            values.read(first, len, &mut buffer, &mut Scratch::default())?;
        }
        Ok(buffer)
    }
}

/// Two replicas that differ, and the means to find the first different element.
struct Pair<'a, C> {
    communicator: &'a C,
    input: Input<'a>,
    left: &'a Replica<'a>,
    right: &'a Replica<'a>,
}

impl<C: Communicator> Pair<'_, C> {
    /// Returns the index of the first different element. `blocks` has the block hashes of the left and the right
    /// replica. A list is `None` if another process has read that replica.
    fn first_element(&self, blocks: [Option<&[u8]>; 2]) -> Result<u64> {
        let [left, right] = self.gather_pair(blocks)?;
        let (left, right) = (left.as_chunks::<HASH_BYTES>().0, right.as_chunks::<HASH_BYTES>().0);
        let number = left.iter().zip(right).take_while(|(left, right)| left == right).count();
        let rank = self.communicator.rank();
        let read = |replica: &Replica<'_>| {
            (replica.reader == rank).then(|| replica.read_block(self.input, number)).transpose()
        };
        let own = read(self.left).and_then(|left| Ok([left, read(self.right)?]));
        let own = self.communicator.all_ok(own)?;
        let [left, right] = self.gather_pair([own[0].as_deref(), own[1].as_deref()])?;
        let dtype = self.left.entry.dtype;
        let elements = BLOCK_BYTES / dtype.itemsize() * number as u64;
        let difference = Difference::between(dtype, elements, &left, &right);
        // The blocks can be equal only if a file has changed after it was hashed. A later check detects this change.
        Ok(difference.map_or(elements, |difference| difference.element))
    }

    /// Gathers bytes of the left and the right replica from the processes that read them. `own` has these bytes for
    /// each replica that this process reads.
    fn gather_pair(&self, own: [Option<&[u8]>; 2]) -> Result<[Vec<u8>; 2]> {
        let [left, right] = own.map(|own| self.communicator.gather(own.unwrap_or_default()));
        let take = |mut gathered: Vec<Vec<u8>>, replica: &Replica<'_>| gathered.swap_remove(replica.reader as usize);
        Ok([take(left?, self.left), take(right?, self.right)])
    }
}

/// Chooses a process that reads a chunk, among the processes that see its file. The number `turn` distributes the
/// chunks among these processes.
fn choose_reader(visibility: &FileVisibility, ranks: u32, entry: &TensorEntry, chunk: u32, turn: usize) -> Result<u32> {
    let file = entry.chunks.location(chunk as usize).file();
    let seen_by: &[u32] = match (visibility, file) {
        (FileVisibility::PerRank(seen), Some(file)) => &seen[file.0 as usize],
        _ => return Ok(u32::try_from(turn % ranks as usize).expect("fewer than 2^32 ranks")),
    };
    let reader = seen_by.get(turn % seen_by.len().max(1)).copied();
    reader.ok_or_else(|| {
        let what = format!("{}: no process sees a file with {}", entry.fqn, entry.chunk_name(chunk));
        Error::comm(0, "compare", what)
    })
}
