//! What ends a run before its time, as a flag that workers look at between strips: INT, TERM, USR1 and USR2, or that
//! another process has what this one works on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
use signal_hook::flag;

use crate::error::{Error, Result, STOPPING};

/// Asked between strips whether to go on. Cloning shares the flag.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    signal: Arc<AtomicUsize>,
    /// Message and hint, of what is no business of this process any more.
    loss: Arc<OnceLock<(String, String)>>,
}

/// The numbers of [`STOPPING`].
const NUMBERS: [i32; 4] = [SIGINT, SIGTERM, SIGUSR1, SIGUSR2];

impl Stop {
    /// A flag that INT, TERM, USR1 and USR2 to the process set from now on. A second INT ends the process at once, so
    /// that a hung file system cannot hold a user. The others never do: a job that is cancelled or out of time gets TERM
    /// twice within milliseconds, and KILL if that was not enough. Beyond a limit to the size of files a write fails from
    /// now on, and is an error as any other; the signal would end the process and leave half of the work there.
    ///
    /// # Errors
    /// `Io` where the handlers cannot be installed.
    pub fn on_signals() -> Result<Self> {
        let stop = Self::default();
        stop.listen().map_err(Error::io("install a signal handler in", "this process"))?;
        Ok(stop)
    }

    fn listen(&self) -> std::io::Result<()> {
        let hurry = Arc::new(AtomicBool::new(false));
        flag::register_conditional_default(SIGINT, Arc::clone(&hurry))?;
        flag::register(SIGINT, hurry)?;
        for signal in NUMBERS {
            let number = usize::try_from(signal).expect("signal numbers are positive");
            flag::register_usize(signal, Arc::clone(&self.signal), number)?;
        }
        flag::register(SIGXFSZ, Arc::default())?;
        Ok(())
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
            Some(which) => {
                let (signal, exit) = STOPPING[which];
                Err(Error::Stopped { signal, exit, rank: None, kept: None })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn work_that_is_lost_ends_after_a_signal_only() {
        let stop = Stop::default();
        stop.clone().lose(("taken over".into(), "wait".into()));
        assert!(stop.check_signal().is_ok());
        assert_eq!(stop.check().unwrap_err().to_string(), "taken over");
        stop.signal.store(usize::try_from(SIGTERM).unwrap(), Ordering::Relaxed);
        assert!(matches!(stop.check(), Err(Error::Stopped { signal: "TERM", .. })));
    }

    #[test]
    fn the_exit_code_tells_whether_to_try_again() {
        let code = |error: &Error| match error {
            Error::Stopped { exit, .. } => *exit,
            _ => unreachable!(),
        };
        for (number, (signal, exit)) in NUMBERS.into_iter().zip(STOPPING) {
            let stop = Stop::default();
            assert!(stop.check().is_ok());
            stop.signal.store(usize::try_from(number).unwrap(), Ordering::Relaxed);
            let error = stop.check().unwrap_err();
            assert_eq!((code(&error), i32::from(exit)), (exit, 128 + number));
            assert_eq!(error.to_string(), format!("stopped by {signal}; nothing was written at the destination"));
            let kept = error.keeping(Path::new(".out.dtshard-partial"), "1 of 2".into());
            assert_eq!(code(&kept), if number == SIGINT { 130 } else { 75 });
            let words = format!("stopped by {signal}; .out.dtshard-partial keeps 1 of 2, --resume goes on from there");
            assert_eq!(kept.to_string(), words);
        }
    }
}
