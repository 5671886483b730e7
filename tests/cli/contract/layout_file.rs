//! Tests of layout files: `--layout` and `inspect --layout`.
//!
//! Tested in other modules:
//!
//! - The grammar, and all its error messages: `layout::file::tests`.
//! - `--split`, and splits in a file: `splits`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::common::env::TestEnv;
use crate::common::{assert_same, below, expect, fixture, inspect, read, succeed};
use crate::contract::{assert_contains, contents};

/// Writes the layout of a checkpoint to a file.
fn write_layout(env: &TestEnv, source: &Path, name: &str, options: &str) -> PathBuf {
    let json = if Path::new(name).extension().is_some_and(|suffix| suffix == "json") { "--json" } else { "" };
    env.write(name, &succeed("inspect", &[source], &format!("--layout {json} {options}")).stdout)
}

/// Asserts that resharding a checkpoint with its printed layout reproduces its files.
#[track_caller]
pub fn assert_layout_reproduces(source: &str, options: &str) {
    let env = TestEnv::new();
    let source = fixture(source);
    let expected = env.make("reshard", &source, "expected", options);
    for (name, out) in [("layout.toml", "of-toml"), ("layout.json", "of-json")] {
        let layout = write_layout(&env, &source, name, options);
        let found = env.make("reshard", &source, out, &format!("{options} --layout {}", layout.display()));
        let differing: Vec<String> = {
            let (found, expected) = (contents(&found.path), contents(&expected.path));
            assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
            found.into_iter().filter(|(name, bytes)| expected[name] != *bytes).map(|(name, _)| name).collect()
        };
        assert!(differing.is_empty(), "{}: {differing:?}\n{}", source.display(), fs::read_to_string(layout).unwrap());
    }
}

#[test]
fn printed_layout_of_rank_files_reproduces_them() {
    let cases = ["fsdp4", "fsdp3", "tp2", "fsdp_tp", "fsdp_tp6", "hsdp", "llama_tiny", "fsdp1_sharded"];
    for case in cases {
        assert_layout_reproduces(&format!("{case}/ranks"), "");
    }
    for source in ["verl/global_step_10/actor", "flat2/sharded", "flat_hybrid/sharded"] {
        assert_layout_reproduces(source, "");
    }
    // Only the `local` format records splits of DTensors.
    let env = TestEnv::new();
    let cut = "--mesh dp=2,tp=2 --split balanced --placements **.embed=S(0),S(1) --placements S(0),S(0)";
    let local = env.make("reshard", "fsdp4/ranks", "local", &format!("--to local {cut}"));
    assert_layout_reproduces(local.path.to_str().expect("a path that is text"), "");
    for folder in fs::read_dir(fixture("compat")).into_iter().flatten() {
        let version = folder.unwrap().file_name().into_string().unwrap();
        for case in ["fsdp4", "fsdp_tp", "hsdp"] {
            let source = format!("compat/{version}/{case}/ranks");
            if fixture(&source).is_dir() {
                assert_layout_reproduces(&source, "");
            }
        }
    }
}

#[test]
fn printed_layout_of_flat_parameters_reproduces_them() {
    for case in ["flat2", "flat3", "flat_bf16", "flat_hybrid", "flat_mixed"] {
        for kind in ["flat", "views"] {
            let known = fixture(&format!("{case}/{kind}.flat_layout.json"));
            assert_layout_reproduces(&format!("{case}/{kind}"), &format!("--flat-layout {}", known.display()));
        }
    }
}

#[test]
fn printed_layout_has_few_rules() {
    let printed = |source: &str| succeed("inspect", &[&fixture(source)], "--layout").stdout;
    assert_eq!(printed("llama_tiny/ranks"), "mesh = \"fsdp=4\"\nplacements = \"S(0)\"\n");
    let expected = r#"mesh = "dp=2,tp=2"
placements = "_S(0,2),S(0)"

[[rules]]
tensors = "freqs"
placements = "plain"

[[rules]]
tensors = "blocks.*.norm.weight"
placements = "S(0),R"
slice = "dp"

[[rules]]
tensors = "blocks.*.w2.weight"
placements = "S(0),S(1)"

[[rules]]
tensors = "blocks.*.w2.bias"
placements = "S(0),R"

[[rules]]
tensors = "norm.weight"
placements = "S(0),R"
slice = "dp"
"#;
    assert_eq!(printed("fsdp_tp/ranks"), expected);
    let document = succeed("inspect", &[&fixture("tp2/ranks")], "--layout --json").json();
    assert_eq!(document["mesh"], "tp=2");
    assert_eq!(document["rules"][1], json!({ "tensors": "blocks.*.norm.weight", "placements": "plain" }));
    // Partial placements are printed.
    let partial = printed("partial2/ranks");
    assert_contains(&partial, &["placements = \"P(sum)\"", "tensors = \"max.f32\"\nplacements = \"P(max)\""]);
}

#[test]
fn split_factors_follow_the_size_of_another_mesh() {
    let env = TestEnv::new();
    let source = fixture("fsdp_tp/ranks");
    let layout = write_layout(&env, &source, "layout.toml", "");
    let with_file = env.make("reshard", &source, "said", &format!("--mesh dp=2,tp=4 --layout {}", layout.display()));
    let own = env.make("reshard", &source, "own", "--mesh dp=2,tp=4");
    assert_eq!(contents(&with_file.path), contents(&own.path));
    assert!(!with_file.run.stderr.contains("FSDP2"), "{}", with_file.run.stderr);
    // A split factor that is not the size of a mesh dim is kept, with a note.
    let strange = "--mesh dp=2,tp=4 --placements _S(0,2),S(0) --to torch-ranks";
    let note = "placements _S(0,2),S(0): dp has _S(0,2), but FSDP2 over tensor parallelism uses _S(0,4) there, because tp is 4";
    let run = env.make("reshard", &source, "strange", strange).run;
    assert_contains(&run.stderr, &[note]);
    let document = succeed("reshard", &[&source], &format!("{strange} --dry-run --json")).json();
    assert!(document["warnings"].as_array().unwrap().contains(&json!(note)), "{document}");
    let fused = succeed("reshard", &[&source], "--mesh dp=2,tp=4 --placements R,_S(0,3) --dry-run --to torch-ranks");
    assert!(!fused.stderr.contains("FSDP2"), "{}", fused.stderr);
}

#[test]
fn printed_layout_lists_exceptions_by_name() {
    let env = TestEnv::new();
    let options = "--mesh dp=2,tp=2 --placements S(0),R --placements optim.state.**.exp_avg=R,R \
                   --placements blocks.1.w1.weight=R,S(0) --mesh-ranks 0,2,1,3";
    let made = env.make("reshard", "fsdp4/dcp", "made", &format!("{options} --to torch-ranks"));
    let layout = write_layout(&env, &made.path, "layout.toml", "");
    let text = fs::read_to_string(&layout).unwrap();
    assert_contains(&text, &["tensors = \"optim.**.exp_avg\"\nplacements = \"R,R\""]);
    assert_contains(&text, &["mesh_ranks = [0, 2, 1, 3]", "tensors = \"blocks.1.w1.weight\"\nplacements = \"R,S(0)\""]);
    assert!(!text.contains("blocks.0.w1"), "{text}");
    let again = env.make("reshard", &made.path, "again", &format!("--layout {}", layout.display()));
    assert_eq!(contents(&again.path), contents(&made.path));
    // The layout is applied to a source that records no layout.
    let of_dcp = env.make("reshard", "fsdp4/dcp", "dcp", &format!("--to torch-ranks --layout {}", layout.display()));
    assert_eq!(
        inspect(&of_dcp.path, "--brief")["tensors"]["model.blocks.1.w1.weight"],
        inspect(&made.path, "--brief")["tensors"]["model.blocks.1.w1.weight"]
    );
    assert_same(&of_dcp.tensors(), &read(&fixture("fsdp4/dcp")), "of dcp");
}

/// By default, `fully_shard` makes a mesh without names of mesh dims.
#[test]
fn mesh_without_names_keeps_its_placements() {
    for text in ["mesh = [3]\nplacements = \"R\"", "mesh = [2, 2]\nmesh_ranks = [3, 1, 0, 2]\nplacements = \"R,S(0)\""]
    {
        let env = TestEnv::new();
        let layout = env.write("layout.toml", text);
        let options = format!("--to torch-ranks --layout {}", layout.display());
        let made = env.make("reshard", "tp2/dcp", "made", &options);
        let again = env.make("reshard", &made.path, "again", "");
        assert_eq!(contents(&again.path), contents(&made.path), "{text}");
        let printed = write_layout(&env, &made.path, "printed.toml", "");
        let fed = env.make("reshard", &made.path, "fed", &format!("--layout {}", printed.display()));
        assert_eq!(contents(&fed.path), contents(&made.path), "{text}");
        let local = env.make("reshard", &made.path, "local", "--to local");
        let back = env.make("reshard", &local.path, "back", "--to torch-ranks");
        assert_eq!(contents(&back.path), contents(&made.path), "{text}");
    }
}

/// Quantised weights have names such as `weight` and `weight.scale`. The pattern `weight` also matches `weight.scale`,
/// because a pattern may name a module.
#[test]
fn name_that_extends_another_tensor_name_gets_the_earlier_rule() {
    let env = TestEnv::new();
    let renamed = "--include model --rename (blocks.*w2).bias=${1}.weight.scale";
    let source = env.make("reshard", "tp2/ranks", "source", renamed);
    let layout = write_layout(&env, &source.path, "layout.toml", "");
    let found = env.make("reshard", &source.path, "found", &format!("--layout {}", layout.display()));
    assert_eq!(contents(&found.path), contents(&source.path), "{}", fs::read_to_string(layout).unwrap());
}

#[test]
fn split_of_a_strided_placement_is_refused() {
    let env = TestEnv::new();
    let cut = "--mesh dp=3 --placements _S(0,3) --split balanced";
    for to in ["--to local", "--to dcp", "--to torch-ranks", "--to torch-ranks --tensor-class local"] {
        env.refuse("reshard", "fsdp4/ranks", "x", &format!("{cut} {to}"));
    }
}

#[test]
fn layout_that_files_do_not_record_is_not_printed() {
    let stderr_of = |source: &str| expect(2, "inspect", &[&fixture(source)], "--layout").stderr;
    let several = stderr_of("odd4/ranks");
    assert_contains(
        &several,
        &["its tensors are on several meshes, x=2,y=2 and dp=4 and", "a layout file has only one"],
    );
    assert_contains(
        &stderr_of("fsdp4/dcp"),
        &["a DCP directory does not record", "inspect rank files of the same job"],
    );
    assert_contains(&stderr_of("replicated_plain/ranks"), &["none of its tensors is on a mesh"]);
    assert_contains(&stderr_of("safetensors/single"), &["safetensors holds whole tensors"]);
    assert_contains(&stderr_of("flat3/flat"), &["but not the names, order and shapes"]);
}

pub const EMBED: &str = "model.embed.weight";

/// Converts `fsdp4/ranks`, whose embedding has 10 rows, to DCP with a layout file that has this text. Returns the
/// output of `inspect`.
#[track_caller]
pub fn laid_out(text: &str, options: &str) -> Json {
    let env = TestEnv::new();
    let layout = env.write("layout.toml", text);
    let options = format!("--to dcp --layout {} {options}", layout.display());
    let made = env.make("reshard", "fsdp4/ranks", "out", &options);
    // The DCP directory of this fixture has names instead of numbers in the optimizer state.
    succeed("verify", &[&fixture("fsdp4/ranks"), &made.path], "");
    inspect(&made.path, "")
}

#[test]
fn command_line_overrides_the_layout_file() {
    let env = TestEnv::new();
    let text =
        "mesh = \"dp=2,tp=2\"\nplacements = \"S(0),R\"\n[[rules]]\ntensors = \"**.w1\"\nplacements = \"R,S(0)\"\n";
    let layout = env.write("layout.toml", text);
    let placements = |name: &str, options: &str| {
        let options = format!("--to torch-ranks --layout {} {options}", layout.display());
        let found = inspect(&env.make("reshard", "fsdp4/dcp", name, &options).path, "--brief");
        let of = |tensor: &str| found["tensors"][tensor]["placements"].as_str().unwrap().to_owned();
        (of("model.blocks.0.w1.weight"), of(EMBED), found["mesh"].clone())
    };
    let of = |w1: &str, embed: &str, tp: u64| (w1.to_owned(), embed.to_owned(), json!([["dp", 2], ["tp", tp]]));
    assert_eq!(placements("a", ""), of("R,S(0)", "S(0),R", 2));
    assert_eq!(placements("b", "--placements **.w1=S(1),R"), of("S(1),R", "S(0),R", 2));
    assert_eq!(placements("c", "--placements S(1),R"), of("R,S(0)", "S(1),R", 2));
    assert_eq!(placements("d", "--mesh dp=2,tp=3"), of("R,S(0)", "S(0),R", 3));
    let path = layout.display();
    env.refuse("reshard", "fsdp4/dcp", "x", &format!("--layout {path} --mesh tp=2,dp=2"));
    // A file without a mesh applies to the mesh of SRC.
    let rule = env.write("rule.toml", "[[rules]]\ntensors = \"embed\"\nplacements = \"R\"\n");
    let made = env.make("reshard", "fsdp4/ranks", "own", &format!("--layout {}", rule.display()));
    let found = inspect(&made.path, "--brief");
    assert_eq!((&found["tensors"][EMBED]["placements"], &found["mesh"]), (&json!("R"), &json!([["dp", 4]])));
    assert_eq!(found["tensors"]["model.head.weight"]["placements"], "S(0)");
}

#[test]
fn layout_file_overrides_like() {
    let env = TestEnv::new();
    let layout = env.write("layout.toml", "[[rules]]\ntensors = \"embed\"\nplacements = \"R,R\"\n");
    let like = fixture("fsdp_tp/ranks");
    let options = format!("--like {} --layout {}", like.display(), layout.display());
    let found = inspect(&env.make("reshard", "fsdp_tp/dcp", "out", &options).path, "--brief");
    assert_eq!(found["tensors"][EMBED]["placements"], "R,R");
    assert_eq!(found["tensors"]["model.blocks.0.wq.weight"]["placements"], "_S(0,2),S(0)");
}

#[test]
fn errors_in_a_layout_file_have_their_line() {
    let env = TestEnv::new();
    let refuse = |text: &str| {
        let layout = env.write("layout.toml", text);
        let outcome = env.refuse("reshard", "fsdp4/dcp", "x", &format!("--layout {} --json", layout.display()));
        fs::remove_file(&layout).unwrap();
        outcome.json()
    };
    let document = refuse(
        "mesh = \"dp=2,tp=2\"\nplacements = \"S(0),R\"\n\n[[rules]]\ntensors = \"**.w1\"\nplacements = \"S(0)\"\n",
    );
    assert_eq!(document["error"]["kind"], "layout");
    assert_eq!(document["error"]["file"], env.path("layout.toml").display().to_string());
    let mesh = "mesh = \"dp=2\"\nplacements = \"S(0)\"\n";
    let rule = |pattern: &str, more: &str| format!("{mesh}[[rules]]\ntensors = \"{pattern}\"\n{more}\n");
    refuse(&rule("**.w11", "placements = \"S(0)\""));
    refuse(&rule("norm", "placements = \"S(1)\""));
    refuse(&rule("norm", "placements = \"S(0)\"\nsizes = { dp = [2, 2] }"));
    refuse(&format!("{mesh}[styles]\nnorm = \"colwise\"\n"));
    refuse("[flat]\nworld_size = 2\n");
    refuse("placements = \"S(0)\"\n");
    let junk = env.path("junk");
    fs::write(&junk, b"mesh = \"\xff\"").unwrap();
    let options = format!("--layout {}", junk.display());
    env.refuse("reshard", "fsdp4/dcp", "x", &options);
    let options = format!("--layout {}", env.path("nowhere").display());
    env.refuse("reshard", "fsdp4/dcp", "x", &options);
    let options = format!("--layout {}", fixture("fsdp4").display());
    env.refuse("reshard", "fsdp4/dcp", "x", &options);
    let large = env.path("large.toml");
    fs::File::create(&large).unwrap().set_len(1 << 40).unwrap();
    let options = format!("--layout {}", large.display());
    env.refuse("reshard", "fsdp4/dcp", "x", &options);
}

#[test]
fn units_of_a_layout_file_are_written_and_read() {
    let env = TestEnv::new();
    let known = fixture("flat2/flat.flat_layout.json");
    let source = fixture("flat2/flat");
    let options = format!("--flat-layout {}", known.display());
    let layout = write_layout(&env, &source, "units.toml", &options);
    let text = fs::read_to_string(&layout).unwrap();
    assert_contains(
        &text,
        &["[flat]\n", "[[flat.units]]\nmodule = \"layers.0\"\n", "{ fqn = \"emb.weight\", shape = [11, 6] },"],
    );
    // For flat files, a layout file has the same effect as flat_layout.json.
    let read_with = |path: &Path| inspect(&source, &format!("--brief --flat-layout {}", path.display()));
    assert_eq!(read_with(&layout), read_with(&known));
    // A layout file with flat units describes the output, whatever SRC is.
    let full = fixture("flat2/full/model.pt");
    let written = |name: &str, options: String| contents(&env.make("flatten", &full, name, &options).path);
    let expected = written("a", format!("--flat-layout {}", known.display()));
    assert_eq!(written("b", format!("--layout {}", layout.display())), expected);
    assert_eq!(written("c", format!("--layout {}", known.display())), expected);
    assert_eq!(written("d", format!("--flat-layout {}", layout.display())), expected);
    let both = format!("--layout {} --flat-layout {}", layout.display(), known.display());
    env.refuse("flatten", &full, "x", &both);
    let wrap = format!("--layout {} --wrap layers.*", layout.display());
    env.refuse("flatten", &full, "x", &wrap);
    // The units in SRC differ from the units in the layout file.
    let options =
        format!("--flat-layout {} --layout {}", known.display(), fixture("flat2/groups.flat_layout.json").display());
    let regrouped = env.make("flatten", &source, "groups", &options);
    assert_same(&below("model.", &regrouped.tensors()), &read(&env.path("a")), "regrouped");
    // A layout of tensors has no units.
    let tensors = env.write("tensors.toml", "mesh = \"dp=2\"\n");
    env.refuse("flatten", &full, "x", &format!("--layout {}", tensors.display()));
    fs::write(&layout, "[flat]\nuse_orig_params = true\nunits = []\n").unwrap();
    env.refuse("flatten", &full, "x", &format!("--layout {}", layout.display()));
}
