//! Tests of folders of real jobs: checkpoints in subfolders, several checkpoints in one folder, other files beside
//! them, other file names, and missing files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{assert_same, below, copy_folder, expect, fixture, inspect, read, succeed};
use dtshard::catalog::{Catalog, state_dict};
use dtshard::format::{Checkpoint, Format, PartContent, RankNamePattern, ReadOptions, SeriesChoice, Want};
use dtshard::text::spell_options;
use tempfile::TempDir;

fn temporary_folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// Copies the folder of a fixture with its subfolders, and returns the path of the copy.
fn copy_fixture(case: &str, root: &TempDir, at: &str) -> PathBuf {
    let target = root.path().join(at);
    copy_tree(&fixture(case), &target);
    target
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_tree(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

fn write_text(root: &TempDir, name: &str, content: &str) {
    let path = root.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn open(path: &Path, options: &ReadOptions) -> Checkpoint {
    Checkpoint::open(path, options).unwrap_or_else(|error| panic!("{error}\n{:?}", error.hint()))
}

/// Returns the names and the kinds of the leaves that cannot be read.
fn unreadable(catalog: &Catalog) -> Vec<String> {
    let kinds = catalog.tensors.iter().map(|entry| Some(format!("{}: {}", entry.fqn, entry.unreadable.as_ref()?.kind)));
    kinds.flatten().collect()
}

fn assert_refused(path: &Path, options: &ReadOptions, words: &[&str]) {
    let error = Checkpoint::open(path, options).expect_err("an error");
    let text = format!("{error}\n{}", error.hint().unwrap_or_default());
    let text = spell_options(&text, |name| format!("--{}", name.replace('_', "-")));
    for word in words {
        assert!(text.contains(word), "no `{word}` in: {text}");
    }
}

fn model_only() -> ReadOptions {
    ReadOptions { want: Want::Model, series: SeriesChoice::Model, ..ReadOptions::default() }
}

// ------------------------------------------------------------------------------------------------- parent folders

#[test]
fn checkpoint_is_found_in_subfolders() {
    for (at, pointer) in [
        ("global_step_10", None),
        ("global_step_10/actor", None),
        ("step-1000", None),
        ("step_1000", None),
        ("iter_0000100", None),
        ("checkpoint-500", None),
        ("runs", Some(("latest", "runs"))),
        ("global_step_7/actor", Some(("latest_checkpointed_iteration.txt", "7\n"))),
        ("iter_0000100", Some(("latest_checkpointed_iteration.txt", "100"))),
        ("step-12", Some(("latest", "12"))),
    ] {
        let root = temporary_folder();
        let expected = copy_fixture("fsdp3/dcp", &root, at);
        if let Some((name, text)) = pointer {
            write_text(&root, name, text);
            // A pointer file such as `latest` names the checkpoint to read, so older checkpoints are skipped.
            copy_fixture("fsdp3/dcp", &root, "global_step_3");
            copy_fixture("fsdp3/dcp", &root, "step-3");
        }
        for want in [Want::Model, Want::All] {
            let found = open(root.path(), &ReadOptions { want, ..ReadOptions::default() });
            assert_eq!(found.root, expected, "{at}");
            assert_eq!(found.resolved_from.as_deref(), Some(root.path()));
        }
        assert!(open(&expected, &ReadOptions::default()).resolved_from.is_none());
    }
}

#[test]
fn every_verb_accepts_a_parent_folder_and_names_the_checkpoint() {
    let root = temporary_folder();
    let actor = copy_fixture("llama_tiny/ranks", &root, "global_step_10/actor");
    write_text(&root, "latest_checkpointed_iteration.txt", "10");
    // verl saves the state of the data loader in this folder.
    fs::copy(fixture("torch_file/objects.pt"), root.path().join("global_step_10/data.pt")).unwrap();
    let beside = temporary_folder();
    let out = beside.path().join("out");
    for (verb, paths) in [
        ("inspect", vec![root.path()]),
        ("verify", vec![root.path()]),
        ("verify", vec![actor.as_path(), root.path()]),
        ("consolidate", vec![root.path(), &out]),
    ] {
        let run = succeed(verb, &paths, "");
        assert!(
            run.stderr.contains(&format!("note: reading {}, found in ", actor.display())),
            "{verb}: {}",
            run.stderr
        );
    }
    assert!(out.join("config.json").is_file(), "the assets of the folder that was taken");
    assert_same(&read(&out), &read_model(&actor), "consolidated");
    let quiet = succeed("inspect", &[root.path()], "--quiet");
    assert!(quiet.stderr.is_empty());
}

fn read_model(actor: &Path) -> crate::common::Tensors {
    below("model.", &read(actor))
}

#[test]
fn several_candidates_are_refused_with_a_list() {
    let root = temporary_folder();
    for name in ["global_step_10", "global_step_9"] {
        copy_fixture("fsdp3/dcp", &root, name);
    }
    let words = [
        "contains several checkpoints: global_step_9, global_step_10",
        "give one of these checkpoints as SRC",
        "global_step_10",
    ];
    assert_refused(root.path(), &ReadOptions::default(), &words);
    expect(2, "inspect", &[root.path()], "");
    expect(2, "verify", &[root.path()], "");
    write_text(&root, "latest", "global_step_11");
    assert_refused(
        root.path(),
        &ReadOptions::default(),
        &["the file `latest` names the folder `global_step_11`, which does not exist", "give an existing folder"],
    );

    let root = temporary_folder();
    copy_fixture("fsdp3/dcp", &root, "global_step_10/actor");
    copy_fixture("fsdp3/dcp", &root, "global_step_10/critic");
    for options in [model_only(), ReadOptions::default()] {
        assert_refused(
            root.path(),
            &options,
            &["global_step_10 contains several checkpoints: actor, critic", "global_step_10/actor"],
        );
    }
    let root = temporary_folder();
    for name in ["pytorch_model_fsdp_0", "pytorch_model_fsdp_1"] {
        copy_fixture("fsdp3/dcp", &root, name);
    }
    assert_refused(root.path(), &ReadOptions::default(), &["pytorch_model_fsdp_0, pytorch_model_fsdp_1"]);
}

#[test]
fn latest_file_that_leads_outside_is_refused() {
    for text in ["../elsewhere", "/etc", "", "a\nb", "..", "a/../../b"] {
        let root = temporary_folder();
        copy_fixture("fsdp3/dcp", &root, "elsewhere");
        write_text(&root, "run/latest", text);
        assert_refused(
            &root.path().join("run"),
            &ReadOptions::default(),
            &["latest: content", "the path of a folder below the folder of this file"],
        );
    }
    let root = temporary_folder();
    write_text(&root, "latest", "global_step_5");
    assert_refused(root.path(), &ReadOptions::default(), &["the folder that the file names", "missing: global_step_5"]);
    // A link to its own parent folder does not cause an endless search.
    let root = temporary_folder();
    std::os::unix::fs::symlink(".", root.path().join("latest")).unwrap();
    assert_refused(root.path(), &ReadOptions::default(), &["folders are nested too deeply"]);
}

#[test]
fn link_called_latest_is_followed() {
    let root = temporary_folder();
    copy_fixture("fsdp3/dcp", &root, "step-1");
    copy_fixture("fsdp3/dcp", &root, "step-2");
    std::os::unix::fs::symlink("step-2", root.path().join("latest")).unwrap();
    assert_eq!(open(root.path(), &ReadOptions::default()).root, root.path().join("latest"));
}

#[test]
fn megatron_folders_are_refused_by_name() {
    for iteration in ["100", "release"] {
        let root = temporary_folder();
        let name = if iteration == "release" { "release" } else { "iter_0000100" };
        write_text(&root, "latest_checkpointed_iteration.txt", iteration);
        write_text(&root, &format!("{name}/mp_rank_00/model_optim_rng.pt"), "x");
        assert_refused(root.path(), &ReadOptions::default(), &[name, "Megatron-LM", "torch_dist"]);
    }
    let root = temporary_folder();
    let inside = copy_fixture("fsdp3/dcp", &root, "iter_0000100");
    write_text(&root, "latest_checkpointed_iteration.txt", "100");
    write_text(
        &root,
        "iter_0000100/metadata.json",
        r#"{"sharded_backend": "torch_dist", "sharded_backend_version": 1}"#,
    );
    assert_refused(root.path(), &ReadOptions::default(), &["Megatron-LM checkpoint (torch_dist)", "--from dcp"]);
    let forced = open(root.path(), &ReadOptions { from: Some(Format::Dcp), ..ReadOptions::default() });
    assert_eq!(forced.root, inside);
    succeed("verify", &[root.path()], "--from dcp");
    // A metadata.json of another program is ignored.
    write_text(&root, "iter_0000100/metadata.json", r#"{"step": 100}"#);
    open(root.path(), &ReadOptions::default());
}

// ------------------------------------------------------------------------------------------------------ accelerate

/// Writes the files that accelerate and the Hugging Face Trainer write below the folder of a run.
fn accelerate() -> TempDir {
    let root = temporary_folder();
    for name in ["pytorch_model_fsdp_0", "optimizer_0"] {
        copy_fixture(&format!("accelerate/{name}"), &root, &format!("checkpoint-500/{name}"));
    }
    for name in ["scheduler.bin", "sampler.bin", "rng_state_0.pth"] {
        fs::copy(fixture("accelerate/scheduler.bin"), root.path().join("checkpoint-500").join(name)).unwrap();
    }
    write_text(&root, "checkpoint-500/random_states_0.pkl", "x");
    root
}

#[test]
fn sibling_model_and_optimizer_are_one_checkpoint() {
    let root = accelerate();
    let checkpoint = root.path().join("checkpoint-500");
    let found = open(root.path(), &model_only());
    assert_eq!(found.root, checkpoint.join("pytorch_model_fsdp_0"));
    assert_eq!(found.parts.len(), 1);
    assert_eq!(found.parts[0].content, PartContent::Whole);
    assert!(found.beside.is_empty());

    let found = open(root.path(), &ReadOptions::default());
    assert_eq!((found.root.as_path(), found.format), (checkpoint.as_path(), Format::Dcp));
    let parts: Vec<_> = found.parts.iter().map(|part| (part.folder.to_str().unwrap(), &part.content)).collect();
    let keys = |key: &str| PartContent::Keys(vec![key.into()]);
    assert_eq!(parts, [("pytorch_model_fsdp_0", &keys("model")), ("optimizer_0", &keys("optimizer"))]);
    assert_eq!(
        found.beside,
        ["random_states_0.pkl", "rng_state_0.pth", "sampler.bin", "scheduler.bin"].map(PathBuf::from)
    );
    let expected = crate::common::Truth::load("accelerate/truth").tensors;
    assert_same(&read(root.path()), &expected, "both folders");
    assert_eq!(state_dict::model(&found.catalog.state).root.to_string(), "model");

    let targets = temporary_folder();
    let out = targets.path().join("out");
    succeed("consolidate", &[root.path(), &out], "");
    assert_same(&read(&out), &below("model.", &expected), "consolidated");
    succeed("verify", &[root.path()], "");
    let out = targets.path().join("resharded");
    succeed("reshard", &[root.path(), &out], "--mesh dp=4");
    assert_same(&read(&out), &expected, "resharded");
}

#[test]
fn sibling_folders_with_equal_keys_become_subtrees() {
    let root = temporary_folder();
    copy_fixture("fsdp3/dcp", &root, "pytorch_model_fsdp");
    copy_fixture("fsdp3/dcp", &root, "optimizer");
    let found = open(root.path(), &ReadOptions::default());
    assert!(found.resolved_from.is_none());
    assert_eq!(found.parts[1].content, PartContent::Subtree("optimizer".into()));
    let all = read(root.path());
    assert_same(&below("optimizer.", &all), &read(&fixture("fsdp3/dcp")), "one of two");
}

// ------------------------------------------------------------------------------------------------ parts and others

#[test]
fn files_beside_a_checkpoint_are_listed() {
    let root = temporary_folder();
    let source = copy_fixture("llama_tiny/ranks", &root, "actor");
    let found = open(&source, &ReadOptions::default());
    assert_eq!(found.beside, ["fsdp_config.json", "huggingface/config.json"].map(PathBuf::from));
    let series: Vec<&PartContent> = found.parts.iter().map(|part| &part.content).collect();
    assert_eq!(series, [&PartContent::Subtree("model".into()), &PartContent::Subtree("extra_state".into())]);
    assert_eq!(found.parts[0].name_pattern.as_ref().unwrap().render(3, 16), "model_world_size_16_rank_3.pt");
    assert_eq!(RankNamePattern::new_series("optim").render(0, 2), "optim_world_size_2_rank_0.pt");
    // Files of a series that is not selected still belong to the checkpoint.
    let only = ReadOptions { series: SeriesChoice::Named(vec!["model".into()]), ..ReadOptions::default() };
    let found = open(&source, &only);
    assert_eq!(found.beside.len(), 2);
    assert_eq!(found.parts[0].content, PartContent::Whole);
    let found = open(&fixture("safetensors/sharded"), &ReadOptions::default());
    assert_eq!(found.beside, [PathBuf::from("config.json")]);
    let found = open(&copy_fixture("fsdp3/dcp", &root, "d"), &ReadOptions::default());
    assert!(found.beside.is_empty(), "{:?}", found.beside);
}

/// The folder is the last folder of the Trainer. It has a model, its arguments, and checkpoints in subfolders.
#[test]
fn model_beside_other_torch_files_is_read() {
    let root = temporary_folder();
    copy_folder(&fixture("safetensors/sharded"), root.path());
    for name in ["training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"] {
        fs::copy(fixture("accelerate/scheduler.bin"), root.path().join(name)).unwrap();
    }
    copy_fixture("accelerate/pytorch_model_fsdp_0", &root, "checkpoint-500/pytorch_model_fsdp_0");
    let found = open(root.path(), &model_only());
    assert_eq!((found.format, found.root.as_path()), (Format::Safetensors, root.path()));
    // If such a file is alone in a folder, it is the checkpoint.
    let root = temporary_folder();
    fs::copy(fixture("torch_file/trainer.pt"), root.path().join("optimizer.pt")).unwrap();
    assert_eq!(open(root.path(), &ReadOptions::default()).format, Format::Torch);
    fs::copy(fixture("torch_file/trainer.pt"), root.path().join("scheduler.pt")).unwrap();
    assert_refused(
        root.path(),
        &ReadOptions::default(),
        &["optimizer.pt, scheduler.pt are separate torch checkpoints", "give one of these files as SRC"],
    );
}

// ----------------------------------------------------------------------------------------------- names of rank files

/// Returns a folder with the model files of `fsdp4` under other names.
fn renamed(name: impl Fn(u32) -> String) -> TempDir {
    let root = temporary_folder();
    for rank in 0..4 {
        let from = fixture(&format!("fsdp4/ranks/model_world_size_4_rank_{rank}.pt"));
        fs::copy(from, root.path().join(name(rank))).unwrap();
    }
    root
}

#[test]
fn rank_files_are_found_under_every_usual_name() {
    let whole = read(renamed(|rank| format!("model_world_size_4_rank_{rank}.pt")).path());
    for (name, rendered) in [
        ("model_rank_R.pt", "model_rank_11.pt"),
        ("rankR.pt", "rank11.pt"),
        ("rank-0000R.pth", "rank-00011.pth"),
        ("model.rankR.of.4.pt", "model.rank11.of.16.pt"),
        ("shard_R_of_4.pt", "shard_11_of_16.pt"),
        ("shardR.bin", "shard11.bin"),
        ("model-0000R-of-00004.pt", "model-00011-of-00016.pt"),
    ] {
        let root = renamed(|rank| name.replace('R', &rank.to_string()));
        let found = open(root.path(), &ReadOptions::default());
        assert_eq!(found.format, Format::TorchRanks, "{name}");
        assert_eq!(found.parts[0].name_pattern.as_ref().unwrap().render(11, 16), rendered);
        assert_same(&read(root.path()), &whole, name);
        succeed("verify", &[root.path()], "");
    }
}

#[test]
fn ranks_that_count_from_one_are_refused() {
    let root = renamed(|rank| format!("model_rank_{}_of_4.pt", rank + 1));
    let words = ["its files are numbered from 1 to 4, but ranks are numbered from 0", "rename the files"];
    assert_refused(root.path(), &ReadOptions::default(), &words);
    // The names look valid, but the ranks recorded inside the files contradict them.
    let root = renamed(|rank| format!("model_rank_{}.pt", (rank + 1) % 4));
    assert_refused(root.path(), &ReadOptions::default(), &["the file of rank", "the file name has the wrong rank"]);
}

#[test]
fn numbered_files_of_whole_tensors_are_read_as_one_set() {
    let root = temporary_folder();
    let truth = crate::common::Truth::load("torch_file/model.truth");
    for (number, file) in [(1, "torch_file/model.pt"), (2, "torch_file/trainer.pt")] {
        fs::copy(fixture(file), root.path().join(format!("pytorch_model-0000{number}-of-00002.bin"))).unwrap();
    }
    let found = open(root.path(), &ReadOptions::default());
    assert_eq!(found.format, Format::Torch);
    let all = read(root.path());
    let own = all.iter().filter(|(name, _)| truth.tensors.contains_key(*name));
    assert_same(&own.map(|(name, tensor)| (name.clone(), tensor.clone())).collect(), &truth.tensors, "the first file");
    assert!(all.len() > truth.tensors.len());
    fs::remove_file(root.path().join("pytorch_model-00001-of-00002.bin")).unwrap();
    assert_refused(
        root.path(),
        &ReadOptions::default(),
        &["2 files (the total in the file names)", "missing: pytorch_model-00001-of-00002.bin"],
    );
}

#[test]
fn files_of_two_world_sizes_are_refused() {
    let root = temporary_folder();
    let source = copy_fixture("fsdp3/ranks", &root, "ranks");
    copy_folder(&fixture("fsdp4/ranks"), &source);
    let words = ["one world size", "files of 3 and 4", "into another folder", "--series cannot"];
    assert_refused(&source, &ReadOptions::default(), &words);
    // Series that are not selected may have missing files.
    for rank in 0..4 {
        fs::remove_file(source.join(format!("model_world_size_4_rank_{rank}.pt"))).unwrap();
    }
    let found = open(&source, &model_only());
    assert_eq!(found.series, ["model"]);
}

// ----------------------------------------------------------------------------------------------------- missing ranks

#[test]
fn missing_ranks_are_an_error_unless_replicas_cover_them() {
    let allow = ReadOptions { allow_missing: true, ..model_only() };
    // The job uses HSDP on (dp_replicate=2, dp_shard=2).
    let root = temporary_folder();
    let source = copy_fixture("hsdp/ranks", &root, "ranks");
    let whole = read_with(&source, &model_only());
    for rank in [0, 3] {
        fs::remove_file(source.join(format!("model_world_size_4_rank_{rank}.pt"))).unwrap();
    }
    let words = [
        "missing: ranks 0, 3",
        "use --allow-missing to continue without these files: replicas on the other ranks cover every tensor",
    ];
    assert_refused(&source, &model_only(), &words);
    assert_eq!(read_with(&source, &allow), whole);
    assert!(open(&source, &allow).catalog.warnings[0].contains("read without ranks 0, 3"));

    // Ranks 1 and 3 hold the same shards, and so do ranks 0 and 2.
    fs::remove_file(source.join("model_world_size_4_rank_2.pt")).unwrap();
    let error = Checkpoint::open(&source, &model_only()).unwrap_err();
    assert!(!error.hint().unwrap().contains("--allow-missing"), "{error}");
    let rest = open(&source, &allow);
    let gap = rest.catalog.tensors.iter().find_map(|entry| entry.tilings().err()).expect("a hole");
    assert!(gap.to_string().contains("gap"), "{gap}");

    // If the ranks have different tensor names, the present ranks do not show which tensors the missing rank has.
    let root = temporary_folder();
    let source = copy_fixture("conflict/missing", &root, "ranks");
    let third = source.join("model_world_size_3_rank_0.pt");
    fs::rename(source.join("model_world_size_2_rank_0.pt"), &third).unwrap();
    fs::rename(source.join("model_world_size_2_rank_1.pt"), source.join("model_world_size_3_rank_1.pt")).unwrap();
    let error = Checkpoint::open(&source, &model_only()).unwrap_err();
    assert!(error.to_string().contains("missing: rank 2"), "{error}");
    assert!(!error.hint().unwrap().contains("--allow-missing"), "{error}");
    fs::copy(third, source.join("model_world_size_3_rank_1.pt")).unwrap();
    assert_refused(&source, &model_only(), &["missing: rank 2", "--allow-missing"]);
}

fn read_with(path: &Path, options: &ReadOptions) -> crate::common::Tensors {
    crate::common::tensors_of(&open(path, options))
}

#[test]
fn missing_rank_0_is_covered_by_replicas() {
    let allow = ReadOptions { allow_missing: true, ..ReadOptions::default() };
    let root = temporary_folder();
    for rank in 1..4 {
        let from = fixture(&format!("hsdp/ranks/model_world_size_4_rank_{rank}.pt"));
        fs::copy(from, root.path().join(format!("model_rank_{rank}.pt"))).unwrap();
    }
    assert_refused(
        root.path(),
        &ReadOptions::default(),
        &["are numbered from 1 to 3", "or add the missing file of rank 0"],
    );
    assert_same(&read_with(root.path(), &allow), &read_with(&fixture("hsdp/ranks"), &model_only()), "without rank 0");
}

// ------------------------------------------------------------------------------------------------------------ dcp-hf

#[test]
fn shards_of_dcps_hugging_face_storage_are_read() {
    let truth = crate::common::Truth::load("dcp_hf/truth").tensors;
    for name in ["shards", "mapped"] {
        let source = fixture("dcp_hf").join(name);
        let found = open(&source, &ReadOptions::default());
        assert_eq!(found.format, Format::DcpHf);
        assert!(found.catalog.warnings[0].contains("missing last shard"), "{:?}", found.catalog.warnings);
        assert_same(&read(&source), &truth, name);
        succeed("verify", &[&source], "");
        let root = temporary_folder();
        let out = root.path().join("out");
        succeed("consolidate", &[&source, &out], "--verify");
        assert_same(&crate::common::read_safetensors(&out), &truth, "consolidated");
        succeed("verify", &[&source, &out], "");
    }
    let document = inspect(&fixture("dcp_hf/shards"), "");
    assert_eq!(document["format"], "dcp-hf");
    let chunk = &document["tensors"]["model.embed_tokens.weight"]["chunks"][1];
    assert_eq!((&chunk["offsets"], &chunk["rank"]), (&serde_json::json!([4, 0]), &serde_json::json!(1)));
    let one = fixture("dcp_hf/shards/shard-00002-model-00001-of-00001.safetensors");
    let run = succeed("inspect", &[&one], "");
    assert!(run.stderr.contains("is only shard 2 of a checkpoint in DCP's Hugging Face storage"), "{}", run.stderr);
    let run = expect(2, "verify", &[&one], "");
    assert!(run.stderr.contains("give the folder"), "{}", run.stderr);
}

/// If files record the offsets of their shards, they may have any names. Without recorded offsets, one tensor name in
/// two files is an error.
#[test]
fn dcp_hf_shards_are_read_under_other_names() {
    let root = temporary_folder();
    for shard in 1..=3 {
        let from = fixture(&format!("dcp_hf/shards/shard-0000{shard}-model-00001-of-00001.safetensors"));
        fs::copy(from, root.path().join(format!("part{shard}.safetensors"))).unwrap();
    }
    let found = open(root.path(), &ReadOptions::default());
    assert_eq!(found.format, Format::Safetensors);
    assert!(found.catalog.warnings[0].contains("missing last shard"), "{:?}", found.catalog.warnings);
    assert_same(&read(root.path()), &crate::common::Truth::load("dcp_hf/truth").tensors, "renamed");
    let root = temporary_folder();
    for name in ["a.safetensors", "b.safetensors"] {
        fs::copy(fixture("safetensors/single/model.safetensors"), root.path().join(name)).unwrap();
    }
    assert_refused(
        root.path(),
        &ReadOptions::default(),
        &["a tensor in one file only", "found a tensor of this name also in "],
    );
}

#[test]
fn missing_dcp_hf_shards_are_refused() {
    let root = temporary_folder();
    let source = copy_fixture("dcp_hf/shards", &root, "shards");
    let name = |shard: u32| source.join(format!("shard-{shard:05}-model-00001-of-00001.safetensors"));
    // This rank had nothing to write.
    fs::rename(name(3), name(5)).unwrap();
    let words = ["the files of shards 1 to 5", "missing: shards 3, 4", "--allow-missing"];
    assert_refused(&source, &ReadOptions::default(), &words);
    let allow = ReadOptions { allow_missing: true, ..ReadOptions::default() };
    let truth = crate::common::Truth::load("dcp_hf/truth").tensors;
    assert_same(&read_with(&source, &allow), &truth, "without the missing");
    // The rank of this file has data, so its file must not be missing.
    fs::remove_file(name(2)).unwrap();
    let error = Checkpoint::open(&source, &ReadOptions::default()).unwrap_err();
    assert!(!error.hint().unwrap().contains("--allow-missing"), "{error}");
    let run = expect(1, "verify", &[&source], "");
    assert!(run.stdout.contains("missing"), "{}", run.stdout);
    // A config gives the shapes, and so do the consolidated files above a folder `sharded`.
    let source = copy_fixture("dcp_hf/shards", &root, "out/sharded");
    fs::write(root.path().join("out/model.safetensors.index.json"), "{}").unwrap();
    assert!(open(&source, &ReadOptions::default()).catalog.warnings.is_empty());
    // The files are from two different saves.
    fs::copy(
        fixture("dcp_hf/mapped/shard-00001-model-00001-of-00002.safetensors"),
        source.join("shard-00001-model-00001-of-00002.safetensors"),
    )
    .unwrap();
    assert_refused(
        &source,
        &ReadOptions::default(),
        &["the number of files per rank differs", "some names say 1, others say 2"],
    );
}

#[test]
fn consolidated_files_are_read_before_their_shards() {
    let root = temporary_folder();
    copy_fixture("dcp_hf/shards", &root, "sharded");
    copy_folder(&fixture("safetensors/sharded"), root.path());
    let found = open(root.path(), &ReadOptions::default());
    assert_eq!((found.format, found.root.as_path()), (Format::Safetensors, root.path()));
    let source = copy_fixture("dcp_hf/shards", &root, "both");
    copy_folder(&fixture("safetensors/sharded"), &source);
    assert_refused(&source, &ReadOptions::default(), &["two formats: dcp-hf and safetensors", "--from dcp-hf"]);
    succeed("verify", &[&source], "--from dcp-hf");
}

// -------------------------------------------------------------------------------------------- names of tied tensors

/// Writes a safetensors file of two f32 vectors, `a` and `b`, with the given `__metadata__`.
fn tied(root: &TempDir, name: &str, metadata: &str) -> PathBuf {
    let header = format!(
        r#"{{"__metadata__":{metadata},"a{name}":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"b{name}":{{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}}}"#
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(b"0123456789ab");
    let path = root.path().join(format!("model{name}.safetensors"));
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn recorded_aliases_are_read_as_tied_names() {
    let root = temporary_folder();
    let source = tied(&root, "", r#"{"format":"pt","0.head":"b","note":"by hand","a":"b"}"#);
    let found = open(&source, &ReadOptions::default());
    assert_eq!(found.catalog.state.to_string(), "{'0.head': <tensor 1>, 'a': <tensor 0>, 'b': <tensor 1>}");
    assert_eq!(found.catalog.tensors[1].fqn.as_str(), "0.head");
    let details = &found.catalog.details;
    assert_eq!(details.len(), 2, "{details:?}");
    assert!(details.iter().any(|detail| detail.contains("note: by hand")), "{details:?}");
    succeed("verify", &[&source], "");
}

#[test]
fn index_with_aliases_is_read() {
    let root = temporary_folder();
    tied(&root, "1", r#"{"format":"pt","head":"a2"}"#);
    tied(&root, "2", r#"{"format":"pt","head":"a2"}"#);
    let index = root.path().join("model.safetensors.index.json");
    let map =
        r#""a1":"model1.safetensors","b1":"model1.safetensors","a2":"model2.safetensors","b2":"model2.safetensors""#;
    let write_text = |more: &str| fs::write(&index, format!(r#"{{"weight_map":{{{map}{more}}}}}"#)).unwrap();
    for more in ["", r#","head":"model2.safetensors""#] {
        write_text(more);
        assert_eq!(read(root.path()).len(), 5);
    }
    write_text(r#","head":"model1.safetensors""#);
    assert_refused(root.path(), &ReadOptions::default(), &["head: expected the tensor in `model1.safetensors`"]);
    write_text("");
    tied(&root, "1", r#"{"head":"a1"}"#);
    assert_refused(root.path(), &ReadOptions::default(), &["head", "another name of one tensor"]);
}

// ---------------------------------------------------------------------------------------------------- unknown objects

#[test]
fn unknown_objects_are_left_out_on_request() {
    let pickle = || {
        let mut writer = torch_pickle::pickle::Writer::new();
        writer.empty_dict().mark();
        let view = crate::corrupt::View { key: "0", numel: 2, offset: 0, sizes: &[2], strides: &[1] };
        writer.string("w");
        view.write(&mut writer);
        writer.string("scaler").global("my.trainer", "Scaler").empty_tuple().newobj();
        writer.string("list").empty_list().mark().int(1).global("my.trainer", "Other").empty_tuple().reduce().appends();
        writer.setitems();
        writer.finish()
    };
    let drop = ReadOptions { drop_unknown: true, ..ReadOptions::default() };
    let root = temporary_folder();
    let file = crate::corrupt::torch_file(pickle(), &[("0", b"12345678")]);
    write_bytes(&root, "one.pt", &file);
    let kept = open(&root.path().join("one.pt"), &ReadOptions::default()).catalog;
    assert_eq!(kept.state.to_string(), "{'w': <tensor 0>, 'scaler': <tensor 1>, 'list': [1, <tensor 2>]}");
    assert_eq!(
        unreadable(&kept),
        ["scaler: an object of `my.trainer.Scaler`", "list.1: an object of `my.trainer.Other`"]
    );
    let check = |path: &Path| {
        let found = open(path, &drop);
        assert_eq!(found.catalog.state.to_string(), "{'w': <tensor 0>, 'list': [1, None]}");
        assert_eq!(found.catalog.dropped, ["scaler (my.trainer.Scaler)", "list[1] (my.trainer.Other)"]);
    };
    check(&root.path().join("one.pt"));
    // Every rank has the unknown objects, but each object is listed once.
    for rank in 0..2 {
        write_bytes(&root, &format!("ranks/model_rank_{rank}.pt"), &file);
        write_bytes(&root, &format!("both/model_rank_{rank}.pt"), &file);
        write_bytes(&root, &format!("both/extra_rank_{rank}.pt"), &file);
    }
    check(&root.path().join("ranks"));
    let both = open(&root.path().join("both"), &drop);
    assert_eq!(both.catalog.dropped[2], "extra.scaler (my.trainer.Scaler)");
}

/// The objects in this fixture were written by PyTorch.
#[test]
fn unknown_objects_of_pytorch_are_left_out_on_request() {
    let drop = ReadOptions { drop_unknown: true, ..ReadOptions::default() };
    let truth = crate::common::Truth::load("foreign_objects/truth").tensors;
    let state = "{'model': {'w': <tensor 0>}, 'state': {'step': 3, 'pair': (1, None)}}";
    let dropped = ["own", "state.sampler", "state.pair[1]"].map(|name| format!("{name} (their_trainer.Foreign)"));
    for name in ["dcp", "foreign.pt"] {
        let source = fixture("foreign_objects").join(name);
        assert_eq!(unreadable(&open(&source, &ReadOptions::default()).catalog).len(), 3);
        let found = open(&source, &drop);
        assert_eq!(found.catalog.state.to_string(), state, "{name}");
        assert_eq!(found.catalog.dropped, dropped, "{name}");
        assert_same(&crate::common::tensors_of(&found), &truth, name);
    }
}

fn write_bytes(root: &TempDir, name: &str, bytes: &[u8]) {
    let path = root.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}
