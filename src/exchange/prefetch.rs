//! Plans whole tensors in advance, one batch of tensors at a time, on all threads. Reason: a round of small tensors
//! contains thousands of tensors, and the earlier rounds must not wait until all tensors are planned. Invariant: the
//! iterator returns tensors and errors in the order of the reservation.

use std::iter::{Enumerate, Peekable};
use std::slice;
use std::sync::Arc;
use std::vec;

use rayon::prelude::*;

use super::demand::{Demand, FileOwners};
use super::readers::Topology;
use super::transfer_plan::{MAX_COPIES, SizedPlan, TransferPlan};
use super::transfers::Unit;
use crate::catalog::{Catalog, Reserved, TensorEntry};
use crate::error::Result;

/// The maximum number of tensors in a batch. A batch has several tensors for each thread, but fewer tensors than a
/// round may have. So the plans of a batch never need more memory than the plans of a round may need.
const MAX_TENSORS: usize = 1 << 10;

/// An exchange unit with its transfer plan.
pub struct PlannedUnit<'a> {
    /// The elements of a tensor that the plan transfers.
    pub unit: Unit<'a>,
    /// The transfer plan. `None` if the plan would have too many copies, so that the exchange unit must be split.
    pub plan: Option<SizedPlan<'a>>,
}

impl<'a> PlannedUnit<'a> {
    /// Makes the transfer plan of an exchange unit.
    ///
    /// # Errors
    /// Returns the errors of [`TransferPlan::build`].
    pub fn new(unit: Unit<'a>, topology: &Topology) -> Result<Self> {
        let plan = TransferPlan::build(unit.clone(), topology, MAX_COPIES)?;
        Ok(Self { unit, plan })
    }
}

/// An iterator over the tensors of which at least one process must write bytes. Each result is a whole tensor with its
/// plan.
pub struct Prefetch<'a> {
    catalog: &'a Catalog,
    remaining: Peekable<Enumerate<slice::Iter<'a, Reserved>>>,
    owners: &'a FileOwners,
    topology: &'a Topology,
    planned: vec::IntoIter<Result<Option<PlannedUnit<'a>>>>,
}

impl<'a> Prefetch<'a> {
    /// Returns an iterator over the tensors to write. Their transfer plans are made in advance.
    #[must_use]
    pub fn new(catalog: &'a Catalog, tensors: &'a [Reserved], owners: &'a FileOwners, topology: &'a Topology) -> Self {
        Self {
            catalog,
            remaining: tensors.iter().enumerate().peekable(),
            owners,
            topology,
            planned: Vec::new().into_iter(),
        }
    }

    /// Plans the next batch of tensors. Returns false if no tensors are left.
    fn plan_next_tensors(&mut self) -> bool {
        let (mut batch, mut copies) = (Vec::new(), 0_usize);
        while let Some((number, tensor)) = self.remaining.peek().copied() {
            copies = copies.saturating_add(max_copies(tensor, self.catalog.tensor(tensor.source)));
            if !batch.is_empty() && (batch.len() == MAX_TENSORS || copies > MAX_COPIES) {
                break;
            }
            batch.push((number, tensor));
            self.remaining.next();
        }
        let planned: Vec<_> = batch.into_par_iter().map(|(number, tensor)| self.plan_tensor(number, tensor)).collect();
        self.planned = planned.into_iter();
        self.planned.len() > 0
    }

    /// Plans the transfers of a tensor. Returns `None` if no process has to write any byte of it.
    fn plan_tensor(&self, number: usize, tensor: &'a Reserved) -> Result<Option<PlannedUnit<'a>>> {
        let demand = Demand::new(self.catalog.tensor(tensor.source), tensor, self.owners)?;
        if demand.is_empty() {
            return Ok(None);
        }
        let ranges = std::iter::once(0..demand.source.numel()).collect();
        PlannedUnit::new(Unit { demand: Arc::new(demand), number, ranges }, self.topology).map(Some)
    }
}

impl<'a> Iterator for Prefetch<'a> {
    type Item = Result<PlannedUnit<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.planned.next() {
                Some(planned) => {
                    if let Some(planned) = planned.transpose() {
                        return Some(planned);
                    }
                }
                None if self.plan_next_tensors() => {}
                None => return None,
            }
        }
    }
}

/// Returns an upper bound for the number of copies of a tensor. It is reached if every target chunk overlaps every
/// source chunk.
fn max_copies(tensor: &Reserved, source: &TensorEntry) -> usize {
    tensor.entry.chunks.len().saturating_mul(source.chunks.len()).max(tensor.tiles_read(source))
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::super::readers::{FileVisibility, ReplicaChoice};
    use super::*;
    use crate::catalog::{Chunk, Dtype, FileLocation, OutputFile, TensorId};
    use crate::exec::Extents;
    use crate::exec::reduce::ReductionMethod;
    use crate::layout::Tile;
    use crate::storage::FileId;

    /// Returns the number of tensors in the first batch, if each of `tensors` tensors has `chunks` source chunks and
    /// one target chunk.
    fn first_batch_len(tensors: u32, chunks: u64) -> usize {
        let mut catalog = Catalog::empty();
        let (mut output, mut reserved) = (OutputFile::new("out"), Vec::new());
        let of_bytes = |range: Range<u64>, file, offset| {
            let tile = Tile::new([std::iter::once(range).collect()]);
            Chunk {
                tile,
                location: FileLocation::Bytes { file: FileId(file), offset },
                strides: None,
                rank: None,
                view: None,
            }
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
        let (visibility, reducing) = (FileVisibility::Shared, ReductionMethod::InRankOrder);
        let topology = Topology { visibility, nodes: vec![0, 0], replica_choice: ReplicaChoice::Any, reducing };
        let mut prefetch = Prefetch::new(&catalog, &reserved, &owners, &topology);
        assert!(prefetch.next().unwrap().unwrap().unit.number == 0);
        let first = prefetch.planned.len() + 1;
        assert_eq!(prefetch.count() + 1, tensors as usize);
        first
    }

    #[test]
    fn first_batch_is_at_most_one_round() {
        // A batch of small tensors has the maximum length.
        assert_eq!([1, 8].map(|chunks| first_batch_len(3000, chunks)), [MAX_TENSORS; 2]);
        let many = [(130, 64), (10, 1000), (2, 5000), (2, 9000)];
        assert_eq!(many.map(|(tensors, chunks)| first_batch_len(tensors, chunks)), [128, 8, 1, 1]);
    }
}
