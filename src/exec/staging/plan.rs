//! What a partial folder holds: its plan, its leases, and whether it has been published.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::lease::{Seen, read_leases};
use super::place::{ABOUT, DATA, Identity, PLAN, exists, is_gone, is_unique};
use super::{Claim, Plan, Shape};
use crate::error::{Error, Result};
use crate::exec::about::About;

/// `plan.json`: what is being written. It is there as long as its folder is, and never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Planned {
    pub version: String,
    /// In hexadecimal digits.
    pub fingerprint: String,
    /// The launch that made the folder, where a launcher named it.
    pub run: Option<String>,
    /// The parts of the process that made it.
    pub parts: u32,
    /// Tells this folder from all that ever had its name.
    pub id: String,
}

/// Longer is no plan.
const MOST_BYTES: u64 = 1 << 16;

/// Longer is not told.
const MOST_ABOUT: u64 = 64 << 20;

/// The beginning of a file; opening what is none could wait for ever.
pub(super) fn read_at_most(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

impl Planned {
    pub fn new(plan: &Plan<'_>, claim: &Claim, id: String) -> Self {
        Self {
            version: plan.version.to_owned(),
            fingerprint: plan.fingerprint.to_string(),
            run: claim.run.clone(),
            parts: claim.part.of,
            id,
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("strings and numbers are JSON");
        bytes.push(b'\n');
        bytes
    }

    /// The folder for output and journals, in the partial folder. It is named after this one: a process that slept while
    /// the partial folder was thrown away and made anew finds nothing that it could write to.
    pub fn work(&self) -> String {
        format!("work-{}", self.id)
    }

    pub fn is_of(&self, plan: &Plan<'_>) -> bool {
        self.version == plan.version && self.fingerprint == plan.fingerprint.to_string()
    }

    /// In what it is not `plan`; `folder` is the partial folder that it was found in.
    pub fn difference(&self, plan: &Plan<'_>, folder: &Path) -> String {
        if self.version != plan.version {
            return format!("dtshard {} made it, and this is {}", self.version, plan.version);
        }
        let about = read_at_most(&folder.join(ABOUT), MOST_ABOUT).ok();
        let about: Option<About> = about.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let difference = about.and_then(|about| about.difference(plan.about));
        difference.unwrap_or_else(|| "it is of another source, or of other options".to_owned())
    }

    /// The plan of a partial folder, `None` where there is none (any more).
    pub fn read(folder: &Path) -> io::Result<Option<Self>> {
        match read_at_most(&folder.join(PLAN), MOST_BYTES) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok().filter(|plan: &Self| is_unique(&plan.id))),
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::NotADirectory => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// What stands where a partial folder would be.
pub(super) enum Found {
    Nothing,
    /// No plan, or nothing but that: not from this version, or from nobody.
    Junk,
    Partial(Partial),
}

pub(super) struct Partial {
    pub plan: Planned,
    pub leases: Vec<Seen>,
    /// What was in the data folder is at the destination.
    pub is_published: bool,
}

impl Found {
    /// # Errors
    /// `Io` where something is there and cannot be read.
    pub fn at(folder: &Path, shape: Shape) -> Result<Self> {
        let read = || -> io::Result<Self> {
            let is_empty = |mut entries: fs::ReadDir| entries.next().is_none();
            let before = Identity::of(folder);
            match folder.symlink_metadata() {
                Err(error) if is_gone(&error) => return Ok(Self::Nothing),
                Err(error) => return Err(error),
                Ok(metadata) if !metadata.is_dir() => return Ok(Self::Junk),
                // Somebody's leftover: a rename takes its place.
                Ok(_) if is_empty(fs::read_dir(folder)?) => return Ok(Self::Nothing),
                Ok(_) => {}
            }
            // Junk, or another folder since.
            let junk = || Ok(if Identity::of(folder) == before { Self::Junk } else { Self::Nothing });
            let Some(plan) = Planned::read(folder)? else { return junk() };
            let work = folder.join(plan.work());
            if !exists(&work) {
                return junk();
            }
            // In this order: once somebody sealed, only publishing takes the output away.
            let look = || -> io::Result<_> { Ok((read_leases(folder)?, output(&work, shape)?.is_none())) };
            let has_sealer = |leases: &[Seen]| leases.iter().any(|seen| seen.name.is_seal());
            let (mut leases, mut is_away) = look()?;
            if is_away && !has_sealer(&leases) {
                // Not made yet; or all of that came to pass since the leases were read.
                (leases, is_away) = look()?;
            }
            let is_published = is_away && has_sealer(&leases);
            if Identity::of(folder) != before {
                // Taken away during the look, which may have missed some leases, then.
                return Ok(Self::Nothing);
            }
            Ok(Self::Partial(Partial { plan, leases, is_published }))
        };
        match read() {
            Err(error) if is_gone(&error) => Ok(Self::Nothing),
            found => found.map_err(Error::io("read", folder)),
        }
    }
}

/// What is to be renamed to the destination, if it is there.
pub(super) fn output(work: &Path, shape: Shape) -> io::Result<Option<PathBuf>> {
    let data = work.join(DATA);
    let first = match shape {
        Shape::Folder => data.symlink_metadata().map(|_| Some(data)),
        Shape::File => fs::read_dir(&data).and_then(|mut entries| {
            let entry = entries.next().transpose()?;
            Ok(entry.map(|entry| entry.path()))
        }),
    };
    match first {
        Err(error) if is_gone(&error) => Ok(None),
        first => first,
    }
}
