//! Checks and measures a GPU; `scripts/gpu-check` runs it beside `dtshard` itself. Prints JSON, a line for each check
//! and each figure.
//!
//! ```text
//! gpu_check about             devices, NCCL, and whether there is a kernel
//! gpu_check copies SECONDS SEED      random strided copies against the host's, SECONDS for each packer
//! gpu_check arithmetic SECONDS SEED  random reductions and casts against the host's, SECONDS for each
//! gpu_check large             copies of more than 4 GiB; needs twice as much host memory
//! gpu_check speeds WHAT MB    copies within the device, arithmetic, transfers to and from the device, or rounds, of MB
//! gpu_check files FOLDER      speed of writing and reading files in FOLDER
//! ```
//!
//! `--ptx FILE` before the other arguments uses a kernel that was compiled before.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the program prints its results")]

mod arithmetic;
mod copies;
mod files;
mod random;
mod speeds;

#[path = "../../benches/support/mod.rs"]
mod support;

use std::process::ExitCode;

use dtshard::error::{Error, Result};
use dtshard::gpu::{self, Device, Gpu, Kernels, Packer, Settings};
use dtshard::launch::process_environment;
use serde_json::{Value, json};

const USAGE: &str = "gpu_check [--ptx FILE] about | copies SECONDS SEED | arithmetic SECONDS SEED | large | \
                     speeds copies|arithmetic|transfers|rounds MB | files FOLDER";

/// True if all checks passed.
type CheckResult = Result<bool>;

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut settings = Settings::new(&process_environment);
    if arguments.len() > 1 && arguments[0] == "--ptx" {
        match std::fs::read_to_string(&arguments[1]) {
            Ok(text) => settings.kernels = Kernels::Ptx(text),
            Err(error) => return failed(&format!("{}: {error}", arguments[1])),
        }
        arguments.drain(..2);
    }
    let gpu = || gpu::open_alone(&settings);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let verdict = match arguments[..] {
        ["about"] => gpu().and_then(|gpu| about(&gpu)),
        [what @ ("copies" | "arithmetic"), seconds, seed] => match (seconds.parse(), seed.parse()) {
            (Ok(seconds), Ok(seed)) => gpu().and_then(|gpu| match what {
                "copies" => copies::random(&gpu, seconds, seed),
                _ => arithmetic::random(&gpu, seconds, seed),
            }),
            _ => return failed(USAGE),
        },
        ["large"] => gpu().and_then(|gpu| copies::large(&gpu)),
        ["speeds", what @ ("copies" | "arithmetic" | "transfers" | "rounds"), megabytes] => match megabytes.parse() {
            Ok(megabytes @ 1_usize..=65_536) => gpu().and_then(|gpu| match what {
                "copies" => speeds::copies(&gpu, megabytes << 20),
                "arithmetic" => speeds::arithmetic(&gpu, megabytes << 20),
                "transfers" => speeds::transfers(&gpu, megabytes << 20),
                _ => speeds::rounds(&gpu, megabytes << 20),
            }),
            _ => return failed(USAGE),
        },
        ["files", folder] => files::all(folder.as_ref()),
        _ => return failed(USAGE),
    };
    match verdict {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => failed(&message(&error)),
    }
}

fn failed(reason: &str) -> ExitCode {
    eprintln!("{reason}");
    ExitCode::FAILURE
}

fn message(error: &Error) -> String {
    error.hint().map_or_else(|| error.to_string(), |hint| format!("{error}; {hint}"))
}

fn line(value: &Value) {
    println!("{value}");
}

/// Prints a figure, and its ratio to another one.
fn figure(name: &str, bytes_per_second: f64, of: Option<f64>) {
    line(&json!({
        "figure": name,
        "gb_per_s": bytes_per_second / 1e9,
        "ratio": of.map(|of| bytes_per_second / of),
    }));
}

fn about(gpu: &Gpu) -> CheckResult {
    let why = match &gpu.packer {
        Packer::Kernel(_) => None,
        Packer::Driver(why) => Some(why),
    };
    // An NCCL without a version cannot be used.
    let nccl = gpu.nccl().map_err(str::to_owned).and_then(|nccl| nccl.version().map_err(|error| error.to_string()));
    let (devices, device) = (Device::count_visible()?, gpu.device.name());
    line(&json!({ "devices": devices, "device": device, "no_nccl": nccl.err(), "no_kernel": why }));
    Ok(true)
}

/// Returns the ways to copy, by name: the kernel if there is one, and the driver.
fn packers(gpu: &Gpu) -> Vec<(&'static str, Packer)> {
    let driver = ("driver", Packer::Driver("the driver copies".into()));
    match &gpu.packer {
        Packer::Kernel(_) => vec![("kernel", gpu.packer.clone()), driver],
        Packer::Driver(_) => vec![driver],
    }
}
