//! Tables for people: a line a tensor, a line a chunk.

use std::iter;

use super::{View, harmless, parts};
use crate::catalog::Sharding;

/// Every tensor. The last column is its digest where there are any.
pub fn tensors(view: &View<'_>) -> String {
    let row = |(name, id): &(String, _)| {
        let entry = view.checkpoint.catalog.tensor(*id);
        let placements = entry.sharding.as_deref().map_or_else(|| String::from("-"), Sharding::display_placements);
        let last = match view.digests.get(id) {
            Some(digest) => digest.clone(),
            None if view.digests.is_empty() => entry.chunks.len().to_string(),
            None => String::from("-"),
        };
        [harmless(name), entry.dtype.to_string(), dims(&entry.shape), placements, last]
    };
    let last = if view.digests.is_empty() { "chunks" } else { "digest" };
    align(["tensor", "dtype", "shape", "placements", last], view.names.iter().map(row).collect())
}

/// Every chunk of every tensor, below its name.
pub fn chunks(view: &View<'_>) -> String {
    let mut text = String::new();
    for (name, id) in &view.names {
        let rows = parts(view, view.checkpoint.catalog.tensor(*id)).map(|part| {
            let rank = part.rank.map_or_else(|| String::from("-"), |rank| rank.to_string());
            let file = part.file.map_or_else(|| String::from("-"), |file| harmless(&file));
            [format!("  {}", dims(&part.offsets)), dims(&part.sizes), rank, file]
        });
        let rows = align(["  offsets", "sizes", "rank", "file"], rows.collect());
        text.push_str(&format!("\n{}\n{rows}", harmless(name)));
    }
    text
}

/// A longer name sticks out alone. Formatting panics from 2^16 on.
const MAX_WIDTH: usize = 4096;

fn dims(dims: &[u64]) -> String {
    format!("{dims:?}")
}

/// Columns as wide as their widest cell, up to what is a line at all: names come from files.
fn align<const N: usize>(header: [&str; N], rows: Vec<[String; N]>) -> String {
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
