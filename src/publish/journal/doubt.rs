//! Doubts: what is recorded and is not so, or not any more.
//!
//! A file that is not as long as it should be, or bytes that are not those that were written, are no reason to give up
//! what else was done: what a record says of them does not count, and is work to be done. That has to be said so that
//! it lasts and others hear it, so it stands in a journal. A doubt names one entry of one journal; no two journals ever
//! have the same name, so what is done again is not doubted with it.

use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Durability, EXTENSION, Journal, Record};
use crate::error::{Error, Result};
use crate::storage::AnchoredPath;

/// An entry that does not count.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "(String, u32, u64)", into = "(String, u32, u64)")]
pub struct Doubt {
    /// The name of the journal that it is in.
    pub journal: String,
    pub file: u32,
    pub start: u64,
}

impl From<(String, u32, u64)> for Doubt {
    fn from((journal, file, start): (String, u32, u64)) -> Self {
        Self { journal, file, start }
    }
}

impl From<Doubt> for (String, u32, u64) {
    fn from(Doubt { journal, file, start }: Doubt) -> Self {
        (journal, file, start)
    }
}

/// Record doubts, in a journal beside that of this process.
///
/// # Errors
/// `Io`
pub fn doubt(journal: &AnchoredPath, doubts: Vec<Doubt>, sync: bool) -> Result<()> {
    if doubts.is_empty() {
        return Ok(());
    }
    let name = Path::new(journal.file_name());
    let mut names =
        (0_u32..).map(|nth| journal.with_file_name(name.with_extension(format!("doubts-{nth}.{EXTENSION}"))));
    let mut made = loop {
        match Journal::create(&names.next().expect("there are enough numbers")) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::AlreadyExists => {}
            made => break made?,
        }
    };
    made.append(&Record { doubts, ..Record::default() }, &Durability::of(sync))?;
    crate::fault::point("doubted");
    Ok(())
}
