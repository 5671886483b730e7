#!/usr/bin/env python3
"""Kills conversions at random moments, resumes and kills them again, and compares the final output.

    cargo build --release
    python3 tests/crash/crash.py target/release/dtshard --cases 200

Each case is one conversion by 1 to 4 processes. In each of its rounds any of them get KILL, TERM, USR1 or INT at a random
moment; the next round resumes, often with another number of processes, until one completes. After every round the
destination must be unchanged, or complete and correct; in the end it must equal the output of an undisturbed run, with
nothing left beside it, and the source must be unchanged.

A build with debug assertions writes its journal after every 256 KiB with DTSHARD_FAULT=none, which --hurried sets:

    CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true cargo build --release --target-dir target/hurried
    python3 tests/crash/crash.py target/hurried/release/dtshard --cases 200 --hurried --mb 60

Needs Python 3 only, and about six times --mb of space in --work.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIGNALS = [signal.SIGKILL] * 6 + [signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
# Valid exit codes: success, a refusal or a dead peer, retry, a signal that keeps no work, and a signal that arrived before
# its handler was installed.
ENDS = {0, 2, 75, 130, 138, 143, *(-number for number in SIGNALS)}
MOST_ROUNDS = 6


def write_source(folder, mb, rng):
    """A safetensors checkpoint of tensors from 4 KB to an eighth of the whole, and two sidecar files."""
    folder.mkdir()
    left, tensors, at = mb * 1_000_000, {}, 0
    while left > 0:
        rows = min(int(2 ** rng.uniform(2, 20)), mb * 1_000_000 // 8 // 1024, left // 1024 + 1)
        size = rows * 1024
        name = f"layers.{len(tensors):04}.weight"
        tensors[name] = {"dtype": "F32", "shape": [rows, 256], "data_offsets": [at, at + size]}
        at, left = at + size, left - size
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        block = b""
        for done in range(0, at, 1 << 20):
            if done % (16 << 20) == 0:
                block = struct.pack("<262144f", *(rng.uniform(-70_000, 70_000) for _ in range(262_144)))
            turned = done // (1 << 20) * 4 % len(block)
            file.write((block[turned:] + block[:turned])[: at - done])
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer.json").write_text("{}")


def digest(path):
    """Returns a hash of all files below a path, and their names."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = {}
    for file in files:
        if file.is_file():
            with open(file, "rb") as handle:
                name = "" if file == path else str(file.relative_to(path))
                found[name] = hashlib.file_digest(handle, "blake2b").hexdigest()
    return found


class Job:
    """A conversion, its output, and its duration without interruption."""

    def __init__(self, bench, verb, source, name, options):
        self.bench, self.verb, self.source, self.options = bench, verb, source, options
        self.target = bench.folder / name
        self.old = bench.folder / f".{name}.dtshard-old"
        self.seconds = 1e9
        for _ in range(2):
            bench.clear()
            began = time.monotonic()
            subprocess.run(self.command(["--resume"]), check=True, env=bench.env, stderr=subprocess.DEVNULL)
            self.seconds = min(self.seconds, time.monotonic() - began)
        self.wanted = digest(self.target)
        self.source_was = digest(source)
        bench.clear()

    def command(self, more):
        return [str(self.bench.binary), self.verb, str(self.source), str(self.target), "--quiet", *self.options, *more]

    def __str__(self):
        return " ".join([self.verb, self.target.name, *self.options])


class Bench:
    def __init__(self, args):
        self.binary = args.binary.resolve()
        self.rng = random.Random(args.seed)
        self.env = dict(os.environ, DTSHARD_FAULT="none") if args.hurried else dict(os.environ)
        self.work = Path(tempfile.mkdtemp(prefix="dtshard-crash-", dir=args.work))
        self.folder = self.work / "folder"
        self.folder.mkdir()
        self.count = collections.Counter()
        self.old_content = self.work / "old.safetensors"
        write_source(self.work / "small", 1, self.rng)
        shutil.copy(self.work / "small" / "model.safetensors", self.old_content)

    def clear(self):
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def jobs(self, mb):
        plain, dcp, ranks = (self.work / name for name in ["plain", "dcp", "ranks"])
        write_source(plain, mb, self.rng)
        make = [self.binary, "reshard", plain, "--no-sync", "--quiet", "--mesh", "fsdp=4", "--to"]
        subprocess.run([*make, "dcp", dcp], check=True)
        subprocess.run([*make, "torch-ranks", ranks], check=True)
        yield Job(self, "unshard", ranks, "out.pt", [])
        yield Job(self, "consolidate", dcp, "out", ["--dtype", "f16"])
        yield Job(self, "reshard", dcp, "out", ["--to", "torch-ranks", "--mesh", "dp=2,tp=2", "--placements", "R,S(1)"])
        yield Job(self, "reshard", ranks, "out", ["--to", "dcp", "--mesh", "fsdp=3"])

    def put_old(self, job):
        if job.target.suffix:
            shutil.copy(self.old_content, job.target)
        else:
            job.target.mkdir()
            shutil.copy(self.old_content, job.target / "model.safetensors")
        return digest(job.target)

    def state(self, job, old):
        """Returns the state of the destination. Any other state is a failure."""
        if not job.target.exists():
            if old is None:
                return "absent"
            assert digest(job.old) == old, "the old checkpoint is lost"
            return "old, aside"
        found = digest(job.target)
        if found == job.wanted:
            return "new"
        assert old is not None and found == old, f"{job.target} is neither old nor new"
        return "old"

    def case(self, job):
        rng = self.rng
        self.clear()
        old = self.put_old(job) if rng.random() < 0.3 else None
        fixed = ["--overwrite"] if old is not None else []
        for number in range(1, MOST_ROUNDS + 1):
            is_last = number == MOST_ROUNDS
            resumes = number > 1 or rng.random() < 0.5
            of = rng.randint(1, 4)
            more = fixed + (["--resume"] if resumes else [])
            more += rng.choice([[], ["--io", "read"], ["--io", "mmap"]]) + rng.choice([[], ["--threads", "1"]])
            more += ["--verify"] if rng.random() < 0.1 else []
            waits = rng.random() < 0.3
            ends = self.round(job, of, more, waits, 0 if is_last else rng.randint(1, of))
            state = self.state(job, old)
            self.count[f"after a round: {state}"] += 1
            self.count["rounds"] += 1
            if state == "new" and all(end == 0 for end in ends):
                break
            if is_last:
                # Parts of the last round may have been refused: they ran at the same time, and one was late.
                ended = subprocess.run(job.command(more), env=self.env, capture_output=True, text=True)
                assert ended.returncode == 0, f"{ends} {ended.stderr}"
        else:
            number = MOST_ROUNDS
        self.count[f"done in round {number}"] += 1
        # A run that was killed right after its rename left files that the next run removes.
        subprocess.run(job.command(fixed + ["--resume"]), check=True, env=self.env, stderr=subprocess.DEVNULL)
        assert digest(job.target) == job.wanted, f"{job.target} is wrong"
        left = sorted(path.name for path in self.folder.iterdir())
        assert left == [job.target.name], f"left behind: {left}"

    def round(self, job, of, more, waits, victims):
        """Starts all parts, sends signals to some, waits for all, and returns the exit codes."""
        rng = self.rng
        parts = [["--parts", str(of), "--part", str(index)] + ([] if waits else ["--no-wait"]) for index in range(of)]
        if of == 1:
            parts = [[]]
        processes = [
            subprocess.Popen(job.command(more + part), env=self.env, stderr=subprocess.PIPE, text=True) for part in parts
        ]
        self.count["processes"] += of
        began = time.monotonic()
        length = job.seconds * rng.choice([0.3, 1.0, 1.0, 1.5])
        plan = sorted((rng.random() * length, index) for index in rng.sample(range(of), victims))
        if len(plan) > 1 and rng.random() < 0.5:
            # All parts are killed at the same moment, like on a failing node.
            plan = [(plan[0][0], index) for _, index in plan]
        for when, index in plan:
            time.sleep(max(0.0, began + when - time.monotonic()))
            chosen = rng.choice(SIGNALS)
            if processes[index].poll() is None:
                processes[index].send_signal(chosen)
                self.count[f"sent {chosen.name}"] += 1
        # A process that waits for a part which was killed before it began would wait for minutes.
        limit = time.monotonic() + 10 * job.seconds + 2 if victims else float("inf")
        while any(process.poll() is None for process in processes):
            if time.monotonic() > limit:
                limit = time.monotonic() + 30
                for process in processes:
                    if process.poll() is None:
                        process.terminate()
                        self.count["sent SIGTERM to who waited"] += 1
            time.sleep(0.002)
        ends = []
        for process in processes:
            said = process.stderr.read()
            process.stderr.close()
            ends.append(process.returncode)
            self.count[f"ended with {process.returncode}"] += 1
            assert process.returncode in ENDS and "panicked" not in said, f"{process.args}: {process.returncode} {said}"
        return ends


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--mb", type=int, default=300, help="size of the source")
    parser.add_argument("--work", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hurried", action="store_true", help="record every step; for builds with debug assertions")
    args = parser.parse_args()
    bench = Bench(args)
    began = time.monotonic()
    try:
        jobs = list(bench.jobs(args.mb))
        for job in jobs:
            print(f"{job}: {job.seconds:.2f} s undisturbed", flush=True)
        for number in range(args.cases):
            job = jobs[number % len(jobs)]
            try:
                bench.case(job)
            except AssertionError as error:
                sys.exit(f"case {number} of seed {args.seed} ({job}): {error}\nkept: {bench.work}")
            if number % 20 == 19:
                print(f"{number + 1} cases, {time.monotonic() - began:.0f} s", flush=True)
        for job in jobs:
            assert digest(job.source) == job.source_was, f"{job.source} has changed"
    except BaseException:
        print(f"kept: {bench.work}", file=sys.stderr)
        raise
    shutil.rmtree(bench.work)
    sent = sum(count for what, count in bench.count.items() if what.startswith("sent"))
    print(f"{args.cases} cases, {sent} signals sent, {time.monotonic() - began:.0f} s: all came out right")
    for what, count in sorted(bench.count.items()):
        print(f"{count:6} {what}")


if __name__ == "__main__":
    main()
