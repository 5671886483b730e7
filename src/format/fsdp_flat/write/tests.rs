use std::path::PathBuf;

use super::{FlatTarget, PlannedTree, reserve, survey};
use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit, SharedName};
use crate::catalog::{Catalog, Dict, DictKind, Dtype, Fqn, Key, Path, Reservation, TensorEntry, TensorId, Value};
use crate::layout::Dims;
use crate::storage::FileId;

fn text(text: &str) -> Value {
    Value::Str(text.into())
}

fn dict<K: Into<std::sync::Arc<str>>>(entries: impl IntoIterator<Item = (K, Value)>) -> Value {
    let entries = entries.into_iter().map(|(key, value)| (Value::Str(key.into()), value)).collect();
    Value::Dict(Dict { entries, ..Dict::default() })
}

fn target(layout: &FlatLayout) -> FlatTarget<'_> {
    FlatTarget { layout, model: Some(key("model")), gradients: None, name: &|rank| PathBuf::from(format!("{rank}.pt")) }
}

fn names(names: &[&str]) -> Vec<Fqn> {
    names.iter().map(|name| Fqn::from(*name)).collect()
}

fn key(name: &str) -> Path {
    Path(vec![Key::Name(name.into())])
}

fn param(fqn: &str, shape: &[u64]) -> FlatParam {
    FlatParam { fqn: fqn.into(), shape: Dims::from_slice(shape), stride: None }
}

fn unit(module: &str, params: Vec<FlatParam>) -> FlatUnit {
    FlatUnit { params, ..FlatUnit::new(module, Some(Dtype::F32)) }
}

/// Returns a layout with two units. The root has `emb` [5, 3], tied to `head`, and `norm` [3]. The unit `blk` has
/// `blk.w` [3, 5] and `blk.b` [5].
fn layout(use_orig_params: bool) -> FlatLayout {
    let mut root = unit("", vec![param("emb", &[5, 3]), param("norm", &[3])]);
    root.shared.push(SharedName { fqn: "head".into(), with: "emb".into() });
    let blk = unit("blk", vec![param("blk.w", &[3, 5]), param("blk.b", &[5])]);
    FlatLayout {
        world_size: 2,
        shard_group_size: 2,
        use_orig_params,
        has_assumed_alignment: false,
        units: vec![root, blk],
        optimizer: None,
    }
}

/// A checkpoint `{"model": .., "optim": ..}`.
struct Source {
    catalog: Catalog,
    model: Vec<(String, Value)>,
    states: Vec<(String, Value)>,
    groups: Vec<Vec<String>>,
}

impl Source {
    fn empty() -> Self {
        Self { catalog: Catalog::empty(), model: Vec::new(), states: Vec::new(), groups: Vec::new() }
    }

    fn tensor(&mut self, fqn: &str, dtype: Dtype, shape: &[u64]) -> Value {
        let entry = TensorEntry::whole(fqn.into(), dtype, Dims::from_slice(shape), FileId(0), 0);
        Value::Tensor(self.catalog.push_tensor(entry))
    }

    fn add(&mut self, fqn: &str, shape: &[u64]) {
        let tensor = self.tensor(fqn, Dtype::F32, shape);
        self.model.push((fqn.into(), tensor));
    }

    fn add_state(&mut self, fqn: &str, shape: &[u64]) {
        let (step, average) = (self.tensor(fqn, Dtype::F32, &[]), self.tensor(fqn, Dtype::F32, shape));
        self.states.push((fqn.into(), dict([("step", step), ("exp_avg", average)])));
    }

    /// Returns a checkpoint that matches [`layout`]: a model with the buffer `blk.seen`, and optimizer state.
    fn valid() -> Self {
        let mut source = Self::empty();
        for (fqn, shape) in [("emb", &[5, 3][..]), ("blk.w", &[3, 5]), ("blk.b", &[5]), ("norm", &[3])] {
            source.add(fqn, shape);
            source.add_state(fqn, shape);
        }
        let buffer = source.tensor("blk.seen", Dtype::I64, &[]);
        source.model.insert(2, ("blk.seen".into(), buffer));
        source.groups = vec![["emb", "blk.w", "blk.b", "norm"].map(String::from).to_vec()];
        source
    }

    fn state(&self) -> Value {
        let group = |(index, names): (i64, &Vec<String>)| {
            let params = names.iter().map(|name| text(name)).collect();
            dict([("lr", Value::Int(index)), ("params", Value::List(params))])
        };
        let groups = (0..).zip(&self.groups).map(group).collect();
        let optimizer = dict([("state", dict(self.states.clone())), ("param_groups", Value::List(groups))]);
        dict([("model", dict(self.model.clone())), ("optim", optimizer)])
    }

    fn reserve(&self, layout: &FlatLayout) -> crate::error::Result<Reservation> {
        reserve(&self.catalog, &self.state(), target(layout))
    }

    /// Returns the planned state dict, which all rank files share.
    fn tree(&self, layout: &FlatLayout) -> Value {
        PlannedTree::new(&self.catalog, &self.state(), &target(layout)).unwrap().tree
    }
}

fn keys(tree: &Value, path: &[&str]) -> Vec<String> {
    let found = path.iter().fold(tree, |value, key| value.as_dict().unwrap().get(key).unwrap());
    found.as_dict().unwrap().entries.iter().map(|(key, _)| crate::catalog::path::key_text(key).to_string()).collect()
}

#[test]
fn flat_parameters_come_where_pytorch_puts_them() {
    let source = Source::valid();
    assert_eq!(keys(&source.tree(&layout(false)), &["model"]), ["_flat_param", "blk._flat_param", "blk.seen"]);
    assert_eq!(
        keys(&source.tree(&layout(true)), &["model"]),
        ["emb", "blk.w", "blk.seen", "blk.b", "blk._flat_param", "norm", "head", "_flat_param"]
    );
    let whole = FlatLayout { shard_group_size: 1, ..layout(true) };
    assert_eq!(keys(&source.tree(&whole), &["model"]), ["emb", "blk.w", "blk.seen", "blk.b", "norm", "head"]);
}

#[test]
fn optimizer_numbers_parameters_or_units() {
    let mut source = Source::valid();
    let tree = source.tree(&layout(true));
    assert_eq!(keys(&tree, &["optim", "state"]), ["0", "1", "2", "3"]);
    let groups =
        |tree: &Value| tree.as_dict().unwrap().get("optim").unwrap().as_dict().unwrap().entries[1].1.to_string();
    assert_eq!(groups(&tree), "[{'lr': 0, 'params': [0, 1, 2, 3]}]");
    let tree = source.tree(&layout(false));
    assert_eq!(
        (keys(&tree, &["optim", "state"]), groups(&tree)),
        (vec!["0".into(), "1".into()], "[{'lr': 0, 'params': [0, 1]}]".into())
    );

    // Each of the two parameter groups has the parameters of one unit.
    source.groups = vec![vec!["blk.w".into(), "blk.b".into()], vec!["norm".into(), "emb".into()]];
    assert_eq!(groups(&source.tree(&layout(false))), "[{'lr': 0, 'params': [0]}, {'lr': 1, 'params': [1]}]");
    // The parameter groups in the layout are in the order of the job.
    let optimizer = Some(vec![names(&["norm", "emb"]), names(&["blk.b", "blk.w"])]);
    let tree = source.tree(&FlatLayout { optimizer, ..layout(true) });
    assert_eq!(groups(&tree), "[{'lr': 1, 'params': [0, 1]}, {'lr': 0, 'params': [2, 3]}]");
}

/// torchtitan saves optimizer state with dotted names. Such state has options for each parameter, but no parameter
/// groups. If the layout has no parameter groups either, `use_orig_params=True` is an error.
#[test]
fn flattened_optimizer_needs_known_groups() {
    let mut source = Source::valid();
    let named = |source: &Source, layout: &FlatLayout| source.tree(layout);
    let optimizer = Some(vec![["emb", "blk.w", "blk.b", "norm"].map(Fqn::from).to_vec()]);
    let with_groups = FlatLayout { optimizer, ..layout(true) };
    let expected = [named(&source, &layout(false)), named(&source, &with_groups)];
    let mut flattened = Vec::new();
    for (fqn, state) in &source.states {
        let state = state.as_dict().unwrap().entries.iter();
        flattened.extend(state.map(|(key, value)| (format!("state.{fqn}.{}", key.as_str().unwrap()), value.clone())));
        flattened.push((format!("param_groups.{fqn}.lr"), Value::Int(0)));
    }
    let mut plan = |layout: &FlatLayout| {
        let state = dict([("model", dict(source.model.clone())), ("optim", dict(flattened.clone()))]);
        source.catalog.state = state.clone();
        let target = target(layout);
        let planned = PlannedTree::new(&source.catalog, &state, &target);
        planned.map(|planned| planned.tree).map_err(|error| error.to_string())
    };
    assert_eq!([plan(&layout(false)).unwrap(), plan(&with_groups).unwrap()], expected);
    let error = plan(&layout(true)).unwrap_err();
    assert!(error.starts_with("optim: optimizer state saved with flatten_optimizer_state_dict does not"), "{error}");
}

/// FSDP2 rank files contain `optimizer.state_dict()`, which refers to parameters by number.
#[test]
fn numbered_source_optimizer_resolves_to_parameters() {
    let mut source = Source::valid();
    let number = |name: &Value, order: &[&str]| {
        let at = order.iter().position(|known| name.as_str() == Some(known)).unwrap();
        Value::Int(i64::try_from(at).unwrap())
    };
    let order = ["emb", "blk.w", "blk.b", "norm"];
    let mut state = source.state();
    source.catalog.state = state.clone();
    let named = source.tree(&layout(false));
    let Value::Dict(whole) = &mut state else { unreachable!() };
    let Value::Dict(optimizer) = &mut whole.entries[1].1 else { unreachable!() };
    let Value::Dict(states) = &mut optimizer.entries[0].1 else { unreachable!() };
    states.entries.iter_mut().for_each(|(name, _)| *name = number(name, &order));
    let params = Value::List((0..4).map(Value::Int).collect());
    optimizer.entries[1].1 = Value::List(vec![dict([("lr", Value::Int(0)), ("params", params)])]);
    source.catalog.state = state.clone();
    let layout = layout(false);
    let target = target(&layout);
    let planned = PlannedTree::new(&source.catalog, &state, &target).unwrap();
    assert_eq!(planned.tree, named);
    // With several groups, parameter numbers cannot be resolved to parameters.
    let Value::Dict(whole) = &mut state else { unreachable!() };
    let Value::Dict(optimizer) = &mut whole.entries[1].1 else { unreachable!() };
    let group = |numbers: [i64; 2]| dict([("params", Value::List(numbers.map(Value::Int).to_vec()))]);
    optimizer.entries[1].1 = Value::List(vec![group([0, 1]), group([2, 3])]);
    let error = PlannedTree::new(&source.catalog, &state, &target).err().unwrap().to_string();
    assert!(error.starts_with("optim: the optimizer has state of number 0, which is not a parameter"), "{error}");

    // A layout with such groups resolves the numbers, and so do names (`param_names`) next to the numbers.
    let listed = Some(vec![names(&["emb", "blk.w"]), names(&["blk.b", "norm"])]);
    let listed = FlatLayout { optimizer: listed, ..self::layout(true) };
    let numbered = survey(&source.catalog, &state, &self::target(&listed)).unwrap().numbered;
    assert_eq!(numbered, listed.optimizer);
    let Value::Dict(whole) = &mut state else { unreachable!() };
    let Value::Dict(optimizer) = &mut whole.entries[1].1 else { unreachable!() };
    let group = |numbers: [i64; 2], names: [&str; 2]| {
        let names = Value::List(names.map(text).to_vec());
        dict([("params", Value::List(numbers.map(Value::Int).to_vec())), ("param_names", names)])
    };
    optimizer.entries[1].1 = Value::List(vec![group([0, 1], ["emb", "blk.w"]), group([2, 3], ["blk.b", "norm"])]);
    let views = self::layout(true);
    let numbered = survey(&source.catalog, &state, &self::target(&views)).unwrap().numbered;
    assert_eq!(numbered, listed.optimizer);
}

#[test]
fn merged_tensors_are_reported() {
    let mut source = Source::valid();
    let merged = |source: &Source, layout: &FlatLayout| {
        survey(&source.catalog, &source.state(), &target(layout)).unwrap().merged
    };
    assert_eq!(merged(&source, &layout(true)), []);
    // The source has a step for each parameter. The two steps of each unit are merged into one.
    assert_eq!(merged(&source, &layout(false)).len(), 2);
    source.add("head", &[5, 3]);
    let Some((_, Value::Tensor(head))) = source.model.last() else { unreachable!() };
    assert_eq!(merged(&source, &layout(true)), [(TensorId(0), *head)]);
    // A source may have a tied parameter only under its other name.
    let emb = source.model.remove(0).1;
    source.model.pop();
    source.model.push(("head".into(), emb));
    assert_eq!(merged(&source, &layout(true)), []);
    assert_eq!(
        keys(&source.tree(&layout(true)), &["model"])[4..],
        ["norm", "head", "emb", "_flat_param"].map(String::from)[..]
    );
}

/// A change that makes a valid source or layout invalid.
type Change<'c> = &'c dyn Fn(&mut Source, &mut FlatLayout);

#[test]
fn source_that_cannot_be_flattened_is_an_error() {
    let error_text = |change: Change<'_>, use_orig_params: bool| {
        let (mut source, mut layout) = (Source::valid(), layout(use_orig_params));
        change(&mut source, &mut layout);
        source.reserve(&layout).unwrap_err().to_string()
    };
    let flat: [(Change<'_>, &str); 8] = [
        (&|s, _| drop(s.model.drain(3..)), "the model lacks 2 parameters of the flat layout: norm, blk.b"),
        (&|_, l| l.units[1].params[1].shape[0] = 6, "blk.b: expected the shape [6] of the flat layout, found [5]"),
        (
            &|s, _| s.catalog.tensors[3].dtype = Dtype::Bf16,
            "unit blk: `blk.w` is bf16, `blk.b` is f32, but a flat parameter has one dtype",
        ),
        (
            &|s, _| s.groups = vec![vec!["emb".into(), "norm".into(), "blk.w".into()], vec!["blk.b".into()]],
            "optim: unit blk: `blk.w` is in group 0, `blk.b` in group 1, but a flat parameter belongs to one parameter \
             group",
        ),
        (
            &|s, _| drop(s.states.remove(2)),
            "optim: `blk.w` and `blk.b` are in one flat parameter, but only one of them has state",
        ),
        (
            &|s, _| s.states[1].1 = dict([("step", Value::Int(1)), ("exp_avg", Value::Int(2))]),
            "optim: `blk.w` and `blk.b` are in one flat parameter, but they differ in `step`",
        ),
        (
            &|s, _| s.states[0].0 = "emb2".into(),
            "optim: the optimizer has state of `emb2`, which is not a parameter of the flat layout",
        ),
        (
            &|s, _| s.groups[0].truncate(3),
            "optim: cannot flatten an optimizer with state of `norm`, which is in no parameter group",
        ),
    ];
    for (change, expected) in flat {
        assert_eq!(error_text(change, false), expected);
    }
    let views: [(Change<'_>, &str); 6] = [
        (
            &|s, _| {
                let row = s.tensor("row", Dtype::F32, &[3]);
                s.states[1].1 = dict([("exp_avg_sq_row", row)]);
            },
            "optim: `exp_avg_sq_row` of `blk.w` is a tensor of shape [3], but the parameter has shape [3, 5]",
        ),
        (
            &|_, l| l.units[1].align_numel = Some(1 << 40),
            "unit blk: expected an align_numel of at most 16, found 1099511627776",
        ),
        (&|_, l| l.units[1].params[1].shape.clear(), "unit blk: the parameter `blk.b` is a scalar"),
        (
            &|s, _| s.catalog.tensors.iter_mut().for_each(|t| t.dtype = Dtype::I32),
            "the root unit: `emb` is i32, but FSDP1 flattens only f64, f32, f16 and bf16 parameters",
        ),
        (
            &|_, l| l.optimizer = Some(vec![vec!["emb".into(), "norm".into(), "blk.w".into()]]),
            "optim: `blk.b` is not in `optimizer` of the flat layout",
        ),
        (
            &|s, _| s.groups.push(vec!["head".into()]),
            "optim: cannot flatten an optimizer with `emb` listed twice in its parameter groups",
        ),
    ];
    for (change, expected) in views {
        assert_eq!(error_text(change, true), expected);
    }
}

#[test]
fn buffers_are_noted() {
    let mut source = Source::valid();
    source.add("tied", &[5, 3]);
    let notes = source.reserve(&layout(true)).unwrap().notes;
    assert_eq!(notes, ["2 tensors are not parameters of the flat layout, so every rank stores them whole"]);
}

/// Wrappers are added to the paths of modules exactly once.
#[test]
fn metadata_lists_wrapped_modules() {
    let version = |version| dict([("version", Value::Int(version))]);
    let metadata = |paths: &[(&str, i64)]| {
        let entries = paths.iter().map(|(path, number)| (text(path), version(*number))).collect();
        let ordered = Value::Dict(Dict { kind: DictKind::Ordered, entries, attributes: None });
        dict([("_metadata", ordered)])
    };
    let plain = metadata(&[("", 2), ("norm", 3), ("blk", 4), ("blk.w", 5)]);
    let wrapped = metadata(&[
        ("", 1),
        ("_fsdp_wrapped_module", 2),
        ("_fsdp_wrapped_module.norm", 3),
        ("_fsdp_wrapped_module.blk", 1),
        ("_fsdp_wrapped_module.blk._fsdp_wrapped_module", 4),
        ("_fsdp_wrapped_module.blk._fsdp_wrapped_module.w", 5),
    ]);
    let of = |metadata: &Value, layout: &FlatLayout| super::metadata::wrap_attributes(metadata, layout);
    assert_eq!(of(&plain, &layout(true)).unwrap(), wrapped);
    assert_eq!(of(&wrapped, &layout(true)).unwrap(), wrapped);
    let mut others = layout(true);
    others.units[1].module = "norm".into();
    // Wrappers of units that the layout does not have are removed.
    let rewrapped = metadata(&[
        ("", 1),
        ("_fsdp_wrapped_module", 2),
        ("_fsdp_wrapped_module.norm", 1),
        ("_fsdp_wrapped_module.norm._fsdp_wrapped_module", 3),
        ("_fsdp_wrapped_module.blk", 4),
        ("_fsdp_wrapped_module.blk.w", 5),
    ]);
    assert_eq!(of(&wrapped, &others).unwrap(), rewrapped);
}

/// Lays out the files of 64 ranks for 100 units of 5 parameters, each with two optimizer tensors. The plan of all files
/// must take less than 8 MiB of memory.
#[test]
fn equal_bytes_of_ranks_are_kept_once() {
    let mut source = Source::empty();
    let mut units = vec![unit("", Vec::new())];
    for layer in 0..100 {
        let module = format!("layers.{layer}");
        let params: Vec<FlatParam> = (0..5).map(|index| param(&format!("{module}.w{index}"), &[64, 64])).collect();
        for param in &params {
            source.add(param.fqn.as_str(), &param.shape);
            source.add_state(param.fqn.as_str(), &param.shape);
        }
        units.push(unit(&module, params));
    }
    source.groups = vec![source.model.iter().map(|(name, _)| name.clone()).collect()];
    for use_orig_params in [true, false] {
        let layout = FlatLayout {
            world_size: 64,
            shard_group_size: 64,
            use_orig_params,
            has_assumed_alignment: false,
            units: units.clone(),
            optimizer: None,
        };
        let reservation = source.reserve(&layout).unwrap();
        let (held, payload) = (reservation.planning_bytes(&source.catalog), reservation.payload_bytes());
        assert!(held < 8 << 20, "{held} bytes beside {payload}");
    }
}
