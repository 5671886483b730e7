//! What is said while processes wait for each other, and to whom that comes late.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::rendezvous::{Comer, Comes, LONG, SOON, folder, free, sheet, talk, words};
use crate::comm::{Note, Place, Process};
use crate::error::Error;
use crate::storage::AnchoredPath;

/// Less than anybody waits who waits for long.
const AT_ONCE: Duration = Duration::from_secs(20);

type Notes = Arc<Mutex<Vec<(bool, String)>>>;

/// One that says whom it waits for, soon and often: whether it is its own wait, and what.
fn talkative(comer: Comer) -> (Comer, Notes) {
    let notes = Notes::default();
    let kept = Arc::clone(&notes);
    let tell = move |note: Note<'_>| {
        let (own, words) = match note {
            Note::Own(words) => (true, words),
            Note::OfFirst(words) => (false, words),
        };
        kept.lock().unwrap().push((own, words.to_owned()));
    };
    (Comer { tell: Some(Arc::new(tell)), ..comer }, notes)
}

/// Wait until process 0 is there, and what an earlier one has left is gone.
fn sheet_of(folder: &Path) {
    let until = Instant::now() + LONG;
    let names = || fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    while names().any(|name| name.matches('-').count() > 1) || names().count() == 0 {
        assert!(Instant::now() < until, "no sheet");
        thread::sleep(Duration::from_millis(5));
    }
}

fn is_said(notes: &Notes, own: bool, begin: &str, end: &str) -> bool {
    let is_it = |words: &str| words.starts_with(begin) && words.ends_with(end);
    notes.lock().unwrap().iter().any(|(is_own, words)| *is_own == own && is_it(words))
}

/// Wait until a process says this of its own wait.
fn hear(notes: &Notes, begin: &str, end: &str) {
    let until = Instant::now() + LONG;
    while !is_said(notes, true, begin, end) {
        assert!(Instant::now() < until, "{notes:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Some of a run, process 0 among them, once they wait for these others.
fn wait_for(others: &str, ranks: &[u32], of: u32, place: &Place) -> Vec<Comes> {
    let (first, notes) = talkative(Comer::new(0, of, place, LONG));
    let comers = ranks.iter().map(|rank| Comer::new(*rank, of, place, LONG));
    let comers = [first].into_iter().chain(comers).map(Comer::comes).collect();
    let at = if let Place::Tcp { .. } = place { format!(" at {place}") } else { String::new() };
    hear(&notes, &format!("waiting for {others} of {of}{at} ("), "");
    comers
}

#[test]
fn who_waits_says_for_whom() {
    let place = free();
    let limit = Duration::from_secs(3);
    let (first, by_first) = talkative(Comer::new(0, 4, &place, limit));
    let (second, by_second) = talkative(Comer::new(1, 4, &place, LONG));
    for comer in [first.comes(), second.comes()] {
        words(comer);
    }
    let whom = format!("waiting for processes 2, 3 of 4 at {place} (");
    for (own, notes) in [(true, by_first), (false, by_second)] {
        assert!(is_said(&notes, own, &whom, " of at most 3 s)"), "{notes:?}");
    }
    // Where process 0 is not there.
    let (kept, shared) = folder();
    let folder = kept.path().display();
    let nobody = format!("nobody answers at {place}");
    for (place, why) in [(&place, &*nobody), (&shared, &*format!("it has not written {folder}/rendezvous-"))] {
        let (comer, notes) = talkative(Comer::new(1, 2, place, limit));
        comer.fails();
        let notes = notes.lock().unwrap();
        let is_it = |own: bool, words: &str| {
            own && words.starts_with(&format!("waiting for process 0 at {place} ("))
                && words.contains(&format!(" of at most 3 s): {why}"))
        };
        assert!(notes.iter().any(|(own, words)| is_it(*own, words)), "{notes:?}");
    }
}

/// That process 0 is gone by then says less than why it was not found as it was there.
#[test]
fn a_name_that_cannot_be_resolved() {
    let (kept, _) = folder();
    let Place::Tcp { ports, .. } = free() else { unreachable!("a place by TCP") };
    let place = Place::Tcp { host: "nosuchhost.invalid".into(), ports };
    let comer = |rank, limit| Comer { shared: Some(kept.path().into()), ..Comer::new(rank, 2, &place, limit) };
    let first = comer(0, Duration::from_secs(3)).comes();
    let second = comer(1, LONG).comes();
    for comer in [first, second] {
        let error = comer.join().unwrap().map(drop).unwrap_err();
        let (said, hint) = (error.to_string(), error.hint().unwrap());
        assert!(
            hint.ends_with(" has to be an address of process 0 that all reach") && !hint.contains("--rendezvous"),
            "{hint}"
        );
        assert!(
            said.starts_with("process 1: rendezvous: did not come within 3 s at tcp://nosuchhost.invalid:"),
            "{said}"
        );
        assert!(said.contains("cannot resolve nosuchhost.invalid: "), "{said}");
    }
}

#[test]
fn a_place_that_is_none() {
    let (kept, _) = folder();
    let file = kept.path().join("file");
    fs::write(&file, "").unwrap();
    let fails = |rank, folder: &std::path::Path, limit| {
        let comer = Comer::new(rank, 2, &Place::Folder(folder.into()), limit);
        comer.comes().join().unwrap().map(drop).unwrap_err().to_string()
    };
    let begun = Instant::now();
    for rank in [0, 1] {
        assert!(fails(rank, &file, LONG).starts_with(&format!("cannot meet in {}: Not a directory", file.display())));
    }
    let nowhere = kept.path().join("nowhere");
    assert!(fails(0, &nowhere, LONG).starts_with(&format!("cannot meet in {}: No such file", nowhere.display())));
    assert!(begun.elapsed() < AT_ONCE);
    // Somebody may make it.
    let said = fails(1, &nowhere, SOON);
    assert!(said.contains(&format!("the folder {} is not there", nowhere.display())), "{said}");
}

#[test]
fn who_comes_late_hears_of_it() {
    let (kept, place) = folder();
    let begun = Instant::now();
    Comer::new(0, 3, &place, SOON).fails();
    for rank in [1, 2] {
        let said = Comer::new(rank, 3, &place, LONG).fails();
        assert!(said.starts_with("process 1: rendezvous: did not come within 1 s, nor did process 2; "), "{said}");
        assert!(said.contains(", as process 0, called the meeting off ") && said.ends_with(" s ago"), "{said}");
    }
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    assert_eq!(fs::read_dir(kept.path()).unwrap().count(), 0, "they have heard it");
    // Once: they may come again. Those of the next meeting do not hear of it any more.
    Comer::new(0, 3, &place, SOON).fails();
    Comer::new(2, 3, &place, LONG).fails();
    let second = Comer::new(2, 3, &place, LONG).comes();
    thread::sleep(Duration::from_millis(300));
    assert!(!second.is_finished());
    let first = Comer::new(0, 3, &place, LONG).comes();
    sheet_of(kept.path());
    talk(vec![first, second, Comer::new(1, 3, &place, LONG).comes()]);
    assert_eq!(fs::read_dir(kept.path()).unwrap().count(), 0);
}

/// Under one name, as where a launcher, or a loop within one task, starts all again.
#[test]
fn word_that_is_older_than_anybody_waits_ends_nobody() {
    let (kept, place) = folder();
    Comer::new(0, 2, &place, SOON).fails();
    let (path, bytes) = sheet(kept.path());
    let mut notice: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    notice["at"] = (notice["at"].as_u64().unwrap() - 2 * LONG.as_secs()).into();
    fs::write(&path, notice.to_string()).unwrap();
    let (second, notes) = talkative(Comer::new(1, 2, &place, LONG));
    let second = second.comes();
    hear(&notes, "an earlier meeting here has failed: ", "; waiting for process 0 of another run");
    talk(vec![second, Comer::new(0, 2, &place, LONG).comes()]);
    assert_eq!(fs::read_dir(kept.path()).unwrap().count(), 0);
}

/// By a notice that may be of an earlier run, or by an address whose process has ended.
#[test]
fn who_comes_late_may_be_the_first_of_the_next_run() {
    let (kept, place) = folder();
    let comer = |rank, limit| Comer { run: None, ..Comer::new(rank, 2, &place, limit) };
    let failed = format!("an earlier meeting here has failed: process 1: did not come within 1 s; {}", Process::this());
    comer(0, SOON).fails();
    let (second, notes) = talkative(comer(1, LONG));
    let second = second.comes();
    hear(&notes, &failed, "; waiting for process 0 of another run");
    assert!(!second.is_finished());
    talk(vec![second, comer(0, LONG).comes()]);
    assert_eq!(fs::read_dir(kept.path()).unwrap().count(), 0);

    comer(0, SOON).fails();
    let said = comer(1, SOON).fails();
    assert!(said.starts_with("process 0: rendezvous: did not come within 1 s: it has not written"), "{said}");
    assert!(said.contains(&failed), "{said}");

    let first = comer(0, SOON).comes();
    let (path, bytes) = sheet(kept.path());
    words(first);
    let here = Process::this();
    let mut killed: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    killed["process"] = serde_json::to_value(Process { start: here.start + 1, ..here }).unwrap();
    fs::write(&path, killed.to_string()).unwrap();
    let (second, notes) = talkative(comer(1, SOON));
    let said = second.fails();
    assert!(said.contains("has ended") && said.contains("nobody answers at"), "{said}");
    let ended = format!("process 0 that others were to meet here, {}, has ended", Process::this());
    assert!(is_said(&notes, true, &ended, ""), "{notes:?}");
    crate::comm::sweep(&AnchoredPath::new(kept.path()));
    assert_eq!(fs::read_dir(kept.path()).unwrap().count(), 0);
}

#[test]
fn two_of_one_rank_end_all() {
    let (_kept, shared) = folder();
    for place in [free(), shared] {
        let begun = Instant::now();
        let comers = wait_for("process 2", &[1, 3], 4, &place);
        let twice = Comer::new(1, 4, &place, LONG).fails();
        let who = Process::this();
        let words_said = format!("process 1 is there already: two take themselves for it: {who}");
        assert!(twice.contains(&words_said), "{twice}");
        for comer in comers {
            let said = words(comer);
            assert_eq!(said, format!("process 1: rendezvous: two take themselves for it: {who} and {who}"));
        }
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    }
}

/// As where a whole run was started twice: one that is complete goes on.
#[test]
fn two_of_one_rank_where_nobody_is_missing() {
    let place = free();
    let early = wait_for("process 2", &[1], 3, &place);
    assert!(Comer::new(1, 3, &place, LONG).fails().contains("process 1 is there already"));
    talk(early.into_iter().chain([Comer::new(2, 3, &place, LONG).comes()]).collect());
}

/// As long as others come, nobody knows that one never will.
#[test]
fn two_of_one_rank_while_others_come() {
    let place = free();
    let mut comers = wait_for("processes 2, 3, 4", &[1], 5, &place);
    assert!(Comer::new(1, 5, &place, LONG).fails().contains("process 1 is there already"));
    for rank in 2..5 {
        thread::sleep(Duration::from_millis(1300));
        comers.push(Comer::new(rank, 5, &place, LONG).comes());
    }
    talk(comers);
}

#[test]
fn two_that_are_first() {
    let (kept, place) = folder();
    let first = Comer::new(0, 2, &place, LONG).comes();
    sheet(kept.path());
    let second = Comer::new(0, 2, &place, LONG).comes();
    let error = first.join().unwrap().map(drop).unwrap_err();
    assert_eq!(error.hint(), Some("start all processes at the same time, each once"));
    let said = error.to_string();
    assert!(said.starts_with("process 0: rendezvous: two take themselves for it: "), "{said}");
    talk(vec![second, Comer::new(1, 2, &place, LONG).comes()]);
    assert_eq!(fs::read_dir(kept.path()).unwrap().count(), 0);
}

/// It goes on without the others, and says nothing to them.
#[test]
fn who_does_not_call_it_off_leaves_nothing() {
    let (kept, place) = folder();
    let error = Comer { calls_off: false, ..Comer::new(0, 2, &place, SOON) }.comes().join().unwrap().map(drop);
    assert!(matches!(error, Err(Error::Comm { rank, .. }) if rank.index == 1));
    assert_eq!(fs::read_dir(kept.path()).unwrap().count(), 0);
}

/// A folder of one name that other hosts do not see.
#[test]
fn the_hint_names_folder_and_host() {
    let (kept, place) = folder();
    for rank in [0, 1] {
        let error = Comer::new(rank, 3, &place, SOON).comes().join().unwrap().map(drop).unwrap_err();
        let (hint, folder, host) = (error.hint().unwrap(), kept.path().display(), Process::this().host);
        assert!(hint.contains(&format!("{folder} has to be on a file system that all processes share")), "{hint}");
        assert!(hint.contains(&format!("is {folder} on {host} the same as on the other hosts?")), "{hint}");
    }
}

#[test]
fn sheets_that_nobody_is_behind_are_swept_away() {
    let (kept, place) = folder();
    let first = Comer::new(0, 2, &place, SOON).comes();
    let (path, words_there) = sheet(kept.path());
    let old = kept.path().join("rendezvous-0000.json");
    fs::write(&old, &words_there).unwrap();
    let long_ago = std::time::SystemTime::now() - Duration::from_hours(2);
    fs::File::options().append(true).open(&old).unwrap().set_modified(long_ago).unwrap();
    fs::write(kept.path().join("rendezvous-1111.json"), "{}").unwrap();
    fs::write(kept.path().join("other.json"), "{}").unwrap();
    crate::comm::sweep(&AnchoredPath::new(kept.path()));
    let mut left: Vec<PathBuf> = fs::read_dir(kept.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    left.sort();
    assert_eq!(left, [kept.path().join("other.json"), path.clone()]);
    // Another run has put its own there.
    let mut other: serde_json::Value = serde_json::from_slice(&words_there).unwrap();
    other["token"][0] = ((other["token"][0].as_u64().unwrap() + 1) % 256).into();
    fs::write(&path, other.to_string()).unwrap();
    words(first);
    assert!(path.exists());
}
