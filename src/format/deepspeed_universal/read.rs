//! Reads a checkpoint into a catalog: the model files as in other checkpoints of DeepSpeed, and a file for each value of
//! each trained parameter.
//!
//! `ds_to_universal.py` joins the shards of tensor-parallel ranks, and puts the parameters of all stages of a pipeline into one
//! folder. It copies the model file of each rank as it was. The shapes of the shards in these files, joined as the files
//! describe, are the shapes of the parameters.
//!
//! A folder in `zero` belongs to a trained parameter only if `param_shapes` of the model file lists its name. DeepSpeed
//! 0.19.8 also writes folders of buffers, of frozen parameters, and of further names of tied parameters, but converts
//! their values: they come from the model files.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use indexmap::{IndexMap, IndexSet};

use super::{FOLDER, OPTIMIZER_FILE};
use crate::catalog::optimizer::{GROUPS, PARAMS, STATE};
use crate::catalog::unreadable::UnreadableKind;
use crate::catalog::{Catalog, Chunk, Dict, DictKind, Fqn, TensorEntry, Value, Weights};
use crate::error::{Error, FormatError, Result};
use crate::format::deepspeed::assemble::{Parts, Stage0, dict, optimizer_dict, unreadable, whole};
use crate::format::deepspeed::bytes::check_copies;
use crate::format::deepspeed::fields::{Fields, is_vector};
use crate::format::deepspeed::folder::{FolderFiles, GATHER, leftover, refused};
use crate::format::deepspeed::frozen;
use crate::format::deepspeed::join::{self, Job, Shards, StageLayouts, by_parameter, check_same_shape};
use crate::format::deepspeed::model::{ModelStates, Module, wrong_name};
use crate::format::deepspeed::names::{LayerName, Role, StatesName, is_expert, is_states};
use crate::format::deepspeed::optimizer::{FlatGroup, Shapes};
use crate::format::deepspeed::read::{
    check_jobs, check_world_size, dropped_values, load_files, load_named, read_pipeline, without_module,
};
use crate::format::deepspeed::tensor_parallel::{INFO, Joined};
use crate::format::deepspeed::ties::{ShardMasters, TIED_LAYERS, unrecorded_ties};
use crate::format::reading::ReadFindings;
use crate::format::scalar::read_scalar;
use crate::format::torch::{RankFile, TensorNode, View, load};
use crate::format::{list, name_of};
use crate::layout::{Dims, Region, Tile};
use crate::name_list::{FEW, short_list};
use crate::quantity::count;
use crate::storage::lookup;
use torch_pickle::pickle::Unknown;

/// The value of a parameter with its master weights.
const MASTER: &str = "fp32";
/// The value of a parameter with the number of steps.
const STEP: &str = "step";

/// Reads a checkpoint.
///
/// # Errors
/// `Unsupported` for kinds of checkpoints that dtshard does not read; `Missing`, `Malformed`, `Io`.
pub fn read(reading: &mut ReadFindings<'_>, folder: &Path) -> Result<Catalog> {
    let names = list(folder)?;
    refuse_unfinished(folder)?;
    let found = FolderFiles::find(folder, &model_names(&names))?;
    if let Some(name) = found.experts.values().next() {
        return Err(refused(folder, &format!("with experts ({})", name_of(name)), GATHER));
    }
    let mut model_files = Vec::with_capacity(found.jobs.len());
    for own in &found.jobs {
        model_files.push(load_files(reading, &own.model, reading.options.unknown())?);
    }
    let dropped: IndexSet<String> = model_files.iter().flat_map(|files| dropped_values(files)).collect();
    let layers = load_named(reading, &found.layers)?;
    let is_pipeline = !layers.is_empty() || is_pipeline(&model_files)?;
    let mut jobs = Vec::with_capacity(found.jobs.len());
    for (own, files) in found.jobs.iter().zip(&model_files) {
        jobs.push(Job { model: ModelStates::read(folder, own, files, is_pipeline)?, optimizer: None });
    }
    let is_stage3 = found.jobs[0].is_stage3;
    for (Job { model, .. }, own) in jobs.iter().zip(&found.jobs).filter(|_| is_stage3) {
        // With MiCS, fewer ranks save files.
        let first = model.first();
        let ranks = first.number("dp_world_size")?.and_then(|ranks| u32::try_from(ranks).ok());
        if let Some(ranks) = ranks.filter(|_| model.zero_setting("mics_shard_size").is_none()) {
            own.check_partitions(folder, ranks, &format!("dp_world_size in {}", first.file_name()))?;
        }
    }
    if is_stage3 && is_pipeline {
        return Err(refused(folder, "in Universal form, of ZeRO stage 3 and pipeline parallelism", GATHER));
    }
    let mut shapes = Vec::with_capacity(jobs.len());
    for Job { model, .. } in &jobs {
        let Some(own) = model.param_shapes()? else {
            return Err(model.first().wrong("param_shapes", "the shapes of the parameters of each group", "none"));
        };
        shapes.push(own);
    }
    check_world_size(folder, &found, jobs[0].model.first())?;
    let ranks =
        if is_pipeline && layers.is_empty() { stage_ranks(&jobs, &shapes) } else { found.tensor_parallel(folder)? };
    check_jobs(&jobs, ranks)?;
    if !jobs.len().is_multiple_of(ranks) {
        let expected = format!("a multiple of {ranks}, the number of tensor-parallel ranks");
        return Err(leftover(folder, "the number of model-parallel ranks", expected, jobs.len().to_string()));
    }
    let layouts = StageLayouts::read(&jobs, ranks)?;
    let params = Trained::read(&jobs, &shapes, &layouts)?;
    let first = *jobs[0].model.first();
    let zero = folder.join(FOLDER);
    let listed = ParamFiles::list(&zero, &first, params.iter().map(|param| param.fqn))?;
    let files = load::load(&mut reading.files, &listed.paths(), Unknown::Refuse)?;
    let path = zero.join(OPTIMIZER_FILE);
    if !lookup::is_file(&path)? {
        return Err(missing(&zero, "the options of the parameter groups", &[String::from(OPTIMIZER_FILE)]));
    }
    let optimizer_files = load::load(&mut reading.files, &BTreeMap::from([(0, path)]), Unknown::Refuse)?;
    let optimizer = OptimizerFile::read(&optimizer_files[0], &shapes, &params, is_stage3)?;
    let values = listed.values(&files);

    let weights = reading.options.weights.unwrap_or(Weights::Master);
    let with_masters = if weights == Weights::Master { params.as_slice() } else { &[] };
    let trained: HashSet<&str> = with_masters.iter().map(|param| param.fqn.as_str()).collect();
    let groups = if is_pipeline { masters(with_masters, &values)? } else { Vec::new() };
    let of_rank = |rank: usize| groups.iter().map(|(param, group)| param.shard_masters(group, rank)).collect();
    let shard_masters: Vec<Vec<ShardMasters<'_>>> = (0..ranks).filter(|_| is_pipeline).map(of_rank).collect();
    let pipeline = read_pipeline(reading, folder, &layers, &trained, &shard_masters)?.without_tied_layers();
    let modules: Vec<&Module<'_>> =
        if is_pipeline { pipeline.iter().collect() } else { jobs.iter().map(|job| &job.model.module).collect() };
    // The file of a tied layer has the number of the layer.
    let has_values =
        |param: &Trained<'_>| modules[0].contains_key(param.fqn.as_str()) || !layers.is_empty() && param.is_tied();
    if weights == Weights::Module && (is_stage3 || !params.iter().all(has_values)) {
        return Err(without_module(folder, "in Universal form, which has master weights only"));
    }
    let unrecorded = match shard_masters.first() {
        Some(own) => unrecorded_ties(reading, &jobs, modules[0], own)?,
        None => None,
    };
    let shards =
        if ranks > 1 { frozen::shards(folder, &jobs, &modules, &trained, (is_stage3, weights))? } else { vec![] };
    let frozen = join::frozen(&jobs, &shards, &layouts)?;
    if reading.options.holdings.is_empty() {
        check_copies(&reading.files, &frozen.iter().collect::<Vec<_>>())?;
    }
    // No other file in the folder is part of the state dict, but all of them are part of the checkpoint.
    let below = files_below(&zero)?;
    refuse_surplus(&below, &params)?;
    reading.other_files.extend(below);
    reading.other_files.extend(names.iter().filter(|name| is_states(name)).map(|name| folder.join(name)));

    let mut catalog = Catalog::empty();
    let (mut masters, mut state) = (IndexMap::new(), Vec::new());
    let mut steps: Vec<Steps> = Vec::new();
    for (param, values) in params.iter().zip(&values) {
        let fqn = param.fqn;
        let mut own = Vec::new();
        for (key, file) in values {
            let value = match *key {
                STEP => step(file, &mut catalog)?,
                _ => Value::Tensor(catalog.push_tensor(tensor(folder, file, param)?)),
            };
            match (*key, &value) {
                (MASTER, _) if weights == Weights::Module => {}
                (MASTER, Value::Tensor(id)) => _ = masters.insert(fqn.clone(), *id),
                (STEP, _) => {
                    if reading.options.holdings.is_empty() {
                        steps.resize_with(steps.len().max(param.group + 1), Steps::default);
                        steps[param.group].check(reading, file, &value, &catalog)?;
                    }
                    own.push((Value::Str(STEP.into()), value));
                }
                (key, _) => own.push((Value::Str(key.into()), value)),
            }
        }
        if let Some(step) = optimizer.step.filter(|_| !own.is_empty()) {
            // Stage 3 stores one counter for all parameters.
            let own_step = match step {
                Value::Tensor(id) => match &optimizer_files[0].contents.tensors[id.0 as usize] {
                    TensorNode::Plain(view) => Value::Tensor(catalog.push_tensor(whole(&optimizer_files[0], "", view))),
                    _ => Value::None,
                },
                other => other.clone(),
            };
            own.push((Value::Str(STEP.into()), own_step));
        }
        if !own.is_empty() {
            state.push((Value::Str(fqn.into()), dict(DictKind::Plain, own)));
        }
    }
    if is_pipeline && layers.is_empty() {
        catalog.warnings.push(without_layers(folder));
        for model in jobs.iter().map(|job| &job.model) {
            let file = model.first().file;
            for name in &model.buffers {
                let kind = UnreadableKind::Tensor(format!("a buffer of a pipeline, without a value: {COPY}"));
                masters.entry(Fqn::from(*name)).or_insert_with(|| catalog.push_tensor(unreadable(file, name, kind)));
            }
        }
    }
    let groups = optimizer
        .groups
        .iter()
        .map(|(names, options)| (names.iter().map(|name| Value::Str((*name).into())).collect(), Some(*options)));
    let optimizer = optimizer_dict(&optimizer_files[0], state, groups.collect(), &mut catalog);
    let parts = Parts {
        folder,
        jobs: &jobs,
        params: &[],
        frozen: &frozen.iter().map(|param| (param.fqn.as_str(), param)).collect(),
        modules: &modules,
        is_pipeline,
        is_stage3,
        weights,
        stage0: Stage0::None,
        may_lack_trained: layers.is_empty(),
    };
    let mut catalog = parts.complete(catalog, masters, Some(optimizer))?;
    let model_files = || model_files.iter().flatten();
    let all = model_files().chain(layers.iter().map(|(_, file)| file)).chain(&files).chain(&optimizer_files);
    catalog.archives = all.map(|file| file.contents.file_range()).collect();
    catalog.dropped = dropped.into_iter().collect();
    catalog.warnings.extend(unrecorded);
    Ok(catalog)
}

/// The advice for a pipeline without files of layers.
const COPY: &str =
    "copy `layer_*-model_states.pt` from the checkpoint that ds_to_universal.py has read into the folder";

/// Returns the warning about a pipeline without files of layers.
fn without_layers(folder: &Path) -> String {
    format!(
        "{}: the buffers and the frozen parameters of this pipeline, if it has any, are missing, and nothing shows the names of \
         the frozen ones: ds_to_universal.py does not copy the files of layers; {COPY}",
        folder.display()
    )
}

/// Returns whether the model files have no module, as those of a pipeline.
fn is_pipeline(files: &[Vec<RankFile>]) -> Result<bool> {
    const KEY: &str = "module";
    let mut all = Vec::with_capacity(files.len());
    for files in files {
        let fields = Fields::of_file(&files[0])?;
        all.push((fields, !matches!(fields.dict.get(KEY), Some(Value::None))));
    }
    let (first, first_has_module) = all[0];
    let show = |has_module: bool| if has_module { "a state dict" } else { "none" };
    match all.iter().find(|(_, has_module)| *has_module != first_has_module) {
        Some((other, has_module)) => {
            let expected = format!("{} as in {}", show(first_has_module), first.file_name());
            Err(leftover(other.path(), KEY, expected, show(*has_module)))
        }
        None => Ok(!first_has_module),
    }
}

/// Returns the number of tensor-parallel ranks of each stage of a pipeline without files of layers: as the files record, or
/// else the number of ranks from rank 0 on that have the same parameters. Stages have different ones.
fn stage_ranks(jobs: &[Job<'_>], shapes: &[Vec<Shapes>]) -> usize {
    let names = |own: &Vec<Shapes>| own.iter().flatten().map(|(fqn, _)| fqn.clone()).collect::<Vec<Fqn>>();
    let recorded = jobs[0].model.tensor_parallel().and_then(|ranks| usize::try_from(ranks).ok());
    let ranks = recorded.unwrap_or_else(|| {
        let first = names(&shapes[0]);
        shapes.iter().take_while(|own| names(own) == first).count()
    });
    ranks.max(1)
}

/// A trained parameter.
struct Trained<'a> {
    fqn: &'a Fqn,
    /// The number of the group in `param_shapes`.
    group: usize,
    /// The shape of the shard of each tensor-parallel rank.
    shards: Vec<&'a Dims>,
    joined: Joined,
}

/// The hint for a checkpoint that DeepSpeed's script may have joined in a wrong way.
const FROM_ZERO: &str = "convert the ZeRO checkpoint of which it was made, and declare the layout there with options::src_mesh and \
                         options::src_placements";

impl<'a> Trained<'a> {
    /// Returns the parameters of all jobs. `shapes` is `param_shapes` of each job.
    ///
    /// # Errors
    /// `Malformed` for files that contradict each other, `Unsupported` for shards that no file describes.
    fn read(jobs: &[Job<'_>], shapes: &'a [Vec<Shapes>], layouts: &StageLayouts<'_>) -> Result<Vec<Self>> {
        let ranks = layouts.tensor_parallel;
        let groups = shapes
            .iter()
            .enumerate()
            .flat_map(|(number, own)| own.iter().enumerate().map(move |(group, own)| (number, group, own)));
        let shards = groups
            .flat_map(|(number, group, own)| own.iter().map(move |(fqn, shape)| (number, fqn, (number, group, shape))));
        let one = |(fqn, Shards { stage, all }): (&'a Fqn, Shards<(usize, usize, &'a Dims)>)| {
            let (first, others) = all.split_at(ranks);
            let model = |number: usize| jobs[number].model.first();
            for (place, (number, _, shape)) in others.iter().enumerate() {
                let (own, _, own_shape) = first[place % ranks];
                check_same_shape(fqn, (model(own), own_shape), (model(*number), shape))?;
            }
            let shapes: Vec<&Dims> = first.iter().map(|(.., shape)| *shape).collect();
            let file = model(stage * ranks);
            let joined = layouts.join(fqn, stage, &shapes, file)?;
            if joined.is_unknown {
                // Without a description, `ds_to_universal.py --inject_missing_state` puts also copies one after another.
                let kind = format!("in Universal form, of {ranks} tensor-parallel ranks without `{INFO}` (`{fqn}`)");
                return Err(refused(file.path(), &kind, FROM_ZERO));
            }
            Ok(Self { fqn, group: first[0].1, shards: shapes, joined })
        };
        by_parameter(jobs, ranks, shards)?.into_iter().map(one).collect()
    }

    /// Returns whether the parameter is of a layer that several stages of a pipeline use.
    fn is_tied(&self) -> bool {
        self.fqn.as_str().starts_with(TIED_LAYERS)
    }

    /// Returns the master weights of the parameter for a tensor-parallel rank. `group` has them.
    fn shard_masters<'b>(&'b self, group: &'b FlatGroup<'b>, rank: usize) -> ShardMasters<'b> {
        let Joined { parts, copies, .. } = &self.joined;
        let own = parts.iter().chain(copies.iter().map(|[_, copy]| copy)).filter(|part| part.shard == rank);
        let placed = &group.partitioned.params[0];
        let stored = Region::whole(&placed.shape);
        let boxes = own.filter_map(|part| {
            let common = Region { offsets: part.to.clone(), sizes: part.from.sizes.clone() }.intersect(&stored)?;
            let mut shard = common.relative_to(&part.to);
            shard.offsets.iter_mut().zip(&part.from.offsets).for_each(|(offset, first)| *offset += first);
            Some([common, shard])
        });
        ShardMasters { fqn: self.fqn, shape: self.shards[rank], boxes: boxes.collect(), group, placed }
    }
}

/// Returns the master weights of the parameters of a pipeline. `values` has the files of each parameter.
fn masters<'a>(
    params: &'a [Trained<'a>],
    values: &[Vec<(&str, &'a RankFile)>],
) -> Result<Vec<(&'a Trained<'a>, FlatGroup<'a>)>> {
    let mut found = Vec::new();
    for (param, values) in params.iter().zip(values) {
        let file = values.iter().find_map(|(key, file)| (*key == MASTER).then_some(*file));
        let Some(file) = file else { continue };
        let (_, TensorNode::Plain(view)) = node(file)? else { continue };
        // A tensor of another shape is an error later.
        if view.sizes.len() != param.joined.shape.len() {
            continue;
        }
        found.extend(FlatGroup::of_tensor(param.fqn.clone(), file, view).map(|group| (param, group)));
    }
    Ok(found)
}

/// Refuses a folder in which ds_to_universal.py was interrupted.
fn refuse_unfinished(folder: &Path) -> Result<()> {
    const NAME: &str = "tmp";
    if !lookup::is_folder(&folder.join(NAME))? {
        return Ok(());
    }
    Err(Error::Format(FormatError::Malformed {
        path: folder.to_path_buf(),
        at: String::from("the folders"),
        expected: String::from("a finished Universal checkpoint"),
        found: format!("the folder `{NAME}` of an interrupted run of ds_to_universal.py"),
        hint: Some(format!("run ds_to_universal.py again; if it ran with --keep_temp_folder, remove `{NAME}`").into()),
    }))
}

/// Returns the names of the model files to read. A folder that dtshard wrote has the files of all stages: those of stage
/// 3 have no values.
fn model_names(names: &[String]) -> Vec<String> {
    let role = |name: &String| StatesName::parse(name).map(|name| name.role);
    let has_whole = names.iter().any(|name| role(name) == Some(Role::Model));
    let is_read = |name: &&String| match role(name) {
        Some(Role::Model) => true,
        Some(Role::PartitionedModel) => !has_whole,
        Some(Role::Optimizer) => false,
        None => LayerName::parse(name).is_some() || is_expert(name),
    };
    let mut read: Vec<String> = names.iter().filter(is_read).cloned().collect();
    read.sort_unstable();
    read
}

/// The files of the trained parameters.
struct ParamFiles {
    zero: PathBuf,
    names: Vec<Fqn>,
    /// For each parameter, the sorted names of its values: `exp_avg`, `exp_avg_sq`, `fp32`, `step`.
    params: Vec<Vec<String>>,
}

impl ParamFiles {
    /// Lists the folders of parameters.
    ///
    /// # Errors
    /// `Missing` with the names of missing folders and files, `Malformed` for a name that is not the name of a folder.
    fn list<'a>(zero: &Path, model: &Fields<'_>, params: impl Iterator<Item = &'a Fqn>) -> Result<Self> {
        let mut found = Self { zero: zero.to_path_buf(), names: Vec::new(), params: Vec::new() };
        let mut lost = Vec::new();
        for fqn in params {
            let name = fqn.as_str();
            // The name is a path in the file system, so it must not lead out of the folder.
            if Path::new(name).file_name().is_none_or(|file| file != name) || name.contains('\0') {
                return Err(wrong_name(model, name, "names of folders"));
            }
            let folder = zero.join(name);
            let names = if lookup::is_folder(&folder)? { list(&folder)? } else { Vec::new() };
            let mut keys: Vec<String> =
                names.iter().filter_map(|name| name.strip_suffix(".pt").map(str::to_owned)).collect();
            keys.sort_unstable();
            if !keys.iter().any(|key| key == MASTER) {
                lost.push(format!("{name}/{MASTER}.pt"));
            }
            found.names.push(fqn.clone());
            found.params.push(keys);
        }
        if !lost.is_empty() {
            return Err(missing(zero, "the master weights of each parameter", &lost));
        }
        // Every parameter of a group has the same values, so a parameter with fewer values has lost a file.
        let all: BTreeSet<&String> = found.params.iter().flatten().collect();
        let named = found.names.iter().zip(&found.params);
        let lost: Vec<String> = named
            .flat_map(|(name, keys)| {
                let lacks = all.iter().filter(|key| !keys.contains(key));
                lacks.map(move |key| format!("{name}/{key}.pt"))
            })
            .collect();
        if lost.is_empty() {
            return Ok(found);
        }
        Err(missing(zero, "the same files for each parameter", &lost))
    }

    /// Returns the values of each parameter with their names. `files` are the files of [`Self::paths`].
    fn values<'a>(&'a self, files: &'a [RankFile]) -> Vec<Vec<(&'a str, &'a RankFile)>> {
        let mut files = files.iter();
        let of_param = |keys: &'a Vec<String>| keys.iter().map(String::as_str).zip(files.by_ref()).collect();
        self.params.iter().map(of_param).collect()
    }

    /// Returns the paths of all files, in the order of the parameters and their values.
    fn paths(&self) -> BTreeMap<u32, PathBuf> {
        let named = self.names.iter().zip(&self.params);
        let paths = named.flat_map(|(name, keys)| {
            keys.iter().map(move |key| self.zero.join(name.as_str()).join(format!("{key}.pt")))
        });
        (0..).zip(paths).collect()
    }
}

fn missing(zero: &Path, expected: &str, names: &[String]) -> Error {
    Error::missing(zero, "the files of the parameters", expected, short_list(names, FEW))
        .missing_hint("copy the whole folder again, or run ds_to_universal.py again")
        .naming(names)
}

/// Returns the files in the folder of the parameters and in its subfolders.
fn files_below(zero: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for name in list(zero)? {
        let path = zero.join(name);
        if lookup::is_folder(&path)? {
            found.extend(list(&path)?.into_iter().map(|name| path.join(name)));
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

/// Refuses optimizer state of a name that is not a trained parameter. ds_to_universal.py writes the values of frozen
/// parameters and of buffers, too, but they have no optimizer state.
fn refuse_surplus(files: &[PathBuf], params: &[Trained<'_>]) -> Result<()> {
    let trained: HashSet<&str> = params.iter().map(|param| param.fqn.as_str()).collect();
    for path in files {
        let [key, name] = [path.file_name(), path.parent().and_then(Path::file_name)];
        let key = key.and_then(|key| key.to_str()?.strip_suffix(".pt")).filter(|key| *key != MASTER);
        let name = name.and_then(|name| name.to_str()).filter(|name| *name != FOLDER && !trained.contains(name));
        if let (Some(key), Some(name)) = (key, name) {
            let expected = "no optimizer state, because param_shapes in the model files does not list this parameter";
            return Err(leftover(path, &format!("the folder `{name}`"), expected, format!("{key}.pt")));
        }
    }
    Ok(())
}

/// Returns the tensor in the file of a parameter, with its position in the file.
fn node(file: &RankFile) -> Result<(&'static str, &TensorNode)> {
    const PARAM: &str = "param";
    let (at, value) = match &file.contents.value {
        Value::Dict(dict) => (PARAM, dict.get(PARAM)),
        bare => ("the pickled value", Some(bare)),
    };
    match value {
        Some(Value::Tensor(id)) => Ok((at, &file.contents.tensors[id.0 as usize])),
        other => {
            let found = other.map_or_else(|| String::from("none"), |value| value.type_name().into_owned());
            Err(Error::malformed(&file.path, at, "a tensor", found))
        }
    }
}

/// Makes the entry of a tensor in the file of a parameter.
fn tensor(folder: &Path, file: &RankFile, param: &Trained<'_>) -> Result<TensorEntry> {
    let Trained { fqn, joined, shards, .. } = param;
    let shape = &joined.shape;
    let is_true = |key: &str| {
        let value = file.contents.value.as_dict().and_then(|dict| dict.get(key));
        matches!(value, Some(Value::Bool(true)))
    };
    if is_true("is_expert_param") {
        return Err(refused(folder, &format!("with experts ({fqn})"), GATHER));
    }
    let (at, node) = node(file)?;
    let view = match node {
        TensorNode::Plain(view) => view,
        TensorNode::Unreadable(kind) => return Ok(unreadable(file, fqn.as_str(), kind.clone())),
        TensorNode::Distributed { .. } | TensorNode::Sharded { .. } => {
            return Err(Error::malformed(&file.path, at, "a plain tensor", "a distributed tensor"));
        }
    };
    if !view.dtype.is_float() {
        return Err(Error::malformed(&file.path, at, "floating-point numbers", view.dtype.to_string()));
    }
    if view.sizes == *shape {
        return Ok(whole(file, fqn.as_str(), view));
    }
    // The rows with which Megatron-DeepSpeed pads a vocabulary are not in the file. The layout of several shards says how many
    // rows they are.
    if shards.len() == 1 && is_true("vocab_tensor") && is_without_rows(&view.sizes, shape) {
        return Ok(whole(file, fqn.as_str(), view));
    }
    // Stage 3 stores a vector.
    match is_vector(view).then(|| crate::layout::numel(shape)).flatten() {
        Some(numel) if view.sizes[0] == numel => Ok(shaped(file, fqn, view, shape)),
        _ => {
            let ranks = match shards.len() {
                1 => String::new(),
                ranks => format!(" of {ranks} tensor-parallel ranks"),
            };
            let expected = format!("a tensor of shape {:?} (param_shapes of the model file{ranks})", shape.as_slice());
            Err(leftover(&file.path, at, expected, format!("{:?}", view.sizes.as_slice())))
        }
    }
}

/// Returns whether a shape is another shape with fewer rows.
fn is_without_rows(sizes: &[u64], shape: &[u64]) -> bool {
    sizes.len() == shape.len() && !sizes.is_empty() && sizes[0] < shape[0] && sizes[1..] == shape[1..]
}

/// Makes the entry of a tensor whose elements are a vector in the file.
fn shaped(file: &RankFile, fqn: &Fqn, view: &View, shape: &Dims) -> TensorEntry {
    let mut entry = TensorEntry::new(fqn.clone(), view.dtype, shape.clone());
    let tile = Tile::from_region(&Region::whole(shape));
    let location = file.contents.record_location(view);
    entry.chunks.push(Chunk { tile, location, strides: None, rank: None, view: None });
    entry
}

/// Returns the number of steps in a file `step.pt`.
fn step(file: &RankFile, catalog: &mut Catalog) -> Result<Value> {
    let wrong = |found: String| Error::malformed(&file.path, "the pickled value", "a number", found);
    match &file.contents.value {
        Value::Int(number) => Ok(Value::Int(*number)),
        Value::Tensor(id) => match &file.contents.tensors[id.0 as usize] {
            TensorNode::Plain(view) if view.sizes.is_empty() => {
                Ok(Value::Tensor(catalog.push_tensor(whole(file, "", view))))
            }
            _ => Err(wrong(String::from("a tensor of another kind"))),
        },
        other => Err(wrong(other.type_name().into_owned())),
    }
}

/// The counters of steps of the parameters of a group, which DeepSpeed requires to be equal.
#[derive(Default)]
struct Steps {
    first: Option<(f64, PathBuf)>,
}

impl Steps {
    /// Compares the counter of a parameter with the counters before it.
    fn check(&mut self, reading: &ReadFindings<'_>, file: &RankFile, value: &Value, catalog: &Catalog) -> Result<()> {
        #[allow(clippy::cast_precision_loss, reason = "no job makes 2^53 steps")]
        let number = match value {
            Value::Int(number) => Some(*number as f64),
            Value::Tensor(id) => read_scalar(&reading.files, catalog.tensor(*id))?,
            _ => None,
        };
        let Some(number) = number else { return Ok(()) };
        let (first, path) = self.first.get_or_insert_with(|| (number, file.path.clone()));
        if first.to_bits() == number.to_bits() {
            return Ok(());
        }
        let folder = path.parent().and_then(Path::file_name).unwrap_or_default().display();
        Err(leftover(&file.path, "the number of steps", format!("{first} as for {folder}"), number.to_string()))
    }
}

/// The content of `optimizer_state.pt`.
struct OptimizerFile<'a> {
    /// The names of the parameters of each group, and the options.
    groups: Vec<(Vec<&'a Fqn>, &'a Dict)>,
    /// The number of steps, which stage 3 stores here.
    step: Option<&'a Value>,
}

impl<'a> OptimizerFile<'a> {
    /// Reads the file. `shapes` is `param_shapes` of each job.
    fn read(file: &'a RankFile, shapes: &[Vec<Shapes>], params: &[Trained<'a>], is_stage3: bool) -> Result<Self> {
        let root = Fields::of_file(file)?;
        let own = if is_stage3 {
            const KEY: &str = "optimizer_state_dict";
            root.dict(KEY)?.ok_or_else(|| root.wrong(KEY, "the state dict of the optimizer", "none"))?
        } else {
            root
        };
        let wrong = || own.wrong(GROUPS, "parameter groups with numbers of parameters", "others");
        let mut groups = Vec::new();
        let mut start = 0;
        for group in own.list(GROUPS)? {
            let group = group.as_dict().ok_or_else(wrong)?;
            // dtshard writes empty groups after the groups of the optimizer.
            if group.entries.is_empty() {
                continue;
            }
            let Some(Value::List(numbers)) = group.get(PARAMS) else { return Err(wrong()) };
            // A parameter group of stage 3 lists its sub-groups.
            let end = start + if is_stage3 { numbers.len() } else { 1 };
            let of_group = params.iter().filter(|param| (start..end).contains(&param.group));
            groups.push((of_group.map(|param| param.fqn).collect(), group));
            start = end;
        }
        // The ranks of stage 3 can have different sub-groups, but the first rank, which writes the file, has all parameters.
        let jobs = if is_stage3 { &shapes[..1] } else { shapes };
        if let Some(other) = jobs.iter().map(Vec::len).find(|groups| *groups != start) {
            let expected = format!("{} (param_shapes of the model file)", count(other, "group"));
            return Err(own.wrong(GROUPS, expected, "another number"));
        }
        let first = || {
            let states = own.get(STATE)?.as_dict()?;
            let (_, first) = states.entries.iter().find(|(key, _)| key.as_i64() == Some(0))?;
            first.as_dict()?.get(STEP)
        };
        Ok(Self { groups, step: if is_stage3 { first() } else { None } })
    }
}
