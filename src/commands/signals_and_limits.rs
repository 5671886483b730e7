//! Settings of the whole process, which only the program makes, not the library: signals, limits and the allocator.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGXFSZ};
use signal_hook::flag;

use dtshard::{Error, Result, Stop};

/// Sets limits, allocator and signal handlers of the process, and returns a flag that INT, TERM, USR1 and USR2 set from
/// now on.
///
/// A second INT ends the process immediately, so that a hung file system cannot block a user. A second TERM does not,
/// because a scheduler that cancels a job sends TERM twice within milliseconds, and KILL later. SIGXFSZ is ignored, so
/// that a write beyond the limit of file size fails with an error; the signal would end the process in the middle of
/// its work.
///
/// # Errors
/// `Io` if the handlers cannot be installed.
pub fn prepare() -> Result<Stop> {
    raise_open_file_limit();
    give_back_large_blocks();
    let stop = Stop::default();
    listen(&stop).map_err(Error::io("install a signal handler in", "this process"))?;
    Ok(stop)
}

fn listen(stop: &Stop) -> std::io::Result<()> {
    dtshard::catch_lost_pages()?;
    let hurry = Arc::new(AtomicBool::new(false));
    flag::register_conditional_default(SIGINT, Arc::clone(&hurry))?;
    flag::register(SIGINT, hurry)?;
    for signal in Stop::SIGNALS {
        let number = usize::try_from(signal).expect("signal numbers are positive");
        flag::register_usize(signal, stop.signal(), number)?;
    }
    flag::register(SIGXFSZ, Arc::default())?;
    Ok(())
}

/// Raises the soft limit on file descriptors to the hard limit.
///
/// The soft limit is low for programs that use select(2), which this program does not use. If the limit cannot be
/// raised, the library keeps fewer files open.
fn raise_open_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Makes the allocator return freed blocks of at least 1 MiB to the system immediately.
///
/// By default glibc raises its threshold and keeps such blocks, so the memory of tables that are used one after the
/// other would add up. Smaller blocks stay in the allocator, because each page that is returned costs a page fault
/// later.
fn give_back_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const LARGE_BYTES: libc::c_int = 1 << 20;
        for limit in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
            // SAFETY: mallopt sets a parameter of the allocator, under its lock.
            #[expect(unsafe_code)]
            let _ = unsafe { libc::mallopt(limit, LARGE_BYTES) };
        }
    }
}
