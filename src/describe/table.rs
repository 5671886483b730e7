//! Tables that `inspect` prints: one line for each tensor, or one line for each chunk. Offsets and sizes are in
//! elements.

use std::iter::{self, zip};

use super::{Inspection, parts};
use crate::catalog::{Fqn, TensorEntry};
use crate::format::TensorStorage;
use crate::layout::{Region, chunk};
use crate::text::escape_invisible;

/// Returns the table of all tensors. The last column has the number of chunks, or the digest if the user asked for
/// digests.
pub fn tensors(view: &Inspection<'_>) -> String {
    let ranks = has_boxes_alone(view).then(|| most_chunks(view));
    let row = |(name, id): &(Fqn, _)| {
        let entry = view.checkpoint.catalog.tensor(*id);
        if let Some(why) = entry.unreadable.as_ref().filter(|why| !why.has_parts()) {
            let none = || String::from("-");
            return [escape_invisible(name.as_str()), none(), none(), none(), format!("unreadable: {}", why.kind)];
        }
        let placements = match &entry.sharding {
            _ if entry.unreadable.is_some() => String::from("unknown"),
            Some(sharding) => sharding.display_placements(),
            None => ranks.and_then(|ranks| shard_of_boxes(entry, ranks)).unwrap_or_else(|| String::from("-")),
        };
        let last = match view.digests.get(id) {
            Some(digest) => digest.clone(),
            None if view.digests.is_empty() => entry.chunks.len().to_string(),
            None => String::from("-"),
        };
        [escape_invisible(name.as_str()), entry.dtype.to_string(), dims(&entry.shape), placements, last]
    };
    let last = if view.digests.is_empty() { "chunks" } else { "digest" };
    align(["tensor", "dtype", "shape", "placements", last], view.names.iter().map(row).collect())
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
    use crate::catalog::{Chunk, Dtype, FileLocation, Fqn};
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
