//! Tests of files without tensors that are copied together with the checkpoint. They may be on any node.

use std::fs;

use crate::nodes::{Nodes, Spread};

#[test]
fn sidecar_files_on_any_node_are_copied() {
    for of in [2, 3] {
        Nodes::new("verl/global_step_10/actor", of, Spread::One)
            .assert_equals_one_process("reshard out --mesh fsdp=3", "--bucket-size 500");
        Nodes::new("verl/global_step_10/actor", of, Spread::One).assert_equals_one_process("consolidate out", "");
        Nodes::new("accelerate_llama", of, Spread::Two).assert_equals_one_process("consolidate out", "");
        Nodes::new("dcp_trainer", of, Spread::One).assert_equals_one_process("reshard out --mesh fsdp=3", "");
        Nodes::new("safetensors/sharded", of, Spread::One).assert_equals_one_process("consolidate out", "");
    }
}

/// A file with tensors of a series that is not selected is copied. A process that sees all of the file copies it.
#[test]
fn containers_of_another_series_are_copied() {
    for of in [2, 3, 4] {
        let nodes = Nodes::new("fsdp4/ranks", of, Spread::One);
        nodes.assert_equals_one_process("reshard out --mesh fsdp=4 --series model", "--bucket-size 500");
        let nodes = Nodes::new("accelerate_llama/pytorch_model_fsdp_0", of, Spread::One);
        nodes.assert_equals_one_process("consolidate out --assets @accelerate_llama", "");
    }
}

/// Two nodes have different files with the same name.
#[test]
fn differing_assets_are_refused() {
    let nodes = Nodes::new("accelerate_llama", 2, Spread::Two);
    fs::write(&nodes.copies("config.json")[1], "{}").unwrap();
    for outcome in nodes.run_together("consolidate out") {
        outcome.assert_refused(&["config.json", "differs between processes 0 and 1"]);
    }
}
