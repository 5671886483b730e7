//! Tests of parallelize plans against the results of `parallelize_module` and `fully_shard` for the same models: mesh,
//! placements, shape and bytes of the local tensor of each rank.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use dtshard::format::torch::{TensorNode, View};
use dtshard::layout::parallelize::{
    Family, MeshRoles, ParallelizePlan, Parameter, ParameterKind, ParameterOrder, ParameterPlacement, RoleNames,
    RuleStyle, ShapeOrigin, StyleRule,
};
use dtshard::layout::{DeviceMesh, MeshDim, Pattern, Placement, Rank, Tile, local_shard};
use safetensors::tensor::TensorView;
use serde_json::Value as Json;

use crate::common::{fixture, succeed};
use crate::rank_file::Opened;

fn truth(family: &str) -> Json {
    serde_json::from_slice(&fs::read(fixture("plans").join(format!("{family}.json"))).unwrap()).unwrap()
}

/// Every model family of the fixtures, with the name of its built-in plan.
const FAMILIES: [(&str, &str); 14] = [
    ("llama", "llama"),
    ("titan", "llama"),
    ("mistral", "mistral"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("mixtral", "mixtral"),
    ("mixtral_hub", "mixtral"),
    ("qwen2_moe", "qwen2-moe"),
    ("qwen2_moe_hub", "qwen2_moe"),
    ("qwen3_moe", "qwen3-moe"),
    ("qwen3_moe_hub", "qwen3_moe"),
    ("gpt_neox", "gpt-neox"),
    ("gpt_neox_hub", "gpt_neox"),
    ("gpt2", "gpt2"),
];

/// The name of a tensor for which PyTorch records placements that differ from the actual placement of its elements.
const MISPLACED: &str = "transformer.h.0.attn.c_attn.bias";

fn text(value: &Json) -> String {
    value.as_str().unwrap().to_owned()
}

fn texts(list: &Json) -> Vec<String> {
    list.as_array().unwrap().iter().map(text).collect()
}

fn numbers(list: &Json) -> Vec<u64> {
    serde_json::from_value(list.clone()).unwrap()
}

/// Returns the mesh in the ground truth `placing` as text, such as `dp=2,tp=2`.
fn mesh_of(placing: &Json) -> String {
    let dims = placing["mesh"].as_array().unwrap().iter();
    dims.map(|dim| format!("{}={}", text(&dim[0]), dim[1])).collect::<Vec<_>>().join(",")
}

/// Returns the name, shape and bytes of each complete tensor of a model. The bytes are computed as in the script that
/// made the fixtures.
fn tensors(truth: &Json) -> Vec<(String, Vec<u64>, Vec<u8>)> {
    let whole = truth["whole"].as_object().unwrap().iter();
    whole
        .map(|(name, about)| {
            let first = truth["tied"][name].as_str().unwrap_or(name);
            let shape = numbers(&about["shape"]);
            let start = crc32fast::hash(first.as_bytes()) % 8192 * 1024;
            let end = start + u32::try_from(shape.iter().product::<u64>()).unwrap();
            #[expect(clippy::cast_precision_loss, reason = "below 2^24")]
            let bytes: Vec<u8> = (start..end).flat_map(|value| (value as f32).to_le_bytes()).collect();
            assert_eq!(Json::from(crc32fast::hash(&bytes)), about["crc32"], "{name}");
            (name.clone(), shape, bytes)
        })
        .collect()
}

/// Writes the complete model to one file.
fn write_model(truth: &Json, path: &Path) {
    let tensors = tensors(truth);
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let shape = shape.iter().map(|size| usize::try_from(*size).unwrap()).collect();
        (name.as_str(), TensorView::new(safetensors::Dtype::F32, shape, bytes).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Returns the tensors of one rank file, by name.
fn found(opened: &Opened) -> BTreeMap<String, TensorNode> {
    let contents = &opened.1;
    let entries = contents.value.as_dict().unwrap().entries.iter();
    let tensor = |id: dtshard::catalog::TensorId| contents.tensors[id.0 as usize].clone();
    entries.map(|(key, value)| (key.as_str().unwrap().to_owned(), tensor(value.tensor_ids()[0]))).collect()
}

/// Asserts that the local tensors of a rank equal the ground truth.
fn assert_rank(opened: &Opened, rank: usize, placing: &Json, what: &str) {
    let found = found(opened);
    let expected = placing["tensors"].as_object().unwrap();
    assert!(found.keys().eq(expected.keys().collect::<std::collections::BTreeSet<_>>()), "{what}");
    for (name, expected) in expected.iter().filter(|(_, expected)| expected.get("as_placed").is_none()) {
        let what = format!("{what}: {name} on rank {rank}");
        let local: &View = match &found[name] {
            TensorNode::Plain(view) => {
                assert_eq!(expected["class"], "Tensor", "{what}");
                view
            }
            TensorNode::Distributed { local, mesh, placements, .. } => {
                assert_eq!(mesh.mesh.names().unwrap(), texts(&expected["mesh_dims"]), "{what}");
                let placements: Vec<String> = placements.iter().map(ToString::to_string).collect();
                assert_eq!(placements, texts(&expected["placements"]), "{what}");
                local
            }
            other @ (TensorNode::Sharded { .. } | TensorNode::Unreadable(_)) => panic!("{what}: {other:?}"),
        };
        let bytes = crate::rank_file::elements(&opened.0, &opened.1, local);
        assert_eq!(Json::from(crc32fast::hash(&bytes)), expected["crc32"][rank], "{what}");
        let shape = numbers(&expected["locals"][rank]);
        assert!(local.sizes.to_vec() == shape || shape.contains(&0) && local.sizes.contains(&0), "{what}");
    }
}

#[test]
fn built_in_plans_give_the_local_tensors_of_pytorch() {
    for (family, plan) in FAMILIES {
        let truth = truth(family);
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model.safetensors");
        write_model(&truth, &model);
        for placing in truth["placings"].as_array().unwrap() {
            let mesh = mesh_of(placing);
            let plan = if mesh.contains("tp") { format!("--plan {plan}") } else { String::from("--fsdp dp") };
            let what = format!("{family} on {mesh}");
            let target: PathBuf = folder.path().join(&mesh);
            succeed("reshard", &[&model, &target], &format!("--to torch-ranks --mesh {mesh} {plan}"));
            let world_size = DeviceMesh::parse(&mesh).unwrap().world_size();
            for rank in 0..world_size {
                let file = target.join(format!("model_world_size_{world_size}_rank_{rank}.pt"));
                assert_rank(&crate::rank_file::read(&file), rank, placing, &what);
            }
        }
    }
}

/// Returns the styles of the toy model. Its embeddings have separate styles, because they are not linear modules.
fn styles() -> ParallelizePlan {
    let rule = |(pattern, style): (&str, &str)| StyleRule {
        pattern: Pattern::parse(pattern).unwrap(),
        style: style.parse::<RuleStyle>().unwrap(),
        origin: pattern.to_owned(),
    };
    let rules = [
        ("colwise.embedding", "colwise-embedding"),
        ("rowwise.embedding", "rowwise-embedding"),
        ("colwise.*", "colwise"),
        ("rowwise.*", "rowwise"),
        ("sequence.*", "sequence"),
    ];
    ParallelizePlan { styles: rules.into_iter().map(rule).collect(), ..ParallelizePlan::default() }
}

fn bind(plan: &ParallelizePlan, mesh: &DeviceMesh, truth: &Json) -> HashMap<String, ParameterPlacement> {
    let tensors = tensors(truth);
    let parameter = |(name, shape, _): &(String, Vec<u64>, Vec<u8>)| (name.clone(), shape.clone());
    let named: Vec<(String, Vec<u64>)> = tensors.iter().map(parameter).collect();
    let parameters: Vec<Parameter<'_>> = named
        .iter()
        .map(|(name, shape)| Parameter {
            name: name.clone(),
            shape,
            shape_origin: ShapeOrigin::Global,
            kind: ParameterKind::Parameter,
        })
        .collect();
    let laid = plan.bind(mesh, &parameters, ParameterOrder::Unknown).unwrap();
    named.into_iter().map(|(name, _)| name).zip(laid).collect()
}

/// Returns the bytes of the elements of a tile. `bytes` has all elements of the tensor, of 4 bytes each.
fn part(tile: &Tile, shape: &[u64], bytes: &[u8]) -> Vec<u8> {
    let mut part = Vec::new();
    let mut index = vec![0_u64; shape.len()];
    for element in bytes.chunks(4) {
        if tile.dims().iter().zip(&index).all(|(dim, at)| dim.iter().any(|range| range.contains(at))) {
            part.extend_from_slice(element);
        }
        for (at, size) in index.iter_mut().zip(shape).rev() {
            *at += 1;
            if *at < *size {
                break;
            }
            *at = 0;
        }
    }
    part
}

/// Each style is tested alone. If FSDP has the inner mesh dim, PyTorch swaps the dims of the mesh. Then the bytes are
/// equal, and the placements are equal on the mesh with swapped dims.
#[test]
fn styles_give_the_placements_of_pytorch() {
    let truth = truth("styles");
    let tensors = tensors(&truth);
    for placing in truth["placings"].as_array().unwrap() {
        let mesh = mesh_of(placing);
        let is_sharded = placing["fully_shard"] == true;
        let swapped = (mesh == "tp=2,dp=2" && is_sharded).then(|| {
            let names = ["dp", "tp"].map(String::from).to_vec();
            DeviceMesh::new([2_u64, 2].as_slice(), [0, 2, 1, 3].map(Rank).to_vec(), Some(names)).unwrap()
        });
        let own = DeviceMesh::parse(&mesh).unwrap();
        for mesh in std::iter::once(own).chain(swapped) {
            let is_in_order = !is_sharded || mesh.names().unwrap()[0] != "tp";
            // Without `fully_shard`, `parallelize_module` runs on the slice `tp`, as within DDP.
            let given =
                RoleNames { ddp: (!is_sharded && mesh.ndim() > 1).then(|| "dp".into()), ..RoleNames::default() };
            let plan = ParallelizePlan { roles: MeshRoles::resolve(&mesh, &given).unwrap(), ..styles() };
            let laid = bind(&plan, &mesh, &truth);
            for (name, shape, bytes) in &tensors {
                let (what, expected) = (format!("{name} on {mesh}"), &placing["tensors"][name]);
                assert_styled(&laid[name], &mesh, expected, is_in_order, &what);
                for (rank, at) in mesh.coordinates() {
                    let whole = vec![Placement::Replicate; mesh.ndim()];
                    let placements = laid[name].shared.as_ref().map_or(&whole, |shared| &shared.placements);
                    let tile = local_shard(shape, mesh.shape(), placements, &at).unwrap();
                    let local = part(&tile, shape, bytes);
                    let rank = rank.0 as usize;
                    assert_eq!(Json::from(crc32fast::hash(&local)), expected["crc32"][rank], "{what}, rank {rank}");
                    let expected = numbers(&expected["locals"][rank]);
                    assert!(tile.sizes().to_vec() == expected || expected.contains(&0) && local.is_empty(), "{what}");
                }
            }
        }
    }
}

/// Asserts that a parameter has the expected class. If `is_in_order` is true, also asserts its mesh dims and its
/// placements.
fn assert_styled(laid: &ParameterPlacement, mesh: &DeviceMesh, expected: &Json, is_in_order: bool, what: &str) {
    let Some(shared) = &laid.shared else {
        assert_eq!(expected["class"], "Tensor", "{what}");
        return;
    };
    assert_ne!(expected["class"], "Tensor", "{what}");
    let names = mesh.names().unwrap();
    let dims = || (0..mesh.ndim()).filter(|dim| shared.slice.as_ref().is_none_or(|dims| dims.contains(&MeshDim(*dim))));
    let known = texts(&expected["mesh_dims"]);
    if is_in_order {
        assert_eq!(dims().map(|dim| names[dim].clone()).collect::<Vec<_>>(), known, "{what}");
    }
    if is_in_order {
        let found = dims().filter(|dim| known.contains(&names[*dim])).map(|dim| shared.placements[dim].to_string());
        assert_eq!(found.collect::<Vec<_>>(), texts(&expected["placements"]), "{what}");
    }
}

/// Every row of a plan matches a parameter of its family, and no other family matches better.
#[test]
fn built_in_plan_is_recognised_by_parameter_names() {
    for (model, plan) in FAMILIES {
        let truth = truth(model);
        let tensors = tensors(&truth);
        let parameters: Vec<Parameter<'_>> = tensors
            .iter()
            .map(|(name, shape, _)| Parameter {
                name: name.clone(),
                shape,
                shape_origin: ShapeOrigin::Global,
                kind: ParameterKind::Parameter,
            })
            .collect();
        let alike = dtshard::layout::parallelize::similar_families(&parameters);
        assert!(alike.contains(&Family::named(plan).unwrap().name), "{model}: {alike:?}");
        let mesh = DeviceMesh::parse("tp=2").unwrap();
        let roles = MeshRoles::resolve(&mesh, &RoleNames::default()).unwrap();
        let laid = ParallelizePlan { styles: Vec::new(), family: Family::named(plan), roles };
        let laid = laid.bind(&mesh, &parameters, ParameterOrder::Unknown).unwrap();
        assert!(laid.iter().all(|laid| laid.shared.is_some() && laid.uncut.is_none()), "{model}: {laid:?}");
    }
}

/// The shards of fused weights consist of several boxes. DCP directories and plain shards store them in pieces.
#[test]
fn fused_weights_survive_every_format() {
    for (family, plan) in [("gpt2", "gpt2"), ("mixtral", "mixtral")] {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model.safetensors");
        write_model(&truth(family), &model);
        for to in ["dcp", "local", "torch-ranks"] {
            for mesh in ["tp=2", "dp=2,tp=3", "tp=2,dp=3"] {
                let target = folder.path().join(format!("{to}.{mesh}"));
                succeed("reshard", &[&model, &target], &format!("--to {to} --mesh {mesh} --plan {plan}"));
                succeed("verify", &[&target, &model], "");
            }
        }
    }
}

/// If no placement can describe the shards of a block, the block is not sharded, and a note says so.
#[test]
fn blocks_under_fsdp_stay_whole_with_a_note() {
    let truth = truth("gpt2");
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.safetensors");
    write_model(&truth, &model);
    let target = folder.path().join("out");
    let run = succeed("reshard", &[&model, &target], "--to torch-ranks --mesh dp=2,tp=2 --plan gpt2");
    assert!(run.stderr.contains(&format!("1 tensor (`{MISPLACED}`) is replicated on dp")), "{}", run.stderr);
    succeed("verify", &[&target, &model], "");
    let shown = crate::common::inspect(&target, "--brief");
    assert_eq!(shown["tensors"][MISPLACED]["placements"], "R,_S(0,3)");
}

/// The documentation lists every row of every built-in plan.
#[test]
fn built_in_plans_match_the_documentation() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/reference/parallelize.md")).unwrap();
    for family in Family::all() {
        assert!(page.contains(&format!("`{}`", family.name)), "{}", family.name);
        for row in family.layers.iter().copied().flatten().chain(family.outside_layers) {
            let cells = format!("| `{}` | `{}` |", row.pattern, row.style);
            assert!(page.contains(&cells), "{}: {cells}", family.name);
        }
    }
    for style in RuleStyle::NAMES {
        assert!(page.contains(&format!("`{style}`")), "{style}");
    }
}
