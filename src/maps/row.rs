//! A row of a map: for each side, the tensors that hold the same elements.
//!
//! A row is an equation. Elements with equal coordinates on all axes are equal. So every axis of one side is on each
//! other side, too, in a dim or in a name, except padding and copies, which only one side has.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use super::cell::{Axis, CellError, Dim, Factor, NamePart, Offset, Sum, TensorPattern};

/// A row of a map.
#[derive(Clone, Debug)]
pub struct Row {
    /// The line of the row in its file.
    pub line: usize,
    /// For each side of the map, in the order of the map's sides: the tensors. Empty if the side does not have them.
    pub cells: Vec<Cell>,
    /// For each side, the number that is added to the values of the other sides.
    pub add: Vec<f64>,
}

/// The tensors of a row on one side. If there are several, the dim with a sum on the other sides concatenates them.
pub type Cell = Vec<TensorPattern>;

/// A fault in a row. The message names the sides by their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowFault {
    pub problem: String,
    pub hint: String,
}

impl RowFault {
    fn new(problem: impl Display, hint: impl Into<String>) -> Self {
        Self { problem: problem.to_string(), hint: hint.into() }
    }

    /// Describes a cell that does not follow the grammar.
    pub fn of_cell(side: &str, error: CellError) -> Self {
        let CellError { expected, found } = error;
        Self::new(
            format!("{side}: expected {expected}, found {found}"),
            "docs/reference/map-file.md has the grammar of cells",
        )
    }
}

impl Row {
    /// Completes the variables in the names of a row, and checks the row. `sides` are the names of the sides.
    ///
    /// # Errors
    /// [`RowFault`] if an axis is on one side only, or if the lists of words of one variable differ in length.
    pub fn complete(&mut self, sides: &[&str]) -> Result<(), RowFault> {
        self.complete_variables(sides)?;
        let given: Vec<usize> = (0..self.cells.len()).filter(|side| !self.cells[*side].is_empty()).collect();
        let Some((&first, others)) = given.split_first() else {
            return Err(RowFault::new("expected a cell on at least one side, found none", "remove the row"));
        };
        for &side in &given {
            check_list(sides[side], &self.cells[side])?;
        }
        for &other in others {
            self.compare([first, other], sides)?;
        }
        Ok(())
    }

    /// Returns whether the row has tensors on both sides. If only one side has them, a conversion between the sides drops
    /// them.
    pub fn is_on(&self, side: usize) -> bool {
        !self.cells[side].is_empty()
    }

    /// Replaces each `{x}` by the words that another cell gives for `x`, or by a number if no cell gives words.
    fn complete_variables(&mut self, sides: &[&str]) -> Result<(), RowFault> {
        let mut known: BTreeMap<Axis, (usize, Vec<Box<str>>)> = BTreeMap::new();
        for (side, cell) in self.cells.iter().enumerate() {
            for part in cell.iter().flat_map(|tensor| &tensor.name.parts) {
                let NamePart::Words { axis, words } = part else { continue };
                match known.get(axis) {
                    None => {
                        known.insert(axis.clone(), (side, words.clone()));
                    }
                    Some((other, theirs)) if theirs.len() != words.len() => {
                        return Err(RowFault::new(
                            format!(
                                "{}: {} words for {{{axis}}}, but {} has {}",
                                sides[side],
                                words.len(),
                                sides[*other],
                                theirs.len()
                            ),
                            "give as many words on each side; they pair up in their order",
                        ));
                    }
                    Some(_) => {}
                }
            }
        }
        for part in self.cells.iter_mut().flatten().flat_map(|tensor| &mut tensor.name.parts) {
            if let NamePart::Variable { axis } = part {
                *part = match known.get(axis) {
                    Some((_, words)) => NamePart::Words { axis: axis.clone(), words: words.clone() },
                    None => NamePart::Number { axis: axis.clone(), offset: Offset::Number(0) },
                };
            }
        }
        Ok(())
    }

    /// Checks that two sides have the same axes: as a whole, and in each pair of terms.
    fn compare(&self, pair: [usize; 2], sides: &[&str]) -> Result<(), RowFault> {
        let [left, right] = pair.map(|side| (sides[side], &self.cells[side]));
        self.compare_terms(pair, sides)?;
        for ((name, cell), (other_name, other)) in [(left, right), (right, left)] {
            let theirs = axes(other);
            if let Some(axis) = axes(cell).into_iter().find(|axis| !theirs.contains(axis)) {
                return Err(RowFault::new(
                    format!("{name} has the axis {axis}, and {other_name} does not"),
                    format!("name {axis} on both sides, or write it as _{axis} (padding) or ={axis} (copies)"),
                ));
            }
            let has_rest = |cell: &Cell| cell.iter().any(TensorPattern::has_rest);
            if has_rest(cell) && !other.iter().all(TensorPattern::has_rest) {
                return Err(RowFault::new(
                    format!("{name} has `...`, and {other_name} does not"),
                    "write `...` on both sides, or name each dim on both sides",
                ));
            }
            let has_open_name = |cell: &Cell| cell.iter().any(|tensor| tensor.name.has_rest());
            if has_open_name(cell) && !has_open_name(other) {
                return Err(RowFault::new(
                    format!("the name on {name} ends in `**`, and on {other_name} it does not"),
                    "end the names of both sides in `**`",
                ));
            }
        }
        Ok(())
    }
}

impl Row {
    /// Checks that the terms of two sides pair up: the first with the first, and so on, each with the same axes.
    fn compare_terms(&self, pair: [usize; 2], sides: &[&str]) -> Result<(), RowFault> {
        let [left, right] = pair.map(|side| terms(sides[side], &self.cells[side]));
        let (left, right) = (left?, right?);
        let [one, other] = pair.map(|side| sides[side]);
        if left.len() != right.len() {
            return Err(RowFault::new(
                format!("{one} has {} terms, and {other} has {}", left.len(), right.len()),
                "a sum has one term for each tensor of the list on the other side, in the same order",
            ));
        }
        for (number, (left, right)) in (1..).zip(left.iter().zip(&right)) {
            if left != right {
                let list = |axes: &BTreeSet<&Axis>| axes.iter().map(|axis| &***axis).collect::<Vec<_>>().join(", ");
                return Err(RowFault::new(
                    format!("term {number} has the axes {} on {one}, and {} on {other}", list(left), list(right)),
                    "write the terms in the same order on both sides, each with the same axes",
                ));
            }
        }
        Ok(())
    }
}

/// The maximum number of terms of a cell. A product of sums has as many terms as the product of their numbers.
const MAX_TERMS: usize = 4096;

/// Returns the axes of each term of a cell, without terms of padding: the axes of the tensor's name and those of the term's
/// factors. Fails if a term has an axis twice, or if there are too many terms.
fn terms<'c>(side: &str, cell: &'c Cell) -> Result<Vec<BTreeSet<&'c Axis>>, RowFault> {
    let mut all = Vec::new();
    for tensor in cell {
        // For each term, its axes, and whether it is padding.
        let mut own: Vec<(BTreeSet<&Axis>, bool)> = vec![(tensor.name.axes().collect(), false)];
        for dim in &tensor.dims {
            if let Dim::Sum(sum) = dim {
                own = with_sum(side, tensor, own, sum)?;
            }
        }
        all.extend(own.into_iter().filter(|(_, is_padding)| !is_padding).map(|(axes, _)| axes));
    }
    Ok(all)
}

fn with_sum<'c>(
    side: &str,
    tensor: &TensorPattern,
    terms: Vec<(BTreeSet<&'c Axis>, bool)>,
    sum: &'c Sum,
) -> Result<Vec<(BTreeSet<&'c Axis>, bool)>, RowFault> {
    let mut found = Vec::new();
    for term in terms {
        for product in &sum.0 {
            let sums =
                product.0.iter().filter(|factor| matches!(factor, Factor::Group(inner) if has_terms(inner))).count();
            if sums > 1 {
                return Err(RowFault::new(
                    format!("{side}: `{tensor}` has a product of {sums} sums"),
                    "write one sum in a product; the order of the terms would not be clear",
                ));
            }
            let mut own = vec![term.clone()];
            for factor in &product.0 {
                match factor {
                    Factor::One | Factor::Copies(_) => {}
                    Factor::Padding(_) => own.iter_mut().for_each(|(_, is_padding)| *is_padding = true),
                    Factor::Group(inner) => own = with_sum(side, tensor, own, inner)?,
                    Factor::Axis(axis) => {
                        if own.iter_mut().any(|(axes, _)| !axes.insert(axis)) {
                            return Err(RowFault::new(
                                format!("{side}: the axis {axis} occurs twice in a term of `{tensor}`"),
                                "give each factor of a term its own axis",
                            ));
                        }
                    }
                }
            }
            found.extend(own);
            if found.len() > MAX_TERMS {
                return Err(RowFault::new(
                    format!("{side}: `{tensor}` has more than {MAX_TERMS} terms"),
                    "write the terms as a list of tensors in several rows",
                ));
            }
        }
    }
    Ok(found)
}

/// Returns the axes of a cell: of its names and of its dims, without padding and copies.
fn axes(cell: &Cell) -> Vec<&Axis> {
    let mut all: Vec<&Axis> = Vec::new();
    for tensor in cell {
        for axis in tensor.name.axes().chain(tensor.dim_axes()) {
            if !all.contains(&axis) {
                all.push(axis);
            }
        }
    }
    all
}

/// Checks that each axis has one position in a tensor, and that the tensors of a list have the same variables in their names.
fn check_list(side: &str, cell: &Cell) -> Result<(), RowFault> {
    for tensor in cell {
        let sums = tensor.dims.iter().filter(|dim| matches!(dim, Dim::Sum(sum) if has_terms(sum))).count();
        if sums > 1 {
            return Err(RowFault::new(
                format!("{side}: `{tensor}` has sums in {sums} dims"),
                "write a row with a sum in one dim; split the tensor in two rows of two maps",
            ));
        }
        for axis in tensor.name.axes() {
            if tensor.dim_axes().contains(&axis) {
                return Err(RowFault::new(
                    format!("{side}: the axis {axis} is in the name and in the dims of `{tensor}`"),
                    "use another name for one of the two",
                ));
            }
        }
        for dim in &tensor.dims {
            let Dim::Sum(sum) = dim else { continue };
            check_terms(side, tensor, sum, &[])?;
        }
    }
    Ok(())
}

/// Returns whether a sum, or a sum in it, has several terms.
fn has_terms(sum: &Sum) -> bool {
    let is_group = |factor: &Factor| matches!(factor, Factor::Group(inner) if has_terms(inner));
    sum.0.len() > 1 || sum.0.iter().flat_map(|product| &product.0).any(is_group)
}

/// Checks that no axis occurs twice in one term. Different terms may have the same axes.
fn check_terms(side: &str, tensor: &TensorPattern, sum: &Sum, outer: &[&Axis]) -> Result<(), RowFault> {
    for product in &sum.0 {
        let mut seen = outer.to_vec();
        for factor in &product.0 {
            match factor {
                Factor::Axis(axis) | Factor::Padding(axis) | Factor::Copies(axis) => {
                    if seen.contains(&axis) {
                        return Err(RowFault::new(
                            format!("{side}: the axis {axis} occurs twice in a term of `{tensor}`"),
                            "give each factor of a term its own axis",
                        ));
                    }
                    seen.push(axis);
                }
                Factor::One => {}
                Factor::Group(inner) => check_terms(side, tensor, inner, &seen)?,
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(cells: [&[&str]; 2]) -> Option<String> {
        let parse = |texts: &[&str]| texts.iter().map(|text| TensorPattern::parse("", text).unwrap()).collect();
        let mut row = Row { line: 1, cells: cells.map(parse).into(), add: vec![0.0; 2] };
        row.complete(&["a", "b"]).err().map(|fault| fault.problem)
    }

    #[test]
    fn cells_whose_terms_do_not_pair_up_are_faults() {
        let cases: [([&[&str]; 2], &str); 5] = [
            ([&["qkv [(h d + k d)]"], &["q [(h d)]", "k [(k d)]", "v [(k d)]"]], "a has 2 terms, and b has 3"),
            ([&["q [(h d) i]", "k [(k d) i]"], &["x [(k d + h d) i]"]], "term 1 has the axes d, h, i on a"),
            ([&["q [h k]", "p [h k]"], &["x [(h + h k)]"]], "term 1 has the axes h, k on a, and h on b"),
            ([&["w [a a]"], &["v [a]"]], "the axis a occurs twice in a term"),
            ([&["w [a ...]", "v [a]"], &["x [(a + a) ...]"]], "b has `...`, and a does not"),
        ];
        for (cells, expected) in cases {
            let found = problem(cells).unwrap_or_default();
            assert!(found.contains(expected), "{cells:?}: {found}");
        }
        assert_eq!(problem([&["qkv [(k (p + 1 + 1) d)]"], &["q [(k p d)]", "k [(k d)]", "v [(k d)]"]]), None);
    }

    #[test]
    fn product_of_many_sums_is_a_fault() {
        let product = "(a + a)".repeat(24);
        let cells: [&[&str]; 2] = [&[&format!("w [({product})]")], &["v [a]"]];
        assert!(problem(cells).is_some());
    }
}
