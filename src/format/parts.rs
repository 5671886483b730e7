//! Checkpoints that are read as one: several series of rank files in a folder, several folders beside each other.
//!
//! Each is read for itself and then becomes part of one state dict, under a name of its own or beside the others.
//! What came from where is remembered, so that it can be written apart again.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::rank_names::RankNames;
use crate::catalog::path::key_text;
use crate::catalog::{Catalog, Dict, Value, shift_tensors};
use crate::error::Result;
use crate::storage::lookup::{self, FileKind};

/// A checkpoint that was read for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointPart {
    /// Relative to the checkpoint's root; empty where it is the root.
    pub folder: PathBuf,
    pub content: PartContent,
    /// How its files are called, where there is one a rank.
    pub names: Option<RankNames>,
    /// How many of those there are; 0 where there is not one a rank.
    pub world_size: u32,
}

/// What of the state dict a part is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartContent {
    Whole,
    /// The subtree at this path, dotted.
    Below(String),
    /// These entries of the state dict.
    Keys(Vec<String>),
}

/// A folder that was read.
#[derive(Debug)]
pub struct LoadedFolder {
    pub catalog: Catalog,
    pub parts: Vec<CheckpointPart>,
}

impl LoadedFolder {
    /// A checkpoint that is one part.
    pub fn whole(catalog: Catalog) -> Self {
        let part = CheckpointPart { folder: PathBuf::new(), content: PartContent::Whole, names: None, world_size: 0 };
        Self { catalog, parts: vec![part] }
    }
}

/// A folder in another one; an empty name is that one itself.
pub fn within(root: &Path, folder: &Path) -> PathBuf {
    // Joined, it would end in a slash, and a file with a slash after it is no file.
    if folder.as_os_str().is_empty() { root.to_path_buf() } else { root.join(folder) }
}

/// Several folders as one. Their state dicts lie side by side where their keys differ, else each under the name of
/// its folder.
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
        let state = adopt(&mut whole, loaded.catalog, under);
        match state {
            Value::Dict(dict) if side_by_side => entries.extend(dict.entries),
            state => entries.push((Value::Str(name.as_str().into()), state)),
        }
        parts.extend(loaded.parts.into_iter().map(|part| CheckpointPart {
            content: match (part.content, side_by_side) {
                (PartContent::Whole, true) => PartContent::Keys(own_keys.clone()),
                (content, true) => content,
                (PartContent::Below(path), false) => PartContent::Below(format!("{name}.{path}")),
                (_, false) => PartContent::Below(name.clone()),
            },
            folder: within(&folder, &part.folder),
            names: part.names,
            world_size: part.world_size,
        }));
    }
    whole.state = Value::Dict(Dict { entries, ..Dict::default() });
    LoadedFolder { catalog: whole, parts }
}

fn top_keys(state: &Value) -> Option<Vec<String>> {
    Some(state.as_dict()?.entries.iter().map(|(key, _)| key_text(key).to_string()).collect())
}

/// Move everything but the state of `part` into `whole`, and give the state in the numbering of `whole`. `under` is
/// the name of the subtree it is to become.
pub fn adopt(whole: &mut Catalog, mut part: Catalog, under: Option<&str>) -> Value {
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
    whole.archives.append(&mut part.archives);
    whole.warnings.append(&mut part.warnings);
    whole.notes.append(&mut part.notes);
    whole.details.append(&mut part.details);
    part.state
}

/// Entries that are looked at in search of files beside a checkpoint.
const MAX_ENTRIES: usize = 100_000;
const MAX_DEPTH: usize = 16;

/// The regular files below `root` that are no part of the checkpoint, relative to it and sorted; `None` where there
/// are too many to be what a trainer leaves beside a checkpoint. Links to files count as files, so do links that lead
/// nowhere, of which carrying them makes an error; linked folders are not entered.
///
/// # Errors
/// `Io` where a folder cannot be listed or an entry cannot be looked at.
pub fn beside(root: &Path, is_part: &dyn Fn(&Path) -> bool) -> Result<Option<Vec<PathBuf>>> {
    let mut found = Vec::new();
    let mut seen = 0;
    let mut folders = vec![(PathBuf::new(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        for entry in lookup::list(&within(root, &folder))? {
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
    fn folders_lie_side_by_side_or_below_their_names() {
        let joined = join(vec![("a".into(), loaded(&["model"])), ("b".into(), loaded(&["optimizer"]))]);
        assert_eq!(joined.catalog.state.to_string(), "{'model': <tensor 0>, 'optimizer': <tensor 1>}");
        assert_eq!(joined.parts[1].folder, Path::new("b"));
        assert_eq!(joined.parts[1].content, PartContent::Keys(vec!["optimizer".into()]));

        let joined = join(vec![("a".into(), loaded(&["w"])), ("b".into(), loaded(&["w"]))]);
        assert_eq!(joined.catalog.tensors[1].fqn.as_str(), "b.w");
        assert_eq!(joined.parts[0].content, PartContent::Below("a".into()));
        let names = crate::catalog::model::all_tensors(&joined.catalog.state);
        assert_eq!(names.iter().map(|(name, id)| (name.as_str(), id.0)).collect::<Vec<_>>(), [("a.w", 0), ("b.w", 1)]);
    }

    #[test]
    fn files_beside_are_listed_and_bounded() {
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
        assert_eq!(beside(root, &is_part).unwrap().unwrap(), expected);
        let deep: PathBuf = std::iter::repeat_n("d", MAX_DEPTH + 1).collect();
        std::fs::create_dir_all(root.join(deep)).unwrap();
        assert!(beside(root, &is_part).unwrap().is_none());
    }
}
