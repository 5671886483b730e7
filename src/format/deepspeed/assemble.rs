//! Makes the catalog of a checkpoint: parameters as boxes of the vectors of all partitions. No tensor data is read here.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use indexmap::{IndexMap, IndexSet};

use super::fields::Fields;
use super::folder::missing_layer;
use super::frozen;
use super::join::{Job, Param, Shard};
use super::model::{ModelStates, Module, OWN_KEYS, StoredValue, wrong_name};
use super::optimizer::StateValue;
use super::partitions::{Partitioned, Placed};
use super::tensor_parallel::{INFO, Joined};
use super::ties::{TIED_LAYERS, ties};
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
use crate::storage::FileId;

/// The keys of the model and of the optimizer in the state dict, as PyTorch's trainers name them.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

/// The values of a shard: those of a parameter, or of its optimizer state, in the vectors of all partitions.
struct Source<'a> {
    files: &'a [&'a RankFile],
    views: &'a [&'a View],
    partitioned: &'a Partitioned,
    placed: &'a Placed,
}

impl<'a> Source<'a> {
    fn new(shard: &Shard<'a>, views: &'a [&'a View]) -> Self {
        Self { files: &shard.group.files, views, partitioned: &shard.group.partitioned, placed: shard.placed }
    }

    /// Makes a chunk that stands for the complete shard of a tensor-parallel rank. It has the shape of the shard, and is in the
    /// file of the first partition.
    fn shard(&self, rank: Rank) -> Chunk {
        let tile = Tile::from_region(&Region::whole(&self.placed.shape));
        let location = self.files[0].contents.record_location(self.views[0]);
        Chunk { tile, location, strides: None, rank: Some(rank), view: None }
    }

    /// Adds the chunks of a box of the shard. `to` is the position of the box in the tensor.
    fn push(&self, from: &Region, to: &[u64], entry: &mut TensorEntry) {
        let shape = &self.placed.shape;
        let itemsize = entry.dtype.itemsize();
        let all_strides = contiguous_strides(shape);
        for piece in self.partitioned.pieces(self.placed) {
            let view = self.views[piece.partition];
            let location = self.files[piece.partition].contents.record_location(view);
            let FileLocation::Record { file, record, within } = location else { continue };
            let mut at = piece.at;
            for region in Region::cut(shape, piece.elements) {
                let start = at;
                at += region.numel();
                let Some(common) = region.intersect(from) else { continue };
                // The elements of `region` follow one another, those of `common` may have gaps.
                let steps = common.relative_to(&region.offsets);
                let skipped: u64 = steps.offsets.iter().zip(&all_strides).map(|(step, stride)| step * stride).sum();
                let within = within + (start + skipped) * itemsize;
                let own_strides = contiguous_strides(&common.sizes);
                let has_gaps =
                    (0..shape.len()).any(|dim| common.sizes[dim] > 1 && own_strides[dim] != all_strides[dim]);
                let mut moved = common.relative_to(&from.offsets);
                moved.offsets.iter_mut().zip(to).for_each(|(offset, first)| *offset += first);
                entry.chunks.push(Chunk {
                    tile: Tile::from_region(&moved),
                    location: FileLocation::Record { file, record, within },
                    strides: has_gaps.then(|| all_strides.clone()),
                    rank: None,
                    view: None,
                });
            }
        }
    }
}

/// Makes the entry of a parameter, or of its state, from its parts. `sources` has one shard for each tensor-parallel rank.
/// Without a known layout, the entry has the complete shards, and cannot be read.
///
/// # Errors
/// `Malformed` if the shape does not fit memory.
fn entry(fqn: &Fqn, joined: &Joined, sources: &[Source<'_>]) -> Result<TensorEntry> {
    let Joined { shape, parts, .. } = joined;
    let dtype = sources[0].views[0].dtype;
    if checked_len_bytes(shape, dtype).is_none() {
        let fields = Fields::of_file(sources[0].files[0])?;
        return Err(fields.wrong(fqn.as_str(), "a shape that fits memory", format!("{:?}", shape.as_slice())));
    }
    let mut entry = TensorEntry::new(fqn.clone(), dtype, shape.clone());
    if joined.is_unknown {
        let of_rank = |(rank, source): (u32, &Source<'_>)| source.shard(Rank(rank));
        (0..).zip(sources).map(of_rank).for_each(|chunk| entry.chunks.push(chunk));
        entry.unreadable = Some(Box::new(unknown_layout(sources[0].files[0], fqn, sources.len())));
        return Ok(entry);
    }
    if shape.contains(&0) {
        let tile = Tile::from_region(&Region::whole(shape));
        entry.chunks.push(Chunk { tile, location: FileLocation::Empty, strides: None, rank: None, view: None });
        return Ok(entry);
    }
    for part in parts {
        sources[part.shard].push(&part.from, &part.to, &mut entry);
    }
    Ok(entry)
}

/// Returns the reason why a parameter of unknown layout cannot be read.
fn unknown_layout(file: &RankFile, fqn: &Fqn, ranks: usize) -> Unreadable {
    let folder = file.path.parent().unwrap_or(&file.path);
    let kind = UnreadableKind::UnknownLayout {
        what: format!(
            "{fqn}: the model files do not say how {ranks} tensor-parallel ranks have cut this parameter: they have no `{INFO}`"
        ),
        hint: format!(
            "declare the layout with options::src_mesh tp={ranks} and with options::src_placements '{fqn}=LIST' for each kind of \
             parameter, such as '**.up.weight=S(0)', or with options::src_plan"
        ),
    };
    Unreadable { file: folder.to_path_buf(), kind }
}

/// Makes the entry of the master weights of a parameter.
pub fn master_entry(param: &Param<'_>) -> Result<TensorEntry> {
    let sources: Vec<Source<'_>> = param.shards.iter().map(|shard| Source::new(shard, &shard.group.masters)).collect();
    entry(param.fqn, &param.joined, &sources)
}

/// Makes the entry of a tensor that one file stores as a whole.
pub fn whole(file: &RankFile, fqn: &str, view: &View) -> TensorEntry {
    let mut entry = TensorEntry::new(fqn.into(), view.dtype, view.sizes.clone());
    let tile = Tile::from_region(&Region::whole(&view.sizes));
    let strides = (view.strides != contiguous_strides(&view.sizes)).then(|| view.strides.clone());
    entry.chunks.push(Chunk { tile, location: file.contents.record_location(view), strides, rank: None, view: None });
    entry
}

pub fn unreadable(file: &RankFile, fqn: &str, kind: UnreadableKind) -> TensorEntry {
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

pub fn dict(kind: DictKind, entries: Vec<(Value, Value)>) -> Value {
    Value::Dict(Dict { kind, entries, ..Dict::default() })
}

/// Makes the state dict of an optimizer from the state of each parameter, and from the parameter groups in `file`, each with
/// the names of its parameters. The options of a group are `None` if the file does not have them.
pub fn optimizer_dict(
    file: &RankFile,
    state: Vec<(Value, Value)>,
    groups: Vec<(Vec<Value>, Option<&Dict>)>,
    catalog: &mut Catalog,
) -> Value {
    let groups = groups.into_iter().map(|(names, options)| {
        let mut names = Some(Value::List(names));
        let Some(options) = options else {
            return dict(DictKind::Plain, names.map(|names| (Value::Str(PARAMS.into()), names)).into_iter().collect());
        };
        let options = options.entries.iter().map(|(key, value)| match key.as_str() {
            Some(PARAMS) => (key.clone(), names.take().unwrap_or(Value::None)),
            _ => (key.clone(), import(file, value, catalog)),
        });
        dict(DictKind::Plain, options.collect())
    });
    let groups = Value::List(groups.collect());
    let own = vec![(Value::Str(STATE.into()), dict(DictKind::Plain, state)), (Value::Str(GROUPS.into()), groups)];
    dict(DictKind::Plain, own)
}

/// The parts from which the catalog of a checkpoint is made.
#[derive(Clone, Copy)]
pub struct Parts<'a> {
    pub folder: &'a Path,
    /// The jobs of all model-parallel ranks.
    pub jobs: &'a [Job<'a>],
    /// The trained parameters of all jobs; empty at stage 0.
    pub params: &'a [Param<'a>],
    /// The frozen parameters, if there are several tensor-parallel ranks; otherwise empty.
    pub frozen: &'a HashMap<&'a str, &'a Param<'a>>,
    /// The state dict of the module on each tensor-parallel rank, of all stages of the pipeline.
    pub modules: &'a [&'a Module<'a>],
    pub is_pipeline: bool,
    pub is_stage3: bool,
    /// The values that parameters get. Without optimizer files, the module has the only ones.
    pub weights: Weights,
    pub stage0: Stage0<'a>,
    /// True if trained parameters need not be in the module.
    pub may_lack_trained: bool,
}

/// The optimizer of ZeRO stage 0, which is in the model file, or in the files of expert-parallel ranks.
#[derive(Clone, Copy)]
pub enum Stage0<'a> {
    /// The checkpoint is of another stage, or the optimizer is not read.
    None,
    /// The state dict of the optimizer of f32 parameters, which have numbers.
    Numbered(&'a Value),
    /// The state of each parameter, with the master weights of 16-bit parameters.
    Whole(&'a [WholeGroup<'a>]),
}

impl Parts<'_> {
    /// Makes the catalog.
    ///
    /// # Errors
    /// `Malformed` for names that contradict each other, `Unsupported` for kinds of tensors that dtshard does not read.
    pub fn catalog(&self) -> Result<Catalog> {
        let mut catalog = Catalog::empty();
        let mut masters: IndexMap<Fqn, TensorId> = IndexMap::new();
        let optimizer = match self.stage0 {
            Stage0::None => self.partitioned(&mut masters, &mut catalog)?,
            Stage0::Numbered(state) => Some(import(self.model().first().file, state, &mut catalog)),
            Stage0::Whole(groups) => Some(self.whole(groups, &mut masters, &mut catalog)),
        };
        self.complete(catalog, masters, optimizer)
    }

    /// Completes a catalog that has the tensors of the optimizer and the master weights of the trained parameters, if they are
    /// read.
    ///
    /// # Errors
    /// The errors of [`Self::catalog`].
    pub fn complete(
        &self,
        mut catalog: Catalog,
        masters: IndexMap<Fqn, TensorId>,
        optimizer: Option<Value>,
    ) -> Result<Catalog> {
        catalog.weights = Some(self.weights);
        let mut entries = vec![(Value::Str(MODEL.into()), self.model_dict(masters, &mut catalog)?)];
        entries.extend(optimizer.map(|optimizer| (Value::Str(OPTIMIZER.into()), optimizer)));
        self.add_objects(&mut entries, &mut catalog);
        catalog.state = dict(DictKind::Plain, entries);
        name_tensors(&mut catalog);
        Ok(catalog)
    }

    /// Returns the state dict of an optimizer that has whole tensors. Adds the master weights to `masters`.
    fn whole(&self, groups: &[WholeGroup<'_>], masters: &mut IndexMap<Fqn, TensorId>, catalog: &mut Catalog) -> Value {
        let (mut state, mut param_groups) = (Vec::new(), Vec::new());
        let mut params = groups.iter().flat_map(|group| &group.params);
        let file = params.next().map_or(self.model().first().file, |first| first.file);
        for group in groups {
            for WholeMaster { name, file, master, state: own, .. } in &group.params {
                if let Some(master) = master {
                    masters.insert((*name).into(), catalog.push_tensor(whole(file, name, master)));
                }
                state.extend(own.map(|own| (Value::Str((*name).into()), import(file, own, catalog))));
            }
            let names = group.params.iter().map(|param| Value::Str(param.name.into()));
            param_groups.push((names.collect(), Some(group.options)));
        }
        optimizer_dict(file, state, param_groups, catalog)
    }

    /// Returns the state dict of the optimizer in the optimizer files; `None` if there are none. Adds the master weights to
    /// `masters`, if they are read.
    fn partitioned(&self, masters: &mut IndexMap<Fqn, TensorId>, catalog: &mut Catalog) -> Result<Option<Value>> {
        let Some(first) = &self.jobs[0].optimizer else { return Ok(None) };
        let mut state = Vec::new();
        for param in self.params {
            if self.weights == Weights::Master {
                let id = catalog.push_tensor(master_entry(param)?);
                masters.insert(param.fqn.clone(), id);
            }
            if !param.shards[0].group.state.is_empty() {
                let own = own_state(param, catalog)?;
                state.push((Value::Str(param.fqn.into()), own));
            }
        }
        let groups = first
            .param_groups
            .iter()
            .zip(self.param_names())
            .map(|((_, options), names)| (names.iter().map(|name| Value::Str((*name).into())).collect(), *options));
        Ok(Some(optimizer_dict(first.first, state, groups.collect(), catalog)))
    }

    /// Returns the names of the parameters of each parameter group, in all jobs.
    fn param_names(&self) -> Vec<IndexSet<&Fqn>> {
        let mut all: Vec<IndexSet<&Fqn>> = Vec::new();
        for optimizer in self.jobs.iter().filter_map(|job| job.optimizer.as_ref()) {
            all.resize_with(all.len().max(optimizer.param_groups.len()), IndexSet::new);
            for (into, (names, _)) in all.iter_mut().zip(&optimizer.param_groups) {
                into.extend(names);
            }
        }
        all
    }

    /// Returns the model files of the first job.
    fn model(&self) -> &ModelStates<'_> {
        &self.jobs[0].model
    }

    /// Returns the state dict of the model, in the order of `module`. `values` has the master weights of the trained
    /// parameters, if they are read.
    fn model_dict(&self, values: IndexMap<Fqn, TensorId>, catalog: &mut Catalog) -> Result<Value> {
        let module = self.modules[0];
        let ties = ties(self.jobs, module, self.is_stage3, self.weights)?;
        let first = self.model().first();
        let mut values = values;
        let trained = values.len();
        // Only the first stage that uses a tied layer may have a file of it, and the file has another name for it.
        let is_tied_layer = |name: &Fqn| self.is_pipeline && name.as_str().starts_with(TIED_LAYERS);
        let is_lost = |name: &&Fqn| !module.contains_key(name.as_str()) && !is_tied_layer(name);
        if let Some(lost) = values.keys().find(is_lost).filter(|_| !self.may_lack_trained) {
            let layer = lost.as_str().split_once('.').and_then(|(layer, _)| layer.parse().ok());
            return Err(match layer.filter(|_| self.is_pipeline) {
                Some(layer) => missing_layer(self.folder, layer, lost.as_str()),
                None => wrong_name(first, lost.as_str(), "only names of `module`"),
            });
        }
        let tied: HashSet<&str> = ties.iter().map(|(alias, _)| &**alias).collect();
        // At stages 1 and 2, a further name of a parameter is a view of the same elements of `module`.
        let by_view: HashMap<(FileId, TensorId), TensorId> = if self.is_stage3 {
            HashMap::new()
        } else {
            let known = values.iter().filter(|(_, id)| catalog.tensor(**id).numel() > 0);
            known.filter_map(|(name, id)| Some((module.get(name.as_str())?.tensor()?, *id))).collect()
        };
        let mut imported: HashMap<(FileId, TensorId), TensorId> = HashMap::new();
        for (name, stored) in module {
            let name: &str = name;
            if values.contains_key(&Fqn::from(name)) || tied.contains(name) {
                continue;
            }
            let own = stored.tensor();
            let id = match own.and_then(|own| by_view.get(&own).or_else(|| imported.get(&own))) {
                Some(id) => *id,
                None => {
                    let id = catalog.push_tensor(self.untrained(name, *stored)?);
                    // At stage 3, all parameters have equal views, which have no elements.
                    if let Some(own) = own.filter(|_| catalog.tensor(id).numel() > 0) {
                        imported.insert(own, id);
                    }
                    id
                }
            };
            values.insert(name.into(), id);
        }
        for (alias, with) in &ties {
            let Some(id) = values.get(&Fqn::from(&**with)).copied() else {
                return Err(first.wrong(
                    "shared_params",
                    "names of parameters",
                    format!("`{with}`, which has no value"),
                ));
            };
            values.insert((&**alias).into(), id);
        }
        let tied = values.keys().take(trained).filter(|name| !module.contains_key(name.as_str()));
        let others = values.keys().skip(trained).filter(|name| !module.contains_key(name.as_str()));
        let own = module.keys().map(|name| Fqn::from(&**name));
        let order: Vec<Fqn> = tied.cloned().chain(own).chain(others.cloned()).collect();
        let entries = order.iter().map(|name| (Value::Str(name.into()), Value::Tensor(values[name])));
        Ok(dict(DictKind::Ordered, entries.collect()))
    }

    /// Makes the entry of a frozen parameter or of a buffer.
    fn untrained(&self, name: &str, stored: StoredValue<'_>) -> Result<TensorEntry> {
        let StoredValue { fields, value } = stored;
        if let Some(param) = self.frozen.get(name) {
            return master_entry(param);
        }
        if self.is_stage3 && frozen::is_partitioned(self.model(), name)? {
            let group = frozen::partitioned(self.folder, self.model(), name)?;
            let shard = Shard { model: self.model(), group: &group, placed: &group.partitioned.params[0] };
            let source = Source::new(&shard, &group.masters);
            return entry(&shard.placed.fqn, &Joined::whole(&shard.placed.shape), &[source]);
        }
        let Some(view) = fields.view(value) else {
            let kind = match value {
                Value::Tensor(id) => match &fields.file.contents.tensors[id.0 as usize] {
                    TensorNode::Unreadable(kind) => kind.clone(),
                    _ => UnreadableKind::Tensor(String::from("a distributed tensor")),
                },
                other => UnreadableKind::Object(other.type_name().into_owned()),
            };
            return Ok(unreadable(fields.file, name, kind));
        };
        let is_placeholder = self.is_stage3 && view.sizes.as_slice() == [0] && !self.model().buffers.contains(&name);
        if is_placeholder {
            let kind = UnreadableKind::Tensor(String::from(
                "a parameter without a value in the files, probably a further name of another parameter: at stage 3, \
                 only `shared_params` says of which one, and it does not list this name",
            ));
            return Ok(unreadable(fields.file, name, kind));
        }
        Ok(whole(fields.file, name, view))
    }

    /// Adds the values of the training loop. At stage 3, each rank saved its own values.
    fn add_objects(&self, entries: &mut Vec<(Value, Value)>, catalog: &mut Catalog) {
        let mut keys: Vec<&Value> = Vec::new();
        let files = || self.jobs.iter().flat_map(|job| &job.model.files);
        for fields in files() {
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
                    self.model().first().path().display(),
                    key.as_str().unwrap_or_default(),
                    key.as_str().unwrap_or_default(),
                ));
                continue;
            }
            let mut by_rank = Vec::new();
            for (rank, fields) in (0..).zip(files()) {
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

/// Returns the state of one parameter.
fn own_state(param: &Param<'_>, catalog: &mut Catalog) -> Result<Value> {
    let group = param.shards[0].group;
    let files = &group.files;
    let mut entries = Vec::with_capacity(group.state.len());
    for (key, value) in &group.state {
        let value = match value {
            StateValue::Plain(value) => (*value).clone(),
            StateValue::Vectors(_) => {
                let sources: Vec<Source<'_>> =
                    param.shards.iter().filter_map(|shard| Some(Source::new(shard, shard.vectors(key)?))).collect();
                Value::Tensor(catalog.push_tensor(entry(param.fqn, &param.joined, &sources)?))
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
