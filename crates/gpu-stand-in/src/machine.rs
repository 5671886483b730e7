//! The imitated machine: its devices, their memory, and the objects that handles identify.
//!
//! This is the entire state of the libraries in a process. Handles are looked up in tables, so using a destroyed handle
//! is an error and not a crash.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::memory::Heap;
use crate::settings::Settings;
use crate::stream::{Event, Stream};

pub struct Machine {
    pub settings: Settings,
    pub devices: Vec<Device>,
    tables: Mutex<Tables>,
}

pub struct Device {
    /// The index of the device among all devices of the machine.
    pub number: usize,
    pub heap: Heap,
    /// True if work has accessed invalid memory. As in CUDA, the device then runs no more work.
    pub faulted: AtomicBool,
}

#[derive(Default)]
pub struct Tables {
    last: usize,
    /// The streams, by their handles. The default stream of a device has the index of the device as its key.
    pub streams: HashMap<usize, Arc<Stream>>,
    pub events: HashMap<usize, Arc<Event>>,
    pub modules: HashMap<usize, String>,
    pub functions: HashMap<usize, crate::kernels::Kernel>,
    pub communicators: HashMap<usize, Arc<crate::nccl::Communicator>>,
    /// The ranges of pinned host memory: address, and length in bytes.
    pub pinned: BTreeMap<usize, usize>,
}

static MACHINE: OnceLock<Machine> = OnceLock::new();

thread_local! {
    /// The index of the device whose context is current in this thread; `None` if no context is current.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

impl Machine {
    /// Returns the imitated machine. The first call creates it.
    pub fn start() -> &'static Self {
        MACHINE.get_or_init(|| {
            let settings = Settings::of_environment();
            let device = |&number| Device { number, heap: Heap::new(settings.memory), faulted: AtomicBool::new(false) };
            Self { devices: settings.devices.iter().map(device).collect(), settings, tables: Mutex::default() }
        })
    }

    /// Returns the imitated machine, or `None` if it was not started.
    pub fn get() -> Option<&'static Self> {
        MACHINE.get()
    }

    pub fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the stream that a handle identifies. Handle 0 is the default stream of the current device.
    pub fn stream(&self, handle: usize) -> Option<Arc<Stream>> {
        let delay = self.settings.delay;
        if handle != 0 {
            return self.tables().streams.get(&handle).cloned();
        }
        let device = current()?;
        let streams = &mut self.tables().streams;
        Some(Arc::clone(streams.entry(device).or_insert_with(|| Stream::new(device, delay))))
    }

    /// Waits for all streams of the current device.
    pub fn synchronize(&self) {
        let is_current = |stream: &&Arc<Stream>| Some(stream.device()) == current();
        let streams: Vec<_> = self.tables().streams.values().filter(is_current).cloned().collect();
        streams.iter().for_each(|stream| stream.synchronize());
    }

    /// Returns true if a range of host memory is inside one range of pinned memory.
    pub fn is_pinned(&self, address: usize, bytes: usize) -> bool {
        let tables = self.tables();
        tables.pinned.range(..=address).next_back().is_some_and(|(start, length)| address + bytes <= start + length)
    }
}

impl Device {
    pub fn fault(&self) {
        self.faulted.store(true, Ordering::SeqCst);
    }

    pub fn has_faulted(&self) -> bool {
        self.faulted.load(Ordering::SeqCst)
    }
}

impl Tables {
    /// Returns a new handle, which no other object has or has had.
    pub fn handle(&mut self) -> usize {
        self.last += 16;
        0x10_0000 + self.last
    }
}

/// Returns the index of the device whose context is current in this thread.
pub fn current() -> Option<usize> {
    CURRENT.get()
}

pub fn make_current(device: Option<usize>) {
    CURRENT.set(device);
}
