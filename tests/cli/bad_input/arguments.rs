//! Invalid arguments: every verb exits with code 2 and leaves nothing behind.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use crate::common::env::TestEnv;
use crate::corrupt::{Outcome, command, copy_all, dtshard, fixture};

/// Reshards a small DCP directory with these arguments, and asserts exit code 2 and no new file.
fn assert_refused(args: &[&str]) {
    let env = TestEnv::new();
    let (source, target) = (fixture("replicated_plain/dcp"), env.path("out"));
    let mut all: Vec<&dyn AsRef<OsStr>> = vec![&"reshard", &source, &target];
    all.extend(args.iter().map(|arg| arg as &dyn AsRef<OsStr>));
    dtshard(&all).assert_refused(&[]);
    assert_eq!(env.names(), Vec::<String>::new(), "{args:?}");
}

#[test]
fn invalid_meshes_are_refused() {
    for mesh in [
        "dp=0",
        "dp",
        "=4",
        "dp=4,dp=2",
        "dp=99999999999",
        "",
        ",",
        "dp=",
        "dp=-1",
        "dp=4=2",
        "dp=1.5",
        "dp=4,",
        "dp=18446744073709551616",
        "dp=4294967296,tp=4294967296",
        "dp=16777217",
        "d p=2",
        "dp=0x4",
    ] {
        assert_refused(&["--mesh", mesh]);
    }
    assert_refused(&["--mesh=dp=2", "--mesh-ranks=0"]);
    assert_refused(&["--mesh=dp=2", "--mesh-ranks=0,0"]);
    assert_refused(&["--mesh=dp=2", "--mesh-ranks=0,1,2"]);
    assert_refused(&["--mesh=dp=2", "--mesh-ranks=0,x"]);
    assert_refused(&["--mesh=dp=2", "--mesh-ranks=0,4294967296"]);
    assert_refused(&[]);
}

#[test]
fn invalid_placements_are_refused() {
    for list in ["S", "S(", "S(a)", "Q", "S(0)x", "S(99999999999999999999)", "_S(0)", "_S(0,0)", "", ",", "P(mean)"] {
        assert_refused(&["--mesh=dp=2", "--placements", list]);
    }
    assert_refused(&["--mesh=dp=2", "--placements=S(0),R"]);
    assert_refused(&["--mesh=dp=2,tp=2", "--placements=S(0)"]);
    for partial in ["P", "P(sum)", "Partial(max)", "**=P(sum)"] {
        assert_refused(&["--mesh=dp=2", "--placements", partial]);
    }
    assert_refused(&["--mesh=dp=2", "--placements=R", "--placements=S(0)"]);
    assert_refused(&["--mesh=dp=2", "--placements=no.such.tensor=R"]);
    assert_refused(&["--mesh=dp=2", "--placements=**=S(9)"]);
    assert_refused(&["--mesh=dp=2", "--placements=[=R"]);
    assert_refused(&["--mesh=dp=2,tp=2"]);
}

#[test]
fn invalid_threads_and_memory_are_refused() {
    assert_refused(&["--mesh=dp=2", "--threads=0"]);
    for threads in ["-1", "x", "99999999999999999999", "1.5", ""] {
        assert_refused(&["--mesh=dp=2", &format!("--threads={threads}")]);
    }
    for threads in ["100000", "18446744073709551615"] {
        assert_refused(&["--mesh=dp=2", "--max-memory=1000TB", "--threads", threads]);
    }
    assert_refused(&["--mesh=dp=2", "--max-memory=1"]);
    assert_refused(&["--mesh=dp=2", "--max-memory=40MB", "--threads=8"]);
    for size in ["0", "-1", "x", "5XB", "99999999999999999999GB", "nan", "1e400"] {
        assert_refused(&["--mesh=dp=2", &format!("--max-memory={size}")]);
    }
}

/// Contradictions between the environment variables of launchers are tested in `launch::tests`.
#[test]
fn invalid_parts_are_refused() {
    let mesh = "--mesh=dp=2";
    assert_refused(&[mesh, "--part=0"]);
    assert_refused(&[mesh, "--parts=4"]);
    assert_refused(&[mesh, "--part=4", "--parts=4"]);
    assert_refused(&[mesh, "--parts=0"]);
    for number in ["-1", "x", "1.5", "4294967296", ""] {
        assert_refused(&[mesh, "--parts=4", &format!("--part={number}")]);
        assert_refused(&[mesh, &format!("--parts={number}")]);
    }
    assert_refused(&[mesh, "--resume", "--restart"]);
}

/// Verbs that only read ignore the environment variables of launchers. Verbs that write refuse variables that
/// contradict each other.
#[test]
fn contradicting_launchers_are_refused_by_verbs_that_write() {
    let env = TestEnv::new();
    let (source, target) = (fixture("replicated_plain/dcp"), env.path("out"));
    let task = |args: &[&dyn AsRef<OsStr>]| -> Outcome {
        let mut command = command(args);
        command.envs([("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "2"), ("RANK", "0"), ("WORLD_SIZE", "8")]);
        command.output().unwrap().into()
    };
    let words = ["SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=4", "RANK=0, WORLD_SIZE=8", "hint: unset RANK", "--parts 1"];
    task(&[&"reshard", &source, &target, &"--mesh=dp=2"]).assert_refused(&words);
    task(&[&"reshard", &source, &"--mesh=dp=2", &"--dry-run", &"--json"])
        .assert_refused(&words)
        .assert_mentions(&["\"kind\": \"usage\""]);
    assert!(env.names().is_empty());
    for verb in ["inspect", "verify"] {
        let outcome = task(&[&verb, &source]);
        assert!(!outcome.assert_succeeded().err.contains("[2/4]"), "{outcome:?}");
    }
    let outcome = task(&[&"reshard", &source, &target, &"--mesh=dp=2", &"--parts=1"]);
    assert!(!outcome.assert_succeeded().err.contains('['), "{outcome:?}");
}

/// Every line begins with the number of its process. If the output is equal in all processes, only one process prints
/// it.
#[test]
fn output_of_several_processes_is_prefixed_and_printed_once() {
    let source = fixture("replicated_plain/dcp");
    let task = |rank: &str, args: &[&dyn AsRef<OsStr>]| -> Outcome {
        let first: [&dyn AsRef<OsStr>; 4] = [&"reshard", &source, &"--mesh=dp=2", &"--dry-run"];
        let mut command = command(&[&first, args].concat());
        command.envs([("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", rank), ("SLURMD_NODENAME", "n1")]);
        command.output().unwrap().into()
    };
    let first = task("0", &[]);
    assert!(first.assert_succeeded().out.contains("bytes written"), "{first:?}");
    let other = task("2", &[]);
    assert_eq!((other.assert_succeeded().out.as_str(), other.err.as_str()), ("", ""));
    let other = task("2", &[&"-v"]);
    other
        .assert_succeeded()
        .assert_mentions(&["[2/4] part 2 of 4 (counted from 0), started by srun on n1\n", "[2/4] reading "]);
    assert!(other.err.lines().all(|line| line.starts_with("[2/4] ")), "{other:?}");
    task("2", &[&"--include=nothing"]).assert_refused(&["[2/4] error: ", "[2/4] hint: "]);
    assert!(task("2", &[&"--json"]).assert_succeeded().out.is_empty());
    task("2", &[&"--json", &"--include=nothing"]).assert_refused(&["{\n  \"error\""]);
    // All processes have the same command line, so only one process prints the tip and the usage.
    let first = task("0", &[&"--mehs=dp=2", &"--json"]);
    first.assert_refused(&["error: unexpected argument '--mehs' found", "tip: ", "Usage: ", "\"error\""]);
    let other = task("2", &[&"--mehs=dp=2", &"--json"]);
    other.assert_refused(&[]);
    assert_eq!((other.err.as_str(), other.out.as_str()), ("[2/4] error: unexpected argument '--mehs' found\n", ""));
    assert!(task("2", &[&"--help"]).assert_succeeded().out.is_empty());
    assert!(task("0", &[&"--help"]).assert_succeeded().out.contains("Usage: "));
}

#[test]
fn formats_not_written_or_not_present_are_refused() {
    assert_refused(&["--mesh=dp=2", "--to=safetensors"]);
    assert_refused(&["--mesh=dp=2", "--to=nonsense"]);
    assert_refused(&["--mesh=dp=2", "--from=torch"]);
    assert_refused(&["--mesh=dp=2", "--io=nonsense"]);
}

#[test]
fn unknown_series_root_and_assets_are_refused() {
    let env = TestEnv::new();
    let source = fixture("fsdp3/ranks");
    let target = env.path("o.pt");
    dtshard(&[&"unshard", &source, &target, &"--series", &"nope"])
        .assert_refused(&["no series `nope`", "model, extra_state"]);
    let target = env.path("o.safetensors");
    dtshard(&[&"consolidate", &source, &target, &"--root", &"no.such"])
        .assert_refused(&["--root no.such", "top of the state"]);
    dtshard(&[&"consolidate", &source, &target, &"--root", &"x", &"--everything"]).assert_refused(&["--everything"]);
    let none = env.path("none");
    dtshard(&[&"consolidate", &source, &env.path("o"), &"--assets", &none])
        .assert_refused(&["--assets", "no such folder"]);
    assert!(env.names().is_empty());
}

fn assert_no_checkpoint(source: &Path) {
    let env = TestEnv::new();
    for verb in ["unshard", "consolidate"] {
        dtshard(&[&verb, &source, &env.path("out.pt")]).assert_refused(&[]);
    }
    dtshard(&[&"verify", &source]).assert_refused(&[]);
    dtshard(&[&"inspect", &source]).assert_refused(&[]);
    assert!(env.names().is_empty());
}

#[test]
fn sources_without_a_checkpoint_are_refused() {
    let env = TestEnv::new();
    assert_no_checkpoint(&env.path("nowhere"));
    fs::create_dir(env.path("empty")).unwrap();
    assert_no_checkpoint(&env.path("empty"));
    for address in ["s3://bucket/x", "gs://bucket/x", "hf://org/model", "https://example.org/model.pt"] {
        assert_no_checkpoint(Path::new(address));
    }
    assert_no_checkpoint(&env.write("model.gguf", b"GGUF\x03\0\0\0"));
    assert_no_checkpoint(&env.write("hidden.bin", b"\x89HDF\r\n\x1a\n"));
    assert_no_checkpoint(&fixture("torch_file/script.pt"));
    assert_no_checkpoint(&fixture("torch_file/legacy.pt"));
    for (name, bytes) in
        [("a.txt", &b"hello"[..]), ("a.pt", b""), ("b.pt", b"PK"), ("zeros", &[0; 600]), ("x.bin", b"\x80\x02}.")]
    {
        assert_no_checkpoint(&env.write(name, bytes));
    }
    env.write("several/a.pt", b"PK\x03\x04");
    env.write("several/b.pt", b"PK\x03\x04");
    assert_no_checkpoint(&env.path("several"));
    assert_no_checkpoint(Path::new("/dev/null"));
    assert_no_checkpoint(Path::new("/dev/zero"));
    let pipe = env.path("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert_no_checkpoint(&pipe);
    assert_no_checkpoint(&fixture("fsdp3/dcp/.metadata"));
    assert_no_checkpoint(&fixture("fsdp3/dcp/__0_0.distcp"));
}

/// The program must not open a pipe for reading, because that would block forever.
#[test]
fn folder_or_pipe_in_place_of_a_file_is_refused() {
    for name in
        ["w.safetensors", "w.pt", "model_rank_0.pt", ".metadata", "__0.metadata", "model.safetensors.index.json"]
    {
        for pipe in [false, true] {
            let env = TestEnv::new();
            let source = env.path("src");
            fs::create_dir(&source).unwrap();
            if pipe {
                let made = std::process::Command::new("mkfifo").arg(source.join(name)).status().unwrap();
                assert!(made.success());
            } else {
                fs::create_dir(source.join(name)).unwrap();
            }
            let mut run = crate::corrupt::command(&[&"inspect", &source]).spawn().unwrap();
            let mut waited = 0;
            while run.try_wait().unwrap().is_none() {
                std::thread::sleep(std::time::Duration::from_millis(20));
                waited += 1;
                if waited > 500 {
                    run.kill().unwrap();
                    panic!("{name} (pipe: {pipe}) is waited for");
                }
            }
            crate::corrupt::Outcome::from(run.wait_with_output().unwrap()).assert_refused(&["src"]);
        }
    }
}

#[test]
fn folder_with_two_formats_is_refused_without_from() {
    let env = TestEnv::new();
    let source = env.copy("fsdp3/dcp");
    copy_all(&fixture("safetensors/single"), &source);
    assert_no_checkpoint(&source);
    dtshard(&[&"verify", &source, &"--from", &"dcp"]).assert_succeeded();
    dtshard(&[&"verify", &source, &"--from", &"safetensors"]).assert_succeeded();
    copy_all(&fixture("fsdp3/ranks"), &source);
    assert_no_checkpoint(&source);
}

/// In each case, an option has no effect on flat parameters, or the world size is so large that there are too many files.
#[test]
fn useless_or_oversized_flat_parameters_are_refused() {
    let env = TestEnv::new();
    let (model, flat) = (fixture("flat2/full/model.pt"), env.path("flat"));
    dtshard(&[&"flatten", &model, &flat, &"--world-size", &"2", &"--wrap", &"layers.*"]).assert_succeeded();
    let before = env.names();
    let again = env.path("again");
    let assert_refused = |verb: &str, args: &[&str], words: &[&str]| {
        let mut all: Vec<&dyn AsRef<OsStr>> = vec![&verb, &flat, &again];
        all.extend(args.iter().map(|arg| arg as &dyn AsRef<OsStr>));
        dtshard(&all).assert_refused(words);
        assert_eq!(env.names(), before, "{args:?}");
    };
    assert_refused("flatten", &["--buffers", "freqs"], &["--buffers freqs", "the flat layout already lists"]);
    assert_refused("flatten", &["--forward-dtype", "bf16"], &["--forward-dtype bf16", "use_orig_params"]);
    assert_refused("flatten", &["--world-size", "4294967295"], &["4294967295 ranks"]);
    assert_refused("reshard", &["--mesh", "fsdp=16777216"], &["16777216 ranks"]);
    assert_refused("reshard", &["--mesh", "fsdp=2", "--tensor-class", "dtensor"], &["--tensor-class needs rank files"]);
    dtshard(&[&"flatten", &flat, &again, &"--use-orig-params", &"--forward-dtype", &"bf16"]).assert_succeeded();
}

#[test]
fn other_frameworks_are_refused_by_name() {
    for name in [
        "latest_checkpointed_iteration.txt",
        "mp_rank_00",
        "_CHECKPOINT_METADATA",
        "manifest.ocdbt",
        "flax_model.msgpack",
        "model.onnx",
        "model.Q4_K_M.gguf",
        "weights.h5",
        "arrays.npz",
        "model.ckpt.index",
    ] {
        let env = TestEnv::new();
        env.write(&format!("src/{name}"), b"x");
        assert_no_checkpoint(&env.path("src"));
    }
}
