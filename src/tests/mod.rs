//! Tests of several modules together: files are written and read again, and damaged files are read or refused.

mod flat_write;
mod fuzz;
mod rank_files;
mod reports;

#[path = "../../tests/common/rank_file.rs"]
#[allow(dead_code, reason = "the tests of the program use the rest")]
mod rank_file;

use std::path::{Path, PathBuf};

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}
