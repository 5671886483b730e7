//! The header of one safetensors file: JSON that says where each tensor lies, checked against the file.
//!
//! Offsets are bytes. Invariant of what is given out: the tensors tile the data, in their order, and have dtypes that
//! PyTorch has.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use crate::catalog::{Dtype, checked_len_bytes};
use crate::error::{Error, Result};
use crate::format::json::Distinct;
use crate::layout::Dims;
use crate::storage::{FileId, Files};

/// Headers beyond this are refused by the reference reader, too.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One file's header, checked.
#[derive(Debug)]
pub struct Header {
    pub metadata: BTreeMap<String, String>,
    /// In the order of the data.
    pub tensors: Vec<(String, Stored)>,
}

/// A tensor of one file.
#[derive(Clone, Debug)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Dims,
    /// Absolute offset in the file.
    pub offset: u64,
}

/// An entry as the JSON gives it.
#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Read the header of a file.
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
        let expected = format!("a header length up to {}", MAX_HEADER_BYTES.min(file_len - 8));
        return Err(malformed("byte 0", &expected, header_len.to_string()));
    }
    let text = files.read(file, 8, header_len)?;
    let Distinct(entries): Distinct<Json> =
        serde_json::from_slice(&text).map_err(|error| malformed("header", "a JSON object", error.to_string()))?;

    let data_start = 8 + header_len;
    let data_len = file_len - data_start;
    let mut metadata = BTreeMap::new();
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, value) in entries {
        if name == "__metadata__" {
            metadata = serde_json::from_value(value)
                .map_err(|error| malformed("__metadata__", "a map of strings", error.to_string()))?;
            continue;
        }
        let raw: RawEntry = serde_json::from_value(value)
            .map_err(|error| malformed(&name, "dtype, shape and data_offsets", error.to_string()))?;
        let (stored, len) = check_entry(path, &name, raw, data_start)?;
        tensors.push((name, stored, len));
    }
    tensors.sort_by_key(|(_, stored, len)| (stored.offset, *len));
    // The data must be tiled: each tensor begins where the one before it ends, the last one ends with the file.
    let mut end = data_start;
    for (name, stored, len) in &tensors {
        if stored.offset != end {
            let (expected, found) = (format!("data at {}", end - data_start), (stored.offset - data_start).to_string());
            return Err(malformed(name, &expected, format!("data at {found}")));
        }
        end += len;
    }
    if end != file_len {
        let expected = format!("{} bytes of data", end - data_start);
        return Err(malformed("data", &expected, format!("{data_len} bytes")));
    }
    Ok(Header { metadata, tensors: tensors.into_iter().map(|(name, stored, _)| (name, stored)).collect() })
}

/// The tensor of an entry and its length in bytes.
fn check_entry(path: &Path, name: &str, raw: RawEntry, data_start: u64) -> Result<(Stored, u64)> {
    let malformed = |expected: String, found: String| Error::malformed(path, name, expected, found);
    let Some(dtype) = Dtype::from_safetensors_tag(&raw.dtype) else {
        return Err(Error::unsupported(
            format!("{}: {name}: dtype {} has no PyTorch counterpart", path.display(), raw.dtype),
            "convert that tensor to a dtype PyTorch has before it is saved",
        ));
    };
    let mut shape: Dims = raw.shape.as_slice().into();
    if dtype == Dtype::F4E2m1fnX2 {
        // The file counts values, PyTorch the bytes that hold two of them.
        let last = shape.last_mut().filter(|size| **size % 2 == 0);
        let Some(last) = last else {
            return Err(malformed(String::from("an even last dim of F4"), format!("{:?}", raw.shape)));
        };
        *last /= 2;
    }
    let (begin, end) = raw.data_offsets;
    let Some(len) = checked_len_bytes(&shape, dtype).filter(|len| begin.checked_add(*len) == Some(end)) else {
        let expected = format!("the bytes of {dtype} {:?}", raw.shape);
        return Err(malformed(expected, format!("data_offsets [{begin}, {end}]")));
    };
    let Some(offset) = data_start.checked_add(begin).filter(|offset| offset.checked_add(len).is_some()) else {
        return Err(malformed(String::from("data inside the file"), format!("data_offsets [{begin}, {end}]")));
    };
    Ok((Stored { dtype, shape, offset }, len))
}

/// A tensor as it is to be written.
#[derive(Clone, Copy, Debug)]
pub struct Written<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [u64],
    /// Offset in the data, which has room for it.
    pub begin: u64,
}

/// An entry as it is written; the order of the fields is the reference writer's.
#[derive(serde::Serialize)]
struct WrittenEntry<'a> {
    dtype: &'a str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

/// The length of the header, which comes first.
const LENGTH_BYTES: usize = 8;

/// What a file begins with: the length of the header, and the header.
///
/// # Errors
/// `Unsupported` where the format has no tag for a dtype, or the header is too long for its readers, with what helps
/// against that.
pub fn write_header<'a>(
    path: &Path,
    metadata: &Map<String, Json>,
    tensors: impl Iterator<Item = Written<'a>>,
    shorter: &str,
) -> Result<Vec<u8>> {
    // In place: a file may have a million tensors.
    let mut file = vec![0; LENGTH_BYTES];
    file.extend_from_slice(br#"{"__metadata__":"#);
    serde_json::to_writer(&mut file, metadata).expect("strings serialise");
    for Written { name, dtype, shape, begin } in tensors {
        let Some(tag) = dtype.safetensors_tag() else {
            return Err(Error::unsupported(
                format!("{name}: safetensors cannot hold {dtype}"),
                "write a torch file (--to torch) or a DCP directory (reshard --to dcp)",
            ));
        };
        let mut counted = Dims::from(shape);
        if dtype == Dtype::F4E2m1fnX2 {
            let Some(last) = counted.last_mut() else {
                return Err(Error::unsupported(
                    format!("{name}: safetensors counts single values, and a 0-d F4 tensor has none"),
                    "write a torch file (--to torch)",
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
            format!("{}: a header of {len} bytes, more than readers accept", path.display()),
            shorter,
        ));
    }
    file[..LENGTH_BYTES].copy_from_slice(&len.to_le_bytes());
    Ok(file)
}
