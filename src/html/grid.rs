//! Pictures of how a tensor is cut: a rectangle for each box of the tensor, with the ranks that hold the box.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use maud::{Markup, Render, html};

use crate::text::escape_invisible;

/// A picture of a tensor, cut into cells along one or two of its dims. Positions are in pixels of the picture.
#[derive(Debug)]
pub struct Grid {
    /// The heading of the picture, such as the placements.
    pub title: String,
    /// Sentences about the picture.
    pub description: Vec<String>,
    /// The positions of the cuts between rows, from 0 to the height of the picture.
    pub rows: Vec<u32>,
    /// The positions of the cuts between columns, from 0 to the width of the picture.
    pub columns: Vec<u32>,
    /// The sets of holders.
    pub sets: Vec<GridSet>,
    /// For each row of cells, the cells.
    pub cells: Vec<Vec<GridCell>>,
    /// Texts at positions of the left edge and of the upper edge.
    pub row_marks: Vec<(u32, String)>,
    pub column_marks: Vec<(u32, String)>,
    /// A position, such as that of the first element that differs between replicas.
    pub cross: Option<(u32, u32)>,
    /// The problem that the picture shows.
    pub problem: Option<String>,
    /// The tensors that are cut in this way.
    pub tensors: Vec<String>,
}

/// The state of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GridCell {
    /// The holders of this set hold the cell.
    Held(usize),
    /// No chunk holds the cell.
    Hole,
    /// Several chunks that are not replicas hold the cell; the number is the set of all holders.
    Overlap(usize),
}

/// The ranks or files that hold a box.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GridSet {
    /// A short text for the picture: `0-3`.
    pub label: String,
    /// A number that chooses the colour.
    pub colour: usize,
}

/// The number of colours of ranks.
const RANK_COLOURS: usize = 12;

/// The width in pixels of a character in a label.
const CHARACTER: u32 = 7;

/// A rectangle of cells in equal states.
struct Area {
    cell: GridCell,
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
}

impl Grid {
    /// Returns rectangles that together have all cells.
    fn areas(&self) -> Vec<Area> {
        let mut open: BTreeMap<(usize, usize), Area> = BTreeMap::new();
        let mut areas = Vec::new();
        for (row, cells) in self.cells.iter().enumerate() {
            let mut runs = BTreeMap::new();
            let mut start = 0;
            for run in cells.chunk_by(|left, right| left == right) {
                let columns = start..start + run.len();
                start = columns.end;
                let key = (columns.start, columns.end);
                let area = match open.remove(&key) {
                    Some(above) if above.cell == run[0] => Area { rows: above.rows.start..row + 1, ..above },
                    above => {
                        areas.extend(above);
                        Area { cell: run[0], rows: row..row + 1, columns }
                    }
                };
                runs.insert(key, area);
            }
            areas.extend(std::mem::replace(&mut open, runs).into_values());
        }
        areas.extend(open.into_values());
        areas
    }

    fn class(&self, cell: GridCell) -> String {
        match cell {
            GridCell::Held(set) => format!("r{}", self.sets[set].colour % RANK_COLOURS),
            GridCell::Hole => String::from("hole"),
            GridCell::Overlap(_) => String::from("overlap"),
        }
    }

    fn label(&self, cell: GridCell) -> String {
        match cell {
            GridCell::Held(set) => self.sets[set].label.clone(),
            GridCell::Hole => String::from("missing"),
            GridCell::Overlap(set) => format!("twice: {}", self.sets[set].label),
        }
    }
}

impl Render for Grid {
    fn render(&self) -> Markup {
        let areas = self.areas();
        let (width, height) = (self.columns.last().copied().unwrap_or(0), self.rows.last().copied().unwrap_or(0));
        // One path for each colour is much smaller than one element for each area.
        let mut paths: BTreeMap<String, String> = BTreeMap::new();
        let mut labels = Vec::new();
        for Area { cell, rows, columns } in areas {
            let [top, bottom] = [self.rows[rows.start], self.rows[rows.end]];
            let [left, right] = [self.columns[columns.start], self.columns[columns.end]];
            let path = paths.entry(self.class(cell)).or_default();
            write!(path, "M{left} {top}H{right}V{bottom}H{left}Z").expect("writing to memory");
            let label = self.label(cell);
            let len = u32::try_from(label.chars().count()).unwrap_or(u32::MAX);
            if bottom - top >= 13 && len.saturating_mul(CHARACTER) + 4 <= right - left {
                labels.push((left.midpoint(right), top.midpoint(bottom) + 4, label));
            }
        }
        let left =
            6 + self.row_marks.iter().map(|(_, text)| u32::try_from(text.len()).unwrap_or(0) * 6).max().unwrap_or(0);
        let view = format!("-{left} -16 {} {}", width + left + 14, height + 24);
        html! {
            figure.grid.bad[self.problem.is_some()] {
                figcaption {
                    h3 { (escape_invisible(&self.title)) }
                    @if let Some(problem) = &self.problem { p.problem { "Problem: " (escape_invisible(problem)) } }
                }
                svg role="img" viewBox=(view) width=(width + left + 14) {
                    title { (escape_invisible(&self.title)) }
                    desc { (escape_invisible(&self.description.join(" "))) }
                    @for (class, path) in &paths { path class=(class) d=(path) {} }
                    @for (x, y, label) in &labels { text.on x=(x) y=(y) { (escape_invisible(label)) } }
                    @for (y, text) in &self.row_marks { text.mark.row x="-4" y=(y + 4) { (text) } }
                    @for (x, text) in &self.column_marks { text.mark x=(x) y="-5" { (text) } }
                    @if let Some((x, y)) = self.cross {
                        path.cross d=(format!("M{x} {y}m-7 -7l14 14m0 -14l-14 14")) {}
                    }
                }
                @for sentence in &self.description { p { (escape_invisible(sentence)) } }
                @if let [only] = self.tensors.as_slice() { p { code { (escape_invisible(only)) } } }
                @else if !self.tensors.is_empty() { details {
                    summary { (self.tensors.len()) " names are cut in this way" }
                    ul { @for name in &self.tensors { li { code { (escape_invisible(name)) } } } }
                } }
            }
        }
    }
}
