//! The header of a safetensors file: JSON with the location of each tensor, checked against the file.
//!
//! Unit of offsets: bytes. Invariant of a returned [`Header`]: the data of the tensors is in the order of `tensors`,
//! without gaps, and PyTorch has the dtype of every tensor. Source: `safetensors/src/tensor.rs`.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use foldhash::fast::RandomState;
use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value as Json};

use crate::catalog::{Dtype, checked_len_bytes, state_dict};
use crate::error::{Error, Result};
use crate::format::MAX_RANDOM_STATE_BYTES;
use crate::json_text;
use crate::layout::Dims;
use crate::storage::{FileId, Files};

/// The maximum header length in bytes. The reference reader of safetensors has this limit, too.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

const METADATA: &str = "__metadata__";

/// The maximum number of dims of a tensor. No real tensor has more dims.
const MAX_DIMS: usize = 64;

/// The maximum number of entries of `__metadata__`, which has names of tied tensors and a few notes of the writer. The
/// limit exists because every entry takes memory, even a short one.
const MAX_NOTES: usize = 1 << 20;

/// Returns whether a file starts with a header length that fits into the file, followed by a JSON object.
pub fn starts_with_header(head: &[u8], len: u64) -> bool {
    let Some(Ok(header)) = head.get(..8).map(<[u8; 8]>::try_from) else { return false };
    head.get(8) == Some(&b'{') && u64::from_le_bytes(header) <= len.saturating_sub(8)
}

/// Reads the header of a file, and the states of random number generators in the file. `files` records the byte ranges
/// that are read, and the metadata mirror (a sparse copy of the metadata of all files) copies these byte ranges. Damage
/// is ignored, because the reader of the format reports it later.
pub fn look_at(files: &Files, file: FileId) {
    let Ok(header) = read_header(files, file) else { return };
    for (name, stored) in header.tensors {
        let len = checked_len_bytes(&stored.shape, stored.dtype).filter(|len| *len <= MAX_RANDOM_STATE_BYTES);
        if let Some(len) = len.filter(|_| state_dict::is_random_state(&name)) {
            let _ = files.read(file, stored.offset, len);
        }
    }
}

/// The checked header of a file.
#[derive(Debug)]
pub struct Header {
    /// The content of `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    /// The tensors, in the order of their data.
    pub tensors: Vec<(Arc<str>, StoredTensor)>,
}

/// A tensor that is stored in a file.
#[derive(Clone, Debug)]
pub struct StoredTensor {
    /// The dtype.
    pub dtype: Dtype,
    /// The shape.
    pub shape: Dims,
    /// The offset of the tensor's data in the file, in bytes.
    pub offset: u64,
}

/// An entry of the JSON header, before it is checked.
#[derive(Deserialize)]
struct RawEntry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    #[serde(deserialize_with = "shape")]
    shape: Dims,
    data_offsets: (u64, u64),
}

/// Reads the sizes of a tensor. The number of sizes is limited, because a damaged file could list very many sizes.
fn shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Dims, D::Error> {
    struct Sizes;

    impl<'de> Visitor<'de> for Sizes {
        type Value = Dims;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(formatter, "a list of at most {MAX_DIMS} sizes")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut sizes: A) -> Result<Dims, A::Error> {
            let mut dims = Dims::new();
            while let Some(size) = sizes.next_element()? {
                if dims.len() == MAX_DIMS {
                    return Err(A::Error::invalid_length(MAX_DIMS + 1, &self));
                }
                dims.push(size);
            }
            Ok(dims)
        }
    }

    deserializer.deserialize_seq(Sizes)
}

/// The parsed JSON of a header, with entries in file order. Each entry is checked while the text is parsed, because a
/// tree of all JSON values takes many times the memory of the text.
#[derive(Default)]
struct RawHeader {
    metadata: BTreeMap<String, String>,
    /// The tensors of the file, each with the length of its data in bytes.
    tensors: Vec<(Arc<str>, StoredTensor, u64)>,
}

/// A serde visitor that decodes a JSON header to a [`RawHeader`].
struct RawHeaderVisitor<'a> {
    path: &'a Path,
    data_start: u64,
    fault: &'a mut Fault,
}

/// Details about an error in the header that are missing from the error of serde_json.
enum Fault {
    /// The error is not inside an entry of the header.
    None,
    /// The JSON of the entry with this name has an error. The second field describes the expected content.
    In(String, &'static str),
    /// The JSON of an entry has no error, but the entry breaks a rule of safetensors.
    Unfit(Box<Error>),
}

impl<'de> Visitor<'de> for RawHeaderVisitor<'_> {
    type Value = RawHeader;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut header = RawHeader::default();
        let mut has_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                if std::mem::replace(&mut has_metadata, true) {
                    return Err(A::Error::custom(format_args!("the key `{METADATA}` twice")));
                }
                let metadata = map.next_value_seed(HeaderMetadata);
                header.metadata = metadata.inspect_err(|_| *self.fault = Fault::In(name, "a map of strings"))?;
                continue;
            }
            let read = match map.next_value() {
                Ok(raw) => check_entry(self.path, &name, raw, self.data_start),
                Err(error) => {
                    *self.fault = Fault::In(name, "dtype, shape and data_offsets");
                    return Err(error);
                }
            };
            match read {
                Ok((stored, len)) => header.tensors.push((name.into(), stored, len)),
                Err(error) => {
                    *self.fault = Fault::Unfit(Box::new(error));
                    return Err(A::Error::custom("an entry that does not fit"));
                }
            }
        }
        Ok(header)
    }
}

impl<'de> DeserializeSeed<'de> for RawHeaderVisitor<'_> {
    type Value = RawHeader;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<RawHeader, D::Error> {
        deserializer.deserialize_map(self)
    }
}

/// Decodes `__metadata__`.
struct HeaderMetadata;

impl<'de> DeserializeSeed<'de> for HeaderMetadata {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderMetadata {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "a map of strings, {MAX_NOTES} of them at most")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut metadata = BTreeMap::new();
        while let Some((key, value)) = map.next_entry()? {
            if metadata.len() == MAX_NOTES {
                return Err(A::Error::invalid_length(MAX_NOTES + 1, &self));
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }
}

/// Reads the header of a file.
///
/// # Errors
/// `Malformed`, `Unsupported`, `Io`.
pub fn read_header(files: &Files, file: FileId) -> Result<Header> {
    let path = files.path(file);
    let file_len = files.len_bytes(file);
    let malformed = |at: &str, expected: &str, found: String| Error::malformed(path, at, expected, found);
    if file_len < 8 {
        return Err(malformed("byte 0", "an 8-byte header length", format!("a file of {file_len} bytes")));
    }
    let prefix = files.read(file, 0, 8)?;
    let header_len = u64::from_le_bytes(prefix.try_into().expect("8 bytes were read"));
    if header_len == 0 || header_len > MAX_HEADER_BYTES || header_len > file_len - 8 {
        let expected = format!("a header of 1 to {} bytes", MAX_HEADER_BYTES.min(file_len - 8).max(1));
        return Err(malformed("byte 0", &expected, format!("a header length of {header_len}")));
    }
    let text = files.read(file, 8, header_len)?;
    parse_header(path, &text, file_len)
}

/// Parses the header of a file whose length is `file_len` bytes.
///
/// # Errors
/// `Malformed`, `Unsupported`.
pub fn parse_header(path: &Path, text: &[u8], file_len: u64) -> Result<Header> {
    let malformed = |at: &str, expected: &str, found: String| Error::malformed(path, at, expected, found);
    let data_start = 8 + text.len() as u64;
    let data_len = file_len.saturating_sub(data_start);
    let mut fault = Fault::None;
    let mut json = serde_json::Deserializer::from_slice(text);
    let visitor = RawHeaderVisitor { path, data_start, fault: &mut fault };
    let parsed = visitor.deserialize(&mut json).and_then(|header| json.end().map(|()| header));
    let RawHeader { metadata, mut tensors } = parsed.map_err(|error| match fault {
        Fault::Unfit(error) => *error,
        Fault::In(name, expected) if error.is_data() => json_text::malformed_part(path, name, &error, expected),
        Fault::In(..) | Fault::None => json_text::malformed_part(path, "header", &error, "a JSON object"),
    })?;
    let mut names = HashSet::with_capacity_and_hasher(tensors.len(), RandomState::default());
    if let Some((name, ..)) = tensors.iter().find(|(name, ..)| !names.insert(&**name)) {
        return Err(malformed("header", "a JSON object", format!("the key `{name}` twice")));
    }
    drop(names);
    tensors.sort_by_key(|(_, stored, len)| (stored.offset, *len));
    // The tensors must tile the data: each tensor starts where the previous tensor ends, and the last tensor ends at
    // the end of the file.
    let mut end = data_start;
    for (name, stored, len) in &tensors {
        if stored.offset != end {
            let (expected, found) =
                (format!("data that starts at byte {}", end - data_start), (stored.offset - data_start).to_string());
            return Err(malformed(name, &expected, format!("data that starts at byte {found}")));
        }
        end += len;
    }
    if end != file_len {
        let expected = format!("{} bytes of data", end - data_start);
        return Err(malformed("data", &expected, format!("{data_len} bytes")));
    }
    Ok(Header { metadata, tensors: tensors.into_iter().map(|(name, stored, _)| (name, stored)).collect() })
}

/// The dtypes of safetensors that PyTorch does not have.
const WITHOUT_TORCH_DTYPE: [&str; 2] = ["F6_E2M3", "F6_E3M2"];

/// Returns the error for a dtype tag that is not the tag of a PyTorch dtype.
fn unknown_dtype(path: &Path, name: &str, tag: &str) -> Error {
    let at = format!("{}: {name}", path.display());
    if WITHOUT_TORCH_DTYPE.contains(&tag) {
        return Error::unsupported(
            format!("{at}: PyTorch has no dtype for the safetensors dtype `{tag}`"),
            "convert this tensor to a PyTorch dtype before saving",
        );
    }
    let upper = tag.to_uppercase();
    let known = Dtype::from_safetensors_tag(&upper).map(|_| format!("; safetensors writes it as `{upper}`"));
    Error::unsupported(
        format!(
            "{at}: the header has the dtype `{tag}`, which safetensors does not define{}",
            known.unwrap_or_default()
        ),
        "save this file again with a safetensors library",
    )
}

/// Checks an entry of the header, and returns its tensor and the length of the tensor's data in bytes.
fn check_entry(path: &Path, name: &str, raw: RawEntry<'_>, data_start: u64) -> Result<(StoredTensor, u64)> {
    let malformed = |expected: String, found: String| Error::malformed(path, name, expected, found);
    let Some(dtype) = Dtype::from_safetensors_tag(&raw.dtype) else {
        return Err(unknown_dtype(path, name, &raw.dtype));
    };
    let mut shape = raw.shape.clone();
    if dtype == Dtype::F4E2m1fnX2 {
        // The shape in the file counts F4 values. PyTorch counts bytes, each of which holds two F4 values.
        let last = shape.last_mut().filter(|size| **size % 2 == 0);
        let Some(last) = last else {
            return Err(malformed(String::from("an even last dim of F4"), format!("{:?}", raw.shape)));
        };
        *last /= 2;
    }
    let (begin, end) = raw.data_offsets;
    let Some(len) = checked_len_bytes(&shape, dtype).filter(|len| begin.checked_add(*len) == Some(end)) else {
        let expected = format!("data_offsets with the length of a tensor of dtype {dtype} and shape {:?}", raw.shape);
        return Err(malformed(expected, format!("data_offsets [{begin}, {end}]")));
    };
    let Some(offset) = data_start.checked_add(begin).filter(|offset| offset.checked_add(len).is_some()) else {
        return Err(malformed(String::from("data inside the file"), format!("data_offsets [{begin}, {end}]")));
    };
    Ok((StoredTensor { dtype, shape, offset }, len))
}

/// A tensor in the header of a file that will be written.
#[derive(Clone, Copy, Debug)]
pub struct WrittenTensor<'a> {
    /// The name.
    pub name: &'a str,
    /// The dtype.
    pub dtype: Dtype,
    /// The shape.
    pub shape: &'a [u64],
    /// The offset of the tensor's data in bytes, counted from the first byte after the header.
    pub begin: u64,
}

/// An entry of the JSON header to write. The fields are in the order of the reference writer.
#[derive(serde::Serialize)]
struct WrittenEntry<'a> {
    dtype: &'a str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

/// The number of bytes at the start of a file that hold the length of the header.
const LENGTH_BYTES: usize = 8;

/// Returns the bytes of a file before its tensor data: the length of the header, and the header.
///
/// # Errors
/// `Unsupported` if the format has no tag for a dtype, or if the header is too long for readers. `shorter` is the hint
/// of the error about a header that is too long.
pub fn write_header<'a>(
    path: &Path,
    metadata: &Map<String, Json>,
    tensors: impl Iterator<Item = WrittenTensor<'a>>,
    shorter: &str,
) -> Result<Vec<u8>> {
    // The JSON is written directly into the output buffer, because a file may have a million tensors.
    let mut file = vec![0; LENGTH_BYTES];
    file.extend_from_slice(br#"{"__metadata__":"#);
    serde_json::to_writer(&mut file, metadata).expect("strings serialise");
    for WrittenTensor { name, dtype, shape, begin } in tensors {
        let Some(tag) = dtype.safetensors_tag() else {
            return Err(Error::unsupported(
                format!("{name}: safetensors cannot store {dtype}"),
                "write a torch file (options::to torch) or a DCP directory (reshard, options::to dcp)",
            ));
        };
        let mut counted = Dims::from(shape);
        if dtype == Dtype::F4E2m1fnX2 {
            let Some(last) = counted.last_mut() else {
                return Err(Error::unsupported(
                    format!("{name}: safetensors counts single F4 values in the last dim, and a 0-d tensor has no dim"),
                    "write a torch file (options::to torch)",
                ));
            };
            *last *= 2;
        }
        let end = begin + shape.iter().product::<u64>() * dtype.itemsize();
        let written = WrittenEntry { dtype: tag, shape: &counted, data_offsets: [begin, end] };
        file.push(b',');
        serde_json::to_writer(&mut file, name).expect("a string serialises");
        file.push(b':');
        serde_json::to_writer(&mut file, &written).expect("an entry serialises");
    }
    file.push(b'}');
    file.resize(file.len().next_multiple_of(8), b' ');
    let len = (file.len() - LENGTH_BYTES) as u64;
    if len > MAX_HEADER_BYTES {
        return Err(Error::unsupported(
            format!("{}: a header of {len} bytes is longer than readers accept", path.display()),
            shorter,
        ));
    }
    file[..LENGTH_BYTES].copy_from_slice(&len.to_le_bytes());
    Ok(file)
}
