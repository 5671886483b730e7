//! Tests of the architecture: which modules each module may import.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules that every other module may import.
const EVERYWHERE: [&str; 5] = ["document", "error", "json_text", "name_list", "threads"];

/// The public modules of the library, which may import every other module.
const PUBLIC: [&str; 3] = ["checkpoint", "conversion", "options"];

/// For each top-level module, the other top-level modules that it may import besides `EVERYWHERE`.
const ALLOWED: [(&str, &[&str]); 30] = [
    ("layout", &[]),
    ("storage", &[]),
    ("launch", &[]),
    ("comm", &["launch", "storage"]),
    ("fault", &[]),
    ("catalog", &["layout", "storage"]),
    ("plan", &["catalog", "layout"]),
    ("format", &["catalog", "layout", "nearest", "quantity", "storage"]),
    ("metadata_mirror", &["comm", "format", "layout", "storage"]),
    ("document", &[]),
    ("json_text", &[]),
    ("quantity", &[]),
    ("name_list", &[]),
    ("threads", &[]),
    ("maps", &["document", "layout"]),
    ("select", &["catalog", "layout", "maps", "nearest", "storage"]),
    ("nearest", &["layout"]),
    ("exec", &["plan", "catalog", "layout", "storage", "comm", "launch", "fault"]),
    ("publish", &["exec", "catalog", "storage", "comm", "launch", "fault"]),
    ("exchange", &["catalog", "layout", "plan", "exec", "publish", "comm", "launch", "storage", "fault"]),
    ("gpu", &["catalog", "layout", "exec", "exchange", "comm", "launch", "quantity"]),
    ("progress", &["exec"]),
    ("text", &["quantity"]),
    ("html", &["quantity", "text"]),
    (
        "convert",
        &[
            "catalog",
            "comm",
            "exchange",
            "exec",
            "fault",
            "format",
            "gpu",
            "html",
            "launch",
            "layout",
            "maps",
            "nearest",
            "plan",
            "progress",
            "publish",
            "quantity",
            "select",
            "storage",
            "text",
            "metadata_mirror",
        ],
    ),
    (
        "describe",
        &[
            "catalog", "convert", "exec", "format", "html", "layout", "maps", "nearest", "progress", "quantity",
            "select", "storage", "text",
        ],
    ),
    (
        "verify",
        &[
            "catalog", "convert", "describe", "exec", "format", "html", "progress", "quantity", "select", "storage",
            "text",
        ],
    ),
    // Errors are defined in separate modules, which import no other modules.
    ("error", &["catalog", "comm", "convert", "exec", "format", "gpu", "layout", "storage"]),
    // These are modules of the program, which use the library as `dtshard`.
    ("cli", &["options"]),
    ("commands", &["cli", "options", "text", "verify"]),
];

/// The files that may contain `unsafe`: mapped files with their kernel hints, and CUDA.
const UNSAFE: [&str; 4] =
    ["commands/signals_and_limits.rs", "gpu/mod.rs", "storage/filesystem.rs", "storage/mapping.rs"];

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

#[test]
fn modules_import_only_allowed_modules() {
    let mut wrong = BTreeSet::new();
    for (module, imports) in imported() {
        let Some(top) = module.first().filter(|top| !PUBLIC.contains(&top.as_str())) else { continue };
        let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| name == top) else {
            wrong.insert(format!("{top} has no row"));
            continue;
        };
        for other in imports.iter().filter_map(|other| other.first()) {
            if other != top && !EVERYWHERE.contains(&other.as_str()) && !allowed.contains(&other.as_str()) {
                wrong.insert(format!("{} uses {other}", module.join("::")));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn unsafe_code_is_limited_to_listed_files() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    let is_allowing = |file: &&PathBuf| fs::read_to_string(file).unwrap().contains("unsafe_code");
    let mut allowing: Vec<_> =
        files.iter().filter(is_allowing).map(|file| file.strip_prefix(&source).unwrap().to_str().unwrap()).collect();
    allowing.sort_unstable();
    assert_eq!(allowing, UNSAFE);
}

/// Parsers read a copy in memory, not a mapped file, because another process may change a mapped file at any moment.
/// The only exception is the archive reader, which copies or compares each byte of a mapping once.
#[test]
fn mapped_bytes_are_read_by_two_modules_only() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    // The module that maps files has tests with mappings.
    let is_user = |file: &&PathBuf| !file.starts_with(source.join("storage"));
    let uses = |file: &&PathBuf| fs::read_to_string(file).unwrap().contains(".mapped(");
    let users = files.iter().filter(is_user).filter(uses);
    let mut using: Vec<_> = users.map(|file| file.strip_prefix(&source).unwrap().to_str().unwrap()).collect();
    using.sort_unstable();
    assert_eq!(using, ["exec/runs.rs", "format/archive.rs"]);
}

/// Processes exchange bytes only by files, NCCL and MPI.
#[test]
fn no_module_opens_a_socket() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    let sockets = ["TcpStream", "TcpListener", "UdpSocket", "UnixStream", "UnixListener"];
    let opens = |file: &&PathBuf| {
        let text = fs::read_to_string(file).unwrap();
        sockets.iter().any(|socket| text.contains(socket))
    };
    let opening: Vec<_> = files.iter().filter(opens).collect();
    assert!(opening.is_empty(), "{opening:?}");
}

/// The path of a module: `format::torch::reader`.
type Module = Vec<String>;

/// Returns the modules of the library and the program, each with its code, without comments and unit tests.
fn modules() -> BTreeMap<Module, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    let without_comments = |text: &str| -> String {
        text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
    };
    let mut found = BTreeMap::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let relative = file.strip_prefix(&source).unwrap().with_extension("");
        let mut module: Module = relative.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
        if module.last().is_some_and(|name| ["mod", "lib", "main"].contains(&name.as_str())) {
            module.pop();
        }
        if !module.iter().any(|name| name.starts_with("test")) {
            found.entry(module).or_insert_with(String::new).push_str(&without_comments(code));
        }
    }
    found
}

/// Returns the paths of a `use` tree: `a::{b, c::{d, e}}` gives `a::b`, `a::c::d` and `a::c::e`.
fn paths_of(tree: &str) -> Vec<String> {
    let Some((head, rest)) = tree.split_once('{') else { return vec![tree.trim().to_owned()] };
    let body = rest.rsplit_once('}').map_or(rest, |(body, _)| body);
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, c) in body.char_indices().chain([(body.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.extend(paths_of(&body[start..at]).into_iter().map(|path| format!("{}{path}", head.trim())));
                start = at + 1;
            }
            _ => {}
        }
    }
    found
}

/// Returns the modules that each module imports. Parents and children of the module are left out, because they may
/// import each other.
fn imported() -> BTreeMap<Module, BTreeSet<Module>> {
    let trees = regex::Regex::new(r"\buse\s+([^;]+);|\b((?:crate|super|dtshard)(?:::\w+)+)").unwrap();
    let modules = modules();
    let resolve =
        |path: &[String]| (1..=path.len()).rev().map(|len| path[..len].to_vec()).find(|it| modules.contains_key(it));
    let mut found: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
    for (module, code) in &modules {
        let trees = trees.captures_iter(code).map(|found| found.get(1).or(found.get(2)).unwrap().as_str());
        for path in trees.flat_map(paths_of) {
            let mut parts: Vec<String> = path.split("::").map(|part| part.trim().to_owned()).collect();
            let mut base = match parts[0].as_str() {
                "crate" | "dtshard" => Vec::new(),
                "self" | "super" => module.clone(),
                _ => continue,
            };
            while ["crate", "dtshard", "self", "super"].contains(&parts.first().map_or("", String::as_str)) {
                if parts.remove(0) == "super" {
                    base.pop();
                }
            }
            base.extend(parts);
            if let Some(other) = resolve(&base)
                && !other.starts_with(module)
                && !module.starts_with(&other)
            {
                found.entry(module.clone()).or_default().insert(other);
            }
        }
    }
    found
}

#[test]
fn no_module_imports_itself_through_others() {
    let imported = imported();
    assert!(imported.len() > 100, "imports were not found");
    let mut circles = Vec::new();
    for module in imported.keys() {
        let mut reached: BTreeSet<&Module> = BTreeSet::new();
        let mut next: Vec<&Module> = imported[module].iter().collect();
        while let Some(other) = next.pop() {
            if reached.insert(other) {
                next.extend(imported.get(other).into_iter().flatten());
            }
        }
        if reached.contains(module) {
            circles.push(module.join("::"));
        }
    }
    assert!(circles.is_empty(), "{circles:?}");
}

/// Finds import cycles between top-level modules that go through a parent module. The test of import cycles misses
/// them, because it skips imports between a module and its parents or children.
#[test]
fn no_top_level_module_imports_itself_through_others() {
    let mut remaining: BTreeMap<&str, &[&str]> = ALLOWED.into_iter().filter(|(module, _)| *module != "error").collect();
    while let Some(lowest) = remaining
        .iter()
        .find(|(_, imports)| imports.iter().all(|other| !remaining.contains_key(other)))
        .map(|(module, _)| *module)
    {
        remaining.remove(lowest);
    }
    assert!(remaining.is_empty(), "{remaining:?}");
}

/// The library is also used by programs without a command line, so it must not need clap.
#[test]
fn clap_is_imported_by_the_command_line_only() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    let is_library =
        |file: &&PathBuf| !file.starts_with(source.join("cli")) && !file.starts_with(source.join("commands"));
    let names = |file: &&PathBuf, word: &str| fs::read_to_string(file).unwrap().contains(word);
    let importing: Vec<_> =
        files.iter().filter(is_library).filter(|file| names(file, "clap::") || names(file, "indicatif::")).collect();
    assert!(importing.is_empty(), "{importing:?}");
}

/// Messages of the library name an option as `options::max_memory`, and every front end spells this name for its users.
/// Messages may name flags of other programs.
#[test]
fn library_messages_name_options_by_field_names() {
    let help = |verb: &str| {
        let process =
            std::process::Command::new(env!("CARGO_BIN_EXE_dtshard")).args([verb, "--help"]).output().unwrap();
        String::from_utf8(process.stdout).unwrap()
    };
    let help: String = ["inspect", "reshard", "unshard", "flatten", "consolidate", "verify"].map(help).concat();
    let flag = regex::Regex::new(r"--([a-z]+(?:-[a-z]+)*)").unwrap();
    let flags: BTreeSet<&str> = flag.captures_iter(&help).map(|found| found.get(1).unwrap().as_str()).collect();
    assert!(flags.len() > 60, "{flags:?}");
    let option = regex::Regex::new(r"\boptions::([a-z_]+)").unwrap();
    let literal = regex::Regex::new(r#"(?m)^\s*//.*$|"(?:\\(?s:.)|[^"\\])*""#).unwrap();
    let mut wrong = Vec::new();
    for (module, code) in modules() {
        if module.is_empty() || ["cli", "commands"].contains(&module[0].as_str()) {
            continue;
        }
        for text in literal.find_iter(&code).map(|found| found.as_str()).filter(|text| text.starts_with('"')) {
            let is_flag = |name: &str| flags.contains(name) && !text.contains("`dtshard ");
            let flags_here =
                flag.captures_iter(text).filter(|found| is_flag(&found[1])).map(|found| found[0].to_owned());
            let unknown =
                option.captures_iter(text).filter(|found| !flags.contains(found[1].replace('_', "-").as_str()));
            wrong.extend(
                flags_here.chain(unknown.map(|found| found[0].to_owned())).map(|name| (module.join("::"), name)),
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
