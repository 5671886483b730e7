//! Tests of hostile pickles: reading them gives an error in bounded time and memory, and never a panic.

use proptest::prelude::*;

use super::*;

#[test]
fn every_truncation_is_an_error() {
    for bytes in EVERYTHING {
        for len in 0..bytes.len() {
            assert_eq!(error_of(&bytes[..len]).kind, PickleErrorKind::Truncated, "{len} bytes");
        }
    }
}

#[test]
fn length_beyond_the_input_is_an_error() {
    let huge = b"\x8d\x00\x00\x00\x00\x00\x00\x00\x10abc.";
    assert_eq!(error_of(huge).kind, PickleErrorKind::Truncated);
    let frame = b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffN.";
    assert_eq!(error_of(frame).kind, PickleErrorKind::Truncated);
    let negative = error_of(b"\x80\x02\x8b\xff\xff\xff\xffN.");
    assert_eq!(negative.to_string(), "byte 2: LONG4 with the negative length -1");
}

#[test]
fn invalid_stack_operations_are_errors() {
    for bytes in [
        &b"."[..],          // STOP with an empty stack
        b"(.",              // a mark is not a value
        b"((.",             // two marks are not a value either
        b"N(.",             // a value under a mark is out of reach
        b"NN.",             // a value left over
        b"(N.",             // a mark left over
        b"N(0R.",           // REDUCE without a callee
        b"\x85.",           // TUPLE1 of nothing
        b"K\x01(\x85t.",    // TUPLE1 through a mark
        b"t.",              // TUPLE without a mark
        b"e.",              // APPENDS without a mark
        b"}(K\x01u.",       // a key without its value
        b"}K\x01a.",        // APPEND to a dict
        b"]K\x01K\x02s.",   // SETITEM on a list
        b"N}b.",            // BUILD on None
        b"cos\nx\nK\x01R.", // arguments that are not a tuple
        b"h\x00.",          // GET before PUT
        b"q\x00.",          // PUT of nothing
        b"K\x01K\x02\x93.", // STACK_GLOBAL of ints
        b"X\x01\x00\x00\x00\xff.",
        b"I1\n.",
        b"\x82\x01.",
        b"\x97.",
        b"\xff.",
        b"\x80\x06N.",
    ] {
        assert_eq!(error_of(bytes).kind, PickleErrorKind::Malformed, "{bytes:?}");
    }
}

#[test]
fn errors_name_the_byte() {
    assert_eq!(error_of(b"\x80\x02N\xff.").to_string(), "byte 3: 0xff, which is not a pickle opcode");
    let text = error_of(b"\x80\x02I01\n.").to_string();
    assert_eq!(text, "byte 2: 0x49, an opcode of the old text protocols, which no checkpoint uses");
}

#[test]
fn memo_index_beyond_the_input_is_an_error() {
    assert_eq!(error_of(b"Nr\xff\xff\xff\xffj\xff\xff\xff\xff.").kind, PickleErrorKind::Limit);
}

#[test]
fn too_many_nodes_are_an_error() {
    let limits = Limits { max_nodes: 10, ..Limits::for_input(0) };
    let error = parse_with(&[b'N'; 20], &mut NoVisitor, limits).err().unwrap();
    // Already the first walk, which finds the fetched memo entries, finds that STOP is missing.
    assert_eq!(error.kind, PickleErrorKind::Truncated);
    let mut bytes = vec![b'N'; 20];
    bytes.push(b'.');
    let error = parse_with(&bytes, &mut NoVisitor, limits).err().unwrap();
    assert_eq!((error.kind, error.at), (PickleErrorKind::Limit, 10));
}

#[test]
fn too_deep_value_is_an_error() {
    let nested = |n: usize| [vec![b']'; n], vec![b'a'; n - 1], vec![b'.']].concat();
    assert!(decoded(&nested(256)).is_ok());
    let bytes = nested(100_000);
    let pickle = read(&bytes);
    let error = decode(pickle.root(), &mut |_| Ok(None)).unwrap_err();
    assert!(matches!(error, DecodeError::Limit { .. }), "{error}");
    assert!(error.to_string().ends_with("[0][0]: values nested deeper than 256"));
}

/// For each kind of container, a value of the maximum depth can be decoded and dropped on the stack of a thread, even
/// in a debug build.
#[test]
fn the_depth_limit_fits_the_stack() {
    for (before, after) in [
        ("(", "t"),
        ("}K\x01", "s"),
        ("ccollections\ndeque\n", "\u{85}R"),
        ("ccollections\ndeque\n)R", "b"),
        ("ccollections\ndeque\n)RK\x01", "s"),
        ("ccollections\nOrderedDict\n)R", "b"),
        ("ccollections\nOrderedDict\n)RK\x01", "s"),
        ("c__builtin__\nset\n](", "e\u{85}R"),
    ] {
        // The characters are converted to bytes one by one, since the opcode TUPLE1 is not ASCII.
        let nested = |n: usize| -> Vec<u8> {
            let text = [&before.repeat(n), "N", &after.repeat(n), "."].concat();
            text.chars().map(|c| c as u8).collect()
        };
        // A set takes two levels of nesting.
        let levels = if after.starts_with('e') { 127 } else { 255 };
        let value = decoded(&nested(levels)).unwrap();
        assert_eq!(value.clone(), value);
        let mut writer = Writer::new();
        writer.value(&value, &mut no_tensors).unwrap();
        assert_eq!(decoded(&writer.finish()), Ok(value));
        assert!(matches!(decoded(&nested(5000)), Err(DecodeError::Limit { .. })));
    }
}

/// Each list contains the previous list twice, so 40 lists are a tree of 2^40 nodes.
#[test]
fn exponentially_shared_lists_are_an_error() {
    let mut bytes = b"]q\x00".to_vec();
    for i in 0..40 {
        bytes.extend([b'0', b']', b'(', b'h', i, b'h', i, b'e', b'q', i + 1]);
    }
    bytes.push(b'.');
    let error = decoded(&bytes).unwrap_err();
    assert!(matches!(error, DecodeError::Limit { .. }), "{error}");
}

/// A long text that is fetched many times is not copied without limit.
#[test]
fn text_fetched_too_often_is_an_error() {
    let mut bytes = b"](X\x00\x00\x10\x00".to_vec();
    bytes.extend(vec![b'x'; 1 << 20]);
    bytes.extend(b"q\x00");
    bytes.extend(b"h\x00".repeat(100_000));
    bytes.extend(b"e.");
    assert!(matches!(decoded(&bytes), Err(DecodeError::Limit { .. })));
}

#[test]
fn unlisted_calls_are_errors() {
    for (bytes, symbol) in [
        (
            &b"\x80\x02}q\x00X\x03\x00\x00\x00cfgq\x01]q\x02cposix\nsystem\nq\x03X\x02\x00\x00\x00idq\x04\x85q\x05Rq\
            \x06as."[..],
            "posix.system",
        ),
        (b"\x80\x04}X\x03\x00\x00\x00cfg]\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85Ras.", "os.system"),
        (b"}X\x03\x00\x00\x00cfg]cbuiltins\neval\nas.", "builtins.eval"),
        (b"}X\x03\x00\x00\x00cfg]ctorch\nload\n)Ras.", "torch.load"),
        // These pickles contain `getattr(os, 'system')('id')`, and `getattr` of a value that is itself computed.
        (b"}X\x03\x00\x00\x00cfg]c__builtin__\ngetattr\ncos\npath\nU\x06system\x86R)Ras.", "os.path.system"),
        (b"}X\x03\x00\x00\x00cfg]c__builtin__\ngetattr\nK\x01U\x06system\x86R)Ras.", "builtins.getattr"),
        // These pickles use a type or function that is listed, but in a way that the list does not allow.
        (b"}X\x03\x00\x00\x00cfg]cbuiltins\ntype\n)Ras.", "builtins.type"),
        (b"}X\x03\x00\x00\x00cfg]cnumpy._core.multiarray\nscalar\nas.", "numpy._core.multiarray.scalar"),
        // This pickle makes an object of a known class with NEWOBJ, which is not allowed for the class.
        (b"}X\x03\x00\x00\x00cfg]cbuiltins\nset\n)\x81as.", "builtins.set"),
    ] {
        let expected = DecodeError::Forbidden { symbol: symbol.into(), path: "cfg[0]".into() };
        assert_eq!(decoded(bytes), Err(expected));
    }
}

#[test]
fn object_with_unlisted_argument_is_an_error() {
    let bytes = b"ccollections\ndefaultdict\ncos\nsystem\n\x85R.";
    let expected = DecodeError::Forbidden { symbol: "os.system".into(), path: "args[0]".into() };
    assert_eq!(decoded(bytes), Err(expected));
}

#[test]
fn unlisted_objects_can_be_dropped() {
    let bytes = b"}(X\x01\x00\x00\x00acos\nx\nX\x01\x00\x00\x00b](cos\ny\nK\x01eK\x02K\x03u.";
    let decoded = decode_with(read(bytes).root(), Unknown::Drop, &mut |_| Ok(None)).unwrap();
    assert_eq!(decoded.value.to_string(), "{'b': [None, 1], 2: 3}");
    let dropped: Vec<_> = decoded.dropped.iter().map(|d| (&*d.path, &*d.symbol)).collect();
    assert_eq!(dropped, [("a", "os.x"), ("b[0]", "os.y")]);

    let whole = decode_with(read(b"cos\nx\n.").root(), Unknown::Drop, &mut |_| Ok(None)).unwrap();
    assert_eq!((whole.value, whole.dropped.len()), (Value::None, 1));
}

#[test]
fn unlisted_objects_can_be_replaced() {
    let replaced = |bytes: &[u8]| {
        let mut symbols = Vec::new();
        let mut unknowns = |symbol| {
            symbols.push(symbol);
            symbols.len() as u32
        };
        let value = decode_replacing::<u32, Infallible>(read(bytes).root(), &mut |_| Ok(None), &mut unknowns);
        (value.map(|value| value.to_string()), symbols)
    };
    let (value, symbols) = replaced(b"}(X\x01\x00\x00\x00acos\nx\nX\x01\x00\x00\x00b](cos\ny\nK\x01eK\x02K\x03u.");
    assert_eq!(value.unwrap(), "{'a': <1>, 'b': [<2>, 1], 2: 3}");
    assert_eq!(symbols, ["os.x", "os.y"]);
    // The object with an unlisted argument is replaced as a whole.
    let (value, symbols) = replaced(b"ccollections\ndefaultdict\ncos\nsystem\n\x85R.");
    assert_eq!((value.unwrap().as_str(), symbols.as_slice()), ("<1>", &["os.system".to_owned()][..]));
    // A dict key cannot be replaced, so the dict is replaced.
    assert_eq!(replaced(b"]}cos\nx\nK\x01sa.").0.unwrap(), "[<1>]");
}

#[test]
fn known_calls_with_unusual_arguments_are_errors() {
    for bytes in [
        &b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."[..],
        b"cbuiltins\nset\n]\x85R}b.",
        b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
        b"c_codecs\nencode\nX\x03\x00\x00\x00\xe2\x82\xacX\x06\x00\x00\x00latin1\x86R.",
        b"ccollections\nOrderedDict\n]\x85R.",
    ] {
        assert!(matches!(decoded(bytes), Err(DecodeError::Malformed { .. })), "{bytes:?}");
    }
}

/// A reference to an unlisted object takes two bytes of a pickle, but each replacement has a copy of the name.
#[test]
fn copies_of_a_long_unlisted_name_count_as_work() {
    let name_bytes = 1 << 20;
    let mut bytes = b"](cos\n".to_vec();
    bytes.extend(b"x".repeat(name_bytes));
    bytes.extend(b"\nq\x00");
    bytes.extend(b"h\x00".repeat(10_000));
    bytes.extend(b"e.");
    let mut copied = 0;
    let mut unknowns = |symbol: String| {
        copied += symbol.len();
        0
    };
    let value = decode_replacing::<u32, Infallible>(read(&bytes).root(), &mut |_| Ok(None), &mut unknowns);
    assert!(matches!(value, Err(DecodeError::Limit { .. })), "{value:?}");
    assert!(copied < 1 << 26, "{copied}");
}

/// A `torch.Size` made of a long shared tuple takes only five bytes of a pickle, so each `torch.Size` must not copy the
/// tuple.
#[test]
fn long_sizes_are_not_copied() {
    let mut bytes = b"ctorch\nSize\nq\x000(".to_vec();
    bytes.extend(b"K\x01".repeat(10_000));
    bytes.extend(b"t\x85q\x010(");
    bytes.extend(b"h\x00h\x01R".repeat(10_000));
    bytes.extend(b"l.");
    let last = bytes.len() - 2;
    bytes[last] = b't';
    let pickle = read(&bytes);
    let size = pickle.root().as_tuple().unwrap().get(0).unwrap();
    assert_eq!((size.as_dims(), size.to_dims().unwrap().len()), (None, 10_000));
}

fn opcodes() -> impl Strategy<Value = Vec<u8>> {
    let op = proptest::sample::select(
        &b"(012NK\x88G)\x85\x86\x87t]aE}su\x8f\x90\x91R\x81\x92bQq\x94h\x93\x00\x01\x02\x8c"[..],
    );
    let global = proptest::sample::select(vec![
        b"ctorch\nSize\n".to_vec(),
        b"ccollections\nOrderedDict\n".to_vec(),
        b"c__builtin__\ngetattr\n".to_vec(),
        b"cargparse\nNamespace\n".to_vec(),
        b"h\x00".to_vec(),
        b"q\x00".to_vec(),
    ]);
    let piece = prop_oneof![6 => op.prop_map(|op| vec![op]), 1 => global];
    proptest::collection::vec(piece, 0..80).prop_map(|pieces| pieces.concat())
}

/// A visitor that replaces every second built object and every third call by a row, so that nodes are freed.
struct VisitSome(u32);

impl Visitor for VisitSome {
    fn build(&mut self, _: (&str, &str), args: Ref<'_>, state: Ref<'_>) -> Result<Option<Row>, String> {
        _ = (args.describe(), state.describe());
        self.0 += 1;
        Ok(self.0.is_multiple_of(2).then_some(Row { kind: 0, index: self.0 }))
    }

    fn reduce(&mut self, _: (&str, &str), _: Ref<'_>) -> Result<Option<Row>, String> {
        self.0 += 1;
        Ok(self.0.is_multiple_of(3).then_some(Row { kind: 1, index: self.0 }))
    }
}

fn survives(bytes: &[u8]) {
    if let Ok((pickle, len)) = parse(bytes, &mut NoVisitor) {
        assert!(len <= bytes.len() && pickle.live_nodes() <= bytes.len());
        _ = decode(pickle.root(), &mut |_| Ok(None)).map(|value| value.to_string());
        _ = decode_with(pickle.root(), Unknown::Drop, &mut |_| Ok(None));
    }
    if let Ok((pickle, _)) = parse(bytes, &mut VisitSome(0)) {
        _ = decode(pickle.root(), &mut |_| Ok(None));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        survives(&bytes);
    }

    #[test]
    fn random_opcodes_never_panic(mut bytes in opcodes()) {
        bytes.push(b'.');
        survives(&bytes);
        // In this form the opcodes cause fewer errors, so far more programs run to their end.
        bytes.insert(0, b'(');
        bytes.insert(bytes.len() - 1, b't');
        survives(&bytes);
    }

    #[test]
    fn damaged_pickles_never_panic(which in 0..4usize, at in any::<proptest::sample::Index>(), byte: u8) {
        let mut bytes = EVERYTHING[which].to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        survives(&bytes);
    }
}
