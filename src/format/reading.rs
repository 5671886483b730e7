//! Reading the folders of one checkpoint, each by its format, and what is learnt on the way.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::index::ShardIndex;
use super::listing::{DetectedFiles, is_data_file, is_metadata_file};
use super::parts::{self, LoadedFolder};
use super::series::SeriesSet;
use super::shortfall::Shortfall;
use super::{Format, ReadOptions};
use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::layout::Rank;
use crate::storage::{Files, IoMode};

/// What is learnt while folders are read.
pub struct ReadFindings<'a> {
    pub options: &'a ReadOptions,
    pub files: Files,
    pub series: Vec<String>,
    pub skipped_series: Vec<String>,
    /// Names of files and tensors that incomplete sets do not have.
    pub missing: Vec<String>,
    /// Ranks that have files, where there is one a rank.
    pub ranks: BTreeSet<Rank>,
    /// Files of the checkpoint that were not read as such.
    pub other_files: Vec<PathBuf>,
}

impl<'a> ReadFindings<'a> {
    pub fn new(options: &'a ReadOptions, io: IoMode) -> Self {
        Self {
            options,
            files: Files::new(io).with_mirrored_files(Arc::clone(&options.holdings)),
            series: Vec::new(),
            skipped_series: Vec::new(),
            missing: Vec::new(),
            ranks: BTreeSet::new(),
            other_files: Vec::new(),
        }
    }

    /// The checkpoint of one folder, or file.
    ///
    /// # Errors
    /// As reading its format.
    pub fn read(&mut self, path: &Path, found: DetectedFiles) -> Result<(Format, LoadedFolder)> {
        let mut warnings = Vec::new();
        let reader = found.format.entry().read;
        let lacks = reader.shortfall(path, &found, self.options, self.files.io())?;
        warnings.extend(self.admit(lacks)?);
        let (format, mut loaded) = reader.read(self, path, found)?;
        loaded.catalog.warnings.extend(warnings);
        Ok((format, loaded))
    }

    /// Let an incomplete set pass where that is asked for, with a warning.
    ///
    /// # Errors
    /// The error of the shortfall.
    fn admit(&mut self, lacks: Option<Shortfall>) -> Result<Option<String>> {
        match lacks {
            None => Ok(None),
            Some(Shortfall { allowed: Some(warning), .. }) if self.options.allow_missing => Ok(Some(warning)),
            Some(Shortfall { missing, error, .. }) if self.options.show_incomplete => {
                self.missing.extend(missing);
                Ok(Some(error.to_string()))
            }
            Some(Shortfall { error, .. }) => Err(error),
        }
    }

    /// Take note of what an index says of the files it names.
    ///
    /// # Errors
    /// The error of a difference, unless it is let pass.
    pub fn check_index(
        &mut self,
        index: Option<ShardIndex>,
        differing: Option<Shortfall>,
        catalog: &mut Catalog,
    ) -> Result<()> {
        catalog.warnings.extend(self.admit(differing)?);
        if let Some(index) = index {
            catalog.warnings.extend(index.warnings(catalog)?);
            self.other_files.push(index.path);
        }
        Ok(())
    }

    /// The series of rank files that are wanted.
    ///
    /// # Errors
    /// `Usage` where there is none of a name that is asked for.
    pub fn choose(&mut self, all: SeriesSet) -> Result<SeriesSet> {
        let chosen = all.choose(&self.options.series)?;
        self.series.extend(chosen.names());
        self.skipped_series.extend(chosen.skipped());
        self.other_files.extend(chosen.skipped_files().cloned());
        self.ranks.extend(chosen.ranks());
        Ok(chosen)
    }

    /// Files that lie beside those of the checkpoint.
    ///
    /// # Errors
    /// `Io` where a folder cannot be listed or an entry cannot be looked at.
    pub fn beside(&self, root: &Path, catalog: &mut Catalog) -> Result<Vec<PathBuf>> {
        let own: HashSet<&Path> = self
            .files
            .ids()
            .map(|id| self.files.path(id))
            .chain(self.other_files.iter().map(PathBuf::as_path))
            .collect();
        let is_part = |path: &Path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            own.contains(root.join(path).as_path()) || is_metadata_file(name) || is_data_file(path)
        };
        Ok(parts::other_files(root, &is_part)?.unwrap_or_else(|| {
            catalog.warnings.push(format!("{}: too many other files in it to look at", root.display()));
            Vec::new()
        }))
    }
}

/// The error of a declared layout for tensors that are not in rank files.
pub fn without_ranks(root: &Path) -> Error {
    Error::usage(
        format!("{} is no folder of rank files, so that no plain tensor in it is a part", root.display()),
        "options::src_mesh, options::src_placements, options::src_split, options::src_plan, options::src_layout and \
         options::reduce say how plain tensors of rank files lie (one torch.save \
         or safetensors file a rank); leave them out",
    )
}
