//! What all journals of a folder say together.
//!
//! Journals come from processes that were killed, and from nodes that went down: a torn end is no error, it says less.
//! Whatever is wrong in a journal, it and what stands behind it in that file is work that is done again.
//!
//! Counts bytes. Invariant: `done` lies within the files, no stretch of it was taken from two entries, and `sums` lie in
//! `done`, each in one span.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::{Durability, EXTENSION, Entry, LONGEST_LINE, Record, SumPart, of_line, this_boot};
use crate::catalog::OutputFile;
use crate::error::{Error, Result};
use crate::exec::carry::Carried;
use crate::exec::cast::Counts;
use crate::exec::copy::DtypePair;
use crate::exec::extents::Extents;
use crate::storage::regular_file;

/// What is finished.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    pub done: Extents,
    /// By file, ascending: the parts of spans whose sum is not in the file yet.
    pub sums: BTreeMap<u32, Vec<SumPart>>,
    /// What casts met on the way.
    pub lost: BTreeMap<DtypePair, Counts>,
    /// Carried files, by their number.
    pub carried: BTreeSet<u32>,
}

impl Known {
    /// Read every journal of `folder`, about these files and this many carried ones. `sync` says that what is finished is
    /// to be on disk, so that records of what may not be there say nothing.
    ///
    /// # Errors
    /// `Io` where the folder or a journal cannot be read.
    pub fn read(folder: &Path, files: &[OutputFile], carried: usize, sync: bool) -> Result<Self> {
        let mut known = Self::default();
        let here = this_boot().filter(|_| !sync).map(|boot| Durability::Unsynced { boot: Some(boot) });
        for path in journals(folder)? {
            for_each_record(&path, |record, durability| {
                if !is_possible(&record, files, carried) {
                    return false;
                }
                if durability == Durability::Synced || Some(&durability) == here.as_ref() {
                    known.take(record);
                }
                true
            })?;
        }
        for (file, sums) in &mut known.sums {
            sums.sort_unstable_by_key(|part| part.offset);
            SumPart::join(sums, &files[*file as usize]);
        }
        Ok(known)
    }

    fn take(&mut self, record: Record) {
        for Entry { file, range, sums } in record.entries {
            if self.done.overlaps(file, &range) {
                // Its sums belong to all of it or to nothing.
                continue;
            }
            self.done.insert(file, range);
            if !sums.is_empty() {
                self.sums.entry(file).or_default().extend(sums);
            }
        }
        for (pair, counts) in record.lost {
            self.lost.entry(pair).or_default().add(counts);
        }
        self.carried.extend(record.carried);
    }

    /// Check that files of which something is recorded are in `folder`, the output, with the size they are to have. They
    /// are made with it before anything is recorded, so somebody else was at work where one is not.
    ///
    /// # Errors
    /// `Usage` naming the first one that is not, `Io` where one cannot be looked at.
    pub fn check(&self, folder: &Path, files: &[OutputFile], carried: &[Carried]) -> Result<()> {
        let written = self.done.files().map(|index| &files[index as usize]).map(|file| (&file.path, file.len));
        let copied = self.carried.iter().map(|index| &carried[*index as usize]).map(|file| (&file.to, file.len));
        let recorded: Vec<(&PathBuf, u64)> = written.chain(copied).collect();
        // A network file system takes its time for each.
        let found: Vec<Result<Option<u64>>> = recorded.par_iter().map(|(path, _)| len_of(&folder.join(path))).collect();
        for ((path, len), found) in recorded.into_iter().zip(found) {
            let found = found?;
            if found != Some(len) {
                let found = found.map_or_else(|| String::from("no file"), |found| format!("{found} bytes"));
                return Err(Error::usage(
                    format!(
                        "{}: expected {len} bytes, of which some are recorded as done, found {found}",
                        folder.join(path).display()
                    ),
                    "something else changed what an earlier run left; --restart throws it away and starts again",
                ));
            }
        }
        Ok(())
    }
}

/// In the order of their names, so that everybody reads the same.
fn journals(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(Error::io("list", folder))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<Vec<_>>>();
    let mut paths = paths.map_err(Error::io("list", folder))?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == EXTENSION));
    paths.sort_unstable();
    Ok(paths)
}

/// Hand out the records of a journal until one is damaged, or `take` says that it is.
fn for_each_record(path: &Path, mut take: impl FnMut(Record, Durability) -> bool) -> Result<()> {
    regular_file(path)?;
    let mut reader = BufReader::new(File::open(path).map_err(Error::io("open", path))?);
    let mut line = Vec::new();
    loop {
        line.clear();
        reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).map_err(Error::io("read", path))?;
        let Some((record, durability)) = of_line(&line) else { return Ok(()) };
        if !take(record, durability) {
            return Ok(());
        }
    }
}

/// Whether a record can be about these files.
pub(super) fn is_possible(record: &Record, files: &[OutputFile], carried: usize) -> bool {
    let is_entry_possible = |entry: &Entry| {
        let Some(file) = files.get(entry.file as usize) else { return false };
        let mut at = entry.range.start;
        let are_sums_within = entry.sums.iter().all(|part| {
            let end = part.offset.checked_add(part.len).filter(|end| part.len > 0 && *end <= entry.range.end);
            let is_free = part.offset >= at;
            at = end.unwrap_or(at);
            let span = file.sum_at(part.offset);
            is_free && end.is_some_and(|end| span.is_some_and(|sum| end <= sum.range.end))
        });
        !entry.range.is_empty() && entry.range.end <= file.len && are_sums_within
    };
    record.entries.iter().all(is_entry_possible) && record.carried.iter().all(|number| (*number as usize) < carried)
}

/// `None` where there is no such file.
fn len_of(path: &Path) -> Result<Option<u64>> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) => Ok(metadata.is_file().then_some(metadata.len())),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(Error::io("look at", path)(error)),
    }
}
