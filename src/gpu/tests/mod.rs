//! Tests without a GPU. If a test needs a CUDA driver, it runs in its own process. That process loads the
//! `gpu-stand-in` library, which replaces the driver and NCCL.

mod arithmetic;
mod conforming;
mod copying;
mod dying;
mod exchanging;
mod kernels;
mod nccl_reduction;
mod opening;

use std::os::unix::fs::symlink;
use std::process::{self, Command, Output};
use std::sync::Once;
use std::thread;

use super::{Gpu, Kernels, Settings};
use crate::comm::tests::conformance::WAIT_LIMIT;
use crate::error::Result;

/// PTX that declares the kernels without their code. The `gpu-stand-in` library contains the kernels, compiled for the
/// CPU.
const PTX: &str = ".version 8.0\n.target sm_80\n.visible .entry copy_runs(\n)\n{ ret; }\n.visible .entry reduce(\n)\n{ ret; }\n\
    .visible .entry report_outcomes(\n)\n{ ret; }\n.visible .entry cast(\n)\n{ ret; }\n";

/// The time in microseconds that each operation on a stream takes in the `gpu-stand-in` library.
const DELAY_US: &str = "30";

/// Returns a folder that contains the `gpu-stand-in` library under the file names of the CUDA driver and NCCL, so that
/// the loader finds it.
fn libraries() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let stand_in = std::env::current_exe().unwrap().with_file_name("libgpu_stand_in.so");
    for name in ["libcuda.so", "libnccl.so.2"] {
        symlink(&stand_in, folder.path().join(name)).unwrap();
    }
    folder
}

/// Returns a command that runs one ignored test of this binary with the `gpu-stand-in` library, which has `devices`
/// devices.
fn test_process(test: &str, devices: u32, folder: &tempfile::TempDir) -> Command {
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(["--ignored", "--exact", "--nocapture"]).arg(format!("gpu::tests::{test}"));
    process.env("LD_LIBRARY_PATH", folder.path());
    process.env("GPU_STAND_IN_DEVICES", devices.to_string()).env("GPU_STAND_IN_DELAY_US", DELAY_US);
    for name in ["CUDA_VISIBLE_DEVICES", "DTSHARD_NCCL_LIB"] {
        process.env_remove(name);
    }
    process
}

/// Runs an ignored test of this binary in its own process, with the environment variables `settings`, and asserts that
/// it passes.
fn run_test(test: &str, devices: u32, settings: &[(&str, &str)]) {
    let folder = libraries();
    let output = test_process(test, devices, &folder).envs(settings.iter().copied()).output().unwrap();
    assert_passed(test, &output);
}

/// Runs a test like [`run_test`], but skips it if the `gpu-stand-in` library was built without kernels.
#[expect(clippy::print_stdout, reason = "the output says why the test was skipped")]
fn run_test_with_kernels(test: &str, devices: u32, settings: &[(&str, &str)]) {
    if gpu_stand_in::HAS_KERNELS {
        run_test(test, devices, settings);
    } else {
        println!("skipped: {test}: the stand-in has no kernels, because there was no C++ compiler");
    }
}

fn assert_passed(test: &str, output: &Output) {
    let text = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    assert!(output.status.success() && text.contains("1 passed"), "{test}:\n{text}");
}

/// Opens a GPU in the same way as a process of a run.
fn open(kernels: Kernels, local_rank: u32) -> Result<Gpu> {
    static WATCH: Once = Once::new();
    // The test process is aborted if it waits for too long.
    WATCH.call_once(|| {
        let _ = thread::spawn(|| {
            thread::sleep(WAIT_LIMIT * 3);
            process::abort();
        });
    });
    super::open(&Settings { kernels, ..Settings::default() }, Some(local_rank))
}

/// Returns the kernels, unless the environment variable `KERNELS` switches them off.
fn kernels() -> Kernels {
    match std::env::var("KERNELS").as_deref() {
        Ok("off") => Kernels::Off,
        _ => Kernels::Ptx(PTX.into()),
    }
}

/// The path of a file that does not exist.
const NOWHERE: &str = "/nonexistent/libnccl.so.2";
