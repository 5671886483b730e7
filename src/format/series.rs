//! Finds and reads series of rank files in one folder: `model_world_size_8_rank_3.pt` next to
//! `optim_world_size_8_rank_3.pt`.
//!
//! Ranks count from 0, as in `torch.distributed`. Every rank of a series must have a file, because the data of a
//! missing rank cannot be restored. If other ranks hold replicas of the missing rank's data, the user may continue
//! without its file (`options::allow_missing`).

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::fsdp_flat::{self, SeriesFiles, Unflattened};
use super::parts::{CheckpointPart, LoadedFolder, join_series};
use super::rank_names::{Numbering, RankName, RankNamePattern, is_composer_step};
use super::shortfall::{list_missing_names, only_found};
use super::torch;
use super::torch::RankFile;
use super::torch::load::load;
use super::torch::ranks::{PlainKind, has_layout_attributes, merge};
use super::{ReadOptions, folder_of};
use crate::catalog::state_dict::GRADIENTS;
use crate::catalog::unreadable::UnreadableKind;
use crate::catalog::{Catalog, Unreadable, path};
use crate::error::{CatalogError, Error, Result};
use crate::layout::Rank;
use crate::name_list::{FEW, Numbers, natural_order, short_list};
use crate::storage::Files;
use crate::storage::lookup::{self, FileKind};

/// The series of rank files to read from a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SeriesChoice {
    #[default]
    All,
    /// The model series. A folder with a single series is read whatever the name of the series is.
    Model,
    /// The model series and, if they exist, series of gradients. A folder with a single series is read whatever the
    /// name of the series is.
    ModelAndGradients,
    Named(Vec<String>),
}

/// Returns a description such as `is 1 of 8 files of its series`, and the names of the other files; `None` if the file
/// belongs to no series or set of several files.
///
/// # Errors
/// `Io` if the folder of the file cannot be listed.
pub fn describe_single_file(path: &Path) -> Result<Option<(String, Vec<String>)>> {
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
    let others = if others.is_empty() { String::new() } else { format!(" (next to it: {})", short_list(&others, FEW)) };
    // Hugging Face numbers the files of a set from 1: `00001-of-00002`.
    let group = if name.numbering == Numbering::OfTotal { "set" } else { "series" };
    Ok((count > 1).then(|| (format!("is 1 of {count} files of its {group}{others}{absent}"), missing)))
}

fn siblings(path: &Path, own: &RankName) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in lookup::list(folder_of(path))? {
        let is_of_series = entry.path.extension().is_some()
            && RankName::parse(&entry.path).is_some_and(|name| name.series == own.series);
        // If the file of a rank is a dangling link, the rank still belongs to the series.
        if is_of_series && matches!(entry.kind()?, FileKind::File | FileKind::Dangling) {
            found.push(entry.path);
        }
    }
    Ok(found)
}

/// The rank files of one series. The numbers in the file names are not checked yet.
#[derive(Debug)]
struct Series {
    name: String,
    files: Vec<(RankName, PathBuf)>,
}

/// The series of rank files in a folder, divided into chosen and skipped series.
#[derive(Debug)]
pub struct SeriesSet {
    folder: PathBuf,
    series: Vec<Series>,
    /// The series of the folder that will not be read.
    skipped: Vec<Series>,
}

/// The torch files of a folder: series of rank files, sets of numbered files, and other files.
#[derive(Debug)]
pub struct GroupedFiles {
    pub rank_files: Option<SeriesSet>,
    /// Sets: files that form one checkpoint together. Their names are numbered from 1, and the folder has no index.
    pub sets: Vec<NumberedSet>,
    pub plain: Vec<PathBuf>,
}

/// A set of numbered files. The file names state the number of files: `model-00001-of-00004`.
#[derive(Clone, Debug)]
pub struct NumberedSet {
    pub name: String,
    /// The number of files in the set, as stated in the file names.
    pub size: u32,
    first: u32,
    files: BTreeMap<u32, PathBuf>,
    names: RankNamePattern,
}

impl NumberedSet {
    /// Returns a set of numbered files. `files` must not be empty, because the pattern of the names is taken from the
    /// first file name.
    fn new(name: String, size: u32, files: Vec<(RankName, PathBuf)>) -> Self {
        let mut names = files[0].0.pattern.clone();
        files.iter().for_each(|(name, _)| names.widen_padding(&name.pattern));
        let is_numbered_from_one = files.iter().all(|(name, _)| name.numbering == Numbering::OfTotal && name.rank > 0);
        let files = files.into_iter().map(|(name, path)| (name.rank, path)).collect();
        Self { name, size, first: u32::from(is_numbered_from_one), files, names }
    }

    /// Returns the names of missing files.
    pub fn missing_names(&self) -> Vec<String> {
        let all = self.first..self.size.saturating_add(self.first);
        let count = all.len().saturating_sub(self.files.range(all.clone()).count());
        let missing = all.filter(|number| !self.files.contains_key(number));
        list_missing_names(count as u64, missing.map(|number| self.names.render(number, self.size)))
    }

    /// Returns the paths of the files, in the order of their numbers.
    pub fn into_paths(self) -> Vec<PathBuf> {
        self.files.into_values().collect()
    }
}

/// Groups the files of a folder by their names.
///
/// # Errors
/// `Malformed` or `Conflict` if the numbers in the file names of a set contradict each other.
pub fn group(folder: &Path, paths: &[PathBuf]) -> Result<GroupedFiles> {
    let mut found: BTreeMap<String, Vec<(RankName, PathBuf)>> = BTreeMap::new();
    let mut grouped = GroupedFiles { rank_files: None, sets: Vec::new(), plain: Vec::new() };
    for path in paths {
        match RankName::parse(path) {
            Some(name) => found.entry(name.series.clone()).or_default().push((name, path.clone())),
            None => grouped.plain.push(path.clone()),
        }
    }
    remove_second_names(&mut found)?;
    let mut series = Vec::new();
    for (name, files) in found {
        let own = Series { name, files };
        if let [(only, path)] = own.files.as_slice()
            && (only.numbering, only.rank) == (Numbering::TensorParallel, 0)
        {
            // The only file has whole tensors.
            grouped.plain.push(path.clone());
            continue;
        }
        let is_numbered_from_one =
            own.files.iter().all(|(name, _)| name.numbering == Numbering::OfTotal && name.rank > 0);
        if is_numbered_from_one {
            grouped.sets.push(own.into_numbered_set(folder)?);
        } else {
            series.push(own);
        }
    }
    series.sort_by_key(|series| (series.name != "model", series.name.clone()));
    if !series.is_empty() {
        grouped.rank_files = Some(SeriesSet { folder: folder.to_path_buf(), series, skipped: Vec::new() });
    }
    Ok(grouped)
}

/// Removes the series `latest` if all its files are links to files of other series. Composer makes such links.
fn remove_second_names(found: &mut BTreeMap<String, Vec<(RankName, PathBuf)>>) -> Result<()> {
    const LATEST: &str = "latest";
    let Some(latest) = found.get(LATEST) else { return Ok(()) };
    let others = found.iter().filter(|(name, _)| *name != LATEST).flat_map(|(_, files)| files);
    let others = others.map(|(_, path)| lookup::resolve(path)).collect::<Result<HashSet<_>>>()?;
    for (_, path) in latest {
        let target = lookup::resolve(path)?;
        if target.is_none() || !others.contains(&target) {
            return Ok(());
        }
    }
    found.remove(LATEST);
    Ok(())
}

impl SeriesSet {
    /// Returns a set of series with these names and files, for formats whose file names do not give the rank.
    pub fn of_items(folder: &Path, items: Vec<(String, BTreeMap<u32, PathBuf>)>) -> Self {
        let series = |(name, files): (String, BTreeMap<u32, PathBuf>)| {
            let parsed = |rank: u32| RankName {
                series: name.clone(),
                rank,
                world_size: None,
                numbering: Numbering::Rank,
                pattern: RankNamePattern::new_series(&name),
            };
            let files = files.into_iter().map(|(rank, path)| (parsed(rank), path)).collect();
            Series { name: name.clone(), files }
        };
        Self { folder: folder.to_path_buf(), series: items.into_iter().map(series).collect(), skipped: Vec::new() }
    }

    /// Returns the paths of all files.
    pub fn files(&self) -> impl Iterator<Item = &PathBuf> {
        self.series.iter().chain(&self.skipped).flat_map(|series| &series.files).map(|(_, path)| path)
    }

    /// Returns the names of the chosen series.
    pub fn names(&self) -> Vec<String> {
        self.series.iter().map(|series| series.name.clone()).collect()
    }

    /// Returns the names of the series of this checkpoint that were not chosen. Leaves out series that are other
    /// versions of the checkpoint, such as other training steps, because they are checkpoints of their own.
    pub fn skipped(&self) -> Vec<String> {
        self.skipped.iter().filter(|series| !series.is_version()).map(|series| series.name.clone()).collect()
    }

    /// Returns the files of the series that were not chosen.
    pub fn skipped_files(&self) -> impl Iterator<Item = &PathBuf> {
        self.skipped.iter().flat_map(|series| &series.files).map(|(_, path)| path)
    }

    /// Returns a set of numbered files for each chosen series whose file names state the number of files.
    ///
    /// # Errors
    /// `Malformed` or `Conflict` if the numbers in the file names of one series contradict each other.
    pub fn numbered_sets(&self) -> Result<Vec<NumberedSet>> {
        let sized = |series: &Series| {
            let (size, _) = series.ranks(&self.folder)?;
            Ok(size.map(|size| NumberedSet::new(series.name.clone(), size, series.files.clone())))
        };
        self.series.iter().filter_map(|series| sized(series).transpose()).collect()
    }

    /// Returns the series and the rank of each file of the chosen series.
    pub fn ranks(&self) -> impl Iterator<Item = (&str, Rank)> {
        let files = self.series.iter().flat_map(|series| series.files.iter().map(move |(name, _)| (series, name)));
        files.map(|(series, name)| (series.name.as_str(), Rank(name.rank)))
    }

    /// Divides the series of this set by `choice`, and returns the set: the series that `choice` selects become the
    /// chosen series, and all other series become skipped series.
    ///
    /// # Errors
    /// `Usage` in three cases: `choice` names a series that does not exist; `choice` names no series, although several
    /// series are complete checkpoints; the model series cannot be determined.
    pub fn choose(mut self, choice: &SeriesChoice) -> Result<Self> {
        let all = self.names();
        if !matches!(choice, SeriesChoice::Named(_)) {
            self.refuse_several_versions()?;
        }
        let selected: Vec<String> = match choice {
            SeriesChoice::All => return Ok(self),
            SeriesChoice::Model | SeriesChoice::ModelAndGradients if all.len() == 1 => return Ok(self),
            SeriesChoice::Model => vec![model_series(&all)],
            SeriesChoice::ModelAndGradients => {
                let gradients = all.iter().filter(|name| GRADIENTS.contains(&name.as_str())).cloned();
                std::iter::once(model_series(&all)).chain(gradients).collect()
            }
            SeriesChoice::Named(names) => names.clone(),
        };
        if let Some(missing) = selected.iter().find(|name| !all.contains(name)) {
            return Err(Error::usage(
                format!("{} has no series `{missing}`", self.folder.display()),
                if all.iter().all(String::is_empty) {
                    String::from("remove options::series, because the rank files are one series without a name")
                } else {
                    format!("choose one of these series with options::series: {}", short_list(&all, FEW))
                },
            ));
        }
        (self.series, self.skipped) = self.series.into_iter().partition(|series| selected.contains(&series.name));
        Ok(self)
    }

    /// Checks that at most one series is a complete checkpoint ([`Series::is_version`]). The user must choose one of
    /// several: makani overwrites its versions in turn, so the numbers in the names do not show which version is the
    /// newest.
    fn refuse_several_versions(&self) -> Result<()> {
        let mut versions: Vec<&Series> = self.series.iter().filter(|series| series.is_version()).collect();
        versions.sort_by(|left, right| natural_order(&left.name, &right.name));
        let last_step = versions.last().filter(|series| is_composer_step(&series.name));
        if versions.len() < 2 {
            return Ok(());
        }
        let names: Vec<&str> = versions.iter().map(|series| series.name.as_str()).collect();
        let mut changed = Vec::new();
        for series in &versions {
            changed.push((series.changed()?, &*series.name));
        }
        changed.sort_unstable();
        let newest = match (changed.as_slice(), last_step) {
            (_, Some(step)) => format!("options::series {}, the newest step", step.name),
            ([.., (before, _), (last, name)], _) if last > before => {
                format!("options::series {name}, the last one written")
            }
            _ => format!("options::series {}", names[0]),
        };
        Err(Error::usage(
            format!("{} contains several checkpoints: series {}", self.folder.display(), short_list(&names, FEW)),
            format!("choose one of them with {newest}"),
        )
        .naming(&names))
    }

    /// Reads the chosen series into one catalog. If there are several series, each series becomes a subtree of the
    /// state dict.
    ///
    /// # Errors
    /// The errors of reading and merging rank files; `Missing` if ranks are missing.
    pub fn read(&self, files: &mut Files, options: &ReadOptions) -> Result<(LoadedFolder, Unflattened)> {
        let (mut read, mut missing_warnings) = (Vec::new(), Vec::new());
        for series in &self.series {
            let (own, gap) = series.read(&self.folder, files, options)?;
            read.push(own);
            missing_warnings.push(gap);
        }
        let model_beside = || self.read_skipped_model(files.without_entries(), options);
        let flat = fsdp_flat::read(&self.folder, &mut read, &model_beside, &options.flat)?;
        let mut catalogs = Vec::new();
        // One series may have the parameters with their layouts, and another series may have the optimizer state.
        let has_parts = read.iter().any(|series| has_layout_attributes(&series.files));
        let plain = match options.plain() {
            PlainKind::Replicas if has_parts => PlainKind::Parts,
            plain => plain,
        };
        for (series, (SeriesFiles { files, .. }, gap)) in self.series.iter().zip(read.into_iter().zip(missing_warnings))
        {
            let has_shards = plain != PlainKind::Declared && series.has_shards();
            let mut catalog = merge(&files, if has_shards { PlainKind::Parts } else { plain })?;
            if has_shards {
                mark_shards(&mut catalog, &self.folder);
            }
            catalog.dropped = torch::dropped_objects(&files);
            catalog.warnings.extend(gap);
            catalogs.push(catalog);
        }
        let mut loaded = self.join(catalogs);
        loaded.catalog.flat.clone_from(&flat.layout);
        loaded.catalog.warnings.extend(flat.warnings.iter().cloned());
        Ok((loaded, flat))
    }

    /// Reads the chosen series like [`read`](Self::read), but for files that are not torch files. The function
    /// `read_ranks` reads the files of one series.
    ///
    /// # Errors
    /// `Missing` if ranks are missing, and the errors of `read_ranks`.
    pub fn read_with(
        &self,
        options: &ReadOptions,
        read_ranks: &mut dyn FnMut(&BTreeMap<u32, PathBuf>) -> Result<Catalog>,
    ) -> Result<LoadedFolder> {
        let mut catalogs = Vec::new();
        for series in &self.series {
            let (ranks, gap) = series.present_ranks(&self.folder, options, &|_| false)?;
            let mut catalog = read_ranks(&ranks)?;
            catalog.warnings.extend(gap);
            catalogs.push(catalog);
        }
        Ok(self.join(catalogs))
    }

    /// Returns the names of the files that the chosen series lack.
    ///
    /// # Errors
    /// `Malformed` or `Conflict` if the numbers in the file names of one series contradict each other.
    pub fn missing_files(&self, options: &ReadOptions) -> Result<Vec<String>> {
        let mut missing = Vec::new();
        for series in &self.series {
            let (world_size, ranks) = series.ranks(&self.folder)?;
            let gap = series.missing_ranks(&self.folder, world_size, &ranks, options)?;
            missing.extend(gap.into_iter().flat_map(|gap| gap.files));
        }
        Ok(missing)
    }

    /// Joins the catalogs of the chosen series.
    fn join(&self, catalogs: Vec<Catalog>) -> LoadedFolder {
        let loaded = |(series, catalog): (&Series, Catalog)| {
            let names = (!series.files.is_empty()).then(|| series.names());
            (series.name.clone(), CheckpointPart::whole(names, series.world_size()), catalog)
        };
        join_series(self.series.iter().zip(catalogs).map(loaded).collect())
    }

    /// Reads the model series if it is among the skipped series. Returns `None` if no skipped series is the model
    /// series.
    fn read_skipped_model(&self, mut files: Files, options: &ReadOptions) -> Result<Option<Vec<RankFile>>> {
        let name = model_series(&self.skipped());
        let Some(series) = self.skipped.iter().find(|series| series.name == name) else { return Ok(None) };
        let (_, ranks) = series.ranks(&self.folder)?;
        load(&mut files, &ranks, options.unknown()).map(Some)
    }
}

/// Marks all plain tensors of several ranks as [`Unreadable`], because they may be shards of larger tensors: the file names show
/// that the files have shards. `folder` is the folder of the files.
fn mark_shards(catalog: &mut Catalog, folder: &Path) {
    for entry in catalog.tensors.iter_mut().filter(|entry| !entry.is_shared() && entry.unreadable.is_none()) {
        let kind = UnreadableKind::UnknownLayout {
            what: format!("{}: the tensor may be a shard, and the files do not record its layout", entry.fqn),
            hint: String::from(
                "name the side of a weight map that has the layout, such as options::map llama:meta:hf, or declare the layout with \
                 options::src_mesh and options::src_placements",
            ),
        };
        entry.unreadable = Some(Box::new(Unreadable { file: folder.to_path_buf(), kind }));
    }
}

/// Returns the only name that ends in `model`, such as `pytorch_model`. If there is no such name, or more than one,
/// returns `model`.
fn model_series(names: &[String]) -> String {
    let models: Vec<&String> = names.iter().filter(|name| name.ends_with("model")).collect();
    match models.as_slice() {
        [only] => (*only).clone(),
        _ => String::from("model"),
    }
}

/// The hint for missing rank files, if the existing rank files have every element of every tensor.
pub const ALLOW_MISSING_HINT: &str =
    "use options::allow_missing to continue without these files: replicas on the other ranks cover every tensor";

/// The ranks of a series that have no file.
struct MissingRanks {
    at: String,
    /// The names of the missing files.
    files: Vec<String>,
    ranks: String,
    error: Error,
}

impl Series {
    /// Returns whether the series is one of several complete checkpoints that a trainer keeps in one folder: a version
    /// of makani (`ckpt_mp0_v0.tar`, `ckpt_mp0_v1.tar`, `best_ckpt_mp0.tar`), or a step of Composer
    /// (`ep1-ba500-rank0.pt`).
    fn is_version(&self) -> bool {
        let is_model_parallel = |(name, _): &(RankName, PathBuf)| name.numbering == Numbering::ModelParallel;
        self.files.first().is_some_and(is_model_parallel) || is_composer_step(&self.name)
    }

    /// Returns whether the file names show that the plain tensors of the files are shards.
    fn has_shards(&self) -> bool {
        self.files.first().is_some_and(|(name, _)| name.numbering == Numbering::TensorParallel)
    }

    /// Returns the pattern of the file names of the series.
    fn names(&self) -> RankNamePattern {
        let mut names = self.files[0].0.pattern.clone();
        self.files.iter().for_each(|(name, _)| names.widen_padding(&name.pattern));
        names
    }

    /// Returns the time of the last change of any file of the series.
    fn changed(&self) -> Result<Option<SystemTime>> {
        let mut latest = None;
        for (_, path) in &self.files {
            let metadata = std::fs::metadata(path).map_err(lookup::refused("open", path))?;
            latest = latest.max(metadata.modified().ok());
        }
        Ok(latest)
    }

    /// Returns the number of ranks: the world size in the file names, or the highest rank plus one.
    fn world_size(&self) -> u32 {
        let sizes = self.files.iter().map(|(name, _)| name.world_size.unwrap_or(name.rank.saturating_add(1)));
        sizes.max().unwrap_or(0)
    }

    /// Reads the files of the series; also returns a warning if some files are missing.
    fn read(&self, folder: &Path, files: &mut Files, options: &ReadOptions) -> Result<(SeriesFiles, Option<String>)> {
        let covers = |ranks: &_| self.covers(folder, ranks, files.without_entries(), options);
        let (ranks, warning) = self.present_ranks(folder, options, &covers)?;
        let own = load(files, &ranks, options.unknown())?;
        Ok((SeriesFiles { name: self.name.clone(), files: own, has_missing_ranks: warning.is_some() }, warning))
    }

    /// Returns the existing files by rank, and a warning about missing files. If `covers` returns true (the existing
    /// files have every element), the error about missing files suggests to continue without the missing files.
    fn present_ranks(
        &self,
        folder: &Path,
        options: &ReadOptions,
        covers: &dyn Fn(&BTreeMap<u32, PathBuf>) -> bool,
    ) -> Result<(BTreeMap<u32, PathBuf>, Option<String>)> {
        let (world_size, ranks) = self.ranks(folder)?;
        let warning = match self.missing_ranks(folder, world_size, &ranks, options)? {
            None => None,
            Some(gap) if options.allow_missing => Some(format!(
                "{} {} read without {}; dtshard cannot detect a tensor that only a missing rank had",
                gap.at,
                if self.name.is_empty() { "are" } else { "is" },
                gap.ranks
            )),
            Some(gap) if options.declared_layout.is_some() => {
                return Err(gap.error.missing_hint(
                    "copy the missing files into the folder; or use options::allow_missing to continue without these files, if \
                     other ranks hold replicas of their shards",
                ));
            }
            Some(gap) if options.show_incomplete => Some(only_found(&gap.error)),
            Some(gap) => {
                return Err(if covers(&ranks) { gap.error.missing_hint(ALLOW_MISSING_HINT) } else { gap.error });
            }
        };
        Ok((ranks, warning))
    }

    /// Returns whether the files in `ranks` have every element of every tensor. The function cannot detect a tensor
    /// that only missing ranks have. Such a tensor is unlikely if all existing files have the same tensor names, so the
    /// function returns false if these names differ.
    fn covers(&self, folder: &Path, ranks: &BTreeMap<u32, PathBuf>, mut files: Files, options: &ReadOptions) -> bool {
        if self.has_shards() {
            return false;
        }
        let Ok(files) = load(&mut files, ranks, options.unknown()) else { return false };
        let mut own = [SeriesFiles { name: self.name.clone(), files, has_missing_ranks: true }];
        if fsdp_flat::read(folder, &mut own, &|| Ok(None), &options.flat).is_err() {
            return false;
        }
        let [SeriesFiles { files: loaded, .. }] = own;
        let names = |file: &RankFile| {
            let mut names = HashSet::new();
            path::tensors(&file.contents.value, &path::Path::default(), &mut |path, _| _ = names.insert(path.clone()));
            names
        };
        if fsdp_flat::may_have_flat_state(&loaded) {
            return false;
        }
        let Some((first, others)) = loaded.split_first() else { return false };
        let known = names(first);
        others.iter().all(|file| names(file) == known)
            && merge(&loaded, PlainKind::Replicas)
                .is_ok_and(|catalog| catalog.tensors.iter().all(|entry| entry.tilings().is_ok()))
    }

    /// Returns the world size that the file names state, and the files by rank.
    fn ranks(&self, folder: &Path) -> Result<(Option<u32>, BTreeMap<u32, PathBuf>)> {
        let mut sizes: BTreeMap<Option<u32>, BTreeMap<u32, PathBuf>> = BTreeMap::new();
        for (name, path) in &self.files {
            let ranks = sizes.entry(name.world_size).or_default();
            if let Some(other) = ranks.insert(name.rank, path.clone()) {
                let found = format!("also {}", other.display());
                return Err(Error::malformed(path, "file name", format!("one file for rank {}", name.rank), found));
            }
        }
        let names: Vec<String> =
            sizes.keys().map(|size| size.map_or_else(|| String::from("unknown"), |size| size.to_string())).collect();
        let mut sizes = sizes.into_iter();
        match (sizes.next(), sizes.next()) {
            (Some(only), None) => Ok(only),
            _ => Err(Error::Catalog(CatalogError::Conflict {
                fqn: self.label(),
                what: "the world size",
                between: String::from("its files"),
                detail: format!(
                    "expected one world size, found files of {} ranks",
                    short_list(&names, FEW).replace(", ", " and ")
                ),
                hint: Some(String::from(
                    "move the files of one world size into another folder, because options::series cannot distinguish them",
                )),
            })
            .within(folder)),
        }
    }

    /// Converts a series whose files are numbered from 1 to a set of numbered files.
    fn into_numbered_set(self, folder: &Path) -> Result<NumberedSet> {
        let (size, files) = self.ranks(folder)?;
        let size = size.unwrap_or_default();
        if let Some(highest) = files.keys().next_back().filter(|highest| **highest > size) {
            let at = format!("files `{}`", self.name);
            return Err(Error::malformed(folder, at, format!("files up to {size}"), format!("file {highest}")));
        }
        Ok(NumberedSet::new(self.name, size, self.files))
    }

    /// Returns the name of the series for messages: `series NAME`, or `the rank files` if the file names, such as
    /// `rank_0.pt`, contain no name of a series.
    fn label(&self) -> String {
        if self.name.is_empty() { String::from("the rank files") } else { format!("series `{}`", self.name) }
    }

    /// Returns the ranks below the world size that have no file.
    fn missing_ranks(
        &self,
        folder: &Path,
        world_size: Option<u32>,
        ranks: &BTreeMap<u32, PathBuf>,
        options: &ReadOptions,
    ) -> Result<Option<MissingRanks>> {
        let (lowest, highest) = (*ranks.keys().next().unwrap_or(&0), *ranks.keys().next_back().unwrap_or(&0));
        let size = world_size.unwrap_or(highest.saturating_add(1));
        let at = self.label();
        // Files that are numbered from 1 to the highest number may be all files, or rank 0 may be missing.
        let is_numbered_from_one = match world_size {
            Some(size) => size == highest,
            None => ranks.len() > 1 && !options.allow_missing,
        };
        if lowest == 1 && is_numbered_from_one && ranks.len() as u64 == u64::from(highest) {
            return Err(Error::unsupported(
                format!(
                    "{}: {at}: its files are numbered from 1 to {highest}, but ranks are numbered from 0",
                    folder.display()
                ),
                "rename the files so that the first one is rank 0, or add the missing file of rank 0",
            ));
        }
        if highest >= size {
            return Err(Error::malformed(folder, at, format!("ranks below {size}"), format!("rank {highest}")));
        }
        let present = ranks.keys().copied();
        let missing = size.checked_sub(1).and_then(|highest| Numbers::missing(0..=highest, present));
        Ok(missing.map(|numbers| {
            let ranks = numbers.short("rank", "ranks");
            let error = Error::missing(folder, at.clone(), format!("the files of {size} ranks"), ranks.clone())
                .naming(&numbers.names("rank", "ranks"));
            let name = |rank| self.names().render(rank, size);
            let files = list_missing_names(numbers.count(), numbers.iter().map(name));
            MissingRanks { at: format!("{}: {at}", folder.display()), files, ranks, error }
        }))
    }
}
