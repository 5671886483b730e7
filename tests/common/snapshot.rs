//! Compares outputs with expected outputs. Each expected output is a reviewed file in `tests/snapshots`.

use std::fs;
use std::path::Path;

/// Asserts that a text is equal to `tests/snapshots/NAME`. With `UPDATE_SNAPSHOTS=1` the file is written instead, for
/// review.
#[track_caller]
pub fn assert_snapshot(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(name);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, found).unwrap();
        return;
    }
    let expected = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(found == expected, "{name} differs; UPDATE_SNAPSHOTS=1 takes what was found:\n{found}");
}
