//! Saved output of `inspect --digest --json`, which `verify` can compare with a checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Deserializer};
use serde_json::Value as Json;

use crate::error::{Error, Result};
use crate::format::Format;
use crate::format::index::is_index;
use crate::json_text;
use crate::storage::{lookup, regular_file};

/// The fields of a saved `inspect --digest --json` document that describe tensors and objects.
#[derive(Debug, Deserialize)]
pub struct DigestListing {
    format: String,
    pub tensors: BTreeMap<String, ListedTensor>,
    pub objects: BTreeMap<String, Json>,
}

/// The description of one tensor in a saved document.
#[derive(Debug, Deserialize)]
pub struct ListedTensor {
    /// The dtype, or an empty text if the tensor could not be read.
    #[serde(deserialize_with = "null_as_default")]
    pub dtype: String,
    #[serde(deserialize_with = "null_as_default")]
    pub shape: Vec<u64>,
    /// The digest of the tensor: a hash of its dtype, shape and values. `None` if the tensor could not be read, or has
    /// partial values that cannot be reduced.
    pub digest: Option<String>,
}

fn null_as_default<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(
    from: D,
) -> std::result::Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl DigestListing {
    /// Returns the listing of digests at `path`. Returns `None` if `path` can only be a checkpoint: a folder, a file
    /// that is not JSON, or an index of weights.
    ///
    /// # Errors
    /// `Malformed` for a JSON document that is not a listing, `Usage` for a listing without digests, `Io`.
    pub fn read_if_any(path: &Path) -> Result<Option<Self>> {
        let is_json = path.extension().is_some_and(|suffix| suffix == "json");
        let is_index = path.file_name().is_some_and(|name| is_index(&name.to_string_lossy()));
        if !is_json || is_index || lookup::is_folder(path)? {
            return Ok(None);
        }
        regular_file(path)?;
        let text = std::fs::read(path).map_err(Error::io("read", path))?;
        let listing: Self = serde_json::from_slice(&text).map_err(|error| {
            json_text::malformed_part(path, "saved digests", &error, "the output of `dtshard inspect --digest --json`")
        })?;
        if listing.tensors.values().any(|listed| listed.digest.is_some()) || listing.tensors.is_empty() {
            return Ok(Some(listing));
        }
        Err(Error::usage(
            format!("{}: the listing has no digests", path.display()),
            "create it with `dtshard inspect --digest --json`",
        ))
    }

    /// Returns whether the format of the listed checkpoint can store objects.
    #[must_use]
    pub fn holds_objects(&self) -> bool {
        Format::from_name(&self.format).is_none_or(Format::holds_objects)
    }
}
