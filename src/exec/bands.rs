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

use std::hash::Hash;

use indexmap::IndexMap;

use super::strips::{Payload, Strip};
use crate::storage::direct::ALIGNMENT;

/// Source bytes of one band: what strips and block hold together stays in a core's cache.
const BAND_BYTES: u64 = 1 << 20;

/// What may lie between two payloads of one band.
const GAP_BYTES: u64 = 64 << 10;

/// Tiles of one band: beyond, their strips would be shorter than two blocks of a disk.
const BAND_TILES: usize = 128;

/// A tile's part in bands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The same for all tiles of the group.
    pub number: usize,
    /// What all of them take from the source.
    pub source_bytes: u64,
}

/// Which band a strip is of: group and number.
pub type Band = (usize, u64);

/// What of a tensor's tiles makes groups.
#[derive(Debug)]
pub struct Member<'a, K> {
    /// Tiles with equal keys hold the same rows.
    pub key: K,
    /// Source bytes that the tile takes.
    pub source_bytes: u64,
    pub group: &'a mut Option<Group>,
}

/// Put tiles of one tensor into groups, where at least two want the same rows.
pub fn group<'a, K: Hash + Eq>(members: impl IntoIterator<Item = Member<'a, K>>) {
    let mut by_key: IndexMap<K, Vec<(u64, &mut Option<Group>)>> = IndexMap::new();
    for Member { key, source_bytes, group } in members {
        by_key.entry(key).or_default().push((source_bytes, group));
    }
    let mut number = 0;
    for mut tiles in by_key.into_values().filter(|tiles| tiles.len() > 1) {
        for tiles in tiles.chunks_mut(BAND_TILES) {
            let source_bytes = tiles.iter().map(|(bytes, _)| bytes).sum();
            tiles.iter_mut().for_each(|(_, group)| **group = Some(Group { number, source_bytes }));
            number += 1;
        }
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

/// The cuts that bands ask for, at boundaries of blocks, of payloads in file order.
///
/// A band begins with the block that its payload begins in, and ends with the block that it ends in. Payloads that are
/// short share one, as long as its source fits a band.
pub fn cuts(payloads: &[Payload]) -> Vec<Cut> {
    let mut cuts: Vec<Cut> = Vec::new();
    // Source bytes of the band that is begun, in each group all of its tiles.
    let mut begun = 0;
    for Payload { file, offset, len, group, .. } in payloads {
        let Some(Group { number, source_bytes }) = *group else { continue };
        let bb: u64 = std::env::var("DTS_BAND").map_or(BAND_BYTES, |v| v.parse::<u64>().unwrap() << 10);
        let bands = source_bytes.div_ceil(bb).max(1);
        let at = |band: u64| {
            let within = u128::from(*len) * u128::from(band) / u128::from(bands);
            offset + u64::try_from(within).expect("no more than the length")
        };
        let start = offset / ALIGNMENT * ALIGNMENT;
        // The end of the band before, where this one is close behind it.
        let follows = cuts.last().is_some_and(|last| last.file == *file && start <= last.offset + GAP_BYTES);
        if follows {
            cuts.pop();
        }
        begun += source_bytes;
        if !follows || begun > BAND_BYTES {
            begun = source_bytes.min(BAND_BYTES);
            for band in 0..bands {
                let offset = at(band) / ALIGNMENT * ALIGNMENT;
                if cuts.last().is_none_or(|last| (last.file, last.offset) < (*file, offset)) {
                    cuts.push(Cut { file: *file, offset, band: Some((number, band)) });
                }
            }
        }
        cuts.push(Cut { file: *file, offset: (offset + len).next_multiple_of(ALIGNMENT), band: None });
    }
    cuts
}

/// Put strips into the order of work, and give what is done in one go.
pub fn order(strips: &mut [Strip]) -> Vec<&[Strip]> {
    strips.sort_by_key(|strip| strip.band);
    strips.chunk_by(|one, other| one.band.is_some() && one.band == other.band).collect()
}
