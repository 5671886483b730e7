//! Reading a twin, and saying what is found in the words of SRC.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::MetadataMirror;
use crate::error::{CatalogError, Error, FormatError, Result, StorageError, UsageError};
use crate::format::{Checkpoint, MirrorOf, ReadOptions};
use crate::layout::LayoutError;
use crate::name_list::name_processes;
use crate::storage::{Holdings, IoMode, LocalContent, LocalFile, filesystem, lookup};

impl MetadataMirror {
    /// Read the checkpoint that the ranks see together. Its files are those of SRC, which can be opened where this process
    /// sees them; [`Files::seen_by`](crate::storage::Files::seen_by) says who does.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open(&self, options: &ReadOptions) -> Result<Checkpoint> {
        let holdings = self.files.iter().map(|(path, seen)| {
            let (held, seen_by) = (Arc::clone(&seen.held), Arc::clone(&seen.by));
            (self.folder.join(path), LocalContent { held, seen_by, modified: seen.modified })
        });
        let holdings: Arc<Holdings> = Arc::new(holdings.collect());
        let own = ReadOptions { io: Some(IoMode::Read), holdings: Arc::clone(&holdings), ..options.clone() };
        let mut checkpoint = Checkpoint::open(&self.root(), &own).map_err(|error| self.in_words_of_src(error))?;
        // That of a bare name has none.
        let own = if self.own.as_os_str().is_empty() { Path::new(".") } else { &self.own };
        let io = match options.io {
            Some(io) => io,
            None if lookup::is_folder(own)? => filesystem::preferred_io(own)?,
            None => IoMode::Read,
        };
        checkpoint.files.localise(io, &|path| {
            let seen = self.files.get(path.strip_prefix(&self.folder).ok()?)?;
            Some(LocalFile { path: self.own.join(&seen.path), seen: seen.own })
        })?;
        self.rename(&mut checkpoint.root);
        checkpoint.resolved_from.iter_mut().for_each(|path| self.rename(path));
        let catalog = &mut checkpoint.catalog;
        let told = [&mut catalog.warnings, &mut catalog.notes, &mut catalog.details].into_iter().flatten();
        told.for_each(|text| *text = self.words_of_src(text));
        let not_taken = self.files.values().filter(|seen| !seen.not_taken.is_empty());
        checkpoint.catalog.notes.extend(not_taken.map(|seen| {
            let (path, writer) = (self.own.join(&seen.path), seen.writer);
            let others = name_processes(&seen.not_taken);
            format!("{} is another one at {others}: that of process {writer} is taken", path.display())
        }));
        checkpoint.twin = Some(MirrorOf { folder: self.own.clone(), twin: self.folder.clone(), holdings });
        Ok(checkpoint)
    }

    fn rename(&self, path: &mut PathBuf) {
        if let Ok(rest) = path.strip_prefix(&self.folder) {
            // Joining nothing would leave a slash.
            *path = if rest.as_os_str().is_empty() { self.own.clone() } else { self.own.join(rest) };
        }
    }

    fn words_of_src(&self, text: &str) -> String {
        let (twin, own) = (self.folder.display().to_string(), self.own.join("").display().to_string());
        text.replace(&format!("{twin}/"), &own).replace(&twin, own.trim_end_matches('/'))
    }

    /// What is added to a hint: some nodes may have no files, but a path that is mistyped on one of them looks the same.
    fn blind_words(&self) -> String {
        const SHOWN: usize = 3;
        let words = self.blind.iter().take(SHOWN).map(|(place, ranks)| {
            let see = if ranks.len() == 1 { "sees" } else { "see" };
            format!("; {} {see} nothing at {place}", name_processes(ranks))
        });
        words.collect()
    }

    /// An error of the twin as one of SRC.
    #[must_use]
    pub fn in_words_of_src(&self, mut error: Error) -> Error {
        let reword = |text: &mut String| *text = self.words_of_src(text);
        match &mut error {
            Error::Storage(StorageError::Io { path, .. }) => self.rename(path),
            Error::Format(FormatError::Malformed { path, expected, found, .. }) => {
                self.rename(path);
                [expected, found].into_iter().for_each(reword);
            }
            Error::Format(FormatError::Missing { path, expected, missing, hint, .. }) => {
                self.rename(path);
                [expected, missing].into_iter().for_each(reword);
                // What nobody sees may well be somewhere.
                let hint =
                    hint.get_or_insert_with(|| String::from("no process sees it: start one on the node where it lies"));
                *hint += &self.blind_words();
            }
            Error::Within { path, source } => {
                self.rename(path);
                let inner = std::mem::replace(&mut **source, Error::comm(0, "", ""));
                **source = self.in_words_of_src(inner);
            }
            Error::Naming { source, .. } => {
                let inner = std::mem::replace(&mut **source, Error::comm(0, "", ""));
                **source = self.in_words_of_src(inner);
            }
            Error::Format(FormatError::Unsupported { what, hint }) => [what, hint].into_iter().for_each(reword),
            Error::Usage(UsageError { message, hint }) => std::iter::once(message).chain(hint).for_each(reword),
            Error::Catalog(CatalogError::Coverage { detail, hint, .. }) => {
                std::iter::once(detail).chain(hint).for_each(reword);
            }
            Error::Catalog(CatalogError::Conflict { between, detail, hint, .. }) => {
                [between, detail].into_iter().chain(hint).for_each(reword);
            }
            Error::Layout(LayoutError::File { file, .. }) => reword(file),
            Error::Storage(StorageError::Untrusted { .. })
            | Error::Layout(_)
            | Error::Comm(_)
            | Error::Device(_)
            | Error::Stopped(_) => {}
        }
        error
    }
}
