//! C functions with bodies in Rust. The caller gets a code, and results in the places that its pointers name.

/// Declares functions of a library, whose bodies return `Result<(), Code>`, with the `Code` that is in scope.
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

/// The error if a pointer for a result is null.
pub struct NoPlace;

/// Writes a result to the place that the caller's pointer names.
pub fn put<T>(place: *mut T, value: T) -> Result<(), NoPlace> {
    if place.is_null() || !place.is_aligned() {
        return Err(NoPlace);
    }
    // SAFETY: as in C, the caller of the library has a `T` there.
    unsafe { place.write(value) };
    Ok(())
}
