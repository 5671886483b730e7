//! Reads a metadata mirror as a checkpoint, and replaces the paths of the mirror in messages by paths of SRC.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::MetadataMirror;
use crate::document::DocumentError;
use crate::error::{CatalogError, Error, FormatError, Result, StorageError, UsageError};
use crate::format::{Checkpoint, MirrorOf, ReadOptions};
use crate::layout::LayoutError;
use crate::name_list::name_processes;
use crate::storage::{IoMode, LocalContent, LocalFile, MirroredFiles, filesystem, lookup};

impl MetadataMirror {
    /// Reads the checkpoint that the files of all processes form together. In the result, files have their paths in
    /// SRC. This process can open only the files that it sees, and [`Files::seen_by`](crate::storage::Files::seen_by)
    /// returns the processes that see a file.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::open`].
    pub fn open(&self, options: &ReadOptions) -> Result<Checkpoint> {
        let holdings = self.files.iter().map(|(path, seen)| {
            let (available, seen_by) = (Arc::clone(&seen.mirrored), Arc::clone(&seen.seen_by));
            (self.folder.join(path), LocalContent { available, seen_by, modified: seen.modified })
        });
        let holdings: Arc<MirroredFiles> = Arc::new(holdings.collect());
        let own = ReadOptions { io: Some(IoMode::Read), holdings: Arc::clone(&holdings), ..options.clone() };
        let mut checkpoint = Checkpoint::open(&self.root(), &own).map_err(|error| self.with_source_paths(error))?;
        // The parent folder of a path that is only a file name is the empty path.
        let own = if self.own.as_os_str().is_empty() { Path::new(".") } else { &self.own };
        let io = match options.io {
            Some(io) => io,
            None if lookup::is_folder(own)? => filesystem::preferred_io(own)?,
            None => IoMode::Read,
        };
        checkpoint.files.use_local_files(io, &|path| {
            let seen = self.files.get(path.strip_prefix(&self.folder).ok()?)?;
            Some(LocalFile { path: self.own.join(&seen.path), own_modified: seen.own_modified })
        })?;
        self.rename(&mut checkpoint.root);
        checkpoint.resolved_from.iter_mut().for_each(|path| self.rename(path));
        let catalog = &mut checkpoint.catalog;
        let texts = [&mut catalog.warnings, &mut catalog.notes, &mut catalog.details].into_iter().flatten();
        texts.for_each(|text| *text = self.replace_paths(text));
        for why in catalog.tensors.iter_mut().filter_map(|entry| entry.unreadable.as_deref_mut()) {
            self.rename(&mut why.file);
            why.map_misfit(|error| self.with_source_paths(error));
        }
        let not_taken = self.files.values().filter(|seen| !seen.differing_ranks.is_empty());
        checkpoint.catalog.notes.extend(not_taken.map(|seen| {
            let (path, writer) = (self.own.join(&seen.path), seen.writer);
            let others = name_processes(&seen.differing_ranks);
            format!("{} differs at {others}; the file of process {writer} is used", path.display())
        }));
        checkpoint.mirror = Some(MirrorOf { folder: self.own.clone(), mirror: self.folder.clone(), holdings });
        Ok(checkpoint)
    }

    fn rename(&self, path: &mut PathBuf) {
        if let Ok(rest) = path.strip_prefix(&self.folder) {
            // Joining an empty path would add a slash.
            *path = if rest.as_os_str().is_empty() { self.own.clone() } else { self.own.join(rest) };
        }
    }

    fn replace_paths(&self, text: &str) -> String {
        let (mirror, own) = (self.folder.display().to_string(), self.own.join("").display().to_string());
        text.replace(&format!("{mirror}/"), &own).replace(&mirror, own.trim_end_matches('/'))
    }

    /// Returns a text that is added to hints, such as `; process 3 sees nothing at PATH`. It names the processes that
    /// see nothing at SRC, and the path of SRC that each was given, because this path may be mistyped. At most three
    /// paths are named. Empty if all processes see SRC.
    fn ranks_without_files_text(&self) -> String {
        const SHOWN: usize = 3;
        let words = self.ranks_without_files.iter().take(SHOWN).map(|(place, ranks)| {
            let see = if ranks.len() == 1 { "sees" } else { "see" };
            format!("; {} {see} nothing at {place}", name_processes(ranks))
        });
        words.collect()
    }

    /// Replaces the paths of the mirror in an error by paths of SRC.
    pub fn with_source_paths(&self, mut error: Error) -> Error {
        let reword = |text: &mut String| *text = self.replace_paths(text);
        match &mut error {
            Error::Storage(StorageError::Io { path, .. }) => self.rename(path),
            Error::Format(FormatError::Malformed { path, expected, found, .. }) => {
                self.rename(path);
                [expected, found].into_iter().for_each(reword);
            }
            Error::Format(FormatError::Missing { path, expected, missing, hint, .. }) => {
                self.rename(path);
                [expected, missing].into_iter().for_each(reword);
                // A file that no process sees may exist on another node.
                let hint = hint.get_or_insert_with(|| String::from("start a process on the node that has the file"));
                *hint += &self.ranks_without_files_text();
            }
            Error::Within { path, source } => {
                self.rename(path);
                let inner = std::mem::replace(&mut **source, Error::comm(0, "", ""));
                **source = self.with_source_paths(inner);
            }
            Error::Naming { source, .. } => {
                let inner = std::mem::replace(&mut **source, Error::comm(0, "", ""));
                **source = self.with_source_paths(inner);
            }
            Error::Format(FormatError::Unsupported { what, hint }) => [what, hint].into_iter().for_each(reword),
            Error::Usage(UsageError { message, hint }) => std::iter::once(message).chain(hint).for_each(reword),
            Error::Catalog(CatalogError::Coverage { detail, hint, .. }) => {
                std::iter::once(detail).chain(hint).for_each(reword);
            }
            Error::Catalog(CatalogError::Conflict { between, detail, hint, .. }) => {
                [between, detail].into_iter().chain(hint).for_each(reword);
            }
            Error::Layout(LayoutError::File(DocumentError { file, .. })) => reword(file),
            Error::Storage(StorageError::Untrusted { .. })
            | Error::Layout(_)
            | Error::Comm(_)
            | Error::Device(_)
            | Error::Stopped(_) => {}
        }
        error
    }
}
