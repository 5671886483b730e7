//! Tests of reports about large and hostile checkpoints. The checkpoints consist of headers alone.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, json};

use crate::catalog::{Catalog, Chunk, ChunkTable, Sharding};
use crate::layout::distinct_tiles::{SharedTensor, shards};
use crate::layout::{DeviceMesh, Placement, TensorDim};
use crate::options::InspectOptions;
use crate::{Checkpoint, Result};

/// Writes a safetensors file with the header of these bf16 tensors, and a hole instead of their data.
fn write_header(path: &Path, tensors: &[(String, Vec<u64>)]) {
    let mut header = Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<u64>();
        header.insert(name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] }));
    }
    let header = serde_json::Value::from(header).to_string();
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
}

/// The tensors of a model with the architecture of Llama 3.
fn llama(layers: u64, hidden: u64, intermediate: u64, keys: u64, vocabulary: u64) -> Vec<(String, Vec<u64>)> {
    let mut tensors = vec![(String::from("model.embed_tokens.weight"), vec![vocabulary, hidden])];
    for layer in 0..layers {
        let parts = [
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![keys, hidden]),
            ("self_attn.v_proj", vec![keys, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("mlp.gate_proj", vec![intermediate, hidden]),
            ("mlp.up_proj", vec![intermediate, hidden]),
            ("mlp.down_proj", vec![hidden, intermediate]),
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
        ];
        tensors.extend(parts.map(|(part, shape)| (format!("model.layers.{layer}.{part}.weight"), shape)));
    }
    tensors.push((String::from("model.norm.weight"), vec![hidden]));
    tensors.push((String::from("lm_head.weight"), vec![vocabulary, hidden]));
    tensors
}

/// Distributes all tensors of a catalog over a mesh.
fn distribute(catalog: &mut Catalog, mesh: &str, placements: &[Placement]) {
    let mesh = DeviceMesh::parse(mesh).unwrap();
    let id = catalog.intern_mesh(mesh.clone());
    for entry in &mut catalog.tensors {
        let fits = |placement: &Placement| match placement.sharded_dim() {
            Some(dim) if dim.0 >= entry.shape.len() => Placement::Replicate,
            _ => *placement,
        };
        let shared = SharedTensor::from(placements.iter().map(fits).collect::<Vec<_>>());
        let sharding = Sharding { mesh: id, shared };
        let location = entry.chunks.location(0);
        let mut chunks = ChunkTable::new(entry.shape.len());
        let on_mesh = crate::layout::distinct_tiles::MeshPlacement { mesh: &mesh, shared: &sharding.shared };
        for (tile, ranks) in shards(&entry.shape, on_mesh).unwrap() {
            for rank in ranks {
                let tile = tile.clone();
                chunks.push(Chunk { tile, location, strides: None, rank: Some(rank), view: None });
            }
        }
        entry.chunks = chunks;
        entry.sharding = Some(Box::new(sharding));
    }
}

fn report(checkpoint: &Checkpoint) -> Result<String> {
    checkpoint.inspect(&InspectOptions::default())?.to_html()
}

#[test]
fn report_of_405b_parameters_on_1024_ranks_is_small() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensors = llama(126, 16384, 53248, 1024, 128_256);
    assert_eq!(tensors.len(), 1137);
    write_header(&path, &tensors);
    let mut checkpoint = Checkpoint::open(&path).unwrap();
    distribute(
        &mut checkpoint.inner.catalog,
        "dp=128,tp=8",
        &[Placement::Shard(TensorDim(0)), Placement::Shard(TensorDim(1))],
    );
    let page = report(&checkpoint).unwrap();
    assert!(page.len() < 250_000, "{}", page.len());
    assert!(page.contains("model.layers.{0..125}.mlp.up_proj.weight"));
    assert!(page.contains("1024 ranks hold 811.7"), "replicas of the norms are counted");
    assert!(page.contains("All ranks hold equally much."));
    assert!(page.contains("Dim 0 has 128 parts, which are drawn as 32 bands."));
    distribute(&mut checkpoint.inner.catalog, "dp=1000", &[Placement::Shard(TensorDim(0))]);
    let page = report(&checkpoint).unwrap();
    assert!(page.len() < 250_000, "{}", page.len());
    assert!(page.contains("Each bar shows 16 ranks") && page.contains("empty shards"));
    let table = checkpoint.inspect(&InspectOptions::default()).unwrap().tensor_table();
    assert_eq!(table.lines().count(), 1 + 12 + 1, "{table}");
}

#[test]
fn report_of_many_unequal_tensors_is_limited() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensors: Vec<(String, Vec<u64>)> = (0..20_000).map(|at| (format!("a.{at}.b"), vec![1 + at])).collect();
    write_header(&path, &tensors);
    let page = report(&Checkpoint::open(&path).unwrap()).unwrap();
    assert!(page.len() < 1_000_000, "{}", page.len());
    assert!(page.contains("19000 more rows are not shown."));
}

#[test]
fn names_with_markup_are_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let hostile = "<script>alert(1)</script>.\"><img src=x onerror=alert(1)>.'.&lt;.\u{202e}.{0..3}";
    let deep = format!("{hostile}.{}", "x.".repeat(5000));
    let tensors: Vec<(String, Vec<u64>)> =
        [hostile, &deep, "", ".", "a..b"].iter().map(|name| ((*name).to_owned(), vec![3])).collect();
    write_header(&path, &tensors);
    let page = report(&Checkpoint::open(&path).unwrap()).unwrap();
    assert!(!page.contains("<script") && !page.contains("<img"), "{page}");
    assert!(!page.contains('\u{202e}'));
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
}

#[test]
fn equal_tensors_are_grouped_and_others_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut tensors: Vec<(String, Vec<u64>)> = (0..6).map(|at| (format!("layers.{at}.w"), vec![4])).collect();
    tensors[3].1 = vec![5];
    tensors.push((String::from("norm"), vec![4]));
    write_header(&path, &tensors);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let names = |options: &InspectOptions| -> Vec<String> {
        let table = checkpoint.inspect(options).unwrap().tensor_table();
        table.lines().skip(1).map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
    };
    let options = InspectOptions::default();
    assert_eq!(names(&options), ["layers.{0..2,4,5}.w", "layers.3.w", "norm", "total"]);
    let by_size = InspectOptions { sort: crate::options::TensorOrder::Size, ..options.clone() };
    assert_eq!(names(&by_size), ["layers.{0..2,4,5}.w", "layers.3.w", "norm", "total"]);
    let all = InspectOptions { all: true, ..by_size };
    assert_eq!(names(&all)[..2], ["layers.3.w", "layers.0.w"]);
    let selected = InspectOptions { tensor: vec![String::from("layers")], ..options };
    assert_eq!(names(&selected).len(), 6);
}
