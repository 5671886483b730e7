//! Sightings: what ranks tell each other of their files, and whether those of one name are one.
//!
//! All ranks merge the same words in the same order, so all come to the same result, or to the same error.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::walk::Walked;
use crate::error::{Error, Result};
use crate::storage::{Ranges, regular_file};

/// What a rank tells of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sighting {
    path: String,
    /// `None` for a link that leads nowhere.
    found: Option<Found>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Found {
    len: u64,
    modified: (i64, i64),
    skeleton: Vec<Bone>,
}

/// A stretch of a skeleton: start, end, and a hash of what is there.
type Bone = (u64, u64, u64);

/// A file, by all that ranks tell.
#[derive(Debug)]
pub struct Seen {
    pub path: PathBuf,
    /// `None` where all that is there is a link that leads nowhere.
    pub len: Option<u64>,
    /// The latest time at which it was changed somewhere.
    pub modified: (i64, i64),
    /// The time on this rank, where that sees it.
    pub own: Option<(i64, i64)>,
    pub held: Arc<Ranges>,
    /// Ascending.
    pub seen_by: Arc<[u32]>,
    /// The rank that writes its twin.
    pub writer: u32,
}

/// Stretches are read in blocks of this many bytes.
pub const BLOCK_BYTES: u64 = 1 << 20;

/// Look at those of the files that are `wanted`.
///
/// # Errors
/// `Io`, and what finding a skeleton gives; of several faults the first.
pub fn look(
    walked: &Walked,
    wanted: &impl Fn(&Path) -> bool,
    skeleton: &(dyn Fn(&Path) -> Result<Ranges> + Sync),
) -> Result<Vec<Sighting>> {
    let files: Vec<&PathBuf> = walked.files.iter().filter(|path| wanted(path)).collect();
    let looked: Vec<Result<Sighting>> = files
        .into_par_iter()
        .map(|path| {
            let found = Found::of(&walked.folder.join(path), || skeleton(path))?;
            Ok(Sighting { path: text(path), found: Some(found) })
        })
        .collect();
    let dangling = walked.dangling.iter().filter(|path| wanted(path));
    let dangling = dangling.map(|path| Ok(Sighting { path: text(path), found: None }));
    looked.into_iter().chain(dangling).collect()
}

fn text(path: &Path) -> String {
    path.to_str().expect("names that are not UTF-8 were refused").to_owned()
}

impl Found {
    fn of(path: &Path, skeleton: impl FnOnce() -> Result<Ranges>) -> Result<Self> {
        let metadata = regular_file(path)?;
        let ranges = skeleton()?;
        let file = File::open(path).map_err(Error::io("open", path))?;
        let mut bones = Vec::new();
        for range in ranges.iter() {
            let mut hasher = blake3::Hasher::new();
            each_block(&file, path, range.clone(), &mut |_, block| {
                hasher.update(block);
                Ok(())
            })?;
            let hash = hasher.finalize();
            let (short, _) = hash.as_bytes().split_first_chunk().expect("32 bytes");
            bones.push((range.start, range.end, u64::from_le_bytes(*short)));
        }
        Ok(Self { len: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()), skeleton: bones })
    }

    /// Where two that should be one differ, and what each has there.
    fn difference(&self, other: &Self) -> Option<(&'static str, String)> {
        if self.len != other.len {
            return Some(("the length", format!("{} and {} bytes", self.len, other.len)));
        }
        let both = self.skeleton.iter().zip(&other.skeleton);
        let first = both.clone().find(|(one, other)| one != other).map(|(one, other)| one.0.min(other.0));
        let at = first.or_else(|| {
            let behind = self.skeleton.get(both.len()).or_else(|| other.skeleton.get(both.len()));
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
pub fn merge(own: &Path, rank: u32, heard: Vec<Vec<Sighting>>) -> Result<BTreeMap<PathBuf, Seen>> {
    let mut first: BTreeMap<PathBuf, (u32, Option<Found>)> = BTreeMap::new();
    let mut all: BTreeMap<PathBuf, (Vec<u32>, (i64, i64), Option<(i64, i64)>)> = BTreeMap::new();
    for (teller, sightings) in (0..).zip(heard) {
        for Sighting { path, found } in sightings {
            let path = checked_path(teller, &path)?;
            if let Some(found) = &found {
                check(teller, &path, found)?;
                let (ranks, modified, here) = all.entry(path.clone()).or_insert((Vec::new(), found.modified, None));
                ranks.push(teller);
                *modified = found.modified.max(*modified);
                *here = here.or((teller == rank).then_some(found.modified));
            }
            match first.entry(path) {
                Entry::Vacant(entry) => _ = entry.insert((teller, found)),
                Entry::Occupied(mut entry) => match (entry.get(), found) {
                    (_, None) => {}
                    ((_, None), found) => _ = entry.insert((teller, found)),
                    ((other, Some(known)), Some(found)) => {
                        if let Some(difference) = known.difference(&found) {
                            return Err(conflict(&own.join(entry.key()), (*other, teller), difference));
                        }
                    }
                },
            }
        }
    }
    let seen = first.into_iter().map(|(path, (writer, found))| {
        let (ranks, modified, own) = all.remove(&path).unwrap_or_default();
        let len = found.as_ref().map(|found| found.len);
        let held = found.iter().flat_map(|found| &found.skeleton).map(|(start, end, _)| *start..*end).collect();
        let seen = Seen { path: path.clone(), len, modified, own, held: Arc::new(held), seen_by: ranks.into(), writer };
        (path, seen)
    });
    Ok(seen.collect())
}

fn conflict(path: &Path, (first, second): (u32, u32), (what, detail): (&'static str, String)) -> Error {
    Error::Conflict {
        fqn: path.display().to_string(),
        what,
        between: format!("ranks {first} and {second}"),
        detail,
        hint: Some(String::from(
            "files of one name are taken for replicas; if they are not, rename them, or give each its own folder",
        )),
    }
}

/// Others are of this program, but it may be another version or another run.
fn checked_path(rank: u32, path: &str) -> Result<PathBuf> {
    let path = Path::new(path);
    if path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_))) {
        return Ok(path.to_path_buf());
    }
    Err(Error::comm(rank, "tell of files", format!("`{}` is no file below SRC", path.display())))
}

fn check(rank: u32, path: &Path, found: &Found) -> Result<()> {
    let mut end = 0;
    for (start, stop, _) in &found.skeleton {
        if *start < end || stop <= start || *stop > found.len {
            let what = format!("{}: bytes {start} to {stop} of {}", path.display(), found.len);
            return Err(Error::comm(rank, "tell of files", what));
        }
        end = *stop;
    }
    Ok(())
}
