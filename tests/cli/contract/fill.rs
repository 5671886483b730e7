//! Tests of `--like` and `--fill-from`: complete parameters are edited, and written back into the sharded checkpoint
//! that they come from.
//!
//! The layouts of reshard without these options are tested in `layout`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use crate::common::env::TestEnv;
use crate::common::{Tensors, assert_same, bytes_of, copy_folder, fixture, inspect, read, succeed};
use crate::contract::{assert_contains, names_below};

/// A tensor of a safetensors file: dtype, shape, bytes.
type Stored = (safetensors::Dtype, Vec<usize>, Vec<u8>);

/// Changes the tensors of a safetensors file with `change` and writes the file again.
fn edit(path: &Path, change: impl FnOnce(&mut BTreeMap<String, Stored>)) {
    let content = fs::read(path).unwrap();
    let stored = SafeTensors::deserialize(&content).unwrap();
    let tensors = stored.tensors().into_iter();
    let mut tensors: BTreeMap<String, Stored> =
        tensors.map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))).collect();
    change(&mut tensors);
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Changes the bytes of a tensor in such a way that the values of every dtype change.
fn invert(stored: &mut Stored) {
    stored.2.iter_mut().for_each(|byte| *byte ^= 1);
}

/// The name, inside the model, of the tensor that the tests edit.
const EDITED: &str = "blocks.0.w1.weight";

/// Writes the model of a sharded checkpoint to one file, and changes one tensor in it.
fn edited(env: &TestEnv, sharded: &Path, name: &str) -> PathBuf {
    let path = env.path("edited.safetensors");
    succeed("consolidate", &[sharded, &path], "--assets none --overwrite");
    edit(&path, |tensors| invert(tensors.get_mut(name).unwrap()));
    path
}

/// Returns the options that name a checkpoint as `--like` and `--fill-from`.
fn like_and_fill_from(sharded: &Path) -> String {
    format!("--like {0} --fill-from {0}", sharded.display())
}

/// Asserts that two checkpoints have the same files, objects, meshes and placements.
fn assert_same_layout(found: &Path, sharded: &Path) {
    assert_eq!(names_below(found), names_below(sharded));
    let (new, old) = (inspect(found, ""), inspect(sharded, ""));
    let at = sharded.display();
    assert_eq!((&new["meshes"], &new["objects"]), (&old["meshes"], &old["objects"]), "{at}");
    for (name, tensor) in old["tensors"].as_object().unwrap() {
        for key in ["dtype", "shape", "placements", "mesh"] {
            assert_eq!(new["tensors"][name][key], tensor[key], "{at}: {key} of {name}");
        }
    }
}

/// Asserts that in `found` the tensor `name` has the value of the file `edited`, and that all other tensors have the
/// values of the checkpoint `sharded`.
fn assert_only_edited(found: &Tensors, sharded: &Path, edited: &Path, name: &str) {
    let mut expected = read(sharded);
    let new = read(edited).remove(name).unwrap();
    let old = expected.insert(format!("model.{name}"), new.clone()).unwrap();
    assert_ne!(old.digest, new.digest);
    assert_same(found, &expected, "only one tensor is another");
}

#[test]
fn edited_model_is_written_into_rank_files() {
    let env = TestEnv::new();
    for case in ["fsdp_tp", "fsdp4", "hsdp", "tp2"] {
        let sharded = fixture(case).join("ranks");
        let edited = edited(&env, &sharded, EDITED);
        let made = env.make("reshard", &edited, case, &like_and_fill_from(&sharded));
        assert_only_edited(&made.tensors(), &sharded, &edited, EDITED);
        assert_same_layout(&made.path, &sharded);
        assert_contains(&made.run.stderr, &["DST gets ", " tensors from ", "edited.safetensors and "]);
    }
}

#[test]
fn mesh_is_recovered_from_slices_of_older_torch_versions() {
    let env = TestEnv::new();
    for version in ["2.5.1", "2.9.1", "2.10.0", "2.12.0"] {
        let sharded = fixture("compat").join(format!("torch-{version}/fsdp_tp/ranks"));
        if !sharded.is_dir() {
            continue;
        }
        let edited = edited(&env, &sharded, "head.weight");
        for (name, options) in
            [("like", like_and_fill_from(&sharded)), ("fill", format!("--fill-from {}", sharded.display()))]
        {
            let made = env.make("reshard", &edited, &format!("{name}-{version}"), &options);
            assert_only_edited(&made.tensors(), &sharded, &edited, "head.weight");
            let found = inspect(&made.path, "--brief");
            assert_eq!(found["mesh"], serde_json::json!([["dp", 2], ["tp", 2]]), "{version}");
            // PyTorch before 2.10 does not record that a mesh is a slice of another mesh, so a slice is written like a
            // complete mesh.
            let norm = &found["tensors"]["model.norm.weight"]["placements"];
            assert!(norm == "S(0)" || norm == "S(0),R", "{version}: {norm}");
        }
    }
}

#[test]
fn unedited_model_gives_identical_files() {
    let env = TestEnv::new();
    let sharded = env.path("sharded");
    succeed("reshard", &[&fixture("fsdp_tp/ranks"), &sharded], "");
    let model = env.path("model.safetensors");
    succeed("consolidate", &[&sharded, &model], "--assets none");
    let made = env.make("reshard", &model, "again", &like_and_fill_from(&sharded));
    assert_eq!(bytes_of(&made.path), bytes_of(&sharded));
    // Objects and optimizer state are matched by their complete paths.
    let whole = env.path("whole.pt");
    succeed("unshard", &[&sharded, &whole], "--series all");
    let made = env.make("reshard", &whole, "whole", &like_and_fill_from(&sharded));
    assert_eq!(bytes_of(&made.path), bytes_of(&sharded));
    let flat = env.path("whole.safetensors");
    succeed("unshard", &[&sharded, &flat], "--series all");
    let made = env.make("reshard", &flat, "flat", &like_and_fill_from(&sharded));
    assert_eq!(bytes_of(&made.path), bytes_of(&sharded));
}

#[test]
fn edited_model_is_written_into_dcp() {
    let env = TestEnv::new();
    let sharded = fixture("fsdp_tp/dcp");
    let edited = edited(&env, &sharded, EDITED);
    // A DCP directory records no placements.
    let mesh = format!("--like {} --fill-from {}", fixture("fsdp_tp/ranks").display(), sharded.display());
    let made = env.make("reshard", &edited, "like", &format!("{mesh} --to dcp"));
    assert_only_edited(&made.tensors(), &sharded, &edited, EDITED);
    let mesh = format!("--mesh fsdp=3 --fill-from {}", sharded.display());
    let made = env.make("reshard", &edited, "meshed", &mesh);
    assert_only_edited(&made.tensors(), &sharded, &edited, EDITED);
    assert_eq!(made.closing_line().split(',').next().unwrap(), "wrote 4 files");
}

#[test]
fn fill_from_gives_the_default_layout() {
    let env = TestEnv::new();
    let sharded = fixture("fsdp_tp/ranks");
    let edited = edited(&env, &sharded, EDITED);
    let filled = env.make("reshard", &edited, "filled", &format!("--fill-from {}", sharded.display()));
    let like = env.make("reshard", &edited, "like", &like_and_fill_from(&sharded));
    assert_eq!(bytes_of(&filled.path), bytes_of(&like.path));
}

#[test]
fn files_and_folders_of_fill_from_are_kept() {
    let env = TestEnv::new();
    let actor = fixture("verl/global_step_10/actor");
    let model = env.path("model.safetensors");
    succeed("consolidate", &[&actor, &model], "--assets none");
    let name = "model.layers.0.self_attn.q_proj.weight";
    edit(&model, |tensors| {
        tensors.retain(|known, _| known == name);
        invert(tensors.get_mut(name).unwrap());
    });
    let made = env.make("reshard", &model, "actor", &format!("--fill-from {}", actor.display()));
    assert_eq!(names_below(&made.path), names_below(&actor));
    let mut expected = read(&actor);
    expected.insert(format!("model.{name}"), read(&model).remove(name).unwrap());
    assert_same(&made.tensors(), &expected, "verl");
    assert_contains(&made.run.stderr, &["1 tensor from "]);
    // Model and optimizer are in separate folders.
    let accelerate = fixture("accelerate_llama");
    succeed("consolidate", &[&accelerate, &model], "--assets none --overwrite");
    let options = format!("--mesh fsdp=2 --fill-from {}", accelerate.display());
    let made = env.make("reshard", &model, "accelerate", &options);
    assert_same(&made.tensors(), &read(&accelerate), "accelerate");
    assert!(made.path.join("pytorch_model_fsdp_0/.metadata").is_file() && made.path.join("optimizer_0").is_dir());
}

#[test]
fn check_crc_checks_both_checkpoints() {
    let env = TestEnv::new();
    let sharded = env.path("sharded");
    copy_folder(&fixture("fsdp4/ranks"), &sharded);
    let whole = env.path("model.pt");
    succeed("consolidate", &[&sharded, &whole], "--to torch --assets none");
    // In a torch file, the data of a record follows its name and is aligned to 64 bytes.
    let damage = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        let name = bytes.windows(6).position(|window| window == b"data/2").expect("a tensor");
        bytes[(name + 10).next_multiple_of(64)] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let options = format!("--check-crc --fill-from {}", sharded.display());
    env.make("reshard", &whole, "sound", &options);
    let sound = fs::read(&whole).unwrap();
    damage(&whole);
    env.refuse("reshard", &whole, "x", &options);
    fs::write(&whole, sound).unwrap();
    let optimizer = sharded.join("optim_world_size_4_rank_1.pt");
    damage(&optimizer);
    env.refuse("reshard", &whole, "x", &options);
    fs::remove_file(optimizer).unwrap();
    env.refuse("reshard", &whole, "x", &options);
}

#[test]
fn edited_tensors_that_do_not_fit_are_refused() {
    let env = TestEnv::new();
    let sharded = fixture("fsdp_tp/ranks");
    let path = edited(&env, &sharded, EDITED);
    let original = fs::read(&path).unwrap();
    let options = like_and_fill_from(&sharded);
    let refuse = |change: &dyn Fn(&mut BTreeMap<String, Stored>)| {
        fs::write(&path, &original).unwrap();
        edit(&path, change);
        env.refuse("reshard", &path, "x", &options);
    };
    refuse(&|tensors| {
        let (_, shape, bytes) = tensors.get_mut(EDITED).unwrap();
        shape[0] -= 1;
        bytes.truncate(bytes.len() / (shape[0] + 1) * shape[0]);
    });
    refuse(&|tensors| {
        let (dtype, _, bytes) = tensors.get_mut(EDITED).unwrap();
        *dtype = safetensors::Dtype::F64;
        *bytes = bytes.repeat(2);
    });
    refuse(&|tensors| {
        let (dtype, _, bytes) = tensors.get_mut(EDITED).unwrap();
        *dtype = safetensors::Dtype::F16;
        bytes.truncate(bytes.len() / 2);
    });
    refuse(&|tensors| {
        let moved = tensors.remove(EDITED).unwrap();
        tensors.insert("blocks.0.w1.wieght".into(), moved);
    });
    // The options that the hints propose solve the problem.
    fs::write(&path, &original).unwrap();
    edit(&path, |tensors| {
        let (dtype, _, bytes) = tensors.get_mut(EDITED).unwrap();
        *dtype = safetensors::Dtype::F64;
        *bytes = bytes.repeat(2);
    });
    env.make("reshard", &path, "cast", &format!("{options} --dtype {EDITED}=f32"));
    let made = env.make("reshard", &path, "excluded", &format!("{options} --exclude {EDITED}"));
    assert_same(&made.tensors(), &read(&sharded), "the edited one is left out");
}

#[test]
fn tied_names_stay_tied() {
    let env = TestEnv::new();
    let sharded = env.path("sharded");
    let source = fixture("torch_file/model.pt");
    succeed("reshard", &[&source, &sharded], "--mesh fsdp=2 --to torch-ranks --include {embed,head,norm}");
    let path = env.path("edited.safetensors");
    let (kept, alias) = ("embed.weight", "head.weight");
    succeed("consolidate", &[&sharded, &path], "--assets none");
    // Both names of the tied tensor have the same value and stay tied.
    edit(&path, |tensors| [kept, alias].iter().for_each(|name| invert(tensors.get_mut(*name).unwrap())));
    let made = env.make("reshard", &path, "both", &like_and_fill_from(&sharded));
    let new = read(&path).remove(kept).unwrap();
    assert_eq!((&made.tensors()[kept], &made.tensors()[alias]), (&new, &new));
    // Only one of the two names is in the edited file, and both names get its value.
    edit(&path, |tensors| drop(tensors.remove(alias)));
    let one = env.make("reshard", &path, "one", &like_and_fill_from(&sharded));
    assert_eq!(bytes_of(&one.path), bytes_of(&made.path));
    // The two names have different values in the edited file.
    succeed("consolidate", &[&sharded, &path], "--assets none --overwrite");
    edit(&path, |tensors| invert(tensors.get_mut(alias).unwrap()));
    env.refuse("reshard", &path, "x", &like_and_fill_from(&sharded));
}

#[test]
fn names_tied_in_the_edited_file_only_stay_separate() {
    let env = TestEnv::new();
    let tied = fixture("torch_file/model.pt");
    let (flat, apart) = (env.path("flat.safetensors"), env.path("apart"));
    succeed("consolidate", &[&tied, &flat], "--assets none --include {embed,head,norm}");
    succeed("reshard", &[&flat, &apart], "--mesh fsdp=2 --to torch-ranks");
    let options = format!("--include {{embed,head}} {}", like_and_fill_from(&apart));
    let made = env.make("reshard", &tied, "made", &options);
    assert_eq!(bytes_of(&made.path), bytes_of(&apart));
    assert!(!made.closing_line().contains("left out"), "{}", made.closing_line());
    assert_contains(&made.run.stderr, &["names of ", "are not selected"]);
}

#[test]
fn objects_of_the_edited_checkpoint_take_precedence() {
    let env = TestEnv::new();
    let (source, sharded) = (fixture("torch_file/trainer.pt"), env.path("sharded"));
    succeed("reshard", &[&source, &sharded], "--mesh fsdp=2 --placements S(0)");
    let made = env.make("reshard", &source, "same", &fill_from_with_mesh(&sharded));
    assert_eq!(bytes_of(&made.path), bytes_of(&sharded));
    let model = env.path("model");
    succeed("reshard", &[&source, &model], "--mesh fsdp=2 --include model");
    env.refuse("reshard", &source, "x", &format!("--exclude {{optimizer,rng}} {}", fill_from_with_mesh(&model)));
}

/// Returns the options that name a DCP directory as `--fill-from`, and the mesh that the directory does not record.
fn fill_from_with_mesh(sharded: &Path) -> String {
    format!("--mesh fsdp=2 --placements S(0) --fill-from {}", sharded.display())
}

#[test]
fn ambiguous_name_is_refused() {
    let env = TestEnv::new();
    let (flat, sharded) = (env.vectors("flat.safetensors", &[("x", 4), ("model.x", 4), ("y", 2)]), env.path("s"));
    succeed("reshard", &[&flat, &sharded], "--mesh fsdp=2 --to torch-ranks --nest model");
    let one = env.vectors("one.safetensors", &[("unused", 4), ("model.x", 4)]);
    let options = format!("--exclude unused {}", like_and_fill_from(&sharded));
    env.refuse("reshard", &one, "x", &options);
    let new = read(&one).remove("model.x").unwrap();
    let made = env.make("reshard", &one, "nested", &format!("{options} --nest model"));
    assert_eq!(made.tensors()["model.model.x"], new);
    let made = env.make("reshard", &one, "rooted", &format!("--root model {}", like_and_fill_from(&sharded)));
    assert_eq!(made.tensors()["model.x"], new);
}

#[test]
fn names_match_without_wrapper_prefixes() {
    let env = TestEnv::new();
    let (plain, wrapped) = (env.vectors("plain.safetensors", &[("a.w", 4), ("b.w", 6)]), env.path("wrapped"));
    let options = "--mesh fsdp=2 --to torch-ranks --rename ^=_orig_mod.";
    succeed("reshard", &[&plain, &wrapped], options);
    let other = env.vectors("other.safetensors", &[("x", 1), ("a.w", 4)]);
    let options = format!("--exclude x {}", like_and_fill_from(&wrapped));
    let made = env.make("reshard", &other, "made", &options);
    let (new, old) = (read(&other), read(&wrapped));
    let expected = [("_orig_mod.a.w", &new["a.w"]), ("_orig_mod.b.w", &old["_orig_mod.b.w"])];
    assert_same(&made.tensors(), &expected.map(|(name, tensor)| (name.to_owned(), tensor.clone())).into(), "wrapped");
    env.refuse("reshard", &other, "x", &format!("{options} --keep-names"));
}

#[test]
fn like_gives_the_layout_of_another_checkpoint() {
    let env = TestEnv::new();
    let (like, dcp) = (fixture("fsdp_tp/ranks"), fixture("fsdp_tp/dcp"));
    let options = format!("--like {}", like.display());
    let made = env.make("reshard", &dcp, "out", &options);
    let (new, old) = (inspect(&made.path, "--brief"), inspect(&like, "--brief"));
    assert_eq!(new["mesh"], old["mesh"]);
    for (name, tensor) in new["tensors"].as_object().unwrap() {
        // In a DCP directory, optimizer state has the names of parameters as keys. In rank files, it has numbers as
        // keys.
        let parameter = name.strip_prefix("optim.state.").and_then(|rest| Some(rest.rsplit_once('.')?.0));
        let parameter =
            parameter.filter(|_| name.rsplit_once('.').unwrap().1 != "step").map(|name| format!("model.{name}"));
        let expected = &old["tensors"][parameter.as_ref().unwrap_or(name)];
        assert_eq!(tensor["placements"], expected["placements"], "{name}");
    }
    assert_same(&made.tensors(), &read(&dcp), "values");
    // The mesh dims have the same names but other sizes.
    let made = env.make("reshard", &dcp, "larger", &format!("{options} --mesh dp=4,tp=2"));
    let larger = inspect(&made.path, "--brief");
    assert_eq!(larger["mesh"], serde_json::json!([["dp", 4], ["tp", 2]]));
    let name = format!("model.{EDITED}");
    assert_eq!(larger["tensors"][&name]["placements"], old["tensors"][&name]["placements"]);
    env.refuse("reshard", &dcp, "x", &format!("{options} --mesh a=2,b=2"));
    // Placement rules take precedence over the placements of `--fill-from`.
    let made = env.make("reshard", &dcp, "ruled", &format!("{options} --placements **.{EDITED}=R,R"));
    assert_eq!(inspect(&made.path, "--brief")["tensors"][&name]["placements"], "R,R");
}

/// ShardedTensors record no mesh, so the mesh is inferred from the rows of each rank.
#[test]
fn like_accepts_sharded_tensors() {
    let env = TestEnv::new();
    for (index, (folder, ranks)) in
        [("fsdp1_sharded/ranks", 4), ("flat2/sharded", 2), ("flat_hybrid/sharded", 4)].into_iter().enumerate()
    {
        let sharded = fixture(folder);
        let names = read(&sharded).into_keys().find(|name| name.ends_with("w1.weight") || name.ends_with("wq.weight"));
        let name = names.map(|name| name.strip_prefix("model.").map_or(name.clone(), str::to_owned)).unwrap();
        let edited = edited(&env, &sharded, &name);
        for (way, options) in
            [("both", like_and_fill_from(&sharded)), ("fill", format!("--fill-from {}", sharded.display()))]
        {
            let made = env.make("reshard", &edited, &format!("{way}-{index}"), &options);
            let whole = read(&sharded);
            let mut expected = whole.clone();
            let key = if whole.contains_key(&name) { name.clone() } else { format!("model.{name}") };
            let new = read(&edited).remove(&name).unwrap();
            assert_ne!(expected.insert(key, new.clone()).unwrap().digest, new.digest);
            assert_same(&made.tensors(), &expected, folder);
            assert_same_layout(&made.path, &sharded);
            assert_same_boxes(&made.path, &sharded);
        }
        // The source is sharded in another way, or has complete tensors.
        let model = env.path(&format!("model-{index}.safetensors"));
        succeed("consolidate", &[&sharded, &model], "--assets none");
        let dtensors = env.path(&format!("dtensors-{index}"));
        succeed("reshard", &[&sharded, &dtensors], "--mesh a=3,b=2 --placements R,S(0) --tensor-class dtensor");
        for (source, name) in [(&model, "whole"), (&dtensors, "dtensors")] {
            let options = format!("--like {}", sharded.display());
            let made = env.make("reshard", source, &format!("as-{name}-{index}"), &options);
            let model = |path: &Path| -> Tensors {
                let all = read(path);
                let cut =
                    |(name, tensor): (String, _)| (name.strip_prefix("model.").unwrap_or(&name).to_owned(), tensor);
                all.into_iter().filter(|(name, _)| !name.starts_with("extra_state")).map(cut).collect()
            };
            assert_same(&model(&made.path), &model(source), name);
            assert_eq!(inspect(&made.path, "--brief")["meshes"], serde_json::json!([]), "{name}: no DTensors");
            assert!(made.path.join(format!("model_world_size_{ranks}_rank_{}.pt", ranks - 1)).exists());
        }
        let made = env.make(
            "reshard",
            &model,
            &format!("six-{index}"),
            &format!("--like {} --mesh fsdp=6", sharded.display()),
        );
        assert!(made.path.join("model_world_size_6_rank_5.pt").exists());
    }
}

/// Asserts that every rank has the same boxes of the same tensors in two folders.
fn assert_same_boxes(found: &Path, sharded: &Path) {
    let (new, old) = (inspect(found, ""), inspect(sharded, ""));
    let boxes = |tensor: &serde_json::Value| -> Vec<String> {
        let chunks = tensor["chunks"].as_array().unwrap().iter();
        chunks.map(|chunk| format!("{} {} {}", chunk["rank"], chunk["offsets"], chunk["sizes"])).collect()
    };
    for (name, tensor) in old["tensors"].as_object().unwrap() {
        assert_eq!(boxes(&new["tensors"][name]), boxes(tensor), "{name}");
    }
}

#[test]
fn like_without_the_layout_of_a_tensor_is_refused() {
    let env = TestEnv::new();
    let like = format!("--like {}", fixture("fsdp4/ranks").display());
    let source = env.vectors("own.safetensors", &[("norm.wieght", 3)]);
    env.refuse("reshard", &source, "x", &like);
    env.make("reshard", &source, "bare", &format!("{like} --placements S(0)"));
    env.make("reshard", &source, "ruled", &format!("{like} --placements norm.wieght=R"));
    let none = |like: &str| format!("--like {}", fixture(like).display());
    env.refuse("reshard", "fsdp4/ranks", "x", &none("fsdp4/dcp"));
    env.refuse("reshard", "fsdp4/ranks", "x", &none("torch_file/model.pt"));
}

#[test]
fn destination_in_like_or_fill_from_is_refused() {
    let env = TestEnv::new();
    let sharded = env.path("sharded");
    copy_folder(&fixture("fsdp4/ranks"), &sharded);
    let edited = edited(&env, &sharded, EDITED);
    for (option, dst) in [("--like", "sharded"), ("--fill-from", "sharded"), ("--fill-from", "sharded/inside")] {
        let options = format!("{option} {} --overwrite", sharded.display());
        env.refuse("reshard", &edited, dst, &options);
    }
}
