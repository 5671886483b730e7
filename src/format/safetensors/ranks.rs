//! Reads one safetensors file per rank: each file has one rank's shards, and the files of all ranks use the same tensor
//! names.
//!
//! The format cannot record which elements of a tensor a shard contains. So files are read in this way only if the user
//! declares the layout ([`crate::format::declared_layout`]). Before the declared layout is applied, every chunk is
//! treated as a full tensor.

use std::collections::BTreeMap;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use super::header::read_header;
use super::{Names, aliases, put_in_order};
use crate::catalog::{Catalog, Chunk, FileLocation, Fqn, TensorEntry};
use crate::error::Result;
use crate::layout::{Rank, Region, Tile};
use crate::storage::Files;

/// Reads the files of all ranks into one catalog.
///
/// # Errors
/// `Conflict` if ranks have different dtypes or numbers of dims under one name; the errors of reading one file.
pub fn read(files: &mut Files, ranks: &BTreeMap<u32, PathBuf>) -> Result<Catalog> {
    let mut catalog = Catalog::empty();
    let mut names = Names::new();
    let mut notes = Vec::new();
    for (rank, path) in ranks {
        let file = files.add(path)?;
        let shared: Arc<FilePath> = path.as_path().into();
        let header = read_header(files, file)?;
        for (name, stored) in header.tensors {
            let tile = Tile::from_region(&Region::whole(&stored.shape));
            let place = FileLocation::Bytes { file, offset: stored.offset };
            let location = if tile.is_empty() { FileLocation::Empty } else { place };
            let entry = TensorEntry::new(Fqn::from(name.clone()), stored.dtype, stored.shape);
            let (first, id) = match names.get(&name) {
                Some(known) => known.clone(),
                None => (shared.clone(), catalog.push_tensor(entry.clone())),
            };
            let known = &mut catalog.tensors[id.0 as usize];
            if (known.dtype, known.shape.len()) != (entry.dtype, entry.shape.len()) {
                let between = format!("{} and {}", first.display(), path.display());
                let text = |entry: &TensorEntry| format!("{} of {} dims", entry.dtype, entry.shape.len());
                let detail = format!("{} and {}", text(known), text(&entry));
                return Err(known.fqn.disagreement("dtype or number of dims", between, detail));
            }
            known.chunks.push(Chunk { tile, location, strides: None, rank: Some(Rank(*rank)), view: None });
            names.insert(name, (first, id));
        }
        notes.extend(header.metadata.into_iter().map(|(key, value)| (shared.clone(), key, value)));
    }
    let aliases = aliases(&mut catalog, &names, notes)?;
    names.extend(aliases);
    put_in_order(&mut catalog, names);
    Ok(catalog)
}
