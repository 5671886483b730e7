//! Expected outputs, each in a reviewed file.

use std::fs;
use std::path::Path;

/// Compares with the text of `tests/snapshots/NAME`; `UPDATE_SNAPSHOTS=1` writes the file again, for review.
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
