//! Rank files with flat parameters, which FSDP1 jobs save with `StateDictType.LOCAL_STATE_DICT` and `torch.save`. There
//! is one file per rank, and the file has the rank's shard of each flat parameter. All rank files of a series are read
//! together.
//!
//! `flatten` writes this format without a writer trait, because writing flat parameters needs the units and the order
//! of their parameters, which the writer traits do not provide.

use std::path::Path;

use super::document::FILE_NAME;
use crate::error::Result;
use crate::format::Format;
use crate::format::entry::{FormatEntry, TensorStorage};
use crate::format::json::is_layout_document;
use crate::format::known_files::{FileRole, FileSignature, KnownFile};
use crate::format::listing::DetectedFiles;
use crate::format::parts::LoadedFolder;
use crate::format::reading::ReadFindings;
use crate::format::torch::entry::RankReader;
use crate::format::traits::Read;

/// The row for rank files with flat parameters in the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
    files: "`model_world_size_N_rank_R.pt`, `flat_layout.json`",
    known_files: &[KnownFile::new(FILE_NAME, FileRole::Beside, FileSignature::Like(is_layout_document))],
    holds_objects: true,
    has_rank_files: true,
    names_tensors_by_rank: true,
    ..FormatEntry::new(
        "fsdp-flat",
        "one `torch.save` file per rank, with FSDP1's flat parameters",
        TensorStorage::Flat,
        &Reader,
    )
};

/// The reader of rank files with flat parameters. Detection reports such files as rank files of `torch.save`. The flat
/// parameters are found when the files are read.
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
