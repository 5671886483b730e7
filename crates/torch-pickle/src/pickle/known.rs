//! The list of known calls: calls that have a variant of `Value`, such as `set`.
//!
//! Source of the rule: CPython `Lib/pickle.py`, `save_bytes` and `save_bytearray`, and the `__reduce_ex__` of the
//! built-in types. Only the argument shapes that these functions write are accepted.

use std::mem::take;

use crate::value::Value;

pub(super) fn is_known(module: &str, name: &str) -> bool {
    match module {
        "_codecs" => name == "encode",
        "builtins" => matches!(name, "set" | "frozenset" | "bytes" | "bytearray" | "complex"),
        _ => false,
    }
}

/// Returns the value of a call of `name`, such as `set`. Returns `None` if the name is not a known call, or if CPython
/// does not write such arguments. `OrderedDict` is not a known call here, because the entries of the dict are set after
/// the call.
pub(super) fn value<T, X>(name: &str, args: &mut [Value<T, X>]) -> Option<Value<T, X>> {
    Some(match (name, args) {
        ("set", []) => Value::Set(Vec::new()),
        ("set", [Value::List(items)]) => Value::Set(take(items)),
        ("set", [Value::Ints(ints)]) => Value::Set(ints.iter().copied().map(Value::Int).collect()),
        ("frozenset", []) => Value::FrozenSet(Vec::new()),
        ("frozenset", [Value::List(items)]) => Value::FrozenSet(take(items)),
        ("frozenset", [Value::Ints(ints)]) => Value::FrozenSet(ints.iter().copied().map(Value::Int).collect()),
        ("bytes", []) => Value::Bytes(Vec::new()),
        ("encode", [Value::Str(text), Value::Str(codec)]) => Value::Bytes(latin1(text, codec)?),
        ("bytearray", []) => Value::ByteArray(Vec::new()),
        ("bytearray", [Value::Bytes(bytes)]) => Value::ByteArray(take(bytes)),
        ("bytearray", [Value::Str(text), Value::Str(codec)]) => Value::ByteArray(latin1(text, codec)?),
        ("complex", [Value::Float(re), Value::Float(im)]) => Value::Complex(*re, *im),
        _ => return None,
    })
}

/// Decodes a `bytes` object of protocol 2. This protocol has no opcode for bytes. Instead, it stores a text with one
/// character per byte, and a call that encodes the text as Latin-1.
fn latin1(text: &str, codec: &str) -> Option<Vec<u8>> {
    if !matches!(codec, "latin1" | "latin-1") {
        return None;
    }
    text.chars().map(|c| u8::try_from(c).ok()).collect()
}
