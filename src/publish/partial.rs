//! The partial folder: how it is made, its plan, its leases, and whether it has been published.
//!
//! Invariant: it appears complete, by one rename.

use std::fs::File;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::destination::{DRAFT, GONE, Place};
use super::lease::{Seen, read_leases};
use super::names::{Identity, is_gone, is_hidden, is_unique, read_at_most};
use super::{Claim, Plan, Shape};
use crate::error::{Error, Result};
use crate::exec::about::About;
use crate::fault;
use crate::storage::AnchoredPath;

/// The folder in the work folder that has the output.
pub(super) const DATA: &str = "data";
const PLAN: &str = "plan.json";
const ABOUT: &str = "about.json";

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
    pub fn difference(&self, plan: &Plan<'_>, folder: &AnchoredPath) -> String {
        if self.version != plan.version {
            return format!("dtshard {} made it, and this is {}", self.version, plan.version);
        }
        let about = read_at_most(&folder.join(ABOUT), MOST_ABOUT).ok();
        let about: Option<About> = about.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let difference = about.and_then(|about| about.difference(plan.about));
        difference.unwrap_or_else(|| "it is of another source, or of other options".to_owned())
    }

    /// The plan of a partial folder, `None` where there is none (any more).
    pub fn read(folder: &AnchoredPath) -> io::Result<Option<Self>> {
        match read_at_most(&folder.join(PLAN), MOST_BYTES) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok().filter(|plan: &Self| is_unique(&plan.id))),
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::NotADirectory => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Place {
    /// Make the partial folder, with its plan and an empty data folder. False where somebody was faster, or took the
    /// draft for litter.
    ///
    /// # Errors
    /// `Io`
    pub fn make(&self, plan: &Planned, about: &About, sync: bool) -> Result<bool> {
        let draft = self.unique(DRAFT);
        draft.create_folder().map_err(Error::io("create", &self.partial()))?;
        fault::point("begin-draft");
        let made = Self::fill(&draft, plan, about, sync).and_then(|()| {
            fault::point("begin-planned");
            // The folder that is there has a plan, so it is not empty, and no rename replaces it.
            draft.rename(&self.partial())
        });
        match made {
            Ok(()) => {
                fault::point("begin-made");
                if sync {
                    self.folder.sync().map_err(Error::io("sync", &self.folder))?;
                }
                self.sweep(&[GONE, DRAFT]);
                Ok(true)
            }
            Err(error) => {
                self.spare.give_back();
                let _ = draft.remove_all();
                let is_taken = matches!(
                    error.kind(),
                    io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory
                );
                if is_taken || is_gone(&error) {
                    return Ok(false);
                }
                Err(Error::io("create", &self.partial())(error))
            }
        }
    }

    fn fill(draft: &AnchoredPath, plan: &Planned, about: &About, sync: bool) -> io::Result<()> {
        let work = draft.join(plan.work());
        work.create_folder()?;
        work.join(DATA).create_folder()?;
        let create = |name: &str, bytes: &[u8]| -> io::Result<File> {
            let mut file = draft.join(name).create_new(0o666)?;
            file.write_all(bytes)?;
            Ok(file)
        };
        // Not synced: nothing depends on it.
        create(ABOUT, &serde_json::to_vec_pretty(about).expect("strings and numbers are JSON"))?;
        let file = create(PLAN, &plan.to_bytes())?;
        if sync {
            file.sync_all()?;
            work.sync()?;
            draft.sync()?;
        }
        Ok(())
    }
}

/// What stands where a partial folder would be.
pub(super) enum Found {
    Nothing,
    /// No plan, or nothing but that: not from this version, or from nobody.
    Junk,
    /// A name in it is listed and cannot be opened: it is going away, or the file system answers from a cache.
    Unclear,
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
    pub fn at(folder: &AnchoredPath, shape: Shape) -> Result<Self> {
        let read = || -> io::Result<Self> {
            let Some(metadata) = folder.own_metadata()? else { return Ok(Self::Nothing) };
            let before = Some(Identity::new(&metadata));
            if !metadata.is_dir() {
                return Ok(Self::Junk);
            }
            // Somebody's leftover: a rename takes its place.
            if folder.names()?.is_empty() {
                return Ok(Self::Nothing);
            }
            let without = |name: &str| {
                if Identity::of(folder) != before {
                    // Another folder since.
                    return Ok(Self::Nothing);
                }
                Ok(if is_hidden(folder, name)? { Self::Unclear } else { Self::Junk })
            };
            let Some(plan) = Planned::read(folder)? else { return without(PLAN) };
            let work = folder.join(plan.work());
            if !work.exists() {
                return without(&plan.work());
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
        let look = || match read() {
            Err(error) if is_gone(&error) => Ok(Self::Nothing),
            found => found.map_err(Error::io("read", folder)),
        };
        match look()? {
            // The name was looked up again.
            Self::Unclear => look(),
            found => Ok(found),
        }
    }
}

/// What is to be renamed to the destination, if it is there.
pub(super) fn output(work: &AnchoredPath, shape: Shape) -> io::Result<Option<AnchoredPath>> {
    let data = work.join(DATA);
    let found = match shape {
        Shape::Folder => work.names().map(|names| names.iter().any(|name| name == DATA).then_some(data)),
        Shape::File => data.names().and_then(|names| match names.as_slice() {
            [] => Ok(None),
            [only] => Ok(Some(data.join(only))),
            several => {
                let names: Vec<_> = several.iter().map(|name| name.to_string_lossy()).collect();
                let found = format!("expected one file in {DATA}, found {}", names.join(", "));
                Err(io::Error::new(io::ErrorKind::InvalidData, found))
            }
        }),
    };
    match found {
        Err(error) if is_gone(&error) => Ok(None),
        found => found,
    }
}
