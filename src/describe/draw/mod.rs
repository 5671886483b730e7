//! Draws the boxes of a tensor, each with the ranks or files that store the box.
//!
//! The tensor is cut at every index at which a chunk begins or ends, so the grid has few cells even if the tensor is
//! large. Each cell of the grid has a set of holders (ranks or files), and adjacent cells of the same set form one box.
//! Two dims are drawn: the first two dims that are cut, or uncut dims if fewer than two are cut. The remaining dims are
//! collapsed, so a box names every holder of at least one element in the box. If boxes would be smaller than a
//! character, a list of intervals replaces the picture.
//!
//! ```text
//!         0        4        8
//!       0 ┌────────┬────────┐
//!         │   0    │   1    │     (4, 8) as (S(0), S(1)) on (2, 2)
//!       2 ├────────┼────────┤
//!         │   2    │   3    │
//!       4 └────────┴────────┘
//! ```

mod canvas;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use indexmap::{IndexMap, IndexSet};

use super::Span;
use crate::layout::{Intervals, Rank, Tile};
use canvas::Canvas;

/// The maximum size of a picture, without its legend.
#[derive(Clone, Copy, Debug)]
pub struct PictureSize {
    /// The maximum width, in characters.
    pub columns: usize,
    /// The maximum height, in lines of text.
    pub lines: usize,
}

/// The holder of a chunk: its rank, or its file if the format does not record ranks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChunkHolder {
    /// The rank that saved the chunk.
    Rank(Rank),
    /// The file that stores the chunk.
    File(String),
}

/// The maximum number of cuts (offsets at which a chunk begins or ends) along one dim, including both ends of the dim.
/// A picture with more cuts would not fit.
const MOST_CUTS: usize = 256;

/// The maximum number of intervals of one dim that are listed, if a list replaces the picture.
const MOST_INTERVALS: u64 = 8;

/// Draws a tensor of this shape as a picture, or as a list of intervals if the picture does not fit into `room`. Also
/// names the holders whose chunks are empty.
pub fn draw(shape: &[u64], chunks: &[(ChunkHolder, Tile)], room: PictureSize) -> Vec<Vec<Span>> {
    let mut groups: IndexMap<&Tile, BTreeSet<&ChunkHolder>> = IndexMap::new();
    let mut holds_nothing = BTreeSet::new();
    for (holder, tile) in chunks {
        if tile.is_empty() {
            holds_nothing.insert(holder);
        } else {
            groups.entry(tile).or_default().insert(holder);
        }
    }
    for holders in groups.values() {
        holds_nothing.retain(|holder| !holders.contains(holder));
    }
    let groups: Vec<(&Tile, BTreeSet<&ChunkHolder>)> = groups.into_iter().collect();
    let mut lines = if shape.contains(&0) {
        vec![plain("no elements")]
    } else {
        DrawnGrid::new(shape, &groups).and_then(|grid| grid.draw(room)).unwrap_or_else(|| list(&groups))
    };
    if !holds_nothing.is_empty() {
        let verb = if holds_nothing.len() == 1 { "holds" } else { "hold" };
        lines.push(plain(&format!("{} {verb} nothing", in_words(&holds_nothing))));
    }
    lines
}

fn plain(text: &str) -> Vec<Span> {
    vec![Span { text: text.to_owned(), ground: None }]
}

/// A tensor that is cut into cells along the drawn dims, with the holders of each cell.
struct DrawnGrid {
    /// Lines of text that explain which dims are drawn as rows and columns, and which dims are not drawn.
    legend: Vec<String>,
    /// The offsets of the cuts between rows, from 0 to the size of the dim. The list is empty if no dim is drawn as
    /// rows.
    rows: Vec<u64>,
    /// The offsets of the cuts between columns. The list is empty if no dim is drawn as columns.
    columns: Vec<u64>,
    /// The distinct sets of holders. The first set is empty: its cells are in no chunk.
    sets: Vec<Vec<ChunkHolder>>,
    /// For each row of cells, the index in `sets` of the holders of each cell.
    cells: Vec<Vec<usize>>,
}

impl DrawnGrid {
    /// Cuts a tensor along its drawn dims. Returns `None` if there are too many cuts to draw.
    fn new(shape: &[u64], groups: &[(&Tile, BTreeSet<&ChunkHolder>)]) -> Option<Self> {
        let cuts: Vec<BTreeSet<u64>> =
            (0..shape.len()).map(|dim| cuts(shape[dim], groups.iter().map(|(tile, _)| &tile.dims()[dim]))).collect();
        let drawn = drawn_dims(&cuts);
        if drawn.iter().any(|dim| cuts[*dim].len() > MOST_CUTS) {
            return None;
        }
        let of = |dim: Option<usize>| dim.map_or_else(Vec::new, |dim| cuts[dim].iter().copied().collect::<Vec<_>>());
        let (row_dim, column_dim) = match drawn.as_slice() {
            [] => (None, None),
            [dim] => (None, Some(*dim)),
            [first, second, ..] => (Some(*first), Some(*second)),
        };
        let (rows, columns) = (of(row_dim), of(column_dim));
        let number = |cuts: &[u64]| cuts.len().saturating_sub(1).max(1);
        let mut holders: Vec<Vec<BTreeSet<&ChunkHolder>>> =
            vec![vec![BTreeSet::new(); number(&columns)]; number(&rows)];
        for (tile, who) in groups {
            let spans = |dim: Option<usize>, cuts: &[u64]| dim.map_or(vec![0], |dim| covered(&tile.dims()[dim], cuts));
            let across = spans(column_dim, &columns);
            for row in spans(row_dim, &rows) {
                for column in &across {
                    holders[row][*column].extend(who);
                }
            }
        }
        let mut sets = IndexSet::from([Vec::new()]);
        let mut intern = |set: &BTreeSet<&ChunkHolder>| sets.insert_full(set.iter().copied().cloned().collect()).0;
        let cells = holders.iter().map(|row| row.iter().map(&mut intern).collect()).collect();
        let legend = legend(shape, &cuts, row_dim, column_dim);
        let mut grid = Self { legend, rows, columns, sets: sets.into_iter().collect(), cells };
        grid.drop_needless_cuts();
        Some(grid)
    }

    /// Removes cuts between rows or columns of cells with equal holders. Such cuts can occur because a dim is
    /// collapsed.
    fn drop_needless_cuts(&mut self) {
        for row in (1..self.cells.len()).rev() {
            if self.cells[row] == self.cells[row - 1] {
                self.cells.remove(row);
                self.rows.remove(row);
            }
        }
        for column in (1..self.cells[0].len()).rev() {
            if self.cells.iter().all(|row| row[column] == row[column - 1]) {
                for row in &mut self.cells {
                    row.remove(column);
                }
                self.columns.remove(column);
            }
        }
    }

    /// Returns the picture and its legend, or `None` if the picture does not fit. Boxes contain the names of their
    /// holders if these names fit, otherwise letters that the legend explains.
    fn draw(&self, room: PictureSize) -> Option<Vec<Vec<Span>>> {
        let names: Vec<String> = self.sets.iter().map(|set| short(set.iter())).collect();
        let letters: Vec<String> = (0..self.sets.len()).map(letters).collect();
        let are_short = names.iter().all(|name| name.chars().count() <= LONGEST_NAME);
        let with_names = if are_short { Canvas::new(self, &names, room) } else { None };
        let is_lettered = with_names.is_none();
        let canvas = with_names.or_else(|| Canvas::new(self, &letters, room))?;
        let mut lines: Vec<Vec<Span>> = self.legend.iter().map(|line| plain(line)).collect();
        lines.extend(canvas.draw());
        if is_lettered {
            let width = letters.last().map_or(1, String::len);
            for (letter, set) in letters.iter().zip(&self.sets).skip(1) {
                lines.push(plain(&format!("{letter:width$}  {}", in_words(&set.iter().collect()))));
            }
        }
        if self.cells.iter().flatten().any(|set| *set == 0) {
            lines.push(plain("an empty box: in none of the files that were read"));
        }
        Some(lines)
    }

    /// Returns the background colour of a set of holders. For ranks, the colour depends on the lowest rank of the set,
    /// so a rank has one colour in all pictures; for files, it depends on the index of the set.
    fn ground(&self, set: usize) -> Option<u8> {
        // Light colours; neighbours in this list are easy to tell apart.
        const GROUNDS: [u8; 12] = [153, 223, 157, 219, 229, 159, 183, 216, 194, 189, 222, 152];
        let index = match self.sets[set].first()? {
            ChunkHolder::Rank(rank) => rank.0 as usize,
            ChunkHolder::File(_) => set - 1,
        };
        Some(GROUNDS[index % GROUNDS.len()])
    }
}

/// The maximum length of a name in a box, in characters. A longer name would make boxes too wide.
const LONGEST_NAME: usize = 16;

/// Returns the offsets along a dim at which a chunk begins or ends, and both ends of the dim. Stops after more than
/// [`MOST_CUTS`] offsets.
fn cuts<'a>(size: u64, chunks: impl Iterator<Item = &'a Intervals>) -> BTreeSet<u64> {
    let mut cuts = BTreeSet::from([0, size]);
    for interval in chunks.flat_map(Intervals::iter) {
        cuts.extend([interval.start.min(size), interval.end.min(size)]);
        if cuts.len() > MOST_CUTS {
            break;
        }
    }
    cuts
}

/// Returns the dims to draw, at most two: the first two dims that are cut, or, if fewer than two dims are cut, also the
/// first uncut dims.
pub fn drawn_dims(cuts: &[BTreeSet<u64>]) -> Vec<usize> {
    let is_cut = |dim: &usize| cuts[*dim].len() > 2;
    let mut dims: Vec<usize> = (0..cuts.len()).filter(is_cut).take(2).collect();
    let rest: Vec<usize> = (0..cuts.len()).filter(|dim| !dims.contains(dim)).take(2 - dims.len()).collect();
    dims.extend(rest);
    dims.sort_unstable();
    dims
}

/// Returns the indices of the ranges between neighbouring `cuts` that an interval list covers.
fn covered(intervals: &Intervals, cuts: &[u64]) -> Vec<usize> {
    let at = |offset| cuts.partition_point(|cut| *cut < offset);
    intervals.iter().flat_map(|interval| at(interval.start)..at(interval.end).min(cuts.len() - 1)).collect()
}

fn legend(shape: &[u64], cuts: &[BTreeSet<u64>], row_dim: Option<usize>, column_dim: Option<usize>) -> Vec<String> {
    let mut lines = Vec::new();
    if let (Some(row), Some(column), true) = (row_dim, column_dim, shape.len() > 2) {
        lines.push(format!("rows are dim {row}, columns are dim {column}"));
    }
    for dim in (0..shape.len()).filter(|dim| Some(*dim) != row_dim && Some(*dim) != column_dim) {
        lines.push(if cuts[dim].len() > 2 {
            format!(
                "dim {dim} ({}) is cut as well, but not drawn: a box names all holders of any part of it",
                shape[dim]
            )
        } else {
            format!("dim {dim} ({}) is whole everywhere", shape[dim])
        });
    }
    lines
}

/// Returns one line for each distinct tile, with its holders and intervals.
fn list(groups: &[(&Tile, BTreeSet<&ChunkHolder>)]) -> Vec<Vec<Span>> {
    let rows: Vec<(String, String)> =
        groups.iter().map(|(tile, holders)| (in_words(holders), intervals(tile))).collect();
    let width = rows.iter().map(|(holders, _)| holders.chars().count()).max().unwrap_or(0);
    rows.iter().map(|(holders, tile)| plain(&format!("{holders:width$}  {tile}"))).collect()
}

/// Returns the first [`MOST_INTERVALS`] intervals of each dim: `[0:2+4:6, 0:8]`.
fn intervals(tile: &Tile) -> String {
    let dim = |dim: &Intervals| {
        let shown: Vec<String> = (dim.iter().zip(0..MOST_INTERVALS))
            .map(|(interval, _)| format!("{}:{}", interval.start, interval.end))
            .collect();
        let more = if dim.count() > MOST_INTERVALS { format!("+... ({} in all)", dim.count()) } else { String::new() };
        shown.join("+") + &more
    };
    format!("[{}]", tile.dims().iter().map(dim).collect::<Vec<_>>().join(", "))
}

/// Returns the names of holders in the short form for boxes: `0-3,8` or `__0_0`.
pub fn short<'a>(holders: impl Iterator<Item = &'a ChunkHolder>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    let mut texts = Vec::new();
    for holder in holders {
        match (holder, runs.last_mut()) {
            (ChunkHolder::Rank(rank), Some((_, last))) if *last + 1 == rank.0 => *last = rank.0,
            (ChunkHolder::Rank(rank), _) => runs.push((rank.0, rank.0)),
            (ChunkHolder::File(name), _) => {
                let stem = std::path::Path::new(name).file_stem().map_or(name.into(), |stem| stem.to_string_lossy());
                texts.push(stem.into_owned());
            }
        }
    }
    let run = |(first, last): (u32, u32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first},{last}"),
        _ => format!("{first}-{last}"),
    };
    runs.into_iter().map(run).chain(texts).collect::<Vec<_>>().join(",")
}

/// Returns the names of holders in words: `rank 0`, `ranks 0-3, 8` or `__0_0.distcp`.
fn in_words(holders: &BTreeSet<&ChunkHolder>) -> String {
    let ranks: Vec<&ChunkHolder> =
        holders.iter().copied().filter(|holder| matches!(holder, ChunkHolder::Rank(_))).collect();
    let files = holders.iter().filter_map(|holder| match holder {
        ChunkHolder::File(name) => Some(name.clone()),
        ChunkHolder::Rank(_) => None,
    });
    let plural = if ranks.len() == 1 { "rank" } else { "ranks" };
    let words = (!ranks.is_empty()).then(|| format!("{plural} {}", short(ranks.into_iter()).replace(',', ", ")));
    words.into_iter().chain(files).collect::<Vec<_>>().join(", ")
}

/// Returns the letters that stand for the set of holders with this index: none for 0 (the empty set), then `A`, ...,
/// `Z`, `AA`, ...
fn letters(mut index: usize) -> String {
    let mut text = Vec::new();
    while index > 0 {
        index -= 1;
        text.push(b'A' + u8::try_from(index % 26).expect("below 26"));
        index /= 26;
    }
    text.iter().rev().map(|letter| char::from(*letter)).collect()
}

/// The rectangle of cells, inside a box, into which the name of the box is written.
#[derive(Debug)]
struct Area {
    set: usize,
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
}

impl DrawnGrid {
    /// Returns one area for each box: a large rectangle inside the box, into which the name of the box is written.
    fn areas(&self) -> Vec<Area> {
        let mut seen = vec![vec![false; self.cells[0].len()]; self.cells.len()];
        let mut areas = Vec::new();
        for row in 0..self.cells.len() {
            for column in 0..self.cells[0].len() {
                if !seen[row][column] {
                    areas.push(self.area(row, column, &mut seen));
                }
            }
        }
        areas
    }

    /// Returns the area of the box that contains a cell, and marks all cells of this box in `seen`.
    fn area(&self, row: usize, column: usize, seen: &mut [Vec<bool>]) -> Area {
        let set = self.cells[row][column];
        let mut spans: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        let mut next = vec![(row, column)];
        while let Some((row, column)) = next.pop() {
            let inside = self.cells.get(row).and_then(|row| row.get(column)) == Some(&set);
            if inside && !std::mem::replace(&mut seen[row][column], true) {
                spans.entry(row).or_default().insert(column);
                next.extend([(row + 1, column), (row, column + 1)]);
                next.extend(row.checked_sub(1).map(|row| (row, column)));
                next.extend(column.checked_sub(1).map(|column| (row, column)));
            }
        }
        // Extends right, then down, from the first cell of the box: the leftmost cell of its topmost row.
        let width = (column..self.cells[0].len()).take_while(|column| spans[&row].contains(column)).count();
        let columns = column..column + width;
        let full = |row: &usize| spans.get(row).is_some_and(|span| columns.clone().all(|at| span.contains(&at)));
        let height = (row..self.cells.len()).take_while(full).count();
        Area { set, rows: row..row + height, columns }
    }
}
