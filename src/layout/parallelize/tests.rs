use super::*;
use crate::layout::{DeviceMesh, MeshDim};

fn mesh(text: &str) -> DeviceMesh {
    DeviceMesh::parse(text).unwrap()
}

fn rule(pattern: &str, style: &str) -> StyleRule {
    StyleRule { pattern: Pattern::parse(pattern).unwrap(), style: style.parse().unwrap(), origin: pattern.to_owned() }
}

fn plan(mesh: &DeviceMesh, rules: &[(&str, &str)]) -> ParallelizePlan {
    let roles = MeshRoles::resolve(mesh, &RoleNames::default()).unwrap();
    ParallelizePlan { styles: rules.iter().map(|(pattern, style)| rule(pattern, style)).collect(), family: None, roles }
}

fn parameters<'a>(named: &[(&str, &'a [u64])]) -> Vec<Parameter<'a>> {
    named
        .iter()
        .map(|(name, shape)| Parameter {
            name: (*name).to_owned(),
            shape,
            shape_origin: ShapeOrigin::Global,
            kind: ParameterKind::Parameter,
        })
        .collect()
}

/// Displays placements as `_S(0,2),S(0)`, followed by the dims of a slice, or `plain`.
fn text(placed: &ParameterPlacement) -> String {
    let Some(shared) = &placed.shared else { return String::from("plain") };
    let list: Vec<String> = shared.placements.iter().map(ToString::to_string).collect();
    let slice: Vec<String> = shared.slice.iter().flatten().map(|MeshDim(dim)| format!(" on {dim}")).collect();
    list.join(",") + &slice.concat()
}

fn bind(
    at: &str,
    rules: &[(&str, &str)],
    named: &[(&str, &[u64])],
    order: ParameterOrder,
) -> Result<Vec<String>, PlanError> {
    let mesh = mesh(at);
    let placed = plan(&mesh, rules).bind(&mesh, &parameters(named), order)?;
    Ok(placed.iter().map(text).collect())
}

const LINEAR: &[(&str, &[u64])] = &[("a.weight", &[4, 6]), ("a.bias", &[4])];

#[test]
fn fsdp_shards_dim_0_after_tensor_parallelism() {
    let of = |mesh: &str, style: &str| bind(mesh, &[("a", style)], LINEAR, ParameterOrder::Unknown).unwrap();
    assert_eq!(of("tp=2", "colwise"), ["S(0)", "S(0)"]);
    assert_eq!(of("tp=2", "rowwise"), ["S(1)", "R"]);
    assert_eq!(of("dp=3,tp=2", "colwise"), ["_S(0,2),S(0)", "_S(0,2),S(0)"]);
    assert_eq!(of("dp=3,tp=2", "rowwise"), ["S(0),S(1)", "S(0),R"]);
    assert_eq!(of("dp=3,tp=2", "sequence"), ["S(0),R", "S(0),R"]);
    assert_eq!(of("tp=2,dp=3", "colwise"), ["S(0),S(0)", "S(0),S(0)"]);
    assert_eq!(of("tp=2,dp=3", "rowwise"), ["S(1),S(0)", "R,S(0)"]);
    assert_eq!(of("dp=3,tp=1", "colwise"), ["S(0),S(0)", "S(0),S(0)"]);
    assert_eq!(of("dp_replicate=2,dp_shard=3,tp=2", "colwise"), ["R,_S(0,2),S(0)", "R,_S(0,2),S(0)"]);
    assert_eq!(of("dp_replicate=2,tp=2", "colwise"), ["R,S(0)", "R,S(0)"]);
}

#[test]
fn parameter_without_style_is_sharded_by_fsdp_only() {
    let named: &[(&str, &[u64])] = &[("a.weight", &[4, 6]), ("b.weight", &[4]), ("b.scale", &[])];
    let of = |mesh: &str| bind(mesh, &[("a", "rowwise")], named, ParameterOrder::Unknown).unwrap();
    assert_eq!(of("tp=2"), ["S(1)", "plain", "plain"]);
    assert_eq!(of("dp=3,tp=2"), ["S(0),S(1)", "S(0),R on 0", "R,R on 0"]);
    assert_eq!(of("dp_replicate=2,dp_shard=3,tp=2"), ["R,S(0),S(1)", "R,S(0),R on 0 on 1", "R,R,R on 0 on 1"]);
    assert_eq!(of("tp=2,dp_shard=3,dp_replicate=2")[1], "R,S(0),R on 1 on 2");
    // The style `none` excludes the module `b`, even if a later pattern matches it.
    let left = [("b", "none"), ("*", "rowwise")];
    assert_eq!(bind("dp=3,tp=2", &left, named, ParameterOrder::Unknown).unwrap(), of("dp=3,tp=2"));
    // Without a plan, FSDP shards every parameter that has dims.
    assert_eq!(bind("dp=4", &[], named, ParameterOrder::Unknown).unwrap(), ["S(0)", "S(0)", "R"]);
    assert_eq!(bind("dp_replicate=2,dp=4", &[], named, ParameterOrder::Unknown).unwrap()[0], "R,S(0)");
    // A buffer stays plain, unless a style matches it.
    let mesh = mesh("dp=3,tp=2");
    let mut buffers = parameters(named);
    buffers.iter_mut().for_each(|parameter| parameter.kind = ParameterKind::Buffer);
    let placed = plan(&mesh, &[("a", "rowwise")]).bind(&mesh, &buffers, ParameterOrder::Unknown).unwrap();
    assert_eq!(placed.iter().map(text).collect::<Vec<_>>(), ["S(0),S(1)", "plain", "plain"]);
}

#[test]
fn fused_weight_is_sharded_by_block_or_replicated() {
    let named: &[(&str, &[u64])] = &[("a.weight", &[9, 6]), ("a.bias", &[9]), ("b.weight", &[8, 6])];
    let of = |at: &str, style: &str| {
        let mesh = mesh(at);
        let placed = plan(&mesh, &[("*", style)]).bind(&mesh, &parameters(named), ParameterOrder::Unknown).unwrap();
        placed.iter().map(|placed| (text(placed), placed.uncut)).collect::<Vec<_>>()
    };
    let odd = Some(UncutReason::OddBlocks { blocks: 3, size: 8 });
    let placed = |text: &str, uncut| (text.to_owned(), uncut);
    // A block of 3 does not divide over 2 ranks, which is allowed. 8 does not divide into 3 blocks.
    assert_eq!(of("tp=2", "colwise(3)"), [placed("_S(0,3)", None), placed("_S(0,3)", None), placed("R", odd)]);
    assert_eq!(of("tp=2", "rowwise(3)"), [placed("_S(1,3)", None), placed("R", None), placed("_S(1,3)", None)]);
    assert_eq!(of("tp=2", "colwise-conv1d(3)")[..2], [placed("_S(1,3)", None), placed("_S(0,3)", None)]);
    // FSDP would split after tensor parallelism, but its placement is evaluated first.
    let within = Some(UncutReason::BlocksWithinFsdp);
    assert_eq!(
        of("dp=2,tp=2", "colwise(3)"),
        [placed("R,_S(0,3)", within), placed("R,_S(0,3)", within), placed("S(0),R", odd)]
    );
    assert_eq!(of("tp=2,dp=2", "colwise(3)")[0], placed("_S(0,3),S(0)", None));
    assert_eq!(of("dp=2,tp=1", "colwise(3)")[0], placed("S(0),_S(0,3)", None));
    assert_eq!(of("dp=2,tp=2", "colwise-conv1d(3)")[0], placed("S(0),_S(1,3)", None));
}

#[test]
fn pattern_matches_module_or_parameter_and_the_first_wins() {
    let named: &[(&str, &[u64])] =
        &[("l.0.a.weight", &[4, 4]), ("l.0.a.b.weight", &[4, 4]), ("l.0.experts.up", &[3, 4, 4])];
    let of = |rules: &[(&str, &str)]| bind("tp=2", rules, named, ParameterOrder::Unknown);
    assert_eq!(of(&[("l.*.a", "colwise")]).unwrap(), ["S(0)", "plain", "plain"], "not what is below it");
    assert_eq!(of(&[("l.*.experts.up", "colwise")]).unwrap(), ["plain", "plain", "S(1)"]);
    assert_eq!(of(&[("l.0.a", "rowwise"), ("**", "colwise")]).unwrap(), ["S(1)", "S(0)", "S(1)"]);
    let error = of(&[("l.*.a", "colwise"), ("l.*.c", "colwise")]).unwrap_err();
    assert!(matches!(&error, PlanError::Unmatched { pattern, .. } if pattern == "l.*.c"), "{error}");
    assert_eq!(bind("tp=2", &[(".", "colwise")], &[("weight", &[4, 4])], ParameterOrder::Unknown).unwrap(), ["S(0)"]);
}

const MLP: &[(&str, &[u64])] = &[
    ("mlp.up.weight", &[8, 4]),
    ("mlp.up.bias", &[8]),
    ("mlp.norm.weight", &[8]),
    ("mlp.down.weight", &[4, 8]),
    ("mlp.down.bias", &[4]),
    ("mlp.last.weight", &[4, 4]),
];

#[test]
fn pairwise_uses_registration_order() {
    let of = |order| bind("tp=2", &[("mlp", "pairwise")], MLP, order);
    // The norm is not a linear module, and the third linear module has no partner.
    assert_eq!(of(ParameterOrder::Registered).unwrap(), ["S(0)", "S(0)", "plain", "S(1)", "R", "plain"]);
    let error = of(ParameterOrder::Unknown).unwrap_err();
    assert!(matches!(error, PlanError::UnknownOrder { .. }), "{error}");
    assert!(error.to_string().contains("up, down, last"), "{error}");
    // The last child of a pairwise module may have a style of its own.
    let rules = [("mlp", "pairwise"), ("mlp.last", "rowwise")];
    assert_eq!(bind("tp=2", &rules, MLP, ParameterOrder::Registered).unwrap()[5], "S(1)");
    let rules = [("mlp.up", "replicate"), ("mlp", "pairwise")];
    assert_eq!(bind("tp=2", &rules, MLP, ParameterOrder::Registered).unwrap()[..4], ["R", "R", "plain", "S(1)"]);
}

#[test]
fn children_of_sequential_are_sorted_by_number() {
    let named: &[(&str, &[u64])] = &[
        ("net.10.weight", &[4, 4]),
        ("net.0.weight", &[4, 4]),
        ("net.2.weight", &[4, 4]),
        ("net.4.weight", &[4, 4]),
        ("2.weight", &[4, 4]),
        ("0.weight", &[4, 4]),
    ];
    let of = |rule: &str| bind("tp=2", &[(rule, "pairwise")], named, ParameterOrder::Unknown).unwrap();
    assert_eq!(of("net"), ["S(1)", "S(0)", "S(1)", "S(0)", "plain", "plain"]);
    assert_eq!(of("."), ["plain", "plain", "plain", "plain", "S(1)", "S(0)"]);
}

#[test]
fn pairwise_with_fewer_than_two_children_is_an_error() {
    let error = bind("tp=2", &[("*", "pairwise")], &[("mlp.up.weight", &[4, 4])], ParameterOrder::Unknown).unwrap_err();
    assert!(matches!(&error, PlanError::NoPair { module, found: 1, .. } if module == "mlp"), "{error}");
    let error = bind("tp=2", &[("mlp.up", "pairwise")], MLP, ParameterOrder::Registered).unwrap_err();
    assert!(matches!(&error, PlanError::NoPair { found: 0, .. }), "{error}");
    let error = bind("tp=2", &[("mlpp", "pairwise")], MLP, ParameterOrder::Registered).unwrap_err();
    assert!(matches!(&error, PlanError::Unmatched { .. }), "{error}");
}

/// The weights of `{tok: nn.Embedding(10, 6), fc1: nn.Linear(6, 8), fc2: nn.Linear(8, 6)}`; PyTorch 2.0 pairs `fc1` and
/// `fc2`.
const BESIDE_EMBEDDING: &[(&str, &[u64])] = &[
    ("tok.weight", &[10, 6]),
    ("fc1.weight", &[8, 6]),
    ("fc1.bias", &[8]),
    ("fc2.weight", &[6, 8]),
    ("fc2.bias", &[6]),
];

#[test]
fn pairwise_with_sizes_that_do_not_fit_is_an_error() {
    let error = bind("tp=2", &[(".", "pairwise")], BESIDE_EMBEDDING, ParameterOrder::Registered).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("tok has 10 outputs and fc1 has 6 inputs"), "{text}");
}

#[test]
fn pairwise_skips_embeddings_and_excluded_modules() {
    let pairs = ["S(0)", "S(0)", "S(1)", "R"];
    for (style, token) in [("none", "plain"), ("rowwise-embedding", "S(0)"), ("colwise_embedding", "S(1)")] {
        for rules in [[(".", "pairwise"), ("tok", style)], [("tok", style), (".", "pairwise")]] {
            let placed = bind("tp=2", &rules, BESIDE_EMBEDDING, ParameterOrder::Registered).unwrap();
            assert_eq!(placed[0], token, "{rules:?}");
            assert_eq!(placed[1..], pairs, "{rules:?}");
        }
    }
}

#[test]
fn pairwise_with_names_pairs_these_children() {
    let of = |style: &str| bind("tp=2", &[(".", style)], BESIDE_EMBEDDING, ParameterOrder::Unknown);
    assert_eq!(of("pairwise(fc1,fc2)").unwrap(), ["plain", "S(0)", "S(0)", "S(1)", "R"]);
    assert_eq!(of("pairwise(fc2,fc1)").unwrap(), ["plain", "S(1)", "R", "S(0)", "S(0)"]);
    // The sizes of named pairs are not compared.
    assert_eq!(of("pairwise(tok,fc1)").unwrap(), ["S(0)", "S(1)", "R", "plain", "plain"]);
    let error = of("pairwise(fc1,fc3)").unwrap_err();
    assert!(
        matches!(&error, PlanError::NoSuchChild { child, children, .. }
        if child == "fc3" && children == &["tok", "fc1", "fc2"]),
        "{error}"
    );
    assert!(matches!(of("pairwise(a,b)").unwrap_err(), PlanError::NoSuchChild { child, .. } if child == "a"));
}

#[test]
fn pairwise_notes_weights_without_a_bias() {
    let named: &[(&str, &[u64])] = &[("m.tok.weight", &[6, 6]), ("m.fc1.weight", &[8, 6]), ("m.fc1.bias", &[8])];
    let mesh = mesh("tp=2");
    let notes = |style: &str| {
        let placed = plan(&mesh, &[("m", style)]).bind(&mesh, &parameters(named), ParameterOrder::Registered).unwrap();
        placed.iter().map(|placement| placement.note.is_some()).collect::<Vec<_>>()
    };
    assert_eq!(notes("pairwise"), [true, false, false]);
    assert_eq!(notes("pairwise(tok,fc1)"), [false, false, false]);
}

/// If FSDP also shards the first module, the local shard of a rank has fewer outputs than the module has after tensor
/// parallelism.
#[test]
fn pairwise_does_not_compare_local_shards_of_fsdp() {
    let named: &[(&str, &[u64])] = &[("0.weight", &[2, 6]), ("2.weight", &[3, 4])];
    let mesh = mesh("dp=2,tp=2");
    let mut shards = parameters(named);
    let bind = |parameters: &[Parameter<'_>]| {
        plan(&mesh, &[(".", "pairwise")]).bind(&mesh, parameters, ParameterOrder::Unknown).is_ok()
    };
    assert!(!bind(&shards));
    shards.iter_mut().for_each(|parameter| parameter.shape_origin = ShapeOrigin::LocalShard);
    assert!(bind(&shards));
}

#[test]
fn tensors_of_ddp_are_on_the_other_mesh_dims() {
    let named: &[(&str, &[u64])] = &[("fc1.weight", &[8, 6]), ("norm.weight", &[6])];
    let rules = [("fc1", "colwise")];
    assert_eq!(bind("ddp=2,tp=2", &rules, named, ParameterOrder::Unknown).unwrap(), ["R,S(0) on 1", "plain"]);
    assert_eq!(bind("tp=2,ddp=2", &rules, named, ParameterOrder::Unknown).unwrap(), ["S(0),R on 0", "plain"]);
    let three = bind("ddp=2,dp=2,tp=2", &rules, named, ParameterOrder::Unknown).unwrap();
    assert_eq!(three, ["R,_S(0,2),S(0) on 1 on 2", "R,S(0),R on 1"]);
    let given = RoleNames { ddp: Some("dp".into()), ..RoleNames::default() };
    let roles = MeshRoles::resolve(&mesh("dp=2,tp=2"), &given).unwrap();
    assert_eq!((roles.tp, roles.fsdp, roles.ddp), (Some(MeshDim(1)), None, Some(MeshDim(0))));
}

#[test]
fn mesh_roles_are_found_by_usual_or_given_names() {
    let of = |at: &str, tp: &str, fsdp: &str, replicate: &str| {
        let name = |name: &str| (!name.is_empty()).then(|| name.to_owned());
        let given = RoleNames { tp: name(tp), fsdp: name(fsdp), replicate: name(replicate), ..RoleNames::default() };
        let roles = MeshRoles::resolve(&mesh(at), &given)?;
        Ok([roles.tp, roles.fsdp, roles.replicate].map(|dim| dim.map(|MeshDim(dim)| dim)))
    };
    let error = |at: &str, tp: &str, fsdp: &str| of(at, tp, fsdp, "").map_err(|error: PlanError| error.to_string());
    assert_eq!(of("dp_shard=8,tp=8", "", "", ""), Ok([Some(1), Some(0), None]));
    assert_eq!(of("dp_replicate=2,dp_shard=2,tp=2", "", "", ""), Ok([Some(2), Some(1), Some(0)]));
    assert_eq!(of("dp=2,tp=2", "", "", "dp"), Ok([Some(1), None, Some(0)]));
    assert_eq!(of("dp=2,tp=2", "dp", "tp", ""), Ok([Some(0), Some(1), None]));
    assert_eq!(of("x=2,y=2", "y", "x", ""), Ok([Some(1), Some(0), None]));
    assert_eq!(error("dp=2,tp=2", "tpp", "").unwrap_err(), "options::tp tpp: the mesh has no dim `tpp`, only dp, tp");
    assert_eq!(error("dp=2,pp=2", "", "").unwrap_err(), "the plan does not use mesh dim pp of dp=2,pp=2");
    assert!(error("dp=2,dp_shard=2", "", "").unwrap_err().contains("mesh dim dp of"));
    assert_eq!(error("dp=2,tp=2", "dp", "dp").unwrap_err(), "options::tp and options::fsdp both use mesh dim dp");
    let unnamed = DeviceMesh::new([2_u64].as_slice(), vec![crate::layout::Rank(0), crate::layout::Rank(1)], None);
    assert!(matches!(MeshRoles::resolve(&unnamed.unwrap(), &RoleNames::default()), Err(PlanError::UnnamedMesh { .. })));
}

#[test]
fn styles_without_tp_dim_or_tp_dim_without_styles_are_errors() {
    assert!(matches!(
        bind("dp=2", &[("a", "colwise")], LINEAR, ParameterOrder::Unknown),
        Err(PlanError::NoTensorDim { .. })
    ));
    assert!(matches!(bind("tp=2", &[], LINEAR, ParameterOrder::Unknown), Err(PlanError::NoStyles { .. })));
}

#[test]
fn plan_of_another_family_is_an_error() {
    let mesh = mesh("tp=2");
    let bind_family = |family: &str, named: &[(&str, &[u64])]| {
        let plan = ParallelizePlan { family: Family::named(family), ..plan(&mesh, &[]) };
        plan.bind(&mesh, &parameters(named), ParameterOrder::Unknown)
            .map(|placed| placed.iter().map(text).collect::<Vec<_>>())
    };
    let alike = |family: &str, named: &[(&str, &[u64])]| match bind_family(family, named) {
        Err(PlanError::OtherFamily { similar, .. }) => similar,
        other => panic!("{other:?}"),
    };
    // A plan does not fit a model if only the row of the head matches.
    let gpt2: &[(&str, &[u64])] = &[("h.0.attn.c_attn.weight", &[4, 12]), ("lm_head.weight", &[9, 4])];
    assert_eq!(alike("llama", gpt2), ["gpt2"]);
    assert_eq!(alike("llama", &[("lm_head.weight", &[9, 4])]), Vec::<&str>::new());
    let llama: &[(&str, &[u64])] =
        &[("layers.0.self_attn.q_proj.weight", &[4, 4]), ("layers.0.mlp.up_proj.weight", &[4, 4])];
    assert_eq!(alike("gpt2", llama), ["llama", "mistral", "qwen2"]);
    let norm: &[(&str, &[u64])] = &[llama, &[("layers.0.self_attn.q_norm.weight", &[2])]].concat();
    assert_eq!(alike("gpt2", norm), ["qwen3"]);
    // Buffers of older checkpoints stay plain.
    let masks: &[(&str, &[u64])] = &[("h.0.attn.c_attn.bias", &[12]), ("h.0.attn.bias", &[1, 1, 8, 8])];
    assert_eq!(bind_family("GPT2", masks).unwrap(), ["_S(0,3)", "plain"]);
    // The fused weights of families that are similar to llama.
    let fused: &[(&str, &[u64])] =
        &[("model.layers.0.self_attn.qkv_proj.weight", &[8, 4]), ("x.layers.1.mlp.gate_up_proj.weight", &[8, 4])];
    assert_eq!(bind_family("llama", fused).unwrap(), ["R", "_S(0,2)"]);
}

#[test]
fn every_built_in_plan_parses_and_is_found_by_name() {
    for family in Family::all() {
        assert!(!family.candidates().is_empty() && Family::named(family.name).is_some());
        assert!(family.candidates().iter().all(|candidate| matches!(candidate.rule.style, RuleStyle::Single(_))));
    }
    assert!(Family::named("llama9").is_none());
}
