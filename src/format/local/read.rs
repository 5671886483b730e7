//! Reading a folder of rank files: each is held against the document, tensor by tensor.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::document::{self, Described, FILE_NAME, LocalDocument};
use super::rank_of;
use crate::catalog::{Catalog, Chunk, Class, Dtype, FileLocation, MeshId, PartialValues, Sharding, TensorEntry};
use crate::error::{Error, FormatError, Result};
use crate::format::safetensors::{StoredTensor, read_header};
use crate::format::series::WITHOUT_THEM;
use crate::layout::shards::MeshPlacement;
use crate::layout::{DeviceMesh, Dims, LayoutError, Rank, Region, Tile};
use crate::name_list::Numbers;
use crate::storage::{Files, lookup};

/// Read a folder; gives the number of ranks, too.
///
/// # Errors
/// `Usage` without a document, `Missing` listing the ranks that have no file, `Malformed` where a file is not as the
/// document says, `Io`.
pub fn read(files: &mut Files, folder: &Path, paths: &[PathBuf], allow_missing: bool) -> Result<(Catalog, u32)> {
    let path = folder.join(FILE_NAME);
    if !lookup::exists(&path)? {
        return Err(without_document(folder));
    }
    let document = document::read(&path)?;
    let ranks: BTreeMap<u32, PathBuf> =
        paths.iter().filter_map(|path| Some((rank_of(path)?.0, path.clone()))).collect();
    if let Some((rank, path)) = ranks.range(document.world_size..).next() {
        let expected = format!("ranks below the world size of {FILE_NAME}, {}", document.world_size);
        return Err(Error::malformed(path, "file name", expected, format!("rank {rank}")));
    }
    let missing = document.world_size.checked_sub(1).and_then(|last| Numbers::missing(0..=last, ranks.keys().copied()));
    let mut assembly = Assembly::new(&document);
    for (rank, path) in &ranks {
        assembly.add(files, Rank(*rank), path)?;
    }
    let mut catalog = assembly.finish(&path)?;
    catalog.state = document.state;
    let Some(numbers) = missing else { return Ok((catalog, document.world_size)) };
    let missing = numbers.short("rank", "ranks");
    if !allow_missing {
        let is_whole = |entry: &TensorEntry| !entry.chunks.is_empty() && entry.tilings().is_ok();
        return Err(Error::Format(FormatError::Missing {
            path: folder.to_path_buf(),
            at: String::from(FILE_NAME),
            expected: format!("the files of {} ranks", document.world_size),
            missing,
            hint: catalog.tensors.iter().all(is_whole).then(|| WITHOUT_THEM.into()),
        })
        .naming(&numbers.names("rank", "ranks")));
    }
    catalog.warnings.push(format!("{}: read without {missing}", folder.display()));
    Ok((catalog, document.world_size))
}

fn without_document(folder: &Path) -> Error {
    Error::usage(
        format!("{}: rank files without {FILE_NAME}, which says of what their tensors are parts", folder.display()),
        "say it with options::src_mesh and options::src_placements, or options::src_layout; options::from safetensors takes files of whole tensors",
    )
}

/// A catalog in the making, rank by rank.
struct Assembly<'a> {
    document: &'a LocalDocument,
    catalog: Catalog,
    /// Meshes of the document in the catalog, those that it needs.
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

    /// A tensor of which nothing has been found yet.
    fn entry(&mut self, described: &Described) -> TensorEntry {
        let Described { names, dtype, shape, class, .. } = described;
        let mut entry = TensorEntry { class: *class, ..TensorEntry::new(names[0].clone(), *dtype, shape.clone()) };
        let (document, catalog) = (self.document, &mut self.catalog);
        // A ShardedTensor has boxes and no mesh.
        if let Some(sharding) = described.sharding.as_ref().filter(|_| *class != Class::ShardedTensor) {
            let intern = || catalog.intern_mesh(mesh_of(document, sharding).clone());
            let mesh = *self.meshes.entry(sharding.mesh).or_insert_with(intern);
            entry.sharding = Some(Box::new(Sharding { mesh, ..sharding.clone() }));
        }
        entry
    }

    /// Take in a rank's file.
    fn add(&mut self, files: &mut Files, rank: Rank, path: &Path) -> Result<()> {
        let file = files.add(path)?;
        let mut stored: HashMap<Arc<str>, StoredTensor> = read_header(files, file)?.tensors.into_iter().collect();
        for (described, entry) in self.document.tensors.iter().zip(&mut self.catalog.tensors) {
            let tile = part(self.document, described, rank).map_err(|error| unfit(path, entry, &error))?;
            let Some(tile) = tile else { continue };
            let sizes = tile.sizes();
            let mut own = None;
            for name in &described.names {
                let Some(found) = stored.remove(name.as_str()) else {
                    let expected = format!("a tensor {} {:?}", described.dtype, sizes.as_slice());
                    return Err(Error::malformed(path, name.as_str(), expected, "none of that name"));
                };
                check(path, name.as_str(), (described.dtype, &sizes), &found)?;
                own.get_or_insert(found);
            }
            let offset = own.expect("every tensor has a name").offset;
            if tile.is_empty() && described.class == Class::ShardedTensor {
                continue;
            }
            let location = if tile.is_empty() { FileLocation::Empty } else { FileLocation::Bytes { file, offset } };
            entry.chunks.push(Chunk { tile, location, strides: None, rank: Some(rank) });
        }
        // The first by name, so that it is the same one every time.
        match stored.into_keys().min() {
            None => Ok(()),
            Some(name) => {
                let expected = format!("only tensors of which {FILE_NAME} gives rank {rank} a part");
                Err(Error::malformed(path, &*name, expected, "one more"))
            }
        }
    }

    fn finish(mut self, path: &Path) -> Result<Catalog> {
        for (described, entry) in self.document.tensors.iter().zip(&mut self.catalog.tensors) {
            let Some(sharding) = &described.sharding else { continue };
            let lies = MeshPlacement { mesh: mesh_of(self.document, sharding), shared: &sharding.shared };
            let summands = PartialValues::new(lies, &entry.chunks).map_err(|error| unfit(path, entry, &error))?;
            entry.partial_values = summands.map(Box::new);
        }
        Ok(self.catalog)
    }
}

fn unfit(path: &Path, entry: &TensorEntry, error: &LayoutError) -> Error {
    Error::malformed(path, entry.fqn.as_str(), "placements that fit", error.to_string())
}

fn mesh_of<'a>(document: &'a LocalDocument, sharding: &Sharding) -> &'a DeviceMesh {
    &document.meshes[sharding.mesh.0 as usize]
}

/// What a rank holds of a tensor; `None` where it has none, not even an empty one.
fn part(document: &LocalDocument, described: &Described, rank: Rank) -> Result<Option<Tile>, LayoutError> {
    let Described { shape, sharding, ranks, .. } = described;
    let Some(sharding) = sharding else {
        let is_holder = ranks.as_ref().is_none_or(|ranks| ranks.contains(&rank));
        return Ok(is_holder.then(|| Tile::from_region(&Region::whole(shape))));
    };
    let mesh = mesh_of(document, sharding);
    mesh.coordinate(rank).map(|at| sharding.shared.part(shape, mesh, &at)).transpose()
}

fn check(path: &Path, name: &str, (dtype, sizes): (Dtype, &Dims), found: &StoredTensor) -> Result<()> {
    if (dtype, sizes) == (found.dtype, &found.shape) {
        return Ok(());
    }
    let expected = format!("{dtype} {:?} as {FILE_NAME} says", sizes.as_slice());
    Err(Error::malformed(path, name, expected, format!("{} {:?}", found.dtype, found.shape.as_slice())))
}
