//! `layout.json`: describes how the tensors in rank files are sharded, and the state dict that contains them.
//!
//! ```json
//! {"version": 1, "world_size": 4,
//!  "meshes": [{"dims": [["dp", 2], ["tp", 2]]}],
//!  "tensors": {
//!   "model.w": {"dtype": "f32", "shape": [7, 3], "class": "dtensor", "mesh": 0, "placements": "S(0),R"},
//!   "model.head": {"tied_to": "model.w"},
//!   "step": {"dtype": "i64", "shape": []}},
//!  "state": {"model": {"w": {"$tensor": "model.w"}, "head": {"$tensor": "model.head"}}, "step": {"$tensor": "step"}}}
//! ```
//!
//! Shapes are the shapes of whole tensors. Unit of shapes: elements. If the ranks of a mesh are not `0, 1, 2, ...`, the
//! mesh has a list `ranks`. Optional fields of a tensor: `splits` gives the split rule of each mesh dim if a rule is
//! not `torch.chunk`; `slice` lists the mesh dims of the tensor's mesh if this mesh is a slice; `ranks` lists the ranks
//! that have a plain tensor if not all ranks have it. The keys of `tensors` are the keys in the rank files, and the
//! names of the tensors in `state`. [`super::encode`] describes the encoding of `state`.
//!
//! Invariant: a document that was read is consistent. Equal documents are rendered as equal texts.

use std::collections::HashMap;
use std::path::Path as FilePath;

use serde::Deserialize;
use serde_json::json;

use super::decode;
use super::tree::Tree;
use crate::catalog::path::tensors;
use crate::catalog::{Class, Dtype, Fqn, MeshId, Path, Sharding, TensorId, Value, checked_len_bytes};
use crate::error::{Error, Result, Wrong};
use crate::format::json::{self, DistinctKeys};
use crate::json_text;
use crate::layout::distinct_tiles::SharedTensor;
use crate::layout::{DeviceMesh, Dims, MeshDim, Placement, Rank, Split, numel, parse_placements};

/// The name of the document next to the rank files.
pub const FILE_NAME: &str = "layout.json";

/// The maximum size of a document in bytes. The document of a million tensors takes about 300 MB.
const MAX_BYTES: u64 = 1 << 30;

/// The maximum number of dims of a tensor. No real tensor has more dims.
const MAX_DIMS: usize = 64;

/// The maximum number of ranks in all meshes of a document together. The limit exists because each rank takes memory,
/// although a short text can describe a mesh of many ranks.
const MAX_CELLS: u64 = 1 << 24;

const VERSION: u64 = 1;

/// The content of a `layout.json`, which has been checked for consistency.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalDocument {
    pub world_size: u32,
    pub meshes: Vec<DeviceMesh>,
    pub tensors: Vec<DescribedTensor>,
    /// The state dict. Its tensor ids are indices of `tensors`.
    pub state: Value,
}

/// The description of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct DescribedTensor {
    /// All names of the tensor: its first name, followed by the further names if the tensor is tied. Each name is a key
    /// in the rank files.
    pub names: Vec<Fqn>,
    pub dtype: Dtype,
    pub shape: Dims,
    pub class: Class,
    /// The sharding of the tensor; `None` for a plain tensor. The mesh id is an index of the document's `meshes`.
    pub sharding: Option<Sharding>,
    /// For a plain tensor, the ranks that have the tensor, in ascending order; `None` if all ranks have the tensor.
    pub ranks: Option<Vec<Rank>>,
}

/// The names of tensor classes in `layout.json`.
const CLASSES: [(&str, Class); 3] =
    [("tensor", Class::Tensor), ("dtensor", Class::DTensor), ("sharded-tensor", Class::ShardedTensor)];

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a layout")]
struct DocumentJson {
    version: u64,
    world_size: u32,
    meshes: Vec<MeshJson>,
    tensors: DistinctKeys<TensorJson>,
    state: Tree,
}

/// Reads only the version, so that a document of a later version gives a clear error even if this version of dtshard
/// cannot read other fields of the document.
#[derive(Deserialize)]
struct VersionOnly {
    version: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a mesh")]
struct MeshJson {
    dims: Vec<(Option<String>, u64)>,
    ranks: Option<Vec<u32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a tensor")]
struct TensorJson {
    dtype: Option<String>,
    shape: Option<Vec<u64>>,
    class: Option<String>,
    mesh: Option<u32>,
    placements: Option<String>,
    splits: Option<Vec<String>>,
    slice: Option<Vec<usize>>,
    ranks: Option<Vec<u32>>,
    tied_to: Option<String>,
}

// ---------------------------------------------------------------------------------------------------- reading

/// Reads and checks a document.
///
/// # Errors
/// `Malformed` naming the position in the file, `Unsupported` for a later version, `Io`.
pub fn read(path: &FilePath) -> Result<LocalDocument> {
    parse(path, &json::read_document(path, MAX_BYTES)?)
}

/// Parses and checks the text of a document; `path` is used in error messages only.
///
/// # Errors
/// The errors of [`read`].
pub fn parse(path: &FilePath, text: &[u8]) -> Result<LocalDocument> {
    let text: DocumentJson =
        serde_json::from_slice(text).map_err(|error| match serde_json::from_slice::<VersionOnly>(text) {
            Ok(VersionOnly { version }) if version != VERSION => unknown_version(path, version),
            _ => json_text::malformed(path, &error, "a layout of rank files"),
        })?;
    if text.version != VERSION {
        return Err(unknown_version(path, text.version));
    }
    Ok(check(text).map_err(|wrong| wrong.within(path))?)
}

fn unknown_version(path: &FilePath, version: u64) -> Error {
    Error::unsupported(
        format!(
            "{}: version {version} of the layout is not supported; this dtshard reads version {VERSION}",
            path.display()
        ),
        "use a newer dtshard, or write the checkpoint again with this version",
    )
}

fn fail<T>(at: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong::new(at, expected, found))
}

fn check(text: DocumentJson) -> Result<LocalDocument, Wrong> {
    let DocumentJson { world_size, meshes, tensors: DistinctKeys(described), state: tree, .. } = text;
    if world_size == 0 {
        return fail("world_size", "at least 1", "0");
    }
    let meshes = check_meshes(meshes, world_size)?;
    let mut tensors: Vec<DescribedTensor> = Vec::new();
    let mut ids: HashMap<&str, TensorId> = HashMap::new();
    for (name, text) in described.iter().filter(|(_, text)| text.tied_to.is_none()) {
        ids.insert(name, TensorId(u32::try_from(tensors.len()).expect("a text has fewer than 2^32 tensors")));
        tensors.push(check_tensor(name, text, &meshes, world_size)?);
    }
    let own = ids.clone();
    for (name, text) in &described {
        let Some(other) = &text.tied_to else { continue };
        let Some(id) = own.get(other.as_str()) else {
            return fail(name, "a tensor with its own description in tied_to", format!("`{other}`"));
        };
        if !text.is_tie() {
            return fail(name, "no other key beside tied_to", "other keys");
        }
        ids.insert(name, *id);
        tensors[id.0 as usize].names.push(Fqn::from(name.as_str()));
    }
    let state = decode::decode(&tree, &ids, world_size)?;
    let mut named = 0;
    let mut elsewhere = None;
    visit_tensors(&state, &mut |path, id| {
        named += 1;
        let name = path.to_string();
        if ids.get(name.as_str()) != Some(&id) {
            elsewhere.get_or_insert((name, id));
        }
    });
    if let Some((name, id)) = elsewhere {
        let found = format!("the tensor {}", tensors[id.0 as usize].names[0]);
        return fail("state", format!("the tensor of the same name at {name}"), found);
    }
    let references = state.tensor_ids().len();
    if named != ids.len() || references != named {
        let found = format!("{references} references to {} names", ids.len());
        return fail("state", "every tensor once, at the path of its name", found);
    }
    Ok(LocalDocument { world_size, meshes, tensors, state })
}

fn visit_tensors(state: &Value, visit: &mut dyn FnMut(&Path, TensorId)) {
    tensors(state, &Path::default(), visit);
}

fn check_meshes(texts: Vec<MeshJson>, world_size: u32) -> Result<Vec<DeviceMesh>, Wrong> {
    let mut cells_left = MAX_CELLS;
    let mut meshes = Vec::new();
    for (index, MeshJson { dims, ranks }) in texts.into_iter().enumerate() {
        let at = format!("mesh {index}");
        let shape: Dims = dims.iter().map(|(_, size)| *size).collect();
        let cells = numel(&shape).filter(|cells| *cells <= u64::from(world_size) && shape.len() <= MAX_DIMS);
        let Some(left) = cells.and_then(|cells| cells_left.checked_sub(cells)) else {
            let expected = match cells {
                None => format!("at most one cell for each rank (world_size is {world_size})"),
                Some(_) => format!("at most {MAX_CELLS} cells in all meshes together"),
            };
            return fail(at, expected, "more cells");
        };
        cells_left = left;
        let cells = u32::try_from(cells.unwrap_or(0)).expect("as many as a world size");
        let ranks: Vec<Rank> = ranks.unwrap_or_else(|| (0..cells).collect()).into_iter().map(Rank).collect();
        if let Some(rank) = ranks.iter().find(|rank| rank.0 >= world_size) {
            return fail(at, format!("ranks below {world_size}"), format!("rank {rank}"));
        }
        let has_names = dims.iter().any(|(name, _)| name.is_some());
        let names: Option<Vec<String>> = dims.into_iter().map(|(name, _)| name).collect();
        if has_names && names.is_none() {
            return fail(at, "names for all dims or for none", "names for some dims");
        }
        let mesh = DeviceMesh::new(shape, ranks, names.filter(|_| has_names));
        meshes.push(mesh.map_err(|error| Wrong::from_message(at, "a mesh", &error.to_string()))?);
    }
    Ok(meshes)
}

impl TensorJson {
    /// Returns whether `tied_to` is the only field of the tensor.
    fn is_tie(&self) -> bool {
        let Self { dtype, shape, class, mesh, placements, splits, slice, ranks, .. } = self;
        let others = [dtype.is_some(), shape.is_some(), class.is_some(), mesh.is_some(), placements.is_some()];
        !others.contains(&true) && splits.is_none() && slice.is_none() && ranks.is_none()
    }
}

fn check_tensor(
    name: &str,
    text: &TensorJson,
    meshes: &[DeviceMesh],
    world_size: u32,
) -> Result<DescribedTensor, Wrong> {
    let Some(dtype) = text.dtype.as_deref().and_then(Dtype::from_name) else {
        return fail(name, "the dtype of a tensor", format!("`{}`", text.dtype.as_deref().unwrap_or_default()));
    };
    let Some(shape) = &text.shape else { return fail(name, "a shape", "none") };
    if shape.len() > MAX_DIMS || checked_len_bytes(shape, dtype).is_none() {
        return fail(name, format!("a shape of at most {MAX_DIMS} dims that fits memory"), describe_list(shape));
    }
    let class = match &text.class {
        None => Class::Tensor,
        Some(text) => match CLASSES.iter().find(|(class, _)| class == text) {
            Some((_, class)) => *class,
            None => return fail(name, "the class tensor, dtensor or sharded-tensor", format!("`{text}`")),
        },
    };
    let sharding = check_sharding(name, text, meshes, shape.len())?;
    if sharding.is_none() && class != Class::Tensor {
        return fail(name, "placements", "none");
    }
    let ranks = match &text.ranks {
        None => None,
        Some(_) if sharding.is_some() => return fail(name, "placements or ranks", "both"),
        Some(ranks) => {
            let is_list = ranks.is_sorted_by(|a, b| a < b) && ranks.iter().all(|rank| *rank < world_size);
            if !is_list || ranks.is_empty() {
                return fail(name, format!("ascending ranks below {world_size}"), describe_list(ranks));
            }
            Some(ranks.iter().copied().map(Rank).collect())
        }
    };
    let (names, shape) = (vec![Fqn::from(name)], Dims::from(shape.as_slice()));
    Ok(DescribedTensor { names, dtype, shape, class, sharding, ranks })
}

fn check_sharding(
    name: &str,
    text: &TensorJson,
    meshes: &[DeviceMesh],
    ndim: usize,
) -> Result<Option<Sharding>, Wrong> {
    let (mesh, list) = match (text.mesh, &text.placements) {
        (Some(mesh), Some(list)) => (mesh, list),
        (None, None) if text.splits.is_none() && text.slice.is_none() => return Ok(None),
        _ => return fail(name, "mesh and placements together", "only one of them, or splits or slice without them"),
    };
    let Some(own) = meshes.get(mesh as usize) else {
        return fail(name, format!("one of {} meshes", meshes.len()), format!("mesh {mesh}"));
    };
    let placements: Option<Vec<Placement>> = parse_placements(list)
        .map_err(|error| Wrong::from_message(name, "placements", &error.to_string()))?
        .into_iter()
        .map(|spec| spec.resolve(ndim))
        .collect();
    let Some(placements) = placements.filter(|placements| placements.len() == own.ndim()) else {
        let expected = format!("{} placements that fit a tensor of {ndim} dims", own.ndim());
        return fail(name, expected, list.clone());
    };
    let splits: Vec<Split> = (text.splits.iter().flatten())
        .map(|split| {
            split
                .parse()
                .map_err(|error: crate::layout::LayoutError| Wrong::from_message(name, "a split", &error.to_string()))
        })
        .collect::<Result<_, Wrong>>()?;
    if !splits.is_empty() && splits.len() != own.ndim() {
        return fail(name, format!("{} splits", own.ndim()), splits.len().to_string());
    }
    let slice = match &text.slice {
        None => None,
        Some(dims) => {
            let outside =
                |(dim, placement): (usize, &Placement)| !dims.contains(&dim) && *placement != Placement::Replicate;
            let is_slice = dims.is_sorted_by(|a, b| a < b) && dims.last().is_some_and(|last| *last < own.ndim());
            if !is_slice || placements.iter().enumerate().any(outside) {
                return fail(
                    name,
                    "ascending mesh dims, with R on all other dims",
                    format!("slice {}", describe_list(dims)),
                );
            }
            Some(dims.iter().copied().map(MeshDim).collect())
        }
    };
    Ok(Some(Sharding { mesh: MeshId(mesh), shared: SharedTensor { placements, splits, slice } }))
}

fn describe_list<T: std::fmt::Debug>(list: &[T]) -> String {
    format!("{:.60}", format!("{list:?}"))
}

// ---------------------------------------------------------------------------------------------------- writing

impl LocalDocument {
    /// Renders the document, one tensor per line. `state` is the encoded state of this document.
    pub fn render(&self, state: &Tree) -> String {
        let meshes: Vec<String> = self.meshes.iter().map(render_mesh).collect();
        let mut names: Vec<(TensorId, &Fqn, Option<&Fqn>)> = Vec::new();
        let mut known: HashMap<String, (TensorId, &Fqn)> = HashMap::new();
        for (id, tensor) in (0..).map(TensorId).zip(&self.tensors) {
            known.extend(tensor.names.iter().map(|name| (name.to_string(), (id, name))));
        }
        // Tensors are listed in the order of the state dict.
        visit_tensors(&self.state, &mut |path, _| {
            if let Some((id, name)) = known.get(&path.to_string()) {
                let first = &self.tensors[id.0 as usize].names[0];
                names.push((*id, name, (first != *name).then_some(first)));
            }
        });
        let lines: Vec<String> = names.iter().map(|(id, name, tied)| self.render_tensor(*id, name, *tied)).collect();
        format!(
            "{{\n  \"version\": {VERSION},\n  \"world_size\": {},\n  \"meshes\": [{}],\n  \"tensors\": {{{}\n  }},\n  \
             \"state\": {}\n}}\n",
            self.world_size,
            meshes.join(", "),
            lines.join(","),
            state.render(2)
        )
    }

    fn render_tensor(&self, id: TensorId, name: &Fqn, tied: Option<&Fqn>) -> String {
        let key = json!(name.as_str());
        if let Some(first) = tied {
            return format!("\n    {key}: {{\"tied_to\": {}}}", json!(first.as_str()));
        }
        let DescribedTensor { dtype, shape, class, sharding, ranks, .. } = &self.tensors[id.0 as usize];
        let mut line = format!("\n    {key}: {{\"dtype\": \"{dtype}\", \"shape\": {:?}", shape.as_slice());
        if let Some(sharding @ Sharding { mesh, shared: SharedTensor { splits, slice, .. } }) = sharding {
            let (class, _) = CLASSES.iter().find(|(_, known)| known == class).expect("all classes are listed");
            line += &format!(
                ", \"class\": \"{class}\", \"mesh\": {}, \"placements\": \"{}\"",
                mesh.0,
                sharding.display_placements()
            );
            if splits.iter().any(|split| *split != Split::Chunk) {
                let splits: Vec<String> = splits.iter().map(ToString::to_string).collect();
                line += &format!(", \"splits\": {}", json!(splits));
            }
            if let Some(dims) = slice {
                let dims: Vec<usize> = dims.iter().map(|dim| dim.0).collect();
                line += &format!(", \"slice\": {dims:?}");
            }
        }
        if let Some(ranks) = ranks {
            let ranks: Vec<u32> = ranks.iter().map(|rank| rank.0).collect();
            line += &format!(", \"ranks\": {ranks:?}");
        }
        line + "}"
    }
}

fn render_mesh(mesh: &DeviceMesh) -> String {
    let dims =
        (0..mesh.ndim()).map(|dim| json!([mesh.names().map(|names| &names[dim]), mesh.shape()[dim]]).to_string());
    let mut text = format!("{{\"dims\": [{}]", dims.collect::<Vec<_>>().join(", "));
    if !mesh.ranks_are_row_major() {
        let ranks: Vec<u32> = mesh.ranks().iter().map(|rank| rank.0).collect();
        text += &format!(", \"ranks\": {ranks:?}");
    }
    text + "}"
}
