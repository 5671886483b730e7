//! Compares the messages of all runs in a test with a reviewed transcript.
//!
//! [`Transcript::begin`] starts the transcript of the test in this thread, and [`record`] adds a run to it. When the
//! last [`Transcript`] of the test is dropped, the text is compared with the section of the test in
//! `tests/messages/tests/MODULE.txt`. With `UPDATE_SNAPSHOTS=1`, the section is written instead.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::thread;

use regex::Regex;

/// The maximum number of lines of one run in a transcript. Further lines are left out; tests of long lists check them
/// separately.
const MAX_LINES: usize = 40;

#[derive(Default)]
struct State {
    /// The folders of the test. Their names differ between runs, so the transcript does not contain them.
    folders: Vec<PathBuf>,
    open: usize,
    compared: usize,
    text: String,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

/// A guard for one test folder. When the last guard of a test is dropped, the recorded runs are compared with the
/// transcript.
/// # exchange
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

/// Removes all recorded runs. A test calls this function if it skips a case on this machine.
pub fn discard() {
    STATE.with_borrow_mut(|state| *state = State { open: state.open, ..State::default() });
}

/// Adds a run to the transcript of the test in this thread, if the test has begun one.
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
        // The output of a successful run is not recorded, because tests check it. A JSON document is not recorded,
        // because it repeats the message.
        if code != Some(0) && !out.starts_with('{') {
            out.lines().take(MAX_LINES).for_each(|line| writeln!(text, "> {}", line.trim_end()).unwrap());
        }
        state.text.push_str(&portable(&text, &state.folders));
    });
}

fn quoted(word: &str, folders: &[PathBuf]) -> String {
    let is_plain = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c));
    // A long word is truncated after the names of folders in it are replaced, because these names have different
    // lengths.
    let word = if word.len() > 200 {
        format!("{:.200}...", portable(&word.escape_debug().to_string(), folders))
    } else {
        word.replace('\n', "\\n")
    };
    if is_plain { word } else { format!("'{word}'") }
}

/// Patterns of the parts of messages that differ between machines and between runs, each with its replacement.
static VARYING: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    let patterns = [
        (r" in \d+\.\d s( \([\d.]+ [kMG]?B/s\))?", " in [TIME]"),
        // A loaded machine takes long enough for a rate.
        (r"(of [\d.]+ [kM]?B), [\d.]+ [kMG]?B/s, \d+ s left\)", "$1)"),
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
        // Several threads allocate files, so the number of the file in this message varies.
        (r"(space for \S*/model-)\d{5}", "${1}[NUMBER]"),
        (r"/[\w/.-]*/\.tmp\w{6}", "[TMP]"),
        (r#""(seconds|bytes_per_second)": [\d.]+"#, r#""$1": [NUMBER]"#),
    ];
    patterns.map(|(pattern, with)| (Regex::new(pattern).unwrap(), with)).into()
});

/// Replaces the parts of a text that differ between machines and between runs, such as times and paths.
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

/// Returns a diff of two texts.
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

/// Compares a transcript with the section of the test in this thread. `number` counts the transcripts of the test,
/// which may have several, one after the other.
fn compare(text: &str, number: usize) {
    let test = thread::current().name().unwrap_or_default().to_owned();
    let (module, name) = test.rsplit_once("::").expect("a test in a module, in a thread that has its name");
    let name = if number == 1 { name.to_owned() } else { format!("{name} {number}") };
    let file = format!("tests/messages/tests/{}.txt", module.replace("::", "/"));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(&file);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Tests of one module may write the file at the same time.
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
