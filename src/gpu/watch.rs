//! The NCCL state of a process, and a thread that aborts NCCL when a peer has ended.
//!
//! A thread that waits for NCCL polls NCCL and the failure notes. But some calls cannot poll: freeing device memory
//! waits for the device, the device waits for NCCL, and NCCL may wait for a peer that has ended. A thread that waits
//! for a message from another process cannot poll either, and that process may never send the message. Therefore a
//! separate thread polls. Invariant: an aborted NCCL stays aborted, the first reason is kept, and an operation that the
//! abort has ended never counts as complete.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nccl::raw::ncclRemoteError;

use crate::comm::FailureNotes;
use crate::error::{CommError, DeviceError, Error, Result};
use crate::threads;

/// The interval between two checks of the thread that watches NCCL.
const EVERY: Duration = Duration::from_millis(100);

/// The reason why NCCL is aborted.
#[derive(Clone, Debug)]
pub(super) enum AbortReason {
    /// The cause is another process, which has ended or has shut down its NCCL. The text is the error message.
    Elsewhere(String),
    /// The cause may be in this process. The text is the error message.
    Here(String),
}

impl AbortReason {
    pub fn words(&self) -> &str {
        let (Self::Elsewhere(words) | Self::Here(words)) = self;
        words
    }

    /// Returns the maximum time that this process waits, after a failure of NCCL, for the failure notes to say which
    /// process has ended, and why. The time is longer if the cause is another process, because that process must first
    /// record its reason.
    pub fn grace_period(&self) -> Duration {
        match self {
            Self::Elsewhere(_) => Duration::from_secs(5),
            Self::Here(_) => Duration::from_secs(1),
        }
    }
}

impl From<nccl::Error> for AbortReason {
    fn from(error: nccl::Error) -> Self {
        let is_elsewhere = match &error {
            nccl::Error::Call { code, .. } => *code == ncclRemoteError,
            nccl::Error::GivenUp { .. } => true,
            _ => false,
        };
        if is_elsewhere { Self::Elsewhere(error.to_string()) } else { Self::Here(error.to_string()) }
    }
}

/// Returns the error for a failure of NCCL in this process, which has the number `own`. The error contains the failure
/// from the notes of the run, or the message of NCCL if the notes contain no failure within the grace period.
pub(super) fn reason(notes: &dyn FailureNotes, own: u32, op: &'static str, why: &AbortReason) -> Error {
    let until = Instant::now() + why.grace_period();
    loop {
        match notes.check() {
            // The failure in the notes is this rank's own failure, which the watch thread has recorded. So the error
            // gets the message of NCCL.
            Err(Error::Comm(CommError { rank, .. })) if rank.index == own && matches!(why, AbortReason::Here(_)) => {
                break;
            }
            Err(Error::Comm(CommError { rank, detail, hint, .. })) => {
                return CommError { rank, op, detail, hint }.into();
            }
            Err(other) => return other,
            Ok(()) if Instant::now() >= until => break,
            Ok(()) => thread::sleep(Duration::from_millis(5)),
        }
    }
    of_nccl(op, why.words())
}

/// Returns an error with a message of NCCL.
pub(super) fn of_nccl(op: &'static str, words: &str) -> Error {
    let hint =
        "set NCCL_DEBUG=INFO for details from NCCL; set NCCL_SOCKET_IFNAME to select the network interface".to_owned();
    DeviceError { op, detail: words.to_owned(), hint: Some(hint) }.into()
}

/// The NCCL communicator of this process, or the reason why it was aborted.
pub(super) struct NcclState {
    peers: Mutex<Option<nccl::Communicator>>,
    given_up: OnceLock<AbortReason>,
}

impl NcclState {
    pub fn new(peers: nccl::Communicator) -> Arc<Self> {
        Arc::new(Self { peers: Mutex::new(Some(peers)), given_up: OnceLock::new() })
    }

    /// Calls `body` with the NCCL communicator. If `body` returns an error, aborts NCCL.
    ///
    /// # Errors
    /// The reason why NCCL was aborted, now or earlier.
    pub fn with<T>(&self, body: impl FnOnce(&mut nccl::Communicator) -> nccl::Result<T>) -> Result<T, AbortReason> {
        let mut peers = self.lock();
        let done = peers.as_mut().map_or(Err(nccl::Error::Aborted), body);
        done.map_err(|error| {
            // The failed call may already have aborted NCCL. The lock is held until the reason is set, because
            // `check_not_aborted` relies on this order.
            let why = self.given_up.get_or_init(|| error.into()).clone();
            drop(peers);
            self.give_up(why)
        })
    }

    /// Checks that NCCL has not been aborted. Call it after a stream has reached an event: an abort also ends the
    /// operations on all streams, so the stream reaches the event although the operations are incomplete.
    ///
    /// # Errors
    /// The reason why NCCL was aborted.
    pub fn check_not_aborted(&self) -> Result<(), AbortReason> {
        // The reason is set before NCCL is aborted, or while this lock is held.
        let _peers = self.lock();
        self.given_up.get().map_or(Ok(()), |why| Err(why.clone()))
    }

    /// Aborts NCCL, so that the work of NCCL on all streams ends. Returns the reason of the first abort: if NCCL was
    /// aborted before, `why` is ignored.
    pub fn give_up(&self, why: AbortReason) -> AbortReason {
        let why = self.given_up.get_or_init(|| why);
        drop(self.take());
        why.clone()
    }

    pub fn take(&self) -> Option<nccl::Communicator> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<nccl::Communicator>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that regularly checks the status of NCCL and the failure notes. On a failure, it aborts NCCL and notifies
/// the other processes. The thread runs as long as this value exists.
pub(super) struct NcclWatch {
    /// A sender that never sends. The thread ends when the sender is dropped; after that, the field is `None`.
    going: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    is_leaving: Arc<Mutex<bool>>,
}

impl NcclWatch {
    /// Starts the thread. `own` is the number of this process.
    ///
    /// # Errors
    /// `Usage` if no thread can be started.
    pub fn start(met: Arc<NcclState>, notes: Arc<dyn FailureNotes>, own: u32) -> Result<Self> {
        let (going, goes) = mpsc::channel::<()>();
        let is_leaving = Arc::new(Mutex::new(false));
        let leaving = Arc::clone(&is_leaving);
        let thread = threads::start("watch", move || {
            while goes.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                let is_well = notes.check().map_err(|gone| met.give_up(AbortReason::Elsewhere(gone.to_string())));
                let status = || {
                    let is_leaving = leaving.lock().unwrap_or_else(PoisonError::into_inner);
                    if *is_leaving { Ok(()) } else { met.with(|peers| peers.status()) }
                };
                if let Err(why) = is_well.and_then(|()| status()) {
                    // Another rank may be waiting for NCCL, and this rank for that rank. So this thread notifies all
                    // ranks of the failure.
                    return notes.fail(&reason(&*notes, own, "exchange", &why));
                }
            }
        })?;
        Ok(Self { going: Some(going), thread: Some(thread), is_leaving })
    }

    /// Makes the thread check only the failure notes from now on. It must not check NCCL any more, because NCCL reports
    /// an error as soon as another process shuts down its NCCL.
    pub fn expect_leaving(&self) {
        *self.is_leaving.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

impl Drop for NcclWatch {
    fn drop(&mut self) {
        self.going = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
