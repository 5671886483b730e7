//! Tests that NVRTC compiles the kernels. They need NVRTC but no GPU. `DTSHARD_TEST_NVRTC` is the path of the NVRTC
//! library.

use std::path::Path;

use cudarc::nvrtc::sys::is_culib_present;

use super::*;
use crate::gpu::kernels::{ARITHMETIC, COPIES};

#[test]
#[expect(clippy::print_stdout, reason = "the output says why the test was skipped")]
fn kernels_compile_with_nvrtc() {
    let Some(file) = std::env::var_os("DTSHARD_TEST_NVRTC") else {
        println!("skipped: DTSHARD_TEST_NVRTC names no libnvrtc.so");
        return;
    };
    let (folder, file) = (libraries(), Path::new(&file));
    symlink(file, folder.path().join("libnvrtc.so")).unwrap();
    // NVRTC loads its built-ins from the same folder.
    let folders = std::env::join_paths([folder.path(), file.parent().unwrap()]).unwrap();
    let output =
        test_process("kernels::kernels_compile_and_load", 1, &folder).env("LD_LIBRARY_PATH", folders).output().unwrap();
    assert_passed("kernels::kernels_compile_and_load", &output);
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn kernels_compile_and_load() {
    // SAFETY: the library is NVRTC.
    assert!(unsafe { is_culib_present() });
    for arch in [(8, 0), (9, 0)] {
        let copies = COPIES.compile(arch).unwrap().to_src();
        assert!(copies.contains(".visible .entry copy_runs("), "{copies}");
        // The code contains no 64-bit division.
        assert!(!copies.contains("div.u64"), "{copies}");
        let arithmetic = ARITHMETIC.compile(arch).unwrap().to_src();
        for kernel in ["reduce", "report_outcomes", "cast"] {
            assert!(arithmetic.contains(&format!(".visible .entry {kernel}(")), "{kernel}");
        }
        // No operation is fused or may be fused later, no operation flushes subnormals to zero or divides
        // approximately, and no register is spilled.
        for unwanted in ["fma.", "mul.f", "add.f", ".ftz", "div.approx", "div.full", ".local"] {
            assert!(!arithmetic.contains(unwanted), "{unwanted}");
        }
        // An access of 16 bytes is one instruction.
        for ptx in [copies, arithmetic] {
            assert!(ptx.contains("ld.global.nc.v4") && ptx.contains("st.global.wb.v4"), "{ptx}");
        }
    }
    // NVRTC 13 no longer supports the first architecture.
    for program in [COPIES, ARITHMETIC] {
        assert!([(7, 0), (7, 5)].into_iter().any(|arch| program.compile(arch).is_ok()));
    }
    let unknown = COPIES.compile((99, 0)).unwrap_err();
    assert!(unknown.contains("NVRTC cannot compile copy_runs"), "{unknown}");
    // The stand-in loads the PTX as a driver would.
    let gpu = open(Kernels::Compiled, 0).unwrap();
    assert_eq!(matches!(gpu.packer, crate::gpu::Packer::Kernel(_)), gpu_stand_in::HAS_KERNELS);
    assert_eq!(gpu.arithmetic().is_ok(), gpu_stand_in::HAS_KERNELS);
}
