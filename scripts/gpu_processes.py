"""Runs programs at the same time, and collects their output."""

import os
import signal
import subprocess
import tempfile
import time

# The number of characters that are kept from the end of an output.
LONGEST = 20_000


class Failed(Exception):
    """A failure: the reason, the output of the failed program so far, and a log of all programs."""

    def __init__(self, why, out="", log=""):
        super().__init__(why)
        self.out, self.log = out, log


def together(commands, environments, limit):
    """Runs commands at the same time. Returns the seconds until the last one ended, and each stdout and stderr."""
    begun = time.monotonic()
    files = [[tempfile.TemporaryFile() for _ in "oe"] for _ in commands]
    started = []
    is_late = False
    try:
        # Each command gets its own process group, so that the processes that it starts can be ended, too.
        for command, environment, (out, err) in zip(commands, environments, files):
            started.append(subprocess.Popen(list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, stdout=out,
                                            stderr=err, preexec_fn=os.setpgrp))
        # If one process fails, the others may wait for it for some time.
        for process in started:
            process.wait(max(0.1, begun + limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        running = [process.poll() is None for process in started]
        for process, is_running in zip(started, running):
            if is_running:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begun
    said = [tuple(map(text, pair)) for pair in files]
    # A process that failed by itself is reported before one that had to be killed.
    wrong = sorted((is_running, nth) for nth, is_running in enumerate(running) if started[nth].returncode)
    if wrong:
        was_running, nth = wrong[0]
        why = f"still running after {limit:.0f} s" if was_running else f"process {nth} ended with {started[nth].returncode}"
        if is_late and not was_running:
            why += f", and others were still running after {limit:.0f} s"
        last_lines = " / ".join((said[nth][1].strip() or said[nth][0].strip()).splitlines()[-3:])
        raise Failed(f"{why}: {last_lines or 'it said nothing'}", said[nth][0], log(commands, started, said))
    return seconds, said


def text(file):
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


def log(commands, started, said):
    parts = []
    for command, process, (out, err) in zip(commands, started, said):
        parts += [f"$ {' '.join(map(str, command))}", f"ended with {process.returncode}", out[-LONGEST:], err[-LONGEST:]]
    return "\n".join(filter(None, parts))
