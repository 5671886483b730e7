//! Files that are no tensors, and go along: they may lie on any node.

use std::fs;

use crate::nodes::{Nodes, Spread};

#[test]
fn files_beside_a_checkpoint() {
    for of in [2, 3] {
        Nodes::new("verl/global_step_10/actor", of, Spread::One)
            .agree("reshard out --mesh fsdp=3", "--bucket-size 500");
        Nodes::new("verl/global_step_10/actor", of, Spread::One).agree("consolidate out", "");
        Nodes::new("accelerate_llama", of, Spread::Two).agree("consolidate out", "");
        Nodes::new("dcp_trainer", of, Spread::One).agree("reshard out --mesh fsdp=3", "");
        Nodes::new("safetensors/sharded", of, Spread::One).agree("consolidate out", "");
    }
}

/// A container of tensors that is no part of what is converted is carried by a process that sees all of it.
#[test]
fn containers_of_another_series() {
    for of in [2, 3, 4] {
        let nodes = Nodes::new("fsdp4/ranks", of, Spread::One);
        nodes.agree("reshard out --mesh fsdp=4 --series model", "--bucket-size 500");
        let nodes = Nodes::new("accelerate_llama/pytorch_model_fsdp_0", of, Spread::One);
        nodes.agree("consolidate out --assets @accelerate_llama", "");
    }
}

/// Of one name on two nodes.
#[test]
fn assets_that_differ() {
    let nodes = Nodes::new("accelerate_llama", 2, Spread::Two);
    fs::write(&nodes.copies("config.json")[1], "{}").unwrap();
    for outcome in nodes.together("consolidate out") {
        outcome.refused(&["config.json", "differs between processes 0 and 1"]);
    }
}
