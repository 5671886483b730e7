//! A mapped file that another process truncates turns reads into SIGBUS. That must be a message and exit code 2,
//! not a core dump: nothing has been published yet, so ending at once loses nothing but the partial output.

#![expect(unsafe_code, reason = "a signal handler has to be installed through libc")]

use std::sync::Once;

const MESSAGE: &[u8] =
    b"error: a source file was truncated while it was being read\nhint: wait for the job that writes the checkpoint to finish, or use --io read\n";

/// Install the handler once for the process.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let handler: extern "C" fn(libc::c_int) = on_sigbus;
        // SAFETY: the action is fully initialised (zero is a valid sigset and flag word) and the handler calls only
        // async-signal-safe functions.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        }
    });
}

extern "C" fn on_sigbus(_signal: libc::c_int) {
    // SAFETY: write(2) and _exit(2) are async-signal-safe and the buffer is static.
    unsafe {
        libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
        libc::_exit(2);
    }
}
