//! Merges the torch.save files of all ranks into one state dict.
//!
//! Dicts are merged key by key, and lists item by item. The file of each rank has the rank's local part of each DTensor
//! and ShardedTensor. Objects are compared while files are merged; if they differ, the value of each rank is kept.
//! Plain tensors that several ranks store must be equal (see [`PlainKind`] for exceptions); their data is compared when
//! it is read. Rank 0 is never preferred. Unit of shapes and offsets: elements.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::attributes::show_dims;
use super::context::ShardedDims;
use super::model_parallel::{ModelParallelGrid, has_comm_grid, remove_comm_grid};
use super::rank_file::RankFile;
use super::{ProcessGroup, TensorNode, View, chunk};
use crate::catalog::path::{self, LeafAction, is_descended, key_text};
use crate::catalog::{
    Catalog, Class, Dict, Fqn, Key, PartialValues, Path, RankValue, Sharding, TensorEntry, TensorId, Unreadable, Value,
    checked_len_bytes, list_ranks, permuted_stride, shift_tensors,
};
use crate::error::{CatalogError, Error, FormatError, Result};
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::partial::{PartialReduction, partial_index};
use crate::layout::{DeviceMesh, Dims, MeshDim, Placement, Rank, Region, Tile, comma_list, local_shard};

/// The hint for plain tensors that have the same name and different shapes on several ranks.
const PARTS_HINT: &str = "if these tensors are shards of one tensor, declare the layout, such as options::src_mesh tp=2 \
                          options::src_placements '**.w1=S(0)'; otherwise check that all files come from one save of \
                          one job";

/// The relation between plain tensors with one name in the files of several ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainKind {
    /// The tensors are copies of one tensor, so all ranks must have equal values.
    Replicas,
    /// The tensors are parts of one tensor, and may have different shapes. The user declares how they form the tensor
    /// ([`crate::format::declared_layout`]). Until the declared layout is applied, the tensor has the shape of its
    /// first part, and every part is treated as a full tensor.
    Declared,
    /// The tensors may be replicas or shards, because other plain tensors of the checkpoint carry layouts as
    /// attributes. A shard of optimizer state gets the layout of its parameter ([`crate::format::parameter_layout`]).
    Parts,
}

/// Returns whether plain tensors of some file are known to be parts of larger tensors.
pub fn has_layout_attributes(files: &[RankFile]) -> bool {
    has_comm_grid(files) || files.iter().any(|file| file.contents.has_layout_attributes())
}

/// Returns the catalog of a file that belongs to no series. If the file contains a DTensor, the file has only the local
/// part of one rank. The later coverage check then reports the missing elements.
///
/// # Errors
/// `Malformed` for an invalid file, `Conflict` for a contradiction in the file.
pub fn single(file: &RankFile) -> Result<Catalog> {
    let mut catalog = merge_files(std::slice::from_ref(file), PlainKind::Replicas)?.0;
    if has_comm_grid(std::slice::from_ref(file)) {
        remove_comm_grid(&mut catalog.state);
    }
    Ok(catalog)
}

/// Merges the files of all ranks into one catalog.
///
/// # Errors
/// `Conflict` if ranks store different metadata for a tensor, `Malformed` if the name of a file states another rank
/// than the content of the file.
pub fn merge(files: &[RankFile], plain: PlainKind) -> Result<Catalog> {
    let grid = ModelParallelGrid::of(files, plain == PlainKind::Declared)?;
    let plain = match plain {
        PlainKind::Replicas if has_layout_attributes(files) => PlainKind::Parts,
        plain => plain,
    };
    let (mut catalog, sharded) = merge_files(files, plain)?;
    catalog.plain_may_be_parts = plain == PlainKind::Parts || has_layout_attributes(files);
    if let Some(grid) = grid {
        grid.apply(&mut catalog, &sharded)?;
    }
    if has_comm_grid(files) {
        remove_comm_grid(&mut catalog.state);
    }
    Ok(catalog)
}

/// Merges files into one catalog. Also returns the plain tensors with the attribute `sharded_dims_mp`.
fn merge_files(files: &[RankFile], plain: PlainKind) -> Result<(Catalog, Vec<(TensorId, ShardedDims)>)> {
    let mut merger = Merger { files, plain, tensors: Vec::new() };
    let mut state: Option<Value> = None;
    for (index, file) in files.iter().enumerate() {
        let own = merger.renumber(index, &file.contents.value);
        match &mut state {
            None => state = Some(own),
            Some(state) => merger.merge_value(state, own, index),
        }
    }
    let mut catalog = Catalog::empty();
    catalog.archives = files.iter().map(|file| file.contents.file_range()).collect();
    catalog.state = state.unwrap_or_else(|| Value::Dict(Dict::default()));
    path::edit_leaves(&mut catalog.state, &mut |path, leaf| {
        if let Value::Other(rank_values) = leaf {
            merger.remove_ranks_without_value(path, rank_values);
        }
        LeafAction::Keep
    });
    let mut names: Vec<Option<Path>> = vec![None; merger.tensors.len()];
    path::tensors(&catalog.state, &Path::default(), &mut |path, id| {
        names[id.0 as usize].get_or_insert_with(|| path.clone());
    });
    // Tensors in attributes of dicts cannot be selected by name, but they are written with their dicts.
    for id in catalog.state.tensor_ids() {
        names[id.0 as usize].get_or_insert_with(|| Path(vec![Key::Name("attributes".into()), Key::Index(id.0.into())]));
    }
    // A tensor that was merged into the tensor of another rank has no path in the merged state dict, and gets no entry.
    let mut renumber = vec![TensorId(u32::MAX); names.len()];
    let mut sharded = Vec::new();
    let has_sharded_dims = files.iter().any(|file| !file.contents.sharded_dims.is_empty());
    for (old, name) in names.into_iter().enumerate() {
        if let Some(path) = name {
            let entry = merger.merged_entry(path.fqn(), &merger.tensors[old], &mut catalog)?;
            let parts = &merger.tensors[old];
            let dims = if has_sharded_dims { merger.sharded_dims(&entry.fqn, parts)? } else { None };
            renumber[old] = catalog.push_tensor(entry);
            sharded.extend(dims.map(|dims| (renumber[old], dims)));
        }
    }
    catalog.state.map_tensors(&mut |id| renumber[id.0 as usize]);
    Ok((catalog, sharded))
}

/// A tensor in the file of one rank: the index of the file, and the index of the tensor in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TensorOfRank {
    file: usize,
    tensor: usize,
}

struct Merger<'a> {
    files: &'a [RankFile],
    plain: PlainKind,
    /// For each tensor of the merged state dict, the tensors in the rank files that were merged to this tensor.
    tensors: Vec<Vec<TensorOfRank>>,
}

impl Merger<'_> {
    /// Returns a copy of `value` with new tensor ids, which differ from the tensor ids of all other files.
    fn renumber(&mut self, file: usize, value: &Value) -> Value {
        let first = self.tensors.len();
        let count = self.files[file].contents.tensors.len();
        self.tensors.extend((0..count).map(|tensor| vec![TensorOfRank { file, tensor }]));
        let mut value = value.clone();
        shift_tensors(&mut value, u32::try_from(first).expect("fewer than 2^32 tensors"));
        value
    }

    fn merge_value(&mut self, into: &mut Value, from: Value, file: usize) {
        match (into, from) {
            (Value::Tensor(into), Value::Tensor(from)) => self.merge_tensor(*into, from, file),
            (Value::Dict(into), Value::Dict(from)) => self.merge_dict(into, from, file),
            // Lists without dicts and tensors are not merged item by item, but compared as one value.
            (Value::List(into), Value::List(from))
                if into.len() == from.len() && into.iter().chain(&from).any(is_descended) =>
            {
                for (into, from) in into.iter_mut().zip(from) {
                    self.merge_value(into, from, file);
                }
            }
            (Value::Other(rank_values), from) => {
                match rank_values.iter_mut().find(|rank_value| rank_value.value.same_but_tensors(&from)) {
                    Some(rank_value) => {
                        rank_value.ranks.extend(self.files[file].rank);
                        for (into, from) in rank_value.value.tensor_ids().into_iter().zip(from.tensor_ids()) {
                            self.merge_tensor(into, from, file);
                        }
                    }
                    None => rank_values.push(self.rank_value(from, file..=file)),
                }
            }
            (into, from) if into.same_but_tensors(&from) => {
                for (into, from) in into.tensor_ids().into_iter().zip(from.tensor_ids()) {
                    self.merge_tensor(into, from, file);
                }
            }
            (into, from) => {
                let first = std::mem::replace(into, Value::None);
                *into = Value::Other(vec![self.rank_value(first, 0..=file - 1), self.rank_value(from, file..=file)]);
            }
        }
    }

    fn merge_tensor(&mut self, into: TensorId, from: TensorId, file: usize) {
        // This function is called for each name of a tied tensor, but the parts are added only once. If `into` and `from`
        // are one tensor, this tensor already has its parts.
        let (into, parts) = (into.0 as usize, self.tensors[from.0 as usize].clone());
        let own = self.tensors[into].iter().rev().take_while(|part| part.file == file);
        if into != from.0 as usize && !own.into_iter().any(|part| parts.contains(part)) {
            self.tensors[into].extend(parts);
        }
    }

    /// Removes from `rank_values` the ranks whose file has no value at `path`. This is needed because, when ranks first
    /// differ in a value, the earlier value is assigned to all ranks that were merged before, including ranks whose
    /// file does not have the value.
    fn remove_ranks_without_value(&self, path: &Path, rank_values: &mut [RankValue]) {
        let has_value = |rank: &Rank| {
            let file = self.files.iter().find(|file| file.rank == Some(*rank));
            file.is_none_or(|file| path.find(&file.contents.value).is_some())
        };
        for rank_value in rank_values.iter_mut() {
            rank_value.ranks.retain(has_value);
        }
    }

    fn rank_value(&self, value: Value, files: RangeInclusive<usize>) -> RankValue {
        RankValue { value, ranks: self.files[files].iter().filter_map(|file| file.rank).collect() }
    }

    fn merge_dict(&mut self, into: &mut Dict, from: Dict, file: usize) {
        let mut positions: Option<HashMap<(Arc<str>, bool), usize>> = None;
        for (index, (key, value)) in from.entries.into_iter().enumerate() {
            // The files of ranks nearly always have the same keys in the same order.
            let same = into.entries.get(index).is_some_and(|(known, _)| *known == key);
            let position = if same {
                Some(index)
            } else {
                let positions = positions.get_or_insert_with(|| {
                    (0..).zip(&into.entries).map(|(index, (key, _))| (typed_key(key), index)).collect()
                });
                positions.get(&typed_key(&key)).copied()
            };
            let Some(position) = position else {
                into.entries.push((key, value));
                continue;
            };
            self.merge_value(&mut into.entries[position].1, value, file);
        }
    }

    fn rank(&self, part: TensorOfRank) -> Option<Rank> {
        self.files[part.file].rank
    }

    fn node(&self, part: TensorOfRank) -> &TensorNode {
        &self.files[part.file].contents.tensors[part.tensor]
    }

    /// Returns the catalog entry of a tensor, with one chunk for the local part of each rank.
    fn merged_entry(&self, fqn: Fqn, parts: &[TensorOfRank], catalog: &mut Catalog) -> Result<TensorEntry> {
        if let Some(why) = parts.iter().find_map(|part| self.unreadable(*part)) {
            return Ok(TensorEntry::unreadable(fqn, why));
        }
        let first = parts[0];
        for &part in parts {
            self.check_agreement(&fqn, first, part)?;
        }
        match self.node(first) {
            TensorNode::Plain(view) => {
                let mut entry = TensorEntry::new(fqn, view.dtype, view.sizes.clone());
                entry.stride = permuted_stride(&view.sizes, &view.strides).map(Box::new);
                for &part in parts {
                    if let TensorNode::Plain(view) = self.node(part) {
                        let tile = Tile::from_region(&Region::whole(&view.sizes));
                        entry.chunks.push(chunk(&self.files[part.file].contents, view, tile, self.rank(part)));
                    }
                }
                Ok(entry)
            }
            TensorNode::Distributed { local, shape, .. } => self.merge_dtensor(fqn, local, shape, parts, catalog),
            TensorNode::Sharded { dtype, shape, stride, .. } => {
                let entry = TensorEntry {
                    stride: stride.clone().map(Box::new),
                    ..TensorEntry::new(fqn, *dtype, shape.clone())
                };
                self.merge_sharded_tensor(entry, parts)
            }
            TensorNode::Unreadable(_) => unreachable!("returned above"),
        }
    }

    /// Returns the reason why a tensor in the file of one rank cannot be read; otherwise `None`.
    fn unreadable(&self, part: TensorOfRank) -> Option<Unreadable> {
        match self.node(part) {
            TensorNode::Unreadable(kind) => {
                Some(Unreadable { file: self.files[part.file].path.clone(), kind: kind.clone() })
            }
            _ => None,
        }
    }

    fn check_agreement(&self, fqn: &Fqn, first: TensorOfRank, part: TensorOfRank) -> Result<()> {
        let describe = |found: &TensorNode| match found {
            TensorNode::Plain(view) => ("tensor", view.dtype, view.sizes.clone()),
            TensorNode::Distributed { local, shape, .. } => ("DTensor", local.dtype, shape.clone()),
            TensorNode::Sharded { dtype, shape, .. } => ("ShardedTensor", *dtype, shape.clone()),
            TensorNode::Unreadable(_) => unreachable!("a tensor with an unreadable part is not merged"),
        };
        let (left, right) = (describe(self.node(first)), describe(self.node(part)));
        let (what, left, right) = if left.0 != right.0 {
            ("kind of tensor", left.0.to_owned(), right.0.to_owned())
        } else if left.1 != right.1 {
            ("dtype", left.1.to_string(), right.1.to_string())
        } else if self.may_be_parts(first) && left.2.len() != right.2.len() {
            ("number of dims", left.2.len().to_string(), right.2.len().to_string())
        } else if !self.may_be_parts(first) && left.2 != right.2 {
            ("shape", format!("{:?}", left.2.as_slice()), format!("{:?}", right.2.as_slice()))
        } else {
            return Ok(());
        };
        let name = |part| self.rank(part).map_or_else(|| String::from("one file"), |rank| format!("rank {rank}"));
        let mut error = fqn.disagreement(
            what,
            format!("{} and {}", name(first), name(part)),
            format!("{} has {left}, {} has {right}", name(first), name(part)),
        );
        if let (Error::Catalog(CatalogError::Conflict { hint, .. }), "shape", TensorNode::Plain(_)) =
            (&mut error, what, self.node(first))
        {
            *hint = Some(PARTS_HINT.into());
        }
        Err(error)
    }

    fn may_be_parts(&self, part: TensorOfRank) -> bool {
        self.plain != PlainKind::Replicas && matches!(self.node(part), TensorNode::Plain(_))
    }

    /// Returns the attribute `sharded_dims_mp` of a tensor, which must be equal in all files; `None` if the tensor has
    /// no such attribute.
    fn sharded_dims(&self, fqn: &Fqn, parts: &[TensorOfRank]) -> Result<Option<ShardedDims>> {
        let dims = |part: TensorOfRank| match self.node(part) {
            TensorNode::Plain(view) => self.files[part.file].contents.sharded_dims.get(view),
            TensorNode::Distributed { .. } | TensorNode::Sharded { .. } | TensorNode::Unreadable(_) => None,
        };
        let first = dims(parts[0]);
        let Some(other) = parts.iter().find(|part| dims(**part) != first) else { return Ok(first.cloned()) };
        let name = |part| self.rank(part).map_or_else(|| String::from("one file"), |rank| format!("rank {rank}"));
        let text = |dims: Option<&ShardedDims>| dims.map_or_else(|| String::from("none"), show_dims);
        let (left, right) = (name(parts[0]), name(*other));
        let detail = format!("{left} has {}, {right} has {}", text(first), text(dims(*other)));
        Err(fqn.disagreement("sharded_dims_mp", format!("{left} and {right}"), detail))
    }

    fn merge_dtensor(
        &self,
        fqn: Fqn,
        local: &View,
        shape: &Dims,
        parts: &[TensorOfRank],
        catalog: &mut Catalog,
    ) -> Result<TensorEntry> {
        check_shape(&self.files[parts[0].file].path, &fqn, shape, local.dtype)?;
        let mut entry = TensorEntry::new(fqn, local.dtype, shape.clone());
        entry.class = Class::DTensor;
        for &part in parts {
            let TensorNode::Distributed { local, mesh, placements, .. } = self.node(part) else { continue };
            // A rank outside the mesh has no data. Its file does not show which slice of the root mesh the tensor is
            // on.
            if !mesh.is_member {
                continue;
            }
            let file = &self.files[part.file];
            if let (Some(own), Some(stored)) = (file.rank, mesh.rank)
                && own != stored
            {
                let name = entry.fqn.as_str();
                return Err(FormatError::wrong_rank(&file.path, name, own, "DTensor", stored).into());
            }
            let reduction = PartialReduction::new(mesh.mesh.shape(), placements).map_err(|error| {
                let hint = "redistribute it to Shard or Replicate in the job before saving";
                Error::unsupported(format!("{}: {}: {error}", file.path.display(), entry.fqn), hint)
            })?;
            let sharding = Box::new(lift_to_root(&mesh.mesh, mesh.root.as_ref(), placements, catalog));
            match &entry.sharding {
                None => {
                    entry.sharding = Some(sharding);
                    entry.partial_values =
                        reduction.map(|reduction| Box::new(PartialValues { reduction, by_chunk: Vec::new() }));
                }
                // If there is no root mesh, each rank may record only its own slice of a mesh. The placements are the
                // same on all slices.
                Some(known)
                    if known.shared.placements != sharding.shared.placements
                        || mesh.root.is_some() && *known != sharding =>
                {
                    return Err(self.layout_conflict(&entry.fqn, parts[0], part));
                }
                Some(_)
                    if entry.partial_values.as_ref().map(|partial_values| &partial_values.reduction)
                        != reduction.as_ref() =>
                {
                    return Err(self.layout_conflict(&entry.fqn, parts[0], part));
                }
                Some(_) => {}
            }
            let rank = mesh.rank.or(file.rank);
            let at = rank.and_then(|rank| mesh.mesh.coordinate(rank));
            let Some(at) = at else {
                let found = rank.map_or_else(|| String::from("a file without a rank"), |rank| format!("rank {rank}"));
                let expected = format!("a rank of its mesh {} ({})", mesh.mesh, list_ranks(mesh.mesh.ranks()));
                return Err(Error::malformed(&file.path, entry.fqn.as_str(), expected, found));
            };
            let tile = local_shard(shape, mesh.mesh.shape(), placements, &at).map_err(|error| {
                Error::malformed(
                    &file.path,
                    entry.fqn.as_str(),
                    "placements that fit the tensor",
                    format!("placements that do not fit ({error})"),
                )
            })?;
            if tile.sizes() != local.sizes {
                let expected = format!("a local tensor of shape {:?}", tile.sizes().as_slice());
                let found = format!("{:?}", local.sizes.as_slice());
                return Err(Error::malformed(&file.path, entry.fqn.as_str(), expected, found));
            }
            entry.chunks.push(chunk(&file.contents, local, tile, rank));
            // If each rank records only its own slice of the mesh, ranks of different slices hold replicas.
            if let Some(partial_values) = &mut entry.partial_values {
                partial_values.by_chunk.push(partial_index(mesh.mesh.shape(), placements, &at));
            }
        }
        Ok(entry)
    }

    fn layout_conflict(&self, fqn: &Fqn, first: TensorOfRank, part: TensorOfRank) -> Error {
        let describe = |part| match self.node(part) {
            TensorNode::Distributed { mesh, placements, .. } => {
                format!("{} on {}", comma_list(placements), mesh.mesh)
            }
            _ => String::from("none"),
        };
        let name = |part| self.rank(part).map_or_else(|| String::from("one file"), |rank| format!("rank {rank}"));
        fqn.disagreement(
            "layout",
            format!("{} and {}", name(first), name(part)),
            format!("{} has {}, {} has {}", name(first), describe(first), name(part), describe(part)),
        )
    }

    fn merge_sharded_tensor(&self, mut entry: TensorEntry, parts: &[TensorOfRank]) -> Result<TensorEntry> {
        check_shape(&self.files[parts[0].file].path, &entry.fqn, &entry.shape, entry.dtype)?;
        entry.class = Class::ShardedTensor;
        for &part in parts {
            let TensorNode::Sharded { group: ProcessGroup { rank, .. }, local, all, .. } = self.node(part) else {
                continue;
            };
            let file = &self.files[part.file];
            let bad = |expected: String, found: String| {
                Err(Error::malformed(&file.path, entry.fqn.as_str(), expected, found))
            };
            if let Some(own) = file.rank.filter(|own| own.0 != *rank) {
                let name = entry.fqn.as_str();
                return Err(FormatError::wrong_rank(&file.path, name, own, "ShardedTensor", Rank(*rank)).into());
            }
            for (region, view) in local {
                if !region.fits(&entry.shape) || region.sizes != view.sizes {
                    let expected =
                        format!("a shard of shape {:?} inside {:?}", view.sizes.as_slice(), entry.shape.as_slice());
                    return bad(expected, format!("offsets and sizes {region}"));
                }
                if !all.contains(region) {
                    return bad(String::from("a shard listed in shards_metadata"), format!("{region}"));
                }
                entry.chunks.push(chunk(&file.contents, view, Tile::from_region(region), Some(Rank(*rank))));
            }
        }
        Ok(entry)
    }
}

/// Returns a dict key as text, and whether the key is a string. A dict may have both `0` and `'0'`.
fn typed_key(key: &Value) -> (Arc<str>, bool) {
    (key_text(key), key.as_str().is_some())
}

fn check_shape(path: &std::path::Path, fqn: &Fqn, shape: &[u64], dtype: crate::catalog::Dtype) -> Result<()> {
    match checked_len_bytes(shape, dtype) {
        Some(_) => Ok(()),
        None => Err(Error::malformed(path, fqn.as_str(), "a shape that fits memory", format!("{shape:?}"))),
    }
}

/// Converts placements on a slice to placements on the root mesh of this slice. On mesh dims of the root mesh that are
/// not in the slice, the result is Replicate.
fn lift_to_root(
    mesh: &DeviceMesh,
    root: Option<&DeviceMesh>,
    placements: &[Placement],
    catalog: &mut Catalog,
) -> Sharding {
    let lifted = root.and_then(|root| {
        let (own, all) = (mesh.names()?, root.names()?);
        let positions: Vec<usize> =
            own.iter().map(|name| all.iter().position(|known| known == name)).collect::<Option<_>>()?;
        let mut lifted = vec![Placement::Replicate; all.len()];
        for (&position, placement) in positions.iter().zip(placements) {
            lifted[position] = *placement;
        }
        let slice = (positions.len() < all.len()).then(|| positions.iter().copied().map(MeshDim).collect());
        positions.is_sorted().then_some((root, lifted, slice))
    });
    let (mesh, placements, slice) = lifted.unwrap_or_else(|| (mesh, placements.to_vec(), None));
    Sharding { mesh: catalog.intern_mesh(mesh.clone()), shared: SharedTensor { slice, ..placements.into() } }
}
