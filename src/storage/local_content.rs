//! The bytes that this process can read of a file that only other processes see completely. All sizes and offsets are
//! in bytes.
//!
//! Such a file has a mirror (see [`crate::metadata_mirror`]): a sparse file of equal length, which contains all bytes
//! that are not tensor data, and holes elsewhere. Invariant: a hole is never read as data. Reading bytes that the
//! mirror does not contain is an error, which names the processes that see the file.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::{FileId, FileRange};
use crate::error::{Error, Result};
use crate::name_list::name_processes;

/// A set of byte ranges of a file. The ranges are ascending, not adjacent, and not empty.
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
    /// Returns the ranges, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().cloned()
    }

    /// Returns whether the set contains all bytes of a range.
    pub fn contains(&self, range: &Range<u64>) -> bool {
        let behind = self.0.partition_point(|known| known.start <= range.start);
        range.is_empty() || behind.checked_sub(1).is_some_and(|before| self.0[before].end >= range.end)
    }

    /// Returns the number of bytes in the set.
    pub fn len_bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }
}

/// The bytes of a file that this process can read from the metadata mirror, and the dtshard processes that see the file.
#[derive(Clone, Debug)]
pub struct LocalContent {
    /// The byte ranges of the file that the mirror contains.
    pub available: Arc<Ranges>,
    /// The numbers of the dtshard processes that see the file, ascending.
    pub seen_by: Arc<[u32]>,
    /// The latest modification time that any process reports, in seconds and nanoseconds since 1970. The time may differ
    /// between copies of the file on different nodes.
    pub modified: (i64, i64),
}

/// The files of the metadata mirror. The key is the path of a file in the mirror.
pub type MirroredFiles = HashMap<PathBuf, LocalContent>;

/// The original of a file in the metadata mirror. This process may see the original file or not.
#[derive(Clone, Debug)]
pub struct LocalFile {
    /// The path of the original file, as the user knows it.
    pub path: PathBuf,
    /// The modification time that this process sees, in seconds and nanoseconds since 1970; `None` if this process does not
    /// see the file.
    pub own_modified: Option<(i64, i64)>,
}

/// The action that is performed before each read of a file.
#[derive(Clone, Debug)]
pub(super) enum ReadCheck {
    /// The range that will be read is recorded.
    Record(FileId, ReadLog),
    /// The read fails if the mirror does not contain the range.
    Limit(LocalContent),
}

/// The ranges that have been read, in the order of the reads.
pub(super) type ReadLog = Arc<Mutex<Vec<FileRange>>>;

impl ReadCheck {
    /// Records or checks a range of the file that is about to be read.
    pub fn before_read(&self, path: &Path, offset: u64, len: u64) -> Result<()> {
        match self {
            Self::Record(file, log) => {
                let mut log = log.lock().expect("no panic while the lock is held");
                log.push(FileRange { file: *file, offset, len });
                Ok(())
            }
            Self::Limit(LocalContent { available: held, seen_by, .. }) => {
                let range = offset..offset.saturating_add(len);
                if held.contains(&range) {
                    return Ok(());
                }
                Err(Error::missing(
                    path,
                    format!("byte {offset}"),
                    format!("{len} bytes of tensor data"),
                    format!("the file, which only {} can see", name_processes(seen_by)),
                )
                .missing_hint(
                    "with options::source per-rank a process can read tensor data only from files that it sees",
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_ranges_are_joined() {
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
