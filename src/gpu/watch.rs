//! The NCCL state of a rank, and a thread that aborts NCCL when a peer has ended.
//!
//! A thread that waits for NCCL polls NCCL and the failure notes. But some calls cannot poll: freeing device memory
//! waits for the device, the device waits for NCCL, and NCCL may wait for a peer that has ended. A thread that waits
//! for a message from another rank cannot poll either, and that rank may never send it. Therefore a separate thread
//! polls. Invariant: an aborted NCCL stays aborted, and the first reason is kept.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nccl::raw::ncclRemoteError;

use crate::comm::FailureNotes;
use crate::error::{CommError, DeviceError, Error, Result};
use crate::threads;

/// The interval between two checks while no thread waits for NCCL.
const EVERY: Duration = Duration::from_millis(100);

/// The reason why NCCL is aborted.
#[derive(Clone, Debug)]
pub(super) enum AbortReason {
    /// Another rank has ended, or has shut down its NCCL.
    Elsewhere(String),
    /// A failure that may concern only this rank.
    Here(String),
}

impl AbortReason {
    pub fn words(&self) -> &str {
        let (Self::Elsewhere(words) | Self::Here(words)) = self;
        words
    }

    /// The time to wait until the failure notes contain a failure that NCCL has already reported. Ranks that have lost
    /// a peer wait for the reason of that peer.
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

/// Returns the error for a failure of NCCL at rank `own`: the failure in the notes of the run, or else the message of
/// NCCL.
pub(super) fn reason(notes: &dyn FailureNotes, own: u32, op: &'static str, why: &AbortReason) -> Error {
    let until = Instant::now() + why.grace_period();
    loop {
        match notes.check() {
            // The watch thread has recorded this rank's own failure first.
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

/// Returns the error that contains a message of NCCL.
pub(super) fn of_nccl(op: &'static str, words: &str) -> Error {
    let hint =
        "set NCCL_DEBUG=INFO for details from NCCL; set NCCL_SOCKET_IFNAME to select the network interface".to_owned();
    DeviceError { op, detail: words.to_owned(), hint: Some(hint) }.into()
}

/// The NCCL communicator, or the reason why it was aborted.
pub(super) struct NcclState {
    peers: Mutex<Option<nccl::Communicator>>,
    given_up: OnceLock<AbortReason>,
}

impl NcclState {
    pub fn new(peers: nccl::Communicator) -> Arc<Self> {
        Arc::new(Self { peers: Mutex::new(Some(peers)), given_up: OnceLock::new() })
    }

    /// Calls `body` with the NCCL communicator. If `body` fails, aborts NCCL.
    ///
    /// # Errors
    /// The reason why NCCL was aborted, now or earlier.
    pub fn with<T>(&self, body: impl FnOnce(&mut nccl::Communicator) -> nccl::Result<T>) -> Result<T, AbortReason> {
        let done = self.lock().as_mut().map_or(Err(nccl::Error::Aborted), body);
        done.map_err(|error| self.give_up(error.into()))
    }

    /// Aborts NCCL, which ends its work on all streams. Returns the reason of the first abort.
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

/// A thread that monitors NCCL for as long as this value exists.
pub(super) struct NcclWatch {
    /// The sender whose end stops the thread; `None` once the thread is to stop.
    going: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    is_leaving: Arc<Mutex<bool>>,
}

impl NcclWatch {
    /// Starts the thread. `own` is this rank.
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
                    // This rank may be waiting for another rank that waits for NCCL.
                    return notes.fail(&reason(&*notes, own, "exchange", &why));
                }
            }
        })?;
        Ok(Self { going: Some(going), thread: Some(thread), is_leaving })
    }

    /// From this call on, monitors only the failure notes, because NCCL reports an error as soon as another rank shuts
    /// down.
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
