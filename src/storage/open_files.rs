//! The open files of a checkpoint: as many as the limit on descriptors allows.
//!
//! With a reference count or a lock for each file, threads that copy small tensors would wait for each other longer
//! than they copy. Therefore half of the budget of descriptors is reserved for the first files, which stay open once
//! they are opened; using such a file needs no lock. All later files share the second half of the budget. If the second
//! half is full, opening a later file closes the later file that was opened first.

use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock};

use super::{FileId, OpenFile, filesystem};
use crate::error::Result;

/// The open files of one checkpoint.
#[derive(Debug, Default)]
pub(super) struct OpenFiles {
    /// The first files of the checkpoint, which stay open once they are opened.
    permanent: Vec<OnceLock<Arc<OpenFile>>>,
    others: Mutex<CachedFiles>,
}

/// The open files that may be closed again, in the order in which they were opened.
#[derive(Debug, Default)]
struct CachedFiles {
    files: HashMap<u32, Arc<OpenFile>>,
    order: VecDeque<u32>,
}

/// A file that stays open while this value exists.
pub enum Opened<'a> {
    Permanent(&'a Arc<OpenFile>),
    Cached(Arc<OpenFile>),
}

impl Opened<'_> {
    /// Returns a reference-counted handle, which the caller may keep.
    pub fn to_arc(&self) -> Arc<OpenFile> {
        match self {
            Self::Permanent(file) => Arc::clone(file),
            Self::Cached(file) => Arc::clone(file),
        }
    }
}

impl Deref for Opened<'_> {
    type Target = OpenFile;

    fn deref(&self) -> &OpenFile {
        match self {
            Self::Permanent(file) => file,
            Self::Cached(file) => file,
        }
    }
}

impl OpenFiles {
    /// Enlarges the list of permanently open files for a checkpoint of `files` files. Each open file uses `descriptors`
    /// descriptors. The list never has more files than half of the budget allows.
    pub fn grow(&mut self, files: usize, descriptors: usize) {
        let permanent = files.min(filesystem::open_file_budget() / descriptors / 2);
        if permanent > self.permanent.len() {
            self.permanent.resize_with(permanent, OnceLock::new);
        }
    }

    /// Returns the file with this id. Calls `open` if the file is not open.
    pub fn get(&self, id: FileId, descriptors: usize, open: impl FnOnce() -> Result<OpenFile>) -> Result<Opened<'_>> {
        if let Some(place) = self.permanent.get(id.0 as usize) {
            let file = match place.get() {
                Some(file) => file,
                None => {
                    let file = Arc::new(open()?);
                    place.get_or_init(|| file)
                }
            };
            return Ok(Opened::Permanent(file));
        }
        let mut others = self.others.lock().expect("no panic while the lock is held");
        if let Some(file) = others.files.get(&id.0) {
            return Ok(Opened::Cached(Arc::clone(file)));
        }
        let file = Arc::new(open()?);
        // First in, first out: the work proceeds through the files in order, so the oldest file is no longer needed. A
        // file that is still in use stays open through its other `Arc`.
        let budget = (filesystem::open_file_budget() / descriptors).saturating_sub(self.permanent.len());
        if others.order.len() >= budget.max(1)
            && let Some(oldest) = others.order.pop_front()
        {
            others.files.remove(&oldest);
        }
        others.order.push_back(id.0);
        others.files.insert(id.0, Arc::clone(&file));
        Ok(Opened::Cached(file))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::storage::{Files, IoMode};

    #[test]
    fn first_files_stay_open_and_others_are_closed_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = Files::new(IoMode::Read);
        for name in 0..5_u8 {
            let path = folder.path().join(name.to_string());
            std::fs::write(&path, [name]).unwrap();
            files.add(&path).unwrap();
        }
        // The budget allows two permanent files and two other files.
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
