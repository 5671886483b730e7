//! Checkpoints that the code of trainers wrote (`tests/fixtures/trainers`): `consolidate` without options gives the
//! values and names of the model.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::{Value as Json, json};

use crate::common::{
    Tensors, Truth, assert_same, below, copy_folder, expect, fixture, inspect, rank_file, read, read_safetensors,
    succeed, with_parameter_name,
};
use crate::contract::assert_contains;

/// Each checkpoint, the name of the files with its expected tensors (without suffix), and the prefix of the model's
/// names in these files.
const CHECKPOINTS: [(&str, &str, &str); 13] = [
    ("accelerate_ddp/checkpoint_0", "accelerate_ddp", ""),
    ("composer/run/ep0-ba2-rank0.pt", "composer", "state.model."),
    ("composer_ddp/run/ep0-ba2-rank0.pt", "composer_ddp", "state.model."),
    ("composer_fsdp/run/ep0-ba2", "composer_fsdp", "state.model."),
    ("fabric/out/step-30", "fabric", "model."),
    ("hf_trainer/checkpoint-2", "hf_trainer", ""),
    ("lightning_file", "lightning_file", "state_dict."),
    ("lightning_fsdp1", "lightning_fsdp1", "model."),
    ("makani", "makani", "model_state."),
    ("makani_uneven/training_checkpoints", "makani_uneven", "model_state."),
    ("st_info/ranks", "st_info", "model."),
    ("st_info_ddp/ranks", "st_info_ddp", "model."),
    ("st_info_ddp/parameters", "st_info_ddp", "model."),
];

/// Each checkpoint whose plain tensors have an attribute with their layout, the name of the files with its expected
/// tensors (without suffix), and the option that selects its series.
const WITH_ATTRIBUTES: [(&str, &str, &str); 5] = [
    ("makani", "makani", ""),
    ("makani_uneven", "makani_uneven", ""),
    ("makani_matmul", "makani_matmul", "--series ckpt_v1"),
    ("st_info/ranks", "st_info", "--series all"),
    ("st_info_ddp/ranks", "st_info_ddp", "--series all"),
];

#[test]
fn checkpoint_of_each_trainer_consolidates_to_the_model() {
    let folder = tempfile::tempdir().unwrap();
    for (checkpoint, stem, prefix) in CHECKPOINTS {
        let made = folder.path().join(checkpoint.replace(['/', '.'], "-"));
        succeed("consolidate", &[&fixture(&format!("trainers/{checkpoint}")), &made], "");
        let mut expected = below(prefix, &Truth::load(&format!("trainers/{stem}.truth")).tensors);
        let has_buffers = !checkpoint.ends_with("parameters");
        expected.retain(|name, _| !is_optimizer_state(name) && (has_buffers || !name.ends_with("seen")));
        assert_same(&read_safetensors(&made), &expected, checkpoint);
    }
}

/// The folder in which a trainer made its files, and the folder of the checkpoint below it.
const TRAINER_FOLDERS: [(&str, &str); 6] = [
    ("composer", "run"),
    ("composer_ddp", "run"),
    ("composer_fsdp", "run/ep0-ba2"),
    ("fabric", "out/step-30"),
    ("accelerate_ddp", "checkpoint_0"),
    ("hf_trainer", "checkpoint-2"),
];

#[test]
fn trainer_folder_leads_to_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for (trainer, checkpoint) in TRAINER_FOLDERS {
        let source = fixture(&format!("trainers/{trainer}"));
        let note = format!("note: reading {}, found in {}", source.join(checkpoint).display(), source.display());
        for (verb, made) in [("inspect", None), ("verify", None), ("consolidate", Some(folder.path().join(trainer)))] {
            let paths: Vec<&Path> = [Some(source.as_path()), made.as_deref()].into_iter().flatten().collect();
            assert_contains(&succeed(verb, &paths, "").stderr, &[&note]);
        }
        let (_, stem, prefix) = CHECKPOINTS.iter().find(|(_, stem, _)| *stem == trainer).unwrap();
        let mut expected = below(prefix, &Truth::load(&format!("trainers/{stem}.truth")).tensors);
        expected.retain(|name, _| !is_optimizer_state(name));
        assert_same(&read_safetensors(&folder.path().join(trainer)), &expected, trainer);
    }
}

/// The folders in the table of `docs/reference/trainers.md`, in its order, and the prefix of the model's names in the
/// expected tensors.
const ON_PAGE: [(&str, &str); 27] = [
    ("trainers/accelerate_ddp", ""),
    ("trainers/accelerate_deepspeed", "model."),
    ("trainers/accelerate_fsdp1", "model."),
    ("trainers/accelerate_fsdp1_full", "model."),
    ("accelerate_llama", "model."),
    ("trainers/composer", "state.model."),
    ("trainers/composer_ddp", "state.model."),
    ("trainers/composer_fsdp", "state.model."),
    ("trainers/fabric", "model."),
    ("trainers/hf_trainer", ""),
    ("trainers/hf_trainer_deepspeed", "model."),
    ("trainers/hf_trainer_fsdp1", "model."),
    ("trainers/hf_trainer_fsdp2", "model."),
    ("trainers/lightning_file", "state_dict."),
    ("trainers/lightning_deepspeed", "model."),
    ("trainers/lightning_fsdp1", "model."),
    ("lightning_fsdp", "state_dict."),
    ("trainers/makani", "model_state."),
    ("trainers/makani_uneven", "model_state."),
    ("trainers/olmo_core", "model."),
    ("trainers/olmo_core_flat", "model."),
    ("trainers/st_info_ddp/ranks", "model."),
    ("trainers/titan_run", ""),
    ("trainers/torchtune", ""),
    ("trainers/torchtune_dcp", "model."),
    ("verl", "model."),
    ("trainers/verl_fsdp1", "model."),
];

/// Each row of the table of trainers is true for its fixture: the model, the optimizer state and the copied files.
#[test]
fn page_of_trainers_is_true() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/trainers.md");
    let page = fs::read_to_string(page).unwrap();
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.starts_with("| ") && line.contains("`tests/fixtures/"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let folders: Vec<&str> = rows.iter().map(|row| row[1].trim_matches('`')).collect();
    let expected = ON_PAGE.map(|(source, _)| format!("tests/fixtures/{source}"));
    assert_eq!(folders, expected);
    let folder = tempfile::tempdir().unwrap();
    for ((source, prefix), row) in ON_PAGE.iter().zip(rows) {
        let made = folder.path().join(source.replace('/', "-"));
        succeed("consolidate", &[&fixture(source), &made], "");
        let truth = Truth::load(&format!("{}.truth", source.trim_end_matches("/ranks")));
        let mut expected = below(prefix, &truth.tensors);
        expected.retain(|name, _| !is_optimizer_state(name) && !name.starts_with("train_state."));
        assert_same(&read_safetensors(&made), &expected, source);

        let resharded = made.with_extension("resharded");
        let mesh = if source.contains("makani") { "h=2" } else { "dp=2" };
        succeed("reshard", &[&fixture(source), &resharded], &format!("--mesh {mesh}"));
        // The optimizer state may have numbers or names of parameters.
        let parameters = truth.names("optim_params");
        let optimizer_state = |tensors: Tensors| -> Tensors {
            let named = tensors.into_iter().map(|(name, tensor)| (with_parameter_name(&name, &parameters), tensor));
            named.filter(|(name, _)| is_optimizer_state(name)).collect()
        };
        let found = optimizer_state(read(&resharded));
        let has_moments = found.keys().any(|name| name.ends_with("exp_avg"));
        assert_eq!(row[3] == "resharded", has_moments, "{source}");
        if has_moments {
            assert_same(&found, &optimizer_state(truth.tensors), source);
        }
        for name in row[4].split(',').map(|name| name.trim().trim_matches('`')).filter(|name| !name.is_empty()) {
            assert!(resharded.join(name).is_file(), "{source}: {name}");
        }
    }
}

/// The closing line lists the folder of the optimizer as left out, and `--series all` reads it.
#[test]
fn optimizer_folder_that_is_not_read_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["accelerate_fsdp1", "hf_trainer_fsdp1", "hf_trainer_fsdp2"] {
        let source = fixture(&format!("trainers/{name}"));
        let [model, all] = ["model", "all"].map(|kind| folder.path().join(format!("{name}_{kind}.pt")));
        let run = succeed("unshard", &[&source, &model], "");
        assert_contains(
            &run.stderr,
            &["hint: use --series all to include the folders that are left out", "; left out: folder optimizer_0"],
        );
        let run = succeed("unshard", &[&source, &all], "--series all");
        assert!(!run.stderr.contains("left out"), "{}", run.stderr);
        assert_same(&read(&all), &Truth::load(&format!("trainers/{name}.truth")).tensors, name);
    }
}

/// A DCP directory with the optimizer lies beside the rank files of the model, as accelerate saves it.
#[test]
fn optimizer_folder_in_a_folder_of_rank_files_is_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("checkpoint_0");
    copy_folder(&fixture("fsdp4/ranks"), &source);
    copy_folder(&fixture("accelerate_llama/optimizer_0"), &source.join("optimizer_0"));
    for (verb, words) in [("inspect", ""), ("reshard", "--mesh fsdp=2")] {
        let made = folder.path().join(verb);
        let paths: &[&Path] = if verb == "inspect" { &[&source] } else { &[&source, &made] };
        let run = succeed(verb, paths, words);
        assert_contains(&run.stderr, &["checkpoint_0/optimizer_0 is a checkpoint of its own and is not read"]);
    }
}

/// The configuration of a run with OLMo-core is not the configuration of a Hugging Face model.
#[test]
fn configuration_of_a_training_run_is_not_copied() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("trainers/olmo_core");
    let run = succeed("consolidate", &[&source, &folder.path().join("found")], "");
    assert_contains(&run.stderr, &["no config.json found"]);
    assert!(!folder.path().join("found/config.json").exists());
    let given = format!("--assets {}", source.join("step2").display());
    succeed("consolidate", &[&source, &folder.path().join("given")], &given);
    assert!(folder.path().join("given/config.json").exists());
}

/// Composer keeps several steps in one folder: files, or folders of sharded checkpoints. Links name the newest step.
#[test]
fn several_steps_of_composer_need_a_choice() {
    let folder = tempfile::tempdir().unwrap();
    let (files, folders) = (folder.path().join("files"), folder.path().join("folders"));
    fs::create_dir(&files).unwrap();
    for step in ["ep0-ba2", "ep0-ba10"] {
        let file = fixture("trainers/composer/run/ep0-ba2-rank0.pt");
        fs::copy(file, files.join(format!("{step}-rank0.pt"))).unwrap();
        copy_folder(&fixture("trainers/composer_fsdp/run/ep0-ba2"), &folders.join(step));
    }
    symlink("ep0-ba10-rank0.pt", files.join("latest-rank0.pt")).unwrap();
    for verb in ["inspect", "verify"] {
        let run = expect(2, verb, &[&files], "");
        assert_contains(
            &run.stderr,
            &["several checkpoints: series ep0-ba2, ep0-ba10", "--series ep0-ba10, the newest"],
        );
        let run = expect(2, verb, &[&folders], "");
        assert_contains(&run.stderr, &["several checkpoints: ep0-ba2, ep0-ba10", "folders/ep0-ba10"]);
    }
    let run = succeed("consolidate", &[&files, &folder.path().join("a")], "--series ep0-ba2");
    assert!(!run.stderr.contains("series"), "{}", run.stderr);
    fs::remove_file(files.join("ep0-ba2-rank0.pt")).unwrap();
    succeed("consolidate", &[&files, &folder.path().join("b")], "");
    for rank in 0..2 {
        symlink("ep0-ba10", folders.join(format!("latest-rank{rank}.pt"))).unwrap();
    }
    let run = succeed("consolidate", &[&folders, &folder.path().join("c")], "");
    assert_contains(&run.stderr, &["reading", "folders/latest-rank0.pt, found in"]);
    let expected = below("state.model.", &Truth::load("trainers/composer.truth").tensors);
    for made in ["a", "b"] {
        assert_same(&read_safetensors(&folder.path().join(made)), &expected, made);
    }
}

/// The search for a checkpoint continues in a folder of any name only if it is the only subfolder, and it does so at
/// most twice.
#[test]
fn only_subfolder_is_searched() {
    let folder = tempfile::tempdir().unwrap();
    let from = |path: &str| {
        let source = folder.path().join(path.split('/').next().unwrap());
        copy_folder(&fixture("trainers/fabric/out/step-30"), &folder.path().join(path));
        (folder.path().join(path), source)
    };
    for path in ["a/my run/out/step_7", "b/step7/model_and_optim", "c/checkpoints/checkpoint_3", "d/x/y"] {
        let (checkpoint, source) = from(path);
        fs::create_dir(source.join(".git")).unwrap();
        symlink(".", source.join("link")).unwrap();
        fs::write(source.join("train.py"), "").unwrap();
        let run = succeed("inspect", &[&source], "");
        assert_contains(&run.stderr, &[&format!("note: reading {}, found in ", checkpoint.display())]);
        // With a second subfolder, the folder of the checkpoint may be either of the two.
        if !["b", "c"].iter().any(|with_known_names| path.starts_with(with_known_names)) {
            fs::create_dir(source.join("logs")).unwrap();
            let run = expect(2, "inspect", &[&source], "");
            assert_contains(&run.stderr, &[&format!("{} contains no checkpoint", source.display())]);
        }
    }
    let (_, source) = from("e/x/y/z");
    let run = expect(2, "inspect", &[&source], "");
    assert_contains(&run.stderr, &[&format!("{} contains no checkpoint", source.display())]);
}

/// Composer's optimizer state keeps its names and `TorchVersion` objects, so that the trainer can load them again.
#[test]
fn composer_checkpoint_resharded_keeps_its_state_dict() {
    let folder = tempfile::tempdir().unwrap();
    for (checkpoint, to) in [("composer/run/ep0-ba2-rank0.pt", "torch-ranks"), ("composer_fsdp/run/ep0-ba2", "dcp")] {
        let (source, made) = (fixture(&format!("trainers/{checkpoint}")), folder.path().join(to));
        succeed("reshard", &[&source, &made], &format!("--mesh dp=3 --to {to}"));
        succeed("verify", &[&source, &made], "");
        let listed = succeed("inspect", &[&made], "--json").stdout;
        assert!(listed.contains("torch_version"), "{listed}");
    }
}

/// Tensors that dtshard cannot read are refused by name. Without them, the rest of the file is read.
#[test]
fn unreadable_tensors_are_refused_and_can_be_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let mut truth = Truth::load("trainers/not_dense.truth").tensors;
    truth.retain(|name, _| !name.starts_with("odd:"));
    let kinds = [
        ("sparse_coo", "a sparse tensor"),
        ("sparse_coo_hybrid", "a sparse tensor"),
        ("sparse_csr", "a sparse tensor"),
        ("sparse_csc", "a sparse tensor"),
        ("sparse_bsr", "a sparse tensor"),
        ("quantized", "a quantized tensor"),
        ("quantized_channels", "a quantized tensor"),
        ("meta", "a tensor on the meta device"),
        ("nested", "a nested tensor"),
        ("nested_jagged", "a tensor of class `torch.nested._internal.nested_tensor.NestedTensor`"),
    ];
    for (name, kind) in kinds {
        let (source, made) = (fixture(&format!("trainers/not_dense/{name}.pt")), folder.path().join(name));
        for verb in ["consolidate", "unshard"] {
            let refused = expect(2, verb, &[&source, &made.with_extension("pt")], "").stderr;
            assert_contains(&refused, &[&format!("{name}.pt: cannot read `{name}`: it is {kind}"), "with --exclude"]);
        }
        succeed("consolidate", &[&source, &made], &format!("--exclude {name}"));
        assert_same(&read_safetensors(&made), &truth, name);
        let listed = succeed("inspect", &[&source], "--json").json();
        assert!(listed["tensors"][name]["unreadable"].as_str().unwrap().starts_with(kind), "{listed}");
        let verified = succeed("verify", &[&source], &format!("--exclude {name}")).stdout;
        assert_contains(&verified, &[&format!("{name}, {kind}"), "not compared"]);
    }
    let all = fixture("trainers/not_dense/all.pt");
    let listing = folder.path().join("digests.json");
    fs::write(&listing, succeed("inspect", &[&all], "--digest --json").stdout).unwrap();
    let left_out = kinds.map(|(name, _)| format!("--exclude {name}")).join(" ");
    let verified = succeed("verify", &[&all, &listing], &format!("--common {left_out}")).stderr;
    assert_contains(&verified, &["the same: 2 tensors"]);
    succeed("reshard", &[&all, &folder.path().join("ranks")], &format!("--mesh dp=2 {left_out}"));
    succeed("consolidate", &[&folder.path().join("ranks"), &folder.path().join("all")], "");
    assert_same(&read_safetensors(&folder.path().join("all")), &truth, "all");
}

/// The optimizer state of torchao is of a tensor subclass. The model beside it is read.
#[test]
fn unreadable_optimizer_state_does_not_hinder_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("trainers/torchao_adamw8bit/checkpoint.pt");
    let made = folder.path().join("model");
    succeed("consolidate", &[&source, &made], "");
    let mut expected = below("model.", &Truth::load("trainers/torchao_adamw8bit.truth").tensors);
    expected.retain(|name, _| !is_optimizer_state(name));
    assert_same(&read_safetensors(&made), &expected, "torchao_adamw8bit");
    let refused = expect(2, "reshard", &[&source, &folder.path().join("ranks")], "--mesh dp=2").stderr;
    assert_contains(&refused, &["exp_avg", "it is a tensor of class `torchao.", "with --exclude"]);
    // The metadata of a DCP directory describes such a tensor as a plain one. The class is in the data file.
    let source = fixture("trainers/torchao_adamw8bit/dcp");
    let refused = expect(2, "reshard", &[&source, &folder.path().join("dcp")], "--mesh dp=2").stderr;
    assert_contains(&refused, &["exp_avg", "it is a tensor of class `torchao.", "with --exclude"]);
    assert_contains(&succeed("verify", &[&source, &made], "--root model").stderr, &["the same: 4 tensors"]);
    assert_contains(
        &succeed("verify", &[&source], "").stdout,
        &["cannot read `optim.state.0.weight.exp_avg`: it is a", "not compared"],
    );
}

/// An object of an unknown class is refused if it is selected; the model beside it is read.
#[test]
fn unknown_object_does_not_hinder_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let truth = below("model.", &Truth::load("foreign_objects/truth").tensors);
    for source in ["foreign_objects/dcp", "foreign_objects/foreign.pt"] {
        let (source, made) = (fixture(source), folder.path().join(source.replace(['/', '.'], "_")));
        assert_contains(&succeed("consolidate", &[&source, &made], "").stderr, &["left out: 5 objects"]);
        assert_same(&read_safetensors(&made), &truth, "model");
        let whole = made.with_extension("pt");
        assert_contains(&expect(2, "unshard", &[&source, &whole], "").stderr, &["`own` needs the Python object"]);
        succeed("unshard", &[&source, &whole], "--exclude own --exclude state");
        let listed = succeed("inspect", &[&source], "--json").json();
        assert_eq!(listed["objects"]["own"]["unreadable"], "an object of `their_trainer.Foreign`");
        assert!(listed["tensors"].get("own").is_none());
    }
}

/// In these checkpoints, only the tensors of the model have an attribute with their layout. The optimizer state has
/// numbers for names and no such attribute, but gets the layout of its parameters.
#[test]
fn layout_in_attributes_gives_whole_tensors_and_optimizer_state() {
    let folder = tempfile::tempdir().unwrap();
    for (checkpoint, stem, series) in WITH_ATTRIBUTES {
        let made = folder.path().join(format!("{stem}.pt"));
        succeed("unshard", &[&fixture(&format!("trainers/{checkpoint}")), &made], series);
        assert_same(&read(&made), &Truth::load(&format!("trainers/{stem}.truth")).tensors, checkpoint);
    }
}

#[test]
fn inspect_shows_the_parts_that_makani_wrote() {
    for (checkpoint, stem, series) in &WITH_ATTRIBUTES[..3] {
        let found = inspect(&fixture(&format!("trainers/{checkpoint}")), series);
        let truth = Truth::load(&format!("trainers/{stem}.truth"));
        for (name, expected) in truth.json["layout"].as_object().unwrap() {
            let chunks = found["tensors"][name]["chunks"].as_array().unwrap();
            for (rank, part) in expected["parts"].as_array().unwrap().iter().enumerate() {
                let own = chunks.iter().find(|chunk| chunk["rank"] == rank).unwrap();
                assert_eq!(
                    (&own["offsets"], &own["sizes"]),
                    (&part["offsets"], &part["shape"]),
                    "{stem} {name} {rank}"
                );
            }
        }
    }
    let found = inspect(&fixture("trainers/makani"), "");
    assert_eq!(found["mesh"], json!([["matmul", 1], ["h", 2], ["w", 2]]));
    assert_eq!(found["tensors"]["model_state.conv.weight"]["placements"], "R,S(3),S(4)");
    assert_eq!(found["tensors"]["optimizer_state_dict.state.8.exp_avg"]["placements"], "R,S(3),S(4)");
    assert_eq!(found["tensors"]["model_state.mean"]["placements"], Json::Null);
    assert!(found["objects"].as_object().unwrap().keys().all(|name| !name.contains("comm_grid")));
}

#[test]
fn inspect_shows_the_placements_in_st_info() {
    for (case, before) in [("st_info", ""), ("st_info_ddp", "R,")] {
        let found = inspect(&fixture(&format!("trainers/{case}/ranks")), "");
        let truth = Truth::load(&format!("trainers/{case}.truth"));
        for (name, layout) in truth.json["layout"].as_object().unwrap() {
            let expected = format!("{before}{}", layout["placements"].as_str().unwrap());
            assert_eq!(found["tensors"][name]["placements"], expected, "{case} {name}");
        }
    }
}

#[test]
fn reshard_to_another_mesh_keeps_the_values() {
    let folder = tempfile::tempdir().unwrap();
    for ((checkpoint, stem, series), mesh) in [
        (WITH_ATTRIBUTES[0], "matmul=2,h=3,w=1"),
        (WITH_ATTRIBUTES[1], "h=2,w=2"),
        (WITH_ATTRIBUTES[1], "w=3"),
        (WITH_ATTRIBUTES[2], "h=2"),
        (WITH_ATTRIBUTES[3], "tp=3"),
        (WITH_ATTRIBUTES[4], "dp=1,tp=3"),
    ] {
        let (source, made) = (fixture(&format!("trainers/{checkpoint}")), folder.path().join(stem).join(mesh));
        succeed("reshard", &[&source, &made], &format!("--mesh {mesh} {series}"));
        assert_same(&read(&made), &Truth::load(&format!("trainers/{stem}.truth")).tensors, mesh);
        succeed("verify", &[&source, &made], series);
    }
}

/// Each file gets the `comm_grid` of its new rank. Resharded back, the files have the `comm_grid` of makani's own files.
#[test]
fn resharded_makani_files_have_the_grid_of_their_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let (source, on4, on3) = (fixture("trainers/makani_uneven"), folder.path().join("on4"), folder.path().join("on3"));
    succeed("reshard", &[&source, &on4], "--mesh h=2,w=2");
    let group = |size: i64, position: i64| format!("{{'size': {size}, 'rank': {position}}}");
    for rank in 0..4 {
        let grid = comm_grid(&on4.join(format!("ckpt_mp{rank}_v0.tar")));
        let (all, h, w) = (group(4, rank), group(2, rank / 2), group(2, rank % 2));
        let matmul = group(1, 0);
        let entries = format!("'model': {all}, 'spatial': {all}, 'matmul': {matmul}, 'w': {w}, 'h': {h}");
        assert_eq!(grid, format!("OrderedDict({{{entries}}})"));
    }
    succeed("reshard", &[&on4, &on3], "--mesh matmul=1,h=3,w=1");
    for rank in 0..3 {
        let name = format!("ckpt_mp{rank}_v0.tar");
        let [own, theirs] = [&on3, &source.join("training_checkpoints")].map(|folder| folder.join(&name));
        let [own, theirs] = [own, theirs].map(|path| rank_file::read(&path).1);
        assert_eq!(own.value, theirs.value, "rank {rank}");
        assert_eq!(own.sharded_dims.len(), theirs.sharded_dims.len() + 16, "also 16 moments");
    }
}

#[test]
fn makani_grid_is_left_out_for_other_mesh_dims() {
    let folder = tempfile::tempdir().unwrap();
    let (source, made) = (fixture("trainers/makani_uneven"), folder.path().join("made"));
    let run = succeed("reshard", &[&source, &made], "--mesh fsdp=2");
    assert!(run.stderr.contains("DST has no `comm_grid` and no `sharded_dims_mp`"), "{}", run.stderr);
    let file = rank_file::read(&made.join("ckpt_mp1_v0.tar")).1;
    assert!(file.sharded_dims.is_empty() && !file.value.to_string().contains("comm_grid"));
    let dtensors = folder.path().join("dtensors");
    let run = succeed("reshard", &[&source, &dtensors], "--mesh h=2 --tensor-class dtensor");
    assert!(!run.stderr.contains("comm_grid"), "{}", run.stderr);
    succeed("verify", &[&source, &dtensors], "");
    let run = expect(2, "reshard", &[&source, &folder.path().join("x")], "--mesh model=2");
    assert!(run.stderr.contains("no tensor of the source is sharded over the group `model`"), "{}", run.stderr);
    let run = succeed("reshard", &[&source, &folder.path().join("y")], "--mesh h=2,matmul=2");
    assert!(run.stderr.contains("makani numbers ranks in the order matmul, h, w"), "{}", run.stderr);
}

/// The file of one rank must not be read as a complete checkpoint.
#[test]
fn file_of_one_makani_rank_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("made");
    let file = fixture("trainers/makani_matmul/training_checkpoints/ckpt_mp0_v0.tar");
    let run = expect(2, "consolidate", &[&file, &made], "");
    assert!(run.stderr.contains("1 of 2 files of its series"), "{}", run.stderr);
    for name in ["model.pt", "ckpt_mp0_v0.tar"] {
        let alone = folder.path().join(name);
        fs::copy(&file, &alone).unwrap();
        for verb in ["consolidate", "unshard", "reshard"] {
            let run = expect(2, verb, &[&alone, &made], if verb == "reshard" { "--mesh h=2" } else { "" });
            assert!(run.stderr.contains("only the parts of model-parallel rank 0"), "{}", run.stderr);
        }
        let run = succeed("inspect", &[&alone], "");
        assert!(run.stderr.contains("warning: ") && run.stderr.contains("model-parallel rank 0"), "{}", run.stderr);
    }
}

#[test]
fn several_versions_of_makani_need_a_series() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    copy_folder(&fixture("trainers/makani_matmul/training_checkpoints"), &source);
    let set_time = |series: &str, seconds: u64| {
        for rank in 0..2 {
            let name = series.replacen("_mp", &format!("_mp{rank}"), 1);
            let file = fs::File::options().append(true).open(source.join(format!("{name}.tar"))).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
        }
    };
    for (newest, times) in [("ckpt_v0", [5, 9, 8]), ("ckpt_v1", [5, 7, 8]), ("best_ckpt", [9, 7, 8])] {
        ["best_ckpt_mp", "ckpt_mp_v0", "ckpt_mp_v1"]
            .into_iter()
            .zip(times)
            .for_each(|(name, time)| set_time(name, time));
        let run = expect(2, "consolidate", &[&source, &folder.path().join("made")], "");
        assert!(run.stderr.contains("several checkpoints: series best_ckpt, ckpt_v0, ckpt_v1"), "{}", run.stderr);
        assert!(run.stderr.contains(&format!("--series {newest}, the last one written")), "{}", run.stderr);
    }
    let truth = below("model_state.", &Truth::load("trainers/makani_matmul.truth").tensors);
    for (series, is_newest) in [("ckpt_v1", true), ("ckpt_v0", false)] {
        let made = folder.path().join(series);
        let run = succeed("consolidate", &[&source, &made], &format!("--series {series}"));
        assert!(!run.stderr.contains("--series all"), "{}", run.stderr);
        assert_eq!(read_safetensors(&made) == truth, is_newest, "{series}");
    }
}

/// `--src-placements` declares the layout once: `reshard` writes DTensors with the same mesh and placements. Patterns
/// may leave out the component `module` of DDP.
#[test]
fn local_parts_become_dtensors_with_one_declaration() {
    let folder = tempfile::tempdir().unwrap();
    let (source, local, made) =
        (fixture("trainers/st_info_ddp/ranks"), folder.path().join("a"), folder.path().join("b"));
    succeed("reshard", &[&source, &local], "--tensor-class local");
    let declared = "--src-mesh dp=2,tp=2 --src-placements up=R,S(0) --src-placements module.down.weight=R,S(1)";
    succeed("reshard", &[&local, &made], &format!("{declared} --tensor-class dtensor"));
    let found = inspect(&made, "");
    for (name, placements) in [("up.weight", "R,S(0)"), ("down.weight", "R,S(1)")] {
        assert_eq!(found["tensors"][format!("model.module.{name}")]["placements"], placements);
    }
    assert_eq!(found["tensors"]["optim.state.4.exp_avg"]["placements"], "R,S(1)");
    succeed("verify", &[&made, &source], "");
}

/// Returns the `comm_grid` in a file, as Python prints it.
fn comm_grid(path: &Path) -> String {
    let (_, contents) = rank_file::read(path);
    contents.value.as_dict().unwrap().get("comm_grid").map(|grid| format!("{grid:.1000}")).unwrap()
}

fn is_optimizer_state(name: &str) -> bool {
    let parts: Vec<&str> = name.split('.').collect();
    parts.iter().any(|part| ["optimizer", "optim", "optimizers", "optimizer_states"].contains(part))
        || matches!(parts.last(), Some(&("exp_avg" | "exp_avg_sq" | "step")))
}
