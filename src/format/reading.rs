//! Reading the folders of one checkpoint, each by its format, and what is learnt on the way.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::detect::{self, Detected};
use super::index::Index;
use super::parts::{self, Loaded};
use super::series::{self, SeriesSet};
use super::sets;
use super::shortfall::Shortfall;
use super::{Content, Format, Part, ReadOptions, dcp, fsdp_flat, local, safetensors, torch};
use crate::catalog::{Catalog, TensorId, model};
use crate::error::{Error, Result};
use crate::layout::Rank;
use crate::storage::{Files, IoMode, lookup};

/// What is learnt while folders are read.
pub struct Reading<'a> {
    pub options: &'a ReadOptions,
    pub files: Files,
    pub series: Vec<String>,
    pub skipped_series: Vec<String>,
    /// Names of files and tensors that incomplete sets do not have.
    pub missing: Vec<String>,
    /// Ranks that have files, where there is one a rank.
    pub ranks: BTreeSet<Rank>,
    /// Files of the checkpoint that were not read as such.
    other_files: Vec<PathBuf>,
}

impl<'a> Reading<'a> {
    pub fn new(options: &'a ReadOptions, io: IoMode) -> Self {
        Self {
            options,
            files: Files::new(io).holding(Arc::clone(&options.holdings)),
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
    pub fn read(&mut self, path: &Path, detected: Detected) -> Result<(Format, Loaded)> {
        let mut warnings = Vec::new();
        let lacks = sets::shortfall(path, &detected, self.options, self.files.io())?;
        warnings.extend(self.admit(lacks)?);
        let (format, mut loaded) = self.read_whole(path, detected)?;
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

    fn read_whole(&mut self, path: &Path, detected: Detected) -> Result<(Format, Loaded)> {
        let unknown = self.options.unknown();
        let mut world_size = 0;
        let (format, catalog) = match detected {
            Detected::Dcp => (Format::Dcp, dcp::read(&mut self.files, path, unknown)?),
            Detected::Safetensors { paths, index: None } if self.options.told.is_some() => {
                return self.read_parts(path, &paths);
            }
            Detected::Safetensors { paths, index } => {
                let index = index.as_deref().map(Index::read).transpose()?;
                let (mut catalog, differing) = safetensors::read(&mut self.files, &paths, index.as_ref())?;
                self.check_index(index, differing, &mut catalog)?;
                (Format::Safetensors, catalog)
            }
            Detected::DcpHf { paths } => (Format::DcpHf, safetensors::read(&mut self.files, &paths, None)?.0),
            Detected::Torch { paths, index } => {
                let index = index.as_deref().map(Index::read).transpose()?;
                let mut catalog = torch::read(&mut self.files, &paths, unknown)?;
                let differing = index.as_ref().and_then(|index| self.differing(index, &catalog, &paths));
                self.check_index(index, differing, &mut catalog)?;
                (Format::Torch, catalog)
            }
            Detected::Local { paths } if self.options.told.is_some() => {
                local::refuse_told(path)?;
                return self.read_parts(path, &paths);
            }
            Detected::Local { paths } => {
                self.other_files.push(path.join(local::FILE_NAME));
                let (catalog, ranks) = local::read(&mut self.files, path, &paths, self.options.allow_missing)?;
                world_size = ranks;
                (Format::Local, catalog)
            }
            Detected::TorchRanks(all) => {
                let chosen = self.choose(all)?;
                let (loaded, flat) = chosen.read(&mut self.files, self.options)?;
                // What it says is in the catalog, and written anew.
                self.other_files.push(path.join(fsdp_flat::document::FILE_NAME));
                let asked = self.options.from == Some(Format::FsdpFlat);
                if asked && !flat.any && loaded.catalog.flat.is_none() {
                    return Err(detect::not_that_format(path, Format::FsdpFlat));
                }
                let format = if flat.any || asked { Format::FsdpFlat } else { Format::TorchRanks };
                return Ok((format, loaded));
            }
        };
        let whole = Part { folder: PathBuf::new(), content: Content::Whole, names: None, world_size };
        Ok((format, Loaded { catalog, parts: vec![whole] }))
    }

    /// Returns the first difference between an index and the torch files that it names.
    fn differing(&self, index: &Index, catalog: &Catalog, paths: &[PathBuf]) -> Option<Shortfall> {
        let named = model::all_tensors(&catalog.state);
        let file_of = |id: TensorId| {
            let chunks = &catalog.tensor(id).chunks;
            chunks.iter().find_map(|chunk| chunk.place.file()).map(|file| self.files.path(file))
        };
        let holders: HashMap<&str, Option<&Path>> =
            named.iter().map(|(fqn, id)| (fqn.as_str(), file_of(*id))).collect();
        let stored = named.iter().map(|(fqn, id)| (fqn.as_str(), file_of(*id)));
        index.differing(&|name| holders.get(name).copied(), stored, paths)
    }

    /// Take note of what an index says of the files it names.
    fn check_index(&mut self, index: Option<Index>, differing: Option<Shortfall>, catalog: &mut Catalog) -> Result<()> {
        catalog.warnings.extend(self.admit(differing)?);
        if let Some(index) = index {
            catalog.warnings.extend(index.warnings(catalog)?);
            self.other_files.push(index.path);
        }
        Ok(())
    }

    /// The series of rank files that are wanted.
    fn choose(&mut self, all: SeriesSet) -> Result<SeriesSet> {
        let chosen = all.choose(&self.options.series)?;
        self.series.extend(chosen.names());
        self.skipped_series.extend(chosen.skipped());
        self.other_files.extend(chosen.skipped_files().cloned());
        self.ranks.extend(chosen.ranks());
        Ok(chosen)
    }

    /// Safetensors files that hold what one rank each has, where they are called so.
    fn read_parts(&mut self, path: &Path, paths: &[PathBuf]) -> Result<(Format, Loaded)> {
        let is_folder = lookup::is_folder(path)?;
        let Some(set) = series::group(path, paths)?.ranks.filter(|_| is_folder) else {
            return Err(without_ranks(path));
        };
        let chosen = self.choose(set)?;
        let mut loaded = chosen.read_by(self.options, &mut |ranks| safetensors::ranks::read(&mut self.files, ranks))?;
        // Names of these are none for torch files.
        loaded.parts.iter_mut().for_each(|part| part.names = None);
        Ok((Format::Safetensors, loaded))
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
            own.contains(root.join(path).as_path()) || name.ends_with(".distcp") || name.ends_with(".metadata")
        };
        Ok(parts::beside(root, &is_part)?.unwrap_or_else(|| {
            catalog.warnings.push(format!("{}: too many other files in it to look at", root.display()));
            Vec::new()
        }))
    }
}

/// The error of a declared layout for tensors that are not in rank files.
pub fn without_ranks(root: &Path) -> Error {
    Error::usage(
        format!("{} is no folder of rank files, so that no plain tensor in it is a part", root.display()),
        "--src-mesh, --src-placements, --src-split, --src-plan, --src-layout and --reduce say how plain tensors of rank files lie (one torch.save \
         or safetensors file a rank); leave them out",
    )
}
