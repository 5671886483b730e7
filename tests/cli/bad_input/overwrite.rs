//! Tests that `--overwrite` replaces checkpoints, and that it refuses a destination with any other content.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::bad_input::skip;
use crate::common::env::TestEnv;
use crate::corrupt::{copy_all, dtshard, files_of, fixture};

/// Returns everything below a folder, with the content of files and the targets of links.
fn tree(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let content = |path: &PathBuf| match fs::read_link(path) {
        Ok(target) => target.into_os_string().into_encoded_bytes(),
        Err(_) => fs::read(path).unwrap_or_default(),
    };
    files_of(folder).into_iter().map(|path| (path.clone(), content(&path))).collect()
}

/// Asserts that the run fails with exit code 2 and a `usage` error that contains `names`, that it changes no file, and
/// that a dry run prints a warning. Returns the message.
#[track_caller]
fn assert_refused(env: &TestEnv, args: &[&dyn AsRef<OsStr>], names: &[&str]) -> String {
    let before = tree(&env.path(""));
    let mut args = args.to_vec();
    args.extend_from_slice(&[&"--overwrite", &"--json"]);
    let outcome = dtshard(&args);
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    let error = &serde_json::from_str::<Json>(&outcome.out).unwrap()["error"];
    assert_eq!(error["kind"], "usage");
    assert!(error["hint"].is_string());
    let message = error["message"].as_str().unwrap().to_owned();
    names.iter().for_each(|name| assert!(message.contains(name), "no {name} in {message}"));
    args.push(&"--dry-run");
    let outcome = dtshard(&args);
    let document: Json = serde_json::from_str(&outcome.assert_succeeded().out).unwrap();
    let warnings_of_overwrite = document["warnings"].as_array().unwrap().iter().filter_map(Json::as_str);
    let warnings_of_overwrite: Vec<&str> = warnings_of_overwrite.filter(|warning| warning.contains(&message)).collect();
    assert_eq!(warnings_of_overwrite.len(), 1, "{document}");
    assert!(tree(&env.path("")) == before, "something changed");
    message
}

/// Returns a source, and the folder into which `consolidate` wrote its model.
fn consolidated(env: &TestEnv) -> (PathBuf, PathBuf) {
    let (source, out) = (fixture("llama_tiny/ranks"), env.path("out"));
    dtshard(&[&"consolidate", &source, &out]).assert_succeeded();
    (source, out)
}

#[test]
fn folder_with_foreign_files_and_one_torch_file_is_refused() {
    let env = TestEnv::new();
    let source = fixture("llama_tiny/ranks");
    env.write("out/.git/HEAD", "ref: refs/heads/main");
    env.write("out/.git/objects/ab/cdef", "blob");
    env.write("out/thesis.tex", "mine");
    fs::copy(fixture("torch_file/model.pt"), env.path("out/stray.pt")).unwrap();
    let out = env.path("out");
    let message = assert_refused(&env, &[&"consolidate", &source, &out], &[".git/", "thesis.tex"]);
    assert!(!message.contains("stray.pt") && !message.contains("HEAD"), "{message}");
    assert_refused(&env, &[&"reshard", &source, &out, &"--mesh=dp=2"], &[".git/", "thesis.tex"]);
}

#[test]
fn foreign_files_in_an_output_folder_are_refused() {
    let cases: [(&str, &str); 14] = [
        ("notes.txt", "notes.txt"),
        (".DS_Store", ".DS_Store"),
        (".gitattributes", ".gitattributes"),
        ("README.md", "README.md"),
        ("x.pt", "x.pt"),
        ("results.zip", "results.zip"),
        ("tokenizer-notes.txt", "tokenizer-notes.txt"),
        ("LICENSE-notes", "LICENSE-notes"),
        ("modeling_mine.py", "modeling_mine.py"),
        ("notes.distcp", "notes.distcp"),
        ("optimizer_results/notes.txt", "optimizer_results/"),
        ("huggingface/thesis.tex", "huggingface/thesis.tex"),
        ("sub/deeper/thesis.tex", "sub/"),
        ("checkpoint-500/config.json", "checkpoint-500/"),
    ];
    for (name, named) in cases {
        let env = TestEnv::new();
        let (source, out) = consolidated(&env);
        let user_file = env.write(&format!("out/{name}"), "mine");
        assert_refused(&env, &[&"consolidate", &source, &out], &[named]);
        fs::remove_file(user_file).unwrap();
        if name.contains('/') {
            fs::remove_dir_all(out.join(name.split('/').next().unwrap())).unwrap();
        }
        dtshard(&[&"consolidate", &source, &out, &"--overwrite"]).assert_succeeded();
    }
}

/// A folder with checkpoints in subfolders is not replaced, although it holds a checkpoint itself.
#[test]
fn folder_of_several_checkpoints_is_refused() {
    let env = TestEnv::new();
    let (source, out) = consolidated(&env);
    copy_all(&fixture("fsdp4/dcp"), &out.join("step-1"));
    copy_all(&fixture("fsdp4/dcp"), &out.join("step-2"));
    assert_refused(&env, &[&"consolidate", &source, &out], &["step-1/", "step-2/"]);
    fs::remove_file(out.join("model.safetensors")).unwrap();
    assert_refused(&env, &[&"consolidate", &source, &out], &[]);
}

#[test]
fn eight_foreign_names_are_listed_and_the_rest_counted() {
    let env = TestEnv::new();
    let (source, out) = consolidated(&env);
    // The names have letters, because consecutive numbers would be shown as one range.
    ('a'..='t').for_each(|letter| drop(env.write(&format!("out/note-{letter}"), "mine")));
    let message = assert_refused(&env, &[&"consolidate", &source, &out], &["note-a", "note-h", "12"]);
    assert_eq!(message.matches("note-").count(), 8, "{message}");
}

#[test]
fn file_without_a_checkpoint_is_refused() {
    let env = TestEnv::new();
    let source = env.copy("torch_file/model.pt");
    let mut archive = fs::read(&source).unwrap();
    archive[30..44].copy_from_slice(b"word/style.xml");
    let files: [(&str, &[u8]); 5] = [
        ("notes.txt", b"mine"),
        ("out.pt", b"mine"),
        ("out.safetensors", b"12345678{ mine }"),
        ("empty.pt", b""),
        ("thesis.docx", &archive),
    ];
    for (name, content) in files {
        let user_file = env.write(name, content);
        assert_refused(&env, &[&"unshard", &source, &user_file, &"--to=torch"], &[name]);
        assert_refused(&env, &[&"reshard", &source, &user_file, &"--to=dcp", &"--mesh=dp=2"], &[name]);
    }
}

#[test]
fn links_to_folders_and_to_other_files_are_foreign() {
    let env = TestEnv::new();
    let (source, out) = consolidated(&env);
    env.write("elsewhere/thesis.tex", "mine");
    for (name, target) in [("huggingface", "elsewhere"), ("data", "elsewhere"), ("note", "elsewhere/thesis.tex")] {
        symlink(env.path(target), out.join(name)).unwrap();
        assert_refused(&env, &[&"consolidate", &source, &out], &[name]);
        fs::remove_file(out.join(name)).unwrap();
    }
    // The folder is a hub cache with links to blobs. Only the links are removed.
    let blob = env.path("blob");
    fs::rename(out.join("model.safetensors"), &blob).unwrap();
    symlink(&blob, out.join("model.safetensors")).unwrap();
    dtshard(&[&"consolidate", &source, &out, &"--overwrite"]).assert_succeeded();
    assert!(blob.is_file() && !out.join("model.safetensors").is_symlink());
}

/// Every verb replaces the output of every verb and format.
#[test]
fn results_of_every_verb_and_format_are_replaced() {
    let env = TestEnv::new();
    let trainer = env.copy("fsdp4/ranks");
    // `reshard` copies files with unknown names unchanged.
    env.write("src/ranks/train.log", "step 1");
    env.write("src/ranks/notes/README.md", "mine");
    let accelerate = fixture("accelerate_llama");
    let flat = fixture("flat4/flat");
    let commands: [(&str, &Path, &str); 10] = [
        ("consolidate", &fixture("verl"), ""),
        ("consolidate", &fixture("llama_tiny/ranks"), "--max-shard-size=20KB"),
        ("reshard", &trainer, "--mesh=dp=2"),
        ("reshard", &trainer, "--mesh=dp=2 --to=dcp"),
        ("reshard", &trainer, "--mesh=dp=2 --placements=S(0) --to=local"),
        ("reshard", &fixture("verl"), "--mesh=fsdp=2"),
        ("reshard", &accelerate, "--mesh=dp=2"),
        ("reshard", &fixture("titan"), "--mesh=dp=2"),
        ("flatten", &flat, &format!("--world-size=2 --flat-layout={}.flat_layout.json", flat.display())),
        ("reshard", &fixture("dcp_trainer"), "--mesh=dp=2"),
    ];
    let out = env.path("out");
    for (verb, source, options) in &commands {
        for _ in 0..2 {
            let options: Vec<&str> = options.split_whitespace().collect();
            let mut args: Vec<&dyn AsRef<OsStr>> = vec![verb, source, &out, &"--overwrite", &"--no-sync"];
            args.extend(options.iter().map(|option| -> &dyn AsRef<OsStr> { option }));
            dtshard(&args).assert_succeeded();
        }
    }
    let file = env.path("out.pt");
    for verb in ["unshard", "consolidate", "unshard"] {
        dtshard(&[&verb, &trainer, &file, &"--overwrite", &"--no-sync"]).assert_succeeded();
    }
    dtshard(&[&"reshard", &trainer, &file, &"--to=dcp", &"--mesh=dp=2", &"--overwrite"]).assert_succeeded();
    assert!(file.is_dir());
}

#[test]
fn sidecar_files_are_replaced_unless_edited() {
    let env = TestEnv::new();
    let (source, out) = (env.copy("fsdp4/ranks"), env.path("out"));
    let again = |target: &PathBuf| dtshard(&[&"reshard", &source, target, &"--mesh=dp=2", &"--overwrite"]);
    env.write("src/ranks/train.log", "step 1");
    env.write("src/ranks/sub/notes.txt", "of the trainer");
    again(&out).assert_succeeded();
    // The copy has no extended attributes, but its content is the content that this run would write.
    let copy = env.path("copy");
    copy_all(&out, &copy);
    again(&copy).assert_succeeded();
    let keeps_marks = rustix::fs::lgetxattr(out.join("train.log"), "user.dtshard.carried", &mut [0_u8; 64][..]).is_ok();
    if keeps_marks {
        // The trainer has continued, so the copy in the destination is older than the file in SRC.
        env.write("src/ranks/train.log", "step 1, step 2");
        fs::remove_dir_all(source.join("sub")).unwrap();
        again(&out).assert_succeeded();
        assert_eq!(fs::read_to_string(out.join("train.log")).unwrap(), "step 1, step 2");
        assert!(!out.join("sub").exists());
    } else {
        skip("files that were carried earlier and changed in SRC: the file system keeps no attributes");
    }
    env.write("out/train.log", "edited by hand");
    assert_refused(&env, &[&"reshard", &source, &out, &"--mesh=dp=2"], &["train.log"]);
}

/// The folder has files that `save_pretrained`, the Hugging Face Trainer and the hub write.
#[test]
fn files_of_hugging_face_are_replaced_except_hub_files() {
    let env = TestEnv::new();
    let (source, out) = consolidated(&env);
    let saved = fixture("torch_file/model.pt");
    for name in ["generation_config.json", "tokenizer.json", "special_tokens_map.json", "trainer_state.json"] {
        env.write(&format!("out/{name}"), "{}");
    }
    for name in ["training_args.bin", "scheduler.pt", "optimizer.pt", "rng_state_0.pth", "pytorch_model.bin"] {
        fs::copy(&saved, out.join(name)).unwrap();
    }
    dtshard(&[&"consolidate", &source, &out, &"--overwrite"]).assert_succeeded();
    env.write("out/README.md", "---\nlicense: mit\n---\n");
    env.write("out/.gitattributes", "*.bin filter=lfs");
    env.write("out/tf_model.h5", "\u{89}HDF");
    assert_refused(&env, &[&"consolidate", &source, &out], &["README.md", ".gitattributes", "tf_model.h5"]);
}

#[test]
fn folders_without_a_checkpoint_are_refused() {
    let env = TestEnv::new();
    let source = fixture("llama_tiny/ranks");
    let out = env.path("out");
    env.write("out/config.json", "{}");
    assert_refused(&env, &[&"consolidate", &source, &out], &["out"]);
    // DeepSpeed's files are torch files that dtshard cannot write again.
    fs::remove_file(out.join("config.json")).unwrap();
    fs::copy(fixture("torch_file/model.pt"), out.join("mp_rank_00_model_states.pt")).unwrap();
    assert_refused(&env, &[&"consolidate", &source, &out], &["out"]);
}

/// An interrupted replacement is undone first. Then the restored folder is checked like any other folder.
#[test]
fn old_checkpoint_of_an_interrupted_swap_is_restored() {
    let env = TestEnv::new();
    let (source, out) = consolidated(&env);
    let old = env.path(".out.dtshard-old");
    fs::rename(&out, &old).unwrap();
    dtshard(&[&"consolidate", &source, &out, &"--overwrite"]).assert_succeeded();
    assert!(out.join("model.safetensors").is_file() && !old.exists());
    env.write("out/thesis.tex", "mine");
    fs::rename(&out, &old).unwrap();
    dtshard(&[&"consolidate", &source, &out, &"--overwrite"]).assert_refused(&["thesis.tex"]);
    assert_eq!(fs::read_to_string(out.join("thesis.tex")).unwrap(), "mine");
    assert_eq!(fs::read_dir(env.path("")).unwrap().count(), 1);
}
