//! Conformance tests of the NCCL communicator, with one thread for each rank. The failure notes are those of the
//! communicator of threads.

use std::sync::Arc;

use super::*;
use crate::comm::tests::conformance::{Fleet, conforms};
use crate::comm::tests::local::Threads;
use crate::gpu::stream::Stream;
use crate::gpu::{DeviceBytes, Nccl, Sharing};

/// A fleet in which each rank is a thread with its own device of the `gpu-stand-in` library.
#[derive(Default)]
struct Devices(Threads);

impl Fleet for Devices {
    type Rank = Nccl;

    fn rank(&self, rank: u32, size: u32) -> Nccl {
        let gpu = open(kernels(), rank).unwrap();
        Nccl::meet(&gpu, Sharing::Refused, &Arc::new(self.0.rank(rank, size))).unwrap()
    }

    fn memory(&self, rank: &Nccl, bytes: &[u8]) -> DeviceBytes {
        let stream = Stream::new(rank.device()).unwrap();
        let mut memory = DeviceBytes::new(rank.device(), bytes.len(), "a test").unwrap();
        // SAFETY: `bytes` and `memory` stay allocated until the stream is synchronized.
        unsafe { stream.copy_in(bytes, &mut memory) }.unwrap();
        stream.cuda().synchronize().unwrap();
        memory
    }

    fn bytes(&self, rank: &Nccl, memory: &DeviceBytes) -> Vec<u8> {
        let stream = Stream::new(rank.device()).unwrap();
        let mut bytes = vec![0; memory.len()];
        // SAFETY: `bytes` and `memory` stay allocated until the stream is synchronized.
        unsafe { stream.copy_out(memory, &mut bytes) }.unwrap();
        stream.cuda().synchronize().unwrap();
        bytes
    }

    /// Returns false, because NCCL does not check that sender and receiver agree on the length.
    fn checks_lengths(&self) -> bool {
        false
    }
}

#[test]
fn nccl_passes_the_conformance_tests_stand_in() {
    run_test("conforming::conformance_tests_pass", 5, &[]);
}

/// The `gpu-stand-in` library is set to report no errors of peers. So only the failure notes report that a peer has
/// ended.
#[test]
fn nccl_without_peer_errors_passes_the_conformance_tests_stand_in() {
    run_test("conforming::conformance_tests_pass", 5, &[("GPU_STAND_IN_LOST_PEERS", "silent")]);
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn conformance_tests_pass() {
    conforms(Devices::default());
}
