//! A temporary folder for one test, and runs of the program in it.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use tempfile::TempDir;

use super::corrupt::dtshard;
use super::outcome::copy_all;
use super::transcript::Transcript;
use super::{Run, Tensors, expect, fixture, read, succeed};

/// A temporary folder for one test. When the value is dropped, the folder is removed, and the messages of all runs in
/// it are compared with the recorded messages in `tests/messages`.
pub struct TestEnv {
    folder: TempDir,
    _transcript: Transcript,
}

impl TestEnv {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let transcript = Transcript::begin(folder.path());
        Self { folder, _transcript: transcript }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the relative paths of all files and folders in the folder, sorted. Hidden files are included.
    pub fn names(&self) -> Vec<String> {
        names_below(self.folder.path())
    }

    /// Writes a file, and its parent folders.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// Copies a fixture, which is a file or a folder, and returns the path of the copy.
    pub fn copy(&self, name: &str) -> PathBuf {
        let from = fixture(name);
        let to = self.path("src").join(from.file_name().unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        copy_all(&from, &to);
        to
    }

    /// Writes a safetensors file of f32 vectors. `tensors` has the name of each vector and its number of elements.
    pub fn vectors(&self, name: &str, tensors: &[(&str, usize)]) -> PathBuf {
        let data: Vec<(&str, Vec<u8>)> = (1_u8..)
            .zip(tensors)
            .map(|(first, (name, len))| {
                let values =
                    (0..*len).map(|index| f32::from(first) + f32::from(u16::try_from(index).unwrap()) / 4096.0);
                (*name, values.flat_map(f32::to_le_bytes).collect())
            })
            .collect();
        let views = data.iter().map(|(name, bytes)| {
            (*name, TensorView::new(safetensors::Dtype::F32, vec![bytes.len() / 4], bytes).unwrap())
        });
        let path = self.path(name);
        fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        path
    }

    /// Runs a conversion of a fixture or another path to a new path in the folder, and asserts that it succeeds.
    #[track_caller]
    pub fn make(&self, verb: &str, source: impl AsRef<Path>, name: &str, options: &str) -> Made {
        let source = fixture("").join(source);
        let path = self.path(name);
        let run = succeed(verb, &[&source, &path], options);
        Made { path, run }
    }

    /// Runs a conversion, and asserts that it exits with 2 and leaves no new file. Its message is compared with the
    /// recorded messages in `tests/messages`.
    #[track_caller]
    pub fn refuse(&self, verb: &str, source: impl AsRef<Path>, name: &str, options: &str) -> Run {
        let source = fixture("").join(source);
        let before = self.names();
        let run = expect(2, verb, &[&source, &self.path(name)], options);
        assert_eq!(self.names(), before, "{options}");
        run
    }

    /// Asserts that verbs refuse a damaged source: a conversion exits with 2 and leaves no file, `verify` exits with 1,
    /// and `inspect` does not crash.
    pub fn assert_bad_input(&self, source: &Path) {
        let before = self.names();
        dtshard(&[&"unshard", &source, &self.path("out.pt")]).assert_refused(&[]);
        assert_eq!(self.names(), before, "something was left behind");
        let verified = dtshard(&[&"verify", &source]);
        assert_eq!(verified.code, Some(1), "verify: {verified:?}");
        dtshard(&[&"inspect", &source]).assert_no_crash();
    }

    /// Asserts that verbs refuse a valid source that is not supported: a conversion exits with 2 and leaves no file,
    /// `verify` exits with 2, and `inspect` does not crash.
    pub fn assert_unsupported_input(&self, source: &Path) {
        let before = self.names();
        dtshard(&[&"unshard", &source, &self.path("out.pt")]).assert_refused(&[]);
        assert_eq!(self.names(), before, "something was left behind");
        dtshard(&[&"verify", &source]).assert_refused(&[]);
        dtshard(&[&"inspect", &source]).assert_no_crash();
    }
}

/// The result of a successful conversion: its path and its run.
pub struct Made {
    pub path: PathBuf,
    pub run: Run,
}

impl Made {
    pub fn tensors(&self) -> Tensors {
        read(&self.path)
    }

    pub fn tensor_names(&self) -> Vec<String> {
        self.tensors().into_keys().collect()
    }

    pub fn closing_line(&self) -> &str {
        self.run.stderr.lines().last().unwrap_or_default()
    }
}

pub fn names_below(root: &Path) -> Vec<String> {
    fn walk(root: &Path, folder: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(root, &path, found);
            }
            found.push(path.strip_prefix(root).unwrap().display().to_string());
        }
    }
    let mut found = Vec::new();
    walk(root, root, &mut found);
    found.sort();
    found
}
