//! The program's kernels, by their names: `kernels.cpp` has their text, compiled for the host.
//!
//! They do all that the text does but for what threads do at once. A lane that is not aligned, or not in one allocation, is
//! illegal, as it is on a device.

use std::ffi::{CStr, c_char};

use crate::memory::{Allocation, Heap, Illegal};

/// A kernel, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(u32);

/// Bytes of the arguments that each of them takes: a table, how many jobs it has, and how much a block does.
pub const ARGUMENTS: [usize; 3] = [8, 4, 4];

/// One launch.
pub struct Launch<'a> {
    pub blocks: u32,
    /// Of a block.
    pub threads: u32,
    /// The bytes of each argument.
    pub arguments: &'a [Vec<u8>],
    pub heap: &'a Heap,
}

/// `struct Illegal`
#[repr(C)]
struct Access {
    address: u64,
    bytes: u64,
}

#[cfg(not(no_kernels))]
unsafe extern "C" {
    safe fn stand_in_kernel(number: u32) -> *const c_char;

    /// # Safety
    /// There is a kernel of that number, and so many allocations.
    fn stand_in_launch(
        number: u32,
        allocations: *const Allocation,
        count: u64,
        blocks: u32,
        threads: u32,
        table: u64,
        jobs: u32,
        block_units: u32,
    ) -> Access;
}

/// There was no compiler of C++.
#[cfg(no_kernels)]
mod none {
    use super::{Access, Allocation, c_char};

    pub fn stand_in_kernel(_: u32) -> *const c_char {
        std::ptr::null()
    }

    #[expect(clippy::too_many_arguments, reason = "as it is in C++")]
    pub unsafe fn stand_in_launch(
        _: u32,
        _: *const Allocation,
        _: u64,
        _: u32,
        _: u32,
        address: u64,
        _: u32,
        _: u32,
    ) -> Access {
        Access { address, bytes: 1 }
    }
}
#[cfg(no_kernels)]
use none::{stand_in_kernel, stand_in_launch};

impl Kernel {
    pub fn named(name: &str) -> Option<Self> {
        let names = (0..).map_while(|number| {
            let name = stand_in_kernel(number);
            // SAFETY: what is not null is a string that stays.
            (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) })
        });
        (0..).zip(names).find(|(_, known)| known.to_bytes() == name.as_bytes()).map(|(number, _)| Self(number))
    }

    /// Do all blocks, one after the other.
    pub fn run(self, launch: &Launch<'_>) -> Result<(), Illegal> {
        let argument =
            |nth: usize| launch.arguments[nth].iter().rev().fold(0, |value: u64, byte| value << 8 | u64::from(*byte));
        let word = |nth| u32::try_from(argument(nth)).unwrap_or(u32::MAX);
        let allocations = launch.heap.allocations();
        // SAFETY: the kernel was found by its name; so many allocations are there.
        let access = unsafe {
            let (first, count) = (allocations.as_ptr(), allocations.len() as u64);
            stand_in_launch(self.0, first, count, launch.blocks, launch.threads, argument(0), word(1), word(2))
        };
        if access.bytes == 0 {
            return Ok(());
        }
        eprintln!("gpu-stand-in: a kernel uses {} B at {:#x}", access.bytes, access.address);
        Err(Illegal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(no_kernels, ignore = "there was no compiler of C++")]
    fn kernels_have_their_names() {
        assert!(Kernel::named("copy_runs").is_some_and(|kernel| Kernel::named("cast") != Some(kernel)));
        assert_eq!(Kernel::named("copy"), None);
    }

    #[test]
    #[cfg_attr(no_kernels, ignore = "there was no compiler of C++")]
    fn what_a_kernel_may_not_use_is_told() {
        let heap = Heap::new(1 << 16);
        let table = heap.allocate(64).unwrap();
        // A record has more bytes; and none lies across the end of all addresses.
        for table in [table, u64::MAX - 15] {
            let arguments = [table.to_le_bytes().to_vec(), 1_u32.to_le_bytes().to_vec(), 1_u32.to_le_bytes().to_vec()];
            let launch = Launch { blocks: 1, threads: 1, arguments: &arguments, heap: &heap };
            assert_eq!(Kernel::named("copy_runs").unwrap().run(&launch), Err(Illegal));
        }
    }
}
