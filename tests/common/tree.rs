//! The files and names that a run leaves in a folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::outcome::files_of;

/// Every file below a path, by its relative path, with its content.
pub type Tree = BTreeMap<PathBuf, Vec<u8>>;

pub fn tree(path: &Path) -> Tree {
    if path.is_file() {
        return Tree::from([(PathBuf::new(), fs::read(path).unwrap())]);
    }
    let files = files_of(path).into_iter().filter(|file| file.is_file());
    files.map(|file| (file.strip_prefix(path).unwrap().to_path_buf(), fs::read(&file).unwrap())).collect()
}

/// Returns the names in a folder, sorted. Hidden names are included.
pub fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
