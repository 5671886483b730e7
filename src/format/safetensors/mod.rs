//! The safetensors format: a header length, a JSON header and the tensor data, in one file or in a folder of files
//! with an index.
//!
//! Source of the rules: the safetensors format description and `safetensors/src/tensor.rs` (0.8). This reader is
//! stricter than the reference reader: it refuses duplicate keys. The reference writer needs every tensor in memory,
//! so headers are laid out here.
//!
//! ```text
//! | u64 N | N bytes of JSON, padded with spaces | tensor data, tiled without holes |
//! ```

pub(super) mod entry;
mod header;
pub mod ranks;
pub(super) mod sharding;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use header::{StoredTensor, WrittenTensor, look_at, parse_header, read_header, starts_with_header, write_header};
use rayon::prelude::*;
use serde_json::json;

use self::sharding::{SHARDING_INFO, ShardName, TensorShard, sharding_info, warning_of_unknown_shapes};
use super::index::ShardIndex;
use super::output_placing::Placing;
use super::shortfall::Shortfall;
use super::{RankName, distinct_names, folder_of, name_of, natural_order, torch_checkpointing};
use crate::catalog::{Catalog, Dict, Dtype, Fqn, OutputFile, Reservation, Reserved, TensorEntry, TensorId, Value};
use crate::error::{CatalogError, Error, FormatError, Result};
use crate::storage::{FileId, Files};

/// The key in `__metadata__` for the framework that wrote a file. Loaders expect the value `pt`.
pub const FORMAT_KEY: &str = "format";

/// The key in `__metadata__` with which DCP's Hugging Face storage records its version.
pub const DCP_VERSION_KEY: &str = "DCP_VERSION";

/// Keys in `__metadata__` that describe the file. Other keys may be names of tied tensors.
const OWN_KEYS: [&str; 4] = [FORMAT_KEY, SHARDING_INFO, DCP_VERSION_KEY, "total_size"];

/// The name of the index that loaders of safetensors files read.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

// ---------------------------------------------------------------------------------------------------- reading

/// Reads one or more safetensors files into one catalog. If there is an index, also returns a shortfall with the first
/// difference between the index and the files; `None` if they agree.
///
/// # Errors
/// `Malformed`, `Conflict`, `Unsupported`, `Io`.
pub fn read(files: &mut Files, paths: &[PathBuf], index: Option<&ShardIndex>) -> Result<(Catalog, Option<Shortfall>)> {
    let mut catalog = Catalog::empty();
    let mut shards: Vec<TensorShard> = Vec::new();
    let mut notes: Vec<(Arc<Path>, String, String)> = Vec::new();
    let mut sharded = None;
    for path in paths {
        let file = files.add(path)?;
        let shared: Arc<Path> = path.as_path().into();
        let mut header = read_header(files, file)?;
        let mut offsets = match header.metadata.remove(SHARDING_INFO) {
            Some(text) => {
                sharded = Some(path);
                sharding_info(path, &text)?
            }
            None => BTreeMap::new(),
        };
        shards.extend(header.tensors.into_iter().map(|(name, stored)| {
            let offsets = offsets.remove(&*name).map(Box::new);
            TensorShard { name, path: shared.clone(), file, stored, offsets }
        }));
        if let Some((name, _)) = offsets.pop_first() {
            let at = SHARDING_INFO;
            return Err(Error::malformed(path, at, format!("the tensor {name} in the same file"), "no such tensor"));
        }
        notes.extend(header.metadata.into_iter().map(|(key, value)| (shared.clone(), key, value)));
    }
    let mut names = Names::new();
    shards.sort_unstable_by(|left, right| (&left.name, left.file).cmp(&(&right.name, right.file)));
    for shards in shards.chunk_by(|left, right| left.name == right.name) {
        let name = &shards[0].name;
        if let [first, second, ..] = shards
            && let Some(plain) = shards.iter().find(|shard| shard.offsets.is_none())
        {
            let other = if plain.path == first.path { second } else { first };
            return Err(twice(name, &plain.path, &other.path));
        }
        let id = catalog.push_tensor(sharding::tensor(shards)?);
        names.insert(name.clone(), (shards[0].path.clone(), id));
    }
    drop(shards);
    if let Some(path) = sharded {
        catalog.warnings.extend(warning_of_unknown_shapes(path)?);
    }
    let aliases = aliases(&mut catalog, &names, notes)?;
    let differing = index.and_then(|index| {
        let holder = |name: &str| names.get(name).or_else(|| aliases.get(name)).map(|(path, _)| Some(&**path));
        let stored = names.iter().map(|(name, (path, _))| (&**name, Some(&**path)));
        index.differing(&holder, stored, paths)
    });
    names.extend(aliases);
    put_in_order(&mut catalog, names);
    Ok((catalog, differing))
}

/// For each name, the tensor and the path of the first file that contains this tensor.
type Names = BTreeMap<Arc<str>, (Arc<Path>, TensorId)>;

/// Builds the state dict from the names of tensors. Sorts the names in natural order (numbers in names are compared as
/// numbers). The first name of each tensor becomes the tensor's FQN.
fn put_in_order(catalog: &mut Catalog, names: Names) {
    let mut names: Vec<(Arc<str>, TensorId)> = names.into_iter().map(|(name, (_, id))| (name, id)).collect();
    names.sort_by(|(left, _), (right, _)| natural_order(left, right));
    let mut named = vec![false; catalog.tensors.len()];
    for (name, id) in &names {
        // The first name of an entry becomes its FQN.
        if !std::mem::replace(&mut named[id.0 as usize], true) {
            catalog.tensors[id.0 as usize].fqn = name.clone().into();
        }
    }
    let entries = names.into_iter().map(|(name, id)| (Value::Str(name), Value::Tensor(id))).collect();
    catalog.state = Value::Dict(Dict { entries, ..Dict::default() });
}

/// Returns the error for a tensor name that occurs in two files. If the two files may be the files of two ranks, the
/// hint suggests to declare a layout.
fn twice(name: &str, path: &Path, other: &Path) -> Error {
    let is_of_rank = |path: &&Path| RankName::parse(path).is_some() && ShardName::parse(path).is_none();
    if ![path, other].iter().all(is_of_rank) {
        let names = [path, other].map(name_of);
        let lost = torch_checkpointing::hint_if_missing(folder_of(path), &names);
        let found = format!("a tensor of this name also in {}", other.display());
        let (path, at, expected) = (path.to_path_buf(), name.to_owned(), String::from("a tensor in one file only"));
        let several_saves = "the folder may have files of two saves: move the files of one save into another folder";
        let hint = Some(lost.unwrap_or_else(|| several_saves.to_owned()).into());
        return FormatError::Malformed { path, at, expected, found, hint }.into();
    }
    Error::Catalog(CatalogError::Conflict {
        fqn: name.to_owned(),
        what: "the content",
        between: format!("{} and {}", path.display(), other.display()),
        detail: String::from("both files have this tensor, but a tensor may be in one file only"),
        hint: Some(String::from(
            "if each file contains the shards of one rank, declare the layout, such as options::src_mesh tp=2 \
             options::src_placements '**.w1=S(0)'",
        )),
    })
}

/// Returns the names of tied tensors that are only in `__metadata__` (`safetensors.torch.save_model`): the file stores
/// a tied tensor under one name, and for each further name `__metadata__` has an entry with the stored name. All other
/// entries of `__metadata__`, except the keys that describe the file (such as `format`), are added to the details that
/// the user sees.
fn aliases(catalog: &mut Catalog, names: &Names, notes: Vec<(Arc<Path>, String, String)>) -> Result<Names> {
    let mut aliases = Names::new();
    for (path, key, value) in notes {
        // Loaders check these keys. The keys do not describe the model.
        if [FORMAT_KEY, DCP_VERSION_KEY].contains(&key.as_str()) || key == "total_size" && value.parse::<u64>().is_ok()
        {
            continue;
        }
        let Some(kept) = names.get(value.as_str()).filter(|_| !names.contains_key(key.as_str())) else {
            catalog.details.push(format!("{}: __metadata__ {key}: {value}", path.display()));
            continue;
        };
        if let Some((_, other)) =
            aliases.insert(key.as_str().into(), kept.clone()).filter(|(_, other)| *other != kept.1)
        {
            let other = &catalog.tensor(other).fqn;
            let found = format!("another name of {other} and of {value}");
            return Err(Error::malformed(&path, key, "another name of one tensor", found));
        }
    }
    Ok(aliases)
}

// ---------------------------------------------------------------------------------------------------- writing

/// The rule that assigns tensors to output files.
#[derive(Clone, Debug)]
pub enum FileDivision {
    /// One file with this name.
    File(PathBuf),
    /// A folder. Each file has at most `max_shard_bytes` bytes of tensor data, but a tensor with more bytes gets a file
    /// of its own.
    Folder { max_shard_bytes: u64 },
    /// A folder with the file names of the source. Each tensor is in the file with the name of its source file.
    Like(Placing),
}

/// The name of an output file, and the tensors in this file.
type FileGroup<'a> = (PathBuf, Cow<'a, [(Fqn, TensorId)]>);

/// The tensors of a catalog, and the output dtype of each.
#[derive(Clone, Copy)]
pub struct SelectedTensors<'a> {
    /// The catalog of the tensors.
    pub source: &'a Catalog,
    /// The output dtype of each tensor of `source`.
    pub dtypes: &'a [Dtype],
}

impl SelectedTensors<'_> {
    fn dtype(self, id: TensorId) -> Dtype {
        self.dtypes[id.0 as usize]
    }

    fn len_bytes(self, id: TensorId) -> u64 {
        self.source.tensor(id).numel() * self.dtype(id).itemsize()
    }
}

/// Lays out safetensors files for `tensors`, in this order. `ties` has pairs of names: a further name of a tied tensor,
/// and the name under which the tensor is written. Each pair is recorded in the `__metadata__` of the file with the
/// tensor.
///
/// # Errors
/// `Unsupported` if the format has no tag for a dtype, if two tensors have the same name, or if a further name of a
/// tied tensor is a reserved key of `__metadata__`.
///
/// # Panics
/// If a tie names a tensor that is not written.
pub fn reserve(
    selected: SelectedTensors<'_>,
    tensors: &[(Fqn, TensorId)],
    ties: &[(Fqn, Fqn)],
    shape: &FileDivision,
) -> Result<Reservation> {
    let groups: Vec<FileGroup<'_>> = match shape {
        FileDivision::File(name) => vec![(name.clone(), tensors.into())],
        FileDivision::Folder { max_shard_bytes } => split(selected, tensors, *max_shard_bytes),
        FileDivision::Like(placing) => {
            placing.groups(tensors).into_iter().map(|(name, group)| (name, group.into())).collect()
        }
    };
    let aliases = || ties.iter().map(|(alias, _)| alias.as_str());
    let names = tensors.iter().map(|(fqn, _)| fqn.as_str()).chain(aliases());
    // Checking names and laying out files both take long for very many tensors, so they run in parallel.
    let (distinct, reservation) =
        rayon::join(|| distinct_names(names, &["__metadata__", ""]), || reserve_files(selected, groups, ties));
    distinct?;
    if let Some(alias) = aliases().find(|alias| OWN_KEYS.contains(alias)) {
        return Err(Error::unsupported(
            format!("the tied name `{alias}` cannot be recorded, because the format reserves that metadata key"),
            "write tied tensors under every name (options::tied keep)",
        ));
    }
    let written: HashSet<&Fqn> = tensors.iter().filter(|_| !ties.is_empty()).map(|(fqn, _)| fqn).collect();
    assert!(ties.iter().all(|(_, kept)| written.contains(kept)), "ties are with tensors that are written");
    reservation
}

/// Lays out one file for each group, and the index if there are several groups.
fn reserve_files(
    selected: SelectedTensors<'_>,
    groups: Vec<FileGroup<'_>>,
    ties: &[(Fqn, Fqn)],
) -> Result<Reservation> {
    let mut reservation = Reservation::default();
    let mut weight_map = serde_json::Map::new();
    let count = groups.len();
    for (name, group) in groups {
        if count > 1 {
            weight_map.extend(group.iter().map(|(fqn, _)| (fqn.to_string(), json!(name.to_string_lossy()))));
        }
        let of_ties = group.iter().filter(|_| !ties.is_empty());
        let names: HashSet<&Fqn> = of_ties.map(|(fqn, _)| fqn).collect();
        let ties: Vec<&(Fqn, Fqn)> = ties.iter().filter(|(_, kept)| names.contains(kept)).collect();
        reserve_file(selected, &group, &ties, name, &mut reservation)?;
    }
    if count > 1 {
        let total_size = reservation.payload_bytes();
        let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
        let mut text = serde_json::to_string_pretty(&index).expect("strings and numbers serialise");
        text.push('\n');
        let mut file = OutputFile::new(INDEX_NAME);
        file.push_header(text.into_bytes());
        reservation.files.push(file);
    }
    Ok(reservation)
}

/// Divides tensors into groups of consecutive tensors. Each group has at most `limit` bytes of tensor data; a tensor
/// with more bytes forms a group of its own.
fn split<'a>(selected: SelectedTensors<'_>, tensors: &'a [(Fqn, TensorId)], limit: u64) -> Vec<FileGroup<'a>> {
    let mut groups = Vec::new();
    let (mut start, mut bytes) = (0, 0_u64);
    for (index, (_, id)) in tensors.iter().enumerate() {
        let len = selected.len_bytes(*id);
        if index > start && bytes.saturating_add(len) > limit {
            groups.push(&tensors[start..index]);
            (start, bytes) = (index, 0);
        }
        bytes += len;
    }
    groups.push(&tensors[start..]);
    let count = groups.len();
    let name = |index: usize| match count {
        1 => PathBuf::from("model.safetensors"),
        _ => PathBuf::from(format!("model-{:05}-of-{count:05}.safetensors", index + 1)),
    };
    groups.into_iter().enumerate().map(|(index, group)| (name(index), group.into())).collect()
}

fn reserve_file(
    selected: SelectedTensors<'_>,
    tensors: &[(Fqn, TensorId)],
    ties: &[&(Fqn, Fqn)],
    name: PathBuf,
    reservation: &mut Reservation,
) -> Result<()> {
    let file_id = FileId(u32::try_from(reservation.files.len()).expect("fewer than 2^32 files"));
    let (offsets, data_bytes) = data_offsets(selected, tensors);
    let mut metadata = serde_json::Map::new();
    metadata.insert(FORMAT_KEY.into(), json!("pt"));
    metadata.extend(ties.iter().map(|(alias, kept)| (alias.to_string(), json!(kept.as_str()))));
    let written = tensors.iter().zip(&offsets).map(|((fqn, id), &begin)| WrittenTensor {
        name: fqn.as_str(),
        dtype: selected.dtype(*id),
        shape: &selected.source.tensor(*id).shape,
        begin,
    });
    let header = write_header(&name, &metadata, written, "split the model with options::max_shard_size")?;
    let mut file = OutputFile::new(name);
    file.push_header(header);
    let data_start = file.len;
    file.push_payload(data_bytes);
    let mut placed: Vec<(u64, &(Fqn, TensorId))> = offsets.into_iter().zip(tensors).collect();
    placed.sort_by_key(|(offset, _)| *offset);
    let reserved = |(offset, (fqn, id)): (u64, &(Fqn, TensorId))| {
        let (dtype, shape) = (selected.dtype(*id), selected.source.tensor(*id).shape.clone());
        Reserved::new(*id, TensorEntry::whole(fqn.clone(), dtype, shape, file_id, data_start + offset))
    };
    reservation.tensors.par_extend(placed.into_par_iter().map(reserved));
    reservation.files.push(file);
    Ok(())
}

/// Returns the offset of each tensor's data, and the end of all data, in bytes. If the order of `tensors` aligns every
/// tensor for its dtype, the data has this order. Otherwise tensors with wider dtypes come first, because loaders
/// refuse tensors that are not aligned.
fn data_offsets(selected: SelectedTensors<'_>, tensors: &[(Fqn, TensorId)]) -> (Vec<u64>, u64) {
    let place = |order: &[usize]| {
        let mut offsets = vec![0; tensors.len()];
        let (mut end, mut aligned) = (0, true);
        for &index in order {
            let id = tensors[index].1;
            aligned &= end % selected.dtype(id).itemsize() == 0;
            offsets[index] = end;
            end += selected.len_bytes(id);
        }
        (offsets, end, aligned)
    };
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    let (mut offsets, end, aligned) = place(&order);
    if !aligned {
        order.sort_by_key(|&index| std::cmp::Reverse(selected.dtype(tensors[index].1).itemsize()));
        (offsets, ..) = place(&order);
    }
    (offsets, end)
}
