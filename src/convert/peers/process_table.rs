//! Table of the processes of a run, with the node and process id of each process. Messages use it to name a process:
//! `process 2 of 4 (n1, pid 4711)`.

use crate::comm::{Communicator, Process};
use crate::error::{Error, Peer, Result};
use crate::launch::Part;
use crate::metadata_mirror::MetadataMirror;
use crate::name_list::short_list;

/// Node and process id of each process of a run.
pub struct ProcessTable {
    of: u32,
    /// Node and process id of each process as text, such as `n1, pid 4711`, in the order of process numbers. The list
    /// is empty until the processes have connected; messages then name processes only by number.
    places: Vec<String>,
}

impl ProcessTable {
    /// Returns the table for processes that have not connected yet.
    #[must_use]
    pub fn unknown(part: Part) -> Self {
        Self { of: part.of, places: Vec::new() }
    }

    /// Gathers the node and process id of every process. Collective.
    ///
    /// # Errors
    /// The errors of [`Communicator::gather`].
    pub fn meet(communicator: &impl Communicator) -> Result<Self> {
        let all = communicator.gather(Process::this().to_string().as_bytes())?;
        let places = all.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect();
        Ok(Self { of: communicator.size(), places })
    }

    /// Returns the description of a process, with its node and process id if they are known.
    pub fn peer(&self, index: u32) -> Peer {
        Peer { index, of: Some(self.of), place: self.places.get(index as usize).cloned() }
    }

    /// Returns a list of processes, for example `process 1 of 4 (n1, pid 4711), process 3 of 4 (n3, pid 12)`. A long
    /// list is shortened.
    pub fn names(&self, processes: &[u32]) -> String {
        let names: Vec<String> = processes.iter().map(|index| self.peer(*index).to_string()).collect();
        short_list(&names, 3)
    }

    /// Adds to an error about a damaged file the processes that see this file. If no process sees all of SRC,
    /// the user cannot find the file with `verify`.
    pub fn locate(&self, mut error: Error, mirror: &MetadataMirror) -> Error {
        if let Some((path, hint @ None)) = error.damaged_mut()
            && let seen_by @ [_, ..] = mirror.seen_by(path)
        {
            let seers = self.names(seen_by);
            let text = format!(
                "the file is damaged or was not completely written: check it on the node of {seers}; with \
                 options::check_crc, all processes first check every checksum in their files"
            );
            *hint = Some(text.into());
        }
        error
    }

    /// If an error names a process, adds the node and the process id of the named process.
    pub fn name(&self, mut error: Error) -> Error {
        if let Some(peer) = error.peer_mut() {
            *peer = self.peer(peer.index);
        }
        error
    }
}
