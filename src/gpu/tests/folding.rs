//! What NCCL reduces itself, as far as the stand-in's order and roundings are like it: others than those of the host.

use proptest::prelude::*;

use super::exchanging::Devices;
use super::passes;
use crate::exchange::tests::Case;
use crate::exchange::tests::folding::{self, Terms};

#[test]
fn what_nccl_reduces_is_near_stand_in() {
    passes("folding::property", 4, &[]);
}

#[test]
fn what_nccl_reduces_goes_over_the_wire_once_stand_in() {
    passes("folding::even", 4, &[]);
}

#[test]
fn what_nccl_does_not_reduce_is_reduced_in_the_order_of_ranks_stand_in() {
    passes("folding::ineligible", 4, &[]);
}

#[test]
#[ignore = "a process of a test"]
fn even() {
    folding::evenly_cut(&Devices);
}

#[test]
#[ignore = "a process of a test"]
fn ineligible() {
    folding::what_is_not_folded(&Devices);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    #[test]
    #[ignore = "a process of a test"]
    fn property(
        (ranks, specs) in (1..5_u32).prop_flat_map(|ranks| (Just(ranks), folding::specs(ranks))),
        terms in prop::sample::select(vec![Terms::Any, Terms::Whole]),
        transpose in any::<bool>(),
        cuts in prop::collection::vec(any::<u64>(), 0..4),
        bucket_bytes in prop_oneof![16..400_u64, Just(1 << 20)],
    ) {
        let case = Case::of(&specs, transpose, terms);
        let (found, _) = folding::together(&Devices, &case, ranks, &cuts, bucket_bytes);
        let alone = case.alone();
        // An average of three may be rounded.
        if terms == Terms::Whole && ranks != 3 {
            prop_assert!(found == alone);
        }
        case.assert_near(found, &alone);
    }
}
