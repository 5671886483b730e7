//! What a rank has of NCCL until it is given up, and a thread that gives it up in time.
//!
//! Whoever waits for NCCL asks meanwhile how it is. But memory that is freed waits for the device as well, which waits for
//! NCCL, which waits for a peer that may be gone; and who is in such a call asks nobody. Nor does who waits for another
//! rank's word, which that one cannot give. Invariant: what was given up stays so, and why is what it was first.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nccl::raw::ncclRemoteError;

use crate::comm::FailureNotes;
use crate::error::{CommError, DeviceError, Error, Result};
use crate::threads;

/// How often it is looked after where nobody waits for it.
const EVERY: Duration = Duration::from_millis(100);

/// Why NCCL is given up.
#[derive(Clone, Debug)]
pub(super) enum AbortReason {
    /// Another rank is gone, or has ended its side.
    Elsewhere(String),
    /// Whatever it is, it may be of this rank alone.
    Here(String),
}

impl AbortReason {
    pub fn words(&self) -> &str {
        let (Self::Elsewhere(words) | Self::Here(words)) = self;
        words
    }

    /// How long the notes may take to have what NCCL knows already. Ranks whose peer is lost wait for the reason of that one.
    pub fn patience(&self) -> Duration {
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

/// Returns the error for why NCCL fails at rank `own`: what the notes of the run say, or else what NCCL says.
pub(super) fn reason(notes: &dyn FailureNotes, own: u32, op: &'static str, why: &AbortReason) -> Error {
    let until = Instant::now() + why.patience();
    loop {
        match notes.check() {
            // The watch was faster with the reason of this rank.
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

/// The error for what NCCL says.
pub(super) fn of_nccl(op: &'static str, words: &str) -> Error {
    let hint = "NCCL_DEBUG=INFO lets NCCL tell more; NCCL_SOCKET_IFNAME names the network to use".to_owned();
    DeviceError { op, detail: words.to_owned(), hint: Some(hint) }.into()
}

/// NCCL among the ranks, or why there is none any more.
pub(super) struct NcclState {
    peers: Mutex<Option<nccl::Communicator>>,
    given_up: OnceLock<AbortReason>,
}

impl NcclState {
    pub fn new(peers: nccl::Communicator) -> Arc<Self> {
        Arc::new(Self { peers: Mutex::new(Some(peers)), given_up: OnceLock::new() })
    }

    /// # Errors
    /// Why it is given up, now or before.
    pub fn with<T>(&self, body: impl FnOnce(&mut nccl::Communicator) -> nccl::Result<T>) -> Result<T, AbortReason> {
        let done = self.lock().as_mut().map_or(Err(nccl::Error::Aborted), body);
        done.map_err(|error| self.give_up(error.into()))
    }

    /// Abort NCCL, which ends what streams have of it; why, or why it was done before.
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

/// A thread that looks after it, as long as this is.
pub(super) struct NcclWatch {
    /// `None` once it is to end.
    going: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    is_leaving: Arc<Mutex<bool>>,
}

impl NcclWatch {
    /// # Errors
    /// `Usage` where no thread can be started.
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
                    // This rank may be waiting for another one, which waits for NCCL.
                    return notes.fail(&reason(&*notes, own, "exchange", &why));
                }
            }
        })?;
        Ok(Self { going: Some(going), thread: Some(thread), is_leaving })
    }

    /// Watches only the other processes from now on: NCCL reports an error as soon as another rank has ended its side.
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
