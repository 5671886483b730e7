//! Readers: decides which process reads each source range. If all processes see all files, each range is read once, by
//! the process that needs most of its bytes, so that the fewest bytes are sent. If each process sees only its own
//! files, a process reads the bytes that it needs from any replica in its own files. A process without such a replica
//! gets the bytes from another process, on its own node if possible.

use smallvec::SmallVec;

use crate::catalog::TensorEntry;
use crate::comm::{Communicator, node};
use crate::error::{CommError, Error, Result};
use crate::exec::reduce::ReductionMethod;
use crate::storage::{FileId, Files};

/// The files that each process can read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileVisibility {
    /// All processes can read all files.
    Shared,
    /// For each file, the processes that can read it, in ascending order. The index of the list is the [`FileId`].
    PerRank(Vec<SmallVec<[u32; 2]>>),
}

impl FileVisibility {
    /// Returns which of `ranks` processes see each of `files`, which were opened through a metadata mirror. A file that
    /// is not part of the mirror is visible to all processes.
    #[must_use]
    pub fn from_files(files: &Files, ranks: u32) -> Self {
        let all: SmallVec<[u32; 2]> = (0..ranks).collect();
        Self::PerRank(
            files.ids().map(|id| files.seen_by(id).map_or_else(|| all.clone(), SmallVec::from_slice)).collect(),
        )
    }
}

/// The facts about the processes of an exchange that determine which process reads and which process reduces. All
/// processes have the same value.
#[derive(Clone, Debug)]
pub struct Topology {
    /// The files that each process can read.
    pub visibility: FileVisibility,
    /// For each process, the number of the node on which it runs.
    pub nodes: Vec<u32>,
    /// The rule that selects the replica to read, if there are several.
    pub replica_choice: ReplicaChoice,
    /// The method for reducing partial values.
    pub reducing: ReductionMethod,
}

/// The rule for choosing one of several replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaChoice {
    /// Any replica may be read, because all replicas are equal.
    Any,
    /// Only the replica of the lowest rank of SRC is read, because replicas may differ.
    LowestRank,
}

impl ReplicaChoice {
    /// Returns the chunks in `holders` that may be read. `holders` are chunks with equal elements (replicas), in
    /// ascending order of the ranks that saved them.
    pub fn allowed_holders(self, holders: &[u32]) -> &[u32] {
        if self == Self::LowestRank { &holders[..1] } else { holders }
    }
}

/// A process that reads a source chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reader {
    /// The number of the dtshard process that reads.
    pub rank: u32,
    /// The index of the chunk that the process reads, in its tensor.
    pub chunk: u32,
}

impl Topology {
    /// Gathers the node number of each process: processes on one node have equal numbers. Collective.
    ///
    /// # Errors
    /// Returns the errors of [`Communicator::gather`].
    pub fn gather_nodes(communicator: &impl Communicator) -> Result<Vec<u32>> {
        // Host name and boot id together identify a node. Nodes that were started from one image may have the same host
        // name. Containers on one node may have different host names; they then count as different nodes.
        let host = node::this_host().unwrap_or_default();
        let boot = node::this_boot().unwrap_or_default();
        let identities = communicator.gather(format!("{host}\n{boot}").as_bytes())?;
        Ok(number_nodes(&identities))
    }

    /// Returns the index of a process among the processes on its node, from 0 (`LOCAL_RANK` of torchrun). `nodes` has
    /// the node number of each process.
    pub fn local_rank(nodes: &[u32], rank: u32) -> u32 {
        let (before, own) = (&nodes[..rank as usize], nodes[rank as usize]);
        u32::try_from(before.iter().filter(|node| **node == own).count()).expect("fewer than 2^32 ranks")
    }

    /// Returns the number of processes.
    pub fn size(&self) -> u32 {
        u32::try_from(self.nodes.len()).expect("fewer than 2^32 ranks")
    }

    /// Chooses a reader for each process that needs bytes of a chunk. `needs` lists these processes in ascending order,
    /// each with the number of bytes that it needs. `holders` are the chunk and its replicas. `turn` is a number that
    /// differs for each source range, so that different processes are chosen if several are equally good.
    ///
    /// # Errors
    /// Returns `Comm` if no process sees a file that contains the chunk.
    pub fn choose_readers(
        &self,
        entry: &TensorEntry,
        holders: &[u32],
        needs: &[(u32, u64)],
        turn: usize,
    ) -> Result<SmallVec<[Reader; 4]>> {
        let FileVisibility::PerRank(visible_to) = &self.visibility else {
            let max_bytes = needs.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
            let first: SmallVec<[u32; 8]> =
                needs.iter().filter(|(_, bytes)| *bytes == max_bytes).map(|(rank, _)| *rank).collect();
            let reader = Reader { rank: first[turn % first.len()], chunk: holders[0] };
            return Ok(needs.iter().map(|_| reader).collect());
        };
        let readers_of_chunk = |chunk: &u32| {
            let file = entry.chunks.location(*chunk as usize).file();
            let ranks: &[u32] = file.map_or(&[], |FileId(file)| &visible_to[file as usize]);
            let chunk = *chunk;
            ranks.iter().map(move |&rank| Reader { rank, chunk })
        };
        let all: SmallVec<[Reader; 8]> = holders.iter().flat_map(readers_of_chunk).collect();
        if all.is_empty() {
            return Err(Error::Comm(CommError {
                rank: needs.first().map_or(0, |(rank, _)| *rank).into(),
                op: "read",
                detail: format!("{}: no process sees a file with {}", entry.fqn, entry.chunk_name(holders[0])),
                hint: Some(
                    "start enough processes that each file of SRC is visible to one of them: options::source per-rank reads no other files".into(),
                ),
            }));
        }
        let reader_of = |&(rank, _): &(u32, u64)| {
            let node = self.nodes[rank as usize];
            let proximity = |reader: &Reader| (reader.rank == rank, self.nodes[reader.rank as usize] == node);
            let nearest = all.iter().map(proximity).max().expect("not empty");
            let closest: SmallVec<[&Reader; 8]> = all.iter().filter(|reader| proximity(reader) == nearest).collect();
            *closest[turn % closest.len()]
        };
        Ok(needs.iter().map(reader_of).collect())
    }
}

/// Numbers the nodes from 0, in the order of the lowest process on each node. Processes with equal identities are on
/// the same node. A process with an empty identity (`"\n"`) has a node of its own.
fn number_nodes(identities: &[Vec<u8>]) -> Vec<u32> {
    let mut known: Vec<&[u8]> = Vec::new();
    let mut numbers = Vec::with_capacity(identities.len());
    for identity in identities {
        let found = known.iter().position(|other| *other == identity && identity != b"\n");
        if found.is_none() {
            known.push(identity);
        }
        let number = found.unwrap_or(known.len() - 1);
        numbers.push(u32::try_from(number).expect("fewer than 2^32 ranks"));
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_host_and_boot_id_is_the_same_node() {
        let identities = ["a\n1", "b\n2", "a\n1", "a\n2", "\n", "\n"].map(|identity| identity.as_bytes().to_vec());
        assert_eq!(number_nodes(&identities), [0, 1, 0, 2, 3, 4]);
    }
}
