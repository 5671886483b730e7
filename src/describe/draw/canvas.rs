//! Lays out and draws a picture of a grid of boxes: chooses the size of each box in characters, and draws the lines
//! between boxes and the names in boxes.
//!
//! Widths count characters. A stretch is the range of rows or columns of the tensor between two neighbouring cuts.
//! Every stretch gets at least one character, and the remaining characters are distributed in proportion to the lengths
//! of the stretches. Stretches of equal length get equally many characters.

use super::super::Span;
use super::{Area, DrawnGrid, PictureSize};

/// A picture of a grid of boxes that fits into a given size.
pub struct Canvas<'a> {
    grid: &'a DrawnGrid,
    names: &'a [String],
    areas: Vec<Area>,
    /// The positions of the vertical lines, in characters: the left edge, the lines at the cuts between columns of the
    /// tensor, and the right edge.
    columns: Vec<usize>,
    /// The positions of the upper edge, of the lines at the cuts between rows of the tensor, and of the lower edge, in
    /// lines of text. If `ruled` is false, no lines are drawn at cuts; the position of a cut is then that of the first
    /// text line after the cut.
    lines: Vec<usize>,
    /// True if horizontal lines are drawn between boxes. If false, boxes follow each other without lines between them,
    /// so that more boxes fit.
    ruled: bool,
    /// The number of characters to the left of the picture, in which row offsets are written.
    margin: usize,
}

/// The width in characters of a tensor that is not cut along its columns. A tensor of few columns gets fewer
/// characters, and a tensor with a long name in its box gets more.
const UNCUT_COLUMNS: usize = 40;
/// The height in lines of a tensor that is not cut along its rows. A tensor of few rows gets fewer lines.
const UNCUT_LINES: usize = 5;

impl<'a> Canvas<'a> {
    /// Lays out a grid. `names` has a name for each set of holders (ranks or files). Returns `None` if the picture does
    /// not fit into `room`.
    pub fn new(grid: &'a DrawnGrid, names: &'a [String], room: PictureSize) -> Option<Self> {
        let areas = grid.areas();
        let widest = |cuts: &[u64]| cuts.iter().map(|cut| digits(*cut)).max().unwrap_or(0);
        let margin = if grid.rows.is_empty() { 1 } else { widest(&grid.rows) + 2 };
        let across = lengths(&grid.columns);
        let room_across = room.columns.checked_sub(margin + across.len() + widest(&grid.columns).max(1))?;
        let natural = if across.len() == 1 { UNCUT_COLUMNS } else { usize::MAX };
        let natural = natural.min(usize::try_from(across.iter().sum::<u64>()).unwrap_or(usize::MAX).saturating_mul(4));
        let padded = |padding: usize| {
            let least = least_widths(&areas, names, across.len(), padding);
            share(&across, &least, natural.max(least.iter().sum()), room_across)
        };
        let widths = padded(2).or_else(|| padded(0))?;

        let down = lengths(&grid.rows);
        let natural = if down.len() == 1 { UNCUT_LINES } else { usize::MAX };
        let natural = natural.min(usize::try_from(down.iter().sum::<u64>()).unwrap_or(usize::MAX)).max(down.len());
        let least = vec![1; down.len()];
        let heights = |lines: usize| share(&down, &least, natural, room.lines.checked_sub(lines)?);
        let (ruled, heights) = match heights(down.len() + 1) {
            Some(heights) => (true, heights),
            None => (false, heights(2)?),
        };
        let columns = positions(&widths, true);
        let lines = positions(&heights, ruled);
        let canvas = Self { grid, names, areas, columns, lines, ruled, margin };
        canvas.names_fit().then_some(canvas)
    }

    fn names_fit(&self) -> bool {
        let room = |area: &Area| self.columns[area.columns.end] - self.columns[area.columns.start] - 1;
        self.areas.iter().all(|area| self.names[area.set].chars().count() <= room(area))
    }

    /// Returns the picture, with row offsets on the left and column offsets above.
    pub fn draw(&self) -> Vec<Vec<Span>> {
        let (height, width) = (last(&self.lines) + 1, last(&self.columns) + 1);
        let mut cells: Vec<Vec<(char, Option<u8>)>> =
            (0..height).map(|line| (0..width).map(|column| self.character(line, column)).collect()).collect();
        for area in &self.areas {
            self.write_name(area, &mut cells);
        }
        let above = self.offsets_above();
        let mut lines: Vec<Vec<Span>> = Vec::new();
        if !above.trim().is_empty() {
            lines.push(vec![Span { text: above, ground: None }]);
        }
        for (line, cells) in cells.iter().enumerate() {
            let mut spans = vec![Span { text: self.offset_beside(line), ground: None }];
            for (character, ground) in cells {
                match spans.last_mut() {
                    Some(span) if span.ground == *ground => span.text.push(*character),
                    _ => spans.push(Span { text: character.to_string(), ground: *ground }),
                }
            }
            lines.push(spans);
        }
        lines
    }

    /// Returns the index of the cell's set of holders (ranks or files), or `None` outside the grid.
    fn set(&self, row: Option<usize>, column: Option<usize>) -> Option<usize> {
        self.grid.cells.get(row?)?.get(column?).copied()
    }

    /// Returns the character at a position and its background colour: the inside of a box, or a line between two boxes.
    fn character(&self, line: usize, column: usize) -> (char, Option<u8>) {
        let (above, below) = stretches(&self.lines, line, self.ruled);
        let (left, right) = stretches(&self.columns, column, true);
        let corners = [self.set(above, left), self.set(above, right), self.set(below, left), self.set(below, right)];
        let [upper_left, upper_right, lower_left, lower_right] = corners;
        let arms = (
            upper_left != upper_right,
            lower_left != lower_right,
            upper_left != lower_left,
            upper_right != lower_right,
        );
        let character = match arms {
            (false, false, false, false) => return (' ', upper_left.and_then(|set| self.grid.ground(set))),
            (true, true, false, false) => '│',
            (false, false, true, true) => '─',
            (false, true, false, true) => '┌',
            (false, true, true, false) => '┐',
            (true, false, false, true) => '└',
            (true, false, true, false) => '┘',
            (true, true, false, true) => '├',
            (true, true, true, false) => '┤',
            (false, true, true, true) => '┬',
            (true, false, true, true) => '┴',
            _ => '┼',
        };
        (character, None)
    }

    fn write_name(&self, area: &Area, cells: &mut [Vec<(char, Option<u8>)>]) {
        let name: Vec<char> = self.names[area.set].chars().collect();
        let (left, right) = (self.columns[area.columns.start] + 1, self.columns[area.columns.end]);
        let top = self.lines[area.rows.start] + usize::from(self.ruled || area.rows.start == 0);
        let line = top + (self.lines[area.rows.end] - top - 1) / 2;
        let start = left + (right - left - name.len()) / 2;
        for (cell, character) in cells[line][start..].iter_mut().zip(name) {
            cell.0 = character;
        }
    }

    /// Returns the line of column offsets: the first and the last offset, and as many of the others as fit.
    fn offsets_above(&self) -> String {
        let mut text: Vec<char> = Vec::new();
        let mut write = |column: usize, offset: u64, end: usize| {
            let digits: Vec<char> = offset.to_string().chars().collect();
            let free = text.is_empty() || text.len() < column;
            if free && column + digits.len() < end {
                text.resize(column, ' ');
                text.extend(digits);
            }
        };
        if let (Some((size, offsets)), Some((end, columns))) =
            (self.grid.columns.split_last(), self.columns.split_last())
        {
            for (column, offset) in columns.iter().zip(offsets) {
                write(self.margin + column, *offset, self.margin + end);
            }
            write(self.margin + end, *size, usize::MAX);
        }
        text.into_iter().collect()
    }

    /// Returns the offset to write on the left of a line of the picture: the offset of the row of cells that begins on
    /// this line, or spaces if none does.
    fn offset_beside(&self, line: usize) -> String {
        let width = self.margin - 1;
        // Without lines, a row of cells begins at its first line of characters. The first row begins below the edge.
        let row = match line {
            0 if !self.ruled => None,
            1 if !self.ruled => Some(0),
            line => self.lines.binary_search(&line).ok(),
        };
        match row.and_then(|row| self.grid.rows.get(row)) {
            Some(offset) => format!("{offset:>width$} "),
            None => " ".repeat(self.margin),
        }
    }
}

/// Returns the indices of the two stretches (ranges between neighbouring cuts) just before and just after a position.
/// `lines` are the positions of the lines. If the position is inside a stretch, both indices are the index of this
/// stretch. Outside the picture there is no stretch (`None`).
fn stretches(lines: &[usize], at: usize, ruled: bool) -> (Option<usize>, Option<usize>) {
    let behind = lines.partition_point(|line| *line <= at);
    let within = behind.checked_sub(1).filter(|stretch| stretch + 1 < lines.len());
    let is_edge = at == 0 || at == last(lines);
    if is_edge || ruled && lines.binary_search(&at).is_ok() {
        let before = if at == 0 { None } else { Some(lines.partition_point(|line| *line < at) - 1) };
        return (before, within);
    }
    (within, within)
}

fn last(positions: &[usize]) -> usize {
    *positions.last().expect("a stretch has two ends")
}

fn digits(number: u64) -> usize {
    number.to_string().len()
}

/// Returns the distances between neighbouring cuts. If no dim is drawn in this direction, the result is a single length
/// of 1.
fn lengths(cuts: &[u64]) -> Vec<u64> {
    if cuts.is_empty() { vec![1] } else { cuts.windows(2).map(|pair| pair[1] - pair[0]).collect() }
}

/// Returns the positions of the lines around stretches (ranges between neighbouring cuts) of these sizes, including
/// both edges. If `ruled` is false, there are no lines between stretches, and the result has the start of each further
/// stretch instead.
fn positions(sizes: &[usize], ruled: bool) -> Vec<usize> {
    let mut at = 0;
    let mut positions = vec![0];
    for (index, size) in sizes.iter().enumerate() {
        at += size + usize::from(ruled || index == 0);
        positions.push(at);
    }
    positions
}

/// Returns the minimum width of each column in characters, so that each name and `padding` more characters fit. Ignores
/// areas (places for a name) that span several columns, because such areas nearly always have enough room.
fn least_widths(areas: &[Area], names: &[String], columns: usize, padding: usize) -> Vec<usize> {
    let mut least = vec![1; columns];
    for area in areas.iter().filter(|area| area.columns.len() == 1) {
        let needed = names[area.set].chars().count() + padding;
        let width = &mut least[area.columns.start];
        *width = needed.max(*width);
    }
    least
}

/// Divides characters among stretches (ranges between neighbouring cuts) in proportion to `lengths`, and returns the
/// size of each stretch. Each size is at least the value in `least`. The sum of the sizes is close to `natural`, and at
/// most `room`. Returns `None` if `room` is too small.
fn share(lengths: &[u64], least: &[usize], natural: usize, room: usize) -> Option<Vec<usize>> {
    let total: u128 = lengths.iter().map(|length| u128::from(*length)).sum();
    let scaled = |target: usize| -> Vec<usize> {
        let size = |length: u64| usize::try_from(u128::from(length) * target as u128 / total).unwrap_or(usize::MAX);
        lengths.iter().zip(least).map(|(length, least)| size(*length).max(*least)).collect()
    };
    let fits = |sizes: &Vec<usize>| sizes.iter().sum::<usize>() <= room;
    (0..=natural.min(room)).rev().map(scaled).find(fits)
}
