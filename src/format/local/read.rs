//! Reads a folder of the format `local`, and checks every tensor in its rank files against `layout.json`. Offsets are
//! in bytes; shapes count elements.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::document::{self, DescribedTensor, FILE_NAME, LocalDocument};
use super::{file_name, rank_of};
use crate::catalog::{Catalog, Chunk, Class, Dtype, FileLocation, MeshId, PartialValues, Sharding, TensorEntry};
use crate::error::{Error, FormatError, Result};
use crate::format::safetensors::{StoredTensor, read_header};
use crate::format::series::ALLOW_MISSING_HINT;
use crate::format::shortfall::{Shortfall, list_missing_names};
use crate::layout::distinct_tiles::MeshPlacement;
use crate::layout::{DeviceMesh, Dims, LayoutError, Rank, Region, Tile};
use crate::name_list::Numbers;
use crate::storage::{Files, lookup};

/// Reads a folder of the format `local`, and returns the catalog, the number of ranks in `layout.json`, and a shortfall if a
/// rank has no file. `paths` are the rank files of the folder.
///
/// # Errors
/// `Usage` if there is no `layout.json`, `Malformed` if a file does not match `layout.json`, `Io`.
pub fn read(files: &mut Files, folder: &Path, paths: &[PathBuf]) -> Result<(Catalog, u32, Option<Shortfall>)> {
    let path = folder.join(FILE_NAME);
    if !lookup::exists(&path)? {
        return Err(missing_document_error(folder));
    }
    let document = document::read(&path)?;
    let ranks: BTreeMap<u32, PathBuf> =
        paths.iter().filter_map(|path| Some((rank_of(path)?.0, path.clone()))).collect();
    if let Some((rank, path)) = ranks.range(document.world_size..).next() {
        let expected = format!("a rank below the world size {} of {FILE_NAME}", document.world_size);
        return Err(Error::malformed(path, "file name", expected, format!("rank {rank}")));
    }
    let missing = document.world_size.checked_sub(1).and_then(|last| Numbers::missing(0..=last, ranks.keys().copied()));
    let mut assembly = Assembly::new(&document);
    for (rank, path) in &ranks {
        assembly.add(files, Rank(*rank), path)?;
    }
    let mut catalog = assembly.finish(&path)?;
    catalog.state = document.state;
    let shortfall = missing.map(|numbers| {
        let missing = numbers.short("rank", "ranks");
        let allowed = format!("{} is read without {missing}", folder.display());
        let is_whole = |entry: &TensorEntry| !entry.chunks.is_empty() && entry.tilings().is_ok();
        let error = Error::Format(FormatError::Missing {
            path: folder.to_path_buf(),
            at: String::from(FILE_NAME),
            expected: format!("the files of {} ranks", document.world_size),
            missing,
            hint: catalog.tensors.iter().all(is_whole).then(|| ALLOW_MISSING_HINT.into()),
        })
        .naming(&numbers.names("rank", "ranks"));
        let missing = list_missing_names(numbers.count(), numbers.iter().map(|rank| file_name(Rank(rank))));
        Shortfall { missing, error, allowed: Some(allowed), is_one_file: false }
    });
    Ok((catalog, document.world_size, shortfall))
}

fn missing_document_error(folder: &Path) -> Error {
    Error::usage(
        format!(
            "{}: the folder has rank files but no {FILE_NAME}, which describes how their tensors are sharded",
            folder.display()
        ),
        "declare how tensors are sharded with options::src_mesh and options::src_placements, or with options::src_layout; \
         or read the files as whole tensors with options::from safetensors",
    )
}

/// A catalog to which the rank files are added one after the other.
struct Assembly<'a> {
    document: &'a LocalDocument,
    catalog: Catalog,
    /// The meshes that have been added to the catalog: a map from the mesh id in the document to the mesh id in the
    /// catalog.
    meshes: HashMap<MeshId, MeshId>,
}

impl<'a> Assembly<'a> {
    fn new(document: &'a LocalDocument) -> Self {
        let mut own = Self { document, catalog: Catalog::empty(), meshes: HashMap::new() };
        for described in &document.tensors {
            let entry = own.entry(described);
            own.catalog.push_tensor(entry);
        }
        own
    }

    /// Returns a catalog entry without chunks for a tensor of the document. Adds the tensor's mesh to the catalog.
    fn entry(&mut self, described: &DescribedTensor) -> TensorEntry {
        let DescribedTensor { names, dtype, shape, class, .. } = described;
        let mut entry = TensorEntry { class: *class, ..TensorEntry::new(names[0].clone(), *dtype, shape.clone()) };
        let (document, catalog) = (self.document, &mut self.catalog);
        // The catalog stores a ShardedTensor as boxes, without its mesh.
        if let Some(sharding) = described.sharding.as_ref().filter(|_| *class != Class::ShardedTensor) {
            let intern = || catalog.intern_mesh(mesh_of(document, sharding).clone());
            let mesh = *self.meshes.entry(sharding.mesh).or_insert_with(intern);
            entry.sharding = Some(Box::new(Sharding { mesh, ..sharding.clone() }));
        }
        entry
    }

    /// Checks that the file of a rank has exactly the tensors that `layout.json` describes for this rank, and adds a
    /// chunk for each of them.
    fn add(&mut self, files: &mut Files, rank: Rank, path: &Path) -> Result<()> {
        let file = files.add(path)?;
        let mut stored: HashMap<Arc<str>, StoredTensor> = read_header(files, file)?.tensors.into_iter().collect();
        for (described, entry) in self.document.tensors.iter().zip(&mut self.catalog.tensors) {
            let tile = local_tile(self.document, described, rank).map_err(|error| misfit_error(path, entry, &error))?;
            let Some(tile) = tile else { continue };
            let sizes = tile.sizes();
            let mut own = None;
            for name in &described.names {
                let Some(found) = stored.remove(name.as_str()) else {
                    let expected = format!("a tensor {} {:?}", described.dtype, sizes.as_slice());
                    return Err(Error::malformed(path, name.as_str(), expected, "no tensor of this name"));
                };
                check_stored(path, name.as_str(), (described.dtype, &sizes), &found)?;
                own.get_or_insert(found);
            }
            let offset = own.expect("every tensor has a name").offset;
            if tile.is_empty() && described.class == Class::ShardedTensor {
                continue;
            }
            let location = if tile.is_empty() { FileLocation::Empty } else { FileLocation::Bytes { file, offset } };
            entry.chunks.push(Chunk { tile, location, strides: None, rank: Some(rank), view: None });
        }
        // The error reports the smallest name, so that it is the same in every run.
        match stored.into_keys().min() {
            None => Ok(()),
            Some(name) => {
                let expected =
                    format!("no tensor of this name, because {FILE_NAME} lists no such tensor for rank {rank}");
                Err(Error::malformed(path, &*name, expected, "one"))
            }
        }
    }

    fn finish(mut self, path: &Path) -> Result<Catalog> {
        for (described, entry) in self.document.tensors.iter().zip(&mut self.catalog.tensors) {
            let Some(sharding) = &described.sharding else { continue };
            let placement = MeshPlacement { mesh: mesh_of(self.document, sharding), shared: &sharding.shared };
            let partial_values =
                PartialValues::new(placement, &entry.chunks).map_err(|error| misfit_error(path, entry, &error))?;
            entry.partial_values = partial_values.map(Box::new);
        }
        Ok(self.catalog)
    }
}

fn misfit_error(path: &Path, entry: &TensorEntry, error: &LayoutError) -> Error {
    Error::malformed(
        path,
        entry.fqn.as_str(),
        "placements that fit the tensor",
        format!("placements that do not fit ({error})"),
    )
}

fn mesh_of<'a>(document: &'a LocalDocument, sharding: &Sharding) -> &'a DeviceMesh {
    &document.meshes[sharding.mesh.0 as usize]
}

/// Returns a rank's part of a tensor, which may be empty. Returns `None` if the rank's file does not contain the
/// tensor.
fn local_tile(document: &LocalDocument, described: &DescribedTensor, rank: Rank) -> Result<Option<Tile>, LayoutError> {
    let DescribedTensor { shape, sharding, ranks, .. } = described;
    let Some(sharding) = sharding else {
        let is_holder = ranks.as_ref().is_none_or(|ranks| ranks.contains(&rank));
        return Ok(is_holder.then(|| Tile::from_region(&Region::whole(shape))));
    };
    let mesh = mesh_of(document, sharding);
    mesh.coordinate(rank).map(|at| sharding.shared.part(shape, mesh, &at)).transpose()
}

fn check_stored(path: &Path, name: &str, (dtype, sizes): (Dtype, &Dims), found: &StoredTensor) -> Result<()> {
    if (dtype, sizes) == (found.dtype, &found.shape) {
        return Ok(());
    }
    let expected = format!("{dtype} {:?} as in {FILE_NAME}", sizes.as_slice());
    Err(Error::malformed(path, name, expected, format!("{} {:?}", found.dtype, found.shape.as_slice())))
}
