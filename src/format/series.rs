//! Series of rank files in one folder: `model_world_size_8_rank_3.pt` beside `optim_world_size_8_rank_3.pt`.
//!
//! Ranks count from 0, as in `torch.distributed`, and all of a series' ranks must be there: what a rank alone holds
//! cannot be made up. Where the others are replicas of it, the user may go on without it.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use super::fsdp_flat::{self, SeriesFiles, Unflattened};
use super::parts::{CheckpointPart, LoadedFolder, PartContent, adopt};
use super::rank_names::{Numbering, RankName, RankNames};
use super::shortfall::list_absent;
use super::torch;
use super::torch::load::load;
use super::torch::ranks::{PlainKind, RankFile, merge};
use super::{ReadOptions, folder_of};
use crate::catalog::model::GRADIENTS;
use crate::catalog::{Catalog, Dict, Value, path};
use crate::error::{CatalogError, Error, FormatError, Result};
use crate::layout::Rank;
use crate::name_list::{FEW, Numbers, natural_order, short_list};
use crate::storage::Files;
use crate::storage::lookup::{self, FileKind};

/// Which series of a folder to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SeriesChoice {
    #[default]
    All,
    /// The model; or the only one there is.
    Model,
    /// And gradients, where there are any.
    ModelAndGradients,
    Named(Vec<String>),
}

/// Returns a description of one file of a series, and the names of the other files.
///
/// # Errors
/// `Io` where the folder that it is in cannot be listed.
pub fn fragment(path: &Path) -> Result<Option<(String, Vec<String>)>> {
    let Some(name) = RankName::parse(path) else { return Ok(None) };
    let beside = siblings(path, &name)?;
    let count = match name.world_size {
        Some(size) => size,
        None => u32::try_from(beside.len()).expect("fewer than 2^32 files"),
    };
    let others = beside.iter().filter(|other| other.file_name() != path.file_name());
    let mut others: Vec<String> = others.filter_map(|other| Some(other.file_name()?.to_str()?.to_owned())).collect();
    others.sort_by(|left, right| natural_order(left, right));
    let mut missing = others.clone();
    let mut absent = String::new();
    if let Some(size) = name.world_size {
        let known = [beside.as_slice(), &[path.to_path_buf()]].concat();
        let set = |files: &[PathBuf]| {
            let parsed = files.iter().filter_map(|path| Some((RankName::parse(path)?, path.clone())));
            let parsed = parsed.filter(|(other, _)| other.world_size == Some(size));
            NumberedSet::new(name.series.clone(), size, parsed.collect())
        };
        let all = set(&known);
        missing = NumberedSet { files: set(&[path.to_path_buf()]).files, ..all.clone() }.missing_names();
        let names = all.missing_names();
        if !names.is_empty() {
            absent = format!(", missing: {}", short_list(&names, FEW));
        }
    }
    let others = if others.is_empty() { String::new() } else { format!(" ({} beside it)", short_list(&others, FEW)) };
    Ok((count > 1).then(|| (format!("1 of {count} files of its series{others}{absent}"), missing)))
}

fn siblings(path: &Path, own: &RankName) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in lookup::list(folder_of(path))? {
        let is_of_series = entry.path.extension().is_some()
            && RankName::parse(&entry.path).is_some_and(|name| name.series == own.series);
        // A rank whose file cannot be reached is a rank nevertheless.
        if is_of_series && matches!(entry.kind()?, FileKind::File | FileKind::Dangling) {
            found.push(entry.path);
        }
    }
    Ok(found)
}

/// The rank files of one series, as they were found.
#[derive(Debug)]
struct Series {
    name: String,
    files: Vec<(RankName, PathBuf)>,
}

/// The series of a folder.
#[derive(Debug)]
pub struct SeriesSet {
    folder: PathBuf,
    series: Vec<Series>,
    /// Series of the folder that were not chosen.
    skipped: Vec<Series>,
}

/// What the torch files of a folder are, by their names.
#[derive(Debug)]
pub struct Grouped {
    pub ranks: Option<SeriesSet>,
    /// Files that say that they are one of several, from 1 on, without an index that lists them.
    pub sets: Vec<NumberedSet>,
    pub plain: Vec<PathBuf>,
}

/// Files that say in their names how many they are.
#[derive(Clone, Debug)]
pub struct NumberedSet {
    pub name: String,
    /// The number of files that their names state.
    pub size: u32,
    first: u32,
    files: BTreeMap<u32, PathBuf>,
    names: RankNames,
}

impl NumberedSet {
    /// At least one file is needed, for the style of the names.
    fn new(name: String, size: u32, files: Vec<(RankName, PathBuf)>) -> Self {
        let mut names = files[0].0.names.clone();
        files.iter().for_each(|(name, _)| names.widen(&name.names));
        let from_one = files.iter().all(|(name, _)| name.numbering == Numbering::OfTotal && name.rank > 0);
        let files = files.into_iter().map(|(name, path)| (name.rank, path)).collect();
        Self { name, size, first: u32::from(from_one), files, names }
    }

    /// The names of files that are not there.
    pub fn missing_names(&self) -> Vec<String> {
        let all = self.first..self.size.saturating_add(self.first);
        let count = all.len().saturating_sub(self.files.range(all.clone()).count());
        let missing = all.filter(|number| !self.files.contains_key(number));
        list_absent(count as u64, missing.map(|number| self.names.render(number, self.size)))
    }

    pub fn into_paths(self) -> Vec<PathBuf> {
        self.files.into_values().collect()
    }
}

/// Group the files of a folder by their names.
///
/// # Errors
/// `Malformed` and `Conflict` where the numbers of a set contradict each other.
pub fn group(folder: &Path, paths: &[PathBuf]) -> Result<Grouped> {
    let mut found: BTreeMap<String, Vec<(RankName, PathBuf)>> = BTreeMap::new();
    let mut grouped = Grouped { ranks: None, sets: Vec::new(), plain: Vec::new() };
    for path in paths {
        match RankName::parse(path) {
            Some(name) => found.entry(name.series.clone()).or_default().push((name, path.clone())),
            None => grouped.plain.push(path.clone()),
        }
    }
    let mut series = Vec::new();
    for (name, files) in found {
        let own = Series { name, files };
        let counts_from_one = own.files.iter().all(|(name, _)| name.numbering == Numbering::OfTotal && name.rank > 0);
        if counts_from_one {
            grouped.sets.push(own.set(folder)?);
        } else {
            series.push(own);
        }
    }
    series.sort_by_key(|series| (series.name != "model", series.name.clone()));
    if !series.is_empty() {
        grouped.ranks = Some(SeriesSet { folder: folder.to_path_buf(), series, skipped: Vec::new() });
    }
    Ok(grouped)
}

impl SeriesSet {
    pub fn names(&self) -> Vec<String> {
        self.series.iter().map(|series| series.name.clone()).collect()
    }

    pub fn skipped(&self) -> Vec<String> {
        self.skipped.iter().map(|series| series.name.clone()).collect()
    }

    pub fn skipped_files(&self) -> impl Iterator<Item = &PathBuf> {
        self.skipped.iter().flat_map(|series| &series.files).map(|(_, path)| path)
    }

    /// The series whose names say how many files they have.
    ///
    /// # Errors
    /// `Malformed` and `Conflict` where the numbers of one contradict each other.
    pub fn numbered(&self) -> Result<Vec<NumberedSet>> {
        let sized = |series: &Series| {
            let (size, _) = series.ranks(&self.folder)?;
            Ok(size.map(|size| NumberedSet::new(series.name.clone(), size, series.files.clone())))
        };
        self.series.iter().filter_map(|series| sized(series).transpose()).collect()
    }

    /// Ranks that have files.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> {
        self.series.iter().flat_map(|series| &series.files).map(|(name, _)| Rank(name.rank))
    }

    /// Keep the series of the choice.
    ///
    /// # Errors
    /// `Usage` where there is none of that name, or no way to tell which is the model.
    pub fn choose(mut self, choice: &SeriesChoice) -> Result<Self> {
        let all = self.names();
        let wanted: Vec<String> = match choice {
            SeriesChoice::All => return Ok(self),
            SeriesChoice::Model | SeriesChoice::ModelAndGradients if all.len() == 1 => return Ok(self),
            SeriesChoice::Model => vec![model_of(&all)],
            SeriesChoice::ModelAndGradients => {
                let gradients = all.iter().filter(|name| GRADIENTS.contains(&name.as_str())).cloned();
                std::iter::once(model_of(&all)).chain(gradients).collect()
            }
            SeriesChoice::Named(names) => names.clone(),
        };
        if let Some(missing) = wanted.iter().find(|name| !all.contains(name)) {
            return Err(Error::usage(
                format!("{} has no series `{missing}`", self.folder.display()),
                if all.iter().all(String::is_empty) {
                    String::from("its rank files are one series without a name: leave options::series out")
                } else {
                    format!("its series are {}: choose with options::series", short_list(&all, FEW))
                },
            ));
        }
        (self.series, self.skipped) = self.series.into_iter().partition(|series| wanted.contains(&series.name));
        Ok(self)
    }

    /// One catalog; several series are subtrees of it.
    ///
    /// # Errors
    /// As reading and merging rank files; `Missing` where ranks are.
    pub fn read(&self, files: &mut Files, options: &ReadOptions) -> Result<(LoadedFolder, Unflattened)> {
        let (mut read, mut gaps) = (Vec::new(), Vec::new());
        for series in &self.series {
            let (own, gap) = series.read(&self.folder, files, options)?;
            read.push(own);
            gaps.push(gap);
        }
        let model_beside = || self.model_beside(files.without_entries(), options);
        let flat = fsdp_flat::read(&self.folder, &mut read, &model_beside, &options.flat)?;
        let mut catalogs = Vec::new();
        for (SeriesFiles { files, .. }, gap) in read.into_iter().zip(gaps) {
            let mut catalog = merge(&files, options.plain())?;
            catalog.dropped = torch::dropped(&files);
            catalog.warnings.extend(gap);
            catalogs.push(catalog);
        }
        let mut loaded = self.join(catalogs);
        loaded.catalog.flat.clone_from(&flat.layout);
        loaded.catalog.warnings.extend(flat.warnings.iter().cloned());
        Ok((loaded, flat))
    }

    /// As [`read`](Self::read), for files that are no torch files: `read_ranks` reads those of a series.
    ///
    /// # Errors
    /// `Missing` where ranks are, and as `read_ranks`.
    pub fn read_by(
        &self,
        options: &ReadOptions,
        read_ranks: &mut dyn FnMut(&BTreeMap<u32, PathBuf>) -> Result<Catalog>,
    ) -> Result<LoadedFolder> {
        let mut catalogs = Vec::new();
        for series in &self.series {
            let (ranks, gap) = series.present(&self.folder, options, &|_| false)?;
            let mut catalog = read_ranks(&ranks)?;
            catalog.warnings.extend(gap);
            catalogs.push(catalog);
        }
        Ok(self.join(catalogs))
    }

    /// One catalog of one a series; several are subtrees of it.
    fn join(&self, mut catalogs: Vec<Catalog>) -> LoadedFolder {
        let part = |series: &Series, content| {
            let (names, world_size) = (Some(series.names()), series.world_size());
            CheckpointPart { folder: PathBuf::new(), content, names, world_size }
        };
        if let ([only], 1) = (self.series.as_slice(), catalogs.len()) {
            return LoadedFolder { catalog: catalogs.remove(0), parts: vec![part(only, PartContent::Whole)] };
        }
        let mut whole = Catalog::empty();
        let mut entries = Vec::new();
        let mut parts = Vec::new();
        for (series, catalog) in self.series.iter().zip(catalogs) {
            let state = adopt(&mut whole, catalog, Some(&series.name));
            entries.push((Value::Str(series.name.as_str().into()), state));
            parts.push(part(series, PartContent::Below(series.name.clone())));
        }
        whole.state = Value::Dict(Dict { entries, ..Dict::default() });
        LoadedFolder { catalog: whole, parts }
    }

    /// The model series, where it was not chosen.
    fn model_beside(&self, mut files: Files, options: &ReadOptions) -> Result<Option<Vec<RankFile>>> {
        let name = model_of(&self.skipped());
        let Some(series) = self.skipped.iter().find(|series| series.name == name) else { return Ok(None) };
        let (_, ranks) = series.ranks(&self.folder)?;
        load(&mut files, &ranks, options.unknown()).map(Some)
    }
}

/// `model`, or the only one that calls itself a model, as `pytorch_model` does.
fn model_of(names: &[String]) -> String {
    let models: Vec<&String> = names.iter().filter(|name| name.ends_with("model")).collect();
    match models.as_slice() {
        [only] => (*only).clone(),
        _ => String::from("model"),
    }
}

/// What to say where missing files are not needed.
pub const WITHOUT_THEM: &str =
    "replicas of the other ranks cover every tensor: options::allow_missing goes on without them";

/// Ranks whose files are not there.
struct MissingRanks {
    at: String,
    ranks: String,
    error: Error,
}

impl Series {
    /// The style of its names.
    fn names(&self) -> RankNames {
        let mut names = self.files[0].0.names.clone();
        self.files.iter().for_each(|(name, _)| names.widen(&name.names));
        names
    }

    /// How many ranks its files are of.
    fn world_size(&self) -> u32 {
        let sizes = self.files.iter().map(|(name, _)| name.world_size.unwrap_or(name.rank.saturating_add(1)));
        sizes.max().unwrap_or(0)
    }

    /// Its files, and what to say where some are missing.
    fn read(&self, folder: &Path, files: &mut Files, options: &ReadOptions) -> Result<(SeriesFiles, Option<String>)> {
        let covers = |ranks: &_| self.covers(folder, ranks, files.without_entries(), options);
        let (ranks, warning) = self.present(folder, options, &covers)?;
        let own = load(files, &ranks, options.unknown())?;
        Ok((SeriesFiles { name: self.name.clone(), files: own, incomplete: warning.is_some() }, warning))
    }

    /// The files that are there, and what to say of those that are not. `covers` tells whether it goes on without them.
    fn present(
        &self,
        folder: &Path,
        options: &ReadOptions,
        covers: &dyn Fn(&BTreeMap<u32, PathBuf>) -> bool,
    ) -> Result<(BTreeMap<u32, PathBuf>, Option<String>)> {
        let (world_size, ranks) = self.ranks(folder)?;
        let warning = match self.gap(folder, world_size, &ranks, options)? {
            None => None,
            Some(gap) if options.allow_missing => Some(format!(
                "{}: read without {}; a tensor that only such a rank had would not be noticed",
                gap.at, gap.ranks
            )),
            Some(gap) => {
                return Err(if covers(&ranks) { gap.error.missing_hint(WITHOUT_THEM) } else { gap.error });
            }
        };
        Ok((ranks, warning))
    }

    /// Whether these ranks alone have every element of every tensor. That they know every tensor is only likely, where
    /// all of them know the same.
    fn covers(&self, folder: &Path, ranks: &BTreeMap<u32, PathBuf>, mut files: Files, options: &ReadOptions) -> bool {
        let Ok(files) = load(&mut files, ranks, options.unknown()) else { return false };
        let mut own = [SeriesFiles { name: self.name.clone(), files, incomplete: true }];
        if fsdp_flat::read(folder, &mut own, &|| Ok(None), &options.flat).is_err() {
            return false;
        }
        let [SeriesFiles { files: loaded, .. }] = own;
        let names = |file: &RankFile| {
            let mut names = HashSet::new();
            path::tensors(&file.contents.value, &path::Path::default(), &mut |path, _| _ = names.insert(path.clone()));
            names
        };
        let Some((first, others)) = loaded.split_first() else { return false };
        let known = names(first);
        others.iter().all(|file| names(file) == known)
            && options.declared_layout.is_none()
            && merge(&loaded, PlainKind::Replicas)
                .is_ok_and(|catalog| catalog.tensors.iter().all(|entry| entry.tilings().is_ok()))
    }

    /// The files by rank, and the world size in their names.
    fn ranks(&self, folder: &Path) -> Result<(Option<u32>, BTreeMap<u32, PathBuf>)> {
        let mut sizes: BTreeMap<Option<u32>, BTreeMap<u32, PathBuf>> = BTreeMap::new();
        for (name, path) in &self.files {
            let ranks = sizes.entry(name.world_size).or_default();
            if let Some(other) = ranks.insert(name.rank, path.clone()) {
                let found = format!("{} as well", other.display());
                return Err(Error::malformed(path, "file name", format!("the only file of rank {}", name.rank), found));
            }
        }
        let names: Vec<String> =
            sizes.keys().map(|size| size.map_or_else(|| String::from("no size"), |size| size.to_string())).collect();
        let mut sizes = sizes.into_iter();
        match (sizes.next(), sizes.next()) {
            (Some(only), None) => Ok(only),
            _ => Err(Error::Catalog(CatalogError::Conflict {
                fqn: format!("{}: series `{}`", folder.display(), self.name),
                what: "the world size",
                between: String::from("its files"),
                detail: format!(
                    "expected one world size, found files of {}",
                    short_list(&names, FEW).replace(", ", " and ")
                ),
                hint: Some(String::from(
                    "move the files of one of them into another folder; options::series cannot tell them apart",
                )),
            })),
        }
    }

    /// A set of files that are numbered from 1.
    fn set(self, folder: &Path) -> Result<NumberedSet> {
        let (size, files) = self.ranks(folder)?;
        let size = size.unwrap_or_default();
        if let Some(highest) = files.keys().next_back().filter(|highest| **highest > size) {
            let at = format!("files `{}`", self.name);
            return Err(Error::malformed(folder, at, format!("files up to {size}"), format!("file {highest}")));
        }
        Ok(NumberedSet::new(self.name, size, self.files))
    }

    /// Ranks below the world size that have no file.
    fn gap(
        &self,
        folder: &Path,
        world_size: Option<u32>,
        ranks: &BTreeMap<u32, PathBuf>,
        options: &ReadOptions,
    ) -> Result<Option<MissingRanks>> {
        let (lowest, highest) = (*ranks.keys().next().unwrap_or(&0), *ranks.keys().next_back().unwrap_or(&0));
        let size = world_size.unwrap_or(highest.saturating_add(1));
        let at = format!("series `{}`", self.name);
        // Without a world size, rank 0 may as well be missing.
        let from_one = match world_size {
            Some(size) => size == highest,
            None => ranks.len() > 1 && !options.allow_missing,
        };
        if lowest == 1 && from_one && ranks.len() as u64 == u64::from(highest) {
            return Err(Error::unsupported(
                format!("{}: {at}: its files count from 1 to {highest}, and ranks count from 0", folder.display()),
                "rename the files so that the first one is rank 0; or rank 0 is missing",
            ));
        }
        if highest >= size {
            return Err(Error::malformed(folder, at, format!("ranks below {size}"), format!("rank {highest}")));
        }
        let present = ranks.keys().copied();
        let missing = size.checked_sub(1).and_then(|highest| Numbers::missing(0..=highest, present));
        Ok(missing.map(|numbers| {
            let ranks = numbers.short("rank", "ranks");
            let error = Error::Format(FormatError::Missing {
                path: folder.to_path_buf(),
                at: at.clone(),
                expected: format!("the files of {size} ranks"),
                missing: ranks.clone(),
                hint: None,
            })
            .naming(&numbers.names("rank", "ranks"));
            MissingRanks { at: format!("{}: {at}", folder.display()), ranks, error }
        }))
    }
}
