//! Tests that the bytes of every conversion of every fixture, for every verb and target, do not change.
//!
//! `tests/outputs/manifest.txt` has one line per conversion: a BLAKE3 hash over all files at DST (paths and contents),
//! or `exit N` for a conversion that fails, and the command line without DST, run in `tests/fixtures`. A change that is
//! not meant to change outputs leaves the manifest unchanged.
//!
//! Without options, `cargo test` runs every ninth conversion. `cargo test --test cli outputs:: -- --include-ignored` runs
//! all of them, as `ci/check` does; with `UPDATE_SNAPSHOTS=1` it writes the manifest again, for review.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::in_parallel;

/// The conversions: each verb with the options of one target.
const CONVERSIONS: [&str; 28] = [
    "consolidate",
    "consolidate --to torch",
    "consolidate --everything",
    "consolidate --dtype bf16 --max-shard-size 4kB",
    "consolidate --root model --tied drop --dtype **.weight=f16",
    "unshard",
    "unshard --unit {blocks,layers}.*",
    "unshard --to safetensors",
    "unshard --all-ranks",
    "reshard",
    "reshard --mesh dp=3",
    "reshard --mesh dp=3 --to dcp",
    "reshard --mesh dp=3 --to dcp-hf",
    "reshard --mesh dp=3 --to torch-ranks",
    "reshard --mesh dp=3 --to local",
    "reshard --mesh dp=3 --to torch-checkpointing",
    "reshard --to deepspeed-universal",
    "reshard --to deepspeed-universal --exclude {optim,optimizer}.**",
    "reshard --mesh dp=3 --split balanced --to torch-ranks",
    "reshard --mesh dp=2 --tensor-class sharded-tensor --to torch-ranks",
    "reshard --like fsdp_tp/ranks --to dcp",
    "reshard --like llama_tiny/ranks",
    "reshard --mesh dp=2,tp=2 --placements S(0),S(1) --to dcp",
    "reshard --mesh dp=2,tp=3 --placements _S(0,3),S(0) --to torch-ranks",
    "flatten --world-size 3 --use-orig-params",
    "flatten --world-size 2 --wrap layers.*",
    "flatten --world-size 2 --strategy no-shard --use-orig-params",
    "flatten --world-size 4 --strategy hybrid-shard --shard-group-size 2 --wrap blocks.*",
];

/// Folders of fixtures that are not converted: they contain no checkpoints, the published package leaves them out, or other
/// tests convert them.
const NOT_CONVERTED: [&str; 5] = ["plans", "compat", "trainers", "maps", "quantized"];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Returns every folder of the fixtures, and every checkpoint file that does not belong to a set of files, relative to
/// the fixtures.
fn sources() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for case in sorted_entries(&fixtures()) {
        let is_converted = !NOT_CONVERTED.iter().any(|name| case.ends_with(name));
        if case.is_dir() && is_converted {
            collect_sources(&case, &mut found);
        }
    }
    found.iter().map(|path| path.strip_prefix(fixtures()).unwrap().to_path_buf()).collect()
}

fn collect_sources(folder: &Path, found: &mut Vec<PathBuf>) {
    found.push(folder.to_path_buf());
    for entry in sorted_entries(folder) {
        let name = entry.file_name().unwrap().to_string_lossy().into_owned();
        if entry.is_dir() {
            collect_sources(&entry, found);
        } else if is_whole_checkpoint(&name) {
            found.push(entry);
        }
    }
}

fn is_whole_checkpoint(name: &str) -> bool {
    let has_suffix = [".pt", ".safetensors"].iter().any(|suffix| name.ends_with(suffix));
    has_suffix && !["_rank_", "shard-", "-of-", "truth"].iter().any(|part| name.contains(part))
}

fn sorted_entries(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    entries
}

/// Runs one conversion and returns its line of the manifest.
fn convert(source: &Path, conversion: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let destination = folder.path().join("out");
    let (verb, options) = conversion.split_once(' ').unwrap_or((conversion, ""));
    let mut command = Command::new(env!("CARGO_BIN_EXE_dtshard"));
    command.current_dir(fixtures()).arg(verb).arg(source).arg(&destination).args(options.split_whitespace());
    let output = command.args(["--no-sync", "-q", "--threads", "1"]).output().unwrap();
    match output.status.code() {
        Some(0) => hash_of(&destination),
        Some(code) => {
            assert!(
                !destination.exists(),
                "{conversion} {} failed and left {}",
                source.display(),
                destination.display()
            );
            format!("exit {code}")
        }
        None => panic!("{conversion} {}: {}", source.display(), output.status),
    }
}

/// Returns a hash over the paths and contents of all files of a checkpoint.
fn hash_of(checkpoint: &Path) -> String {
    let mut files = BTreeMap::new();
    read_files(checkpoint, Path::new(""), &mut files);
    let mut hasher = blake3::Hasher::new();
    for (path, content) in files {
        hasher.update(format!("{path} {}\n", content.len()).as_bytes()).update(&content);
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

fn read_files(path: &Path, name: &Path, files: &mut BTreeMap<String, Vec<u8>>) {
    if path.is_dir() {
        for entry in sorted_entries(path) {
            read_files(&entry, &name.join(entry.file_name().unwrap()), files);
        }
    } else {
        files.insert(name.display().to_string(), fs::read(path).unwrap());
    }
}

/// Returns every conversion of every fixture, in the order of the manifest: the source and the arguments.
fn conversions() -> Vec<(PathBuf, String)> {
    let mut jobs = Vec::new();
    for source in sources() {
        jobs.extend(CONVERSIONS.iter().map(|conversion| (source.clone(), (*conversion).to_owned())));
        // Flat parameters are also converted with the flat layout of the job that saved them.
        let layout = source.with_added_extension("flat_layout.json");
        if fixtures().join(&layout).is_file() {
            let with_layout = |conversion| format!("{conversion} --flat-layout {}", layout.display());
            jobs.extend(CONVERSIONS.iter().map(|conversion| (source.clone(), with_layout(conversion))));
        }
    }
    jobs
}

/// Runs conversions and returns their lines of the manifest.
fn run(jobs: &[(PathBuf, String)]) -> Vec<String> {
    in_parallel(jobs, |(source, conversion)| {
        format!("{:32} {conversion} {}", convert(source, conversion), source.display())
    })
}

fn manifest() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/outputs/manifest.txt")
}

fn assert_lines(found: &[String], expected: &[&str]) {
    let changed: Vec<&String> = found.iter().zip(expected).filter(|(a, b)| a != b).map(|(found, _)| found).collect();
    assert!(changed.is_empty(), "{} outputs differ from the manifest: {changed:#?}", changed.len());
    assert_eq!(found.len(), expected.len(), "the manifest has other conversions");
}

/// The step and the number of conversions of a fixture have no common divisor, so the sample has every conversion.
#[test]
fn every_ninth_conversion_matches_the_hash_of_the_manifest() {
    const STEP: usize = 9;
    let jobs: Vec<(PathBuf, String)> = conversions().into_iter().step_by(STEP).collect();
    let expected = fs::read_to_string(manifest()).unwrap();
    let lines: Vec<&str> = expected.lines().step_by(STEP).collect();
    assert_lines(&run(&jobs), &lines);
}

#[test]
#[ignore = "takes as long as a third of the other tests; ci/check runs it"]
fn conversions_of_every_fixture_match_the_hashes_of_the_manifest() {
    let found = run(&conversions());
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(manifest(), found.join("\n") + "\n").unwrap();
        return;
    }
    let expected = fs::read_to_string(manifest()).unwrap();
    assert_lines(&found, &expected.lines().collect::<Vec<_>>());
}
