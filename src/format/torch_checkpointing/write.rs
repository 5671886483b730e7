//! Lays out a checkpoint: a torch.save file for each item and rank, and `metadata.pkl`.
//!
//! The files of an item are those of the format `torch-ranks`. `metadata.pkl` lists every tensor in a dict, a list or a
//! tuple of an item, as the package's `DefaultResharder` does. It contains plain dicts and lists, but no objects of
//! classes; it contains tuples where the package needs hashable values.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path as FilePath, PathBuf};

use serde_json::{Value as Json, json};

use super::METADATA;
use super::metadata::{ROOT_ITEM, check_split_factors};
use crate::catalog::path::key_text;
use crate::catalog::{
    Catalog, Dict, Dtype, Key, OutputFile, Path, Reservation, TensorEntry, TensorId, Value, contiguous_strides,
};
use crate::error::{Error, Result};
use crate::format::torch::{DTensorStyle, RankLayout, RankTarget, Release, reserve_ranks};
use crate::format::traits::ShardedTarget;
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::{DeviceMesh, Dims, MeshDim, Placement, Rank};
use torch_pickle::pickle::Writer;

/// The name of the item that gets the complete state dict, if its keys are not names of items.
const ONLY_ITEM: &str = "model";

/// The version of the metadata that is written.
const VERSION: &str = "2.0";

/// Lays out the files of a checkpoint.
///
/// # Errors
/// `Unsupported` for tensors that are neither DTensors nor plain, for placements that the format does not have, and for
/// per-rank tensors of different shapes; the errors of the layouts and of laying out rank files.
pub fn reserve(target: ShardedTarget<'_>) -> Result<Reservation> {
    let ShardedTarget { source, state, mesh, world_size, style, layouts, .. } = target;
    let mut whole = Reservation::default();
    let mut metadata = MetadataPickle::new(mesh, world_size, style);
    let mut items = Vec::new();
    let mut root_item = None;
    for (name, value, prefix) in items_of(state) {
        if prefix.is_empty() {
            root_item = Some(name);
        }
        let target = RankTarget {
            mesh,
            world_size,
            style,
            name: &|rank| PathBuf::from(format!("{name}_{rank}.pt")),
            layout: &mut |_, path, entry| {
                let whole_path = Path(prefix.iter().chain(&path.0).cloned().collect());
                let layout = layouts.rank_layout(&whole_path, entry)?;
                check_layout(&whole_path, &layout, mesh)?;
                Ok(layout)
            },
        };
        // `DefaultResharder` loads the files without their data, to find the offsets of storages. This needs the order of
        // data that `reserve_ranks` guarantees.
        let reservation = reserve_ranks(source, value, target)?;
        let shared: HashMap<TensorId, Option<SharedTensor>> =
            reservation.tensors.iter().map(|tensor| (tensor.source, tensor.shared.as_deref().cloned())).collect();
        let tensors = listed_tensors(source, name, value)?;
        if !tensors.is_empty() {
            items.push((name, tensors, shared));
        }
        whole.append(FilePath::new(""), reservation);
    }
    let mut file = OutputFile::of_rank(Rank(0), METADATA);
    file.push_header(metadata.write(source, &items, root_item));
    whole.files.push(file);
    Ok(whole)
}

/// Returns the items of a state dict: the name, the value and the path of each item. The keys of the state dict are the
/// items, if the package allows these names and no item is a tensor. Otherwise the state dict is one item.
fn items_of<'s>(state: &'s Value) -> Vec<(&'s str, &'s Value, Vec<Key>)> {
    let is_item = |(key, value): &(Value, Value)| {
        let is_valid = |name: &str| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
        };
        key.as_str().is_some_and(is_valid) && !matches!(value, Value::Tensor(_))
    };
    match state {
        Value::Dict(Dict { entries, .. }) if !entries.is_empty() && entries.iter().all(is_item) => {
            let item = |(key, value): &'s (Value, Value)| {
                (key.as_str().expect("an item has a name"), value, vec![Key::Name(key_text(key))])
            };
            entries.iter().map(item).collect()
        }
        state => vec![(ONLY_ITEM, state, Vec::new())],
    }
}

fn check_layout(path: &Path, layout: &RankLayout, mesh: &DeviceMesh) -> Result<()> {
    let partial = |placements: &[Placement]| placements.iter().any(|placement| placement.is_partial());
    match layout {
        RankLayout::Plain => Ok(()),
        RankLayout::Distributed { placements, .. } if !partial(placements) => check_split_factors(placements, mesh)
            .map_err(|(expected, found)| {
                Error::unsupported(
                    format!("{path}: torch_checkpointing expects {expected}, found {found}"),
                    "give the tensor other placements with options::placements",
                )
            }),
        RankLayout::Distributed { .. } => Err(Error::unsupported(
            format!("{path}: torch_checkpointing does not store the placement Partial"),
            "give the tensor other placements with options::placements",
        )),
        RankLayout::Local(_) | RankLayout::Sharded { .. } => Err(Error::unsupported(
            format!("{path}: torch_checkpointing stores sharded tensors as DTensors only"),
            "use options::tensor_class dtensor",
        )),
    }
}

/// The tensors of an item that the metadata lists, by their paths as JSON.
type ListedTensors = BTreeMap<String, TensorId>;

/// Returns the tensors of an item that are in dicts, lists and tuples.
fn listed_tensors(source: &Catalog, item: &str, value: &Value) -> Result<ListedTensors> {
    let mut found = ListedTensors::new();
    collect(source, item, value, &mut Vec::new(), &mut found)?;
    Ok(found)
}

fn collect(source: &Catalog, item: &str, value: &Value, path: &mut Vec<Json>, found: &mut ListedTensors) -> Result<()> {
    match value {
        Value::Tensor(id) => {
            let text = serde_json::to_string(path).expect("texts and ints serialise");
            let described = |id: TensorId| (source.tensor(id).dtype, &source.tensor(id).shape);
            if let Some(known) = found.get(&text).filter(|known| described(**known) != described(*id)) {
                let show = |id| format!("{} {:?}", described(id).0, described(id).1.as_slice());
                return Err(Error::unsupported(
                    format!(
                        "{item}: the tensor at {text} is {} on one rank and {} on another, but torch_checkpointing stores \
                         one shape for all ranks",
                        show(*known),
                        show(*id)
                    ),
                    "leave the tensor out with options::on_conflict drop, or write options::to torch-ranks",
                ));
            }
            found.entry(text).or_insert(*id);
        }
        Value::Dict(dict) => {
            for (key, child) in &dict.entries {
                path.push(match key {
                    Value::Int(number) => json!(number),
                    key => json!(&*key_text(key)),
                });
                collect(source, item, child, path, found)?;
                path.pop();
            }
        }
        Value::List(items) | Value::Tuple(items) => {
            for (index, child) in items.iter().enumerate() {
                path.push(json!(index));
                collect(source, item, child, path, found)?;
                path.pop();
            }
        }
        Value::Other(rank_values) => {
            for rank_value in rank_values {
                collect(source, item, &rank_value.value, path, found)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// An item to list: its name, its tensors, and the placements of each tensor (`None` for a plain tensor).
type ListedItem<'a> = (&'a str, ListedTensors, HashMap<TensorId, Option<SharedTensor>>);

/// The `metadata.pkl` of a checkpoint while it is written. Each mesh and each list of ranks is written once, and later
/// fetched from the memo.
struct MetadataPickle<'a> {
    mesh: &'a DeviceMesh,
    world_size: u32,
    style: &'a DTensorStyle,
    writer: Writer,
    /// The memo index of each mesh, by its ranks and the names of its dims. The tuple of ranks has the next index.
    meshes: HashMap<(Vec<Rank>, Option<Vec<String>>), u32>,
    /// The memo indices of the tuples of ranks that are written.
    written_ranks: HashSet<u32>,
}

/// A mesh in the metadata.
struct MeshSpec {
    shape: Dims,
    ranks: Vec<Rank>,
    names: Option<Vec<String>>,
}

impl<'a> MetadataPickle<'a> {
    fn new(mesh: &'a DeviceMesh, world_size: u32, style: &'a DTensorStyle) -> Self {
        Self { mesh, world_size, style, writer: Writer::new(), meshes: HashMap::new(), written_ranks: HashSet::new() }
    }

    fn write(&mut self, source: &Catalog, items: &[ListedItem<'_>], root_item: Option<&str>) -> Vec<u8> {
        self.writer.empty_dict().mark();
        self.writer.string("version").string(VERSION);
        self.writer.string("world_size").uint(self.world_size.into());
        if let Some(name) = root_item {
            self.writer.string(ROOT_ITEM).string(name);
        }
        self.writer.string("metadata").empty_dict().mark();
        for (name, tensors, shared) in items {
            self.writer.string(name).empty_dict().mark();
            self.writer.string("nested_path_to_metadata").empty_dict().mark();
            for (path, id) in tensors {
                self.writer.string(path);
                self.tensor(source.tensor(*id), shared.get(id).and_then(Option::as_ref));
            }
            self.writer.setitems();
            self.writer.string("rank_to_layout_info").empty_dict().mark();
            for rank in 0..self.world_size {
                self.writer.uint(rank.into()).none();
            }
            self.writer.setitems();
            self.writer.setitems();
        }
        self.writer.setitems();
        self.writer.setitems();
        std::mem::take(&mut self.writer).finish()
    }

    /// Writes the groups of ranks of a tensor, each with its mesh.
    fn tensor(&mut self, entry: &TensorEntry, shared: Option<&SharedTensor>) {
        let (groups, placements) = match shared {
            None => {
                let ranks: Vec<Rank> = (0..self.world_size).map(Rank).collect();
                let shape = Dims::from_elem(ranks.len() as u64, 1);
                (vec![MeshSpec { shape, ranks, names: None }], vec![Placement::Replicate])
            }
            Some(SharedTensor { placements, slice, .. }) => {
                let dims = self.dims(slice.as_deref());
                (self.slices(&dims), dims.iter().map(|dim| placements[*dim]).collect())
            }
        };
        self.writer.empty_list().mark();
        for spec in groups {
            self.writer.empty_dict().mark();
            self.writer.string("sharding_metadata").empty_dict().mark();
            self.writer.string("type").string("DTensorShardingMetadata");
            self.writer.string("data").empty_dict().mark();
            self.writer.string("global_shape");
            self.list(&entry.shape);
            self.writer.string("dtype").string(&torch_name(entry.dtype));
            self.writer.string("stride");
            self.list(&contiguous_strides(&entry.shape));
            self.writer.string("mesh_spec");
            let mut ranks = spec.ranks.clone();
            ranks.sort_unstable();
            let memo = self.mesh(spec);
            self.writer.string("placements").empty_list().mark();
            placements.iter().for_each(|placement| self.placement(*placement));
            self.writer.appends();
            self.writer.setitems();
            self.writer.setitems();
            self.writer.string("ranks");
            self.ranks(&ranks, memo + 1);
            self.writer.setitems();
        }
        self.writer.appends();
    }

    fn list(&mut self, numbers: &[u64]) {
        self.writer.empty_list().mark();
        numbers.iter().for_each(|number| _ = self.writer.uint(*number));
        self.writer.appends();
    }

    /// Returns the mesh dims on which a DTensor is, as in the rank files.
    fn dims(&self, slice: Option<&[MeshDim]>) -> Vec<usize> {
        match slice {
            Some(dims) if self.style.release >= Release::V2_10 => dims.iter().map(|dim| dim.0).collect(),
            _ => (0..self.mesh.ndim()).collect(),
        }
    }

    /// Returns the slices of the mesh with these dims: one slice for each combination of coordinates on the other dims.
    fn slices(&self, dims: &[usize]) -> Vec<MeshSpec> {
        let mut slices: BTreeMap<Vec<u64>, Vec<(Vec<u64>, Rank)>> = BTreeMap::new();
        for (rank, coordinate) in self.mesh.coordinates() {
            let others = (0..coordinate.len()).filter(|dim| !dims.contains(dim)).map(|dim| coordinate[dim]).collect();
            let own = dims.iter().map(|dim| coordinate[*dim]).collect();
            slices.entry(others).or_default().push((own, rank));
        }
        let shape: Dims = dims.iter().map(|dim| self.mesh.shape()[*dim]).collect();
        let names = self.mesh.names().map(|names| dims.iter().map(|dim| names[*dim].clone()).collect::<Vec<_>>());
        let slice = |mut ranks: Vec<(Vec<u64>, Rank)>| {
            ranks.sort();
            let ranks = ranks.into_iter().map(|(_, rank)| rank).collect();
            MeshSpec { shape: shape.clone(), ranks, names: names.clone() }
        };
        slices.into_values().map(slice).collect()
    }

    /// Writes a mesh, and returns its memo index. The tuple of its ranks in ascending order has the next index.
    fn mesh(&mut self, MeshSpec { shape, ranks, names }: MeshSpec) -> u32 {
        let next = 2 * u32::try_from(self.meshes.len()).expect("fewer than 2^31 meshes");
        let key = (ranks, names);
        if let Some(memo) = self.meshes.get(&key) {
            self.writer.get(*memo);
            return *memo;
        }
        let (ranks, names) = &key;
        self.writer.empty_dict().mark();
        self.writer.string("device_type").string(&self.style.device_type);
        self.writer.string("mesh_shape");
        tuple(&mut self.writer, &shape, |writer, size| _ = writer.uint(*size));
        self.writer.string("mesh_data");
        tuple(&mut self.writer, ranks, |writer, rank| _ = writer.uint(rank.0.into()));
        if ranks.is_sorted() {
            self.writer.put(next + 1);
            self.written_ranks.insert(next + 1);
        }
        self.writer.string("mesh_dim_names");
        match names {
            None => _ = self.writer.none(),
            Some(names) => tuple(&mut self.writer, names, |writer, name| _ = writer.string(name)),
        }
        self.writer.setitems().put(next);
        self.meshes.insert(key, next);
        next
    }

    /// Writes the tuple of a mesh's ranks, which are in ascending order. The tuple has the memo index `memo`.
    fn ranks(&mut self, ranks: &[Rank], memo: u32) {
        if !self.written_ranks.insert(memo) {
            self.writer.get(memo);
            return;
        }
        tuple(&mut self.writer, ranks, |writer, rank| _ = writer.uint(rank.0.into()));
        self.writer.put(memo);
    }

    fn placement(&mut self, placement: Placement) {
        self.writer.empty_dict().mark().string("type");
        match placement {
            Placement::Shard(dim) => _ = self.writer.string("Shard").string("dim").uint(dim.0 as u64),
            Placement::StridedShard { dim, split_factor } => {
                self.writer.string("StridedShard").string("dim").uint(dim.0 as u64);
                self.writer.string("split_factor").uint(split_factor);
            }
            Placement::Replicate | Placement::Partial(_) => _ = self.writer.string("Replicate"),
        }
        self.writer.setitems();
    }
}

/// Writes a tuple. `each` must write one item as one value.
fn tuple<T>(writer: &mut Writer, items: &[T], mut each: impl FnMut(&mut Writer, &T)) {
    if items.len() > 3 {
        writer.mark();
    }
    items.iter().for_each(|item| each(writer, item));
    writer.tuple(items.len());
}

fn torch_name(dtype: Dtype) -> String {
    format!("torch.{}", dtype.torch_name())
}
