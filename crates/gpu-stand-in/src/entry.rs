//! C functions with bodies in Rust. A function returns a code, and writes results to the places to which the caller's
//! pointers point.

/// Declares functions of a library. The bodies return `Result<(), Code>`; `Code` is the type with this name in scope.
macro_rules! entries {
    ($($(#[$about:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$about])*
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> Code {
                $crate::entry::code(move || $body)
            }
        )*
    };
}
pub(crate) use entries;

/// Converts the result of a body to a code. Code 0 is success in all libraries.
pub fn code<Code: Default>(body: impl FnOnce() -> Result<(), Code>) -> Code {
    body().err().unwrap_or_default()
}

/// The error for a null pointer to a result.
pub struct NoPlace;

/// Writes a result to the place to which the caller's pointer points.
pub fn put<T>(place: *mut T, value: T) -> Result<(), NoPlace> {
    if place.is_null() || !place.is_aligned() {
        return Err(NoPlace);
    }
    // SAFETY: as in C, the caller of the library has a `T` there.
    unsafe { place.write(value) };
    Ok(())
}
