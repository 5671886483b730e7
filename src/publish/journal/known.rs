//! What all journals of a folder say together.
//!
//! Journals come from processes that were killed, and from nodes that went down: a torn end is no error, it says less.
//! Whatever is wrong in a journal, it and what stands behind it in that file is work that is done again.
//!
//! Counts bytes. Invariant: `done` lies within the files, no stretch of it was taken from two entries, and `sums` lie in
//! `done`, each in one span.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::{Doubt, Durability, EXTENSION, LONGEST_LINE, Record, of_line, this_boot};
use crate::catalog::OutputFile;
use crate::error::{Error, Result};
use crate::exec::digest::{Digest, for_each_block};
use crate::exec::{CastLosses, Entry, Extents, Reporter, Stop, SumPart, add_lost};
use crate::storage::{AnchoredPath, afresh};

/// What is finished.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    pub done: Extents,
    /// By file, ascending: the parts of spans whose sum is not in the file yet.
    pub sums: BTreeMap<u32, Vec<SumPart>>,
    /// What casts met on the way.
    pub lost: CastLosses,
    /// Carried files, by their number.
    pub carried: BTreeSet<u32>,
    /// What `done` was taken from.
    pub taken: Vec<Taken>,
    /// What is also recorded of some of the same bytes, by a process that was taken for dead, say.
    spare: Vec<Taken>,
}

/// A stretch that is recorded as finished, and by whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    journal: Arc<str>,
    pub file: u32,
    pub range: Range<u64>,
    pub digest: u32,
}

impl Taken {
    /// Of its bytes; none is empty.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn doubt(&self) -> Doubt {
        Doubt { journal: self.journal.to_string(), file: self.file, start: self.range.start }
    }
}

impl Known {
    /// Read every journal of `folder`, about these files and this many carried ones. `sync` says that what is finished is
    /// to be on disk, so that records of what may not be there say nothing.
    ///
    /// # Errors
    /// `Io` where the folder or a journal cannot be read.
    pub fn read(folder: &AnchoredPath, files: &[OutputFile], carried: usize, sync: bool) -> Result<Self> {
        let mut known = Self::default();
        let here = this_boot().filter(|_| !sync).map(|boot| Durability::Unsynced { boot: Some(boot) });
        let mut records: Vec<(Arc<str>, Record)> = Vec::new();
        for path in journals(folder)? {
            let name: Arc<str> = path.file_name().to_string_lossy().into();
            for_each_record(&path, |record, durability| {
                if !is_possible(&record, files, carried) {
                    return false;
                }
                if durability == Durability::Synced || Some(&durability) == here.as_ref() {
                    records.push((Arc::clone(&name), record));
                }
                true
            })?;
        }
        let doubts: HashSet<Doubt> = records.iter().flat_map(|(_, record)| record.doubts.iter().cloned()).collect();
        for (journal, record) in records {
            known.take(&journal, record, &doubts);
        }
        for (file, sums) in &mut known.sums {
            sums.sort_unstable_by_key(|part| part.offset);
            SumPart::join(sums, &files[*file as usize]);
        }
        Ok(known)
    }

    fn take(&mut self, journal: &Arc<str>, record: Record, doubts: &HashSet<Doubt>) {
        for Entry { file, range, digest, sums, lost } in record.entries {
            let taken = Taken { journal: Arc::clone(journal), file, range: range.clone(), digest };
            if !doubts.is_empty() && doubts.contains(&taken.doubt()) {
                continue;
            }
            if self.done.overlaps(file, &range) {
                // Its sums and counts belong to all of it or to nothing.
                self.spare.push(taken);
                continue;
            }
            self.taken.push(taken);
            self.done.insert(file, range);
            if !sums.is_empty() {
                self.sums.entry(file).or_default().extend(sums);
            }
            add_lost(&mut self.lost, &lost);
        }
        self.carried.extend(record.carried);
    }

    /// How much of what is done is in each journal.
    #[must_use]
    pub fn len_bytes_by_journal(&self) -> HashMap<Arc<str>, u64> {
        let mut lengths = HashMap::new();
        for taken in &self.taken {
            *lengths.entry(Arc::clone(&taken.journal)).or_default() += taken.len_bytes();
        }
        lengths
    }

    /// The doubts after which none of these bytes counts as done, whoever else has recorded them.
    #[must_use]
    pub fn doubts(&self, doubted: &[&Taken]) -> Vec<Doubt> {
        let mut bytes = Extents::new();
        doubted.iter().for_each(|taken| bytes.insert(taken.file, taken.range.clone()));
        let spare = self.spare.iter().filter(|taken| bytes.overlaps(taken.file, &taken.range));
        doubted.iter().copied().chain(spare).map(Taken::doubt).collect()
    }
}

/// Whether nobody has recorded anything in a folder.
///
/// # Errors
/// `Io` where the folder cannot be read.
pub fn is_empty(folder: &AnchoredPath) -> Result<bool> {
    journals(folder).map(|journals| journals.is_empty())
}

/// In the order of their names, so that everybody reads the same.
fn journals(folder: &AnchoredPath) -> Result<Vec<AnchoredPath>> {
    let mut names = folder.names().map_err(Error::io("list", folder))?;
    names.retain(|name| Path::new(name).extension().is_some_and(|extension| extension == EXTENSION));
    names.sort_unstable();
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

/// Hand out the records of a journal until one is damaged, or `take` says that it is.
fn for_each_record(path: &AnchoredPath, mut take: impl FnMut(Record, Durability) -> bool) -> Result<()> {
    let mut reader = BufReader::new(afresh::open(path).map_err(Error::io("open", path))?);
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
    record.entries.iter().all(is_entry_possible)
        && record.carried.iter().all(|number| (*number as usize) < carried)
        && record.doubts.iter().all(|doubt| (doubt.file as usize) < files.len())
}

/// A recorded stretch that is not what was written.
#[derive(Clone, Debug)]
pub struct Changed {
    pub taken: Taken,
    pub found: u32,
}

/// The recorded stretches that reach into `own` and are not what was written, in `folder`.
///
/// # Errors
/// `Io`, `Stopped`.
pub fn changed(
    known: &Known,
    own: &Extents,
    folder: &AnchoredPath,
    files: &[OutputFile],
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Vec<Changed>> {
    let is_own = |taken: &&Taken| own.overlaps(taken.file, &taken.range);
    let found = |taken: &Taken| -> Result<Option<Changed>> {
        let found = of_file(&files[taken.file as usize], folder, &taken.range, reporter, stop)?;
        Ok((found != taken.digest).then(|| Changed { taken: taken.clone(), found }))
    };
    let found: Vec<Result<Option<Changed>>> = known.taken.par_iter().filter(is_own).map(found).collect();
    found.into_iter().filter_map(Result::transpose).collect()
}

fn of_file(
    file: &OutputFile,
    folder: &AnchoredPath,
    range: &Range<u64>,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<u32> {
    let path = folder.join(&file.path);
    let open = path.open().map_err(Error::io("open", &path))?;
    let mut digest = Digest::new(file, range);
    for_each_block(&open, path.path(), range, |block| {
        digest.update(block);
        reporter.advance(block.len() as u64);
        stop.check()
    })?;
    Ok(digest.finish())
}
