//! Divides the state dict of a training job into the parts that DeepSpeed stores apart: trained parameters with their
//! optimizer state, the other values of the model, the options of the parameter groups, and the values of the training
//! loop.

use std::collections::{HashMap, HashSet};

use indexmap::IndexMap;

use super::archives::Content;
use crate::catalog::optimizer::{GROUPS, PARAM_NAMES, PARAMS, STATE, is_optimizer_key};
use crate::catalog::parameter_names::numbered_optimizers;
use crate::catalog::path::{key_text, tensors};
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Catalog, Dict, Dtype, Fqn, Key, Path, TensorId, Value, state_dict};
use crate::error::{Error, Result};
use crate::format::distinct_names;

/// The key of the number of steps in the state of a parameter.
const STEP: &str = "step";
/// The moments of the optimizers of the Adam family. Stage 3 of DeepSpeed loads these two, and needs them.
const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// The parts of a state dict.
pub struct JobState {
    /// The trained parameters, in the order of the parameter groups.
    pub params: Vec<Param>,
    /// The parameter groups.
    pub groups: Vec<ParamGroup>,
    /// The values of the model that are not trained: buffers, frozen parameters, and values that are not tensors.
    pub untrained: Vec<(Fqn, Value)>,
    /// The further names of tied parameters, each with the name under which the parameter is trained.
    pub tied: Vec<(Fqn, Fqn)>,
    /// The values of the training loop.
    pub others: Vec<(Value, Value)>,
    /// The names of tensors that DeepSpeed has no place for.
    pub left_out: Vec<String>,
    /// True if the state dict has the state of an optimizer.
    pub has_optimizer: bool,
}

/// A trained parameter.
pub struct Param {
    pub name: Fqn,
    pub id: TensorId,
    /// The tensors of the optimizer state that have the shape of the parameter, by their names.
    pub state: Vec<(String, Content)>,
    /// The number of steps, if the optimizer counts them.
    pub step: Option<Content>,
}

/// A parameter group.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamGroup {
    pub names: Vec<Fqn>,
    /// The options of the optimizer, such as the learning rate.
    pub options: Vec<(Value, Value)>,
}

/// An optimizer in the state dict: the values of each parameter, and the parameter groups.
#[derive(Default)]
struct Optimizer {
    state: IndexMap<Fqn, Vec<(String, Value)>>,
    groups: Vec<ParamGroup>,
}

impl JobState {
    /// Divides a state dict.
    ///
    /// # Errors
    /// `Unsupported` if the state dict has no model, several optimizers, or an optimizer of other parameters.
    pub fn divide(source: &Catalog, state: &Value) -> Result<Self> {
        let model = state_dict::model(state);
        if model.tensors.is_empty() {
            return Err(Error::unsupported(
                "the state dict has no model, but DeepSpeed needs the weights of the parameters",
                "convert the model together with its optimizer",
            ));
        }
        let names: Vec<(Fqn, TensorId)> =
            model.tensors.iter().map(|(name, id)| (Fqn::from(clean_name(name.as_str())), *id)).collect();
        distinct_names(names.iter().map(|(name, _)| name.as_str()), &[])?;
        let by_name: HashMap<&Fqn, TensorId> = names.iter().map(|(name, id)| (name, *id)).collect();
        let found = find_optimizer(state, &model.root)?;
        let has_optimizer = found.is_some();
        let (optimizer_path, mut optimizer) = found.unzip();
        if optimizer.is_none() {
            // Without an optimizer, any tensor of floats may be a parameter. A tied tensor is trained under its first name.
            let mut seen = HashSet::new();
            let is_trained = |(_, id): &&(Fqn, TensorId)| source.tensor(*id).dtype.is_float() && seen.insert(*id);
            let names = names.iter().filter(is_trained).map(|(name, _)| name.clone()).collect();
            optimizer =
                Some(Optimizer { groups: vec![ParamGroup { names, options: Vec::new() }], ..Optimizer::default() });
        }
        let Optimizer { state: states, groups } = optimizer.expect("it was just set");
        let mut left_out = Vec::new();
        let params = params(source, &by_name, states, &groups, has_optimizer, &mut left_out)?;
        let trained: HashMap<TensorId, &Fqn> = params.iter().rev().map(|param| (param.id, &param.name)).collect();
        let trained_names: HashSet<&Fqn> = params.iter().map(|param| &param.name).collect();
        let tied = names
            .iter()
            .filter(|(name, _)| !trained_names.contains(name))
            .filter_map(|(name, id)| Some((name.clone(), (*trained.get(id)?).clone())))
            .collect();
        // Without an optimizer it is not known which tensors are buffers, so the module has all tensors.
        let is_other = |(name, id): &&(Fqn, TensorId)| {
            !has_optimizer || !trained_names.contains(name) && !trained.contains_key(id)
        };
        let mut untrained: Vec<(Fqn, Value)> =
            names.iter().filter(is_other).map(|(name, id)| (name.clone(), Value::Tensor(*id))).collect();
        if let Some(Value::Dict(dict)) = model.root.find(state).filter(|_| !model.root.0.is_empty()) {
            let objects = dict.entries.iter().filter(|(_, value)| !value.contains_tensor());
            untrained.extend(objects.map(|(key, value)| (Fqn::from(clean_name(&key_text(key))), value.clone())));
        }
        let mut rest = state.clone();
        if let Some(gradients) = state_dict::gradients_root(state, &model.root) {
            remove(&mut rest, &gradients.0);
            left_out.push(gradients.to_string());
        }
        remove_model(&mut rest, &model);
        optimizer_path.iter().for_each(|path| remove(&mut rest, &path.0));
        let others = match rest {
            Value::Dict(dict) => dict.entries,
            _ => Vec::new(),
        };
        Ok(Self { params, groups, untrained, tied, others, left_out, has_optimizer })
    }
}

/// Makes the trained parameters, in the order of the groups.
fn params(
    source: &Catalog,
    by_name: &HashMap<&Fqn, TensorId>,
    mut states: IndexMap<Fqn, Vec<(String, Value)>>,
    groups: &[ParamGroup],
    has_optimizer: bool,
    left_out: &mut Vec<String>,
) -> Result<Vec<Param>> {
    let listed = groups.iter().flat_map(|group| &group.names).cloned();
    let mut names: Vec<Fqn> = listed.chain(states.keys().cloned()).collect();
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
    let mut params: Vec<Param> = Vec::with_capacity(names.len());
    let mut keys: Vec<String> = Vec::new();
    for name in names {
        let Some(id) = by_name.get(&name).copied() else {
            return Err(Error::unsupported(
                format!("the optimizer has the parameter {name}, which the model lacks"),
                "convert the optimizer together with its model; leave parameters out of both with options::exclude",
            ));
        };
        let shape = &source.tensor(id).shape;
        let mut param = Param { name, id, state: Vec::new(), step: None };
        for (key, value) in states.swap_remove(&param.name).unwrap_or_default() {
            match (key.as_str(), &value) {
                (STEP, Value::Tensor(step)) if source.tensor(*step).shape.is_empty() => {
                    param.step = Some(Content::Tensor(*step, source.tensor(*step).dtype));
                }
                (STEP, Value::Int(number)) => param.step = Some(Content::Int(*number)),
                (_, Value::Tensor(own)) if source.tensor(*own).shape == *shape => {
                    if !keys.contains(&key) {
                        keys.push(key.clone());
                    }
                    param.state.push((key, Content::Tensor(*own, source.tensor(*own).dtype)));
                }
                _ => left_out.push(format!("{}.{}.{key}", STATE, param.name)),
            }
        }
        params.push(param);
    }
    let mut step = params.iter().find_map(|param| param.step);
    if !has_optimizer {
        keys = MOMENTS.map(String::from).to_vec();
        step = Some(Content::Zero);
    }
    // DeepSpeed needs the same values for all parameters of a group. A parameter that was never updated has zeros.
    for param in &mut params {
        param.step = param.step.or(step);
        for key in &keys {
            if !param.state.iter().any(|(own, _)| own == key) {
                param.state.push((key.clone(), Content::Zeros(param.id)));
            }
        }
    }
    Ok(params)
}

/// Returns the dtype of the master weights of a parameter.
pub fn master_dtype(dtype: Dtype) -> Dtype {
    if matches!(dtype, Dtype::F16 | Dtype::Bf16) { Dtype::F32 } else { dtype }
}

/// Finds the only optimizer of a state dict, outside the model at `model`.
fn find_optimizer(state: &Value, model: &Path) -> Result<Option<(Path, Optimizer)>> {
    if let Some(path) = numbered_optimizers(state).first() {
        return Err(Error::unsupported(
            format!("the optimizer `{path}` has numbers instead of the names of parameters, and the names are unknown"),
            "save the optimizer with get_optimizer_state_dict, or leave it out with options::exclude",
        ));
    }
    let mut found = Vec::new();
    look(state, &Path::default(), model, &mut found);
    if let [(first, _), (second, _), ..] = found.as_slice() {
        return Err(Error::unsupported(
            format!("the state dict has several optimizers, `{first}` and `{second}`, but DeepSpeed stores one"),
            "leave all but one out with options::exclude",
        ));
    }
    Ok(found.pop())
}

/// Adds the optimizers of a value to `found`.
fn look(value: &Value, path: &Path, model: &Path, found: &mut Vec<(Path, Optimizer)>) {
    /// The maximum number of keys above an optimizer, as in `app.optimizer`.
    const DEPTH: usize = 3;
    let Value::Dict(dict) = value else { return };
    if path == model && !model.0.is_empty() {
        return;
    }
    let is_called_optimizer = matches!(path.0.last(), Some(Key::Name(name)) if is_optimizer_key(name));
    if let Some(optimizer) = nested(dict, is_called_optimizer).or_else(|| flat(dict).filter(|_| is_called_optimizer)) {
        found.push((path.clone(), optimizer));
        return;
    }
    if path.0.len() < DEPTH {
        for (key, child) in &dict.entries {
            look(child, &path.child(Key::Name(key_text(key))), model, found);
        }
    }
}

/// Reads an optimizer in the form of `get_optimizer_state_dict`.
fn nested(dict: &Dict, is_called_optimizer: bool) -> Option<Optimizer> {
    let Value::Dict(states) = dict.get(STATE)? else { return None };
    let groups = dict.get(GROUPS);
    if groups.is_none() && !is_called_optimizer {
        return None;
    }
    let mut optimizer = Optimizer::default();
    for (name, own) in &states.entries {
        let Value::Dict(own) = own else { return None };
        let own = own.entries.iter().map(|(key, value)| (key_text(key).to_string(), value.clone())).collect();
        optimizer.state.insert(clean(name.as_str()?), own);
    }
    if let Some(Value::List(groups)) = groups {
        for group in groups {
            let group = group.as_dict()?;
            let Value::List(names) = group.get(PARAMS)? else { return None };
            let names = names.iter().map(|name| name.as_str().map(clean)).collect::<Option<_>>()?;
            let is_option = |(key, _): &&(Value, Value)| ![Some(PARAMS), Some(PARAM_NAMES)].contains(&key.as_str());
            let options = group.entries.iter().filter(is_option).cloned().collect();
            optimizer.groups.push(ParamGroup { names, options });
        }
    }
    if optimizer.groups.is_empty() {
        let names = optimizer.state.keys().cloned().collect();
        optimizer.groups.push(ParamGroup { names, options: Vec::new() });
    }
    Some(optimizer)
}

/// Reads an optimizer in the form of `flatten_optimizer_state_dict`: `state.NAME.KEY` and `param_groups.NAME.OPTION`.
/// Parameters with equal options form a group.
fn flat(dict: &Dict) -> Option<Optimizer> {
    let mut optimizer = Optimizer::default();
    let mut options: IndexMap<Fqn, Vec<(Value, Value)>> = IndexMap::new();
    for (key, value) in &dict.entries {
        let Some(key) = key.as_str() else { continue };
        if let Some((name, own)) = key.strip_prefix("state.").and_then(|rest| rest.rsplit_once('.')) {
            optimizer.state.entry(clean(name)).or_default().push((own.to_owned(), value.clone()));
        } else if let Some((name, own)) = key.strip_prefix("param_groups.").and_then(|rest| rest.rsplit_once('.')) {
            options.entry(clean(name)).or_default().push((Value::Str(own.into()), value.clone()));
        }
    }
    if optimizer.state.is_empty() {
        return None;
    }
    for name in optimizer.state.keys() {
        options.entry(name.clone()).or_default();
    }
    for (name, options) in options {
        match optimizer.groups.iter_mut().find(|group| group.options == options) {
            Some(group) => group.names.push(name),
            None => optimizer.groups.push(ParamGroup { names: vec![name], options }),
        }
    }
    Some(optimizer)
}

fn clean(name: &str) -> Fqn {
    Fqn::from(clean_name(name))
}

/// Removes the model from a state dict.
fn remove_model(state: &mut Value, model: &state_dict::Model) {
    if !model.root.0.is_empty() {
        return remove(state, &model.root.0);
    }
    let Value::Dict(dict) = state else { return };
    let own: HashSet<&Fqn> = model.tensors.iter().map(|(name, _)| name).collect();
    dict.entries.retain(|(key, value)| {
        let mut is_own = false;
        tensors(value, &Path(vec![Key::Name(key_text(key))]), &mut |path, _| is_own |= own.contains(&path.fqn()));
        !is_own
    });
}

/// Removes the value at a path, and the dicts that become empty.
fn remove(state: &mut Value, path: &[Key]) {
    let (Value::Dict(dict), [Key::Name(first), rest @ ..]) = (state, path) else { return };
    let Some(at) = dict.entries.iter().position(|(key, _)| key_text(key) == *first) else { return };
    let is_empty = rest.is_empty() || {
        remove(&mut dict.entries[at].1, rest);
        matches!(&dict.entries[at].1, Value::Dict(inner) if inner.entries.is_empty())
    };
    if is_empty {
        dict.entries.remove(at);
    }
}
