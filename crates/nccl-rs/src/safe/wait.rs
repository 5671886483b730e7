//! A time limit for waiting for peers, and a function that may end the wait earlier.

use std::fmt;
use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

use crate::result::Progress;
use crate::{Error, Result};

/// The first pause between two polls of NCCL. Each later pause is twice as long as the previous one.
const SHORTEST: Duration = Duration::from_micros(20);
/// The longest pause between two polls. This pause is also the maximum time until a completed operation is noticed.
const LONGEST: Duration = Duration::from_millis(5);

/// The time limit of a communicator for three waits: until all peers join the creation of the communicator, until a
/// peer joins the first exchange with this rank, and until all peers join the end of the communicator.
///
/// The limit does not apply to data transfers, because the caller waits for data transfers on the stream.
pub struct Wait {
    limit: Duration,
    watch: Box<Watch>,
}

type Watch = dyn FnMut(Duration) -> ControlFlow<String> + Send;

impl Wait {
    /// Returns a wait with this time limit.
    #[must_use]
    pub fn up_to(limit: Duration) -> Self {
        Self { limit, watch: Box::new(|_| ControlFlow::Continue(())) }
    }

    /// Sets the function `watch`, which is called every few milliseconds during a wait, with the elapsed time. If
    /// `watch` returns `Break(why)`, the wait ends immediately. For example, a program can check its peers or its
    /// signals in `watch`.
    #[must_use]
    pub fn watching(self, watch: impl FnMut(Duration) -> ControlFlow<String> + Send + 'static) -> Self {
        Self { watch: Box::new(watch), ..self }
    }

    /// Polls until the operation is done. Returns an error at the time limit, or if the watch ends the wait.
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
    fn polls_until_done() {
        let mut looks = 0;
        let done = Wait::up_to(Duration::from_mins(1)).until_done("ncclGroupEnd", || {
            looks += 1;
            Ok(if looks < 4 { Progress::InProgress } else { Progress::Done })
        });
        assert_eq!((done, looks), (Ok(()), 4));
    }

    #[test]
    fn exceeded_limit_is_an_error_with_the_limit() {
        let limit = Duration::from_millis(30);
        let late = Wait::up_to(limit).until_done("ncclCommInitRankConfig", || Ok(Progress::InProgress)).unwrap_err();
        assert_eq!(late, Error::Late { function: "ncclCommInitRankConfig", limit });
        assert_eq!(late.to_string(), "ncclCommInitRankConfig is not done after 0.0 s; check that all ranks run");
    }

    #[test]
    fn zero_limit_polls_once() {
        let mut wait = Wait::up_to(Duration::ZERO);
        assert_eq!(wait.until_done("ncclGroupEnd", || Ok(Progress::Done)), Ok(()));
        assert!(matches!(wait.until_done("ncclGroupEnd", || Ok(Progress::InProgress)), Err(Error::Late { .. })));
    }

    #[test]
    fn watch_stops_before_the_limit() {
        let mut asked = 0;
        let mut wait = Wait::up_to(Duration::from_hours(1)).watching(move |_| {
            asked += 1;
            if asked < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break("rank 3 is gone".into()) }
        });
        let given_up = wait.until_done("ncclGroupEnd", || Ok(Progress::InProgress)).unwrap_err();
        assert_eq!(given_up.to_string(), "ncclGroupEnd was stopped: rank 3 is gone");
    }

    #[test]
    fn error_stops_polling() {
        let error = Wait::up_to(Duration::from_hours(1)).until_done("ncclGroupEnd", || Err(Error::Aborted));
        assert_eq!(error, Err(Error::Aborted));
    }
}
