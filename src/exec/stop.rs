//! INT and TERM as a flag that workers look at between strips.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};

use crate::error::{Error, Result};

/// Asked between strips whether to go on. Cloning shares the flag.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    signal: Arc<AtomicUsize>,
}

impl Stop {
    /// A flag that the process's INT and TERM set from now on. A second signal of the same kind ends the process at
    /// once, so that a hung file system cannot hold a user. Beyond a limit to the size of files a write fails from now
    /// on, and is an error as any other; the signal would end the process and leave half of the work there.
    ///
    /// # Errors
    /// `Io` where the handlers cannot be installed.
    pub fn on_signals() -> Result<Self> {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM] {
            let number = usize::try_from(signal).expect("signal numbers are positive");
            let hurry = Arc::new(std::sync::atomic::AtomicBool::new(false));
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&hurry))
                .and_then(|_| signal_hook::flag::register(signal, hurry))
                .and_then(|_| signal_hook::flag::register_usize(signal, Arc::clone(&stop.signal), number))
                .map_err(Error::io("install a signal handler in", "this process"))?;
        }
        signal_hook::flag::register(SIGXFSZ, Arc::default())
            .map_err(Error::io("install a signal handler in", "this process"))?;
        Ok(stop)
    }

    /// # Errors
    /// `Stopped` once a signal has come.
    pub fn check(&self) -> Result<()> {
        match i32::try_from(self.signal.load(Ordering::Relaxed)).unwrap_or(SIGTERM) {
            0 => Ok(()),
            SIGINT => Err(Error::Stopped { signal: "INT", exit: 130 }),
            _ => Err(Error::Stopped { signal: "TERM", exit: 143 }),
        }
    }
}
