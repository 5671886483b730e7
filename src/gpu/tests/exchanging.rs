//! Tests of exchanges by GPUs: several ranks (threads) together must write the same bytes as one.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::comm::Local;
use crate::exchange::Shuffle;
use crate::exchange::tests::{Case, Means, check_each_cut, check_faults, has_valid_length, spec};
use crate::gpu::{DeviceShuffle, Nccl, Sharing};

/// The NCCL exchange for tests. Each rank is a thread with its own device of the `gpu-stand-in` library.
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
fn device_exchange_equals_host_exchange_stand_in() {
    run_test_with_kernels("exchanging::random_exchanges_equal_one_process", 3, &[]);
}

#[test]
fn device_exchange_without_kernels_equals_host_exchange_stand_in() {
    run_test("exchanging::random_exchanges_equal_one_process", 3, &[("KERNELS", "off")]);
}

#[test]
fn exchange_with_kernels_on_some_ranks_equals_host_exchange_stand_in() {
    run_test_with_kernels("exchanging::random_exchanges_equal_one_process", 3, &[("KERNELS", "of even ranks")]);
}

#[test]
fn cast_loss_in_a_shared_element_counts_once_stand_in() {
    run_test_with_kernels("exchanging::cast_losses_count_once_at_every_split", 3, &[]);
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn cast_losses_count_once_at_every_split() {
    check_each_cut(&Devices);
}

#[test]
fn overflowing_sum_names_the_tensor_stand_in() {
    run_test_with_kernels("exchanging::overflowing_sums_name_the_tensor", 3, &[]);
    run_test("exchanging::overflowing_sums_name_the_tensor", 3, &[("KERNELS", "off")]);
    run_test_with_kernels("exchanging::overflowing_sums_name_the_tensor", 3, &[("KERNELS", "of even ranks")]);
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn overflowing_sums_name_the_tensor() {
    check_faults(&Devices);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(120) })]

    #[test]
    #[ignore = "runs as a child process that another test starts"]
    fn random_exchanges_equal_one_process(
        specs in prop::collection::vec(spec(), 1..4),
        transpose in any::<bool>(),
        shares in any::<bool>(),
        ranks in 1..4_u32,
        cuts in prop::collection::vec(any::<u64>(), 0..4),
        bucket_bytes in prop_oneof![16..400_u64, Just(1 << 20)],
        visibility_seed in prop::option::of(any::<u64>()),
    ) {
        prop_assume!(specs.iter().all(has_valid_length));
        let case = Case::lossy(&specs, transpose);
        let case = if shares { case.with_shares() } else { case };
        let (topology, todos) = case.topology(ranks, &cuts, visibility_seed);
        let (exchanged, _) = case.exchange(&Devices, &topology, &todos, bucket_bytes);
        prop_assert!(exchanged == case.convert_alone());
    }
}
