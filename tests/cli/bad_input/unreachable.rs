//! Source files that exist but cannot be read: missing blobs behind links, and folders of other users.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::env::TestEnv;
use crate::outcome::{Outcome, command};

const NOBODY: u32 = 65534;

/// Runs the program with `--json`, and asserts that it fails with exit code 2 and an error of the kind `kind` that
/// contains all of `names`.
fn assert_refused(mut command: Command, kind: &str, names: &[&str]) {
    let outcome = Outcome::from(command.arg("--json").output().unwrap());
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    let document: serde_json::Value = serde_json::from_str(&outcome.out).unwrap();
    assert_eq!(document["error"]["kind"], kind, "{outcome:?}");
    outcome.assert_mentions(names);
}

/// Makes a snapshot folder of a Hugging Face hub cache from a fixture: each file is a link to a blob. The blob of the
/// file `lost` is missing.
fn hub_cache(env: &TestEnv, fixture: &str, lost: &str) -> PathBuf {
    let files = env.copy(fixture);
    let (blobs, snapshot) = (env.path("hub/blobs"), env.path("hub/snapshots/5f2c"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    for entry in fs::read_dir(&files).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name != lost {
            fs::copy(entry.path(), blobs.join(format!("blob-of-{name}"))).unwrap();
        }
        symlink(format!("../../blobs/blob-of-{name}"), snapshot.join(&name)).unwrap();
    }
    snapshot
}

#[test]
fn missing_blob_of_a_hub_cache_is_an_error_that_names_it() {
    for lost in ["model-00001-of-00003.safetensors", "model.safetensors.index.json"] {
        let env = TestEnv::new();
        let source = hub_cache(&env, "safetensors/sharded", lost);
        let names = [lost, &format!("../../blobs/blob-of-{lost}")];
        let before = env.names();
        assert_refused(command(&[&"consolidate", &source, &env.path("out")]), "missing", &names);
        assert_refused(command(&[&"reshard", &source, &env.path("out"), &"--mesh=dp=2"]), "missing", &names);
        assert_refused(command(&[&"inspect", &source]), "missing", &names);
        assert_eq!(env.names(), before, "something was left behind");
        let verified = Outcome::from(command(&[&"verify", &source]).output().unwrap());
        assert_eq!(verified.code, Some(1), "{verified:?}");
    }
}

#[test]
fn missing_config_of_a_hub_cache_is_an_error_of_verbs_that_copy_it() {
    let env = TestEnv::new();
    let source = hub_cache(&env, "safetensors/sharded", "config.json");
    let names = ["config.json", "../../blobs/blob-of-config.json"];
    assert_refused(command(&[&"consolidate", &source, &env.path("out")]), "missing", &names);
    assert_refused(command(&[&"reshard", &source, &env.path("out"), &"--mesh=dp=2"]), "missing", &names);
    for verb in ["inspect", "verify"] {
        Outcome::from(command(&[&verb, &source]).output().unwrap()).assert_succeeded();
    }
    Outcome::from(command(&[&"unshard", &source, &env.path("out.pt")]).output().unwrap()).assert_succeeded();
}

#[test]
fn dangling_link_beside_a_checkpoint_is_an_error_of_reshard_only() {
    let env = TestEnv::new();
    let source = env.copy("fsdp4/ranks");
    symlink("/nowhere/notes.txt", source.join("notes.txt")).unwrap();
    let names = ["notes.txt", "/nowhere/notes.txt"];
    assert_refused(command(&[&"reshard", &source, &env.path("out"), &"--mesh=dp=2"]), "missing", &names);
    Outcome::from(command(&[&"verify", &source]).output().unwrap()).assert_succeeded();
    Outcome::from(command(&[&"unshard", &source, &env.path("out.pt")]).output().unwrap()).assert_succeeded();
}

/// Returns a command that runs as another user, who has no access to `locked`. Returns `None` if there is no other
/// user.
fn as_nobody(args: &[&dyn AsRef<OsStr>], env: &TestEnv, locked: &Path) -> Option<Command> {
    let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    set_mode(&env.path(""), 0o777);
    set_mode(locked, 0o700);
    let of_nobody = |mut command: Command| {
        command.uid(NOBODY).gid(NOBODY);
        command
    };
    if !rustix::process::getuid().is_root() || of_nobody(command(&[&"--version"])).output().is_err() {
        crate::bad_input::skip("another user cannot run the program");
        return None;
    }
    Some(of_nobody(command(args)))
}

#[test]
fn folder_of_another_user_is_an_error_that_names_it() {
    for (fixture, locked, verb) in [
        ("verl", "global_step_10/actor/huggingface", "consolidate"),
        ("verl", "global_step_10/actor/huggingface", "reshard --mesh=dp=2"),
        ("verl", "global_step_10", "consolidate"),
        ("titan", "step-1000", "consolidate"),
        ("titan", "step-1000", "inspect"),
        ("titan", "step-1000", "verify"),
        ("accelerate_llama", "pytorch_model_fsdp_0", "consolidate"),
        ("accelerate_llama", "optimizer_0", "reshard --mesh=dp=2"),
        ("accelerate_llama", "optimizer_0", "inspect"),
        ("accelerate_llama", "optimizer_0", "verify"),
    ] {
        let env = TestEnv::new();
        let source = env.copy(fixture);
        let out = env.path("out");
        let mut args: Vec<&dyn AsRef<OsStr>> = Vec::new();
        let words: Vec<&str> = verb.split(' ').collect();
        words.iter().for_each(|word| args.push(word));
        args.push(&source);
        if !["inspect", "verify"].contains(&verb) {
            args.push(&out);
        }
        let Some(command) = as_nobody(&args, &env, &source.join(locked)) else { return };
        assert_refused(command, "io", &[locked]);
        assert!(!out.exists(), "{verb}");
    }
}

#[test]
fn file_of_another_user_behind_a_link_is_an_error_that_names_both() {
    let env = TestEnv::new();
    let source = hub_cache(&env, "safetensors/sharded", "none");
    let blob = env.path("hub/blobs/blob-of-model-00001-of-00003.safetensors");
    let Some(command) = as_nobody(&[&"consolidate", &source, &env.path("out")], &env, &blob) else { return };
    assert_refused(command, "io", &["model-00001-of-00003.safetensors", "../../blobs/blob-of-model-00001"]);
}
