//! `flatten` with the units and orders that it concludes itself.

#[allow(dead_code, reason = "each test binary uses its own share")]
mod common;

use std::fs;

use common::{expect, fixture, succeed};

/// The units of the fixtures' model, and its buffers.
const WRAPPING: &str = "--wrap layers.* --wrap layers.1.inner --wrap tiny --buffers freqs --buffers **.scale";

#[test]
fn what_follows_from_a_state_dict_is_what_the_live_model_had() {
    let folder = tempfile::tempdir().unwrap();
    let [told, concluded] = ["told", "concluded"].map(|name| folder.path().join(name));
    // The channels_last weight is so in the file; the copy of the tied one is not a parameter.
    let source = fixture("flat2/full/model.pt");
    let layout = fixture("flat2/flat.flat_layout.json");
    succeed("flatten", &[&source, &told], &format!("--flat-layout {}", layout.display()));
    succeed("flatten", &[&source, &concluded], &format!("--world-size 2 --exclude head {WRAPPING}"));
    for rank in 0..2 {
        let [told, concluded] = [&told, &concluded]
            .map(|folder| fs::read(folder.join(format!("model_world_size_2_rank_{rank}.pt"))).unwrap());
        assert!(told == concluded, "rank {rank}");
    }
}

#[test]
fn a_weight_whose_order_in_memory_is_not_stored_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [shards, flat] = ["shards", "flat"].map(|name| folder.path().join(name));
    succeed("reshard", &[&fixture("flat2/full/model.pt"), &shards], "--to torch-ranks --mesh fsdp=2");
    let outcome = expect(2, "flatten", &[&shards, &flat], &format!("--world-size 2 {WRAPPING}"));
    assert!(outcome.stderr.contains("conv.weight: of shape [6, 2, 2, 2], it may lie by rows"), "{outcome:?}");
}
