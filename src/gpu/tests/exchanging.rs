//! Ranks that exchange by devices write what one process writes.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::comm::Local;
use crate::exchange::Shuffle;
use crate::exchange::tests::{Case, Means, check_each_cut, check_faults, fits, spec};
use crate::gpu::{DeviceShuffle, Nccl, Sharing};

pub(super) struct Devices;

impl Means for Devices {
    type Seat = (Gpu, Nccl);
    type Rank = Nccl;

    fn seat(&self, rank: Local) -> Self::Seat {
        use crate::comm::Communicator;
        let kernels = match std::env::var("KERNELS").as_deref() {
            Ok("of even ranks") if rank.rank() % 2 == 1 => Kernels::Off,
            _ => kernels(),
        };
        let gpu = open(kernels, rank.rank()).unwrap();
        let peers = Nccl::meet(&gpu, Sharing::Refused, &Arc::new(rank)).unwrap();
        (gpu, peers)
    }

    fn rank((_, peers): &Self::Seat) -> &Self::Rank {
        peers
    }

    fn shuffle((gpu, peers): &Self::Seat) -> impl Shuffle {
        DeviceShuffle::new(gpu, peers, gpu.arithmetic().ok()).unwrap()
    }

    fn leave((_gpu, peers): Self::Seat) {
        use crate::comm::Communicator;
        peers.leave().unwrap();
    }
}

#[test]
fn exchanges_by_devices_are_those_of_hosts_stand_in() {
    passes_with_kernels("exchanging::property", 3, &[]);
}

#[test]
fn exchanges_without_kernels_are_those_of_hosts_stand_in() {
    passes("exchanging::property", 3, &[("KERNELS", "off")]);
}

#[test]
fn exchanges_of_which_some_compute_are_those_of_hosts_stand_in() {
    passes_with_kernels("exchanging::property", 3, &[("KERNELS", "of even ranks")]);
}

#[test]
fn an_element_that_two_write_counts_once_stand_in() {
    passes_with_kernels("exchanging::each_cut", 3, &[]);
}

#[test]
#[ignore = "a process of a test"]
fn each_cut() {
    check_each_cut(&Devices);
}

#[test]
fn summands_that_have_no_value_are_named_stand_in() {
    passes_with_kernels("exchanging::faults", 3, &[]);
    passes("exchanging::faults", 3, &[("KERNELS", "off")]);
    passes_with_kernels("exchanging::faults", 3, &[("KERNELS", "of even ranks")]);
}

#[test]
#[ignore = "a process of a test"]
fn faults() {
    check_faults(&Devices);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(120) })]

    #[test]
    #[ignore = "a process of a test"]
    fn property(
        specs in prop::collection::vec(spec(), 1..4),
        transpose in any::<bool>(),
        shares in any::<bool>(),
        ranks in 1..4_u32,
        cuts in prop::collection::vec(any::<u64>(), 0..4),
        bucket_bytes in prop_oneof![16..400_u64, Just(1 << 20)],
        wish in prop::option::of(any::<u64>()),
    ) {
        prop_assume!(specs.iter().all(fits));
        let case = Case::hard(&specs, transpose);
        let case = if shares { case.with_shares() } else { case };
        let (parties, todos) = case.parties(ranks, &cuts, wish);
        let (together, _) = case.together(&Devices, &parties, &todos, bucket_bytes);
        prop_assert!(together == case.alone());
    }
}
