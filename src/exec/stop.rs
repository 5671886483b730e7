//! A flag that ends a run before its time, which workers look at between strips: a signal has come, or another process has
//! taken over what this one works on. The caller connects it to signals.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use crate::error::{Error, Result, Stopped};

/// A flag that ends a run. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    signal: Arc<AtomicUsize>,
    /// Message and hint, of what is no business of this process any more.
    loss: Arc<OnceLock<(String, String)>>,
}

/// The numbers of [`STOPPING`](super::stopped::STOPPING).
const NUMBERS: [i32; 4] = [SIGINT, SIGTERM, SIGUSR1, SIGUSR2];

impl Stop {
    /// Numbers of the signals that may stop a run: INT, TERM, USR1, USR2.
    pub const SIGNALS: [i32; 4] = NUMBERS;

    /// Returns the number of the signal that has come, 0 before: what a signal handler sets.
    #[must_use]
    pub fn signal(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.signal)
    }

    /// Stops the run as `signal` does, one of [`Stop::SIGNALS`].
    pub fn raise(&self, signal: i32) {
        self.signal.store(usize::try_from(signal).unwrap_or_default(), Ordering::Relaxed);
    }

    /// Somebody else has what this process works on; say so in these words, a message and a hint.
    pub fn lose(&self, words: (String, String)) {
        let _ = self.loss.set(words);
    }

    /// # Errors
    /// `Stopped` once a signal has come, `Usage` once the work is lost to another process.
    pub fn check(&self) -> Result<()> {
        self.check_signal()?;
        self.loss.get().map_or(Ok(()), |(message, hint)| Err(Error::usage(message, hint)))
    }

    /// # Errors
    /// `Stopped` once a signal has come.
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
    fn work_that_is_lost_ends_after_a_signal_only() {
        let stop = Stop::default();
        stop.clone().lose(("taken over".into(), "wait".into()));
        assert!(stop.check_signal().is_ok());
        assert_eq!(stop.check().unwrap_err().to_string(), "taken over");
        stop.signal.store(usize::try_from(SIGTERM).unwrap(), Ordering::Relaxed);
        assert!(matches!(stop.check(), Err(Error::Stopped(Stopped { signal: "TERM", .. }))));
    }

    #[test]
    fn the_exit_code_tells_whether_to_try_again() {
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
                format!("stopped by {signal}; .out.dtshard-partial keeps 1 of 2, options::resume goes on from there");
            assert_eq!(kept.to_string(), words);
        }
    }
}
