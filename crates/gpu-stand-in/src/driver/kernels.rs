//! Modules and kernel launches. A module is PTX text. If the PTX text names a kernel, the stand-in runs the [compiled
//! kernel](crate::kernels) of this name.

use std::ffi::{CStr, c_char, c_uint, c_void};

use super::{Code, copies, current, entries, put, started, stream};
use crate::kernels::{ARGUMENTS, Kernel, Launch};

/// The maximum number of threads in a block.
const LARGEST_BLOCK: u32 = 1024;

/// Returns true if PTX text declares a kernel with this name.
fn declares(ptx: &str, name: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    ptx.split(".entry").skip(1).any(|text| text.trim_start().split(|c| !is_name(c)).next() == Some(name))
}

entries! {
    fn cuModuleLoadData(handle: *mut usize, image: *const c_char) {
        current()?;
        if image.is_null() {
            return Err(Code::ERROR_INVALID_VALUE);
        }
        // SAFETY: as in C, the caller of the library guarantees a string at `image`.
        let ptx = unsafe { CStr::from_ptr(image) }.to_string_lossy().into_owned();
        if !ptx.contains(".version") || !ptx.contains(".target") {
            return Err(Code::ERROR_INVALID_IMAGE);
        }
        let mut tables = started()?.tables();
        let name = tables.handle();
        tables.modules.insert(name, ptx);
        put(handle, name)
    }

    fn cuModuleUnload(handle: usize) {
        started()?.tables().modules.remove(&handle).map(drop).ok_or(Code::ERROR_INVALID_HANDLE)
    }

    fn cuModuleGetFunction(handle: *mut usize, module: usize, name: *const c_char) {
        current()?;
        if name.is_null() {
            return Err(Code::ERROR_INVALID_VALUE);
        }
        // SAFETY: as in C, the caller of the library guarantees a string at `name`.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::ERROR_NOT_FOUND)?;
        let mut tables = started()?.tables();
        if !declares(tables.modules.get(&module).ok_or(Code::ERROR_INVALID_HANDLE)?, name) {
            return Err(Code::ERROR_NOT_FOUND);
        }
        let Some(kernel) = Kernel::named(name) else {
            eprintln!("gpu-stand-in: the kernel {name} is not known, or there was no C++ compiler");
            return Err(Code::ERROR_NOT_FOUND);
        };
        let function = tables.handle();
        tables.functions.insert(function, kernel);
        put(handle, function)
    }

    fn cuLaunchKernel(
        function: usize,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        _shared_bytes: c_uint,
        handle: usize,
        arguments: *const *const c_void,
        extra: *const *const c_void,
    ) {
        let (stream, device) = stream(handle)?;
        let kernel = *started()?.tables().functions.get(&function).ok_or(Code::ERROR_INVALID_HANDLE)?;
        // Only launches with one dimension are supported.
        let flat = [grid_y, grid_z, block_y, block_z] == [1; 4];
        if !flat || grid_x == 0 || block_x == 0 || block_x > LARGEST_BLOCK || arguments.is_null() || !extra.is_null() {
            return Err(Code::ERROR_INVALID_VALUE);
        }
        let argument = |(at, bytes): (usize, &usize)| {
            // SAFETY: as in C, the caller of the library passes a pointer to each argument, which has this size.
            unsafe { std::slice::from_raw_parts((*arguments.add(at)).cast::<u8>(), *bytes) }.to_vec()
        };
        let values: Vec<Vec<u8>> = ARGUMENTS.iter().enumerate().map(argument).collect();
        stream.push(move || copies::on_device(device, || {
            kernel.run(&Launch { blocks: grid_x, threads: block_x, arguments: &values, heap: &device.heap })
        }));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_by_whole_names() {
        let ptx = ".version 8.0\n.visible .entry pack_16(\n\t.param .u64 a\n)\n.visible .entry unpack (";
        assert!(declares(ptx, "pack_16") && declares(ptx, "unpack"));
        assert!(!declares(ptx, "pack") && !declares(ptx, "entry"));
    }
}
