//! The fixtures with flat parameters of FSDP1, and the flat layouts beside their folders.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::{copy_folder, fixture};

/// The options of `flatten` for the model of the fixtures: its units and its buffers. They are for a state dict in the
/// order of registration.
pub const WRAP: &str = "--wrap layers.* --wrap layers.1.inner --wrap tiny --buffers freqs --buffers **.scale";

/// Returns the path of the flat layout that the live model of a fixture wrote.
pub fn layout_file(case: &str, name: &str) -> PathBuf {
    fixture(case).join(format!("{name}.flat_layout.json"))
}

pub fn layout(case: &str, name: &str) -> Json {
    read_layout(&layout_file(case, name))
}

pub fn read_layout(path: &Path) -> Json {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Copies a fixture's folder, with its flat layout beside the files.
pub fn copy_with_layout(case: &str, name: &str, to: &Path) {
    copy_folder(&fixture(case).join(name), to);
    fs::copy(layout_file(case, name), to.join("flat_layout.json")).unwrap();
}
