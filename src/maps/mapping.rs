//! Applies a map to the names and shapes of a model: which rows match, which tensors of the other side follow, and which sizes
//! their axes have.
//!
//! Each row is applied once for each combination of the coordinates that the names of both sides have. Such an application has
//! all tensors of the source that hold one part of the equation (a layer, for example), and the tensors of the target that
//! hold the same elements. Invariant: an application has each of its source tensors exactly once, and the sizes of all axes of
//! its target are known.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::cell::{Axis, Dim, NamePart, Offset, Sum, TensorPattern};
use super::error::{MapError, is_scale};
use super::file::WeightMap;
use super::names::NameMatch;
use super::row::Row;
use super::sizes::{DimFault, KnownSize, SizeOrigin, Sizes};

/// The maximum number of elements of a target tensor. A tensor of one-byte elements may have so many bytes.
const MAX_ELEMENTS: u64 = 1 << 60;

/// The maximum number of tensors that one application of a row may make.
const MAX_TENSORS: u64 = 1 << 20;

/// A tensor of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// The name of the tensor within its model.
    pub name: String,
    pub shape: Vec<u64>,
}

/// The result of a map for the tensors of a model.
#[derive(Debug)]
pub struct Mapping {
    /// The applications of rows, in the order of the rows and of their coordinates.
    pub applications: Vec<Application>,
    /// The tensors of the source that the target does not have, as indices, with the indices of their rows.
    pub dropped: Vec<(usize, usize)>,
    /// Tied tensors that the source leaves out and the target needs. The tensor with the index `len + i`, where `len` is the
    /// number of tensors of the source, has the values of the tensor with the index `tied[i]`.
    pub tied: Vec<usize>,
    /// The sizes of the map, with their origins.
    pub sizes: Sizes,
}

/// One application of a row.
#[derive(Debug)]
pub struct Application {
    /// The index of the row.
    pub row: usize,
    /// The source tensors.
    pub sources: Vec<AppliedTensor<usize>>,
    /// The target tensors with their names and shapes.
    pub targets: Vec<AppliedTensor<SourceTensor>>,
    /// The sizes of all axes.
    pub sizes: Sizes,
    /// The sizes of the dims that `...` stands for.
    pub rest: Vec<u64>,
}

/// A tensor of an application.
#[derive(Debug)]
pub struct AppliedTensor<T> {
    /// The index of the tensor's pattern in its cell.
    pub pattern: usize,
    /// The coordinates of the tensor on the axes of its name.
    pub at: NameMatch,
    /// The tensor: an index in the source, or a name and a shape.
    pub tensor: T,
}

/// The numbers of names of a model that the rows of one side match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fit {
    /// Names that a row matches without `**` at the start.
    pub named: usize,
    /// Names that only a row of the name `**` matches.
    pub open: usize,
    /// Names that no row matches.
    pub unmatched: Vec<String>,
    /// The indices of the rows that match.
    pub rows: BTreeSet<usize>,
}

impl WeightMap {
    /// Counts the names that the rows of a side match.
    pub fn fit<'n>(&self, side: usize, names: impl Iterator<Item = &'n str>, sizes: &Sizes) -> Fit {
        let (mut fit, rows) = (Fit::default(), RowIndex::new(self, side));
        for name in names {
            match rows.find(name, sizes) {
                None => fit.unmatched.push(name.to_owned()),
                Some((row, pattern, _)) => {
                    fit.rows.insert(row);
                    *(if pattern.name.is_open() { &mut fit.open } else { &mut fit.named }) += 1;
                }
            }
        }
        fit
    }

    /// Returns the number of names that rows of a side match by more than `**`, if every name matches a row and this number is not
    /// zero. Stops at the first name without a row.
    pub fn matches_all(&self, side: usize, names: &[String], sizes: &Sizes) -> Option<usize> {
        let (mut named, rows) = (0, RowIndex::new(self, side));
        for name in names {
            let (_, pattern, _) = rows.find(name, sizes)?;
            named += usize::from(!pattern.name.is_open());
        }
        (named > 0).then_some(named)
    }

    /// Maps the tensors of a model from one side to another. `sizes` are the sizes that are known without the tensors.
    ///
    /// # Errors
    /// [`MapError`] if a name has no row, if tensors that belong together are missing, or if the shapes do not fit the map.
    pub fn apply(&self, [from, to]: [usize; 2], source: &[SourceTensor], sizes: Sizes) -> Result<Mapping, MapError> {
        let mut groups: BTreeMap<(usize, NameMatch), Vec<AppliedTensor<usize>>> = BTreeMap::new();
        self.check_offsets(from, &sizes)?;
        let rows = RowIndex::new(self, from);
        let (added, tied) = self.missing_ties([from, to], source, &rows, &sizes);
        let tensors: Vec<SourceTensor> = source.iter().cloned().chain(added).collect();
        let mut mapping = Mapping { applications: Vec::new(), dropped: Vec::new(), tied, sizes };
        let mut unmatched = Vec::new();
        for (index, tensor) in tensors.iter().enumerate() {
            let Some((row, _, (pattern, at))) = rows.find(&tensor.name, &mapping.sizes) else {
                unmatched.push(tensor.name.as_str());
                continue;
            };
            if !self.rows[row].is_on(to) {
                // A row with a cell on one side only leaves its tensors out.
                let sides = (0..self.sides.len()).filter(|side| self.rows[row].is_on(*side));
                if is_scale(&tensor.name) && sides.count() > 1 {
                    let [from, to] = [from, to].map(|side| self.sides[side].name.clone());
                    return Err(MapError::QuantisedLeftOut { name: tensor.name.clone(), from, to });
                }
                if index < source.len() {
                    mapping.dropped.push((index, row));
                }
                continue;
            }
            let carried = self.rows[row].carried([from, to]);
            let mut key = at.clone();
            key.coordinates.retain(|axis, _| carried.contains(axis));
            groups.entry((row, key)).or_default().push(AppliedTensor { pattern, at, tensor: index });
        }
        if let Some(first) = unmatched.first() {
            return Err(self.no_row(from, first, &unmatched, source.len()));
        }
        let mut open: Vec<RowGroup> =
            groups.into_iter().map(|((row, key), sources)| RowGroup { row, key, sources }).collect();
        // The shapes of one row may give a size that another row needs, so the rows are applied until nothing changes.
        while !open.is_empty() {
            let (mut later, mut first_fault, before) = (Vec::new(), None, open.len());
            for group in open {
                match self.solve(&group, [from, to], &tensors, &mut mapping.sizes) {
                    Ok(solved) => mapping.applications.push(group.applied(solved)),
                    Err(error) if error.is_unknown_size() => {
                        first_fault.get_or_insert(error);
                        later.push(group);
                    }
                    Err(error) => return Err(error),
                }
            }
            if let Some(error) = first_fault.filter(|_| later.len() == before) {
                return Err(error);
            }
            open = later;
        }
        mapping.applications.sort_by_key(|application| application.row);
        self.check_names(to, &mapping)?;
        Ok(mapping)
    }

    /// Checks that each size in an offset of a name (`{m+l}`) on a side is known. Without the size, the row whose number has no
    /// offset would match all names.
    fn check_offsets(&self, side: usize, sizes: &Sizes) -> Result<(), MapError> {
        for pattern in self.rows.iter().flat_map(|row| &row.cells[side]) {
            for part in &pattern.name.parts {
                if let NamePart::Number { offset: Offset::Size(size), .. } = part
                    && sizes.get(size).is_none()
                {
                    return Err(MapError::UnknownOffset { pattern: pattern.to_string(), size: size.clone() });
                }
            }
        }
        Ok(())
    }

    /// Returns the tied tensors that the source leaves out although the target needs them, and for each of them the index of
    /// the tensor that it is tied to.
    fn missing_ties(
        &self,
        [from, to]: [usize; 2],
        source: &[SourceTensor],
        rows: &RowIndex<'_>,
        sizes: &Sizes,
    ) -> (Vec<SourceTensor>, Vec<usize>) {
        let mut missing = (Vec::new(), Vec::new());
        for (name, tied_to) in &self.sides[from].tied {
            let position = |name: &str| source.iter().position(|tensor| tensor.name == name);
            let (None, Some(index)) = (position(name), position(tied_to)) else { continue };
            let is_tied_on_target = rows.find(name, sizes).is_some_and(|(row, _, (_, at))| {
                let names = self.rows[row].cells[to].iter().filter_map(|pattern| pattern.name.name(&at, sizes));
                let ties = &self.sides[to].tied;
                names.into_iter().any(|name| ties.iter().any(|(tied, _)| *tied == name))
            });
            if !is_tied_on_target {
                missing.0.push(SourceTensor { name: name.clone(), shape: source[index].shape.clone() });
                missing.1.push(index);
            }
        }
        missing
    }

    /// Finds the sizes of all axes of a group, and the target tensors. Sizes that the map names are added to `global`.
    fn solve(
        &self,
        group: &RowGroup,
        [from, to]: [usize; 2],
        tensors: &[SourceTensor],
        global: &mut Sizes,
    ) -> Result<Solved, MapError> {
        let row = &self.rows[group.row];
        let carried = row.carried([from, to]);
        let mut sizes = global.clone();
        self.count_names(group.row, from, &group.sources, &carried, &mut sizes)?;
        // Words in a name on any side give the size of their axis, also if neither of the two sides has it in a name.
        for pattern in row.cells.iter().flatten() {
            for axis in pattern.name.axes().filter(|axis| !carried.contains(axis)) {
                if let Some(count) = pattern.name.word_count(axis) {
                    let origin = SizeOrigin::Names(pattern.to_string());
                    sizes.insert(axis, KnownSize { value: count, origin })?;
                }
            }
        }
        let shapes = Shapes::new(&row.cells[from], &group.sources, tensors)?;
        shapes.solve(&mut sizes)?;
        for rule in &self.sizes {
            if let Some(known) = sizes.known(&rule.axis) {
                global.insert(&rule.axis, known.clone())?;
            }
        }
        let mut targets = Vec::new();
        for (index, pattern) in row.cells[to].iter().enumerate() {
            let axes: Vec<&Axis> = pattern.name.axes().filter(|axis| !carried.contains(axis)).collect();
            let shape = target_shape(pattern, &sizes, &shapes.rest)?;
            for at in combinations(&axes, &group.key, &sizes, pattern)? {
                let Some(name) = pattern.name.name(&at, &sizes) else {
                    return Err(unknown_offset(pattern, &sizes));
                };
                targets.push(AppliedTensor { pattern: index, at, tensor: SourceTensor { name, shape: shape.clone() } });
            }
        }
        Ok(Solved { sizes, rest: shapes.rest, targets })
    }

    /// Finds the sizes of the axes that only the names of the source have, and checks that each combination of their
    /// coordinates is there, for each tensor of the cell.
    fn count_names(
        &self,
        row: usize,
        from: usize,
        sources: &[AppliedTensor<usize>],
        carried: &BTreeSet<&Axis>,
        sizes: &mut Sizes,
    ) -> Result<(), MapError> {
        let cell = &self.rows[row].cells[from];
        let mut expected: u64 = 0;
        let mut first_missing = None;
        for (index, pattern) in cell.iter().enumerate() {
            let axes: Vec<&Axis> = pattern.name.axes().filter(|axis| !carried.contains(axis)).collect();
            for axis in &axes {
                let largest = || {
                    let own = sources.iter().filter_map(|source| source.at.coordinates.get(*axis));
                    own.max().map_or(0, |largest| largest.saturating_add(1))
                };
                let value = pattern.name.word_count(axis).unwrap_or_else(largest);
                let known = KnownSize { value, origin: SizeOrigin::Names(pattern.to_string()) };
                if let Some(size) =
                    sizes.get(axis).filter(|size| *size != value && pattern.name.word_count(axis).is_none())
                {
                    if value > size {
                        sizes.insert(axis, known)?;
                    }
                    continue;
                }
                sizes.insert(axis, known)?;
            }
            let present: BTreeSet<&NameMatch> =
                sources.iter().filter(|source| source.pattern == index).map(|source| &source.at).collect();
            let count = axes.iter().try_fold(1_u64, |count, axis| count.checked_mul(sizes.get(axis)?));
            expected = expected.saturating_add(count.unwrap_or(u64::MAX));
            if count != Some(present.len() as u64) {
                let key = sources.first().map(|source| source.at.clone()).unwrap_or_default();
                let mut all = Coordinates::new(&axes, &key, sizes);
                let missing = std::iter::from_fn(|| all.next()).find(|at| !present.contains(at));
                first_missing =
                    first_missing.or(missing.map(|at| (pattern.name.name(&at, sizes).unwrap_or_default(), pattern)));
            }
        }
        match first_missing {
            None => Ok(()),
            Some((name, pattern)) => {
                Err(MapError::Missing { name, pattern: pattern.to_string(), expected, found: sources.len() as u64 })
            }
        }
    }

    /// Checks that no two applications make a tensor of the same name, and that the row of each target tensor is the first row that
    /// matches its name. Otherwise the conversion back would apply another row.
    fn check_names(&self, to: usize, mapping: &Mapping) -> Result<(), MapError> {
        let (mut made, rows): (HashMap<&str, usize>, _) = (HashMap::new(), RowIndex::new(self, to));
        for application in &mapping.applications {
            for target in &application.targets {
                if let Some(other) = made.insert(&target.tensor.name, application.row) {
                    let lines = [other, application.row].map(|row| self.rows[row].line);
                    let (name, file) = (target.tensor.name.clone(), self.name.clone());
                    return Err(MapError::SameName { name, file, lines });
                }
                let first = rows.find(&target.tensor.name, &application.sizes).map(|(row, ..)| row);
                if let Some(first) = first.filter(|first| *first < application.row)
                    && self.rows[first].cells != self.rows[application.row].cells
                {
                    let lines = [application.row, first].map(|row| self.rows[row].line);
                    let (name, file) = (target.tensor.name.clone(), self.name.clone());
                    return Err(MapError::Shadowed { name, file, lines });
                }
            }
        }
        Ok(())
    }

    fn no_row(&self, from: usize, first: &str, unmatched: &[&str], all: usize) -> MapError {
        let side = self.sides[from].name.clone();
        if unmatched.len() == all {
            return MapError::NothingMatches { family: self.family.clone(), side, name: first.to_owned() };
        }
        let patterns = self.rows.iter().flat_map(|row| &row.cells[from]).map(|pattern| pattern.name.to_string());
        let nearest = patterns.min_by_key(|pattern| strsim::damerau_levenshtein(pattern, first));
        MapError::NoRow {
            family: self.family.clone(),
            side,
            name: first.to_owned(),
            more: unmatched.len() - 1,
            nearest: nearest.unwrap_or_default(),
        }
    }
}

/// The patterns of one side by the text after their last variable, so that a name is compared with few of them.
struct RowIndex<'m> {
    map: &'m WeightMap,
    side: usize,
    /// For each text at the end of patterns, the rows and the indices in their cells, in order.
    by_end: HashMap<&'m str, Vec<(usize, usize)>>,
    /// The lengths of these texts.
    lengths: BTreeSet<usize>,
}

impl<'m> RowIndex<'m> {
    fn new(map: &'m WeightMap, side: usize) -> Self {
        let mut by_end: HashMap<&str, Vec<(usize, usize)>> = HashMap::new();
        for (row, Row { cells, .. }) in map.rows.iter().enumerate() {
            for (index, pattern) in cells[side].iter().enumerate() {
                by_end.entry(pattern.name.end()).or_default().push((row, index));
            }
        }
        let lengths = by_end.keys().map(|end| end.len()).collect();
        Self { map, side, by_end, lengths }
    }

    /// Returns the first row that matches a name, with the pattern and the coordinates.
    fn find(&self, name: &str, sizes: &Sizes) -> Option<(usize, &'m TensorPattern, (usize, NameMatch))> {
        let ends = self.lengths.iter().filter_map(|length| name.get(name.len().checked_sub(*length)?..));
        let mut first: Option<((usize, usize), &TensorPattern, NameMatch)> = None;
        for at in ends.filter_map(|end| self.by_end.get(end)) {
            let before = |at: &&(usize, usize)| first.as_ref().is_none_or(|(known, ..)| *at < known);
            let found = at.iter().take_while(before).find_map(|&(row, index)| {
                let pattern = &self.map.rows[row].cells[self.side][index];
                Some(((row, index), pattern, pattern.name.matches(name, sizes)?))
            });
            first = found.or(first);
        }
        first.map(|((row, index), pattern, found)| (row, pattern, (index, found)))
    }
}

/// The source tensors to which a row is applied at once, because they have equal coordinates on the carried axes.
struct RowGroup {
    row: usize,
    /// The coordinates on the axes that are in the names of both sides.
    key: NameMatch,
    sources: Vec<AppliedTensor<usize>>,
}

/// The sizes and the target tensors of a group.
struct Solved {
    sizes: Sizes,
    rest: Vec<u64>,
    targets: Vec<AppliedTensor<SourceTensor>>,
}

impl RowGroup {
    fn applied(self, solved: Solved) -> Application {
        let Solved { sizes, rest, targets } = solved;
        Application { row: self.row, sources: self.sources, targets, sizes, rest }
    }
}

/// The shapes of the source tensors of a group: an equation for each dim, and the sizes of the dims of `...`.
struct Shapes<'a> {
    /// For each dim, the tensor, the sum of its axes, and its size.
    equations: Vec<(&'a SourceTensor, &'a Sum, u64)>,
    rest: Vec<u64>,
}

impl<'a> Shapes<'a> {
    fn new(
        cell: &'a [TensorPattern],
        sources: &[AppliedTensor<usize>],
        tensors: &'a [SourceTensor],
    ) -> Result<Self, MapError> {
        let mut equations = Vec::new();
        let mut rest: Option<(&SourceTensor, &[u64])> = None;
        for source in sources {
            let (pattern, tensor) = (&cell[source.pattern], &tensors[source.tensor]);
            let SourceTensor { name, shape } = tensor;
            let explicit = pattern.dims.iter().filter(|dim| **dim != Dim::Rest).count();
            let fits = if pattern.has_rest() { shape.len() >= explicit } else { shape.len() == explicit };
            if !fits {
                let (name, shape) = (name.clone(), shape.clone());
                return Err(MapError::DimCount { name, shape, pattern: pattern.to_string() });
            }
            let mut at = 0;
            for dim in &pattern.dims {
                let Dim::Sum(sum) = dim else {
                    let own = &shape[at..at + shape.len() - explicit];
                    at += own.len();
                    let (other, known) = *rest.get_or_insert((tensor, own));
                    if known != own {
                        let pair = [other, tensor];
                        let (names, shapes) = (pair.map(|of| of.name.clone()), pair.map(|of| of.shape.clone()));
                        return Err(MapError::RestDiffers { names, shapes });
                    }
                    continue;
                };
                equations.push((tensor, sum, shape[at]));
                at += 1;
            }
        }
        Ok(Self { equations, rest: rest.map(|(_, rest)| rest.to_vec()).unwrap_or_default() })
    }

    /// Solves the equations, and adds the solved sizes to `sizes`.
    fn solve(&self, sizes: &mut Sizes) -> Result<(), MapError> {
        loop {
            let (mut has_changed, mut unknown) = (false, None);
            for (tensor, sum, size) in &self.equations {
                let SourceTensor { name, shape } = *tensor;
                let dim = || Dim::Sum((*sum).clone()).to_string();
                match sizes.solve(sum, *size) {
                    Ok(None) => {}
                    Ok(Some((axis, value))) => {
                        sizes.insert(&axis, KnownSize { value, origin: SizeOrigin::Shape(name.clone()) })?;
                        has_changed = true;
                    }
                    Err(DimFault::Unknown(axes)) => {
                        let (name, shape) = (name.clone(), shape.clone());
                        unknown.get_or_insert_with(|| MapError::UnknownSize { name, shape, dim: dim(), axes });
                    }
                    Err(fault) => {
                        let known = describe_sizes(sizes, sum);
                        let (name, fault) = (name.clone(), Box::new(fault));
                        return Err(MapError::Dim { name, dim: dim(), size: *size, fault, known });
                    }
                }
            }
            match unknown {
                None => return Ok(()),
                Some(error) if !has_changed => return Err(error),
                Some(_) => {}
            }
        }
    }
}

/// Describes the known sizes of the axes of a sum: `h is 5 by options::set`.
fn describe_sizes(sizes: &Sizes, sum: &Sum) -> Vec<String> {
    let mut described = Vec::new();
    for axis in sum.axes() {
        if let Some(KnownSize { value, origin }) = sizes.known(axis) {
            described.push(format!("{axis} is {value} by {origin}"));
        }
    }
    described
}

impl Row {
    /// Returns the axes that are in the names of both sides.
    fn carried(&self, [from, to]: [usize; 2]) -> BTreeSet<&Axis> {
        let axes =
            |side: usize| self.cells[side].iter().flat_map(|pattern| pattern.name.axes()).collect::<BTreeSet<_>>();
        axes(from).intersection(&axes(to)).copied().collect()
    }
}

/// Returns the error about a name that cannot be written, because the size in one of its offsets is unknown.
fn unknown_offset(pattern: &TensorPattern, sizes: &Sizes) -> MapError {
    let unknown = pattern.name.parts.iter().find_map(|part| match part {
        NamePart::Number { offset: Offset::Size(size), .. } if sizes.get(size).is_none() => Some(size.clone()),
        _ => None,
    });
    MapError::UnknownOffset { pattern: pattern.to_string(), size: unknown.unwrap_or_else(|| "".into()) }
}

/// Returns the shape of a target tensor.
fn target_shape(pattern: &TensorPattern, sizes: &Sizes, rest: &[u64]) -> Result<Vec<u64>, MapError> {
    let mut shape = Vec::new();
    let too_large = || MapError::TooLarge { pattern: pattern.to_string() };
    for dim in &pattern.dims {
        match dim {
            Dim::Rest => shape.extend(rest),
            Dim::Sum(sum) => match sizes.value(sum).map(u64::try_from) {
                Some(Ok(size)) => shape.push(size),
                Some(Err(_)) => return Err(too_large()),
                None => {
                    let axes = sum.axes().into_iter().filter(|axis| sizes.get(axis).is_none()).cloned().collect();
                    return Err(MapError::UnknownTargetSize { pattern: pattern.to_string(), axes });
                }
            },
        }
    }
    // Without zeros, so that each dim and each step within a dim is bounded, too.
    let elements = shape.iter().try_fold(1_u64, |elements, size| elements.checked_mul((*size).max(1)));
    if elements.is_none_or(|elements| elements > MAX_ELEMENTS) {
        return Err(too_large());
    }
    Ok(shape)
}

/// Returns all combinations of coordinates on these axes, each added to the coordinates `key`.
fn combinations(
    axes: &[&Axis],
    key: &NameMatch,
    sizes: &Sizes,
    pattern: &TensorPattern,
) -> Result<Vec<NameMatch>, MapError> {
    let count = axes.iter().try_fold(1_u64, |count, axis| count.checked_mul(sizes.get(axis)?));
    if count.is_none_or(|count| count > MAX_TENSORS) {
        let unknown: Vec<Axis> =
            axes.iter().filter(|axis| sizes.get(axis).is_none()).map(|axis| (*axis).clone()).collect();
        return Err(match unknown.as_slice() {
            [] => MapError::TooLarge { pattern: pattern.to_string() },
            _ => MapError::UnknownTargetSize { pattern: pattern.to_string(), axes: unknown },
        });
    }
    let mut all = Coordinates::new(axes, key, sizes);
    Ok(std::iter::from_fn(|| all.next()).collect())
}

/// Counts through the coordinates on several axes, the last axis fastest.
struct Coordinates<'a> {
    axes: Vec<(&'a Axis, u64)>,
    next: Option<NameMatch>,
}

impl<'a> Coordinates<'a> {
    fn new(axes: &[&'a Axis], key: &NameMatch, sizes: &Sizes) -> Self {
        let axes: Vec<(&Axis, u64)> = axes.iter().map(|axis| (*axis, sizes.get(axis).unwrap_or(0))).collect();
        let mut first = key.clone();
        first.coordinates.extend(axes.iter().map(|(axis, _)| ((*axis).clone(), 0)));
        let is_empty = axes.iter().any(|(_, size)| *size == 0);
        Self { axes, next: (!is_empty).then_some(first) }
    }

    fn next(&mut self) -> Option<NameMatch> {
        let current = self.next.take()?;
        let mut following = current.clone();
        for (axis, size) in self.axes.iter().rev() {
            let at = following.coordinates.get_mut(*axis)?;
            *at += 1;
            if *at < *size {
                self.next = Some(following);
                break;
            }
            *at = 0;
        }
        Some(current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_finds_the_first_row_that_matches() {
        let patterns = ["a.{l}.w", "a.5.w", "a.**", "{x:a,b}.{l}.w", "b.1.w", "c.{l}", "**"];
        for shift in 0..patterns.len() {
            let order: Vec<&str> = patterns.iter().cycle().skip(shift).take(patterns.len()).copied().collect();
            let rows: Vec<String> = order.iter().map(|name| format!("{{ a = \"{name}\" }}")).collect();
            let text = format!("family = \"f\"\n[sides]\na = {{}}\nb = {{}}\n[[map]]\nrows = [{}]\n", rows.join(", "));
            let map = WeightMap::parse("f.toml", &text).unwrap();
            let (index, sizes) = (RowIndex::new(&map, 0), Sizes::default());
            for name in ["a.5.w", "a.6.w", "a.5.w2", "b.1.w", "b.2.w", "c.7", "c.x", "w", "", "ä"] {
                let is_match = |row: &Row| row.cells[0][0].name.matches(name, &sizes).is_some();
                let found = index.find(name, &sizes).map(|(row, ..)| row);
                assert_eq!(found, map.rows.iter().position(is_match), "{order:?} {name}");
            }
        }
    }
}
