//! safetensors: a length, a JSON header, the data. One file, or a folder with an index.
//!
//! Source of the rules: the safetensors format description and `safetensors/src/tensor.rs` (0.8), but stricter where
//! the reference reader is lenient: duplicate keys are refused. The reference writer wants every tensor in memory, so
//! headers are laid out here.
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

use self::sharding::{SHARDING_INFO, ShardName, TensorShard, sharding_info, untold_shapes};
use super::index::ShardIndex;
use super::placing::Placing;
use super::shortfall::Shortfall;
use super::{RankName, distinct_names, natural_order};
use crate::catalog::{Catalog, Dict, Dtype, Fqn, OutputFile, Reservation, Reserved, TensorEntry, TensorId, Value};
use crate::error::{CatalogError, Error, Result};
use crate::storage::{FileId, Files};

/// Says which framework wrote a file: loaders want `pt`.
pub const FORMAT_KEY: &str = "format";

/// The version of the metadata of DCP's Hugging Face storage.
pub const DCP_VERSION_KEY: &str = "DCP_VERSION";

/// Keys of the metadata that say something of the file, and so are no names of tied tensors.
const OWN_KEYS: [&str; 4] = [FORMAT_KEY, SHARDING_INFO, DCP_VERSION_KEY, "total_size"];

pub const INDEX_NAME: &str = "model.safetensors.index.json";

// ---------------------------------------------------------------------------------------------------- reading

/// Read one file, or every file of a folder; with an index, also say how that and the files differ.
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
        catalog.warnings.extend(untold_shapes(path)?);
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

/// Tensors by name, and the file where each was found first.
type Names = BTreeMap<Arc<str>, (Arc<Path>, TensorId)>;

/// Make names the state dict, and the first of each tensor that of its entry.
fn put_in_order(catalog: &mut Catalog, names: Names) {
    let mut names: Vec<(Arc<str>, TensorId)> = names.into_iter().map(|(name, (_, id))| (name, id)).collect();
    names.sort_by(|(left, _), (right, _)| natural_order(left, right));
    let mut named = vec![false; catalog.tensors.len()];
    for (name, id) in &names {
        // An entry bears the first of its names.
        if !std::mem::replace(&mut named[id.0 as usize], true) {
            catalog.tensors[id.0 as usize].fqn = name.clone().into();
        }
    }
    let entries = names.into_iter().map(|(name, id)| (Value::Str(name), Value::Tensor(id))).collect();
    catalog.state = Value::Dict(Dict { entries, ..Dict::default() });
}

/// A tensor in two files, which may be those of ranks.
fn twice(name: &str, path: &Path, other: &Path) -> Error {
    let is_of_rank = |path: &&Path| RankName::parse(path).is_some() && ShardName::parse(path).is_none();
    if ![path, other].iter().all(is_of_rank) {
        let found = format!("it in {} as well", other.display());
        return Error::malformed(path, name, "a tensor in one file only", found);
    }
    Error::Catalog(CatalogError::Conflict {
        fqn: name.to_owned(),
        what: "the file",
        between: format!("{} and {}", path.display(), other.display()),
        detail: String::from("expected a tensor in one file only"),
        hint: Some(String::from(
            "where each file holds what one rank had, options::src_mesh and options::src_placements say how its tensors lie (options::src_mesh \
             tp=2 options::src_placements '**.w1=S(0)')",
        )),
    })
}

/// Further names of tensors: tied ones are written once, and `__metadata__` says which of the names was kept
/// (`safetensors.torch.save_model`). Other notes in it are told to the user.
fn aliases(catalog: &mut Catalog, names: &Names, notes: Vec<(Arc<Path>, String, String)>) -> Result<Names> {
    let mut aliases = Names::new();
    for (path, key, value) in notes {
        // Loaders look for these; they say nothing about the model.
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

/// How to write.
#[derive(Clone, Debug)]
pub enum FileDivision {
    /// One file of this name.
    File(PathBuf),
    /// A folder; files hold at most this many bytes of tensor data, a larger tensor gets its own.
    Folder { max_shard_bytes: u64 },
    /// A folder of the files that another one has.
    Like(Placing),
}

/// A file, and the tensors in it.
type Group<'a> = (PathBuf, Cow<'a, [(Fqn, TensorId)]>);

/// The tensors of a catalog, and the dtype that each is written in.
#[derive(Clone, Copy)]
pub struct SelectedTensors<'a> {
    pub source: &'a Catalog,
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

/// Lay out the named tensors of `wanted`, in this order. Of each pair of `ties` the first is a further name of the
/// second, which is one of `tensors`: it is recorded in the `__metadata__` of the file that has it, as `{alias: kept}`.
///
/// # Errors
/// `Unsupported` where the format has no tag for a dtype.
///
/// # Panics
/// Where a tie is with a tensor that is not written.
pub fn reserve(
    wanted: SelectedTensors<'_>,
    tensors: &[(Fqn, TensorId)],
    ties: &[(Fqn, Fqn)],
    shape: &FileDivision,
) -> Result<Reservation> {
    let groups: Vec<Group<'_>> = match shape {
        FileDivision::File(name) => vec![(name.clone(), tensors.into())],
        FileDivision::Folder { max_shard_bytes } => split(wanted, tensors, *max_shard_bytes),
        FileDivision::Like(placing) => {
            placing.groups(tensors).into_iter().map(|(name, group)| (name, group.into())).collect()
        }
    };
    let aliases = || ties.iter().map(|(alias, _)| alias.as_str());
    let names = tensors.iter().map(|(fqn, _)| fqn.as_str()).chain(aliases());
    // Each takes a while where there are very many.
    let (distinct, reservation) =
        rayon::join(|| distinct_names(names, &["__metadata__", ""]), || reserve_files(wanted, groups, ties));
    distinct?;
    if let Some(alias) = aliases().find(|alias| OWN_KEYS.contains(alias)) {
        return Err(Error::unsupported(
            format!("a tied tensor called `{alias}` cannot be recorded, since that key of the metadata has a meaning"),
            "write tied tensors under every name (options::tied keep)",
        ));
    }
    let written: HashSet<&Fqn> = tensors.iter().filter(|_| !ties.is_empty()).map(|(fqn, _)| fqn).collect();
    assert!(ties.iter().all(|(_, kept)| written.contains(kept)), "ties are with tensors that are written");
    reservation
}

/// The files of groups, and the index where there are several.
fn reserve_files(wanted: SelectedTensors<'_>, groups: Vec<Group<'_>>, ties: &[(Fqn, Fqn)]) -> Result<Reservation> {
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
        reserve_file(wanted, &group, &ties, name, &mut reservation)?;
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

/// Consecutive tensors, each group within the limit where its tensors are.
fn split<'a>(wanted: SelectedTensors<'_>, tensors: &'a [(Fqn, TensorId)], limit: u64) -> Vec<Group<'a>> {
    let mut groups = Vec::new();
    let (mut start, mut bytes) = (0, 0_u64);
    for (index, (_, id)) in tensors.iter().enumerate() {
        let len = wanted.len_bytes(*id);
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
    wanted: SelectedTensors<'_>,
    tensors: &[(Fqn, TensorId)],
    ties: &[&(Fqn, Fqn)],
    name: PathBuf,
    reservation: &mut Reservation,
) -> Result<()> {
    let file_id = FileId(u32::try_from(reservation.files.len()).expect("fewer than 2^32 files"));
    let (offsets, data_bytes) = data_offsets(wanted, tensors);
    let mut metadata = serde_json::Map::new();
    metadata.insert(FORMAT_KEY.into(), json!("pt"));
    metadata.extend(ties.iter().map(|(alias, kept)| (alias.to_string(), json!(kept.as_str()))));
    let written = tensors.iter().zip(&offsets).map(|((fqn, id), &begin)| WrittenTensor {
        name: fqn.as_str(),
        dtype: wanted.dtype(*id),
        shape: &wanted.source.tensor(*id).shape,
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
        let (dtype, shape) = (wanted.dtype(*id), wanted.source.tensor(*id).shape.clone());
        Reserved::new(*id, TensorEntry::whole(fqn.clone(), dtype, shape, file_id, data_start + offset))
    };
    reservation.tensors.par_extend(placed.into_par_iter().map(reserved));
    reservation.files.push(file);
    Ok(())
}

/// Where each tensor's data begins, and where all of it ends. Data comes in the order given, unless that would leave a tensor on an address its
/// dtype cannot be viewed at, which loaders refuse: then wider dtypes come first.
fn data_offsets(wanted: SelectedTensors<'_>, tensors: &[(Fqn, TensorId)]) -> (Vec<u64>, u64) {
    let place = |order: &[usize]| {
        let mut offsets = vec![0; tensors.len()];
        let (mut end, mut aligned) = (0, true);
        for &index in order {
            let id = tensors[index].1;
            aligned &= end % wanted.dtype(id).itemsize() == 0;
            offsets[index] = end;
            end += wanted.len_bytes(id);
        }
        (offsets, end, aligned)
    };
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    let (mut offsets, end, aligned) = place(&order);
    if !aligned {
        order.sort_by_key(|&index| std::cmp::Reverse(wanted.dtype(tensors[index].1).itemsize()));
        (offsets, ..) = place(&order);
    }
    (offsets, end)
}
