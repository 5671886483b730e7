//! Compiles the GPU kernels of `dtshard` for the CPU.

fn main() {
    println!("cargo:rerun-if-changed=src/kernels.cpp");
    println!("cargo:rerun-if-changed=../../src/gpu/kernels");
    println!("cargo:rustc-check-cfg=cfg(no_kernels)");
    let mut build = cc::Build::new();
    build.cpp(true).cpp_link_stdlib(None).std("c++17").opt_level(1).debug(false).warnings(false);
    // The flags make the CPU code behave like device code: kernels on a device do not fuse operations, and kernels read
    // the same bytes as different types.
    for flag in ["-ffp-contract=off", "-fno-strict-aliasing", "-fno-exceptions", "-fno-rtti", "-w"] {
        build.flag(flag);
    }
    if let Err(error) = build.file("src/kernels.cpp").try_compile("kernels") {
        println!("cargo:warning=without kernels: {error}");
        println!("cargo:rustc-cfg=no_kernels");
        // This file does not exist, so cargo runs this script again at each build, until a compiler is found.
        println!("cargo:rerun-if-changed=a-compiler-of-c++");
    }
}
