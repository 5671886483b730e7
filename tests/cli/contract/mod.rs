//! The contract of the command line, promise by promise: names and defaults that scripts depend on. A module a
//! section, in the order in which the command line is described; the name of a test is the promise it holds the binary
//! to. The head of a module names where those promises are tested that are not tested in it.
//!
//! | what is promised | module |
//! |---|---|
//! | verbs, hidden aliases, long options with underscores, typing errors | `running` |
//! | `completions`, `man`, `--help`, `--version` | `cli_inspect`; every word of `--help`: `json` |
//! | the two promises for day one, the closing line | `consolidate` |
//! | `--from`, `--to`, names of files, parent folders, series, one rank's file | `formats` |
//! | files beside a checkpoint; Lightning's folders | `carried`, `lightning` |
//! | what consolidate takes, `--root`, `--everything`, `--assets` | `consolidate` |
//! | `--mesh`, `--mesh-ranks`, `--placements` | `layout` |
//! | `--plan`, `--tp`, `--fsdp`, `--replicate` | `plan`; what PyTorch makes of plans: `plans` |
//! | `--layout`, `inspect --layout` | `layout_file` |
//! | `--split`, splits and sizes of a layout file | `splits` |
//! | `--like`, `--fill-from` | `fill` |
//! | gradients, `--with-grads` | `gradients` |
//! | `--tensor-class` | `sharded_tensors` |
//! | `--src-mesh` to `--reduce`: what SRC does not say | `told` |
//! | `flatten`, `--flat-layout` | `flat` |
//! | `--wrap`, `--buffers` | `units`; refusals: `flat` |
//! | `unshard --unit`, `--all-ranks`; `--fill-from` with flat parameters | `flat_back` |
//! | `--include` to `--keep-names`, patterns, collisions, what matches nothing | `names` |
//! | `--dtype`, `--tied`, `--on-conflict`, `--check-replicas`, `--check-crc`, `--allow-missing`, `--drop-unknown` | `values` |
//! | `--tied write` | `tied` |
//! | what a format cannot hold, `--max-shard-size`, natural order, same bytes | `values` |
//! | `--dry-run` to `--verify`, `--overwrite`, `--restart`, `-q`, `-v`, exit codes, broken pipes | `running` |
//! | `verify`, its exit codes and lists, digests as OTHER | `verify` |
//! | `local` | `local` |
//! | formats and arguments in `--help`, `inspect` of DCP, digests of all tensors | `help` |
//! | errors, and the `--json` document of every verb | `json` |
//! | names in messages: lists, escapes, findings | `messages` |
//! | `inspect`, its document, digests | `inspect` |

mod carried;
mod consolidate;
mod fill;
mod flat;
mod flat_back;
mod formats;
mod gradients;
mod help;
mod inspect;
mod json;
mod layout;
mod layout_file;
mod lightning;
mod local;
mod messages;
mod names;
mod plan;
mod running;
mod splits;
mod tied;
mod told;
mod units;
mod values;
mod verify;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::transcript::Transcript;
use crate::common::{Run, Tensors, expect, fixture, read, succeed};
use safetensors::tensor::TensorView;
use tempfile::TempDir;

/// A folder to write to.
struct Desk(TempDir, Transcript);

impl Desk {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let transcript = Transcript::begin(folder.path());
        Self(folder, transcript)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Everything in it, with folders in folders, relative and sorted.
    fn names(&self) -> Vec<String> {
        names_below(self.0.path())
    }

    /// Write a text, with its folders.
    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// A safetensors file of small f32 vectors: the number of elements of each.
    fn vectors(&self, name: &str, tensors: &[(&str, usize)]) -> PathBuf {
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
    fn make(&self, verb: &str, source: impl AsRef<Path>, name: &str, options: &str) -> Made {
        let source = fixture("").join(source);
        let path = self.path(name);
        let run = succeed(verb, &[&source, &path], options);
        Made { path, run }
    }

    /// Convert and expect exit code 2, nothing new, and all the words in what is said.
    #[track_caller]
    fn refuse(&self, verb: &str, source: impl AsRef<Path>, name: &str, options: &str, words: &[&str]) -> Run {
        let source = fixture("").join(source);
        let before = self.names();
        let run = expect(2, verb, &[&source, &self.path(name)], options);
        for word in words {
            assert!(run.stderr.contains(word), "no `{word}` in: {}", run.stderr);
        }
        assert_eq!(self.names(), before, "{options}");
        run
    }
}

/// What a conversion made.
struct Made {
    path: PathBuf,
    run: Run,
}

impl Made {
    fn tensors(&self) -> Tensors {
        read(&self.path)
    }

    fn tensor_names(&self) -> Vec<String> {
        self.tensors().into_keys().collect()
    }

    fn closing(&self) -> &str {
        self.run.stderr.lines().last().unwrap_or_default()
    }
}

fn names_below(root: &Path) -> Vec<String> {
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

/// Files below a folder, with their content.
fn contents(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = names_below(root).into_iter().filter(|name| root.join(name).is_file());
    files.map(|name| (name.clone(), fs::read(root.join(name)).unwrap())).collect()
}

fn copy_tree(from: &Path, to: &Path) {
    for (name, content) in contents(from) {
        let target = to.join(name);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::write(target, content).unwrap();
    }
}

fn holds(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no `{word}` in: {text}");
    }
}
