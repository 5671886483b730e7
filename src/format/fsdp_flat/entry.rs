//! The row of the table of formats for FSDP1's flat parameters.

use std::path::Path;

use crate::error::Result;
use crate::format::Format;
use crate::format::listing::Found;
use crate::format::parts::Loaded;
use crate::format::reading::Reading;
use crate::format::registry::{Entry, Read, TensorStorage};

/// Reads rank files. They are found as those of torch.save, and flat parameters show when they are read.
struct Reader;

impl Read for Reader {
    fn read(&self, reading: &mut Reading<'_>, path: &Path, found: Found) -> Result<(Format, Loaded)> {
        RankReader.read(reading, path, found)
    }
}
use crate::format::torch::entry::RankReader;

/// The row of the table of formats.
pub static ENTRY: Entry = Entry {
    name: "fsdp-flat",
    about: "the same with FSDP1's flat parameters",
    files: "`model_world_size_N_rank_R.pt`, `flat_layout.json`",
    suffixes: &[],
    tensors: TensorStorage::Flat,
    holds_objects: true,
    has_rank_files: true,
    keeps_order: false,
    is_in_module_order: false,
    names_tensors_by_rank: true,
    read: &Reader,
    write_shards: None,
};
