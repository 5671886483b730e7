//! `--backend auto` where all processes see SRC: GPUs are used where that pays and each process has one. A stand-in takes
//! the place of driver and NCCL.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::nodes::{ended, tree};
use crate::outcome::{Outcome, command, fixture};

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
        let mut command = command(&[&"reshard", &self.source, &self.folder.path().join(name)]);
        command.args(words.split_whitespace()).args(["--to", "torch-ranks", "--mesh", "fsdp=2", "-v"]);
        command.env("DTSHARD_FAULT", "none").env("GPU_STAND_IN_DEVICES", "2");
        command
    }

    /// What two processes say, of which the second may lack something; they write what one does.
    fn said(&self, second: Second, words: &str) -> [String; 2] {
        let processes = [0, 1].map(|part: usize| {
            let mut process = self.command("out", words);
            process.args(["--parts", "2", "--part", &part.to_string()]);
            if part == 0 || second != Second::WithoutDevice {
                process.env("LD_LIBRARY_PATH", self.folder.path());
            }
            if part == 1 && second == Second::WithoutNccl {
                process.env("DTSHARD_NCCL_LIB", NOWHERE);
            }
            process.spawn().unwrap()
        });
        let said = ended(processes).into_iter().map(|outcome| outcome.succeeded().err.clone());
        let alone: Outcome = self.command("alone", words).arg("--parts=1").output().unwrap().into();
        alone.succeeded();
        let [made, wanted] = ["out", "alone"].map(|name| tree(&self.folder.path().join(name)));
        assert!(made == wanted, "{words}: not what one process writes");
        said.collect::<Vec<_>>().try_into().unwrap()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Second {
    Complete,
    WithoutDevice,
    WithoutNccl,
}

const NOWHERE: &str = "/nonexistent/libnccl.so.2";

const BY_NCCL: &str = "bytes go by NCCL 2.";

#[test]
fn short_runs_are_exchanged_stand_in() {
    for said in Desk::with_matrix().said(Second::Complete, "--placements S(1)") {
        assert!(said.contains("runs of 2.05 kB in the mean, shorter than 65.54 kB"), "{said}");
        assert!(said.contains(BY_NCCL) && said.contains("(stand-in (no GPU))"), "{said}");
        assert!(said.contains("no kernel packs them") && said.contains("no NVRTC"), "{said}");
    }
}

#[test]
fn what_is_reduced_is_exchanged_stand_in() {
    let desk = Desk::new(|_| fixture("partial2/ranks"));
    for said in desk.said(Second::Complete, "--placements R") {
        assert!(said.contains("are reduced") && said.contains(BY_NCCL), "{said}");
    }
}

#[test]
fn long_runs_are_read_by_each_stand_in() {
    for said in Desk::with_matrix().said(Second::Complete, "--placements S(0)") {
        assert!(said.contains("backend cpu") && said.contains("runs of 524.29 kB"), "{said}");
        assert!(!said.contains(BY_NCCL), "{said}");
    }
}

#[test]
fn without_a_device_of_each_they_do_without_stand_in() {
    let desk = Desk::with_matrix();
    let [with, without] = desk.said(Second::WithoutDevice, "--placements S(1)");
    assert!(with.contains("no exchange: rank 1: rendezvous: did not come"), "{with}");
    assert!(without.contains("backend cpu") && without.contains("no CUDA driver here"), "{without}");
}

#[test]
fn without_nccl_of_each_they_do_without_stand_in() {
    for said in Desk::with_matrix().said(Second::WithoutNccl, "--placements S(1)") {
        assert!(said.contains("bytes do not go by NCCL; rank 1: ") && said.contains(NOWHERE), "{said}");
    }
}
