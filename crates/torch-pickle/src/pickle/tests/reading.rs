//! Tests that pickles written by CPython are read to the expected values.

use super::*;

/// Returns the object graph that `samples.py` pickles.
fn everything() -> Value {
    let ints = |ints: &[i64]| ints.iter().copied().map(Value::Int).collect::<Vec<_>>();
    let big = |low: u8, high: &[u8]| {
        let mut bytes = vec![low, 0, 0, 0, 0, 0, 0];
        bytes.extend(high);
        Value::BigInt(bytes.into())
    };
    let tuple = |n: i64| Value::Tuple((1..=n).map(Value::Int).collect());
    let version = dict(vec![(text("version"), Value::Int(1))]);
    let ordered = |entries, attributes| Value::Dict(Dict { kind: DictKind::Ordered, entries, attributes });
    let metadata = dict(vec![(text("_metadata"), ordered(vec![(text(""), version)], None))]);
    let int_type = Value::Symbol(Symbol::new("builtins", "int"));
    let mut default = object(Construct::Call, "collections", "defaultdict", vec![int_type]);
    default.entries = vec![(text("k"), Value::Int(1))];
    let mut namespace = object(Construct::New, "argparse", "Namespace", vec![]);
    namespace.state = Some(dict(vec![(text("lr"), Value::Float(0.5))]));
    let size = Value::Tuple(ints(&[2, 3]));
    let cuda = vec![text("cuda"), Value::Int(1)];

    let entries = [
        ("none", Value::None),
        ("yes", Value::Bool(true)),
        ("no", Value::Bool(false)),
        ("ints", Value::List(ints(&[0, 255, 256, 65535, 65536, -1, -(1 << 31), 1 << 31, i64::MIN, i64::MAX]))),
        (
            "big",
            Value::List(vec![
                big(0, &[0x80, 0]),
                Value::BigInt([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0xff].into()),
                big(0, &[0, 1]),
                big(0xff, &[0, 0, 0xff]),
                Value::Int(0),
            ]),
        ),
        ("f", Value::List(vec![Value::Float(1.5), Value::Float(f64::NEG_INFINITY)])),
        ("s", Value::List(vec![text(""), text("é"), Value::SurrogateStr((*b"a\xed\xa0\x80b").into())])),
        ("b", Value::List(vec![Value::Bytes(vec![]), Value::Bytes(vec![0, 0xff])])),
        ("ba", Value::ByteArray(vec![b'x', 0x80])),
        ("t", Value::Tuple((0..5).map(tuple).collect())),
        ("set", Value::Set(ints(&[7]))),
        ("frozen", Value::FrozenSet(ints(&[8]))),
        ("c", Value::Complex(1.0, -2.0)),
        ("shared", Value::List(vec![Value::List(ints(&[1, 2])), Value::List(ints(&[1, 2]))])),
        ("od", ordered(vec![(text("a"), Value::Int(1))], Some(Box::new(metadata)))),
        ("dd", Value::Object(Box::new(default))),
        ("ns", Value::Object(Box::new(namespace))),
        ("size", Value::Object(Box::new(object(Construct::Call, "torch", "Size", vec![size])))),
        ("dtype", Value::Symbol(Symbol::new("torch", "bfloat16"))),
        ("dev", Value::Object(Box::new(object(Construct::Call, "torch", "device", cuda)))),
    ];
    dict(entries.into_iter().map(|(key, value)| (text(key), value)).collect())
}

#[test]
fn every_protocol_gives_the_same_value() {
    for bytes in EVERYTHING {
        assert_eq!(decoded(bytes), Ok(everything()));
    }
}

#[test]
fn views_are_typed_and_know_identity() {
    let pickle = read(EVERYTHING[2]);
    let root = pickle.root();
    assert_eq!(root.as_dict().unwrap().len(), 20);
    assert!(root.get("none").unwrap().is_none());
    assert_eq!(root.get("yes").unwrap().as_bool(), Some(true));
    assert_eq!(root.get("dtype").unwrap().global(), Some(("torch", "bfloat16")));
    assert_eq!(root.get("size").unwrap().as_dims(), Some(&[2, 3][..]));
    assert!(root.get("missing").is_none());

    let big = root.get("big").unwrap().as_list().unwrap();
    assert_eq!(
        big.map(super::super::view::Ref::as_u64).collect::<Vec<_>>(),
        [Some(1 << 63), None, None, None, Some(0)]
    );

    let mut shared = root.get("shared").unwrap().as_list().unwrap();
    let (first, second) = (shared.next().unwrap(), shared.next().unwrap());
    assert_eq!(first.id(), second.id());
    assert!(first.is_shared() && !root.is_shared());
    assert_eq!(first.to_dims().unwrap().as_slice(), [1, 2]);

    let ordered = root.get("od").unwrap();
    assert_eq!(ordered.get("a").unwrap().as_i64(), Some(1));
    assert!(ordered.state().unwrap().get("_metadata").unwrap().as_dict().is_some());

    let device = root.get("dev").unwrap().call().unwrap();
    assert_eq!((device.module, device.name), ("torch", "device"));
    assert_eq!(device.args.get(0).unwrap().as_str(), Some("cuda"));

    let namespace = root.get("ns").unwrap().object().unwrap();
    assert_eq!((namespace.module, namespace.name), ("argparse", "Namespace"));
    assert_eq!(namespace.state.unwrap().get("lr").unwrap().as_f64(), Some(0.5));
}

#[test]
fn dict_of_several_batches_is_read() {
    let entries: Vec<_> = (0..2001).map(|i| (Value::Int(i), Value::Int(-i))).collect();
    let mut writer = Writer::new();
    writer.value(&dict(entries.clone()), &mut no_tensors).unwrap();
    let bytes = writer.finish();
    // CPython writes the entries of the dict in two batches, and one entry alone without a mark.
    assert!(bytes.ends_with(b"uM\xd0\x07J\x30\xf8\xff\xffs."));
    assert_eq!(decoded(&bytes), Ok(dict(entries)));
}

#[test]
fn numpy_scalars_are_carried() {
    let four = b"\x80\x04\x95f\x00\x00\x00\x00\x00\x00\x00\x8c\x16numpy._core.multiarray\x94\x8c\x06scalar\
        \x94\x93\x94\x8c\x05numpy\x94\x8c\x05dtype\x94\x93\x94\x8c\x02f4\x94\x89\x88\x87\x94R\x94(K\x03\x8c\
        \x01<\x94NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t\x94bC\x04\x00\x00\xc0?\x94\x86\x94R\x94.";
    let two = b"\x80\x02cnumpy._core.multiarray\nscalar\nq\x00cnumpy\ndtype\nq\x01X\x02\x00\x00\x00f4q\x02\
        \x89\x88\x87q\x03Rq\x04(K\x03X\x01\x00\x00\x00<q\x05NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x06b\
        c_codecs\nencode\nq\x07X\x05\x00\x00\x00\x00\x00\xc3\x80?q\x08X\x06\x00\x00\x00latin1q\x09\x86q\nRq\
        \x0b\x86q\x0cRq\x0d.";
    let value = decoded(four).unwrap();
    assert_eq!(value.type_name(), "numpy._core.multiarray.scalar");
    assert_eq!(decoded(two), Ok(value));
}

/// For `t = ([],); t[0].append(t)`, CPython builds the tuple twice and removes one of the two with POP, with or without
/// the mark of the tuple.
#[test]
fn recursive_tuples_use_pop() {
    for bytes in [
        &b"\x80\x02]q\x00h\x00\x85q\x01a0h\x01."[..],
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94h\x00\x85\x94a0h\x01.",
    ] {
        let pickle = read(bytes);
        let tuple = pickle.root();
        let list = tuple.as_tuple().unwrap().get(0).unwrap();
        assert_eq!(list.as_list().unwrap().get(0).unwrap().id(), tuple.id());
        let error = decode(tuple, &mut |_| Ok(None)).unwrap_err();
        assert_eq!(error.to_string(), "[0][0]: an object that contains itself");
    }
}

/// Protocol 2 of `torch.distributed.ReduceOp.AVG` accesses the class through `getattr`.
#[test]
fn nested_classes_are_read_symbolically() {
    let bytes = b"\x80\x02c__builtin__\ngetattr\nq\x00ctorch.distributed.distributed_c10d\nReduceOp\nq\x01X\
        \x09\x00\x00\x00RedOpTypeq\x02\x86q\x03Rq\x04)\x81q\x05K\x01b.";
    let value = decoded(bytes).unwrap();
    assert_eq!(value.type_name(), "torch.distributed.distributed_c10d.ReduceOp.RedOpType");
    let mut writer = Writer::new();
    writer.value(&value, &mut no_tensors).unwrap();
    assert_eq!(decoded(&writer.finish()), Ok(value));
}

#[test]
fn duplicate_key_has_its_last_value() {
    let bytes = b"\x80\x02}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00bK\x02X\x01\x00\x00\x00aK\x03u.";
    let pickle = read(bytes);
    assert_eq!(pickle.root().get("a").unwrap().as_i64(), Some(3));
    let expected = dict(vec![(text("a"), Value::Int(3)), (text("b"), Value::Int(2))]);
    assert_eq!(decoded(bytes), Ok(expected));
}

#[test]
fn reads_no_further_than_stop() {
    let (_, len) = parse(b"\x80\x02N.rest", &mut NoVisitor).unwrap();
    assert_eq!(len, 4);
}

#[test]
fn caller_decodes_tensors() {
    let bytes = b"\x80\x02]((X\x07\x00\x00\x00storagetQNe.";
    let mut seen = Vec::new();
    let value = decode(read(bytes).root(), &mut |r| {
        let id = r.persistent_id().unwrap();
        seen.push(id.as_tuple().unwrap().get(0).unwrap().as_str().unwrap().to_owned());
        Ok(Some(5_u32))
    });
    assert_eq!(value.unwrap().to_string(), "[<5>, None]");
    assert_eq!(seen, ["storage"]);

    let error = decoded(bytes).unwrap_err();
    assert_eq!(error.to_string(), "[0]: a storage outside of a tensor");
}
