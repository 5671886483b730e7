//! The memory of one device. All sizes and offsets are in bytes.
//!
//! The addresses that programs see cannot be read; the stand-in keeps the bytes at other addresses. Therefore a program
//! that uses a device address as a host address crashes immediately.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// The byte with which memory is filled after it is allocated and after it is freed.
const POISON: u8 = 0xA5;
/// The alignment of CUDA's allocations in bytes.
const ALIGNMENT: usize = 256;

pub struct Heap {
    /// The device address at which the memory starts. A program that reads this address crashes.
    seen: usize,
    /// The host address at which the bytes really are.
    real: usize,
    size: usize,
    /// The current allocations: offset in the memory, and length in bytes.
    used: Mutex<BTreeMap<usize, usize>>,
}

/// An allocated range of device memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Allocation {
    /// The device address at which the range starts.
    pub seen: u64,
    /// The host address at which the bytes really are.
    pub real: u64,
    pub bytes: u64,
}

/// The error for a range that is not inside one allocation of device memory. Its reason has already been printed.
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

    /// Allocates device memory. Returns the device address, or `None` if there is not enough space.
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

    /// Frees the allocation that begins at an address.
    pub fn free(&self, address: u64) -> Result<(), Illegal> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = usize::try_from(address).unwrap_or(usize::MAX).wrapping_sub(self.seen);
        let Some(bytes) = used.remove(&offset) else {
            eprintln!("gpu-stand-in: no allocation begins at {address:#x}, which is freed");
            return Err(Illegal);
        };
        self.poison(offset, bytes);
        Ok(())
    }

    /// Returns the host address of a range's bytes. Fails if the range is not inside one allocation.
    pub fn locate(&self, address: u64, bytes: usize) -> Result<*mut u8, Illegal> {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = usize::try_from(address).unwrap_or(usize::MAX).wrapping_sub(self.seen);
        let end = offset.checked_add(bytes);
        match used.range(..=offset).next_back() {
            Some((start, length)) if end.is_some_and(|end| end <= start + length) => {
                Ok((self.real + offset) as *mut u8)
            }
            _ => {
                eprintln!("gpu-stand-in: {bytes} B at {address:#x} are not in one allocation of the device");
                Err(Illegal)
            }
        }
    }

    /// Returns all ranges that are currently allocated.
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

    /// Returns true if an address belongs to the memory of this device, even if it is not allocated.
    pub fn has(&self, address: u64) -> bool {
        usize::try_from(address).is_ok_and(|address| (self.seen..self.seen + self.size).contains(&address))
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the number of bytes that are not allocated.
    pub fn left(&self) -> usize {
        self.size - self.used.lock().unwrap_or_else(PoisonError::into_inner).values().sum::<usize>()
    }

    fn poison(&self, offset: usize, bytes: usize) {
        // SAFETY: the range is an allocation of the table, which is inside the memory mapping.
        unsafe { ptr::write_bytes((self.real + offset) as *mut u8, POISON, bytes) }
    }
}

fn map(size: usize, protection: i32) -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the call creates a new mapping at an address that the kernel chooses.
    let address = unsafe { libc::mmap(ptr::null_mut(), size, protection, flags, -1, 0) };
    assert!(address != libc::MAP_FAILED, "{size} B cannot be mapped");
    address as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_across_allocations_is_illegal() {
        let heap = Heap::new(1 << 20);
        let (first, second) = (heap.allocate(300).unwrap(), heap.allocate(256).unwrap());
        assert_eq!(second - first, 512);
        assert!(heap.locate(first, 300).is_ok() && heap.locate(first + 299, 1).is_ok());
        assert!(heap.locate(first, 301).is_err() && heap.locate(first + 512, 257).is_err());
        heap.free(first).unwrap();
        assert!(heap.locate(first, 1).is_err() && heap.free(first).is_err() && heap.free(second + 1).is_err());
        assert_eq!(heap.allocate(400), Some(first), "the freed range is reused");
    }

    #[test]
    fn freed_memory_is_reused() {
        let heap = Heap::new(4096);
        let all = heap.allocate(4096).unwrap();
        assert_eq!((heap.allocate(1), heap.left()), (None, 0));
        heap.free(all).unwrap();
        assert_eq!((heap.allocate(usize::MAX), heap.left()), (None, 4096));
    }
}
