//! Tests of splits of dims: `--split`, and splits and sizes in a layout file.
//!
//! The computation of splits is tested in `layout::split::tests`, and splits of SRC in `declared_layout` and `local`.

use serde_json::{Value as Json, json};

use crate::common::env::TestEnv;
use crate::common::{inspect, succeed};
use crate::contract::layout_file::{EMBED, assert_layout_reproduces, laid_out};
use crate::contract::{assert_contains, contents};

/// Returns the offset and the size of each chunk of a tensor along the dim `dim`, without duplicates.
fn cuts(document: &Json, name: &str, dim: usize) -> Vec<(u64, u64)> {
    let chunks = document["tensors"][name]["chunks"].as_array().unwrap_or_else(|| panic!("no {name}"));
    let number = |list: &Json| list[dim].as_u64().unwrap();
    let mut found: Vec<_> = chunks.iter().map(|chunk| (number(&chunk["offsets"]), number(&chunk["sizes"]))).collect();
    found.sort_unstable();
    found.dedup();
    found
}

#[test]
fn split_options_set_the_chunks_of_dcp() {
    let chunk = [(0, 3), (3, 3), (6, 3), (9, 1)];
    let balanced = [(0, 3), (3, 3), (6, 2), (8, 2)];
    let makani = [(0, 3), (3, 3), (6, 3), (9, 1)];
    let base = "mesh = \"dp=4\"\nplacements = \"S(0)\"\n";
    assert_eq!(cuts(&laid_out(base, ""), EMBED, 0), chunk);
    assert_eq!(cuts(&laid_out(base, "--split balanced"), EMBED, 0), balanced);
    assert_eq!(cuts(&laid_out(&format!("{base}split = \"balanced\""), ""), EMBED, 0), balanced);
    assert_eq!(cuts(&laid_out(&format!("{base}split = \"balanced\""), "--split makani"), EMBED, 0), makani);
    // With 10 rows over 6 ranks, makani leaves no rank without rows.
    let split = laid_out("mesh = \"dp=6\"\nplacements = \"S(0)\"\nsplit = \"makani\"", "");
    assert_eq!(cuts(&split, EMBED, 0), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 5)]);
    let sizes =
        format!("{base}[[rules]]\ntensors = \"embed\"\nplacements = \"S(0)\"\nsizes = {{ dp = [1, 0, 7, 2] }}\n");
    let found = laid_out(&sizes, "--split balanced");
    assert_eq!(cuts(&found, EMBED, 0), [(0, 1), (1, 7), (8, 2)]);
    assert_eq!(cuts(&found, "optim.state.embed.weight.exp_avg", 0), [(0, 1), (1, 7), (8, 2)], "its state follows");
    // Two mesh dims have different splits.
    let both = "mesh = \"dp=2,tp=2\"\nplacements = \"S(0),R\"\n[[rules]]\ntensors = \"embed\"\nplacements = \"S(0),S(1)\"\n\
                split = \"chunk,1+2\"\n";
    let found = laid_out(both, "");
    assert_eq!((cuts(&found, EMBED, 0), cuts(&found, EMBED, 1)), (vec![(0, 5), (5, 5)], vec![(0, 1), (1, 2)]));
}

#[test]
fn split_sizes_of_local_files_are_printed_and_reproduced() {
    let env = TestEnv::new();
    let sizes = "mesh = \"dp=2\"\nplacements = \"S(0)\"\n[[rules]]\ntensors = \"embed\"\nplacements = \"S(0)\"\n\
                 sizes = { dp = [7, 3] }\n";
    let layout = env.write("sizes.toml", sizes);
    let made = env.make("reshard", "fsdp4/ranks", "made", &format!("--to local --layout {}", layout.display()));
    assert_layout_reproduces(&made.path.display().to_string(), "");
    let printed = succeed("inspect", &[&made.path], "--layout").stdout;
    assert_contains(&printed, &["tensors = \"embed.weight\"\nplacements = \"S(0)\"\nsplit = \"7+3\"\n"]);
    // The error for sizes that do not fit names the origin of the sizes.
    env.refuse("reshard", &made.path, "x", "--mesh dp=3");
    let to_dtensors = format!("--layout {}", layout.display());
    env.refuse("reshard", "fsdp4/ranks", "x", &to_dtensors);
    env.refuse("reshard", "fsdp_tp/ranks", "x", "--to local --split balanced --mesh dp=2,tp=3");
    // A layout with a default split is printed and reproduced as well.
    let made = env.make("reshard", "fsdp4/ranks", "even", "--to local --mesh dp=4 --split balanced");
    assert_layout_reproduces(&made.path.display().to_string(), "");
}

#[test]
fn uneven_splits_of_dtensors_are_refused() {
    let env = TestEnv::new();
    env.refuse("reshard", "fsdp4/ranks", "x", "--mesh dp=4 --placements S(0) --split balanced");
    env.refuse("reshard", "fsdp1_sharded/ranks", "x", "--mesh dp=4 --placements S(0) --split balanced");
    // All rules give the same even split.
    let even = "--mesh dp=2 --placements S(0) --include **.embed";
    let by = |split: &str, name: &str| {
        contents(&env.make("reshard", "fsdp4/ranks", name, &format!("{even} --split {split}")).path)
    };
    assert_eq!(by("chunk", "a"), by("makani", "b"));
    // Local tensors may be split by any rule.
    let options = "--mesh dp=4 --placements S(0) --split balanced --tensor-class local";
    let made = env.make("reshard", "fsdp4/ranks", "local", options);
    let shapes: Vec<Json> = (0..4)
        .map(|rank| {
            let file = made.path.join(format!("model_world_size_4_rank_{rank}.pt"));
            inspect(&file, "--brief")["tensors"]["embed.weight"]["shape"].clone()
        })
        .collect();
    assert_eq!(shapes, [json!([3, 3]), json!([3, 3]), json!([2, 3]), json!([2, 3])]);
}
