//! Series of rank files in one folder: `model_world_size_8_rank_3.pt` beside `optim_world_size_8_rank_3.pt`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::torch::ranks::{RankFile, merge};
use super::torch::reader;
use crate::catalog::{Catalog, Dict, Value};
use crate::error::{Error, Result};
use crate::layout::Rank;
use crate::storage::Files;

/// Which series of a folder to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SeriesChoice {
    #[default]
    All,
    /// The model; or the only one there is.
    Model,
    Named(Vec<String>),
}

/// What the name of a rank's file tells.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RankName {
    series: String,
    rank: u32,
    world_size: Option<u32>,
}

/// Take `model_world_size_8_rank_3` or `checkpoint_rank3_of_8` or `rank_3` apart; `None` where there is no rank in it.
fn parse_name(path: &Path) -> Option<RankName> {
    let stem = path.file_stem()?.to_str()?;
    let rank_at = stem.rfind("rank").filter(|at| stem[at + 4..].contains(|c: char| c.is_ascii_digit()))?;
    let rank = number_after(&stem[rank_at + 4..])?;
    let world_size = (stem.find("world_size").map(|at| (at, at + "world_size".len())))
        .or_else(|| stem[rank_at..].find("_of_").map(|at| (rank_at + at, rank_at + at + 3)))
        .and_then(|(at, end)| Some((at, number_after(&stem[end..])?)));
    let series_end = world_size.map_or(rank_at, |(at, _)| at.min(rank_at));
    let series = stem[..series_end].trim_end_matches(['_', '-', '.']);
    Some(RankName { series: series.to_owned(), rank, world_size: world_size.map(|(_, size)| size) })
}

/// The number after at most one separator.
fn number_after(text: &str) -> Option<u32> {
    let text = text.strip_prefix(['_', '-', '.']).unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

/// What to say where one rank's file is given and the whole is needed.
pub fn fragment(path: &Path) -> Option<String> {
    let name = parse_name(path)?;
    let count = match name.world_size {
        Some(size) => size,
        None => u32::try_from(siblings(path)?.len()).ok()?,
    };
    (count > 1).then(|| format!("1 of {count} files of its series"))
}

fn siblings(path: &Path) -> Option<Vec<PathBuf>> {
    let own = parse_name(path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    Some(entries.filter(|path| parse_name(path).is_some_and(|name| name.series == own.series)).collect())
}

/// The series of a folder, each complete.
#[derive(Debug)]
pub struct SeriesSet {
    folder: PathBuf,
    /// Rank files by series, ascending by rank.
    series: Vec<(String, Vec<(Rank, PathBuf)>)>,
    /// Series of the folder that were not chosen.
    skipped: Vec<String>,
}

impl SeriesSet {
    /// Group the rank files among `paths`; `None` where there are none.
    ///
    /// # Errors
    /// `Malformed` where a series is incomplete or of two world sizes.
    pub fn group(folder: &Path, paths: &[PathBuf]) -> Result<Option<Self>> {
        let mut found: BTreeMap<String, BTreeMap<Option<u32>, BTreeMap<u32, PathBuf>>> = BTreeMap::new();
        for path in paths {
            let Some(name) = parse_name(path) else { continue };
            let ranks = found.entry(name.series).or_default().entry(name.world_size).or_default();
            if let Some(other) = ranks.insert(name.rank, path.clone()) {
                let found = format!("{} as well", other.display());
                return Err(Error::malformed(path, "file name", format!("the only file of rank {}", name.rank), found));
            }
        }
        if found.is_empty() {
            return Ok(None);
        }
        let mut series = Vec::new();
        for (name, sizes) in found {
            if sizes.len() > 1 {
                let sizes: Vec<String> = sizes
                    .keys()
                    .map(|size| size.map_or_else(|| String::from("no size"), |size| size.to_string()))
                    .collect();
                let found = format!("files of {}", sizes.join(" and "));
                return Err(Error::malformed(folder, format!("series `{name}`"), "one world size", found));
            }
            let (world_size, ranks) = sizes.into_iter().next().expect("one world size");
            check_complete(folder, &name, world_size, &ranks)?;
            series.push((name, ranks.into_iter().map(|(rank, path)| (Rank(rank), path)).collect()));
        }
        series.sort_by_key(|(name, _): &(String, _)| (name != "model", name.clone()));
        Ok(Some(Self { folder: folder.to_path_buf(), series, skipped: Vec::new() }))
    }

    pub fn names(&self) -> Vec<String> {
        self.series.iter().map(|(name, _)| name.clone()).collect()
    }

    pub fn skipped(&self) -> Vec<String> {
        self.skipped.clone()
    }

    /// Keep the series of the choice.
    ///
    /// # Errors
    /// `Usage` where there is none of that name, or no way to tell which is the model.
    pub fn choose(mut self, choice: &SeriesChoice) -> Result<Self> {
        let wanted: Vec<String> = match choice {
            SeriesChoice::All => return Ok(self),
            SeriesChoice::Model if self.series.len() == 1 => return Ok(self),
            SeriesChoice::Model => vec![String::from("model")],
            SeriesChoice::Named(names) => names.clone(),
        };
        let all = self.names();
        if let Some(missing) = wanted.iter().find(|name| !all.contains(name)) {
            return Err(Error::usage(
                format!("{} has no series `{missing}`", self.folder.display()),
                format!("its series are {}: choose with --series", all.join(", ")),
            ));
        }
        self.series.retain(|(name, _)| wanted.contains(name));
        self.skipped = all.into_iter().filter(|name| !wanted.contains(name)).collect();
        Ok(self)
    }

    /// One catalog; several series are subtrees of it.
    ///
    /// # Errors
    /// As reading and merging rank files.
    pub fn read(self, files: &mut Files) -> Result<Catalog> {
        let several = self.series.len() > 1;
        let mut whole = Catalog::empty();
        let mut entries = Vec::new();
        for (name, ranks) in self.series {
            let mut loaded = Vec::with_capacity(ranks.len());
            for (rank, path) in ranks {
                let file = files.add(&path)?;
                let contents = reader::read(files, files.whole(file), "")?;
                loaded.push(RankFile { rank: Some(rank), path, contents });
            }
            let mut catalog = merge(&loaded)?;
            if !several {
                return Ok(catalog);
            }
            adopt(&mut whole, &mut catalog, &name);
            entries.push((Value::Str(name), catalog.state));
        }
        whole.state = Value::Dict(Dict { entries, ..Dict::default() });
        Ok(whole)
    }
}

/// Move everything but the state of `part` into `whole`, where it is the subtree `name`.
fn adopt(whole: &mut Catalog, part: &mut Catalog, name: &str) {
    let shift = u32::try_from(whole.tensors.len()).expect("fewer than 2^32 tensors");
    part.state.shift_tensors(shift);
    let meshes: Vec<_> = part.meshes.drain(..).map(|mesh| whole.intern_mesh(mesh)).collect();
    for mut entry in part.tensors.drain(..) {
        entry.fqn = format!("{name}.{}", entry.fqn).into();
        if let Some(sharding) = &mut entry.sharding {
            sharding.mesh = meshes[sharding.mesh.0 as usize];
        }
        whole.tensors.push(entry);
    }
    whole.archives.append(&mut part.archives);
    whole.warnings.append(&mut part.warnings);
}

fn check_complete(folder: &Path, name: &str, world_size: Option<u32>, ranks: &BTreeMap<u32, PathBuf>) -> Result<()> {
    let highest = *ranks.last_key_value().expect("a series has a file").0;
    let size = world_size.unwrap_or(highest.saturating_add(1));
    let at = format!("series `{name}`");
    if highest >= size {
        return Err(Error::malformed(folder, at, format!("ranks below {size}"), format!("rank {highest}")));
    }
    // A world size is a number in a file name: compare before listing, so that a huge one costs nothing.
    if ranks.len() as u64 == u64::from(size) {
        return Ok(());
    }
    const SHOWN: usize = 16;
    let missing: Vec<Rank> = (0..size).filter(|rank| !ranks.contains_key(rank)).take(SHOWN).map(Rank).collect();
    let count = u64::from(size) - ranks.len() as u64;
    let more = if count > SHOWN as u64 { format!(" and {} more", count - SHOWN as u64) } else { String::new() };
    Err(Error::Missing {
        path: folder.to_path_buf(),
        at,
        expected: format!("the files of {size} ranks"),
        missing: format!("{}{more}", crate::catalog::list_ranks(&missing)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_found_in_common_names() {
        let parse = |name: &str| parse_name(Path::new(name)).map(|name| (name.series, name.rank, name.world_size));
        assert_eq!(parse("model_world_size_8_rank_3.pt"), Some(("model".into(), 3, Some(8))));
        assert_eq!(parse("extra_state_world_size_2_rank_0.pt"), Some(("extra_state".into(), 0, Some(2))));
        assert_eq!(parse("rank_12.pt"), Some((String::new(), 12, None)));
        assert_eq!(parse("optim-rank7.pt"), Some(("optim".into(), 7, None)));
        assert_eq!(parse("model_rank_1_of_4.pt"), Some(("model".into(), 1, Some(4))));
        assert_eq!(parse("model.pt"), None);
        assert_eq!(parse("frank.pt"), None);
    }
}
