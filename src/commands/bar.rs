//! Progress bar on the terminal, and other output while the bar is shown.

use std::sync::{Mutex, MutexGuard, PoisonError};

use indicatif::ProgressBar;

/// Bar that is on the terminal now.
pub static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Locks a mutex. A panic of another thread is ignored.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes to the terminal while the bar is hidden.
pub fn without_bar(write: impl FnOnce()) {
    let bar = lock(&BAR).clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}
