//! Parses `metadata.pkl`: a pickle of plain dicts, lists, tuples, texts and ints.
//!
//! The parser reads the objects of the pickle without building a tree of values: many tensors share one mesh, and the
//! tree would contain this mesh many times. Meshes and lists of ranks that several tensors share are converted once.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use foldhash::fast::RandomState;

use crate::catalog::{Dtype, Fqn, Key, Path as StatePath, checked_len_bytes};
use crate::error::{Error, Result};
use crate::format::torch::reader::pickle_error;
use crate::layout::strided::find_unknown_split_factor;
use crate::layout::{DeviceMesh, Dims, Placement, PlacementSpec, Rank, Region, TensorDim};
use torch_pickle::pickle::{self, NoVisitor, NodeId, Ref};

/// The content of `metadata.pkl`.
#[derive(Debug)]
pub struct CheckpointMetadata {
    pub world_size: u32,
    pub items: Vec<ItemMetadata>,
    /// The name of the item that has the complete state dict, if dtshard invented this name ([`ROOT_ITEM`]).
    pub root_item: Option<String>,
}

/// The key of `metadata.pkl` for the name of the item that has the complete state dict. Only dtshard writes this key,
/// for a state dict whose keys are not names of items. The package torch_checkpointing ignores the key.
pub const ROOT_ITEM: &str = "root_item";

/// The metadata of one checkpoint item, such as `model`.
#[derive(Debug)]
pub struct ItemMetadata {
    pub name: String,
    /// The file of each rank. A rank without a file layout writes `NAME_RANK.pt`.
    pub layouts: BTreeMap<u32, Option<FileLayout>>,
    pub tensors: Vec<TensorMetadata>,
}

/// The file in which one rank stores one checkpoint item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLayout {
    /// The path relative to the folder of the checkpoint.
    pub path: String,
    pub encoding: Encoding,
}

/// The encoding of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoding {
    Torch,
    Safetensors,
    /// An encoding that has no tensors, by the name of its Python class.
    Other(String),
}

/// A tensor of a checkpoint item, and its sharding.
#[derive(Debug)]
pub struct TensorMetadata {
    /// The path in the item.
    pub path: StatePath,
    /// The sharding of the tensor for each group of ranks. The ranks of one mesh are one group.
    pub groups: Vec<RankGroup>,
}

/// Ranks that have the same sharding of a tensor.
#[derive(Debug)]
pub struct RankGroup {
    pub ranks: Arc<[Rank]>,
    pub dtype: Dtype,
    pub shape: Dims,
    pub sharding: TensorSharding,
}

/// The part of a tensor that a rank has.
#[derive(Debug)]
pub enum TensorSharding {
    /// The shard that the placements give on a mesh.
    Mesh { mesh: Arc<DeviceMesh>, placements: Vec<Placement> },
    /// The boxes of the tensor that are in the local tensor.
    Boxes(Vec<LocalBox>),
}

/// A box of a tensor, and its position in the local tensor of a rank.
#[derive(Debug)]
pub struct LocalBox {
    pub region: Region,
    pub local_offsets: Dims,
}

/// The maximum number of keys in a path, and of dims of a tensor.
const MAX_DEPTH: usize = 128;

impl CheckpointMetadata {
    /// Parses the bytes of `metadata.pkl`. `path` is used in messages only.
    ///
    /// # Errors
    /// `Malformed` that names the item and the tensor, `Unsupported` for dtypes and shardings that dtshard does not
    /// have.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let (pickle, _) = pickle::parse(bytes, &mut NoVisitor).map_err(|error| pickle_error(path, "pickle", &error))?;
        let budget = bytes.len().saturating_mul(WORK_PER_BYTE);
        let mut parser = Parser { path, world_size: 0, ranks: HashMap::default(), meshes: HashMap::default(), budget };
        parser.parse(pickle.root())
    }
}

struct Parser<'p> {
    path: &'p Path,
    world_size: u32,
    ranks: HashMap<NodeId, Arc<[Rank]>, RandomState>,
    meshes: HashMap<NodeId, Arc<DeviceMesh>, RandomState>,
    /// The amount of work that is left. Several objects of a pickle may refer to one object, which is then read several
    /// times; a hostile file must not make the parser do this without limit.
    budget: usize,
}

/// The amount of work per byte of a pickle. One unit is an entry of a list or dict, or a byte of text.
const WORK_PER_BYTE: usize = 64;

impl Parser<'_> {
    fn wrong(&self, at: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::malformed(self.path, at, expected, found)
    }

    /// Subtracts work from the budget.
    fn spend(&mut self, at: &str, work: usize) -> Result<()> {
        match self.budget.checked_sub(work) {
            Some(left) => {
                self.budget = left;
                Ok(())
            }
            None => Err(self.wrong(at, "metadata that does not repeat its parts", "parts that are repeated too often")),
        }
    }

    fn field<'a>(&self, at: &str, node: Ref<'a>, key: &str) -> Result<Ref<'a>> {
        let found = || format!("{} without this key", node.describe());
        node.get(key).ok_or_else(|| self.wrong(at, format!("a dict with the key `{key}`"), found()))
    }

    fn text<'a>(&self, at: &str, node: Ref<'a>) -> Result<&'a str> {
        node.as_str().ok_or_else(|| self.wrong(at, "text", node.describe()))
    }

    fn entries<'a>(&self, at: &str, node: Ref<'a>) -> Result<impl Iterator<Item = (Ref<'a>, Ref<'a>)> + use<'a>> {
        let entries = node.as_dict().ok_or_else(|| self.wrong(at, "a dict", node.describe()))?;
        Ok(entries.into_iter())
    }

    fn items<'a>(&self, at: &str, node: Ref<'a>) -> Result<impl Iterator<Item = Ref<'a>> + use<'a>> {
        let items = node.as_list().or_else(|| node.as_tuple());
        items.ok_or_else(|| self.wrong(at, "a list or a tuple", node.describe()))
    }

    fn dims(&self, at: &str, node: Ref<'_>) -> Result<Dims> {
        node.to_dims_up_to(MAX_DEPTH)
            .ok_or_else(|| self.wrong(at, format!("up to {MAX_DEPTH} non-negative integers"), node.describe()))
    }

    fn parse(&mut self, root: Ref<'_>) -> Result<CheckpointMetadata> {
        let world_size = self.field("world_size", root, "world_size")?;
        let size = world_size.as_u64().and_then(|size| u32::try_from(size).ok());
        self.world_size = size.ok_or_else(|| self.wrong("world_size", "a number below 2^32", world_size.describe()))?;
        let version = match root.get("version") {
            Some(version) => self.text("version", version)?,
            None => "1.0",
        };
        let metadata = self.field("metadata", root, "metadata")?;
        let mut items = match version {
            "1.0" => self.version_1(metadata, self.field("metadata", root, "rank_to_layout_info_mappings")?)?,
            "2.0" => self.version_2(metadata)?,
            other => {
                return Err(Error::unsupported(
                    format!("{}: dtshard does not know version {other:.20} of this metadata", self.path.display()),
                    "load the checkpoint with torch_checkpointing, and save it in another format",
                ));
            }
        };
        for item in &mut items {
            let expected = 0..self.world_size;
            if !item.layouts.keys().copied().eq(expected) {
                let ranks: Vec<String> = item.layouts.keys().take(20).map(ToString::to_string).collect();
                let expected = format!("file layouts of the ranks 0 to {}", self.world_size.saturating_sub(1));
                return Err(self.wrong(&item.name, expected, format!("file layouts of ranks {}", ranks.join(", "))));
            }
            item.tensors.sort_by(|left, right| left.path.cmp(&right.path));
            if let Some([first, _]) = item.tensors.array_windows().find(|[first, second]| first.path == second.path) {
                let name = name_of(&item.name, &first.path);
                return Err(Error::malformed(self.path, name.as_str(), "one entry for each tensor", "two"));
            }
        }
        let root_item = root.get(ROOT_ITEM).map(|name| self.text(ROOT_ITEM, name)).transpose()?.map(str::to_owned);
        Ok(CheckpointMetadata { world_size: self.world_size, items, root_item })
    }

    fn version_2(&mut self, metadata: Ref<'_>) -> Result<Vec<ItemMetadata>> {
        let mut items: Vec<ItemMetadata> = Vec::new();
        for (name, item) in self.entries("metadata", metadata)? {
            let name = self.text("metadata", name)?.to_owned();
            let layouts = self.layouts(&name, self.field(&name, item, "rank_to_layout_info")?)?;
            let mut tensors = Vec::new();
            for (path, groups) in self.entries(&name, self.field(&name, item, "nested_path_to_metadata")?)? {
                self.spend(&name, path.as_str().map_or(1, str::len))?;
                let path = self.state_path(&name, self.text(&name, path)?)?;
                tensors.push(self.tensor(&name, path, groups)?);
            }
            if items.iter().any(|known| known.name == name) {
                return Err(self.wrong("metadata", "distinct items", format!("the item `{name}` twice")));
            }
            items.push(ItemMetadata { name, layouts, tensors });
        }
        Ok(items)
    }

    /// Parses metadata of version 1.0, in which the paths of tensors begin with the item.
    fn version_1(&mut self, metadata: Ref<'_>, mappings: Ref<'_>) -> Result<Vec<ItemMetadata>> {
        let mut items: BTreeMap<String, ItemMetadata> = BTreeMap::new();
        for (path, groups) in self.entries("metadata", metadata)? {
            self.spend("metadata", path.as_str().map_or(1, str::len))?;
            let mut path = self.state_path("metadata", self.text("metadata", path)?)?;
            let name = match path.0.first() {
                Some(Key::Name(name)) => name.to_string(),
                _ => return Err(self.wrong("metadata", "paths that begin with an item", path.to_string())),
            };
            path.0.remove(0);
            let tensor = self.tensor(&name, path, groups)?;
            let new = || ItemMetadata { name: name.clone(), layouts: BTreeMap::new(), tensors: Vec::new() };
            items.entry(name.clone()).or_insert_with(new).tensors.push(tensor);
        }
        for (rank, mapping) in self.entries("rank_to_layout_info_mappings", mappings)? {
            let rank = self.rank_key("rank_to_layout_info_mappings", rank)?;
            for item in items.values_mut() {
                let path = mapping.get(&item.name).and_then(|layout| layout.get("file_path")?.as_str());
                self.spend(&item.name, 1 + path.map_or(0, str::len))?;
                let layout = mapping.get(&item.name).filter(|layout| !layout.is_none());
                let layout = layout.map(|layout| self.layout(&item.name, layout)).transpose()?;
                item.layouts.insert(rank, layout);
            }
        }
        Ok(items.into_values().collect())
    }

    /// Returns a rank that is the key of a dict. The key may also be a text, because the package accepts both.
    fn rank_key(&self, at: &str, node: Ref<'_>) -> Result<u32> {
        let number = node.as_u64().or_else(|| node.as_str()?.parse().ok());
        let rank = number.and_then(|rank| u32::try_from(rank).ok()).filter(|rank| *rank < self.world_size);
        rank.ok_or_else(|| self.wrong(at, format!("a rank below {}", self.world_size), node.describe()))
    }

    fn layouts(&mut self, item: &str, node: Ref<'_>) -> Result<BTreeMap<u32, Option<FileLayout>>> {
        let mut layouts = BTreeMap::new();
        for (rank, layout) in self.entries(item, node)? {
            let path = layout.get("file_path").and_then(Ref::as_str);
            self.spend(item, 1 + path.map_or(0, str::len))?;
            let layout = (!layout.is_none()).then(|| self.layout(item, layout)).transpose()?;
            layouts.insert(self.rank_key(item, rank)?, layout);
        }
        Ok(layouts)
    }

    fn layout(&self, item: &str, node: Ref<'_>) -> Result<FileLayout> {
        let path = self.text(item, self.field(item, node, "file_path")?)?.to_owned();
        let encoding = self.field(item, node, "serialization_format")?;
        let encoding = match self.text(item, self.field(item, encoding, "type")?)? {
            "TorchSerialization" => Encoding::Torch,
            "SafetensorsSerialization" => Encoding::Safetensors,
            other => Encoding::Other(other.to_owned()),
        };
        Ok(FileLayout { path, encoding })
    }

    /// Parses a path, which is a JSON list of texts and ints.
    fn state_path(&self, item: &str, text: &str) -> Result<StatePath> {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum Step {
            Index(u64),
            NegativeKey(i64),
            Name(String),
        }
        let wrong =
            || self.wrong(item, format!("a path of up to {MAX_DEPTH} strings and ints"), format!("`{text:.100}`"));
        let steps: Vec<Step> = serde_json::from_str(text).map_err(|_| wrong())?;
        if steps.len() > MAX_DEPTH {
            return Err(wrong());
        }
        let key = |step| match step {
            Step::Index(index) => Key::Index(index),
            Step::NegativeKey(key) => Key::Name(key.to_string().into()),
            Step::Name(name) => Key::Name(name.into()),
        };
        Ok(StatePath(steps.into_iter().map(key).collect()))
    }

    fn tensor(&mut self, item: &str, path: StatePath, groups: Ref<'_>) -> Result<TensorMetadata> {
        let name = name_of(item, &path);
        let mut found = Vec::new();
        for group in self.items(name.as_str(), groups)? {
            found.push(self.group(name.as_str(), group)?);
        }
        match found.as_slice() {
            [] => Err(self.wrong(name.as_str(), "the sharding of a tensor", "an empty list")),
            [first, rest @ ..] => {
                if let Some(other) =
                    rest.iter().find(|other| (other.dtype, &other.shape) != (first.dtype, &first.shape))
                {
                    let describe = |group: &RankGroup| format!("{} {:?}", group.dtype, group.shape.as_slice());
                    let found = format!("{} on rank {}", describe(other), other.ranks.first().map_or(0, |rank| rank.0));
                    return Err(self.wrong(name.as_str(), format!("{} on all ranks", describe(first)), found));
                }
                Ok(TensorMetadata { path, groups: found })
            }
        }
    }

    fn group(&mut self, name: &str, group: Ref<'_>) -> Result<RankGroup> {
        self.spend(name, 1)?;
        let ranks = self.ranks(name, self.field(name, group, "ranks")?)?;
        let packed = self.field(name, group, "sharding_metadata")?;
        let (kind, data) = (self.text(name, self.field(name, packed, "type")?)?, self.field(name, packed, "data")?);
        let dtype = self.text(name, self.field(name, data, "dtype")?)?;
        let Some(dtype) = Dtype::from_name(dtype) else {
            return Err(Error::unsupported(
                format!("{}: {name}: dtype {dtype:.40} is not supported", self.path.display()),
                "leave that tensor out of the checkpoint, or save it as bytes (uint8)",
            ));
        };
        let shape = self.dims(name, self.field(name, data, "global_shape")?)?;
        if checked_len_bytes(&shape, dtype).is_none() {
            return Err(self.wrong(name, "a shape that fits memory", format!("{:?}", shape.as_slice())));
        }
        let sharding = match kind {
            "DTensorShardingMetadata" => self.on_mesh(name, data, &ranks, shape.len())?,
            "default_tensor_v1" => TensorSharding::Boxes(self.boxes(name, data, &shape)?),
            other => {
                return Err(Error::unsupported(
                    format!("{}: {name} has sharding metadata of the type `{other:.60}`", self.path.display()),
                    "load the checkpoint with torch_checkpointing, and save it in another format",
                ));
            }
        };
        Ok(RankGroup { ranks, dtype, shape, sharding })
    }

    fn ranks(&mut self, name: &str, node: Ref<'_>) -> Result<Arc<[Rank]>> {
        if let Some(known) = self.ranks.get(&node.id()).filter(|_| node.is_shared()) {
            return Ok(Arc::clone(known));
        }
        let mut ranks = Vec::new();
        for rank in self.items(name, node)? {
            self.spend(name, 1)?;
            ranks.push(Rank(self.rank_key(name, rank)?));
        }
        let ranks: Arc<[Rank]> = ranks.into();
        self.ranks.insert(node.id(), Arc::clone(&ranks));
        Ok(ranks)
    }

    fn on_mesh(&mut self, name: &str, data: Ref<'_>, ranks: &[Rank], ndim: usize) -> Result<TensorSharding> {
        let mesh = self.mesh(name, self.field(name, data, "mesh_spec")?)?;
        let mut placements = Vec::new();
        for placement in self.items(name, self.field(name, data, "placements")?)? {
            self.spend(name, 1)?;
            placements.push(self.placement(name, placement, ndim)?);
        }
        if placements.len() != mesh.ndim() {
            let expected = format!("{} placements, one for each mesh dim", mesh.ndim());
            return Err(self.wrong(name, expected, placements.len().to_string()));
        }
        check_split_factors(&placements, &mesh).map_err(|(expected, found)| self.wrong(name, expected, found))?;
        if let Some(outside) = ranks.iter().find(|rank| mesh.coordinate(**rank).is_none()) {
            return Err(self.wrong(name, "ranks of the mesh", format!("rank {outside}")));
        }
        Ok(TensorSharding::Mesh { mesh, placements })
    }

    fn mesh(&mut self, name: &str, node: Ref<'_>) -> Result<Arc<DeviceMesh>> {
        if let Some(known) = self.meshes.get(&node.id()).filter(|_| node.is_shared()) {
            return Ok(Arc::clone(known));
        }
        let shape = self.dims(name, self.field(name, node, "mesh_shape")?)?;
        let ranks = self.ranks(name, self.field(name, node, "mesh_data")?)?;
        let names = match node.get("mesh_dim_names").filter(|names| !names.is_none()) {
            Some(names) => {
                let names = self.items(name, names)?.map(|dim| self.text(name, dim).map(str::to_owned));
                Some(names.collect::<Result<Vec<String>>>()?)
            }
            None => None,
        };
        let mesh = DeviceMesh::new(shape, ranks.to_vec(), names);
        let mesh =
            Arc::new(mesh.map_err(|error| self.wrong(name, "a valid mesh", format!("an invalid mesh ({error})")))?);
        self.meshes.insert(node.id(), Arc::clone(&mesh));
        Ok(mesh)
    }

    fn placement(&self, name: &str, node: Ref<'_>, ndim: usize) -> Result<Placement> {
        let number = |key: &str| {
            let number = self.field(name, node, key)?;
            number.as_u64().ok_or_else(|| self.wrong(name, format!("a number as `{key}`"), number.describe()))
        };
        let dim = || {
            let dim = number("dim")?;
            let known = usize::try_from(dim).ok().filter(|dim| *dim < ndim).map(TensorDim);
            known.ok_or_else(|| self.wrong(name, format!("a placement on a dim below {ndim}"), dim.to_string()))
        };
        match self.text(name, self.field(name, node, "type")?)? {
            "Shard" => Ok(Placement::Shard(dim()?)),
            "StridedShard" => Ok(Placement::StridedShard { dim: dim()?, split_factor: number("split_factor")? }),
            "Replicate" => Ok(Placement::Replicate),
            other => Err(self.wrong(name, "Shard, StridedShard or Replicate", format!("`{other:.40}`"))),
        }
    }

    fn boxes(&mut self, name: &str, data: Ref<'_>, shape: &[u64]) -> Result<Vec<LocalBox>> {
        let mut column = |key: &str| -> Result<Vec<Dims>> {
            let mut column = Vec::new();
            for dims in self.items(name, self.field(name, data, key)?)? {
                self.spend(name, shape.len() + 1)?;
                column.push(self.dims(name, dims)?);
            }
            Ok(column)
        };
        let (global, local, sizes) = (column("global_offsets")?, column("local_offsets")?, column("local_sizes")?);
        if global.len() != local.len() || global.len() != sizes.len() {
            let found = format!("{}, {} and {}", global.len(), local.len(), sizes.len());
            return Err(self.wrong(name, "as many global offsets as local offsets and sizes", found));
        }
        let mut boxes = Vec::with_capacity(global.len());
        for ((offsets, local_offsets), sizes) in global.into_iter().zip(local).zip(sizes) {
            if [&offsets, &local_offsets, &sizes].iter().any(|dims| dims.len() != shape.len()) {
                return Err(self.wrong(name, format!("offsets and sizes of {} dims", shape.len()), "other dims"));
            }
            let region = Region::new(offsets, sizes);
            if !region.fits(shape) {
                return Err(self.wrong(name, format!("shards inside shape {shape:?}"), region.to_string()));
            }
            boxes.push(LocalBox { region, local_offsets });
        }
        Ok(boxes)
    }
}

/// Checks that the split factor of each strided shard is a product of sizes of later mesh dims that shard the same
/// tensor dim. torch_checkpointing defines the split factor as "how many same-dimension shards are logically applied
/// after this placement" (`StridedShardSpec` in `dtensor_metadata.py`). The error has two texts: the expected split
/// factor, and the placement found.
pub fn check_split_factors(placements: &[Placement], mesh: &DeviceMesh) -> Result<(), (String, String)> {
    let placements: Vec<PlacementSpec> = placements.iter().copied().map(PlacementSpec::from).collect();
    let Some(unknown) = find_unknown_split_factor(&placements, mesh) else { return Ok(()) };
    Err((
        format!(
            "a split factor that is a product of sizes of later mesh dims that shard the same tensor dim, such as {}",
            unknown.expected
        ),
        format!("{} on mesh dim {}", unknown.spec, unknown.at),
    ))
}

/// Returns the name of a tensor for messages: the item and the path, joined with dots.
pub fn name_of(item: &str, path: &StatePath) -> Fqn {
    if path.0.is_empty() { Fqn::from(item) } else { Fqn::from(format!("{item}.{path}")) }
}
