//! The terminal as a bar is drawn on it.
//!
//! The cursor waits at the start of the bar's line. indicatif leaves it at the end, where the `^C` that a terminal echoes
//! goes to the next line, so that the bar stays on the line above.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use indicatif::TermLike;

/// Standard error.
#[derive(Debug, Default)]
pub struct Terminal {
    /// Written at once, so that nothing else comes between.
    buffer: Mutex<String>,
}

impl Terminal {
    fn push(&self, text: &str) {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner).push_str(text);
    }

    /// Move the cursor, where there is anywhere to go.
    fn go(&self, number: usize, direction: char) {
        if number > 0 {
            self.push(&format!("\x1b[{number}{direction}"));
        }
    }
}

impl TermLike for Terminal {
    /// One column less than there are, as some terminals go to the next line with the last one.
    fn width(&self) -> u16 {
        terminal_size::terminal_size_of(io::stderr()).map_or(79, |(width, _)| width.0.max(2) - 1)
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.go(n, 'A');
        Ok(())
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.go(n, 'B');
        Ok(())
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.go(n, 'C');
        Ok(())
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.go(n, 'D');
        Ok(())
    }

    fn write_line(&self, s: &str) -> io::Result<()> {
        self.push(s);
        self.push("\n");
        Ok(())
    }

    fn write_str(&self, s: &str) -> io::Result<()> {
        self.push(s);
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.push("\r\x1b[2K");
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let text = std::mem::take(&mut *self.buffer.lock().unwrap_or_else(PoisonError::into_inner));
        io::stderr().lock().write_all(text.as_bytes())?;
        io::stderr().lock().write_all(b"\r")
    }
}
