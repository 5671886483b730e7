use std::collections::{BTreeMap, BTreeSet};

mod dtypes;
mod properties;

use super::*;
use crate::catalog::{Dict, DictKind, Dtype, Fqn, RankValue, Value, path, state_dict};
use crate::layout::{Dims, Rank};
use crate::storage::FileId;

fn text(text: &str) -> Value {
    Value::Str(text.into())
}

fn dict(entries: Vec<(&str, Value)>) -> Value {
    let entries = entries.into_iter().map(|(key, value)| (text(key), value)).collect();
    Value::Dict(Dict { entries, ..Dict::default() })
}

/// Makes an `OrderedDict` like a state dict of torch: its `_metadata` lists `modules`.
fn ordered(entries: Vec<(&str, Value)>, modules: &[&str]) -> Value {
    let version = || dict(vec![("version", Value::Int(1))]);
    let modules = modules.iter().map(|module| (*module, version())).collect();
    let Value::Dict(mut made) = dict(entries) else { unreachable!() };
    made.kind = DictKind::Ordered;
    made.attributes = Some(Box::new(dict(vec![("_metadata", dict(modules))])));
    Value::Dict(made)
}

fn list(items: Vec<Value>) -> Value {
    Value::List(items)
}

fn t(id: u32) -> Value {
    Value::Tensor(TensorId(id))
}

fn names(values: &[&str]) -> Value {
    list(values.iter().map(|name| text(name)).collect())
}

/// Makes a catalog from a state dict. All tensors are f32 matrices.
fn catalog(state: Value) -> Catalog {
    let mut catalog = Catalog::empty();
    let count = state.tensor_ids().iter().map(|id| id.0 + 1).max().unwrap_or(0);
    for id in 0..count {
        let shape = Dims::from_slice(&[2, 3]);
        catalog.push_tensor(TensorEntry::whole(Fqn::from(format!("t{id}")), Dtype::F32, shape, FileId(0), 0));
    }
    catalog.state = state;
    catalog
}

fn patterns(texts: &[&str]) -> Vec<Pattern> {
    texts.iter().map(|text| Pattern::parse(text).unwrap()).collect()
}

fn renames(texts: &[&str]) -> Vec<Rename> {
    texts.iter().map(|text| Rename::parse(text).unwrap()).collect()
}

fn renaming(texts: &[&str]) -> NameOptions {
    NameOptions { renames: renames(texts), ..NameOptions::default() }
}

fn stripping(prefix: &str) -> NameOptions {
    NameOptions { strip_prefixes: vec![prefix.into()], ..NameOptions::default() }
}

fn selection(state: &Value, options: &NameOptions) -> Selected {
    select(&catalog(state.clone()), options).unwrap()
}

fn state(state: &Value, options: &NameOptions) -> Value {
    selection(state, options).catalog.state
}

/// Asserts that two values are equal. On failure, prints the complete values, because the default text of a value is
/// shortened.
#[track_caller]
fn assert_state(found: &Value, expected: &Value) {
    assert!(found == expected, "found    {found:.2000}\nexpected {expected:.2000}");
}

fn error(state: &Value, options: &NameOptions) -> (String, String) {
    let error = select(&catalog(state.clone()), options).unwrap_err();
    assert_eq!(error.kind(), "usage");
    (error.to_string(), error.hint().unwrap_or_default().to_owned())
}

fn tensor_names(state: &Value) -> Vec<String> {
    state_dict::all_tensors(state).iter().map(|(fqn, _)| fqn.to_string()).collect()
}

/// Returns a state dict with a model and an optimizer, as FSDP2 jobs save it.
fn training() -> Value {
    let weights = vec![("layers.0.w", t(0)), ("layers.1.w", t(1)), ("head.w", t(2))];
    let moments = |first, second| dict(vec![("step", Value::Int(7)), ("exp_avg", t(first)), ("exp_avg_sq", t(second))]);
    let states = dict(vec![("layers.0.w", moments(3, 4)), ("layers.1.w", moments(5, 6)), ("head.w", moments(7, 8))]);
    let group = dict(vec![("lr", Value::Float(0.1)), ("params", names(&["layers.0.w", "layers.1.w", "head.w"]))]);
    dict(vec![
        ("model", ordered(weights, &["", "layers", "layers.0", "layers.1", "head"])),
        ("optim", dict(vec![("state", states), ("param_groups", list(vec![group]))])),
        ("extra", dict(vec![("step", Value::Int(7)), ("none", dict(vec![])), ("rng", Value::Bytes(vec![1]))])),
    ])
}

/// Returns a state dict with every kind of container and key.
fn every_container() -> Value {
    let Value::Dict(mut keyed) = dict(vec![("name", t(2))]) else { unreachable!() };
    keyed.entries.insert(0, (Value::Int(0), t(0)));
    keyed.entries.push((Value::Tuple(vec![Value::Int(1), Value::None]), t(1)));
    let rank_values = vec![
        RankValue { value: Value::Int(1), ranks: vec![Rank(0)] },
        RankValue { value: Value::Int(2), ranks: vec![Rank(1)] },
    ];
    dict(vec![
        ("keyed", Value::Dict(keyed)),
        ("list", list(vec![t(3), Value::None, dict(vec![]), list(vec![Value::Int(1)]), list(vec![t(4)])])),
        ("tuple", Value::Tuple(vec![t(5), Value::Int(1)])),
        ("empty", ordered(vec![], &[""])),
        ("empty list", list(vec![])),
        ("per rank", Value::Other(rank_values)),
        ("a.b", t(6)),
        ("a", ordered(vec![("b", t(0))], &["", "_orig_mod.b"])),
        ("", t(7)),
    ])
}

#[test]
fn state_is_equal_without_changes() {
    let bare = [t(0), list(vec![t(0), Value::None]), dict(vec![]), ordered(vec![], &[""]), Value::Int(1)];
    for source in [training(), every_container()].into_iter().chain(bare) {
        for options in [
            NameOptions::default(),
            NameOptions { wrappers: Wrappers::Cut, ..NameOptions::default() },
            NameOptions { dtypes: vec![DtypeRule::parse("bf16").unwrap()], ..NameOptions::default() },
        ] {
            let selected = selection(&source, &options);
            assert_state(&selected.catalog.state, &source);
            assert_eq!(selected.left_out, LeftOut::default());
        }
    }
    let source = training();
    assert_state(&state(&source, &renaming(&["head=head", "(step)=\\1"])), &source);
    assert_state(&state(&source, &NameOptions { include: patterns(&["**"]), ..NameOptions::default() }), &source);
    assert_state(&state(&every_container(), &renaming(&[r"(.)=\1"])), &every_container());
}

#[test]
fn selection_keeps_ids_and_shapes_but_no_chunks() {
    let source = catalog(training());
    let options = NameOptions { root: Root::Model, exclude: patterns(&["head"]), ..NameOptions::default() };
    let selected = select(&source, &options).unwrap();
    assert_eq!(selected.catalog.tensors.len(), source.tensors.len());
    for (found, entry) in selected.catalog.tensors.iter().zip(&source.tensors) {
        assert_eq!((&found.shape, &found.sharding, found.dtype), (&entry.shape, &entry.sharding, entry.dtype));
        assert!(found.chunks.is_empty());
    }
    assert_eq!(selected.catalog.tensors[1].fqn.as_str(), "layers.1.w");
    assert_eq!(selected.catalog.tensors[2].fqn.as_str(), "t2");
}

#[test]
fn wrappers_are_cut_from_all_names_or_none() {
    let wrapped = "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.w";
    let modules = ["", "_fsdp_wrapped_module", "_fsdp_wrapped_module.layers"];
    let group = dict(vec![("params", names(&[wrapped]))]);
    let source = dict(vec![
        ("model", dict(vec![("_orig_mod", ordered(vec![(wrapped, t(0)), ("_orig_mod", t(2))], &modules))])),
        (
            "optim",
            dict(vec![
                ("state", dict(vec![(wrapped, dict(vec![("exp_avg", t(1))]))])),
                ("param_groups", list(vec![group])),
            ]),
        ),
    ]);
    let clean = NameOptions { wrappers: Wrappers::Cut, ..NameOptions::default() };
    let group = dict(vec![("params", names(&["layers.0.w"]))]);
    let expected = dict(vec![
        ("model", ordered(vec![("layers.0.w", t(0)), ("_orig_mod", t(2))], &["", "layers"])),
        (
            "optim",
            dict(vec![
                ("state", dict(vec![("layers.0.w", dict(vec![("exp_avg", t(1))]))])),
                ("param_groups", list(vec![group])),
            ]),
        ),
    ]);
    let found = state(&source, &clean);
    assert_eq!(tensor_names(&found), ["model.layers.0.w", "model._orig_mod", "optim.state.layers.0.w.exp_avg"]);
    assert_state(&found, &expected);
    assert_state(&state(&source, &NameOptions::default()), &source);

    let twice = dict(vec![("_orig_mod.w", t(0)), ("w", t(1))]);
    let (message, hint) = error(&twice, &clean);
    assert_eq!(message, "`_orig_mod.w` and `w` would both be named `w`");
    assert!(hint.contains("options::keep_names"));
}

#[test]
fn patterns_match_any_name_of_a_tensor() {
    // Each case has the include patterns, the exclude patterns, and the tensors of `training` that remain.
    let cases: [(&[&str], &[&str], &[u32]); 9] = [
        (&["model.layers.0"], &[], &[0, 3, 4]),
        (&["layers.0"], &[], &[0, 3, 4]),
        (&["optim"], &[], &[3, 4, 5, 6, 7, 8]),
        (&["**.exp_avg"], &[], &[3, 5, 7]),
        (&[], &["head"], &[0, 1, 3, 4, 5, 6]),
        (&[], &["optim"], &[0, 1, 2]),
        (&[], &["optim.state.**.exp_avg"], &[0, 1, 2, 4, 6, 8]),
        (&["layers.*"], &["layers.1", "**.exp_avg_sq"], &[0, 3]),
        (&["layers.0", "head"], &["optim.state"], &[0, 2]),
    ];
    for (include, exclude, ids) in cases {
        let options = NameOptions { include: patterns(include), exclude: patterns(exclude), ..NameOptions::default() };
        let found: Vec<u32> = state(&training(), &options).tensor_ids().iter().map(|id| id.0).collect();
        assert_eq!(found, ids, "{include:?} {exclude:?}");
    }
}

fn params(state: &Value) -> Option<Value> {
    let leaves = path::leaves(state);
    leaves.iter().find_map(|(path, leaf)| match leaf {
        path::StateLeaf::Object(value) if path.to_string().ends_with("param_groups.0.params") => Some((*value).clone()),
        _ => None,
    })
}

#[test]
fn param_groups_follow_their_state() {
    let only = |include: &[&str], exclude: &[&str]| {
        let options = NameOptions { include: patterns(include), exclude: patterns(exclude), ..NameOptions::default() };
        params(&state(&training(), &options))
    };
    assert_eq!(only(&[], &["head"]), Some(names(&["layers.0.w", "layers.1.w"])));
    assert_eq!(only(&["layers.0"], &[]), Some(names(&["layers.0.w"])));
    assert_eq!(only(&["model.layers.0"], &["optim.param_groups"]), None);
    assert_eq!(only(&["extra"], &[]), None);
    assert_eq!(only(&["layers"], &["optim.state"]), None);
    // If the patterns select the groups themselves, the groups keep every parameter that is not excluded.
    assert_eq!(only(&["optim"], &[]), Some(names(&["layers.0.w", "layers.1.w", "head.w"])));
    assert_eq!(only(&["optim"], &["head"]), Some(names(&["layers.0.w", "layers.1.w"])));
    assert_eq!(only(&["optim.param_groups"], &[]), Some(names(&["layers.0.w", "layers.1.w", "head.w"])));
}

#[test]
fn numbered_state_is_kept_with_a_note() {
    let Value::Dict(mut by_number) = dict(vec![]) else { unreachable!() };
    by_number.entries = vec![(Value::Int(0), dict(vec![("exp_avg", t(2))])), (Value::Int(1), dict(vec![("m", t(3))]))];
    let group =
        dict(vec![("params", list(vec![Value::Int(0), Value::Int(1)])), ("param_names", names(&["a.w", "b.w"]))]);
    let source = dict(vec![
        ("model", dict(vec![("a.w", t(0)), ("b.w", t(1))])),
        ("optimizer", dict(vec![("state", Value::Dict(by_number.clone())), ("param_groups", list(vec![group]))])),
    ]);
    let selected =
        selection(&source, &NameOptions { exclude: patterns(&["b"]), ..renaming(&[r"\ba\.=c.", r"\b0\b=zero"]) });
    let group =
        dict(vec![("params", list(vec![Value::Int(0), Value::Int(1)])), ("param_names", names(&["c.w", "b.w"]))]);
    let expected = dict(vec![
        ("model", dict(vec![("c.w", t(0))])),
        ("optimizer", dict(vec![("state", Value::Dict(by_number)), ("param_groups", list(vec![group]))])),
    ]);
    // The rename of `0` also matches in `param_groups.0`, so the list `param_groups` becomes a dict.
    let unzeroed = selection(&source, &NameOptions { exclude: patterns(&["b"]), ..renaming(&[r"\ba\.=c."]) });
    assert_state(&unzeroed.catalog.state, &expected);
    assert!(tensor_names(&selected.catalog.state).contains(&"optimizer.state.0.exp_avg".to_owned()));
    assert_eq!(
        selected.notes,
        [
            "kept all 2 tensors of optimizer state, although parameters are left out: the state is stored by parameter index, so \
             the parameter of each tensor is unknown"
        ]
    );
}

#[test]
fn pattern_that_matches_nothing_is_an_error() {
    let cases = [
        (
            NameOptions { include: patterns(&["layers.0", "laiers.1.w"]), ..NameOptions::default() },
            "options::include laiers.1.w",
        ),
        (
            NameOptions { exclude: patterns(&["model.laiers.1.w"]), ..NameOptions::default() },
            "options::exclude model.laiers.1.w",
        ),
        (
            NameOptions { dtypes: vec![DtypeRule::parse("laiers.1.w=f32").unwrap()], ..NameOptions::default() },
            "options::dtype laiers.1.w=f32",
        ),
        (renaming(&["laiers.1.w=x"]), "options::rename laiers.1.w=x"),
        (stripping("modle.layers."), "options::strip_prefix modle.layers."),
        (NameOptions { root: Root::At("modle.layers".into()), ..NameOptions::default() }, "options::root modle.layers"),
    ];
    for (options, start) in cases {
        let (message, hint) = error(&training(), &options);
        assert!(message.starts_with(start), "{message}");
        assert!(hint.contains("model.layers"), "{message}: {hint}");
    }
    // An empty dict does not count as a leaf.
    assert!(
        error(&training(), &NameOptions { exclude: patterns(&["extra.none"]), ..NameOptions::default() })
            .0
            .contains("none")
    );
    let (_, hint) = error(&dict(vec![]), &NameOptions { include: patterns(&["a"]), ..NameOptions::default() });
    assert_eq!(hint, "there are no names to match");
}

/// Each rename in this test doubles the length of the name.
#[test]
fn name_that_grows_too_long_is_an_error() {
    let (message, _) = error(&training(), &renaming(&[r".*=\0\0"; 40]));
    assert!(message.contains("a name would become longer than 65536 bytes"), "{message}");
}

#[test]
fn root_model_selects_the_model_only() {
    let shipped = |source: &Value| state(source, &NameOptions { root: Root::Model, ..NameOptions::default() });
    assert_state(&shipped(&training()), training().as_dict().unwrap().get("model").unwrap());

    // torchtitan has the model at the top and a flattened optimizer.
    let source = dict(vec![
        ("layers.0.w", t(0)),
        ("scaler", t(1)),
        ("version", Value::Int(2)),
        (
            "optimizer",
            dict(vec![("state.layers.0.w.exp_avg", t(2)), ("param_groups.layers.0.w.lr", Value::Float(0.1))]),
        ),
        ("train_state", dict(vec![("step", t(3))])),
        ("rng_state", t(4)),
    ]);
    let selected = selection(&source, &NameOptions { root: Root::Model, ..NameOptions::default() });
    assert_state(
        &selected.catalog.state,
        &dict(vec![("layers.0.w", t(0)), ("scaler", t(1)), ("version", Value::Int(2))]),
    );
    assert_eq!(
        selected.left_out.groups,
        [("optimizer".into(), 1), ("rng_state".into(), 1), ("train_state".into(), 1)] as [(String, usize); 3]
    );

    // A nested Hugging Face model keeps its own `model`.
    let inner = dict(vec![
        ("model", dict(vec![("layers", list(vec![dict(vec![("w", t(0))])]))])),
        ("lm_head", dict(vec![("weight", t(1))])),
    ]);
    assert_state(&shipped(&dict(vec![("model", inner.clone())])), &inner);
    assert_state(&shipped(&inner), &inner);
    let flat = dict(vec![("model.embed.w", t(0)), ("lm_head.w", t(1))]);
    assert_state(&shipped(&flat), &flat);
    assert_state(&shipped(&dict(vec![("model", dict(vec![("model", flat.clone())]))])), &flat);

    // A file with only an optimizer has no model.
    let optimizer =
        dict(vec![("state", dict(vec![("w", dict(vec![("exp_avg", t(0))]))])), ("param_groups", list(vec![]))]);
    assert_state(&shipped(&optimizer), &dict(vec![]));
}

#[test]
fn root_may_end_inside_a_key() {
    let at = |source: &Value, path: &str| {
        state(source, &NameOptions { root: Root::At(path.into()), ..NameOptions::default() })
    };
    assert_state(&at(&training(), "model"), training().as_dict().unwrap().get("model").unwrap());
    assert_state(&at(&training(), "model.layers"), &ordered(vec![("0.w", t(0)), ("1.w", t(1))], &["", "0", "1"]));
    assert_state(&at(&training(), "model.layers.0."), &ordered(vec![("w", t(0))], &[""]));
    assert_eq!(tensor_names(&at(&training(), "optim.state.layers")).len(), 4);
    let nested = dict(vec![("a", list(vec![dict(vec![("w", t(0))]), dict(vec![("w", t(1))])]))]);
    assert_state(&at(&nested, "a.1"), &dict(vec![("w", t(1))]));
    assert_state(&at(&nested, "a"), &list(vec![dict(vec![("w", t(0))]), dict(vec![("w", t(1))])]));
    let inner = list(vec![dict(vec![("d", t(1))])]);
    let flat = dict(vec![("a.b", dict(vec![("c", t(0))])), ("l", inner), ("m.n.o", t(2))]);
    for (path, name) in [("a.b", "c"), ("l.0", "d"), ("m", "n.o")] {
        assert_eq!(tensor_names(&at(&flat, path)), [name], "{path}");
    }
    for path in ["m.n.o", "a.bc"] {
        error(&flat, &NameOptions { root: Root::At(path.into()), ..NameOptions::default() });
    }
    for path in ["model.layers.0.w", "model.lay", "extra", ""] {
        let (message, hint) =
            error(&training(), &NameOptions { root: Root::At(path.into()), ..NameOptions::default() });
        assert_eq!(message, format!("options::root {path}: the state dict has no tensors at this path"));
        assert!(
            hint.starts_with("the top of the state dict has the keys model, optim, extra; the nearest paths are "),
            "{hint}"
        );
    }
}

#[test]
fn optimizer_state_follows_its_parameter() {
    let renamed = |options: &NameOptions| {
        let found = state(&training(), options);
        (tensor_names(&found)[0].clone(), tensor_names(&found)[3].clone(), params(&found).unwrap().to_string())
    };
    for (options, parameter, of_state, first) in [
        (
            renaming(&[r"^model\.layers=model.blocks"]),
            "model.blocks.0.w",
            "optim.state.blocks.0.w.exp_avg",
            "blocks.0.w",
        ),
        (renaming(&[r"^model\.=net."]), "net.layers.0.w", "optim.state.layers.0.w.exp_avg", "layers.0.w"),
        (renaming(&[r"^model\.="]), "layers.0.w", "optim.state.layers.0.w.exp_avg", "layers.0.w"),
        (stripping("model."), "layers.0.w", "optim.state.layers.0.w.exp_avg", "layers.0.w"),
        (stripping("model"), "layers.0.w", "optim.state.layers.0.w.exp_avg", "layers.0.w"),
        (renaming(&["^(.*)$=top.\\1"]), "top.model.layers.0.w", "top.optim.state.layers.0.w.exp_avg", "layers.0.w"),
        (renaming(&[r"layers\.(\d)=h.\1", "optim=opt"]), "model.h.0.w", "opt.state.h.0.w.exp_avg", "h.0.w"),
        (renaming(&["exp_avg$=m"]), "model.layers.0.w", "optim.state.layers.0.w.m", "layers.0.w"),
        (
            renaming(&[r"\.w$=.weight"]),
            "model.layers.0.weight",
            "optim.state.layers.0.weight.exp_avg",
            "layers.0.weight",
        ),
        (
            NameOptions { add_prefix: Some("x.".into()), ..renaming(&["layers=l"]) },
            "x.model.l.0.w",
            "x.optim.state.l.0.w.exp_avg",
            "l.0.w",
        ),
        (
            NameOptions { nest: Some("a.b".into()), ..renaming(&["layers=l"]) },
            "a.b.model.l.0.w",
            "a.b.optim.state.l.0.w.exp_avg",
            "l.0.w",
        ),
    ] {
        let (found_parameter, found_state, params) = renamed(&options);
        assert_eq!((found_parameter.as_str(), found_state.as_str()), (parameter, of_state), "{options:?}");
        assert!(params.starts_with(&format!("['{first}'")), "{params}");
    }
    // One optimizer is flattened, and the other is nested like the model.
    let flat = dict(vec![
        ("layers.0.w", t(0)),
        ("optimizer", dict(vec![("state.layers.0.w.exp_avg", t(1)), ("param_groups.layers.0.w.lr", Value::Int(1))])),
    ]);
    let expected = dict(vec![
        ("blocks.0.w", t(0)),
        ("optimizer", dict(vec![("state.blocks.0.w.exp_avg", t(1)), ("param_groups.blocks.0.w.lr", Value::Int(1))])),
    ]);
    assert_state(&state(&flat, &renaming(&["^layers=blocks"])), &expected);
    assert_state(
        &state(&flat, &NameOptions { exclude: patterns(&["layers"]), ..NameOptions::default() }),
        &dict(vec![]),
    );
    assert_state(&state(&flat, &NameOptions { include: patterns(&["layers"]), ..NameOptions::default() }), &flat);
    let both = |name: &str| {
        let tree = |leaf| dict(vec![(name, list(vec![dict(vec![("w", leaf)])]))]);
        let states = tree(dict(vec![("deep", dict(vec![("exp_avg", t(1))]))]));
        dict(vec![("model", tree(t(0))), ("optim", dict(vec![("state", states)]))])
    };
    assert_state(&state(&both("layers"), &renaming(&[r"^model\.layers=model.blocks"])), &both("blocks"));
    // Names in `nn.Sequential` start with numbers.
    let sequential = |name: &str| {
        let flat = format!("state.{name}.exp_avg");
        let nested = dict(vec![(name, dict(vec![("exp_avg", t(2))]))]);
        dict(vec![
            ("model", dict(vec![(name, t(0))])),
            ("optimizer", dict(vec![("adam", dict(vec![(flat.as_str(), t(1))]))])),
            ("optim", dict(vec![("state", nested)])),
        ])
    };
    assert_state(&state(&sequential("0.weight"), &renaming(&[r"^model\.0=model.1"])), &sequential("1.weight"));
    assert_state(
        &state(&sequential("0.weight"), &NameOptions { exclude: patterns(&["0.weight"]), ..NameOptions::default() }),
        &dict(vec![]),
    );
    // If the parameters are unknown, the complete name of the state is renamed.
    let alone = |name: &str| {
        let group = dict(vec![("params", names(&[name]))]);
        dict(vec![("state", dict(vec![(name, dict(vec![("exp_avg", t(0))]))])), ("param_groups", list(vec![group]))])
    };
    assert_state(&state(&alone("layers.0.w"), &renaming(&["layers=blocks"])), &alone("blocks.0.w"));
    let at = NameOptions { root: Root::At("optim".into()), ..renaming(&["layers=blocks"]) };
    assert_eq!(tensor_names(&state(&training(), &at))[0], "state.blocks.0.w.exp_avg");
}

#[test]
fn containers_keep_their_kind_and_attributes() {
    // Modules are renamed too; a flat dict stays flat, and a nested dict stays nested.
    let found = state(&training(), &NameOptions { root: Root::Model, ..renaming(&["layers=net.blocks"]) });
    let expected = vec![("net.blocks.0.w", t(0)), ("net.blocks.1.w", t(1)), ("head.w", t(2))];
    assert_state(&found, &ordered(expected, &["", "net.blocks", "net.blocks.0", "net.blocks.1", "head"]));
    let found = state(&training(), &NameOptions { root: Root::Model, ..renaming(&["^=net."]) });
    assert_eq!(found.as_dict().unwrap().entries[0].0, text("net.layers.0.w"));

    let nested = |name: &str| dict(vec![("m", dict(vec![(name, dict(vec![("w", t(0)), ("b", t(1))]))])), ("x", t(2))]);
    assert_state(&state(&nested("attn"), &renaming(&["attn=self_attn"])), &nested("self_attn"));
    let deeper =
        dict(vec![("m", dict(vec![("attn", dict(vec![("in", dict(vec![("w", t(0)), ("b", t(1))]))]))])), ("x", t(2))]);
    assert_state(&state(&nested("attn"), &renaming(&[r"\.(w|b)$=.in.\1"])), &deeper);

    // A prefix and a nest path.
    let prefixed = NameOptions {
        add_prefix: Some("model.".into()),
        nest: Some("a.b".into()),
        root: Root::Model,
        ..NameOptions::default()
    };
    let expected = vec![("model.layers.0.w", t(0)), ("model.layers.1.w", t(1)), ("model.head.w", t(2))];
    let modules = ["model", "model.layers", "model.layers.0", "model.layers.1", "model.head"];
    let expected = dict(vec![("a", dict(vec![("b", ordered(expected, &modules))]))]);
    assert_state(&state(&training(), &prefixed), &expected);
    let (message, _) = error(&training(), &NameOptions { nest: Some("a..b".into()), ..NameOptions::default() });
    assert_eq!(message, "options::nest a..b: expected names joined with dots, found an empty name");
}

#[test]
fn excluded_leaves_leave_no_empty_container() {
    let exclude = |source: &Value, texts: &[&str]| {
        state(source, &NameOptions { exclude: patterns(texts), ..NameOptions::default() })
    };
    let Value::Dict(mut expected) = training() else { unreachable!() };
    expected.entries.pop();
    // The dict below `extra` is empty in the source too.
    let extra = dict(vec![("none", dict(vec![]))]);
    expected.entries.push((text("extra"), extra));
    assert_state(&exclude(&training(), &["extra.step", "extra.rng"]), &Value::Dict(expected.clone()));
    expected.entries.pop();
    assert_state(&exclude(&training(), &["extra"]), &Value::Dict(expected));

    let layers = |items| dict(vec![("layers", list(items)), ("w", t(2))]);
    let source = layers(vec![dict(vec![("w", t(0))]), dict(vec![("w", t(1))]), t(3)]);
    assert_state(
        &exclude(&source, &["layers.0", "layers.2"]),
        &layers(vec![Value::None, dict(vec![("w", t(1))]), Value::None]),
    );
    assert_state(&exclude(&source, &["layers"]), &dict(vec![("w", t(2))]));
    assert_state(&exclude(&source, &["**"]), &dict(vec![]));
}

#[test]
fn lists_keep_positions_or_become_dicts() {
    let items = |items| dict(vec![("l", list(items))]);
    let w = |id| dict(vec![("w", t(id))]);
    let source = items(vec![w(0), w(1), w(2)]);
    assert_state(
        &state(&source, &NameOptions { exclude: patterns(&["l.0"]), ..renaming(&[r"l\.1=l.0"]) }),
        &items(vec![w(1), Value::None, w(2)]),
    );
    assert_state(
        &state(&source, &renaming(&[r"l\.1=l.one"])),
        &dict(vec![("l", dict(vec![("0", w(0)), ("one", w(1)), ("2", w(2))]))]),
    );
    assert_state(
        &state(&source, &renaming(&[r"l\.2=l.99999999999"])),
        &dict(vec![("l", dict(vec![("0", w(0)), ("1", w(1)), ("99999999999", w(2))]))]),
    );
    // If there were one list for each name, the lists would be much larger than in the source.
    let many = items((0..2000).map(w).collect());
    let (message, _) = error(&many, &renaming(&[r"^l\.(\d+)=l\1.\1"]));
    assert!(message.ends_with("options::rename splits this list into too many lists"), "{message}");
}

#[test]
fn collision_error_names_both_tensors() {
    let source = dict(vec![("a.w", t(0)), ("b.w", t(1)), ("c", dict(vec![("w", t(2)), ("v", t(3))]))]);
    for (rename, message) in [
        ("^a=b", "`a.w` and `b.w` would both be named `b.w`"),
        (r"^c\.w=a.w", "`a.w` and `c.w` would both be named `a.w`"),
        (r"^c\.w=c", "`c.w` and `c.v` would both be named `c`"),
        (r"^a\.w=c", "`a.w` and `c.w` would both be named `c`"),
    ] {
        assert_eq!(error(&source, &renaming(&[rename])).0, message, "{rename}");
    }
    let nothing = [stripping("a.w"), renaming(&["^a.w$="])];
    for options in nothing {
        assert_eq!(error(&source, &options).0, "a.w: its new name is empty");
    }
    let deep = renaming(&[r"^c=${0}.c.c.c.c.c.c.c.c", "c=c.c.c.c.c.c.c.c.c", "c=c.c.c.c.c.c"]);
    assert!(error(&source, &deep).0.contains("at most 256 parts"));
    // A collision in the source itself is allowed.
    let twice = dict(vec![("a.b", t(0)), ("a", dict(vec![("b", t(1))]))]);
    assert_state(&state(&twice, &NameOptions { wrappers: Wrappers::Cut, ..NameOptions::default() }), &twice);
}

#[test]
fn left_out_tensors_are_counted_by_top_key() {
    let selected = selection(
        &training(),
        &NameOptions { root: Root::Model, exclude: patterns(&["head"]), ..NameOptions::default() },
    );
    assert_eq!(selected.left_out.groups, [("model".into(), 1), ("optim".into(), 6)] as [(String, usize); 2]);
    assert_eq!(selected.left_out.tensors[0], "model.head.w");
    assert_eq!(selected.left_out.tensors.len(), 7);
    assert!(selected.left_out.objects.contains(&"extra.rng".to_owned()));
    assert!(selected.left_out.objects.contains(&"optim.param_groups.0.params".to_owned()));
    // A tied tensor is kept if one of its names is kept.
    let tied = dict(vec![("a.w", t(0)), ("b.w", t(0)), ("c.w", t(1))]);
    let selected = selection(&tied, &NameOptions { exclude: patterns(&["a", "c"]), ..NameOptions::default() });
    assert_eq!(selected.left_out.tensors, ["c.w"]);
    assert_eq!(selected.left_out.groups, [("c".into(), 1)] as [(String, usize); 1]);
}

#[test]
fn ties_are_listed_by_new_names() {
    let tied = dict(vec![("a.w", t(0)), ("b", t(1)), ("c", t(0)), ("d", t(2)), ("e", t(1)), ("f", t(0))]);
    let selected = selection(&tied, &renaming(&["^=x."]));
    let ties: Vec<(String, Vec<String>)> = selected
        .ties()
        .into_iter()
        .map(|(kept, aliases)| (kept.to_string(), aliases.iter().map(ToString::to_string).collect()))
        .collect();
    assert_eq!(
        ties,
        [("x.a.w".into(), vec!["x.c".into(), "x.f".into()]), ("x.b".into(), vec!["x.e".into()]),]
            as [(String, Vec<String>); 2]
    );
}

#[test]
fn wrappers_match_tries_names_with_and_without_wrappers() {
    let source = dict(vec![("model", dict(vec![("_orig_mod.w", t(0)), ("_orig_mod.b", t(1))]))]);
    let matching = |wrappers| NameOptions { wrappers, exclude: patterns(&["model.w"]), ..NameOptions::default() };
    let expected = dict(vec![("model", dict(vec![("_orig_mod.b", t(1))]))]);
    assert_state(&state(&source, &matching(Wrappers::Match)), &expected);
    assert!(error(&source, &matching(Wrappers::Keep)).0.contains("options::exclude model.w"));
}
