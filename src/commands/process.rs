//! State of the whole process that the program sets, and the library does not: signals and limits.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGXFSZ};
use signal_hook::flag;

use dtshard::{Error, Result, Stop};

/// Raises the limit of open files, and returns a flag that INT, TERM, USR1 and USR2 set from now on.
///
/// A second INT ends the process at once, so that a hung file system cannot hold a user. The others never do: a job that
/// is cancelled or out of time gets TERM twice within milliseconds, and KILL if that was not enough. Beyond a limit to the
/// size of files a write fails from now on, and is an error as any other; the signal would end the process and leave half
/// of the work there.
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

/// Raises the soft limit on descriptors to the hard one.
///
/// The soft limit is low for the sake of programs that wait with select(2), which has no room for more; nothing here does.
/// If the limit may not be raised, the library opens as many files as there may be.
fn raise_open_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Has the allocator return large blocks to the system as soon as they are freed.
///
/// An allocator that learns from them keeps them instead, and tables that are needed one after the other add up. Smaller
/// blocks stay, as they are soon wanted again: each page that is returned costs a fault.
fn give_back_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const LARGE_BYTES: libc::c_int = 1 << 20;
        for limit in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
            // SAFETY: sets a number of the allocator's, under its lock.
            #[expect(unsafe_code)]
            let _ = unsafe { libc::mallopt(limit, LARGE_BYTES) };
        }
    }
}
