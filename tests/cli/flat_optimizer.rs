//! Optimizer state of FSDP1's flat parameters beside a model that `SHARDED_STATE_DICT` saved, as verl saves it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value as Json, json};

use crate::common::corrupt::{copy_all, dtshard, edit_pickle, replace};
use crate::common::flat;
use crate::common::{Tensor, Truth, assert_same, expect, fixture, inspect, read, succeed};
use crate::contract::assert_contains;

/// The checkpoints, and the value of `use_orig_params`.
const CHECKPOINTS: [(&str, bool); 2] = [("verl_fsdp1", false), ("verl_fsdp1_orig", true)];

/// Returns the model and the optimizer state of a checkpoint.
fn truth(name: &str) -> BTreeMap<String, Tensor> {
    Truth::load(&format!("trainers/{name}.truth")).tensors
}

/// Returns the model and the optimizer state that `unshard` writes.
fn unsharded(source: &Path) -> BTreeMap<String, Tensor> {
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("all.pt");
    succeed("unshard", &[source, &made], "--series model,optim");
    read(&made)
}

/// Returns the lengths of the first moments in the optimizer file of a rank.
fn lengths(actor: &Path, ranks: u32, rank: u32) -> BTreeMap<String, u64> {
    let file = actor.join(format!("optim_world_size_{ranks}_rank_{rank}.pt"));
    let moments = read(&file).into_iter().filter_map(|(name, tensor)| {
        let number = name.strip_prefix("state.")?.strip_suffix(".exp_avg")?;
        Some((number.to_owned(), tensor.shape.iter().product()))
    });
    moments.collect()
}

#[test]
fn optimizer_state_has_the_names_and_shapes_of_parameters() {
    for (name, _) in CHECKPOINTS {
        let source = fixture(&format!("trainers/{name}"));
        assert_same(&unsharded(&source), &truth(name), name);
        assert_contains(&succeed("verify", &[&source], "").stderr, &["sound: 85 tensors"]);
        let listed = inspect(&source, "--series all");
        assert_eq!(
            listed["tensors"]["optim.state.model.layers.1.mlp.up_proj.weight.exp_avg"]["shape"][0], 25,
            "{name}"
        );
    }
}

/// `reshard` writes state of the flat parameters of the new job. The lengths are those of verl on 3 ranks.
#[test]
fn resharded_optimizer_has_state_of_flat_parameters() {
    let folder = tempfile::tempdir().unwrap();
    for (name, use_orig_params) in CHECKPOINTS {
        let (there, back) = (folder.path().join(name), folder.path().join(format!("{name}_back")));
        let source = fixture(&format!("trainers/{name}"));
        let run = succeed("reshard", &[&source, &there], "--mesh fsdp=3");
        assert_contains(&run.stderr, &["`optim` of DST is for a job with FSDP1, as in SRC"]);
        assert_same(&unsharded(&there), &truth(name), name);
        let config = fs::read_to_string(there.join("fsdp_config.json")).unwrap();
        assert_contains(&config, &["\"FSDP_version\": 1", "\"world_size\": 3"]);
        let first = lengths(&there, 3, 0);
        if use_orig_params {
            // The root unit has 615 elements of the embedding, 1 of padding, 15 of the norm, and 615 of the head.
            assert_eq!([first["0"], lengths(&there, 3, 1)["0"]], [416, 199]);
            assert!(!first.contains_key("20"), "rank 0 has nothing of the head");
        } else {
            // The units have 1245, 1635 and 1635 elements.
            assert_eq!([first["0"], first["1"], first["2"]], [415, 545, 545]);
        }
        succeed("reshard", &[&there, &back], "--mesh fsdp=2");
        let actor = source.join("global_step_2/actor");
        for rank in 0..2 {
            let file = format!("optim_world_size_2_rank_{rank}.pt");
            assert_same(&read(&back.join(&file)), &read(&actor.join(&file)), name);
        }
    }
}

/// If a shard group has one rank, FSDP1 uses `NO_SHARD`, and loads plain tensors only. Such a checkpoint is read like one
/// with sharded parameters: for the ranks of SRC, `reshard` writes the optimizer files of SRC.
#[test]
fn shard_groups_of_one_rank_have_plain_tensors() {
    let folder = tempfile::tempdir().unwrap();
    for (name, use_orig_params) in CHECKPOINTS {
        let source = fixture(&format!("trainers/{name}"));
        let actor = source.join("global_step_2/actor");
        let layout = folder.path().join(format!("{name}.toml"));
        fs::write(&layout, succeed("inspect", &[&source], "--layout").stdout).unwrap();
        for (number, mesh) in ["fsdp=1", "ddp=2,fsdp=1"].into_iter().enumerate() {
            let at = |what: &str| folder.path().join(format!("{name}{number}{what}"));
            let (one, model, back, again, hybrid) = (at("one"), at("model"), at("back"), at("again"), at("hybrid"));
            let run = succeed("reshard", &[&source, &one], &format!("--mesh {mesh}"));
            let hint = "you need --flat-layout FILE; write it with `dtshard inspect SRC --layout > FILE`";
            assert_eq!(run.stderr.contains(hint), use_orig_params, "{}", run.stderr);
            succeed("reshard", &[&source, &model], &format!("--mesh {mesh} --series model"));
            for made in [&one, &model] {
                let tensors = inspect(made, "--series model")["tensors"].clone();
                assert!(
                    tensors.as_object().unwrap().values().all(|tensor| tensor["placements"].is_null()),
                    "{tensors}"
                );
            }
            assert_contains(
                &succeed("verify", &[&one, &source], "--series model,optim").stderr,
                &["the same: 84 tensors"],
            );
            let given = if use_orig_params {
                // The files of `NO_SHARD` do not show the padding between parameters.
                let refused = expect(2, "reshard", &[&one, &back], "--mesh fsdp=2").stderr;
                assert_contains(&refused, &["the padding between the parameters", "--flat-layout FILE"]);
                format!("--flat-layout {}", layout.display())
            } else {
                String::new()
            };
            succeed("reshard", &[&one, &back], &format!("--mesh fsdp=2 {given}"));
            for rank in 0..2 {
                let file = format!("optim_world_size_2_rank_{rank}.pt");
                assert_same(&read(&back.join(&file)), &read(&actor.join(&file)), &format!("{name} {mesh}"));
                let extra = inspect(&back, "--series all")["tensors"]["extra_state.rng.cpu"].clone();
                assert!(extra["placements"].is_null(), "{extra}");
            }
            // Without a mesh, the files are those of the job that saved SRC.
            succeed("reshard", &[&one, &again], "");
            let file = one.join(format!("optim_world_size_{}_rank_0.pt", number + 1));
            assert_same(&read(&again.join(file.file_name().unwrap())), &read(&file), name);
            succeed("reshard", &[&again, &hybrid], &format!("--mesh ddp=2,fsdp=2 {given}"));
            assert_same(&unsharded(&hybrid), &truth(name), name);
            let config = fs::read_to_string(hybrid.join("fsdp_config.json")).unwrap();
            assert_contains(&config, &["\"FSDP_version\": 1", "\"world_size\": 4"]);
        }
    }
}

/// A checkpoint for FSDP2 has no flat layout. With units, `reshard` and `flatten` write flat parameters, and
/// `fsdp_config.json` has the version of FSDP that loads them.
#[test]
fn checkpoint_for_fsdp2_needs_units_to_become_flat() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("verl/global_step_10/actor");
    let refused = folder.path().join("refused");
    let like = fixture("torch_file/trainer.pt");
    for options in [String::new(), format!("--like {}", like.display())] {
        let run = expect(2, "reshard", &[&source, &refused], &format!("--mesh fsdp=2 --to fsdp-flat {options}"));
        assert_contains(
            &run.stderr,
            &["--flat-layout FILE", "--layout FILE", "--like CKPT", "`dtshard flatten`, ", "--wrap"],
        );
        assert!(!run.stderr.contains("--buffers"), "{}", run.stderr);
        assert!(!refused.exists());
    }
    let at = |name: &str| folder.path().join(name);
    succeed("flatten", &[&source, &at("wrapped")], "--wrap model.layers.* --world-size 2");
    let layout = at("wrapped").join("flat_layout.json");
    for (name, given) in [
        ("file", format!("--flat-layout {}", layout.display())),
        ("like", format!("--like {}", at("wrapped").display())),
    ] {
        succeed("reshard", &[&source, &at(name)], &format!("--mesh fsdp=2 --to fsdp-flat {given}"));
    }
    for name in ["wrapped", "file", "like"] {
        let config = fs::read_to_string(at(name).join("fsdp_config.json")).unwrap();
        assert_contains(&config, &["\"FSDP_version\": 1", "\"world_size\": 2"]);
        let run = succeed("verify", &[&source, &at(name)], "--series model,optim");
        assert_contains(&run.stderr, &["the same"]);
    }
    succeed("reshard", &[&at("wrapped"), &at("again")], "--mesh fsdp=2 --to torch-ranks");
    let config = fs::read_to_string(at("again").join("fsdp_config.json")).unwrap();
    assert_contains(&config, &["\"FSDP_version\": 2"]);
    succeed("verify", &[&source, &at("again")], "--series model,optim");
}

/// An optimizer that is not in files of its own, or that has no parameter groups, cannot have state of flat parameters. DST
/// is for a job with FSDP2, and says so in `fsdp_config.json`.
#[test]
fn optimizer_without_its_own_files_is_for_fsdp2() {
    let folder = tempfile::tempdir().unwrap();
    for (name, _) in CHECKPOINTS {
        let source = fixture(&format!("trainers/{name}"));
        for (number, (options, head)) in [
            ("--nest a.b --mesh fsdp=2", "a.b.optim.state.20.exp_avg"),
            ("--add-prefix x. --mesh fsdp=2", "x.optim.state.20.exp_avg"),
            ("--exclude optim.param_groups --mesh fsdp=2", "optim.state.lm_head.weight.exp_avg"),
            ("--series optim --mesh ddp=2,fsdp=1 --placements R,S(0)", "state.lm_head.weight.exp_avg"),
        ]
        .into_iter()
        .enumerate()
        {
            let made = folder.path().join(format!("{name}{number}"));
            let run = succeed("reshard", &[&source, &made], options);
            assert_contains(&run.stderr, &["DST gets the state of each original parameter, for a job with FSDP2"]);
            let moment = inspect(&made, "--series all")["tensors"][head].clone();
            assert_eq!(moment["shape"][0], 41, "{name} {options}: {moment}");
            assert!(moment["placements"].as_str().unwrap().contains("S(0)"), "{name} {options}: {moment}");
            assert_contains(&fs::read_to_string(made.join("fsdp_config.json")).unwrap(), &["\"FSDP_version\": 2"]);
        }
    }
}

/// The model is in ShardedTensors, two parameters are tied, and units are nested. The files for three ranks are equal to
/// those of PyTorch on three ranks.
#[test]
fn files_for_other_ranks_equal_those_of_pytorch() {
    for form in ["views", "flat"] {
        let folder = tempfile::tempdir().unwrap();
        let (source, made) = (folder.path().join("source"), folder.path().join("made"));
        fs::create_dir(&source).unwrap();
        for rank in 0..2 {
            for (series, from) in [("model", "sharded"), ("optim", form)] {
                let file = format!("{series}_world_size_2_rank_{rank}.pt");
                fs::copy(fixture(&format!("flat2/{from}/{file}")), source.join(&file)).unwrap();
            }
        }
        // FSDP1 flattens the weight of the convolution in the order of its memory, which the shards do not show.
        let refused = expect(2, "reshard", &[&source, &made], "--mesh fsdp=3").stderr;
        assert_contains(&refused, &["conv.weight may be in channels_last order", "--flat-layout FILE"]);
        let layout = fixture(&format!("flat2/{form}.flat_layout.json"));
        succeed("reshard", &[&source, &made], &format!("--mesh fsdp=3 --flat-layout {}", layout.display()));
        for rank in 0..3 {
            let file = format!("optim_world_size_3_rank_{rank}.pt");
            let expected = read(&fixture(&format!("flat3/{form}/{file}")));
            assert!(expected.len() > 10);
            assert_same(&read(&made.join(&file)), &expected, &format!("{form} {rank}"));
        }
    }
}

/// A model without `_metadata` does not show its units, so state of flat parameters beside it is refused.
#[test]
fn flat_state_beside_a_plain_model_without_metadata_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (one, made) = (folder.path().join("one"), folder.path().join("made"));
    succeed("reshard", &[&fixture("trainers/verl_fsdp1"), &one], "--mesh fsdp=1");
    let file = one.join("model_world_size_1_rank_0.pt");
    edit_pickle(&file, |pickle| replace(pickle, b"_metadata", b"_metadatb"));
    for verb in ["reshard", "unshard"] {
        let options = if verb == "reshard" { "--mesh fsdp=2" } else { "--series model,optim" };
        let refused = expect(2, verb, &[&one, &made], options).stderr;
        assert_contains(&refused, &["a 1-d tensor of 1635 elements", "the flat layout of the model is unknown"]);
    }
    succeed("unshard", &[&one, &made], "--series model");
}

/// FSDP1 loads buffers from plain tensors only.
#[test]
fn buffers_of_an_fsdp1_job_stay_plain() {
    let folder = tempfile::tempdir().unwrap();
    for form in ["views", "flat"] {
        let made = folder.path().join(form);
        let layout = fixture(&format!("flat_none/{form}.flat_layout.json"));
        let given = format!("--flat-layout {}", layout.display());
        succeed("reshard", &[&fixture(&format!("flat_none/{form}")), &made], &format!("--mesh fsdp=2 {given}"));
        let tensors = inspect(&made, &format!("--series model {given}"))["tensors"].clone();
        for (name, is_sharded) in [("freqs", false), ("layers.0.scale", false), ("emb.weight", true)] {
            assert_eq!(tensors[name]["placements"].is_string(), is_sharded, "{form} {name}: {tensors}");
        }
        // Without the layout, the optimizer of SRC is not understood.
        let again = folder.path().join("again");
        let refused = expect(2, "reshard", &[&fixture(&format!("flat_none/{form}")), &again], "--mesh fsdp=2").stderr;
        assert_contains(&refused, &["--flat-layout FILE"]);
    }
    // With use_orig_params and one rank in each shard group, the state is not sharded, so no layout is needed.
    let (source, one) = (fixture("flat_none/views"), folder.path().join("one"));
    succeed("reshard", &[&source, &one], "--mesh fsdp=1");
    assert_contains(&succeed("verify", &[&source, &one], "--series model,optim").stderr, &["the same: "]);
}

/// A parameter that is left out has no state in the flat parameters, and a new name of a parameter applies to its state.
#[test]
fn filters_and_renames_apply_to_state_of_flat_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("made");
    for (name, _) in CHECKPOINTS {
        let source = fixture(&format!("trainers/{name}"));
        for options in [
            "--exclude **.lm_head",
            "--exclude **.norm.**",
            "--include **.layers.0",
            "--include **.lm_head.weight --include model.**.mlp",
            "--rename lm_head=head",
            "--rename layers\\.(\\d+)=blocks.\\1",
        ] {
            let run = succeed("reshard", &[&source, &made], &format!("--mesh fsdp=3 --overwrite {options}"));
            assert_contains(&run.stderr, &["`optim` of DST is for a job with FSDP1"]);
            succeed("verify", &[&source, &made], &format!("--series all {options}"));
        }
        // The names of the optimizer without its model follow, too.
        let options = "--mesh fsdp=3 --overwrite --series optim --rename lm_head=head";
        succeed("reshard", &[&source, &made], options);
        // A flat parameter has state for all its parameters, or for none.
        let options = "--mesh fsdp=3 --overwrite --exclude optim.state.lm_head.weight";
        if name == "verl_fsdp1" {
            let refused = expect(2, "reshard", &[&source, &made], options);
            assert_contains(&refused.stderr, &["only one of them has state", "leave out the parameters together"]);
        } else {
            succeed("reshard", &[&source, &made], options);
        }
    }
}

/// Without the model's DTensors, only the name `fsdp` shows which mesh dim shards the flat parameters.
#[test]
fn optimizer_without_its_model_needs_a_mesh_with_known_dims() {
    let folder = tempfile::tempdir().unwrap();
    let (source, made) = (fixture("trainers/verl_fsdp1"), folder.path().join("made"));
    let optimizer = "--overwrite --series optim";
    let refused = expect(2, "reshard", &[&source, &made], &format!("{optimizer} --mesh replicate=2,shard=2"));
    assert_contains(&refused.stderr, &["without the model", "--mesh ddp=2,fsdp=2"]);
    succeed("reshard", &[&source, &made], &format!("{optimizer} --mesh ddp=2,fsdp=2"));
    succeed("reshard", &[&source, &made], &format!("{optimizer} --mesh shard=4"));
    succeed("reshard", &[&source, &made], "--overwrite --series model,optim --mesh ddp=2,fsdp=2");
}

/// A job of FSDP1 with one rank loads plain tensors.
#[test]
fn notes_about_dtensors_are_left_out_if_dst_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let (source, made) = (fixture("trainers/verl_fsdp1"), folder.path().join("made"));
    let run = succeed("reshard", &[&source, &made], "--mesh tp=1");
    assert!(!run.stderr.contains("DTensors of DST") && !run.stderr.contains("S(0)"), "{}", run.stderr);
}

/// For a job with FSDP2, the state is in DTensors with numbers in the order of the model.
#[test]
fn optimizer_of_another_layout_has_numbers_of_parameters() {
    let folder = tempfile::tempdir().unwrap();
    for (name, _) in CHECKPOINTS {
        let source = fixture(&format!("trainers/{name}"));
        for (number, options) in
            ["--mesh fsdp=4 --tensor-class dtensor", "--mesh dp=2,tp=2 --placements S(0),R"].into_iter().enumerate()
        {
            let made = folder.path().join(format!("{name}{number}"));
            succeed("reshard", &[&source, &made], options);
            let listed = inspect(&made, "--series all");
            // The parameters of the root unit are the first, the last but one, and the last of the model.
            for (number, rows) in [("0", 41), ("1", 12), ("19", 15), ("20", 41)] {
                let moment = &listed["tensors"][format!("optim.state.{number}.exp_avg")];
                assert_eq!(moment["shape"][0], rows, "{name} {options}");
                assert!(moment["placements"].as_str().unwrap().starts_with("S(0)"), "{name} {options}: {moment}");
            }
            assert_contains(&succeed("verify", &[&source, &made], "--series all").stderr, &["the same: 85 tensors"]);
            let config = fs::read_to_string(made.join("fsdp_config.json")).unwrap();
            assert_contains(&config, &["\"FSDP_version\": 2", "\"world_size\": 4"]);
        }
        let dcp = folder.path().join(format!("{name}_dcp"));
        succeed("reshard", &[&source, &dcp], "--mesh fsdp=4 --to dcp");
        let mut found = read(&dcp);
        found.retain(|name, _| !name.starts_with("extra_state."));
        assert_same(&found, &truth(name), name);
    }
}

/// The layout in the job gives the same result as the layout that dtshard finds.
#[test]
fn given_flat_layout_is_used() {
    let folder = tempfile::tempdir().unwrap();
    for (name, _) in CHECKPOINTS {
        let source = fixture(&format!("trainers/{name}"));
        let layout = fixture(&format!("trainers/{name}.flat_layout.json"));
        let made = folder.path().join(name);
        succeed("reshard", &[&source, &made], &format!("--mesh fsdp=3 --flat-layout {}", layout.display()));
        assert_same(&unsharded(&made), &truth(name), name);
    }
}

/// Changes a flat layout.
type Change<'a> = &'a dyn Fn(&mut Json);

/// Writes a changed copy of a flat layout.
fn write_changed(layout: &Path, to: &Path, change: Change<'_>) {
    let mut json = flat::read_layout(layout);
    change(&mut json);
    fs::write(to, json.to_string()).unwrap();
}

/// Exchanges two items of a list.
fn swap(list: &mut Json, first: usize, second: usize) {
    list.as_array_mut().unwrap().swap(first, second);
}

/// The model has the names, the shapes, the units and the order of all parameters. A layout with another order would move
/// optimizer state to other parameters.
#[test]
fn given_flat_layout_that_contradicts_the_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (file, made) = (folder.path().join("layout.json"), folder.path().join("all.pt"));
    let params = |layout: &mut Json, unit: usize| layout["units"][unit]["params"].take();
    let cases: [(Change<'_>, &str); 9] = [
        (
            &|l| swap(&mut l["units"][1]["params"], 1, 2),
            "unit model.layers.0: the flat layout differs between LAYOUT and MODEL: expected \
             model.layers.0.self_attn.v_proj.weight before model.layers.0.self_attn.k_proj.weight, found \
             model.layers.0.self_attn.k_proj.weight before model.layers.0.self_attn.v_proj.weight",
        ),
        (
            &|l| l["units"][0]["params"].as_array_mut().unwrap().reverse(),
            "the root unit: the flat layout differs between LAYOUT and MODEL: expected lm_head.weight before \
             model.norm.weight",
        ),
        (
            &|l| {
                let (first, second) = (params(l, 1).to_string(), params(l, 2).to_string());
                let other = |text: &str, from, to| serde_json::from_str::<Json>(&text.replace(from, to)).unwrap();
                l["units"][1]["params"] = other(&second, "layers.1.self_attn.q_proj", "layers.0.self_attn.x_proj");
                l["units"][1]["params"] = other(&l["units"][1]["params"].to_string(), "layers.1", "layers.0");
                l["units"][2]["params"] = other(&first, "layers.0", "layers.1");
            },
            "model.layers.0.self_attn.x_proj.weight: the flat layout differs between LAYOUT and MODEL: expected a \
             parameter of shape [12, 15], found no parameter of this name",
        ),
        (
            &|l| {
                l["units"][1]["params"][0]["fqn"] = json!("model.layers.0.base.model.layers.0.self_attn.q_proj.weight");
            },
            "found no parameter of this name, but `model.layers.0.self_attn.q_proj.weight`",
        ),
        (
            &|l| l["units"][0]["params"][0]["shape"] = json!([15, 41]),
            "model.embed_tokens.weight: the flat layout differs between LAYOUT and MODEL: expected shape [15, 41], \
             found shape [41, 15]",
        ),
        (
            &|l| drop(l["units"][1]["params"].as_array_mut().unwrap().pop()),
            "model.layers.0.post_attention_layernorm.weight: the flat layout differs between LAYOUT and MODEL: \
             expected no parameter of this name, found a parameter of shape [15]",
        ),
        (
            &|l| {
                let moved = l["units"][2]["params"].as_array_mut().unwrap().pop().unwrap();
                l["units"][0]["params"].as_array_mut().unwrap().insert(1, moved);
            },
            "model.layers.1.post_attention_layernorm.weight: the flat layout differs between LAYOUT and MODEL: \
             expected a parameter of the root unit, found a parameter of unit model.layers.1",
        ),
        (
            &|l| {
                // The first name of a tied parameter gives its position.
                let shared = json!({"fqn": "model.embed_tokens.weight", "shared_with": "lm_head.weight"});
                l["units"][0]["params"][0] = shared;
            },
            "the root unit: the flat layout differs between LAYOUT and MODEL: expected model.norm.weight before \
             lm_head.weight, found lm_head.weight before model.norm.weight",
        ),
        (
            &|l| {
                let optimizer = &mut l["optimizer"][0];
                let last = optimizer.as_array().unwrap().len() - 1;
                // The weights of the two norms of a layer, or the flat parameters of the two layers.
                let pair = if last == 2 { [1, 2] } else { [8, 9] };
                swap(optimizer, pair[0], pair[1]);
            },
            "`optimizer`: the flat layout differs between LAYOUT and MODEL: expected model.layers.",
        ),
    ];
    for (name, _) in CHECKPOINTS {
        let source = fixture(&format!("trainers/{name}"));
        let model = source.join("global_step_2/actor/model_world_size_2_rank_0.pt").display().to_string();
        for (change, expected) in cases {
            write_changed(&fixture(&format!("trainers/{name}.flat_layout.json")), &file, change);
            let given = format!("--flat-layout {}", file.display());
            let expected = expected.replace("LAYOUT", &file.display().to_string()).replace("MODEL", &model);
            let refused = expect(2, "unshard", &[&source, &made], &format!("--series model,optim {given}")).stderr;
            assert_contains(&refused, &[&expected, "the flat layout"]);
            assert!(!refused.contains("damaged") && !made.exists(), "{refused}");
            let finding = expect(1, "verify", &[&source], &given).stdout;
            assert_contains(&finding, &["the flat layout differs between"]);
        }
    }
}

/// A name in `optimizer` that no parameter has is an error, and so is a list of another length. The hints are about the
/// layout, not about the files of the checkpoint.
#[test]
fn optimizer_of_the_layout_that_does_not_match_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (file, made) = (folder.path().join("layout.json"), folder.path().join("all.pt"));
    let cases: [(Change<'_>, &str); 4] = [
        (
            &|l| l["optimizer"][0][0] = json!("nix"),
            "nix: the optimizer lists this name, but the flat layout has no such",
        ),
        (
            &|l| drop(l["optimizer"][0].as_array_mut().unwrap().pop()),
            "the flat layout has parameter groups of the sizes [",
        ),
        (&|l| l["optimizer"][0][0] = l["optimizer"][0][1].clone(), "optimizer: expected each name once"),
        (&|l| swap(&mut l["optimizer"][0], 0, 1), "expected state of "),
    ];
    for (name, _) in CHECKPOINTS {
        let source = fixture(&format!("trainers/{name}"));
        for (change, expected) in cases {
            write_changed(&fixture(&format!("trainers/{name}.flat_layout.json")), &file, change);
            let given = format!("--series model,optim --flat-layout {}", file.display());
            let refused = expect(2, "unshard", &[&source, &made], &given).stderr;
            assert_contains(&refused, &[expected, "layout.json", "flat layout"]);
            assert!(!refused.contains("was not completely written") && !refused.contains("--like"), "{refused}");
        }
    }
}

/// These layouts differ from the layout of the job, but assign the same bytes to each parameter.
#[test]
fn given_flat_layout_may_differ_where_the_model_has_the_value() {
    let folder = tempfile::tempdir().unwrap();
    let (file, made) = (folder.path().join("layout.json"), folder.path().join("made"));
    let changes: [Change<'_>; 5] = [
        &|l| drop(l.as_object_mut().unwrap().remove("optimizer")),
        &|l| {
            l["units"].as_array_mut().unwrap().reverse();
            l.as_object_mut().unwrap().remove("optimizer");
        },
        &|l| l["world_size"] = json!(8),
        &|l| {
            l["use_orig_params"] = json!(!l["use_orig_params"].as_bool().unwrap());
            for unit in l["units"].as_array_mut().unwrap() {
                unit["align_numel"] = json!(8);
            }
        },
        // A job may leave out a further name of a tied parameter.
        &|l| {
            let shared = json!({"fqn": "model.other.weight", "shared_with": "model.norm.weight"});
            l["units"][0]["params"].as_array_mut().unwrap().push(shared);
        },
    ];
    for (name, _) in CHECKPOINTS {
        let source = fixture(&format!("trainers/{name}"));
        for (number, change) in changes.into_iter().enumerate() {
            write_changed(&fixture(&format!("trainers/{name}.flat_layout.json")), &file, change);
            let made = made.join(format!("{name}{number}"));
            let run = succeed("reshard", &[&source, &made], &format!("--mesh fsdp=3 --flat-layout {}", file.display()));
            assert!(!run.stderr.contains("assumed"), "{}", run.stderr);
            assert_same(&unsharded(&made), &truth(name), name);
        }
    }
}

/// A layout is compared with a model of `NO_SHARD`, too, whose tensors are plain.
#[test]
fn layout_that_contradicts_an_unsharded_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (file, made) = (folder.path().join("layout.json"), folder.path().join("all.pt"));
    let source = fixture("flat_none/flat");
    let cases: [(Change<'_>, &str); 3] = [
        (
            &|l| swap(&mut l["units"][1]["params"], 3, 4),
            "expected layers.0.norm.bias before layers.0.norm.weight, found layers.0.norm.weight before layers.0.norm.bias",
        ),
        (&|l| l["units"][0]["params"][2]["fqn"] = json!("tok.weight"), "tok.weight: the flat layout differs between"),
        (&|l| swap(&mut l["optimizer"][0], 1, 2), "expected layers.1._flat_param before layers.0._flat_param"),
    ];
    for (change, expected) in cases {
        write_changed(&flat::layout_file("flat_none", "flat"), &file, change);
        let given = format!("--series all --flat-layout {}", file.display());
        assert_contains(&expect(2, "unshard", &[&source, &made], &given).stderr, &[expected]);
    }
}

/// The numbers of several parameter groups do not follow the order of the model, so dtshard needs the names.
#[test]
fn parameter_groups_beside_a_sharded_model_need_a_layout() {
    let folder = tempfile::tempdir().unwrap();
    let (source, made) = (folder.path().join("source"), folder.path().join("made"));
    fs::create_dir(&source).unwrap();
    for rank in 0..2 {
        for (series, from) in [("model", "sharded"), ("optim", "groups")] {
            let file = format!("{series}_world_size_2_rank_{rank}.pt");
            fs::copy(fixture(&format!("flat2/{from}/{file}")), source.join(&file)).unwrap();
        }
    }
    let refused = expect(2, "reshard", &[&source, &made], "--mesh fsdp=3").stderr;
    assert_contains(&refused, &["the parameters of its 2 groups are unknown", "--flat-layout FILE with `optimizer`"]);
    let layout = flat::layout_file("flat2", "groups");
    succeed("reshard", &[&source, &made], &format!("--mesh fsdp=3 --flat-layout {}", layout.display()));
}

/// State of other lengths, and a rank without an optimizer file, are refused. The model can still be read.
#[test]
fn state_that_does_not_match_the_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (actor, made) = (folder.path().join("actor"), folder.path().join("made"));
    copy_all(&fixture("trainers/verl_fsdp1_orig/global_step_2/actor"), &actor);
    let [first, second] = [0, 1].map(|rank| actor.join(format!("optim_world_size_2_rank_{rank}.pt")));
    // The file of rank 0 has the parts of rank 1.
    fs::copy(&second, &first).unwrap();
    let refused = expect(2, "reshard", &[&actor, &made], "--mesh fsdp=3").stderr;
    assert_contains(
        &refused,
        &[
            "the optimizer has 21 parameters, and its state does not match the 3 units with 21 parameters",
            "--flat-layout",
        ],
    );
    assert_contains(&expect(2, "verify", &[&actor], "").stderr, &["its state does not match the 3 units"]);
    let listed = succeed("inspect", &[&actor], "--series all").stderr;
    assert_contains(&listed, &["its state does not match the 3 units", "its state is left out"]);
    fs::remove_file(&second).unwrap();
    let refused = expect(2, "reshard", &[&actor, &made], "--mesh fsdp=3").stderr;
    assert_contains(&refused, &["rank 1"]);
    assert!(!refused.contains("--allow-missing"), "{refused}");
    assert!(!made.exists());
    succeed("consolidate", &[&actor, &made], "");
}

/// If `_metadata` lists no wrapped modules, or two parameters have one name, dtshard does not find the flat layout.
#[test]
fn damaged_model_is_refused() {
    for name in ["verl_fsdp1", "verl_fsdp1_orig"] {
        for (from, to) in
            [("_fsdp_wrapped_module", "_else_wrapped_module"), ("q_proj", "k_proj"), ("norm.weight", "norm.height")]
        {
            let folder = tempfile::tempdir().unwrap();
            let (actor, made) = (folder.path().join("actor"), folder.path().join("made"));
            copy_all(&fixture(&format!("trainers/{name}/global_step_2/actor")), &actor);
            for rank in 0..2 {
                let file = actor.join(format!("model_world_size_2_rank_{rank}.pt"));
                edit_pickle(&file, |pickle| replace(pickle, from.as_bytes(), to.as_bytes()));
            }
            let run = dtshard(&[&"reshard", &actor, &made, &"--mesh", &"fsdp=3", &"--no-sync"]);
            // A renamed parameter is no damage: the run succeeds and keeps the new name.
            let is_renamed = to == "norm.height";
            assert_eq!(run.code, Some(if is_renamed { 0 } else { 2 }), "{name} {to}: {run:?}");
            assert_eq!(made.exists(), is_renamed, "{name} {to}");
            if from == "_fsdp_wrapped_module" {
                run.assert_refused(&["does not record which modules FSDP1 wraps", "--flat-layout"]);
                let layout = fixture(&format!("trainers/{name}.flat_layout.json"));
                let given = format!("--flat-layout {}", layout.display());
                succeed("reshard", &[&actor, &made], &format!("--mesh fsdp=3 {given}"));
                let all = folder.path().join("all.pt");
                succeed("unshard", &[&made, &all], &format!("--series model,optim {given}"));
                assert_same(&read(&all), &truth(name), name);
            }
        }
    }
}
