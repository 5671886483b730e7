//! Tests of NCCL reductions with the `gpu-stand-in` library. Like NCCL, it adds in another order and rounds differently
//! than the host.

use proptest::prelude::*;

use super::exchanging::Devices;
use super::run_test;
use crate::exchange::tests::Case;
use crate::exchange::tests::nccl_reduction::{self, Terms};

#[test]
fn nccl_reduction_is_close_to_the_host_stand_in() {
    run_test("nccl_reduction::random_reductions_are_close_to_the_host", 4, &[]);
}

#[test]
fn nccl_reduction_sends_each_byte_once_stand_in() {
    run_test("nccl_reduction::wire_bytes_are_minimal", 4, &[]);
}

#[test]
fn unsupported_reduction_uses_rank_order_stand_in() {
    run_test("nccl_reduction::unsupported_reductions_use_rank_order", 4, &[]);
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn wire_bytes_are_minimal() {
    nccl_reduction::check_wire_bytes(&Devices);
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn unsupported_reductions_use_rank_order() {
    nccl_reduction::check_not_reduced_by_nccl(&Devices);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    #[test]
    #[ignore = "runs as a child process that another test starts"]
    fn random_reductions_are_close_to_the_host(
        (ranks, specs) in (1..5_u32).prop_flat_map(|ranks| (Just(ranks), nccl_reduction::specs(ranks))),
        terms in prop::sample::select(vec![Terms::Any, Terms::Integers]),
        transpose in any::<bool>(),
        cuts in prop::collection::vec(any::<u64>(), 0..4),
        bucket_bytes in prop_oneof![16..400_u64, Just(1 << 20)],
    ) {
        let case = Case::with_terms(&specs, transpose, terms);
        let (found, _) = nccl_reduction::exchange_partial_values(&Devices, &case, ranks, &cuts, bucket_bytes);
        let alone = case.convert_alone();
        // The average of three values may be rounded.
        if terms == Terms::Integers && ranks != 3 {
            prop_assert!(found == alone);
        }
        case.assert_near(found, &alone);
    }
}
