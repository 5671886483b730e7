//! Tests of flat parameters that are converted to complete tensors, and of edited tensors that are converted back to
//! flat parameters.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use dtshard::format::torch::{TensorNode, View};
use safetensors::SafeTensors;
use serde_json::Value as Json;

use crate::common::env::TestEnv;
use crate::common::{assert_same, below, bytes_of, fixture, inspect, read, succeed};
use crate::contract::flat::{BOTH, check_files, folder, full};
use crate::contract::{assert_contains, contents};
use crate::rank_file;

// ---------------------------------------------------------------------------------------------------------------
// unshard
// ---------------------------------------------------------------------------------------------------------------

#[test]
fn unsharded_flat_parameters_equal_the_full_state_dict() {
    let env = TestEnv::new();
    for (case, name) in [("flat2", "views"), ("flat2", "flat"), ("flat4", "flat"), ("flat_hybrid", "views")] {
        let source = folder(&env, case, name);
        let model = env.make("unshard", &source, &format!("{case}-{name}.pt"), "--rank0-only");
        let same = succeed("verify", &[&model.path, &full()], "");
        assert_contains(&same.stderr, &["the same: 25 tensors"]);
        let optim = env.make("unshard", &source, &format!("{case}-{name}-optim.pt"), "--series optim").path;
        assert_same(&read(&optim), &read(&fixture("flat2/full/optim.pt")), name);
        // Ties are kept. Each parameter has its own copy of the step, because an optimizer increments steps in place.
        let all = env.make("unshard", &source, &format!("{case}-{name}-all.pt"), "--series all").path;
        let (_, contents) = rank_file::read(&all);
        let steps: Vec<&View> = contents
            .tensors
            .iter()
            .filter_map(|found| match found {
                TensorNode::Plain(view) if view.sizes.is_empty() => Some(view),
                _ => None,
            })
            .collect();
        let storages: HashSet<_> = steps.iter().map(|view| view.key.clone()).collect();
        assert_eq!((steps.len(), storages.len()), (20, 20), "{case}/{name}");
    }
}

#[test]
fn all_ranks_writes_the_full_state_dict_for_every_rank() {
    let env = TestEnv::new();
    let source = folder(&env, "flat4", "views");
    let made = env.make("unshard", &source, "all", "--all-ranks");
    let files = bytes_of(&made.path);
    assert_eq!(files.len(), 4);
    let first = files.values().next().unwrap();
    assert!(files.values().all(|file| file == first));
    succeed("verify", &[&made.path, &full()], "");
    env.refuse("unshard", env.make("reshard", &source, "dcp", "--to dcp --mesh fsdp=4").path, "x", "--all-ranks");
}

#[test]
fn unit_option_writes_selected_units_whole() {
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let source = folder(&env, "flat4", name);
        for (unit, more) in [("layers.1", 4), ("layers.*", 3), (".", 4), ("layers.1.inner", 4)] {
            let made = env.make("unshard", &source, &format!("{name}-{unit}"), &format!("--unit {unit}"));
            assert_contains(&made.run.stderr, &[&format!("whole; {more} unit")]);
            assert_same(&made.tensors(), &below("model.", &read(&source)), unit);
            assert_eq!(inspect(&made.path, "--brief")["format"], "fsdp-flat");
        }
        let made = env.make("unshard", &source, &format!("{name}-every"), "--unit ** --unit .");
        assert_contains(&made.run.stderr, &["every rank stores 5 units whole; 0 units stay flat"]);
        assert_eq!(inspect(&made.path, "--brief")["format"], "torch-ranks");
        let again = env.make("unshard", &made.path, &format!("{name}-again.pt"), "");
        assert!(!again.run.stderr.contains("warning"), "{}", again.run.stderr);
        assert_same(&again.tensors(), &below("model.", &read(&source)), "all units");
        env.refuse("unshard", &source, "x", "--unit layers.7");
        env.refuse("unshard", &source, "x", "--unit layers.1 --series all");
        env.refuse("unshard", &source, "x", "--unit layers.1 --to torch");
    }
    let sharded = fixture("fsdp_tp/ranks");
    let made = env.make("unshard", &sharded, "dtensors", "--unit blocks.0");
    let found = inspect(&made.path, "--brief");
    assert_eq!(found["tensors"]["blocks.0.w1.weight"]["placements"], Json::Null);
    assert_eq!(found["tensors"]["head.weight"]["placements"].as_str().map(|text| text.contains('S')), Some(true));
    assert_same(&made.tensors(), &below("model.", &read(&sharded)), "--unit");
    let of_rows = fixture("fsdp1_sharded/ranks");
    let made = env.make("unshard", &of_rows, "sharded-tensors", "--unit blocks.0");
    let (own, found) = (inspect(&of_rows, ""), inspect(&made.path, ""));
    let chunk = |document: &Json, name: &str| document["tensors"][name]["chunks"][0]["sizes"].clone();
    assert_eq!(chunk(&found, "blocks.0.w1.weight"), found["tensors"]["blocks.0.w1.weight"]["shape"]);
    assert_eq!(chunk(&found, "head.weight"), chunk(&own, "model.head.weight"));
    assert_ne!(chunk(&found, "head.weight"), found["tensors"]["head.weight"]["shape"]);
    assert_same(&made.tensors(), &below("model.", &read(&of_rows)), "--unit of ShardedTensors");
    env.refuse("unshard", &sharded, "x", "--unit blocks.9");
    env.refuse("unshard", fixture("odd4/ranks"), "x", "--unit zero");
    env.refuse("unshard", fixture("fsdp_tp/dcp"), "x", "--unit blocks.0");
}

// ---------------------------------------------------------------------------------------------------------------
// Edited tensors are written back
// ---------------------------------------------------------------------------------------------------------------

/// Writes a safetensors file that has selected tensors of another file. The last bit of every byte of the tensors in
/// `change` is inverted.
fn edited(env: &TestEnv, model: &Path, name: &str, change: &[&str], keep: &dyn Fn(&str) -> bool) -> PathBuf {
    let content = fs::read(model).unwrap();
    let stored = SafeTensors::deserialize(&content).unwrap();
    let tensors = stored.tensors().into_iter().filter(|(name, _)| keep(name));
    let tensors: Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)> = tensors
        .map(|(name, view)| {
            let flip = u8::from(change.contains(&name.as_str()));
            let bytes = view.data().iter().map(|byte| byte ^ flip).collect();
            (name, view.dtype(), view.shape().to_vec(), bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let path = env.path(name);
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    path
}

/// An edit: the name of the case, the tensors to change, a function that selects the tensors to keep in the file, and
/// the names whose values then differ in DST.
type Edit<'a> = (&'a str, &'a [&'a str], &'a dyn Fn(&str) -> bool, &'a [&'a str]);

#[test]
fn edited_model_is_written_into_flat_parameters() {
    let env = TestEnv::new();
    const EDITED: &str = "layers.0.wq.weight";
    for name in ["views", "flat"] {
        let source = folder(&env, "flat3", name);
        let both = format!("--like {0} --fill-from {0}", source.display());
        let model = env.make("consolidate", &source, &format!("{name}.safetensors"), "").path;
        let same = env.make("reshard", &model, &format!("{name}-same"), &both);
        check_files(&same.path, "flat3", name, &BOTH);
        let ways: [Edit<'_>; 5] = [
            ("all", &[EDITED], &|_| true, &[EDITED]),
            ("one", &[EDITED], &|name| name == EDITED, &[EDITED]),
            ("alias", &["head.weight"], &|name| name == "head.weight", &["head.weight", "emb.weight"]),
            ("tied", &["head.weight", "emb.weight"], &|_| true, &["head.weight", "emb.weight"]),
            ("strided", &["conv.weight"], &|_| true, &["conv.weight"]),
        ];
        for (way, change, keep, changed) in ways {
            let file = edited(&env, &model, &format!("{name}-{way}.safetensors"), change, keep);
            let made = env.make("reshard", &file, &format!("{name}-{way}"), &both);
            let mut expected = read(&source);
            let new = read(&file);
            for changed in changed {
                let content = new.get(*changed).or_else(|| new.get(change[0])).unwrap().clone();
                let old = expected.insert(format!("model.{changed}"), content.clone()).unwrap();
                assert_ne!(old.digest, content.digest);
            }
            assert_same(&made.tensors(), &expected, way);
            // Only records of the edited model differ from the unedited result.
            let (own, unedited) = (contents(&made.path), contents(&same.path));
            assert_eq!(own.keys().collect::<Vec<_>>(), unedited.keys().collect::<Vec<_>>());
            for (file, content) in own.iter().filter(|(file, _)| !file.starts_with("model")) {
                assert!(unedited[file] == *content, "{file}");
            }
            assert_only_elements_differ(&made.path, &same.path, change, way);
        }
        let file = edited(&env, &model, "apart.safetensors", &["head.weight"], &|_| true);
        env.refuse("reshard", &file, "x", &both);
        // In this case the world size changes, because `--like` differs from `--fill-from`.
        let four = folder(&env, "flat4", name);
        let options = format!("--like {} --fill-from {}", four.display(), source.display());
        let made = env.make("reshard", &model, &format!("{name}-4"), &options);
        check_files(&made.path, "flat4", name, &BOTH);
    }
}

/// All parameters of a flat parameter have the same step. A parameter that is in no flat parameter has its own step.
#[test]
fn edited_optimizer_state_is_written_into_flat_parameters() {
    const STEP: &str = "optim.state.layers.0.wk.weight.step";
    const MOMENT: &str = "optim.state.layers.0.wk.weight.exp_avg";
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let source = folder(&env, "flat3", name);
        let both = format!("--like {0} --fill-from {0}", source.display());
        let whole = env.make("unshard", &source, &format!("{name}.safetensors"), "--series all").path;
        let check = |changed: &str| {
            let file = edited(&env, &whole, &format!("{name}-edited.safetensors"), &[changed], &|_| true);
            let made = env.make("reshard", &file, &format!("{name}-{changed}"), &both);
            let mut expected = read(&source);
            let old = expected.insert(changed.to_owned(), read(&file).remove(changed).unwrap()).unwrap();
            assert_ne!(old.digest, expected[changed].digest);
            assert_same(&made.tensors(), &expected, changed);
        };
        check(MOMENT);
        if name == "views" {
            check(STEP);
            continue;
        }
        let file = edited(&env, &whole, "steps.safetensors", &[STEP], &|_| true);
        env.refuse("reshard", &file, "x", &both);
        // With `use_orig_params`, each parameter keeps its own step.
        let views = folder(&env, "flat4", "views");
        let options = format!("--like {} --fill-from {}", views.display(), source.display());
        env.make("reshard", &file, "apart", &options);
    }
}

#[test]
fn excluded_parameters_stay_in_the_groups_of_fill_from() {
    let env = TestEnv::new();
    let flat = folder(&env, "flat3", "views");
    let (whole, sharded) = (env.path("whole.pt"), env.path("sharded"));
    succeed("unshard", &[&flat, &whole], "--series all");
    succeed("reshard", &[&flat, &sharded], "--mesh fsdp=2 --to torch-ranks");
    for (at, name) in [(&flat, "flat"), (&sharded, "sharded")] {
        for (number, option) in ["--exclude model.norm", "--include model.layers.0"].iter().enumerate() {
            let options = format!("{option} --fill-from {}", at.display());
            let made = env.make("reshard", &whole, &format!("{name}-{number}"), &options);
            succeed("verify", &[&made.path, at], "");
        }
    }
}

/// Asserts that the files of two checkpoints differ only in the edited elements and in the checksums of their zip
/// records.
fn assert_only_elements_differ(found: &Path, unedited: &Path, change: &[&str], way: &str) {
    let (own, old) = (contents(found), contents(unedited));
    let mut differing = 0;
    for (file, content) in own.iter().filter(|(file, _)| file.starts_with("model")) {
        assert_eq!(content.len(), old[file].len(), "{way}: {file}");
        let (own, old) = (rank_file::read(&found.join(file)), rank_file::read(&unedited.join(file)));
        for (new, before) in own.1.tensors.iter().zip(&old.1.tensors) {
            if let (TensorNode::Sharded { local: new, .. }, TensorNode::Sharded { local: before, .. }) = (new, before) {
                let (Some((_, new)), Some((_, before))) = (new.first(), before.first()) else { continue };
                let [new, before] =
                    [rank_file::storage(&own.0, &own.1, new), rank_file::storage(&old.0, &old.1, before)];
                differing += new.iter().zip(&before).filter(|(new, before)| new != before).count();
            }
        }
    }
    let numel = match change[0] {
        "layers.0.wq.weight" => 36,
        "conv.weight" => 48,
        _ => 66,
    };
    assert_eq!(differing, numel * 4, "{way}: every byte of the edited tensor, and no other");
}
