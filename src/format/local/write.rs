//! Lays out rank files of the format `local`, and `layout.json` next to them.
//!
//! Tensors with the widest dtypes come first, as in the reference writer of safetensors, so that the data of every
//! tensor is aligned for its dtype. A tied tensor is stored again under each of its names. A tensor whose content
//! differs between ranks (`Value::Other`) is a plain tensor, and each file has the content of its rank. Offsets are in
//! bytes; shapes count elements.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path as FilePath;
use std::sync::Arc;

use serde_json::{Map, json};

use super::document::{DescribedTensor, FILE_NAME, LocalDocument};
use super::encode::encode;
use super::file_name;
use super::own::{PerRankTensors, assign_to_ranks};
use crate::catalog::path::{self, LeafAction, key_text};
use crate::catalog::{
    Catalog, Chunk, ChunkTable, Class, FileLocation, Fqn, Key, MeshId, OutputFile, Path, Reservation, Reserved,
    Sharding, TensorEntry, TensorId, Value,
};
use crate::error::{Error, Result};
use crate::format::distinct_names;
use crate::format::safetensors::{FORMAT_KEY, WrittenTensor, write_header};
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::{DeviceMesh, Dims, LayoutError, Placement, Rank, Region, Split, Tile};
use crate::storage::FileId;

/// The class and placements of a tensor; `None` for a plain tensor that every rank has in full.
pub type LocalLayout = Option<(Class, SharedTensor)>;

/// A function that returns the layout of the tensor at a path in the state dict.
pub type ChooseLayout<'a> = dyn FnMut(&Path, &TensorEntry) -> Result<LocalLayout> + 'a;

/// The input of [`reserve`]: a mesh, and a layout for each tensor.
pub struct LocalTarget<'a> {
    pub mesh: &'a DeviceMesh,
    /// The number of ranks, each of which gets a file. Files of ranks outside the mesh contain only plain tensors.
    pub world_size: u32,
    /// A function that is called for each name of each tensor, and returns the layout of the tensor. For a tied tensor,
    /// the layout that the function returns for the first name is used. A tensor whose content differs between ranks is
    /// always plain.
    pub layout: &'a mut ChooseLayout<'a>,
}

/// Lays out a file for each rank, and `layout.json`.
///
/// Reads only dtypes and shapes of `source`.
///
/// # Errors
/// `Unsupported` if `state` is not a dict or cannot be written as JSON, if two paths have the same dotted name, or if
/// safetensors has no tag for a dtype; the errors of `layout`; `Layout` if placements do not fit.
pub fn reserve(source: &Catalog, state: &Value, target: LocalTarget<'_>) -> Result<Reservation> {
    let LocalTarget { mesh, world_size, layout } = target;
    if !matches!(state, Value::Dict(_)) {
        return Err(Error::unsupported(
            format!("the top level of the checkpoint is a {}, but rank files need a dict", state.type_name()),
            "save the checkpoint as a dict, or write a torch file with `dtshard unshard`",
        ));
    }
    let mut reservation = Reservation::default();
    let (mut state, own) = assign_to_ranks(source, state, world_size);
    remove_unencodable(&mut state, &mut reservation.left_out);
    let tree = encode(&state, &Path::default()).map_err(|what| {
        Error::unsupported(format!("the state dict cannot be written as JSON: {what}"), "write torch files instead")
    })?;
    let plan = LocalPlan::new(source, &state, &own, layout, &mut reservation.notes)?;
    let mut order: Vec<usize> = (0..plan.names.len()).collect();
    order.sort_by_key(|&at| std::cmp::Reverse(plan.tensor_at(at).dtype.itemsize()));
    let mut writer =
        FileWriter { plan: &plan, mesh, headers: HashSet::new(), chunks: vec![BTreeMap::new(); order.len()] };
    for rank in (0..world_size).map(Rank) {
        reservation.files.push(writer.file(rank, &order)?);
    }
    let mut chunks = writer.chunks;
    for at in order {
        let (fqn, described) = (&plan.names[at].0, plan.tensor_at(at));
        reservation.tensors.extend(std::mem::take(&mut chunks[at]).into_iter().map(|(source, chunks)| {
            let entry = TensorEntry::new(fqn.clone(), described.dtype, described.shape.clone());
            let shared = described.sharding.as_ref().map(|sharding| Box::new(sharding.shared.clone()));
            Reserved { shared, ..Reserved::new(source, TensorEntry { chunks, ..entry }) }
        }));
    }
    let mut file = OutputFile::new(FILE_NAME);
    file.push_header(plan.document(mesh, world_size, state).render(&tree).into_bytes());
    reservation.files.push(file);
    Ok(reservation)
}

/// Removes values that `layout.json` cannot express, and adds their paths to `left_out`.
fn remove_unencodable(state: &mut Value, left_out: &mut Vec<String>) {
    path::edit_leaves(state, &mut |path, leaf| {
        if encode(leaf, path).is_ok() {
            return LeafAction::Keep;
        }
        left_out.push(path.to_string());
        LeafAction::Remove
    });
    drop_attributes(state, &Path::default(), left_out);
}

/// Removes the attributes of each dict in `value` whose attributes cannot be encoded, and adds the paths of these dicts
/// to `left_out`. Attributes with tensors cannot be encoded, because a tensor in an attribute has no name.
fn drop_attributes(value: &mut Value, path: &Path, left_out: &mut Vec<String>) {
    match value {
        Value::Dict(dict) => {
            if dict
                .attributes
                .take_if(|attributes| attributes.contains_tensor() || encode(attributes, path).is_err())
                .is_some()
            {
                left_out.push(format!("{path} (attributes)"));
            }
            for (key, child) in &mut dict.entries {
                drop_attributes(child, &path.child(Key::Name(key_text(key))), left_out);
            }
        }
        Value::List(items) => {
            for (index, child) in (0..).zip(items) {
                drop_attributes(child, &path.child(Key::Index(index)), left_out);
            }
        }
        _ => {}
    }
}

/// The names and tensors to write. The same plan is used for the files of all ranks.
struct LocalPlan {
    /// The names of tensors in the order of the state dict, each with the index of the tensor in `described`.
    names: Vec<(Fqn, usize)>,
    described: Vec<DescribedTensor>,
    /// For each tensor in `described`, the source of its content.
    contents: Vec<LocalContent>,
    /// For each tensor id in the state dict, the index of the tensor in `described`.
    described_ids: HashMap<TensorId, TensorId>,
}

enum LocalContent {
    /// One source tensor, of which each rank has a part or a copy.
    Shared(TensorId),
    PerRank(BTreeMap<Rank, TensorId>),
}

impl LocalPlan {
    fn new(
        source: &Catalog,
        state: &Value,
        own: &PerRankTensors,
        layout: &mut ChooseLayout<'_>,
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let mut named: Vec<(Path, TensorId)> = Vec::new();
        path::tensors(state, &Path::default(), &mut |path, id| named.push((path.clone(), id)));
        let mut plan =
            Self { names: Vec::new(), described: Vec::new(), contents: Vec::new(), described_ids: HashMap::new() };
        for (path, id) in named {
            let fqn = path.fqn();
            let by_rank = own.get(id);
            let any = by_rank.and_then(|by_rank| by_rank.values().next().copied()).unwrap_or(id);
            let entry = source.tensor(any);
            let chosen = if by_rank.is_some() { None } else { layout(&path, entry)? };
            let sharding = chosen.filter(|(class, shared)| is_sharded(*class, shared)).map(|(class, shared)| {
                let SharedTensor { placements, mut splits, slice } = shared;
                // A split rule has no effect on a mesh dim that does not shard the tensor.
                for (split, _) in splits.iter_mut().zip(&placements).filter(|(_, own)| own.sharded_dim().is_none()) {
                    *split = Split::Chunk;
                }
                if splits.iter().all(|split| *split == Split::Chunk) {
                    splits.clear();
                }
                (class, Sharding { mesh: MeshId(0), shared: SharedTensor { placements, splits, slice } })
            });
            let (class, sharding) = sharding.map_or((Class::Tensor, None), |(class, sharding)| (class, Some(sharding)));
            let next = TensorId(u32::try_from(plan.described.len()).expect("fewer than 2^32 tensors"));
            let index = plan.described_ids.entry(id).or_insert(next).0 as usize;
            plan.names.push((fqn.clone(), index));
            if let Some(first) = plan.described.get_mut(index) {
                if (first.class, &first.sharding) != (class, &sharding) {
                    notes.push(format!("`{fqn}` is tied to `{}` and gets the same layout", first.names[0]));
                }
                first.names.push(fqn);
                continue;
            }
            let ranks = by_rank.map(|by_rank| by_rank.keys().copied().collect());
            plan.contents
                .push(by_rank.map_or(LocalContent::Shared(id), |by_rank| LocalContent::PerRank(by_rank.clone())));
            let (dtype, shape) = (entry.dtype, entry.shape.clone());
            plan.described.push(DescribedTensor { names: vec![fqn], dtype, shape, class, sharding, ranks });
        }
        distinct_names(plan.names.iter().map(|(fqn, _)| fqn.as_str()), &["__metadata__", ""])?;
        Ok(plan)
    }

    fn tensor_at(&self, at: usize) -> &DescribedTensor {
        &self.described[self.names[at].1]
    }

    /// Returns the source tensor for `names[at]`, and the tile of this tensor that `rank` has; `None` if the file of
    /// `rank` does not contain the tensor.
    fn local_tile(&self, at: usize, mesh: &DeviceMesh, rank: Rank) -> Result<Option<(TensorId, Tile)>> {
        let DescribedTensor { names, shape, sharding, .. } = self.tensor_at(at);
        let source = match &self.contents[self.names[at].1] {
            LocalContent::Shared(id) => Some(*id),
            LocalContent::PerRank(by_rank) => by_rank.get(&rank).copied(),
        };
        let tile = match (sharding, mesh.coordinate(rank)) {
            (None, _) => Some(Tile::from_region(&Region::whole(shape))),
            (Some(sharding), Some(at)) => {
                Some(sharding.shared.part(shape, mesh, &at).map_err(LayoutError::for_tensor(&names[0]))?)
            }
            (Some(_), None) => None,
        };
        Ok(source.zip(tile))
    }

    fn document(mut self, mesh: &DeviceMesh, world_size: u32, mut state: Value) -> LocalDocument {
        for described in &mut self.described {
            described.ranks.take_if(|ranks| ranks.len() == world_size as usize);
        }
        let any = self.described.iter().any(|described| described.sharding.is_some());
        let meshes = any.then(|| mesh.clone()).into_iter().collect();
        state.map_tensors(&mut |id| self.described_ids[&id]);
        LocalDocument { world_size, meshes, tensors: self.described, state }
    }
}

/// Returns whether a tensor is written with placements. A ShardedTensor that is replicated on all mesh dims is written
/// as a plain tensor.
fn is_sharded(class: Class, shared: &SharedTensor) -> bool {
    class != Class::ShardedTensor || shared.placements.iter().any(|placement| *placement != Placement::Replicate)
}

/// Lays out the files, rank by rank.
struct FileWriter<'a> {
    plan: &'a LocalPlan,
    mesh: &'a DeviceMesh,
    /// The distinct headers of the files. Most ranks have equal headers, and equal headers are in memory only once.
    headers: HashSet<Arc<Vec<u8>>>,
    /// For each name, the chunks to write, by the source tensor from which the content of the chunks comes.
    chunks: Vec<BTreeMap<TensorId, ChunkTable>>,
}

impl FileWriter<'_> {
    fn file(&mut self, rank: Rank, order: &[usize]) -> Result<OutputFile> {
        let mut parts: Vec<(usize, TensorId, Tile, u64)> = Vec::new();
        let mut end = 0;
        for &at in order {
            if let Some((source, tile)) = self.plan.local_tile(at, self.mesh, rank)? {
                let len = tile.numel() * self.plan.tensor_at(at).dtype.itemsize();
                parts.push((at, source, tile, end));
                end += len;
            }
        }
        let sizes: Vec<Dims> = parts.iter().map(|(_, _, tile, _)| tile.sizes()).collect();
        let written = parts.iter().zip(&sizes).map(|((at, .., begin), shape)| {
            let (fqn, dtype) = (&self.plan.names[*at].0, self.plan.tensor_at(*at).dtype);
            WrittenTensor { name: fqn.as_str(), dtype, shape, begin: *begin }
        });
        let metadata = Map::from_iter([(String::from(FORMAT_KEY), json!("pt"))]);
        let name = file_name(rank);
        let header = write_header(FilePath::new(&name), &metadata, written, "leave tensors out with options::exclude")?;
        let header = Arc::new(header);
        self.headers.insert(Arc::clone(&header));
        let mut output = OutputFile::of_rank(rank, name);
        output.push_header(Arc::clone(self.headers.get(&header).expect("it was put there")));
        let start = output.push_payload(end);
        for (at, source, tile, begin) in parts {
            let offset = start + begin;
            let location = if tile.is_empty() {
                FileLocation::Empty
            } else {
                FileLocation::Bytes { file: FileId(rank.0), offset }
            };
            let table = || ChunkTable::new(self.plan.tensor_at(at).shape.len());
            let chunks = self.chunks[at].entry(source).or_insert_with(table);
            chunks.push(Chunk { tile, location, strides: None, rank: Some(rank), view: None });
        }
        Ok(output)
    }
}
