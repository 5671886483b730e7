//! Which part of a state dict is the model, and which tensors belong to which parameter.
//!
//! Decided by the nesting that the file records, not by dots in names.

use std::collections::HashSet;

use super::path::{key_text, tensors};
use super::{Catalog, Dict, Fqn, Key, Path, TensorEntry, TensorId, Value};

/// Keys under which trainers put the model.
const MODEL: [&str; 4] = ["model", "module", "state_dict", "model_state_dict"];

/// Keys that stand beside a model at the top and are not part of it.
const BESIDE: [&str; 18] = [
    "optimizer",
    "optimizers",
    "optim",
    "optimizer_state_dict",
    "optimizer_states",
    "lr_scheduler",
    "lr_schedulers",
    "scheduler",
    "scheduler_state_dict",
    "train_state",
    "trainer",
    "dataloader",
    "sampler",
    "scaler",
    "args",
    "config",
    GRADIENTS[0],
    GRADIENTS[1],
];

/// Keys under which gradients stand, by the names of their parameters.
pub const GRADIENTS: [&str; 2] = ["grads", "gradients"];

/// Children of a module that has a child `model` as well: where they stand beside it, `model` is a part, not the whole.
const HEADS: [&str; 6] = ["lm_head", "embed_out", "score", "classifier", "qa_outputs", "v_head"];

/// Keys under which trainers put an optimizer.
pub const OPTIMIZER: [&str; 5] = ["optimizer", "optim", "optimizers", "optimizer_state_dict", "optimizer_states"];

/// The model of a state dict.
#[derive(Debug)]
pub struct Model {
    /// Where it is; empty where it is at the top.
    pub root: Path,
    /// Its tensors, under names relative to the root.
    pub tensors: Vec<(Fqn, TensorId)>,
}

/// Find the model.
#[must_use]
pub fn model(state: &Value) -> Model {
    let (root, at) = descend(state);
    let mut found = Vec::new();
    if let (true, Value::Dict(dict)) = (root.0.is_empty(), at) {
        for (key, value) in &dict.entries {
            let name = key_text(key);
            if !is_beside(&name, value) {
                collect(value, &Path(vec![Key::Name(name)]), &mut found);
            }
        }
    } else {
        collect(at, &Path::default(), &mut found);
    }
    Model { root, tensors: found }
}

/// Where the model is; empty where it is at the top.
#[must_use]
pub fn model_root(state: &Value) -> Path {
    descend(state).0
}

fn descend(state: &Value) -> (Path, &Value) {
    let mut root = Path::default();
    let mut at = state;
    if let Some((key, inner)) = child(at, &["app"]).filter(|(_, inner)| child(inner, &MODEL).is_some()) {
        root.0.push(key);
        at = inner;
    }
    // `{"module": {"state_dict": {...}}}`: as deep as the nesting goes. `state_dict` is no module's name, but `model`
    // is one in most models, so below the outermost it is a wrapper only where it is alone.
    let mut keys = &MODEL[..];
    while let Some((key, inner)) = child(at, keys).filter(|_| !has_head(at)) {
        root.0.push(key);
        at = inner;
        keys = if is_alone(at) { &MODEL } else { &MODEL[2..] };
    }
    (root, at)
}

fn is_alone(value: &Value) -> bool {
    value.as_dict().is_some_and(|dict| dict.entries.len() == 1)
}

/// Whether a dict is a module whose child `model` is one of several parts of it.
fn has_head(value: &Value) -> bool {
    let head = |key: &Value, value: &Value| {
        key.as_str().is_some_and(|key| HEADS.contains(&key)) && value.as_dict().is_some() && value.contains_tensor()
    };
    value.as_dict().is_some_and(|dict| dict.entries.iter().any(|(key, value)| head(key, value)))
}

/// Every tensor with its name.
#[must_use]
pub fn all_tensors(state: &Value) -> Vec<(Fqn, TensorId)> {
    let mut found = Vec::new();
    collect(state, &Path::default(), &mut found);
    found
}

fn collect(value: &Value, path: &Path, found: &mut Vec<(Fqn, TensorId)>) {
    tensors(value, path, &mut |path, id| found.push((path.fqn(), id)));
}

/// The first of `keys` under which a dict has a dict with tensors.
fn child<'a>(value: &'a Value, keys: &[&str]) -> Option<(Key, &'a Value)> {
    let Value::Dict(dict) = value else { return None };
    keys.iter().find_map(|key| {
        let inner = dict.get(key)?;
        (matches!(inner, Value::Dict(_)) && inner.contains_tensor()).then(|| (Key::Name((*key).into()), inner))
    })
}

/// State of random number generators, by the names that trainers give it: the one thing that is meant to differ from
/// rank to rank.
#[must_use]
pub fn is_random_state(name: &str) -> bool {
    const NAMES: [&str; 5] = ["rng", "rng_state", "rng_states", "random_state", "random_states"];
    name.split('.').any(|part| NAMES.contains(&part) || part.ends_with("_rng_state"))
}

/// A container beside the model. A tensor called `scaler` is a parameter.
#[must_use]
pub fn is_beside(name: &str, value: &Value) -> bool {
    let container = !matches!(value, Value::Tensor(_));
    container && BESIDE.contains(&name) || name == "rng" || name.starts_with("rng_") || name.ends_with("rng_state")
}

/// What the path of an optimizer's state tensor tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptimizerState {
    /// Where the optimizer is.
    pub optimizer: Path,
    /// The parameter it belongs to, by its name or by a number.
    pub parameter: Fqn,
}

/// `optim.state.FQN.exp_avg` is state of FQN, be `state` a dict or, as `flatten_optimizer_state_dict` writes it, the
/// beginning of a key.
#[must_use]
pub fn optimizer_state(path: &Path) -> Option<OptimizerState> {
    let is = |key: &Key, names: &[&str]| matches!(key, Key::Name(name) if names.contains(&name.as_ref()));
    let at = path.0.iter().position(|key| is(key, &OPTIMIZER))?;
    let to = |end: usize| Path(path.0[..end].to_vec());
    if let [Key::Name(last)] = &path.0[at + 1..] {
        let (parameter, _) = last.strip_prefix("state.")?.rsplit_once('.')?;
        return Some(OptimizerState { optimizer: to(at + 1), parameter: Fqn::from(parameter) });
    }
    let state = at + 1 + path.0[at + 1..].iter().position(|key| is(key, &["state"]))?;
    let parameter = &path.0[state + 1..path.0.len().checked_sub(1)?.max(state + 1)];
    (!parameter.is_empty()).then(|| OptimizerState { optimizer: to(state), parameter: Path(parameter.to_vec()).fqn() })
}

/// The parameter an optimizer's state tensor belongs to.
#[must_use]
pub fn optimizer_parameter(path: &Path) -> Option<Fqn> {
    optimizer_state(path).map(|state| state.parameter)
}

/// `grads.FQN` is the gradient of FQN.
#[must_use]
pub fn gradient_parameter(path: &Path) -> Option<Fqn> {
    let is_gradients = |key: &Key| matches!(key, Key::Name(name) if GRADIENTS.contains(&name.as_ref()));
    let at = path.0.iter().position(is_gradients)?;
    let parameter = &path.0[at + 1..];
    (!parameter.is_empty()).then(|| Path(parameter.to_vec()).fqn())
}

/// Where the gradients of a model are, which stand beside it.
#[must_use]
pub fn gradients_root(state: &Value, model_root: &Path) -> Option<Path> {
    let beside = Path(model_root.0[..model_root.0.len().saturating_sub(1)].to_vec());
    let dict = value_at(state, &beside)?.as_dict()?;
    let is_there = |name: &&str| matches!(dict.get(name), Some(Value::Dict(_)));
    GRADIENTS.iter().copied().find(is_there).map(|name| beside.child(Key::Name(name.into())))
}

/// Whether a flat name looks like state of an optimizer: `optim.state.w.exp_avg`, where no nesting says so.
#[must_use]
pub fn reads_as_optimizer_state(name: &str) -> bool {
    let mut parts = name.split('.');
    parts.any(|part| OPTIMIZER.contains(&part)) && parts.next() == Some("state")
}

/// The value at a path.
#[must_use]
pub fn value_at<'a>(state: &'a Value, path: &Path) -> Option<&'a Value> {
    path.0.iter().try_fold(state, |value, key| match (value, key) {
        (Value::Dict(dict), Key::Name(name)) => {
            dict.entries.iter().find(|(own, _)| key_text(own) == *name).map(|(_, value)| value)
        }
        (Value::List(items), Key::Index(index)) => items.get(usize::try_from(*index).ok()?),
        _ => None,
    })
}

/// The parameters that an optimizer of plain `optimizer.state_dict()` knows by numbers: `numbers[i]` is parameter `i`.
///
/// Such a state dict does not say which parameter a number stands for. PyTorch numbers them in the order of
/// `model.parameters()`, which is that of the model's state dict without its buffers and whatever is not trained.
/// `None` unless there is only one reading: one parameter group, numbered from 0, and one way to go through the model
/// in order such that all state tensors with dims have the shape of their parameter and are DTensors where it is one.
/// Only tensors that may be parameters are gone through.
#[must_use]
pub fn numbered_parameters(
    catalog: &Catalog,
    optimizer: &Value,
    may_be: &dyn Fn(&Fqn) -> bool,
) -> Option<Vec<(Fqn, TensorId)>> {
    let dict = optimizer.as_dict()?;
    let (Value::List(groups), Value::Dict(states)) = (dict.get("param_groups")?, dict.get("state")?) else {
        return None;
    };
    let [Value::Dict(group)] = groups.as_slice() else { return None };
    let Value::List(numbers) = group.get("params")? else { return None };
    if !(0..).zip(numbers).all(|(index, number)| number.as_i64() == Some(index)) {
        return None;
    }
    let mut kept: Vec<Vec<&TensorEntry>> = vec![Vec::new(); numbers.len()];
    for (number, state) in &states.entries {
        let number = usize::try_from(number.as_i64()?).ok()?;
        let tensors = state.tensor_ids().into_iter().map(|id| catalog.tensor(id));
        *kept.get_mut(number)? = tensors.filter(|entry| !entry.shape.is_empty()).collect();
    }
    let mut seen = HashSet::new();
    let mut floats = model(&catalog.state).tensors;
    floats.retain(|(fqn, id)| catalog.tensor(*id).dtype.is_float() && may_be(fqn) && seen.insert(*id));
    let fits = |number: usize, (_, id): &(Fqn, TensorId)| {
        let parameter = catalog.tensor(*id);
        let alike = |state: &&TensorEntry| {
            state.shape == parameter.shape && state.sharding.is_some() == parameter.sharding.is_some()
        };
        kept[number].iter().all(alike)
    };
    // Where the leftmost and the rightmost way are one, there is no other between them.
    let mut rest = floats.iter().enumerate();
    let leftmost = (0..kept.len()).map(|number| rest.find(|(_, float)| fits(number, float)).map(|(at, _)| at));
    let leftmost: Vec<usize> = leftmost.collect::<Option<_>>()?;
    let mut rest = floats.iter().enumerate().rev();
    let rightmost = (0..kept.len()).rev().map(|number| rest.find(|(_, float)| fits(number, float)).map(|(at, _)| at));
    let rightmost: Vec<usize> = rightmost.collect::<Option<_>>()?;
    leftmost.iter().eq(rightmost.iter().rev()).then(|| leftmost.into_iter().map(|at| floats[at].clone()).collect())
}

/// The names a rule may know a tensor by: its own, that within the model, that of the parameter it is state or gradient
/// of.
#[must_use]
pub fn rule_names(path: &Path, model_root: &Path) -> Vec<String> {
    let mut names = vec![path.to_string()];
    if !model_root.0.is_empty() && path.0.starts_with(&model_root.0) {
        names.push(Path(path.0[model_root.0.len()..].to_vec()).to_string());
    } else if let Some(parameter) = optimizer_parameter(path).or_else(|| gradient_parameter(path)) {
        if !model_root.0.is_empty() {
            names.push(format!("{model_root}.{parameter}"));
        }
        names.push(parameter.to_string());
    }
    names
}

/// A state dict of flat names.
#[must_use]
pub fn flat_state(tensors: &[(Fqn, TensorId)]) -> Value {
    let entries = tensors.iter().map(|(fqn, id)| (Value::Str(fqn.to_string()), Value::Tensor(*id))).collect();
    Value::Dict(Dict { entries, ..Dict::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::FileId;

    fn dict(entries: Vec<(&str, Value)>) -> Value {
        let entries = entries.into_iter().map(|(key, value)| (Value::Str(key.into()), value)).collect();
        Value::Dict(Dict { entries, ..Dict::default() })
    }

    fn tensor(id: u32) -> Value {
        Value::Tensor(TensorId(id))
    }

    fn names(tensors: &[(Fqn, TensorId)]) -> Vec<&str> {
        tensors.iter().map(|(fqn, _)| fqn.as_str()).collect()
    }

    #[test]
    fn the_model_is_found_by_nesting() {
        let weights = || dict(vec![("model.norm.weight", tensor(0)), ("head", tensor(1))]);
        let optim = || dict(vec![("state", dict(vec![("w", tensor(2))]))]);

        let found = model(&dict(vec![("model", weights()), ("optim", optim())]));
        assert_eq!(
            (found.root.to_string().as_str(), names(&found.tensors)),
            ("model", vec!["model.norm.weight", "head"])
        );

        let found = model(&dict(vec![("app", dict(vec![("model", weights()), ("optim", optim())]))]));
        assert_eq!(found.root.to_string(), "app.model");

        let found = model(&dict(vec![("module", dict(vec![("state_dict", weights())])), ("epoch", Value::Int(3))]));
        assert_eq!(found.root.to_string(), "module.state_dict");

        // torchtitan: the model at the top.
        let found = model(&dict(vec![
            ("tok_embeddings.weight", tensor(0)),
            ("scaler", tensor(3)),
            ("optimizer", optim()),
            ("rng_state", tensor(4)),
            ("train_state", dict(vec![("step", tensor(5))])),
        ]));
        assert_eq!(
            (found.root.to_string().as_str(), names(&found.tensors)),
            ("", vec!["tok_embeddings.weight", "scaler"])
        );

        // A flat Hugging Face state dict: `model.` is text, not nesting.
        let found = model(&weights());
        assert_eq!(names(&found.tensors), ["model.norm.weight", "head"]);
    }

    #[test]
    fn a_child_called_model_is_not_always_the_model() {
        let layers = || dict(vec![("layers", tensor(0))]);
        let head = || ("lm_head", dict(vec![("weight", tensor(1))]));
        let cases = [
            (dict(vec![("model", dict(vec![("model", layers()), head()]))]), "model"),
            (dict(vec![("model", dict(vec![("model", layers()), ("other", tensor(1))]))]), "model"),
            (dict(vec![("model", dict(vec![("model", layers())]))]), "model.model"),
            (dict(vec![("model", layers()), head()]), ""),
            (dict(vec![("model", layers()), ("ema", dict(vec![("layers", tensor(1))]))]), "model"),
            (dict(vec![("app", dict(vec![("model", layers()), ("optim", layers())])), ("x", tensor(1))]), "app.model"),
            (
                dict(vec![("module", dict(vec![("state_dict", layers()), ("epoch", Value::Int(1))]))]),
                "module.state_dict",
            ),
        ];
        for (state, root) in cases {
            assert_eq!(model_root(&state).to_string(), root, "{state}");
        }
    }

    #[test]
    fn gradients_know_their_parameter() {
        let path = |keys: &[&str]| Path(keys.iter().map(|key| Key::Name((*key).into())).collect());
        let parameter = |keys: &[&str]| gradient_parameter(&path(keys)).map(|fqn| fqn.to_string());
        assert_eq!(parameter(&["grads", "a.w"]).as_deref(), Some("a.w"));
        assert_eq!(parameter(&["app", "gradients", "a", "w"]).as_deref(), Some("a.w"));
        assert_eq!((parameter(&["grads"]), parameter(&["model", "grads.w"])), (None, None));
        let own = || dict(vec![("w", tensor(0))]);
        let state = dict(vec![("app", dict(vec![("model", own()), ("grads", own())]))]);
        assert_eq!(gradients_root(&state, &path(&["app", "model"])), Some(path(&["app", "grads"])));
        assert_eq!(gradients_root(&state, &path(&[])), None);
    }

    #[test]
    fn optimizer_state_knows_its_parameter() {
        let path = |steps: &[&str]| Path(steps.iter().map(|step| Key::Name((*step).into())).collect());
        let state = path(&["optim", "state", "layers.0.weight", "exp_avg"]);
        assert_eq!(optimizer_parameter(&state).unwrap().as_str(), "layers.0.weight");
        assert_eq!(
            rule_names(&state, &path(&["model"])),
            ["optim.state.layers.0.weight.exp_avg", "model.layers.0.weight", "layers.0.weight"]
        );
        let flat = path(&["optimizer", "state.layers.0.weight.exp_avg"]);
        assert_eq!(optimizer_parameter(&flat).unwrap().as_str(), "layers.0.weight");
        assert_eq!(optimizer_parameter(&path(&["optimizer", "param_groups.layers.0.weight.lr"])), None);
        assert_eq!(optimizer_parameter(&path(&["model", "w"])), None);
        assert_eq!(optimizer_parameter(&path(&["optim", "state"])), None);
        assert_eq!(optimizer_parameter(&path(&["optim"])), None);
        assert_eq!(rule_names(&path(&["model", "w"]), &path(&["model"])), ["model.w", "w"]);
    }

    #[test]
    fn numbers_stand_for_parameters_where_there_is_one_reading() {
        let float = |name: &str, size: u64| {
            TensorEntry::whole(name.into(), super::super::Dtype::F32, [size].as_slice().into(), FileId(0), 0)
        };
        // a [4], a buffer [2], b [3]; state of two parameters.
        let read = |sizes: [u64; 3], states: [u64; 2], groups: &[&[i64]]| {
            let mut catalog = Catalog::empty();
            let weights = dict(["a", "buffer", "b"].into_iter().zip((0..).map(tensor)).collect());
            catalog.tensors =
                ["a", "buffer", "b"].into_iter().zip(sizes).map(|(name, size)| float(name, size)).collect();
            catalog.tensors.extend(states.map(|size| float("state", size)));
            catalog.state = dict(vec![("model", weights)]);
            let state = |id| dict(vec![("exp_avg", tensor(id))]);
            let states = vec![(Value::Int(0), state(3)), (Value::Int(1), state(4))];
            let group = |numbers: &&[i64]| {
                dict(vec![("params", Value::List(numbers.iter().copied().map(Value::Int).collect()))])
            };
            let optimizer = dict(vec![
                ("state", Value::Dict(Dict { entries: states, ..Dict::default() })),
                ("param_groups", Value::List(groups.iter().map(group).collect())),
            ]);
            let found = numbered_parameters(&catalog, &optimizer, &|_| true)?;
            Some(found.iter().map(|(fqn, _)| fqn.to_string()).collect::<Vec<_>>())
        };
        assert_eq!(read([4, 2, 3], [4, 3], &[&[0, 1]]).unwrap(), ["a", "b"]);
        // The buffer could be the second parameter.
        assert_eq!(read([4, 3, 3], [4, 3], &[&[0, 1]]), None);
        assert_eq!(read([4, 2, 3], [4, 5], &[&[0, 1]]), None);
        // Groups are in an order of their own.
        assert_eq!(read([4, 2, 3], [4, 3], &[&[0], &[1]]), None);
        assert_eq!(read([4, 2, 3], [4, 3], &[&[1, 0]]), None);
    }
}
