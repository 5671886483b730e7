//! Tests that a run never uses more memory than `--dry-run` reports.
//!
//! There are two measures. The first is the number of anonymous pages that the kernel counts, polled repeatedly. The
//! second is a limit on all private memory (RLIMIT_DATA), within which the run must succeed. The limit also counts
//! unused memory: the reserved capacity of lists and the full stacks of threads. So the tests set the limit higher than
//! the reported memory, by an allowance for both.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use dtshard::catalog::{Catalog, Chunk, Dtype, FileLocation, OutputFile, Reserved, TensorEntry, TensorId};
use dtshard::exchange::{
    FileOwners, FileVisibility, Moves, PLAN_BYTES, ReductionMethod, ReplicaChoice, Rounds, Topology,
};
use dtshard::exec::Extents;
use dtshard::layout::Tile;
use dtshard::storage::{FileId, memory};
use serde_json::Value as Json;

const BINARY: &str = env!("CARGO_BIN_EXE_dtshard");
const STACK_BYTES: u64 = 2 << 20;

/// Writes a safetensors file with `small` small tensors and three tensors of 4 MiB, all of which are zero.
fn model(path: &Path, small: usize) {
    let mut header = String::from("{");
    let mut end = 0;
    for index in 0..small + 3 {
        let rows = if index < small { 8 } else { 1 << 17 };
        let len = rows * 8 * 4;
        let comma = if index > 0 { "," } else { "" };
        let (name, from) = (format!("layers.{index}.experts.w1.weight"), end);
        end += len;
        write!(header, r#"{comma}"{name}":{{"dtype":"F32","shape":[{rows},8],"data_offsets":[{from},{end}]}}"#)
            .unwrap();
    }
    header.push('}');
    while header.len() % 8 != 0 {
        header.push(' ');
    }
    let mut file = std::fs::File::create_new(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
}

/// Returns the peak memory in bytes that a dry run reports.
fn planned_memory(arguments: &[&str]) -> u64 {
    let run = Command::new(BINARY).args(arguments).args(["--dry-run", "--json"]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    serde_json::from_slice::<Json>(&run.stdout).unwrap()["peak_bytes"].as_u64().unwrap()
}

/// Runs the program with a limit of `limit` bytes of private memory (RLIMIT_DATA), and asserts that it succeeds.
/// Returns the peak of its anonymous memory in bytes.
fn used_memory(arguments: &[&str], limit: u64) -> u64 {
    let limited = r#"ulimit -d "$0"; exec "$@""#;
    let mut run = Command::new("sh")
        .args(["-c", limited, &(limit / 1024).to_string(), BINARY])
        .args(arguments)
        .arg("--quiet")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", run.id());
    let mut most = 0;
    while run.try_wait().unwrap().is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let field = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let now = field.and_then(|field| field.split_whitespace().next()?.parse::<u64>().ok());
        most = most.max(now.unwrap_or(0) * 1024);
        std::thread::sleep(Duration::from_millis(1));
    }
    let run = run.wait_with_output().unwrap();
    assert!(run.status.success(), "{arguments:?} within {limit}: {}", String::from_utf8_lossy(&run.stderr));
    most
}

/// Returns an upper bound for the number of threads of a run without `--threads`.
fn default_threads() -> u64 {
    std::thread::available_parallelism().map_or(4, |cores| cores.get().max(4) as u64)
}

/// Asserts that a run without sync uses at most the memory that its dry run reports. `line` has the arguments; `{}` in
/// it stands for `folder`.
fn assert_within_plan(folder: &Path, line: &str) {
    assert_synced_run_within_plan(folder, &format!("{line} --no-sync"));
}

fn assert_synced_run_within_plan(folder: &Path, line: &str) {
    let line = line.replace("{}", folder.to_str().unwrap());
    let arguments: Vec<&str> = line.split_whitespace().collect();
    let threads = arguments.iter().position(|argument| *argument == "--threads").map(|at| arguments[at + 1]);
    let threads: u64 = threads.map_or_else(default_threads, |threads| threads.parse().unwrap());
    let promised = planned_memory(&arguments);
    let used = used_memory(&arguments, promised + promised / 4 + (threads + 1) * STACK_BYTES);
    assert!(used <= promised, "{line}: {used} used, {promised} promised");
}

#[test]
fn run_stays_within_the_memory_that_dry_run_reports() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(&folder.join("model.safetensors"), 4_000);
    for line in [
        "reshard {}/model.safetensors {}/dcp --mesh fsdp=4 --to dcp --threads 2",
        "reshard {}/model.safetensors {}/ranks --mesh fsdp=2 --to torch-ranks --threads 2",
        "consolidate {}/dcp {}/a --threads 1",
        "consolidate {}/dcp {}/b --threads 8",
        "consolidate {}/dcp {}/c --threads 2 --io read",
        "consolidate {}/dcp {}/d --threads 2 --dtype bf16",
        "unshard {}/ranks {}/e.pt --threads 2",
        "reshard {}/dcp {}/f --mesh tp=4 --placements S(1) --threads 2",
        "reshard {}/dcp {}/g --mesh tp=4 --placements S(1) --threads 2 --io direct",
        "reshard {}/ranks {}/h --mesh fsdp=3 --to dcp --threads 2",
        "flatten {}/e.pt {}/i --world-size 2 --threads 2",
    ] {
        assert_within_plan(folder, line);
    }
}

/// If output is synced, more threads write, and incomplete disk blocks at the ends of write blocks wait in memory.
#[test]
fn synced_run_stays_within_the_memory_that_dry_run_reports() {
    // The folder must be on a disk, and `/tmp` may be in memory, so the folder of the crate is used.
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let folder = folder.path();
    model(&folder.join("model.safetensors"), 2_000);
    for line in [
        "reshard {}/model.safetensors {}/dcp --mesh fsdp=4 --to dcp",
        "consolidate {}/dcp {}/a",
        "unshard {}/dcp {}/b.pt --threads 2",
        "reshard {}/dcp {}/c --mesh tp=4 --placements S(1)",
        "reshard {}/dcp {}/d --mesh tp=4 --placements S(1) --threads 8",
        "reshard {}/dcp {}/e --mesh fsdp=3 --max-memory 60MB",
    ] {
        assert_synced_run_within_plan(folder, line);
    }
}

#[test]
fn memory_does_not_depend_on_tensor_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(&folder.join("model.safetensors"), 10);
    for threads in [1, 2, 8] {
        // The minimum memory for this number of threads, as documented.
        let floor = (32 << 20) + threads * ((64 << 10) + (3584 << 10)) + (1 << 20);
        let options = format!("--threads {threads} --max-memory {floor}");
        assert_within_plan(folder, &format!("unshard {{}}/model.safetensors {{}}/{threads}.pt {options}"));
        assert_within_plan(
            folder,
            &format!("reshard {{}}/model.safetensors {{}}/{threads} --mesh tp=4 --placements S(1) {options}"),
        );
    }
}

/// The error for too little memory states a minimum that is sufficient, even if headers need most of it.
#[test]
fn run_succeeds_with_the_minimum_memory_of_the_error() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("model.safetensors");
    model(&source, 40_000);
    let target = folder.path().join("dcp");
    let arguments = ["reshard", source.to_str().unwrap(), target.to_str().unwrap(), "--mesh", "fsdp=4", "--to", "dcp"];
    let run = |max_memory: &str| {
        let options = ["--dry-run", "--threads", "2", "--max-memory", max_memory];
        let run = Command::new(BINARY).args(arguments).args(options).output().unwrap();
        (run.status.success(), String::from_utf8(run.stderr).unwrap())
    };
    let (fits, error) = run("42MB");
    let floor = error.split_whitespace().rev().find(|word| word.bytes().all(|byte| byte.is_ascii_digit()));
    assert!(!fits && error.contains("the headers and tables of 5 files need"), "{error}");
    let (fits, error) = run(floor.unwrap());
    assert!(fits, "{error}");
}

/// Each of two processes sees half of SRC, and they exchange data. In some cases `--max-memory` is so small that the
/// memory for headers and the memory for rounds must both be reduced.
#[test]
fn exchanging_processes_stay_within_the_memory_that_dry_run_reports() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(&folder.join("model.safetensors"), 8_000);
    let place = |name: &str| folder.join(name).into_os_string().into_string().unwrap();
    let words = ["reshard", &place("model.safetensors"), &place("dcp"), "--mesh", "fsdp=2", "--to", "dcp", "--no-sync"];
    assert!(Command::new(BINARY).args(words).output().unwrap().status.success());
    for (rank, names) in [&[".metadata", "__0_0.distcp"][..], &["__1_0.distcp"]].into_iter().enumerate() {
        let node = folder.join(format!("node{rank}"));
        std::fs::create_dir(&node).unwrap();
        for name in names {
            std::fs::copy(folder.join("dcp").join(name), node.join(name)).unwrap();
        }
    }
    for (number, line) in [
        "consolidate --threads 2",
        "consolidate --threads 2 --max-memory 128MB",
        "reshard --mesh fsdp=3 --to torch-ranks --threads 2 --max-memory 128MB",
        "reshard --mesh tp=2 --placements S(1) --to dcp --threads 2 --bucket-size 4MB",
    ]
    .into_iter()
    .enumerate()
    {
        let target = place(&format!("out{number}"));
        let both = |run: &(dyn Fn(&[&str]) -> u64 + Sync)| {
            let of_rank = |rank: usize| {
                let (source, part) = (place(&format!("node{rank}")), rank.to_string());
                let (verb, options) = line.split_once(' ').unwrap();
                let mut words = vec![verb, &source, &target, "--source", "per-rank", "--parts", "2", "--part", &part];
                words.extend(options.split(' '));
                run(&words)
            };
            std::thread::scope(|scope| {
                let ranks = [0, 1].map(|rank| scope.spawn(move || of_rank(rank)));
                ranks.map(|rank| rank.join().unwrap())
            })
        };
        let promised = both(&planned_memory);
        let limit = promised.iter().max().unwrap() * 5 / 4 + 8 * STACK_BYTES;
        let used = both(&|words| used_memory(words, limit));
        assert!(used.iter().zip(promised).all(|(used, promised)| *used <= promised), "{line}: {used:?}, {promised:?}");
    }
}

/// How a square matrix is divided into a number of pieces: by rows, by columns, or not at all (each piece is a
/// replica).
#[derive(Clone, Copy, Debug)]
enum Cut {
    Rows(u64),
    Columns(u64),
    Replicas(u64),
}

impl Cut {
    fn pieces(self) -> u64 {
        let (Self::Rows(pieces) | Self::Columns(pieces) | Self::Replicas(pieces)) = self;
        pieces
    }

    fn tile(self, size: u64, piece: u64) -> Tile {
        let of_one = |range: Range<u64>| std::iter::once(range).collect();
        let part = |pieces| size * piece / pieces..size * (piece + 1) / pieces;
        match self {
            Self::Rows(pieces) => Tile::new([of_one(part(pieces)), of_one(0..size)]),
            Self::Columns(pieces) => Tile::new([of_one(0..size), of_one(part(pieces))]),
            Self::Replicas(_) => Tile::new([0..size, 0..size].map(of_one)),
        }
    }
}

/// Returns the peak memory in bytes that the plans of the exchange rounds take. The conversion has `tensors` square
/// matrices and `ranks` processes; `from` and `to` divide each matrix, and each piece has a file of its own.
fn memory_of_plans(tensors: u32, ranks: u32, from: Cut, to: Cut) -> u64 {
    let size = from.pieces().max(to.pieces()).max(64);
    let files =
        |cut: Cut| -> Vec<OutputFile> { (0..cut.pieces()).map(|piece| OutputFile::new(piece.to_string())).collect() };
    let (mut sources, mut outputs) = (files(from), files(to));
    let mut catalog = Catalog::empty();
    let mut reserved = Vec::new();
    for number in 0..tensors {
        let placed = |cut: Cut, files: &mut [OutputFile]| {
            let mut entry =
                TensorEntry::new(format!("layers.{number}").into(), Dtype::U8, [size, size].as_slice().into());
            for (file, (piece, output)) in (0..).zip((0..).zip(files)) {
                let tile = cut.tile(size, piece);
                let location = FileLocation::Bytes { file: FileId(file), offset: output.push_payload(tile.numel()) };
                entry.chunks.push(Chunk { tile, location, strides: None, rank: None, view: None });
            }
            entry
        };
        catalog.tensors.push(placed(from, &mut sources));
        reserved.push(Reserved::new(TensorId(number), placed(to, &mut outputs)));
    }
    let mut todos = vec![Extents::new(); ranks as usize];
    (0..).zip(&outputs).for_each(|(file, output)| todos[file as usize % ranks as usize].insert(file, 0..output.len));
    let owners = FileOwners::new(&outputs, &todos);
    let seen = (0..u32::try_from(sources.len()).unwrap()).map(|file| std::iter::once(file % ranks).collect());
    let parties = Topology {
        visibility: FileVisibility::PerRank(seen.collect()),
        nodes: (0..ranks).map(|rank| rank / 8).collect(),
        replica_choice: ReplicaChoice::Any,
        reducing: ReductionMethod::InRankOrder,
    };
    let before = memory::anonymous_memory().unwrap().now;
    // While the next plan is computed, three plans exist: for the rounds that are being read, sent and written.
    let mut under_way = VecDeque::new();
    for round in Rounds::new(&catalog, &reserved, &owners, &parties, 64_000_000).take(5) {
        under_way.push_back(Moves::new(&round.unwrap(), 0));
        if under_way.len() > 3 {
            under_way.pop_front();
        }
    }
    memory::anonymous_memory().unwrap().peak - before
}

const PLANNED: [(u32, u32, Cut, Cut); 8] = [
    // Small tensors with one piece each.
    (21_000, 1, Cut::Rows(1), Cut::Rows(1)),
    (13_000, 128, Cut::Rows(1), Cut::Rows(1)),
    // Plans for data that goes to all processes, or to most of them.
    (8_000, 64, Cut::Rows(1), Cut::Replicas(64)),
    (2_500, 256, Cut::Rows(1), Cut::Replicas(256)),
    (2_500, 256, Cut::Rows(1), Cut::Replicas(200)),
    // Tensors with many pieces each.
    (300, 8, Cut::Rows(1024), Cut::Rows(1)),
    (60, 64, Cut::Rows(64), Cut::Columns(64)),
    (300, 256, Cut::Rows(256), Cut::Rows(192)),
];

#[test]
#[ignore = "a process of a test"]
fn memory_of_transfer_plans() {
    let (tensors, ranks, from, to) = PLANNED[std::env::var("CASE").map_or(0, |case| case.parse().unwrap())];
    // The output starts on a new line, because the test harness may have written a part of a line.
    writeln!(std::io::stdout(), "\n{}", memory_of_plans(tensors, ranks, from, to)).unwrap();
}

/// The memory that dtshard reserves for transfer plans is enough for each tested number of processes and pieces.
#[test]
fn transfer_plans_take_at_most_the_accounted_memory() {
    let run = |case: usize| {
        let own = std::env::current_exe().unwrap();
        let words = ["memory::memory_of_transfer_plans", "--exact", "--ignored", "--nocapture"];
        let run = Command::new(own).args(words).env("CASE", case.to_string()).output().unwrap();
        let stdout = String::from_utf8(run.stdout).unwrap();
        stdout.lines().find_map(|line| line.parse::<u64>().ok()).expect(&stdout)
    };
    let took: Vec<u64> = (0..PLANNED.len()).map(run).collect();
    assert!(took.iter().all(|bytes| *bytes <= PLAN_BYTES), "{took:?} of {PLAN_BYTES}: {PLANNED:?}");
}

/// The number of bytes of anonymous memory that a run may use in addition to the memory for the bytes that it reads.
const PROGRAM_BYTES: u64 = 12 << 20;

/// Returns the peak of a run's anonymous memory in bytes, and its exit code. The run may fail.
fn peak_memory(arguments: &[&str]) -> (u64, Option<i32>) {
    let mut run = Command::new(BINARY).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{}/status", run.id());
    let mut most = 0;
    loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let field = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let now = field.and_then(|field| field.split_whitespace().next()?.parse::<u64>().ok());
        most = most.max(now.unwrap_or(0) * 1024);
        if let Some(status) = run.try_wait().unwrap() {
            return (most, status.code());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write_header(path: &Path, mut header: String) -> u64 {
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    header.len() as u64
}

#[test]
fn header_of_many_tensors_takes_four_times_its_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    model(&path, 60_000);
    let mut len = [0; 8];
    std::io::Read::read_exact(&mut std::fs::File::open(&path).unwrap(), &mut len).unwrap();
    let (most, code) = peak_memory(&["inspect", "--brief", path.to_str().unwrap()]);
    assert_eq!(code, Some(0));
    assert!(most <= 4 * u64::from_le_bytes(len) + PROGRAM_BYTES, "{most} for {}", u64::from_le_bytes(len));
}

#[test]
fn header_of_long_lists_is_refused_in_little_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let zeros = "0,".repeat(15_000_000);
    for header in [
        format!(r#"{{"x":[{zeros}0]}}"#),
        format!(r#"{{"x":{{"dtype":"U8","shape":[{zeros}0],"data_offsets":[0,0]}}}}"#),
        format!(r#"{{"x":{{"dtype":"U8","shape":[0],"data_offsets":[{zeros}0]}}}}"#),
        format!(r#"{{"x":{{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":[{zeros}0]}}}}"#),
        format!(r#"{{"__metadata__":{{"a":[{zeros}0]}}}}"#),
    ] {
        let len = write_header(&path, header);
        let (most, code) = peak_memory(&["inspect", path.to_str().unwrap()]);
        assert_eq!(code, Some(2));
        assert!(most <= 2 * len + PROGRAM_BYTES, "{most} for {len}");
    }
}

/// A list of 2 * 10^7 ints may take 700 MB: 35 bytes per int. This test uses a list of 2.5 * 10^6 ints.
#[test]
fn list_of_ints_takes_35_bytes_an_int() {
    const INTS: u32 = 2_500_000;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ints.pt");
    let mut pickle = b"\x80\x02}X\x01\0\0\0a]".to_vec();
    for batch in (0..INTS).collect::<Vec<_>>().chunks(1000) {
        pickle.push(b'(');
        batch.iter().for_each(|int| pickle.extend([&b"J"[..], &int.to_le_bytes()].concat()));
        pickle.push(b'e');
    }
    pickle.extend(b"s.");
    std::fs::write(&path, crate::corrupt::torch_file(pickle, &[])).unwrap();
    let source = path.to_str().unwrap();
    for (verb, name, options) in [
        ("inspect", None, ""),
        ("unshard", Some("out.pt"), "--no-sync --include a"),
        ("reshard", Some("dcp"), "--to dcp --mesh dp=2 --no-sync --include a"),
    ] {
        let target = name.map(|name| folder.path().join(name));
        let mut arguments = vec![verb, source];
        arguments.extend(target.as_ref().map(|path| path.to_str().unwrap()));
        arguments.extend(options.split_whitespace());
        let (most, code) = peak_memory(&arguments);
        assert_eq!(code, Some(0), "{arguments:?}");
        assert!(most <= 35 * u64::from(INTS) + PROGRAM_BYTES, "{verb}: {most}");
        if let Some(target) = target {
            let (_, code) = peak_memory(&["verify", source, target.to_str().unwrap()]);
            assert_eq!(code, Some(0), "{verb}");
        }
    }
}
