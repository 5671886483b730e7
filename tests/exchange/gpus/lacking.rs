//! One process has no device, or no NCCL, while the others have them; or all have one device.

use crate::gpus::job::{Job, RANKS, SIGHTS, Settings, Sight, others_name};
use crate::nodes::{ended, succeeds};

const NO_DEVICE: Settings<'static> = &[("GPU_STAND_IN_DEVICES", "0")];
const HIDDEN: Settings<'static> = &[("CUDA_VISIBLE_DEVICES", "")];
const NO_NCCL: Settings<'static> = &[("DTSHARD_NCCL_LIB", "/nonexistent/libnccl.so.2")];
const NO_DRIVER: Settings<'static> = &[("LD_LIBRARY_PATH", "/nonexistent")];

/// Less than rounds and NCCL may take.
const NO_MEMORY: Settings<'static> = &[("GPU_STAND_IN_MEMORY_MIB", "128")];

const LACKS: [(Settings<'static>, &str); 4] = [
    (NO_DEVICE, "no CUDA-capable device is detected"),
    (HIDDEN, "no CUDA-capable device is detected"),
    (NO_NCCL, "/nonexistent/libnccl.so.2"),
    (NO_DRIVER, "no CUDA driver here"),
];

#[test]
fn who_asks_for_devices_is_refused_stand_in() {
    for sight in SIGHTS {
        let job = Job::new(sight);
        for (settings, words) in LACKS {
            for odd in [0, 2] {
                let outcomes = job.but(odd, "", settings);
                outcomes[odd as usize].refused(&[words, "hint: ", "--backend cpu"]);
                others_name(&outcomes, odd, &[words]);
                job.is_done_anew();
            }
        }
    }
}

/// It is said before anybody is met, and nobody is waited for who does not come soon.
#[test]
fn who_lacks_them_says_so_before_others_come_stand_in() {
    let job = Job::new(Sight::Apart);
    for (settings, words) in [(NO_NCCL, "/nonexistent/libnccl.so.2"), (NO_DRIVER, "no CUDA driver here")] {
        for rank in [0, 1] {
            let child = job.command(rank, "", settings).env("DTSHARD_FAULT", "").spawn().unwrap();
            let outcome = ended([child]).remove(0);
            outcome.refused(&[
                "; it ends as soon as the others have heard that",
                words,
                "error: ",
                "hint: ",
                "--backend cpu",
            ]);
            assert!(!outcome.err.contains("did not come"), "{outcome:?}");
        }
    }
}

/// All read a copy then, and say why if they are asked.
#[test]
fn files_are_copied_where_one_lacks_them_and_it_is_left_open_stand_in() {
    let job = Job::new(Sight::Apart);
    let no_memory = (NO_MEMORY, "134.22 MB are free");
    for (settings, words) in LACKS.into_iter().chain([no_memory]) {
        let outcomes = job.but(1, "--backend auto -v", settings);
        outcomes.iter().for_each(succeeds);
        for outcome in &outcomes {
            outcome.says(&[
                "backend cpu: files that only some processes see are copied first, not nccl: process 1 of 3 (",
                words,
            ]);
        }
        job.has_made();
    }
    let outcomes = job.but(1, "--backend auto -v", &[]);
    outcomes.iter().for_each(succeeds);
    for outcome in &outcomes {
        outcome.says(&["backend nccl: bytes go by NCCL 2.30.7, here from GPU ", "(stand-in (no GPU))"]);
    }
    job.has_made();
}

const ONE: Settings<'static> = &[("CUDA_VISIBLE_DEVICES", "1")];

#[test]
fn two_with_one_device_stand_in() {
    let job = Job::new(Sight::Apart);
    for outcome in job.each(|_| (String::from("--backend nccl"), ONE)) {
        outcome.refused(&["processes 0 and 1 have one GPU", "hint: start a process for each GPU"]);
    }
    job.is_done_anew();
    for outcome in job.each(|_| (String::from("--backend auto -v"), ONE)) {
        succeeds(&outcome);
        outcome.says(&["are copied first, not nccl: processes 0 and 1 have one GPU"]);
    }
    job.has_made();
}

/// They come to it together, whoever it is.
#[test]
fn nccl_that_fails_where_it_is_left_open_stand_in() {
    let job = Job::new(Sight::Apart);
    for odd in 0..RANKS {
        let outcomes = job.but(odd, "--backend auto -v", &[("GPU_STAND_IN_FAULT", "fails-meeting")]);
        outcomes.iter().for_each(succeeds);
        for outcome in &outcomes {
            outcome.says(&["warning: NCCL does not connect the GPUs: ", "the network was told to fail"]);
            assert!(!outcome.err.contains("backend nccl"), "{outcome:?}");
        }
        job.has_made();
    }
}
