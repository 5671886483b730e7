//! Reads the folders of one checkpoint, each with the reader of its format. All readers add their findings to a single
//! [`ReadFindings`]: open files, series, ranks, and names of missing files.

use std::collections::{BTreeMap, BTreeSet, HashSet};
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

/// The ranks that have a file.
#[derive(Clone, Debug, Default)]
pub struct RanksWithFiles {
    /// The ranks that have a file of any series.
    pub all: BTreeSet<Rank>,
    /// For each series, the ranks that have a file.
    pub of_series: BTreeMap<String, BTreeSet<Rank>>,
    /// True if ranks of the mesh may have no file.
    pub allow_missing: bool,
}

/// The information that the readers of formats collect while they read the folders of one checkpoint.
pub struct ReadFindings<'a> {
    /// The options of the user.
    pub options: &'a ReadOptions,
    /// The files that were opened.
    pub files: Files,
    /// Names of the series that were read.
    pub series: Vec<String>,
    /// Names of the series that were not read.
    pub skipped_series: Vec<String>,
    /// The names of the missing files and of the missing tensors of incomplete sets.
    pub missing: Vec<String>,
    /// The ranks that have a file, for formats with one file per rank.
    pub ranks: RanksWithFiles,
    /// True if the reader of the format has applied the declared layout. It does so if a rank has a tensor in several
    /// chunks.
    pub has_applied_layout: bool,
    /// Files that belong to the checkpoint and were not opened to read tensors, such as an index.
    pub other_files: Vec<PathBuf>,
}

impl<'a> ReadFindings<'a> {
    /// Returns empty findings.
    pub fn new(options: &'a ReadOptions, io: IoMode) -> Self {
        Self {
            options,
            files: Files::new(io).with_mirrored_files(Arc::clone(&options.holdings)),
            series: Vec::new(),
            skipped_series: Vec::new(),
            missing: Vec::new(),
            ranks: RanksWithFiles { allow_missing: options.allow_missing, ..RanksWithFiles::default() },
            has_applied_layout: false,
            other_files: Vec::new(),
        }
    }

    /// Reads the checkpoint in one folder or file.
    ///
    /// # Errors
    /// The errors of the format's reader.
    pub fn read(&mut self, path: &Path, found: DetectedFiles) -> Result<(Format, LoadedFolder)> {
        let mut warnings = Vec::new();
        let reader = found.format.entry().read;
        let lacks = reader.shortfall(path, &found, self.options, self.files.io())?;
        warnings.extend(self.admit(lacks)?);
        let (format, mut loaded) = reader.read(self, path, found)?;
        loaded.catalog.warnings.extend(warnings);
        Ok((format, loaded))
    }

    /// Accepts a shortfall (the missing files of a set) if an option allows an incomplete set, and returns the warning
    /// to show.
    ///
    /// # Errors
    /// The error of the shortfall if no option allows it.
    pub fn admit(&mut self, lacks: Option<Shortfall>) -> Result<Option<String>> {
        match lacks {
            None => Ok(None),
            Some(Shortfall { allowed: Some(warning), .. }) if self.options.allow_missing => Ok(Some(warning)),
            Some(lacks) if self.options.show_incomplete => {
                let warning = lacks.warning();
                self.missing.extend(lacks.missing);
                Ok(Some(warning))
            }
            Some(Shortfall { error, .. }) => Err(error),
        }
    }

    /// Adds warnings about differences between an index and the files that it names.
    ///
    /// # Errors
    /// The error of a difference, unless an option allows the difference.
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

    /// Selects the series of rank files that the options request, and records the selected and the skipped series. If
    /// an incomplete checkpoint is shown, also records the files that the selected series lack.
    ///
    /// # Errors
    /// `Usage` if a requested series does not exist.
    pub fn choose(&mut self, all: SeriesSet) -> Result<SeriesSet> {
        let chosen = all.choose(&self.options.series)?;
        self.series.extend(chosen.names());
        self.skipped_series.extend(chosen.skipped());
        self.other_files.extend(chosen.skipped_files().cloned());
        if self.options.show_incomplete {
            self.missing.extend(chosen.missing_files(self.options)?);
        }
        for (series, rank) in chosen.ranks() {
            self.ranks.all.insert(rank);
            self.ranks.of_series.entry(series.to_owned()).or_default().insert(rank);
        }
        Ok(chosen)
    }

    /// Returns the regular files below `root` that no reader has read and that are not part of the checkpoint. If there
    /// are too many files to list, returns an empty list, and adds a warning to `catalog`.
    ///
    /// # Errors
    /// `Io` if a folder cannot be listed or an entry cannot be examined.
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
            catalog.warnings.push(format!("{} has too many other files to list", root.display()));
            Vec::new()
        }))
    }
}

/// Returns the error for the case that the user declares a layout, but the source has no rank files.
pub fn without_ranks(root: &Path) -> Error {
    Error::usage(
        format!("{} needs no declared layout: its tensors are whole, or record how they are sharded", root.display()),
        "remove options::src_mesh, options::src_placements, options::src_split, options::src_plan, options::src_layout and \
         options::reduce: they declare how plain tensors in rank files are sharded (one torch.save or safetensors file per \
         rank)",
    )
}
