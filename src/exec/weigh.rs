//! Weighing: how a plan reads the source, told from some of its tensors, since there may be very many.
//!
//! The tensors looked at are those that lie at equal distances among the bytes of all, so the long ones decide, and no
//! period of layers has a say. One is planned at a time, and no more of it than a window of a copy has: so much memory a
//! run has for plans in any case. Counts bytes. Invariant: it is the same wherever catalog and target are, so processes that
//! weigh one plan need not ask each other.

use super::copy::Stats;
use super::window::prepare;
use super::{Extents, Input};
use crate::catalog::{Reservation, Reserved, TensorEntry};
use crate::error::Result;

/// Tensors that are planned, at most.
const MOST_PLANNED: usize = 64;

/// Tiles of a tensor that are planned, at most, or those of one chunk.
const MOST_TILES: usize = 1 << 12;

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
        let mut slots = Vec::new();
        let mut weighed = Self { of: reservation.tensors.len(), ..Self::default() };
        for tensor in spread(&reservation.tensors, len_of) {
            let source = input.catalog.tensor(tensor.source);
            prepare(input, &[tensor], &some_chunks(tensor, source, MOST_TILES), &mut slots)?;
            let stats = Stats::of_slots(&slots);
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

/// Where chunks lie that have so many tiles together: all, or one of every so many.
fn some_chunks(tensor: &Reserved, source: &TensorEntry, most_tiles: usize) -> Extents {
    let chunks = 0..tensor.entry.chunks.len();
    let tiles = chunks.clone().map(|chunk| tensor.tiles_of(chunk, source)).fold(0, usize::saturating_add);
    let mut some = Extents::new();
    for chunk in chunks.step_by(tiles.div_ceil(most_tiles).max(1)) {
        if let Some((file, offset)) = tensor.place(chunk) {
            some.insert(file, offset..offset + tensor.chunk_bytes(chunk));
        }
    }
    some
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Chunk, Dtype, Place, TensorId};
    use crate::layout::{Region, Tile};
    use crate::storage::FileId;

    #[test]
    fn of_very_many_chunks_some_are_planned() {
        let mut entry = TensorEntry::new("t".into(), Dtype::F32, [40].as_slice().into());
        let source = entry.clone();
        for file in 0..10 {
            let place = Place::Bytes { file: FileId(file), offset: 8 };
            entry.chunks.push(Chunk {
                tile: Tile::from_region(&Region::whole(&[40])),
                place,
                strides: None,
                rank: None,
            });
        }
        let tensor = Reserved::new(TensorId(0), entry);
        let files = |most| some_chunks(&tensor, &source, most).files().collect::<Vec<_>>();
        assert_eq!(files(10), (0..10).collect::<Vec<_>>());
        assert_eq!(files(4), [0, 3, 6, 9]);
        let one = some_chunks(&tensor, &source, 1);
        assert_eq!(one.iter().collect::<Vec<_>>(), [(0, 8..168)]);
    }

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
