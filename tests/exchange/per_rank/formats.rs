//! Tests of every kind of source and target, with two to five processes and with many or few rounds.

use std::fs;

use crate::nodes::{Nodes, Spread, assert_succeeded};
use crate::outcome::files_of;

/// Runs each case, and asserts that its output equals that of one process. The number of processes, of copies of each
/// file, and the bucket size depend on the number of the case, so that different combinations are tested.
fn assert_equals_one_process(cases: &[(&'static str, &str)]) {
    const BUCKETS: [&str; 3] = ["", "--bucket-size 2KB", "--bucket-size 300"];
    for (number, (source, words)) in cases.iter().enumerate() {
        for (turn, spread) in [Spread::One, Spread::Two].into_iter().enumerate() {
            let of = 2 + u32::try_from((number + 2 * turn) % 4).unwrap();
            let nodes = Nodes::new(source, of, spread);
            nodes.assert_equals_one_process(words, BUCKETS[(number + turn) % BUCKETS.len()]);
        }
    }
}

#[test]
fn distributed_checkpoints_give_the_bytes_of_one_process() {
    assert_equals_one_process(&[
        ("titan/step-1000", "reshard out --mesh fsdp=3"),
        ("titan/step-1000", "consolidate out --dtype f16"),
        ("dcp_trainer", "unshard out.pt"),
        ("hsdp/dcp", "reshard out --mesh fsdp=2,tp=2 --placements S(0),S(1) --to torch-ranks"),
        ("fsdp_tp6/dcp", "unshard out.pt --include model.**"),
        ("fsdp1_sharded/dcp", "consolidate out --root model"),
        ("dcp_hf/shards", "consolidate out"),
        ("dcp_hf/mapped", "reshard out --mesh fsdp=3"),
    ]);
}

#[test]
fn rank_files_give_the_bytes_of_one_process() {
    assert_equals_one_process(&[
        ("fsdp4/ranks", "reshard out --mesh fsdp=2"),
        ("odd4/ranks", "reshard out --mesh fsdp=5"),
        ("odd4/ranks", "reshard out --mesh fsdp=3 --placements S(1)"),
        ("hsdp/ranks", "reshard out --mesh fsdp=8 --to dcp"),
        ("fsdp_tp/ranks", "consolidate out --dtype bf16"),
        ("fsdp_tp6/ranks", "reshard out --mesh dp=2,tp=3 --placements S(0),S(1) --to local"),
        ("tp2/ranks", "reshard out --mesh replica=2,fsdp=3 --placements R,S(0)"),
        ("replicated_plain/ranks", "unshard out --all-ranks"),
        ("fsdp1_sharded/ranks", "reshard out --mesh fsdp=3 --to dcp"),
        ("outside4/ranks", "unshard out.pt"),
        ("compat/torch-2.4.1/fsdp4/dcp", "unshard out.pt"),
    ]);
}

#[test]
fn partial_values_give_the_bytes_of_one_process() {
    assert_equals_one_process(&[
        ("partial2/ranks", "consolidate out"),
        ("partial2/ranks", "reshard out --mesh fsdp=3"),
        ("partial2/ranks", "unshard out.pt --dtype bf16"),
    ]);
}

#[test]
fn flat_parameters_give_the_bytes_of_one_process() {
    assert_equals_one_process(&[
        ("flat2/flat", "consolidate out --flat-layout @flat2/flat.flat_layout.json"),
        ("flat2/one_file", "unshard out.pt --flat-layout @flat2/one_file.flat_layout.json"),
        ("flat2/groups", "reshard out --mesh fsdp=3 --flat-layout @flat2/groups.flat_layout.json"),
        ("flat2/sharded", "reshard out --mesh fsdp=3 --to dcp"),
        ("flat3/views", "flatten out --world-size 2 --flat-layout @flat3/views.flat_layout.json"),
        ("flat4/flat", "flatten out --world-size 5 --flat-layout @flat4/flat.flat_layout.json"),
        ("flat4/views", "reshard out --mesh fsdp=2 --to torch-ranks --flat-layout @flat4/views.flat_layout.json"),
        ("flat_mixed/flat", "unshard out.pt --flat-layout @flat_mixed/flat.flat_layout.json"),
        ("flat_hybrid/flat", "consolidate out --flat-layout @flat_hybrid/flat.flat_layout.json"),
        ("flat_none/views", "consolidate out --flat-layout @flat_none/views.flat_layout.json"),
    ]);
}

#[test]
fn whole_files_give_the_bytes_of_one_process() {
    assert_equals_one_process(&[
        ("safetensors/sharded", "reshard out --mesh fsdp=3"),
        ("safetensors/sharded", "consolidate out.safetensors"),
        ("llama_tiny/dcp", "consolidate out --max-shard-size 20KB"),
        ("torch_file/model.pt", "reshard out --mesh fsdp=3"),
        ("torch_file/trainer.pt", "unshard out.pt"),
        ("torch_file/objects.pt", "consolidate out.safetensors"),
        ("safetensors/single/model.safetensors", "reshard out --mesh fsdp=2 --to torch-ranks"),
        ("cast/cases.safetensors", "consolidate out.safetensors --dtype f16"),
    ]);
}

/// The checkpoint of `--like` or `--fill-from` is a path that all processes see.
#[test]
fn like_and_fill_from_give_the_bytes_of_one_process() {
    assert_equals_one_process(&[
        ("hsdp/ranks", "reshard out --like @fsdp4/ranks"),
        ("hsdp/ranks", "reshard out --fill-from @fsdp4/ranks --include model.**"),
    ]);
}

/// Several processes write a checkpoint. Its files are then divided among the nodes, and another run reads them.
#[test]
fn written_formats_are_read_by_the_next_run() {
    for to in ["local", "torch-ranks", "dcp"] {
        let nodes = Nodes::new("fsdp4/ranks", 3, Spread::One);
        nodes.assert_equals_one_process(&format!("reshard made --mesh fsdp=4 --to {to}"), "");
        let (expected, outcome) = nodes.run_alone("consolidate out");
        outcome.assert_succeeded();
        (0..nodes.of).for_each(|node| fs::remove_dir_all(nodes.source(node)).unwrap());
        let made = nodes.dst_folder().join("made");
        for (number, file) in (0..).zip(files_of(&made)) {
            let home = nodes.source(number % nodes.of);
            fs::create_dir_all(&home).unwrap();
            fs::copy(&file, home.join(file.file_name().unwrap())).unwrap();
        }
        nodes.clear();
        nodes.run_together("consolidate out").iter().for_each(assert_succeeded);
        nodes.assert_made(&expected, "consolidate out");
    }
}
