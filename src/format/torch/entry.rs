//! The rows of the table of formats for torch.save files.

use std::path::PathBuf;

use super::{RankTarget, reserve_ranks};
use crate::catalog::Reservation;
use crate::error::Result;
use crate::format::registry::{Entry, ShardedTarget, TensorStorage, WriteShards};

/// One file of whole tensors, or the set that an index names.
pub static ONE_FILE: Entry = Entry {
    name: "torch",
    about: "one `torch.save` file, or a set with an index",
    files: "exactly DST",
    suffixes: &["pt", "pth", "bin", "ckpt"],
    tensors: TensorStorage::Whole,
    holds_objects: true,
    has_rank_files: false,
    keeps_order: true,
    is_in_module_order: true,
    names_tensors_by_rank: false,
    write_shards: None,
};

/// One file a rank.
pub static RANK_FILES: Entry = Entry {
    name: "torch-ranks",
    about: "one `torch.save` file a rank: DTensor, ShardedTensor, plain tensors",
    files: "`model_world_size_N_rank_R.pt`, or one such series for each series of SRC",
    suffixes: &[],
    tensors: TensorStorage::Ranks,
    holds_objects: true,
    has_rank_files: true,
    keeps_order: true,
    is_in_module_order: true,
    names_tensors_by_rank: true,
    write_shards: Some(&RankWriter),
};

/// Writes rank files.
struct RankWriter;

impl WriteShards for RankWriter {
    fn reserve(&self, target: ShardedTarget<'_>) -> Result<Reservation> {
        let ShardedTarget { source, state, mesh, world_size, style, names, layouts } = target;
        let names = names.expect("rank files have names");
        let target = RankTarget {
            mesh,
            world_size,
            style,
            name: &|rank| PathBuf::from(names.render(rank.0, world_size)),
            layout: &mut |_, path, entry| layouts.rank_layout(path, entry),
        };
        reserve_ranks(source, state, target)
    }
}
