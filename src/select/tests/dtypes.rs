//! Tests of casts to the dtypes that the user selects.

use super::*;

/// Returns a catalog of the state dict [`training`], with additional tensors of other dtypes and shapes in the model.
fn typed() -> Catalog {
    let mut source = catalog(training());
    let mut add = |name: &str, dtype, shape: &[u64]| {
        let entry = TensorEntry::whole(Fqn::from(name), dtype, Dims::from_slice(shape), FileId(0), 0);
        let id = source.push_tensor(entry);
        let Value::Dict(top) = &mut source.state else { unreachable!() };
        let Value::Dict(model) = &mut top.entries[0].1 else { unreachable!() };
        model.entries.push((text(name), Value::Tensor(id)));
    };
    add("half", Dtype::F16, &[2]);
    add("double", Dtype::F64, &[2]);
    add("scale", Dtype::F32, &[]);
    add("ids", Dtype::I64, &[2]);
    add("mask", Dtype::Bool, &[2]);
    add("freqs", Dtype::C64, &[2]);
    add("quant", Dtype::F8E4m3fn, &[2]);
    source
}

fn dtypes(rules: &[&str]) -> (BTreeMap<String, Dtype>, Selected) {
    let source = typed();
    let rules = rules.iter().map(|rule| DtypeRule::parse(rule).unwrap()).collect();
    let selected = select(&source, &NameOptions { dtypes: rules, ..renaming(&["^extra=more"]) }).unwrap();
    let all = state_dict::all_tensors(&selected.catalog.state).into_iter();
    (all.map(|(fqn, id)| (fqn.to_string(), selected.catalog.tensor(id).dtype)).collect(), selected)
}

#[test]
fn dtype_without_pattern_casts_weights_only() {
    let (found, selected) = dtypes(&["bf16"]);
    let kept = |name: &str| found[&format!("model.{name}")];
    assert_eq!((kept("layers.0.w"), kept("half"), kept("head.w")), (Dtype::Bf16, Dtype::Bf16, Dtype::Bf16));
    assert_eq!((kept("double"), kept("scale"), kept("ids")), (Dtype::F64, Dtype::F32, Dtype::I64));
    assert_eq!((kept("mask"), kept("freqs"), kept("quant")), (Dtype::Bool, Dtype::C64, Dtype::F8E4m3fn));
    assert_eq!(found["optim.state.layers.0.w.exp_avg"], Dtype::F32);
    assert_eq!(selected.casts.cast, [(Dtype::F32, Dtype::Bf16, 3), (Dtype::F16, Dtype::Bf16, 1)]);
    assert_eq!(
        selected.casts.kept,
        [(KeptReason::Scalar, 1), (KeptReason::OptimizerState, 6), (KeptReason::Double, 1), (KeptReason::NotFloat, 3)]
    );
    assert_eq!(
        selected.notes,
        [
            "options::dtype does not cast 1 tensor (0-d), 6 tensors (optimizer state), 1 tensor (f64), 3 tensors (not float)"
        ]
    );
    assert_eq!(selected.catalog.tensors.len(), typed().tensors.len());
}

#[test]
fn first_matching_pattern_decides() {
    let (found, _) = dtypes(&["bf16", "layers.0=f32", "layers=f16", "model.double=f32", "**.exp_avg=torch.half"]);
    assert_eq!(found["model.layers.0.w"], Dtype::F32);
    assert_eq!(found["model.layers.1.w"], Dtype::F16);
    assert_eq!(found["model.head.w"], Dtype::Bf16);
    assert_eq!(found["model.double"], Dtype::F32);
    // The pattern matches the state's own name, not the name of its parameter.
    assert_eq!(found["optim.state.layers.0.w.exp_avg"], Dtype::F16);
    assert_eq!(found["optim.state.layers.0.w.exp_avg_sq"], Dtype::F32);
    let (found, selected) = dtypes(&["{ids,scale,mask,quant}=bf16"]);
    assert_eq!((found["model.ids"], found["model.scale"]), (Dtype::I64, Dtype::F32));
    assert_eq!(selected.casts.kept, [(KeptReason::Scalar, 1), (KeptReason::NotFloat, 2)]);

    // Patterns match old and new names, and any name of a tied tensor.
    let source = catalog(dict(vec![("a.w", t(0)), ("b.w", t(0)), ("c.w", t(1))]));
    let rules = |rules: &[&str]| rules.iter().map(|rule| DtypeRule::parse(rule).unwrap()).collect();
    let options = NameOptions { dtypes: rules(&["new=f16", "b=bf16"]), ..renaming(&["^c=new"]) };
    let selected = select(&source, &options).unwrap();
    assert_eq!(selected.catalog.tensors.iter().map(|entry| entry.dtype).collect::<Vec<_>>(), [Dtype::Bf16, Dtype::F16]);
    // A tensor that is left out is not cast and not counted.
    let options =
        NameOptions { dtypes: rules(&["c=bf16", "f16"]), exclude: patterns(&["c"]), ..NameOptions::default() };
    assert_eq!(select(&source, &options).unwrap().casts.cast, [(Dtype::F32, Dtype::F16, 1)]);
    let (message, _) = error(&source.state, &NameOptions { dtypes: rules(&["f16", "bf16"]), ..NameOptions::default() });
    assert_eq!(message, "options::dtype bf16: expected one dtype without a pattern, found a second one");
}

#[test]
fn every_dtype_name_parses_and_unknown_names_are_errors() {
    for (rule, dtype) in [
        ("bf16", Dtype::Bf16),
        ("bfloat16", Dtype::Bf16),
        ("torch.bfloat16", Dtype::Bf16),
        ("half", Dtype::F16),
        ("fp16", Dtype::F16),
        ("float16", Dtype::F16),
        ("torch.float32", Dtype::F32),
        ("fp32", Dtype::F32),
        ("float", Dtype::F32),
        ("double", Dtype::F64),
        ("float64", Dtype::F64),
        ("float8_e4m3fn", Dtype::F8E4m3fn),
        ("f8_e5m2fnuz", Dtype::F8E5m2fnuz),
    ] {
        let parsed = DtypeRule::parse(rule).unwrap();
        assert_eq!((parsed.dtype, parsed.pattern.is_none()), (dtype, true), "{rule}");
        assert_eq!(DtypeRule::parse(&format!("a.*={rule}")).unwrap().pattern.unwrap().as_str(), "a.*");
    }
    for (rule, message) in [
        ("bf61", "options::dtype bf61: unknown dtype `bf61`"),
        ("a=", "options::dtype a=: unknown dtype ``"),
        ("a=i8", "options::dtype a=i8: tensors cannot be cast to i8"),
        ("f8_e8m0fnu", "options::dtype f8_e8m0fnu: tensors cannot be cast to f8_e8m0fnu"),
        ("c64", "options::dtype c64: tensors cannot be cast to c64"),
    ] {
        let error = DtypeRule::parse(rule).unwrap_err();
        assert_eq!(error.to_string(), message);
        assert!(error.hint().unwrap().contains("f32, f16, bf16"));
    }
    assert!(DtypeRule::parse("=bf16").is_err());
}
