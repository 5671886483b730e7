//! The order of work: strips that want the same source rows follow each other.
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
//! is read once ([`super::block`]). What is in no group is in file order.
//!
//! All units are bytes of output, except where a name says otherwise.

use indexmap::IndexMap;

use super::strips::{Payload, Strip};
use crate::layout::partial::Share;
use crate::layout::{Intervals, Tile};
use crate::storage::direct::ALIGNMENT;

/// Source bytes of one band: what strips and block hold together stays in a core's cache.
const BAND_BYTES: u64 = 1 << 20;

/// What may lie between two payloads of one band.
const GAP_BYTES: u64 = 64 << 10;

/// Tiles of one band: beyond, their strips would be too short to be worth a system call.
const BAND_TILES: usize = 128;

/// A tile's part in bands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The same for all tiles of the group.
    pub number: usize,
    /// What all of them take from the source.
    pub source_bytes: u64,
    /// Rows: what lies at one place of the dims that the tiles have in common.
    pub rows: u64,
}

/// Which band a strip is of: group and number.
pub type Band = (usize, u64);

/// A tile that takes short runs of source rows.
#[derive(Debug)]
pub struct Member<'a> {
    pub tile: Tile,
    /// What of the source's summands it takes.
    pub share: Option<&'a Share>,
    /// Source bytes that it takes.
    pub source_bytes: u64,
    pub group: &'a mut Option<Group>,
}

/// Put tiles of one tensor into groups, where at least two want the same rows.
pub fn group<'a>(members: impl IntoIterator<Item = Member<'a>>) {
    let mut by_rows: IndexMap<(Option<Intervals>, Option<&Share>), Vec<Member<'_>>> = IndexMap::new();
    for member in members {
        by_rows.entry((member.tile.dims().first().cloned(), member.share)).or_default().push(member);
    }
    let mut groups: Vec<_> = by_rows.into_values().collect();
    let groups = groups.iter_mut().flat_map(|members| members.chunks_mut(BAND_TILES));
    for (number, members) in groups.filter(|members| members.len() > 1).enumerate() {
        let source_bytes = members.iter().map(|member| member.source_bytes).sum();
        let (first, others) = members.split_first().expect("more than one");
        let (sizes, dims) = (first.tile.sizes(), first.tile.dims());
        let is_common = |dim: &usize| others.iter().all(|other| other.tile.dims()[*dim] == dims[*dim]);
        let rows = (0..dims.len()).take_while(is_common).map(|dim| sizes[dim]).product();
        members.iter_mut().for_each(|member| *member.group = Some(Group { number, source_bytes, rows }));
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
///
/// Bands are of whole rows, to the next boundary of blocks where that is no more than a small part of them: it lies
/// elsewhere in each file, so a few rows are read for two bands. Payloads that are short share a band.
pub fn cuts(payloads: &[Payload]) -> Vec<Cut> {
    let mut cuts: Vec<Cut> = Vec::new();
    // Source bytes of the band that is begun, in each group all of its tiles.
    let mut begun = 0;
    for Payload { file, offset, len, group, .. } in payloads {
        let Some(Group { number, source_bytes, rows }) = *group else { continue };
        let bands = source_bytes.div_ceil(BAND_BYTES).clamp(1, rows);
        let is_long = len / bands >= 16 * ALIGNMENT && rows / bands >= 16;
        let grid = if is_long { ALIGNMENT } else { 1 };
        let at = |band: u64| {
            let row = u128::from(rows) * u128::from(band) / u128::from(bands);
            let within = u128::from(*len) * row / u128::from(rows);
            offset + u64::try_from(within).expect("no more than the length")
        };
        // The end of the band before, where this one is close behind it.
        let follows = cuts.last().is_some_and(|last| last.file == *file && *offset <= last.offset + GAP_BYTES);
        if follows {
            cuts.pop();
        }
        begun += source_bytes;
        if !follows || begun > BAND_BYTES {
            begun = source_bytes.min(BAND_BYTES);
            for band in 0..bands {
                let offset = at(band) / grid * grid;
                if cuts.last().is_none_or(|last| (last.file, last.offset) < (*file, offset)) {
                    cuts.push(Cut { file: *file, offset, band: Some((number, band)) });
                }
            }
        }
        cuts.push(Cut { file: *file, offset: (offset + len).next_multiple_of(grid), band: None });
    }
    cuts
}

/// Put strips into the order of work, and give what is done in one go.
pub fn order(strips: &mut [Strip]) -> Vec<&[Strip]> {
    strips.sort_by_key(|strip| strip.band);
    strips.chunk_by(|one, other| one.band.is_some() && one.band == other.band).collect()
}
