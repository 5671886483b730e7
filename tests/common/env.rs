//! A folder for one test, and what runs of the program do with it.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use tempfile::TempDir;

use super::corrupt::dtshard;
use super::outcome::copy_all;
use super::transcript::Transcript;
use super::{Run, Tensors, expect, fixture, read, succeed};

/// A folder that is removed with it. Messages of runs are compared when it is dropped.
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

    /// Everything in it, hidden and in folders, relative and sorted.
    pub fn names(&self) -> Vec<String> {
        names_below(self.folder.path())
    }

    /// Writes a file, with its folders.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// A copy of a fixture, file or folder.
    pub fn copy(&self, name: &str) -> PathBuf {
        let from = fixture(name);
        let to = self.path("src").join(from.file_name().unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        copy_all(&from, &to);
        to
    }

    /// A safetensors file of small f32 vectors: the number of elements of each.
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

    /// Convert a fixture or a path to a new place here and give what the run said.
    #[track_caller]
    pub fn make(&self, verb: &str, source: impl AsRef<Path>, name: &str, options: &str) -> Made {
        let source = fixture("").join(source);
        let path = self.path(name);
        let run = succeed(verb, &[&source, &path], options);
        Made { path, run }
    }

    /// Convert and expect exit code 2 and nothing new. `tests/messages` has the error.
    #[track_caller]
    pub fn refuse(&self, verb: &str, source: impl AsRef<Path>, name: &str, options: &str) -> Run {
        let source = fixture("").join(source);
        let before = self.names();
        let run = expect(2, verb, &[&source, &self.path(name)], options);
        assert_eq!(self.names(), before, "{options}");
        run
    }

    /// Nothing but `verify`, `inspect` and a conversion can be asked of a damaged source: the last must exit with 2
    /// and leave no trace, the first must exit with 1.
    pub fn is_bad(&self, source: &Path) {
        let before = self.names();
        dtshard(&[&"unshard", &source, &self.path("out.pt")]).refused(&[]);
        assert_eq!(self.names(), before, "something was left behind");
        let verified = dtshard(&[&"verify", &source]);
        assert_eq!(verified.code, Some(1), "verify: {verified:?}");
        dtshard(&[&"inspect", &source]).did_not_crash();
    }

    /// As [`Self::is_bad`] where the bytes are sound but not supported: every verb but `inspect` exits with 2.
    pub fn is_unsupported(&self, source: &Path) {
        let before = self.names();
        dtshard(&[&"unshard", &source, &self.path("out.pt")]).refused(&[]);
        assert_eq!(self.names(), before, "something was left behind");
        dtshard(&[&"verify", &source]).refused(&[]);
        dtshard(&[&"inspect", &source]).did_not_crash();
    }
}

/// What a conversion made.
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

    pub fn closing(&self) -> &str {
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
