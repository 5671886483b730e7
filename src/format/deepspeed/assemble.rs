//! Makes the catalog of a checkpoint: parameters as boxes of the vectors of all partitions. No tensor data is read here.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use indexmap::IndexMap;

use super::fields::Fields;
use super::folder::{GATHER, leftover, refused};
use super::model::{ModelStates, OWN_KEYS, wrong_name};
use super::optimizer::{OptimizerStates, StateValue};
use super::partitions::{Partitioned, Placed};
use super::whole_masters::{WholeGroup, WholeMaster};
use crate::catalog::optimizer::{GROUPS, PARAMS, STATE};
use crate::catalog::unreadable::UnreadableKind;
use crate::catalog::{
    Catalog, Chunk, Dict, DictKind, FileLocation, Fqn, TensorEntry, TensorId, Unreadable, Value, Weights,
    checked_len_bytes, contiguous_strides, path,
};
use crate::error::Result;
use crate::format::torch::{RankFile, TensorNode, View};
use crate::format::torchsnapshot::add_value;
use crate::layout::{Rank, Region, Tile};

/// The keys of the model and of the optimizer in the state dict, as PyTorch's trainers name them.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

/// Makes the entry of a parameter, or of its state, whose elements are in the vectors `views` of `files`.
///
/// # Errors
/// `Malformed` if the shape does not fit memory.
fn entry(files: &[&RankFile], views: &[&View], partitioned: &Partitioned, param: &Placed) -> Result<TensorEntry> {
    let dtype = views[0].dtype;
    if checked_len_bytes(&param.shape, dtype).is_none() {
        let fields = Fields::of_file(files[0])?;
        let found = format!("{:?}", param.shape.as_slice());
        return Err(fields.wrong(param.fqn.as_str(), "a shape that fits memory", found));
    }
    let mut entry = TensorEntry::new(param.fqn.clone(), dtype, param.shape.clone());
    let mut push = |region: &Region, location: FileLocation| {
        entry.chunks.push(Chunk { tile: Tile::from_region(region), location, strides: None, rank: None, view: None });
    };
    if param.shape.contains(&0) {
        push(&Region::whole(&param.shape), FileLocation::Empty);
    }
    for piece in partitioned.pieces(param) {
        let location = files[piece.partition].contents.record_location(views[piece.partition]);
        let FileLocation::Record { file, record, within } = location else { continue };
        let mut within = within + piece.at * dtype.itemsize();
        for region in Region::cut(&param.shape, piece.elements) {
            push(&region, FileLocation::Record { file, record, within });
            within += region.numel() * dtype.itemsize();
        }
    }
    Ok(entry)
}

/// Makes the entry of a tensor that one file stores as a whole.
fn whole(file: &RankFile, fqn: &str, view: &View) -> TensorEntry {
    let mut entry = TensorEntry::new(fqn.into(), view.dtype, view.sizes.clone());
    let tile = Tile::from_region(&Region::whole(&view.sizes));
    let strides = (view.strides != contiguous_strides(&view.sizes)).then(|| view.strides.clone());
    entry.chunks.push(Chunk { tile, location: file.contents.record_location(view), strides, rank: None, view: None });
    entry
}

fn unreadable(file: &RankFile, fqn: &str, kind: UnreadableKind) -> TensorEntry {
    TensorEntry::unreadable(fqn.into(), Unreadable { file: file.path.clone(), kind })
}

/// Copies a value of a file into the catalog, with the tensors in it.
fn import(file: &RankFile, value: &Value, catalog: &mut Catalog) -> Value {
    let mut known: HashMap<TensorId, TensorId> = HashMap::new();
    let mut value = value.clone();
    value.map_tensors(&mut |id| {
        *known.entry(id).or_insert_with(|| {
            let made = match &file.contents.tensors[id.0 as usize] {
                TensorNode::Plain(view) => whole(file, "", view),
                TensorNode::Unreadable(kind) => unreadable(file, "", kind.clone()),
                TensorNode::Distributed { .. } | TensorNode::Sharded { .. } => {
                    unreadable(file, "", UnreadableKind::Tensor(String::from("a distributed tensor")))
                }
            };
            catalog.push_tensor(made)
        })
    });
    value
}

fn dict(kind: DictKind, entries: Vec<(Value, Value)>) -> Value {
    Value::Dict(Dict { kind, entries, ..Dict::default() })
}

/// The parts from which the catalog of a checkpoint is made.
pub struct Parts<'a> {
    pub folder: &'a Path,
    pub model: &'a ModelStates<'a>,
    pub is_stage3: bool,
    /// The values that parameters get. Without optimizer files, the module has the only ones.
    pub weights: Weights,
    pub optimizer: OptimizerParts<'a>,
}

/// The optimizer of a checkpoint.
#[derive(Clone, Copy)]
pub enum OptimizerParts<'a> {
    None,
    /// The state dict of the optimizer, as the model file has it at stage 0 with f32 parameters. Parameters have numbers.
    Numbered(&'a Value),
    /// The master weights and the state that the model file has at stage 0 with 16-bit parameters.
    Whole(&'a [WholeGroup<'a>]),
    /// The optimizer files of stages 1, 2 and 3, and their content.
    Partitioned(&'a [&'a RankFile], &'a OptimizerStates<'a>),
}

impl Parts<'_> {
    /// Makes the catalog.
    ///
    /// # Errors
    /// `Malformed` for names that contradict each other, `Unsupported` for kinds of tensors that dtshard does not read.
    pub fn catalog(&self) -> Result<Catalog> {
        let mut catalog = Catalog::empty();
        catalog.weights = Some(self.weights);
        let mut masters: IndexMap<Fqn, TensorId> = IndexMap::new();
        let optimizer = match self.optimizer {
            OptimizerParts::None => None,
            OptimizerParts::Numbered(state) => Some(import(self.model.first().file, state, &mut catalog)),
            OptimizerParts::Whole(groups) => Some(self.whole(groups, &mut masters, &mut catalog)),
            OptimizerParts::Partitioned(files, states) => {
                Some(self.partitioned(files, states, &mut masters, &mut catalog)?)
            }
        };
        let mut entries = vec![(Value::Str(MODEL.into()), self.model_dict(masters, &mut catalog)?)];
        entries.extend(optimizer.map(|optimizer| (Value::Str(OPTIMIZER.into()), optimizer)));
        self.add_objects(&mut entries, &mut catalog);
        catalog.state = dict(DictKind::Plain, entries);
        name_tensors(&mut catalog);
        Ok(catalog)
    }

    /// Returns the state dict of an optimizer that has whole tensors. Adds the master weights to `masters`.
    fn whole(&self, groups: &[WholeGroup<'_>], masters: &mut IndexMap<Fqn, TensorId>, catalog: &mut Catalog) -> Value {
        let file = self.model.first().file;
        let (mut state, mut param_groups) = (Vec::new(), Vec::new());
        for group in groups {
            for WholeMaster { name, master, state: own } in &group.params {
                masters.insert((*name).into(), catalog.push_tensor(whole(file, name, master)));
                state.extend(own.map(|own| (Value::Str((*name).into()), import(file, own, catalog))));
            }
            let names = group.params.iter().map(|param| Value::Str(param.name.into()));
            param_groups.push(param_group(file, group.options, names, catalog));
        }
        state_dict(state, param_groups)
    }

    /// Returns the state dict of an optimizer whose files are partitioned. Adds the master weights to `masters`, if they are
    /// read.
    fn partitioned(
        &self,
        files: &[&RankFile],
        states: &OptimizerStates<'_>,
        masters: &mut IndexMap<Fqn, TensorId>,
        catalog: &mut Catalog,
    ) -> Result<Value> {
        let mut known: HashSet<&str> = HashSet::new();
        let mut state = Vec::new();
        for group in &states.groups {
            for param in &group.partitioned.params {
                if !known.insert(param.fqn.as_str()) {
                    return Err(wrong_name(self.model.first(), param.fqn.as_str(), "each name once"));
                }
                if self.weights == Weights::Master {
                    let id = catalog.push_tensor(entry(files, &group.masters, &group.partitioned, param)?);
                    masters.insert(param.fqn.clone(), id);
                }
                if !group.state.is_empty() {
                    let own = own_state(files, group, param, catalog)?;
                    state.push((Value::Str((&param.fqn).into()), own));
                }
            }
        }
        let groups = states.param_groups.iter().map(|(names, options)| {
            param_group(files[0], options, names.iter().map(|name| Value::Str(name.into())), catalog)
        });
        let groups = groups.collect();
        Ok(state_dict(state, groups))
    }

    /// Returns the state dict of the model, in the order of `module`. `values` has the master weights of the trained
    /// parameters, if they are read.
    fn model_dict(&self, values: IndexMap<Fqn, TensorId>, catalog: &mut Catalog) -> Result<Value> {
        let ModelStates { module, shared, .. } = self.model;
        let first = self.model.first();
        let mut values = values;
        let trained = values.len();
        let mut names: Vec<&str> = Vec::with_capacity(module.entries.len());
        for (key, _) in &module.entries {
            names.push(key.as_str().ok_or_else(|| first.wrong("module", "names of tensors", key.type_name()))?);
        }
        if let Some(lost) = values.keys().find(|name| module.get(name.as_str()).is_none()) {
            return Err(wrong_name(first, lost.as_str(), "only names of `module`"));
        }
        let ties: HashMap<&str, &str> = shared.iter().copied().collect();
        // At stages 1 and 2, a further name of a parameter is a view of the same elements of `module`.
        let by_view: HashMap<TensorId, TensorId> = if self.is_stage3 {
            HashMap::new()
        } else {
            let known = values.iter().filter(|(_, id)| catalog.tensor(**id).numel() > 0);
            known
                .filter_map(|(name, id)| match module.get(name.as_str()) {
                    Some(Value::Tensor(own)) => Some((*own, *id)),
                    _ => None,
                })
                .collect()
        };
        let mut imported: HashMap<TensorId, TensorId> = HashMap::new();
        for name in &names {
            if values.contains_key(&Fqn::from(*name)) || ties.contains_key(name) {
                continue;
            }
            let value = module.get(name).expect("a name of the module");
            let known = match value {
                Value::Tensor(id) => by_view.get(id).or_else(|| imported.get(id)).copied(),
                _ => None,
            };
            let id = match known {
                Some(id) => id,
                None => {
                    let id = catalog.push_tensor(self.untrained(name, value)?);
                    // At stage 3, all parameters have equal views, which have no elements.
                    if let (Value::Tensor(own), true) = (value, catalog.tensor(id).numel() > 0) {
                        imported.insert(*own, id);
                    }
                    id
                }
            };
            values.insert((*name).into(), id);
        }
        for (alias, with) in shared {
            let Some(id) = values.get(&Fqn::from(*with)).copied() else {
                return Err(first.wrong(
                    "shared_params",
                    "names of parameters",
                    format!("`{with}`, which has no value"),
                ));
            };
            values.insert((*alias).into(), id);
        }
        let others = values.keys().skip(trained).filter(|name| module.get(name.as_str()).is_none());
        let order: Vec<Fqn> = names.iter().map(|name| Fqn::from(*name)).chain(others.cloned()).collect();
        let entries = order.iter().map(|name| (Value::Str(name.into()), Value::Tensor(values[name])));
        Ok(dict(DictKind::Ordered, entries.collect()))
    }

    /// Makes the entry of a frozen parameter or of a buffer.
    fn untrained(&self, name: &str, value: &Value) -> Result<TensorEntry> {
        let first = self.model.first();
        let frozen = |fields: &Fields<'_>| -> Result<Option<Value>> {
            let fragments = fields.dict("frozen_param_fragments")?;
            Ok(fragments.and_then(|fragments| fragments.dict.get(name).cloned()))
        };
        if self.is_stage3 && frozen(first)?.is_some() {
            return self.frozen(name);
        }
        let Some(view) = first.view(value) else {
            let kind = match value {
                Value::Tensor(id) => match &first.file.contents.tensors[id.0 as usize] {
                    TensorNode::Unreadable(kind) => kind.clone(),
                    _ => UnreadableKind::Tensor(String::from("a distributed tensor")),
                },
                other => UnreadableKind::Object(other.type_name().into_owned()),
            };
            return Ok(unreadable(first.file, name, kind));
        };
        let is_placeholder = self.is_stage3 && view.sizes.as_slice() == [0] && !self.model.buffers.contains(&name);
        if is_placeholder {
            let kind = UnreadableKind::Tensor(String::from(
                "a parameter without a value in the files, probably a further name of another parameter: at stage 3, \
                 only `shared_params` says of which one, and it does not list this name",
            ));
            return Ok(unreadable(first.file, name, kind));
        }
        Ok(whole(first.file, name, view))
    }

    /// Makes the entry of a frozen parameter at stage 3, of which each model file has a part.
    fn frozen(&self, name: &str) -> Result<TensorEntry> {
        let first = self.model.first();
        let at = format!("frozen_param_shapes[{name:?}]");
        let shapes =
            first.get("frozen_param_shapes").map(|value| first.shapes("frozen_param_shapes", value)).transpose()?;
        let param = shapes.into_iter().flatten().find(|(own, _)| own.as_str() == name);
        let Some(param) = param else { return Err(first.wrong(&at, "a shape", "none")) };
        let partitioned = Partitioned::by_parameter(vec![param], self.model.files.len() as u64)
            .ok_or_else(|| first.wrong(&at, "fewer than 2^64 elements", "more"))?;
        let mut views: Vec<&View> = Vec::new();
        for (partition, fields) in self.model.files.iter().enumerate() {
            let at = format!("frozen_param_fragments[{name:?}]");
            let fragment = fields.dict("frozen_param_fragments")?.and_then(|fragments| fragments.dict.get(name));
            let Some(fragment) = fragment else {
                return Err(leftover(fields.path(), &at, "a part of the frozen parameter", "none"));
            };
            let view = fields.vector(&at, fragment)?;
            if !view.dtype.is_float() {
                let kind = format!("with quantized frozen parameters ({name} has dtype {})", view.dtype);
                return Err(refused(self.folder, &kind, GATHER));
            }
            let first_dtype = views.first().map_or(view.dtype, |first| first.dtype);
            if view.sizes[0] != partitioned.len() || view.dtype != first_dtype {
                let expected =
                    format!("{} elements of dtype {first_dtype} in partition {partition}", partitioned.len());
                let found = format!("{} of dtype {}", view.sizes[0], view.dtype);
                return Err(leftover(fields.path(), &at, expected, found));
            }
            views.push(view);
        }
        let files: Vec<&RankFile> = self.model.files.iter().map(|fields| fields.file).collect();
        entry(&files, &views, &partitioned, &partitioned.params[0])
    }

    /// Adds the values of the training loop. At stage 3, each rank saved its own values.
    fn add_objects(&self, entries: &mut Vec<(Value, Value)>, catalog: &mut Catalog) {
        let mut keys: Vec<&Value> = Vec::new();
        for fields in &self.model.files {
            for (key, value) in &fields.dict.entries {
                let is_own = key.as_str().is_some_and(|key| OWN_KEYS.contains(&key));
                if !is_own && !matches!(value, Value::None) && !keys.iter().any(|known| known.same_but_tensors(key)) {
                    keys.push(key);
                }
            }
        }
        for key in keys {
            if key.as_str().is_some_and(|key| [MODEL, OPTIMIZER].contains(&key)) {
                catalog.warnings.push(format!(
                    "{}: the value `{}` of the training loop is left out, because the state dict has the {} of the \
                     checkpoint under this key",
                    self.model.first().path().display(),
                    key.as_str().unwrap_or_default(),
                    key.as_str().unwrap_or_default(),
                ));
                continue;
            }
            let mut by_rank = Vec::new();
            for (rank, fields) in (0..).zip(&self.model.files) {
                let own = fields.dict.entries.iter().find(|(own, _)| own.same_but_tensors(key));
                let Some((_, value)) = own else { continue };
                let start = catalog.tensors.len();
                let value = import(fields.file, value, catalog);
                add_value(catalog, &mut by_rank, value, Rank(rank), start);
            }
            let value = if by_rank.len() == 1 { by_rank.remove(0).value } else { Value::Other(by_rank) };
            entries.push((key.clone(), value));
        }
    }
}

/// Returns the state dict of an optimizer.
fn state_dict(state: Vec<(Value, Value)>, groups: Vec<Value>) -> Value {
    let entries = vec![
        (Value::Str(STATE.into()), dict(DictKind::Plain, state)),
        (Value::Str(GROUPS.into()), Value::List(groups)),
    ];
    dict(DictKind::Plain, entries)
}

/// Returns a parameter group, which has names instead of numbers.
fn param_group(file: &RankFile, options: &Dict, names: impl Iterator<Item = Value>, catalog: &mut Catalog) -> Value {
    let mut names = Some(Value::List(names.collect()));
    let options = options.entries.iter().map(|(key, value)| match key.as_str() {
        Some(PARAMS) => (key.clone(), names.take().unwrap_or(Value::None)),
        _ => (key.clone(), import(file, value, catalog)),
    });
    dict(DictKind::Plain, options.collect())
}

/// Returns the state of one parameter.
fn own_state(
    files: &[&RankFile],
    group: &super::optimizer::FlatGroup<'_>,
    param: &Placed,
    catalog: &mut Catalog,
) -> Result<Value> {
    let mut entries = Vec::with_capacity(group.state.len());
    for (key, value) in &group.state {
        let value = match value {
            StateValue::Plain(value) => (*value).clone(),
            StateValue::Vectors(views) => {
                Value::Tensor(catalog.push_tensor(entry(files, views, &group.partitioned, param)?))
            }
            StateValue::Scalars(views) => Value::Tensor(catalog.push_tensor(whole(files[0], "", views[0]))),
            StateValue::Unknown(what) => {
                let kind = UnreadableKind::Tensor(what.clone());
                Value::Tensor(catalog.push_tensor(unreadable(files[0], "", kind)))
            }
        };
        entries.push((Value::Str((*key).into()), value));
    }
    Ok(dict(DictKind::Plain, entries))
}

/// Gives each tensor the first of its names in the state dict.
fn name_tensors(catalog: &mut Catalog) {
    let mut names: Vec<Option<Fqn>> = vec![None; catalog.tensors.len()];
    path::tensors(&catalog.state, &path::Path::default(), &mut |path, id| {
        names[id.0 as usize].get_or_insert_with(|| path.fqn());
    });
    for (entry, name) in catalog.tensors.iter_mut().zip(names) {
        if let Some(name) = name {
            entry.fqn = name;
        }
    }
}
