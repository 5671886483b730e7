//! Lays out a DCP directory for a target mesh: one `__R_0.distcp` per rank, and `.metadata` for all of them.
//!
//! If several ranks have the same tile, one of these ranks writes the tile: the rank to which the fewest bytes are
//! assigned so far. If several ranks have equally few bytes, the lowest of these ranks writes the tile. A tile that
//! consists of several boxes is written as several chunks, because a chunk of the format is one box.
//!
//! There may be millions of boxes. Until all boxes are assigned to ranks, only the bounds and two indices of each box
//! are in memory: the index of its tensor, and its index among the boxes of this tensor.

use std::collections::BTreeMap;

use super::file_layout::FileLayout;
use super::write_metadata;
use crate::catalog::{
    Catalog, Chunk, ChunkTable, FileLocation, Fqn, OutputFile, Path, Reservation, Reserved, StateLeaf, TensorEntry,
    TensorId, Value, path,
};
use crate::error::{Error, Result};
use crate::format::distinct_names;
use crate::layout::distinct_tiles::HeldTile;
use crate::layout::{Rank, Region, Tile};

/// The distinct tiles of one tensor in the target layout, each with the ranks that have the tile.
pub type Shards = Vec<HeldTile>;

/// Lays out a DCP directory for the state dict `state`. For each tensor, `shards` returns the distinct tiles, each with
/// the ranks that have the tile.
///
/// # Errors
/// `Unsupported` if `state` is not a dict, two paths have the same dotted name, or an object cannot be pickled; the
/// errors of `shards`.
pub fn reserve(
    source: &Catalog,
    state: &Value,
    shards: &mut dyn FnMut(&Fqn, &Path, &TensorEntry) -> Result<Shards>,
) -> Result<Reservation> {
    if !matches!(state, Value::Dict(_)) {
        return Err(Error::unsupported(
            format!("the top level of the checkpoint is a {}, but a DCP checkpoint must be a dict", state.type_name()),
            match state {
                Value::List(_) | Value::Tuple(_) => {
                    "choose one item by its index (append .0 to options::root; without options::root, use options::root 0), or \
                     put the list under a key with options::nest"
                }
                _ => "put it under a key with options::nest, or write a torch file with `dtshard unshard`",
            },
        ));
    }
    let leaves = path::leaves(state);
    // DCP cannot distinguish two paths with the same dotted name.
    let names: Vec<Fqn> = leaves.iter().map(|(path, _)| path.fqn()).collect();
    distinct_names(names.iter().map(Fqn::as_str), &[])?;
    let mut assignment = Assignment::default();
    let mut tensors: Vec<(Fqn, TensorId)> = Vec::new();
    let mut objects: Vec<(Fqn, &Value)> = Vec::new();
    for (fqn, (path, leaf)) in names.into_iter().zip(&leaves) {
        match leaf {
            StateLeaf::Object(value) => objects.push((fqn, value)),
            StateLeaf::Tensor(id) => {
                let entry = source.tensor(*id);
                assignment.boxes.push(ChunkTable::new(entry.shape.len()));
                let held = shards(&fqn, path, entry)?.into_iter().filter(|(tile, _)| !tile.is_empty());
                for (tile, ranks) in held {
                    let rank = assignment.least_loaded(&ranks);
                    for (region, _) in tile.regions() {
                        let bytes = region.numel() * entry.dtype.itemsize();
                        assignment.push(rank, bytes, &region);
                    }
                }
                if entry.numel() == 0 {
                    // PyTorch stores a chunk of an empty tensor as well.
                    assignment.push(Rank(0), 0, &Region::whole(&entry.shape));
                }
                tensors.push((fqn, *id));
            }
        }
    }
    if !objects.is_empty() {
        // Objects are equal on all ranks, so any rank can write them.
        assignment.of_rank.entry(OBJECTS_OF).or_default();
    }
    let Assignment { boxes, of_rank } = assignment;
    let mut layout = FileLayout::new(source, &tensors);
    for (rank, own) in of_rank {
        layout.file(rank, if rank == OBJECTS_OF { &objects } else { &[] }, &own.boxes, &boxes)?;
    }
    drop(boxes);
    Ok(finish(layout, &leaves))
}

/// The rank whose data file contains all objects.
const OBJECTS_OF: Rank = Rank(0);

/// The assignment of boxes to the ranks that write these boxes.
#[derive(Default)]
struct Assignment {
    /// For each tensor, the bounds of its boxes. The file locations of the boxes are not known yet.
    boxes: Vec<ChunkTable>,
    of_rank: BTreeMap<Rank, RankLoad>,
}

/// The boxes that a rank writes.
#[derive(Default)]
struct RankLoad {
    bytes: u64,
    /// The boxes: pairs of a tensor index and the index of a box in [`Assignment::boxes`] of that tensor.
    boxes: Vec<(u32, u32)>,
}

impl Assignment {
    fn least_loaded(&self, ranks: &[Rank]) -> Rank {
        if let [only] = ranks {
            return *only;
        }
        let load = |rank: &Rank| self.of_rank.get(rank).map_or(0, |load| load.bytes);
        *ranks.iter().min_by_key(|rank| (load(rank), **rank)).expect("every tile is on a rank")
    }

    /// Assigns the box `region` of the most recently added tensor to `rank`. `bytes` is the length of the box's data.
    fn push(&mut self, rank: Rank, bytes: u64, region: &Region) {
        let number = |len: usize| u32::try_from(len).expect("fewer than 2^32 tensors, and chunks of each");
        let tensor = number(self.boxes.len() - 1);
        let table = self.boxes.last_mut().expect("a tensor was begun");
        let load = self.of_rank.entry(rank).or_default();
        load.boxes.push((tensor, number(table.len())));
        load.bytes += bytes;
        table.push(Chunk {
            tile: Tile::from_region(region),
            location: FileLocation::Empty,
            strides: None,
            rank: None,
            view: None,
        });
    }
}

/// Adds the file `.metadata`, and returns the complete layout of the directory.
fn finish(mut layout: FileLayout<'_>, leaves: &[(Path, StateLeaf<'_>)]) -> Reservation {
    let mut file = OutputFile::new(".metadata");
    file.push_header(write_metadata::pickle(&layout, leaves));
    layout.reservation.files.push(file);
    for ((fqn, id), chunks) in layout.tensors.iter().zip(layout.chunks) {
        let entry = layout.source.tensor(*id);
        let target = TensorEntry::new(fqn.clone(), entry.dtype, entry.shape.clone());
        layout.reservation.tensors.push(Reserved::new(*id, TensorEntry { chunks, ..target }));
    }
    layout.reservation
}
