//! Tests of running a verb: the files that it writes, its messages and exit codes.
//!
//! Tested in other modules:
//!
//! - INT and TERM, a killed run and `--restart`, two runs into one DST: `bad_input::interrupted`.
//! - DST in SRC and SRC in DST, through links too: `bad_input::destination::nested_source_and_destination_are_refused`.
//! - An existing DST, links: `bad_input::destination::existing_destinations_are_refused_and_links_are_not_followed`;
//!   `--overwrite` leaves the old or the new checkpoint:
//!   `bad_input::interrupted::overwrite_killed_at_any_time_leaves_old_or_new_checkpoint`.
//! - A full file system: `bad_input::destination::full_file_system_leaves_nothing`.
//! - `--io`, `--threads`, `--max-memory`, `--verify` and `--progress` do not change the output:
//!   `conversions::io_threads_and_memory_options_change_no_byte`.
//! - `--max-memory` below the minimum, `--threads 0`: `bad_input::arguments::invalid_threads_and_memory_are_refused`.
//! - A run uses at most the memory that `--dry-run` reports: `tests/exchange/memory.rs`.
//! - The exit code after a broken pipe is 0: `inspect::broken_pipe_is_no_error`; for the verbs that write, this module.
//! - `--json`, `-q`, `-v` and `--progress` before and behind the verb:
//!   `inspect::output_options_are_accepted_before_and_after_the_verb`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use serde_json::json;

use crate::common::env::TestEnv;
use crate::common::{assert_same, expect, fixture, inspect, read, run, succeed};
use crate::contract::{assert_contains, contents, copy_tree, names_below};

/// Conversions with each verb that writes: the verb, the name of the output, and the options.
const WAYS: [(&str, &str, &str); 4] = [
    ("reshard", "shards", "--mesh dp=2"),
    ("reshard", "ranks", "--mesh dp=2 --to torch-ranks"),
    ("unshard", "whole.pt", ""),
    ("consolidate", "model", ""),
];

#[test]
fn dry_run_without_dst_writes_nothing() {
    for (verb, name, options) in WAYS {
        let env = TestEnv::new();
        let planned = succeed(verb, &[&fixture("fsdp4/dcp")], &format!("{options} --dry-run"));
        assert_contains(
            &planned.stdout,
            &["source ", "target ", "files ", "tensors ", "bytes written ", "peak memory "],
        );
        assert!(!planned.stderr.contains("wrote"), "{}", planned.stderr);
        let document = succeed(verb, &[&fixture("fsdp4/dcp")], &format!("{options} --dry-run --json")).json();
        assert_eq!(document["target"]["path"], json!(null));
        let target = env.path(name);
        let with = succeed(verb, &[&fixture("fsdp4/dcp"), &target], &format!("{options} --dry-run --json")).json();
        assert_eq!(with["target"]["path"], target.to_str().unwrap());
        assert_eq!(with["tensors"], document["tensors"]);
        assert!(env.names().is_empty());
        expect(2, verb, &[&fixture("fsdp4/dcp")], options);
    }
}

/// The tested options affect only processes that exchange data. The processes of these runs do not exchange data.
#[test]
fn options_without_effect_give_a_warning() {
    for (options, option, why) in [
        ("--bucket-size 1MB", "--bucket-size", "this is the only process"),
        ("--fast-reduce", "--fast-reduce", "this is the only process"),
        ("--bucket-size 1MB --backend cpu --part 0 --parts 1", "--bucket-size", "this is the only process"),
        (
            "--bucket-size 1MB --part 0 --parts 2 --no-wait",
            "--bucket-size",
            "processes that do not wait for each other cannot exchange bytes",
        ),
        (
            "--bucket-size 1MB --backend cpu --part 0 --parts 2",
            "--bucket-size",
            "with --backend cpu, each process reads from SRC all data that it writes",
        ),
        ("--fast-reduce --part 0 --parts 2", "--fast-reduce", "SRC has no Partial tensors, so nothing is reduced"),
    ] {
        let words = format!("{options} --dry-run --json");
        let planned = succeed("consolidate", &[&fixture("fsdp4/dcp"), &TestEnv::new().path("out")], &words);
        let warning = format!("{option} has no effect, because {why}");
        assert_contains(&planned.stderr, &[&format!("warning: {warning}\n")]);
        let warnings = planned.json()["warnings"].as_array().unwrap().clone();
        assert!(warnings.contains(&json!(warning)), "{options}: {warnings:?}");
    }
    let env = TestEnv::new();
    let made = succeed("consolidate", &[&fixture("fsdp4/dcp"), &env.path("out")], "--bucket-size 1MB");
    assert_contains(&made.stderr, &["warning: --bucket-size has no effect"]);
    let quiet = succeed("consolidate", &[&fixture("fsdp4/dcp"), &env.path("silent")], "");
    assert!(!quiet.stderr.contains("has no effect"), "{}", quiet.stderr);
}

#[test]
fn finished_run_leaves_dst_only() {
    for (verb, name, options) in WAYS {
        for more in ["", "--verify"] {
            let env = TestEnv::new();
            env.make(verb, "fsdp4/dcp", name, &format!("{options} {more}"));
            let names = env.names();
            assert!(names.iter().all(|found| found.split('/').next() == Some(name)), "{names:?}");
        }
    }
}

#[test]
fn existing_dst_is_refused_unless_empty_or_overwritten() {
    for (verb, name, options) in WAYS {
        let env = TestEnv::new();
        env.make(verb, "fsdp4/dcp", name, options);
        let before = contents(&env.path(""));
        env.refuse(verb, "fsdp3/dcp", name, options);
        env.refuse(verb, "fsdp3/dcp", name, &format!("{options} --restart"));
        assert!(before == contents(&env.path("")), "{verb}: nothing has changed");
        let made = env.make(verb, "replicated_plain/dcp", name, &format!("{options} --overwrite"));
        assert!(!made.tensor_names().iter().any(|tensor| tensor.contains("blocks")), "{verb}: the new one");
        assert!(env.names().iter().all(|found| found.starts_with(name)), "{:?}", env.names());
        // `--overwrite` also works without an existing DST.
        env.make(verb, "fsdp4/dcp", &format!("new_{name}"), &format!("{options} --overwrite"));
        if !name.contains('.') {
            fs::create_dir(env.path("empty")).unwrap();
            env.make(verb, "fsdp4/dcp", "empty", options);
        }
    }
}

/// Returns a test environment with the files of a run that was killed while it replaced DST: the old DST was renamed,
/// and the new DST was not.
fn killed_within_a_swap() -> TestEnv {
    let env = TestEnv::new();
    env.make("consolidate", "fsdp4/dcp", "out", "");
    fs::rename(env.path("out"), env.path(".out.dtshard-old")).unwrap();
    copy_tree(&fixture("safetensors/single"), &env.path(".out.dtshard-partial"));
    env
}

#[test]
fn restart_rolls_back_an_interrupted_swap() {
    let env = killed_within_a_swap();
    let options = ["consolidate", "--no-sync", "--restart"];
    let (source, target) = (fixture("fsdp3/dcp"), env.path("out"));
    let outcome = run(options.iter().map(AsRef::as_ref).chain([source.as_os_str(), target.as_os_str()]));
    assert_eq!(outcome.code, 2, "the old one is there again: {outcome:?}");
    assert_contains(&outcome.stderr, &["exists", "--overwrite"]);
    succeed("verify", &[&fixture("fsdp4/dcp"), &target], "--root model");
    assert_eq!(env.names(), ["out", "out/model.safetensors"]);
}

#[test]
fn next_run_rolls_back_an_interrupted_swap() {
    let env = killed_within_a_swap();
    expect(2, "consolidate", &[&fixture("fsdp3/dcp"), &env.path("out")], "");
    succeed("verify", &[&fixture("fsdp4/dcp"), &env.path("out")], "--root model");
}

#[test]
fn dst_inside_src_is_refused_and_src_is_unchanged() {
    for (verb, name, options) in WAYS {
        let env = TestEnv::new();
        copy_tree(&fixture("fsdp4/dcp"), &env.path("src"));
        let before = contents(&env.path("src"));
        env.refuse(verb, env.path("src"), &format!("src/{name}"), options);
        env.refuse(verb, env.path("src"), "src", &format!("{options} --overwrite"));
        env.make(verb, env.path("src"), name, &format!("{options} --verify --check-crc --check-replicas"));
        assert!(contents(&env.path("src")) == before, "{verb}");
    }
}

#[test]
fn parent_folders_are_created_and_permissions_follow_umask() {
    for (umask, folder_mode, file_mode) in [("022", 0o755, 0o644), ("077", 0o700, 0o600), ("002", 0o775, 0o664)] {
        let env = TestEnv::new();
        let target = env.path("deep/er/out");
        let command = format!(
            "umask {umask}; exec '{}' consolidate --no-sync '{}' '{}'",
            env!("CARGO_BIN_EXE_dtshard"),
            fixture("dcp_trainer").display(),
            target.display(),
        );
        assert!(Command::new("sh").args(["-c", &command]).stderr(Stdio::null()).status().unwrap().success());
        let mode = |name: &str| fs::metadata(env.path(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!([mode("deep"), mode("deep/er"), mode("deep/er/out")], [folder_mode; 3], "{umask}");
        assert_eq!(mode("deep/er/out/model.safetensors"), file_mode, "{umask}");
        assert_eq!(mode("deep/er/out/config.json"), file_mode, "{umask}");
    }
}

#[test]
fn quiet_prints_errors_only_and_verbose_prints_more() {
    let env = TestEnv::new();
    assert_eq!(env.make("consolidate", "verl", "a", "-q").run.stderr, "");
    assert_eq!(env.make("consolidate", "titan", "b", "--quiet --dtype bf16").run.stderr, "");
    assert_contains(&env.refuse("consolidate", "verl", "c", "-q --root nothing").stderr, &["--root nothing"]);
    let usual = env.make("consolidate", "fsdp4/dcp", "d", "").run.stderr;
    let verbose = env.make("consolidate", "fsdp4/dcp", "e", "-v").run.stderr;
    assert!(verbose.lines().count() > usual.lines().count(), "{verbose}");
    assert_contains(&verbose, &["left out: optim.state.embed.weight.exp_avg\n", "left out: nested.tuple\n"]);
    assert_eq!(env.make("consolidate", "fsdp4/dcp", "f", "-v -q").run.stderr, "", "quiet is stronger");
    // `--quiet` does not hide data on standard output.
    assert_eq!(env.make("consolidate", "fsdp4/dcp", "g", "").run.stdout, "");
    assert!(!succeed("inspect", &[&fixture("fsdp4/dcp")], "-q").stdout.is_empty());
}

#[test]
fn progress_option_shows_or_hides_progress() {
    let env = TestEnv::new();
    let stderr_of = |name: &str, options: &str| env.make("unshard", "fsdp4/dcp", name, options).run.stderr;
    assert_eq!(stderr_of("a.pt", "").lines().count(), 1);
    assert_eq!(stderr_of("b.pt", "--progress never").lines().count(), 1);
    assert_contains(&stderr_of("c.pt", "--progress always"), &["writing"]);
    assert_eq!(stderr_of("d.pt", "--progress always -q"), "");
}

#[test]
fn long_options_accept_underscores() {
    let env = TestEnv::new();
    let made = env.make("consolidate", "fsdp4/dcp", "a", "--max_shard_size 500 --max_memory=256MB --dry_run --json");
    assert_eq!(made.run.json()["files"].as_array().unwrap().len(), 3);
    let made = env.make("unshard", "fsdp4/dcp", "a_b.pt", "--add_prefix=my_ --no_sync");
    assert!(made.tensor_names().iter().all(|name| name.starts_with("my_")), "values keep theirs");
    let made = env.make("reshard", "fsdp4/dcp", "c", "--mesh dp=1,tp_x=2 --mesh_ranks 0,1 --placements R,S(0)");
    assert!(made.path.join("__1_0.distcp").is_file());
}

#[test]
fn repeated_option_takes_the_last_value() {
    let env = TestEnv::new();
    let made = env.make("unshard", "fsdp4/dcp", "a.pt", "--root optim --root model --no-sync -q --json --json");
    assert!(made.tensor_names().contains(&"embed.weight".into()));
}

#[test]
fn hidden_aliases_run_the_verbs() {
    let env = TestEnv::new();
    let merged =
        run(["merge".as_ref(), fixture("fsdp4/dcp").as_os_str(), env.path("merged").as_os_str(), "--no-sync".as_ref()]);
    assert_eq!(merged.code, 0, "{merged:?}");
    let consolidated = env.make("consolidate", "fsdp4/dcp", "consolidated", "");
    assert!(contents(&env.path("merged")) == contents(&consolidated.path));
    let converted = run([
        "convert".as_ref(),
        fixture("fsdp4/dcp").as_os_str(),
        env.path("converted").as_os_str(),
        "--mesh=dp=2".as_ref(),
    ]);
    assert_eq!(converted.code, 0, "{converted:?}");
    let resharded = env.make("reshard", "fsdp4/dcp", "resharded", "--mesh dp=2");
    assert!(contents(&env.path("converted")) == contents(&resharded.path));
    assert!(run(["diff".as_ref(), fixture("fsdp4/dcp").as_os_str(), fixture("fsdp3/dcp").as_os_str()]).code == 0);
    assert!(run(["diff".as_ref(), fixture("fsdp4/dcp").as_os_str(), fixture("tp2/dcp").as_os_str()]).code == 1);
}

#[test]
fn mistyped_arguments_get_a_suggestion() {
    for (arguments, meant) in [
        (&["consolidat", "a", "b"][..], "consolidate"),
        (&["consolidate", "a", "b", "--max-shard-sise", "5GB"], "--max-shard-size"),
        (&["consolidate", "a", "b", "--asets", "none"], "--assets"),
        (&["reshard", "a", "b", "--mehs", "dp=2"], "--mesh"),
        (&["reshard", "a", "b", "--mesh", "dp=2", "--placement", "R"], "--placements"),
        (&["unshard", "a", "b", "--to", "torhc"], "torch"),
        (&["unshard", "a", "b", "--on-conflict", "rank_0"], "rank0"),
        (&["verify", "a", "b", "--comon"], "--common"),
        (&["inspect", "a", "--digst"], "--digest"),
    ] {
        let outcome = run(arguments);
        assert_eq!(outcome.code, 2, "{arguments:?}");
        assert_contains(&outcome.stderr, &["tip: a similar", meant]);
    }
}

#[test]
fn option_of_another_verb_names_that_verb() {
    for (arguments, verbs) in [
        ("consolidate a b --mesh dp=2", "--mesh is an option of reshard"),
        ("inspect a --mesh=dp=2", "--mesh is an option of reshard"),
        ("flatten a b --max-shard-size 5GB", "--max-shard-size is an option of unshard and consolidate"),
        ("verify a b --dry-run", "--dry-run is an option of reshard, unshard, flatten and consolidate"),
        ("reshard a b --digest", "--digest is an option of inspect"),
        ("--mesh dp=2 reshard a b", "--mesh is an option of reshard"),
    ] {
        let outcome = run(arguments.split(' '));
        assert_eq!(outcome.code, 2, "{arguments}");
        assert_contains(&outcome.stderr, &["unexpected argument '--", &format!("tip: {verbs}\n")]);
        assert_eq!(outcome.stderr.matches("tip: ").count(), 1, "{}", outcome.stderr);
        let document = run(arguments.split(' ').chain(["--json"])).json();
        assert_eq!(document["error"]["hint"], verbs, "{arguments}");
    }
    // An unknown option gets no tip that names another verb.
    let outcome = run(["consolidate", "a", "b", "--frobnicate"]);
    assert!(!outcome.stderr.contains("is an option of"), "{}", outcome.stderr);
}

#[test]
fn broken_pipe_is_no_error_of_verbs_that_write() {
    for (verb, name, options) in WAYS {
        let env = TestEnv::new();
        let mut command = Command::new(env!("CARGO_BIN_EXE_dtshard"));
        command.arg(verb).arg(fixture("fsdp4/dcp")).arg(env.path(name)).args(options.split_whitespace());
        command.args(["--json", "--no-sync"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        assert_eq!(child.wait().unwrap().code(), Some(0), "{verb}");
        assert!(env.path(name).exists());
    }
}

#[test]
fn failed_run_exits_with_2() {
    let env = TestEnv::new();
    for (verb, name, options) in WAYS {
        env.refuse(verb, "nowhere", name, options);
        env.refuse(verb, "torch_file/legacy.pt", name, options);
        env.refuse(verb, "conflict/shape", name, options);
        env.refuse(verb, "fsdp4/dcp", name, &format!("{options} --no-such-option"));
    }
    assert_eq!(run(["frobnicate"]).code, 2);
    assert_eq!(run(["--help"]).code, 0);
    assert_eq!(run(["--version"]).code, 0);
}

#[test]
fn max_memory_below_the_minimum_is_an_error_with_the_minimum() {
    let env = TestEnv::new();
    let options = "--max-memory 1MB --threads 2";
    for (verb, name, more) in WAYS {
        env.refuse(verb, "fsdp4/dcp", name, &format!("{more} {options}"));
    }
    let outcome = env.refuse("unshard", "fsdp4/dcp", "x.pt", options);
    let floor = outcome
        .stderr
        .split_whitespace()
        .filter_map(|word| word.trim_end_matches(',').parse::<u64>().ok())
        .max()
        .unwrap();
    env.make("unshard", "fsdp4/dcp", "x.pt", &format!("--threads 2 --max-memory {floor}"));
}

#[test]
fn verify_option_reads_the_output_back() {
    for (verb, name, options) in WAYS {
        let env = TestEnv::new();
        let made = env.make(verb, "fsdp4/dcp", name, &format!("{options} --verify --progress always"));
        assert_contains(&made.run.stderr, &["verifying", "note: verified: DST was read back"]);
    }
}

#[test]
fn every_io_mode_and_sync_give_the_same_values() {
    for io in ["auto", "mmap", "read", "direct"] {
        let env = TestEnv::new();
        let made =
            env.make("reshard", "fsdp_tp/ranks", "x", &format!("--mesh dp=2 --placements S(0) --io {io} --threads 2"));
        assert_same(&made.tensors(), &read(&fixture("fsdp_tp/ranks")), io);
    }
    // This run syncs its output; the helper `make` runs with `--no-sync`.
    let env = TestEnv::new();
    let target = env.path("x");
    let outcome = run(["unshard".as_ref(), fixture("fsdp4/dcp").as_os_str(), target.as_os_str()]);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert_eq!(inspect(&target, "--brief")["format"], "torch");
    assert_eq!(names_below(env.path("").as_path()), ["x"]);
}
