//! The text of the kernel copies what the host copies. It is C++ that a compiler of the host takes, too: blocks and
//! threads are loops then, one thread after the other, so what threads do at once is not seen.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::process::Stdio;

use libloading::Library;
use nccl::DeviceBuffer;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::copying::copy;
use super::*;
use crate::gpu::copies::{BLOCK_UNITS, Nest, Table};

/// What CUDA has built in, before the text; and the launch, behind it.
const BUILT_IN: &str = r"
    #include <algorithm>
    using std::min;
    struct Index { unsigned int x; };
    static Index threadIdx, blockIdx, blockDim;
    struct alignas(16) uint4 { unsigned int x, y, z, w; };
    static unsigned long long lowest, beyond;
    template <typename T> T __ldg(const T* from) {
        unsigned long long at = (unsigned long long)from;
        if (at % sizeof(T) || at < lowest || at + sizeof(T) > beyond) __builtin_trap();
        return *from;
    }
    #define __global__
    #define __device__
    #define __shared__ static
    #define __syncthreads()
";
const LAUNCH: &str = r#"
    extern "C" void launch(u64 source, u64 end, u32 blocks, u32 threads, const Copy* copies, u32 count, u32 block_units) {
        lowest = source, beyond = end;
        blockDim.x = threads;
        for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
            for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) copy_runs(copies, count, block_units);
    }
"#;

/// Memory of the host in the place of a device's.
struct Memory(*mut u8, Layout);

impl Memory {
    fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), 256).unwrap();
        // SAFETY: it is not of no bytes.
        Self(unsafe { alloc_zeroed(layout) }, layout)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: it has so many, all zeroed at first.
        unsafe { std::slice::from_raw_parts_mut(self.0, self.1.size()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated so.
        unsafe { dealloc(self.0, self.1) }
    }
}

// SAFETY: it is lent to no communicator.
unsafe impl DeviceBuffer for Memory {
    fn address(&self) -> u64 {
        self.0.addr() as u64
    }

    fn bytes(&self) -> usize {
        self.1.size()
    }
}

type Launch = unsafe extern "C" fn(u64, u64, u32, u32, *const u8, u32, u32);

#[test]
#[expect(clippy::print_stdout, reason = "whoever asks for this test learns why it was not run")]
fn the_text_of_the_kernel_copies_what_hosts_copy() {
    let folder = tempfile::tempdir().unwrap();
    let (text, file) = (folder.path().join("kernel.cpp"), folder.path().join("libkernel.so"));
    std::fs::write(&text, [BUILT_IN, include_str!("../kernels/copy_runs.cu"), LAUNCH].concat()).unwrap();
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o"]).arg(&file).arg(&text);
    match compiler.stdout(Stdio::null()).status() {
        Err(none) => return println!("skipped: c++: {none}"),
        Ok(status) => assert!(status.success(), "the text of the kernel is not compiled"),
    }
    // SAFETY: it was made just now, and has no initializers.
    let library = unsafe { Library::new(&file) }.unwrap();
    // SAFETY: it is declared so.
    let launch = unsafe { library.get::<Launch>("launch") }.unwrap();
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::with_cases(300) });
    let done = runner.run(&prop::collection::vec(copy(), 1..5), |copies| {
        let longest = copies.iter().map(|(_, source, _)| usize::try_from(*source).unwrap()).max().unwrap_or(0);
        prop_assume!(longest < 4 << 20 && copies.iter().all(|(_, _, target)| *target < 4 << 20));
        let mut from = Memory::new(longest);
        (0_u8..251).cycle().zip(from.bytes_mut()).for_each(|(value, byte)| *byte = value);
        let mut expected = Vec::new();
        let mut placed = Vec::new();
        for (copy, _, len) in copies {
            let base = expected.len().next_multiple_of(16);
            expected.resize(base + usize::try_from(len).unwrap(), 0);
            copy.copy(from.bytes_mut(), &mut expected[base..]);
            placed.push((copy, base));
        }
        let mut into = Memory::new(expected.len());
        let table = Table::new(placed.iter().filter_map(|(copy, base)| Nest::new(copy, &from, &into, *base)));
        let mut records = Memory::new(table.bytes.len());
        records.bytes_mut()[..table.bytes.len()].copy_from_slice(&table.bytes);
        let (source, end) = (from.address(), from.address() + longest as u64);
        // SAFETY: the table lies in its memory, and its copies in theirs.
        unsafe { launch(source, end, table.blocks, 256, records.0, table.copies, BLOCK_UNITS) };
        prop_assert!(into.bytes_mut()[..expected.len()] == expected);
        Ok(())
    });
    done.unwrap();
}
