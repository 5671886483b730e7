//! Tests of `layout.json`: a rendered document is read back equal, and an invalid document gives an error with the
//! position of the fault.

use std::collections::HashMap;
use std::path::Path as FilePath;

use super::decode::decode;
use super::document::{LocalDocument, parse};
use super::encode::encode;
use super::tree::Tree;
use crate::catalog::value::{Construct, Object, Symbol};
use crate::catalog::{Dict, DictKind, Path, RankValue, TensorId, Value};
use crate::error::Result;
use crate::layout::Rank;

fn dict(entries: Vec<(Value, Value)>) -> Value {
    Value::Dict(Dict { entries, ..Dict::default() })
}

fn text(text: &str) -> Value {
    Value::Str(text.into())
}

fn round_trip(value: &Value) -> Value {
    let whole = dict(vec![(text("v"), value.clone())]);
    let tree = encode(&whole, &Path::default()).unwrap();
    let tree: Tree = serde_json::from_str(&tree.render(0)).unwrap();
    let names = HashMap::from([("v", TensorId(0)), ("v.0.a", TensorId(1)), ("v.rank_1.0", TensorId(2))]);
    let Value::Dict(mut read) = decode(&tree, &names, 4).unwrap() else { panic!("a dict") };
    read.entries.remove(0).1
}

#[test]
fn every_value_round_trips() {
    let namespace = {
        let mut object = Object::new(Construct::New, Symbol::new("argparse", "Namespace"));
        object.state = Some(dict(vec![(text("lr"), Value::Float(0.1))]));
        Value::Object(Box::new(object))
    };
    let ordered = |attributes: Option<Value>, entries| {
        Value::Dict(Dict { kind: DictKind::Ordered, entries, attributes: attributes.map(Box::new) })
    };
    let rank_value = |value, ranks: &[u32]| RankValue { value, ranks: ranks.iter().copied().map(Rank).collect() };
    let values = [
        Value::List(vec![Value::None, Value::Bool(true), Value::Int(i64::MIN), text("$ü\n\"")]),
        Value::List([0.0, -0.0, 1.0, 0.1, 1e300, 5e-324].map(Value::Float).to_vec()),
        Value::List([f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(Value::Float).to_vec()),
        Value::from(u64::MAX),
        Value::SurrogateStr([0xed, 0xa0, 0x80].into()),
        Value::Tuple(vec![Value::Bytes(vec![0, 255]), Value::ByteArray(vec![]), Value::Complex(1.0, f64::NAN)]),
        Value::Set(vec![Value::Int(2), Value::Int(1)]),
        Value::FrozenSet(vec![Value::Tuple(vec![])]),
        dict(vec![(Value::Int(0), Value::None), (text("0"), Value::None), (Value::Tuple(vec![]), Value::None)]),
        dict(vec![(text("$tensor"), text("v"))]),
        dict(vec![(text("$dict"), Value::List(vec![]))]),
        ordered(None, vec![]),
        ordered(Some(dict(vec![(text("_metadata"), namespace.clone())])), vec![(text("a"), Value::Int(1))]),
        ordered(None, vec![(text("$dict"), Value::Int(1)), (Value::Int(7), Value::Int(1))]),
        Value::Symbol(Symbol::new("torch", "bfloat16")),
        namespace,
        Value::Tensor(TensorId(0)),
        Value::Tuple(vec![dict(vec![(text("a"), Value::Tensor(TensorId(1)))])]),
        Value::Other(vec![
            rank_value(Value::Int(1), &[0, 2]),
            rank_value(Value::Tuple(vec![Value::Tensor(TensorId(2))]), &[1, 3]),
        ]),
    ];
    for value in values {
        assert_eq!(round_trip(&value), value);
    }
}

#[test]
fn too_deep_value_is_an_error() {
    let deep = |depth| (0..depth).fold(Value::None, |inner, _| Value::Tuple(vec![inner]));
    assert_eq!(round_trip(&deep(50)), deep(50));
    assert!(encode(&deep(70), &Path::default()).unwrap_err().contains("nested deeper"));
}

fn read(text: &str) -> Result<LocalDocument> {
    parse(FilePath::new("layout.json"), text.as_bytes())
}

fn document(meshes: &str, tensors: &str, state: &str) -> String {
    format!(
        r#"{{"version": 1, "world_size": 4, "meshes": [{meshes}], "tensors": {{{tensors}}}, "state": {{{state}}}}}"#
    )
}

const MESH: &str = r#"{"dims": [["dp", 2], ["tp", 2]], "ranks": [0, 2, 1, 3]}, {"dims": [[null, 3]]}"#;

/// Returns a document with one tensor, whose fields are `tensor`.
fn document_with_tensor(tensor: &str) -> String {
    document(MESH, &format!(r#""w": {{{tensor}}}"#), r#""w": {"$tensor": "w"}"#)
}

#[test]
fn rendered_document_is_read_back_equal() {
    let tensors = r#""w": {"dtype": "f32", "shape": [7, 3], "class": "dtensor", "mesh": 0,
        "placements": "_S(0,2),P(avg)", "splits": ["4+3", "chunk"], "slice": [0, 1]},
        "head.w": {"tied_to": "w"}, "n": {"dtype": "i64", "shape": [], "ranks": [1, 3]}"#;
    let state = r#""head": {"w": {"$tensor": "head.w"}}, "w": {"$tensor": "w"}, "n": {"$tensor": "n"}"#;
    let document = read(&document(MESH, tensors, state)).unwrap();
    let tree = encode(&document.state, &Path::default()).unwrap();
    let text = document.render(&tree);
    assert_eq!(read(&text).unwrap(), document, "{text}");
    assert_eq!(read(&text).unwrap().render(&tree), text);
    assert!(text.contains("\n    \"head.w\": {\"tied_to\": \"w\"},\n"), "{text}");
    assert_eq!(document.meshes[0].to_string(), "dp=2,tp=2");
}

#[test]
fn invalid_document_error_names_the_place() {
    let plain = r#""dtype": "f32", "shape": [4]"#;
    let sharded = |more: &str| document_with_tensor(&format!(r#""dtype": "f32", "shape": [4], "mesh": 0, {more}"#));
    let in_mesh = |mesh: &str| document(mesh, "", "");
    let state = |state: &str| document("", &format!(r#""w": {{{plain}}}"#), state);
    let more = |extra: &str| state(&format!(r#""w": {{"$tensor": "w"}}, {extra}"#));
    let cases = [
        (String::new(), "expected a layout of rank files, found the end of the text"),
        (
            document_with_tensor(plain).replace("\"version\": 1", "\"version\": 2, \"new\": 1"),
            "version 2 of the layout",
        ),
        (document_with_tensor(plain).replace("\"world_size\"", "\"World_size\""), "the unknown key `World_size`"),
        (document_with_tensor(plain).replace(": 4,", ": 0,"), "world_size: expected at least 1"),
        (document_with_tensor(plain).replace(": 4,", ": -4,"), "found the number -4"),
        (
            document_with_tensor(plain).replacen("\"w\"", "\"w\": {\"dtype\": \"f32\", \"shape\": []}, \"w\"", 1),
            "the key `w` twice",
        ),
        (document_with_tensor(r#""dtype": "f32", "shape": [4], "dtype": "f32""#), "the key `dtype` twice"),
        (document_with_tensor(r#""dtype": "f31", "shape": [4]"#), "w: expected the dtype of a tensor, found `f31`"),
        (document_with_tensor(r#""dtype": "f32""#), "w: expected a shape, found none"),
        (document_with_tensor(r#""dtype": "f32", "shape": [-4]"#), "found the number -4"),
        (
            document_with_tensor(r#""dtype": "f32", "shape": [18446744073709551615, 2]"#),
            "w: expected a shape of at most 64 dims that fits",
        ),
        (document_with_tensor(r#""dtype": "f32", "shape": [4611686018427387904, 0, 16]"#), "that fits memory"),
        (
            document_with_tensor(&format!(r#""dtype": "f32", "shape": {:?}"#, [1; 65])),
            "w: expected a shape of at most 64 dims",
        ),
        (document_with_tensor(r#""dtype": "f32", "shape": [4], "class": "DTensor""#), "found `DTensor`"),
        (
            document_with_tensor(r#""dtype": "f32", "shape": [4], "class": "dtensor""#),
            "w: expected placements, found none",
        ),
        (document_with_tensor(r#""dtype": "f32", "shape": [4], "mesh": 0"#), "w: expected mesh and placements"),
        (document_with_tensor(r#""dtype": "f32", "shape": [4], "splits": []"#), "w: expected mesh and placements"),
        (
            document_with_tensor(r#""dtype": "f32", "shape": [4], "mesh": 2, "placements": "R""#),
            "one of 2 meshes, found mesh 2",
        ),
        (sharded(r#""placements": "S(0)""#), "2 placements that fit a tensor of 1 dims, found S(0)"),
        (sharded(r#""placements": "S(0),S(1)""#), "2 placements that fit"),
        (sharded(r#""placements": "S(0),X""#), "w: expected S(dim), _S(dim,split_factor), R or P(op) (placement"),
        (sharded(r#""placements": "S(0),_S(0,0)""#), "w: expected a split factor of at least 1"),
        (sharded(r#""placements": "S(0),R", "splits": ["chunk"]"#), "w: expected 2 splits, found 1"),
        (
            sharded(r#""placements": "S(0),R", "splits": ["even", "chunk"]"#),
            "w: expected chunk, balanced, makani or sizes such as 3+1",
        ),
        (
            sharded(r#""placements": "S(0),R", "slice": [1]"#),
            "ascending mesh dims, with R on all other dims, found slice [1]",
        ),
        (sharded(r#""placements": "S(0),R", "slice": [0, 2]"#), "slice [0, 2]"),
        (sharded(r#""placements": "S(0),R", "slice": []"#), "slice []"),
        (sharded(r#""placements": "S(0),R", "ranks": [0]"#), "w: expected placements or ranks, found both"),
        (
            document_with_tensor(&format!(r#"{plain}, "ranks": [1, 0]"#)),
            "w: expected ascending ranks below 4, found [1, 0]",
        ),
        (document_with_tensor(&format!(r#"{plain}, "ranks": [4]"#)), "ascending ranks below 4"),
        (document_with_tensor(&format!(r#"{plain}, "ranks": []"#)), "ascending ranks below 4"),
        (
            document_with_tensor(r#""tied_to": "w""#),
            "w: expected a tensor with its own description in tied_to, found `w`",
        ),
        (
            document_with_tensor(&format!(r#"{plain}}}, "v": {{"tied_to": "w", "shape": [4]"#)),
            "v: expected no other key beside tied_to",
        ),
        (in_mesh(r#"{"dims": [["dp", 5]]}"#), "mesh 0: expected at most one cell for each rank (world_size is 4)"),
        (
            in_mesh(r#"{"dims": [["dp", 4294967296], ["tp", 4294967296]]}"#),
            "mesh 0: expected at most one cell for each",
        ),
        (in_mesh(r#"{"dims": [["dp", 0]]}"#), "mesh 0: expected every dim to be at least 1"),
        (in_mesh(r#"{"dims": [["dp", 2], ["dp", 2]]}"#), "mesh 0: expected distinct dim names"),
        (in_mesh(r#"{"dims": [["dp", 2], [null, 2]]}"#), "mesh 0: expected names for all dims or for none"),
        (in_mesh(r#"{"dims": [["dp", 2]], "ranks": [0]}"#), "mesh 0: expected one rank for each cell of the mesh"),
        (in_mesh(r#"{"dims": [["dp", 2]], "ranks": [0, 4]}"#), "mesh 0: expected ranks below 4, found rank 4"),
        (in_mesh(r#"{"dims": [["dp", 2]], "ranks": [1, 1]}"#), "mesh 0: expected every rank once"),
        (state(""), "every tensor once, at the path of its name, found 0 references to 1 names"),
        (state(r#""v": {"$tensor": "w"}"#), "state: expected the tensor of the same name at v, found the tensor w"),
        (state(r#""w": {"$tensor": "v"}"#), "state w: expected the name of an entry in `tensors`, found `v`"),
        (state(r#""w": {"$tensor": 1}"#), "state w: expected the name of a tensor, found a whole number"),
        (more(r#""v": {"$tensor": "w"}"#), "expected the tensor of the same name at v, found the tensor w"),
        (more(r#""a": {"$ordered": {}, "$attributes": {"$tensor": "w"}}"#), "found `$tensor`"),
        (more(r#""a": {"$dict": [[{"$tensor": "w"}, 1]]}"#), "found `$tensor`"),
        (more(r#""a": {"$dict": [[1, 1], [1, 2]]}"#), "state a: expected distinct keys, found 1 twice"),
        (more(r#""a": {"b": 1, "b": 2}"#), "the key `b` twice"),
        (more(r#""a": {"$dict": [[1]]}"#), "state a: expected pairs"),
        (more(r#""a": {"$tuple": [], "b": 1}"#), "state a: expected no key next to $tuple, found `b`"),
        (more(r#""a": {"b": 1, "$tuple": []}"#), "state a: expected no key that begins with $"),
        (more(r#""a": {"$new": 1}"#), "state a: expected a tag that is allowed at this place, found `$new`"),
        (more(r#""a": {"$bytes": "é0"}"#), "state a: expected bytes"),
        (more(r#""a": {"$float": "1"}"#), "state a: expected a float"),
        (more(r#""a": {"$symbol": ["os", "system"]}"#), "plain data, found `os.system`"),
        (
            more(r#""a": {"$symbol": ["torch._utils", "_rebuild_tensor_v2"]}"#),
            "found `torch._utils._rebuild_tensor_v2`",
        ),
        (more(r#""a": {"$object": {"how": "call", "class": ["os", "system"], "args": ["id"]}}"#), "found `os.system`"),
        (more(r#""a": {"$object": {"how": "call", "class": ["builtins", "object"]}}"#), "found `builtins.object`"),
        (more(r#""a": {"$object": {"how": "exec"}}"#), "call or new"),
        (more(r#""a": {"$object": {"how": "new", "class": ["argparse", "Namespace"], "x": 1}}"#), "found `x`"),
        (more(r#""a": {"$ranks": []}"#), "state a: expected values of ranks, found none"),
        (more(r#""a": {"$ranks": [[[], 1]]}"#), "state a: expected ranks that have a value"),
        (more(r#""a": {"$ranks": [[[0], 1], [[0], 2]]}"#), "ascending ranks below 4, each once, found 0"),
        (more(r#""a": {"$ranks": [[[4], 1]]}"#), "ascending ranks below 4, each once, found 4"),
        (
            more(r#""a": {"$tuple": [{"$ranks": [[[0], 1]]}]}"#),
            "state a.0: expected a tag that is allowed at this place",
        ),
        (
            document_with_tensor(plain).replace("{\"w\": {\"$tensor\": \"w\"}}", "[]"),
            "state: expected a dict, found list",
        ),
        (more(&format!(r#""a": {}{}"#, "[".repeat(200), "]".repeat(200))), "too many nested lists and objects"),
        ("[".repeat(100_000), "expected a whole number from 0 to 2^64 - 1, found a list"),
    ];
    for (text, expected) in cases {
        let found = read(&text).unwrap_err().to_string();
        assert!(found.contains(expected), "{text}\n{found}\n{expected}");
    }
}
