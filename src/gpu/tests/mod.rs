//! Tests without a GPU. Those that need a driver run in a process of their own, which loads the stand-in for it.

mod arithmetic;
mod conforming;
mod copying;
mod dying;
mod exchanging;
mod folding;
mod kernels;
mod opening;

use std::os::unix::fs::symlink;
use std::process::{self, Command, Output};
use std::sync::Once;
use std::thread;

use super::{Gpu, Kernels, Settings};
use crate::comm::tests::conformance::PATIENCE;
use crate::error::Result;

/// As PTX names the kernels; the stand-in has their texts.
const PTX: &str = ".version 8.0\n.target sm_80\n.visible .entry copy_runs(\n)\n{ ret; }\n.visible .entry reduce(\n)\n{ ret; }\n\
    .visible .entry tell_outcomes(\n)\n{ ret; }\n.visible .entry cast(\n)\n{ ret; }\n";

/// What is under way in the stand-in is late by so many microseconds.
const DELAY_US: &str = "30";

/// A folder where the loader finds the stand-in under the names of the libraries.
fn libraries() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let stand_in = std::env::current_exe().unwrap().with_file_name("libgpu_stand_in.so");
    for name in ["libcuda.so", "libnccl.so.2"] {
        symlink(&stand_in, folder.path().join(name)).unwrap();
    }
    folder
}

/// A process that runs one ignored test of this binary, on a machine of so many stand-ins for devices.
fn process_of(test: &str, devices: u32, folder: &tempfile::TempDir) -> Command {
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(["--ignored", "--exact", "--nocapture"]).arg(format!("gpu::tests::{test}"));
    process.env("LD_LIBRARY_PATH", folder.path());
    process.env("GPU_STAND_IN_DEVICES", devices.to_string()).env("GPU_STAND_IN_DELAY_US", DELAY_US);
    for name in ["CUDA_VISIBLE_DEVICES", "DTSHARD_NCCL_LIB"] {
        process.env_remove(name);
    }
    process
}

/// Run a test in such a process, with `settings` of its environment.
fn passes(test: &str, devices: u32, settings: &[(&str, &str)]) {
    let folder = libraries();
    let output = process_of(test, devices, &folder).envs(settings.iter().copied()).output().unwrap();
    passed(test, &output);
}

/// As [`passes`], where the stand-in has kernels.
#[expect(clippy::print_stdout, reason = "whoever asks for this test learns why it was not run")]
fn passes_with_kernels(test: &str, devices: u32, settings: &[(&str, &str)]) {
    if gpu_stand_in::HAS_KERNELS {
        passes(test, devices, settings);
    } else {
        println!("skipped: {test}: the stand-in has no kernels without a compiler of C++");
    }
}

fn passed(test: &str, output: &Output) {
    let told = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    assert!(output.status.success() && told.contains("1 passed"), "{test}:\n{told}");
}

/// As a process of a run has it.
fn open(kernels: Kernels, local_rank: u32) -> Result<Gpu> {
    static WATCH: Once = Once::new();
    // A process that waits for ever is ended.
    WATCH.call_once(|| {
        let _ = thread::spawn(|| {
            thread::sleep(PATIENCE * 3);
            process::abort();
        });
    });
    super::open(&Settings { kernels, ..Settings::default() }, Some(local_rank))
}

/// The kernels, or none.
fn kernels() -> Kernels {
    match std::env::var("KERNELS").as_deref() {
        Ok("off") => Kernels::Off,
        _ => Kernels::Ptx(PTX.into()),
    }
}

/// Where there is nothing.
const NOWHERE: &str = "/nonexistent/libnccl.so.2";
