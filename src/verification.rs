//! Verification of one checkpoint, and comparison of two.

use std::sync::Arc;

pub use crate::convert::Verification;
use crate::convert::options::VerifyOptions;
use crate::convert::{self, Engine, Setup};
use crate::error::Result;
use crate::progress::Progress;

/// Verifies that a checkpoint is sound: the chunks of every tensor cover it exactly once, replicas are equal, and
/// stored checksums match. With [`VerifyOptions::other`], also compares the values of two checkpoints, in any layouts
/// and formats.
///
/// ```no_run
/// use dtshard::{NoProgress, Setup, VerifyOptions, verify};
///
/// let options = VerifyOptions { src: "step-1000".into(), other: Some("out".into()), ..VerifyOptions::default() };
/// let verification = verify(&options, &Setup::default(), NoProgress)?;
/// assert!(verification.is_same(), "{}", verification.lines(true));
/// # Ok::<(), dtshard::Error>(())
/// ```
///
/// # Errors
/// `Usage` for options that do not fit the checkpoints; `Io` if a file cannot be read. Damage and differences are
/// findings, not errors.
pub fn verify(options: &VerifyOptions, setup: &Setup, progress: impl Progress + 'static) -> Result<Verification> {
    let progress: Arc<dyn Progress> = Arc::new(progress);
    let engine = Engine::reading(&options.source, setup)?;
    engine.work(&progress, |run| convert::verify(options, run))
}
