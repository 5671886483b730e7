//! Looking ahead: whole tensors are proven, planned and drafted some at a time, by as many threads as there are.
//!
//! A round of small tensors has thousands of them, and whoever moves the round before waits for it.
//!
//! Counts tiles. Invariant: tensors come in their order, and so do their faults.

use std::iter::Enumerate;
use std::slice;
use std::sync::Arc;
use std::vec;

use rayon::prelude::*;

use super::demand::{Demand, Owners};
use super::draft::{Draft, Unit, Weighed};
use super::readers::Parties;
use super::rounds::MOST_COPIES;
use crate::catalog::{Catalog, Reserved};
use crate::error::Result;

/// Tiles of the tensors that are looked at together: some for each of many threads, and few beside those of a round.
const MOST_TILES: usize = 1 << 10;

/// A unit, with its moves where those are not too many.
pub struct Drafted<'a> {
    pub unit: Unit<'a>,
    pub draft: Option<Weighed<'a>>,
}

impl<'a> Drafted<'a> {
    /// # Errors
    /// As [`Draft::weighed`].
    pub fn new(unit: Unit<'a>, parties: &Parties) -> Result<Self> {
        let draft = Draft::weighed(unit.clone(), parties, MOST_COPIES)?;
        Ok(Self { unit, draft })
    }
}

/// An iterator over the tensors of which something is to be done, each in one range.
pub struct Ahead<'a> {
    catalog: &'a Catalog,
    rest: Enumerate<slice::Iter<'a, Reserved>>,
    owners: &'a Owners,
    parties: &'a Parties,
    drafted: vec::IntoIter<Result<Option<Drafted<'a>>>>,
}

impl<'a> Ahead<'a> {
    #[must_use]
    pub fn new(catalog: &'a Catalog, tensors: &'a [Reserved], owners: &'a Owners, parties: &'a Parties) -> Self {
        Self { catalog, rest: tensors.iter().enumerate(), owners, parties, drafted: Vec::new().into_iter() }
    }

    /// Look at the next tensors. False where there are none.
    fn look(&mut self) -> bool {
        let (mut few, mut tiles) = (Vec::new(), 0_usize);
        while tiles < MOST_TILES {
            let Some((number, tensor)) = self.rest.next() else { break };
            tiles = tiles.saturating_add(tensor.tiles_read(self.catalog.tensor(tensor.source)).max(1));
            few.push((number, tensor));
        }
        let drafted: Vec<_> = few.into_par_iter().map(|(number, tensor)| self.drafted(number, tensor)).collect();
        self.drafted = drafted.into_iter();
        self.drafted.len() > 0
    }

    /// `None` where nothing of it is to be done.
    fn drafted(&self, number: usize, tensor: &'a Reserved) -> Result<Option<Drafted<'a>>> {
        let demand = Demand::new(self.catalog.tensor(tensor.source), tensor, self.owners)?;
        if demand.is_empty() {
            return Ok(None);
        }
        let ranges = std::iter::once(0..demand.source.numel()).collect();
        Drafted::new(Unit { demand: Arc::new(demand), number, ranges }, self.parties).map(Some)
    }
}

impl<'a> Iterator for Ahead<'a> {
    type Item = Result<Drafted<'a>>;

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
