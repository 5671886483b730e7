//! Hints that the user can follow: the command that a hint names succeeds.

use crate::common::corrupt::dtshard;
use crate::common::env::TestEnv;
use crate::common::{fixture, succeed};

#[test]
fn hint_about_objects_names_formats_that_the_verb_writes() {
    let env = TestEnv::new();
    let made = env.make("reshard", "accelerate_llama", "hf", "--to dcp-hf --mesh dp=2");
    assert!(made.run.stderr.contains("use --to dcp or --to torch-ranks to write objects"), "{}", made.run.stderr);
    for format in ["dcp", "torch-ranks"] {
        let made = env.make("reshard", "accelerate_llama", format, &format!("--to {format} --mesh dp=2"));
        assert!(!made.run.stderr.contains("objects"), "{}", made.run.stderr);
    }
}

#[test]
fn values_that_differ_in_a_snapshot_need_a_choice() {
    let env = TestEnv::new();
    let snapshot = fixture("trainers/torchsnapshot");
    let verified = dtshard(&[&"verify", &snapshot]);
    verified.assert_mentions(&["use --on-conflict to choose a value in a conversion, or --exclude"]);
    assert!(!verified.err.contains("--src-mesh"), "{verified:?}");
    succeed("verify", &[&snapshot], "--exclude local.**");
    // `local.value` is one tensor for each of two ranks.
    let dropped = env.make("reshard", &snapshot, "dropped", "--mesh dp=3 --on-conflict drop");
    assert!(dropped.run.stderr.contains("left out: 3 tensors (differing), 1 object\n"), "{}", dropped.run.stderr);
    let first = env.make("reshard", &snapshot, "first", "--mesh dp=2 --on-conflict rank0");
    let compared = dtshard(&[&"verify", &snapshot, &first.path]);
    assert_eq!(compared.out.matches("\nlocal.value: ").count(), 1, "{compared:?}");
    compared.assert_mentions(&["local.value.rank_1: removed", "local.value: added"]);
}

#[test]
fn optimizer_folder_is_read_with_series_all() {
    let env = TestEnv::new();
    let source = fixture("trainers/accelerate_fsdp1");
    for options in ["--series optim", "--series optimizer", "--series optimizer_0", "--root optimizer"] {
        let refused = env.refuse("unshard", &source, "out.pt", options);
        let hint = "use --series all to read optimizer_0 too, with --root optimizer to choose the optimizer; or give";
        assert!(refused.stderr.contains(hint), "{}", refused.stderr);
        assert!(refused.stderr.contains("checkpoint_0/optimizer_0 as SRC"), "{}", refused.stderr);
    }
    env.make("unshard", &source, "chosen.pt", "--series all --root optimizer");
    env.make("unshard", source.join("checkpoint_0/optimizer_0"), "given.pt", "");
}

#[test]
fn model_compared_with_a_run_gets_a_hint_to_swap() {
    let env = TestEnv::new();
    let run = fixture("trainers/fabric");
    let model = env.make("consolidate", &run, "model", "--assets none").path;
    dtshard(&[&"verify", &model, &run]).assert_mentions(&["swap SRC and OTHER and add --root model", "--nest model"]);
    dtshard(&[&"verify", &model, &run, &"--common"]).assert_refused(&["add --nest model"]);
    succeed("verify", &[&run, &model], "--root model");
    succeed("verify", &[&model, &run], "--nest model --common");
}

#[test]
fn list_at_the_top_needs_an_index_or_a_key() {
    let env = TestEnv::new();
    let source = "trainers/lightning_file";
    let refused = env.refuse("reshard", source, "out", "--root optimizer_states --mesh dp=2");
    for words in ["the top level of the checkpoint is a list", "append .0 to --root", "--nest"] {
        assert!(refused.stderr.contains(words), "{}", refused.stderr);
    }
    env.make("reshard", source, "item", "--root optimizer_states.0 --mesh dp=2");
    env.make("reshard", source, "nested", "--root optimizer_states --nest optimizers --mesh dp=2");
}

#[test]
fn folder_above_several_checkpoints_names_them() {
    let source = fixture("trainers/st_info");
    dtshard(&[&"inspect", &source]).assert_refused(&["st_info/parameters", "st_info/ranks"]);
    succeed("inspect", &[&source.join("ranks")], "");
}

#[test]
fn mesh_dims_with_a_space_get_a_tip() {
    let source = fixture("trainers/fabric");
    for mesh in [["--mesh", "fsdp=4"].as_slice(), &["--mesh=fsdp=4"]] {
        let mut words: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&"reshard", &source, &"/nowhere"];
        words.extend(mesh.iter().map(|word| word as &dyn AsRef<std::ffi::OsStr>));
        words.push(&"tp=2");
        dtshard(&words).assert_refused(&["separate the dims of a mesh with commas", "--mesh fsdp=4,tp=2"]);
    }
}

#[test]
fn flat_parameters_of_one_rank_are_counted_in_the_singular() {
    let env = TestEnv::new();
    let made = env.make("flatten", "flat2/full/model.pt", "flat", "--world-size 1 --wrap layers.*");
    let inspected = dtshard(&[&"inspect", &made.path]);
    inspected.assert_mentions(&["over 1 rank"]);
    assert!(!inspected.out.contains("1 ranks"), "{inspected:?}");
}
