//! Journals: what is finished, told so that it outlives the process.
//!
//! Each process has a journal of its own and only appends to it. A record is one line: what was finished since the one
//! before, as JSON, and the CRC-32 of that. Its data is on disk before it says so; where nothing is synced, a record
//! names the boot it was written on instead, since a node that goes down loses what it had not written back. [`Batch`]
//! collects a record, [`Known`] is what all journals say together.
//!
//! ```text
//!     {"r":{"e":[[0,4096,12288,3735928559,[[4096,512,305419896]],[["f32","f16",7,0]]]],"c":[2]}} 9ae0daaf
//!                |  range      |           |    |    |             |                              CRC-32
//!                file          |           |    |    |             what casts met
//!                              |           |    len  CRC-32 of a part of a span
//!                              digest      offset
//! ```
//!
//! What the files do not bear out is [doubted](Doubt), in a journal, too: nothing is ever taken back by changing one.
//!
//! Counts bytes. Invariant: a record is read back as a whole or not at all, and what stands behind a damaged one is not
//! read.

mod batch;
mod doubt;
mod known;

use std::fs::File;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

pub use batch::Batch;
pub use doubt::{Doubt, doubt};
pub use known::{Changed, Known, Taken, changed, is_empty};

use crate::comm::node::this_boot;
use crate::error::{Error, Result};
use crate::exec::{Entry, SumPart};
use crate::storage::AnchoredPath;

/// What a journal's name ends in.
pub const EXTENSION: &str = "journal";

/// A line that is longer was not written by us: it has more parts of spans than fit memory.
const LONGEST_LINE: u64 = 256 << 20;

/// What was finished since the last record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    #[serde(rename = "e", default, skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<Entry>,
    /// Carried files, by their number.
    #[serde(rename = "c", default, skip_serializing_if = "Vec::is_empty")]
    pub carried: Vec<u32>,
    /// Of other journals, and of what this one says elsewhere.
    #[serde(rename = "d", default, skip_serializing_if = "Vec::is_empty")]
    pub doubts: Vec<Doubt>,
}

impl Record {
    /// Take in what was finished after this.
    pub fn append(&mut self, later: Self) {
        self.entries.extend(later.entries);
        self.carried.extend(later.carried);
        self.doubts.extend(later.doubts);
    }

    /// The parts of spans that are not summed up, with the file each is in.
    pub fn sums(&self) -> impl Iterator<Item = (u32, SumPart)> + '_ {
        self.entries.iter().flat_map(|entry| entry.sums.iter().map(|part| (entry.file, *part)))
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.carried.is_empty() && self.doubts.is_empty()
    }
}

/// What a record promises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Its data is on disk.
    Synced,
    /// Its data is on disk or in the memory of this boot; nobody believes it where the boot is not known.
    Unsynced { boot: Option<String> },
}

impl Durability {
    #[must_use]
    pub fn of(sync: bool) -> Self {
        if sync { Self::Synced } else { Self::Unsynced { boot: this_boot() } }
    }
}

/// The journal that this process writes.
#[derive(Debug)]
pub struct Journal {
    path: AnchoredPath,
    file: File,
    /// Of all complete records.
    len: u64,
}

impl Journal {
    /// Begin a journal, which nobody else has begun.
    ///
    /// # Errors
    /// `Io` naming the file.
    pub fn create(path: &AnchoredPath) -> Result<Self> {
        let file = path.create_new(0o666).map_err(Error::io("create", path))?;
        // A journal without a name in its folder cannot be found by the next run.
        let folder = path.folder();
        folder.sync().map_err(Error::io("sync", &folder))?;
        Ok(Self { path: path.clone(), file, len: 0 })
    }

    /// Write a record, in one call; where it fails, the next one takes its place. The data it tells of is written, and
    /// on disk if it is to be `Synced`.
    ///
    /// # Errors
    /// `Io` naming the file.
    pub fn append(&mut self, record: &Record, durability: &Durability) -> Result<()> {
        let line = to_line(record, durability);
        self.file.write_all_at(&line, self.len).map_err(Error::io("write", &self.path))?;
        if *durability == Durability::Synced {
            self.file.sync_data().map_err(Error::io("sync", &self.path))?;
        }
        self.len += line.len() as u64;
        Ok(())
    }
}

/// A record, and the boot it holds on where it does not hold on all.
#[derive(Serialize, Deserialize)]
struct Line<R> {
    #[serde(rename = "r")]
    record: R,
    /// Empty where it is not known.
    #[serde(rename = "b", default, skip_serializing_if = "Option::is_none")]
    boot: Option<String>,
}

fn to_line(record: &Record, durability: &Durability) -> Vec<u8> {
    let boot = match durability {
        Durability::Synced => None,
        Durability::Unsynced { boot } => Some(boot.clone().unwrap_or_default()),
    };
    let mut line = serde_json::to_vec(&Line { record, boot }).expect("a record is plain data");
    let crc = crc32fast::hash(&line);
    line.extend_from_slice(format!(" {crc:08x}\n").as_bytes());
    line
}

/// `None` where the line is not one that was written as a whole.
fn of_line(line: &[u8]) -> Option<(Record, Durability)> {
    let (json, crc) = line.strip_suffix(b"\n")?.split_last_chunk::<9>()?;
    let crc = u32::from_str_radix(std::str::from_utf8(crc.strip_prefix(b" ")?).ok()?, 16).ok()?;
    if crc32fast::hash(json) != crc {
        return None;
    }
    let Line { record, boot } = serde_json::from_slice(json).ok()?;
    let durability = match boot {
        None => Durability::Synced,
        Some(boot) => Durability::Unsynced { boot: Some(boot).filter(|boot| !boot.is_empty()) },
    };
    Some((record, durability))
}

#[cfg(test)]
mod tests;
