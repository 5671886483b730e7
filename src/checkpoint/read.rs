//! Reads the values of an open checkpoint: tensors, boxes and shards into buffers of the caller, objects as pickles.
//!
//! A buffer has the elements in row-major order and in little-endian byte order. Only the bytes of the requested part are
//! read, by all worker threads; partial values are reduced.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::sync::PoisonError;

use rayon::prelude::*;

use torch_pickle::pickle::Writer;

use super::Checkpoint;
use crate::catalog::{Chunk, ChunkTable, Path, TensorEntry, TensorId, path, state_dict};
use crate::convert::source_checks::{self, Replicas};
use crate::convert::{self, Run, has_ranks};
use crate::error::{CatalogError, Error, LayoutError, Result};
use crate::exec::{Locations, PreparedTile, Scratch};
use crate::format::archive::Leaves;
use crate::layout::{Region, Tile, local_shard, parse_placements};
use crate::plan::SourceTensor;
use crate::progress::{NoProgress, Progress};

/// The maximum number of bytes that one thread reads at a time.
const BLOCK_BYTES: usize = 4 << 20;

/// The number of parts that are prepared together. Preparing lists the source chunks of a part, which takes memory.
const PARTS_AT_A_TIME: usize = 64;

/// A part of a tensor, and the buffer for its elements.
#[derive(Debug)]
pub struct TensorRead<'a> {
    /// The complete dotted path of the tensor in the state dict.
    pub name: &'a str,
    /// The part of the tensor.
    pub part: TensorPart,
    /// The first element of the part that is read, in row-major order: 0, unless the part is read piece by piece.
    pub first: u64,
    /// The buffer. Its length is the number of bytes that are read.
    pub buffer: &'a mut [u8],
}

/// The part of a tensor that is read.
#[derive(Clone, Debug)]
pub enum TensorPart {
    /// The complete tensor.
    Whole,
    /// The box that begins at `offsets` and has the given `sizes`, in elements.
    Box {
        /// The first index of the box in each dimension.
        offsets: Vec<u64>,
        /// The size of the box in each dimension.
        sizes: Vec<u64>,
    },
    /// The local tensor of the rank at `coordinate` of a device mesh, as PyTorch's `DTensor` defines it. With
    /// `_StridedShard` placements it may consist of several boxes.
    Shard {
        /// The shape of the mesh.
        mesh: Vec<u64>,
        /// The coordinate of the rank in the mesh.
        coordinate: Vec<u64>,
        /// A placement for each mesh dimension in PyTorch's notation: `S(0),R`.
        placements: String,
    },
}

impl Checkpoint {
    /// Reads a complete tensor into `buffer`.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::read_all`]; `Usage` if the buffer has not the length of the tensor.
    pub fn read(&self, name: &str, buffer: &mut [u8]) -> Result<()> {
        self.read_complete(name, TensorPart::Whole, buffer)
    }

    /// Reads one box of a tensor into `buffer`. Does not read tensor data outside the box. The box begins at `offsets`
    /// and has the given `sizes`.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::read_all`]; `Usage` if the buffer has not the length of the box.
    pub fn read_box(&self, name: &str, offsets: &[u64], sizes: &[u64], buffer: &mut [u8]) -> Result<()> {
        self.read_complete(name, TensorPart::Box { offsets: offsets.to_vec(), sizes: sizes.to_vec() }, buffer)
    }

    fn read_complete(&self, name: &str, part: TensorPart, buffer: &mut [u8]) -> Result<()> {
        let (id, tile) = self.tile(name, &part)?;
        let expected = tile.numel() * self.inner.catalog.tensor(id).dtype.itemsize();
        if buffer.len() as u64 != expected {
            return Err(Error::usage(
                format!("{name}: the box has {expected} bytes, the buffer {}", buffer.len()),
                "give a buffer of the length of the box",
            ));
        }
        self.read_all(&mut [TensorRead { name, part, first: 0, buffer }], &NoProgress)
    }

    /// Reads parts of tensors, each into its buffer. `progress` receives the number of bytes that are read.
    ///
    /// If several ranks stored a plain tensor, all copies of the tensor are compared when a part of it is first read. The states
    /// of random number generators may differ: the copy of [`OpenOptions::rank`](crate::OpenOptions::rank) is read.
    ///
    /// # Errors
    /// `Usage` if no tensor has the name, if the part does not fit the shape of the tensor, or if the buffer is longer than
    /// the part, or its length is no multiple of the size of an element; `Unsupported` if the layout or the type of the tensor is unknown; `Conflict`
    /// if copies of a plain tensor differ; `Io` and `Malformed` from reading files; `Stopped` if the [`Stop`](crate::Stop) of the checkpoint is raised.
    pub fn read_all(&self, reads: &mut [TensorRead<'_>], progress: &dyn Progress) -> Result<()> {
        // Errors of options are reported before anything is read.
        let parts = reads.iter().map(|read| self.part(read)).collect::<Result<Vec<_>>>()?;
        self.compare_copies(&parts)?;
        progress.begin("reading", reads.iter().map(|read| read.buffer.len() as u64).sum());
        for (reads, parts) in reads.chunks_mut(PARTS_AT_A_TIME).zip(parts.chunks(PARTS_AT_A_TIME)) {
            self.engine.workers.install(|| self.read_parts(reads, parts, progress))?;
        }
        progress.end();
        Ok(())
    }

    /// Returns a handle of the file and the offset in bytes at which one run of bytes holds the part, in row-major order. The
    /// handle is that of the file that was opened, even if another file has its path now. Returns `None` if several runs hold
    /// the part, or if its values are computed.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::read_all`], apart from reading.
    pub fn stored_run(&self, name: &str, part: &TensorPart) -> Result<Option<(File, u64)>> {
        let (id, tile) = self.tile(name, part)?;
        self.compare_copies(&[(id, tile.clone())])?;
        let entry = self.entry_to_read(id);
        let source = SourceTensor::new(&entry)?;
        let tile = PreparedTile::new(convert::input(&self.inner), &source, &tile, &mut Locations::default())?;
        let Some((file, offset)) = tile.single_run() else { return Ok(None) };
        Ok(Some((self.inner.files.open(file)?.duplicate()?, offset)))
    }

    /// Returns the sizes of a part of a tensor. They are the shape of the local tensor if the part is the shard of a rank.
    ///
    /// # Errors
    /// `Usage` if no tensor has the name, or if the part does not fit the shape of the tensor.
    pub fn part_sizes(&self, name: &str, part: &TensorPart) -> Result<Vec<u64>> {
        Ok(self.tile(name, part)?.1.sizes().to_vec())
    }

    /// Returns the tensor and the tile that are a part of it.
    fn tile(&self, name: &str, part: &TensorPart) -> Result<(TensorId, Tile)> {
        let id = self.find(name).ok_or_else(|| self.unknown(name))?;
        let entry = self.inner.catalog.tensor(id);
        match &entry.unreadable {
            Some(why) => Err(why.error(name)),
            None => Ok((id, part.tile(name, entry)?)),
        }
    }

    /// Returns the tensor and the tile that are read, after all checks.
    fn part(&self, read: &TensorRead<'_>) -> Result<(TensorId, Tile)> {
        let name = read.name;
        let (id, tile) = self.tile(name, &read.part)?;
        let entry = self.inner.catalog.tensor(id);
        let (itemsize, len) = (entry.dtype.itemsize(), read.buffer.len() as u64);
        let end = (len % itemsize == 0).then(|| read.first.checked_add(len / itemsize)).flatten();
        if end.is_none_or(|end| end > tile.numel()) {
            return Err(Error::usage(
                format!(
                    "{name}: the part has {} elements of {} ({} bytes), and the buffer {len} bytes for those from element {} on",
                    tile.numel(),
                    entry.dtype,
                    tile.numel() * itemsize,
                    read.first
                ),
                "give a buffer of the length of the part",
            ));
        }
        Ok((id, tile))
    }

    /// Compares the copies of plain tensors that were not compared before.
    fn compare_copies(&self, parts: &[(TensorId, Tile)]) -> Result<()> {
        let lock = || self.compared.lock().unwrap_or_else(PoisonError::into_inner);
        let ids: Vec<TensorId> = {
            let known = lock();
            parts.iter().map(|(id, _)| *id).filter(|id| !known.contains_key(id)).collect()
        };
        // The lock is not held meanwhile: worker threads that read for another thread of the caller need it.
        let compare = |run: &Run<'_>| source_checks::differing(&self.inner, &ids, Replicas::Plain, None, run);
        let differing = self.engine.work(&self.progress, compare)?;
        let mut compared = lock();
        for (id, difference) in differing {
            let entry = self.inner.catalog.tensor(id);
            if !state_dict::is_random_state(entry.fqn.as_str()) || !has_ranks(entry) {
                let mut error = source_checks::replica_conflict(&self.inner, id, &difference, None);
                if let Error::Catalog(CatalogError::Conflict { hint, .. }) = &mut error {
                    let text = "leave the tensor out, or convert the checkpoint with options::on_conflict first; if the ranks \
                                hold shards of the tensor, declare them with options::src_mesh and options::src_placements";
                    *hint = Some(text.to_owned());
                }
                return Err(error);
            }
            compared.insert(id, true);
        }
        for id in ids {
            compared.entry(id).or_insert(false);
        }
        Ok(())
    }

    /// Returns a tensor with its chunks. If each rank has its own values, the result has only the chunk of one rank.
    fn entry_to_read(&self, id: TensorId) -> Cow<'_, TensorEntry> {
        let entry = self.inner.catalog.tensor(id);
        let has_own_values = self.compared.lock().unwrap_or_else(PoisonError::into_inner).get(&id) == Some(&true);
        if !has_own_values {
            return Cow::Borrowed(entry);
        }
        let mut copies: Vec<Chunk> = entry.chunks.iter().collect();
        copies.sort_by_key(|chunk| chunk.rank);
        let own = copies.iter().position(|chunk| chunk.rank == Some(self.rank));
        let index = own.unwrap_or(self.rank.0 as usize % copies.len());
        let mut chunks = ChunkTable::new(entry.shape.len());
        chunks.push(copies.swap_remove(index));
        Cow::Owned(TensorEntry { chunks, ..entry.clone() })
    }

    fn read_parts(
        &self,
        reads: &mut [TensorRead<'_>],
        parts: &[(TensorId, Tile)],
        progress: &dyn Progress,
    ) -> Result<()> {
        let input = convert::input(&self.inner);
        let prepare = |(id, tile): &(TensorId, Tile)| {
            let entry = self.entry_to_read(*id);
            PreparedTile::new(input, &SourceTensor::new(&entry)?, tile, &mut Locations::default())
        };
        let prepared = parts.par_iter().map(prepare).collect::<Result<Vec<_>>>()?;
        let mut blocks = Vec::new();
        for (read, tile) in reads.iter_mut().zip(&prepared) {
            let itemsize = usize::try_from(tile.itemsize()).expect("a few bytes");
            let elements = BLOCK_BYTES / itemsize;
            let cut = read.buffer.chunks_mut(elements * itemsize).enumerate();
            blocks.extend(cut.map(|(index, block)| (tile, read.first + (index * elements) as u64, block)));
        }
        blocks.into_par_iter().try_for_each_init(Scratch::default, |scratch, (tile, first, block)| {
            self.engine.setup.stop.check()?;
            tile.read(input, first, block, scratch)?;
            progress.advance(block.len() as u64);
            Ok(())
        })
    }

    /// Returns the values that are not tensors as pickles of protocol 2, each with its dotted path in the state dict. Of a value
    /// that differs between ranks, the value of [`OpenOptions::rank`](crate::OpenOptions::rank) is returned. A tensor inside a value (in a tuple or an object) is written as a persistent id, which is the name of
    /// the tensor.
    ///
    /// # Errors
    /// `Unsupported` for a value that cannot be pickled.
    pub fn pickled_objects(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let objects = path::objects(&self.inner.catalog.state);
        let pickle = |(path, value): (Path, &_)| {
            let mut names = HashMap::new();
            path::tensors(value, &path, &mut |path, id| {
                names.entry(id).or_insert_with(|| path.to_string());
            });
            let tensors = |writer: &mut Writer, id: TensorId| {
                writer.string(&names[&id]).binpersid();
                Ok(())
            };
            let mut writer = Writer::new();
            let written = writer.value(value, &mut Leaves { rank: Some(self.rank), tensors });
            written.map_err(|error| {
                Error::unsupported(format!("{path}: the value cannot be pickled: {error}"), "leave the value out")
            })?;
            Ok((path.to_string(), writer.finish()))
        };
        objects.into_iter().map(pickle).collect()
    }

    fn unknown(&self, name: &str) -> Error {
        let names: Vec<String> =
            state_dict::all_tensors(&self.inner.catalog.state).into_iter().map(|(name, _)| name.to_string()).collect();
        Error::usage(format!("{name}: no tensor has this name"), crate::nearest::name_hint(name, &names))
    }
}

impl TensorPart {
    /// Returns the elements of the part as a tile of the tensor.
    fn tile(&self, name: &str, entry: &TensorEntry) -> Result<Tile> {
        let shape = entry.shape.as_slice();
        match self {
            Self::Whole => Ok(Tile::from_region(&Region::whole(shape))),
            Self::Box { offsets, sizes } => {
                let has_dims = [offsets.len(), sizes.len()] == [shape.len(); 2];
                let region =
                    has_dims.then(|| Region::new(&offsets[..], &sizes[..])).filter(|region| region.fits(shape));
                let region = region.ok_or_else(|| {
                    Error::usage(
                        format!("{name}: a box at {offsets:?} of sizes {sizes:?} does not fit shape {shape:?}"),
                        "give an offset and a size for each dimension, within the shape",
                    )
                })?;
                Ok(Tile::from_region(&region))
            }
            Self::Shard { mesh, coordinate, placements } => {
                let about = |error: LayoutError| {
                    Error::usage(
                        format!("{name}: {placements} on a mesh {mesh:?} does not fit shape {shape:?}: {error}"),
                        "give a placement for each mesh dimension, and a coordinate within the mesh",
                    )
                };
                let mut resolved = Vec::new();
                for spec in parse_placements(placements).map_err(about)? {
                    let placement = spec.resolve(shape.len()).filter(|placement| !placement.is_partial());
                    resolved.push(placement.ok_or_else(|| {
                        Error::usage(
                            format!("{name}: a part cannot have the placement {spec} of shape {shape:?}"),
                            "use S(dim) or _S(dim,split_factor) of a dimension of the tensor, or R",
                        )
                    })?);
                }
                local_shard(shape, mesh, &resolved, coordinate).map_err(about)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::path::Path;

    use super::*;
    use crate::options::SelectOptions;

    fn fixture(path: &str) -> Checkpoint {
        Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)).unwrap()
    }

    /// A matrix of several chunks, and its bytes.
    fn matrix(checkpoint: &Checkpoint) -> (String, [u64; 2], Vec<u8>) {
        let is_cut = |tensor: &crate::TensorInfo<'_>| tensor.shape().len() == 2 && tensor.chunks() > 1;
        let tensor = checkpoint.tensors().find(is_cut).unwrap();
        let mut whole = vec![0; usize::try_from(tensor.len_bytes()).unwrap()];
        checkpoint.read(tensor.name(), &mut whole).unwrap();
        (tensor.name().to_owned(), [tensor.shape()[0], tensor.shape()[1]], whole)
    }

    #[test]
    fn shards_of_all_ranks_are_the_tensor() {
        let checkpoint = fixture("fsdp4/dcp");
        let (name, [rows, columns], whole) = matrix(&checkpoint);
        let itemsize = whole.len() / usize::try_from(rows * columns).unwrap();
        // Rank r of 3 has rows r * ceil(rows / 3) and the following.
        let chunk = rows.div_ceil(3);
        for rank in 0..3 {
            let range = (rank * chunk).min(rows)..((rank + 1) * chunk).min(rows);
            let [start, end] = [range.start, range.end].map(|row| usize::try_from(row * columns).unwrap() * itemsize);
            let part = TensorPart::Shard { mesh: vec![2, 3], coordinate: vec![1, rank], placements: "R,S(0)".into() };
            let mut shard = vec![0; end - start];
            let read = TensorRead { name: &name, part: part.clone(), first: 0, buffer: &mut shard };
            checkpoint.read_all(&mut [read], &NoProgress).unwrap();
            assert_eq!(shard, whole[start..end]);
            // In two pieces.
            let mut shard = vec![0; end - start];
            let (one, two) = shard.split_at_mut(itemsize.min(end - start));
            let first = (one.len() / itemsize) as u64;
            let mut reads = [(0, one), (first, two)].map(|(first, buffer)| TensorRead {
                name: &name,
                part: part.clone(),
                first,
                buffer,
            });
            checkpoint.read_all(&mut reads, &NoProgress).unwrap();
            assert_eq!(shard, whole[start..end]);
        }
    }

    #[test]
    fn part_that_does_not_fit_is_an_error() {
        let checkpoint = fixture("fsdp4/dcp");
        let (name, [rows, columns], whole) = matrix(&checkpoint);
        let shard = |mesh: &[u64], coordinate: &[u64], placements: &str| TensorPart::Shard {
            mesh: mesh.to_vec(),
            coordinate: coordinate.to_vec(),
            placements: placements.into(),
        };
        let cases = [
            (TensorPart::Box { offsets: vec![0, 1], sizes: vec![rows, columns] }, 0, "does not fit shape"),
            (TensorPart::Box { offsets: vec![u64::MAX, 0], sizes: vec![1, 1] }, 0, "does not fit shape"),
            (shard(&[2], &[2], "S(0)"), 0, "does not fit shape"),
            (shard(&[2], &[0], "S(2)"), 0, "cannot have the placement"),
            (shard(&[2], &[0], "P(sum)"), 0, "cannot have the placement"),
            (shard(&[2, 2], &[0, 0], "S(0)"), 0, "does not fit shape"),
            (TensorPart::Whole, 1, "and the buffer"),
            (TensorPart::Whole, u64::MAX, "and the buffer"),
        ];
        for (part, first, expected) in cases {
            let mut buffer = vec![0; whole.len()];
            let read = TensorRead { name: &name, part, first, buffer: &mut buffer };
            let error = checkpoint.read_all(&mut [read], &NoProgress).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(&name), "{error}");
        }
    }

    #[test]
    fn stored_run_is_the_offset_of_a_tensor_in_its_file() {
        let checkpoint = fixture("titan.truth.safetensors");
        let tensor = checkpoint.tensors().find(|tensor| tensor.shape().len() == 2).unwrap();
        let mut whole = vec![0; usize::try_from(tensor.len_bytes()).unwrap()];
        checkpoint.read(tensor.name(), &mut whole).unwrap();
        let (mut file, offset) = checkpoint.stored_run(tensor.name(), &TensorPart::Whole).unwrap().unwrap();
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        let offset = usize::try_from(offset).unwrap();
        assert_eq!(bytes[offset..offset + whole.len()], whole);
        let columns = TensorPart::Box { offsets: vec![0, 0], sizes: vec![tensor.shape()[0], 1] };
        assert!(checkpoint.stored_run(tensor.name(), &columns).unwrap().is_none());
    }

    #[test]
    fn selected_tensor_is_read_under_its_new_name() {
        let mut checkpoint = fixture("fsdp4/dcp");
        let (name, _, whole) = matrix(&checkpoint);
        let rename = vec![format!("{name}=other.name")];
        let options = SelectOptions { include: vec![name.clone()], rename, ..SelectOptions::default() };
        checkpoint.select(&options).unwrap();
        let mut renamed = vec![0; whole.len()];
        checkpoint.read("other.name", &mut renamed).unwrap();
        assert_eq!(renamed, whole);
        assert!(checkpoint.tensor(&name).is_none());
        let cast = SelectOptions { dtype: vec!["bf16".into()], ..SelectOptions::default() };
        assert!(checkpoint.select(&cast).unwrap_err().to_string().contains("options::dtype has no effect on reading"));
    }

    #[test]
    fn reading_a_tensor_of_an_unsupported_type_is_an_error_that_names_the_type() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/trainers/not_dense/quantized.pt");
        let checkpoint = Checkpoint::open(path).unwrap();
        let error = checkpoint.read("quantized", &mut []).unwrap_err().to_string();
        assert!(error.contains("cannot read `") && error.contains("quantized"), "{error}");
    }
}
