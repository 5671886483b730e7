//! The files of a checkpoint that are open, as many as the limit on descriptors allows.
//!
//! Why: a count of who has a file, or a lock around it, is where threads that want a small tensor each wait for each
//! other, for longer than they copy. So the first files, half of the budget, stay open once they are, and to have one
//! costs a look. The others take turns in the other half.
//!
//! Counts files.

use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock};

use super::{FileId, OpenFile, filesystem};
use crate::error::Result;

#[derive(Debug, Default)]
pub(super) struct OpenFiles {
    /// The first files there are.
    staying: Vec<OnceLock<Arc<OpenFile>>>,
    others: Mutex<OpenTurns>,
}

/// Those that have their turn, the latest last.
#[derive(Debug, Default)]
struct OpenTurns {
    files: HashMap<u32, Arc<OpenFile>>,
    order: VecDeque<u32>,
}

/// A file that is open for as long as it is wanted.
pub enum Opened<'a> {
    Staying(&'a Arc<OpenFile>),
    InTurn(Arc<OpenFile>),
}

impl Opened<'_> {
    /// The same, to be kept.
    #[must_use]
    pub fn keep(&self) -> Arc<OpenFile> {
        match self {
            Self::Staying(file) => Arc::clone(file),
            Self::InTurn(file) => Arc::clone(file),
        }
    }
}

impl Deref for Opened<'_> {
    type Target = OpenFile;

    fn deref(&self) -> &OpenFile {
        match self {
            Self::Staying(file) => file,
            Self::InTurn(file) => file,
        }
    }
}

impl OpenFiles {
    /// Make room for so many files in all, each of which takes this many descriptors.
    pub fn grow(&mut self, files: usize, descriptors: usize) {
        let staying = files.min(filesystem::open_file_budget() / descriptors / 2);
        if staying > self.staying.len() {
            self.staying.resize_with(staying, OnceLock::new);
        }
    }

    /// The file of this number; if it is not open, `open` does that.
    pub fn get(&self, id: FileId, descriptors: usize, open: impl FnOnce() -> Result<OpenFile>) -> Result<Opened<'_>> {
        if let Some(place) = self.staying.get(id.0 as usize) {
            let file = match place.get() {
                Some(file) => file,
                None => {
                    let file = Arc::new(open()?);
                    place.get_or_init(|| file)
                }
            };
            return Ok(Opened::Staying(file));
        }
        let mut others = self.others.lock().expect("no panic while the lock is held");
        if let Some(file) = others.files.get(&id.0) {
            return Ok(Opened::InTurn(Arc::clone(file)));
        }
        let file = Arc::new(open()?);
        // First in, first out: work goes through the files in order, so the oldest one is done with. A file still in
        // use stays open through its other `Arc`.
        let room = (filesystem::open_file_budget() / descriptors).saturating_sub(self.staying.len());
        if others.order.len() >= room.max(1)
            && let Some(oldest) = others.order.pop_front()
        {
            others.files.remove(&oldest);
        }
        others.order.push_back(id.0);
        others.files.insert(id.0, Arc::clone(&file));
        Ok(Opened::InTurn(file))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::storage::{Files, IoMode};

    #[test]
    fn the_first_files_stay_and_the_others_take_turns() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = Files::new(IoMode::Read);
        for name in 0..5_u8 {
            let path = folder.path().join(name.to_string());
            std::fs::write(&path, [name]).unwrap();
            files.add(&path).unwrap();
        }
        // Room for two that stay and two others.
        let descriptors = filesystem::open_file_budget() / 4;
        let mut open = OpenFiles::default();
        open.grow(5, descriptors);
        let opened = RefCell::new(Vec::new());
        for number in [0, 1, 2, 3, 2, 4, 2, 4, 1, 0] {
            let now = || {
                opened.borrow_mut().push(number);
                files.open_now(FileId(number))
            };
            let file = open.get(FileId(number), descriptors, now).unwrap();
            assert!(file.path().ends_with(number.to_string()));
        }
        assert_eq!(*opened.borrow(), [0, 1, 2, 3, 4, 2]);
    }
}
