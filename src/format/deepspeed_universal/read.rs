//! Reads a checkpoint into a catalog: the model files as in other checkpoints of DeepSpeed, and a file for each value of
//! each trained parameter.
//!
//! A folder in `zero` belongs to a trained parameter only if `param_shapes` of the model file lists its name. DeepSpeed
//! 0.19.8 also writes folders of buffers, of frozen parameters, and of further names of tied parameters, but converts
//! their values: they come from the model files.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use super::{FOLDER, OPTIMIZER_FILE};
use crate::catalog::optimizer::{GROUPS, PARAMS, STATE};
use crate::catalog::{Catalog, Chunk, Dict, DictKind, Fqn, TensorEntry, Value, Weights};
use crate::error::{Error, FormatError, Result};
use crate::format::deepspeed::assemble::{Parts, Stage0, dict, optimizer_dict, unreadable, whole};
use crate::format::deepspeed::fields::{Fields, is_vector};
use crate::format::deepspeed::folder::{FolderFiles, GATHER, leftover, refused};
use crate::format::deepspeed::join::Job;
use crate::format::deepspeed::model::{ModelStates, wrong_name};
use crate::format::deepspeed::names::{LayerName, Role, StatesName, is_expert};
use crate::format::deepspeed::optimizer::Shapes;
use crate::format::deepspeed::read::{dropped_values, load_files, without_module};
use crate::format::list;
use crate::format::reading::ReadFindings;
use crate::format::scalar::read_scalar;
use crate::format::torch::{RankFile, TensorNode, View, load};
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
    let FolderFiles { jobs, layers, .. } = FolderFiles::find(folder, &model_names(&names))?;
    let [found] = jobs.as_slice() else {
        return Err(refused(folder, "in Universal form, of several model-parallel ranks", GATHER));
    };
    if !layers.is_empty() {
        return Err(refused(folder, "in Universal form, of pipeline parallelism", GATHER));
    }
    let unknown = reading.options.unknown();
    let model_files = load_files(reading, &found.model, unknown)?;
    let jobs = [Job { model: ModelStates::read(folder, found, &model_files, false)?, optimizer: None }];
    let model = &jobs[0].model;
    let first = *model.first();
    let Some(shapes) = model.param_shapes()? else {
        return Err(first.wrong("param_shapes", "the shapes of the parameters of each group", "none"));
    };
    let weights = reading.options.weights.unwrap_or(Weights::Master);
    let has_values = |(fqn, _): &(Fqn, Dims)| model.module.contains_key(fqn.as_str());
    if weights == Weights::Module && (found.is_stage3 || !shapes.iter().flatten().all(has_values)) {
        return Err(without_module(folder, "in Universal form, which has master weights only"));
    }
    let zero = folder.join(FOLDER);
    let listed = ParamFiles::list(&zero, &first, &shapes)?;
    let files = load::load(&mut reading.files, &listed.paths(), Unknown::Refuse)?;
    let path = zero.join(OPTIMIZER_FILE);
    if !lookup::is_file(&path)? {
        return Err(missing(&zero, "the options of the parameter groups", &[String::from(OPTIMIZER_FILE)]));
    }
    let optimizer_files = load::load(&mut reading.files, &BTreeMap::from([(0, path)]), Unknown::Refuse)?;
    let optimizer = OptimizerFile::read(&optimizer_files[0], &shapes, found.is_stage3)?;
    // No other file in the folder is part of the state dict, but all of them are part of the checkpoint.
    reading.other_files.extend(files_below(&zero)?);
    let is_model = |name: &&String| StatesName::parse(name).is_some();
    reading.other_files.extend(names.iter().filter(is_model).map(|name| folder.join(name)));

    let mut catalog = Catalog::empty();
    let (mut values, mut state) = (IndexMap::new(), Vec::new());
    let (mut keys_of_params, mut files_of_values) = (listed.params.iter(), files.iter());
    for group in &shapes {
        let mut steps = Steps::default();
        for (fqn, shape) in group {
            let keys = keys_of_params.next().expect("the values of each parameter");
            let mut own = Vec::new();
            for key in keys {
                let file = files_of_values.next().expect("a file for each value");
                let value = match key.as_str() {
                    STEP => step(file, &mut catalog)?,
                    _ => Value::Tensor(catalog.push_tensor(tensor(folder, file, fqn, shape)?)),
                };
                match (key.as_str(), &value) {
                    (MASTER, _) if weights == Weights::Module => {}
                    (MASTER, Value::Tensor(id)) => {
                        if values.insert(fqn.clone(), *id).is_some() {
                            return Err(wrong_name(&first, fqn.as_str(), "each name once"));
                        }
                    }
                    (STEP, _) => {
                        if reading.options.holdings.is_empty() {
                            steps.check(reading, file, &value, &catalog)?;
                        }
                        own.push((Value::Str(STEP.into()), value));
                    }
                    _ => own.push((Value::Str(key.as_str().into()), value)),
                }
            }
            if let Some(step) = optimizer.step.filter(|_| !own.is_empty()) {
                // Stage 3 stores one counter for all parameters.
                let own_step = match step {
                    Value::Tensor(id) => match &optimizer_files[0].contents.tensors[id.0 as usize] {
                        TensorNode::Plain(view) => {
                            Value::Tensor(catalog.push_tensor(whole(&optimizer_files[0], "", view)))
                        }
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
    }
    let groups = optimizer
        .groups
        .iter()
        .map(|(names, options)| (names.iter().map(|name| Value::Str(name.into())).collect(), Some(*options)));
    let optimizer = optimizer_dict(&optimizer_files[0], state, groups.collect(), &mut catalog);
    let parts = Parts {
        folder,
        jobs: &jobs,
        params: &[],
        frozen: &HashMap::new(),
        modules: &[&model.module],
        is_pipeline: false,
        is_stage3: found.is_stage3,
        weights,
        stage0: Stage0::None,
        may_lack_trained: true,
    };
    let mut catalog = parts.complete(catalog, values, Some(optimizer))?;
    let all = model_files.iter().chain(&files).chain(&optimizer_files);
    catalog.archives = all.map(|file| file.contents.file_range()).collect();
    catalog.dropped = dropped_values(&model_files);
    Ok(catalog)
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
    /// Lists the folders of the parameters in `shapes`.
    ///
    /// # Errors
    /// `Missing` with the names of missing folders and files, `Malformed` for a name that is not the name of a folder.
    fn list(zero: &Path, model: &Fields<'_>, shapes: &[Shapes]) -> Result<Self> {
        let mut found = Self { zero: zero.to_path_buf(), names: Vec::new(), params: Vec::new() };
        let mut lost = Vec::new();
        for (fqn, _) in shapes.iter().flatten() {
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
    Error::Format(FormatError::Missing {
        path: zero.to_path_buf(),
        at: String::from("the files of the parameters"),
        expected: expected.to_owned(),
        missing: short_list(names, FEW),
        hint: Some(String::from("copy the whole folder again, or run ds_to_universal.py again")),
    })
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

/// Makes the entry of a tensor in the file of a parameter.
fn tensor(folder: &Path, file: &RankFile, fqn: &Fqn, shape: &Dims) -> Result<TensorEntry> {
    const PARAM: &str = "param";
    let is_true = |key: &str| {
        let value = file.contents.value.as_dict().and_then(|dict| dict.get(key));
        matches!(value, Some(Value::Bool(true)))
    };
    if is_true("is_expert_param") {
        return Err(refused(folder, &format!("with experts ({fqn})"), GATHER));
    }
    let (at, value) = match &file.contents.value {
        Value::Dict(dict) => (PARAM, dict.get(PARAM)),
        bare => ("the pickled value", Some(bare)),
    };
    let node = match value {
        Some(Value::Tensor(id)) => &file.contents.tensors[id.0 as usize],
        other => {
            let found = other.map_or_else(|| String::from("none"), |value| value.type_name().into_owned());
            return Err(Error::malformed(&file.path, at, "a tensor", found));
        }
    };
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
    // The rows with which Megatron-DeepSpeed pads a vocabulary are not in the file.
    let is_cut = is_true("vocab_tensor") && is_without_rows(&view.sizes, shape);
    if is_cut {
        return Ok(whole(file, fqn.as_str(), view));
    }
    // Stage 3 stores a vector.
    match is_vector(view).then(|| crate::layout::numel(shape)).flatten() {
        Some(numel) if view.sizes[0] == numel => Ok(shaped(file, fqn, view, shape)),
        _ => {
            let expected = format!("a tensor of shape {:?} (param_shapes of the model file)", shape.as_slice());
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
    groups: Vec<(Vec<Fqn>, &'a Dict)>,
    /// The number of steps, which stage 3 stores here.
    step: Option<&'a Value>,
}

impl<'a> OptimizerFile<'a> {
    fn read(file: &'a RankFile, shapes: &[Shapes], is_stage3: bool) -> Result<Self> {
        let root = Fields::of_file(file)?;
        let own = if is_stage3 {
            const KEY: &str = "optimizer_state_dict";
            root.dict(KEY)?.ok_or_else(|| root.wrong(KEY, "the state dict of the optimizer", "none"))?
        } else {
            root
        };
        let wrong = || own.wrong(GROUPS, "parameter groups with numbers of parameters", "others");
        let mut groups = Vec::new();
        let mut rest = shapes;
        for group in own.list(GROUPS)? {
            let group = group.as_dict().ok_or_else(wrong)?;
            // dtshard writes empty groups after the groups of the optimizer.
            if group.entries.is_empty() {
                continue;
            }
            let Some(Value::List(params)) = group.get(PARAMS) else { return Err(wrong()) };
            // A parameter group of stage 3 lists its sub-groups.
            let taken = if is_stage3 { params.len() } else { 1 };
            let Some((own, after)) = rest.split_at_checked(taken) else { return Err(groups_differ(&own, shapes)) };
            groups.push((own.iter().flatten().map(|(fqn, _)| fqn.clone()).collect(), group));
            rest = after;
        }
        if !rest.is_empty() {
            return Err(groups_differ(&own, shapes));
        }
        let first = || {
            let states = own.get(STATE)?.as_dict()?;
            let (_, first) = states.entries.iter().find(|(key, _)| key.as_i64() == Some(0))?;
            first.as_dict()?.get(STEP)
        };
        Ok(Self { groups, step: if is_stage3 { first() } else { None } })
    }
}

fn groups_differ(own: &Fields<'_>, shapes: &[Shapes]) -> Error {
    let expected = format!("{} (param_shapes of the model file)", count(shapes.len(), "group"));
    own.wrong(GROUPS, expected, "another number")
}
