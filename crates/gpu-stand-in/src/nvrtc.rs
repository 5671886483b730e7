//! `libnvrtc`: the functions that `dtshard` uses, as `nvrtc.h` declares them. The [kernels](crate::kernels) are
//! compiled already, so the generated PTX contains only the names of the kernels in the source.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use crate::entry::{self, entries};
use crate::kernels::Kernel;

/// An error code of NVRTC: `nvrtcResult`. Code 0 is success.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
struct Code(c_int);

impl Code {
    const INVALID_INPUT: Self = Self(3);
    const INVALID_PROGRAM: Self = Self(4);
    const COMPILATION: Self = Self(6);
}

type Answer<T = ()> = Result<T, Code>;

/// A program, to which the caller has a handle.
struct Program {
    text: String,
    ptx: CString,
    log: CString,
}

type Handle = *mut Program;

impl Program {
    fn compile(&mut self) -> Answer {
        let names: Vec<&str> = self.text.split("extern \"C\" __global__ void ").skip(1).filter_map(name).collect();
        if let Some(unknown) = names.iter().find(|name| Kernel::named(name).is_none()) {
            let why = format!("the kernel {unknown} is not known, or there was no C++ compiler");
            self.log = CString::new(why).unwrap_or_default();
            return Err(Code::COMPILATION);
        }
        let entries = names.iter().flat_map(|name| [".visible .entry ", *name, "(\n)\n{ ret; }\n"]);
        let ptx: String = std::iter::once(".version 8.0\n.target sm_80\n").chain(entries).collect();
        self.ptx = CString::new(ptx).unwrap_or_default();
        Ok(())
    }
}

fn name(text: &str) -> Option<&str> {
    text.split('(').next()
}

fn known<'a>(handle: Handle) -> Answer<&'a mut Program> {
    // SAFETY: as in C, the caller of the library passes the handle of a program, or null.
    unsafe { handle.as_mut() }.ok_or(Code::INVALID_PROGRAM)
}

fn put<T>(place: *mut T, value: T) -> Answer {
    entry::put(place, value).map_err(|_| Code::INVALID_INPUT)
}

fn put_text(place: *mut c_char, text: &CStr) -> Answer {
    let bytes = text.to_bytes_with_nul();
    if place.is_null() {
        return Err(Code::INVALID_INPUT);
    }
    // SAFETY: as in C, the caller of the library guarantees space for as many bytes as the size function returned.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr().cast(), place, bytes.len()) };
    Ok(())
}

entries! {
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) {
        put(major, 13)?;
        put(minor, 0)
    }

    fn nvrtcCreateProgram(
        handle: *mut Handle,
        text: *const c_char,
        _name: *const c_char,
        _headers: c_int,
        _texts: *const *const c_char,
        _names: *const *const c_char,
    ) {
        if text.is_null() {
            return Err(Code::INVALID_INPUT);
        }
        // SAFETY: as in C, the caller of the library guarantees a string at this address.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        let program = Program { text, ptx: CString::default(), log: CString::default() };
        put(handle, Box::into_raw(Box::new(program)))
    }

    fn nvrtcCompileProgram(handle: Handle, _count: c_int, _options: *const *const c_char) {
        known(handle)?.compile()
    }

    fn nvrtcGetPTXSize(handle: Handle, size: *mut usize) {
        put(size, known(handle)?.ptx.count_bytes() + 1)
    }

    fn nvrtcGetPTX(handle: Handle, ptx: *mut c_char) {
        put_text(ptx, &known(handle)?.ptx)
    }

    fn nvrtcGetProgramLogSize(handle: Handle, size: *mut usize) {
        put(size, known(handle)?.log.count_bytes() + 1)
    }

    fn nvrtcGetProgramLog(handle: Handle, log: *mut c_char) {
        put_text(log, &known(handle)?.log)
    }

    fn nvrtcDestroyProgram(handle: *mut Handle) {
        // SAFETY: as in C, the caller of the library guarantees a handle at this address.
        let place = unsafe { handle.as_mut() }.ok_or(Code::INVALID_PROGRAM)?;
        let program: *mut Program = known(*place)?;
        *place = ptr::null_mut();
        // SAFETY: `nvrtcCreateProgram` created the program, and its only handle was set to null.
        drop(unsafe { Box::from_raw(program) });
        Ok(())
    }
}
