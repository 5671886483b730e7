//! Tests of reading and writing together. `tests/*.pkl` were written by CPython with `tests/samples.py`.

mod hostile;
mod reading;
mod records;
mod round_trip;
mod visiting;

use std::convert::Infallible;

use super::*;
use crate::value::{Construct, DictKind, Symbol};

type Value = crate::Value<u32>;
type Dict = crate::Dict<u32>;
type Object = crate::Object<u32>;

/// One object graph, pickled with each of the protocols 2 to 5.
const EVERYTHING: [&[u8]; 4] = [
    include_bytes!("tests/everything.2.pkl"),
    include_bytes!("tests/everything.3.pkl"),
    include_bytes!("tests/everything.4.pkl"),
    include_bytes!("tests/everything.5.pkl"),
];

fn read(bytes: &[u8]) -> Pickle<'_> {
    let (pickle, len) = parse(bytes, &mut NoVisitor).unwrap();
    assert_eq!(len, bytes.len());
    pickle
}

fn decoded(bytes: &[u8]) -> Result<Value, DecodeError> {
    decode(read(bytes).root(), &mut |_| Ok(None))
}

fn error_of(bytes: &[u8]) -> PickleError {
    match parse(bytes, &mut NoVisitor) {
        Ok(_) => panic!("{bytes:?} was read"),
        Err(error) => error,
    }
}

fn text(text: &str) -> Value {
    Value::Str(text.into())
}

fn dict(entries: Vec<(Value, Value)>) -> Value {
    Value::Dict(Dict { entries, ..Dict::default() })
}

fn object(how: Construct, module: &str, name: &str, args: Vec<Value>) -> Object {
    Object { args, ..Object::new(how, Symbol::new(module, name)) }
}

fn no_tensors(_: &mut Writer, _: u32) -> Result<(), WriteError> {
    unreachable!("a value without tensors")
}

fn decode(r: Ref<'_>, tensors: &mut Tensors<'_, u32>) -> Result<Value, DecodeError> {
    super::decode(r, tensors)
}

fn decode_with(r: Ref<'_>, unknown: Unknown, tensors: &mut Tensors<'_, u32>) -> Result<Decoded<u32>, DecodeError> {
    super::decode_with(r, unknown, tensors)
}
