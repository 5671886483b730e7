//! How long peers are waited for, and who may say before that it is in vain.

use std::fmt;
use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

use crate::result::Progress;
use crate::{Error, Result};

/// The first pause between two looks; each is twice as long as the one before.
const SHORTEST: Duration = Duration::from_micros(20);
/// The longest pause: what is done is noticed that late.
const LONGEST: Duration = Duration::from_millis(5);

/// The patience of a communicator: for peers that take part in its making, in the first exchange with them, in its end.
///
/// It is not about data: operations are waited for where their stream is.
pub struct Wait {
    limit: Duration,
    watch: Box<Watch>,
}

type Watch = dyn FnMut(Duration) -> ControlFlow<String> + Send;

impl Wait {
    /// Waits for so long.
    #[must_use]
    pub fn up_to(limit: Duration) -> Self {
        Self { limit, watch: Box::new(|_| ControlFlow::Continue(())) }
    }

    /// Asks `watch` every few milliseconds, with the time that has passed, whether there is any use in it:
    /// `Break(why)` gives up at once. It is where a program looks after its peers, or at its signals.
    #[must_use]
    pub fn watching(self, watch: impl FnMut(Duration) -> ControlFlow<String> + Send + 'static) -> Self {
        Self { watch: Box::new(watch), ..self }
    }

    /// Looks until it is done.
    pub(super) fn until_done(
        &mut self,
        function: &'static str,
        mut look: impl FnMut() -> Result<Progress>,
    ) -> Result<()> {
        let begin = Instant::now();
        let mut pause = SHORTEST;
        while look()? == Progress::InProgress {
            let waited = begin.elapsed();
            if let ControlFlow::Break(why) = (self.watch)(waited) {
                return Err(Error::GivenUp { function, why });
            }
            if waited >= self.limit {
                return Err(Error::Late { function, limit: self.limit });
            }
            thread::sleep(pause.min(self.limit.saturating_sub(waited)));
            pause = LONGEST.min(pause * 2);
        }
        Ok(())
    }
}

impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wait").field("limit", &self.limit).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_looks_until_it_is_done() {
        let mut looks = 0;
        let done = Wait::up_to(Duration::from_mins(1)).until_done("ncclGroupEnd", || {
            looks += 1;
            Ok(if looks < 4 { Progress::InProgress } else { Progress::Done })
        });
        assert_eq!((done, looks), (Ok(()), 4));
    }

    #[test]
    fn the_limit_ends_it_and_is_told() {
        let limit = Duration::from_millis(30);
        let late = Wait::up_to(limit).until_done("ncclCommInitRankConfig", || Ok(Progress::InProgress)).unwrap_err();
        assert_eq!(late, Error::Late { function: "ncclCommInitRankConfig", limit });
        assert_eq!(late.to_string(), "ncclCommInitRankConfig is not done after 0.0 s; do all ranks take part?");
    }

    #[test]
    fn a_limit_of_nothing_looks_once() {
        let mut wait = Wait::up_to(Duration::ZERO);
        assert_eq!(wait.until_done("ncclGroupEnd", || Ok(Progress::Done)), Ok(()));
        assert!(matches!(wait.until_done("ncclGroupEnd", || Ok(Progress::InProgress)), Err(Error::Late { .. })));
    }

    #[test]
    fn the_watch_ends_it_before_the_limit() {
        let mut asked = 0;
        let mut wait = Wait::up_to(Duration::from_hours(1)).watching(move |_| {
            asked += 1;
            if asked < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break("rank 3 is gone".into()) }
        });
        let given_up = wait.until_done("ncclGroupEnd", || Ok(Progress::InProgress)).unwrap_err();
        assert_eq!(given_up.to_string(), "ncclGroupEnd was given up: rank 3 is gone");
    }

    #[test]
    fn an_error_ends_it() {
        let error = Wait::up_to(Duration::from_hours(1)).until_done("ncclGroupEnd", || Err(Error::Aborted));
        assert_eq!(error, Err(Error::Aborted));
    }
}
