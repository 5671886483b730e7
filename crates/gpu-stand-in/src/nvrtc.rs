//! `libnvrtc`: the functions that are used, as `nvrtc.h` declares them. The [kernels](crate::kernels) are compiled already, so
//! what comes of a text are the names of those that it has.

use std::ffi::{CStr, CString, c_char, c_int};

use crate::kernels::Kernel;

/// `nvrtcResult`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
struct Code(c_int);

impl Code {
    const SUCCESS: Self = Self(0);
    const INVALID_INPUT: Self = Self(3);
    const INVALID_PROGRAM: Self = Self(4);
    const COMPILATION: Self = Self(6);
}

/// What a handle points to.
struct Program {
    text: String,
    ptx: CString,
    log: CString,
}

type Handle = *mut Program;

impl Program {
    fn compile(&mut self) -> Result<(), Code> {
        let names: Vec<&str> = self.text.split("extern \"C\" __global__ void ").skip(1).filter_map(name).collect();
        if let Some(unknown) = names.iter().find(|name| Kernel::named(name).is_none()) {
            let why = format!("the kernel {unknown} is not known, or there was no compiler of C++");
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

/// # Safety
/// As in C, the caller has the handle of a program, or null.
unsafe fn program<'a>(handle: Handle) -> Result<&'a mut Program, Code> {
    // SAFETY: promised by the caller.
    unsafe { handle.as_mut() }.ok_or(Code::INVALID_PROGRAM)
}

/// # Safety
/// As in C, the caller has room for a T there, or null.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() || !place.is_aligned() {
        return Err(Code::INVALID_INPUT);
    }
    // SAFETY: promised by the caller.
    unsafe { place.write(value) };
    Ok(())
}

/// # Safety
/// As in C, the caller has room for all of it.
unsafe fn put_text(place: *mut c_char, text: &CStr) -> Result<(), Code> {
    let bytes = text.to_bytes_with_nul();
    if place.is_null() {
        return Err(Code::INVALID_INPUT);
    }
    // SAFETY: promised by the caller.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), place, bytes.len()) };
    Ok(())
}

macro_rules! entries {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> Code {
                // SAFETY: as in C, the caller of the library passes what its header says.
                let done: Result<(), Code> = (|| unsafe { $body })();
                done.err().unwrap_or(Code::SUCCESS)
            }
        )*
    };
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
        let text = CStr::from_ptr(text).to_string_lossy().into_owned();
        let program = Program { text, ptx: CString::default(), log: CString::default() };
        put(handle, Box::into_raw(Box::new(program)))
    }

    fn nvrtcCompileProgram(handle: Handle, _count: c_int, _options: *const *const c_char) {
        program(handle)?.compile()
    }

    fn nvrtcGetPTXSize(handle: Handle, size: *mut usize) {
        put(size, program(handle)?.ptx.count_bytes() + 1)
    }

    fn nvrtcGetPTX(handle: Handle, ptx: *mut c_char) {
        put_text(ptx, &program(handle)?.ptx)
    }

    fn nvrtcGetProgramLogSize(handle: Handle, size: *mut usize) {
        put(size, program(handle)?.log.count_bytes() + 1)
    }

    fn nvrtcGetProgramLog(handle: Handle, log: *mut c_char) {
        put_text(log, &program(handle)?.log)
    }

    fn nvrtcDestroyProgram(handle: *mut Handle) {
        let place = handle.as_mut().ok_or(Code::INVALID_PROGRAM)?;
        program(*place)?;
        drop(Box::from_raw(std::mem::replace(place, std::ptr::null_mut())));
        Ok(())
    }
}
