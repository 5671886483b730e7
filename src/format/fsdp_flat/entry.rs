//! The row of the table of formats for FSDP1's flat parameters.

use std::path::Path;

use crate::error::Result;
use crate::format::Format;
use crate::format::listing::DetectedFiles;
use crate::format::parts::LoadedFolder;
use crate::format::reading::ReadFindings;
use crate::format::registry::{FormatEntry, Read, TensorStorage};

/// Reads rank files. They are found as those of torch.save, and flat parameters show when they are read.
struct Reader;

impl Read for Reader {
    fn read(
        &self,
        reading: &mut ReadFindings<'_>,
        path: &Path,
        found: DetectedFiles,
    ) -> Result<(Format, LoadedFolder)> {
        RankReader.read(reading, path, found)
    }
}
use crate::format::torch::entry::RankReader;

/// The row of the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
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
