//! Mapped source files. An unreadable page of a mapping becomes an error. All sizes and offsets are in bytes.
//!
//! If a page of a mapping cannot be read, the system raises SIGBUS. The reason is that the file has been truncated, or
//! that its disk fails. If the program has installed the signal handler of this module, the handler replaces the page
//! by a page of zeros and marks the mapping as failed, so that the thread continues. Every read from a mapping ends
//! with a check of this mark, so that the zeros are never used.
//!
//! The addresses of a mapping are in a *region*. Invariant: a region is never freed, because the handler follows pointers
//! to regions without a lock. A later mapping reuses the region of a mapping that no longer exists.

#![expect(unsafe_code, reason = "files are mapped, and a signal handler is installed through libc")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock};

use memmap2::{Advice, Mmap, MmapOptions};

/// The bytes of a file, mapped for reading.
#[derive(Debug)]
pub(super) struct Mapping {
    map: Mmap,
    region: &'static MappedAddresses,
}

impl Mapping {
    /// Maps the first `len` bytes of a file. If the file becomes shorter later, [`Self::read`] returns `None`, provided
    /// that the SIGBUS handler of [`catch_lost_pages`] is installed.
    ///
    /// # Errors
    /// The errors of mmap(2).
    pub fn new(file: &File, len: usize) -> io::Result<Self> {
        // SAFETY: the mapping is read-only and private to this process. Another process may still change the file. The
        // identity check before publishing detects changed bytes, and the SIGBUS handler detects a shorter file.
        let map = unsafe { MmapOptions::new().len(len).map(file) }?;
        // This is only a hint: write blocks read their sources from front to back.
        let _ = map.advise(Advice::Sequential);
        let start = map.as_ptr().addr();
        Ok(Self { region: MappedAddresses::register(start..start + map.len()), map })
    }

    /// Calls `read` with a range of the bytes. Returns `None` if any page of the mapping was unreadable during this
    /// call or an earlier call.
    pub fn read<T>(&self, range: Range<usize>, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let value = read(&self.map[range]);
        // The handler sets the mark before it replaces the page, so a thread that has read zeros sees the mark.
        fence(Ordering::SeqCst);
        (!self.region.has_failed.load(Ordering::SeqCst)).then_some(value)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The region is released before the memory is unmapped, because the next mapping may get the same addresses.
        self.region.release();
    }
}

/// A region: the addresses of one mapping. The signal handler reads these addresses.
#[derive(Debug, Default)]
struct MappedAddresses {
    /// The first address of the mapping; 0 while no mapping uses the region.
    start: AtomicUsize,
    end: AtomicUsize,
    has_failed: AtomicBool,
    next: Option<&'static Self>,
}

/// The first region in the linked list of all regions.
static REGIONS: AtomicPtr<MappedAddresses> = AtomicPtr::new(ptr::null_mut());

/// The regions that no mapping uses. The next mapping reuses one of them.
static UNUSED: Mutex<Vec<&'static MappedAddresses>> = Mutex::new(Vec::new());

impl MappedAddresses {
    fn register(addresses: Range<usize>) -> &'static Self {
        let mut unused = UNUSED.lock().expect("no panic while the lock is held");
        let region = unused.pop().unwrap_or_else(|| {
            // SAFETY: regions are leaked, so a pointer to a region is always valid. Regions change only through
            // atomics.
            let next = unsafe { REGIONS.load(Ordering::Acquire).as_ref() };
            let region = Box::leak(Box::new(Self { next, ..Self::default() }));
            REGIONS.store(region, Ordering::Release);
            region
        });
        region.has_failed.store(false, Ordering::SeqCst);
        region.end.store(addresses.end, Ordering::SeqCst);
        region.start.store(addresses.start, Ordering::SeqCst);
        region
    }

    fn release(&'static self) {
        self.start.store(0, Ordering::SeqCst);
        UNUSED.lock().expect("no panic while the lock is held").push(self);
    }

    fn contains(&self, address: usize) -> bool {
        let start = self.start.load(Ordering::SeqCst);
        start != 0 && (start..self.end.load(Ordering::SeqCst)).contains(&address)
    }
}

/// The action that SIGBUS had before this module's handler was installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);

static IS_INSTALLED: AtomicBool = AtomicBool::new(false);

/// Returns whether the SIGBUS handler is installed. With this handler, an unreadable page is an error; without the
/// handler, an unreadable page ends the process.
pub(super) fn catches_lost_pages() -> bool {
    IS_INSTALLED.load(Ordering::SeqCst)
}

/// Installs a handler for SIGBUS in this process, so that an unreadable page of a mapped file becomes an error.
///
/// The system raises SIGBUS for such a page if the file has been truncated or its disk fails. Without a handler, SIGBUS
/// ends the process. If a SIGBUS does not concern a file mapped here, the previous action is restored and runs. Without
/// this handler, files are mapped only if the caller asks for it.
///
/// # Errors
/// The errors of sigaction(2).
pub fn catch_lost_pages() -> io::Result<()> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _guard = INSTALLING.lock().expect("no panic while the lock is held");
    if catches_lost_pages() {
        return Ok(());
    }
    PAGE_BYTES.store(rustix::param::page_size(), Ordering::SeqCst);
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
    // SAFETY: the actions are fully initialised (zero is a valid set of signals), and the handler calls only functions
    // that a signal handler may call.
    let done = unsafe {
        let mut previous: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut previous);
        let _ = PREVIOUS.set(previous);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut())
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    IS_INSTALLED.store(true, Ordering::SeqCst);
    Ok(())
}

extern "C" fn on_sigbus(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes valid information to a handler with SA_SIGINFO; regions are never freed; the replaced
    // page is an unreadable page of one of our own read-only mappings; sigaction(2) may be called in a handler.
    unsafe {
        let address = (*info).si_addr().addr();
        if mark(address) && put_zeros_at(address) {
            return;
        }
        // This SIGBUS does not concern a mapped file. The access is repeated after the handler returns, and then the
        // previous action runs.
        if let Some(previous) = PREVIOUS.get() {
            libc::sigaction(libc::SIGBUS, previous, ptr::null_mut());
        }
    }
}

/// Marks the mapping that contains this address as failed. Returns false if no mapping contains this address.
fn mark(address: usize) -> bool {
    let mut found = false;
    // SAFETY: regions are never freed.
    let mut next = unsafe { REGIONS.load(Ordering::Acquire).as_ref() };
    while let Some(region) = next {
        if region.contains(address) {
            region.has_failed.store(true, Ordering::SeqCst);
            found = true;
        }
        next = region.next;
    }
    found
}

/// Replaces the page that contains this address by a readable page of zeros. Returns false if this fails.
///
/// # Safety
/// The page must be part of a mapping that is only read.
unsafe fn put_zeros_at(address: usize) -> bool {
    let page_bytes = PAGE_BYTES.load(Ordering::SeqCst);
    let page = ptr::without_provenance_mut::<libc::c_void>(address - address % page_bytes);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the caller guarantees a read-only mapping, and the length of the mapping does not change.
    unsafe { libc::mmap(page, page_bytes, libc::PROT_READ, flags, -1, 0) != libc::MAP_FAILED }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_lost_by_truncation_fails_every_later_read() {
        catch_lost_pages().unwrap();
        let page = rustix::param::page_size();
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * page as u64).unwrap();
        let mapping = Mapping::new(&file, 4 * page).unwrap();
        let other = Mapping::new(&file, page).unwrap();
        let sum = |mapping: &Mapping, range| mapping.read(range, |bytes| bytes.iter().map(|b| u64::from(*b)).sum());
        assert_eq!(sum(&mapping, 0..4 * page), Some(0_u64));
        file.set_len(page as u64).unwrap();
        assert_eq!(sum(&mapping, 0..page), Some(0), "that page is still there");
        assert_eq!(sum(&mapping, page..4 * page), None);
        assert_eq!(sum(&mapping, 0..1), None);
        assert_eq!(sum(&other, 0..page), Some(0), "another mapping of the file has no page that is lost");
    }

    #[test]
    fn file_shorter_than_its_mapping_fails_to_read() {
        catch_lost_pages().unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(10).unwrap();
        let mapping = Mapping::new(&file, 1 << 20).unwrap();
        assert_eq!(mapping.read(0..10, <[u8]>::to_vec), Some(vec![0; 10]));
        assert_eq!(mapping.read(0..1 << 20, |bytes| bytes.iter().all(|byte| *byte == 0)), None);
        drop(mapping);
        assert!(Mapping::new(&file, 10).unwrap().read(0..10, |_| ()).is_some(), "the mark is not inherited");
    }

    #[test]
    fn threads_that_read_a_truncated_file_all_fail() {
        catch_lost_pages().unwrap();
        let len = 64 * rustix::param::page_size();
        let file = tempfile::tempfile().unwrap();
        file.set_len(len as u64).unwrap();
        let mapping = Mapping::new(&file, len).unwrap();
        file.set_len(0).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(mapping.read(0..len, |bytes| bytes.iter().max().copied()), None));
            }
        });
    }
}
