//! The torch.save file of one rank, read except for tensor data.

use std::path::PathBuf;

use super::reader::ArchiveContents;
use crate::layout::Rank;

/// The content of one torch.save file, which is usually the file of one rank.
#[derive(Debug)]
pub struct RankFile {
    /// The rank in the file name; `None` if the file does not belong to a series of rank files.
    pub rank: Option<Rank>,
    pub path: PathBuf,
    pub contents: ArchiveContents,
}
