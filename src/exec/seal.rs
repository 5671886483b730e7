//! Sealing: what runs have finished, each some of it, becomes a checkpoint.
//!
//! All that is left to do are sums that are spread over what several runs wrote, or one wrote before it was stopped.
//! Sealing twice does the same as sealing once, so a run may seal what another one began to seal.
//!
//! Counts bytes.

use std::path::Path;

use super::journal::Known;
use super::output::Outputs;
use super::{Stop, sums};
use crate::catalog::OutputFile;
use crate::error::{Error, Result};

/// Whether everything is finished, as `known` has it.
#[must_use]
pub fn is_complete(known: &Known, files: &[OutputFile], carried: usize) -> bool {
    known.done == super::Extents::of_files(files) && known.carried.len() == carried
}

/// Put sums into the files in `folder`, all data of which is there. `known` is what is said in `journals`.
///
/// # Errors
/// `Malformed` where a file is not as long as it should be or journals contradict each other, `Io`.
pub fn seal(folder: &Path, files: &[OutputFile], known: &Known, journals: &Path, sync: bool) -> Result<()> {
    for file in files {
        let path = folder.join(&file.path);
        let len = path.metadata().map_err(Error::io("look at", &path))?.len();
        if len != file.len {
            let (expected, found) = (format!("{} bytes", file.len), format!("{len} bytes"));
            return Err(Error::malformed(&path, "the whole file", expected, found));
        }
    }
    let outputs = Outputs::of(folder, files, sync)?;
    sums::patch(&outputs, files, &known.sums, journals)?;
    crate::fault::point("seal-summed");
    if sync {
        known.sums.keys().try_for_each(|file| outputs.sync(*file, &Stop::default()))?;
    }
    Ok(())
}
