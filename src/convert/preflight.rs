//! What `--dry-run` says of a destination that it does not touch: the run would be refused, would go on, or is done.

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

/// A warning, where there is something to say.
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
        let foreseen = Staging::preflight(destination, conversion.shape, &claim, &plan(conversion, reducing, &about))?;
        if matches!(foreseen, Preflight::Fresh) {
            check_folder(conversion, nearest_folder(destination))?;
        }
        Ok(foreseen)
    };
    match look(conversion.source.reducing()) {
        Ok(Preflight::Fresh) => None,
        Ok(Preflight::Resumes) => Some(format!("a run would go on with what is done of {}", destination.display())),
        Ok(Preflight::Done) => {
            Some(format!("{} is there already, from the same source and options", destination.display()))
        }
        Ok(Preflight::Unsure(error)) | Err(error) => {
            let hint = error.hint().map(|hint| format!("; {hint}")).unwrap_or_default();
            Some(format!("a run would be refused: {error}{hint}"))
        }
    }
}

fn check_folder(conversion: &Prepared, folder: &Path) -> Result<()> {
    // With this name at its end only folders are found.
    let may_write = access(folder.join("."), Access::WRITE_OK | Access::EXEC_OK);
    may_write.map_err(|error| Error::io("write in", folder)(error.into()))?;
    let (needed, free) = (conversion.len_bytes(), free_bytes(folder)?);
    if free >= needed { Ok(()) } else { Err(no_space(folder, needed, free)) }
}
