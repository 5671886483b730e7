//! Destinations that cannot be written, and the promise that a failure leaves nothing behind.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bad_input::skip;
use crate::corrupt::{Sandbox, dtshard, files_of, fixture};

fn refused(sandbox: &Sandbox, args: &[&dyn AsRef<OsStr>], words: &[&str]) {
    let before = sandbox.names();
    dtshard(args).refused(words);
    assert_eq!(sandbox.names(), before, "something changed");
}

#[test]
fn source_and_destination_within_each_other() {
    let sandbox = Sandbox::new();
    let source = sandbox.copy("replicated_plain/dcp");
    let parent = source.parent().unwrap().to_path_buf();
    let roundabout = parent.join("..").join("src/dcp/../dcp/new");
    symlink(&source, sandbox.path("link")).unwrap();
    for (target, words) in [
        (source.clone(), "is the source itself"),
        (source.join("new"), "lies inside the source"),
        (source.join("new/deeper"), "lies inside the source"),
        (roundabout, "lies inside the source"),
        (sandbox.path("link"), "is the source itself"),
        (sandbox.path("link/new"), "lies inside the source"),
        (parent.clone(), "contains the source"),
        (sandbox.path(""), "contains the source"),
    ] {
        for more in ["--no-sync", "--overwrite", "--restart"] {
            refused(&sandbox, &[&"reshard", &source, &target, &"--mesh=a=2", &more], &[words, "hint: "]);
            refused(&sandbox, &[&"unshard", &source, &target, &more], &[words, "hint: "]);
        }
    }
    let file = sandbox.copy("torch_file/trainer.pt");
    refused(&sandbox, &[&"unshard", &file, &file, &"--overwrite"], &["is the source itself"]);
    // A source through a link is the same source.
    let link = sandbox.path("link");
    refused(&sandbox, &[&"unshard", &link, &source.join("out.pt")], &["lies inside the source"]);
}

/// The index of a folder stands for the files beside it, too.
#[test]
fn a_destination_that_is_a_file_of_the_source() {
    let sandbox = Sandbox::new();
    let source = sandbox.copy("safetensors/sharded");
    let (index, target) =
        (source.join("model.safetensors.index.json"), source.join("model-00002-of-00003.safetensors"));
    refused(&sandbox, &[&"consolidate", &index, &target, &"--overwrite"], &["source"]);
}

#[test]
fn destinations_that_exist() {
    let sandbox = Sandbox::new();
    let source = fixture("replicated_plain/dcp");
    let file = sandbox.write("file.pt", "old");
    sandbox.write("folder/x", "old");
    symlink("nowhere", sandbox.path("dangling")).unwrap();
    symlink(sandbox.path("folder"), sandbox.path("link")).unwrap();
    symlink(&file, sandbox.path("link.pt")).unwrap();
    for name in ["file.pt", "folder", "dangling", "link", "link.pt"] {
        let target = sandbox.path(name);
        let words = if name == "folder" { ["is a folder", "model.pt"] } else { ["exists", "--overwrite"] };
        refused(&sandbox, &[&"unshard", &source, &target], &[name, words[0], words[1]]);
        refused(&sandbox, &[&"reshard", &source, &target, &"--mesh=a=2", &"--to=dcp"], &[name, "exists"]);
        refused(&sandbox, &[&"reshard", &source, &target, &"--mesh=a=2", &"--to=dcp", &"--restart"], &["exists"]);
    }
    // A link is replaced, not what it leads to.
    dtshard(&[&"unshard", &source, &sandbox.path("link"), &"--overwrite"]).succeeded();
    assert_eq!(fs::read_to_string(sandbox.path("folder/x")).unwrap(), "old");
    assert!(sandbox.path("link").is_file() && !sandbox.path("link").is_symlink());
    // A folder does not become a file, and one that holds no checkpoint is not replaced at all.
    let folder = sandbox.path("folder");
    refused(&sandbox, &[&"unshard", &source, &folder, &"--overwrite"], &["is a folder"]);
    refused(&sandbox, &[&"reshard", &source, &folder, &"--mesh=a=2", &"--overwrite"], &["holds no checkpoint"]);
    assert_eq!(fs::read_to_string(sandbox.path("folder/x")).unwrap(), "old");
}

#[test]
fn destinations_that_are_no_place() {
    let sandbox = Sandbox::new();
    let source = fixture("replicated_plain/dcp");
    sandbox.write("file", "x");
    for (target, words) in [
        ("file/out", &["file"][..]),
        ("file/deep/out", &["file"]),
        ("..", &[]),
        ("new/..", &["cannot be a destination"]),
        ("new/../..", &[]),
        (".", &[]),
    ] {
        let target = sandbox.path("").join(target);
        refused(&sandbox, &[&"unshard", &source, &target], words);
        refused(&sandbox, &[&"reshard", &source, &target, &"--mesh=a=2"], words);
    }
    refused(&sandbox, &[&"unshard", &source, &"/"], &["hint: "]);
    refused(&sandbox, &[&"unshard", &source, &""], &["DST"]);
    refused(&sandbox, &[&"unshard", &source, &"/proc/out.pt"], &["/proc"]);
    refused(&sandbox, &[&"unshard", &source, &sandbox.path(&"x".repeat(300))], &[]);
    refused(&sandbox, &[&"unshard", &source, &"/dev/full/out.pt"], &["/dev/full"]);
    refused(&sandbox, &[&"unshard", &source, &"/dev/full"], &["/dev/full", "exists"]);
    // A slash at the end says that it is a folder.
    let target = format!("{}/", sandbox.path("out.safetensors").display());
    refused(&sandbox, &[&"consolidate", &source, &target, &"--everything"], &["is to be a folder"]);
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    // The user that owns a folder made now.
    fs::metadata(tempfile::tempdir().unwrap().path()).unwrap().uid() == 0
}

/// Root may write and read everything, so permissions are tested for others only.
#[test]
fn permissions() {
    use std::os::unix::fs::PermissionsExt;
    if is_root() {
        return;
    }
    let sandbox = Sandbox::new();
    let source = sandbox.copy("replicated_plain/dcp");
    let locked = sandbox.path("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    refused(&sandbox, &[&"unshard", &source, &locked.join("out.pt")], &["locked", "Permission denied"]);
    fs::set_permissions(source.join("__0_0.distcp"), fs::Permissions::from_mode(0o000)).unwrap();
    refused(&sandbox, &[&"unshard", &source, &sandbox.path("out.pt")], &["__0_0.distcp", "Permission denied"]);
}

/// A file system of 1 MiB; needs root.
struct Tiny(PathBuf);

impl Tiny {
    fn mount(at: PathBuf) -> Option<Self> {
        fs::create_dir(&at).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(&at).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(Self(at))
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// `count` tensors of `bytes` bytes each.
fn weights(path: &Path, count: usize, bytes: usize) {
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
fn a_full_file_system() {
    let sandbox = Sandbox::new();
    let Some(tiny) = Tiny::mount(sandbox.path("tiny")) else { return };
    let source = sandbox.path("w.safetensors");
    // More than fits at all: known before anything is written.
    weights(&source, 2, 1 << 20);
    let target = tiny.0.join("out");
    dtshard(&[&"consolidate", &source, &target]).refused(&["needed on the file system", "free", "hint: "]);
    assert!(files_of(&tiny.0).is_empty());
    // Fits by the sum of its bytes, but not in pages.
    weights(&source, 180, 4200);
    dtshard(&[&"consolidate", &source, &target, &"--max-shard-size=4200"])
        .refused(&["No space left", "hint: free space"]);
    assert!(files_of(&tiny.0).is_empty());
    weights(&source, 10, 4200);
    dtshard(&[&"consolidate", &source, &target, &"--max-shard-size=4200"]).succeeded();
}

#[test]
fn carried_files_count_in_the_check_of_free_space() {
    let sandbox = Sandbox::new();
    let Some(tiny) = Tiny::mount(sandbox.path("tiny")) else { return skip("cannot mount a tmpfs here") };
    let source = sandbox.copy("fsdp3/ranks");
    sandbox.write("src/ranks/train.log", vec![1; 2 << 20]);
    let outcome = dtshard(&[&"reshard", &source, &tiny.0.join("out"), &"--mesh=dp=2", &"--json"]);
    let said: serde_json::Value = serde_json::from_str(&outcome.out).unwrap();
    assert_eq!((outcome.code, said["error"]["kind"].as_str()), (Some(2), Some("usage")), "{said}");
    assert!(files_of(&tiny.0).is_empty());
}

/// What `--verify` and a failed replica check leave is nothing, too.
#[test]
fn a_conversion_that_fails_late_leaves_nothing() {
    let sandbox = Sandbox::new();
    let source = sandbox.copy("conflict/tensor");
    refused(&sandbox, &[&"unshard", &source, &sandbox.path("out.pt"), &"--verify"], &["differs"]);
    let old = sandbox.copy("torch_file/model.pt");
    let content = fs::read(&old).unwrap();
    refused(&sandbox, &[&"unshard", &source, &old, &"--overwrite"], &["differs"]);
    assert_eq!(fs::read(old).unwrap(), content);
}

/// What somebody wrote by hand is not replaced by a slip of the fingers.
#[test]
fn a_file_that_is_no_checkpoint_is_not_replaced() {
    let sandbox = Sandbox::new();
    let source = sandbox.copy("torch_file/model.pt");
    for name in ["notes.txt", "train.py", "x.pt"] {
        let own = sandbox.write(name, "mine");
        refused(&sandbox, &[&"unshard", &source, &own, &"--overwrite"], &["holds no checkpoint"]);
        assert_eq!(fs::read_to_string(own).unwrap(), "mine");
    }
}
