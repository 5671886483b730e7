//! Roster: where the processes of a run are, so that whoever reads of one finds it: `process 2 of 4 (n1, pid 4711)`.

use crate::comm::{Communicator, Part, Process};
use crate::error::{Error, Peer, Result};

pub struct Roster {
    of: u32,
    /// By process; none before they have met.
    places: Vec<String>,
}

impl Roster {
    /// Of processes that have not met.
    #[must_use]
    pub fn unknown(part: Part) -> Self {
        Self { of: part.of, places: Vec::new() }
    }

    /// Hear from all where they are. Collective.
    ///
    /// # Errors
    /// As [`Communicator::gather`].
    pub fn meet(communicator: &impl Communicator) -> Result<Self> {
        let Process { host, pid, .. } = Process::this();
        let said = communicator.gather(format!("{host}, pid {pid}").as_bytes())?;
        let places = said.iter().map(|words| String::from_utf8_lossy(words).into_owned()).collect();
        Ok(Self { of: communicator.size(), places })
    }

    #[must_use]
    pub fn peer(&self, index: u32) -> Peer {
        Peer { index, of: Some(self.of), place: self.places.get(index as usize).cloned() }
    }

    /// Say of the process that an error names all that is known.
    #[must_use]
    pub fn name(&self, mut error: Error) -> Error {
        if let Some(peer) = error.peer_mut() {
            *peer = self.peer(peer.index);
        }
        error
    }
}
