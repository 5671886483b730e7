//! Looking ahead: whole tensors are proven, planned and drafted some at a time, by as many threads as there are.
//!
//! A round of small tensors has thousands of them, and whoever moves the round before waits for it.
//!
//! Counts tiles. Invariant: tensors come in their order, and so do their faults.

use std::iter::{Enumerate, Peekable};
use std::slice;
use std::sync::Arc;
use std::vec;

use rayon::prelude::*;

use super::demand::{Demand, FileOwners};
use super::readers::Topology;
use super::transfer_plan::{MOST_COPIES, SizedPlan, TransferPlan};
use super::transfers::Unit;
use crate::catalog::{Catalog, Reserved, TensorEntry};
use crate::error::Result;

/// Tensors that are looked at together: some for each of many threads, and few beside those of a round. However many the
/// threads, their drafts together take no more than those of a round.
const MOST_TENSORS: usize = 1 << 10;

/// A unit, with its moves where those are not too many.
pub struct PlannedUnit<'a> {
    pub unit: Unit<'a>,
    pub draft: Option<SizedPlan<'a>>,
}

impl<'a> PlannedUnit<'a> {
    /// # Errors
    /// As [`Draft::weighed`].
    pub fn new(unit: Unit<'a>, parties: &Topology) -> Result<Self> {
        let draft = TransferPlan::weighed(unit.clone(), parties, MOST_COPIES)?;
        Ok(Self { unit, draft })
    }
}

/// An iterator over the tensors of which something is to be done, each in one range.
pub struct Prefetch<'a> {
    catalog: &'a Catalog,
    rest: Peekable<Enumerate<slice::Iter<'a, Reserved>>>,
    owners: &'a FileOwners,
    parties: &'a Topology,
    drafted: vec::IntoIter<Result<Option<PlannedUnit<'a>>>>,
}

impl<'a> Prefetch<'a> {
    #[must_use]
    pub fn new(catalog: &'a Catalog, tensors: &'a [Reserved], owners: &'a FileOwners, parties: &'a Topology) -> Self {
        Self { catalog, rest: tensors.iter().enumerate().peekable(), owners, parties, drafted: Vec::new().into_iter() }
    }

    /// Look at the next tensors. False where there are none.
    fn look(&mut self) -> bool {
        let (mut few, mut copies) = (Vec::new(), 0_usize);
        while let Some((number, tensor)) = self.rest.peek().copied() {
            copies = copies.saturating_add(most_copies(tensor, self.catalog.tensor(tensor.source)));
            if !few.is_empty() && (few.len() == MOST_TENSORS || copies > MOST_COPIES) {
                break;
            }
            few.push((number, tensor));
            self.rest.next();
        }
        let drafted: Vec<_> = few.into_par_iter().map(|(number, tensor)| self.drafted(number, tensor)).collect();
        self.drafted = drafted.into_iter();
        self.drafted.len() > 0
    }

    /// `None` where nothing of it is to be done.
    fn drafted(&self, number: usize, tensor: &'a Reserved) -> Result<Option<PlannedUnit<'a>>> {
        let demand = Demand::new(self.catalog.tensor(tensor.source), tensor, self.owners)?;
        if demand.is_empty() {
            return Ok(None);
        }
        let ranges = std::iter::once(0..demand.source.numel()).collect();
        PlannedUnit::new(Unit { demand: Arc::new(demand), number, ranges }, self.parties).map(Some)
    }
}

impl<'a> Iterator for Prefetch<'a> {
    type Item = Result<PlannedUnit<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.drafted.next() {
                Some(drafted) => {
                    if let Some(drafted) = drafted.transpose() {
                        return Some(drafted);
                    }
                }
                None if self.look() => {}
                None => return None,
            }
        }
    }
}

/// What a tensor may be copied in: each target chunk has something of each chunk of the source, of one of its summands.
fn most_copies(tensor: &Reserved, source: &TensorEntry) -> usize {
    tensor.entry.chunks.len().saturating_mul(source.chunks.len()).max(tensor.tiles_read(source))
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::super::readers::{Counting, FileVisibility};
    use super::*;
    use crate::catalog::{Chunk, Dtype, FileLocation, OutputFile, TensorId};
    use crate::exec::Extents;
    use crate::exec::reduce::ReductionMethod;
    use crate::layout::Tile;
    use crate::storage::FileId;

    /// How many tensors are looked at together, the first time, of so many that come from so many chunks each into one.
    fn looked_at(tensors: u32, chunks: u64) -> usize {
        let mut catalog = Catalog::empty();
        let (mut output, mut reserved) = (OutputFile::new("out"), Vec::new());
        let of_bytes = |range: Range<u64>, file, offset| {
            let tile = Tile::new([std::iter::once(range).collect()]);
            Chunk { tile, location: FileLocation::Bytes { file: FileId(file), offset }, strides: None, rank: None }
        };
        for number in 0..tensors {
            let entry = || TensorEntry::new(format!("t{number}").into(), Dtype::U8, [chunks].as_slice().into());
            let (mut source, mut target) = (entry(), entry());
            (0..chunks).for_each(|chunk| source.chunks.push(of_bytes(chunk..chunk + 1, 0, chunk)));
            target.chunks.push(of_bytes(0..chunks, 0, output.push_payload(chunks)));
            catalog.tensors.push(source);
            reserved.push(Reserved::new(TensorId(number), target));
        }
        let files = [output];
        let owners = FileOwners::new(&files, &[Extents::of_files(&files), Extents::new()]);
        let (sight, reducing) = (FileVisibility::Shared, ReductionMethod::InRankOrder);
        let parties = Topology { sight, nodes: vec![0, 0], counting: Counting::Any, reducing };
        let mut ahead = Prefetch::new(&catalog, &reserved, &owners, &parties);
        assert!(ahead.next().unwrap().unwrap().unit.number == 0);
        let first = ahead.drafted.len() + 1;
        assert_eq!(ahead.count() + 1, tensors as usize);
        first
    }

    #[test]
    fn what_is_looked_at_is_no_more_than_a_round() {
        // Small ones are enough for many threads.
        assert_eq!([1, 8].map(|chunks| looked_at(3000, chunks)), [MOST_TENSORS; 2]);
        let many = [(130, 64), (10, 1000), (2, 5000), (2, 9000)];
        assert_eq!(many.map(|(tensors, chunks)| looked_at(tensors, chunks)), [128, 8, 1, 1]);
    }
}
