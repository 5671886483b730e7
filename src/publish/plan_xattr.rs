//! What a result was made from, as an attribute of it: by this a run that was done is recognised.
//!
//! Best effort: not every file system has attributes, and not every copy takes them along. So the mark is only ever
//! trusted to say "this is from the same plan", never to say "it is not".

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::XattrFlags;

use crate::exec::fingerprint::Fingerprint;

const NAME: &str = "user.dtshard.plan";

/// Set before the rename, so that what is at the destination has it from its first moment.
pub(super) fn set(output: impl AsFd, fingerprint: Fingerprint) {
    let _ = rustix::fs::fsetxattr(output, NAME, fingerprint.to_string().as_bytes(), XattrFlags::empty());
}

/// What a destination says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// It was finished, from this plan.
    Of(Fingerprint),
    /// It is not ours, or on a file system without attributes, or a copy without its own.
    Nothing,
}

pub(super) fn of(path: &Path) -> Mark {
    let mut value = [0_u8; 64];
    let read = rustix::fs::lgetxattr(path, NAME, &mut value[..]).ok();
    let digits = read.and_then(|len| std::str::from_utf8(value.get(..len)?).ok());
    digits.and_then(|digits| digits.parse().ok()).map_or(Mark::Nothing, Mark::Of)
}

pub(super) fn is(path: &Path, fingerprint: Fingerprint) -> bool {
    of(path) == Mark::Of(fingerprint)
}
