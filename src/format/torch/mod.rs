//! torch.save files: one file, or one file per rank.
//!
//! Source of the file layout: `torch/serialization.py`. Source of the content: `torch/_utils.py`,
//! `torch/distributed/tensor`.

mod attributes;
mod context;
mod disjoint;
pub(super) mod entry;
pub mod load;
mod mesh;
mod model_parallel;
mod object;
mod rank_file;
pub mod ranks;
pub mod reader;
mod recognise;
mod release;
mod spec;
mod tensor;
mod view;
mod write;
mod write_dtensor;
mod write_mesh;
mod write_ranks;
mod write_sharded;

use std::path::PathBuf;

pub use context::View;
pub use object::{ObjectPlace, read_object};
pub use rank_file::RankFile;
pub use recognise::{is_archive, is_no_model, look_at};
pub use release::{DTensorStyle, Release};
pub use tensor::{ProcessGroup, TensorNode};
pub use write::{
    PREFIX, SavedArchive, SavedTensor, StoredView, TensorArchives, reserve, save, write_sizes, write_view,
};
pub use write_ranks::{RankLayout, RankTarget, reserve_ranks};
pub use write_sharded::{RankGroup, ShardedTensorSpec, ShardedWriter};

use indexmap::IndexSet;

use crate::catalog::{Catalog, Chunk, contiguous_strides};
use crate::error::Result;
use crate::format::shortfall::Shortfall;
use crate::layout::Tile;
use crate::storage::Files;
use model_parallel::shortfall_of_single;
use reader::ArchiveContents;
use torch_pickle::pickle::Unknown;

/// Reads torch.save files of whole tensors: one file, or the files that an index names. Also returns a shortfall if a
/// file has only the parts of one rank.
///
/// # Errors
/// `Malformed`, `Unsupported`, `Io`.
pub fn read(files: &mut Files, paths: &[PathBuf], unknown: Unknown) -> Result<(Catalog, Option<Shortfall>)> {
    let mut loaded = Vec::new();
    for path in paths {
        let file = files.add(path)?;
        let contents = reader::read(files, files.whole(file), "", unknown)?;
        loaded.push(RankFile { rank: None, path: path.clone(), contents });
    }
    let dropped = dropped_objects(&loaded);
    let mut catalog = match loaded.as_slice() {
        [only] => ranks::single(only)?,
        several => disjoint::join_disjoint(several)?,
    };
    catalog.dropped = dropped;
    Ok((catalog, loaded.iter().find_map(shortfall_of_single)))
}

/// Returns the objects that were dropped from the files, as `FQN (symbol)`. An object that occurs in several files is
/// listed once.
pub fn dropped_objects(files: &[RankFile]) -> Vec<String> {
    let all = files.iter().flat_map(|file| &file.contents.dropped);
    let distinct: IndexSet<String> = all.map(|dropped| format!("{} ({})", dropped.path, dropped.symbol)).collect();
    distinct.into_iter().collect()
}

/// Returns a chunk of a tensor: `tile` is the position of the chunk in the tensor, and `view` is the data of the chunk
/// in the archive.
fn chunk(contents: &ArchiveContents, view: &View, tile: Tile, rank: Option<crate::layout::Rank>) -> Chunk {
    let strides = (view.strides != contiguous_strides(&view.sizes)).then(|| view.strides.clone());
    Chunk { tile, location: contents.record_location(view), strides, rank, view: None }
}
