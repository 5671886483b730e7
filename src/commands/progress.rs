//! Progress of a run: on a terminal, a bar with rate and remaining time; elsewhere, a line every ten seconds.
//!
//! Rate and remaining time are computed from the bytes that this run copies. They leave out the time before the first
//! bytes, the bytes of an earlier run, and the time in which files are allocated or synced. While files are allocated
//! or synced, the display shows the name of this phase instead of the rate.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::SIGINT;

use super::bar::{BAR, lock};
use super::printer::Printer;
use super::terminal::Terminal;
use dtshard::cli::ProgressChoice;

use dtshard::text::{human_bytes, human_rate};
use dtshard::{Level, Phase, Progress};

/// The time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// The time between two updates of the bar.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// Shows the progress of tasks on standard error, and prints the messages of the library.
#[derive(Clone, Debug)]
pub struct TerminalProgress(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    printer: Printer,
    task: Mutex<Option<Task>>,
}

impl TerminalProgress {
    #[must_use]
    pub fn new(printer: &Printer) -> Self {
        Self(Arc::new(Shared { printer: *printer, task: Mutex::new(None) }))
    }

    fn with_task(&self, act: impl FnOnce(&Task)) {
        if let Some(task) = &*lock(&self.0.task) {
            act(task);
        }
    }
}

impl Progress for TerminalProgress {
    fn begin(&self, task: &'static str, bytes: u64) {
        *lock(&self.0.task) = Some(Task::start(&self.0.printer, task, bytes));
    }

    fn skip(&self, bytes: u64) {
        self.with_task(|task| task.skip(bytes));
    }

    fn advance(&self, bytes: u64) {
        self.with_task(|task| task.advance(bytes));
    }

    fn enter(&self, phase: Phase) {
        self.with_task(|task| task.enter(phase));
    }

    fn end(&self) {
        let ended = lock(&self.0.task).take();
        drop(ended);
    }

    fn message(&self, level: Level, text: &str) {
        let printer = &self.0.printer;
        match level {
            Level::Detail => printer.detail(text),
            Level::Note => printer.note(text),
            Level::Outcome => printer.outcome(text),
            Level::Warning => printer.warning(text),
        }
    }

    fn is_verbose(&self) -> bool {
        self.0.printer.verbose()
    }
}

/// The display of the progress of one task.
#[derive(Debug)]
struct Task {
    /// The state that is displayed, or `None` if no progress is shown.
    shown: Option<Arc<Shown>>,
    /// The thread that updates the display, even if no bytes are copied.
    thread: Option<JoinHandle<()>>,
}

/// The state of a task that the display shows.
#[derive(Debug)]
struct Shown {
    verb: &'static str,
    total: u64,
    display: Display,
    printer: Printer,
    flow: Flow,
    is_over: Mutex<bool>,
    ended: Condvar,
}

#[derive(Debug)]
enum Display {
    Bar(ProgressBar),
    Lines { always: bool },
}

impl Task {
    /// Begins to show the progress of a task that processes `total` bytes.
    fn start(printer: &Printer, verb: &'static str, total: u64) -> Self {
        let display = match printer.progress() {
            ProgressChoice::Never => return Self { shown: None, thread: None },
            _ if printer.draws() => Display::Bar(bar(total)),
            choice => Display::Lines { always: choice == ProgressChoice::Always },
        };
        if let Display::Bar(bar) = &display {
            *lock(&BAR) = Some(bar.clone());
        }
        let (flow, is_over, ended) = (Flow::default(), Mutex::default(), Condvar::default());
        let shown = Arc::new(Shown { verb, total, display, printer: *printer, flow, is_over, ended });
        let own = Arc::clone(&shown);
        // If the thread cannot start, the run continues without a display.
        let thread = std::thread::Builder::new().name("progress".into()).spawn(move || own.show()).ok();
        Self { shown: Some(shown), thread }
    }

    /// Counts `bytes` as done, because an earlier run has written them. They do not count for the rate.
    fn skip(&self, bytes: u64) {
        if let Some(shown) = &self.shown {
            shown.flow.before.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}

impl Task {
    fn advance(&self, bytes: u64) {
        if let Some(shown) = &self.shown {
            shown.flow.advance(bytes, Instant::now());
        }
    }

    fn enter(&self, phase: Phase) {
        if let Some(shown) = &self.shown {
            shown.flow.enter(phase);
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let Some(shown) = &self.shown else { return };
        *lock(&shown.is_over) = true;
        shown.ended.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        match &shown.display {
            Display::Bar(bar) => {
                bar.finish_and_clear();
                *lock(&BAR) = None;
            }
            // `--progress always` prints a line even if the run was shorter than the time between two lines.
            Display::Lines { always: true } if shown.flow.done() > 0 => shown.printer.say(&shown.line(Instant::now())),
            Display::Lines { .. } => {}
        }
    }
}

impl Shown {
    fn show(&self) {
        let every = match &self.display {
            Display::Bar(_) => DRAW_EVERY,
            Display::Lines { .. } => LINE_EVERY,
        };
        let is_interrupted = interrupted();
        loop {
            let over = lock(&self.is_over);
            let waited = self.ended.wait_timeout_while(over, every, |is_over| !*is_over);
            if *waited.unwrap_or_else(PoisonError::into_inner).0 {
                return;
            }
            match &self.display {
                // Workers may see the signal late, and a second signal ends the process immediately, so the bar is
                // removed now.
                Display::Bar(bar) if is_interrupted.load(Ordering::Relaxed) => {
                    bar.finish_and_clear();
                    *lock(&BAR) = None;
                    return;
                }
                Display::Bar(bar) => self.draw(bar, Instant::now()),
                Display::Lines { .. } => self.printer.say(&self.line(Instant::now())),
            }
        }
    }

    fn draw(&self, bar: &ProgressBar, now: Instant) {
        bar.set_prefix(self.flow.label(self.verb));
        bar.set_message(self.flow.pace(self.total, now).map(|pace| format!(" {pace}")).unwrap_or_default());
        bar.set_position(self.flow.done());
    }

    /// Returns a line such as `writing: 25 % (500.00 MB of 2.00 GB, 500.00 MB/s, 3 s left)`.
    fn line(&self, now: Instant) -> String {
        let done = self.flow.done();
        #[expect(clippy::cast_precision_loss, reason = "shown with few digits")]
        let percent = done as f64 * 100.0 / self.total.max(1) as f64;
        let pace = self.flow.pace(self.total, now).map(|pace| format!(", {pace}")).unwrap_or_default();
        let label = self.flow.label(self.verb);
        format!("{label}: {percent:.0} % ({} of {}{pace})", human_bytes(done), human_bytes(self.total))
    }
}

/// Returns the flag that the first SIGINT sets.
fn interrupted() -> Arc<AtomicBool> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    let flag = FLAG.get_or_init(|| {
        let flag = Arc::default();
        // If this fails, the bar is removed when the run ends.
        let _ = signal_hook::flag::register(SIGINT, Arc::clone(&flag));
        flag
    });
    Arc::clone(flag)
}

/// The number of bytes of a task that are done, and the times from which the rate is computed.
#[derive(Debug, Default)]
struct Flow {
    /// The number of bytes of the task that earlier runs have written.
    before: AtomicU64,
    /// The number of bytes of the task that this run has processed.
    done: AtomicU64,
    timing: Mutex<PhaseTiming>,
}

#[derive(Debug, Default)]
struct PhaseTiming {
    phase: Phase,
    /// The time at which the first bytes of this phase were reported as done, and the number of bytes that this run had
    /// done at that time, including these first bytes.
    begun: Option<(Instant, u64)>,
    /// The number of bytes of earlier phases of this run that count for the rate: in each phase, all bytes except those
    /// of the first report. `time` is the total time of these phases, each from its first to its last report of bytes.
    bytes: u64,
    time: Duration,
    last: Option<Instant>,
}

impl Flow {
    fn done(&self) -> u64 {
        self.before.load(Ordering::Relaxed) + self.done.load(Ordering::Relaxed)
    }

    fn advance(&self, bytes: u64, now: Instant) {
        let mut timing = lock(&self.timing);
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        timing.begun.get_or_insert((now, done));
        timing.last = Some(now);
    }

    /// Begins another phase. For the rate of the previous phase, only the time between its first and its last bytes
    /// counts.
    fn enter(&self, phase: Phase) {
        let mut timing = lock(&self.timing);
        if let (Some((begun, first)), Some(last)) = (timing.begun.take(), timing.last) {
            timing.bytes += self.done.load(Ordering::Relaxed) - first;
            timing.time += last.saturating_duration_since(begun);
        }
        timing.phase = phase;
    }

    fn label(&self, verb: &'static str) -> &'static str {
        match lock(&self.timing).phase {
            Phase::Copying => verb,
            Phase::Allocating => "allocating",
            Phase::Syncing => "syncing",
        }
    }

    /// Returns a text such as `500.00 MB/s, 3 s left`. Returns `None` while files are allocated or synced, before the
    /// first bytes of a phase, and if the time is still too short for a meaningful rate.
    #[expect(clippy::cast_precision_loss, reason = "shown with few digits")]
    fn pace(&self, total: u64, now: Instant) -> Option<String> {
        let timing = lock(&self.timing);
        let (begun, first) = timing.begun.filter(|_| timing.phase == Phase::Copying)?;
        let moved = timing.bytes + self.done.load(Ordering::Relaxed) - first;
        let time = timing.time + now.saturating_duration_since(begun);
        let rate = human_rate(moved, time).filter(|_| moved > 0)?;
        let left = time.as_secs_f64() * total.saturating_sub(self.done()) as f64 / moved as f64;
        Some(format!("{rate}, {left:.0} s left"))
    }
}

fn bar(total: u64) -> ProgressBar {
    let template = "{prefix} {wide_bar} {decimal_bytes}/{decimal_total_bytes}{msg}";
    let style = ProgressStyle::with_template(template).expect("a template that a test has parsed");
    let target = ProgressDrawTarget::term_like(Box::new(Terminal::default()));
    ProgressBar::with_draw_target(Some(total), target).with_style(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    #[test]
    fn rate_and_remaining_time_count_from_the_first_bytes() {
        let (flow, start) = (Flow::default(), Instant::now());
        assert_eq!(flow.pace(2000 * MB, start + seconds(60)), None);
        // The rate leaves out the first bytes, because the time that they took is unknown.
        flow.advance(4 * MB, start + seconds(60));
        assert_eq!(flow.pace(2000 * MB, start + seconds(61)), None);
        flow.advance(496 * MB, start + seconds(62));
        assert_eq!(flow.pace(2000 * MB, start + seconds(62)).unwrap(), "248.00 MB/s, 6 s left");
    }

    #[test]
    fn bytes_of_an_earlier_run_are_done_and_have_no_rate() {
        let (flow, start) = (Flow::default(), Instant::now());
        flow.before.fetch_add(1000 * MB, Ordering::Relaxed);
        assert_eq!((flow.done(), flow.pace(2000 * MB, start + seconds(1))), (1000 * MB, None));
        flow.advance(MB, start);
        flow.advance(100 * MB, start + seconds(1));
        assert_eq!(flow.done(), 1101 * MB);
        assert_eq!(flow.pace(2101 * MB, start + seconds(1)).unwrap(), "100.00 MB/s, 10 s left");
    }

    #[test]
    fn allocating_and_syncing_are_named_and_take_no_time() {
        let (flow, start) = (Flow::default(), Instant::now());
        flow.advance(MB, start);
        flow.advance(100 * MB, start + seconds(1));
        for (phase, label) in [(Phase::Allocating, "allocating"), (Phase::Syncing, "syncing")] {
            flow.enter(phase);
            assert_eq!((flow.label("writing"), flow.pace(500 * MB, start + seconds(9))), (label, None));
        }
        flow.enter(Phase::Copying);
        assert_eq!((flow.label("writing"), flow.pace(500 * MB, start + seconds(9))), ("writing", None));
        flow.advance(MB, start + seconds(20));
        flow.advance(100 * MB, start + seconds(21));
        assert_eq!(flow.pace(402 * MB, start + seconds(21)).unwrap(), "100.00 MB/s, 2 s left");
    }

    #[test]
    fn line_has_percentage_rate_and_remaining_time() {
        let printer = Printer::new(dtshard::cli::TalkArgs::default());
        let (flow, is_over, ended) = (Flow::default(), Mutex::default(), Condvar::default());
        let display = Display::Lines { always: true };
        let shown = Shown { verb: "writing", total: 2000 * MB, display, printer, flow, is_over, ended };
        let start = Instant::now();
        shown.flow.advance(0, start);
        shown.flow.advance(500 * MB, start + seconds(1));
        let text = shown.line(start + seconds(1));
        assert_eq!(text, "writing: 25 % (500.00 MB of 2.00 GB, 500.00 MB/s, 3 s left)");
        shown.flow.enter(Phase::Syncing);
        assert_eq!(shown.line(start + seconds(2)), "syncing: 25 % (500.00 MB of 2.00 GB)");
    }

    #[test]
    fn the_bar_template_is_sound() {
        ProgressBar::hidden().set_style(bar(1).style());
    }
}
