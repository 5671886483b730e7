//! Builds the chunk tables of source and target of a conversion, without files on disk.

use dtshard::catalog::{Catalog, ChunkTable, FileLocation, OutputFile, Reservation, Reserved, TensorId};
use dtshard::storage::FileId;

use super::model::{Job, Tensor};

/// Returns the catalog of the source, and the reservation of the target (the layout of its files). Every rank of the
/// target has a file.
pub fn tables(from: &Job, to: &Job, tensors: impl Iterator<Item = Tensor>) -> (Catalog, Reservation) {
    let (mut catalog, mut reservation) = (Catalog::empty(), Reservation::default());
    for tensor in tensors {
        let source = TensorId(u32::try_from(catalog.tensors.len()).expect("few tensors"));
        catalog.tensors.push(from.entry(&tensor));
        let mut target = Reserved::new(source, to.entry(&tensor));
        let mut placed = ChunkTable::new(target.entry.shape.len());
        for (rank, mut chunk) in target.entry.chunks.iter().enumerate() {
            if reservation.files.len() <= rank {
                reservation.files.push(OutputFile::new(format!("{rank}")));
            }
            let file = FileId(u32::try_from(rank).expect("few ranks"));
            let offset = reservation.files[rank].push_payload(chunk.tile.numel() * target.entry.dtype.itemsize());
            chunk.location =
                if chunk.tile.is_empty() { FileLocation::Empty } else { FileLocation::Bytes { file, offset } };
            placed.push(chunk);
        }
        target.entry.chunks = placed;
        reservation.tensors.push(target);
    }
    (catalog, reservation)
}
