//! Tests that the console examples of README.md and docs/ match the output of the program, and that links between pages
//! have targets.
//!
//! A block ```` ```console ```` in which every command begins with `dtshard` is run, in the order of the page. The
//! commands run in a temporary folder in which `tests` is the folder of the repository, so fixtures have the paths that
//! the page shows. Later blocks see the files of earlier blocks. Standard output and standard error are compared
//! together. A line `...` matches any lines; times and rates are masked. `<!-- not run -->` in the line before a block
//! excludes the block. The tutorial needs PyTorch: tests/interop/test_tutorial.py runs it.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use regex::Regex;

#[derive(Debug)]
struct Block {
    line: usize,
    /// The commands of a page, each with the output that the page shows.
    examples: Vec<(String, Vec<String>)>,
}

impl Block {
    fn is_run(&self) -> bool {
        self.examples.iter().all(|(command, _)| command.starts_with("dtshard "))
    }
}

fn blocks(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut lines = text.lines().enumerate();
    let mut before = "";
    while let Some((number, line)) = lines.next() {
        if line == "```console" {
            let body: Vec<&str> = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
            if before != "<!-- not run -->" {
                blocks.push(Block { line: number + 1, examples: examples(&body) });
            }
        }
        before = line;
    }
    blocks
}

fn examples(body: &[&str]) -> Vec<(String, Vec<String>)> {
    let mut examples: Vec<(String, Vec<String>)> = Vec::new();
    let mut goes_on = false;
    for line in body {
        match (line.strip_prefix("$ "), examples.last_mut()) {
            (_, Some((command, _))) if goes_on => *command += &format!("\n{line}"),
            (Some(command), _) => examples.push((command.to_owned(), Vec::new())),
            (None, Some((_, output))) => output.push((*line).to_owned()),
            (None, None) => panic!("a console block begins with a command, not with {line}"),
        }
        goes_on = line.ends_with('\\');
    }
    examples
}

/// Returns the output lines of a shell command.
fn run(command: &str, folder: &Path) -> Vec<String> {
    let binaries = Path::new(env!("CARGO_BIN_EXE_dtshard")).parent().unwrap();
    let path = format!("{}:{}", binaries.display(), std::env::var("PATH").unwrap());
    let shell = format!("exec 2>&1; {command}");
    let output = Command::new("sh").args(["-c", &shell]).current_dir(folder).env("PATH", path).output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.trim_end().to_owned()).collect()
}

/// Replaces the parts of a line that depend on the machine.
fn masked(line: &str) -> String {
    let time = Regex::new(r"in \d+\.\d s( \([\d.]+ [kMG]?B/s\))?").unwrap();
    let line = time.replace(line, "in _ s");
    // The allocator and the kernel make this number differ from run to run.
    let memory = Regex::new(r"[\d.]+ MB \(anonymous\)").unwrap();
    memory.replace(&line, "_ MB (anonymous)").trim_end().to_owned()
}

/// Returns whether the lines equal the expected lines, where `...` matches any number of lines.
fn matches(found: &[String], expected: &[String]) -> bool {
    match expected.split_first() {
        None => found.is_empty(),
        Some((line, rest)) if line.trim() == "..." => (0..=found.len()).any(|skipped| matches(&found[skipped..], rest)),
        Some((line, rest)) => found.first() == Some(line) && matches(&found[1..], rest),
    }
}

/// Runs the examples of a page, and returns a text with the examples whose output differs. With `UPDATE_SNAPSHOTS=1`,
/// writes their output into the page, except for examples with `...`.
fn check(page: &Path) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root.join("tests"), folder.path().join("tests")).unwrap();
    let update = std::env::var_os("UPDATE_SNAPSHOTS").is_some();
    let mut wrong = String::new();
    let text = fs::read_to_string(page).unwrap();
    let mut updated = text.clone();
    let example = |command: &str, output: &[String]| format!("$ {command}\n{}", output.join("\n"));
    for block in blocks(&text).into_iter().filter(Block::is_run) {
        for (command, expected) in block.examples {
            let found = run(&command, folder.path());
            let all_masked = |lines: &[String]| lines.iter().map(|line| masked(line)).collect::<Vec<String>>();
            if matches(&all_masked(&found), &all_masked(&expected)) {
                continue;
            }
            if update && !expected.iter().any(|line| line.trim() == "...") {
                updated = updated.replacen(&example(&command, &expected), &example(&command, &found), 1);
            } else {
                let at = page.strip_prefix(root).unwrap().display();
                writeln!(wrong, "{at}:{}: {}\n", block.line, example(&command, &found)).unwrap();
            }
        }
    }
    if updated != text {
        fs::write(page, updated).unwrap();
    }
    wrong
}

fn pages(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) = entries.partition(|path| path.is_dir());
    let files = files.into_iter().filter(|path| path.extension().is_some_and(|suffix| suffix == "md"));
    files.chain(folders.iter().flat_map(|folder| pages(folder))).collect()
}

#[test]
fn console_examples_match_the_output_of_the_program() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages: Vec<PathBuf> = [root.join("README.md")].into_iter().chain(pages(&root.join("docs"))).collect();
    assert!(pages.len() > 10, "the pages were not found");
    let wrong: String =
        pages.iter().filter(|page| !page.ends_with("docs/tutorial.md")).map(|page| check(page)).collect();
    assert!(wrong.is_empty(), "what these examples print now:\n\n{wrong}");
}

/// Returns the anchors of a page, as GitHub derives them from the headings.
fn anchors(text: &str) -> Vec<String> {
    let link = Regex::new(r"\[([^\]]*)\]\([^)]*\)").unwrap();
    let mut code = false;
    let headings = text.lines().filter(|line| {
        code ^= line.starts_with("```");
        !code && line.starts_with('#')
    });
    let anchor = |heading: &str| {
        let title = link.replace_all(heading.trim_start_matches('#').trim(), "$1").to_lowercase();
        title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// Every link leads to an existing file. If the link has an anchor, the file has a heading for it.
#[test]
fn links_between_pages_have_targets() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let link = Regex::new(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)").unwrap();
    let beside = ["README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|name| root.join(name));
    let mut broken = String::new();
    for page in beside.into_iter().chain(pages(&root.join("docs"))) {
        let text = fs::read_to_string(&page).unwrap();
        for found in link.captures_iter(&text) {
            let target = if found[1].is_empty() { page.clone() } else { page.parent().unwrap().join(&found[1]) };
            let leads = target.exists()
                && found.get(2).is_none_or(|anchor| {
                    target.extension().is_some_and(|suffix| suffix == "md")
                        && anchors(&fs::read_to_string(&target).unwrap()).iter().any(|found| found == anchor.as_str())
                });
            if !leads {
                writeln!(broken, "{}: {}", page.strip_prefix(root).unwrap().display(), &found[0]).unwrap();
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{broken}");
}

/// The program in the documentation is the program that made the flat layouts of the fixtures.
#[test]
fn documented_flat_layout_program_equals_that_of_the_fixtures() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let script = fs::read_to_string(root.join("tests/fixtures/flat_layout.py")).unwrap();
    let program = &script[script.find("import ").unwrap()..];
    let page = fs::read_to_string(root.join("docs/how-to/fsdp1.md")).unwrap();
    assert!(page.contains(&format!("```python\n{program}```\n")), "docs/how-to/fsdp1.md has another flat_layout()");
}
