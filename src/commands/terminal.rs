//! The terminal on which the progress bar is drawn.
//!
//! The cursor stays at the start of the bar's line. indicatif would leave it at the end of the line. There, the `^C`
//! that a terminal echoes would wrap to the next line, and the bar would stay on the line above.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use indicatif::TermLike;

/// Standard error, as the terminal of the progress bar.
#[derive(Debug, Default)]
pub struct Terminal {
    /// Output that is collected and then written in one piece, so that other output cannot appear in the middle of it.
    buffer: Mutex<String>,
}

impl Terminal {
    fn push(&self, text: &str) {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner).push_str(text);
    }

    /// Moves the cursor by `number` positions. `direction` is the last letter of the ANSI escape: A (up) to D (left).
    fn go(&self, number: usize, direction: char) {
        if number > 0 {
            self.push(&format!("\x1b[{number}{direction}"));
        }
    }
}

impl TermLike for Terminal {
    /// Returns the width of the terminal minus one column, because some terminals wrap a line that reaches the last
    /// column.
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
