//! Streams and events, which callers identify by handles.

use std::ffi::c_uint;
use std::sync::Arc;

use super::{Answer, Code, current, entries, put, started, stream};
use crate::machine;
use crate::stream::{Event, Stream};

fn event(handle: usize) -> Answer<Arc<Event>> {
    current()?;
    started()?.tables().events.get(&handle).cloned().ok_or(Code::ERROR_INVALID_HANDLE)
}

entries! {
    fn cuStreamCreate(handle: *mut usize, _flags: c_uint) {
        current()?;
        let ordinal = machine::current().ok_or(Code::ERROR_INVALID_CONTEXT)?;
        let new = Stream::new(ordinal, started()?.settings.delay);
        let mut tables = started()?.tables();
        let name = tables.handle();
        tables.streams.insert(name, new);
        put(handle, name)
    }

    /// Destroys a stream. Work that is already queued on the stream still runs.
    fn cuStreamDestroy_v2(handle: usize) {
        started()?.tables().streams.remove(&handle).ok_or(Code::ERROR_INVALID_HANDLE)?.close();
        Ok(())
    }

    fn cuStreamSynchronize(handle: usize) {
        stream(handle)?.0.synchronize();
        stream(handle).map(drop)
    }

    fn cuStreamQuery(handle: usize) {
        let idle = stream(handle)?.0.is_idle();
        stream(handle)?;
        if idle { Ok(()) } else { Err(Code::ERROR_NOT_READY) }
    }

    fn cuStreamWaitEvent(handle: usize, awaited: usize, _flags: c_uint) {
        event(awaited)?.hold(&stream(handle)?.0);
        Ok(())
    }

    fn cuEventCreate(handle: *mut usize, _flags: c_uint) {
        current()?;
        let mut tables = started()?.tables();
        let name = tables.handle();
        tables.events.insert(name, Arc::default());
        put(handle, name)
    }

    fn cuEventDestroy_v2(handle: usize) {
        started()?.tables().events.remove(&handle).map(drop).ok_or(Code::ERROR_INVALID_HANDLE)
    }

    fn cuEventRecord(handle: usize, recorded: usize) {
        event(handle)?.record(&stream(recorded)?.0);
        Ok(())
    }

    fn cuEventQuery(handle: usize) {
        if event(handle)?.is_passed() { current().map(drop) } else { Err(Code::ERROR_NOT_READY) }
    }

    fn cuEventSynchronize(handle: usize) {
        event(handle)?.synchronize();
        current().map(drop)
    }
}
