//! Universal checkpoints of DeepSpeed, which `ds_to_universal.py` makes of a ZeRO checkpoint and which
//! `engine.load_checkpoint` loads on any number of ranks if the configuration has `load_universal`. A checkpoint is a
//! folder with the folder `zero`, which has a folder for each trained parameter, and with model files
//! (`*_model_states.pt`). Beside it, the text file `latest_universal` has its name.

use std::path::{Path, PathBuf};

use super::{FOLDER, OPTIMIZER_FILE, read, write};
use crate::catalog::Reservation;
use crate::error::Result;
use crate::format::Format;
use crate::format::deepspeed::names::{is_states, is_universal};
use crate::format::entry::{FormatEntry, TensorStorage, Writers};
use crate::format::listing::{DetectedFiles, FolderListing};
use crate::format::parts::LoadedFolder;
use crate::format::reading::ReadFindings;
use crate::format::traits::{Read, StateTarget, WriteState};
use crate::storage::lookup;

/// The row for DeepSpeed's Universal checkpoints in the table of formats.
pub static ENTRY: FormatEntry = FormatEntry {
    files: "`latest_universal`, `global_stepN_universal/` with `zero/NAME/fp32.pt` for each parameter `NAME`",
    // `--overwrite` does not replace folders of DeepSpeed.
    known_files: &[],
    holds_objects: true,
    writers: Writers { state: Some(&Writer), ..Writers::NONE },
    ..FormatEntry::new(
        "deepspeed-universal",
        "folder that DeepSpeed loads with `load_universal`, on any number of ranks",
        TensorStorage::Whole,
        &Reader,
    )
};

/// The reader of Universal checkpoints.
struct Reader;

impl Read for Reader {
    fn find_in(&self, listing: &FolderListing<'_>) -> Result<Option<DetectedFiles>> {
        let FolderListing { folder, names, from } = listing;
        // `ds_to_universal.py` can write into the folder of the checkpoint that it reads.
        let is_required = *from == Some(Format::DeepspeedUniversal) && names.iter().any(|name| name == FOLDER);
        let zero = folder.join(FOLDER);
        if !(is_universal(names) || is_required) || !lookup::is_folder(&zero)? {
            return Ok(None);
        }
        let is_model = |name: &&String| is_states(name);
        let mut paths: Vec<PathBuf> = names.iter().filter(is_model).map(|name| folder.join(name)).collect();
        let index = zero.join(OPTIMIZER_FILE);
        if paths.is_empty() && !lookup::is_file(&index)? {
            return Ok(None);
        }
        paths.push(index.clone());
        Ok(Some(DetectedFiles::indexed(Format::DeepspeedUniversal, paths, index)))
    }

    fn read(&self, reading: &mut ReadFindings<'_>, path: &Path, _: DetectedFiles) -> Result<(Format, LoadedFolder)> {
        Ok((Format::DeepspeedUniversal, LoadedFolder::whole(read::read(reading, path)?)))
    }
}

/// The writer of Universal checkpoints.
struct Writer;

impl WriteState for Writer {
    fn reserve(&self, target: StateTarget<'_>) -> Result<Reservation> {
        write::reserve(target)
    }
}
