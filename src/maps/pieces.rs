//! Divides a target tensor of a map into pieces: strided boxes, each of which is a strided view of one source tensor.
//!
//! Every term of a sum gives each axis a dim and a step in this dim. A piece of the target is a product of arithmetic
//! progressions, one for each dim; so are the elements of the source that it holds.
//!
//! ```text
//!     source [(h r j)]   h = 2, r = 2, j = 3      target [(h j r)]
//!     0 1 2 | 3 4 5 || 6 7 8 | 9 10 11            0 3 1 4 2 5 || 6 9 7 10 8 11
//!     piece h = 0, r = 1: target 1, 3, 5 is source 3, 4, 5
//! ```
//!
//! Axes that are neighbours in one dim of both sides are one axis. If a dim of the target still has several axes, all but
//! the longest are counted out: each combination of their coordinates is a piece. Unit of all numbers: elements.
//! Invariant: the pieces of a target tensor do not overlap, and cover it except for padding.

use std::collections::BTreeMap;

use super::cell::{Axis, Dim, Factor, Product, Sum, TensorPattern};
use super::names::NameMatch;
use super::row::Cell;
use super::sizes::Sizes;

/// The maximum number of pieces of one target tensor.
pub const MAX_PIECES: usize = 1 << 20;

/// A part of a target tensor that is a strided view of one source tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The index of the source tensor's pattern in its cell.
    pub pattern: usize,
    /// The coordinates of the source tensor on the axes of its name.
    pub source: NameMatch,
    /// For each dim of the target, the indices that the piece has.
    pub target: Vec<Progression>,
    /// For each dim of the source, the index of the piece's first element.
    pub start: Vec<u64>,
    /// For each dim of the target, the dim of the source, and the distance in it from one index of the piece to the next.
    pub steps: Vec<(usize, u64)>,
}

/// The indices `start`, `start + step`, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progression {
    pub start: u64,
    pub step: u64,
    pub count: u64,
}

/// A tensor would have more than [`MAX_PIECES`] pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyPieces;

/// One term of a tensor: a box of its elements, in which each axis has a position.
#[derive(Clone, Debug)]
struct Term {
    /// The index of the tensor's pattern in its cell.
    pattern: usize,
    /// For each dim, the index of the term's first element.
    offsets: Vec<u64>,
    /// For each axis, its dim and the step in this dim.
    axes: BTreeMap<Axis, (usize, u64)>,
    /// Axes of equal copies, with their dims and steps.
    copies: BTreeMap<Axis, (usize, u64)>,
    is_padding: bool,
}

/// Returns the number of equal copies that the tensors of a cell have of each element, or of the elements that have most.
pub fn copies(cell: &Cell, sizes: &Sizes, rest: &[u64]) -> u64 {
    let count = |term: &Term| {
        let sizes = term.copies.keys().map(|axis| sizes.get(axis).unwrap_or(1));
        sizes.fold(1_u64, u64::saturating_mul)
    };
    terms(cell, sizes, rest).iter().map(count).max().unwrap_or(1).max(1)
}

/// Returns the pieces of one target tensor. `rest` are the sizes of the dims that `...` stands for. If the source has copies of the
/// elements, `copy` is the number of the copy that the pieces have.
///
/// # Errors
/// [`TooManyPieces`].
pub fn pieces(
    [from, to]: [&Cell; 2],
    (pattern, at): (usize, &NameMatch),
    sizes: &Sizes,
    rest: &[u64],
    copy: u64,
) -> Result<Vec<Piece>, TooManyPieces> {
    let [sources, targets] = [from, to].map(|cell| terms(cell, sizes, rest));
    let mut found = Vec::new();
    for (source, target) in sources.iter().zip(&targets).filter(|(_, target)| target.pattern == pattern) {
        let pair = TermPair { source, target, from: &from[source.pattern], sizes, rest, at, copy };
        pair.divide(&mut found)?;
    }
    Ok(found)
}

/// Returns the padding of one target tensor: strided boxes, each as the indices of every dim.
///
/// # Errors
/// [`TooManyPieces`].
pub fn padding(
    to: &Cell,
    (pattern, at): (usize, &NameMatch),
    sizes: &Sizes,
    rest: &[u64],
) -> Result<Vec<Vec<Progression>>, TooManyPieces> {
    let mut found = Vec::new();
    let terms = all_terms(to, sizes, rest);
    for term in terms.iter().filter(|term| term.is_padding && term.pattern == pattern) {
        TermPair { source: term, target: term, from: &to[pattern], sizes, rest, at, copy: 0 }.divide(&mut found)?;
    }
    Ok(found.into_iter().map(|piece| piece.target).collect())
}

/// Returns, for each dim of a source tensor, the dim of a target tensor that has the same outermost axis, also outermost. A shard
/// of consecutive indices of such a dim has consecutive indices of the target's dim. `patterns` are the patterns of the two
/// tensors in their cells.
pub fn following_dims([from, to]: [&Cell; 2], patterns: [usize; 2], sizes: &Sizes, rest: &[u64]) -> Vec<Option<usize>> {
    let [sources, targets] = [from, to].map(|cell| terms(cell, sizes, rest));
    let mut pairs = sources.iter().zip(&targets);
    let Some((source, target)) = pairs.find(|(source, target)| [source.pattern, target.pattern] == patterns) else {
        return vec![None; from[patterns[0]].dims.len()];
    };
    let outermost = |term: &Term, dim: usize| -> Option<Axis> {
        let own = term.axes.iter().chain(&term.copies).filter(|(_, (of, _))| *of == dim);
        own.max_by_key(|(_, (_, step))| *step).map(|(axis, _)| axis.clone())
    };
    let follows = |dim| {
        let axis = outermost(source, dim)?;
        let (to, _) = target.axes.get(&axis)?;
        (outermost(target, *to)? == axis).then_some(*to)
    };
    (0..source.offsets.len()).map(follows).collect()
}

/// Returns the terms of all tensors of a cell, without padding.
fn terms(cell: &Cell, sizes: &Sizes, rest: &[u64]) -> Vec<Term> {
    all_terms(cell, sizes, rest).into_iter().filter(|term| !term.is_padding).collect()
}

/// Returns the terms of all tensors of a cell.
fn all_terms(cell: &Cell, sizes: &Sizes, rest: &[u64]) -> Vec<Term> {
    let mut all = Vec::new();
    for (index, pattern) in cell.iter().enumerate() {
        let first = Term {
            pattern: index,
            offsets: Vec::new(),
            axes: BTreeMap::new(),
            copies: BTreeMap::new(),
            is_padding: false,
        };
        let mut own = vec![first];
        for dim in &pattern.dims {
            match dim {
                Dim::Rest => {
                    for number in 0..rest.len() {
                        for term in &mut own {
                            let dim = term.offsets.len();
                            term.offsets.push(0);
                            term.axes.insert(rest_axis(number), (dim, 1));
                        }
                    }
                }
                Dim::Sum(sum) => {
                    for term in &mut own {
                        term.offsets.push(0);
                    }
                    own = with_sum(own, sum, 1, sizes);
                }
            }
        }
        all.extend(own);
    }
    all
}

/// The name of the axis for the dim with this number among the dims of `...`. No axis of a map has such a name.
fn rest_axis(number: usize) -> Axis {
    format!("...{number}").into()
}

/// Places a sum in the last dim of each term: each term becomes one term for each product of the sum. `step` is the distance
/// between two elements of the sum.
fn with_sum(terms: Vec<Term>, sum: &Sum, step: u64, sizes: &Sizes) -> Vec<Term> {
    let mut placed = Vec::new();
    for term in terms {
        let mut offset = 0;
        for product in &sum.0 {
            let mut own = term.clone();
            *own.offsets.last_mut().expect("a dim") += offset * step;
            placed.extend(with_product(own, product, step, sizes));
            offset += value(&Sum(vec![product.clone()]), sizes);
        }
    }
    placed
}

fn with_product(term: Term, product: &Product, step: u64, sizes: &Sizes) -> Vec<Term> {
    let mut terms = vec![term];
    let mut step = step;
    for factor in product.0.iter().rev() {
        for term in &mut terms {
            let at = (term.offsets.len() - 1, step);
            match factor {
                Factor::One | Factor::Group(_) => {}
                Factor::Axis(axis) => drop(term.axes.insert(axis.clone(), at)),
                Factor::Copies(axis) => drop(term.copies.insert(axis.clone(), at)),
                Factor::Padding(axis) => {
                    term.axes.insert(axis.clone(), at);
                    term.is_padding = true;
                }
            }
        }
        if let Factor::Group(sum) = factor {
            terms = with_sum(terms, sum, step, sizes);
        }
        // The step of the outermost factor is the last one that is used, so the product may saturate.
        step = step.saturating_mul(value(&Sum(vec![Product(vec![factor.clone()])]), sizes));
    }
    terms
}

/// Returns the size of a sum. The sizes of an application are known and fit the dims of its tensors.
fn value(sum: &Sum, sizes: &Sizes) -> u64 {
    sizes.value(sum).and_then(|value| u64::try_from(value).ok()).expect("the sizes of an application")
}

/// A term of the source, and the term of the target that has the same elements.
struct TermPair<'a> {
    source: &'a Term,
    target: &'a Term,
    /// The pattern of the source tensor.
    from: &'a TensorPattern,
    sizes: &'a Sizes,
    rest: &'a [u64],
    /// The coordinates of the target tensor on the axes of its name.
    at: &'a NameMatch,
    /// The number of the copy, counted over the axes of copies of the source, the first one fastest.
    copy: u64,
}

/// Neighbouring axes of a target dim that are neighbours in the source, too, or are in the names of the source.
#[derive(Clone, Debug)]
struct Run {
    /// The step in the target dim.
    step: u64,
    count: u64,
    source: RunSource,
}

/// The position of a run in the source.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RunSource {
    Dim(usize, u64),
    /// The coordinate on this axis is in the name of the source tensor.
    Name(Axis),
    /// The elements are equal copies.
    Copies,
}

impl TermPair<'_> {
    fn size(&self, axis: &Axis) -> u64 {
        let number = axis.strip_prefix("...").and_then(|number| number.parse::<usize>().ok());
        number.map_or_else(|| self.sizes.get(axis).expect("the sizes of an application"), |number| self.rest[number])
    }

    fn divide(&self, found: &mut Vec<Piece>) -> Result<(), TooManyPieces> {
        let runs: Vec<Vec<Run>> = (0..self.target.offsets.len()).map(|dim| self.runs(dim)).collect();
        if runs.iter().flatten().any(|run| run.count == 0) {
            return Ok(());
        }
        // The position of the longest run of each dim that is in a dim of the source. All other runs are counted out.
        let is_in_dim = |run: &Run| matches!(run.source, RunSource::Dim(..));
        let longest = runs.iter().map(|runs| {
            let mut kept = runs.iter().enumerate().filter(|(_, run)| is_in_dim(run)).collect::<Vec<_>>();
            kept.sort_by_key(|(index, run)| (run.count, *index));
            kept.last().map(|(index, _)| *index)
        });
        let longest: Vec<Option<usize>> = longest.collect();
        let counted: Vec<(usize, &Run)> = runs
            .iter()
            .enumerate()
            .flat_map(|(dim, runs)| runs.iter().enumerate().map(move |(index, run)| (dim, index, run)))
            .filter(|(dim, index, _)| longest[*dim] != Some(*index))
            .map(|(dim, _, run)| (dim, run))
            .collect();
        let number = counted.iter().try_fold(1_u64, |number, (_, run)| number.checked_mul(run.count));
        if number.is_none_or(|number| number + found.len() as u64 > MAX_PIECES as u64) {
            return Err(TooManyPieces);
        }
        let mut first = self.first();
        for (dim, runs) in runs.iter().enumerate() {
            match longest[dim].map(|index| &runs[index]) {
                Some(Run { step, count, source: RunSource::Dim(source, source_step) }) => {
                    first.target[dim] = Progression { step: *step, count: *count, ..first.target[dim] };
                    first.steps[dim] = (*source, *source_step);
                }
                _ => first.target[dim].count = 1,
            }
        }
        count_out(&counted, first, found);
        Ok(())
    }

    /// Returns a piece of the first element.
    fn first(&self) -> Piece {
        let mut start = self.source.offsets.clone();
        // Axes in the name of the target are in a dim or in the name of the source.
        for (axis, at) in &self.at.coordinates {
            if let Some((dim, step)) = self.source.axes.get(axis) {
                start[*dim] += at * step;
            }
        }
        let mut copy = self.copy;
        for (axis, (dim, step)) in &self.source.copies {
            let count = self.size(axis).max(1);
            start[*dim] += copy % count * step;
            copy /= count;
        }
        let mut source = NameMatch { rest: self.at.rest.clone(), ..NameMatch::default() };
        for axis in self.from.name.axes() {
            source.coordinates.insert(axis.clone(), self.at.coordinates.get(axis).copied().unwrap_or(0));
        }
        let progression = |start: &u64| Progression { start: *start, step: 1, count: 1 };
        Piece {
            pattern: self.source.pattern,
            source,
            target: self.target.offsets.iter().map(progression).collect(),
            start,
            steps: vec![(0, 0); self.target.offsets.len()],
        }
    }

    /// Returns the runs of a target dim, the outermost first.
    fn runs(&self, dim: usize) -> Vec<Run> {
        let of_dim = |axes: &BTreeMap<Axis, (usize, u64)>, are_copies: bool| -> Vec<Run> {
            let own = axes.iter().filter(|(_, (own, _))| *own == dim);
            own.map(|(axis, (_, step))| {
                let source = match self.source.axes.get(axis) {
                    _ if are_copies => RunSource::Copies,
                    Some((source, step)) => RunSource::Dim(*source, *step),
                    None => RunSource::Name(axis.clone()),
                };
                Run { step: *step, count: self.size(axis), source }
            })
            .collect()
        };
        let mut runs = of_dim(&self.target.axes, false);
        runs.extend(of_dim(&self.target.copies, true));
        // Axes of one element may have any step.
        runs.retain(|run| run.count != 1 || matches!(run.source, RunSource::Name(_)));
        runs.sort_by_key(|run| std::cmp::Reverse(run.step));
        let mut merged: Vec<Run> = Vec::new();
        for run in runs {
            if let Some(outer) = merged.last_mut()
                && let (RunSource::Dim(outer_dim, outer_step), RunSource::Dim(inner_dim, inner_step)) =
                    (&outer.source, &run.source)
                && outer_dim == inner_dim
                && outer.step == run.step * run.count
                && *outer_step == inner_step * run.count
            {
                *outer = Run { step: run.step, count: outer.count * run.count, source: run.source };
                continue;
            }
            merged.push(run);
        }
        merged
    }
}

/// Adds a piece for each combination of coordinates of the runs.
fn count_out(counted: &[(usize, &Run)], piece: Piece, found: &mut Vec<Piece>) {
    let Some(((dim, run), others)) = counted.split_first() else {
        found.push(piece);
        return;
    };
    for at in 0..run.count {
        let mut own = piece.clone();
        own.target[*dim].start += at * run.step;
        match &run.source {
            RunSource::Dim(source, step) => own.start[*source] += at * step,
            RunSource::Name(axis) => drop(own.source.coordinates.insert(axis.clone(), at)),
            RunSource::Copies => {}
        }
        count_out(others, own, found);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::maps::row::Row;

    /// An element: the index of its pattern, the coordinates of its tensor's name, and its index in each dim.
    type Element = (usize, BTreeMap<Axis, u64>, Vec<u64>);

    fn row(cells: [&[&str]; 2]) -> Row {
        let parse = |texts: &[&str]| texts.iter().map(|text| TensorPattern::parse("", text).unwrap()).collect();
        let mut row = Row { line: 1, cells: cells.map(parse).into(), add: vec![0.0; 2] };
        row.complete(&["a", "b"]).unwrap();
        row
    }

    fn sizes(known: &[(&str, u64)]) -> Sizes {
        let known: Vec<(String, u64)> = known.iter().map(|(axis, size)| ((*axis).to_owned(), *size)).collect();
        Sizes::new(&[], &known, None).unwrap()
    }

    /// Returns all assignments of coordinates to axes.
    fn assignments(axes: &[(Axis, u64)]) -> Vec<BTreeMap<Axis, u64>> {
        let Some(((axis, size), others)) = axes.split_first() else { return vec![BTreeMap::new()] };
        let mut all = Vec::new();
        for rest in assignments(others) {
            for at in 0..*size {
                let mut own = rest.clone();
                own.insert(axis.clone(), at);
                all.push(own);
            }
        }
        all
    }

    /// Returns for each element of the target the element of the source, element by element from the two cells.
    fn by_definition(row: &Row, sizes: &Sizes, rest: &[u64]) -> BTreeMap<Element, Element> {
        let [from, to] = [0, 1].map(|side| terms(&row.cells[side], sizes, rest));
        let mut found = BTreeMap::new();
        for (source, target) in from.iter().zip(&to) {
            let names = [(0, source), (1, target)]
                .map(|(side, term)| row.cells[side][term.pattern].name.axes().cloned().collect::<BTreeSet<Axis>>());
            let mut axes: BTreeSet<Axis> = names.iter().flatten().cloned().collect();
            axes.extend(source.axes.keys().chain(target.axes.keys()).chain(target.copies.keys()).cloned());
            let size = |axis: &Axis| match axis.strip_prefix("...") {
                Some(number) => rest[number.parse::<usize>().unwrap()],
                None => sizes.get(axis).unwrap(),
            };
            let axes: Vec<(Axis, u64)> = axes.into_iter().map(|axis| (axis.clone(), size(&axis))).collect();
            for at in assignments(&axes) {
                let element = |term: &Term, names: &BTreeSet<Axis>| -> Element {
                    let mut index = term.offsets.clone();
                    for (axis, (dim, step)) in term.axes.iter().chain(&term.copies) {
                        index[*dim] += at.get(axis).copied().unwrap_or(0) * step;
                    }
                    let name = names.iter().map(|axis| (axis.clone(), at[axis])).collect();
                    (term.pattern, name, index)
                };
                let previous = found.insert(element(target, &names[1]), element(source, &names[0]));
                assert_eq!(previous, None, "an element of the target has two sources");
            }
        }
        found
    }

    /// Returns the same from the pieces of every target tensor, and the number of pieces.
    fn by_pieces(row: &Row, sizes: &Sizes, rest: &[u64]) -> (BTreeMap<Element, Element>, usize) {
        let (mut found, mut number) = (BTreeMap::new(), 0);
        for (index, pattern) in row.cells[1].iter().enumerate() {
            let axes: Vec<(Axis, u64)> =
                pattern.name.axes().map(|axis| (axis.clone(), sizes.get(axis).unwrap())).collect();
            for coordinates in assignments(&axes) {
                let at = NameMatch { coordinates, rest: "".into() };
                let pieces = pieces([&row.cells[0], &row.cells[1]], (index, &at), sizes, rest, 0).unwrap();
                number += pieces.len();
                for piece in pieces {
                    let counts: Vec<(Axis, u64)> =
                        piece.target.iter().zip(0..).map(|(own, dim)| (format!("{dim}").into(), own.count)).collect();
                    for counted in assignments(&counts) {
                        let counted: Vec<u64> =
                            (0..piece.target.len()).map(|dim| counted[&Axis::from(dim.to_string())]).collect();
                        let target =
                            piece.target.iter().zip(&counted).map(|(own, at)| own.start + own.step * at).collect();
                        let mut source = piece.start.clone();
                        for ((dim, step), at) in piece.steps.iter().zip(&counted) {
                            if let Some(index) = source.get_mut(*dim) {
                                *index += step * at;
                            }
                        }
                        let element = (index, at.coordinates.clone(), target);
                        let previous = found.insert(element, (piece.pattern, piece.source.coordinates.clone(), source));
                        assert_eq!(previous, None, "two pieces have one element");
                    }
                }
            }
        }
        (found, number)
    }

    /// For each row: the cells, the sizes of axes, the sizes of the dims of `...`, and the number of pieces in each direction.
    #[test]
    fn pieces_are_the_elements_that_the_two_cells_define() {
        type Case<'a> = ([&'a [&'a str]; 2], &'a [(&'a str, u64)], &'a [u64], [usize; 2]);
        let cases: [Case<'_>; 16] = [
            ([&["a.{l}.w"], &["b.{l}.w"]], &[("l", 2)], &[3, 2], [2, 2]),
            ([&["w [i o]"], &["w [o i]"]], &[("i", 3), ("o", 4)], &[], [1, 1]),
            ([&["w [(h r j) ...]"], &["w [(h j r) ...]"]], &[("h", 2), ("r", 2), ("j", 3)], &[4], [4, 4]),
            ([&["{e}.w [f d]"], &["w [e f d]"]], &[("e", 3), ("f", 2), ("d", 2)], &[], [3, 3]),
            ([&["{e}.{g:gate,up} [f d]"], &["w [e (g f) d]"]], &[("e", 2), ("g", 2), ("f", 3), ("d", 2)], &[], [4, 4]),
            ([&["w [(e d) f]"], &["{e}.w [f d]"]], &[("e", 2), ("f", 3), ("d", 4)], &[], [2, 2]),
            ([&["w [(e d)]"], &["w [e d]"]], &[("e", 2), ("d", 4)], &[], [1, 2]),
            (
                [&["qkv [(h d + k d + k d) ...]"], &["q [(h d) ...]", "k [(k d) ...]", "v [(k d) ...]"]],
                &[("h", 4), ("k", 2), ("d", 3)],
                &[2],
                [3, 3],
            ),
            (
                [&["qkv [(k (p + 1 + 1) d) i]"], &["q [(k p d) i]", "k [(k d) i]", "v [(k d) i]"]],
                &[("k", 2), ("p", 3), ("d", 2), ("i", 2)],
                &[],
                [6, 6],
            ),
            ([&["w [i (x o)]"], &["{x:q,k,v} [o i]"]], &[("x", 3), ("o", 2), ("i", 2)], &[], [3, 3]),
            ([&["w [(f g)]"], &["w [(g f)]"]], &[("f", 5), ("g", 2)], &[], [2, 2]),
            ([&["w [v d]"], &["w [(v + _pad) d]"]], &[("v", 3), ("pad", 2), ("d", 2)], &[], [1, 1]),
            ([&["w [(k d) i]"], &["w [(k =c d) i]"]], &[("k", 2), ("c", 3), ("d", 2), ("i", 2)], &[], [6, 2]),
            (
                [&["w [o (c t y x)]"], &["w [o c t y x]"]],
                &[("o", 2), ("c", 3), ("t", 2), ("y", 2), ("x", 2)],
                &[],
                [1, 8],
            ),
            ([&["w [a 1 b]"], &["w [b a]"]], &[("a", 2), ("b", 3)], &[], [1, 1]),
            ([&["w [(a b c)]"], &["w [(c b a)]"]], &[("a", 2), ("b", 1), ("c", 4)], &[], [2, 2]),
        ];
        for (cells, known, rest, expected) in cases {
            for (cells, expected) in [(cells, expected[0]), ([cells[1], cells[0]], expected[1])] {
                let (row, sizes) = (row(cells), sizes(known));
                let (found, number) = by_pieces(&row, &sizes, rest);
                assert_eq!(found, by_definition(&row, &sizes, rest), "{cells:?}");
                assert!(!found.is_empty());
                assert_eq!(number, expected, "{cells:?}");
            }
        }
    }
}
