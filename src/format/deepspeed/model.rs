//! The model files: names, shapes, buffers, frozen and tied parameters, and the values that the training loop saved.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use indexmap::IndexMap;

use super::experts::{EXPERTS, split_expert};
use super::fields::Fields;
use super::folder::{GATHER, StatesFiles, leftover, refused};
use super::names::ExpertName;
use super::optimizer::Shapes;
use crate::catalog::{Dict, TensorId, Value};
use crate::error::{Error, Result};
use crate::format::torch::RankFile;
use crate::storage::FileId;

/// The keys of a model file that DeepSpeed needs to load its own files. All other keys are the steps, the state of the
/// learning rate scheduler, and the `client_state` of the training loop.
pub const OWN_KEYS: [&str; 16] = [
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "sparse_tensor_module_names",
    "universal_checkpoint_info",
    "num_experts",
    "ds_autoep_layers",
];

/// The path of the number of tensor-parallel ranks in a model file.
pub const TENSOR_PARALLEL: &str = "checkpoint_parallel_dimensions.tp_degree";

/// The values of the state dict of the module by their names, in order.
pub type Module<'a> = IndexMap<Cow<'a, str>, StoredValue<'a>>;

/// A value of the state dict of the module: a tensor, or an object of the user.
#[derive(Clone, Copy)]
pub struct StoredValue<'a> {
    /// The root of the file that has the value.
    pub fields: Fields<'a>,
    pub value: &'a Value,
}

impl StoredValue<'_> {
    /// Returns the tensor, with the file that has it; `None` for an object.
    pub fn tensor(&self) -> Option<(FileId, TensorId)> {
        match self.value {
            Value::Tensor(id) => Some((self.fields.file.contents.file_range().file, *id)),
            _ => None,
        }
    }
}

/// The content of the model files of one model-parallel rank.
pub struct ModelStates<'a> {
    /// The file of each partition at stage 3, otherwise the only file.
    pub files: Vec<Fields<'a>>,
    pub module: Module<'a>,
    /// The names of buffers.
    pub buffers: Vec<&'a str>,
    /// The names of tied parameters, each with the name under which the parameter is listed.
    pub shared: Vec<(&'a str, &'a str)>,
    /// The number of experts of each layer of experts, by the beginning of their names.
    pub experts: HashMap<&'a str, u64>,
}

impl<'a> ModelStates<'a> {
    /// Reads the model files, one for each partition at stage 3. With pipeline parallelism (`has_layers`), they have no
    /// module, which [`read_layers`] reads.
    ///
    /// # Errors
    /// `Unsupported` for kinds of checkpoints that dtshard does not read, `Malformed` for files that contradict each other
    /// or their names.
    pub fn read(folder: &Path, found: &StatesFiles, files: &'a [RankFile], has_layers: bool) -> Result<Self> {
        let files: Vec<Fields<'a>> = files.iter().map(Fields::of_file).collect::<Result<_>>()?;
        let first = files[0];
        refuse_by_keys(folder, &first)?;
        let module = match first.dict("module")? {
            Some(_) if has_layers => {
                return Err(leftover(first.path(), "module", "none, because the folder has files of layers", "a dict"));
            }
            None if !has_layers => {
                return Err(first.wrong(
                    "module",
                    "the state dict of the module, or files of layers beside it",
                    "none",
                ));
            }
            module => module,
        };
        check_stage(&first, found)?;
        for other in &files[1..] {
            check_same_save(&first, other)?;
        }
        let names = |key: &str| match first.get(key) {
            None => Ok(Vec::new()),
            Some(_) => {
                let wrong = || first.wrong(key, "a list of names", "other values");
                first.list(key)?.iter().map(|name| name.as_str().ok_or_else(wrong)).collect()
            }
        };
        let shared = match first.dict("shared_params")? {
            None => Vec::new(),
            Some(shared) => {
                let wrong = || first.wrong("shared_params", "names of parameters", "other values");
                let pair = |(key, with): &'a (Value, Value)| key.as_str().zip(with.as_str()).ok_or_else(wrong);
                shared.dict.entries.iter().map(pair).collect::<Result<_>>()?
            }
        };
        let buffers = names("buffer_names")?;
        let mut values = Module::new();
        for (key, value) in module.iter().flat_map(|module| &module.dict.entries) {
            let name = key.as_str().ok_or_else(|| first.wrong("module", "names of tensors", key.type_name()))?;
            values.insert(name.into(), StoredValue { fields: first, value });
        }
        Ok(Self { module: values, buffers, shared, experts: HashMap::new(), files })
    }

    /// Returns the number of experts in each layer of experts.
    ///
    /// # Errors
    /// `Malformed` for other values than numbers.
    pub fn expert_counts(&self) -> Result<Vec<u32>> {
        const KEY: &str = "num_experts";
        let first = self.first();
        if first.get(KEY).is_none() {
            return Ok(Vec::new());
        }
        let number = |value: &Value| value.as_i64().and_then(|number| u32::try_from(number).ok());
        let numbers: Option<Vec<u32>> = first.list(KEY)?.iter().map(number).collect();
        numbers.ok_or_else(|| first.wrong(KEY, "the numbers of experts", "other values"))
    }

    /// Adds the values in the files of experts, each of which has one expert of one layer.
    ///
    /// # Errors
    /// `Malformed` for files that are not state dicts, and for the names of other experts or of another layer.
    pub fn add_experts(&mut self, files: impl Iterator<Item = (ExpertName, &'a RankFile)>) -> Result<()> {
        let mut layers: HashMap<u32, &str> = HashMap::new();
        for (name, file) in files {
            let fields = Fields::of_file(file)?;
            for (key, value) in &fields.dict.entries {
                let wrong = |found: &str| {
                    let expected = format!("names with `{EXPERTS}{}.`, as the name of the file says", name.expert);
                    fields.wrong("the state dict", expected, found)
                };
                let key = key.as_str().ok_or_else(|| wrong(&key.type_name()))?;
                let (prefix, number, _) = split_expert(key).ok_or_else(|| wrong(key))?;
                if number != u64::from(name.expert) {
                    return Err(wrong(key));
                }
                // Optimizer states belong to experts by the order of the layers.
                let layer = *layers.entry(name.layer).or_insert(prefix);
                if layer != prefix {
                    let expected = format!("names with `{layer}`, as in the other files of the layer");
                    return Err(leftover(fields.path(), "the state dict", expected, format!("`{key}`")));
                }
                let count = self.experts.entry(prefix).or_default();
                *count = (*count).max(number + 1);
                self.module.insert(key.into(), StoredValue { fields, value });
            }
        }
        Ok(())
    }

    pub fn first(&self) -> &Fields<'a> {
        &self.files[0]
    }

    /// Returns the names and shapes of the trained parameters of each group, in the order in which they are flattened;
    /// `None` if the file does not list them, as at stage 0.
    ///
    /// # Errors
    /// `Malformed` for damaged shapes.
    pub fn param_shapes(&self) -> Result<Option<Vec<Shapes>>> {
        const KEY: &str = "param_shapes";
        let first = self.first();
        if first.get(KEY).is_none() {
            return Ok(None);
        }
        let groups = first.list(KEY)?.iter().enumerate();
        groups.map(|(index, group)| first.shapes(&format!("{KEY}[{index}]"), group)).collect::<Result<_>>().map(Some)
    }

    /// Returns the number of tensor-parallel ranks that the files record, which DeepSpeed 0.19.7 and later write.
    pub fn tensor_parallel(&self) -> Option<u64> {
        let (key, degree) = TENSOR_PARALLEL.split_once('.')?;
        u64::try_from(self.first().get(key)?.as_dict()?.get(degree)?.as_i64()?).ok()
    }

    /// Checks the number of partitions that the files record.
    ///
    /// # Errors
    /// `Malformed` for another number.
    pub fn check_partitions(&self, partitions: usize) -> Result<()> {
        let first = self.first();
        // MiCS partitions over the ranks of one shard group, and only the first group saves.
        let of_group = zero_setting(first, "mics_shard_size").and_then(Value::as_i64).filter(|size| *size > 0);
        let (key, number) = match of_group {
            Some(size) => ("ds_config.zero_optimization.mics_shard_size", Some(size.unsigned_abs())),
            None => ("dp_world_size", first.number("dp_world_size")?),
        };
        match number.filter(|number| *number != partitions as u64) {
            Some(number) => {
                let expected = format!("{partitions} (the number of optimizer files)");
                Err(leftover(first.path(), key, expected, number.to_string()))
            }
            None => Ok(()),
        }
    }

    /// Returns a setting of `zero_optimization` in the configuration of the job.
    pub fn zero_setting(&self, key: &str) -> Option<&'a Value> {
        zero_setting(self.first(), key)
    }

    /// Returns whether the job has a configuration with which DeepSpeed 0.17.6 saves no optimizer files.
    pub fn is_saved_without_optimizer(&self) -> bool {
        let first = self.first();
        let setting = |section: &str, key: &str| first.get("ds_config")?.as_dict()?.get(section)?.as_dict()?.get(key);
        first.get("ds_version").and_then(Value::as_str) == Some("0.17.6")
            && zero_setting(first, "stage").and_then(Value::as_i64) == Some(1)
            && matches!(setting("bf16", "enabled"), Some(Value::Bool(true)))
            && setting("data_types", "grad_accum_dtype").and_then(Value::as_str) == Some("fp32")
    }

    /// Returns the number of updates of the optimizer since the training began, without skipped updates.
    pub fn updates(&self) -> Option<u64> {
        let number = |key: &str| self.first().number(key).ok().flatten();
        number("global_steps")?.checked_sub(number("skipped_steps").unwrap_or(0))
    }
}

/// Returns a setting of `zero_optimization` in the configuration of the job.
fn zero_setting<'a>(fields: &Fields<'a>, key: &str) -> Option<&'a Value> {
    fields.get("ds_config")?.as_dict()?.get("zero_optimization")?.as_dict()?.get(key)
}

/// Returns the error for a kind of checkpoint that the values of a model file show, and that dtshard does not read.
fn refuse_by_keys(folder: &Path, fields: &Fields<'_>) -> Result<()> {
    let key = "ds_autoep_layers";
    if fields.get(key).is_some_and(is_filled) {
        return Err(refused(folder, &format!("with experts of AutoEP (`{key}` in the model file)"), GATHER));
    }
    let key = "use_data_before_expert_parallelism";
    if fields.get("ds_config").and_then(|config| config.as_dict()?.get(key)) == Some(&Value::Bool(true)) {
        return Err(refused(folder, &format!("with experts and `{key}`"), GATHER));
    }
    Ok(())
}

fn is_filled(value: &Value) -> bool {
    !matches!(value, Value::List(items) if items.is_empty())
}

/// Checks that the stage in the configuration of the job is the stage that the names of the files show.
fn check_stage(fields: &Fields<'_>, found: &StatesFiles) -> Result<()> {
    let Some(stage) = zero_setting(fields, "stage").and_then(Value::as_i64) else { return Ok(()) };
    let expected = match (found.is_stage3, found.optimizer.is_empty()) {
        (true, _) if stage != 3 => "3, as the names of the model files say",
        (false, false) if stage != 1 && stage != 2 => "1 or 2, as the names of the files say",
        (false, true) if stage == 3 => "0, 1 or 2, as the name of the model file says",
        _ => return Ok(()),
    };
    Err(leftover(fields.path(), "ds_config.zero_optimization.stage", expected, stage.to_string()))
}

/// Reads the files of the layers of a pipeline, which belong to one tensor-parallel rank. `files` has the number of each
/// layer. The name of a parameter in the module begins with this number.
///
/// # Errors
/// `Malformed` for files that are not state dicts.
pub fn read_layers<'a>(files: impl Iterator<Item = (u32, &'a RankFile)>) -> Result<Module<'a>> {
    let mut module = Module::new();
    for (layer, file) in files {
        let fields = Fields::of_file(file)?;
        for (key, value) in &fields.dict.entries {
            let key =
                key.as_str().ok_or_else(|| fields.wrong("the state dict", "names of tensors", key.type_name()))?;
            module.insert(format!("{layer}.{key}").into(), StoredValue { fields, value });
        }
    }
    Ok(module)
}

/// Checks that the model files of two model-parallel ranks come from one save.
///
/// # Errors
/// `Malformed` that names the file and both values.
pub fn check_same_job(first: &Fields<'_>, other: &Fields<'_>) -> Result<()> {
    check_same_values(first, other, &["mp_world_size", "checkpoint_parallel_dimensions"])?;
    check_same_values(first, other, &SAVE_KEYS)?;
    check_same_config(first, other)
}

/// The values that are equal in all model files of one save.
const SAVE_KEYS: [&str; 5] = ["global_steps", "skipped_steps", "global_samples", "ds_version", "dp_world_size"];

/// Checks that two model files of one model-parallel rank come from one save.
fn check_same_save(first: &Fields<'_>, other: &Fields<'_>) -> Result<()> {
    check_same_values(first, other, &SAVE_KEYS)?;
    check_same_config(first, other)?;
    let name = first.file_name();
    for key in ["param_shapes", "frozen_param_shapes"] {
        if !first.has_same(other, key) {
            return Err(leftover(other.path(), key, format!("the parameters and shapes in {name}"), "others"));
        }
    }
    Ok(())
}

fn check_same_values(first: &Fields<'_>, other: &Fields<'_>, keys: &[&str]) -> Result<()> {
    let name = first.file_name();
    for key in keys {
        if !first.has_same(other, key) {
            let expected = format!("{} as in {name}", show(first.get(key)));
            return Err(leftover(other.path(), key, expected, show(other.get(key))));
        }
    }
    Ok(())
}

/// Checks that an optimizer file comes from the save of the model files.
///
/// # Errors
/// `Malformed` that names the file and both values, if it has another release of DeepSpeed or another configuration.
pub fn check_optimizer_file(model: &Fields<'_>, file: &RankFile) -> Result<()> {
    let own = Fields::of_file(file)?;
    check_same_values(model, &own, &["ds_version"])?;
    check_same_config(model, &own)
}

/// Checks that two files have the configuration of one job.
fn check_same_config(first: &Fields<'_>, other: &Fields<'_>) -> Result<()> {
    const KEY: &str = "ds_config";
    let (Some(expected), Some(found)) = (first.get(KEY), other.get(KEY)) else { return Ok(()) };
    let Some((at, expected, found)) = difference(KEY, expected, found) else { return Ok(()) };
    let name = first.file_name();
    Err(leftover(other.path(), &at, format!("{} as in {name}", show(expected)), show(found)))
}

/// Returns the path and the values of the first entry that differs between two values; `None` if they are equal.
fn difference<'v>(
    at: &str,
    first: &'v Value,
    other: &'v Value,
) -> Option<(String, Option<&'v Value>, Option<&'v Value>)> {
    let (Some(one), Some(two)) = (first.as_dict(), other.as_dict()) else {
        return (!first.same_but_tensors(other)).then(|| (at.to_owned(), Some(first), Some(other)));
    };
    let name = |key: &Value| format!("{at}.{}", key.as_str().map_or_else(|| key.to_string(), str::to_owned));
    // The files of one job have the entries in one order.
    for ((key, expected), (other_key, found)) in one.entries.iter().zip(&two.entries) {
        if !key.same_but_tensors(other_key) {
            return Some((name(key), Some(expected), None));
        }
        if let Some(found) = difference(&name(key), expected, found) {
            return Some(found);
        }
    }
    let surplus = |from: &'v Dict, len: usize| from.entries.get(len);
    let lost = surplus(one, two.entries.len()).map(|(key, value)| (name(key), Some(value), None));
    lost.or_else(|| surplus(two, one.entries.len()).map(|(key, value)| (name(key), None, Some(value))))
}

fn show(value: Option<&Value>) -> String {
    value.map_or_else(|| String::from("none"), |value| format!("{value:.60}"))
}

/// Returns the error about names in `param_shapes` that are not unique, or that the module does not have.
pub fn wrong_name(fields: &Fields<'_>, name: &str, expected: &str) -> Error {
    fields.wrong("param_shapes", expected, format!("`{name}`"))
}
