//! Checkpoints of makani's model-parallel ranks (weather models of NVIDIA).
//!
//! The ranks of a makani job form a grid. Each dim of the grid is a named group of ranks: `h` and `w` shard the rows
//! and columns of the model's input fields, `matmul` shards weights. A rank saves its parts of the tensors as plain
//! tensors, in a file such as `ckpt_mp3_v0.tar`. The attribute `sharded_dims_mp` of a tensor names, for each tensor
//! dim, the group that shards the dim. `comm_grid` in the state dict has the size of each group, and the position of
//! the saving rank in the group (called `rank`). Groups that contain other groups, such as `spatial` with `h` and `w`,
//! are in `comm_grid`, too.
//!
//! ```text
//!     comm_grid of rank 3: model 3 of 4, spatial 3 of 4, matmul 0 of 1, w 1 of 2, h 1 of 2
//!     mesh:                matmul=1,h=2,w=2
//!     [None, None, h, w]   R,S(2),S(3)
//! ```
//!
//! The files do not record the shapes of whole tensors, nor how dims are split that do not divide evenly. Both follow
//! from the parts of all ranks, as in makani's `convert_checkpoint.py`. A file that makani saved in its `flexible` mode
//! has whole tensors with `sharded_dims_mp`, and no `comm_grid`.
//!
//! Unit of sizes: elements of tensors, ranks of groups. Source: `makani/utils/driver.py` (`save_checkpoint`),
//! `makani/utils/comm.py`.

use std::collections::{BTreeSet, HashMap};
use std::path::Path as FilePath;
use std::sync::Arc;

use indexmap::IndexMap;

use super::attributes::SHARDED_DIMS;
use super::context::ShardedDims;
use super::rank_file::RankFile;
use super::write::{list, write_tensor_with_attributes};
use crate::catalog::{Catalog, Dict, DictKind, Dtype, RankValue, TensorEntry, TensorId, Value, checked_len_bytes};
use crate::error::{CatalogError, Error, FormatError, Result};
use crate::format::folder_of;
use crate::format::shortfall::Shortfall;
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::whole::{PartError, RankPart, assemble};
use crate::layout::{DeviceMesh, Dims, Placement, Rank, Split, TensorDim, comma_list};
use crate::name_list::{FEW, Numbers, short_list};
use torch_pickle::pickle::Writer;

/// The key, in the state dict of makani, of the grid of ranks: the size of each group of ranks, and the position of the
/// saving rank in the group.
const COMM_GRID: &str = "comm_grid";
const SIZE: &str = "size";
const POSITION: &str = "rank";

/// The name of the group of all model-parallel ranks. The position of a rank in this group is the number in the name of
/// the rank's file.
const ALL_RANKS: &str = "model";
/// The name of the group of ranks that together hold one input field of the weather model: each rank has some rows
/// (`h`) and columns (`w`) of the field.
const SPATIAL: &str = "spatial";
/// The names of the groups that shard tensors, in the order in which makani numbers ranks: the position in the last
/// group varies fastest.
const ORDER: [&str; 3] = ["matmul", "h", "w"];

/// The maximum number of groups with more than one rank in `comm_grid`. makani has five.
const MAX_GROUPS: usize = 12;

/// A group of ranks, as the file of one of its ranks records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CommGroup {
    size: u64,
    /// The position of the saving rank in the group.
    position: u64,
}

/// The `comm_grid` of one file.
type CommGrid = IndexMap<Arc<str>, CommGroup>;

/// The grid of the makani ranks that saved a checkpoint: a mesh whose dims are named groups of ranks.
pub struct ModelParallelGrid<'a> {
    files: &'a [RankFile],
    mesh: DeviceMesh,
    /// The names of all groups in `comm_grid`.
    groups: Vec<String>,
}

/// Returns whether files have a `comm_grid`. Examines only the first file, because a search in the state dicts of all
/// ranks would take long.
pub fn has_comm_grid(files: &[RankFile]) -> bool {
    files.first().is_some_and(|file| comm_grid(&file.contents.value).is_some())
}

/// Removes the `comm_grid` from a state dict, because it describes the ranks that saved the files, and not the ranks of
/// DST.
pub fn remove_comm_grid(state: &mut Value) {
    if let Value::Dict(dict) = state {
        dict.entries.retain(|(key, _)| key.as_str() != Some(COMM_GRID));
    }
}

/// Returns the grid in the state dict of one file; `None` if the state dict has no grid.
fn comm_grid(state: &Value) -> Option<CommGrid> {
    let group = |(name, group): &(Value, Value)| {
        let natural = |key| u64::try_from(group.as_dict()?.get(key)?.as_i64()?).ok();
        Some((Arc::from(name.as_str()?), CommGroup { size: natural(SIZE)?, position: natural(POSITION)? }))
    };
    let grid = state.as_dict()?.get(COMM_GRID)?.as_dict()?;
    (!grid.entries.is_empty()).then(|| grid.entries.iter().map(group).collect())?
}

/// Returns a shortfall if a file that is read alone has only the tensors of one of several model-parallel ranks.
pub fn shortfall_of_single(file: &RankFile) -> Option<Shortfall> {
    let grid = comm_grid(&file.contents.value)?;
    let all = grid.get(ALL_RANKS).or_else(|| grid.values().max_by_key(|group| group.size))?;
    (all.size > 1).then(|| {
        let (path, CommGroup { size, position }) = (file.path.display(), all);
        let what = format!(
            "{path} has only the parts of model-parallel rank {position}: its {COMM_GRID} records {size} ranks"
        );
        Shortfall::new(Vec::new(), Error::usage(what, "give the folder that contains the files of all ranks"))
            .of_one_file()
    })
}

impl<'a> ModelParallelGrid<'a> {
    /// Returns the grid of the ranks that saved `files`. Returns `None` if no file has a grid or a tensor with
    /// `sharded_dims_mp`, or if the user declares the layout (`is_declared`) of files without a grid.
    ///
    /// # Errors
    /// `Missing` if ranks have no file, `Conflict` and `Malformed` if files contradict each other, `Unsupported` for
    /// the files of several ranks that have no grid.
    pub fn of(files: &'a [RankFile], is_declared: bool) -> Result<Option<Self>> {
        let has_attributes = files.iter().any(|file| !file.contents.sharded_dims.is_empty());
        if !has_attributes && !has_comm_grid(files) {
            return Ok(None);
        }
        let used: BTreeSet<&Arc<str>> =
            files.iter().flat_map(|file| file.contents.sharded_dims.values()).flatten().flatten().collect();
        let grids: Vec<Option<CommGrid>> = files.iter().map(|file| comm_grid(&file.contents.value)).collect();
        let Some(first) = grids.iter().position(Option::is_some) else {
            return match files {
                [_] if has_attributes => Ok(Some(Self::of_whole_tensors(files, &used)?)),
                [first, ..] if has_attributes && !is_declared => Err(without_grid(&first.path)),
                _ => Ok(None),
            };
        };
        if let Some(at) = grids.iter().position(Option::is_none) {
            let expected = format!("an entry as in {}", files[first].path.display());
            return Err(Error::malformed(&files[at].path, COMM_GRID, expected, "none"));
        }
        let grids: Vec<CommGrid> = grids.into_iter().flatten().collect();
        check_agreement(files, &grids)?;
        check_ranks(files, &grids)?;
        let mesh = mesh(files, &grids, &used)?;
        Ok(Some(Self { files, mesh, groups: grids[0].keys().map(ToString::to_string).collect() }))
    }

    /// Returns the grid of a single file with whole tensors, which makani saves in its `flexible` mode.
    fn of_whole_tensors(files: &'a [RankFile], used: &BTreeSet<&Arc<str>>) -> Result<Self> {
        let mut names: Vec<&Arc<str>> = used.iter().copied().collect();
        names.sort_by_key(|name| order(name));
        let mut names: Vec<String> = names.into_iter().map(ToString::to_string).collect();
        if names.is_empty() {
            names.push(ALL_RANKS.to_owned());
        }
        let shape: Dims = names.iter().map(|_| 1).collect();
        let rank = files[0].rank.unwrap_or(Rank(0));
        let known = [ALL_RANKS, SPATIAL].into_iter().chain(ORDER.into_iter().rev());
        let mut groups: Vec<String> = known.map(str::to_owned).collect();
        groups.extend(names.iter().filter(|name| !groups.contains(name)).cloned().collect::<Vec<String>>());
        Ok(Self { files, mesh: DeviceMesh::new(shape, vec![rank], Some(names))?, groups })
    }

    /// Joins the parts of the tensors with `sharded_dims_mp`. Before this call, each of these tensors has the shape of
    /// its first part in the catalog.
    ///
    /// # Errors
    /// `Malformed` if an attribute or a part does not fit the grid.
    pub fn apply(self, catalog: &mut Catalog, sharded: &[(TensorId, ShardedDims)]) -> Result<()> {
        let tensors: Vec<(TensorId, TensorOnGrid)> = sharded
            .iter()
            .map(|(id, dims)| Ok((*id, self.tensor(catalog.tensor(*id), dims)?)))
            .collect::<Result<_>>()?;
        let mesh = catalog.intern_mesh(self.mesh.clone());
        let rule = common_rule(tensors.iter().flat_map(|(_, tensor)| tensor.sizes.iter().flatten()));
        for (id, TensorOnGrid { placements, sizes, parts }) in tensors {
            let split = |sizes: &Option<Vec<u64>>| match (&rule, sizes) {
                (Some(rule), _) => rule.clone(),
                (None, Some(sizes)) => rule_of(sizes).unwrap_or_else(|| Split::Sizes(sizes.as_slice().into())),
                (None, None) => Split::Chunk,
            };
            let mut splits: Vec<Split> = sizes.iter().map(split).collect();
            if splits.iter().all(|split| *split == Split::Chunk) {
                splits.clear();
            }
            let shared = SharedTensor { placements, splits, slice: None };
            let entry = catalog.tensor(id);
            let found =
                assemble(&self.mesh, &shared, &parts, &|_| false).map_err(|error| self.part_error(entry, error))?;
            if checked_len_bytes(&found.shape, entry.dtype).is_none() {
                let (path, found) = (&self.files[0].path, format!("{:?}", found.shape));
                return Err(Error::malformed(path, entry.fqn.as_str(), "parts whose whole tensor fits memory", found));
            }
            let joined = entry.joined((mesh, &self.mesh), shared, &parts, found)?;
            catalog.tensors[id.0 as usize] = joined;
        }
        catalog.model_parallel_groups = self.groups;
        Ok(())
    }

    /// Converts the attribute `sharded_dims_mp` of a tensor to placements, and finds the sizes of the tensor's parts.
    fn tensor(&self, entry: &TensorEntry, dims: &ShardedDims) -> Result<TensorOnGrid> {
        let wrong = |expected: &str, found: String| {
            Err(Error::malformed(&self.files[0].path, format!("{}, {SHARDED_DIMS}", entry.fqn), expected, found))
        };
        let parts = entry.local_shapes();
        let mut placements = vec![Placement::Replicate; self.mesh.ndim()];
        let mut sizes = vec![None; self.mesh.ndim()];
        for (dim, name) in dims.iter().enumerate().filter_map(|(dim, name)| Some((dim, name.as_ref()?))) {
            let Some(mesh_dim) = self.mesh.dim_by_name(name) else {
                let expected = format!("a group of {COMM_GRID} ({})", short_list(&self.groups, FEW));
                return wrong(&expected, format!("`{name}`"));
            };
            if placements[mesh_dim.0] != Placement::Replicate {
                return wrong("each group for one dim at most", format!("`{name}` twice"));
            }
            placements[mesh_dim.0] = Placement::Shard(TensorDim(dim));
            let mut own =
                vec![0; usize::try_from(self.mesh.shape()[mesh_dim.0]).expect("no more than there are files")];
            for part in parts.iter().rev() {
                if let Some(at) = self.mesh.coordinate(part.rank) {
                    own[usize::try_from(at[mesh_dim.0]).expect("an index of a list")] = part.sizes[dim];
                }
            }
            sizes[mesh_dim.0] = Some(own);
        }
        Ok(TensorOnGrid { placements, sizes, parts })
    }

    fn part_error(&self, entry: &TensorEntry, error: PartError) -> Error {
        let path = |rank: Option<Rank>| {
            let file = self.files.iter().find(|file| rank.is_some() && file.rank == rank);
            &file.unwrap_or(&self.files[0]).path
        };
        let (rank, expected, found) = match error {
            PartError::WrongSizes { rank, expected, found, .. } => (
                Some(rank),
                format!("a part of shape {:?}, which fits the parts of the other ranks", expected.as_slice()),
                format!("{:?}", found.as_slice()),
            ),
            PartError::Missing { rank } | PartError::OutsideMesh { rank } => {
                (Some(rank), String::from("a part of this tensor on every rank"), String::from("none"))
            }
            PartError::Overflow { dim } => {
                (None, String::from("sizes whose sum is below 2^64"), format!("a larger sum along dim {dim}"))
            }
            PartError::Layout { error, .. } => (None, format!("a `{SHARDED_DIMS}` that fits"), error.to_string()),
        };
        Error::malformed(path(rank), entry.fqn.as_str(), expected, found)
    }
}

/// The layout of a tensor on the grid, before its split rules are known.
struct TensorOnGrid {
    placements: Vec<Placement>,
    /// For each mesh dim, the sizes of the parts along the tensor dim that the mesh dim shards, in elements, by
    /// position in the mesh dim; `None` for a mesh dim that does not shard the tensor.
    sizes: Vec<Option<Vec<u64>>>,
    parts: Vec<RankPart>,
}

/// The split rules of makani, newest first. Before `balanced`, makani used the rule `makani`.
const RULES: [Split; 3] = [Split::Balanced, Split::Makani, Split::Chunk];

/// Returns the split rule that gives the sizes of all parts, if there is one.
fn common_rule<'s>(sizes: impl Iterator<Item = &'s Vec<u64>> + Clone) -> Option<Split> {
    RULES.into_iter().find(|rule| sizes.clone().all(|sizes| rule.total(sizes).is_some()))
}

fn rule_of(sizes: &Vec<u64>) -> Option<Split> {
    common_rule(std::iter::once(sizes))
}

fn without_grid(path: &FilePath) -> Error {
    Error::unsupported(
        format!(
            "{}: tensors have `{SHARDED_DIMS}`, but the file has no `{COMM_GRID}`, so the sizes of the groups are unknown",
            path.display()
        ),
        "declare the layout of the tensors with options::src_mesh and options::src_placements, or load the checkpoint with \
         a newer makani and save it again",
    )
}

/// Checks that the `comm_grid` of every file has the same groups with the same sizes, and that each position is below
/// the size of its group.
fn check_agreement(files: &[RankFile], grids: &[CommGrid]) -> Result<()> {
    for (file, grid) in files.iter().zip(grids) {
        if let Some((name, group)) = grid.iter().find(|(_, group)| group.position >= group.size) {
            let expected = format!("a {POSITION} below {}", group.size);
            let at = format!("{COMM_GRID}, {name}");
            return Err(Error::malformed(&file.path, at, expected, group.position.to_string()));
        }
        let same = grid.len() == grids[0].len()
            && grids[0].iter().all(|(name, group)| grid.get(name).is_some_and(|own| own.size == group.size));
        if !same {
            let sizes = |grid: &CommGrid| {
                let sizes: Vec<String> = grid.iter().map(|(name, group)| format!("{name}={}", group.size)).collect();
                sizes.join(",")
            };
            return Err(Error::Catalog(CatalogError::Conflict {
                fqn: String::from(COMM_GRID),
                what: "the grid of ranks",
                between: format!("{} and {}", files[0].path.display(), file.path.display()),
                detail: format!("{} and {}", sizes(&grids[0]), sizes(grid)),
                hint: Some(String::from("check that all files come from one save of one job")),
            }));
        }
    }
    Ok(())
}

/// Checks that the number in the name of each file is the position that the file records, and that every rank has a
/// file.
fn check_ranks(files: &[RankFile], grids: &[CommGrid]) -> Result<()> {
    let Some(CommGroup { size, .. }) = grids[0].get(ALL_RANKS) else { return Ok(()) };
    for (file, grid) in files.iter().zip(grids) {
        let stored = grid[ALL_RANKS].position;
        let stored = Rank(u32::try_from(stored).unwrap_or(u32::MAX));
        if let Some(own) = file.rank.filter(|own| *own != stored) {
            return Err(FormatError::wrong_rank(&file.path, COMM_GRID, own, COMM_GRID, stored).into());
        }
    }
    let highest = u32::try_from(size - 1).unwrap_or(u32::MAX);
    let present = files.iter().filter_map(|file| Some(file.rank?.0));
    let Some(missing) = Numbers::missing(0..=highest, present) else { return Ok(()) };
    Err(Error::missing(
        folder_of(&files[0].path),
        String::from(COMM_GRID),
        format!("the files of {size} ranks"),
        missing.short("rank", "ranks"),
    )
    .naming(&missing.names("rank", "ranks")))
}

/// Returns the index of a group in [`ORDER`]. Groups that are not in `ORDER` come last.
fn order(name: &str) -> usize {
    ORDER.iter().position(|known| *known == name).unwrap_or(ORDER.len())
}

/// Returns the mesh of the ranks. The dims of the mesh are groups of `comm_grid`. They are chosen so that no two ranks
/// have equal positions in all chosen groups, and so that the product of their sizes is the number of ranks. If several
/// choices are possible, the choice with the most groups is used. A group of one rank is also a mesh dim if
/// `sharded_dims_mp` names the group.
fn mesh(files: &[RankFile], grids: &[CommGrid], used: &BTreeSet<&Arc<str>>) -> Result<DeviceMesh> {
    let size = |name: &Arc<str>| grids[0][name].size;
    let large: Vec<&Arc<str>> = grids[0].keys().filter(|name| size(name) > 1).collect();
    let wrong = || {
        let sizes: Vec<String> = grids[0].iter().map(|(name, group)| format!("{name}={}", group.size)).collect();
        let expected = format!("groups that give each of the {} ranks a different position", files.len());
        Error::malformed(&files[0].path, COMM_GRID, expected, short_list(&sizes, MAX_GROUPS))
    };
    if large.len() > MAX_GROUPS {
        return Err(wrong());
    }
    // If other groups have the same ranks, the groups that shard tensors are preferred.
    let fineness = |names: &[&Arc<str>]| (names.len(), names.iter().filter(|name| order(name) < ORDER.len()).count());
    let mut finest: Option<Vec<&Arc<str>>> = None;
    for mask in 0_u32..1 << large.len() {
        let chosen: Vec<&Arc<str>> =
            (0..large.len()).filter(|bit| mask >> bit & 1 == 1).map(|bit| large[bit]).collect();
        let count = chosen.iter().try_fold(1_u64, |count, name| count.checked_mul(size(name)));
        let has_used = large.iter().all(|name| !used.contains(name) || chosen.contains(name));
        let is_finer = finest.as_ref().is_none_or(|known| fineness(known) < fineness(&chosen));
        if count == Some(files.len() as u64) && has_used && is_finer && tells_apart(&chosen, grids) {
            finest = Some(chosen);
        }
    }
    let mut names = finest.ok_or_else(wrong)?;
    names.extend(grids[0].keys().filter(|name| size(name) == 1 && used.contains(name)));
    if names.is_empty() {
        // There is a single rank, and no tensor is sharded over any group.
        names.extend(grids[0].keys().next());
    }
    names.sort_by_key(|name| order(name));
    let ranks: Vec<Rank> = (0..).map(Rank).zip(files).map(|(index, file)| file.rank.unwrap_or(index)).collect();
    let row_major = |names: &[&Arc<str>]| {
        let index = |grid: &CommGrid| names.iter().fold(0, |index, name| index * size(name) + grid[*name].position);
        let mut sorted: Vec<(u64, Rank)> = grids.iter().map(index).zip(ranks.iter().copied()).collect();
        sorted.sort_unstable();
        sorted.into_iter().map(|(_, rank)| rank).collect::<Vec<Rank>>()
    };
    if !row_major(&names).is_sorted() {
        // Finds the rank that has position 1 in the group `name`, and position 0 in all other groups.
        let second = |name: &Arc<str>| {
            let is_it = |grid: &CommGrid| names.iter().all(|other| grid[*other].position == u64::from(*other == name));
            grids.iter().position(is_it).map(|at| ranks[at])
        };
        let strides: HashMap<&Arc<str>, Option<Rank>> = names.iter().map(|name| (*name, second(name))).collect();
        names.sort_by_key(|name| std::cmp::Reverse(strides[name]));
    }
    let shape: Dims = names.iter().map(|name| size(name)).collect();
    Ok(DeviceMesh::new(shape, row_major(&names), Some(names.iter().map(ToString::to_string).collect()))?)
}

/// Returns whether no two ranks have the same positions in these groups.
fn tells_apart(names: &[&Arc<str>], grids: &[CommGrid]) -> bool {
    let mut seen = BTreeSet::new();
    grids.iter().all(|grid| seen.insert(names.iter().map(|name| grid[*name].position).collect::<Vec<u64>>()))
}

/// The target of a conversion whose source is a checkpoint of makani: rank files that makani may load.
pub struct GridTarget<'a> {
    pub source: &'a Catalog,
    pub mesh: &'a DeviceMesh,
    pub world_size: u32,
}

/// A state dict in the form that makani loads.
pub struct MakaniState {
    /// The state dict, with the `comm_grid` of each rank.
    pub state: Value,
    /// The value of `sharded_dims_mp` of each tensor that has this attribute.
    pub sharded_dims: HashMap<TensorId, ShardedDims>,
}

impl GridTarget<'_> {
    /// Returns the state dict with the `comm_grid` of every rank, and the value of `sharded_dims_mp` for each tensor in
    /// `parts`. `parts` lists the tensors of which each rank stores its local part as a plain tensor. Returns `None` if
    /// the source is not a checkpoint of makani or if `parts` is empty. Also returns `None`, and adds a note, if makani
    /// cannot load the result.
    pub fn plan<'p>(
        &self,
        state: &Value,
        parts: impl Iterator<Item = (TensorId, &'p SharedTensor)>,
        notes: &mut Vec<String>,
    ) -> Option<MakaniState> {
        let mut parts = parts.peekable();
        if self.source.model_parallel_groups.is_empty() || parts.peek().is_none() {
            return None;
        }
        let dims = |(id, shared): (TensorId, &SharedTensor)| {
            let entry = self.source.tensor(id);
            let inexpressible = || {
                let placements = comma_list(&shared.placements);
                format!(
                    "`{}` has the placements {placements}, and `{SHARDED_DIMS}` has one group for each dim",
                    entry.fqn
                )
            };
            self.dims(entry, shared).map(|dims| (id, dims)).ok_or_else(inexpressible)
        };
        let planned = || -> Result<MakaniState, String> {
            let state = self.state_with_grid(state)?;
            Ok(MakaniState { state, sharded_dims: parts.map(dims).collect::<Result<_, String>>()? })
        };
        match planned() {
            Ok(planned) => {
                notes.extend(self.note_about_order());
                Some(planned)
            }
            Err(reason) => {
                notes.push(format!(
                    "DST has no `{COMM_GRID}` and no `{SHARDED_DIMS}`, so makani cannot load it, and dtshard reads it only \
                     with options::src_mesh and options::src_placements: {reason}"
                ));
                None
            }
        }
    }

    /// Returns the value of `sharded_dims_mp` for a tensor with these placements; `None` if the attribute cannot
    /// express them. If a group shards the tensor in the source and is not a dim of the target mesh, the value still
    /// has this group, which has one rank in the target.
    fn dims(&self, entry: &TensorEntry, shared: &SharedTensor) -> Option<ShardedDims> {
        let names = self.mesh.names()?;
        let mut dims: Vec<Option<Arc<str>>> = vec![None; entry.shape.len()];
        for (placement, name) in shared.placements.iter().zip(names) {
            match placement {
                Placement::Replicate => {}
                Placement::Shard(dim) => {
                    let own = dims.get_mut(dim.0)?;
                    if own.is_some() {
                        return None;
                    }
                    *own = Some(name.as_str().into());
                }
                Placement::StridedShard { .. } | Placement::Partial(_) => return None,
            }
        }
        if let Some(sharding) = &entry.sharding {
            let theirs = self.source.mesh(sharding).names().unwrap_or_default();
            for (placement, name) in sharding.shared.placements.iter().zip(theirs) {
                let is_kept = !names.contains(name) && self.source.model_parallel_groups.contains(name);
                if let Placement::Shard(dim) = placement
                    && is_kept
                    && let Some(own @ None) = dims.get_mut(dim.0)
                {
                    *own = Some(name.as_str().into());
                }
            }
        }
        Some(dims.into())
    }

    fn state_with_grid(&self, state: &Value) -> Result<Value, String> {
        const BEFORE: &str = "model_state";
        let (mesh, names) = (self.mesh, self.mesh.names().unwrap_or_default());
        let is_row_major = mesh.ranks_are_row_major() && mesh.world_size() == self.world_size as usize;
        if names.is_empty() || !names.iter().all(|name| self.source.model_parallel_groups.contains(name)) {
            let groups = short_list(&self.source.model_parallel_groups, FEW);
            return Err(format!("the mesh {mesh} has other dims than the groups of makani ({groups})"));
        }
        if !is_row_major {
            return Err(format!("the ranks of the mesh {mesh} are not numbered from 0 in row-major order"));
        }
        let position = |dict: &Dict| dict.entries.iter().position(|(key, _)| key.as_str() == Some(BEFORE));
        let Some((mut dict, at)) = state.as_dict().and_then(|dict| Some((dict.clone(), position(dict)?))) else {
            return Err(format!("DST has no key `{BEFORE}`"));
        };
        let of_rank = |(rank, position): (Rank, Dims)| RankValue { value: self.grid_at(&position), ranks: vec![rank] };
        let grid = Value::Other(mesh.coordinates().map(of_rank).collect());
        dict.entries.insert(at + 1, (Value::Str(COMM_GRID.into()), grid));
        Ok(Value::Dict(dict))
    }

    /// Returns the `comm_grid` of the rank at a coordinate of the mesh.
    fn grid_at(&self, coordinate: &[u64]) -> Value {
        let names = self.mesh.names().unwrap_or_default();
        let entry = |group: &String| {
            let is_member = |name: &str| match group.as_str() {
                _ if names.contains(group) => name == group,
                ALL_RANKS => true,
                SPATIAL => name == "h" || name == "w",
                _ => false,
            };
            let (mut size, mut position) = (1, 0);
            for (dim, _) in names.iter().enumerate().filter(|(_, name)| is_member(name)) {
                size *= self.mesh.shape()[dim];
                position = position * self.mesh.shape()[dim] + coordinate[dim];
            }
            let field = |key: &str, number: u64| {
                let number = i64::try_from(number).expect("no more than there are ranks");
                (Value::Str(key.into()), Value::Int(number))
            };
            let entries = vec![field(SIZE, size), field(POSITION, position)];
            (Value::Str(group.as_str().into()), Value::Dict(Dict { entries, ..Dict::default() }))
        };
        let entries = self.source.model_parallel_groups.iter().map(entry).collect();
        Value::Dict(Dict { kind: DictKind::Ordered, entries, ..Dict::default() })
    }

    /// Returns a note if the dims of the mesh do not have the order in which makani numbers ranks ([`ORDER`]).
    fn note_about_order(&self) -> Option<String> {
        let mesh = self.mesh;
        let names = mesh.names()?.iter().zip(mesh.shape()).filter(|(_, size)| **size > 1).map(|(name, _)| order(name));
        (!names.is_sorted()).then(|| {
            format!("makani numbers ranks in the order {}, so it cannot load the mesh {mesh} of DST", ORDER.join(", "))
        })
    }
}

/// Writes the part of a tensor that one rank stores, with the attribute `sharded_dims_mp`.
pub fn write_part(writer: &mut Writer, part: (Dtype, usize, &[u64]), dims: &ShardedDims) {
    write_tensor_with_attributes(writer, part, |writer| {
        writer.empty_dict().string(SHARDED_DIMS);
        list(writer, dims, |writer, name| {
            match name {
                Some(name) => writer.string(name),
                None => writer.none(),
            };
        });
        writer.setitem();
    });
}
