//! Messages of the runs in a test, compared with reviewed transcripts.
//!
//! [`Transcript::begin`] starts it for the test of this thread, [`record`] adds a run, and dropping the last one compares with the
//! section of the test in `tests/messages/tests/MODULE.txt`. `UPDATE_SNAPSHOTS=1` writes that section.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::thread;

use regex::Regex;

/// The number of lines of one run that are compared; tests of long lists check the rest.
const MAX_LINES: usize = 40;

#[derive(Default)]
struct State {
    /// Folders of the test, with names that differ between runs.
    folders: Vec<PathBuf>,
    open: usize,
    compared: usize,
    text: String,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

/// Records runs until it is dropped.
pub struct Transcript(());

impl Transcript {
    pub fn begin(folder: &Path) -> Self {
        STATE.with_borrow_mut(|state| {
            state.folders.push(folder.to_path_buf());
            state.open += 1;
        });
        Self(())
    }
}

impl Drop for Transcript {
    fn drop(&mut self) {
        let finished = STATE.with_borrow_mut(|state| {
            state.open -= 1;
            let is_last = state.open == 0 && !state.text.is_empty();
            is_last.then(|| {
                state.compared += 1;
                (std::mem::take(&mut state.text), state.compared)
            })
        });
        if let Some((text, number)) = finished.filter(|_| !thread::panicking()) {
            compare(&text, number);
        }
    }
}

/// Discards the runs so far, for a test that skips a case on this machine.
pub fn discard() {
    STATE.with_borrow_mut(|state| *state = State { open: state.open, ..State::default() });
}

/// Adds a run to the transcript of this test, if there is one.
pub fn record(arguments: &[impl AsRef<OsStr>], code: Option<i32>, out: &str, err: &str) {
    STATE.with_borrow_mut(|state| {
        if state.open == 0 {
            return;
        }
        let words: Vec<String> =
            arguments.iter().map(|word| quoted(&word.as_ref().to_string_lossy(), &state.folders)).collect();
        let mut text = format!("$ dtshard {}\n", words.join(" "));
        if code != Some(0) {
            writeln!(text, "? {}", code.map_or("signal".into(), |code| code.to_string())).unwrap();
        }
        err.lines().take(MAX_LINES).for_each(|line| writeln!(text, "{}", line.trim_end()).unwrap());
        // Tests check the data of a successful run, and a document repeats the message.
        if code != Some(0) && !out.starts_with('{') {
            out.lines().take(MAX_LINES).for_each(|line| writeln!(text, "> {}", line.trim_end()).unwrap());
        }
        state.text.push_str(&portable(&text, &state.folders));
    });
}

fn quoted(word: &str, folders: &[PathBuf]) -> String {
    let is_plain = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c));
    // A long word is cut after its folders are replaced, because the length of their names differs.
    let word = if word.len() > 200 {
        format!("{:.200}...", portable(&word.escape_debug().to_string(), folders))
    } else {
        word.replace('\n', "\\n")
    };
    if is_plain { word } else { format!("'{word}'") }
}

/// What differs between machines and runs in messages, and its replacement.
static VARYING: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    let patterns = [
        (r" in \d+\.\d s( \([\d.]+ [kMG]?B/s\))?", " in [TIME]"),
        (r"\([\w.-]+, pid \d+", "([HOST], pid [PID]"),
        (
            r"reading with \w+, \d+ threads?, write blocks of [\d.]+ [kM]B",
            "reading with [IO], [N] threads, write blocks of [SIZE]",
        ),
        (r"[\d.]+ MB \(anonymous\)", "[SIZE] (anonymous)"),
        (r#""peak_bytes": \d+"#, r#""peak_bytes": [NUMBER]"#),
        (r"\bwork-[0-9a-f]{12}", "work-[RANDOM]"),
        (r"only [\d.]+ [kMGT]?B are free", "only [SIZE] are free"),
        (r"[\d.]+ [kMGT]?B free", "[SIZE] free"),
        // Files are allocated by several threads.
        (r"(space for \S*/model-)\d{5}", "${1}[NUMBER]"),
        (r"/[\w/.-]*/\.tmp\w{6}", "[TMP]"),
        (r#""(seconds|bytes_per_second)": [\d.]+"#, r#""$1": [NUMBER]"#),
    ];
    patterns.map(|(pattern, with)| (Regex::new(pattern).unwrap(), with)).into()
});

/// Replaces what differs between machines and runs.
pub fn portable(text: &str, folders: &[PathBuf]) -> String {
    let repository = env!("CARGO_MANIFEST_DIR");
    let mut text = text.to_owned();
    for folder in folders {
        text = text.replace(&folder.display().to_string(), "[DIR]");
    }
    let text = text
        .replace(&format!("{repository}/tests/fixtures"), "[FIXTURES]")
        .replace(repository, "[REPOSITORY]")
        .replace(env!("CARGO_PKG_VERSION"), "[VERSION]");
    VARYING.iter().fold(text, |text, (pattern, with)| pattern.replace_all(&text, *with).into_owned())
}

/// Returns the lines that differ.
pub fn difference(expected: &str, found: &str) -> String {
    let (old, new): (Vec<_>, Vec<_>) = (expected.trim_end().lines().collect(), found.trim_end().lines().collect());
    let same = old.iter().zip(&new).take_while(|(a, b)| a == b).count();
    let rest = old.len().min(new.len()) - same;
    let tail = old.iter().rev().zip(new.iter().rev()).take(rest).take_while(|(a, b)| a == b).count();
    let mut text = String::new();
    new[same.saturating_sub(4)..same].iter().for_each(|line| writeln!(text, "  {line}").unwrap());
    old[same..old.len() - tail].iter().for_each(|line| writeln!(text, "- {line}").unwrap());
    new[same..new.len() - tail].iter().for_each(|line| writeln!(text, "+ {line}").unwrap());
    text
}

/// Compares with the section of this thread's test. A test may end several transcripts, one after the other.
fn compare(text: &str, number: usize) {
    let test = thread::current().name().unwrap_or_default().to_owned();
    let (module, name) = test.rsplit_once("::").expect("a test in a module, in a thread that has its name");
    let name = if number == 1 { name.to_owned() } else { format!("{name} {number}") };
    let file = format!("tests/messages/tests/{}.txt", module.replace("::", "/"));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(&file);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Tests of one module end at the same time.
        let lock = File::create(Path::new(env!("CARGO_TARGET_TMPDIR")).join("messages.lock")).unwrap();
        lock.lock().unwrap();
        let mut sections = sections(&fs::read_to_string(&path).unwrap_or_default());
        sections.insert(name, text.to_owned());
        let sections: Vec<String> = sections.iter().map(|(name, text)| format!("# {name}\n{text}")).collect();
        fs::write(&path, sections.join("\n")).unwrap();
        return;
    }
    let sections = sections(&fs::read_to_string(&path).unwrap_or_default());
    let expected = sections.get(&name).map_or("", String::as_str);
    assert!(
        expected.trim_end() == text.trim_end(),
        "{file}: `{name}` differs; UPDATE_SNAPSHOTS=1 writes it anew\n{}",
        difference(expected, text)
    );
}

fn sections(text: &str) -> BTreeMap<String, String> {
    let mut sections: BTreeMap<String, String> = BTreeMap::new();
    let mut name = String::new();
    for line in text.lines() {
        match line.strip_prefix("# ") {
            Some(heading) => heading.clone_into(&mut name),
            None => *sections.entry(name.clone()).or_default() += &format!("{line}\n"),
        }
    }
    sections.values_mut().for_each(|text| text.truncate(text.trim_end().len()));
    sections.values_mut().for_each(|text| text.push('\n'));
    sections
}
