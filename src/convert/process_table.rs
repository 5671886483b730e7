//! Roster: where the processes of a run are, so that whoever reads of one finds it: `process 2 of 4 (n1, pid 4711)`.

use crate::comm::{Communicator, Process};
use crate::error::{Error, Peer, Result};
use crate::launch::Part;
use crate::metadata_mirror::MetadataMirror;
use crate::name_list::short_list;

pub struct ProcessTable {
    of: u32,
    /// By process; none before they have met.
    places: Vec<String>,
}

impl ProcessTable {
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
        let said = communicator.gather(Process::this().to_string().as_bytes())?;
        let places = said.iter().map(|words| String::from_utf8_lossy(words).into_owned()).collect();
        Ok(Self { of: communicator.size(), places })
    }

    #[must_use]
    pub fn peer(&self, index: u32) -> Peer {
        Peer { index, of: Some(self.of), place: self.places.get(index as usize).cloned() }
    }

    /// `process 1 of 4 (n1, pid 4711), process 3 of 4 (n3, pid 12)`
    #[must_use]
    pub fn names(&self, processes: &[u32]) -> String {
        let names: Vec<String> = processes.iter().map(|index| self.peer(*index).to_string()).collect();
        short_list(&names, 3)
    }

    /// Say of a file that is damaged whose it is: no process sees all of SRC, so nobody can `verify` it.
    #[must_use]
    pub fn locate(&self, mut error: Error, twin: &MetadataMirror) -> Error {
        if let Some((path, hint @ None)) = error.damaged_mut()
            && let seen_by @ [_, ..] = twin.seen_by(path)
        {
            let seers = self.names(seen_by);
            let words = format!(
                "the file is damaged or was not completely written: look at it on the node of {seers}; with options::check_crc \
                 all processes check every sum in their files first"
            );
            *hint = Some(words.into());
        }
        error
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
