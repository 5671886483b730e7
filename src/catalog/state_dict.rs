//! Finds the components of a state dict: the model, the gradients and their parameters, and the state of random number
//! generators. [`Value`] is the state dict itself.
//!
//! Invariant: only the nesting of dicts counts; dots in a key do not.

use super::optimizer::{is_optimizer_key, optimizer_parameter};
use super::path::{key_text, tensors};
use super::{Dict, Fqn, Key, Path, TensorId, Value};

/// The keys under which trainers store the model. The first [`IS_MODULE_NAME`] keys are also usual names of modules.
const MODEL: [&str; 6] = ["model", "module", "network", "state_dict", "model_state_dict", "model_state"];
const IS_MODULE_NAME: usize = 3;

/// The keys under which trainers store a dict that contains the model and the optimizer: `app` if an application saves
/// one `Stateful`, `state` in Composer.
const OUTER: [&str; 2] = ["app", "state"];

/// Keys at the top level of a state dict that do not belong to the model, even if the tensors of the model are at the
/// top level, too. This list has no keys of optimizers, although they do not belong to the model either.
const BESIDE: [&str; 13] = [
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

/// The keys under which trainers store gradients. A gradient has the name of its parameter.
pub const GRADIENTS: [&str; 2] = ["grads", "gradients"];

/// Names of head modules. If a dict has such a module, its child `model` is only a part of the model.
const HEADS: [&str; 6] = ["lm_head", "embed_out", "score", "classifier", "qa_outputs", "v_head"];

/// The model in a state dict: its path and its tensors.
#[derive(Debug)]
pub struct Model {
    /// The path of the model in the state dict; empty if the tensors of the model are at the top level.
    pub root: Path,
    /// The tensors of the model, with names relative to the root.
    pub tensors: Vec<(Fqn, TensorId)>,
}

/// Finds the model in a state dict.
pub fn model(state: &Value) -> Model {
    let (root, at) = descend(state);
    let mut found = Vec::new();
    if let (true, Value::Dict(dict)) = (root.0.is_empty(), at) {
        for (key, value) in &dict.entries {
            let name = key_text(key);
            if !is_beside_model(&name, value) {
                collect(value, &Path(vec![Key::Name(name)]), &mut found);
            }
        }
    } else {
        collect(at, &Path::default(), &mut found);
    }
    Model { root, tensors: found }
}

/// Returns the tensors of the model, with names relative to the model. If the state dict has no model but gradients,
/// returns the gradients under the names of their parameters.
pub fn parameters(state: &Value) -> Vec<(Fqn, TensorId)> {
    let model = model(state);
    let gradients = || Some(all_tensors(gradients_root(state, &model.root)?.find(state)?));
    if model.tensors.is_empty() { gradients().unwrap_or_default() } else { model.tensors }
}

/// Returns the path of the model in the state dict; empty if the tensors of the model are at the top level.
pub fn model_root(state: &Value) -> Path {
    descend(state).0
}

/// Returns the path of the innermost dict that contains all tensors. The names of all tensors begin with this path; it is
/// empty if the top level has tensors, or several values with tensors.
pub fn common_path(state: &Value) -> Path {
    let mut common = Path::default();
    let mut at = state;
    while let Value::Dict(dict) = at {
        let mut with_tensors = dict.entries.iter().filter(|(_, value)| value.contains_tensor());
        let (Some((key, inner @ Value::Dict(_))), None) = (with_tensors.next(), with_tensors.next()) else { break };
        common.0.push(Key::Name(key_text(key)));
        at = inner;
    }
    common
}

fn descend(state: &Value) -> (Path, &Value) {
    let mut root = Path::default();
    let mut at = state;
    if let Some((key, inner)) = child(at, &OUTER).filter(|(_, inner)| child(inner, &MODEL).is_some()) {
        root.0.push(key);
        at = inner;
    }
    // Wrappers may be nested: `{"module": {"state_dict": {...}}}`. No module is called `state_dict`, but many models
    // have a module called `model`. So below the first wrapper, `model` is a wrapper only if it is the only key.
    let mut keys = &MODEL[..];
    while let Some((key, inner)) = child(at, keys).filter(|_| !has_head(at)) {
        root.0.push(key);
        at = inner;
        keys = if is_alone(at) { &MODEL } else { &MODEL[IS_MODULE_NAME..] };
    }
    (root, at)
}

fn is_alone(value: &Value) -> bool {
    value.as_dict().is_some_and(|dict| dict.entries.len() == 1)
}

/// Returns whether a dict has a head module. If so, its child `model` is only a part of the model.
fn has_head(value: &Value) -> bool {
    let head = |key: &Value, value: &Value| {
        key.as_str().is_some_and(|key| HEADS.contains(&key)) && value.as_dict().is_some() && value.contains_tensor()
    };
    value.as_dict().is_some_and(|dict| dict.entries.iter().any(|(key, value)| head(key, value)))
}

/// Returns every tensor in a state dict, with its name.
pub fn all_tensors(state: &Value) -> Vec<(Fqn, TensorId)> {
    let mut found = Vec::new();
    collect(state, &Path::default(), &mut found);
    found
}

fn collect(value: &Value, path: &Path, found: &mut Vec<(Fqn, TensorId)>) {
    tensors(value, path, &mut |path, id| found.push((path.fqn(), id)));
}

/// Returns the first key in `keys` whose value in the dict is itself a dict with tensors, together with this value.
fn child<'a>(value: &'a Value, keys: &[&str]) -> Option<(Key, &'a Value)> {
    let Value::Dict(dict) = value else { return None };
    keys.iter().find_map(|key| {
        let inner = dict.get(key)?;
        (matches!(inner, Value::Dict(_)) && inner.contains_tensor()).then(|| (Key::Name((*key).into()), inner))
    })
}

/// Returns whether a value of this name is the state of a random number generator. Such a state may differ from rank to
/// rank.
pub fn is_random_state(name: &str) -> bool {
    const NAMES: [&str; 5] = ["rng", "rng_state", "rng_states", "random_state", "random_states"];
    // Compares bytes instead of decoded text, because this function is called for every name.
    let mut parts = name.as_bytes().split(|byte| *byte == b'.');
    parts.any(|part| part.ends_with(b"_rng_state") || NAMES.iter().any(|known| known.as_bytes() == part))
}

/// Returns whether a top-level key does not belong to a model at the top level. The function also examines the value,
/// because a tensor at the key `scaler` is a parameter, and a dict at this key is not.
pub fn is_beside_model(name: &str, value: &Value) -> bool {
    let container = !matches!(value, Value::Tensor(_));
    container && (BESIDE.contains(&name) || is_optimizer_key(name))
        || name == "rng"
        || name.starts_with("rng_")
        || name.ends_with("rng_state")
}

/// Returns the name of the parameter that a gradient belongs to: `FQN` for `grads.FQN`.
pub fn gradient_parameter(path: &Path) -> Option<Fqn> {
    let is_gradients = |key: &Key| matches!(key, Key::Name(name) if GRADIENTS.contains(&name.as_ref()));
    let at = path.0.iter().position(is_gradients)?;
    let parameter = &path.0[at + 1..];
    (!parameter.is_empty()).then(|| Path(parameter.to_vec()).fqn())
}

/// Returns the path of the dict of gradients that is stored beside the model, or `None` if the state dict has no
/// gradients.
pub fn gradients_root(state: &Value, model_root: &Path) -> Option<Path> {
    let beside = Path(model_root.0[..model_root.0.len().saturating_sub(1)].to_vec());
    let dict = beside.find(state)?.as_dict()?;
    let is_there = |name: &&str| matches!(dict.get(name), Some(Value::Dict(_)));
    GRADIENTS.iter().copied().find(is_there).map(|name| beside.child(Key::Name(name.into())))
}

/// Returns the names of a tensor that placement rules are compared with. The first name is the complete name. A tensor of
/// the model also has a name without the path of the model. Optimizer state and gradients also have the name of the
/// parameter, with and without the path of the model.
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

/// Makes a state dict whose keys are complete names.
pub fn flat_state(tensors: &[(Fqn, TensorId)]) -> Value {
    let entries = tensors.iter().map(|(fqn, id)| (Value::Str(fqn.into()), Value::Tensor(*id))).collect();
    Value::Dict(Dict { entries, ..Dict::default() })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn dict(entries: Vec<(&str, Value)>) -> Value {
        let entries = entries.into_iter().map(|(key, value)| (Value::Str(key.into()), value)).collect();
        Value::Dict(Dict { entries, ..Dict::default() })
    }

    pub fn tensor(id: u32) -> Value {
        Value::Tensor(TensorId(id))
    }

    fn names(tensors: &[(Fqn, TensorId)]) -> Vec<&str> {
        tensors.iter().map(|(fqn, _)| fqn.as_str()).collect()
    }

    #[test]
    fn model_is_found_by_nesting() {
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

        // torchtitan stores the parameters of the model at the top level.
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

        // Lightning adds numbers to optimizer keys.
        let found = model(&dict(vec![("net.w", tensor(0)), ("optimizer_0", optim())]));
        assert_eq!(names(&found.tensors), ["net.w"]);

        // In a flat Hugging Face state dict, `model.` is part of the keys, not nesting.
        let found = model(&weights());
        assert_eq!(names(&found.tensors), ["model.norm.weight", "head"]);
    }

    #[test]
    fn child_called_model_beside_a_head_is_not_the_model() {
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
    fn common_path_ends_at_the_dict_of_all_tensors() {
        let weights = || dict(vec![("a.w", tensor(0)), ("b", dict(vec![("w", tensor(1))]))]);
        for (state, common) in [
            (dict(vec![("x", dict(vec![("y", weights()), ("step", Value::Int(3))]))]), "x.y"),
            (dict(vec![("x", weights()), ("y", weights())]), ""),
            (dict(vec![("x.w", tensor(0))]), ""),
            (dict(vec![("x", dict(vec![]))]), ""),
        ] {
            assert_eq!(common_path(&state).to_string(), common, "{state}");
        }
    }

    #[test]
    fn gradient_path_gives_its_parameter() {
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
    fn rule_names_include_those_of_the_parameter() {
        let path = |steps: &[&str]| Path(steps.iter().map(|step| Key::Name((*step).into())).collect());
        let state = path(&["optim", "state", "layers.0.weight", "exp_avg"]);
        assert_eq!(
            rule_names(&state, &path(&["model"])),
            ["optim.state.layers.0.weight.exp_avg", "model.layers.0.weight", "layers.0.weight"]
        );
        assert_eq!(rule_names(&path(&["model", "w"]), &path(&["model"])), ["model.w", "w"]);
    }
}
