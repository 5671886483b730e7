//! Ranks that exchange by devices write what one process writes.

use proptest::prelude::*;

use super::*;
use crate::comm::Local;
use crate::exec::exchange::Shuffle;
use crate::exec::tests::exchanging::{Case, Means, fits, spec};
use crate::gpu::{DeviceShuffle, Nccl, Sharing};

struct Devices;

impl Means for Devices {
    type Seat = (Gpu, Nccl<Local>);
    type Rank = Nccl<Local>;

    fn seat(&self, rank: Local) -> Self::Seat {
        use crate::comm::Communicator;
        let gpu = open(kernels(), rank.rank()).unwrap();
        let peers = Nccl::meet(&gpu, Sharing::Refused, rank).unwrap();
        (gpu, peers)
    }

    fn rank((_, peers): &Self::Seat) -> &Self::Rank {
        peers
    }

    fn shuffle((gpu, peers): &Self::Seat) -> impl Shuffle {
        DeviceShuffle::new(gpu, peers).unwrap()
    }
}

#[test]
fn exchanges_by_devices_are_those_of_hosts_stand_in() {
    passes("exchanging::property", 3, &[]);
}

#[test]
fn exchanges_without_kernels_are_those_of_hosts_stand_in() {
    passes("exchanging::property", 3, &[("KERNELS", "off")]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

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
        let case = Case::new(&specs, transpose);
        let case = if shares { case.with_shares() } else { case };
        let (parties, todos) = case.parties(ranks, &cuts, wish);
        let (together, _) = case.together(&Devices, &parties, &todos, bucket_bytes);
        prop_assert!(together == case.alone());
    }
}
