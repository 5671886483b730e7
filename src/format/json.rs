//! Helpers for reading JSON from untrusted files. In contrast to serde, these helpers refuse duplicate keys and limit
//! the length of a file.

use std::collections::HashSet;
use std::fmt;
use std::io::Read;
use std::marker::PhantomData;
use std::path::Path;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::error::{Error, Result};
use crate::storage::regular_file;

/// A JSON object whose keys are distinct and keep their order.
#[derive(Debug)]
pub struct DistinctKeys<V>(pub Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for DistinctKeys<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(DistinctVisitor(PhantomData))
    }
}

struct DistinctVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for DistinctVisitor<V> {
    type Value = DistinctKeys<V>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DistinctKeys<V>, A::Error> {
        distinct_entries(map).map(DistinctKeys)
    }
}

/// Returns the entries of a JSON object, for serde visitors that accept an object or a value of another type.
///
/// # Errors
/// A custom error if a key occurs twice.
pub fn distinct_entries<'de, A: MapAccess<'de>, V: Deserialize<'de>>(mut map: A) -> Result<Vec<(String, V)>, A::Error> {
    let mut seen = HashSet::new();
    let mut entries = Vec::new();
    while let Some((key, value)) = map.next_entry::<String, V>()? {
        if !seen.insert(key.clone()) {
            return Err(A::Error::custom(format_args!("the key `{key}` twice")));
        }
        entries.push((key, value));
    }
    Ok(entries)
}

/// Returns whether a file starts like a JSON document with a layout of dtshard: `layout.json` or `flat_layout.json`.
pub fn is_layout_document(head: &[u8], _len: u64) -> bool {
    let has = |key: &[u8]| head.windows(key.len()).any(|window| window == key);
    has(b"\"version\"") && has(b"\"world_size\"")
}

/// Reads a document of at most `max_bytes` bytes.
///
/// # Errors
/// `Malformed` if the file is longer, `Io`.
pub fn read_document(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let too_long = || Error::malformed(path, "content", format!("at most {max_bytes} bytes"), "more");
    if regular_file(path)?.len() > max_bytes {
        return Err(too_long());
    }
    let mut text = Vec::new();
    let file = std::fs::File::open(path).map_err(Error::io("open", path))?;
    file.take(max_bytes + 1).read_to_end(&mut text).map_err(Error::io("read", path))?;
    if text.len() as u64 > max_bytes {
        return Err(too_long());
    }
    Ok(text)
}
