//! Shared code of the integration tests: the fixtures and their ground truth, the binary, and readers of its output.

#[allow(unused_imports, reason = "each test program uses its own part")]
pub mod corrupt;
pub mod env;
pub mod flat;
pub mod outcome;
pub mod rank_file;
pub mod snapshot;
pub mod transcript;
pub mod tree;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use assert_cmd::Command;
use dtshard::catalog::{TensorEntry, state_dict};
use dtshard::exec::{Input, Options, Silent, Stop, compare};
use dtshard::format::{Checkpoint, ReadOptions, SeriesChoice, resolve};
use safetensors::SafeTensors;
use serde_json::Value as Json;

/// Runs a job for each item on as many threads as there are cores, and returns the results in the order of the items.
/// The threads are not those of rayon: conversions in other tests would wait until the processes of these jobs end.
#[allow(dead_code, reason = "each test program uses its own part")]
pub fn in_parallel<T: Sync, R: Send>(items: &[T], job: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().unwrap().get() {
            scope.spawn(|| {
                while let number = next.fetch_add(1, Relaxed)
                    && let Some(item) = items.get(number)
                {
                    let result = job(item);
                    results.lock().unwrap().insert(number, result);
                }
            });
        }
    });
    results.into_inner().unwrap().into_values().collect()
}

/// The dtype, shape and digest of a tensor, to compare values. The digest is that of `inspect --digest`; the tests
/// compute it from bytes that dtshard has not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub dtype: String,
    pub shape: Vec<u64>,
    pub digest: String,
}

impl Tensor {
    fn new(dtype: &str, shape: &[u64], bytes: &[u8]) -> Self {
        let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{dtype} [{}]\n", dims.join(",")).as_bytes()).update(bytes);
        Self { dtype: dtype.into(), shape: shape.to_vec(), digest: format!("blake3:{}", hasher.finalize().to_hex()) }
    }
}

pub type Tensors = BTreeMap<String, Tensor>;

/// Returns the tensors whose names begin with a prefix, and removes the prefix from their names.
pub fn below(prefix: &str, tensors: &Tensors) -> Tensors {
    let cut = |(name, tensor): (&String, &Tensor)| Some((name.strip_prefix(prefix)?.to_owned(), tensor.clone()));
    tensors.iter().filter_map(cut).collect()
}

/// Asserts that two sets of tensors are equal; if not, the message lists the names that differ.
#[track_caller]
pub fn assert_same(found: &Tensors, expected: &Tensors, what: &str) {
    let names: std::collections::BTreeSet<_> = found.keys().chain(expected.keys()).collect();
    let differing: Vec<String> = (names.into_iter())
        .filter(|name| found.get(*name) != expected.get(*name))
        .map(|name| format!("{name}: found {:?}, expected {:?}", found.get(name), expected.get(name)))
        .collect();
    assert!(differing.is_empty(), "{what}\n{}", differing.join("\n"));
    assert!(!expected.is_empty(), "{what}: nothing to compare");
}

pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

/// The expected tensors of a fixture, which the script that generated the fixture has written.
#[derive(Debug)]
pub struct Truth {
    pub tensors: Tensors,
    pub json: Json,
}

impl Truth {
    /// Reads the expected tensors. `stem` is a path without suffix, such as `fsdp4/truth` or `torch_file/model.truth`.
    pub fn load(stem: &str) -> Self {
        let json: Json = serde_json::from_slice(&fs::read(fixture(&format!("{stem}.json"))).unwrap()).unwrap();
        let content = fs::read(fixture(&format!("{stem}.safetensors"))).unwrap();
        let stored = SafeTensors::deserialize(&content).unwrap();
        let tensors = json["tensors"].as_object().unwrap().iter().map(|(name, about)| {
            let shape: Vec<u64> = serde_json::from_value(about["shape"].clone()).unwrap();
            // If safetensors does not have a dtype, the tensor is stored as plain bytes.
            let bytes = stored.tensor(name).unwrap().data();
            (name.clone(), Tensor::new(about["dtype"].as_str().unwrap(), &shape, bytes))
        });
        Self { tensors: tensors.collect(), json }
    }

    /// Returns the list of names under the key `key` of the fixture's JSON file; an empty list if the file does not
    /// have the key.
    pub fn names(&self, key: &str) -> Vec<String> {
        serde_json::from_value(self.json[key].clone()).unwrap_or_default()
    }
}

/// The kind of a fixture, which determines the names of its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Dcp,
    Ranks,
    File,
}

/// A checkpoint among the fixtures.
#[derive(Clone, Debug)]
pub struct Source {
    pub path: PathBuf,
    pub kind: Kind,
    truth: String,
}

impl Source {
    pub fn truth(&self) -> Truth {
        Truth::load(&self.truth)
    }

    /// Returns the expected tensors of this checkpoint, under the names that dtshard gives them.
    pub fn expected(&self) -> Tensors {
        let truth = self.truth();
        match self.kind {
            Kind::File => truth.tensors,
            Kind::Dcp => {
                let missing = truth.names("not_in_dcp");
                truth.tensors.into_iter().filter(|(name, _)| !missing.contains(name)).collect()
            }
            Kind::Ranks => self.in_rank_files(&truth),
        }
    }

    /// Returns the expected tensors of this checkpoint, under the names that they have in a DCP directory, where
    /// optimizer state has the names of parameters.
    pub fn named(&self) -> Tensors {
        let parameters = self.parameters();
        self.expected().into_iter().map(|(name, tensor)| (with_parameter_name(&name, &parameters), tensor)).collect()
    }

    /// Returns the names of the parameters to which the optimizer state of this checkpoint refers by number, in the
    /// order of the numbers.
    pub fn parameters(&self) -> Vec<String> {
        match self.kind {
            Kind::Dcp => Vec::new(),
            Kind::Ranks => self.truth().names("optim_params"),
            Kind::File => ["0.weight", "0.bias", "1.weight", "1.bias"].map(String::from).to_vec(),
        }
    }

    fn in_rank_files(&self, truth: &Truth) -> Tensors {
        let series = self.series();
        let has_optimizer = series.iter().any(|name| name == "optim");
        let parameters = truth.names("optim_params");
        let name_in_files = |name: &str| {
            if series.len() == 1 {
                return name.strip_prefix("model.").map(str::to_owned);
            }
            let Some(rest) = name.strip_prefix("optim.state.").filter(|_| has_optimizer) else {
                return name.starts_with("model.").then(|| name.to_owned());
            };
            let (parameter, state) = rest.rsplit_once('.').unwrap();
            // Only FSDP1 names the parameters of an optimizer; in other fixtures, optimizers number them.
            Some(match parameters.iter().position(|known| known == parameter) {
                Some(index) => format!("optim.state.{index}.{state}"),
                None => name.to_owned(),
            })
        };
        truth.tensors.iter().filter_map(|(name, tensor)| Some((name_in_files(name)?, tensor.clone()))).collect()
    }

    fn series(&self) -> Vec<String> {
        let names = fs::read_dir(&self.path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names
            .filter_map(|name| name.strip_suffix("_rank_0.pt")?.split_once("_world_size").map(|s| s.0.into()))
            .collect()
    }

    /// Returns the tensors that `consolidate` writes if no options select other tensors.
    pub fn expected_model(&self) -> Tensors {
        let truth = self.expected();
        let model = below("model.", &truth);
        let in_flat_file = self.kind == Kind::File && !self.path.ends_with("trainer.pt");
        if model.is_empty() || in_flat_file { truth } else { model }
    }

    pub fn fits_safetensors(&self) -> bool {
        let unknown = ["c32", "c128", "f4_e2m1fn_x2"];
        self.expected().values().all(|tensor| !unknown.contains(&tensor.dtype.as_str()))
    }
}

/// Returns a tensor name in which the number of a parameter, in optimizer state, is replaced by the name of the
/// parameter.
pub fn with_parameter_name(name: &str, parameters: &[String]) -> String {
    for optimizer in ["optim.state.", "optimizer.state.", "optimizer_states.0.state."] {
        let Some((number, state)) = name.strip_prefix(optimizer).and_then(|rest| rest.split_once('.')) else {
            continue;
        };
        if let Some(parameter) = number.parse().ok().and_then(|number: usize| parameters.get(number)) {
            return format!("{optimizer}{parameter}.{state}");
        }
    }
    name.to_owned()
}

/// Returns the checkpoints of one fixture: its DCP directory and its rank files.
pub fn case(name: &str) -> Vec<Source> {
    let kinds = [("dcp", Kind::Dcp), ("ranks", Kind::Ranks)];
    let source = |(folder, kind)| Source { path: fixture(name).join(folder), kind, truth: format!("{name}/truth") };
    kinds.into_iter().map(source).filter(|source| source.path.is_dir()).collect()
}

pub fn file(path: &str, truth: &str) -> Source {
    Source { path: fixture(path), kind: Kind::File, truth: truth.into() }
}

pub const CASES: [&str; 10] =
    ["fsdp4", "fsdp3", "hsdp", "fsdp_tp", "fsdp_tp6", "tp2", "odd4", "fsdp1_sharded", "replicated_plain", "llama_tiny"];

/// Returns the sharded fixtures that were made with the main PyTorch version.
pub fn sharded(kind: Kind) -> Vec<Source> {
    CASES.iter().flat_map(|name| case(name)).filter(|source| source.kind == kind).collect()
}

/// Returns the fixtures that store whole tensors.
pub fn files() -> Vec<Source> {
    vec![
        file("torch_file/model.pt", "torch_file/model.truth"),
        file("torch_file/objects.pt", "torch_file/objects.truth"),
        file("torch_file/trainer.pt", "torch_file/trainer.truth"),
        file("safetensors/single", "safetensors/truth"),
        file("safetensors/sharded", "safetensors/sharded.truth"),
        file("dcp_hf/shards", "dcp_hf/truth"),
    ]
}

/// Returns the fixtures that were made with other PyTorch versions. The published package does not contain them.
pub fn compat() -> Vec<Source> {
    let list = |path: &Path| {
        let entries = fs::read_dir(path).into_iter().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let mut found = Vec::new();
    for version in list(&fixture("compat")) {
        for name in list(&fixture("compat").join(&version)) {
            let path = format!("compat/{version}/{name}");
            match name.as_str() {
                "torch_file" => found.push(file(&format!("{path}/model.pt"), &format!("{path}/model.truth"))),
                _ => found.extend(case(&path)),
            }
        }
    }
    found
}

/// The exit code and the output of a run of dtshard.
#[derive(Debug)]
pub struct Run {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    #[track_caller]
    pub fn json(&self) -> Json {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

pub fn run<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Run {
    let arguments: Vec<A> = arguments.into_iter().collect();
    let output = Command::new(env!("CARGO_BIN_EXE_dtshard")).args(&arguments).output().unwrap();
    let run = Run {
        code: output.status.code().expect("an exit code"),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    };
    transcript::record(&arguments, Some(run.code), &run.stdout, &run.stderr);
    run
}

/// Runs `VERB SRC [DST]` with options as on a command line, and asserts this exit code.
#[track_caller]
pub fn expect(code: i32, verb: &str, paths: &[&Path], options: &str) -> Run {
    let mut arguments: Vec<&OsStr> = vec![verb.as_ref()];
    arguments.extend(paths.iter().map(|path| path.as_os_str()));
    arguments.extend(options.split_whitespace().map(OsStr::new));
    if ["consolidate", "unshard", "reshard", "flatten"].contains(&verb) {
        arguments.push("--no-sync".as_ref());
    }
    let outcome = run(&arguments);
    assert_eq!(outcome.code, code, "{arguments:?}\n{}{}", outcome.stdout, outcome.stderr);
    outcome
}

#[track_caller]
pub fn succeed(verb: &str, paths: &[&Path], options: &str) -> Run {
    expect(0, verb, paths, options)
}

#[track_caller]
pub fn inspect(path: &Path, options: &str) -> Json {
    succeed("inspect", &[path], &format!("--json {options}")).json()
}

/// Returns the tensors of a checkpoint, or of the file of one rank. The library of dtshard reads them.
pub fn read(path: &Path) -> Tensors {
    let options = ReadOptions { series: SeriesChoice::All, show_incomplete: true, ..ReadOptions::default() };
    let checkpoint = Checkpoint::open(path, &options).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    tensors_of(&checkpoint)
}

pub fn tensors_of(checkpoint: &Checkpoint) -> Tensors {
    let (files, catalog) = (&checkpoint.files, &checkpoint.catalog);
    // Write blocks are much shorter than the tensors, so that each tensor has several write blocks.
    let options = Options { threads: 1, write_block_bytes: 64, transposed_block_bytes: 64, sync: false };
    let digest = |entry: &TensorEntry| {
        let input = Input { files, catalog, resolve: &resolve };
        compare::digest(input, entry, entry.dtype, &options, &Silent, &Stop::default()).unwrap()
    };
    let tensors = state_dict::all_tensors(&catalog.state).into_iter().map(|(name, id)| {
        let entry = catalog.tensor(id);
        let dtype = entry.dtype.to_string();
        (name.to_string(), Tensor { dtype, shape: entry.shape.to_vec(), digest: digest(entry) })
    });
    tensors.collect()
}

/// Returns the tensors of a safetensors file or folder. The crate safetensors reads them.
pub fn read_safetensors(path: &Path) -> Tensors {
    let files: Vec<PathBuf> = if path.is_dir() {
        let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.extension() == Some(OsStr::new("safetensors"))).collect()
    } else {
        vec![path.to_path_buf()]
    };
    let mut tensors = Tensors::new();
    for file in files {
        let content = fs::read(file).unwrap();
        for (name, view) in SafeTensors::deserialize(&content).unwrap().tensors() {
            let dtype = match format!("{:?}", view.dtype()).to_lowercase().as_str() {
                "f8_e4m3" => String::from("f8_e4m3fn"),
                "f8_e8m0" => String::from("f8_e8m0fnu"),
                other => other.to_owned(),
            };
            let shape: Vec<u64> = view.shape().iter().map(|&size| size as u64).collect();
            let before = tensors.insert(name, Tensor::new(&dtype, &shape, view.data()));
            assert!(before.is_none(), "a name twice in {}", path.display());
        }
    }
    tensors
}

/// Returns the content of every file of a checkpoint, by name.
pub fn bytes_of(path: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    if path.is_file() {
        return BTreeMap::from([(PathBuf::new(), fs::read(path).unwrap())]);
    }
    let files = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    files.map(|file| (file.file_name().unwrap().into(), fs::read(&file).unwrap())).collect()
}

/// Copies the files of a folder.
pub fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for (name, content) in bytes_of(from) {
        fs::write(to.join(name), content).unwrap();
    }
}
