//! The check that a destination passes before it is replaced. Staging knows no formats, so the caller provides it.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::error::Result;

type Check = dyn Fn(&Path) -> Result<()> + Send + Sync;

/// Refuses a destination that may not be replaced. Called right before the destination is moved aside, since anybody may
/// have put a file there while the run was at work.
#[derive(Clone)]
pub struct ReplaceCheck(Arc<Check>);

impl ReplaceCheck {
    pub fn new(check: impl Fn(&Path) -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(check))
    }

    pub(super) fn run(&self, destination: &Path) -> Result<()> {
        (self.0)(destination)
    }
}

impl fmt::Debug for ReplaceCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReplaceCheck")
    }
}
