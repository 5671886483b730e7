//! Names in the folders of a run: unique names, and the identity of the file at a name.
//!
//! Invariant: no two processes ever make one [`unique`] name.

use std::fs::Metadata;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::time::SystemTime;

use crate::comm::Process;
use crate::storage::{AnchoredPath, afresh};

/// A name that no other process, here or elsewhere, comes upon.
pub(super) fn unique() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let text = format!("{:?} {:?} {now:?}", Process::this(), std::thread::current().id());
    blake3::hash(text.as_bytes()).to_hex()[..12].to_owned()
}

/// Whether a text can be one of [`unique`].
pub(super) fn is_unique(text: &str) -> bool {
    text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// True where something is not there (any more).
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::StaleNetworkFileHandle)
}

/// Returns whether a folder lists a name and a fresh lookup of the name fails.
pub(super) fn is_hidden(folder: &AnchoredPath, name: &str) -> io::Result<bool> {
    let is_hidden = || Ok(!folder.join(name).exists() && folder.names()?.iter().any(|listed| listed == name));
    if !is_hidden()? {
        return Ok(false);
    }
    let _ = afresh::look_up(folder, &[name.as_ref()], format!(".probe-{}", unique()).as_ref());
    is_hidden()
}

/// Read the beginning of a file.
pub(super) fn read_at_most(path: &AnchoredPath, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    afresh::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The identity of a file or folder, wherever it is renamed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
    /// Numbers of files are given again; `None` where the file system does not tell.
    born: Option<SystemTime>,
}

impl Identity {
    pub fn of(path: &AnchoredPath) -> Option<Self> {
        path.metadata().ok().map(|metadata| Self::new(&metadata))
    }

    pub fn new(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino(), born: metadata.created().ok() }
    }
}
