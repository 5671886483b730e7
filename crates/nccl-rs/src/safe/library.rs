//! The library, loaded once, and the ids it makes.

use std::ffi::{OsStr, c_char};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::raw::{NCCL_UNIQUE_ID_BYTES, ncclUniqueId};
use crate::result::Nccl;
use crate::{Result, Version};

/// What is looked for where no file is named. Wheels and run-time packages have only the first.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// NCCL, loaded. Clones are the same library.
#[derive(Clone, Debug)]
pub struct Library(Arc<Nccl>);

impl Library {
    /// Loads NCCL: the file that is named and no other, or else `libnccl.so.2` or `libnccl.so`, where the system finds
    /// libraries.
    ///
    /// Needs no device and no driver. It is never unloaded.
    ///
    /// # Errors
    ///
    /// [`Error::Load`](crate::Error::Load), with each name that was tried and why not.
    ///
    /// # Safety
    ///
    /// A file that is found must be NCCL, or keep to the declarations of `nccl.h`: it is run.
    pub unsafe fn load(file: Option<&Path>) -> Result<Self> {
        let names = match file {
            Some(file) => vec![file.as_os_str()],
            None => NAMES.map(OsStr::new).to_vec(),
        };
        // SAFETY: promised by the caller.
        unsafe { Nccl::load(&names) }.map(|nccl| Self(Arc::new(nccl)))
    }

    /// The name under which it was found.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Its version (`ncclGetVersion`).
    pub fn version(&self) -> Result<Version> {
        self.0.version()
    }

    /// Its functions, unchecked.
    #[must_use]
    pub fn nccl(&self) -> &Nccl {
        &self.0
    }
}

/// What the ranks of one communicator have in common (`ncclUniqueId`): one rank makes it, and hands it to all others.
///
/// It says where that rank listens, so it is for one communicator and of no use when that process has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; Self::BYTES]);

impl UniqueId {
    /// How many bytes it has.
    pub const BYTES: usize = NCCL_UNIQUE_ID_BYTES;

    /// Makes one (`ncclGetUniqueId`), which opens a port of this process.
    pub fn new(library: &Library) -> Result<Self> {
        let id = library.nccl().unique_id()?;
        Ok(Self(id.internal.map(c_char::cast_unsigned)))
    }

    /// One that another rank has made.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// To be handed to other ranks.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }

    pub(super) fn raw(self) -> ncclUniqueId {
        ncclUniqueId { internal: self.0.map(u8::cast_signed) }
    }
}

impl fmt::Debug for UniqueId {
    /// Without the bytes: who knows them may take part.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId").finish_non_exhaustive()
    }
}
