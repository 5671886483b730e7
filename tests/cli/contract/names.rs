//! Tests of the selection of tensors, and of the names under which they are written.
//!
//! Tested in other modules:
//!
//! - Wrapper prefixes inside names, `param_groups` and flattened optimizers: `select::tests` (library).
//! - `?`, `{a,b}`, `**` and literal characters in patterns: `layout::pattern::tests`.
//! - Rename files, groups and the last unescaped `=`: `select::rename::tests`.
//! - A placement pattern that matches a module: `conversions::optimizer_state_gets_the_placement_of_its_parameter`.

use std::path::Path;

use serde_json::Value as Json;

use crate::common::env::{Made, TestEnv};
use crate::common::{Tensors, assert_same, below, expect, fixture, inspect, read, run, succeed};
use crate::contract::assert_contains;

/// Writes a model of four vectors. Their lengths are different, so a length identifies a vector.
fn model(env: &TestEnv) -> std::path::PathBuf {
    env.vectors(
        "m.safetensors",
        &[("layers.0.a.weight", 2), ("layers.0.b.weight", 3), ("layers.1.a.weight", 4), ("norm.weight", 5)],
    )
}

/// Runs `unshard` on the model with these options. Returns, for each written tensor, its name and its length. The
/// length identifies the tensor of the source.
fn names_after(options: &[&str]) -> Vec<String> {
    let env = TestEnv::new();
    let (source, target) = (model(&env), env.path("out.pt"));
    let mut arguments = vec!["unshard", source.to_str().unwrap(), target.to_str().unwrap()];
    arguments.extend(options);
    let outcome = run(&arguments);
    assert_eq!(outcome.code, 0, "{options:?}: {}", outcome.stderr);
    let expected = read(&source);
    let found = read(&target);
    for tensor in found.values() {
        assert!(expected.values().any(|known| known == tensor), "{options:?}: another value");
    }
    found.into_iter().map(|(name, tensor)| format!("{name} {}", tensor.shape[0])).collect()
}

#[test]
fn names_are_paths_joined_with_dots_like_in_dcp() {
    let names: Vec<String> = read(&fixture("fsdp4/dcp")).into_keys().collect();
    for name in ["model.blocks.0.w1.weight", "optim.state.blocks.0.w1.weight.exp_avg", "nested.a.2.b"] {
        assert!(names.iter().any(|known| known == name), "{name}");
    }
}

#[test]
fn include_and_exclude_match_source_names() {
    assert_eq!(names_after(&["--include", "layers.0.**"]), ["layers.0.a.weight 2", "layers.0.b.weight 3"]);
    assert_eq!(
        names_after(&["--include", "layers.*.a.weight", "--include", "norm.*"]),
        ["layers.0.a.weight 2", "layers.1.a.weight 4", "norm.weight 5"]
    );
    assert_eq!(names_after(&["--exclude", "layers.0"]), ["layers.1.a.weight 4", "norm.weight 5"]);
    // With both options, names are written that are included and not excluded.
    assert_eq!(
        names_after(&["--include", "layers", "--exclude", "**.b"]),
        ["layers.0.a.weight 2", "layers.1.a.weight 4"]
    );
    // Patterns match the names in the source, even if the names are changed.
    assert_eq!(names_after(&["--include", "layers.0.a", "--rename", "^layers=blocks"]), ["blocks.0.a.weight 2"]);
}

#[test]
fn include_from_reads_one_pattern_per_line() {
    let env = TestEnv::new();
    let file = env.write("patterns", "# those of a\n\n  layers.*.a\nnorm.weight\n");
    let file = file.to_str().unwrap();
    let expected = ["layers.0.a.weight 2", "layers.1.a.weight 4", "norm.weight 5"];
    assert_eq!(names_after(&["--include-from", file]), expected);
    assert_eq!(names_after(&["--include-from", file, "--include", "layers.0.b"]).len(), 4);
    let empty = env.write("empty", "# nothing\n");
    env.refuse("unshard", "fsdp4/dcp", "x.pt", &format!("--include-from {}", empty.display()));
}

#[test]
fn star_matches_one_component_and_a_module_matches_its_parameters() {
    assert_eq!(names_after(&["--include", "*.weight"]), ["norm.weight 5"]);
    assert_eq!(names_after(&["--include", "**.weight"]).len(), 4);
    let env = TestEnv::new();
    env.refuse("unshard", model(&env), "x.pt", "--include layers.*.weight");
    assert_eq!(names_after(&["--include", "layers.?"]).len(), 3);
    assert_eq!(names_after(&["--include", "**.{b,norm}.weight", "--include", "{a,norm}.weight"]).len(), 2);
}

#[test]
fn root_writes_a_subtree_under_relative_names() {
    assert_eq!(names_after(&["--root", "layers.0"]), ["a.weight 2", "b.weight 3"]);
    let env = TestEnv::new();
    let made = env.make("unshard", "fsdp4/dcp", "x.pt", "--root optim.state");
    assert_same(&made.tensors(), &below("optim.state.", &read(&fixture("fsdp4/dcp"))), "--root");
}

#[test]
fn strip_prefix_removes_a_leading_prefix() {
    let expected = ["0.a.weight 2", "0.b.weight 3", "1.a.weight 4", "norm.weight 5"];
    assert_eq!(names_after(&["--strip-prefix", "layers."]), expected);
    assert_eq!(names_after(&["--strip-prefix", "layers"]), expected);
    assert_eq!(names_after(&["--strip-prefix", "layers.", "--strip-prefix", "norm."]).last().unwrap(), "weight 5");
}

#[test]
fn rename_is_unanchored_and_replaces_every_match() {
    assert_eq!(names_after(&["--include", "norm", "--rename", "o=0"]), ["n0rm.weight 5"]);
    assert_eq!(names_after(&["--include", "layers.0.a", "--rename", "a=x"]), ["lxyers.0.x.weight 2"]);
    for replacement in [r"(\w+)\.weight$=\1.W", r"(\w+)\.weight$=${1}.W", r"(?P<last>\w+)\.weight$=${last}.W"] {
        assert_eq!(
            names_after(&["--include", "layers.0", "--rename", replacement]),
            ["layers.0.a.W 2", "layers.0.b.W 3"],
            "{replacement}"
        );
    }
    // The rule is split at the last `=` that is not escaped.
    assert_eq!(names_after(&["--include", "norm", "--rename", r"(?:x=|norm)=n\=m"]), ["n=m.weight 5"]);
    // The rules apply in the order given.
    assert_eq!(names_after(&["--include", "norm", "--rename", "norm=a", "--rename", "^a=b"]), ["b.weight 5"]);
}

#[test]
fn rename_of_an_unknown_group_is_an_error() {
    let env = TestEnv::new();
    for rename in [r"norm=\1", "norm=${2}", "norm=${name}", "(norm", "norm"] {
        env.refuse("unshard", model(&env), "x.pt", &format!("--rename {rename}"));
    }
}

#[test]
fn rename_file_has_one_rule_per_line_and_follows_rename_options() {
    let env = TestEnv::new();
    let file = env.write("rules", "# two\n^norm=a\n\na\\.weight=a.w\n");
    assert_eq!(names_after(&["--include", "norm", "--rename-file", file.to_str().unwrap()]), ["a.w 5"]);
    let options = ["--include", "norm", "--rename", "norm=xnorm", "--rename-file", file.to_str().unwrap()];
    let env = TestEnv::new();
    env.refuse("unshard", model(&env), "x.pt", &options.join(" "));
}

#[test]
fn name_options_apply_in_a_fixed_order() {
    // Each step gets the names that the previous step made, in whatever order the options are given.
    let steps = [
        ["--nest", "top.level"],
        ["--add-prefix", "pre_"],
        ["--rename", "^a=A"],
        ["--strip-prefix", "0."],
        ["--root", "layers"],
        ["--include", "layers.0"],
    ];
    let expected = ["top.level.pre_A.weight 2", "top.level.pre_b.weight 3"];
    assert_eq!(names_after(&steps.concat()), expected);
    let backwards: Vec<&str> = steps.iter().rev().flatten().copied().collect();
    assert_eq!(names_after(&backwards), expected);
}

#[test]
fn add_prefix_changes_names_and_nest_adds_dicts() {
    assert_eq!(names_after(&["--include", "norm", "--add-prefix", "model."]), ["model.norm.weight 5"]);
    let env = TestEnv::new();
    let flat = env.make("unshard", model(&env), "flat.pt", "--add-prefix model.");
    let nested = env.make("unshard", model(&env), "nested.pt", "--nest model");
    assert_eq!(flat.tensors(), nested.tensors());
    // Only the nested file has the model in a dict below the key `model`. `consolidate` removes this key from the names.
    let from_flat = env.make("consolidate", &flat.path, "a.safetensors", "");
    let from_nested = env.make("consolidate", &nested.path, "b.safetensors", "");
    assert!(from_flat.tensor_names().iter().all(|name| name.starts_with("model.")));
    assert_same(&from_nested.tensors(), &read(&model(&env)), "nested");
}

#[test]
fn layout_rules_match_the_resulting_names() {
    let env = TestEnv::new();
    let options = "--mesh dp=2 --rename ^norm=final --placements R --placements final.weight=S(0)";
    let made = env.make("reshard", model(&env), "out", options);
    let found = inspect(&made.path, "");
    assert_eq!(found["tensors"]["final.weight"]["chunks"].as_array().unwrap().len(), 2);
    let options = "--mesh dp=2 --rename ^norm=final --placements R --placements norm.weight=S(0)";
    env.refuse("reshard", model(&env), "x", options);
}

/// Writes a model with the wrapper components that torch.compile, checkpoint wrappers and FSDP1 add to names.
fn wrapped(env: &TestEnv) -> Made {
    let options =
        "--rename ^layers\\.0=_orig_mod._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module --keep-names";
    env.make("unshard", model(env), "wrapped.pt", options)
}

#[test]
fn wrapper_prefixes_are_removed_without_keep_names() {
    let env = TestEnv::new();
    let source = wrapped(&env);
    let long = "_orig_mod._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.a.weight";
    assert!(source.tensor_names().contains(&long.to_owned()));
    let clean = read(&model(&env));
    for (verb, name) in [("consolidate", "a.safetensors"), ("unshard", "b.pt")] {
        assert_same(&env.make(verb, &source.path, name, "").tensors(), &clean, verb);
        let kept = env.make(verb, &source.path, &format!("kept_{name}"), "--keep-names");
        assert_same(&kept.tensors(), &source.tensors(), verb);
    }
    succeed("verify", &[&source.path, &model(&env)], "");
    expect(1, "verify", &[&source.path, &model(&env)], "--keep-names");
    // `reshard` keeps wrapper components in names, and patterns match names with and without them.
    let options = "--mesh dp=2 --placements S(0) --placements layers.0.a.weight=R";
    let shards = env.make("reshard", &source.path, "shards", options);
    assert_same(&shards.tensors(), &source.tensors(), "reshard");
    assert_eq!(inspect(&shards.path, "")["tensors"][long]["chunks"].as_array().unwrap().len(), 1);
    let some = env.make("reshard", &source.path, "some", "--mesh dp=2 --include layers.0.a --dtype layers.0.a=f16");
    assert_eq!(some.tensor_names(), [long]);
    assert_eq!(some.tensors()[long].dtype, "f16");
    for pattern in
        ["--include layers.0.a", "--exclude layers.0.a", "--dtype layers.0.a=f16", "--placements layers.0.a=R"]
    {
        let options = format!("--mesh dp=2 --keep-names --placements S(0) {pattern}");
        env.refuse("reshard", &source.path, "x", &options);
    }
}

#[test]
fn colliding_names_are_refused() {
    let env = TestEnv::new();
    env.refuse("unshard", model(&env), "x.pt", r"--rename layers\.\d=layers.x");
    env.refuse("consolidate", model(&env), "x", r"--rename layers\.\d=layers.x");
    // Without its wrapper component, one name equals the other name.
    let source = env.vectors("both.safetensors", &[("_orig_mod.w", 2), ("w", 2)]);
    env.refuse("unshard", &source, "x.pt", "");
    assert_eq!(env.make("unshard", &source, "kept.pt", "--keep-names").tensor_names(), ["_orig_mod.w", "w"]);
}

#[test]
fn pattern_without_a_match_is_an_error_with_the_nearest_names() {
    let source = "llama_tiny/dcp";
    let env = TestEnv::new();
    for option in
        ["--include model.model.layrs", "--exclude **.q_prj", "--dtype **.q_prj.weight=f32", "--rename q_prj=x"]
    {
        env.refuse("unshard", source, "x.pt", option);
    }
    env.refuse("unshard", source, "x.pt", "--strip-prefix modle.");
    env.refuse("unshard", source, "x.pt", "--root optim.stat");
    let options = "--mesh dp=2 --placements S(0) --placements **.q_prj=R";
    env.refuse("reshard", source, "x", options);
    let outcome = expect(2, "inspect", &[&fixture(source)], "--tensor **.q_prj");
    assert_contains(&outcome.stderr, &["no tensor name matches", "q_proj.weight"]);
    let outcome = expect(2, "verify", &[&fixture(source), &fixture(source)], "--include **.q_prj");
    assert_contains(&outcome.stderr, &["no tensor or object matches this pattern", "q_proj.weight"]);
}

/// Returns the text of `param_groups` of every optimizer, as `inspect` shows it.
fn params(path: &Path) -> String {
    let document = inspect(path, "--brief");
    let groups = document["objects"].as_object().unwrap().iter().filter(|(name, _)| name.ends_with(".params"));
    groups.map(|(_, value)| value["value"].to_string()).collect()
}

#[test]
fn names_in_param_groups_are_renamed() {
    let env = TestEnv::new();
    let made = env.make("unshard", "fsdp4/dcp", "x.pt", "--rename blocks=layers");
    let renamed = |name: String| name.replace("blocks", "layers");
    let expected: Tensors =
        read(&fixture("fsdp4/dcp")).into_iter().map(|(name, tensor)| (renamed(name), tensor)).collect();
    assert_same(&made.tensors(), &expected, "tensors");
    assert!(params(&fixture("fsdp4/dcp")).contains("blocks.0"));
    assert_eq!(params(&made.path), renamed(params(&fixture("fsdp4/dcp"))));
}

#[test]
fn excluded_parameter_excludes_its_optimizer_state() {
    let env = TestEnv::new();
    for pattern in ["model.blocks.0.w1.weight", "blocks.0.w1.weight", "**.0.w1"] {
        let name = pattern.replace('*', "");
        let made = env.make("unshard", "fsdp4/dcp", &name, &format!("--exclude {pattern} --json"));
        let gone = |name: &String| name.contains("blocks.0.w1.weight");
        assert!(!made.tensor_names().iter().any(gone), "{pattern}");
        assert_eq!(made.tensors().len(), read(&fixture("fsdp4/dcp")).len() - 4, "{pattern}");
        let document = made.run.json();
        let left: Vec<&str> = document["left_out"].as_array().unwrap().iter().filter_map(Json::as_str).collect();
        for state in ["exp_avg", "exp_avg_sq", "step"] {
            assert!(left.contains(&format!("optim.state.blocks.0.w1.weight.{state}").as_str()), "{pattern}: {left:?}");
        }
        assert!(left.contains(&"model.blocks.0.w1.weight"));
        assert!(!params(&made.path).contains("blocks.0.w1.weight"), "{pattern}");
        assert!(params(&made.path).contains("blocks.1.w1.weight"));
    }
}

#[test]
fn name_options_combine_in_every_verb_that_writes() {
    let env = TestEnv::new();
    let options = "--include model --exclude **.bias --root model --rename ^blocks=layers --add-prefix m.";
    let keep = |name: &String| name.rsplit('.').next() != Some("bias");
    let renamed = |name: String| format!("m.{}", name.replacen("blocks", "layers", 1));
    let expected: Tensors = below("model.", &read(&fixture("fsdp4/dcp")))
        .into_iter()
        .filter(|(name, _)| keep(name))
        .map(|(name, tensor)| (renamed(name), tensor))
        .collect();
    for (verb, name, more) in [
        ("unshard", "a.pt", ""),
        ("consolidate", "b", ""),
        ("reshard", "c", "--mesh dp=3"),
        ("reshard", "d", "--mesh dp=3 --to torch-ranks"),
    ] {
        let made = env.make(verb, "fsdp4/dcp", name, &format!("{options} {more}"));
        assert_same(&made.tensors(), &expected, verb);
        succeed("verify", &[&fixture("fsdp4/dcp"), &made.path], options);
    }
    assert!(expected.contains_key("m.layers.0.w1.weight"));
}
