//! File reports: descriptions of the files of SRC that processes send to each other, and the check that files with
//! equal paths have equal metadata.
//!
//! All sizes and offsets are in bytes. All processes merge the same reports in the same order, so the result, or the
//! error, is equal in all processes.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::file_inventory::FileInventory;
use crate::error::{CatalogError, Error, Result};
use crate::format::is_read;
use crate::storage::{Ranges, regular_file};

/// The report of one process about one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileReport {
    path: String,
    /// The properties of the file; `None` if the path is a dangling link on the node of the process that reports it.
    found: Option<FoundFile>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FoundFile {
    len: u64,
    modified: (i64, i64),
    metadata: Vec<HashedRange>,
    /// True if the file may be part of the checkpoint. False, for example, for a log or a script in the folder of the
    /// checkpoint.
    is_checkpoint_data: bool,
}

/// A range of metadata: the offset of its start, the offset of its end, and a hash of its bytes.
type HashedRange = (u64, u64, u64);

/// The name of a property that differs between two reports, and a text with the values in both reports.
type Difference = (&'static str, String);

/// A file of SRC, merged from the reports of all processes.
#[derive(Debug)]
pub struct ReportedFile {
    /// The path, relative to the folder of SRC.
    pub path: PathBuf,
    /// The length in bytes; `None` if the path is a dangling link for every process that reports it.
    pub len: Option<u64>,
    /// The latest modification time that a process sees, in seconds and nanoseconds since 1970.
    pub modified: (i64, i64),
    /// The modification time that this process sees. `None` if this process sees no file at this path, or a file that
    /// differs from the file of the lowest process.
    pub own_modified: Option<(i64, i64)>,
    /// The byte ranges of the file that the mirror contains.
    pub mirrored: Arc<Ranges>,
    /// The numbers of the processes that see the file, in ascending order. Processes in `differing_ranks` are not
    /// included.
    pub seen_by: Arc<[u32]>,
    /// The numbers of the processes whose file at this path differs from the file of the lowest process. The list is
    /// empty for a file that may be part of the checkpoint, because a difference is then an error.
    pub differing_ranks: Vec<u32>,
    /// The number of the process that writes this file into the mirror.
    pub writer: u32,
}

/// The maximum number of bytes of a file that are read and hashed in one step.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// Returns reports about the files of `inventory` that `is_selected` selects, for the other processes.
///
/// # Errors
/// `Io`, and the errors of finding metadata. If there are several errors, returns the first.
pub fn report_files(
    inventory: &FileInventory,
    is_selected: &impl Fn(&Path) -> bool,
    metadata_ranges: &(dyn Fn(&Path) -> Result<Ranges> + Sync),
) -> Result<Vec<FileReport>> {
    let files: Vec<&PathBuf> = inventory.files.iter().filter(|path| is_selected(path)).collect();
    let reports: Vec<Result<FileReport>> = files
        .into_par_iter()
        .map(|path| {
            let found = FoundFile::read(&inventory.folder.join(path), || metadata_ranges(path))?;
            Ok(FileReport { path: text(path), found: Some(found) })
        })
        .collect();
    let dangling = inventory.dangling.iter().filter(|path| is_selected(path));
    let dangling = dangling.map(|path| Ok(FileReport { path: text(path), found: None }));
    reports.into_iter().chain(dangling).collect()
}

fn text(path: &Path) -> String {
    path.to_str().expect("names that are not UTF-8 were refused").to_owned()
}

impl FoundFile {
    fn read(path: &Path, metadata_ranges: impl FnOnce() -> Result<Ranges>) -> Result<Self> {
        let metadata = regular_file(path)?;
        let ranges = metadata_ranges()?;
        let file = File::open(path).map_err(Error::io("open", path))?;
        let mut hashed = Vec::new();
        for range in ranges.iter() {
            let mut hasher = blake3::Hasher::new();
            each_block(&file, path, range.clone(), &mut |_, block| {
                hasher.update(block);
                Ok(())
            })?;
            let hash = hasher.finalize();
            let (short, _) = hash.as_bytes().split_first_chunk().expect("32 bytes");
            hashed.push((range.start, range.end, u64::from_le_bytes(*short)));
        }
        Ok(Self {
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            metadata: hashed,
            is_checkpoint_data: is_read(path)?,
        })
    }

    /// Returns the first difference between two reports of one file.
    fn difference(&self, other: &Self) -> Option<Difference> {
        if self.len != other.len {
            return Some(("the length", format!("{} and {} bytes", self.len, other.len)));
        }
        let both = self.metadata.iter().zip(&other.metadata);
        let first = both.clone().find(|(one, other)| one != other).map(|(one, other)| one.0.min(other.0));
        let at = first.or_else(|| {
            let behind = self.metadata.get(both.len()).or_else(|| other.metadata.get(both.len()));
            behind.map(|range| range.0)
        })?;
        Some(("the file", format!("the bytes from {at} on, which are not tensor data, differ")))
    }
}

/// Calls `each` for each block of a range of a file, with the bytes and the offset of the block.
///
/// # Errors
/// `Io`, and the errors of `each`.
pub fn each_block(
    file: &File,
    path: &Path,
    range: Range<u64>,
    each: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut buffer = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let len = BLOCK_BYTES.min(range.end - at);
        buffer.resize(usize::try_from(len).expect("a block fits memory"), 0);
        file.read_exact_at(&mut buffer, at).map_err(Error::io("read", path))?;
        each(at, &buffer)?;
        at += len;
    }
    Ok(())
}

/// Merges the reports of all processes into one list of files. `rank` is the number of this process, and `own` is the
/// folder of SRC on this process. `reports` has the reports of each process.
///
/// # Errors
/// `Conflict` if processes have different checkpoint files under one path, or a file and a folder; `Comm` for invalid
/// reports.
pub fn merge_reports(own: &Path, rank: u32, reports: Vec<Vec<FileReport>>) -> Result<BTreeMap<PathBuf, ReportedFile>> {
    let mut all: BTreeMap<PathBuf, RankReports> = BTreeMap::new();
    for (sender, files) in (0..).zip(reports) {
        for FileReport { path, found } in files {
            let path = checked_path(sender, &path)?;
            if let Some(found) = &found {
                check(sender, &path, found)?;
            }
            all.entry(path).or_default().push((sender, found));
        }
    }
    for (path, reports) in &all {
        // On another rank, this path is a folder, perhaps through a link that is dangling on this rank.
        if let Some((file, other)) = path.ancestors().skip(1).find_map(|above| all.get_key_value(above)) {
            let difference = ("the kind of entry", String::from("a file and a folder"));
            return Err(conflict(&own.join(file), (other[0].0, reports[0].0), difference));
        }
    }
    let merged = all.into_iter().map(|(path, reports)| {
        let seen = ReportedFile::merge(&path, rank, &reports)
            .map_err(|(ranks, difference)| conflict(&own.join(&path), ranks, difference))?;
        Ok((path, seen))
    });
    merged.collect()
}

/// The reports about one file, each with the number of the process that made it. A report is `None` if the path is a
/// dangling link on the node of this process.
type RankReports = Vec<(u32, Option<FoundFile>)>;

impl ReportedFile {
    fn merge(path: &Path, rank: u32, reports: &RankReports) -> Result<Self, ((u32, u32), Difference)> {
        let mut holders: Vec<(u32, &FoundFile)> =
            reports.iter().filter_map(|(sender, found)| Some((*sender, found.as_ref()?))).collect();
        let Some((writer, first)) = holders.first().copied() else {
            let mirrored = Arc::default();
            let writer = reports[0].0;
            return Ok(Self {
                path: path.into(),
                len: None,
                modified: (0, 0),
                own_modified: None,
                mirrored,
                seen_by: [].into(),
                differing_ranks: Vec::new(),
                writer,
            });
        };
        let mut not_taken = Vec::new();
        for (other, found) in &holders[1..] {
            match first.difference(found) {
                None => {}
                Some(difference) if first.is_checkpoint_data || found.is_checkpoint_data => {
                    return Err(((writer, *other), difference));
                }
                Some(_) => not_taken.push(*other),
            }
        }
        holders.retain(|(holder, _)| !not_taken.contains(holder));
        Ok(Self {
            path: path.into(),
            len: Some(first.len),
            modified: holders.iter().map(|(_, found)| found.modified).max().expect("one at least"),
            own_modified: holders.iter().find(|(holder, _)| *holder == rank).map(|(_, found)| found.modified),
            mirrored: Arc::new(first.metadata.iter().map(|(start, end, _)| *start..*end).collect()),
            seen_by: holders.iter().map(|(holder, _)| *holder).collect(),
            differing_ranks: not_taken,
            writer,
        })
    }
}

fn conflict(path: &Path, (first, second): (u32, u32), (what, detail): Difference) -> Error {
    Error::Catalog(CatalogError::Conflict {
        fqn: path.display().to_string(),
        what,
        between: format!("processes {first} and {second}"),
        detail,
        hint: Some(String::from(
            "make files of one name equal, because they are treated as replicas: delete stale copies of another save, \
             or rename files that are not replicas",
        )),
    })
}

/// Checks that a path which another process sent is below the folder of SRC. `rank` is the number of that process. It
/// may be another version of this program, or belong to another run.
fn checked_path(rank: u32, path: &str) -> Result<PathBuf> {
    let path = Path::new(path);
    if path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_))) {
        return Ok(path.to_path_buf());
    }
    Err(Error::comm(rank, "exchange file reports", format!("`{}` is not a path below SRC", path.display())))
}

fn check(rank: u32, path: &Path, found: &FoundFile) -> Result<()> {
    let mut end = 0;
    for (start, stop, _) in &found.metadata {
        if *start < end || stop <= start || *stop > found.len {
            let what = format!(
                "{}: expected ascending ranges inside the file of {} bytes, found bytes {start} to {stop}",
                path.display(),
                found.len
            );
            return Err(Error::comm(rank, "exchange file reports", what));
        }
        end = *stop;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(path: &str, len: u64, metadata: &[HashedRange]) -> FileReport {
        let found = FoundFile { len, modified: (5, 0), metadata: metadata.to_vec(), is_checkpoint_data: true };
        FileReport { path: path.into(), found: Some(found) }
    }

    fn refused(reports: Vec<Vec<FileReport>>) -> String {
        merge_reports(Path::new("/src"), 0, reports).unwrap_err().to_string()
    }

    #[test]
    fn report_with_path_or_range_outside_is_an_error() {
        for path in ["../x", "/etc/passwd", "", ".", "a/../../x"] {
            let text = refused(vec![vec![], vec![report(path, 0, &[])]]);
            assert_eq!(text, format!("process 1: exchange file reports: `{path}` is not a path below SRC"));
        }
        for metadata in [&[(0, 9, 1)][..], &[(3, 2, 1)], &[(2, 4, 1), (3, 5, 1)], &[(0, u64::MAX, 1)], &[(2, 2, 1)]] {
            let text = refused(vec![vec![report("a", 8, metadata)]]);
            assert!(text.starts_with("process 0: exchange file reports: a: expected ascending ranges"), "{text}");
        }
    }

    #[test]
    fn conflict_names_the_first_different_byte() {
        let one = |metadata: &[HashedRange]| vec![report("a", 9, metadata)];
        for (other, at) in [
            (vec![(0, 2, 7), (4, 6, 9)], 4),
            (vec![(0, 2, 9), (4, 6, 8)], 0),
            (vec![(0, 2, 7), (3, 6, 8)], 3),
            (vec![(0, 2, 7)], 4),
            (vec![(0, 2, 7), (4, 6, 8), (8, 9, 1)], 8),
        ] {
            let text = refused(vec![vec![], one(&[(0, 2, 7), (4, 6, 8)]), one(&other)]);
            assert!(text.contains(&format!("between processes 1 and 2: the bytes from {at} on")), "{text}");
        }
    }

    #[test]
    fn file_and_folder_of_one_name_conflict() {
        let link = FileReport { path: "a".into(), found: None };
        let text = refused(vec![vec![link.clone()], vec![report("a/b", 0, &[])]]);
        assert_eq!(text, "/src/a: the kind of entry differs between processes 0 and 1: a file and a folder");
        // If the link points to a file on any rank, the merged entry is that file.
        let merged = merge_reports(Path::new("/src"), 1, vec![vec![link], vec![report("a", 3, &[(0, 3, 1)])]]).unwrap();
        let seen = &merged[Path::new("a")];
        assert_eq!((seen.len, seen.writer, &*seen.seen_by, seen.own_modified), (Some(3), 1, &[1][..], Some((5, 0))));
    }
}
