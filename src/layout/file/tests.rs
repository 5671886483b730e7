use proptest::prelude::*;

use super::*;
use crate::document::{DocumentError, MAX_BYTES, parse_toml};
use crate::layout::rules::{Fallback, MeshLayout, PlacementChoice, PlacementList};
use crate::layout::{MeshDim, Pattern, comma_list};

const WHOLE: &str = r#"
version = 1
mesh = "dp=2,tp=4"
mesh_ranks = [0, 2, 4, 6, 1, 3, 5, 7]
placements = "S(0),R"
split = "balanced"
plan = "llama"
tp = "tp"
fsdp = "dp"

[styles]
tok_embeddings = "rowwise-embedding"
[styles."layers.*"]
"attention.{wq,wk,wv}" = "colwise"
attention.wo = "rowwise"
feed_forward = "pairwise"

[[rules]]
tensors = "**.norm.weight"
placements = "S(0),R"
slice = "dp"

[[rules]]
tensors = "**.freqs"
placements = "plain"

[[rules]]
tensors = "**.w1"
placements = "R,S(-1)"
split = "chunk,makani"
sizes = { tp = [3, 1, 0, 2] }

[flat]
world_size = 8
"#;

fn parse(text: &str) -> LayoutFile {
    LayoutFile::parse("l.toml", text).unwrap()
}

/// Parses an invalid layout file and returns the error message, followed by its hint.
fn wrong(name: &str, text: &str) -> String {
    let parsed = LayoutFile::parse(name, text);
    let error = parsed.and_then(|file| {
        let mesh = file.mesh(None)?.unwrap_or_else(|| DeviceMesh::parse("dp=2,tp=4").unwrap());
        file.rules(&mesh)
    });
    match error.expect_err(text) {
        LayoutError::File(DocumentError { file, position, problem, hint }) => {
            assert_eq!(file, name);
            let hint = hint.map(|hint| format!(" ({hint})")).unwrap_or_default();
            format!("{position}: {problem}{hint}")
        }
        other => panic!("{text}: {other}"),
    }
}

#[test]
fn every_key_is_parsed() {
    let file = parse(WHOLE);
    let mesh = file.mesh(None).unwrap().unwrap();
    assert_eq!((mesh.to_string().as_str(), mesh.ranks()[1].0), ("dp=2,tp=4", 2));
    assert_eq!((file.split.clone(), file.fallback(None).unwrap().len()), (Some(Split::Balanced), 2));
    let styles: Vec<String> = file.plan.styles.iter().map(|rule| format!("{} {}", rule.pattern, rule.style)).collect();
    let expected = [
        "tok_embeddings rowwise-embedding",
        "layers.*.attention.{wq,wk,wv} colwise",
        "layers.*.attention.wo rowwise",
        "layers.*.feed_forward pairwise",
    ];
    assert_eq!(styles, expected);
    assert_eq!(file.plan.styles[1].origin, "l.toml line 14: styles \"layers.*.attention.{wq,wk,wv}\"");
    assert_eq!(file.plan.name.as_ref().unwrap().describe(), "l.toml line 7: plan");
    let rules = file.rules(&mesh).unwrap();
    assert_eq!(rules[0].origin, "l.toml line 19: rules \"**.norm.weight\"");
    let spec = |index: usize| match &rules[index].choice {
        PlacementChoice::Shared(spec) => spec.clone(),
        PlacementChoice::Plain => panic!("rule {index} is plain"),
    };
    assert_eq!(spec(0).slice, Some(vec![MeshDim(0)]));
    assert_eq!(rules[1].choice, PlacementChoice::Plain);
    assert_eq!(spec(2).splits, [Split::Chunk, Split::Sizes([3, 1, 0, 2].into())]);
    assert_eq!(file.flat.unwrap().value["world_size"], 8);
}

#[test]
fn example_in_the_docs_parses() {
    let page = include_str!("../../../docs/reference/layout-file.md");
    let text = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let file = parse(text);
    let mesh = file.mesh(None).unwrap().unwrap();
    assert_eq!((file.rules(&mesh).unwrap().len(), file.plan.styles.len()), (3, 4));
}

#[test]
fn json_gives_the_same_layout_as_toml() {
    let toml = parse(WHOLE);
    let text = r#"{"version": 1, "mesh": "dp=2,tp=4", "mesh_ranks": [0, 2, 4, 6, 1, 3, 5, 7], "placements": "S(0),R",
        "split": "balanced", "plan": "llama", "tp": "tp", "fsdp": "dp",
        "styles": {"tok_embeddings": "rowwise-embedding", "layers.*": {
            "attention.{wq,wk,wv}": "colwise", "attention": {"wo": "rowwise"}, "feed_forward": "pairwise"}},
        "rules": [{"tensors": "**.norm.weight", "placements": "S(0),R", "slice": "dp"},
            {"tensors": "**.freqs", "placements": "plain"},
            {"tensors": "**.w1", "placements": "R,S(-1)", "split": "chunk,makani", "sizes": {"tp": [3, 1, 0, 2]}}],
        "flat": {"world_size": 8}}"#;
    let json = LayoutFile::parse("layout", text).unwrap();
    let mesh = toml.mesh(None).unwrap().unwrap();
    assert_eq!(json.mesh(None).unwrap().unwrap(), mesh);
    assert_eq!((json.split.clone(), json.fallback(None)), (toml.split.clone(), toml.fallback(None)));
    let rules = |file: &LayoutFile| -> Vec<(String, PlacementChoice)> {
        file.rules(&mesh).unwrap().into_iter().map(|rule| (rule.pattern.to_string(), rule.choice)).collect()
    };
    assert_eq!(rules(&json), rules(&toml));
    let styles = |file: &LayoutFile| -> Vec<String> {
        file.plan.styles.iter().map(|rule| format!("{} {}", rule.pattern, rule.style)).collect()
    };
    assert_eq!(styles(&json), styles(&toml));
    assert_eq!(json.flat.unwrap().value, toml.flat.unwrap().value);
    assert_eq!(json.rules[1].line, 6);
    let pretty =
        "\n\n{\n  \"mesh\": \"dp=2\",\n  \"rules\": [\n    {\n      \"tensors\": \"a\",\n      \"placements\": 7\n";
    assert_eq!(
        wrong("l", &(pretty.to_owned() + "}]}")),
        "l line 8: rules \"a\": expected `placements` to be text, found a number"
    );
}

#[test]
fn error_names_file_line_and_rule() {
    let rule = |more: &str| format!("\n[[rules]]\ntensors = \"**.w1\"\n{more}\n");
    let cases = [
        ("", "l.toml line 1: expected a layout, found an empty file"),
        (" \n\t", "l.toml line 1: expected a layout, found an empty file"),
        ("mesh = ", "l.toml line 1: string values must be quoted"),
        ("a b", "l.toml line 1: key with no value, expected `=`"),
        ("mesh = \"dp=2\"\nmesh = \"dp=2\"", "l.toml line 2: duplicate key"),
        (
            "version = 2",
            "l.toml line 1: version: expected layout file version 1, found 2 (write version = 1, or use a newer dtshard)",
        ),
        ("version = \"1\"", "l.toml line 1: version: expected 1, found text"),
        (
            "# c\nplacement = \"S(0)\"",
            "l.toml line 2: unknown key `placement` (did you mean `placements`? use one of version, mesh, mesh_ranks, placements, split, plan, tp, fsdp, replicate, ddp, styles, rules, flat)",
        ),
        (
            "mesh = 4",
            "l.toml line 1: mesh: expected text, found a number (name the dims, outermost first: mesh = \"dp=2,tp=2\")",
        ),
        ("mesh = \"dp\"", "l.toml line 1: mesh: mesh `dp`: expected name=size, as in dp=4,tp=2, found `dp`"),
        ("mesh = [2, 0]", "l.toml line 1: mesh: mesh of shape (2, 0): expected every dim to be at least 1, found 0"),
        (
            "mesh = [4294967296, 4294967296]",
            "l.toml line 1: mesh: mesh of shape (4294967296, 4294967296): expected at most 16777216 ranks, found more",
        ),
        (
            "mesh_ranks = [0]",
            "l.toml line 1: mesh_ranks: expected `mesh` too, found only `mesh_ranks` (add the mesh dims: mesh = \"dp=2,tp=2\")",
        ),
        (
            "mesh = \"dp=2\"\nmesh_ranks = [0, 0]",
            "l.toml line 2: mesh_ranks: mesh: expected every rank once, found rank 0 again",
        ),
        (
            "mesh = \"dp=2\"\nmesh_ranks = [0]",
            "l.toml line 2: mesh_ranks: mesh of shape (2,): expected one rank for each cell of the mesh, found 1 ranks",
        ),
        (
            "mesh = \"dp=2\"\nmesh_ranks = [\n0,\n-1]",
            "l.toml line 4: mesh_ranks: expected a list of ranks, found -1 in it",
        ),
        ("mesh = \"dp=2\"\nmesh_ranks = [0, 4294967296]", "l.toml line 2: mesh_ranks: expected ranks below 2^32"),
        ("placements = [\"S(0)\"]", "l.toml line 1: placements: expected `placements` to be text, found a list"),
        (
            "placements = \"plain\"",
            "l.toml line 1: placements: `plain` is allowed in rules only (use a rule with tensors = \"**\" and placements = \"plain\")",
        ),
        (
            "placements = \"S(0),Q\"",
            "l.toml line 1: placements: placement `Q`: expected S(dim), _S(dim,split_factor), R or P(op), found `Q`",
        ),
        (
            "\nplacements = \"S(0)\"",
            "l.toml line 2: placements: placements `S(0)`: expected one placement for each dim of the mesh dp=2,tp=4",
        ),
        (
            "split = \"3+1\"",
            "l.toml line 1: split: expected chunk, balanced or makani, found `3+1` (use one of these names; give explicit sizes in a rule, because they fit only some tensors)",
        ),
        (
            "tp = \"tpp\"",
            "l.toml line 1: tp: the mesh dp=2,tp=4 has no dim `tpp` (did you mean `tp`? use one of dp, tp)",
        ),
        (
            "[styles.layers]\n\"*.wq\" = \"column-wise\"",
            "l.toml line 2: styles \"layers.*.wq\": style `column-wise`: expected the name of a style (did you mean `colwise`? use one of colwise, rowwise, colwise-embedding, rowwise-embedding, colwise-conv1d, rowwise-conv1d, pairwise, sequence, replicate, none)",
        ),
        (
            "[styles]\n\"a.{b\" = \"colwise\"",
            "l.toml line 2: styles \"a.{b\": pattern `a.{b`: unclosed alternate group; missing '}' (maybe escape '{' with '[{]'?)",
        ),
        ("[styles]\na = 1", "l.toml line 2: styles \"a\": expected `a` to be text, found a number"),
        ("styles = \"llama\"", "l.toml line 1: styles: expected a table, found text"),
        ("rules = 1", "l.toml line 1: rules: expected a list of tables, found a number"),
        ("rules = [1]", "l.toml line 1: rules: expected a table, found a number"),
        ("flat = 1", "l.toml line 1: flat: expected a table, found a number"),
        ("[[rules]]\nplacements = \"R,R\"", "l.toml line 1: rules: expected `tensors`, a pattern for names"),
        (&rule(""), "l.toml line 3: rules \"**.w1\": expected `placements`, as in \"S(0),R\", or \"plain\""),
        (
            &rule("tensor = 1"),
            "l.toml line 4: rules \"**.w1\": unknown key `tensor` (did you mean `tensors`? use one of tensors, placements, slice, split, sizes)",
        ),
        (
            &rule("placements = \"S(0)\""),
            "l.toml line 3: rules \"**.w1\": placements `S(0)`: expected one placement for each dim of the mesh dp=2,tp=4",
        ),
        (
            &rule("placements = \"plain\"\nslice = \"dp\""),
            "l.toml line 4: rules \"**.w1\": plain tensors are not sharded, so `slice` is not allowed",
        ),
        (
            &rule("placements = \"R,S(0)\"\nslice = \"dp\""),
            "l.toml line 3: rules \"**.w1\": placements `R,S(0)`: expected R on mesh dim 1, because `slice` does not contain this dim",
        ),
        (
            &rule("placements = \"R,S(0)\"\nslice = \"tp,dp\""),
            "l.toml line 5: rules \"**.w1\": slice `tp,dp`: expected dims in the order of the mesh dp=2,tp=4, each once",
        ),
        (
            &rule("placements = \"R,S(0)\"\nslice = \"ep\""),
            "l.toml line 5: rules \"**.w1\": the mesh dp=2,tp=4 has no dim `ep` (did you mean `dp`? use one of dp, tp)",
        ),
        (
            &rule("placements = \"R,S(0)\"\nsplit = \"even\""),
            "l.toml line 5: rules \"**.w1\": split `even`: expected chunk, balanced, makani or sizes such as 3+1",
        ),
        (
            &rule("placements = \"R,S(0)\"\nsplit = \"chunk,chunk,chunk\""),
            "l.toml line 5: rules \"**.w1\": expected one split, or one for each dim of the mesh dp=2,tp=4, found 3",
        ),
        (
            &rule("placements = \"R,S(0)\"\n[rules.sizes]\ntp = [1, 2]"),
            "l.toml line 6: rules \"**.w1\": sizes [1, 2] for tp: expected 4 sizes on the mesh dp=2,tp=4",
        ),
        (
            &rule("placements = \"R,S(0)\"\nsizes = { dp = [1, 2] }"),
            "l.toml line 5: rules \"**.w1\": sizes [1, 2] for dp: expected S or _S on this mesh dim, found R",
        ),
        (
            &rule("placements = \"R,S(0)\"\nsizes = { tp = [1.5] }"),
            "l.toml line 5: rules \"**.w1\": expected a list of sizes, found 1.5 in it",
        ),
        ("mesh = 2020-01-01", "l.toml line 1: expected text, a number, a list or a table, found a date"),
        (
            "\nx = 99999999999999999999",
            "l.toml line 2: expected text, a number, a list or a table, found a number beyond 64 bits",
        ),
        ("x = nan", "l.toml line 1: expected text, a number, a list or a table, found nan or an infinity"),
    ];
    for (text, expected) in cases {
        assert_eq!(wrong("l.toml", text), expected, "{text}");
    }
    let cases = [
        ("[1]", "l.json line 1: expected a table, found a list"),
        ("{\"mesh\": \"dp=2\",\n \"mesh\": \"dp=2\"}", "l.json line 2: duplicate key `mesh`"),
        ("{\"mesh\":\n\n}", "l.json line 3: expected JSON, found text that is not a JSON value"),
        ("{\"mesh\": \"dp=2\"\n\n", "l.json line 3: expected JSON, found the end of the text inside an object"),
        ("{\"split\": null}", "l.json line 1: split: expected `split` to be text, found null"),
        ("{\"tp\": true}", "l.json line 1: tp: expected `tp` to be text, found true"),
        ("{\"tp\": \"\\ud800\"}", "l.json line 1: expected JSON, found an incomplete `\\u` escape"),
    ];
    for (text, expected) in cases {
        assert_eq!(wrong("l.json", text), expected, "{text}");
    }
    assert_eq!(
        wrong("l.json", &"[".repeat(100_000)),
        "l.json line 1: expected JSON, found the end of the text inside a list"
    );
    let deep = "[".repeat(1000) + &"]".repeat(1000);
    assert_eq!(wrong("l.json", &deep), "l.json line 1: nested more than 64 deep");
    let error = wrong("l.toml", &format!("x = {deep}"));
    assert_eq!(error, "l.toml line 1: lists and tables are nested too deeply");
    let long = format!("[{}]", vec!["a"; 100_000].join("."));
    assert_eq!(wrong("l.toml", &long), "l.toml line 1: lists and tables are nested too deeply");
    let large = " ".repeat(usize::try_from(MAX_BYTES).unwrap() + 1);
    assert_eq!(wrong("l.toml", &large), "l.toml line 1: expected at most 16777216 bytes, found 16777217");
}

#[test]
fn given_mesh_with_other_dims_is_an_error() {
    let file = parse("placements = \"S(0),R\"\nmesh = \"dp=2,tp=4\"");
    let mesh = |text: &str| Some(DeviceMesh::parse(text).unwrap());
    assert_eq!(file.mesh(mesh("dp=8,tp=1")).unwrap(), mesh("dp=8,tp=1"));
    let error = file.mesh(mesh("tp=4,dp=2")).unwrap_err().to_string();
    assert_eq!(
        error,
        "l.toml line 2: mesh: the mesh of the file is dp=2,tp=4, and the given mesh tp=4,dp=2 has other dims"
    );
    let unnamed = parse("mesh = [2, 4]").mesh(None).unwrap().unwrap();
    assert_eq!((unnamed.names(), unnamed.shape()), (None, &[2, 4][..]));
    assert_eq!(parse("split = \"makani\"").mesh(None).unwrap(), None);
    assert_eq!(parse("\u{feff}split = \"makani\"").mesh(mesh("dp=1")).unwrap(), mesh("dp=1"));
}

#[test]
fn split_factors_adapt_to_a_given_mesh() {
    let file = parse(
        "mesh = \"dp=2,tp=2\"\nplacements = \"_S(0,2),S(0)\"\n[[rules]]\ntensors = \"w\"\nplacements = \"_S(1,2),S(1)\"",
    );
    let on = |text: &str| {
        let mesh = DeviceMesh::parse(text).unwrap();
        let rules = file.rules(&mesh).unwrap();
        let PlacementChoice::Shared(spec) = &rules[0].choice else { panic!("plain") };
        [comma_list(&file.fallback(Some(&mesh)).unwrap()), comma_list(&spec.placements)]
    };
    assert_eq!(on("dp=2,tp=2"), ["_S(0,2),S(0)", "_S(1,2),S(1)"]);
    assert_eq!(on("dp=2,tp=4"), ["_S(0,4),S(0)", "_S(1,4),S(1)"]);
    assert_eq!(on("dp=4,tp=1"), ["S(0),S(0)", "S(1),S(1)"]);
}

#[test]
fn rules_with_sizes_keep_the_split_of_the_layout_elsewhere() {
    let mut file =
        parse("split = \"makani\"\n[[rules]]\ntensors = \"w\"\nplacements = \"S(0),S(1)\"\nsizes = { tp = [1, 2] }");
    let mesh = DeviceMesh::parse("dp=2,tp=2").unwrap();
    let splits = |file: &LayoutFile| match &file.rules(&mesh).unwrap()[0].choice {
        PlacementChoice::Shared(spec) => spec.splits.clone(),
        PlacementChoice::Plain => Vec::new(),
    };
    assert_eq!(splits(&file), [Split::Makani, Split::Sizes([1, 2].into())]);
    file.split = Some(Split::Balanced);
    assert_eq!(splits(&file)[0], Split::Balanced);
}

/// Formats a layout as lines, for comparison.
fn lines(layout: &MeshLayout) -> Vec<String> {
    let rules = layout.rules.iter().map(|rule| format!("{} {:?}", rule.pattern, rule.choice));
    rules.chain([format!("{:?} {:?} {:?}", layout.mesh, layout.fallback, layout.split)]).collect()
}

fn read_back(name: &str, text: &str) -> MeshLayout {
    let file = LayoutFile::parse(name, text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let mesh = file.mesh(None).unwrap().unwrap();
    let fallback = Fallback::Placements(file.fallback(None).unwrap());
    MeshLayout::new(mesh.clone(), file.rules(&mesh).unwrap(), fallback, file.split).unwrap()
}

#[test]
fn written_layout_reads_back_equal() {
    let rule =
        |pattern: &str, choice| Rule { pattern: Pattern::parse(pattern).unwrap(), choice, origin: String::new() };
    let list = |text: &str| crate::layout::parse_placements(text).unwrap();
    let spec = |text: &str, splits: &[Split], slice: Option<&[usize]>| {
        let slice = slice.map(|dims| dims.iter().map(|dim| MeshDim(*dim)).collect());
        PlacementChoice::Shared(PlacementList { placements: list(text), splits: splits.to_vec(), slice })
    };
    let sizes = Split::Sizes([7, 0].into());
    let rules = vec![
        rule("a \"quoted\\\" \u{7}\u{202e}\u{7f}.権重.*", PlacementChoice::Plain),
        rule("w", spec("_S(0,2),R", &[], Some(&[0]))),
        rule("x", spec("P(max),R", &[], None)),
        rule("v", spec("R,S(-1)", &[Split::Chunk, Split::Chunk], None)),
        rule("u", spec("S(0),S(1)", &[Split::Makani, sizes], None)),
    ];
    let mesh = DeviceMesh::parse("dp=2,tp=2").unwrap();
    let ranks = [0, 2, 1, 3].map(crate::layout::Rank).to_vec();
    let mesh = mesh.with_ranks(ranks).unwrap();
    let fallback = Fallback::Placements(list("S(0),R"));
    let layout = MeshLayout::new(mesh, rules, fallback.clone(), Some(Split::Balanced)).unwrap();
    let text = toml(&document(&layout));
    assert_eq!(lines(&read_back("l.toml", &text)), lines(&layout), "{text}");
    assert_eq!(lines(&read_back("l.json", &document(&layout).to_string())), lines(&layout));
    let unnamed = DeviceMesh::new([1_u64, 2].as_slice(), [0, 1].map(crate::layout::Rank).to_vec(), None).unwrap();
    let layout = MeshLayout::new(unnamed, vec![], fallback, None).unwrap();
    let text = toml(&document(&layout));
    assert_eq!(text, "mesh = [1, 2]\nplacements = \"S(0),R\"\n");
    assert_eq!(lines(&read_back("l.toml", &text)), lines(&layout));
}

fn parses_without_panic(name: &str, text: &str) {
    if let Ok(file) = LayoutFile::parse(name, text) {
        let mesh = file.mesh(None).ok().flatten().unwrap_or_else(|| DeviceMesh::parse("dp=2,tp=4").unwrap());
        let _ = file.rules(&mesh);
        let _ = file.has_only_plan();
    }
}

proptest! {
    #[test]
    fn random_text_is_an_error_or_a_layout(text in ".{0,200}", soup in "[\\[\\]{}=\",.\\n a-f0-9_()SR*]{0,200}") {
        for text in [&text, &soup] {
            parses_without_panic("l", text);
            parses_without_panic("l.json", text);
        }
    }

    #[test]
    fn mutated_file_is_an_error_or_a_layout(at in 0..WHOLE.len(), cut in 0_usize..8, new in "[\\[\\]{}=\",.\\n a-f0-9_()SR*\\\\]{0,4}") {
        let mut text = WHOLE.to_owned();
        text.replace_range(at..(at + cut).min(text.len()), &new);
        parses_without_panic("l.toml", &text);
        let json = parse_toml(WHOLE).unwrap().to_json().to_string();
        let at = at.min(json.len() - 1);
        let mut text = json.clone();
        text.replace_range(at..(at + cut).min(text.len()), &new);
        parses_without_panic("l.json", &text);
    }
}
