//! Checks for `--dry-run` whether a run would be refused, would resume, or has nothing to do. The destination is not
//! changed.

use std::path::Path;

use rustix::fs::{Access, access};

use super::prepared::{Prepared, check_destination};
use super::run::Run;
use super::space::no_space;
use super::write::{about, claim, plan};
use crate::convert::options::ConvertOptions;
use crate::error::{Error, Result};
use crate::exec::Options;
use crate::publish::{Preflight, Staging};
use crate::storage::filesystem::{free_bytes, nearest_folder};

/// Returns a warning about the destination, or `None` if a run would start from the beginning. A warning says that a run
/// would be refused, would resume, or has nothing to do.
pub fn describe_destination(
    conversion: &Prepared,
    args: &ConvertOptions,
    destination: &Path,
    options: &Options,
    run: &Run<'_>,
) -> Option<String> {
    let look = |reducing| -> Result<Preflight> {
        check_destination(conversion, args, destination)?;
        let claim = claim(conversion, args, options, run);
        let about = about(conversion, args, reducing, run);
        let preflight = Staging::preflight(destination, conversion.shape, &claim, &plan(conversion, reducing, &about))?;
        if matches!(preflight, Preflight::Fresh) {
            check_folder(conversion, nearest_folder(destination))?;
        }
        Ok(preflight)
    };
    match look(conversion.source.reducing()) {
        Ok(Preflight::Fresh) => None,
        Ok(Preflight::Resumes) => {
            Some(format!("a run would continue the unfinished work on {}", destination.display()))
        }
        Ok(Preflight::Done) => {
            Some(format!("{} exists already, made from the same SRC and options", destination.display()))
        }
        Ok(Preflight::Unsure(error)) | Err(error) => {
            let hint = error.hint().map(|hint| format!("; {hint}")).unwrap_or_default();
            Some(format!("a run would be refused: {error}{hint}"))
        }
    }
}

/// Checks that `folder` is writable and that its file system has space for the complete destination.
fn check_folder(conversion: &Prepared, folder: &Path) -> Result<()> {
    // The trailing `.` makes the check fail if the path is not a folder.
    let may_write = access(folder.join("."), Access::WRITE_OK | Access::EXEC_OK);
    may_write.map_err(|error| Error::io("write in", folder)(error.into()))?;
    let (needed, free) = (conversion.len_bytes(), free_bytes(folder)?);
    if free >= needed { Ok(()) } else { Err(no_space(folder, needed, free)) }
}
