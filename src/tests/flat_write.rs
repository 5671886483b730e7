//! Tests that the files that dtshard writes for FSDP1's `LOCAL_STATE_DICT` equal the files that PyTorch wrote for the
//! same state: equal state dicts, equal views of equal storages, and equal bytes, including padding.

use std::collections::HashMap;
use std::path::{Path as FilePath, PathBuf};

use super::fixture;
use super::rank_file::{Comparison, read};
use crate::catalog::flat::FlatLayout;
use crate::catalog::{Dict, DictKind, Fqn, Path, TensorId, Value};
use crate::catalog::{Key, Reservation};
use crate::exec::{Extents, Input, Options, Silent, Stop, copy};
use crate::format::fsdp_flat::{FlatTarget, document, reserve};
use crate::format::{Checkpoint, ReadOptions, SeriesChoice, resolve};
use crate::layout::Rank;
use crate::publish::work_log::{AtEnd, Log};
use serde_json::Value as Json;

const OPTIONS: Options = Options { threads: 2, write_block_bytes: 300, transposed_block_bytes: 300, sync: false };

const CASES: [(&str, &[&str]); 7] = [
    ("flat2", &["views", "flat", "groups", "one_file"]),
    ("flat3", &["views", "flat"]),
    ("flat4", &["views", "flat"]),
    ("flat_mixed", &["views", "flat"]),
    ("flat_bf16", &["views", "flat"]),
    ("flat_hybrid", &["views", "flat"]),
    ("flat_none", &["views", "flat"]),
];

fn dict(kind: DictKind, entries: Vec<(Value, Value)>) -> Value {
    Value::Dict(Dict { kind, entries, attributes: None })
}

fn text(text: &str) -> Value {
    Value::Str(text.into())
}

/// A test case: a checkpoint of complete tensors, and the content of `truth.json`. A script that runs PyTorch wrote
/// both.
struct Truth {
    checkpoint: Checkpoint,
    json: Json,
    by_name: HashMap<String, TensorId>,
    names: Vec<String>,
}

impl Truth {
    fn open(case: &str) -> Self {
        let options = ReadOptions { series: SeriesChoice::All, ..ReadOptions::default() };
        let checkpoint = Checkpoint::open(&fixture(&format!("{case}/truth.safetensors")), &options).unwrap();
        let json: Json =
            serde_json::from_slice(&std::fs::read(fixture(&format!("{case}/truth.json"))).unwrap()).unwrap();
        let entries = &checkpoint.catalog.state.as_dict().unwrap().entries;
        let by_name =
            entries.iter().map(|(key, value)| (key.as_str().unwrap().into(), value.tensor_ids()[0])).collect();
        let names = json["tensors"].as_object().unwrap().keys().cloned().collect();
        Self { checkpoint, json, by_name, names }
    }

    /// Returns the state dict of the model as a module without wrappers has it, with the keys in the order `order`.
    fn model(&self, order: &[String]) -> Value {
        let entries = order.iter().map(|name| (text(name), Value::Tensor(self.by_name[&format!("model.{name}")])));
        dict(DictKind::Ordered, entries.collect())
    }

    /// Returns the optimizer state with parameter names as keys, and the parameter groups of the job that wrote
    /// `folder`.
    fn optimizer(&self, folder: &str, layout: &FlatLayout) -> Value {
        let members = |fqn: &Fqn| -> Vec<String> {
            match layout.units.iter().find(|unit| unit.key() == *fqn) {
                Some(unit) => unit.params.iter().map(|param| param.fqn.to_string()).collect(),
                None => vec![fqn.to_string()],
            }
        };
        let mut states = Vec::new();
        let mut groups = Vec::new();
        for (list, options) in
            layout.optimizer.iter().flatten().zip(self.json["param_groups"][folder].as_array().unwrap())
        {
            let names: Vec<String> = list.iter().flat_map(members).collect();
            let state = |name: &String| {
                let keys = ["step", "exp_avg", "exp_avg_sq"];
                let tensor = |key: &str| Value::Tensor(self.by_name[&format!("optim.state.{name}.{key}")]);
                dict(DictKind::Plain, keys.map(|key| (text(key), tensor(key))).to_vec())
            };
            states.extend(names.iter().map(|name| (text(name), state(name))));
            let options = options.as_object().unwrap().iter().map(|(key, value)| {
                let value = match key.as_str() {
                    "params" => Value::List(names.iter().map(|name| text(name)).collect()),
                    _ => decode(value),
                };
                (text(key), value)
            });
            groups.push(dict(DictKind::Plain, options.collect()));
        }
        let states = dict(DictKind::Plain, states);
        dict(DictKind::Plain, vec![(text("state"), states), (text("param_groups"), Value::List(groups))])
    }
}

fn decode(json: &Json) -> Value {
    match json {
        Json::Null => Value::None,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(value) => value.as_i64().map_or_else(|| Value::Float(value.as_f64().unwrap()), Value::Int),
        Json::Object(object) => Value::Tuple(object["$tuple"].as_array().unwrap().iter().map(decode).collect()),
        other => panic!("{other}"),
    }
}

/// Returns the keys of the state dict of the model without wrappers, in the order of `truth`, and the attributes of
/// this state dict (`_metadata`). The attributes are derived from `model`, the state dict of the wrapped model.
fn unwrapped(model: &Dict, truth: &Truth) -> (Vec<String>, Option<Value>) {
    let order = truth.names.iter().filter_map(|name| name.strip_prefix("model.").map(str::to_owned)).collect();
    let Some(Value::Dict(attributes)) = model.attributes.as_deref() else { return (order, None) };
    let Some(Value::Dict(metadata)) = attributes.get("_metadata") else { return (order, None) };
    let mut plain: Vec<(Value, Value)> = Vec::new();
    for (path, value) in &metadata.entries {
        let parts = path.as_str().unwrap().split('.').filter(|part| *part != "_fsdp_wrapped_module");
        let path = text(&parts.collect::<Vec<_>>().join("."));
        if plain.iter().all(|(known, _)| *known != path) {
            plain.push((path, value.clone()));
        }
    }
    let metadata = dict(metadata.kind, plain);
    (order, Some(dict(attributes.kind, vec![(text("_metadata"), metadata)])))
}

fn write(truth: &Truth, reservation: &Reservation, folder: &FilePath) {
    let Checkpoint { files, catalog, .. } = &truth.checkpoint;
    let input = Input { files, catalog, resolve: &resolve };
    let todo = Extents::of_files(&reservation.files);
    let folder = &crate::storage::AnchoredPath::new(folder);
    let log = Log::new(&reservation.files, &todo, folder.join("journal"), OPTIONS.sync, AtEnd::Nothing);
    let (log, stop) = (&log, &Stop::default());
    let writing = copy::WriteContext { reservation, folder, log, options: &OPTIONS, reporter: &Silent, stop };
    copy::copy(input, writing).unwrap();
}

fn key(name: &str) -> Path {
    Path(vec![Key::Name(name.into())])
}

#[test]
fn written_files_equal_those_of_pytorch() {
    for (case, folders) in CASES {
        let truth = Truth::open(case);
        let catalog = &truth.checkpoint.catalog;
        for &sub in folders {
            let layout = document::read(&fixture(&format!("{case}/{sub}.flat_layout.json"))).unwrap();
            let ranks = layout.world_size;
            let own = fixture(&format!("{case}/{sub}"));
            let name = |series: &str, rank: Rank| format!("{series}_world_size_{ranks}_rank_{rank}.pt");
            let one_file = sub == "one_file";
            let (_, first) = read(&own.join(name(if one_file { "checkpoint" } else { "model" }, Rank(0))));
            let saved = if one_file { first.value.as_dict().unwrap().get("model").unwrap() } else { &first.value };
            let (order, metadata) = unwrapped(saved.as_dict().unwrap(), &truth);
            let mut model = truth.model(&order);
            if let Value::Dict(dict) = &mut model {
                dict.attributes = metadata.map(Box::new);
            }
            let optimizer = truth.optimizer(sub, &layout);
            // Writes the model and the optimizer to one file, or to a file each.
            let series: Vec<(&str, Value, Option<Path>)> = if one_file {
                let whole = vec![(text("model"), model), (text("optim"), optimizer), (text("step"), Value::Int(7))];
                vec![("checkpoint", dict(DictKind::Plain, whole), Some(key("model")))]
            } else {
                vec![("model", model, Some(Path::default())), ("optim", optimizer, None)]
            };
            // The result is the same with the parameter groups in the layout and without them.
            for optimizer in [layout.optimizer.clone(), None] {
                let layout = FlatLayout { optimizer, ..layout.clone() };
                let folder = tempfile::tempdir().unwrap();
                let out = folder.path();
                for (series, state, model) in &series {
                    let target = FlatTarget {
                        layout: &layout,
                        model: model.clone(),
                        gradients: None,
                        name: &|rank| PathBuf::from(name(series, rank)),
                    };
                    let reservation = reserve(catalog, state, target).unwrap();
                    assert!(reservation.left_out.is_empty());
                    write(&truth, &reservation, out);
                    for rank in (0..ranks).map(Rank) {
                        let file = name(series, rank);
                        Comparison::run(&out.join(&file), &own.join(&file), layout.shard_group_size > 1);
                    }
                    if model.is_some() {
                        let written = document::read(&out.join("flat_layout.json")).unwrap();
                        assert_eq!(written, layout, "{case}/{sub}");
                    }
                }
            }
        }
    }
}
