//! Destinations that cannot be written: the program reports an error and leaves nothing behind.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bad_input::skip;
use crate::common::env::TestEnv;
use crate::corrupt::{dtshard, files_of, fixture};

fn assert_refused(env: &TestEnv, args: &[&dyn AsRef<OsStr>], words: &[&str]) {
    let before = env.names();
    dtshard(args).assert_refused(words);
    assert_eq!(env.names(), before, "something changed");
}

#[test]
fn nested_source_and_destination_are_refused() {
    let env = TestEnv::new();
    let source = env.copy("replicated_plain/dcp");
    let parent = source.parent().unwrap().to_path_buf();
    let roundabout = parent.join("..").join("src/dcp/../dcp/new");
    symlink(&source, env.path("link")).unwrap();
    for (target, words) in [
        (source.clone(), "is the source itself"),
        (source.join("new"), "is inside the source"),
        (source.join("new/deeper"), "is inside the source"),
        (roundabout, "is inside the source"),
        (env.path("link"), "is the source itself"),
        (env.path("link/new"), "is inside the source"),
        (parent.clone(), "contains the source"),
        (env.path(""), "contains the source"),
    ] {
        for more in ["--no-sync", "--overwrite", "--restart"] {
            assert_refused(&env, &[&"reshard", &source, &target, &"--mesh=a=2", &more], &[words, "hint: "]);
            assert_refused(&env, &[&"unshard", &source, &target, &more], &[words, "hint: "]);
        }
    }
    let file = env.copy("torch_file/trainer.pt");
    assert_refused(&env, &[&"unshard", &file, &file, &"--overwrite"], &["is the source itself"]);
    // A source behind a link is the same source.
    let link = env.path("link");
    assert_refused(&env, &[&"unshard", &link, &source.join("out.pt")], &["is inside the source"]);
}

/// An index file as SRC stands for all files that it names.
#[test]
fn destination_that_is_a_file_of_the_source_is_refused() {
    let env = TestEnv::new();
    let source = env.copy("safetensors/sharded");
    let (index, target) =
        (source.join("model.safetensors.index.json"), source.join("model-00002-of-00003.safetensors"));
    assert_refused(&env, &[&"consolidate", &index, &target, &"--overwrite"], &["source"]);
}

#[test]
fn existing_destinations_are_refused_and_links_are_not_followed() {
    let env = TestEnv::new();
    let source = fixture("replicated_plain/dcp");
    let file = env.write("file.pt", "old");
    env.write("folder/x", "old");
    symlink("nowhere", env.path("dangling")).unwrap();
    symlink(env.path("folder"), env.path("link")).unwrap();
    symlink(&file, env.path("link.pt")).unwrap();
    for name in ["file.pt", "folder", "dangling", "link", "link.pt"] {
        let target = env.path(name);
        let words = if name == "folder" { ["is a folder", "model.pt"] } else { ["exists", "--overwrite"] };
        assert_refused(&env, &[&"unshard", &source, &target], &[name, words[0], words[1]]);
        assert_refused(&env, &[&"reshard", &source, &target, &"--mesh=a=2", &"--to=dcp"], &[name, "exists"]);
        assert_refused(&env, &[&"reshard", &source, &target, &"--mesh=a=2", &"--to=dcp", &"--restart"], &["exists"]);
    }
    // The link is replaced; its target stays.
    dtshard(&[&"unshard", &source, &env.path("link"), &"--overwrite"]).assert_succeeded();
    assert_eq!(fs::read_to_string(env.path("folder/x")).unwrap(), "old");
    assert!(env.path("link").is_file() && !env.path("link").is_symlink());
    // A folder is not replaced by a file. A folder without a checkpoint is not replaced at all.
    let folder = env.path("folder");
    assert_refused(&env, &[&"unshard", &source, &folder, &"--overwrite"], &["is a folder"]);
    assert_refused(&env, &[&"reshard", &source, &folder, &"--mesh=a=2", &"--overwrite"], &["is not a checkpoint"]);
    assert_eq!(fs::read_to_string(env.path("folder/x")).unwrap(), "old");
}

#[test]
fn unusable_destinations_are_refused() {
    let env = TestEnv::new();
    let source = fixture("replicated_plain/dcp");
    env.write("folder/file", "x");
    for (target, words) in [
        ("file/out", &["file"][..]),
        ("file/deep/out", &["file"]),
        ("..", &[]),
        ("new/..", &["cannot be a destination"]),
        ("new/../..", &[]),
        (".", &[]),
    ] {
        // `folder` is two levels below the folder for temporary files, so that no target is that folder, which may be the
        // repository.
        let target = env.path("folder").join(target);
        assert_refused(&env, &[&"unshard", &source, &target], words);
        assert_refused(&env, &[&"reshard", &source, &target, &"--mesh=a=2"], words);
    }
    assert_refused(&env, &[&"unshard", &source, &"/"], &["hint: "]);
    assert_refused(&env, &[&"unshard", &source, &""], &["DST"]);
    assert_refused(&env, &[&"unshard", &source, &"/proc/out.pt"], &["/proc"]);
    // Hidden names beside the destination are 28 bytes longer.
    assert_refused(&env, &[&"unshard", &source, &env.path(&"x".repeat(228))], &["a name of at most 227 bytes"]);
    assert_refused(&env, &[&"unshard", &source, &env.path(&"x".repeat(300))], &[]);
    let longest = env.path(&"x".repeat(227));
    for _ in 0..2 {
        dtshard(&[&"unshard", &source, &longest, &"--overwrite"]).assert_succeeded();
    }
    assert_refused(&env, &[&"unshard", &source, &"/dev/full/out.pt"], &["/dev/full"]);
    assert_refused(&env, &[&"unshard", &source, &"/dev/full"], &["/dev/full", "exists"]);
    // A trailing slash requests a folder.
    let target = format!("{}/", env.path("out.safetensors").display());
    assert_refused(&env, &[&"consolidate", &source, &target, &"--everything"], &["ends with /, so it names a folder"]);
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    // Returns true for root: a new folder belongs to the current user.
    fs::metadata(tempfile::tempdir().unwrap().path()).unwrap().uid() == 0
}

/// Permissions do not restrict root, so the test runs for other users only.
#[test]
fn destination_and_source_without_permission_are_refused() {
    use std::os::unix::fs::PermissionsExt;
    if is_root() {
        return;
    }
    let env = TestEnv::new();
    let source = env.copy("replicated_plain/dcp");
    let locked = env.path("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    assert_refused(&env, &[&"unshard", &source, &locked.join("out.pt")], &["locked", "Permission denied"]);
    fs::set_permissions(source.join("__0_0.distcp"), fs::Permissions::from_mode(0o000)).unwrap();
    assert_refused(&env, &[&"unshard", &source, &env.path("out.pt")], &["__0_0.distcp", "Permission denied"]);
}

/// A mounted file system of 1 MiB. Mounting it needs root.
struct SmallFileSystem(PathBuf);

impl SmallFileSystem {
    fn mount(at: PathBuf) -> Option<Self> {
        fs::create_dir(&at).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(&at).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(Self(at))
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// Writes `count` tensors of `bytes` bytes each.
fn write_weights(path: &Path, count: usize, bytes: usize) {
    let entry = |index: usize| {
        let (begin, end) = (index * bytes, (index + 1) * bytes);
        format!(r#""w{index}":{{"dtype":"F8_E5M2","shape":[{bytes}],"data_offsets":[{begin},{end}]}}"#)
    };
    let header = format!("{{{}}}", (0..count).map(entry).collect::<Vec<_>>().join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.resize(file.len() + count * bytes, 1);
    fs::write(path, file).unwrap();
}

#[test]
fn full_file_system_leaves_nothing() {
    let env = TestEnv::new();
    let Some(tiny) = SmallFileSystem::mount(env.path("tiny")) else { return };
    let source = env.path("w.safetensors");
    // The output does not fit into the file system. This is detected before anything is written.
    write_weights(&source, 2, 1 << 20);
    let target = tiny.0.join("out");
    dtshard(&[&"consolidate", &source, &target]).assert_refused(&["needed on the file system", "free", "hint: "]);
    assert!(files_of(&tiny.0).is_empty());
    // The bytes of the output fit, but the pages that they need in the file system do not.
    write_weights(&source, 180, 4200);
    dtshard(&[&"consolidate", &source, &target, &"--max-shard-size=4200"])
        .assert_refused(&["No space left", "hint: free space"]);
    assert!(files_of(&tiny.0).is_empty());
    write_weights(&source, 10, 4200);
    dtshard(&[&"consolidate", &source, &target, &"--max-shard-size=4200"]).assert_succeeded();
}

#[test]
fn sidecar_files_count_in_the_check_of_free_space() {
    let env = TestEnv::new();
    let Some(tiny) = SmallFileSystem::mount(env.path("tiny")) else { return skip("cannot mount a tmpfs here") };
    let source = env.copy("fsdp3/ranks");
    env.write("src/ranks/train.log", vec![1; 2 << 20]);
    let outcome = dtshard(&[&"reshard", &source, &tiny.0.join("out"), &"--mesh=dp=2", &"--json"]);
    let document: serde_json::Value = serde_json::from_str(&outcome.out).unwrap();
    assert_eq!((outcome.code, document["error"]["kind"].as_str()), (Some(2), Some("usage")), "{document}");
    assert!(files_of(&tiny.0).is_empty());
}

/// A failed `--verify` and a failed replica check leave nothing behind either.
#[test]
fn failed_verification_leaves_nothing() {
    let env = TestEnv::new();
    let source = env.copy("conflict/tensor");
    assert_refused(&env, &[&"unshard", &source, &env.path("out.pt"), &"--verify"], &["differs"]);
    let old = env.copy("torch_file/model.pt");
    let content = fs::read(&old).unwrap();
    assert_refused(&env, &[&"unshard", &source, &old, &"--overwrite"], &["differs"]);
    assert_eq!(fs::read(old).unwrap(), content);
}

/// With `--overwrite`, files that the user wrote by hand are not replaced.
#[test]
fn overwrite_keeps_a_file_that_is_no_checkpoint() {
    let env = TestEnv::new();
    let source = env.copy("torch_file/model.pt");
    for name in ["notes.txt", "train.py", "x.pt"] {
        let own = env.write(name, "mine");
        assert_refused(&env, &[&"unshard", &source, &own, &"--overwrite"], &["is not a checkpoint"]);
        assert_eq!(fs::read_to_string(own).unwrap(), "mine");
    }
}
