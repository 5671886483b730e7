//! Tables that `inspect` prints: one line for each tensor or group of equal tensors, or one line for each chunk. Offsets
//! and sizes are in elements.

use std::cmp::Reverse;
use std::iter::{self, zip};

use super::groups::groups;
use super::{Inspection, parts};
use crate::catalog::{Fqn, TensorEntry, TensorId};
use crate::convert::options::TensorOrder;
use crate::format::TensorStorage;
use crate::layout::{Region, chunk};
use crate::name_list::{NameGroup, natural_order};
use crate::quantity::human_bytes;
use crate::text::escape_invisible;

/// Returns the table of tensors. A row describes one tensor, or a group of equal tensors whose names differ only in numbers.
/// Without groups, the last column has the number of chunks, or the digest if the user asked for digests.
pub fn tensors(view: &Inspection<'_>) -> String {
    let args = view.args;
    if !args.all && args.tensor.is_empty() && view.digests.is_empty() {
        let groups = groups(view, |_| 0);
        if groups.len() < view.names.len() {
            return grouped(view, groups);
        }
    }
    let last = if view.digests.is_empty() { "chunks" } else { "digest" };
    let mut order: Vec<&(Fqn, TensorId)> = view.names.iter().collect();
    let bytes = |(_, id): &(Fqn, TensorId)| view.checkpoint.catalog.tensor(*id).len_bytes();
    match args.sort {
        TensorOrder::StateDict => {}
        TensorOrder::Size => order.sort_by_key(|tensor| Reverse(bytes(tensor))),
        TensorOrder::Name => order.sort_by(|left, right| natural_order(left.0.as_str(), right.0.as_str())),
    }
    let ranks = likely_ranks(view);
    let row = |(name, id): &(Fqn, TensorId)| {
        let entry = view.checkpoint.catalog.tensor(*id);
        let TensorFacts { dtype, shape, placements, chunks } = TensorFacts::of(entry, ranks);
        let last = match view.digests.get(id) {
            Some(digest) => digest.clone(),
            None if view.digests.is_empty() || is_absent(entry) => chunks,
            None => String::from("-"),
        };
        [escape_invisible(name.as_str()), dtype, shape, placements, last]
    };
    align(["tensor", "dtype", "shape", "placements", last], order.into_iter().map(row).collect())
}

/// Returns the table with one row for each group, and a row with the totals.
fn grouped(view: &Inspection<'_>, mut groups: Vec<NameGroup>) -> String {
    let entry = |group: &NameGroup| view.checkpoint.catalog.tensor(view.names[group.members[0]].1);
    let total = |group: &NameGroup| entry(group).len_bytes().saturating_mul(group.members.len() as u64);
    match view.args.sort {
        TensorOrder::StateDict => {}
        TensorOrder::Size => groups.sort_by_key(|group| Reverse(total(group))),
        TensorOrder::Name => groups.sort_by(|left, right| natural_order(&left.name(), &right.name())),
    }
    let ranks = likely_ranks(view);
    let mut rows: Vec<[String; 8]> = Vec::with_capacity(groups.len() + 1);
    for group in &groups {
        let entry = entry(group);
        let TensorFacts { dtype, shape, placements, chunks } = TensorFacts::of(entry, ranks);
        let [each, all] = if is_absent(entry) {
            ["-", "-"].map(String::from)
        } else {
            [entry.len_bytes(), total(group)].map(human_bytes)
        };
        let name = escape_invisible(&group.name());
        rows.push([name, group.members.len().to_string(), dtype, shape, placements, chunks, each, all]);
    }
    let none = String::new;
    let sum = groups.iter().map(total).fold(0, u64::saturating_add);
    let number = view.names.len().to_string();
    rows.push([String::from("total"), number, none(), none(), none(), none(), none(), human_bytes(sum)]);
    align(["tensor", "count", "dtype", "shape", "placements", "chunks", "each", "total"], rows)
}

/// The texts for a tensor in the columns of a table.
pub struct TensorFacts {
    pub dtype: String,
    pub shape: String,
    pub placements: String,
    /// The number of chunks; for a tensor without a known dtype and shape, the reason why it cannot be read.
    pub chunks: String,
}

impl TensorFacts {
    /// Returns the texts for a tensor. `ranks` is the result of [`likely_ranks`].
    pub fn of(entry: &TensorEntry, ranks: Option<u64>) -> Self {
        let none = || String::from("-");
        if let Some(why) = entry.unreadable.as_ref().filter(|why| !why.has_parts()) {
            let chunks = format!("unreadable: {}", why.kind);
            return Self { dtype: none(), shape: none(), placements: none(), chunks };
        }
        let placements = match &entry.sharding {
            _ if entry.unreadable.is_some() => String::from("unknown"),
            Some(sharding) => sharding.display_placements(),
            None => ranks.and_then(|ranks| shard_of_boxes(entry, ranks)).unwrap_or_else(none),
        };
        let chunks = entry.chunks.len().to_string();
        Self { dtype: entry.dtype.to_string(), shape: dims(&entry.shape), placements, chunks }
    }
}

/// Returns true if the dtype and the shape of a tensor are unknown.
fn is_absent(entry: &TensorEntry) -> bool {
    entry.unreadable.as_ref().is_some_and(|why| !why.has_parts())
}

/// Returns the likely number of ranks if the format, such as DCP, records boxes of tensors, but neither ranks nor
/// placements; otherwise returns `None`.
pub fn likely_ranks(view: &Inspection<'_>) -> Option<u64> {
    has_boxes_alone(view).then(|| most_chunks(view))
}

/// Returns true if the format, such as DCP, records boxes of tensors, but neither ranks nor placements.
fn has_boxes_alone(view: &Inspection<'_>) -> bool {
    view.checkpoint.format.tensors() == TensorStorage::Boxes
}

/// Returns the largest number of boxes of any tensor. It is the likely number of ranks, because a rank stores at most
/// one box of a tensor.
fn most_chunks(view: &Inspection<'_>) -> u64 {
    view.checkpoint.catalog.tensors.iter().map(|entry| entry.chunks.len() as u64).max().unwrap_or(0)
}

/// Returns a text such as `S(0) x 8` if the boxes of a tensor are the shards that `torch.chunk` makes along one dim for
/// some number of ranks (here 8); otherwise returns `None`. This number may be below `ranks`, because other mesh
/// dimensions may replicate the tensor.
fn shard_of_boxes(entry: &TensorEntry, ranks: u64) -> Option<String> {
    let mut boxes: Vec<Region> = entry
        .chunks
        .iter()
        .filter(|chunk| !chunk.tile.is_empty())
        .map(|chunk| chunk.tile.as_region())
        .collect::<Option<_>>()?;
    boxes.sort_by(|left, right| left.offsets.cmp(&right.offsets));
    let [first, _, ..] = boxes.as_slice() else { return None };
    let dim = zip(&first.sizes, &entry.shape).position(|(size, whole)| size != whole)?;
    let is_shard = |parts: &u64| {
        let cut = (0..*parts).map(|part| chunk(entry.shape[dim], *parts, part)).filter(|range| !range.is_empty());
        cut.eq(boxes.iter().map(|region| region.offsets[dim]..region.offsets[dim] + region.sizes[dim]))
    };
    let is_whole_elsewhere = |region: &Region| {
        let mut others = (0..entry.shape.len()).filter(|other| *other != dim);
        others.all(|other| region.offsets[other] == 0 && region.sizes[other] == entry.shape[other])
    };
    let parts =
        [ranks, boxes.len() as u64].into_iter().find(is_shard).filter(|_| boxes.iter().all(is_whole_elsewhere))?;
    Some(format!("S({dim}) x {parts}"))
}

/// Returns, for every tensor, the name of the tensor followed by a table of its chunks.
pub fn chunks(view: &Inspection<'_>) -> String {
    let mut text = String::new();
    for (name, id) in &view.names {
        let rows = parts(view, view.checkpoint.catalog.tensor(*id)).map(|part| {
            let rank = part.rank.map_or_else(|| String::from("-"), |rank| rank.to_string());
            let file = part.file.map_or_else(|| String::from("-"), |file| escape_invisible(&file));
            [format!("  {}", dims(&part.offsets)), dims(&part.sizes), rank, file]
        });
        let rows = align(["  offsets", "sizes", "rank", "file"], rows.collect());
        text.push_str(&format!("\n{}\n{rows}", escape_invisible(name.as_str())));
    }
    text
}

/// The maximum width of a column, in characters. Longer cells are printed whole, but do not widen the column. The limit
/// exists because `format!` panics for widths of 2^16 or more.
const MAX_WIDTH: usize = 4096;

fn dims(dims: &[u64]) -> String {
    format!("{dims:?}")
}

/// Pads each column to the width of its widest cell, or to [`MAX_WIDTH`] if that is less. The limit is needed because
/// names from files may have any length.
pub fn align<const N: usize>(header: [&str; N], rows: Vec<[String; N]>) -> String {
    let header = header.map(String::from);
    let mut widths = [0; N];
    for row in iter::once(&header).chain(&rows) {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width).min(MAX_WIDTH);
        }
    }
    let mut text = String::new();
    for row in iter::once(&header).chain(&rows) {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Chunk, Dtype, FileLocation};
    use crate::layout::Tile;

    fn boxes(shape: &[u64], boxes: &[(&[u64], &[u64])]) -> TensorEntry {
        let mut entry = TensorEntry::new(Fqn::from("w"), Dtype::F32, shape.into());
        for (offsets, sizes) in boxes {
            let tile = Tile::from_region(&Region::new(*offsets, *sizes));
            entry.chunks.push(Chunk { tile, rank: None, location: FileLocation::Empty, strides: None, view: None });
        }
        entry
    }

    #[test]
    fn placement_is_inferred_only_from_boxes_that_torch_chunk_makes() {
        let rows = |cut: &[u64]| {
            let starts = cut.iter().scan(0, |at, len| Some(std::mem::replace(at, *at + len)));
            let all: Vec<([u64; 2], [u64; 2])> = zip(starts, cut).map(|(at, len)| ([at, 0], [*len, 3])).collect();
            let all: Vec<(&[u64], &[u64])> = all.iter().map(|(at, len)| (&at[..], &len[..])).collect();
            shard_of_boxes(&boxes(&[cut.iter().sum(), 3], &all), 4)
        };
        assert_eq!(rows(&[2, 2, 2, 2]).unwrap(), "S(0) x 4");
        assert_eq!(rows(&[2, 2, 1]).unwrap(), "S(0) x 4", "the last rank has nothing");
        assert_eq!(rows(&[4, 4]).unwrap(), "S(0) x 2");
        assert_eq!(rows(&[1, 1]).unwrap(), "S(0) x 4");
        assert_eq!(rows(&[3, 1, 2]), None);
        assert_eq!(rows(&[4]), None);
        let columns = boxes(&[3, 4], &[(&[0, 2], &[3, 2]), (&[0, 0], &[3, 2])]);
        assert_eq!(shard_of_boxes(&columns, 2).unwrap(), "S(1) x 2");
        let grid = [(&[0, 0][..], &[2, 2][..]), (&[0, 2], &[2, 2]), (&[2, 0], &[2, 2]), (&[2, 2], &[2, 2])];
        assert_eq!(shard_of_boxes(&boxes(&[4, 4], &grid), 4), None);
        assert_eq!(shard_of_boxes(&boxes(&[], &[(&[], &[])]), 4), None);
    }
}
