//! Loads the NCCL library at run time, and creates unique ids.

use std::ffi::{OsStr, c_char};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::raw::{NCCL_UNIQUE_ID_BYTES, ncclUniqueId};
use crate::result::Nccl;
use crate::{Result, Version};

/// The file names that are tried if the caller gives none. Python wheels and run-time packages contain only the first
/// name.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The loaded NCCL library. All clones share the same loaded library.
#[derive(Clone, Debug)]
pub struct Library(Arc<Nccl>);

impl Library {
    /// Loads NCCL: `file` if it is given, or else `libnccl.so.2` or `libnccl.so` from the library search path.
    ///
    /// Loading needs no device and no driver. The library is never unloaded.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Load`](crate::Error::Load) with each name that was tried and the reason why it could not be
    /// loaded.
    ///
    /// # Safety
    ///
    /// The file must be NCCL, or follow the declarations of `nccl.h`, because its code is run.
    pub unsafe fn load(file: Option<&Path>) -> Result<Self> {
        let names = match file {
            Some(file) => vec![file.as_os_str()],
            None => NAMES.map(OsStr::new).to_vec(),
        };
        // SAFETY: guaranteed by the caller.
        unsafe { Nccl::load(&names) }.map(|nccl| Self(Arc::new(nccl)))
    }

    /// Returns the file name with which the library was loaded.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Returns the version of the library (`ncclGetVersion`).
    pub fn version(&self) -> Result<Version> {
        self.0.version()
    }

    /// Returns the methods that call NCCL directly, without checks of their arguments.
    #[must_use]
    pub fn nccl(&self) -> &Nccl {
        &self.0
    }
}

/// The id that all ranks of one communicator share (`ncclUniqueId`). One rank creates the id and sends it to all other
/// ranks.
///
/// The id contains the address at which that rank listens. Therefore the id is valid for one communicator, and only
/// while the process of that rank runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; Self::BYTES]);

impl UniqueId {
    /// The length of a unique id in bytes.
    pub const BYTES: usize = NCCL_UNIQUE_ID_BYTES;

    /// Creates a unique id (`ncclGetUniqueId`). The call opens a port of this process.
    pub fn new(library: &Library) -> Result<Self> {
        let id = library.nccl().unique_id()?;
        // C's char is signed on x86-64, and not on ARM.
        Ok(Self(id.internal.map(|byte| byte.to_ne_bytes()[0])))
    }

    /// Returns the unique id whose bytes another rank has sent.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes of the unique id, to send them to other ranks.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }

    pub(super) fn raw(self) -> ncclUniqueId {
        ncclUniqueId { internal: self.0.map(|byte| c_char::from_ne_bytes([byte])) }
    }
}

impl fmt::Debug for UniqueId {
    /// Formats the id without its bytes, because any process that knows them can join the communicator.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId").finish_non_exhaustive()
    }
}
