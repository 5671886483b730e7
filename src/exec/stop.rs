//! A flag that ends a run early; workers check it between write blocks. A signal handler of the calling program sets
//! the flag. A process also sets it when it discovers that another process has taken over its work.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use crate::error::{Error, Result, Stopped};

/// A flag that ends a run. All clones of a `Stop` share one flag.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    signal: Arc<AtomicUsize>,
    /// The message and the hint of the error, if another process has taken over the work.
    takeover: Arc<OnceLock<(String, String)>>,
}

/// The signal numbers of [`STOPPING`](super::stopped::STOPPING), in the same order.
const NUMBERS: [i32; 4] = [SIGINT, SIGTERM, SIGUSR1, SIGUSR2];

impl Stop {
    /// Numbers of the signals that may stop a run: INT, TERM, USR1, USR2.
    pub const SIGNALS: [i32; 4] = NUMBERS;

    /// Returns the shared number of the signal that has arrived, which is 0 before a signal arrives. A signal handler
    /// stores the number.
    #[must_use]
    pub fn signal(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.signal)
    }

    /// Sets the flag as if the signal `signal` had arrived. `signal` must be one of [`Stop::SIGNALS`].
    pub fn raise(&self, signal: i32) {
        self.signal.store(usize::try_from(signal).unwrap_or_default(), Ordering::Relaxed);
    }

    /// Stops the run because another process has taken over its work; [`Stop::check`] returns this message and hint.
    pub fn cancel(&self, message_and_hint: (String, String)) {
        let _ = self.takeover.set(message_and_hint);
    }

    /// Returns an error if the run must stop.
    ///
    /// # Errors
    /// `Stopped` once a signal has arrived, `Usage` once another process has taken over the work.
    pub fn check(&self) -> Result<()> {
        self.check_signal()?;
        self.takeover.get().map_or(Ok(()), |(message, hint)| Err(Error::usage(message, hint)))
    }

    /// Returns an error if a signal has arrived.
    ///
    /// # Errors
    /// `Stopped` once a signal has arrived.
    pub fn check_signal(&self) -> Result<()> {
        let came = self.signal.load(Ordering::Relaxed);
        match NUMBERS.iter().position(|number| usize::try_from(*number) == Ok(came)) {
            None => Ok(()),
            Some(which) => Err(Stopped::by(which, None).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::stopped::STOPPING;
    use super::*;

    #[test]
    fn takeover_is_an_error_only_of_check() {
        let stop = Stop::default();
        stop.clone().cancel(("taken over".into(), "wait".into()));
        assert!(stop.check_signal().is_ok());
        assert_eq!(stop.check().unwrap_err().to_string(), "taken over");
        stop.signal.store(usize::try_from(SIGTERM).unwrap(), Ordering::Relaxed);
        assert!(matches!(stop.check(), Err(Error::Stopped(Stopped { signal: "TERM", .. }))));
    }

    #[test]
    fn stop_that_keeps_work_exits_with_75_unless_interrupted() {
        for (number, (signal, exit)) in NUMBERS.into_iter().zip(STOPPING) {
            let stop = Stop::default();
            assert!(stop.check().is_ok());
            stop.signal.store(usize::try_from(number).unwrap(), Ordering::Relaxed);
            let Err(Error::Stopped(stopped)) = stop.check() else { panic!("{signal} does not stop") };
            assert_eq!((stopped.exit, i32::from(exit)), (exit, 128 + number));
            assert_eq!(stopped.to_string(), format!("stopped by {signal}; nothing was written at the destination"));
            let kept = stopped.keeping(Path::new(".out.dtshard-partial"), "1 of 2".into());
            assert_eq!(kept.exit, if number == SIGINT { 130 } else { 75 });
            let words =
                format!("stopped by {signal}; .out.dtshard-partial keeps 1 of 2; use options::resume to continue");
            assert_eq!(kept.to_string(), words);
        }
    }
}
