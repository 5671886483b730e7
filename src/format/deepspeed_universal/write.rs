//! Lays out the files of a written checkpoint.
//!
//! One folder serves ZeRO stages 1, 2 and 3: stage 3 reads other keys of `optimizer_state.pt`, and another model file.
//! DeepSpeed takes parameters and optimizer state from the folder `zero` only, so the model files have no values of
//! trained parameters.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::archives::{Archives, Content, Node};
use super::job_state::{JobState, ParamGroup, master_dtype};
use super::{FOLDER, LATEST, OPTIMIZER_FILE};
use crate::catalog::optimizer::{GROUPS, PARAMS, STATE};
use crate::catalog::value::Object;
use crate::catalog::{Catalog, Dict, DictKind, Fqn, OutputFile, Reservation, TensorId, Value};
use crate::error::{Error, Result};
use crate::format::deepspeed::OWN_KEYS;
use crate::format::traits::StateTarget;
use crate::name_list::{FEW, short_list};
use crate::quantity::count;
use torch_pickle::{Construct, Symbol};

/// The release of DeepSpeed whose form the files have. DeepSpeed refuses files of releases before 0.3.17.
const VERSION: &str = "0.19.8";

/// The number of parameter groups in `optimizer_state.pt`. DeepSpeed loads the parameters of as many groups as the file
/// has, and leaves the parameters of all other groups as they are, without a message. So empty groups follow the groups
/// of SRC: they change no option.
const MIN_GROUPS: usize = 64;

/// The maximum length of a file name in bytes: `NAME_MAX` of Linux.
const MAX_NAME_BYTES: usize = 255;

/// Lays out a checkpoint.
///
/// # Errors
/// `Unsupported` if DeepSpeed has no place for the model or the optimizer, or if a name is not a file name.
pub fn reserve(target: StateTarget<'_>) -> Result<Reservation> {
    let StateTarget { source, state, number } = target;
    let job = JobState::divide(source, state)?;
    let (steps, have_groups_equal_steps) = steps(&job, number)?;
    let other = |key: &str| job.others.iter().find(|(own, _)| own.as_str() == Some(key)).map(|(_, value)| value);
    let own_steps = other("global_steps").and_then(Value::as_i64).and_then(|steps| u64::try_from(steps).ok());
    let global_steps = own_steps.or(steps).unwrap_or(0);
    let tag = PathBuf::from(format!("global_step{global_steps}_universal"));
    let mut files = Archives::new(source);
    let folder = tag.join(FOLDER);
    for param in &job.params {
        let name = param.name.as_str();
        check_name(name)?;
        let folder = folder.join(name);
        let master = Content::Tensor(param.id, master_dtype(source.tensor(param.id).dtype));
        let values = std::iter::once(("fp32", master));
        for (key, content) in values.chain(param.state.iter().map(|(key, content)| (key.as_str(), *content))) {
            check_name(key)?;
            let node = Node::Dict(vec![(text("param"), Node::Content(content))]);
            files.file(folder.join(format!("{key}.pt")), &node)?;
        }
        if let Some(step) = param.step {
            files.file(folder.join("step.pt"), &Node::Content(step))?;
        }
    }
    files.file(folder.join(OPTIMIZER_FILE), &optimizer_state(&job))?;
    let (model, left_out) = model_states(source, &job, global_steps);
    files.file(tag.join("mp_rank_00_model_states.pt"), &Node::Value(&model))?;
    let stage3 = without_module(&model);
    files.file(tag.join("zero_pp_rank_0_mp_rank_00_model_states.pt"), &Node::Value(&stage3))?;
    let mut latest = OutputFile::new(LATEST);
    latest.push_header(tag.as_os_str().as_encoded_bytes().to_vec());
    let mut reservation = files.reservation;
    reservation.files.push(latest);
    reservation.notes = notes(&job, other("lr_scheduler").is_some(), have_groups_equal_steps);
    reservation.left_out = left_out;
    Ok(reservation)
}

/// Returns the number of steps that the optimizer has made, which is `None` if it is unknown, and whether all groups have made
/// the same number. Checks that the parameters of each group have equal numbers, because DeepSpeed counts the steps of a
/// group.
#[allow(clippy::cast_precision_loss, reason = "no job makes 2^53 steps")]
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "negative numbers become 0")]
fn steps(job: &JobState, number: &dyn Fn(TensorId) -> Result<Option<f64>>) -> Result<(Option<u64>, bool)> {
    let mut numbers: HashMap<&Fqn, f64> = HashMap::new();
    let mut first = None;
    for param in &job.params {
        let steps = match param.step {
            Some(Content::Tensor(id, _)) => number(id)?,
            Some(Content::Int(steps)) => Some(steps as f64),
            _ => None,
        };
        if let Some(steps) = steps {
            first.get_or_insert(steps);
            numbers.insert(&param.name, steps);
        }
    }
    for group in &job.groups {
        let mut own = group.names.iter().filter_map(|name| Some((name, *numbers.get(name)?)));
        let Some((name, steps)) = own.next() else { continue };
        if let Some((other, found)) = own.find(|(_, other)| other.to_bits() != steps.to_bits()) {
            return Err(Error::unsupported(
                format!(
                    "the optimizer has made {steps} steps for {name} and {found} for {other}, but DeepSpeed counts the steps \
                     of a parameter group"
                ),
                "convert a checkpoint in which all parameters of a group have equal steps, or leave the optimizer out \
                 with options::exclude",
            ));
        }
    }
    let is_equal = numbers.values().all(|steps| first.is_some_and(|first: f64| first.to_bits() == steps.to_bits()));
    Ok((first.map(|steps| steps as u64), is_equal))
}

fn notes(job: &JobState, has_scheduler: bool, have_groups_equal_steps: bool) -> Vec<String> {
    let mut notes = Vec::new();
    if !job.has_optimizer {
        notes.push(format!(
            "SRC has no optimizer, so the moments of {} are zero in DST: the job starts with a new optimizer",
            count(job.params.len(), "tensor")
        ));
    } else if !has_scheduler {
        notes.push(String::from(
            "SRC has no `lr_scheduler`: if the job has a learning rate scheduler, load DST with \
             load_lr_scheduler_states=False",
        ));
    }
    if job.groups.iter().any(|group| group.options != job.groups[0].options) {
        notes.push(String::from(
            "the parameter groups have different options: ZeRO stage 3 loads only the options that are equal in all \
             groups, and keeps the others of the job",
        ));
    }
    if !have_groups_equal_steps {
        notes.push(String::from(
            "the parameter groups have made different numbers of steps: ZeRO stage 3 gives all groups the number of the \
             first group",
        ));
    }
    if !job.left_out.is_empty() {
        notes.push(format!(
            "{} left out, because DeepSpeed has no place for such values",
            short_list(&job.left_out, FEW)
        ));
    }
    notes
}

/// Checks that a name can be the name of a file or folder.
fn check_name(name: &str) -> Result<()> {
    let is_file_name = Path::new(name).file_name().is_some_and(|file| file == name) && !name.contains('\0');
    let is_valid = is_file_name && name != OPTIMIZER_FILE;
    if is_valid && name.len() <= MAX_NAME_BYTES - ".pt".len() {
        return Ok(());
    }
    Err(Error::unsupported(
        format!("{name}: DeepSpeed stores a folder for each parameter, and this name cannot be the name of a folder"),
        "change the name with options::rename, or leave the parameter out with options::exclude",
    ))
}

/// Returns the content of `optimizer_state.pt`: the groups for stages 1 and 2, and for stage 3 the counter of steps and
/// the options of all groups.
fn optimizer_state(job: &JobState) -> Node<'static> {
    let with_params = |(number, group): (i64, &ParamGroup)| {
        let params = (text(PARAMS), Value::List(vec![Value::Int(number)]));
        dict(group.options.iter().cloned().chain([params]).collect())
    };
    let groups = (0..).zip(&job.groups).map(with_params);
    let padding = (job.groups.len()..MIN_GROUPS).map(|_| dict(Vec::new()));
    let groups = Value::List(groups.chain(padding).collect());
    let is_common = |option: &&(Value, Value)| job.groups.iter().all(|group| group.options.contains(option));
    let common = job.groups.first().into_iter().flat_map(|group| &group.options).filter(is_common).cloned();
    let params = (text(PARAMS), Value::List(vec![Value::Int(0)]));
    let common = Value::List(vec![dict(common.chain([params]).collect())]);
    let step = job.params.iter().find_map(|param| param.step).map(|step| (text("step"), Node::Content(step)));
    let first = (Value::Int(0), Node::Dict(step.into_iter().collect()));
    let stage3 = vec![(text(STATE), Node::Dict(vec![first])), (text(GROUPS), Node::Owned(common))];
    Node::Dict(vec![
        (text(GROUPS), Node::Owned(groups)),
        (text("ds_version"), Node::Owned(text(VERSION))),
        (text("optimizer_state_dict"), Node::Dict(stage3)),
    ])
}

/// Returns the content of the model file, and the names of values of the training loop that it has no place for.
fn model_states(source: &Catalog, job: &JobState, global_steps: u64) -> (Value, Vec<String>) {
    let ids: HashMap<&Fqn, TensorId> = job.params.iter().map(|param| (&param.name, param.id)).collect();
    let shapes = |group: &ParamGroup| {
        ordered(group.names.iter().map(|name| (text(name.as_str()), size(source, ids[name]))).collect())
    };
    let module = job.untrained.iter().map(|(name, value)| (text(name.as_str()), value.clone()));
    let tied = job.tied.iter().map(|(alias, kept)| (text(alias.as_str()), text(kept.as_str())));
    let mut entries = vec![
        (text(MODULE), ordered(module.collect())),
        (text("optimizer"), Value::None),
        (text("param_shapes"), Value::List(job.groups.iter().map(shapes).collect())),
        (text("frozen_param_shapes"), Value::None),
        (text("frozen_param_fragments"), Value::None),
        (text("shared_params"), dict(tied.collect())),
        (text("global_steps"), Value::Int(i64::try_from(global_steps).unwrap_or(i64::MAX))),
        (text("skipped_steps"), Value::Int(0)),
        (text("dp_world_size"), Value::Int(1)),
        (text("mp_world_size"), Value::Int(1)),
        (text("ds_version"), text(VERSION)),
    ];
    let mut left_out = Vec::new();
    for (key, value) in &job.others {
        let known = entries.iter().position(|(own, _)| own.same_but_tensors(key));
        match key.as_str() {
            Some("global_steps") => {}
            Some("skipped_steps") => entries[known.expect("listed above")].1 = value.clone(),
            Some(name) if OWN_KEYS.contains(&name) => left_out.push(name.to_owned()),
            _ => entries.push((key.clone(), value.clone())),
        }
    }
    (dict(entries), left_out)
}

/// The key of the module in a model file.
const MODULE: &str = "module";

/// Returns the content of the model file of stage 3, which has no values of the module.
fn without_module(model: &Value) -> Value {
    let Value::Dict(model) = model else { return model.clone() };
    let entry = |(key, value): &(Value, Value)| match key.as_str() {
        Some(MODULE) => (key.clone(), ordered(Vec::new())),
        _ => (key.clone(), value.clone()),
    };
    dict(model.entries.iter().map(entry).collect())
}

fn text(text: &str) -> Value {
    Value::Str(text.into())
}

fn dict(entries: Vec<(Value, Value)>) -> Value {
    Value::Dict(Dict { entries, ..Dict::default() })
}

fn ordered(entries: Vec<(Value, Value)>) -> Value {
    Value::Dict(Dict { kind: DictKind::Ordered, entries, ..Dict::default() })
}

/// Returns the shape of a tensor as a `torch.Size`.
fn size(source: &Catalog, id: TensorId) -> Value {
    let shape = source.tensor(id).shape.iter().map(|size| Value::Int(i64::try_from(*size).unwrap_or(i64::MAX)));
    let args = vec![Value::Tuple(shape.collect())];
    Value::Object(Box::new(Object { args, ..Object::new(Construct::Call, Symbol::new("torch", "Size")) }))
}
