//! Tests of tensors in keys of dicts, which have no name, and of tensors in sets and other containers without names.

use std::path::{Path, PathBuf};

use dtshard::catalog::{Dict, TensorId, Value};
use dtshard::format::archive::Leaves;
use serde_json::Value as Json;
use torch_pickle::pickle::Writer;

use crate::common::env::TestEnv;
use crate::corrupt::{View, dtshard, torch_file};

const STORAGES: [(&str, &[u8]); 3] = [("0", b"key tens"), ("1", b"a weight"), ("2", b"its data")];

fn tensor(number: u32) -> Value {
    Value::Tensor(TensorId(number))
}

fn text(text: &str) -> Value {
    Value::Str(text.into())
}

fn dict(entries: Vec<(Value, Value)>) -> Value {
    Value::Dict(Dict { entries, ..Dict::default() })
}

/// Writes a torch file of `{"w": a tensor, "s": value}`. In `value`, `TensorId(n)` is a view of storage `n`.
fn file(env: &TestEnv, value: Value) -> PathBuf {
    let state = dict(vec![(text("w"), tensor(1)), (text("s"), value)]);
    let mut writer = Writer::new();
    let tensors = |writer: &mut Writer, TensorId(number): TensorId| {
        let key = number.to_string();
        View { key: &key, numel: 2, offset: 0, sizes: &[2], strides: &[1] }.write(writer);
        Ok(())
    };
    writer.value(&state, &mut Leaves { rank: None, tensors }).unwrap();
    env.write("source/w.pt", torch_file(writer.finish(), &STORAGES))
}

/// Returns dicts with a tensor in a key, and the paths of those dicts.
fn with_tensor_keys() -> Vec<(Value, &'static str)> {
    let one = || Value::Int(1);
    let by_tensor = || dict(vec![(tensor(0), one())]);
    vec![
        (by_tensor(), "s"),
        (dict(vec![(tensor(0), tensor(2))]), "s"),
        // The tensor in the key is also a weight of the model.
        (dict(vec![(tensor(1), dict(vec![(text("exp_avg"), tensor(2))]))]), "s"),
        (dict(vec![(Value::Tuple(vec![tensor(0), one()]), one())]), "s"),
        (dict(vec![(one(), one()), (Value::Tuple(vec![Value::Tuple(vec![tensor(0)])]), one())]), "s"),
        (dict(vec![(Value::FrozenSet(vec![tensor(0)]), one())]), "s"),
        (dict(vec![(text("state"), by_tensor())]), "s.state"),
        (Value::List(vec![one(), by_tensor()]), "s.1"),
        (Value::Tuple(vec![one(), by_tensor()]), "s.1"),
    ]
}

const TARGETS: [(&str, &[&str]); 6] = [
    ("unshard", &["--to=torch"]),
    ("consolidate", &["--to=safetensors", "--everything"]),
    ("reshard", &["--to=dcp", "--mesh=dp=2"]),
    ("reshard", &["--to=local", "--mesh=dp=2"]),
    ("reshard", &["--to=torch-ranks", "--mesh=dp=2"]),
    ("flatten", &["--to=fsdp-flat", "--world-size=2"]),
];

fn convert(target: (&str, &[&str]), source: &Path, out: &Path, more: &[&str]) -> crate::corrupt::Outcome {
    let mut args: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&target.0, &source, &out, &"--no-sync", &"--json"];
    args.extend(target.1.iter().chain(more).map(|arg| arg as &dyn AsRef<std::ffi::OsStr>));
    dtshard(&args)
}

fn assert_unsupported(outcome: &crate::corrupt::Outcome, path: &str) {
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    let error = serde_json::from_str::<Json>(&outcome.out).unwrap()["error"].clone();
    assert_eq!(error["kind"], "unsupported", "{error}");
    assert!(error["message"].as_str().unwrap().starts_with(&format!("{path}: ")), "{error}");
}

#[test]
fn tensor_in_a_key_is_refused_by_every_verb_and_target() {
    for (value, path) in with_tensor_keys() {
        let env = TestEnv::new();
        let source = file(&env, value);
        let before = env.names();
        for target in TARGETS {
            assert_unsupported(&convert(target, &source, &env.path("out"), &[]), path);
            assert_unsupported(&convert(target, &source, &env.path("out"), &["--dry-run"]), path);
        }
        assert_unsupported(&dtshard(&[&"verify", &source, &"--json"]), path);
        assert_unsupported(&dtshard(&[&"verify", &source, &source, &"--json"]), path);
        dtshard(&[&"inspect", &source]).assert_succeeded();
        assert_eq!(env.names(), before, "something was left behind");
    }
}

#[test]
fn tensor_in_a_key_of_the_top_dict_is_refused() {
    let env = TestEnv::new();
    let mut writer = Writer::new();
    writer.empty_dict();
    View { key: "0", numel: 2, offset: 0, sizes: &[2], strides: &[1] }.write(&mut writer);
    writer.int(1).setitem();
    let source = env.write("w.pt", torch_file(writer.finish(), &STORAGES));
    for target in TARGETS {
        let outcome = convert(target, &source, &env.path("out"), &[]);
        assert_eq!(outcome.code, Some(2), "{target:?}: {outcome:?}");
    }
}

#[test]
fn checkpoint_is_converted_with_tensor_keys_excluded() {
    for (value, path) in with_tensor_keys() {
        let env = TestEnv::new();
        let source = file(&env, value);
        let exclude = format!("--exclude={}", if path == "s.state" { path } else { "s" });
        for (index, target) in TARGETS.into_iter().enumerate() {
            let out = env.path(&format!("out{index}"));
            convert(target, &source, &out, &[&exclude]).assert_succeeded();
            dtshard(&[&"verify", &source, &out, &exclude]).assert_succeeded();
        }
    }
}

#[test]
fn model_beside_a_dict_of_tensor_keys_is_consolidated() {
    let env = TestEnv::new();
    let mut writer = Writer::new();
    writer.empty_dict().string("model").empty_dict().string("w");
    View { key: "1", numel: 2, offset: 0, sizes: &[2], strides: &[1] }.write(&mut writer);
    writer.setitem().setitem().string("optimizer").empty_dict().string("state").empty_dict();
    View { key: "0", numel: 2, offset: 0, sizes: &[2], strides: &[1] }.write(&mut writer);
    writer.int(1).setitem().setitem().setitem();
    let source = env.write("w.pt", torch_file(writer.finish(), &STORAGES));
    let out = env.path("out.safetensors");
    dtshard(&[&"consolidate", &source, &out]).assert_succeeded();
    dtshard(&[&"verify", &source, &out, &"--root=model"]).assert_succeeded();
}

#[test]
fn tensors_in_sets_are_kept_by_formats_with_objects() {
    let values = [
        Value::Set(vec![tensor(0)]),
        Value::FrozenSet(vec![tensor(0)]),
        Value::Set(vec![Value::Tuple(vec![tensor(0), Value::Int(1)])]),
        Value::Tuple(vec![Value::FrozenSet(vec![tensor(0), tensor(2)])]),
    ];
    for value in values {
        let env = TestEnv::new();
        let source = file(&env, value);
        for (index, target) in TARGETS.into_iter().filter(|(verb, _)| *verb != "flatten").enumerate() {
            let out = env.path(&format!("out{index}"));
            let outcome = convert(target, &source, &out, &[]);
            outcome.assert_succeeded();
            dtshard(&[&"verify", &source, &out]).assert_succeeded();
            let objects = dtshard(&[&"inspect", &out, &"--json"]);
            let document: Json = serde_json::from_str(&objects.out).unwrap();
            let has_set = document["objects"].get("s").is_some();
            assert_eq!(has_set, target.0 != "consolidate", "{target:?}: {}", document["objects"]);
        }
    }
}
