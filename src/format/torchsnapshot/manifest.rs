//! Parses the manifest of a snapshot, `.snapshot_metadata`, and checks each entry on its own. The version 0.1.0 of
//! torchsnapshot writes JSON; earlier versions write the same document as YAML.

use std::collections::HashSet;
use std::path::Path;

use foldhash::fast::RandomState;
use indexmap::IndexSet;
use serde::Deserialize;

use super::primitive;
use super::yaml;
use crate::catalog::{DictKind, Dtype, Fqn, Value, checked_len_bytes};
use crate::error::{Error, Result};
use crate::format::json::DistinctKeys;
use crate::json_text;
use crate::layout::{DeviceMesh, Dims, Placement, Rank, Region, TensorDim};

/// A parsed manifest.
#[derive(Debug)]
pub struct Manifest {
    /// The entries, sorted by rank. The entries of one rank keep their order.
    pub entries: Vec<ManifestEntry>,
    /// The distinct paths of data files, relative to the folder of the snapshot.
    pub files: IndexSet<String, RandomState>,
}

/// An entry of a manifest.
#[derive(Debug)]
pub struct ManifestEntry {
    /// The rank that saved the value. A replicated value belongs to rank 0.
    pub rank: Rank,
    /// The path of the value without the rank. Its components are separated by `/`, and are escaped.
    pub path: String,
    /// The content of the entry.
    pub content: EntryContent,
}

/// The content of an entry.
#[derive(Debug)]
pub enum EntryContent {
    List,
    /// A dict with its keys, in the order of the dict.
    Dict {
        kind: DictKind,
        keys: Vec<DictKey>,
    },
    /// An int, float, bool, text or bytes object, which the manifest itself contains.
    Primitive {
        value: Value,
        is_replicated: bool,
    },
    /// An object that is stored as a `torch.save` archive.
    Object {
        data: StoredData,
        is_replicated: bool,
    },
    /// A tensor that is whole on one rank, in one or more chunks.
    Tensor {
        dtype: Dtype,
        shape: Dims,
        chunks: Vec<StoredShard>,
        is_replicated: bool,
    },
    /// The shards that one rank has of a ShardedTensor or a DTensor.
    Sharded {
        shards: Vec<StoredShard>,
        layout: Option<DTensorLayout>,
    },
    /// A valid tensor that dtshard cannot read. The text is the reason, as a noun phrase.
    Unsupported(String),
}

/// A key of a dict.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(untagged, expecting = "text or an integer")]
pub enum DictKey {
    Int(i64),
    Text(String),
}

/// A box of a tensor, and the location of its elements.
#[derive(Debug)]
pub struct StoredShard {
    pub region: Region,
    pub dtype: Dtype,
    pub encoding: Encoding,
    pub data: StoredData,
}

/// The encoding of the elements of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// The elements in row-major order, and nothing else.
    Raw,
    /// A `torch.save` archive of one tensor.
    Archive,
}

/// The location of data in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoredData {
    /// The index of the file in [`Manifest::files`].
    pub file: usize,
    /// The first byte and the byte after the last one; `None` if the data is the complete file.
    pub byte_range: Option<(u64, u64)>,
}

/// The mesh of a DTensor, and its placement on each mesh dim.
#[derive(Debug)]
pub struct DTensorLayout {
    pub mesh: DeviceMesh,
    pub placements: Vec<Placement>,
}

/// The maximum number of components in a path. A state dict is walked recursively, so its depth needs a limit.
const MAX_DEPTH: usize = 128;

/// The maximum number of dims of a tensor.
const MAX_DIMS: usize = 255;

#[derive(Deserialize)]
#[serde(expecting = "a manifest")]
struct ManifestJson {
    world_size: u32,
    manifest: DistinctKeys<EntryJson>,
}

/// An entry as it is written. Which fields an entry has depends on its type.
#[derive(Default, Deserialize)]
#[serde(default, expecting = "an entry")]
struct EntryJson {
    #[serde(rename = "type")]
    kind: String,
    location: Option<String>,
    serializer: Option<String>,
    dtype: Option<String>,
    shape: Option<Vec<u64>>,
    replicated: Option<bool>,
    byte_range: Option<(u64, u64)>,
    shards: Option<Vec<ShardJson>>,
    chunks: Option<Vec<ShardJson>>,
    mesh: Option<NestedRanks>,
    dim_map: Option<Vec<Vec<i64>>>,
    keys: Option<Vec<DictKey>>,
    serialized_value: Option<String>,
}

#[derive(Deserialize)]
#[serde(expecting = "a shard")]
struct ShardJson {
    offsets: Vec<u64>,
    sizes: Vec<u64>,
    tensor: TensorJson,
}

#[derive(Deserialize)]
#[serde(expecting = "a tensor")]
struct TensorJson {
    location: String,
    serializer: String,
    dtype: String,
    shape: Vec<u64>,
    #[serde(default)]
    byte_range: Option<(u64, u64)>,
}

/// The ranks of a mesh, as lists of lists.
#[derive(Deserialize)]
#[serde(untagged, expecting = "ranks in lists")]
enum NestedRanks {
    Rank(u32),
    List(Vec<Self>),
}

/// Parses the text of a manifest. `path` is used in messages only.
///
/// # Errors
/// `Malformed` that names the entry, or the position in the text.
pub fn parse(path: &Path, text: &[u8]) -> Result<Manifest> {
    let start = text.iter().find(|byte| !byte.is_ascii_whitespace());
    let document: ManifestJson = if start == Some(&b'{') {
        serde_json::from_slice(text).map_err(|error| json_text::malformed(path, &error, "a manifest"))?
    } else {
        let json = yaml::to_json(text).map_err(|wrong| Error::from(wrong.within(path)))?;
        serde_json::from_slice(&json).map_err(|error| {
            let mismatch = json_text::mismatch(&error, "a manifest of torchsnapshot");
            Error::malformed(path, "manifest", mismatch.expected, mismatch.found)
        })?
    };
    let mut files = IndexSet::default();
    let mut entries = Vec::with_capacity(document.manifest.0.len());
    for (key, entry) in document.manifest.0 {
        let Some((rank, logical)) = split_rank(&key, document.world_size) else {
            let expected = format!(
                "RANK/PATH, with RANK below {} (no sign, no leading zeros) and at most {MAX_DEPTH} keys in PATH",
                document.world_size
            );
            return Err(Error::malformed(path, "manifest", expected, format!("`{key:.200}`")));
        };
        let reader = EntryReader { path, key: &key, files: &mut files };
        let content = reader.read(entry)?;
        entries.push(ManifestEntry { rank, path: logical.to_owned(), content });
    }
    entries.sort_by_key(|entry| entry.rank);
    check_ranks(path, document.world_size, &entries)?;
    Ok(Manifest { entries, files })
}

/// Checks that every rank of the job has entries. A complete manifest has entries of every rank, because torchsnapshot
/// writes the dicts and lists of each rank. `entries` is sorted by rank.
fn check_ranks(path: &Path, world_size: u32, entries: &[ManifestEntry]) -> Result<()> {
    let ranks = entries.chunk_by(|entry, next| entry.rank == next.rank).map(|entries| entries[0].rank);
    let mut all = (0..world_size).map(Rank);
    let missing = ranks.zip(all.by_ref()).find(|(rank, expected)| rank != expected).map(|(_, expected)| expected);
    match missing.or_else(|| all.next()) {
        None => Ok(()),
        Some(rank) => Err(Error::malformed(
            path,
            "manifest",
            format!("entries of all {world_size} ranks (`world_size`)"),
            format!("no entry of rank {rank}"),
        )),
    }
}

/// Splits the key of an entry into the rank and the path in the state dict of that rank.
fn split_rank(key: &str, world_size: u32) -> Option<(Rank, &str)> {
    let (rank, path) = key.split_once('/')?;
    let number: u32 = rank.parse().ok()?;
    let depth = path.split('/').count();
    (number < world_size && number.to_string() == rank && depth <= MAX_DEPTH).then_some((Rank(number), path))
}

/// Returns the name of a value: the components of its path, without escapes, joined with dots.
pub fn name_of(path: &str) -> Fqn {
    let parts: Vec<String> = path.split('/').map(unescape).collect();
    Fqn::from(parts.join("."))
}

/// Returns a component of a path without escapes, like Python's `urllib.parse.unquote`.
pub fn unescape(component: &str) -> String {
    let mut bytes = Vec::with_capacity(component.len());
    let mut rest = component.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|digits| first == b'%' && digits.iter().all(u8::is_ascii_hexdigit));
        let code = digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(code.unwrap_or(first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the component of a path for a dict key: `%` and `/` are escaped.
pub fn escape(key: &DictKey) -> String {
    match key {
        DictKey::Int(number) => number.to_string(),
        DictKey::Text(text) => text.replace('%', "%25").replace('/', "%2F"),
    }
}

/// Checks one entry.
struct EntryReader<'a> {
    path: &'a Path,
    key: &'a str,
    files: &'a mut IndexSet<String, RandomState>,
}

impl EntryReader<'_> {
    fn wrong(&self, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::malformed(self.path, self.key, expected, found)
    }

    fn field<T>(&self, kind: &str, name: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.wrong(format!("the key `{name}` in an entry of type `{kind}`"), "no such key"))
    }

    fn read(mut self, entry: EntryJson) -> Result<EntryContent> {
        let EntryJson { kind, location, serializer, dtype, shape, byte_range, shards, chunks, .. } = entry;
        let is_replicated = entry.replicated.unwrap_or(false);
        match kind.as_str() {
            "list" => Ok(EntryContent::List),
            "dict" | "OrderedDict" => {
                let keys = self.field(&kind, "keys", entry.keys)?;
                let mut seen = HashSet::with_capacity_and_hasher(keys.len(), RandomState::default());
                if let Some(twice) = keys.iter().find(|key| !seen.insert(escape(key))) {
                    return Err(self.wrong("distinct keys", format!("the key `{}` twice", escape(twice))));
                }
                drop(seen);
                let kind = if kind == "dict" { DictKind::Plain } else { DictKind::Ordered };
                Ok(EntryContent::Dict { kind, keys })
            }
            "int" | "float" | "bool" | "str" | "bytes" => {
                let text = self.field(&kind, "serialized_value", entry.serialized_value)?;
                let value = primitive::value(&kind, &text);
                let value = value.ok_or_else(|| self.wrong(format!("a value of type {kind}"), format!("{text:.40?}")));
                Ok(EntryContent::Primitive { value: value?, is_replicated })
            }
            "object" => {
                let serializer = self.field(&kind, "serializer", serializer)?;
                if serializer != "torch_save" {
                    let what = format!("an object that was stored with the serializer `{serializer}`");
                    return Ok(EntryContent::Unsupported(what));
                }
                let location = self.field(&kind, "location", location)?;
                Ok(EntryContent::Object { data: self.data(location, byte_range)?, is_replicated })
            }
            "Tensor" => {
                let tensor = TensorJson {
                    location: self.field(&kind, "location", location)?,
                    serializer: self.field(&kind, "serializer", serializer)?,
                    dtype: self.field(&kind, "dtype", dtype)?,
                    shape: self.field(&kind, "shape", shape)?,
                    byte_range,
                };
                let region = Region::whole(&tensor.shape);
                Ok(match self.shard(region, tensor)? {
                    Ok(shard) => {
                        let (dtype, shape) = (shard.dtype, shard.region.sizes.clone());
                        EntryContent::Tensor { dtype, shape, chunks: vec![shard], is_replicated }
                    }
                    Err(unsupported) => EntryContent::Unsupported(unsupported),
                })
            }
            "ChunkedTensor" => {
                let dtype = self.field(&kind, "dtype", dtype)?;
                let shape = Dims::from(self.field(&kind, "shape", shape)?);
                let chunks = self.field(&kind, "chunks", chunks)?;
                let Some(dtype) = Dtype::from_name(&dtype) else {
                    return Ok(EntryContent::Unsupported(format!("a tensor of dtype {dtype}")));
                };
                self.check_shape(&shape, dtype)?;
                Ok(match self.shards(chunks)? {
                    Ok(chunks) => {
                        if let Some(other) = chunks.iter().find(|chunk| chunk.dtype != dtype) {
                            return Err(self.wrong(format!("chunks of dtype {dtype}"), other.dtype.to_string()));
                        }
                        EntryContent::Tensor { dtype, shape, chunks, is_replicated }
                    }
                    Err(unsupported) => EntryContent::Unsupported(unsupported),
                })
            }
            "ShardedTensor" | "DTensor" => {
                let shards = self.field(&kind, "shards", shards)?;
                let layout = match kind.as_str() {
                    "DTensor" => {
                        let mesh = self.field(&kind, "mesh", entry.mesh)?;
                        Some(self.layout(&mesh, &self.field(&kind, "dim_map", entry.dim_map)?)?)
                    }
                    _ => None,
                };
                Ok(match self.shards(shards)? {
                    Ok(shards) => EntryContent::Sharded { shards, layout },
                    Err(unsupported) => EntryContent::Unsupported(unsupported),
                })
            }
            other => Err(self.wrong(
                "a type that torchsnapshot writes (Tensor, ChunkedTensor, ShardedTensor, DTensor, object, list, dict, \
                 OrderedDict, int, float, bool, str, bytes)",
                format!("`{other:.40}`"),
            )),
        }
    }

    fn data(&mut self, location: String, byte_range: Option<(u64, u64)>) -> Result<StoredData> {
        if let Some((start, end)) = byte_range.filter(|(start, end)| start > end) {
            return Err(self.wrong("a byte range that ends after its start", format!("{start} to {end}")));
        }
        let file = match self.files.get_index_of(location.as_str()) {
            Some(known) => known,
            None => self.files.insert_full(location).0,
        };
        Ok(StoredData { file, byte_range })
    }

    fn check_shape(&self, shape: &[u64], dtype: Dtype) -> Result<()> {
        if shape.len() > MAX_DIMS {
            return Err(self.wrong(format!("a shape of at most {MAX_DIMS} dims"), format!("{} dims", shape.len())));
        }
        match checked_len_bytes(shape, dtype) {
            Some(_) => Ok(()),
            None => Err(self.wrong("a shape that fits memory", format!("{shape:?}"))),
        }
    }

    /// Checks a list of shards. The outer error is a fault of the manifest. The inner error is the reason why dtshard
    /// cannot read one of the shards, although the manifest is valid.
    fn shards(&mut self, shards: Vec<ShardJson>) -> Result<Result<Vec<StoredShard>, String>> {
        let mut found: Vec<StoredShard> = Vec::with_capacity(shards.len());
        for ShardJson { offsets, sizes, tensor } in shards {
            if offsets.len() != sizes.len() || sizes != tensor.shape {
                let expected = "offsets and sizes that fit the shape of the tensor";
                let sizes = format!("offsets {offsets:?}, sizes {sizes:?} and a tensor of shape {:?}", tensor.shape);
                return Err(self.wrong(expected, sizes));
            }
            match self.shard(Region::new(offsets, sizes), tensor)? {
                Ok(shard) => found.push(shard),
                Err(unsupported) => return Ok(Err(unsupported)),
            }
        }
        Ok(Ok(found))
    }

    /// Checks a shard like [`Self::shards`].
    fn shard(&mut self, region: Region, tensor: TensorJson) -> Result<Result<StoredShard, String>> {
        let TensorJson { location, serializer, dtype: name, byte_range, .. } = tensor;
        let encoding = match serializer.as_str() {
            "buffer_protocol" => Encoding::Raw,
            "torch_save" => Encoding::Archive,
            // `per_tensor_qtensor` and `per_channel_qtensor` store a quantized tensor with its scale and zero point.
            other => return Ok(Err(format!("a tensor that was stored with the serializer `{other:.40}`"))),
        };
        let Some(dtype) = Dtype::from_name(&name) else {
            return Ok(Err(format!("a tensor of dtype {name:.40}")));
        };
        self.check_shape(&region.sizes, dtype)?;
        let data = self.data(location, byte_range)?;
        Ok(Ok(StoredShard { region, dtype, encoding, data }))
    }

    fn layout(&self, ranks: &NestedRanks, dim_map: &[Vec<i64>]) -> Result<DTensorLayout> {
        let mut shape = Dims::new();
        let mut first = ranks;
        while let NestedRanks::List(items) = first {
            shape.push(items.len() as u64);
            let Some(next) = items.first() else { break };
            first = next;
        }
        let mut all = Vec::new();
        if !collect_ranks(ranks, &shape, &mut all) {
            return Err(self.wrong("a mesh whose lists have equal lengths", "lists of different lengths"));
        }
        let mesh = DeviceMesh::new(shape, all, None)
            .map_err(|error| self.wrong("a valid mesh", format!("an invalid mesh ({error})")))?;
        let mut placements = vec![Placement::Replicate; mesh.ndim()];
        for (tensor_dim, mesh_dims) in dim_map.iter().enumerate() {
            for mesh_dim in mesh_dims.iter().filter(|dim| **dim != -1) {
                let placement = usize::try_from(*mesh_dim).ok().and_then(|dim| placements.get_mut(dim));
                match placement.filter(|placement| **placement == Placement::Replicate) {
                    Some(placement) => *placement = Placement::Shard(TensorDim(tensor_dim)),
                    None => {
                        let expected = format!("a dim_map of distinct mesh dims below {}", mesh.ndim());
                        return Err(self.wrong(expected, format!("{dim_map:?}")));
                    }
                }
            }
        }
        Ok(DTensorLayout { mesh, placements })
    }
}

/// Collects the ranks of a mesh of this shape. Returns false if the lists do not have this shape.
fn collect_ranks(ranks: &NestedRanks, shape: &[u64], all: &mut Vec<Rank>) -> bool {
    match (ranks, shape.split_first()) {
        (NestedRanks::Rank(rank), None) => {
            all.push(Rank(*rank));
            true
        }
        (NestedRanks::List(items), Some((len, inner))) => {
            items.len() as u64 == *len && items.iter().all(|item| collect_ranks(item, inner, all))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_paths_without_escapes() {
        assert_eq!(name_of("progress/slash%2Fand%25").as_str(), "progress.slash/and%");
        for (escaped, plain) in
            [("%", "%"), ("%2", "%2"), ("%zz", "%zz"), ("%C3%BC", "\u{fc}"), ("%ff", "\u{fffd}"), ("%+1", "%+1")]
        {
            assert_eq!(unescape(escaped), plain);
        }
    }

    proptest::proptest! {
        /// An escaped key has no `/`, and becomes the original key when it is unescaped.
        #[test]
        fn escaped_keys_are_unescaped_again(key in ".{0,20}") {
            let escaped = escape(&DictKey::Text(key.clone()));
            proptest::prop_assert!(!escaped.contains('/'));
            proptest::prop_assert_eq!(unescape(&escaped), key);
        }
    }

    #[test]
    fn ranks_are_canonical_numbers_below_the_world_size() {
        assert_eq!(split_rank("1/a/b", 2), Some((Rank(1), "a/b")));
        for key in ["2/a", "01/a", "+1/a", "-1/a", "x/a", "1", "/a", "99999999999/a"] {
            assert_eq!(split_rank(key, 2), None, "{key}");
        }
        assert_eq!(split_rank(&format!("0/{}", ["a"; MAX_DEPTH + 1].join("/")), 2), None);
    }

    #[test]
    fn ints_and_texts_are_different_keys() {
        let text = r#"{"world_size": 1, "manifest": {"0/a": {"type": "dict", "keys": [7, "x", -7]}}}"#;
        let manifest = parse(Path::new("m"), text.as_bytes()).unwrap();
        let EntryContent::Dict { keys, .. } = &manifest.entries[0].content else { panic!("a dict") };
        assert_eq!(*keys, [DictKey::Int(7), DictKey::Text("x".into()), DictKey::Int(-7)]);
        let twice = text.replace('x', "7");
        let error = parse(Path::new("m"), twice.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "m: 0/a: expected distinct keys, found the key `7` twice");
    }
}
