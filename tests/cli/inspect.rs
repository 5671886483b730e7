//! Tests of the output of `inspect`, of help, completions and man pages, and of errors about arguments.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::env::TestEnv;
use crate::common::{expect, fixture, run, succeed};
use crate::snapshot::assert_snapshot;
use serde_json::{Value as Json, json};

const VERBS: [&str; 9] =
    ["inspect", "reshard", "unshard", "flatten", "consolidate", "verify", "maps", "completions", "man"];

/// Returns the text without the paths of this machine.
fn without_paths(text: &str) -> String {
    text.replace(&fixture("").display().to_string(), "fixtures/")
}

fn assert_inspect_snapshot(name: &str, source: &str, options: &str) {
    let outcome = succeed("inspect", &[&fixture(source)], options);
    assert_snapshot(name, &without_paths(&outcome.stdout));
}

#[test]
fn inspect_output_matches_the_snapshots() {
    for source in ["llama_tiny/ranks", "fsdp_tp/ranks", "fsdp4/dcp", "safetensors/sharded"] {
        let name = source.replace('/', "_");
        assert_inspect_snapshot(&format!("inspect_{name}.txt"), source, "");
        assert_inspect_snapshot(&format!("inspect_{name}.json"), source, "--json");
    }
}

#[test]
fn brief_is_the_summary() {
    for source in ["llama_tiny/ranks", "fsdp4/dcp"] {
        let source = fixture(source);
        let whole = succeed("inspect", &[&source], "").stdout;
        let brief = succeed("inspect", &[&source], "--brief").stdout;
        assert!(whole.starts_with(&format!("{brief}\ntensor ")), "{brief}");
    }
    // The fixture has tied names, and ranks with different values.
    assert_inspect_snapshot("inspect_ties.txt", "torch_file/model.pt", "--brief");
    assert_inspect_snapshot("inspect_conflict.txt", "conflict/object", "--brief");
    assert_inspect_snapshot("inspect_optimizer_alone.txt", "fsdp4/ranks", "--brief --series optim");
}

/// Some trainers store the step in an integer tensor. A float tensor named `step` is not shown as a step.
#[test]
fn integer_tensor_called_step_is_shown_as_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    for (dtype, bytes, step) in [
        ("I32", &1234_i32.to_le_bytes()[..], Some("1234")),
        ("I64", &(1_i64 << 40).to_le_bytes(), Some("1099511627776")),
        ("F32", &1.0_f32.to_le_bytes(), None),
    ] {
        let header = json!({ "step": { "dtype": dtype, "shape": [], "data_offsets": [0, bytes.len()] } }).to_string();
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), bytes].concat()).unwrap();
        let summary = succeed("inspect", &[&path], "--brief").stdout;
        let found = summary.lines().find_map(|line| line.strip_prefix("step ")).map(str::trim);
        assert_eq!(found, step, "{summary}");
    }
}

#[test]
fn tensor_option_output_matches_the_snapshots() {
    assert_inspect_snapshot(
        "tensor_chunks.txt",
        "fsdp_tp/ranks",
        "--tensor model.norm.weight --tensor model.blocks.*.w2",
    );
    assert_inspect_snapshot("tensor_digest.txt", "fsdp_tp/ranks", "--tensor model.norm.weight --digest --brief");
    assert_inspect_snapshot("tensor_dcp.txt", "fsdp4/dcp", "--tensor model.blocks.0.w2.bias");
    assert_inspect_snapshot("tensor.json", "fsdp_tp/ranks", "--tensor model.blocks.0.wq.weight --json --digest");
    let brief = succeed("inspect", &[&fixture("fsdp_tp/ranks")], "--tensor model.**.bias --json --brief").json();
    let names: Vec<&String> = brief["tensors"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["model.blocks.0.wq.bias", "model.blocks.0.w2.bias"]);
    assert_eq!(brief["tensors"]["model.blocks.0.wq.bias"].get("chunks"), None);
    assert_eq!(brief["bytes"], json!((7 + 5) * 4));
}

#[test]
fn draw_output_matches_the_snapshots() {
    assert_inspect_snapshot("draw_stripes.txt", "fsdp_tp/ranks", "--tensor model.blocks.0.wq.weight --draw");
    assert_inspect_snapshot("draw_grid.txt", "fsdp_tp/ranks", "--tensor model.blocks.0.w2.weight --draw");
    assert_inspect_snapshot("draw_files.txt", "fsdp4/dcp", "--tensor model.blocks.0.w1.weight --draw --digest");
}

#[test]
fn colour_is_printed_on_request_and_not_to_a_pipe() {
    let drawn = |variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dtshard"));
        command.arg("inspect").arg(fixture("tp2/ranks")).args(["--tensor", "model.head.weight", "--draw"]);
        command.env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE").envs(variables.iter().copied());
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let plain = drawn(&[]);
    assert!(!plain.contains('\x1b') && plain.contains('┌'), "{plain}");
    assert!(drawn(&[("CLICOLOR_FORCE", "1")]).contains("\x1b[48;5;"), "no colour");
    assert_eq!(drawn(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]), plain);
}

#[test]
fn unknown_tensor_is_refused_with_a_suggestion() {
    let source = fixture("fsdp_tp/ranks");
    let outcome = expect(2, "inspect", &[&source], "--tensor model.blocks.0.wq.wieght");
    assert_snapshot("unknown_tensor.txt", &outcome.stderr);
    assert_eq!(outcome.stdout, "");
    let outcome = expect(2, "inspect", &[&source], "--tensor model.blocks.0.wq.wieght --json");
    assert_snapshot("unknown_tensor.json", &outcome.stdout);
    expect(2, "inspect", &[&source], "--tensor model.{a");
    let outcome = expect(2, "inspect", &[&source], "--tensor model.seen --draw --json");
    assert_eq!(outcome.json()["error"]["kind"], "usage");
    assert!(expect(2, "inspect", &[&source], "--draw").stderr.contains("--tensor"));
}

/// A name in a checkpoint must not control the terminal, and must not look like a line of the program.
#[test]
fn control_characters_of_names_are_escaped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let name = "w\u{1b}]0;owned\u{7}\u{9b}2J\nerror: none\u{202e}";
    let header = json!({ name: { "dtype": "U8", "shape": [2], "data_offsets": [0, 2] } }).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([1, 2]);
    std::fs::write(&path, bytes).unwrap();
    let shown = r"w\u{1b}]0;owned\u{7}\u{9b}2J\nerror: none\u{202e}";
    for options in ["", "--digest", "--tensor *", "--tensor * --draw", "--brief", "-v"] {
        let outcome = succeed("inspect", &[&path], options);
        let text = outcome.stdout + &outcome.stderr;
        assert!(text.chars().all(|c| c == '\n' || !c.is_control() && c != '\u{202e}'), "{options}: {text:?}");
        assert!(options == "--brief" || text.contains(shown), "{options}: {text}");
    }
    let outcome = expect(2, "inspect", &[&path], "--tensor nope");
    assert!(outcome.stderr.contains(shown), "{}", outcome.stderr);
    let document = succeed("inspect", &[&path], "--json").json();
    assert_eq!(document["tensors"].as_object().unwrap().keys().collect::<Vec<_>>(), [name]);
}

fn usage_error(arguments: &[&str]) -> Json {
    let outcome = run(arguments);
    assert_eq!(outcome.code, 2, "{outcome:?}");
    assert!(outcome.stderr.starts_with("error: "), "{outcome:?}");
    let error = outcome.json()["error"].clone();
    assert_eq!(error["kind"], "usage");
    error
}

#[test]
fn invalid_arguments_have_a_json_document() {
    let error = usage_error(&["inspect", "x", "--jsn", "--json"]);
    assert_eq!(error["message"], "unexpected argument '--jsn' found");
    assert_eq!(error["hint"], "a similar argument exists: '--json'");
    let error = usage_error(&["--json", "inspec"]);
    assert_eq!(error["hint"], "a similar subcommand exists: 'inspect'");
    let error = usage_error(&["inspect", "x", "--json", "--io", "mnap"]);
    assert_eq!(error["message"], "invalid value 'mnap' for '--io <HOW>' [possible values: auto, mmap, read, direct]");
    assert_eq!(error["hint"], "a similar value exists: 'mmap'");
    let error = usage_error(&["inspect", "--json"]);
    assert_eq!(error["message"], "the following required arguments were not provided: <SRC>");
    assert_eq!(error["hint"], "usage: dtshard inspect --json <SRC>");
    usage_error(&["--json"]);
    // After `--`, an argument that looks like an option is a path.
    let outcome = run(["inspect", "a", "b", "--", "--json"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (2, ""));
}

#[test]
fn output_options_are_accepted_before_and_after_the_verb() {
    let source = fixture("safetensors/sharded");
    let source = source.to_str().unwrap();
    let behind = run(["inspect", source, "--json", "--brief", "--progress", "never"]);
    assert_eq!(behind.code, 0);
    assert_eq!(run(["--json", "--progress", "never", "inspect", source, "--brief"]).stdout, behind.stdout);
    let conflict = fixture("conflict/object");
    let conflict = conflict.to_str().unwrap();
    assert!(run(["inspect", conflict]).stderr.contains("warning: "));
    assert_eq!(run(["-q", "inspect", conflict]).stderr, "");
    assert_eq!(run(["inspect", "-q", conflict]).stderr, "");
    let lines = run(["--progress=always", "inspect", source, "--digest"]).stderr;
    assert!(lines.contains("hashing: 100 %"), "{lines}");
}

#[test]
fn help_lists_every_verb_and_is_short() {
    let help = run(["--help"]);
    assert_eq!((help.code, help.stderr.as_str()), (0, ""));
    assert!(VERBS.iter().all(|verb| help.stdout.contains(&format!("\n  {verb} "))), "{}", help.stdout);
    for alias in ["merge", "convert", "diff"] {
        assert!(!help.stdout.contains(&format!("\n  {alias}")) && !help.stdout.contains("alias"), "{}", help.stdout);
    }
    for verb in VERBS {
        let (short, long) = (run([verb, "-h"]), run([verb, "--help"]));
        assert_eq!((short.code, short.stderr.as_str(), long.code, long.stderr.as_str()), (0, "", 0, ""));
        assert!(short.stdout.lines().count() <= 50, "{}", short.stdout);
        for help in [&short, &long] {
            assert!(help.stdout.contains("\nExamples:\n  dtshard "), "{}", help.stdout);
        }
    }
    let version = run(["--version"]);
    assert_eq!((version.code, version.stdout), (0, format!("dtshard {}\n", env!("CARGO_PKG_VERSION"))));
    let nothing = run::<&str>([]);
    assert_eq!((nothing.code, nothing.stdout.as_str()), (2, ""));
    assert!(nothing.stderr.contains("Usage: dtshard"), "{}", nothing.stderr);
}

#[test]
fn examples_of_help_succeed() {
    let env = TestEnv::new();
    fs::rename(env.copy("llama_tiny/ranks"), env.path("step-1000")).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_dtshard")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    for verb in ["inspect", "reshard", "unshard", "flatten", "consolidate", "verify"] {
        let help = run([verb, "--help"]).stdout;
        let examples: Vec<&str> = help.lines().filter_map(|line| line.strip_prefix("  dtshard ")).collect();
        assert_eq!(examples.len(), 2, "{help}");
        for example in examples {
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!("dtshard {example}")]).env("PATH", &path).current_dir(env.path(""));
            let outcome = shell.output().unwrap();
            assert!(outcome.status.success(), "{example}: {}", String::from_utf8_lossy(&outcome.stderr));
        }
    }
}

/// Returns every long option of a verb, from its help.
fn options(verb: &str) -> Vec<String> {
    let help = run([verb, "--help"]).stdout;
    let name = |line: &str| {
        let option = line.trim_start().trim_start_matches(|c: char| c != ' ').trim_start();
        let option = [line.trim_start(), option].into_iter().find_map(|text| text.strip_prefix("--"))?;
        Some(option.split([' ', '[']).next()?.to_owned())
    };
    // Lines with a deeper indentation describe an option, and may name others.
    help.lines().filter(|line| line.find('-').is_some_and(|at| at < 7)).filter_map(name).collect()
}

#[test]
fn completions_contain_every_verb_and_option() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = succeed("completions", &[Path::new(shell)], "").stdout;
        for verb in VERBS {
            assert!(script.contains(verb), "{shell}: {verb}");
            let options = options(verb);
            assert!(options.len() >= 4, "{verb}: {options:?}");
            assert!(options.iter().all(|option| script.contains(option.as_str())), "{shell} {verb}: {options:?}");
        }
        assert_eq!(succeed("completions", &[Path::new(shell)], "").stdout, script, "{shell}");
        let document = succeed("completions", &[Path::new(shell)], "--json").json();
        assert_eq!(document, json!({ "shell": shell, "script": script }));
    }
    assert!(expect(2, "completions", &[Path::new("bsh")], "").stderr.contains("'bash'"));
}

#[test]
fn man_writes_a_page_for_every_verb() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("man/man1"), folder.path().join("again"));
    let document = succeed("man", &[&first], "--json").json();
    assert!(succeed("man", &[&second], "").stderr.contains("wrote 10 man pages"));
    let pages = crate::common::bytes_of(&first);
    assert_eq!(pages, crate::common::bytes_of(&second));
    let mut names: Vec<String> = VERBS.iter().map(|verb| format!("dtshard-{verb}.1")).collect();
    names.push(String::from("dtshard.1"));
    names.sort();
    assert_eq!(pages.keys().map(|path| path.display().to_string()).collect::<Vec<_>>(), names);
    let mut listed: Vec<String> = serde_json::from_value(document["files"].clone()).unwrap();
    listed.sort();
    assert_eq!(listed, names);
    for (path, page) in pages {
        let page = String::from_utf8(page).unwrap();
        let version = concat!("dtshard ", env!("CARGO_PKG_VERSION"));
        let title = page.lines().find(|line| line.starts_with(".TH")).unwrap();
        assert!(title.contains(version) && !title.contains("20"), "{title}");
        for word in [" merge ", "convert", " diff "] {
            assert!(!page.contains(word), "{}: {word}", path.display());
        }
    }
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    expect(2, "man", &[&file], "");
}

#[test]
fn broken_pipe_is_no_error() {
    for arguments in [vec!["completions", "zsh"], vec!["--help"], vec!["inspect", "--json"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dtshard"));
        command.args(&arguments).stdout(Stdio::piped()).stderr(Stdio::null());
        if arguments[0] == "inspect" {
            command.arg(fixture("fsdp4/dcp"));
        }
        let mut child = command.spawn().unwrap();
        drop(child.stdout.take());
        assert_eq!(child.wait().unwrap().code(), Some(0), "{arguments:?}");
    }
}
