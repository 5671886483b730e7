//! Memory of one device, in bytes.
//!
//! It is mapped twice: programs see addresses at which nothing can be read, and the stand-in has the bytes elsewhere. Who
//! takes a device address for one of the host faults at once.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// What memory holds before it is written and after it is freed.
const POISON: u8 = 0xA5;
/// What CUDA aligns allocations to.
const ALIGNMENT: usize = 256;

pub struct Heap {
    /// What programs see.
    seen: usize,
    /// Where the bytes are.
    real: usize,
    size: usize,
    /// Allocations by their offset: bytes.
    used: Mutex<BTreeMap<usize, usize>>,
}

/// A range of memory that is used.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Allocation {
    /// What programs see.
    pub seen: u64,
    /// Where the bytes are.
    pub real: u64,
    pub bytes: u64,
}

/// A range that is no device memory; the reason is printed where it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Illegal;

impl Heap {
    pub fn new(size: usize) -> Self {
        Self {
            seen: map(size, libc::PROT_NONE),
            real: map(size, libc::PROT_READ | libc::PROT_WRITE),
            size,
            used: Mutex::default(),
        }
    }

    /// The address of so many new bytes, if there are any left.
    pub fn allocate(&self, bytes: usize) -> Option<u64> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = 0;
        for (&offset, &length) in used.iter() {
            if offset - free >= bytes {
                break;
            }
            free = (offset + length).next_multiple_of(ALIGNMENT);
        }
        if free.checked_add(bytes)? > self.size {
            return None;
        }
        used.insert(free, bytes);
        self.poison(free, bytes);
        Some((self.seen + free) as u64)
    }

    /// Frees what begins at an address.
    pub fn free(&self, address: u64) -> Result<(), Illegal> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = usize::try_from(address).unwrap_or(usize::MAX).wrapping_sub(self.seen);
        let Some(bytes) = used.remove(&offset) else {
            eprintln!("gpu-stand-in: {address:#x} is freed, where no allocation begins");
            return Err(Illegal);
        };
        self.poison(offset, bytes);
        Ok(())
    }

    /// Where the bytes of a range are, if it lies in one allocation.
    pub fn locate(&self, address: u64, bytes: usize) -> Result<*mut u8, Illegal> {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = usize::try_from(address).unwrap_or(usize::MAX).wrapping_sub(self.seen);
        let end = offset.checked_add(bytes);
        match used.range(..=offset).next_back() {
            Some((start, length)) if end.is_some_and(|end| end <= start + length) => {
                Ok((self.real + offset) as *mut u8)
            }
            _ => {
                eprintln!("gpu-stand-in: {bytes} B at {address:#x} are in no allocation of the device");
                Err(Illegal)
            }
        }
    }

    /// All that is used now.
    pub fn allocations(&self) -> Vec<Allocation> {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let place = |start: usize, offset: &usize| (start + offset) as u64;
        let allocation = |(offset, bytes): (&usize, &usize)| Allocation {
            seen: place(self.seen, offset),
            real: place(self.real, offset),
            bytes: *bytes as u64,
        };
        used.iter().map(allocation).collect()
    }

    /// Whether an address is one of this device, allocated or not.
    pub fn has(&self, address: u64) -> bool {
        usize::try_from(address).is_ok_and(|address| (self.seen..self.seen + self.size).contains(&address))
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// Bytes that are not allocated.
    pub fn left(&self) -> usize {
        self.size - self.used.lock().unwrap_or_else(PoisonError::into_inner).values().sum::<usize>()
    }

    fn poison(&self, offset: usize, bytes: usize) {
        // SAFETY: the caller has it from the table of allocations, which lie in the mapping.
        unsafe { ptr::write_bytes((self.real + offset) as *mut u8, POISON, bytes) }
    }
}

fn map(size: usize, protection: i32) -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let address = unsafe { libc::mmap(ptr::null_mut(), size, protection, flags, -1, 0) };
    assert!(address != libc::MAP_FAILED, "{size} B cannot be mapped");
    address as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_lie_in_one_allocation() {
        let heap = Heap::new(1 << 20);
        let (first, second) = (heap.allocate(300).unwrap(), heap.allocate(256).unwrap());
        assert_eq!(second - first, 512);
        assert!(heap.locate(first, 300).is_ok() && heap.locate(first + 299, 1).is_ok());
        assert!(heap.locate(first, 301).is_err() && heap.locate(first + 512, 257).is_err());
        heap.free(first).unwrap();
        assert!(heap.locate(first, 1).is_err() && heap.free(first).is_err() && heap.free(second + 1).is_err());
        assert_eq!(heap.allocate(400), Some(first), "the hole is taken again");
    }

    #[test]
    fn memory_runs_out_and_comes_back() {
        let heap = Heap::new(4096);
        let all = heap.allocate(4096).unwrap();
        assert_eq!((heap.allocate(1), heap.left()), (None, 0));
        heap.free(all).unwrap();
        assert_eq!((heap.allocate(usize::MAX), heap.left()), (None, 4096));
    }
}
