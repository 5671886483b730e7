"""Measures what a command costs: wall, user and system time, peak memory, bytes read from disk.

The kernel counts times, the resident peak of one process, and bytes read (`wait4`). It does not count anonymous memory, so
this is sampled. With `tree`, samples are sums over the command and all processes that it starts, so the cost of a peer includes
all its processes. A sum of resident memory counts a shared page once for each process that maps it.
"""

import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

BLOCK = 512  # unit of ru_inblock, whatever the disk


@dataclass
class Run:
    """One run; bytes and seconds."""

    wall: float
    user: float
    system: float
    anonymous: int
    resident: int
    read: int

    def then(self, later):
        """Returns the costs of this run and a later one together: sums of times and reads, maxima of memory."""
        added = {name: getattr(self, name) + getattr(later, name) for name in ("wall", "user", "system", "read")}
        largest = {name: max(getattr(self, name), getattr(later, name)) for name in ("anonymous", "resident")}
        return Run(**added, **largest)


class Failed(Exception):
    """A command failed; the message is the last line of its stderr."""


def measure(argv, tree=False):
    """Runs a command; `tree` also watches the processes that it starts."""
    started = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    with process.stderr, Watch(process.pid, tree) as watch:
        try:
            errors = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - started
            process.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if process.returncode != 0:
        raise Failed(last_line(errors) or f"ended with {process.returncode}")
    resident = max(watch.resident, usage.ru_maxrss * 1024)
    return Run(wall, usage.ru_utime, usage.ru_stime, watch.anonymous, resident, usage.ru_inblock * BLOCK)


def last_line(errors):
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


class Watch:
    """Samples the memory of a process, or of its tree, until the `with` block ends."""

    def __init__(self, pid, tree):
        self.pid, self.tree = pid, tree
        self.anonymous = self.resident = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()

    def watch(self):
        # A tree is sampled less often: walking it takes longer, and peers run for seconds.
        while not self.done.wait(0.02 if self.tree else 0.004):
            sizes = [memory(pid) for pid in (descendants(self.pid) if self.tree else [self.pid])]
            self.anonymous = max(self.anonymous, sum(size[0] for size in sizes))
            self.resident = max(self.resident, sum(size[1] for size in sizes))


def descendants(pid):
    """Yields a process and all living processes that it started."""
    yield pid
    try:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from descendants(int(child))
    except OSError:  # the process ended in the meantime
        pass


def memory(pid):
    """Returns the anonymous and resident bytes of a process; zeros if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 if name in fields else 0 for name in ("RssAnon", "VmRSS"))


def files(path):
    """All files at or below a path."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def size(path):
    return sum(file.stat().st_size for file in files(path))


def drop_cache(path):
    """Takes clean pages of all files out of the page cache; needs no privilege."""
    for file in files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
