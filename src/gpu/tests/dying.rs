//! Tests with two processes, one of which is killed in the middle of an exchange.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::comm::{Communicator, WaitNotices};
use crate::exchange::records::Records;
use crate::exec::Stop;
use crate::gpu::stream::Stream;
use crate::gpu::{DeviceBytes, Nccl, Sharing};
use crate::launch::Part;
use crate::storage::AnchoredPath;

#[test]
fn a_process_that_is_killed_is_named_stand_in() {
    killed(&[]);
}

#[test]
fn a_process_that_is_killed_is_named_where_nccl_tells_nothing_stand_in() {
    killed(&[("GPU_STAND_IN_LOST_PEERS", "silent")]);
}

fn killed(settings: &[(&str, &str)]) {
    one_is_killed("dying::rank", settings);
}

/// Checks that device memory can be freed while the device waits for a process that has died. The thread that frees the
/// memory cannot check the failure notes, so another thread aborts the exchange. The aborted exchange must not count as
/// complete.
#[test]
fn memory_is_freed_where_a_peer_is_gone_stand_in() {
    for lost_peers in ["", "silent"] {
        one_is_killed("dying::freeing", &[("GPU_STAND_IN_LOST_PEERS", lost_peers)]);
    }
}

#[test]
fn process_that_leaves_does_not_wait_for_a_killed_peer_stand_in() {
    for lost_peers in ["", "silent"] {
        one_is_killed("dying::leaving", &[("GPU_STAND_IN_LOST_PEERS", lost_peers)]);
    }
}

/// Runs a test in two processes, of which process 1 aborts in the middle. Asserts that process 0 passes the test.
fn one_is_killed(test: &str, settings: &[(&str, &str)]) {
    let folder = libraries();
    let ranks = ["0", "1"].map(|rank| {
        let mut process = test_process(test, 2, &folder);
        process.env("RANK", rank).env("FOLDER", folder.path()).envs(settings.iter().copied());
        process.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    });
    let [survivor, dead] = ranks.map(|rank| rank.wait_with_output().unwrap());
    assert_passed(test, &survivor);
    assert!(!dead.status.success());
}

fn met() -> (Gpu, Nccl) {
    let index: u32 = std::env::var("RANK").unwrap().parse().unwrap();
    let folder = AnchoredPath::new(Path::new(&std::env::var_os("FOLDER").unwrap())).join("run");
    let part = Part { index, of: 2 };
    let records = Records::meet(&folder, part, WaitNotices::silent(WAIT_LIMIT), &Stop::default()).unwrap();
    let gpu = open(kernels(), index).unwrap();
    let peers = Nccl::meet(&gpu, Sharing::Refused, &Arc::new(records)).unwrap();
    (gpu, peers)
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn freeing() {
    let (gpu, peers) = met();
    if peers.rank() == 1 {
        std::thread::sleep(Duration::from_millis(100));
        std::process::abort();
    }
    let memory = || DeviceBytes::new(&gpu.device, 1 << 20, "a test").unwrap();
    let (outgoing, mut incoming, other) = (memory(), memory(), memory());
    let all = [0..0, 0..1 << 20];
    let stream = Stream::new(&gpu.device).unwrap();
    peers.queue_exchange(&stream, &outgoing, &all, &mut incoming, &all).unwrap();
    let done = stream.record().unwrap();
    let begun = Instant::now();
    drop(other);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    // The stream has reached the event, but only because NCCL was aborted: nothing has been received.
    assert!(done.is_complete());
    let error = peers.wait("exchange", &done).unwrap_err();
    assert_eq!(error.to_string(), "process 1: exchange: its process ended");
    assert!(peers.has_ended("exchange", &done));
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn leaving() {
    let (_gpu, peers) = met();
    if peers.rank() == 1 {
        std::thread::sleep(Duration::from_millis(300));
        std::process::abort();
    }
    let begun = Instant::now();
    let error = peers.leave().unwrap_err();
    assert!(error.to_string().starts_with("process 1: "), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn rank() {
    let (gpu, peers) = met();
    let rank = peers.rank();
    let memory = || DeviceBytes::new(&gpu.device, 1 << 20, "a test").unwrap();
    let (outgoing, mut incoming) = (memory(), memory());
    let all = if rank == 0 { [0..0, 0..1 << 20] } else { [0..1 << 20, 0..0] };
    let mut exchange = || peers.exchange(&outgoing, &all, &mut incoming, &all);
    exchange().unwrap();
    exchange().unwrap();
    if rank == 1 {
        std::thread::sleep(Duration::from_millis(100));
        std::process::abort();
    }
    let begun = Instant::now();
    let error = exchange().unwrap_err();
    assert_eq!(error.to_string(), "process 1: exchange: its process ended");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    // After NCCL was aborted, operations fail without waiting.
    assert_eq!(exchange().unwrap_err().to_string(), "process 1: exchange: its process ended");
    assert!(peers.barrier().is_err());
}
