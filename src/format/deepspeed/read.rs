//! Reads the files of a checkpoint into a catalog.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use indexmap::IndexSet;

use super::assemble::{Parts, Stage0};
use super::bytes::{check_copies, check_padding, check_steps};
use super::declared::DeclaredShards;
use super::expert_ranks::OPTIMIZER;
use super::fields::Fields;
use super::folder::{FolderFiles, GATHER, StatesFiles, leftover, refused};
use super::frozen;
use super::join::{Job, Param, Shard, StageLayouts, frozen as frozen_params, params};
use super::model::{ModelStates, Module, OWN_KEYS, TENSOR_PARALLEL, check_optimizer_file, check_same_job, read_layers};
use super::names::{LayerName, Role, StatesName};
use super::optimizer::{self, OptimizerStates, options_without};
use super::ties::{ShardMasters, tied_layers, unrecorded_ties};
use super::whole_masters::Candidate;
use super::{expert_ranks, mappings, whole_masters};
use crate::catalog::optimizer::{GROUPS, PARAMS};
use crate::catalog::{Catalog, Dict, Dtype, Fqn, Value, Weights};
use crate::error::{Error, Result};
use crate::format::foreign::{first_bytes, refuse_file};
use crate::format::reading::ReadFindings;
use crate::format::torch::{RankFile, dropped_objects, load};
use crate::format::{list, name_of};
use crate::layout::Region;
use crate::quantity::count;
use torch_pickle::pickle::Unknown;

/// Reads a checkpoint.
///
/// # Errors
/// `Unsupported` for kinds of DeepSpeed checkpoints that dtshard does not read; `Missing`, `Malformed`, `Io`.
pub fn read(reading: &mut ReadFindings<'_>, folder: &Path) -> Result<Catalog> {
    let mut names = list(folder)?;
    names.sort_unstable();
    let found = FolderFiles::find(folder, &names)?;
    let tensor_parallel = found.tensor_parallel(folder)?;
    let mut files = Vec::with_capacity(found.jobs.len());
    for own in &found.jobs {
        files.push(JobFiles::load(reading, own)?);
    }
    let layers = load_named(reading, &found.layers)?;
    let experts = load_named(reading, &found.experts)?;
    let unknown = reading.options.unknown();
    let expert_ranks = load_files(reading, &found.expert_ranks, unknown)?;
    let mut jobs = Vec::with_capacity(files.len());
    for (own, files) in found.jobs.iter().zip(&files) {
        let mut model = ModelStates::read(folder, own, &files.model, !layers.is_empty())?;
        found.check_experts(folder, &model.expert_counts()?)?;
        model.add_experts(experts.iter().map(|(name, file)| (*name, file)))?;
        jobs.push(read_job(folder, own, model, &files.optimizer)?);
    }
    check_world_size(folder, &found, jobs[0].model.first())?;
    check_jobs(&jobs, tensor_parallel)?;
    let layouts = StageLayouts::read(&jobs, tensor_parallel)?;
    let mut params = params(&jobs, &layouts)?;
    let weights = reading.options.weights.unwrap_or(Weights::Master);
    let is_pipeline = !layers.is_empty();
    let declared = reading.options.declared_layout.as_ref();
    // Tied layers of the module have the layout that is declared for their ties.
    let with_ties = if weights == Weights::Master || declared.is_some() { params.as_slice() } else { &[] };
    let names: HashSet<&str> = with_ties.iter().map(|param| param.fqn.as_str()).collect();
    let of_rank = |rank: usize| {
        let masters = with_ties.iter().map(|Param { fqn, shards, .. }| {
            let Shard { group, placed, .. } = shards[rank];
            let whole = Region::whole(&placed.shape);
            ShardMasters { fqn, shape: &placed.shape, group, placed, boxes: vec![[whole.clone(), whole]] }
        });
        masters.collect::<Vec<_>>()
    };
    let shard_masters: Vec<Vec<ShardMasters<'_>>> = (0..tensor_parallel).filter(|_| is_pipeline).map(of_rank).collect();
    let pipeline = read_pipeline(reading, folder, &layers, &names, &shard_masters)?;
    let (pipeline, ties) = match weights {
        Weights::Master => (pipeline.without_tied_layers(), HashMap::new()),
        Weights::Module => (pipeline.modules, pipeline.ties),
    };
    // Parameters that do not get their master weights are read like frozen ones.
    let with_masters = if weights == Weights::Master { names } else { HashSet::new() };
    let modules: Vec<&Module<'_>> =
        if is_pipeline { pipeline.iter().collect() } else { jobs.iter().map(|job| &job.model.module).collect() };
    let is_stage3 = found.jobs[0].is_stage3;
    let unrecorded = match shard_masters.first().filter(|_| weights == Weights::Master) {
        Some(own) => unrecorded_ties(reading, &jobs, modules[0], own)?,
        None => None,
    };
    let shards = if tensor_parallel > 1 {
        frozen::shards(folder, &jobs, &modules, &with_masters, (is_stage3, weights))?
    } else {
        vec![]
    };
    let mut frozen = frozen_params(&jobs, &shards, &layouts)?;
    let has_unknown_layout = params.iter().chain(&frozen).any(|param| param.joined.is_unknown);
    let mut notes = Vec::new();
    if let Some(declared) = declared.filter(|_| has_unknown_layout) {
        let declared = DeclaredShards::new(reading, declared, folder, modules[0], (&params, &frozen), ties)?;
        declared.join(&mut params)?;
        declared.join(&mut frozen)?;
        reading.has_applied_layout = true;
        notes = declared.notes;
    }
    let by_name: HashMap<&str, &Param<'_>> = frozen.iter().map(|param| (param.fqn.as_str(), param)).collect();
    let parts = Parts {
        folder,
        jobs: &jobs,
        params: &params,
        frozen: &by_name,
        modules: &modules,
        is_pipeline,
        is_stage3,
        weights,
        stage0: Stage0::None,
        may_lack_trained: false,
    };
    let mut catalog = if found.jobs[0].optimizer.is_empty() {
        read_without_partitions(reading, parts, &found, &expert_ranks)?
    } else {
        if weights == Weights::Module && is_stage3 {
            return Err(without_module(folder, "of ZeRO stage 3, which has master weights only"));
        }
        let warning = check_bytes(reading, &jobs, params.iter().chain(&frozen), is_stage3)?;
        let mut catalog = parts.catalog()?;
        catalog.warnings.extend(warning);
        catalog.warnings.extend(no_options(folder, &jobs));
        let masters = params.first().map(|param| param.shards[0].group.masters[0].dtype);
        if !is_stage3 {
            catalog.notes.extend(note_of_master_weights(reading, folder, masters, modules[0], &jobs[0].model.buffers));
        }
        catalog
    };
    let layers = layers.iter().map(|(_, file)| file).chain(experts.iter().map(|(_, file)| file)).chain(&expert_ranks);
    let all = files.iter().flat_map(|files| files.model.iter().chain(&files.optimizer)).chain(layers);
    catalog.archives = all.map(|file| file.contents.file_range()).collect();
    let dropped: IndexSet<String> = files.iter().flat_map(|files| dropped_values(&files.model)).collect();
    catalog.dropped = dropped.into_iter().collect();
    catalog.notes.extend(notes);
    catalog.warnings.extend(unrecorded);
    catalog.plain_may_be_parts = has_unknown_layout && !reading.has_applied_layout;
    Ok(catalog)
}

/// Returns the values of the training loop that were dropped from model files.
pub fn dropped_values(model_files: &[RankFile]) -> Vec<String> {
    let is_own = |dropped: &str| {
        OWN_KEYS.iter().any(|key| {
            dropped
                .strip_prefix(key)
                .is_some_and(|rest| !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_'))
        })
    };
    let mut dropped = dropped_objects(model_files);
    dropped.retain(|dropped| !is_own(dropped));
    dropped
}

/// The files of one model-parallel rank, read except for tensor data.
struct JobFiles {
    model: Vec<RankFile>,
    optimizer: Vec<RankFile>,
}

impl JobFiles {
    fn load(reading: &mut ReadFindings<'_>, found: &StatesFiles) -> Result<Self> {
        let unknown = reading.options.unknown();
        let model = load_files(reading, &found.model, unknown)?;
        // The objects of DeepSpeed's own classes are not part of the result, so they never matter.
        let optimizer = load_files(reading, &found.optimizer, Unknown::Refuse)?;
        Ok(Self { model, optimizer })
    }
}

/// Reads the optimizer files of one model-parallel rank.
fn read_job<'a>(folder: &Path, found: &StatesFiles, model: ModelStates<'a>, files: &'a [RankFile]) -> Result<Job<'a>> {
    if files.is_empty() {
        return Ok(Job { model, optimizer: None });
    }
    let Some(shapes) = model.param_shapes()? else {
        return Err(model.first().wrong("param_shapes", "the shapes of the parameters of each group", "none"));
    };
    let states = optimizer::read(folder, found, files, shapes, &model.experts)?;
    model.check_partitions(files.len())?;
    mappings::check(&model, files, &states.groups)?;
    for file in files {
        check_optimizer_file(model.first(), file)?;
    }
    Ok(Job { model, optimizer: Some(states) })
}

/// Checks that each model-parallel rank has files, by the number of ranks in the first model file.
///
/// # Errors
/// `Missing` and `Malformed` that name files.
pub fn check_world_size(folder: &Path, found: &FolderFiles, first: &Fields<'_>) -> Result<()> {
    const KEY: &str = "mp_world_size";
    match first.number(KEY)? {
        None => Ok(()),
        Some(ranks) => found.check_ranks(folder, ranks, &format!("{KEY} in {}", first.file_name())),
    }
}

/// Checks that the files of all model-parallel ranks come from one save, and that no rank is missing.
///
/// # Errors
/// `Missing` and `Malformed` that name the files.
pub fn check_jobs(jobs: &[Job<'_>], tensor_parallel: usize) -> Result<()> {
    let first = jobs[0].model.first();
    if let Some(ranks) = jobs[0].model.tensor_parallel()
        && u64::try_from(tensor_parallel) != Ok(ranks)
    {
        let expected = format!("{tensor_parallel} tensor-parallel ranks, as the names of the files say");
        return Err(leftover(first.path(), TENSOR_PARALLEL, expected, ranks.to_string()));
    }
    for job in &jobs[1..] {
        check_same_job(first, job.model.first())?;
        if let (Some(expected), Some(found)) = (&jobs[0].optimizer, &job.optimizer) {
            check_same_options(expected, found)?;
        }
    }
    Ok(())
}

/// Returns a warning if the files have no options of parameter groups.
fn no_options(folder: &Path, jobs: &[Job<'_>]) -> Option<String> {
    let mut groups = jobs.iter().filter_map(|job| job.optimizer.as_ref()).flat_map(|states| &states.param_groups);
    groups.any(|(_, options)| options.is_none()).then(|| {
        format!(
            "{}: with `elastic_checkpoint`, DeepSpeed saves no options of parameter groups, such as the learning rate: set them \
             in the new job",
            folder.display()
        )
    })
}

/// Checks that the parameter groups of two model-parallel ranks have the same options.
fn check_same_options(expected: &OptimizerStates<'_>, found: &OptimizerStates<'_>) -> Result<()> {
    let options = |states: &OptimizerStates<'_>| {
        let of_group = |dict: &Dict| options_without(dict, &[PARAMS]);
        states.param_groups.iter().map(|(_, dict)| dict.map_or(Value::None, of_group)).collect::<Vec<Value>>()
    };
    let (expected_options, options) = (options(expected), options(found));
    if Value::List(expected_options.clone()).same_but_tensors(&Value::List(options.clone())) {
        return Ok(());
    }
    let name = name_of(&expected.first.path);
    let expected = format!("{} with the options in {name}", count(expected_options.len(), "group"));
    Err(leftover(&found.first.path, GROUPS, expected, format!("{} with other options", count(options.len(), "group"))))
}

/// Loads files, after checking that they are files of the form that dtshard reads.
pub fn load_files(
    reading: &mut ReadFindings<'_>,
    paths: &BTreeMap<u32, PathBuf>,
    unknown: Unknown,
) -> Result<Vec<RankFile>> {
    for path in paths.values() {
        refuse_file(path, &first_bytes(path)?)?;
    }
    load::load(&mut reading.files, paths, unknown)
}

/// Loads the files of the layers of a pipeline, or of experts.
///
/// # Errors
/// The errors of [`load_files`].
pub fn load_named<Name: Copy>(
    reading: &mut ReadFindings<'_>,
    found: &BTreeMap<Name, PathBuf>,
) -> Result<Vec<(Name, RankFile)>> {
    let numbered: BTreeMap<u32, PathBuf> = (0..).zip(found.values().cloned()).collect();
    let files = load_files(reading, &numbered, reading.options.unknown())?;
    Ok(found.keys().copied().zip(files).collect())
}

/// The state dict of a pipeline.
pub struct Pipeline<'a> {
    /// The state dict on each tensor-parallel rank.
    pub modules: Vec<Module<'a>>,
    /// The layers that several stages use, with the names of their ties.
    pub ties: HashMap<String, Fqn>,
}

impl<'a> Pipeline<'a> {
    /// Returns the state dicts without the layers that several stages use.
    pub fn without_tied_layers(mut self) -> Vec<Module<'a>> {
        self.modules.iter_mut().for_each(|module| module.retain(|name, _| !self.ties.contains_key(&**name)));
        self.modules
    }
}

/// Reads the state dict of a pipeline on each tensor-parallel rank. `masters` has the trained parameters on each rank.
///
/// # Errors
/// `Malformed` for files that are not state dicts, and for a tied layer that does not have its values on all ranks; `Io`.
pub fn read_pipeline<'a>(
    reading: &ReadFindings<'_>,
    folder: &Path,
    layers: &'a [(LayerName, RankFile)],
    trained: &HashSet<&str>,
    masters: &[Vec<ShardMasters<'_>>],
) -> Result<Pipeline<'a>> {
    let (mut modules, mut ties) = (Vec::new(), Vec::new());
    for (rank, masters) in masters.iter().enumerate() {
        let of_rank = layers.iter().filter(|(name, _)| name.tensor_parallel.unwrap_or(0) as usize == rank);
        let module = read_layers(of_rank.map(|(name, file)| (name.layer, file)))?;
        ties.push(tied_layers(reading, &module, trained, masters)?);
        modules.push(module);
    }
    let of_any_rank: BTreeMap<&String, &Fqn> = ties.iter().flatten().map(|(name, tie)| (name, tie.fqn)).collect();
    for ((module, own), masters) in modules.iter().zip(&ties).zip(masters) {
        let differing = of_any_rank.iter().find(|(name, _)| !own.contains_key(**name));
        if let Some((name, tie)) = differing {
            let stored = module.get(name.as_str()).map_or(folder, |stored| stored.fields.path());
            let own = masters.iter().find(|param| param.fqn == *tie);
            let file = own.map_or_else(String::new, |param| name_of(&param.group.files[0].path));
            let expected = format!("the values of `{tie}` in {file}, as on the other tensor-parallel ranks");
            return Err(leftover(stored, name, expected, "other values"));
        }
    }
    let ties = of_any_rank.into_iter().map(|(name, tie)| (name.clone(), tie.clone())).collect();
    Ok(Pipeline { modules, ties })
}

/// Checks the counters, the padding and the copies in all files. Returns a warning if the optimizer has made another number
/// of steps than the job.
fn check_bytes<'a>(
    reading: &ReadFindings<'_>,
    jobs: &[Job<'_>],
    params: impl Iterator<Item = &'a Param<'a>>,
    is_stage3: bool,
) -> Result<Option<String>> {
    // A metadata mirror has no data of tensors, so neither counters nor padding.
    if !reading.options.holdings.is_empty() {
        return Ok(None);
    }
    let all: Vec<&OptimizerStates<'_>> = jobs.iter().filter_map(|job| job.optimizer.as_ref()).collect();
    let steps = check_steps(&reading.files, &all)?;
    for states in all {
        check_padding(&reading.files, states, is_stage3)?;
    }
    check_copies(&reading.files, &params.collect::<Vec<_>>())?;
    Ok(steps.and_then(|steps| other_steps(&jobs[0].model, steps)))
}

/// Returns a warning if the optimizer has made another number of steps than the job.
fn other_steps(model: &ModelStates<'_>, steps: f64) -> Option<String> {
    let updates = model.updates()?;
    #[allow(clippy::cast_precision_loss, reason = "no job makes 2^53 steps")]
    let is_same = (updates as f64 - steps).abs() < 0.5;
    (!is_same).then(|| {
        format!(
            "{}: the job made {updates} steps (global_steps without skipped_steps), and its optimizer {steps}: this is right \
             only if the optimizer did not begin with the job",
            model.first().path().display()
        )
    })
}

/// Returns the error for a checkpoint whose module is requested, and is not in the files, or not as a whole. `kind` says which
/// checkpoint it is.
pub fn without_module(folder: &Path, kind: &str) -> Error {
    Error::usage(
        format!("options::weights module: {} is a checkpoint {kind}", folder.display()),
        "leave options::weights out; or give the file that save_16bit_model wrote, or that accelerate wrote beside the \
         checkpoint, as SRC",
    )
}

/// Reads a checkpoint without optimizer files. At ZeRO stage 0, the model file has the optimizer, or each expert-parallel rank
/// has a file of it.
fn read_without_partitions(
    reading: &ReadFindings<'_>,
    parts: Parts<'_>,
    found: &FolderFiles,
    expert_ranks: &[RankFile],
) -> Result<Catalog> {
    let Parts { folder, jobs, .. } = parts;
    let model = &jobs[0].model;
    let (first, weights) = (model.first(), reading.options.weights);
    let module = Parts { weights: Weights::Module, ..parts };
    if jobs.len() > 1 || parts.is_pipeline {
        return Err(refused(folder, "of several model-parallel ranks without optimizer files", GATHER));
    }
    if let (true, Some(path)) = (model.experts.is_empty(), found.expert_ranks.values().next()) {
        let expected = "no optimizer file of experts, because the model has none (num_experts in the model file)";
        return Err(leftover(path, "the name of the file", expected, name_of(path)));
    }
    let copy = first.get(OPTIMIZER);
    // Model files of stages 1 and 2 have `param_shapes`.
    let with_experts = !model.experts.is_empty() && (copy.is_some() || model.param_shapes()?.is_none());
    if with_experts && weights != Some(Weights::Module) && expert_ranks.is_empty() {
        found.check_expert_ranks(folder, 1, "at least, because the model has experts")?;
    }
    let of_ranks = expert_ranks.first().and_then(|file| file.contents.value.as_dict()?.get(OPTIMIZER));
    let Some(optimizer) = of_ranks.or(copy) else {
        if weights == Some(Weights::Module) {
            return module.catalog();
        }
        if weights.is_none() && model.is_saved_without_optimizer() {
            let mut catalog = module.catalog()?;
            catalog.warnings.push(format!(
                "{}: DeepSpeed 0.17.6 saves no optimizer at stage 1 with bf16 and `grad_accum_dtype` fp32, so the weights are those \
                 of the module, rounded to bf16; the checkpoint has neither master weights nor optimizer state",
                first.path().display()
            ));
            return Ok(catalog);
        }
        let name = StatesName { role: Role::Optimizer, partition: 0, model_parallel: 0, is_bf16: false };
        return Err(optimizer::missing(folder, &name.of_partition(0)));
    };
    let has = |key: &str| optimizer.as_dict().is_some_and(|dict| dict.get(key).is_some());
    let has_masters = ["fp32_groups", "fp32_groups_flat"].into_iter().any(has);
    if !has_masters && !with_experts {
        // The module has f32 parameters, and they are the master weights.
        let weights = weights.unwrap_or(Weights::Master);
        return Parts { weights, stage0: Stage0::Numbered(optimizer), ..module }.catalog();
    }
    if weights == Some(Weights::Module) {
        let mut catalog = module.catalog()?;
        catalog.warnings.push(format!(
            "{}: the optimizer is left out, because its state has no names of parameters",
            first.path().display()
        ));
        return Ok(catalog);
    }
    // A metadata mirror has no values to compare.
    let has_values = reading.options.holdings.is_empty();
    if has("fp32_groups_flat") || has_masters && !has_values {
        return Err(refused(
            folder,
            "of ZeRO stage 0 with 16-bit parameters, whose master weights have no names",
            "read the parameters of the module, without the optimizer, with options::weights module",
        ));
    }
    let groups = if with_experts {
        expert_ranks::read(folder, found, (&reading.files, has_values), model, expert_ranks)?
    } else {
        let params = model.module.iter().filter(|(name, _)| !model.buffers.contains(&&***name));
        let params = params.map(|(name, stored)| Candidate { name, stored: *stored, is_expert: false });
        let optimizer = first.dict(OPTIMIZER)?.expect("the optimizer is a dict");
        whole_masters::find_names(folder, &reading.files, &optimizer, &params.collect::<Vec<_>>())?
    };
    let mut catalog = Parts { weights: Weights::Master, stage0: Stage0::Whole(&groups), ..module }.catalog()?;
    catalog.notes.extend(whole_masters::note_of_order(folder, &groups));
    let masters = has_masters.then_some(Dtype::F32);
    catalog.notes.extend(note_of_master_weights(reading, folder, masters, &model.module, &model.buffers));
    Ok(catalog)
}

/// Returns the note that says which weights are read, unless an option chose them, or both have one dtype.
fn note_of_master_weights(
    reading: &ReadFindings<'_>,
    folder: &Path,
    masters: Option<Dtype>,
    module: &Module<'_>,
    buffers: &[&str],
) -> Option<String> {
    // All parameters of the module have one dtype in mixed-precision training.
    let (_, parameter) = module.iter().find(|(name, _)| !buffers.contains(&&***name))?;
    let (master, module) = masters.zip(parameter.fields.view(parameter.value).map(|view| view.dtype))?;
    (reading.options.weights.is_none() && master != module).then(|| {
        format!(
            "{}: parameters have their master weights ({master}), which the optimizer updates; options::weights module reads \
             those of the module ({module})",
            folder.display()
        )
    })
}
