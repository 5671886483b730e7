//! The layout of the data files of a DCP directory, and the byte ranges that `.metadata` records for the items in these
//! files.

use std::collections::BTreeMap;

use crate::catalog::{Catalog, Chunk, ChunkTable, FileLocation, Fqn, OutputFile, Reservation, TensorId, Value};
use crate::error::{Error, Result};
use crate::format::torch::{TensorArchives, save};
use crate::layout::Rank;
use crate::storage::FileId;
use torch_pickle::pickle::WriteError;

/// The byte range of an item (a tensor chunk or an object) in a data file: PyTorch's `_StorageInfo`.
#[derive(Clone, Copy)]
pub struct StorageInfo {
    /// The index of the data file in `Reservation::files`.
    pub file: u32,
    /// The offset in the file, in bytes.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
}

/// The layout of a DCP directory: its data files, and the byte ranges to record in `.metadata`.
pub struct FileLayout<'a> {
    /// The source catalog, which has the dtypes and shapes of `tensors`.
    pub source: &'a Catalog,
    /// The tensors to write, by name, in the order of the state dict.
    pub tensors: &'a [(Fqn, TensorId)],
    /// The output files that are already laid out.
    pub reservation: Reservation,
    pub chunks: Vec<ChunkTable>,
    /// For each tensor, the byte range in which each chunk is stored.
    pub stored: Vec<Vec<StorageInfo>>,
    pub objects: BTreeMap<Fqn, StorageInfo>,
    archives: TensorArchives,
}

impl<'a> FileLayout<'a> {
    /// Returns a layout that has no files yet.
    pub fn new(source: &'a Catalog, tensors: &'a [(Fqn, TensorId)]) -> Self {
        Self {
            source,
            tensors,
            reservation: Reservation::default(),
            chunks: tensors.iter().map(|(_, id)| ChunkTable::new(source.tensor(*id).shape.len())).collect(),
            stored: tensors.iter().map(|_| Vec::new()).collect(),
            objects: BTreeMap::new(),
            archives: TensorArchives::default(),
        }
    }

    /// Lays out the data file of one rank, with `objects` and `boxes`. A box is given by the index of its tensor and by
    /// its index in `tables[tensor]`. As in PyTorch, objects come before tensors in the file.
    pub fn file(
        &mut self,
        rank: Rank,
        objects: &[(Fqn, &Value)],
        boxes: &[(u32, u32)],
        tables: &[ChunkTable],
    ) -> Result<()> {
        let number = u32::try_from(self.reservation.files.len()).expect("fewer than 2^32 files");
        let id = FileId(number);
        let mut file = OutputFile::of_rank(rank, format!("__{rank}_0.distcp"));
        for (fqn, value) in objects {
            let offset = file.len;
            let saved = save(self.source, value, &mut file, &mut self.archives.frames)
                .map_err(|error| unpicklable(fqn, &error))?;
            let tensors = saved.tensors.iter().map(|tensor| tensor.reserved(self.source, id));
            self.reservation.tensors.extend(tensors);
            self.objects.insert(fqn.clone(), StorageInfo { file: number, offset, len: saved.len });
        }
        for &(tensor, index) in boxes {
            let (tensor, offset) = (tensor as usize, file.len);
            let tile = tables[tensor].tile(index as usize);
            let dtype = self.source.tensor(self.tensors[tensor].1).dtype;
            let (at, len) = self.archives.append(dtype, &tile.sizes(), &mut file);
            let location =
                if tile.is_empty() { FileLocation::Empty } else { FileLocation::Bytes { file: id, offset: at } };
            self.chunks[tensor].push(Chunk { tile, location, strides: None, rank: Some(rank), view: None });
            self.stored[tensor].push(StorageInfo { file: number, offset, len });
        }
        self.reservation.files.push(file);
        Ok(())
    }
}

fn unpicklable(fqn: &Fqn, error: &WriteError) -> Error {
    Error::unsupported(format!("{fqn}: cannot be pickled: {error}"), "leave that object out of the checkpoint")
}
