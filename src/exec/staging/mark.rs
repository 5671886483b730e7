//! What a result was made from, as an attribute of it: by this a run that was done is recognised.
//!
//! Best effort: not every file system has attributes, and not every copy takes them along. So the mark is only ever
//! trusted to say "this is from the same plan", never to say "it is not".

use std::path::Path;

use rustix::fs::XattrFlags;

use crate::exec::fingerprint::Fingerprint;

const NAME: &str = "user.dtshard.plan";

/// Set before the rename, so that what is at the destination has it from its first moment.
pub(super) fn set(path: &Path, fingerprint: Fingerprint) {
    let _ = rustix::fs::lsetxattr(path, NAME, fingerprint.to_string().as_bytes(), XattrFlags::empty());
}

pub(super) fn is(path: &Path, fingerprint: Fingerprint) -> bool {
    let mut value = [0_u8; 64];
    let len = rustix::fs::lgetxattr(path, NAME, &mut value[..]);
    len.is_ok_and(|len| value.get(..len) == Some(fingerprint.to_string().as_bytes()))
}
