//! Reading the folders of one checkpoint, each by its format, and what is learnt on the way.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::detect::{self, Detected};
use super::parts::{self, Loaded};
use super::series::{self, SeriesSet};
use super::{Content, Format, Part, ReadOptions, dcp, dcp_hf, fsdp_flat, local, safetensors, told, torch};
use crate::catalog::Catalog;
use crate::error::Result;
use crate::layout::Rank;
use crate::storage::{Files, IoMode};

/// What is learnt while folders are read.
pub struct Reading<'a> {
    pub options: &'a ReadOptions,
    pub files: Files,
    pub series: Vec<String>,
    pub skipped_series: Vec<String>,
    pub fragment: Option<String>,
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
            fragment: None,
            ranks: BTreeSet::new(),
            other_files: Vec::new(),
        }
    }

    /// The checkpoint of one folder, or file.
    ///
    /// # Errors
    /// As reading its format.
    pub fn read(&mut self, path: &Path, detected: Detected) -> Result<(Format, Loaded)> {
        let unknown = self.options.unknown();
        let mut world_size = 0;
        let (format, catalog) = match detected {
            Detected::Dcp => (Format::Dcp, dcp::read(&mut self.files, path, unknown)?),
            Detected::Safetensors { paths, index: None } if self.options.told.is_some() => {
                return self.read_parts(path, &paths);
            }
            Detected::Safetensors { paths, index } => {
                let catalog = safetensors::read(&mut self.files, &paths, index.as_deref())?;
                self.other_files.extend(index);
                self.fragment = detect::part_of(path).filter(|_| local::is_part(path));
                (Format::Safetensors, catalog)
            }
            Detected::DcpHf { paths } if path.is_file() => {
                self.fragment = detect::part_of(path);
                (Format::DcpHf, safetensors::read(&mut self.files, &paths, None)?)
            }
            Detected::DcpHf { paths } => (Format::DcpHf, dcp_hf::read(&mut self.files, path, &paths, self.options)?),
            Detected::Torch { paths } => {
                self.fragment = match paths.as_slice() {
                    [only] => detect::part_of(only),
                    _ => None,
                };
                self.other_files.push(path.join(detect::TORCH_INDEX_NAME));
                (Format::Torch, torch::read(&mut self.files, &paths, unknown)?)
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
        let Some(set) = series::group(path, paths)?.ranks.filter(|_| path.is_dir()) else {
            return Err(told::without_ranks(path));
        };
        let chosen = self.choose(set)?;
        let mut loaded = chosen.read_by(self.options, &mut |ranks| safetensors::ranks::read(&mut self.files, ranks))?;
        // Names of these are none for torch files.
        loaded.parts.iter_mut().for_each(|part| part.names = None);
        Ok((Format::Safetensors, loaded))
    }

    /// Files that lie beside those of the checkpoint.
    pub fn beside(&self, root: &Path, catalog: &mut Catalog) -> Vec<PathBuf> {
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
        parts::beside(root, &is_part).unwrap_or_else(|| {
            catalog.warnings.push(format!("{}: too many other files in it to look at", root.display()));
            Vec::new()
        })
    }
}
