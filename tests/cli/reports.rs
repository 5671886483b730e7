//! Tests of `--html`: every verb that describes something writes a page, and other output does not change.

use std::fs;

use crate::common::{expect, fixture, succeed};
use serde_json::{Value as Json, json};

/// Checks what all pages have in common.
fn assert_page(page: &str) {
    assert!(page.starts_with("<!DOCTYPE html><html lang=\"en\">"), "{page}");
    assert!(page.ends_with("</html>"), "{page}");
    assert!(page.contains("Content-Security-Policy") && !page.contains("<script"));
    assert_eq!(page.matches("<h1>").count(), 1);
    assert!(!page.contains("options::"), "options have the names of the command line");
}

#[test]
fn inspect_writes_a_page_beside_its_output() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.html");
    let source = fixture("fsdp_tp/ranks");
    let html = format!("--html {}", file.display());
    assert_eq!(succeed("inspect", &[&source], &html).stdout, succeed("inspect", &[&source], "").stdout);
    let page = fs::read_to_string(&file).unwrap();
    assert_page(&page);
    for text in ["Bytes per rank", "How tensors are cut", "_S(0,2),S(0) on dp=2,tp=2", "optim.state.{0..9}.step"] {
        assert!(page.contains(text), "{text}");
    }
    // An existing file is replaced, also by a run with --json.
    succeed("inspect", &[&fixture("fsdp4/dcp")], &format!("{html} --json"));
    let page = fs::read_to_string(&file).unwrap();
    assert!(page.contains("S(0) x 4") && page.contains("Bytes per file"));
    expect(2, "inspect", &[&source], "--html /no/such/folder/report.html");
}

#[test]
fn page_does_not_replace_a_file_of_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("model.safetensors");
    fs::copy(fixture("titan.truth.safetensors"), &source).unwrap();
    let before = fs::read(&source).unwrap();
    let html = format!("--html {}", source.display());
    for (verb, options) in [("inspect", ""), ("verify", ""), ("reshard", "--mesh fsdp=2 --dry-run")] {
        let failed = expect(2, verb, &[&source], &format!("{options} {html}"));
        assert!(failed.stderr.contains("is no HTML page"), "{}", failed.stderr);
        assert_eq!(fs::read(&source).unwrap(), before);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn missing_rank_is_a_hole_in_the_page() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    fs::create_dir(&source).unwrap();
    for rank in [0, 1, 3] {
        let name = format!("model_world_size_4_rank_{rank}.pt");
        fs::copy(fixture("llama_tiny/ranks").join(&name), source.join(&name)).unwrap();
    }
    let file = folder.path().join("report.html");
    succeed("inspect", &[&source], &format!("--html {}", file.display()));
    let page = fs::read_to_string(&file).unwrap();
    assert_page(&page);
    for text in ["1 missing file", "model_world_size_4_rank_2.pt", "gap at [32:48, 0:32]", "class=\"hole\""] {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn verify_marks_replicas_that_differ() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.html");
    expect(1, "verify", &[&fixture("conflict/replica")], &format!("--html {}", file.display()));
    let page = fs::read_to_string(&file).unwrap();
    assert_page(&page);
    assert!(page.contains("replica: rank 0 and rank 1 differ") && page.contains("class=\"cross\""));
    succeed("verify", &[&fixture("fsdp4/ranks")], &format!("--html {}", file.display()));
    let page = fs::read_to_string(&file).unwrap();
    assert!(page.contains("sound: ") && !page.contains("id=\"problems\""));
}

/// Writes a safetensors file of tensors in bytes.
fn write(path: &std::path::Path, tensors: &[(&str, &str, Json, Vec<u8>)]) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        header
            .insert((*name).to_owned(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] }));
    }
    let header = Json::from(header).to_string();
    fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()).unwrap();
}

#[test]
fn differences_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    let [left, right, file] =
        ["left.safetensors", "right.safetensors", "report.html"].map(|name| folder.path().join(name));
    let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let matrix = |values: &[f32]| ("F32", json!([2, 2]), floats(values));
    let tensors = |second: Vec<u8>, third: Vec<u8>, flags: Vec<u8>| {
        let (dtype, shape, first) = matrix(&[1.0, 2.0, 3.0, 4.0]);
        vec![
            ("layers.0.w", dtype, shape.clone(), first),
            ("layers.1.w", dtype, shape.clone(), second),
            ("layers.2.w", dtype, shape, third),
            ("layers.2.mask", "BOOL", json!([4]), flags),
        ]
    };
    let (zeros, nan) = (floats(&[3.0, 0.0, 0.0, 4.0]), floats(&[f32::NAN, 1.0, f32::INFINITY, 0.0]));
    write(&left, &tensors(zeros, nan.clone(), vec![0, 1, 0, 1]));
    write(&right, &tensors(floats(&[3.0, 0.5, 0.0, 4.0]), floats(&[f32::NAN, f32::NAN, 1.0, 0.0]), vec![0, 1, 1, 0]));
    let found = expect(1, "verify", &[&left, &right], &format!("--json --html {}", file.display())).json();
    let measures: Vec<Json> = found["different"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| json!([one["fqn"], one["max_abs_difference"], one["relative_l2"], one["changed_share"]]))
        .collect();
    assert_eq!(
        measures,
        [
            json!(["layers.1.w", 0.5, 0.1, 0.25]),
            json!(["layers.2.mask", null, null, 0.5]),
            json!(["layers.2.w", "nan", "nan", 0.5]),
        ]
    );
    let page = fs::read_to_string(&file).unwrap();
    assert_page(&page);
    for text in ["Differences by layer", "layers.1", "1.0e-1", "50.00 %", "nan", "3 tensors differ"] {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn dry_run_shows_bytes_from_rank_to_rank() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.html");
    let source = fixture("llama_tiny/ranks");
    succeed("reshard", &[&source], &format!("--mesh fsdp=8 --dry-run --html {}", file.display()));
    let page = fs::read_to_string(&file).unwrap();
    assert_page(&page);
    for text in ["Bytes from SRC to DST", ">rank 7<", "model_world_size_8_rank_{0..7}.pt"] {
        assert!(page.contains(text), "{text}");
    }
    succeed("consolidate", &[&source], &format!("--dry-run --html {}", file.display()));
    assert!(fs::read_to_string(&file).unwrap().contains("model.safetensors"));
    let refused = expect(2, "reshard", &[&source, &folder.path().join("out")], "--mesh fsdp=8 --html x.html");
    assert!(refused.stderr.contains("--dry-run"), "{}", refused.stderr);
}
