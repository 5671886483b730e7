//! Pictures of how tensors are cut. Tensors that are cut in the same way share a picture.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use indexmap::{IndexMap, IndexSet};

use super::super::draw::{ChunkHolder, short};
use super::super::{Inspection, holder};
use super::ReportedGroup;
use crate::html::{Gallery, Grid, GridCell, GridSet, Section};
use crate::layout::{Intervals, Tile};
use crate::quantity::count;

/// The maximum number of pictures of a page.
const MOST_PICTURES: usize = 40;

/// The maximum number of bands of a picture along a dim, if one dim is cut and if two dims are cut.
const MOST_BANDS: usize = 48;
const MOST_BANDS_OF_TWO: usize = 32;

/// The maximum number of cuts of a dim that are looked at. A dim with more cuts is divided into equal bands.
const MOST_CUTS: usize = 1 << 12;

/// The size of a picture in pixels.
const WIDTH: u32 = 288;
const HEIGHT: u32 = 144;
/// The height of the picture of a tensor with one dim.
const LOW: u32 = 44;
/// The smallest size of a band.
const LEAST: u32 = 3;

/// Returns the section, or `None` if every tensor is whole in one place.
pub fn section(view: &Inspection<'_>, groups: &[ReportedGroup<'_>]) -> Option<Section> {
    type Key = (String, Vec<u32>, Vec<u32>, Vec<Vec<GridCell>>, Vec<GridSet>, bool);
    let mut classes: IndexMap<Key, (Grid, u64, u64)> = IndexMap::new();
    let mut whole = 0;
    for group in groups.iter().filter(|group| group.entry.unreadable.is_none()) {
        if group.entry.chunks.len() == 1 && group.problem.is_none() {
            whole += group.group.members.len();
            continue;
        }
        let grid = picture(view, group);
        let problem = grid.problem.is_some();
        let key = (
            grid.title.clone(),
            grid.rows.clone(),
            grid.columns.clone(),
            grid.cells.clone(),
            grid.sets.clone(),
            problem,
        );
        let name = match group.group.members.len() {
            1 => format!("{} {}", group.name, group.facts.shape),
            number => format!("{} {}, {}", group.name, group.facts.shape, count(number, "tensor")),
        };
        let (class, bytes, tensors) = classes.entry(key).or_insert((grid, 0, 0));
        class.tensors.push(name);
        *bytes = bytes.saturating_add(group.total);
        *tensors += group.group.members.len() as u64;
    }
    if classes.is_empty() {
        return None;
    }
    let number = classes.len();
    let mut classes: Vec<(Grid, u64, u64)> = classes.into_values().collect();
    classes.sort_by_key(|(grid, bytes, _)| (grid.problem.is_none(), std::cmp::Reverse(*bytes)));
    let mut caption = String::from(
        "Each picture shows a tensor from above, and the ranks (or files) that hold its parts; equal numbers in one part are \
         replicas. Placements have one entry for each dimension of the mesh: S(d) cuts dim d, _S(d,n) cuts dim d in stripes, R \
         copies. Tensors that are cut in the same way share a picture.",
    );
    if whole > 0 {
        caption.push_str(&format!(
            " {} not drawn: stored whole, once.",
            if whole == 1 { String::from("1 tensor is") } else { format!("{whole} tensors are") }
        ));
    }
    if number > MOST_PICTURES {
        caption.push_str(&format!(" {MOST_PICTURES} of {number} pictures are shown: those with the most bytes."));
    }
    let pictures = classes.into_iter().take(MOST_PICTURES).map(|(mut grid, _, tensors)| {
        let number = usize::try_from(tensors).unwrap_or(usize::MAX);
        grid.title = format!("{} ({})", grid.title, count(number, "tensor"));
        grid
    });
    Some(Section::new("How tensors are cut", caption, Gallery(pictures.collect())))
}

/// A dim of a picture: the offsets of its bands, in elements and in pixels.
struct Axis {
    dim: Option<usize>,
    offsets: Vec<u64>,
    positions: Vec<u32>,
    /// The number of cuts, if it is larger than the number of bands.
    thinned_from: Option<usize>,
}

impl Axis {
    fn none(size: u32) -> Self {
        Self { dim: None, offsets: vec![0, 1], positions: vec![0, size], thinned_from: None }
    }

    fn new(dim: usize, len: u64, cuts: &BTreeSet<u64>, most: usize, size: u32) -> Self {
        let parts = cuts.len().saturating_sub(1);
        let (offsets, thinned_from) = if cuts.len() > MOST_CUTS {
            let most = most as u64;
            ((0..=most).map(|band| at(len, band, most)).collect(), Some(parts))
        } else if parts > most {
            let step = parts.div_ceil(most);
            let mut kept: Vec<u64> = cuts.iter().copied().step_by(step).collect();
            kept.extend((kept.last() != Some(&len)).then_some(len));
            (kept, Some(parts))
        } else {
            (cuts.iter().copied().collect::<Vec<_>>(), None)
        };
        let mut positions: Vec<u32> = Vec::with_capacity(offsets.len());
        for offset in &offsets {
            let position = u32::try_from(at(u64::from(size), *offset, len)).unwrap_or(size);
            positions.push(positions.last().map_or(position, |last| position.max(last + LEAST)));
        }
        Self { dim: Some(dim), offsets, positions, thinned_from }
    }

    /// Returns the bands that an interval list overlaps.
    fn bands(&self, tile: &Tile) -> Vec<usize> {
        let Some(dim) = self.dim else { return vec![0] };
        let intervals = &tile.dims()[dim];
        let last = self.offsets.len() - 1;
        let band = |range: std::ops::Range<u64>| {
            let first = self.offsets.partition_point(|offset| *offset <= range.start).saturating_sub(1);
            first..self.offsets.partition_point(|offset| *offset < range.end).min(last)
        };
        // Only a damaged file has so many intervals.
        if intervals.count() > 1 << 16 {
            return band(intervals.bounds()).collect();
        }
        let found: BTreeSet<usize> = intervals.iter().flat_map(band).collect();
        found.into_iter().collect()
    }

    /// Returns the offsets that are written beside the picture, with at least `room` pixels between them.
    fn marks(&self, room: u32) -> Vec<(u32, String)> {
        let (Some(_), Some(end)) = (self.dim, self.positions.last()) else { return Vec::new() };
        let mut marks: Vec<(u32, String)> = Vec::new();
        for (index, (offset, position)) in self.offsets.iter().zip(&self.positions).enumerate() {
            let is_last = index + 1 == self.offsets.len();
            let is_free = marks.last().is_none_or(|(last, _)| *position >= last + room);
            if is_last || is_free && position + room <= *end {
                marks.push((*position, offset.to_string()));
            }
        }
        marks
    }

    fn position(&self, index: &[u64]) -> u32 {
        let Some(dim) = self.dim else { return self.positions.last().copied().unwrap_or(0) / 2 };
        let element = index.get(dim).copied().unwrap_or(0);
        let band = self.offsets.partition_point(|offset| *offset <= element).clamp(1, self.offsets.len() - 1) - 1;
        self.positions[band].midpoint(self.positions[band + 1])
    }
}

/// Returns `size` * `part` / `of`.
fn at(size: u64, part: u64, of: u64) -> u64 {
    u64::try_from(u128::from(size) * u128::from(part) / u128::from(of.max(1))).unwrap_or(u64::MAX)
}

fn picture(view: &Inspection<'_>, group: &ReportedGroup<'_>) -> Grid {
    let (entry, shape) = (group.entry, &group.entry.shape);
    let mut tiles: IndexMap<Tile, BTreeSet<ChunkHolder>> = IndexMap::new();
    let mut without = BTreeSet::new();
    let mut held = HashMap::new();
    for chunk in entry.chunks.iter() {
        let Some(holder) = holder(view, &chunk) else { continue };
        if chunk.tile.is_empty() {
            without.insert(holder);
        } else {
            *held.entry(holder.clone()).or_insert(0_usize) += 1;
            tiles.entry(chunk.tile).or_default().insert(holder);
        }
    }
    without.retain(|holder| !held.contains_key(holder));
    let cuts: Vec<BTreeSet<u64>> =
        (0..shape.len()).map(|dim| cuts(shape[dim], tiles.keys().map(|tile| &tile.dims()[dim]))).collect();
    let drawn = super::super::draw::drawn_dims(&cuts);
    let cut_dims: Vec<usize> = (0..shape.len()).filter(|dim| cuts[*dim].len() > 2).collect();
    let most = if cut_dims.len() > 1 { MOST_BANDS_OF_TWO } else { MOST_BANDS };
    let axis = |dim: usize, size| Axis::new(dim, shape[dim], &cuts[dim], most, size);
    let (rows, columns) = match drawn.as_slice() {
        [] => (Axis::none(LOW), Axis::none(WIDTH)),
        [dim] => (Axis::none(LOW), axis(*dim, WIDTH)),
        [first, second, ..] => (axis(*first, HEIGHT), axis(*second, WIDTH)),
    };
    let is_exact = rows.thinned_from.is_none()
        && columns.thinned_from.is_none()
        && cut_dims.iter().all(|dim| drawn.contains(dim))
        && entry.partial_values.is_none();
    let mut over = vec![vec![Vec::new(); columns.offsets.len() - 1]; rows.offsets.len() - 1];
    for (number, tile) in tiles.keys().enumerate() {
        let across = columns.bands(tile);
        for row in rows.bands(tile) {
            across.iter().for_each(|column| over[row][*column].push(number));
        }
    }
    let (sets, cells) = cells(over, &tiles, is_exact);
    let mut description = vec![match drawn.as_slice() {
        [first, second, ..] => {
            format!("Drawn for shape {}: rows are dim {first}, columns are dim {second}.", group.facts.shape)
        }
        _ => format!("Drawn for shape {}.", group.facts.shape),
    }];
    for dim in cut_dims.iter().filter(|dim| !drawn.contains(dim)) {
        description.push(format!("Dim {dim} is cut too, but not drawn."));
    }
    for axis in [&rows, &columns] {
        if let (Some(dim), Some(parts)) = (axis.dim, axis.thinned_from) {
            let bands = axis.offsets.len() - 1;
            description.push(format!("Dim {dim} has {parts} parts, which are drawn as {bands} bands."));
        }
    }
    description.push(copies(&tiles));
    if !without.is_empty() {
        let verb = if without.len() == 1 { "holds" } else { "hold" };
        description.push(format!("{} {verb} nothing of it.", names(without.iter(), without.len())));
    }
    let problem = group.problem.as_ref();
    let cross = problem.and_then(|problem| problem.index.as_ref()).map(|at| (columns.position(at), rows.position(at)));
    Grid {
        title: group.layout.clone(),
        description,
        row_marks: rows.marks(11),
        column_marks: columns.marks(30),
        rows: rows.positions,
        columns: columns.positions,
        sets,
        cells,
        cross,
        problem: problem.map(|problem| problem.detail.clone()),
        tensors: Vec::new(),
    }
}

/// Returns the offsets along a dim at which a tile begins or ends, and both ends of the dim. Stops after more than
/// [`MOST_CUTS`] offsets.
fn cuts<'a>(len: u64, tiles: impl Iterator<Item = &'a Intervals>) -> BTreeSet<u64> {
    let mut cuts = BTreeSet::from([0, len]);
    for interval in tiles.flat_map(Intervals::iter) {
        cuts.extend([interval.start.min(len), interval.end.min(len)]);
        if cuts.len() > MOST_CUTS {
            break;
        }
    }
    cuts
}

/// Returns the sets of holders, and the state of each cell. `over` has, for each cell, the numbers of the tiles that
/// overlap it.
fn cells(
    over: Vec<Vec<Vec<usize>>>,
    tiles: &IndexMap<Tile, BTreeSet<ChunkHolder>>,
    is_exact: bool,
) -> (Vec<GridSet>, Vec<Vec<GridCell>>) {
    let mut known: IndexSet<Vec<usize>> = IndexSet::new();
    let mut cell = |numbers: Vec<usize>| match numbers.len() {
        0 => GridCell::Hole,
        1 => GridCell::Held(known.insert_full(numbers).0),
        _ if is_exact => GridCell::Overlap(known.insert_full(numbers).0),
        _ => GridCell::Held(known.insert_full(numbers).0),
    };
    let cells = over.into_iter().map(|row| row.into_iter().map(&mut cell).collect()).collect();
    let set = |(index, numbers): (usize, Vec<usize>)| {
        let holders: BTreeSet<&ChunkHolder> = numbers.iter().flat_map(|number| &tiles[*number]).collect();
        let colour = match holders.first() {
            Some(ChunkHolder::Rank(rank)) if is_exact => rank.0 as usize,
            // The first ranks of bands may all have one colour.
            _ => index,
        };
        GridSet { label: label(&holders), colour }
    };
    (known.into_iter().enumerate().map(set).collect(), cells)
}

/// Returns the names of holders for a picture: `0-3`, or, for many ranks with gaps, `0,8,...,120`.
fn label(holders: &BTreeSet<&ChunkHolder>) -> String {
    let text = short(holders.iter().copied());
    let parts: Vec<&str> = text.split(',').collect();
    match parts.as_slice() {
        [first, second, _, _, .., last] => format!("{first},{second},...,{last}"),
        _ => text,
    }
}

fn names<'a>(holders: impl Iterator<Item = &'a ChunkHolder>, number: usize) -> String {
    let holders: BTreeSet<&ChunkHolder> = holders.collect();
    let noun = match holders.first() {
        Some(ChunkHolder::Rank(_)) if number == 1 => "Rank",
        Some(ChunkHolder::Rank(_)) => "Ranks",
        _ if number == 1 => "File",
        _ => "Files",
    };
    format!("{noun} {}", label(&holders))
}

/// Describes in how many parts a tensor is stored, and how often each part is stored.
fn copies(tiles: &IndexMap<Tile, BTreeSet<ChunkHolder>>) -> String {
    let mut numbers: BTreeMap<usize, usize> = BTreeMap::new();
    tiles.values().for_each(|holders| *numbers.entry(holders.len()).or_default() += 1);
    let times = |number: usize| if number == 1 { String::from("once") } else { format!("{number} times") };
    match (tiles.len(), numbers.keys().next(), numbers.keys().next_back()) {
        (0, ..) => String::from("Nothing of it is stored."),
        (1, Some(number), _) => format!("The whole tensor is stored {}.", times(*number)),
        (parts, Some(least), Some(most)) if least == most => {
            format!("It has {parts} parts; each is stored {}.", times(*most))
        }
        (parts, Some(least), Some(most)) => {
            format!("It has {parts} parts; each is stored {least} to {most} times.")
        }
        _ => String::new(),
    }
}
