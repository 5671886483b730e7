//! Connects `torch.save` archives with the files of a checkpoint: reads the bytes of an archive from a file, adds the
//! path of the file to errors of an archive, and adds archives to output files. Unit of offsets and lengths: bytes.
//! Source of the format: `torch/serialization.py`.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use smallvec::SmallVec;
use torch_pickle::ReadAt;
use torch_pickle::pickle::{WriteError, WriteLeaves, Writer};
use torch_pickle::zip::{self, Archive, ArchiveError, ArchiveLayout, Record};

use crate::catalog::{ChecksumSpan, OutputFile, RankValue, TensorId, list_ranks};
use crate::error::{Error, Result};
use crate::layout::Rank;
use crate::storage::{FileId, FileRange, Files, IoMode};

/// A checkpoint file from which archives are read. The file is opened for each read and not kept open: a checkpoint may
/// have more rank files than the number of files that a process may have open.
#[derive(Clone, Copy)]
pub struct ArchiveSource<'a> {
    files: &'a Files,
    file: FileId,
}

impl<'a> ArchiveSource<'a> {
    /// Returns a source that reads archives from `file`.
    pub fn new(files: &'a Files, file: FileId) -> Self {
        Self { files, file }
    }

    /// Reads the ZIP directory of the archive that fills a byte range of the file.
    ///
    /// # Errors
    /// `Malformed` if the byte range does not contain an archive; `Unsupported` if `torch.jit.save` wrote the archive,
    /// or if its entries are compressed, because another tool has repacked it; `Io`.
    pub fn archive(self, file_range: FileRange) -> Result<Archive> {
        Archive::read_at(&self, file_range.offset, file_range.len).map_err(|error| self.error(error))
    }

    /// Converts an error of reading an archive to an error that names the file.
    pub fn error(self, error: ArchiveError) -> Error {
        let path = self.files.path(self.file);
        match error {
            ArchiveError::Malformed { at, expected, found } => Error::malformed(path, at, expected, found),
            ArchiveError::TorchScript => torch_script_error(path),
            ArchiveError::Io(error) => error.downcast::<Error>().unwrap_or_else(Error::io("read", path)),
            ArchiveError::Compressed { .. } | _ => Error::unsupported(
                format!("{}: {error}", path.display()),
                "save the checkpoint again with torch.save, which does not compress entries; another tool has \
                 repacked the file",
            ),
        }
    }
}

impl ReadAt for ArchiveSource<'_> {
    fn len_bytes(&self) -> u64 {
        self.files.len_bytes(self.file)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.files.open(self.file).and_then(|file| file.read_exact_at(buffer, offset)).map_err(io::Error::other)
    }

    fn mapped<T>(&self, offset: u64, len: u64, read: impl FnOnce(&[u8]) -> T) -> io::Result<Option<T>> {
        if self.files.io() != IoMode::Mmap {
            return Ok(None);
        }
        self.files.open(self.file).and_then(|file| file.mapped(offset, len, read)).map_err(io::Error::other)
    }
}

/// Returns the error for an archive of torch.jit.save.
pub fn torch_script_error(path: &Path) -> Error {
    Error::unsupported(
        format!("{} is a TorchScript archive, not a checkpoint", path.display()),
        "save the module's state_dict() with torch.save",
    )
}

/// Returns the offset of a zip record's data in the file, in bytes.
///
/// # Errors
/// `Malformed` if the zip record has no local header, `Io`.
pub fn data_offset(files: &Files, file: FileId, record: Record) -> Result<u64> {
    let source = ArchiveSource::new(files, file);
    zip::data_offset(&source, record).map_err(|error| source.error(error))
}

/// The header bytes of many output archives: all bytes except tensor data. Equal blocks of bytes are in memory only
/// once.
#[derive(Debug, Default)]
pub struct SharedBytes(HashSet<Arc<Vec<u8>>>);

impl SharedBytes {
    fn share(&mut self, bytes: Vec<u8>) -> Arc<Vec<u8>> {
        if let Some(known) = self.0.get(&bytes) {
            return Arc::clone(known);
        }
        let shared: Arc<Vec<u8>> = bytes.into();
        self.0.insert(Arc::clone(&shared));
        shared
    }

    /// Appends an archive to an output file, and returns the offset of the archive in the file.
    pub fn append(&mut self, archive: ArchiveLayout, file: &mut OutputFile) -> u64 {
        let base = file.len;
        for (at, bytes) in archive.known {
            file.len = base + at;
            file.push_header(self.share(bytes));
        }
        file.len = base + archive.len;
        file.checksums.extend(archive.checksums.into_iter().map(|sum| ChecksumSpan {
            range: base + sum.range.start..base + sum.range.end,
            crc_offsets: SmallVec::from_buf(sum.places.map(|place| base + place)),
        }));
        base
    }
}

/// Pickles the leaves of a state dict that have no pickle opcode: tensors, and values that differ between the ranks of
/// SRC. The closure `tensors` writes a tensor. If a value differs between ranks, the value for `rank` is written (see
/// [`RankValue::value_for`]).
pub struct Leaves<F> {
    /// The rank whose file gets the pickle; `None` if the file belongs to no rank. Without a rank, a value that differs
    /// between ranks is an error.
    pub rank: Option<Rank>,
    pub tensors: F,
}

impl<F: FnMut(&mut Writer, TensorId) -> Result<(), WriteError>> WriteLeaves<TensorId, Vec<RankValue>> for Leaves<F> {
    fn tensor(&mut self, writer: &mut Writer, tensor: TensorId) -> Result<(), WriteError> {
        (self.tensors)(writer, tensor)
    }

    fn other(&mut self, writer: &mut Writer, rank_values: &Vec<RankValue>) -> Result<(), WriteError> {
        if let Some(value) = self.rank.and_then(|rank| RankValue::value_for(rank_values, rank)) {
            return writer.value(value, self);
        }
        let ranks: Vec<Rank> = rank_values.iter().flat_map(|rank_value| rank_value.ranks.iter().copied()).collect();
        Err(WriteError::Leaf(format!("{} store different values", list_ranks(&ranks))))
    }
}
