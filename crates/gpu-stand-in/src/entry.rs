//! What a function of a C library is here: a body in Rust, of which the caller sees a code, and what is put in its places.

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

/// In all libraries 0 is success.
pub fn code<Code: Default>(body: impl FnOnce() -> Result<(), Code>) -> Code {
    body().err().unwrap_or_default()
}

/// The caller has given no place that a result could be put in.
pub struct NoPlace;

/// Writes what a function returns to where the caller wants it.
pub fn put<T>(place: *mut T, value: T) -> Result<(), NoPlace> {
    if place.is_null() || !place.is_aligned() {
        return Err(NoPlace);
    }
    // SAFETY: as in C, the caller of the library has a T there.
    unsafe { place.write(value) };
    Ok(())
}
