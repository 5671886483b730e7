//! Tests of processes that cannot all use NCCL: one process has no device or no NCCL, or all processes have the same
//! device.

use crate::gpus::job::{Job, RANKS, Settings, VISIBILITIES, Visibility, assert_others_name};
use crate::nodes::{assert_succeeded, wait_all};

const NO_DEVICE: Settings<'static> = &[("GPU_STAND_IN_DEVICES", "0")];
const HIDDEN: Settings<'static> = &[("CUDA_VISIBLE_DEVICES", "")];
const NO_NCCL: Settings<'static> = &[("DTSHARD_NCCL_LIB", "/nonexistent/libnccl.so.2")];
const NO_DRIVER: Settings<'static> = &[("LD_LIBRARY_PATH", "/nonexistent")];

/// A GPU with less memory than NCCL and the rounds need.
const NO_MEMORY: Settings<'static> = &[("GPU_STAND_IN_MEMORY_MIB", "128")];

const LACKS: [(Settings<'static>, &str); 4] = [
    (NO_DEVICE, "no CUDA-capable device is detected"),
    (HIDDEN, "no CUDA-capable device is detected"),
    (NO_NCCL, "/nonexistent/libnccl.so.2"),
    (NO_DRIVER, "no CUDA driver: neither "),
];

#[test]
fn backend_nccl_without_a_device_is_refused_by_all() {
    for visibility in VISIBILITIES {
        let job = Job::new(visibility);
        for (settings, words) in LACKS {
            for odd in [0, 2] {
                let outcomes = job.run_with_one_different(odd, "", settings);
                outcomes[odd as usize].assert_refused(&[words, "hint: ", "--backend cpu"]);
                assert_others_name(&outcomes, odd, &[words]);
                job.assert_can_start_again();
            }
        }
    }
}

/// A process without NCCL prints the error before the other processes start. It then waits a short time for the other
/// processes.
#[test]
fn process_without_nccl_reports_it_before_the_others_start() {
    let job = Job::new(Visibility::PerProcess);
    for (settings, words) in [(NO_NCCL, "/nonexistent/libnccl.so.2"), (NO_DRIVER, "no CUDA driver: neither ")] {
        for rank in [0, 1] {
            let child = job.command(rank, "", settings).env("DTSHARD_FAULT", "").spawn().unwrap();
            let outcome = wait_all([child]).remove(0);
            outcome.assert_refused(&[
                "; this process stops after it has informed the other processes",
                words,
                "error: ",
                "hint: ",
                "--backend cpu",
            ]);
            assert!(!outcome.err.contains("did not connect"), "{outcome:?}");
        }
    }
}

/// One process has no GPU, no NCCL or too little GPU memory. With `--backend auto`, all processes then exchange data by
/// copied files, and print the reason if `-v` is given.
#[test]
fn backend_auto_copies_files_if_one_process_lacks_a_device() {
    let job = Job::new(Visibility::PerProcess);
    let no_memory = (NO_MEMORY, "134.22 MB are free");
    for (settings, words) in LACKS.into_iter().chain([no_memory]) {
        let outcomes = job.run_with_one_different(1, "--backend auto -v", settings);
        outcomes.iter().for_each(assert_succeeded);
        for outcome in &outcomes {
            outcome.assert_mentions(&[
                "backend cpu: files that only some processes see are copied first, not nccl: process 1 of 3 (",
                words,
            ]);
        }
        job.assert_made();
    }
    let outcomes = job.run_with_one_different(1, "--backend auto -v", &[]);
    outcomes.iter().for_each(assert_succeeded);
    for outcome in &outcomes {
        outcome.assert_mentions(&[
            "backend nccl: tensors are sent by NCCL 2.30.7, on this process from GPU ",
            "(stand-in (no GPU))",
        ]);
    }
    job.assert_made();
}

const ONE: Settings<'static> = &[("CUDA_VISIBLE_DEVICES", "1")];

#[test]
fn two_processes_with_one_device_are_refused_by_backend_nccl() {
    let job = Job::new(Visibility::PerProcess);
    for outcome in job.run_each(|_| (String::from("--backend nccl"), ONE)) {
        outcome.assert_refused(&["processes 0 and 1 use the same GPU", "hint: start one process for each GPU"]);
    }
    job.assert_can_start_again();
    for outcome in job.run_each(|_| (String::from("--backend auto -v"), ONE)) {
        assert_succeeded(&outcome);
        outcome.assert_mentions(&["are copied first, not nccl: processes 0 and 1 use the same GPU"]);
    }
    job.assert_made();
}

/// If one process cannot connect NCCL, all processes use the CPU backend, whichever process it is.
#[test]
fn backend_auto_falls_back_if_nccl_does_not_connect() {
    let job = Job::new(Visibility::PerProcess);
    for odd in 0..RANKS {
        let outcomes = job.run_with_one_different(odd, "--backend auto -v", &[("GPU_STAND_IN_FAULT", "fails-meeting")]);
        outcomes.iter().for_each(assert_succeeded);
        for outcome in &outcomes {
            outcome.assert_mentions(&["warning: NCCL does not connect the GPUs: ", "injected network failure"]);
            assert!(!outcome.err.contains("backend nccl"), "{outcome:?}");
        }
        job.assert_made();
    }
}
