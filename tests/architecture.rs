//! Who may import whom. The picture is in `src/lib.rs`; this keeps it true.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]

use std::fs;
use std::path::{Path, PathBuf};

/// For each module, the modules of this crate that it may use besides itself, `error`, `name_list` and `threads`.
const ALLOWED: [(&str, &[&str]); 17] = [
    ("layout", &[]),
    ("storage", &[]),
    ("comm", &["storage"]),
    ("fault", &[]),
    ("catalog", &["layout", "storage"]),
    ("plan", &["catalog", "layout"]),
    ("format", &["catalog", "layout", "nearest", "quantity", "storage"]),
    ("twin", &["comm", "format", "layout", "storage"]),
    ("quantity", &[]),
    ("name_list", &[]),
    ("threads", &[]),
    ("select", &["catalog", "layout", "nearest"]),
    ("nearest", &["layout"]),
    ("exec", &["plan", "catalog", "layout", "storage", "comm", "fault"]),
    ("gpu", &["catalog", "layout", "exec", "comm", "quantity"]),
    ("error", &["layout"]),
    // A part of the program, which sees the library as `dtshard`.
    ("cli", &[]),
];

/// Where `unsafe` is allowed: mapped files and what the kernel is told of them, and CUDA.
const UNSAFE: [&str; 4] = ["gpu/mod.rs", "storage/filesystem.rs", "storage/mapping.rs", "storage/memory.rs"];

fn rust_files(path: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|suffix| suffix == "rs") {
            found.push(path);
        }
    }
}

/// Modules named in `crate::NAME` outside of tests and comments.
fn imports(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    code.lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| line.split("crate::").skip(1))
        .map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect())
        .filter(|name: &String| !name.is_empty() && name.chars().all(|c| !c.is_uppercase()))
        .collect()
}

#[test]
fn modules_use_only_what_is_below_them() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    assert!(files.len() > 40, "the sources were not found");
    let mut wrong = Vec::new();
    for file in files {
        let relative = file.strip_prefix(&source).unwrap();
        let module = relative.components().next().unwrap().as_os_str().to_str().unwrap().trim_end_matches(".rs");
        let is_test = relative.components().any(|part| part.as_os_str().to_str().unwrap().starts_with("tests"));
        let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == module).filter(|_| !is_test) else {
            continue;
        };
        for import in imports(&file) {
            if import != module
                && !["error", "name_list", "threads"].contains(&import.as_str())
                && !allowed.contains(&import.as_str())
            {
                wrong.push(format!("{} uses {import}", relative.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn unsafe_code_is_where_files_are_mapped_and_devices_are_used() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    let is_allowing = |file: &&PathBuf| fs::read_to_string(file).unwrap().contains("unsafe_code");
    let mut allowing: Vec<_> =
        files.iter().filter(is_allowing).map(|file| file.strip_prefix(&source).unwrap().to_str().unwrap()).collect();
    allowing.sort_unstable();
    assert_eq!(allowing, UNSAFE);
}

/// Parsers read from memory, not from mapped files: another process may change a mapped file at any moment. The zip reader copies
/// or compares each byte of a mapping once.
#[test]
fn mapped_bytes_are_tensor_data() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    // The module that maps files tests itself.
    let is_user = |file: &&PathBuf| !file.starts_with(source.join("storage"));
    let uses = |file: &&PathBuf| fs::read_to_string(file).unwrap().contains(".mapped(");
    let users = files.iter().filter(is_user).filter(uses);
    let mut using: Vec<_> = users.map(|file| file.strip_prefix(&source).unwrap().to_str().unwrap()).collect();
    using.sort_unstable();
    assert_eq!(using, ["exec/runs.rs", "format/zip/frame.rs", "format/zip/read.rs"]);
}
