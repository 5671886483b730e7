//! How far a run is: a bar with rate and remaining time on a terminal, a plain line now and then elsewhere.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::printer::Printer;
use crate::cli::ProgressChoice;
use crate::exec::Reporter;
use crate::quantity::{human_bytes, human_rate};

/// Time between plain lines, which go into logs.
const LINE_EVERY: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Progress {
    display: Display,
    printer: Printer,
}

#[derive(Debug)]
enum Display {
    Nothing,
    Bar(ProgressBar),
    Lines { verb: &'static str, total: u64, always: bool, done: AtomicU64, started: Instant, last: Mutex<Instant> },
}

impl Progress {
    /// Begin to show progress over `total` bytes.
    pub fn start(printer: &Printer, verb: &'static str, total: u64) -> Self {
        let display = match printer.progress() {
            ProgressChoice::Never => Display::Nothing,
            _ if printer.draws() => Display::Bar(bar(verb, total)),
            choice => {
                let now = Instant::now();
                let always = choice == ProgressChoice::Always;
                Display::Lines { verb, total, always, done: AtomicU64::new(0), started: now, last: Mutex::new(now) }
            }
        };
        Self { display, printer: *printer }
    }
}

fn bar(verb: &'static str, total: u64) -> ProgressBar {
    let template = "{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} eta {eta}";
    let style = ProgressStyle::with_template(template).expect("a template that a test has parsed");
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    bar.with_style(style).with_message(verb)
}

impl Reporter for Progress {
    fn advance(&self, bytes: u64) {
        match &self.display {
            Display::Nothing => {}
            Display::Bar(bar) => bar.inc(bytes),
            Display::Lines { verb, total, done, started, last, .. } => {
                let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                // Whoever does not get the lock at once leaves the line to the one who has it.
                let Ok(mut last) = last.try_lock() else { return };
                if last.elapsed() >= LINE_EVERY {
                    *last = Instant::now();
                    self.printer.say(&line(verb, done, *total, started.elapsed()));
                }
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        match &self.display {
            Display::Bar(bar) => bar.finish_and_clear(),
            // Whoever asks for progress gets a line even where there was no time for one.
            Display::Lines { verb, total, always: true, done, started, .. } => {
                let done = done.load(Ordering::Relaxed);
                if done > 0 {
                    self.printer.say(&line(verb, done, *total, started.elapsed()));
                }
            }
            _ => {}
        }
    }
}

/// `writing: 25 % (500.00 MB of 2.00 GB, 500.00 MB/s, 3 s left)`
#[expect(clippy::cast_precision_loss, reason = "shown with few digits")]
fn line(verb: &str, done: u64, total: u64, elapsed: Duration) -> String {
    let percent = done as f64 * 100.0 / total.max(1) as f64;
    let pace = human_rate(done, elapsed).map(|rate| {
        let left = elapsed.as_secs_f64() * total.saturating_sub(done) as f64 / done.max(1) as f64;
        format!(", {rate}, {left:.0} s left")
    });
    let pace = pace.unwrap_or_default();
    format!("{verb}: {percent:.0} % ({} of {}{pace})", human_bytes(done), human_bytes(total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_rate_and_remaining_time() {
        let text = line("writing", 500_000_000, 2_000_000_000, Duration::from_secs(1));
        assert_eq!(text, "writing: 25 % (500.00 MB of 2.00 GB, 500.00 MB/s, 3 s left)");
        let text = line("writing", 500, 500, Duration::from_millis(1));
        assert_eq!(text, "writing: 100 % (500 B of 500 B)");
    }

    #[test]
    fn the_bar_template_is_sound() {
        bar("writing", 1).finish_and_clear();
    }
}
