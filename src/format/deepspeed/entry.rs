//! Checkpoints that DeepSpeed's `engine.save_checkpoint` writes with ZeRO: a folder with model files
//! (`*_model_states.pt`) and with an optimizer file (`*_optim_states.pt`) for each rank. All files of the folder form one
//! checkpoint. dtshard reads these folders, and does not write them.

use std::path::Path;

use super::names::{StatesName, is_states, is_universal};
use super::read::read;
use crate::error::Result;
use crate::format::Format;
use crate::format::entry::{FormatEntry, TensorStorage};
use crate::format::listing::{DetectedFiles, FolderListing};
use crate::format::parts::LoadedFolder;
use crate::format::reading::ReadFindings;
use crate::format::traits::Read;

/// The row for DeepSpeed's folders in the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
    // No DST has this format, so `--overwrite` never replaces such a folder.
    known_files: &[],
    holds_objects: true,
    is_in_module_order: true,
    ..FormatEntry::new(
        "deepspeed",
        "folder that DeepSpeed's `save_checkpoint` writes (ZeRO stages 0 to 3)",
        TensorStorage::Boxes,
        &Reader,
    )
};

/// The reader of DeepSpeed's folders.
struct Reader;

impl Read for Reader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        if listing.from != Some(Format::Deepspeed) && is_universal(&listing.names) {
            return Ok(None);
        }
        let own: Vec<&String> = listing.names.iter().filter(|name| is_states(name)).collect();
        // The first model file says which parameters are in all other files, so it is the index of the files.
        let is_model = |name: &&&String| StatesName::parse(name).is_some_and(|parsed| parsed.partition == 0);
        let Some(index) = own.iter().find(is_model).or(own.first()) else { return Ok(None) };
        let index = listing.folder.join(index);
        let paths = own.iter().map(|name| listing.folder.join(name)).collect();
        Ok(Some(DetectedFiles::indexed(Format::Deepspeed, paths, index)))
    }

    fn read(&self, reading: &mut ReadFindings<'_>, path: &Path, _: DetectedFiles) -> Result<(Format, LoadedFolder)> {
        Ok((Format::Deepspeed, LoadedFolder::whole(read(reading, path)?)))
    }
}
