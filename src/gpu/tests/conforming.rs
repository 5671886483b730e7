//! NCCL, with notes of threads, does what every communicator does.

use std::sync::Arc;

use super::*;
use crate::comm::tests::conformance::{Fleet, conforms};
use crate::comm::tests::local::Threads;
use crate::gpu::stream::Stream;
use crate::gpu::{DeviceBytes, Nccl, Sharing};

/// A thread and a device for each rank.
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
        // SAFETY: both stay until the stream has been waited for.
        unsafe { stream.copy_in(bytes, &mut memory) }.unwrap();
        stream.cuda().synchronize().unwrap();
        memory
    }

    fn bytes(&self, rank: &Nccl, memory: &DeviceBytes) -> Vec<u8> {
        let stream = Stream::new(rank.device()).unwrap();
        let mut bytes = vec![0; memory.len()];
        // SAFETY: both stay until the stream has been waited for.
        unsafe { stream.copy_out(memory, &mut bytes) }.unwrap();
        stream.cuda().synchronize().unwrap();
        bytes
    }

    /// NCCL takes or waits for what the plan says.
    fn checks_lengths(&self) -> bool {
        false
    }
}

#[test]
fn nccl_conforms_stand_in() {
    passes("conforming::devices", 5, &[]);
}

/// The death of a peer shows by the notes alone.
#[test]
fn nccl_conforms_where_it_tells_nothing_of_the_dead_stand_in() {
    passes("conforming::devices", 5, &[("GPU_STAND_IN_LOST_PEERS", "silent")]);
}

#[test]
#[ignore = "a process of a test"]
fn devices() {
    conforms(Devices::default());
}
