//! What of a file is here, where only other processes see all of it.
//!
//! Such a file has a *twin*: one as long, that holds the stretches which are no tensor data, and holes. Counts bytes.
//! Invariant: nobody takes a hole for data. What a twin does not hold is an error that says who sees it.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::{FileId, FileRange};
use crate::error::{Error, FormatError, Result};
use crate::name_list::name_processes;

/// Stretches of a file: ascending, apart from each other, none empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range<u64>>);

impl FromIterator<Range<u64>> for Ranges {
    fn from_iter<T: IntoIterator<Item = Range<u64>>>(ranges: T) -> Self {
        let mut sorted: Vec<Range<u64>> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
        sorted.sort_unstable_by_key(|range| range.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in sorted {
            match joined.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        Self(joined)
    }
}

impl Ranges {
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().cloned()
    }

    #[must_use]
    pub fn contains(&self, range: &Range<u64>) -> bool {
        let behind = self.0.partition_point(|known| known.start <= range.start);
        range.is_empty() || behind.checked_sub(1).is_some_and(|before| self.0[before].end >= range.end)
    }

    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }
}

/// What is known of a file with a twin.
#[derive(Clone, Debug)]
pub struct LocalContent {
    /// What its twin holds.
    pub held: Arc<Ranges>,
    /// The ranks that see the file, ascending.
    pub seen_by: Arc<[u32]>,
    /// When it was last changed, as all ranks tell it; replicas may be of other times.
    pub modified: (i64, i64),
}

/// The files of a twin, by where they lie in it.
pub type Holdings = HashMap<PathBuf, LocalContent>;

/// Where a file of a twin is for this process.
#[derive(Clone, Debug)]
pub struct LocalFile {
    /// As the user calls it.
    pub path: PathBuf,
    /// When this process saw that it was last changed; `None` where it does not see it.
    pub seen: Option<(i64, i64)>,
}

/// Who looks at what is read of a file.
#[derive(Clone, Debug)]
pub(super) enum ReadCheck {
    Note(FileId, Notes),
    /// No more than is held.
    Hold(LocalContent),
}

/// What was read.
pub(super) type Notes = Arc<Mutex<Vec<FileRange>>>;

impl ReadCheck {
    pub fn look(&self, path: &Path, offset: u64, len: u64) -> Result<()> {
        match self {
            Self::Note(file, notes) => {
                let mut notes = notes.lock().expect("no panic while the lock is held");
                notes.push(FileRange { file: *file, offset, len });
                Ok(())
            }
            Self::Hold(LocalContent { held, seen_by, .. }) => {
                let range = offset..offset.saturating_add(len);
                if held.contains(&range) {
                    return Ok(());
                }
                Err(Error::Format(FormatError::Missing {
                    path: path.to_path_buf(),
                    at: format!("byte {offset}"),
                    expected: format!("{len} bytes of tensor data"),
                    missing: format!("the file, which is seen by {}, not by this process", name_processes(seen_by)),
                    hint: Some(String::from(
                        "with options::source per-rank a process reads tensor data of the files that it sees itself",
                    )),
                }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_where_they_touch() {
        let ranges: Ranges = [8..9, 2..4, 4..6, 3..5, 7..7].into_iter().collect();
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [2..6, 8..9]);
        assert_eq!(ranges.len_bytes(), 5);
        for (range, is_within) in
            [(2..6, true), (3..4, true), (5..7, false), (1..3, false), (8..10, false), (7..7, true)]
        {
            assert_eq!(ranges.contains(&range), is_within, "{range:?}");
        }
    }
}
