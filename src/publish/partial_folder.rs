//! The partial folder: how it is created, its plan, its leases, and whether its output has been published.
//!
//! Invariant: the folder appears complete, by one rename. Its plan and its data folder are created only once.
//! Therefore, if the partial folder contains no output, the output has been published.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use super::destination::{Destination, FileIdentity, TMP, TRASH, is_gone, is_hidden, read_at_most, unique};
use super::lease::{LeaseRole, SeenLease, read_leases};
use super::{Claim, DestinationKind, WorkPlan};
use crate::error::{Error, Result};
use crate::exec::plan_description::PlanDescription;
use crate::fault;
use crate::storage::AnchoredPath;

/// The name of the folder with the output, inside `work-ID`.
pub(super) const DATA: &str = "data";
const PLAN: &str = "plan.json";
const ABOUT: &str = "about.json";

/// The maximum length of the plan file in bytes.
const MAX_PLAN_BYTES: u64 = 1 << 16;
const MAX_ABOUT_BYTES: u64 = 64 << 20;

/// The content of `plan.json`, which states which output to write. The content never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PlanFile {
    pub version: String,
    /// The fingerprint of the conversion plan, in hexadecimal digits.
    pub fingerprint: String,
    /// The name of the launch that created the folder; `None` if the launcher sets no name.
    pub run: Option<String>,
    /// The number of parts into which the work is divided, as chosen by the process that created the folder.
    pub parts: u32,
    /// A random id that no other folder has ever had.
    pub id: String,
}

impl PlanFile {
    pub fn new(plan: &WorkPlan<'_>, claim: &Claim) -> Self {
        Self {
            version: plan.version.to_owned(),
            fingerprint: plan.fingerprint.to_string(),
            run: claim.run.clone(),
            parts: claim.part.of,
            id: unique(),
        }
    }

    /// Returns the name `work-ID` of the folder that contains the output and the journals. The name contains the id of the
    /// plan. Therefore a process that was suspended while the partial folder was deleted and created again cannot write
    /// into the new folder.
    pub fn work(&self) -> String {
        format!("work-{}", self.id)
    }

    pub fn is_of(&self, plan: &WorkPlan<'_>) -> bool {
        self.version == plan.version && self.fingerprint == plan.fingerprint.to_string()
    }

    /// Describes how this plan file differs from the plan of this process, `plan`. `folder` is the partial folder with
    /// this plan file.
    pub fn difference(&self, plan: &WorkPlan<'_>, folder: &AnchoredPath) -> String {
        if self.version != plan.version {
            return format!("dtshard {} wrote it, but this is {}", self.version, plan.version);
        }
        let about = read_at_most(&folder.join(ABOUT), MAX_ABOUT_BYTES).ok();
        let about: Option<PlanDescription> = about.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let difference = about.and_then(|about| about.difference(plan.about));
        difference.unwrap_or_else(|| "it has another source or other options".to_owned())
    }

    /// Reads `plan.json` in the partial folder `folder`. Returns `None` if there is no valid plan.
    fn read(folder: &AnchoredPath) -> io::Result<Option<Self>> {
        let is_id = |id: &str| id.len() == 12 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        match read_at_most(&folder.join(PLAN), MAX_PLAN_BYTES) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok().filter(|plan: &Self| is_id(&plan.id))),
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::NotADirectory => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Destination {
    /// Creates the partial folder, with its plan and an empty data folder. Returns false if another process was faster,
    /// or has deleted the temporary folder because this folder looked like a leftover.
    pub fn make(&self, plan: &PlanFile, about: &PlanDescription, sync: bool) -> Result<bool> {
        let tmp = self.unique(TMP);
        tmp.create_folder().map_err(Error::io("create", &self.partial()))?;
        fault::point("begin-draft");
        let made = fill(&tmp, plan, about, sync).and_then(|()| {
            fault::point("begin-planned");
            // An existing partial folder is not empty, so a rename never replaces it.
            tmp.rename(&self.partial())
        });
        let Err(error) = made else {
            fault::point("begin-made");
            if sync {
                self.folder.sync().map_err(Error::io("sync", &self.folder))?;
            }
            self.sweep(&[TRASH, TMP]);
            return Ok(true);
        };
        self.release();
        let _ = tmp.remove_all();
        match error.kind() {
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => Ok(false),
            _ if is_gone(&error) => Ok(false),
            _ => Err(Error::io("create", &self.partial())(error)),
        }
    }
}

fn fill(tmp: &AnchoredPath, plan: &PlanFile, about: &PlanDescription, sync: bool) -> io::Result<()> {
    let work = tmp.join(plan.work());
    work.create_folder()?;
    work.join(DATA).create_folder()?;
    // The description of the plan is not synced, because nothing depends on it.
    tmp.join(ABOUT).create_new(0o666)?.write_all(&serde_json::to_vec_pretty(about)?)?;
    let mut file = tmp.join(PLAN).create_new(0o666)?;
    file.write_all(&serde_json::to_vec_pretty(plan)?)?;
    if sync {
        file.sync_all()?;
        work.sync()?;
        tmp.sync()?;
    }
    Ok(())
}

/// The object that exists at the path of the partial folder.
pub(super) enum FoundPartial {
    Nothing,
    /// There is a file, or a folder without a valid plan. Another version of dtshard or another program created it.
    Junk,
    /// The name is listed but cannot be opened. The folder is being deleted, or the file system returns a cached name.
    Unclear,
    Partial(Partial),
}

pub(super) struct Partial {
    pub plan: PlanFile,
    pub leases: Vec<SeenLease>,
    /// True if the output has been moved to the destination.
    pub is_published: bool,
}

impl Partial {
    pub fn lease(&self, role: LeaseRole) -> Option<&SeenLease> {
        self.leases.iter().find(|seen| seen.name.role == role)
    }
}

impl FoundPartial {
    pub fn at(folder: &AnchoredPath, shape: DestinationKind) -> Result<Self> {
        let look = || match Self::read(folder, shape) {
            Err(error) if is_gone(&error) => Ok(Self::Nothing),
            found => found.map_err(Error::io("read", folder)),
        };
        match look()? {
            // The file system has now looked up the name again, so the second result is not from its cache.
            Self::Unclear => look(),
            found => Ok(found),
        }
    }

    fn read(folder: &AnchoredPath, shape: DestinationKind) -> io::Result<Self> {
        let Some(metadata) = folder.own_metadata()? else { return Ok(Self::Nothing) };
        let before = Some(FileIdentity::new(&metadata));
        if !metadata.is_dir() {
            return Ok(Self::Junk);
        }
        // An empty folder is ignored, because a rename replaces it.
        if folder.names()?.is_empty() {
            return Ok(Self::Nothing);
        }
        let without = |name: &str| {
            if FileIdentity::of(folder) != before {
                // Another folder now has this name.
                return Ok(Self::Nothing);
            }
            Ok(if is_hidden(folder, name)? { Self::Unclear } else { Self::Junk })
        };
        let Some(plan) = PlanFile::read(folder)? else { return without(PLAN) };
        let work = folder.join(plan.work());
        if !work.exists() {
            return without(&plan.work());
        }
        // The leases must be read before the output is looked for: once a seal lease exists, only publishing moves the
        // output away.
        let look = || -> io::Result<_> { Ok((read_leases(folder)?, output(&work, shape)?.is_none())) };
        let has_sealer = |leases: &[SeenLease]| leases.iter().any(|seen| seen.name.role == LeaseRole::Seal);
        let (mut leases, mut is_away) = look()?;
        if is_away && !has_sealer(&leases) {
            // Either the output does not exist yet, or it was sealed and published after the leases were read. So both
            // are read again.
            (leases, is_away) = look()?;
        }
        let is_published = is_away && has_sealer(&leases);
        if FileIdentity::of(folder) != before {
            // Some leases may have been missed, because the folder was moved away.
            return Ok(Self::Nothing);
        }
        Ok(Self::Partial(Partial { plan, leases, is_published }))
    }
}

/// Returns the path of the output inside `work-ID`. Publishing renames this output, not `work-ID`, to the
/// destination. Returns `None` if `work-ID` contains no output.
pub(super) fn output(work: &AnchoredPath, shape: DestinationKind) -> io::Result<Option<AnchoredPath>> {
    let data = work.join(DATA);
    let found = match shape {
        DestinationKind::Folder => work.names().map(|names| names.iter().any(|name| name == DATA).then_some(data)),
        DestinationKind::File => data.names().and_then(|names| match names.as_slice() {
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
