//! Tests that values are unchanged after they were written and read back.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use super::*;

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        (-70_000..70_000i64).prop_map(Value::Int),
        any::<u64>().prop_map(Value::from),
        vec(any::<u8>(), 9..300).prop_map(|mut bytes| {
            // With this byte the int has no redundant sign byte, and does not fit 64 bits.
            bytes.push(0x55);
            Value::BigInt(bytes.into())
        }),
        any::<u64>().prop_map(|bits| Value::Float(f64::from_bits(bits))),
        any::<String>().prop_map(|text| Value::Str(text.into())),
        Just(Value::SurrogateStr((*b"\xed\xbf\xbf").into())),
        vec(any::<u8>(), 0..20).prop_map(Value::Bytes),
        vec(any::<u8>(), 0..20).prop_map(Value::ByteArray),
        any::<(f64, f64)>().prop_map(|(re, im)| Value::Complex(re, im)),
        Just(Value::Symbol(Symbol::new("torch", "float8_e4m3fn"))),
        Just(Value::Symbol(Symbol::new("builtins", "str"))),
        any::<u32>().prop_map(Value::Tensor),
    ]
}

fn tree() -> impl Strategy<Value = Value> {
    leaf().prop_recursive(6, 64, 6, |inner| {
        let items = || vec(inner.clone(), 0..6);
        let entries = || {
            btree_map(any::<String>(), inner.clone(), 0..6)
                .prop_map(|map| map.into_iter().map(|(key, value)| (Value::Str(key.into()), value)).collect::<Vec<_>>())
        };
        prop_oneof![
            items().prop_map(Value::List),
            items().prop_map(Value::Tuple),
            items().prop_map(Value::Set),
            items().prop_map(Value::FrozenSet),
            entries().prop_map(dict),
            (entries(), proptest::option::of(entries())).prop_map(|(entries, attributes)| {
                let attributes = attributes.map(|attributes| Box::new(dict(attributes)));
                Value::Dict(Dict { kind: DictKind::Ordered, entries, attributes })
            }),
            entries().prop_map(|state| {
                let namespace = object(Construct::New, "argparse", "Namespace", vec![]);
                Value::Object(Box::new(Object { state: Some(dict(state)), ..namespace }))
            }),
            (items(), entries(), items()).prop_map(|(items, entries, args)| {
                let deque = object(Construct::Call, "collections", "deque", args);
                Value::Object(Box::new(Object { items, entries, ..deque }))
            }),
            vec(any::<u32>(), 0..20).prop_map(|dims| {
                let dims = Value::Tuple(dims.into_iter().map(|dim| Value::Int(dim.into())).collect());
                Value::Object(Box::new(object(Construct::Call, "torch", "Size", vec![dims])))
            }),
        ]
    })
}

/// Returns the pickle of a value in which each tensor is a persistent id with its number.
fn written(value: &Value) -> Result<Vec<u8>, WriteError> {
    let mut writer = Writer::new();
    writer.value(value, &mut |w: &mut Writer, id: u32| {
        w.int(id.into()).binpersid();
        Ok(())
    })?;
    Ok(writer.finish())
}

proptest! {
    #[test]
    fn values_survive(value in tree()) {
        let bytes = written(&value).unwrap();
        let pickle = read(&bytes);
        let back = decode(pickle.root(), &mut |r| {
            let id = r.persistent_id().and_then(super::super::view::Ref::as_u64);
            Ok(id.map(|id| u32::try_from(id).unwrap()))
        });
        prop_assert_eq!(back, Ok(value));
    }

    #[test]
    fn longs_are_read_as_the_numbers_they_are(value: i64, padding in 0..20usize) {
        let mut bytes = value.to_le_bytes().to_vec();
        bytes.resize(8 + padding, if value < 0 { 0xff } else { 0 });
        let mut pickle = vec![0x8a, bytes.len() as u8];
        pickle.extend(bytes);
        pickle.push(b'.');
        prop_assert_eq!(decoded(&pickle), Ok(Value::Int(value)));
    }
}

/// The output of this crate equals the output of `pickle.dumps(..., 2)` without its BINPUT opcodes.
#[test]
fn output_equals_that_of_cpython() {
    let mut writer = Writer::new();
    writer.int(0).int(255).int(256).int(65536).int(-1).int(1 << 31).int(i64::MIN).uint(u64::MAX);
    let expected = b"\x80\x02K\x00K\xffM\x00\x01J\x00\x00\x01\x00J\xff\xff\xff\xff\x8a\x05\x00\x00\x00\x80\x00\
        \x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00.";
    assert_eq!(writer.finish(), expected);

    let set = Value::Set(vec![Value::Float(1.5), Value::Bytes(vec![0xff])]);
    let expected = b"\x80\x02c__builtin__\nset\n](G?\xf8\x00\x00\x00\x00\x00\x00c_codecs\nencode\nX\x02\x00\x00\x00\
        \xc3\xbfX\x06\x00\x00\x00latin1\x86Re\x85R.";
    assert_eq!(written(&set).unwrap(), expected);

    let types = ["int", "str", "float"].map(|name| Value::Symbol(Symbol::new("builtins", name)));
    let expected = b"\x80\x02c__builtin__\nlong\nc__builtin__\nunicode\nc__builtin__\nfloat\n\x87.";
    assert_eq!(written(&Value::Tuple(types.into())).unwrap(), expected);
}

#[test]
fn writing_unlisted_names_is_an_error() {
    let system = object(Construct::Call, "os", "system", vec![text("id")]);
    let getattr = object(Construct::Call, "builtins", "getattr", vec![]);
    let scalar = object(Construct::New, "numpy._core.multiarray", "scalar", vec![]);
    for object in [system, getattr, scalar] {
        let symbol = object.class.to_string();
        let symbol = if symbol == "getattr" { "builtins.getattr".into() } else { symbol };
        let error = written(&Value::Object(Box::new(object)));
        assert_eq!(error, Err(WriteError::Forbidden { symbol }));
    }
    let eval = Value::Symbol(Symbol::new("builtins", "eval\nx"));
    assert!(matches!(written(&eval), Err(WriteError::Forbidden { .. })));
}

#[test]
fn writing_a_too_deep_value_is_an_error() {
    let mut deep = Value::None;
    for _ in 0..600 {
        deep = Value::List(vec![deep]);
    }
    assert_eq!(written(&deep), Err(WriteError::TooDeep));
}
