//! A synthetic checkpoint for benchmarks: Llama 3.1 405B with the state of AdamW, laid out on any mesh.
//!
//! Shapes and offsets count elements. Nothing is on disk, and positions in files are not real. The chunks are those of
//! the placements, so planning does the same work as for a checkpoint of a real job. Tensors are generated one by one,
//! because all chunk tables together would dominate the memory that the benchmark measures.
//!
//! Shapes: `meta-llama/Llama-3.1-405B`, `config.json`; names and state: torchtitan with `torch.optim.AdamW`.

use dtshard::catalog::{Chunk, Dtype, FileLocation, TensorEntry};
use dtshard::layout::distinct_tiles::{HeldTile, SharedTensor};
use dtshard::layout::rules::{Fallback, MeshLayout};
use dtshard::layout::{DeviceMesh, Dims, PlacementSpec, parse_placements};
use dtshard::storage::FileId;

const HIDDEN: u64 = 16_384;
const FFN: u64 = 53_248;
const VOCAB: u64 = 128_256;
const KEYS: u64 = 8 * 128;

/// The way in which tensor parallelism shards a tensor.
#[derive(Clone, Copy)]
pub enum Role {
    /// The style is `ColwiseParallel`: the rows of the weight are sharded.
    Column,
    /// The style is `RowwiseParallel`: the columns of the weight are sharded.
    Row,
    /// The tensor is replicated on the tp dimension, as norms are.
    Whole,
    /// The tensor is a plain tensor on all ranks, as `step` of AdamW is.
    Plain,
}

/// A tensor of the model or of its optimizer state.
pub struct Tensor {
    /// The name of the tensor in the state dict.
    pub fqn: String,
    /// The global shape.
    pub shape: Dims,
    /// The way in which tensor parallelism shards the tensor.
    pub role: Role,
}

/// Returns all tensors of `layers` layers (126 in the model): each parameter, and its AdamW state.
pub fn tensors(layers: u64) -> impl Iterator<Item = Tensor> {
    const LAYER: [(&str, &[u64], Role); 9] = [
        ("attention.wq.weight", &[HIDDEN, HIDDEN], Role::Column),
        ("attention.wk.weight", &[KEYS, HIDDEN], Role::Column),
        ("attention.wv.weight", &[KEYS, HIDDEN], Role::Column),
        ("attention.wo.weight", &[HIDDEN, HIDDEN], Role::Row),
        ("feed_forward.w1.weight", &[FFN, HIDDEN], Role::Column),
        ("feed_forward.w2.weight", &[HIDDEN, FFN], Role::Row),
        ("feed_forward.w3.weight", &[FFN, HIDDEN], Role::Column),
        ("attention_norm.weight", &[HIDDEN], Role::Whole),
        ("ffn_norm.weight", &[HIDDEN], Role::Whole),
    ];
    const REST: [(&str, &[u64], Role); 3] = [
        ("tok_embeddings.weight", &[VOCAB, HIDDEN], Role::Row),
        ("norm.weight", &[HIDDEN], Role::Whole),
        ("output.weight", &[VOCAB, HIDDEN], Role::Column),
    ];
    let in_layers =
        (0..layers).flat_map(|layer| LAYER.map(|(name, shape, role)| (format!("layers.{layer}.{name}"), shape, role)));
    let parameters = in_layers.chain(REST.map(|(name, shape, role)| (name.to_owned(), shape, role)));
    parameters.flat_map(|(name, shape, role)| {
        let state = |key: &str, shape: &[u64], role| Tensor {
            fqn: format!("optimizer.state.{name}.{key}"),
            shape: Dims::from_slice(shape),
            role,
        };
        [
            state("exp_avg", shape, role),
            state("exp_avg_sq", shape, role),
            state("step", &[], Role::Plain),
            Tensor { fqn: format!("model.{name}"), shape: Dims::from_slice(shape), role },
        ]
    })
}

/// Returns `count` tensors of 16 x 32 elements, such as the weights of very many small experts.
pub fn small_tensors(count: u64) -> impl Iterator<Item = Tensor> {
    let name = |index: u64| format!("model.layers.{}.experts.{}.weight", index / 100, index % 100);
    (0..count).map(move |index| Tensor { fqn: name(index), shape: Dims::from_slice(&[16, 32]), role: Role::Column })
}

/// A training job: its mesh, and the placements of its tensors.
pub struct Job {
    /// The name of the mesh, for printing.
    pub name: String,
    layout: MeshLayout,
    column: Vec<PlacementSpec>,
    row: Vec<PlacementSpec>,
    whole: Vec<PlacementSpec>,
}

impl Job {
    fn new(mesh: &str, column: &str, row: &str, whole: &str) -> Self {
        let parse = |text: &str| parse_placements(text).expect("placements");
        let fallback = Fallback::Placements(parse(whole));
        let layout = MeshLayout::new(DeviceMesh::parse(mesh).expect("a mesh"), Vec::new(), fallback, None);
        let layout = layout.expect("placements for each mesh dim");
        Self { name: mesh.to_owned(), layout, column: parse(column), row: parse(row), whole: parse(whole) }
    }

    /// Returns a job that uses only FSDP2: the rows of each tensor are sharded over all ranks.
    pub fn fsdp(ranks: u64) -> Self {
        Self::new(&format!("fsdp={ranks}"), "S(0)", "S(0)", "S(0)")
    }

    /// Returns a job that uses FSDP2 and tensor parallelism.
    pub fn fsdp_tp(ranks: u64, tp: u64) -> Self {
        let strided = format!("_S(0,{tp}),S(0)");
        Self::new(&format!("fsdp={},tp={tp}", ranks / tp), &strided, "S(0),S(1)", "S(0),R")
    }

    /// Returns a job on a mesh of one dim that shards the columns of every matrix.
    pub fn columns(ranks: u64) -> Self {
        Self::new(&format!("tp={ranks}"), "S(1)", "S(1)", "R")
    }

    /// Returns the placements of a tensor.
    pub fn shared(&self, tensor: &Tensor) -> SharedTensor {
        let specs = match tensor.role {
            Role::Column => &self.column,
            Role::Row => &self.row,
            Role::Whole => &self.whole,
            Role::Plain => return self.layout.replicated(),
        };
        let resolve = |spec: &PlacementSpec| spec.resolve(tensor.shape.len()).expect("a placement that fits");
        specs.iter().map(resolve).collect::<Vec<_>>().into()
    }

    /// Returns the distinct tiles of a tensor: ranks that hold the same tile give one entry.
    pub fn shards(&self, tensor: &Tensor) -> Vec<HeldTile> {
        self.layout.shards(&tensor.shape, &self.shared(tensor)).expect("placements that fit")
    }

    /// Returns the catalog entry of a tensor as DCP stores it: with one chunk for every distinct tile.
    pub fn entry(&self, tensor: &Tensor) -> TensorEntry {
        let mut entry = TensorEntry::new(tensor.fqn.as_str().into(), Dtype::F32, tensor.shape.clone());
        for (tile, ranks) in self.shards(tensor) {
            if !tile.is_empty() {
                let location = FileLocation::Bytes { file: FileId(ranks[0].0), offset: 0 };
                entry.chunks.push(Chunk { tile, location, strides: None, rank: Some(ranks[0]), view: None });
            }
        }
        entry
    }
}
