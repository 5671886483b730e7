//! Weighing: how a plan reads the source, told from some of its tensors, since there may be very many.
//!
//! The tensors looked at are those that lie at equal distances among the bytes of all, so the long ones decide, and no
//! period of layers has a say. Counts bytes. Invariant: it is the same wherever catalog and target are, so processes that
//! weigh one plan need not ask each other.

use super::copy::Stats;
use super::window::prepare;
use super::{Extents, Input};
use crate::catalog::{Reservation, Reserved};
use crate::error::Result;

/// Tensors that are planned, at most.
const MOST_PLANNED: usize = 64;

/// What a plan is like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weighed {
    /// Tensors that were planned, of how many.
    pub planned: usize,
    pub of: usize,
    /// Bytes that are taken for them, in so many contiguous runs.
    pub bytes_read: u64,
    pub runs: u64,
    /// Bytes of those tensors, and of them those that several summands are reduced for.
    pub bytes: u64,
    pub reduced_bytes: u64,
}

impl Weighed {
    /// Plan some tensors of a target, and look at how they are read.
    ///
    /// # Errors
    /// As planning.
    pub fn new(input: Input<'_>, reservation: &Reservation) -> Result<Self> {
        let len_of = |tensor: &Reserved| input.catalog.tensor(tensor.source).len_bytes();
        let todo = Extents::of_files(&reservation.files);
        let mut slots = Vec::new();
        let mut weighed = Self { of: reservation.tensors.len(), ..Self::default() };
        for tensor in spread(&reservation.tensors, len_of) {
            prepare(input, &[tensor], &todo, &mut slots)?;
            let stats = Stats::of_slots(&slots);
            let source = input.catalog.tensor(tensor.source);
            let is_reduced = (0..tensor.entry.chunks.len()).any(|chunk| tensor.tiles_of(chunk, source) > 1);
            weighed.planned += 1;
            weighed.bytes_read = weighed.bytes_read.saturating_add(stats.bytes_read);
            weighed.runs = weighed.runs.saturating_add(stats.runs);
            weighed.bytes = weighed.bytes.saturating_add(source.len_bytes());
            weighed.reduced_bytes += if is_reduced { source.len_bytes() } else { 0 };
        }
        Ok(weighed)
    }

    #[must_use]
    pub fn mean_run_bytes(&self) -> u64 {
        self.bytes_read.checked_div(self.runs).unwrap_or(0)
    }

    /// Whether most of it is reduced.
    #[must_use]
    pub fn is_reduced(&self) -> bool {
        self.reduced_bytes > self.bytes / 2
    }
}

/// Those that lie at equal distances among the bytes of all; all where they are few.
fn spread<T>(tensors: &[T], len_of: impl Fn(&T) -> u64) -> Vec<&T> {
    if tensors.len() <= MOST_PLANNED {
        return tensors.iter().collect();
    }
    let total: u128 = tensors.iter().map(|tensor| u128::from(len_of(tensor))).sum();
    let mut chosen = Vec::with_capacity(MOST_PLANNED);
    let mut end = 0;
    for tensor in tensors {
        let passed = |at: u128| at * 2 * MOST_PLANNED as u128 / (2 * total).max(1);
        let before = passed(end);
        end += u128::from(len_of(tensor));
        if passed(end) > before {
            chosen.push(tensor);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_chosen_among_bytes() {
        let few = [5, 0, 7];
        assert_eq!(spread(&few, |len| *len), [&5, &0, &7]);
        // Layers of one long tensor and many short ones.
        let layers: Vec<u64> = (0..1000).map(|number| if number % 10 == 0 { 1 << 20 } else { 64 }).collect();
        let chosen = spread(&layers, |len| *len);
        assert!(chosen.len() <= MOST_PLANNED && chosen.len() > MOST_PLANNED / 2);
        assert!(chosen.iter().filter(|len| ***len > 64).count() > chosen.len() * 3 / 4);
        let one: Vec<u64> = (0..100).map(|number| u64::from(number == 50) << 62).collect();
        assert_eq!(spread(&one, |len| *len), [&(1 << 62)]);
        assert!(spread(&[0; 100], |len| *len).is_empty());
    }
}
