//! `--backend auto` where all processes see SRC: GPUs are used where that pays and each process has one. A stand-in takes
//! the place of driver and NCCL.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::nodes::{ended, tree};
use crate::outcome::{Outcome, command, copy_all, fixture};

/// A folder where the loader finds the stand-in, a SRC, and room for what is made.
struct Desk {
    folder: TempDir,
    source: PathBuf,
}

impl Desk {
    fn new(source: impl FnOnce(&Path) -> PathBuf) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let stand_in = std::env::current_exe().unwrap().with_file_name("libgpu_stand_in.so");
        for name in ["libcuda.so", "libnccl.so.2"] {
            symlink(&stand_in, folder.path().join(name)).unwrap();
        }
        let source = source(folder.path());
        Self { folder, source }
    }

    /// One matrix of 1 MiB, as 256 rows of 4 KiB.
    fn with_matrix() -> Self {
        Self::new(|folder| {
            let header = r#"{"w":{"dtype":"F32","shape":[256,1024],"data_offsets":[0,1048576]}}"#;
            let values = (0..1 << 18_u32).flat_map(u32::to_le_bytes);
            let bytes = (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(values);
            let source = folder.join("model.safetensors");
            fs::write(&source, bytes.collect::<Vec<u8>>()).unwrap();
            source
        })
    }

    fn command(&self, name: &str, words: &str) -> Command {
        self.command_to(&self.folder.path().join(name), words)
    }

    fn command_to(&self, dst: &Path, words: &str) -> Command {
        let mut command = command(&[&"reshard", &self.source, &dst]);
        command.args(words.split_whitespace()).args(["--to", "torch-ranks", "--mesh", "fsdp=2", "-v"]);
        command.env("DTSHARD_FAULT", "none").env("GPU_STAND_IN_DEVICES", "2");
        command
    }

    /// Two processes, of which the second has settings of its own.
    fn two(&self, second: Settings<'_>, words: &str) -> Vec<Outcome> {
        self.each(|part| (words.to_owned(), if part == 1 { second } else { &[] }))
    }

    fn each<'s>(&self, of: impl Fn(usize) -> (String, Settings<'s>)) -> Vec<Outcome> {
        self.each_to(&self.folder.path().join("out"), of)
    }

    fn each_to<'s>(&self, dst: &Path, of: impl Fn(usize) -> (String, Settings<'s>)) -> Vec<Outcome> {
        ended([0, 1].map(|part| {
            let (words, settings) = of(part);
            let mut process = self.command_to(dst, &words);
            process.args(["--parts", "2", "--part", &part.to_string()]);
            process.env("LD_LIBRARY_PATH", self.folder.path()).envs(settings.iter().copied());
            process.spawn().unwrap()
        }))
    }

    /// What two say that write what one does.
    fn said(&self, second: Settings<'_>, words: &str) -> [String; 2] {
        let said = self.two(second, words).into_iter().map(|outcome| outcome.succeeded().err.clone());
        let said = said.collect::<Vec<_>>().try_into().unwrap();
        self.has_made(words);
        said
    }

    #[track_caller]
    fn has_made(&self, words: &str) {
        let alone: Outcome = self.command("alone", words).arg("--parts=1").output().unwrap().into();
        alone.succeeded();
        let [made, wanted] = ["out", "alone"].map(|name| tree(&self.folder.path().join(name)));
        assert!(made == wanted, "{words}: not what one process writes");
    }
}

/// Variables of one process.
type Settings<'a> = &'a [(&'a str, &'a str)];

const COMPLETE: Settings<'static> = &[];
const WITHOUT_DEVICE: Settings<'static> = &[("LD_LIBRARY_PATH", "/nonexistent")];
const WITHOUT_NCCL: Settings<'static> = &[("DTSHARD_NCCL_LIB", NOWHERE)];
const FAILS_MEETING: Settings<'static> = &[("GPU_STAND_IN_FAULT", "fails-meeting")];

const NOWHERE: &str = "/nonexistent/libnccl.so.2";

const BY_NCCL: &str = "bytes go by NCCL 2.";

#[test]
fn short_runs_are_exchanged_stand_in() {
    for said in Desk::with_matrix().said(COMPLETE, "--placements S(1)") {
        assert!(said.contains("runs of 2.05 kB in the mean, shorter than 65.54 kB"), "{said}");
        assert!(said.contains(BY_NCCL) && said.contains("(stand-in (no GPU))"), "{said}");
        assert!(said.contains("no kernel packs them") && said.contains("no NVRTC"), "{said}");
    }
}

#[test]
fn what_is_reduced_is_exchanged_stand_in() {
    let desk = Desk::new(|_| fixture("partial2/ranks"));
    for said in desk.said(COMPLETE, "--placements R") {
        assert!(said.contains("are reduced") && said.contains(BY_NCCL), "{said}");
    }
}

#[test]
fn long_runs_are_read_by_each_stand_in() {
    for said in Desk::with_matrix().said(COMPLETE, "--placements S(0)") {
        assert!(said.contains("backend cpu") && said.contains("runs of 524.29 kB"), "{said}");
        assert!(!said.contains(BY_NCCL), "{said}");
    }
}

#[test]
fn without_a_device_of_each_they_do_without_stand_in() {
    let desk = Desk::with_matrix();
    let [with, without] = desk.said(WITHOUT_DEVICE, "--placements S(1)");
    assert!(with.contains("no exchange: process 1 of 2: rendezvous: did not come"), "{with}");
    assert!(without.contains("backend cpu") && without.contains("no CUDA driver here"), "{without}");
}

#[test]
fn without_nccl_of_each_they_do_without_stand_in() {
    for said in Desk::with_matrix().said(WITHOUT_NCCL, "--placements S(1)") {
        assert!(said.contains("bytes go by the file system, from which each process reads what it writes, not by NCCL: process 1 of 2 (") && said.contains(NOWHERE), "{said}");
    }
}

/// Before NCCL has met, so that there is something to go back to.
#[test]
fn without_memory_of_each_they_do_without_stand_in() {
    for said in Desk::with_matrix().said(&[("GPU_STAND_IN_MEMORY_MIB", "128")], "--placements S(1)") {
        assert!(said.contains("not by NCCL: process 1 of 2 (") && said.contains("134.22 MB are free"), "{said}");
        assert!(!said.contains(BY_NCCL) && !said.contains("warning"), "{said}");
    }
}

#[test]
fn options_of_an_exchange_that_is_none_are_warned_of_stand_in() {
    for said in Desk::with_matrix().said(COMPLETE, "--placements S(0) --bucket-size 1MB") {
        let warning = "warning: --bucket-size has no effect: each process reads what it writes; -v says why";
        assert!(said.contains(warning), "{said}");
    }
    for said in Desk::with_matrix().said(COMPLETE, "--placements S(1) --bucket-size 1MB") {
        assert!(!said.contains("no effect"), "{said}");
    }
}

/// Rounds that nobody has asked for are as short as `--max-memory` and a device want them.
#[test]
fn rounds_shrink_before_they_are_given_up_stand_in() {
    let words = "--placements S(1) --threads 1 --max-memory";
    for said in Desk::with_matrix().said(&[("GPU_STAND_IN_MEMORY_MIB", "512")], &format!("{words} 128MB")) {
        assert!(said.contains(BY_NCCL), "{said}");
        assert!(said.contains(": --max-memory has no room for six times 64.00 MB"), "{said}");
    }
    for outcome in
        Desk::with_matrix().two(&[("GPU_STAND_IN_MEMORY_MIB", "512")], &format!("{words} 128MB --source per-rank"))
    {
        assert!(outcome.succeeded().err.contains(BY_NCCL), "{outcome:?}");
    }
    for said in Desk::with_matrix().said(COMPLETE, &format!("{words} 64MB")) {
        assert!(said.contains("backend cpu") && said.contains("--max-memory has no room for rounds, "), "{said}");
        assert!(!said.contains("--bucket-size"), "{said}");
    }
    for said in Desk::with_matrix().said(COMPLETE, &format!("{words} 128MB --bucket-size 64MB")) {
        assert!(said.contains("backend cpu") && said.contains("no room for six times --bucket-size"), "{said}");
    }
}

#[test]
fn two_with_one_device_do_without_stand_in() {
    let desk = Desk::with_matrix();
    let one: Settings<'_> = &[("GPU_STAND_IN_DEVICES", "1")];
    let words = "--placements S(1)";
    for outcome in desk.each(|_| (words.to_owned(), one)) {
        let said = &outcome.succeeded().err;
        assert!(said.contains("not by NCCL: processes 0 and 1 have one GPU"), "{said}");
        assert!(!said.contains(BY_NCCL) && !said.contains("warning"), "{said}");
    }
    desk.has_made(words);
}

#[test]
fn where_nccl_fails_on_one_they_do_without_stand_in() {
    for (part, said) in Desk::with_matrix().said(FAILS_MEETING, "--placements S(1)").iter().enumerate() {
        let who = ["process 1 of 2 (", "GPU"][part];
        assert!(said.contains(&format!("not by NCCL: {who}")) && said.contains(": meet by NCCL: "), "{said}");
        assert!(said.contains("the network was told to fail") && !said.contains(BY_NCCL), "{said}");
    }
}

/// What NCCL has met, and then no memory for: nothing to go back to, but a way out.
#[test]
fn without_memory_of_a_device_they_are_told_of_the_cpu_stand_in() {
    let desk = Desk::with_matrix();
    for fault in ["refuses-memory", "refuses-pinned"] {
        let outcomes = desk.two(&[("GPU_STAND_IN_FAULT", fault)], "--placements S(1)");
        outcomes[0].refused(&["process 1 of 2 (", "allocate memory"]);
        outcomes[1].refused(&["GPU: allocate memory", "hint: ", "--backend cpu"]);
        assert!(!desk.folder.path().join(".out.dtshard-partial").exists());
    }
}

#[test]
fn other_rounds_are_refused_stand_in() {
    let desk = Desk::with_matrix();
    for option in ["--bucket-size 40KB", "--on-conflict rank0"] {
        let words = |part| format!("--placements S(1) --bucket-size 20KB {}", if part == 1 { option } else { "" });
        let (name, value) = option.split_once(' ').unwrap();
        for outcome in desk.each(|part| (words(part), COMPLETE)) {
            let first = if name == "--bucket-size" { "20000" } else { "it is not given" };
            let value = value.replace("KB", "000");
            outcome.refused(&[
                &format!("process 1 of 2: {name}: {value}; at process 0: {first}"),
                "hint: start all processes",
            ]);
            assert!(!outcome.err.contains(BY_NCCL), "{outcome:?}");
        }
    }
    assert!(!desk.folder.path().join(".out.dtshard-partial").exists());
}

/// Before anything is weighed, a device taken, or a place to meet made.
#[test]
fn where_dst_may_not_be_they_do_not_meet_stand_in() {
    let desk = Desk::new(|folder| {
        let source = folder.join("src");
        copy_all(&fixture("partial2/ranks"), &source);
        source
    });
    fs::create_dir(desk.folder.path().join("out")).unwrap();
    fs::write(desk.folder.path().join("out/x"), "x").unwrap();
    let before = tree(desk.folder.path());
    let words = |_| (String::from("--placements R"), COMPLETE);
    let within = desk.each_to(&desk.source.join("out"), words);
    for outcome in &within {
        outcome.refused(&["lies inside the source"]);
    }
    let taken = desk.each(words);
    for outcome in &taken {
        outcome.refused(&["out", "exists", "hint: "]);
    }
    for outcome in within.iter().chain(&taken) {
        assert!(!outcome.err.contains("backend"), "{outcome:?}");
    }
    assert!(before == tree(desk.folder.path()), "something was made");
}

/// NCCL began it, and would go on with it.
#[test]
fn a_dry_run_knows_a_run_of_nccl_stand_in() {
    let desk = Desk::new(|_| fixture("partial2/ranks"));
    let words = "--placements R --fast-reduce";
    let killed = desk.two(&[("DTSHARD_FAULT", "record-after")], words);
    assert_eq!(killed[1].signal, Some(9));
    assert!(killed[0].err.contains(BY_NCCL), "{killed:?}");
    for outcome in desk.two(COMPLETE, &format!("{words} --resume --dry-run")) {
        let said = &outcome.succeeded().err;
        assert!(said.contains("a run would go on with what is done"), "{said}");
    }
    for outcome in desk.two(COMPLETE, &format!("{words} --resume")) {
        outcome.succeeded();
    }
}
