//! Tests of sums and casts on GPUs, which the `gpu-stand-in` library replaces: the output and the counts of casts equal
//! those of one process.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value as Json;
use tempfile::TempDir;

use crate::nodes::{tree, wait_all};
use crate::outcome::{Outcome, command};

/// Whether a process can use GPU kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernels {
    Compiled,
    Off,
}
use Kernels::{Compiled, Off};

/// A folder in which the loader finds the `gpu-stand-in` library. It also has a SRC: the files of two ranks, which have
/// partial values.
struct GpuEnv(TempDir);

impl GpuEnv {
    fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let stand_in = std::env::current_exe().unwrap().with_file_name("libgpu_stand_in.so");
        for name in ["libcuda.so", "libnccl.so.2", "libnvrtc.so"] {
            symlink(&stand_in, folder.path().join(name)).unwrap();
        }
        let env = Self(folder);
        fs::create_dir(env.path("src")).unwrap();
        for rank in 0..2 {
            let header = r#"{"w":{"dtype":"F32","shape":[48,37],"data_offsets":[0,7104]}}"#;
            let values = (0..48 * 37).map(|element| partial_value(rank, element)).flat_map(f32::to_le_bytes);
            let bytes = (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(values);
            let name = format!("src/model-rank-{rank:05}-of-00002.safetensors");
            fs::write(env.path(&name), bytes.collect::<Vec<u8>>()).unwrap();
        }
        env
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, name: &str, words: &str) -> Command {
        let mut command = command(&[&"reshard", &self.path("src"), &self.path(name)]);
        command.args("--src-mesh dp=2 --reduce dp --dtype bf16 --to torch-ranks --mesh fsdp=2 --json -v".split(' '));
        command.args(words.split(' ')).env("DTSHARD_FAULT", "none");
        command
    }

    /// Runs two processes, and asserts that they succeed. Returns the files of DST, and the outcomes.
    fn run_together(&self, kernels: [Kernels; 2], words: &str) -> (crate::tree::Tree, Vec<Outcome>) {
        let processes = [0, 1].map(|part: usize| {
            let mut process = self.command("out", words);
            process.args(["--backend", "nccl", "--parts", "2", "--part", &part.to_string()]);
            process.env("LD_LIBRARY_PATH", self.0.path()).env("GPU_STAND_IN_DEVICES", "2");
            if kernels[part] == Off {
                process.env("DTSHARD_GPU_KERNELS", "off");
            }
            process.spawn().unwrap()
        });
        let outcomes = wait_all(processes);
        for outcome in &outcomes {
            outcome.assert_succeeded();
        }
        (take_files(&self.path("out")), outcomes)
    }
}

/// Reads the files below a path, and removes the path.
fn take_files(path: &Path) -> crate::tree::Tree {
    let made = tree(path);
    fs::remove_dir_all(path).unwrap();
    made
}

/// Returns a partial value for a test. Some values are NaN, and some sums fit f32 but not bf16.
fn partial_value(rank: u8, element: u16) -> f32 {
    match (element % 61, rank) {
        (7, 1) => f32::NAN,
        (11 | 12, 0) => 3.4e38,
        _ => (f32::from(element) - 800.0) * 0.37 / f32::from(rank + 1),
    }
}

fn cast(outcome: &Outcome) -> Json {
    let document: Json = serde_json::from_str(&outcome.out).unwrap_or_else(|error| panic!("{error}: {outcome:?}"));
    document["cast"]["f32->bf16"].clone()
}

#[test]
#[expect(clippy::print_stdout, reason = "whoever asks for this test learns what was not run")]
fn sums_and_casts_on_gpus_equal_those_of_one_process() {
    let env = GpuEnv::new();
    for placements in ["R", "S(0)", "S(1)"] {
        let words = format!("--placements {placements} --bucket-size 3KB");
        let alone: Outcome =
            env.command("out", &words).args(["--backend", "cpu", "--parts", "1"]).output().unwrap().into();
        let (expected, counts) = (take_files(&env.path("out")), cast(alone.assert_succeeded()));
        assert_eq!((&counts["overflows"], &counts["nans"]), (&Json::from(58), &Json::from(29)));
        for kernels in [[Compiled, Compiled], [Compiled, Off], [Off, Off]] {
            if kernels.contains(&Compiled) && !gpu_stand_in::HAS_KERNELS {
                println!("skipped: {kernels:?}: the stand-in has no kernels without a compiler of C++");
                continue;
            }
            let (made, outcomes) = env.run_together(kernels, &words);
            assert!(made == expected, "{placements} {kernels:?}: not what one process writes");
            assert_eq!(cast(&outcomes[0]), counts, "{placements} {kernels:?}");
            for (outcome, kernels) in outcomes.iter().zip(kernels) {
                let by_kernels = outcome.err.contains("kernels reduce and cast");
                assert_eq!(by_kernels, kernels == Compiled, "{outcome:?}");
                assert!(
                    by_kernels || outcome.err.contains("no kernel can reduce or cast, so the CPU does it: "),
                    "{outcome:?}"
                );
            }
        }
    }
}
