//! The text of kernels compiles. That needs NVRTC and no GPU: `DTSHARD_TEST_NVRTC` is its file.

use std::path::Path;

use cudarc::nvrtc::sys::is_culib_present;

use super::*;
use crate::gpu::kernels::{ARITHMETIC, COPIES};

#[test]
#[expect(clippy::print_stdout, reason = "whoever asks for this test learns why it was not run")]
fn kernels_compile_where_nvrtc_is() {
    let Some(file) = std::env::var_os("DTSHARD_TEST_NVRTC") else {
        println!("skipped: DTSHARD_TEST_NVRTC names no libnvrtc.so");
        return;
    };
    let (folder, file) = (libraries(), Path::new(&file));
    symlink(file, folder.path().join("libnvrtc.so")).unwrap();
    // Beside it are the built-ins that it loads.
    let folders = std::env::join_paths([folder.path(), file.parent().unwrap()]).unwrap();
    let output = process_of("kernels::compiled", 1, &folder).env("LD_LIBRARY_PATH", folders).output().unwrap();
    passed("kernels::compiled", &output);
}

#[test]
#[ignore = "a process of a test"]
fn compiled() {
    // SAFETY: it is NVRTC.
    assert!(unsafe { is_culib_present() });
    for arch in [(8, 0), (9, 0)] {
        let copies = COPIES.compile(arch).unwrap().to_src();
        assert!(copies.contains(".visible .entry copy_runs("), "{copies}");
        // Nothing is divided in 64 bits.
        assert!(!copies.contains("div.u64"), "{copies}");
        let arithmetic = ARITHMETIC.compile(arch).unwrap().to_src();
        for kernel in ["reduce", "tell_outcomes", "cast"] {
            assert!(arithmetic.contains(&format!(".visible .entry {kernel}(")), "{kernel}");
        }
        // Nothing is fused, now or later, flushed to zero or divided more or less, and nothing spills.
        for unwanted in ["fma.", "mul.f", "add.f", ".ftz", "div.approx", "div.full", ".local"] {
            assert!(!arithmetic.contains(unwanted), "{unwanted}");
        }
        // The widest access is one instruction.
        for ptx in [copies, arithmetic] {
            assert!(ptx.contains("ld.global.nc.v4") && ptx.contains("st.global.wb.v4"), "{ptx}");
        }
    }
    // NVRTC 13 has left out the first.
    for program in [COPIES, ARITHMETIC] {
        assert!([(7, 0), (7, 5)].into_iter().any(|arch| program.compile(arch).is_ok()));
    }
    let unknown = COPIES.compile((99, 0)).unwrap_err();
    assert!(unknown.contains("NVRTC does not compile copy_runs"), "{unknown}");
    // The stand-in for a device takes it as a driver would.
    let gpu = open(Kernels::Compiled, 0).unwrap();
    assert!(matches!(gpu.packer, crate::gpu::Packer::Kernel(_)));
    gpu.arithmetic().unwrap();
}
