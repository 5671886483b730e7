//! What a rank has of NCCL until it is given up, and a thread that gives it up in time.
//!
//! Whoever waits for NCCL asks meanwhile how it is. But memory that is freed waits for the device as well, which waits for
//! NCCL, which waits for a peer that may be gone; and who is in such a call asks nobody. Invariant: what was given up
//! stays so, and why is what it was first.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::comm::Communicator;

/// How often it is looked after where nobody waits for it.
const EVERY: Duration = Duration::from_millis(100);

/// NCCL among the ranks, or why there is none any more.
pub(super) struct Met {
    peers: Mutex<Option<nccl::Communicator>>,
    given_up: OnceLock<String>,
}

impl Met {
    pub fn new(peers: nccl::Communicator) -> Arc<Self> {
        Arc::new(Self { peers: Mutex::new(Some(peers)), given_up: OnceLock::new() })
    }

    /// # Errors
    /// Why it is given up, now or before.
    pub fn with<T>(&self, body: impl FnOnce(&mut nccl::Communicator) -> nccl::Result<T>) -> Result<T, String> {
        let done = self.lock().as_mut().map_or(Err(nccl::Error::Aborted), body);
        done.map_err(|error| self.give_up(&error.to_string()))
    }

    /// Abort NCCL, which ends what streams have of it; why, or why it was done before.
    pub fn give_up(&self, why: &str) -> String {
        let why = self.given_up.get_or_init(|| why.to_owned());
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
pub(super) struct Watch {
    /// `None` once it is to end.
    going: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub fn start<C: Communicator + Send + 'static>(met: Arc<Met>, control: Arc<C>) -> Self {
        let (going, goes) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            while goes.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                let is_well = control.check().map_err(|gone| met.give_up(&gone.to_string()));
                if is_well.and_then(|()| met.with(|peers| peers.status())).is_err() {
                    return;
                }
            }
        });
        Self { going: Some(going), thread: Some(thread) }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.going = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
