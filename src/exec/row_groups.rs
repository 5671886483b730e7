//! Bands: strips that want the same source rows, and follow each other for that.
//!
//! Where a tensor is cut into columns, each row of the source goes to many files in short runs:
//!
//! ```text
//!   source rows          file 0    file 1    file 2
//!   +---+---+---+        +---+     +---+     +---+
//!   | a | b | c |        | a |     | b |     | c |   band 0: three strips, one read
//!   | a | b | c |        | a |     | b |     | c |
//!   +---+---+---+        +---+     +---+     +---+
//!   | d | e | f |        | d |     | e |     | f |   band 1
//!   +---+---+---+        +---+     +---+     +---+
//! ```
//!
//! Tiles of one tensor that hold the same rows are a **group**; a group is cut into **bands**, each the same fraction of
//! all of its tiles. The strips of a band are filled by one worker, one after the other, from a block of the source that
//! is read once ([`super::block`]).
//!
//! Tiles that are equal and are not of such rows are a group as well: **copies**, as each rank of a replica has them. Their
//! strips are cut at the same places, gathered once and written to each file. What is in no group is in file order.
//!
//! All units are bytes of output, except where a name says otherwise.

use indexmap::IndexMap;

use crate::layout::partial::Share;
use crate::layout::{Intervals, Tile};
use crate::storage::direct::ALIGNMENT;

/// Source bytes of one band: what strips and block hold together stays in a core's cache.
const BAND_BYTES: u64 = 1 << 20;

/// What may lie between two payloads of one band.
const GAP_BYTES: u64 = 64 << 10;

/// Tiles of one band: beyond, their strips would be too short to be worth a system call.
const BAND_TILES: usize = 128;

/// Copies that are worth strips of their own, with the copies that follow them.
const COPIES_BYTES: u64 = 256 << 10;

/// A tile that has its place in an output file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputRange {
    pub file: u32,
    pub offset: u64,
    pub len: u64,
    pub slot: usize,
    /// Cuts inside this tile fall on multiples of its item size.
    pub itemsize: u64,
    /// The tiles that want the same source bytes.
    pub group: Option<RowGroupMember>,
}

/// A tile's part in bands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowGroupMember {
    /// The same for all tiles of the group.
    pub number: usize,
    pub of: RowGroupKind,
}

/// What a group is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowGroupKind {
    /// Tiles that take short runs of the same source rows.
    Rows {
        /// What all of them take from the source.
        source_bytes: u64,
        /// What lies at one place of the dims that the tiles have in common is a row.
        rows: u64,
    },
    /// Equal tiles.
    Copies {
        /// Where the first of them is in its file. Blocks of this one are whole where strips are cut.
        first: u64,
    },
}

/// Which band a strip is of: group and number.
pub type Band = (usize, u64);

/// A tile on its way into a group.
#[derive(Debug)]
pub struct Member<'a> {
    pub tile: Tile,
    /// What of the source's summands it takes.
    pub share: Option<&'a Share>,
    /// Source bytes that it takes.
    pub source_bytes: u64,
    /// Whether it takes short runs of source rows. The rows of a transposed view are columns of its source: a band of them
    /// would go through all of it, so none is made.
    pub is_of_short_rows: bool,
    pub payload: &'a mut OutputRange,
}

/// Put tiles of one tensor into groups, where at least two want the same rows, or are equal. Groups have the numbers from
/// `number` on, no more than there are tiles.
pub fn group<'a>(members: impl IntoIterator<Item = Member<'a>>, mut number: usize) {
    let mut by_rows: IndexMap<(Option<Intervals>, Option<&Share>), Vec<Member<'_>>> = IndexMap::new();
    let mut by_tile: IndexMap<(Tile, Option<&Share>), Vec<Member<'_>>> = IndexMap::new();
    for member in members {
        if member.is_of_short_rows {
            by_rows.entry((member.tile.dims().first().cloned(), member.share)).or_default().push(member);
        } else {
            by_tile.entry((member.tile.clone(), member.share)).or_default().push(member);
        }
    }
    let mut groups: Vec<_> = by_rows.into_values().collect();
    let groups = groups.iter_mut().flat_map(|members| members.chunks_mut(BAND_TILES));
    for members in groups.filter(|members| members.len() > 1) {
        let source_bytes = members.iter().map(|member| member.source_bytes).sum();
        let (first, others) = members.split_first().expect("more than one");
        let (sizes, dims) = (first.tile.sizes(), first.tile.dims());
        let is_common = |dim: &usize| others.iter().all(|other| other.tile.dims()[*dim] == dims[*dim]);
        let rows = (0..dims.len()).take_while(is_common).map(|dim| sizes[dim]).product();
        let group = RowGroupMember { number, of: RowGroupKind::Rows { source_bytes, rows } };
        members.iter_mut().for_each(|member| member.payload.group = Some(group));
        number += 1;
    }
    for members in by_tile.values_mut().filter(|members| members.len() > 1) {
        let group = RowGroupMember { number, of: RowGroupKind::Copies { first: members[0].payload.offset } };
        members.iter_mut().for_each(|member| member.payload.group = Some(group));
        number += 1;
    }
}

/// Where strips have to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    pub file: u32,
    pub offset: u64,
    /// Of the strips from here to the next cut.
    pub band: Option<Band>,
}

/// The cuts that bands ask for, of payloads in file order.
pub fn cuts(payloads: &[OutputRange], strip_bytes: u64) -> Vec<Cut> {
    let mut cuts: Vec<Cut> = Vec::new();
    // Source bytes of the band of rows that is begun, in each group all of its tiles.
    let mut begun = None;
    let is_copy =
        |payload: &OutputRange| matches!(payload.group, Some(RowGroupMember { of: RowGroupKind::Copies { .. }, .. }));
    let follows = |one: &OutputRange, next: &OutputRange| {
        one.file == next.file && next.offset <= one.offset + one.len + GAP_BYTES && is_copy(one) == is_copy(next)
    };
    for payloads in payloads.chunk_by(follows) {
        if !is_copy(&payloads[0]) {
            payloads.iter().for_each(|payload| cut_rows(payload, &mut begun, &mut cuts));
        } else if payloads.iter().map(|payload| payload.len).sum::<u64>() >= COPIES_BYTES {
            cut_copies(payloads, strip_bytes, &mut cuts);
            begun = None;
        }
    }
    cuts
}

/// Bands are of whole rows, to the next boundary of blocks where that is no more than a small part of them: it lies
/// elsewhere in each file, so a few rows are read for two bands. Payloads that are short share a band.
fn cut_rows(payload: &OutputRange, begun: &mut Option<u64>, cuts: &mut Vec<Cut>) {
    let OutputRange { file, offset, len, group, .. } = *payload;
    let Some(RowGroupMember { number, of: RowGroupKind::Rows { source_bytes, rows } }) = group else { return };
    let bands = source_bytes.div_ceil(BAND_BYTES).clamp(1, rows);
    let is_long = len / bands >= 16 * ALIGNMENT && rows / bands >= 16;
    let grid = if is_long { ALIGNMENT } else { 1 };
    let at = |band: u64| {
        let row = u128::from(rows) * u128::from(band) / u128::from(bands);
        let within = u128::from(len) * row / u128::from(rows);
        offset + u64::try_from(within).expect("no more than the length")
    };
    // The end of the band before, where this one is close behind it.
    let last = cuts.pop_if(|last| last.file == file && offset <= last.offset + GAP_BYTES);
    let before = begun.filter(|_| last.is_some());
    let together = before.unwrap_or(0) + source_bytes;
    if before.is_some() && together <= BAND_BYTES {
        *begun = Some(together);
    } else {
        *begun = Some(source_bytes.min(BAND_BYTES));
        // Copies end where they end.
        let earliest = last.filter(|_| before.is_none()).map_or(0, |last| last.offset);
        for band in 0..bands {
            let offset = (at(band) / grid * grid).max(earliest);
            if cuts.last().is_none_or(|last| (last.file, last.offset) < (file, offset)) {
                cuts.push(Cut { file, offset, band: Some((number, band)) });
            }
        }
    }
    cuts.push(Cut { file, offset: (offset + len).next_multiple_of(grid), band: None });
}

/// Copies that follow each other are cut at the same places of their tensors in every file: at boundaries of blocks of the
/// first file, and so of most others. Only those that are short share a strip: what is between tensors may differ in
/// length from file to file.
fn cut_copies(payloads: &[OutputRange], strip_bytes: u64, cuts: &mut Vec<Cut>) {
    // Where the strip began that the next short payload may be in.
    let mut begun = None;
    let mut end = 0;
    for &OutputRange { file, offset, len, group, .. } in payloads {
        let Some(RowGroupMember { number, of: RowGroupKind::Copies { first } }) = group else { continue };
        end = offset + len;
        let is_short = len < COPIES_BYTES;
        if begun.is_some_and(|begun| is_short && end - begun + GAP_BYTES <= strip_bytes) {
            continue;
        }
        begun = is_short.then_some(offset);
        // The end of a band before may have been moved to a boundary, into this one.
        let _ = cuts.pop_if(|last| last.file == file && last.offset >= offset);
        let ragged = first % ALIGNMENT;
        // What follows a tensor up to the next one is in its last strip.
        let count = (ragged + len + GAP_BYTES).div_ceil(strip_bytes.max(ALIGNMENT));
        let step = (ragged + len).div_ceil(count).next_multiple_of(ALIGNMENT);
        let starts = (0..count).map(|index| (index, (index * step).saturating_sub(ragged)));
        for (index, within) in starts.take_while(|(index, within)| *index == 0 || *within < len) {
            cuts.push(Cut { file, offset: offset + within, band: Some((number, index)) });
        }
    }
    cuts.push(Cut { file: payloads[0].file, offset: end, band: None });
}
