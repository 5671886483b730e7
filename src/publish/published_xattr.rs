//! The extended attribute `user.dtshard.plan` of the output: records the plan from which the output was made, so that a
//! later run recognizes a finished output.
//!
//! Some file systems have no extended attributes, and some copying tools drop them. Invariant: the attribute proves
//! that the output was made from this plan; a missing attribute proves nothing.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::XattrFlags;

use crate::exec::fingerprint::Fingerprint;

const NAME: &str = "user.dtshard.plan";

/// Writes the attribute, if the file system supports it. The caller writes the attribute before it renames the output
/// to the destination, so that the destination has the attribute from the start.
pub(super) fn write(output: impl AsFd, fingerprint: Fingerprint) {
    let _ = rustix::fs::fsetxattr(output, NAME, fingerprint.to_string().as_bytes(), XattrFlags::empty());
}

pub(super) fn read(path: &Path) -> Option<Fingerprint> {
    let mut value = [0_u8; 64];
    let len = rustix::fs::lgetxattr(path, NAME, &mut value[..]).ok()?;
    std::str::from_utf8(value.get(..len)?).ok()?.parse().ok()
}

pub(super) fn is(path: &Path, fingerprint: Fingerprint) -> bool {
    read(path) == Some(fingerprint)
}
