//! Command lines that ask for what cannot be.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use crate::common::env::TestEnv;
use crate::corrupt::{Outcome, command, copy_all, dtshard, fixture};

/// `reshard` a small DCP directory with these arguments: exit code 2, nothing left.
fn refused(args: &[&str]) {
    let env = TestEnv::new();
    let (source, target) = (fixture("replicated_plain/dcp"), env.path("out"));
    let mut all: Vec<&dyn AsRef<OsStr>> = vec![&"reshard", &source, &target];
    all.extend(args.iter().map(|arg| arg as &dyn AsRef<OsStr>));
    dtshard(&all).refused(&[]);
    assert_eq!(env.names(), Vec::<String>::new(), "{args:?}");
}

#[test]
fn meshes() {
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
        refused(&["--mesh", mesh]);
    }
    refused(&["--mesh=dp=2", "--mesh-ranks=0"]);
    refused(&["--mesh=dp=2", "--mesh-ranks=0,0"]);
    refused(&["--mesh=dp=2", "--mesh-ranks=0,1,2"]);
    refused(&["--mesh=dp=2", "--mesh-ranks=0,x"]);
    refused(&["--mesh=dp=2", "--mesh-ranks=0,4294967296"]);
    refused(&[]);
}

#[test]
fn placements() {
    for list in ["S", "S(", "S(a)", "Q", "S(0)x", "S(99999999999999999999)", "_S(0)", "_S(0,0)", "", ",", "P(mean)"] {
        refused(&["--mesh=dp=2", "--placements", list]);
    }
    refused(&["--mesh=dp=2", "--placements=S(0),R"]);
    refused(&["--mesh=dp=2,tp=2", "--placements=S(0)"]);
    for partial in ["P", "P(sum)", "Partial(max)", "**=P(sum)"] {
        refused(&["--mesh=dp=2", "--placements", partial]);
    }
    refused(&["--mesh=dp=2", "--placements=R", "--placements=S(0)"]);
    refused(&["--mesh=dp=2", "--placements=no.such.tensor=R"]);
    refused(&["--mesh=dp=2", "--placements=**=S(9)"]);
    refused(&["--mesh=dp=2", "--placements=[=R"]);
    refused(&["--mesh=dp=2,tp=2"]);
}

#[test]
fn resources() {
    refused(&["--mesh=dp=2", "--threads=0"]);
    for threads in ["-1", "x", "99999999999999999999", "1.5", ""] {
        refused(&["--mesh=dp=2", &format!("--threads={threads}")]);
    }
    for threads in ["100000", "18446744073709551615"] {
        refused(&["--mesh=dp=2", "--max-memory=1000TB", "--threads", threads]);
    }
    refused(&["--mesh=dp=2", "--max-memory=1"]);
    refused(&["--mesh=dp=2", "--max-memory=40MB", "--threads=8"]);
    for size in ["0", "-1", "x", "5XB", "99999999999999999999GB", "nan", "1e400"] {
        refused(&["--mesh=dp=2", &format!("--max-memory={size}")]);
    }
}

/// What launchers say, and all their contradictions: `comm::tests`.
#[test]
fn parts() {
    let mesh = "--mesh=dp=2";
    refused(&[mesh, "--part=0"]);
    refused(&[mesh, "--parts=4"]);
    refused(&[mesh, "--part=4", "--parts=4"]);
    refused(&[mesh, "--parts=0"]);
    for number in ["-1", "x", "1.5", "4294967296", ""] {
        refused(&[mesh, "--parts=4", &format!("--part={number}")]);
        refused(&[mesh, &format!("--parts={number}")]);
    }
    refused(&[mesh, "--resume", "--restart"]);
}

/// Verbs that only read are one process's, whatever started it; those that write say what they make of it.
#[test]
fn environments_of_launchers() {
    let env = TestEnv::new();
    let (source, target) = (fixture("replicated_plain/dcp"), env.path("out"));
    let task = |args: &[&dyn AsRef<OsStr>]| -> Outcome {
        let mut command = command(args);
        command.envs([("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "2"), ("RANK", "0"), ("WORLD_SIZE", "8")]);
        command.output().unwrap().into()
    };
    let words = ["SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=4", "RANK=0, WORLD_SIZE=8", "hint: unset RANK", "--parts 1"];
    task(&[&"reshard", &source, &target, &"--mesh=dp=2"]).refused(&words);
    task(&[&"reshard", &source, &"--mesh=dp=2", &"--dry-run", &"--json"])
        .refused(&words)
        .says(&["\"kind\": \"usage\""]);
    assert!(env.names().is_empty());
    for verb in ["inspect", "verify"] {
        let outcome = task(&[&verb, &source]);
        assert!(!outcome.succeeded().err.contains("[2/4]"), "{outcome:?}");
    }
    let outcome = task(&[&"reshard", &source, &target, &"--mesh=dp=2", &"--parts=1"]);
    assert!(!outcome.succeeded().err.contains('['), "{outcome:?}");
}

/// Lines say whose they are; what is the same for all is said once.
#[test]
fn talk_of_several() {
    let source = fixture("replicated_plain/dcp");
    let task = |rank: &str, args: &[&dyn AsRef<OsStr>]| -> Outcome {
        let first: [&dyn AsRef<OsStr>; 4] = [&"reshard", &source, &"--mesh=dp=2", &"--dry-run"];
        let mut command = command(&[&first, args].concat());
        command.envs([("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", rank), ("SLURMD_NODENAME", "n1")]);
        command.output().unwrap().into()
    };
    let first = task("0", &[]);
    assert!(first.succeeded().out.contains("bytes written"), "{first:?}");
    let other = task("2", &[]);
    assert_eq!((other.succeeded().out.as_str(), other.err.as_str()), ("", ""));
    let other = task("2", &[&"-v"]);
    other.succeeded().says(&["[2/4] part 2 of 4, counted from 0, by srun on n1\n", "[2/4] reading "]);
    assert!(other.err.lines().all(|line| line.starts_with("[2/4] ")), "{other:?}");
    task("2", &[&"--include=nothing"]).refused(&["[2/4] error: ", "[2/4] hint: "]);
    assert!(task("2", &[&"--json"]).succeeded().out.is_empty());
    task("2", &[&"--json", &"--include=nothing"]).refused(&["{\n  \"error\""]);
    // All have the same command line, and what can be done about that is said once.
    let first = task("0", &[&"--mehs=dp=2", &"--json"]);
    first.refused(&["error: unexpected argument '--mehs' found", "tip: ", "Usage: ", "\"error\""]);
    let other = task("2", &[&"--mehs=dp=2", &"--json"]);
    other.refused(&[]);
    assert_eq!((other.err.as_str(), other.out.as_str()), ("[2/4] error: unexpected argument '--mehs' found\n", ""));
    assert!(task("2", &[&"--help"]).succeeded().out.is_empty());
    assert!(task("0", &[&"--help"]).succeeded().out.contains("Usage: "));
}

#[test]
fn formats_that_are_not_written_or_not_there() {
    refused(&["--mesh=dp=2", "--to=safetensors"]);
    refused(&["--mesh=dp=2", "--to=nonsense"]);
    refused(&["--mesh=dp=2", "--from=torch"]);
    refused(&["--mesh=dp=2", "--io=nonsense"]);
}

#[test]
fn series_and_roots() {
    let env = TestEnv::new();
    let source = fixture("fsdp3/ranks");
    let target = env.path("o.pt");
    dtshard(&[&"unshard", &source, &target, &"--series", &"nope"]).refused(&["no series `nope`", "model, extra_state"]);
    let target = env.path("o.safetensors");
    dtshard(&[&"consolidate", &source, &target, &"--root", &"no.such"])
        .refused(&["--root no.such", "top of the state"]);
    dtshard(&[&"consolidate", &source, &target, &"--root", &"x", &"--everything"]).refused(&["--everything"]);
    let none = env.path("none");
    dtshard(&[&"consolidate", &source, &env.path("o"), &"--assets", &none]).refused(&["--assets", "no such folder"]);
    assert!(env.names().is_empty());
}

fn unknown(source: &Path) {
    let env = TestEnv::new();
    for verb in ["unshard", "consolidate"] {
        dtshard(&[&verb, &source, &env.path("out.pt")]).refused(&[]);
    }
    dtshard(&[&"verify", &source]).refused(&[]);
    dtshard(&[&"inspect", &source]).refused(&[]);
    assert!(env.names().is_empty());
}

#[test]
fn sources_that_are_no_checkpoint() {
    let env = TestEnv::new();
    unknown(&env.path("nowhere"));
    fs::create_dir(env.path("empty")).unwrap();
    unknown(&env.path("empty"));
    for address in ["s3://bucket/x", "gs://bucket/x", "hf://org/model", "https://example.org/model.pt"] {
        unknown(Path::new(address));
    }
    unknown(&env.write("model.gguf", b"GGUF\x03\0\0\0"));
    unknown(&env.write("hidden.bin", b"\x89HDF\r\n\x1a\n"));
    unknown(&fixture("torch_file/script.pt"));
    unknown(&fixture("torch_file/legacy.pt"));
    for (name, bytes) in
        [("a.txt", &b"hello"[..]), ("a.pt", b""), ("b.pt", b"PK"), ("zeros", &[0; 600]), ("x.bin", b"\x80\x02}.")]
    {
        unknown(&env.write(name, bytes));
    }
    env.write("several/a.pt", b"PK\x03\x04");
    env.write("several/b.pt", b"PK\x03\x04");
    unknown(&env.path("several"));
    unknown(Path::new("/dev/null"));
    unknown(Path::new("/dev/zero"));
    let pipe = env.path("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    unknown(&pipe);
    unknown(&fixture("fsdp3/dcp/.metadata"));
    unknown(&fixture("fsdp3/dcp/__0_0.distcp"));
}

/// A folder where a file should be, and a pipe, which would be waited for without end.
#[test]
fn files_that_are_none() {
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
            crate::corrupt::Outcome::from(run.wait_with_output().unwrap()).refused(&["src"]);
        }
    }
}

#[test]
fn a_folder_with_two_formats() {
    let env = TestEnv::new();
    let source = env.copy("fsdp3/dcp");
    copy_all(&fixture("safetensors/single"), &source);
    unknown(&source);
    dtshard(&[&"verify", &source, &"--from", &"dcp"]).succeeded();
    dtshard(&[&"verify", &source, &"--from", &"safetensors"]).succeeded();
    copy_all(&fixture("fsdp3/ranks"), &source);
    unknown(&source);
}

/// What would not change a byte of flat parameters, and what would be too many files.
#[test]
fn flat_parameters_that_cannot_be() {
    let env = TestEnv::new();
    let (model, flat) = (fixture("flat2/full/model.pt"), env.path("flat"));
    dtshard(&[&"flatten", &model, &flat, &"--world-size", &"2", &"--wrap", &"layers.*"]).succeeded();
    let before = env.names();
    let again = env.path("again");
    let refused = |verb: &str, args: &[&str], words: &[&str]| {
        let mut all: Vec<&dyn AsRef<OsStr>> = vec![&verb, &flat, &again];
        all.extend(args.iter().map(|arg| arg as &dyn AsRef<OsStr>));
        dtshard(&all).refused(words);
        assert_eq!(env.names(), before, "{args:?}");
    };
    refused("flatten", &["--buffers", "freqs"], &["--buffers freqs", "the flat layout says"]);
    refused("flatten", &["--forward-dtype", "bf16"], &["--forward-dtype bf16", "use_orig_params"]);
    refused("flatten", &["--world-size", "4294967295"], &["4294967295 ranks"]);
    refused("reshard", &["--mesh", "fsdp=16777216"], &["16777216 ranks"]);
    refused("reshard", &["--mesh", "fsdp=2", "--tensor-class", "dtensor"], &["--tensor-class is for rank files"]);
    dtshard(&[&"flatten", &flat, &again, &"--use-orig-params", &"--forward-dtype", &"bf16"]).succeeded();
}

#[test]
fn other_frameworks_are_refused_by_name() {
    for name in [
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
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
        unknown(&env.path("src"));
    }
}
