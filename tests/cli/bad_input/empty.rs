//! Sources without tensors: a result without tensors is an error unless the user selected it.

use std::fs;
use std::path::Path;

use serde_json::Value as Json;
use torch_pickle::pickle::Writer;

use crate::common::env::TestEnv;
use crate::corrupt::{dtshard, fixture, torch_file};
use crate::outcome::Outcome;

fn json(run: &Outcome) -> Json {
    serde_json::from_str(&run.out).unwrap_or_else(|error| panic!("{error}: {run:?}"))
}

/// Runs a verb that writes. `options` has the options as on a command line.
fn convert(env: &TestEnv, verb: &str, source: &Path, options: &str) -> Outcome {
    let out = env.path("out");
    let options: Vec<&str> = options.split_whitespace().collect();
    let mut arguments: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&verb, &source, &out, &"--json"];
    arguments.extend(options.iter().map(|option| option as &dyn AsRef<std::ffi::OsStr>));
    dtshard(&arguments)
}

#[track_caller]
fn assert_refused(env: &TestEnv, verb: &str, source: &Path, options: &str) {
    let before = env.names();
    for more in ["", "--dry-run"] {
        let run = convert(env, verb, source, &format!("{options} {more}"));
        assert_eq!((run.code, &json(&run)["error"]["kind"]), (Some(2), &Json::from("usage")), "{verb}: {run:?}");
        assert_eq!(env.names(), before, "{verb} left something behind");
    }
}

/// Returns the pickle of `{"step": 3, "lr": {"base": 1}}`.
fn objects() -> Vec<u8> {
    let mut writer = Writer::new();
    writer.empty_dict().string("step").int(3).setitem();
    writer.string("lr").empty_dict().string("base").int(1).setitem().setitem();
    torch_file(writer.finish(), &[])
}

#[test]
fn source_without_tensors_is_refused_without_a_selection() {
    let env = TestEnv::new();
    let source = env.write("objects.pt", objects());
    assert_refused(&env, "unshard", &source, "");
    assert_refused(&env, "consolidate", &source, "");
    for to in ["dcp", "torch-ranks", "local"] {
        assert_refused(&env, "reshard", &source, &format!("--mesh dp=2 --to {to}"));
    }
    assert_refused(&env, "flatten", &source, "--world-size 2 --wrap **");
    let run = convert(&env, "reshard", &source, "--mesh dp=2 --to dcp --include **");
    assert_eq!(json(run.assert_succeeded())["tensors"], 0);
    // A DCP directory without tensors gives the same results.
    let source = env.path("dcp");
    fs::rename(env.path("out"), &source).unwrap();
    assert_refused(&env, "reshard", &source, "--mesh dp=2");
    let run = convert(&env, "unshard", &source, "--exclude step");
    assert_eq!(json(run.assert_succeeded())["tensors"], 0);
}

#[test]
fn series_without_tensors_is_refused_without_series_option() {
    let env = TestEnv::new();
    for rank in 0..2 {
        let path = env.path("src");
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join(format!("extra_state_world_size_2_rank_{rank}.pt")), objects()).unwrap();
    }
    let source = env.path("src");
    assert_refused(&env, "reshard", &source, "--mesh dp=2");
    assert_refused(&env, "reshard", &source, "--mesh dp=2 --series all");
    let run = convert(&env, "reshard", &source, "--mesh dp=2 --series extra_state");
    assert_eq!(json(run.assert_succeeded())["tensors"], 0);
}

#[test]
fn empty_source_is_refused() {
    let env = TestEnv::new();
    let header = b"\x02\0\0\0\0\0\0\0{}";
    let file = env.write("model.safetensors", header);
    for verb in ["unshard", "consolidate"] {
        assert_refused(&env, verb, &file, "");
    }
    assert_refused(&env, "reshard", &file, "--mesh dp=2");
    // `verify` refuses an empty source as well.
    let run = dtshard(&[&"verify", &file, &"--json"]);
    assert_eq!((run.code, &json(&run)["error"]["kind"]), (Some(2), &Json::from("usage")), "{run:?}");
    dtshard(&[&"inspect", &file]).assert_succeeded();
    let whole = fixture("safetensors/single");
    assert_eq!(dtshard(&[&"verify", &whole, &file]).code, Some(1));
}

/// The objects are verified: they have checksums, and values that may differ between ranks.
#[test]
fn source_without_tensors_is_verified_with_a_warning() {
    let env = TestEnv::new();
    let source = env.write("objects.pt", objects());
    dtshard(&[&"verify", &source]).assert_succeeded().assert_mentions(&["warning", "objects.pt"]);
}
