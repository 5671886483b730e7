//! The tensors of a checkpoint by the names that another one may have for them.
//!
//! Two checkpoints of one model seldom agree on what stands before a name: `model.layers.0.w` beside an optimizer is
//! `layers.0.w` in a file to ship, and a wrapper may have left its prefix in one of them. So a tensor of a model is
//! looked for by its name within the model, anything by its whole path, and both without wrappers.

use std::collections::HashMap;

use crate::catalog::wrappers::clean_name;
use crate::catalog::{Key, Path, TensorId, Value, model, path};
use crate::nearest;
use crate::select::Wrappers;

/// What a name was found to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameMatch {
    Nothing,
    One(TensorId),
    /// A tensor of the model has it as its name there, another one as its path.
    Two(TensorId, TensorId),
}

/// The names of a checkpoint.
#[derive(Debug)]
pub struct Names {
    model_root: Path,
    in_model: TensorLookup,
    whole: TensorLookup,
}

impl Names {
    pub fn new(state: &Value, wrappers: Wrappers) -> Self {
        let model = model::model(state);
        let mut names =
            Self { model_root: model.root, in_model: TensorLookup::new(wrappers), whole: TensorLookup::new(wrappers) };
        for (name, id) in model.tensors {
            names.in_model.insert(name.to_string(), id);
        }
        path::tensors(state, &Path::default(), &mut |path, id| names.whole.insert(path.to_string(), id));
        names
    }

    /// The name that the tensor at a path has in the model; `None` where it is no tensor of the model.
    pub fn within_model(&self, path: &Path) -> Option<String> {
        let name = Path(path.0.strip_prefix(self.model_root.0.as_slice())?.to_vec()).to_string();
        self.in_model.exact.contains_key(&name).then_some(name)
    }

    /// The tensor that another checkpoint has at `path`, and calls `in_model` where it is one of its model.
    pub fn find(&self, path: &Path, in_model: Option<&str>) -> NameMatch {
        let of_model = in_model.and_then(|name| self.in_model.get(name));
        match (of_model, self.whole.get(&path.to_string())) {
            (Some(one), Some(other)) if one != other => NameMatch::Two(one, other),
            (Some(one), _) | (None, Some(one)) => NameMatch::One(one),
            (None, None) => NameMatch::Nothing,
        }
    }

    /// The tensor of the model that has this name in it.
    pub fn parameter(&self, name: &str) -> Option<TensorId> {
        self.in_model.get(name)
    }

    /// What to say where nothing is called like that.
    pub fn nearest(&self, path: &Path, in_model: Option<&str>) -> String {
        let (name, lookup) = match in_model {
            Some(name) => (name.to_owned(), &self.in_model),
            None => (path.to_string(), &self.whole),
        };
        let names: Vec<String> = lookup.exact.keys().cloned().collect();
        nearest::name_hint(&name, &names)
    }
}

/// The path of a value of which a rank's own is at `path`, as formats without rank files have it: `rng.rank_3`.
pub fn of_all_ranks(path: &Path) -> Option<Path> {
    let (Key::Name(last), above) = path.0.split_last()? else { return None };
    let is_rank = last.strip_prefix("rank_").is_some_and(|number| number.parse::<u32>().is_ok());
    is_rank.then(|| Path(above.to_vec()))
}

/// Tensors by name, as it is and without wrappers.
#[derive(Debug)]
struct TensorLookup {
    wrappers: Wrappers,
    exact: HashMap<String, TensorId>,
    /// `None` where several tensors have the name.
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
    fn a_tensor_is_found_by_its_name_in_the_model_or_by_its_path() {
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
    fn names_that_only_wrappers_keep_apart_stay_apart() {
        let state = dict(&[("_orig_mod.w", Value::Tensor(TensorId(0))), ("w", Value::Tensor(TensorId(1)))]);
        let names = Names::new(&state, Wrappers::Match);
        assert_eq!(names.parameter("w"), Some(TensorId(1)));
        assert_eq!(names.parameter("_fsdp_wrapped_module.w"), None);
    }

    #[test]
    fn the_value_of_a_rank_is_known_by_its_last_key() {
        assert_eq!(of_all_ranks(&path(&["rng", "rank_3"])), Some(path(&["rng"])));
        assert_eq!(of_all_ranks(&path(&["rng", "rank_x"])), None);
        assert_eq!(of_all_ranks(&path(&[])), None);
    }
}
