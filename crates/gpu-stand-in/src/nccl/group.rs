//! Groups of calls (`ncclGroupStart` to `ncclGroupEnd`): the calls of one thread in a group are queued in one step.

use std::cell::RefCell;
use std::sync::Arc;

use super::communicator::Communicator;
use super::operation::{self, Collected, Operation, What};
use super::{Answer, Code, refused};
use crate::machine::{self, Machine};

thread_local! {
    static GROUP: RefCell<GroupCall> = RefCell::default();
}

#[derive(Default)]
struct GroupCall {
    depth: usize,
    members: Vec<(Arc<Communicator>, usize, Operation)>,
    /// The error of the first invalid call in the group. If it is set, no call of the group runs.
    refused: Option<Code>,
}

pub fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

pub fn end() -> Answer {
    let group = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1)?;
        Some(if group.depth == 0 { std::mem::take(group) } else { GroupCall::default() })
    });
    let group = group.ok_or_else(|| refused(Code::INVALID_USAGE, "ncclGroupEnd without ncclGroupStart"))?;
    match group.refused {
        Some(code) => Err(code),
        None => queue(group.members),
    }
}

/// Adds a call to the current group of this thread. If there is no group, queues the call immediately.
pub fn add(communicator: &Arc<Communicator>, what: What, call: Collected) -> Answer {
    let stream = call.stream;
    let checked = communicator.ready().and_then(|()| Operation::new(communicator, what, call));
    let alone = GROUP.with_borrow_mut(|group| match checked {
        Ok(operation) if group.depth > 0 => {
            group.members.push((Arc::clone(communicator), stream, operation));
            Ok(None)
        }
        Ok(operation) => Ok(Some(operation)),
        Err(code) => {
            group.refused = group.refused.or((group.depth > 0).then_some(code));
            Err(code)
        }
    })?;
    alone.map_or(Ok(()), |operation| queue(vec![(Arc::clone(communicator), stream, operation)]))
}

fn queue(members: Vec<(Arc<Communicator>, usize, Operation)>) -> Answer {
    let Some((communicator, handle, _)) = members.first() else { return Ok(()) };
    let (communicator, handle) = (Arc::clone(communicator), *handle);
    if members.iter().any(|(other, stream, _)| !Arc::ptr_eq(other, &communicator) || *stream != handle) {
        return Err(refused(
            Code::INVALID_USAGE,
            "the stand-in does not support groups of several communicators or streams",
        ));
    }
    let unknown = || refused(Code::CUDA_ERROR, "there is no such stream");
    let stream = Machine::start().stream(handle).ok_or_else(unknown)?;
    if stream.device() != communicator.place().device {
        return Err(refused(Code::INVALID_USAGE, "the stream is of another device than the communicator"));
    }
    let operations: Vec<Operation> = members.into_iter().map(|(_, _, operation)| operation).collect();
    communicator.enter();
    let push = move |communicator: &Arc<Communicator>| {
        let communicator = Arc::clone(communicator);
        stream.push(move || {
            operation::run(&communicator, &operations);
            communicator.leave();
        });
    };
    if communicator.is_blocking() {
        push(&communicator);
        return Ok(());
    }
    // Queueing is delayed. So if a program does not wait, its next work is queued before this work.
    let (delay, device) = (Machine::start().settings.delay, machine::current());
    communicator.start(move |this| {
        machine::make_current(device);
        std::thread::sleep(delay);
        push(this);
    });
    Err(Code::IN_PROGRESS)
}
