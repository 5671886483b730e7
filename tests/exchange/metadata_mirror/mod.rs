//! Tests that several processes, each of which sees some files of a checkpoint, read and convert it like one process
//! that sees all files.

mod faults;
mod folders;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::common::{fixture, succeed};
use dtshard::catalog::{Catalog, Dtype, Fqn, Reservation, TensorEntry, state_dict};
use dtshard::comm::{Communicator, Local};
use dtshard::error::{Error, Result};
use dtshard::exchange::{
    Exchange, FileOwners, FileVisibility, HostShuffle, ReductionMethod, ReplicaChoice, Topology, agree,
};
use dtshard::exec::division::even_share;
use dtshard::exec::fingerprint::fingerprint;
use dtshard::exec::{Extents, Input, Options, Silent, Stop, copy};
use dtshard::format::{Checkpoint, FlatKnowledge, ReadOptions, dcp, resolve, safetensors};
use dtshard::launch::Part;
use dtshard::layout::{DeviceMesh, Placement, TensorDim, local_shard};
use dtshard::metadata_mirror::{MetadataMirror, create};
use dtshard::publish::completed_work::CompletedWork;
use dtshard::publish::seal::seal;
use dtshard::publish::work_log::{AtEnd, Log};
use dtshard::storage::{AnchoredPath, IoMode};
use tempfile::TempDir;

/// A checkpoint whose files are divided among several processes, which are threads of the test.
struct Spread {
    folder: TempDir,
    /// The path of SRC for each process.
    own: Vec<PathBuf>,
}

impl Spread {
    /// Divides the files of a checkpoint among `ranks` processes. Each file goes to one process, and every third file
    /// also to a second process. If there are more than two processes, the last one gets no files.
    fn new(source: &Path, ranks: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let own: Vec<PathBuf> = (0..ranks).map(|rank| folder.path().join(format!("node{rank}/ckpt"))).collect();
        let holders = if ranks > 2 { ranks - 1 } else { ranks };
        for (index, file) in files_of(source).into_iter().enumerate() {
            let second = (index % 3 == 0).then_some(index + 1);
            for holder in [Some(index), second].into_iter().flatten() {
                let to = own[holder % holders].join(&file);
                fs::create_dir_all(to.parent().unwrap()).unwrap();
                fs::copy(source.join(&file), &to).unwrap();
                set_modified(&to, 1_000_000 + 10 * index as u64 + (holder - index) as u64);
            }
        }
        Self { folder, own }
    }

    fn mirror(&self) -> PathBuf {
        self.folder.path().join("mirror")
    }

    /// Lets all processes (threads) make the metadata mirror together, and then runs `then` in each of them.
    fn run_each<T: Send>(&self, then: impl Fn(&Local, &MetadataMirror) -> Result<T> + Sync) -> Vec<Result<T>> {
        std::thread::scope(|scope| {
            let ranks = Local::fleet(u32::try_from(self.own.len()).unwrap());
            let threads: Vec<_> = ranks
                .into_iter()
                .zip(&self.own)
                .map(|(rank, own)| {
                    let then = &then;
                    scope.spawn(move || {
                        let done = create(&rank, own, &anchored(self.folder.path()).join("mirror"))
                            .and_then(|mirror| then(&rank, &mirror));
                        if done.is_ok() {
                            rank.leave().unwrap();
                        }
                        done
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Asserts that opening the mirror fails in all processes with the same error, apart from the path of SRC. Returns
    /// the error.
    #[track_caller]
    fn error_text(&self, options: &ReadOptions) -> String {
        let errors = self.run_each(|_, mirror| mirror.open(options).map(drop));
        let texts: Vec<String> = (errors.into_iter().zip(&self.own))
            .map(|(error, own)| relative(&error.unwrap_err().to_string(), own))
            .collect();
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:#?}");
        texts[0].clone()
    }
}

fn relative(text: &str, root: &Path) -> String {
    text.replace(&root.display().to_string(), "SRC")
}

fn set_modified(path: &Path, seconds: u64) {
    let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    File::options().append(true).open(path).unwrap().set_modified(modified).unwrap();
}

/// Returns the relative paths of all files below a folder.
fn files_of(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = PathBuf::from(entry.file_name());
        if entry.path().is_dir() {
            found.extend(files_of(&entry.path()).into_iter().map(|below| name.join(below)));
        } else {
            found.push(name);
        }
    }
    found.sort();
    found
}

/// Returns a text with the files and the catalog of an opened checkpoint, to compare checkpoints.
fn describe(checkpoint: &Checkpoint, root: &Path) -> String {
    let Checkpoint { format, files, catalog, parts, beside, series, skipped_series, missing, .. } = checkpoint;
    let files: Vec<_> = files.ids().map(|id| (files.path(id).to_path_buf(), files.len_bytes(id))).collect();
    let places = (&checkpoint.root, &checkpoint.resolved_from, files);
    let text =
        format!("{format} {places:?} {catalog:#?} {parts:?} {beside:?} {series:?} {skipped_series:?} {missing:?}");
    relative(&text, root)
}

fn opened_text(opened: Result<Checkpoint>, root: &Path) -> Result<String, String> {
    opened.map(|checkpoint| describe(&checkpoint, root)).map_err(|error| relative(&error.to_string(), root))
}

/// Adds all folders below a folder to `found`.
fn folders_of(at: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(at).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            folders_of(&path, found);
            found.push(path);
        }
    }
}

/// The checkpoints of DeepSpeed in which only values show which tensors belong together. A metadata mirror refuses them.
const NEED_VALUES: [&str; 9] = [
    "pipe_fp32",
    "pipe_bf16",
    "pipe_tied",
    "pipe_tp",
    "universal_pipe_tp",
    "zero0_bf16",
    "zero0_strides",
    "zero0_adafactor",
    "moe_zero0_bf16",
];

#[test]
fn metadata_mirror_opens_like_the_source() {
    let mut all = Vec::new();
    folders_of(&fixture(""), &mut all);
    all.sort();
    let mut read = BTreeMap::new();
    for (index, source) in all.iter().enumerate() {
        let layout = source.with_extension("flat_layout.json");
        let options = ReadOptions {
            flat: FlatKnowledge { layout: layout.exists().then_some(layout), ..FlatKnowledge::default() },
            allow_missing: index % 2 == 0,
            ..ReadOptions::default()
        };
        let whole = Checkpoint::open(source, &options);
        if let Ok(whole) = &whole {
            *read.entry(whole.format.name()).or_insert(0) += 1;
        }
        let whole = opened_text(whole, source);
        let spread = Spread::new(source, 1 + index % 4);
        let mirrors = spread.run_each(|rank, mirror| {
            let own = &spread.own[rank.rank() as usize];
            Ok(opened_text(mirror.open(&options), own))
        });
        for mirror in mirrors {
            let mirror = mirror.unwrap();
            // The folder `zero` of a Universal checkpoint has files that are checkpoints, too.
            let has = |name: &str| source.iter().any(|part| part == name);
            if NEED_VALUES.iter().any(|name| has(name)) && !has("zero") && whole.is_ok() {
                let error = mirror.expect_err("a mirror has no values");
                assert!(error.contains("only values show") || error.contains("no names"), "{error}");
                continue;
            }
            assert!(mirror == whole, "{}: {mirror:#?}\n{whole:#?}", source.display());
        }
    }
    for format in ["dcp", "torch-ranks", "fsdp-flat", "safetensors", "dcp-hf"] {
        assert!(read.get(format).is_some_and(|count| *count > 1), "{format}: {read:?}");
    }
}

fn options() -> Options {
    Options { threads: 2, write_block_bytes: 1000, transposed_block_bytes: 1000, sync: false }
}

fn writing<'a>(
    reservation: &'a Reservation,
    folder: &'a AnchoredPath,
    log: &'a Log<'a>,
    options: &'a Options,
    stop: &'a Stop,
) -> copy::WriteContext<'a> {
    copy::WriteContext { reservation, folder, log, options, reporter: &Silent, stop }
}

fn anchored(folder: &Path) -> AnchoredPath {
    AnchoredPath::new(folder)
}

fn input(checkpoint: &Checkpoint) -> Input<'_> {
    Input { files: &checkpoint.files, catalog: &checkpoint.catalog, resolve: &resolve }
}

fn in_safetensors(catalog: &Catalog) -> Reservation {
    let tensors = state_dict::all_tensors(&catalog.state);
    let dtypes: Vec<Dtype> = catalog.tensors.iter().map(|entry| entry.dtype).collect();
    let selected = safetensors::SelectedTensors { source: catalog, dtypes: &dtypes };
    safetensors::reserve(selected, &tensors, &[], &safetensors::FileDivision::Folder { max_shard_bytes: 3000 }).unwrap()
}

/// Lays out a DCP directory in which each tensor is sharded along its last dim over three ranks.
fn in_dcp(catalog: &Catalog) -> Reservation {
    let mesh = DeviceMesh::parse("dp=3").unwrap();
    let mut shards = |_: &Fqn, _: &dtshard::catalog::Path, entry: &TensorEntry| {
        let last = entry.shape.len().checked_sub(1);
        let placement = last.map_or(Placement::Replicate, |dim| Placement::Shard(TensorDim(dim)));
        let tile = |at: &dtshard::layout::Dims| local_shard(&entry.shape, mesh.shape(), &[placement], at).unwrap();
        let ranks = mesh.coordinates().take(if last.is_some() { 3 } else { 1 });
        Ok(ranks.map(|(rank, at)| (tile(&at), [rank].into_iter().collect())).collect())
    };
    dcp::reserve(catalog, &catalog.state, &mut shards).unwrap()
}

/// Asserts that the journals record all output as written. Then seals the output files, and returns their content.
fn sealed_files(folder: &Path, reservation: &Reservation, journals: &Path) -> Vec<Vec<u8>> {
    let journals = &anchored(journals);
    let known = CompletedWork::read(journals, &reservation.files, 0, false).unwrap();
    assert_eq!(known.done, Extents::of_files(&reservation.files));
    seal(&anchored(folder), &reservation.files, &[], &known, journals, false).unwrap();
    reservation.files.iter().map(|file| fs::read(folder.join(&file.path)).unwrap()).collect()
}

fn check_conversion(source: &Path, ranks: usize, reserve: &(dyn Fn(&Catalog) -> Reservation + Sync)) {
    let spread = Spread::new(source, ranks);
    let outputs = ["alone", "together"].map(|name| spread.folder.path().join(name));
    let journals = outputs.clone().map(|folder| folder.with_extension("journals"));
    outputs.iter().chain(&journals).for_each(|folder| fs::create_dir(folder).unwrap());

    let whole = Checkpoint::open(source, &ReadOptions::default()).unwrap();
    let reservation = reserve(&whole.catalog);
    let todo = Extents::of_files(&reservation.files);
    let log = Log::new(&reservation.files, &todo, anchored(&journals[0]).join("0.journal"), false, AtEnd::Record);
    copy::copy(input(&whole), writing(&reservation, &anchored(&outputs[0]), &log, &options(), &Stop::default()))
        .unwrap();
    let alone = sealed_files(&outputs[0], &reservation, &journals[0]);

    let done = spread.run_each(|rank, mirror| {
        let checkpoint = mirror.open(&ReadOptions::default())?;
        let reservation = reserve(&checkpoint.catalog);
        let (visibility, nodes) =
            (FileVisibility::from_files(&checkpoint.files, rank.size()), Topology::gather_nodes(rank)?);
        assert_eq!(nodes, vec![0; ranks]);
        let parties =
            Topology { visibility, nodes, replica_choice: ReplicaChoice::Any, reducing: ReductionMethod::InRankOrder };
        let todo = even_share(&reservation.files, Part { index: rank.rank(), of: rank.size() });
        let owners = FileOwners::new(&reservation.files, &agree(rank, &reservation.files, &todo)?);
        let exchange = Exchange {
            input: input(&checkpoint),
            reservation: &reservation,
            parties: &parties,
            owners: &owners,
            bucket_bytes: 5000,
        };
        let journal = anchored(&journals[1]).join(format!("{}.journal", rank.rank()));
        let log = Log::new(&reservation.files, &todo, journal, false, AtEnd::Record);
        let (options, stop) = (options(), Stop::default());
        exchange.run(
            rank,
            HostShuffle::new(rank),
            writing(&reservation, &anchored(&outputs[1]), &log, &options, &stop),
        )?;
        checkpoint.files.check_unchanged()?;
        let own = &spread.own[rank.rank() as usize];
        Ok(fingerprint("1", input(&checkpoint), &reservation, &[], &[own], ReductionMethod::InRankOrder))
    });
    let fingerprints: Vec<_> = done.into_iter().map(|fingerprint| fingerprint.unwrap()).collect();
    assert!(fingerprints.iter().all(|other| *other == fingerprints[0]));
    let together = sealed_files(&outputs[1], &reservation, &journals[1]);
    assert!(together == alone, "{}", source.display());
}

#[test]
fn ranks_that_see_their_own_files_write_identical_bytes() {
    for (source, ranks) in [
        ("fsdp4/dcp", 3),
        ("compat/torch-2.4.1/fsdp4/dcp", 4),
        ("odd4/ranks", 2),
        ("fsdp_tp/ranks", 4),
        ("fsdp1_sharded/ranks", 3),
        ("safetensors/sharded", 2),
        ("dcp_hf/shards", 3),
    ] {
        let source = fixture(source);
        check_conversion(&source, ranks, &in_safetensors);
        check_conversion(&source, ranks, &in_dcp);
    }
}
