//! C functions whose bodies are written in Rust. A function returns a code, and writes its results to addresses that
//! the caller passes.

/// Declares C functions of a library. Their bodies return `Result<(), Code>`; `Code` is the type of this name where the
/// macro is used.
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

/// Runs the body of a function, and converts its result to a code. Code 0 is success in all libraries.
pub fn code<Code: Default>(body: impl FnOnce() -> Result<(), Code>) -> Code {
    body().err().unwrap_or_default()
}

/// The error if the address for a result is null or not aligned.
pub struct NoPlace;

/// Writes a result of a call to the address `place`, which the caller has passed.
pub fn put<T>(place: *mut T, value: T) -> Result<(), NoPlace> {
    if place.is_null() || !place.is_aligned() {
        return Err(NoPlace);
    }
    // SAFETY: as in C, the caller of the library guarantees that the address is valid for a `T`.
    unsafe { place.write(value) };
    Ok(())
}
