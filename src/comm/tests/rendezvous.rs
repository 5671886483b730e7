use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::comm::address::listen;
use crate::comm::fate::ENDED;
use crate::comm::frame::{Frame, MOST};
use crate::comm::hello::{Hello, Reply};
use crate::comm::{Control, KeepGoing, Liveness, Meeting, Note, Part, Patience, Place, meet};
use crate::error::{Error, Result};
use crate::storage::AnchoredPath;

pub type Tell = Arc<dyn Fn(Note<'_>) + Send + Sync>;

/// One rank of a test, which comes to a place.
#[derive(Clone)]
pub struct Comer {
    pub part: Part,
    pub run: Option<&'static str>,
    pub place: Place,
    pub shared: Option<PathBuf>,
    pub limit: Duration,
    pub calls_off: bool,
    /// Who hears whom it waits for, soon and often.
    pub tell: Option<Tell>,
    pub going: KeepGoing,
}

/// One that is on its way.
pub type Comes = JoinHandle<Result<Control>>;

pub const SOON: Duration = Duration::from_secs(1);
pub const LONG: Duration = Duration::from_secs(30);

impl Comer {
    pub fn new(index: u32, of: u32, place: &Place, limit: Duration) -> Self {
        let (part, place) = (Part { index, of }, place.clone());
        Self {
            part,
            run: Some("77.0"),
            place,
            shared: None,
            limit,
            calls_off: true,
            tell: None,
            going: Arc::new(|| Ok(())),
        }
    }

    pub fn comes(self) -> Comes {
        thread::spawn(move || {
            let silent = Patience::silent(self.limit);
            let often = Duration::from_millis(200);
            let patience = match &self.tell {
                None => silent,
                Some(tell) => Patience { first: often, again: often, tell: &**tell, ..silent },
            };
            meet(&Meeting {
                part: self.part,
                run: self.run,
                place: &self.place,
                patience,
                calls_off: self.calls_off,
                shared: self.shared.as_deref().map(AnchoredPath::new).as_ref(),
                liveness: Liveness::default(),
                going: self.going,
            })
        })
    }

    pub fn fails(self) -> String {
        words(self.comes())
    }
}

pub fn words(comer: Comes) -> String {
    let error = comer.join().unwrap().map(drop).unwrap_err();
    assert!(
        error.hint().is_some_and(|hint| hint.contains("start all processes at the same time, each once")),
        "{error:?}"
    );
    error.to_string()
}

/// A place by TCP that nobody is at.
pub fn free() -> Place {
    Place::Tcp { host: "127.0.0.1".into(), ports: vec![listen(&[0]).unwrap().local_addr().unwrap().port()] }
}

pub fn folder() -> (TempDir, Place) {
    let folder = TempDir::new().unwrap();
    let place = Place::Folder(folder.path().into());
    (folder, place)
}

/// They are one run: each hears the others.
pub fn talk(comers: Vec<Comes>) {
    let ranks = comers.into_iter().map(|comer| {
        let control = comer.join().unwrap().unwrap();
        thread::spawn(move || {
            let said = control.gather(&[u8::try_from(control.rank()).unwrap()]).unwrap();
            assert_eq!(said.len(), control.size() as usize);
            assert!((0..).zip(&said).all(|(rank, said)| said == &[rank]));
            control.leave().unwrap();
        })
    });
    ranks.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().unwrap());
}

#[test]
fn by_tcp_and_by_file_in_any_order() {
    let (kept, shared) = folder();
    for place in [free(), shared] {
        for order in [[0, 1, 2], [2, 1, 0]] {
            let comers = order.map(|rank| {
                thread::sleep(Duration::from_millis(30));
                Comer::new(rank, 3, &place, LONG).comes()
            });
            talk(comers.into());
        }
    }
    assert_eq!(fs::read_dir(kept.path()).unwrap().count(), 0, "a file was left behind");
}

#[test]
fn behind_the_port_of_torchrun_the_first_free_one_is_taken() {
    let agent = listen(&[0]).unwrap();
    let first = agent.local_addr().unwrap().port();
    // Taken by something that says nothing.
    let place = Place::Tcp { host: "localhost".into(), ports: vec![first, free_port()] };
    talk((0..3).map(|rank| Comer::new(rank, 3, &place, LONG).comes()).collect());
}

fn free_port() -> u16 {
    listen(&[0]).unwrap().local_addr().unwrap().port()
}

#[test]
fn who_does_not_come_is_named_to_all() {
    let (_kept, shared) = folder();
    for place in [free(), shared] {
        let first = Comer::new(0, 4, &place, SOON).comes();
        let second = Comer::new(1, 4, &place, LONG).comes();
        for said in [words(first), words(second)] {
            let at = if let Place::Tcp { .. } = place { format!(" at {place}") } else { String::new() };
            assert_eq!(said, format!("process 2: rendezvous: did not come within 1 s{at}, nor did process 3"));
        }
    }
}

/// Whoever is in, and whoever comes after that.
#[test]
fn who_is_gone_before_all_have_come_is_named_to_all() {
    let place = free();
    let first = Comer::new(0, 4, &place, LONG).comes();
    let second = Comer::new(2, 4, &place, LONG).comes();
    drop(guest(&place, 4));
    let gone = "process 1: rendezvous: its process ended, while others were waited for";
    assert_eq!(words(second), gone);
    assert!(!first.is_finished(), "one is still to come");
    assert_eq!(Comer::new(3, 4, &place, LONG).fails(), gone);
    assert_eq!(words(first), gone);
}

/// Who gave all up waits no longer for who does not come than it would have.
#[test]
fn who_is_gone_and_who_does_not_come() {
    let place = free();
    let begun = Instant::now();
    let first = Comer::new(0, 3, &place, SOON).comes();
    drop(guest(&place, 3));
    assert_eq!(words(first), "process 1: rendezvous: its process ended, while others were waited for");
    assert!(begun.elapsed() >= SOON && begun.elapsed() < LONG, "{:?}", begun.elapsed());
}

#[test]
fn rank_0_does_not_come() {
    let (kept, shared) = folder();
    let said = Comer::new(1, 2, &shared, SOON).fails();
    assert!(said.starts_with("process 0: rendezvous: did not come within 1 s: it has not written"), "{said}");
    assert!(said.contains(kept.path().to_str().unwrap()), "{said}");
    let place = free();
    let said = Comer::new(1, 2, &place, SOON).fails();
    assert!(said.contains(&format!("nobody answers at {place}")), "{said}");
}

/// The one file in a folder, once it is there.
pub fn sheet(folder: &Path) -> (PathBuf, Vec<u8>) {
    let until = Instant::now() + LONG;
    loop {
        let path = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).next();
        if let Some(path) = path.filter(|path| path.extension().is_some_and(|suffix| suffix == "json")) {
            return (path.clone(), fs::read(path).unwrap());
        }
        assert!(Instant::now() < until, "no file");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_file_that_an_earlier_run_left_is_not_taken() {
    let (kept, place) = folder();
    // Of a run without a name, so that its file is that of every other one.
    let comer = |rank, limit| Comer { run: None, ..Comer::new(rank, 2, &place, limit) };
    let earlier = comer(0, SOON).comes();
    let (path, stale) = sheet(kept.path());
    words(earlier);
    fs::write(&path, &stale).unwrap();
    let second = comer(1, LONG).comes();
    thread::sleep(Duration::from_millis(300));
    talk(vec![second, comer(0, LONG).comes()]);

    // The same where somebody else listens at that port by now, who waits for a rank 1 as well.
    let (elsewhere, other_place) = folder();
    let other = Comer { run: None, ..Comer::new(0, 2, &other_place, Duration::from_secs(2)) }.comes();
    let mut words_there: serde_json::Value = serde_json::from_slice(&sheet(elsewhere.path()).1).unwrap();
    words_there["token"][0] = ((words_there["token"][0].as_u64().unwrap() + 1) % 256).into();
    fs::write(&path, words_there.to_string()).unwrap();
    let alone = comer(1, SOON).fails();
    assert!(alone.contains("of another run: its token differs"), "{alone}");
    let second = comer(1, LONG).comes();
    thread::sleep(Duration::from_millis(300));
    talk(vec![second, comer(0, LONG).comes()]);
    let said = words(other);
    assert!(said.contains("turned away") && said.contains("process 1 is of another run"), "{said}");
    // Of a run with another name.
    fs::write(&path, stale).unwrap();
    talk((0..2).map(|rank| Comer::new(rank, 2, &place, LONG).comes()).collect());
}

#[test]
fn who_is_not_of_the_run_is_turned_away() {
    let place = free();
    let first = Comer::new(0, 3, &place, Duration::from_secs(2)).comes();
    let fewer = Comer::new(1, 2, &place, LONG).fails();
    assert!(fewer.contains("process 1 counts 2 processes, this run has 3"), "{fewer}");
    let other = Comer { run: Some("78.0"), ..Comer::new(1, 3, &place, LONG) }.fails();
    assert!(other.contains("process 1 is of another run: its token differs"), "{other}");
    let right = Comer::new(1, 3, &place, LONG).comes();
    for said in [words(first), words(right)] {
        let missed = format!("process 2: rendezvous: did not come within 2 s at {place}; turned away: ");
        assert!(said.contains(&format!("{missed}127.0.0.1: process 1 counts")), "{said}");
    }
}

/// Who knows the address and what the run is called, and does not see the folder, is a stranger.
#[test]
fn by_tcp_with_a_token_that_is_in_a_folder() {
    let (kept, _) = folder();
    let place = free();
    let comer = |rank, limit| Comer { shared: Some(kept.path().into()), ..Comer::new(rank, 2, &place, limit) };
    // Of an earlier run.
    let earlier = comer(0, SOON).comes();
    let (path, stale) = sheet(kept.path());
    words(earlier);
    fs::write(&path, &stale).unwrap();
    let second = comer(1, LONG).comes();
    thread::sleep(Duration::from_millis(200));
    let first = comer(0, LONG).comes();
    talk(vec![first, second]);
    assert_eq!(fs::read_dir(kept.path()).unwrap().count(), 0);

    let first = comer(0, Duration::from_secs(3)).comes();
    let (path, _) = sheet(kept.path());
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&fs::metadata(path).unwrap().permissions()) & 0o777, 0o600);
    let guessed = Comer::new(1, 2, &place, LONG).fails();
    assert!(guessed.contains("process 1 is of another run: its token differs"), "{guessed}");
    words(first);
    let nowhere = Comer { shared: Some(kept.path().join("nowhere")), ..comer(1, SOON) }.fails();
    assert!(nowhere.contains("nowhere is not there"), "{nowhere}");
}

fn connect(place: &Place) -> TcpStream {
    let Place::Tcp { host, ports } = place else { unreachable!("a place by TCP") };
    let until = Instant::now() + LONG;
    loop {
        match TcpStream::connect((host.as_str(), ports[0])) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn noise_at_the_door_keeps_nobody_out() {
    let place = free();
    let first = Comer::new(0, 2, &place, LONG).comes();
    let silent = connect(&place);
    let mut browser = connect(&place);
    browser.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let gone: Vec<_> = (0..100).map(|_| connect(&place)).collect();
    drop(gone);
    talk(vec![first, Comer::new(1, 2, &place, LONG).comes()]);
    drop(silent);
}

/// A rank 1 that has been let in.
fn guest(place: &Place, of: u32) -> TcpStream {
    let token = *blake3::hash(b"dtshard rendezvous of run 77.0").as_bytes();
    let mut stream = connect(place);
    stream.write_all(&Hello::new((1, of), token).unwrap().bytes()).unwrap();
    is_welcome(&stream);
    stream
}

fn is_welcome(stream: &TcpStream) {
    let reply = Reply::receive(stream, Instant::now() + LONG, &|| Ok(())).unwrap().unwrap();
    assert_eq!(reply, Reply::Welcome);
}

/// It stays for late comers, as one is gone, and is no failure when it is stopped.
#[test]
fn process_0_is_told_to_stop_while_it_stays() {
    let place = free();
    let stop = Arc::new(AtomicBool::new(false));
    let is_stopped = Arc::clone(&stop);
    let going: KeepGoing = Arc::new(move || {
        let error = || Error::Stopped { signal: "TERM", exit: 143, rank: None, kept: None };
        if is_stopped.load(Ordering::Relaxed) { Err(error()) } else { Ok(()) }
    });
    let first = Comer { going, ..Comer::new(0, 3, &place, LONG) }.comes();
    drop(guest(&place, 3));
    thread::sleep(Duration::from_millis(300));
    stop.store(true, Ordering::Relaxed);
    let error = first.join().unwrap().map(drop).unwrap_err();
    assert!(matches!(error, Error::Stopped { exit: 143, rank: None, .. }), "{error:?}");
}

/// A rank 1 of 2 that has met process 0 and says what a test likes.
fn stranger(place: &Place, said: &[u8]) -> TcpStream {
    let mut stream = guest(place, 2);
    is_welcome(&stream);
    stream.write_all(said).unwrap();
    stream
}

#[test]
fn frames_that_are_none_end_the_run() {
    let said = |frame: Frame| {
        let mut bytes = Vec::new();
        frame.write(&mut bytes);
        bytes
    };
    let mut endless = said(Frame::Said { number: 1, rank: 1, bytes: Vec::new() });
    endless[14..18].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut short = endless.clone();
    short[14..18].copy_from_slice(&u32::try_from(MOST).unwrap().to_le_bytes());
    let other = said(Frame::Said { number: 1, rank: 0, bytes: vec![1] });
    let early = said(Frame::Said { number: 5, rank: 1, bytes: vec![1] });
    let noise = vec![0xFF; 1000];
    for (bytes, words) in [
        (endless, "does not speak as it should"),
        (noise, "does not speak as it should"),
        (short, ENDED),
        (other, "speaks for another process"),
        (early, "it is in gather 5, this process in gather 1"),
    ] {
        let place = free();
        let first = Comer::new(0, 2, &place, LONG).comes();
        let stream = stranger(&place, &bytes);
        let control = first.join().unwrap().unwrap();
        if words == ENDED {
            stream.shutdown(std::net::Shutdown::Write).unwrap();
        }
        let error = control.gather(b"here").unwrap_err().to_string();
        assert!(error.starts_with("process 1: gather: ") && error.contains(words), "{error}");
    }
}

#[test]
fn every_wait_asks_whether_to_go_on() {
    let stop = Arc::new(AtomicBool::new(false));
    let going = {
        let stop = Arc::clone(&stop);
        let stopped = || Err(Error::Stopped { signal: "TERM", exit: 143, rank: None, kept: None });
        move || if stop.load(Ordering::Relaxed) { stopped() } else { Ok(()) }
    };
    let going: crate::comm::KeepGoing = Arc::new(going);
    let (_kept, shared) = folder();
    let tcp = free();
    let wait = |index, of, place: &Place| {
        let (going, place) = (Arc::clone(&going), place.clone());
        thread::spawn(move || {
            let part = Part { index, of };
            let liveness = Liveness::default();
            let patience = Patience::silent(LONG);
            let run = Some("77.0");
            let meeting =
                Meeting { part, run, place: &place, shared: None, patience, calls_off: true, liveness, going };
            let control = meet(&meeting)?;
            control.gather(&[]).map(drop)
        })
    };
    let door = free();
    let waiting = [wait(0, 2, &shared), wait(1, 2, &tcp), wait(0, 3, &door)];
    let guest = guest(&door, 3);
    let (kept, met) = folder();
    let second = Comer::new(1, 2, &met, LONG).comes();
    let in_gathering = wait(0, 2, &met);
    let second = second.join().unwrap().unwrap();
    thread::sleep(Duration::from_millis(200));
    stop.store(true, Ordering::Relaxed);
    let stopped = Instant::now();
    for thread in waiting.into_iter().chain([in_gathering]) {
        let error = thread.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Stopped { .. }), "{error}");
    }
    assert!(stopped.elapsed() < Duration::from_secs(10), "{:?}", stopped.elapsed());
    let said = Reply::receive(&guest, Instant::now() + LONG, &|| Ok(())).unwrap().unwrap();
    assert_eq!(said.words(), "stopped by TERM at process 0; nothing was written at the destination");
    // Who hears of it is stopped, too.
    let error = second.gather(&[]).unwrap_err().to_string();
    assert!(error.starts_with("stopped by TERM at process 0; "), "{error}");
    drop(kept);
}
