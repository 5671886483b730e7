//! Lookup of a checkpoint's tensors by the names that another checkpoint uses for them.
//!
//! Two checkpoints of one model often have different prefixes: `model.layers.0.w` in a training checkpoint is
//! `layers.0.w` in a file with weights only, and a wrapper module may add its own prefix. Therefore a tensor of the
//! model is looked up by its name inside the model, and every tensor is looked up by its full path. Both lookups are
//! also tried with names without wrapper prefixes.

use std::collections::HashMap;

use crate::catalog::wrappers::clean_name;
use crate::catalog::{Key, Path, TensorId, Value, path, state_dict};
use crate::nearest;
use crate::select::Wrappers;

/// Result of looking up a tensor by its path and its name inside the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameMatch {
    /// No tensor matches.
    Nothing,
    /// Exactly one tensor matches.
    One(TensorId),
    /// Two tensors match: the first by its name inside the model, the second by its path.
    Two(TensorId, TensorId),
}

/// Index of a checkpoint's tensors by name.
#[derive(Debug)]
pub struct Names {
    model_root: Path,
    in_model: TensorLookup,
    whole: TensorLookup,
}

impl Names {
    /// Indexes the names of all tensors in a state dict.
    pub fn new(state: &Value, wrappers: Wrappers) -> Self {
        let model = state_dict::model(state);
        let mut names =
            Self { model_root: model.root, in_model: TensorLookup::new(wrappers), whole: TensorLookup::new(wrappers) };
        for (name, id) in model.tensors {
            names.in_model.insert(name.to_string(), id);
        }
        path::tensors(state, &Path::default(), &mut |path, id| names.whole.insert(path.to_string(), id));
        names
    }

    /// Returns the name that the tensor at a path has inside the model. Returns `None` if the tensor is not part of the
    /// model.
    pub fn within_model(&self, path: &Path) -> Option<String> {
        let name = Path(path.0.strip_prefix(self.model_root.0.as_slice())?.to_vec()).to_string();
        self.in_model.exact.contains_key(&name).then_some(name)
    }

    /// Finds the tensor that corresponds to a tensor of another checkpoint. In the other checkpoint, the tensor has
    /// this path and, if it is part of the model, the name `in_model` inside the model.
    pub fn find(&self, path: &Path, in_model: Option<&str>) -> NameMatch {
        let of_model = in_model.and_then(|name| self.in_model.get(name));
        match (of_model, self.whole.get(&path.to_string())) {
            (Some(one), Some(other)) if one != other => NameMatch::Two(one, other),
            (Some(one), _) | (None, Some(one)) => NameMatch::One(one),
            (None, None) => NameMatch::Nothing,
        }
    }

    /// Returns the tensor that has this name inside the model.
    pub fn parameter(&self, name: &str) -> Option<TensorId> {
        self.in_model.get(name)
    }

    /// Returns a hint with the most similar name of a tensor, for a lookup that found nothing. Compares `in_model` with
    /// the names inside the model, or, if it is `None`, compares `path` with all paths.
    pub fn nearest(&self, path: &Path, in_model: Option<&str>) -> String {
        let (name, lookup) = match in_model {
            Some(name) => (name.to_owned(), &self.in_model),
            None => (path.to_string(), &self.whole),
        };
        let names: Vec<String> = lookup.exact.keys().cloned().collect();
        nearest::name_hint(&name, &names)
    }
}

/// Returns the path of a value without the key of its rank: `rng` for `rng.rank_3`. Formats without rank files store
/// per-rank values under such keys. Returns `None` if the last key is not a rank.
pub fn of_all_ranks(path: &Path) -> Option<Path> {
    let (Key::Name(last), above) = path.0.split_last()? else { return None };
    let is_rank = last.strip_prefix("rank_").is_some_and(|number| number.parse::<u32>().is_ok());
    is_rank.then(|| Path(above.to_vec()))
}

/// Table of tensors by their exact names and, unless wrapper prefixes are kept, by their names without wrapper
/// prefixes.
#[derive(Debug)]
struct TensorLookup {
    wrappers: Wrappers,
    exact: HashMap<String, TensorId>,
    /// Tensors by their name without wrapper prefixes. The value is `None` if several tensors have this name.
    clean: HashMap<String, Option<TensorId>>,
}

impl TensorLookup {
    fn new(wrappers: Wrappers) -> Self {
        Self { wrappers, exact: HashMap::new(), clean: HashMap::new() }
    }

    fn insert(&mut self, name: String, id: TensorId) {
        if self.wrappers != Wrappers::Keep {
            let known = self.clean.entry(clean_name(&name)).or_insert(Some(id));
            *known = known.filter(|known| *known == id);
        }
        self.exact.insert(name, id);
    }

    fn get(&self, name: &str) -> Option<TensorId> {
        self.exact.get(name).copied().or_else(|| *self.clean.get(&clean_name(name))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Dict;

    fn dict(entries: &[(&str, Value)]) -> Value {
        let entries = entries.iter().map(|(key, value)| (Value::Str((*key).into()), value.clone())).collect();
        Value::Dict(Dict { entries, ..Dict::default() })
    }

    fn path(keys: &[&str]) -> Path {
        Path(keys.iter().map(|key| Key::Name((*key).into())).collect())
    }

    fn found(names: &Names, keys: &[&str], in_model: Option<&str>) -> NameMatch {
        names.find(&path(keys), in_model)
    }

    #[test]
    fn tensor_is_found_by_name_in_model_or_by_path() {
        let [a, b, c] = [0, 1, 2].map(TensorId);
        let model = dict(&[("_orig_mod.w", Value::Tensor(a)), ("model.w", Value::Tensor(b))]);
        let state = dict(&[("model", model), ("optim", dict(&[("step", Value::Tensor(c))]))]);
        let names = Names::new(&state, Wrappers::Match);
        assert_eq!(found(&names, &["w"], Some("w")), NameMatch::One(a));
        assert_eq!(found(&names, &["model.model.w"], Some("model.model.w")), NameMatch::One(b));
        assert_eq!(found(&names, &["model.w"], Some("model.w")), NameMatch::Two(b, a));
        assert_eq!(found(&names, &["optim.step"], None), NameMatch::One(c));
        assert_eq!(found(&names, &["step"], Some("step")), NameMatch::Nothing);
        assert_eq!(names.within_model(&path(&["model", "model.w"])).as_deref(), Some("model.w"));
        assert_eq!(names.within_model(&path(&["optim", "step"])), None);
        assert_eq!(found(&Names::new(&state, Wrappers::Keep), &["w"], Some("w")), NameMatch::Nothing);
    }

    #[test]
    fn names_that_differ_only_by_wrappers_stay_different() {
        let state = dict(&[("_orig_mod.w", Value::Tensor(TensorId(0))), ("w", Value::Tensor(TensorId(1)))]);
        let names = Names::new(&state, Wrappers::Match);
        assert_eq!(names.parameter("w"), Some(TensorId(1)));
        assert_eq!(names.parameter("_fsdp_wrapped_module.w"), None);
    }

    #[test]
    fn per_rank_value_is_recognised_by_its_last_key() {
        assert_eq!(of_all_ranks(&path(&["rng", "rank_3"])), Some(path(&["rng"])));
        assert_eq!(of_all_ranks(&path(&["rng", "rank_x"])), None);
        assert_eq!(of_all_ranks(&path(&[])), None);
    }
}
