//! Readers: who reads what others need.
//!
//! Where all processes see all files, a stretch is read once, by the one that needs most of it: that much never goes
//! over the wire. Where each sees only its own, whoever holds what it needs reads that itself, a replica as well, and
//! the others get it from one on their own node, if there is one.

use smallvec::SmallVec;

use crate::catalog::TensorEntry;
use crate::comm::{Communicator, node};
use crate::error::{CommError, Error, Result};
use crate::exec::reduce::ReductionMethod;
use crate::storage::{FileId, Files};

/// Which processes can read which files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileVisibility {
    /// All can read all.
    Shared,
    /// For each file the ranks that can read it, ascending.
    PerRank(Vec<SmallVec<[u32; 2]>>),
}

impl FileVisibility {
    /// That of files that were read from a twin by so many ranks. What is not of the twin is seen by all.
    #[must_use]
    pub fn of(files: &Files, ranks: u32) -> Self {
        let all: SmallVec<[u32; 2]> = (0..ranks).collect();
        Self::PerRank(
            files.ids().map(|id| files.seen_by(id).map_or_else(|| all.clone(), SmallVec::from_slice)).collect(),
        )
    }
}

/// The processes that exchange, as far as it matters who reads and who reduces. All know the same.
#[derive(Clone, Debug)]
pub struct Topology {
    pub sight: FileVisibility,
    /// For each rank its node.
    pub nodes: Vec<u32>,
    pub counting: Counting,
    pub reducing: ReductionMethod,
}

/// Which of several replicas is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counting {
    /// They are the same.
    Any,
    /// They may differ: the lowest rank's is what is meant.
    First,
}

impl Counting {
    #[must_use]
    pub fn holders(self, holders: &[u32]) -> &[u32] {
        if self == Self::First { &holders[..1] } else { holders }
    }
}

/// A rank that reads a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reader {
    pub rank: u32,
    pub chunk: u32,
}

impl Topology {
    /// Hear from all on which node they are: the nodes of all ranks. Collective.
    ///
    /// # Errors
    /// As [`Communicator::gather`].
    pub fn meet(communicator: &impl Communicator) -> Result<Vec<u32>> {
        // Containers of one node may have hosts' names of their own, and nodes started from one image the same.
        let host = node::this_host().unwrap_or_default();
        let boot = node::this_boot().unwrap_or_default();
        let said = communicator.gather(format!("{host}\n{boot}").as_bytes())?;
        Ok(number(&said))
    }

    /// Which of the ranks of its node a rank is, from 0. `nodes` has the node of each.
    #[must_use]
    pub fn local_rank(nodes: &[u32], rank: u32) -> u32 {
        let (before, own) = (&nodes[..rank as usize], nodes[rank as usize]);
        u32::try_from(before.iter().filter(|node| **node == own).count()).expect("fewer than 2^32 ranks")
    }

    #[must_use]
    pub fn size(&self) -> u32 {
        u32::try_from(self.nodes.len()).expect("fewer than 2^32 ranks")
    }

    /// Who reads for each of those that need some of a chunk: rank and bytes, in the order of ranks. `holders` hold the
    /// same, and `turn` is another number for each stretch, so that what anybody could do is done in turn.
    ///
    /// # Errors
    /// `Missing` where nobody sees a file that holds it.
    pub fn readers(
        &self,
        entry: &TensorEntry,
        holders: &[u32],
        needs: &[(u32, u64)],
        turn: usize,
    ) -> Result<SmallVec<[Reader; 4]>> {
        let FileVisibility::PerRank(seen) = &self.sight else {
            let most = needs.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
            let first: SmallVec<[u32; 8]> =
                needs.iter().filter(|(_, bytes)| *bytes == most).map(|(rank, _)| *rank).collect();
            let reader = Reader { rank: first[turn % first.len()], chunk: holders[0] };
            return Ok(needs.iter().map(|_| reader).collect());
        };
        let seen_by = |chunk: &u32| {
            let file = entry.chunks.location(*chunk as usize).file();
            let ranks: &[u32] = file.map_or(&[], |FileId(file)| &seen[file as usize]);
            let chunk = *chunk;
            ranks.iter().map(move |&rank| Reader { rank, chunk })
        };
        let all: SmallVec<[Reader; 8]> = holders.iter().flat_map(seen_by).collect();
        if all.is_empty() {
            return Err(Error::Comm(CommError {
                rank: needs.first().map_or(0, |(rank, _)| *rank).into(),
                op: "read",
                detail: format!("{}: no process sees a file that holds {}", entry.fqn, entry.chunk_name(holders[0])),
                hint: Some(
                    "with options::source per-rank every file of SRC has to be seen by one of the processes".into(),
                ),
            }));
        }
        let reader_of = |&(rank, _): &(u32, u64)| {
            let node = self.nodes[rank as usize];
            let nearness = |reader: &Reader| (reader.rank == rank, self.nodes[reader.rank as usize] == node);
            let nearest = all.iter().map(nearness).max().expect("not empty");
            let near: SmallVec<[&Reader; 8]> = all.iter().filter(|reader| nearness(reader) == nearest).collect();
            *near[turn % near.len()]
        };
        Ok(needs.iter().map(reader_of).collect())
    }
}

/// Equal words have equal numbers, which count up from 0 in the order in which words first come. Who says nothing is like
/// nobody else.
fn number(said: &[Vec<u8>]) -> Vec<u32> {
    let mut known: Vec<&[u8]> = Vec::new();
    let mut numbers = Vec::with_capacity(said.len());
    for words in said {
        let found = known.iter().position(|other| *other == words && words != b"\n");
        if found.is_none() {
            known.push(words);
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
    fn nodes_are_told_apart_by_what_they_say() {
        let said = ["a\n1", "b\n2", "a\n1", "a\n2", "\n", "\n"].map(|words| words.as_bytes().to_vec());
        assert_eq!(number(&said), [0, 1, 0, 2, 3, 4]);
    }
}
