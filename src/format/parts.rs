//! Joins checkpoints that are read together: several series of rank files in a folder, or several folders next to each
//! other.
//!
//! Each checkpoint is read separately and becomes one part of a joined state dict: a subtree under the name of the
//! series or folder, or keys that are merged with the keys of the other parts. A list of [`CheckpointPart`]s records
//! the origin of each part, so that the parts can be written separately again.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::rank_names::RankNamePattern;
use crate::catalog::path::key_text;
use crate::catalog::{Catalog, Dict, Value, shift_tensors};
use crate::error::Result;
use crate::storage::lookup::{self, FileKind};

/// One of several checkpoints that are joined to one state dict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointPart {
    /// The folder relative to the checkpoint's root; empty for the root.
    pub folder: PathBuf,
    pub content: PartContent,
    /// The pattern of the part's file names, if the part has one file per rank.
    pub name_pattern: Option<RankNamePattern>,
    /// The number of ranks of the job that saved the part: the world size in its files, or the highest rank plus one. 0
    /// if the part does not have one file per rank.
    pub world_size: u32,
}

/// The values of the joined state dict that come from one of the joined checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartContent {
    Whole,
    /// The values in the subtree at this dotted path.
    Subtree(String),
    /// The values under these keys of the state dict.
    Keys(Vec<String>),
}

impl CheckpointPart {
    /// Returns the part for a checkpoint that is the only one in its folder. All values of the state dict come from
    /// this part.
    pub fn whole(name_pattern: Option<RankNamePattern>, world_size: u32) -> Self {
        Self { folder: PathBuf::new(), content: PartContent::Whole, name_pattern, world_size }
    }
}

/// The catalog of a folder that was read, and the checkpoints that were joined into this catalog.
#[derive(Debug)]
pub struct LoadedFolder {
    pub catalog: Catalog,
    pub parts: Vec<CheckpointPart>,
}

impl LoadedFolder {
    /// Returns a folder with a single checkpoint, whose catalog is `catalog`.
    pub fn whole(catalog: Catalog) -> Self {
        Self { catalog, parts: vec![CheckpointPart::whole(None, 0)] }
    }
}

/// Returns the path of a folder inside `root`. If `folder` is empty, returns `root` itself.
pub fn join_folder(root: &Path, folder: &Path) -> PathBuf {
    // Joining an empty name would add a trailing slash, which makes the path of a file invalid.
    if folder.as_os_str().is_empty() { root.to_path_buf() } else { root.join(folder) }
}

/// A series that was read: the name of the series, its description as a [`CheckpointPart`], and its catalog. The
/// description says that the series is the whole checkpoint, as if the folder had no other series.
pub type LoadedSeries = (String, CheckpointPart, Catalog);

/// Joins the catalogs of the series of one folder. Several series become subtrees of one state dict, under their names.
pub fn join_series(mut series: Vec<LoadedSeries>) -> LoadedFolder {
    if series.len() == 1 {
        let (_, part, catalog) = series.remove(0);
        return LoadedFolder { catalog, parts: vec![part] };
    }
    let mut whole = Catalog::empty();
    let (mut entries, mut parts) = (Vec::new(), Vec::new());
    for (name, part, catalog) in series {
        let state = absorb(&mut whole, catalog, Some(&name));
        entries.push((Value::Str(name.as_str().into()), state));
        parts.push(CheckpointPart { content: PartContent::Subtree(name), ..part });
    }
    whole.state = Value::Dict(Dict { entries, ..Dict::default() });
    LoadedFolder { catalog: whole, parts }
}

/// Puts a state dict under a key.
pub fn nest(catalog: &mut Catalog, key: &str) {
    let mut nested = Catalog::empty();
    let state = absorb(&mut nested, std::mem::replace(catalog, Catalog::empty()), Some(key));
    nested.state = Value::Dict(Dict { entries: vec![(Value::Str(key.into()), state)], ..Dict::default() });
    *catalog = nested;
}

/// Joins the catalogs of several folders. If all top-level keys of the state dicts are distinct, the state dicts are
/// merged. Otherwise each state dict becomes a subtree under the name of its folder.
pub fn join(folders: Vec<(PathBuf, LoadedFolder)>) -> LoadedFolder {
    let mut seen = HashSet::new();
    let mut keys = folders.iter().map(|(_, loaded)| top_keys(&loaded.catalog.state));
    let side_by_side = keys.all(|keys| keys.is_some_and(|keys| keys.into_iter().all(|key| seen.insert(key))));
    let mut whole = Catalog::empty();
    let mut entries = Vec::new();
    let mut parts = Vec::new();
    for (folder, loaded) in folders {
        let name = folder.to_string_lossy().into_owned();
        let own_keys = top_keys(&loaded.catalog.state).unwrap_or_default();
        let under = (!side_by_side).then_some(name.as_str());
        let state = absorb(&mut whole, loaded.catalog, under);
        match state {
            Value::Dict(dict) if side_by_side => entries.extend(dict.entries),
            state => entries.push((Value::Str(name.as_str().into()), state)),
        }
        parts.extend(loaded.parts.into_iter().map(|part| CheckpointPart {
            content: match (part.content, side_by_side) {
                (PartContent::Whole, true) => PartContent::Keys(own_keys.clone()),
                (content, true) => content,
                (PartContent::Subtree(path), false) => PartContent::Subtree(format!("{name}.{path}")),
                (_, false) => PartContent::Subtree(name.clone()),
            },
            folder: join_folder(&folder, &part.folder),
            name_pattern: part.name_pattern,
            world_size: part.world_size,
        }));
    }
    whole.state = Value::Dict(Dict { entries, ..Dict::default() });
    LoadedFolder { catalog: whole, parts }
}

fn top_keys(state: &Value) -> Option<Vec<String>> {
    Some(state.as_dict()?.entries.iter().map(|(key, _)| key_text(key).to_string()).collect())
}

/// Moves the tensors, meshes and notes of the catalog `part` into the catalog `whole`. Returns the state dict of
/// `part`, with the ids that its tensors have in `whole`. If the state dict will be a subtree of `whole`, `under` is
/// the name of the subtree.
fn absorb(whole: &mut Catalog, mut part: Catalog, under: Option<&str>) -> Value {
    let shift = u32::try_from(whole.tensors.len()).expect("fewer than 2^32 tensors");
    shift_tensors(&mut part.state, shift);
    let meshes: Vec<_> = part.meshes.drain(..).map(|mesh| whole.intern_mesh(mesh)).collect();
    for mut entry in part.tensors {
        if let Some(name) = under {
            entry.fqn = format!("{name}.{}", entry.fqn).into();
        }
        if let Some(sharding) = &mut entry.sharding {
            sharding.mesh = meshes[sharding.mesh.0 as usize];
        }
        whole.tensors.push(entry);
    }
    let dropped = part.dropped.into_iter().map(|text| under.map_or(text.clone(), |name| format!("{name}.{text}")));
    whole.dropped.extend(dropped);
    whole.flat = whole.flat.take().or(part.flat);
    whole.plain_may_be_parts |= part.plain_may_be_parts;
    if whole.model_parallel_groups.is_empty() {
        whole.model_parallel_groups = part.model_parallel_groups;
    }
    whole.archives.append(&mut part.archives);
    whole.warnings.append(&mut part.warnings);
    whole.notes.append(&mut part.notes);
    whole.details.append(&mut part.details);
    part.state
}

/// The maximum number of files and folders that are visited in the search for files that are not part of a checkpoint.
const MAX_ENTRIES: usize = 100_000;
const MAX_DEPTH: usize = 16;

/// Returns the regular files below `root` that are not part of the checkpoint, relative to `root` and sorted. Returns
/// `None` if there are more than [`MAX_ENTRIES`] files and folders, or if folders are nested more than [`MAX_DEPTH`]
/// deep. A link to a file counts as a file. A dangling link counts as a file, too; an attempt to copy it later is an
/// error. Links to folders are not followed.
///
/// # Errors
/// `Io` if a folder cannot be listed or an entry cannot be examined.
pub fn other_files(root: &Path, is_part: &dyn Fn(&Path) -> bool) -> Result<Option<Vec<PathBuf>>> {
    let mut found = Vec::new();
    let mut seen = 0;
    let mut folders = vec![(PathBuf::new(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        for entry in lookup::list(&join_folder(root, &folder))? {
            seen += 1;
            if seen > MAX_ENTRIES {
                return Ok(None);
            }
            let path = folder.join(&entry.name);
            if is_part(&path) {
                continue;
            }
            match entry.kind()? {
                FileKind::Folder if entry.is_link()? => {}
                FileKind::Folder if depth == MAX_DEPTH => return Ok(None),
                FileKind::Folder => folders.push((path, depth + 1)),
                FileKind::File | FileKind::Dangling => found.push(path),
                FileKind::Special => {}
            }
        }
    }
    found.sort();
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Dtype, TensorEntry};
    use crate::storage::FileId;

    fn loaded(keys: &[&str]) -> LoadedFolder {
        let mut catalog = Catalog::empty();
        let mut entries = Vec::new();
        for key in keys {
            let entry = TensorEntry::whole((*key).into(), Dtype::F32, [1].as_slice().into(), FileId(0), 0);
            entries.push((Value::Str((*key).into()), Value::Tensor(catalog.push_tensor(entry))));
        }
        catalog.state = Value::Dict(Dict { entries, ..Dict::default() });
        LoadedFolder::whole(catalog)
    }

    #[test]
    fn joined_folders_merge_or_nest_by_keys() {
        let joined = join(vec![("a".into(), loaded(&["model"])), ("b".into(), loaded(&["optimizer"]))]);
        assert_eq!(joined.catalog.state.to_string(), "{'model': <tensor 0>, 'optimizer': <tensor 1>}");
        assert_eq!(joined.parts[1].folder, Path::new("b"));
        assert_eq!(joined.parts[1].content, PartContent::Keys(vec!["optimizer".into()]));

        let joined = join(vec![("a".into(), loaded(&["w"])), ("b".into(), loaded(&["w"]))]);
        assert_eq!(joined.catalog.tensors[1].fqn.as_str(), "b.w");
        assert_eq!(joined.parts[0].content, PartContent::Subtree("a".into()));
        let names = crate::catalog::state_dict::all_tensors(&joined.catalog.state);
        assert_eq!(names.iter().map(|(name, id)| (name.as_str(), id.0)).collect::<Vec<_>>(), [("a.w", 0), ("b.w", 1)]);
    }

    #[test]
    fn other_files_are_listed_and_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir_all(root.join("huggingface")).unwrap();
        for name in ["huggingface/config.json", "z.json", "model.part"] {
            std::fs::write(root.join(name), "x").unwrap();
        }
        std::os::unix::fs::symlink("z.json", root.join("linked.json")).unwrap();
        std::os::unix::fs::symlink("huggingface", root.join("linked")).unwrap();
        std::os::unix::fs::symlink("nowhere", root.join("dangling")).unwrap();
        let is_part = |path: &Path| path.extension().is_some_and(|suffix| suffix == "part");
        let expected = ["dangling", "huggingface/config.json", "linked.json", "z.json"].map(PathBuf::from);
        assert_eq!(other_files(root, &is_part).unwrap().unwrap(), expected);
        let deep: PathBuf = std::iter::repeat_n("d", MAX_DEPTH + 1).collect();
        std::fs::create_dir_all(root.join(deep)).unwrap();
        assert!(other_files(root, &is_part).unwrap().is_none());
    }
}
