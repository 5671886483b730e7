//! The progress bar on the terminal, and other output while the bar is shown.

use std::sync::{Mutex, MutexGuard, PoisonError};

use indicatif::ProgressBar;

/// The progress bar that is on the terminal now, or `None` if there is none.
pub static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Locks a mutex, even if another thread panicked while it held the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hides the progress bar while `write` runs, so that `write` can write to the terminal.
pub fn without_bar(write: impl FnOnce()) {
    let bar = lock(&BAR).clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}
