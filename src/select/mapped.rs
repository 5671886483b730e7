//! Applies a [weight map](crate::maps) to a catalog: the result has the tensors of another convention, whose chunks are views of
//! chunks of the source.
//!
//! The names of the rows are names within the model. Optimizer state that is stored under the name of a parameter, and has the
//! shape of the parameter, is mapped like the parameter. Names in the parameter lists of an optimizer change with the parameters.
//! Everything else in the state dict stays unchanged. No tensor data is read. Unit of shapes and indices: elements. Invariant: a
//! mapped tensor has exactly the elements that the map defines, or the coverage check of the catalog refuses it.

use std::collections::{BTreeMap, HashMap, HashSet};

use smallvec::SmallVec;

use super::Wrappers;
use super::rebuild::Rebuild;
use super::split_name::{Step, rekey};
use super::survey::{Leaf, LeafKind, Survey, is_number};
use crate::catalog::{
    Calculation, Catalog, Chunk, ComputedTensor, Dtype, FileLocation, Sharding, StoredView, TensorEntry, TensorId,
    Value,
};
use crate::error::{Error, Result};
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::{Dims, Intervals, Placement, TensorDim, Tile};
use crate::maps::{
    Application, AppliedTensor, MapError, Mapping, NameMatch, Piece, Progression, Sizes, SourceTensor, WeightMap,
    copies, following_dims, padding, pieces, views,
};
use crate::storage::Files;

/// The maximum number of copies of an element in the source.
const MAX_COPIES: u64 = 1 << 10;

/// The maximum number of chunks of a mapped tensor.
const MAX_CHUNKS: usize = 1 << 20;

/// A map with the two sides between which it is applied.
#[derive(Debug)]
pub struct MapRequest<'m> {
    pub map: &'m WeightMap,
    /// The side of the source, and the side of the result.
    pub sides: [usize; 2],
    /// The sizes that are known without the tensors.
    pub sizes: Sizes,
    /// True if optimizer state that cannot be mapped is left out.
    pub drops_state: bool,
}

/// The result of a map.
#[derive(Debug)]
pub struct MapOutcome {
    /// The applied rows and the sizes of the map.
    pub mapping: Mapping,
    /// For each row of the map, the numbers of its source tensors, target tensors and pieces.
    pub rows: BTreeMap<usize, RowCounts>,
    /// Groups of tensors of the source that must have equal values, because the result has one tensor for each group.
    pub equal: Vec<Vec<TensorId>>,
    /// Pairs of a tensor of the result and another copy of it in the source, which must have equal values.
    pub copies: Vec<[TensorId; 2]>,
    /// The names of the tensors that the target does not have.
    pub dropped: Vec<String>,
    /// The names of optimizer state that was left out because it cannot be mapped.
    pub dropped_state: Vec<String>,
}

/// The numbers of tensors of a row, without optimizer state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    pub sources: usize,
    pub targets: usize,
    pub pieces: usize,
}

/// Applies a map to a catalog. The tensors of the result are added to the catalog, so the ids of the source's tensors stay
/// valid; the state dict is replaced.
///
/// # Errors
/// `Usage` if the map does not fit the names and shapes, or if state of an optimizer cannot be mapped; `Unsupported` for a
/// tensor that cannot be read.
pub fn map(catalog: &mut Catalog, files: &mut Files, request: MapRequest<'_>) -> Result<MapOutcome> {
    let MapRequest { map, sides, sizes, drops_state } = request;
    let survey = Survey::new(catalog, Wrappers::Keep);
    let model = ModelNames::new(&survey);
    let tensors = model.tensors(catalog);
    let mapping = map.apply(sides, &tensors, sizes).map_err(|error| {
        let hint = error.hint();
        Error::usage(error.to_string(), hint)
    })?;
    let dropped = mapping.dropped.iter().map(|(index, _)| tensors[*index].name.clone()).collect();
    let outcome = MapOutcome {
        rows: BTreeMap::new(),
        equal: Vec::new(),
        copies: Vec::new(),
        dropped,
        dropped_state: Vec::new(),
        mapping,
    };
    let (added, computed) = (Vec::new(), Vec::new());
    let mut mapper =
        Mapper { map, sides, catalog, files, survey: &survey, model, added, computed, outcome, drops_state };
    let state = mapper.state()?;
    let Mapper { added, computed, outcome, .. } = mapper;
    catalog.tensors.extend(added);
    catalog.computed.extend(computed);
    catalog.state = state;
    Ok(outcome)
}

/// Checks that a map fits the names and shapes of the model from one side to another, and returns the result of its rows.
///
/// # Errors
/// [`MapError`] if the map does not fit.
pub fn check(catalog: &Catalog, map: &WeightMap, sides: [usize; 2], sizes: Sizes) -> Result<Mapping, MapError> {
    let model = ModelNames::new(&Survey::new(catalog, Wrappers::Cut));
    map.apply(sides, &model.tensors(catalog), sizes)
}

/// Returns the names of the tensors of the model, relative to the model and without wrapper components.
pub fn model_names(catalog: &Catalog) -> Vec<String> {
    model_tensors(catalog).into_iter().map(|(name, _)| name).collect()
}

/// Returns the tensors of the model with their names, relative to the model and without wrapper components.
pub fn model_tensors(catalog: &Catalog) -> Vec<(String, TensorId)> {
    let model = ModelNames::new(&Survey::new(catalog, Wrappers::Cut));
    model.parameters.into_iter().map(|(name, _, id)| (name, id)).collect()
}

/// The tensors of the model.
struct ModelNames {
    /// For each tensor, its name within the model, the index of its leaf, and its id.
    parameters: Vec<(String, usize, TensorId)>,
    /// The indices of `parameters` by name.
    by_name: HashMap<String, usize>,
}

impl ModelNames {
    fn new(survey: &Survey<'_>) -> Self {
        let mut parameters = Vec::new();
        for (index, leaf) in survey.leaves.iter().enumerate().filter(|(_, leaf)| leaf.is_parameter()) {
            let name = survey.named(*leaf).name;
            let name = survey.in_model(&name).unwrap_or(&name).to_owned();
            if let Value::Tensor(id) = survey.value(*leaf) {
                parameters.push((name, index, *id));
            }
        }
        let by_name = parameters.iter().enumerate().map(|(index, (name, _, _))| (name.clone(), index)).collect();
        Self { parameters, by_name }
    }

    fn tensors(&self, catalog: &Catalog) -> Vec<SourceTensor> {
        let tensor = |(name, _, id): &(String, usize, TensorId)| SourceTensor {
            name: name.clone(),
            shape: catalog.tensor(*id).shape.to_vec(),
        };
        self.parameters.iter().map(tensor).collect()
    }
}

/// The state of one optimizer under one key, such as `exp_avg`: for each parameter the leaf.
type StateOfKey = HashMap<usize, Leaf>;

struct Mapper<'a> {
    map: &'a WeightMap,
    sides: [usize; 2],
    catalog: &'a Catalog,
    files: &'a mut Files,
    survey: &'a Survey<'a>,
    model: ModelNames,
    /// The tensors of the result that are not tensors of the source.
    added: Vec<TensorEntry>,
    /// The computed files of padding and sums.
    computed: Vec<ComputedTensor>,
    outcome: MapOutcome,
    drops_state: bool,
}

/// A leaf of the result: the leaf of the source whose position it takes, its keys, and its value.
type NewLeaf<'a> = (Leaf, Vec<Step<'a>>, Value);

impl<'a> Mapper<'a> {
    /// Returns the state dict of the result.
    fn state(&mut self) -> Result<Value> {
        // For each leaf that is mapped, the leaves that take its place. A leaf whose place no leaf takes has an empty list.
        let mut replaced: HashMap<u32, Vec<NewLeaf<'a>>> = HashMap::new();
        let mapping = std::mem::take(&mut self.outcome.mapping.applications);
        for (index, _) in &self.outcome.mapping.dropped {
            replaced.insert(self.survey.leaves[self.model.parameters[*index].1].node, Vec::new());
        }
        let mut state: BTreeMap<(u32, String), StateOfKey> = BTreeMap::new();
        for leaf in &self.survey.leaves {
            self.add_state(*leaf, &mut state, &mut replaced)?;
        }
        for application in &mapping {
            self.map_parameters(application, &mut replaced)?;
            for of_key in state.values() {
                self.map_state(application, of_key, &mut replaced)?;
            }
        }
        let lists = ParameterLists::new(&mapping, &self.outcome.mapping, &self.model);
        let mut rebuild = Rebuild::new(self.survey);
        for leaf in &self.survey.leaves {
            match replaced.remove(&leaf.node) {
                Some(leaves) => {
                    for (leaf, steps, value) in leaves {
                        rebuild.insert(leaf, value, &steps)?;
                    }
                }
                None => {
                    let value = lists.value(self.survey, *leaf)?;
                    rebuild.insert(*leaf, value, &self.survey.named(*leaf).steps)?;
                }
            }
        }
        // The versions of modules are those of the modules of the source, which the result does not have.
        let state = rebuild.finish(&|_| None)?;
        self.outcome.mapping.applications = mapping;
        Ok(state)
    }

    /// Adds a leaf of optimizer state to the state of its optimizer and key, or to the leaves that are left out.
    fn add_state(
        &mut self,
        leaf: Leaf,
        state: &mut BTreeMap<(u32, String), StateOfKey>,
        replaced: &mut HashMap<u32, Vec<NewLeaf<'a>>>,
    ) -> Result<()> {
        let Some((number, _)) = leaf.optimizer.filter(|_| leaf.kind != LeafKind::EmptyDict) else { return Ok(()) };
        let named = self.survey.named(leaf);
        let Some(parameter) = named.parameter() else { return Ok(()) };
        if is_number(parameter) && leaf.in_state() {
            return Err(Error::usage(
                format!(
                    "{}: the optimizer state is stored by parameter index, so dtshard does not know which parameters it belongs to",
                    self.survey.raw_name(leaf)
                ),
                "leave the optimizer out with options::exclude, or save it with parameter names (get_optimizer_state_dict)",
            ));
        }
        let Some(index) = self.model.by_name.get(parameter) else {
            if !leaf.in_state() {
                return Ok(());
            }
            let why = format!("the model has no parameter {parameter}");
            self.refuse_state(&[leaf], leaf, &why)?;
            replaced.insert(leaf.node, Vec::new());
            return Ok(());
        };
        if self.outcome.mapping.dropped.iter().any(|(dropped, _)| dropped == index) {
            replaced.insert(leaf.node, Vec::new());
            return Ok(());
        }
        let key = named.name[named.name.len() - named.tail + named.parameter..].to_owned();
        let key = if leaf.in_groups() { format!("param_groups{key}") } else { key };
        state.entry((number, key)).or_default().insert(*index, leaf);
        Ok(())
    }

    /// Returns the index of a source tensor in [`ModelNames::parameters`]. A tied tensor that the source leaves out has the
    /// index of the tensor that it is tied to.
    fn source(&self, index: usize) -> usize {
        let len = self.model.parameters.len();
        index.checked_sub(len).map_or(index, |tied| self.outcome.mapping.tied[tied])
    }

    fn map_parameters(
        &mut self,
        application: &Application,
        replaced: &mut HashMap<u32, Vec<NewLeaf<'a>>>,
    ) -> Result<()> {
        let leaf_of =
            |source: &AppliedTensor<usize>| self.survey.leaves[self.model.parameters[self.source(source.tensor)].1];
        let first = application.sources.iter().map(leaf_of).min_by_key(|leaf| leaf.node);
        let Some(first) = first else { return Ok(()) };
        for source in application.sources.iter().filter(|source| source.tensor < self.model.parameters.len()) {
            replaced.entry(leaf_of(source).node).or_default();
        }
        let prefix = match self.survey.model_root.as_str() {
            "" => String::new(),
            root => format!("{root}."),
        };
        let ids: HashMap<usize, TensorId> = application
            .sources
            .iter()
            .map(|source| (source.tensor, self.model.parameters[self.source(source.tensor)].2))
            .collect();
        let row = &self.map.rows[application.row];
        let number = row.add[self.sides[1]] - row.add[self.sides[0]];
        let ids = if number == 0.0 { ids } else { self.sums(&ids, number)? };
        let mut counts = RowCounts { sources: application.sources.len(), ..RowCounts::default() };
        for target in &application.targets {
            let name = format!("{prefix}{}", target.tensor.name);
            let (id, number) = self.tensor(application, target, &name, &ids)?;
            counts.targets += 1;
            counts.pieces += number;
            let steps = rekey(&self.survey.named(first).steps, &name, &|node| self.survey.nodes[node as usize].flat);
            replaced.entry(first.node).or_default().push((first, steps, Value::Tensor(id)));
        }
        let row = self.outcome.rows.entry(application.row).or_default();
        row.sources += counts.sources;
        row.targets += counts.targets;
        row.pieces += counts.pieces;
        Ok(())
    }

    /// Maps the state of one key for the parameters of an application.
    fn map_state(
        &mut self,
        application: &Application,
        of_key: &StateOfKey,
        replaced: &mut HashMap<u32, Vec<NewLeaf<'a>>>,
    ) -> Result<()> {
        // A tied tensor that the source leaves out has no state, and its copy gets none.
        let own = || application.sources.iter().filter(|source| source.tensor < self.model.parameters.len());
        let leaves: Vec<(usize, Leaf)> =
            own().filter_map(|source| Some((source.tensor, *of_key.get(&source.tensor)?))).collect();
        let Some(&(first_index, first)) = leaves.iter().min_by_key(|(_, leaf)| leaf.node) else { return Ok(()) };
        for (_, leaf) in &leaves {
            replaced.entry(leaf.node).or_default();
        }
        let all: Vec<Leaf> = leaves.iter().map(|(_, leaf)| *leaf).collect();
        if own().count() < application.sources.len() {
            let why = "the map joins its parameter with a copy of a tied tensor, which has no state";
            return self.refuse_state(&all, first, why);
        }
        if let Some(missing) = own().find(|source| !of_key.contains_key(&source.tensor)) {
            let (with, without) = (&self.model.parameters[first_index].0, &self.model.parameters[missing.tensor].0);
            let why = format!("the parameter {without} has no such state, but {with} has, and the map joins the two");
            return self.refuse_state(&all, first, &why);
        }
        let shape_of = |index: usize| &self.catalog.tensor(self.model.parameters[index].2).shape;
        let ids: Vec<Option<TensorId>> = leaves
            .iter()
            .map(|(_, leaf)| match self.survey.value(*leaf) {
                Value::Tensor(id) => Some(*id),
                _ => None,
            })
            .collect();
        let is_scalar = |id: &Option<TensorId>| id.is_none_or(|id| self.catalog.tensor(id).shape.is_empty());
        let are_scalars = ids.iter().all(is_scalar);
        if !are_scalars {
            let other = leaves
                .iter()
                .zip(&ids)
                .find(|((index, _), id)| id.is_none_or(|id| self.catalog.tensor(id).shape != *shape_of(*index)));
            if let Some(((index, leaf), id)) = other {
                let found = id.map_or_else(
                    || String::from("an object"),
                    |id| format!("{:?}", self.catalog.tensor(id).shape.as_slice()),
                );
                let expected = shape_of(*index).to_vec();
                let why = format!("expected the parameter's shape {expected:?}, found {found}");
                return self.refuse_state(&all, *leaf, &why);
            }
        }
        let by_index: HashMap<usize, TensorId> =
            leaves.iter().zip(&ids).filter_map(|((index, _), id)| Some((*index, (*id)?))).collect();
        let value = if are_scalars { Some(self.scalar(&leaves, &ids)?) } else { None };
        let named = self.survey.named(first);
        let start = named.name.len() - named.tail;
        for target in &application.targets {
            let name =
                format!("{}{}{}", &named.name[..start], target.tensor.name, &named.name[start + named.parameter..]);
            let value = match &value {
                Some(Value::Tensor(id)) => {
                    // Each parameter gets a tensor of its own: an optimizer changes steps in place.
                    let entry = TensorEntry { fqn: name.as_str().into(), ..self.catalog.tensor(*id).clone() };
                    Value::Tensor(self.add(entry))
                }
                Some(value) => value.clone(),
                None => Value::Tensor(self.tensor(application, target, &name, &by_index)?.0),
            };
            let steps = rekey(&named.steps, &name, &|node| self.survey.nodes[node as usize].flat);
            replaced.entry(first.node).or_default().push((first, steps, value));
        }
        Ok(())
    }

    /// Returns the value of state that is a scalar or an object, such as `step`. All parameters that the map joins must have
    /// one value.
    fn scalar(&mut self, leaves: &[(usize, Leaf)], ids: &[Option<TensorId>]) -> Result<Value> {
        let first = self.survey.value(leaves[0].1);
        let ids: Vec<TensorId> = ids.iter().flatten().copied().collect();
        if ids.len() == leaves.len() {
            if ids.len() > 1 {
                self.outcome.equal.push(ids);
            }
            return Ok(first.clone());
        }
        match leaves.iter().find(|(_, leaf)| self.survey.value(*leaf) != first) {
            None => Ok(first.clone()),
            Some((_, leaf)) => Err(Error::usage(
                format!(
                    "{} and {} differ, and the map joins them",
                    self.survey.raw_name(leaves[0].1),
                    self.survey.raw_name(*leaf)
                ),
                "leave the optimizer out with options::exclude, or with options::map_state drop",
            )),
        }
    }

    /// Records `leaves` of the optimizer state as left out if `options::map_state` is `drop`. Otherwise returns an error
    /// that names `cause`, one of the leaves.
    fn refuse_state(&mut self, leaves: &[Leaf], cause: Leaf, why: &str) -> Result<()> {
        if self.drops_state {
            self.outcome.dropped_state.extend(leaves.iter().map(|leaf| self.survey.raw_name(*leaf)));
            return Ok(());
        }
        Err(Error::usage(
            format!("{}: the map cannot convert this optimizer state: {why}", self.survey.raw_name(cause)),
            "leave the state out with options::map_state drop, or the optimizer with options::exclude",
        ))
    }

    /// Returns, for each source tensor, the tensor whose elements are those of the source plus a number.
    fn sums(&mut self, ids: &HashMap<usize, TensorId>, number: f64) -> Result<HashMap<usize, TensorId>> {
        // In a fixed order: the ids of tensors and files are part of the fingerprint of a run.
        let ordered: BTreeMap<&usize, &TensorId> = ids.iter().collect();
        ordered.into_iter().map(|(source, id)| Ok((*source, self.sum(*id, number)?))).collect()
    }

    fn sum(&mut self, id: TensorId, number: f64) -> Result<TensorId> {
        let entry = self.catalog.tensor(id);
        if let Some(why) = &entry.unreadable {
            return Err(why.error(entry.fqn.as_str()));
        }
        if !matches!(entry.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
            return Err(Error::unsupported(
                format!("{}: the map adds {number} to the values, which is not possible in {}", entry.fqn, entry.dtype),
                "cast the tensor to f32 or bf16 first, or decode it with options::dequantize",
            ));
        }
        if entry.partial_values.is_some() {
            return Err(Error::unsupported(
                format!("{}: the map adds {number} to the values, and the tensor has partial values", entry.fqn),
                "reduce the partial values first, in a conversion without options::map",
            ));
        }
        let Some(like) = entry.first_file() else { return Ok(id) };
        let content = (entry.dtype, entry.shape.clone());
        let computed = ComputedTensor::new(self.files, like, content, Calculation::Add(number), &[id]);
        let chunks = computed.chunks();
        self.computed.push(computed);
        Ok(self.add(TensorEntry { chunks, stride: None, ..entry.clone() }))
    }

    /// Returns the entry of a tensor of the source, or of a tensor that was added.
    fn entry(&self, id: TensorId) -> &TensorEntry {
        let index = id.0 as usize;
        index
            .checked_sub(self.catalog.tensors.len())
            .map_or_else(|| self.catalog.tensor(id), |added| &self.added[added])
    }

    fn add(&mut self, entry: TensorEntry) -> TensorId {
        let id = self.catalog.tensors.len() + self.added.len();
        self.added.push(entry);
        TensorId(u32::try_from(id).expect("fewer than 2^32 tensors"))
    }

    /// Returns a target tensor of an application, and the number of its pieces. For each source tensor, `ids` has the tensor of
    /// the catalog that is mapped: the parameter, or its state. If the source has copies of the elements, the target has the first,
    /// and the others are added to the tensors that must be equal.
    fn tensor(
        &mut self,
        application: &Application,
        target: &AppliedTensor<SourceTensor>,
        name: &str,
        ids: &HashMap<usize, TensorId>,
    ) -> Result<(TensorId, usize)> {
        let from = &self.map.rows[application.row].cells[self.sides[0]];
        let copies = copies(from, &application.sizes, &application.rest);
        if copies > MAX_COPIES {
            return Err(Error::unsupported(
                format!("{name}: SRC has {copies} copies of the elements, and dtshard compares at most {MAX_COPIES}"),
                "correct the sizes of the axes of copies",
            ));
        }
        let (entry, pieces) = self.target_entry(application, target, name, ids, 0)?;
        let id = self.add(entry);
        for copy in 1..copies {
            let (entry, _) = self.target_entry(application, target, name, ids, copy)?;
            let other = self.add(TensorEntry { fqn: format!("{name} (copy {copy} in SRC)").into(), ..entry });
            self.outcome.copies.push([id, other]);
        }
        Ok((id, pieces))
    }

    /// Returns the entry of a target tensor, from one of the copies in the source, and the number of its pieces.
    fn target_entry(
        &mut self,
        application: &Application,
        target: &AppliedTensor<SourceTensor>,
        name: &str,
        ids: &HashMap<usize, TensorId>,
        copy: u64,
    ) -> Result<(TensorEntry, usize)> {
        let [from, to] = self.sides.map(|side| &self.map.rows[application.row].cells[side]);
        let found = pieces([from, to], (target.pattern, &target.at), &application.sizes, &application.rest, copy);
        let found = found.map_err(|_| self.too_many_pieces(application, name))?;
        let numel = |piece: &Piece| piece.target.iter().map(|own| own.count).product::<u64>();
        let (given, all) = (found.iter().map(numel).sum::<u64>(), target.tensor.shape.iter().product::<u64>());
        let by_name: HashMap<(usize, &NameMatch), usize> =
            application.sources.iter().map(|source| ((source.pattern, &source.at), source.tensor)).collect();
        let shape: Dims = target.tensor.shape.iter().copied().collect();
        let mut first = self.entry(ids[&application.sources[0].tensor]);
        let is_empty = shape.contains(&0);
        let mut entry: Option<TensorEntry> =
            is_empty.then(|| TensorEntry::new(name.into(), first.dtype, shape.clone()));
        for piece in &found {
            let Some(source) = by_name.get(&(piece.pattern, &piece.source)) else {
                return Err(Error::usage(
                    format!(
                        "{name}: SRC has no tensor for a part of this tensor (line {} of {})",
                        self.map.rows[application.row].line, self.map.name
                    ),
                    "correct the row of the map: both sides must have the same axes in each term",
                ));
            };
            let source = self.entry(ids[source]);
            if let Some(why) = &source.unreadable {
                return Err(why.error(source.fqn.as_str()));
            }
            if found.len() == 1 && is_whole(piece, &source.shape, &shape) {
                entry = Some(TensorEntry { fqn: name.into(), ..source.clone() });
                break;
            }
            if source.partial_values.is_some() {
                return Err(Error::unsupported(
                    format!("{}: the tensor has partial values, which a map can only rename", source.fqn),
                    "reduce the partial values first, in a conversion without options::map",
                ));
            }
            if entry.is_none() {
                first = source;
            }
            let entry = entry.get_or_insert_with(|| TensorEntry::new(name.into(), source.dtype, shape.clone()));
            if entry.dtype != source.dtype {
                return Err(Error::usage(
                    format!(
                        "{name}: the map joins {} ({}) and {} ({}), which have different dtypes",
                        first.fqn, first.dtype, source.fqn, source.dtype
                    ),
                    "cast one of them first, in a conversion without options::map",
                ));
            }
            if !add_views(entry, piece, source) || entry.chunks.len() > MAX_CHUNKS {
                return Err(Error::unsupported(
                    format!("{name}: expected at most 2^20 views of chunks, found more"),
                    "reshard SRC to fewer ranks first, in a conversion without options::map",
                ));
            }
        }
        let Some(mut entry) = entry else {
            return Err(Error::unsupported(
                format!("{name}: the map gives no element of this tensor ({:?})", shape.as_slice()),
                "choose another side of the map",
            ));
        };
        if given != all {
            self.pad(&mut entry, application, target)?;
        }
        if entry.sharding.is_none() {
            self.follow_sharding(&mut entry, application, target.pattern, ids);
        }
        Ok((entry, found.len()))
    }

    /// Adds chunks of zeros for the padding of a target tensor.
    fn pad(
        &mut self,
        entry: &mut TensorEntry,
        application: &Application,
        target: &AppliedTensor<SourceTensor>,
    ) -> Result<()> {
        let cell = &self.map.rows[application.row].cells[self.sides[1]];
        let boxes = padding(cell, (target.pattern, &target.at), &application.sizes, &application.rest);
        let boxes = boxes.map_err(|_| self.too_many_pieces(application, entry.fqn.as_str()))?;
        let Some(like) = entry.first_file() else {
            return Err(Error::unsupported(
                format!("{}: the tensor would consist of padding only ({:?})", entry.fqn, entry.shape.as_slice()),
                "choose another side of the map",
            ));
        };
        let numel = |padding: &Vec<Progression>| padding.iter().map(|own| own.count).product::<u64>();
        let Some(largest) = boxes.iter().map(numel).max() else { return Ok(()) };
        // All boxes begin at the start of one file, because all of its elements are equal.
        let content = (entry.dtype, Dims::from_slice(&[largest]));
        let computed = ComputedTensor::new(self.files, like, content, Calculation::Zeros, &[]);
        let location = FileLocation::Bytes { file: computed.file, offset: 0 };
        self.computed.push(computed);
        for padding in boxes {
            let dim = |own: &Progression| Intervals::progression(own.start, own.step, own.count, 1);
            let tile = Tile::new(padding.iter().map(dim));
            entry.chunks.push(Chunk { tile, location, strides: None, rank: None, view: None });
        }
        Ok(())
    }

    /// Sets the class and the placements of a mapped tensor, if all of its source tensors have one class and placements. A shard of a
    /// dim becomes a shard of the dim that follows from the map, or is replicated if there is none. `reshard` uses these placements
    /// as defaults only: the chunks of the tensor are views of the chunks of the source, whatever the placements are.
    fn follow_sharding(
        &self,
        entry: &mut TensorEntry,
        application: &Application,
        pattern: usize,
        ids: &HashMap<usize, TensorId>,
    ) {
        let sources = || application.sources.iter().map(|source| (source.pattern, self.entry(ids[&source.tensor])));
        let Some((from_pattern, first)) = sources().next() else { return };
        if sources().any(|(_, other)| other.class != first.class || other.sharding != first.sharding) {
            return;
        }
        entry.class = first.class;
        let Some(sharding) = &first.sharding else { return };
        let cells = self.sides.map(|side| &self.map.rows[application.row].cells[side]);
        let follows = following_dims(cells, [from_pattern, pattern], &application.sizes, &application.rest);
        let placements = sharding.shared.placements.iter().map(|placement| match placement.sharded_dim() {
            None => *placement,
            Some(dim) => match follows.get(dim.0).copied().flatten() {
                Some(to) => Placement::Shard(TensorDim(to)),
                None => Placement::Replicate,
            },
        });
        let shared =
            SharedTensor { placements: placements.collect(), splits: Vec::new(), slice: sharding.shared.slice.clone() };
        entry.sharding = Some(Box::new(Sharding { mesh: sharding.mesh, shared }));
    }

    fn too_many_pieces(&self, application: &Application, name: &str) -> Error {
        let line = self.map.rows[application.row].line;
        Error::unsupported(
            format!("{name}: the tensor would have more than 2^20 pieces ({} line {line})", self.map.name),
            "correct the row of the map",
        )
    }
}

/// Returns whether a piece is a complete source tensor with its dims in the same order.
fn is_whole(piece: &Piece, source: &[u64], target: &[u64]) -> bool {
    let is_own = |(dim, (own, (of, step))): (usize, (&Progression, &(usize, u64)))| {
        own.start == 0 && own.count == target[dim] && (own.count <= 1 || own.step == 1 && *of == dim && *step == 1)
    };
    source == target
        && piece.start.iter().all(|start| *start == 0)
        && piece.target.iter().zip(&piece.steps).enumerate().all(is_own)
}

/// Adds a chunk to `entry` for each view that a piece has of a chunk of `source`. Returns false if there are too many views.
fn add_views(entry: &mut TensorEntry, piece: &Piece, source: &TensorEntry) -> bool {
    for index in 0..source.chunks.len() {
        let tile = source.chunks.tile(index);
        let Some(found) = views(piece, &tile) else { return false };
        for view in found {
            let steps: SmallVec<[(u32, u64); 4]> =
                view.steps.iter().map(|(dim, step)| (u32::try_from(*dim).expect("few dims"), *step)).collect();
            entry.chunks.push(Chunk {
                tile: view.tile,
                location: source.chunks.location(index),
                strides: source.chunks.strides(index).cloned(),
                rank: source.chunks.rank(index),
                view: Some(StoredView { shape: source.chunks.sizes(index), start: view.start.into(), steps }),
            });
        }
    }
    true
}

/// The new names of the parameters in the lists of an optimizer.
struct ParameterLists<'m> {
    /// For each parameter of the source, the index of its application.
    of: HashMap<&'m str, usize>,
    /// For each application, the number of its parameters in the source, and the names of its targets.
    applications: Vec<(usize, Vec<&'m str>)>,
    dropped: HashSet<&'m str>,
}

impl<'m> ParameterLists<'m> {
    fn new(applications: &'m [Application], mapping: &Mapping, model: &'m ModelNames) -> Self {
        let names = &model.parameters;
        let mut lists = Self {
            of: HashMap::new(),
            applications: Vec::with_capacity(applications.len()),
            dropped: mapping.dropped.iter().map(|(index, _)| names[*index].0.as_str()).collect(),
        };
        for (index, application) in applications.iter().enumerate() {
            let own: Vec<usize> =
                application.sources.iter().map(|source| source.tensor).filter(|source| *source < names.len()).collect();
            lists.of.extend(own.iter().map(|source| (names[*source].0.as_str(), index)));
            let targets = application.targets.iter().map(|target| target.tensor.name.as_str()).collect();
            lists.applications.push((own.len(), targets));
        }
        lists
    }

    /// Returns the value of a leaf with the new names of parameters, if the leaf is a list of parameters of an optimizer.
    fn value(&self, survey: &Survey<'_>, leaf: Leaf) -> Result<Value> {
        let value = survey.value(leaf);
        let key = survey.last_key(leaf).unwrap_or_default();
        if !leaf.in_groups() || !(key == "params" || key == "param_names") {
            return Ok(value.clone());
        }
        match value {
            Value::List(items) => Ok(Value::List(self.items(survey, leaf, items)?)),
            Value::Tuple(items) => Ok(Value::Tuple(self.items(survey, leaf, items)?)),
            Value::Ints(_) => self.items(survey, leaf, &[Value::None]).map(|_| Value::None),
            other => Ok(other.clone()),
        }
    }

    fn items(&self, survey: &Survey<'_>, leaf: Leaf, items: &[Value]) -> Result<Vec<Value>> {
        if items.iter().any(|item| item.as_str().is_none()) {
            return Err(Error::usage(
                format!(
                    "{}: the optimizer lists its parameters by index, which a map cannot convert",
                    survey.raw_name(leaf)
                ),
                "leave the optimizer out with options::exclude, or save it with parameter names (get_optimizer_state_dict)",
            ));
        }
        let mut listed: BTreeMap<usize, usize> = BTreeMap::new();
        let mut new = Vec::with_capacity(items.len());
        for item in items {
            let name = item.as_str().map(|name| survey.clean(name));
            let Some(name) = name.filter(|name| !self.dropped.contains(name.as_str())) else { continue };
            let Some(&application) = self.of.get(name.as_str()) else {
                new.push(item.clone());
                continue;
            };
            let count = listed.entry(application).or_default();
            *count += 1;
            if *count == 1 {
                let targets = &self.applications[application].1;
                new.extend(targets.iter().map(|target| Value::Str((*target).into())));
            }
        }
        if let Some((application, _)) =
            listed.iter().find(|(application, count)| self.applications[**application].0 != **count)
        {
            return Err(Error::usage(
                format!(
                    "{}: the list has only some of the parameters that the map joins to {}",
                    survey.raw_name(leaf),
                    self.applications[*application].1[0]
                ),
                "leave the optimizer out with options::exclude: parameters that are joined must be in one parameter group",
            ));
        }
        Ok(new)
    }
}
