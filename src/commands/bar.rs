//! The progress bar that is on the terminal.

use std::sync::{Mutex, MutexGuard, PoisonError};

use indicatif::ProgressBar;

/// The bar that is on the terminal.
pub static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes to the terminal while no bar is on it.
pub fn without_bar(write: impl FnOnce()) {
    let bar = lock(&BAR).clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}
