//! Texts as they should be, each in a file that a person has looked at.

use std::fs;
use std::path::Path;

/// Compare with the text of `tests/snapshots/NAME`; `UPDATE_SNAPSHOTS=1` writes it anew, for a person to look at.
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
