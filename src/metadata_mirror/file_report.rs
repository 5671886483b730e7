//! Sightings: what ranks tell each other of their files, and whether those of one name are one.
//!
//! All ranks merge the same words in the same order, so all come to the same result, or to the same error.

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

/// What a rank tells of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileReport {
    path: String,
    /// `None` for a link that leads nowhere.
    found: Option<FoundFile>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FoundFile {
    len: u64,
    modified: (i64, i64),
    metadata: Vec<HashedRange>,
    /// It may be a part of the checkpoint, and no log or script that happens to lie there.
    counts: bool,
}

/// A range of metadata: start, end, and a hash of what is there.
type HashedRange = (u64, u64, u64);

/// What differs, and how.
type Difference = (&'static str, String);

/// A file, by all that ranks tell.
#[derive(Debug)]
pub struct ReportedFile {
    pub path: PathBuf,
    /// `None` where all that is there is a link that leads nowhere.
    pub len: Option<u64>,
    /// The latest time at which it was changed somewhere.
    pub modified: (i64, i64),
    /// The time on this rank, where that sees it.
    pub own: Option<(i64, i64)>,
    pub held: Arc<Ranges>,
    /// The ranks that see it, ascending.
    pub by: Arc<[u32]>,
    /// Those that see another one under this name.
    pub not_taken: Vec<u32>,
    /// The rank that writes its twin.
    pub writer: u32,
}

/// Stretches are read in blocks of this many bytes.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// Look at those of the files that are `wanted`.
///
/// # Errors
/// `Io`, and what finding metadata gives; of several faults the first.
pub fn look(
    walked: &FileInventory,
    wanted: &impl Fn(&Path) -> bool,
    metadata_ranges: &(dyn Fn(&Path) -> Result<Ranges> + Sync),
) -> Result<Vec<FileReport>> {
    let files: Vec<&PathBuf> = walked.files.iter().filter(|path| wanted(path)).collect();
    let looked: Vec<Result<FileReport>> = files
        .into_par_iter()
        .map(|path| {
            let found = FoundFile::of(&walked.folder.join(path), || metadata_ranges(path))?;
            Ok(FileReport { path: text(path), found: Some(found) })
        })
        .collect();
    let dangling = walked.dangling.iter().filter(|path| wanted(path));
    let dangling = dangling.map(|path| Ok(FileReport { path: text(path), found: None }));
    looked.into_iter().chain(dangling).collect()
}

fn text(path: &Path) -> String {
    path.to_str().expect("names that are not UTF-8 were refused").to_owned()
}

impl FoundFile {
    fn of(path: &Path, metadata_ranges: impl FnOnce() -> Result<Ranges>) -> Result<Self> {
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
            counts: is_read(path)?,
        })
    }

    /// Where two that should be one differ, and what each has there.
    fn difference(&self, other: &Self) -> Option<Difference> {
        if self.len != other.len {
            return Some(("the length", format!("{} and {} bytes", self.len, other.len)));
        }
        let both = self.metadata.iter().zip(&other.metadata);
        let first = both.clone().find(|(one, other)| one != other).map(|(one, other)| one.0.min(other.0));
        let at = first.or_else(|| {
            let behind = self.metadata.get(both.len()).or_else(|| other.metadata.get(both.len()));
            behind.map(|bone| bone.0)
        })?;
        Some(("the file", format!("bytes from {at} on, which are no tensor data, are not the same")))
    }
}

/// Give out a stretch of a file, block by block, with the offset of each.
///
/// # Errors
/// `Io`, and what `each` gives.
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

/// The files of all ranks. `own` is where `rank`, this one, has its own.
///
/// # Errors
/// `Conflict` where files of one name differ, `Comm` for words that no rank says.
pub fn merge(own: &Path, rank: u32, heard: Vec<Vec<FileReport>>) -> Result<BTreeMap<PathBuf, ReportedFile>> {
    let mut all: BTreeMap<PathBuf, Told> = BTreeMap::new();
    for (teller, sightings) in (0..).zip(heard) {
        for FileReport { path, found } in sightings {
            let path = checked_path(teller, &path)?;
            if let Some(found) = &found {
                check(teller, &path, found)?;
            }
            all.entry(path).or_default().push((teller, found));
        }
    }
    for (path, told) in &all {
        // A folder on another rank, perhaps by way of a link that leads nowhere here.
        if let Some((file, other)) = path.ancestors().skip(1).find_map(|above| all.get_key_value(above)) {
            let difference = ("what it is", String::from("a file and a folder"));
            return Err(conflict(&own.join(file), (other[0].0, told[0].0), difference));
        }
    }
    let merged = all.into_iter().map(|(path, told)| {
        let seen = ReportedFile::of(&path, rank, &told)
            .map_err(|(ranks, difference)| conflict(&own.join(&path), ranks, difference))?;
        Ok((path, seen))
    });
    merged.collect()
}

/// What ranks tell of one file, in their order.
type Told = Vec<(u32, Option<FoundFile>)>;

impl ReportedFile {
    fn of(path: &Path, rank: u32, told: &Told) -> Result<Self, ((u32, u32), Difference)> {
        let mut holders: Vec<(u32, &FoundFile)> =
            told.iter().filter_map(|(teller, found)| Some((*teller, found.as_ref()?))).collect();
        let Some((writer, first)) = holders.first().copied() else {
            let held = Arc::default();
            let writer = told[0].0;
            return Ok(Self {
                path: path.into(),
                len: None,
                modified: (0, 0),
                own: None,
                held,
                by: [].into(),
                not_taken: Vec::new(),
                writer,
            });
        };
        let mut not_taken = Vec::new();
        for (other, found) in &holders[1..] {
            match first.difference(found) {
                None => {}
                Some(difference) if first.counts || found.counts => return Err(((writer, *other), difference)),
                Some(_) => not_taken.push(*other),
            }
        }
        holders.retain(|(holder, _)| !not_taken.contains(holder));
        Ok(Self {
            path: path.into(),
            len: Some(first.len),
            modified: holders.iter().map(|(_, found)| found.modified).max().expect("one at least"),
            own: holders.iter().find(|(holder, _)| *holder == rank).map(|(_, found)| found.modified),
            held: Arc::new(first.metadata.iter().map(|(start, end, _)| *start..*end).collect()),
            by: holders.iter().map(|(holder, _)| *holder).collect(),
            not_taken,
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
            "these may be copies of different saves, one of them stale; files of one name are taken for replicas: if they \
             are not, rename them, or give each its own folder",
        )),
    })
}

/// Others are of this program, but it may be another version or another run.
fn checked_path(rank: u32, path: &str) -> Result<PathBuf> {
    let path = Path::new(path);
    if path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_))) {
        return Ok(path.to_path_buf());
    }
    Err(Error::comm(rank, "tell of files", format!("`{}` is no file below SRC", path.display())))
}

fn check(rank: u32, path: &Path, found: &FoundFile) -> Result<()> {
    let mut end = 0;
    for (start, stop, _) in &found.metadata {
        if *start < end || stop <= start || *stop > found.len {
            let what = format!("{}: bytes {start} to {stop} of {}", path.display(), found.len);
            return Err(Error::comm(rank, "tell of files", what));
        }
        end = *stop;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sighting(path: &str, len: u64, metadata: &[HashedRange]) -> FileReport {
        let found = FoundFile { len, modified: (5, 0), metadata: metadata.to_vec(), counts: true };
        FileReport { path: path.into(), found: Some(found) }
    }

    fn refused(heard: Vec<Vec<FileReport>>) -> String {
        merge(Path::new("/src"), 0, heard).unwrap_err().to_string()
    }

    #[test]
    fn words_that_lead_out_of_a_twin_or_a_file_are_refused() {
        for path in ["../x", "/etc/passwd", "", ".", "a/../../x"] {
            let text = refused(vec![vec![], vec![sighting(path, 0, &[])]]);
            assert_eq!(text, format!("process 1: tell of files: `{path}` is no file below SRC"));
        }
        for metadata in [&[(0, 9, 1)][..], &[(3, 2, 1)], &[(2, 4, 1), (3, 5, 1)], &[(0, u64::MAX, 1)], &[(2, 2, 1)]] {
            let text = refused(vec![vec![sighting("a", 8, metadata)]]);
            assert!(text.starts_with("process 0: tell of files: a: bytes"), "{text}");
        }
    }

    #[test]
    fn the_first_byte_in_question_is_told() {
        let one = |metadata: &[HashedRange]| vec![sighting("a", 9, metadata)];
        for (other, at) in [
            (vec![(0, 2, 7), (4, 6, 9)], 4),
            (vec![(0, 2, 9), (4, 6, 8)], 0),
            (vec![(0, 2, 7), (3, 6, 8)], 3),
            (vec![(0, 2, 7)], 4),
            (vec![(0, 2, 7), (4, 6, 8), (8, 9, 1)], 8),
        ] {
            let text = refused(vec![vec![], one(&[(0, 2, 7), (4, 6, 8)]), one(&other)]);
            assert!(text.contains(&format!("between processes 1 and 2: bytes from {at} on")), "{text}");
        }
    }

    #[test]
    fn a_file_is_no_folder_elsewhere() {
        let link = FileReport { path: "a".into(), found: None };
        let text = refused(vec![vec![link.clone()], vec![sighting("a/b", 0, &[])]]);
        assert_eq!(text, "/src/a: what it is differs between processes 0 and 1: a file and a folder");
        // Where it leads somewhere on one rank, it is what it is there.
        let merged = merge(Path::new("/src"), 1, vec![vec![link], vec![sighting("a", 3, &[(0, 3, 1)])]]).unwrap();
        let seen = &merged[Path::new("a")];
        assert_eq!((seen.len, seen.writer, &*seen.by, seen.own), (Some(3), 1, &[1][..], Some((5, 0))));
    }
}
