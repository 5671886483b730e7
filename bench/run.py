"""Measure dtshard side by side with `cp -r` and PyTorch's own converter: `run.py`, `run.py --only flat`.

Commands run in turn (A B A B ...), after one warm-up each, with the source in the page cache. Prints Markdown: medians
of wall, user and system time, peak anonymous and peak resident memory, and the median ratio to the `cp` run just before,
which copies the same source. Needs a Python with torch (tests/interop/requirements.txt) and a release build of dtshard.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclass
class Run:
    wall: float
    user: float
    system: float
    peak_anonymous: int
    peak_resident: int


def anonymous_bytes(pid):
    """Anonymous memory of a process now; page cache and mapped files apart."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (OSError, ProcessLookupError):
        pass
    return 0


def measure(command):
    """Run a command and watch its memory."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak = 0
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.004):
            peak = max(peak, anonymous_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    done.set()
    watcher.join()
    if status != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{error.decode()}")
    return Run(wall, usage.ru_utime, usage.ru_stime, peak, usage.ru_maxrss * 1024)


def clear(path):
    shutil.rmtree(path, ignore_errors=True)
    Path(path).unlink(missing_ok=True)


@dataclass
class Case:
    name: str
    source: Path
    command: list
    target: Path
    pairs: int


def pairs(case, copy_target):
    """Runs of a command, each right after a run of cp."""
    copy = ["cp", "-r", "--reflink=never", case.source, copy_target]
    runs, ratios, copies = [], [], []
    for index in range(case.pairs + 1):
        clear(copy_target)
        reference = measure(copy)
        clear(copy_target)
        clear(case.target)
        run = measure(case.command)
        if index > 0:
            runs.append(run)
            copies.append(reference)
            ratios.append(run.wall / reference.wall)
    clear(case.target)
    return case.name, runs, ratios, copies


def median(runs, field):
    return statistics.median(getattr(run, field) for run in runs)


def row(name, runs, ratios=None):
    ratio = "1" if ratios is None else f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    cells = [
        name,
        f"{median(runs, 'wall'):.2f} s",
        f"{median(runs, 'user'):.2f} s",
        f"{median(runs, 'system'):.2f} s",
        f"{median(runs, 'peak_anonymous') / 1e6:.0f} MB",
        f"{median(runs, 'peak_resident') / 1e6:.0f} MB",
        ratio,
    ]
    return "| " + " | ".join(cells) + " |"


def cpu_name():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


class Bench:
    """What is measured, from which sources; a source is made for the first case that has it."""

    def __init__(self, args):
        self.args = args
        self.work = Path(args.directory)
        self.target, self.whole = self.work / "target", self.work / "whole.pt"

    def dcp(self, *more):
        args = self.args
        words = [f"source-{args.gigabytes:g}GB-{args.ranks}", *(word.strip("-") for word in more)]
        source = self.work / "-".join(words)
        if not source.exists():
            self.work.mkdir(parents=True, exist_ok=True)
            make = [sys.executable, HERE / "make_checkpoint.py", source, *more]
            subprocess.run([*make, "--gigabytes", str(args.gigabytes), "--ranks", str(args.ranks)], check=True)
        return source

    def flat(self, source, views):
        flat = source.with_name(f"{source.name}-{'views' if views else 'flat'}")
        if not flat.exists():
            subprocess.run(self.flatten(source, views, flat), check=True)
        return flat

    def flatten(self, source, views, target):
        layout = source.with_name(f"{source.name}.flat_layout.json")
        how = ["--flat-layout", layout, f"--use-orig-params={str(views).lower()}"]
        return [self.args.dtshard, "flatten", source, target, *how, *QUIET]

    def case(self, name, source, verb, *more, count=None):
        target = self.whole if verb == "unshard" else self.target
        command = [self.args.dtshard, verb, source, target, *more, *QUIET]
        return Case(name, source, command, target, count or self.args.pairs)

    def dtensors(self):
        source, mesh = self.dcp(), ["--mesh", f"fsdp={self.args.ranks}"]
        torch = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", source, self.whole]
        yield self.case("consolidate to safetensors", source, "consolidate")
        yield self.case("reshard S(0) to S(1)", source, "reshard", *mesh, "--placements", "S(1)")
        yield self.case("unshard to torch", source, "unshard")
        yield Case("PyTorch `dcp_to_torch`", source, torch, self.whole, min(self.args.pairs, 3))

    def flat_parameters(self):
        source, ranks = self.dcp(), self.args.ranks
        fewer, mesh = ["--world-size", str(ranks * 3 // 4)], ["--mesh", f"fsdp={ranks // 2}"]
        for kind, views in (("flat", False), ("views", True)):
            command = self.flatten(source, views, self.target)
            yield Case(f"flatten DCP to {kind}", source, command, self.target, self.args.pairs)
        for kind, views in (("flat", False), ("views", True)):
            flat = self.flat(source, views)
            yield self.case(f"flatten {kind} {ranks} to {fewer[1]} ranks", flat, "flatten", *fewer)
            yield self.case(f"consolidate {kind} to safetensors", flat, "consolidate")
            yield self.case(f"unshard {kind} to torch", flat, "unshard")
            yield self.case(f"reshard {kind} to DCP on {ranks // 2} ranks", flat, "reshard", "--to", "dcp", *mesh)
            clear(flat)
        flat = self.flat(self.dcp("--adamw"), True)
        yield self.case(f"flatten views and AdamW {ranks} to {fewer[1]} ranks", flat, "flatten", *fewer)
        yield self.case("unshard views and AdamW to torch", flat, "unshard", "--series", "all")


    def layouts(self):
        source, tp, dp = self.dcp(), 2, self.args.ranks // 2
        grid = ["--mesh", f"dp={dp},tp={tp}"]
        yield self.case(f"plan llama on {dp} x {tp}, DTensors", source, "reshard", *grid, "--plan", "llama", *RANKS)
        yield self.case(f"plan llama on {dp} x {tp}, local", source, "reshard", *grid, "--plan", "llama", *LOCAL)
        made = self.made(source, "local", *grid, "--plan", "llama", *LOCAL)
        yield self.case("consolidate local to safetensors", made, "consolidate")
        yield self.case(f"reshard local to DCP on {dp} ranks", made, "reshard", "--to", "dcp", "--mesh", f"fsdp={dp}")
        clear(made)
        summed = ["--placements", "P(sum),S(0)"]
        made = self.made(source, "summed", "--mesh", f"dp=2,tp={dp}", *summed, *RANKS)
        yield self.case("consolidate 2 summands of each to safetensors", made, "consolidate")
        yield self.case("keep 2 summands of each, S(0) to S(1)", made, "reshard", "--placements", "P(sum),S(1)")
        clear(made)

    def made(self, source, name, *options):
        made = source.with_name(f"{source.name}-{name}")
        if not made.exists():
            subprocess.run([self.args.dtshard, "reshard", source, made, *options, *QUIET], check=True)
        return made


QUIET = ["--no-sync", "-q"]
RANKS, LOCAL = ["--to", "torch-ranks"], ["--to", "local"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/dev/shm/dtshard-bench", help="where to work; tmpfs measures pure work")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--only", choices=["dtensors", "flat", "layouts"], help="one group of cases")
    parser.add_argument("--dtshard", default=ROOT / "target/release/dtshard")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint for the next run")
    args = parser.parse_args()

    bench = Bench(args)
    size = sum(file.stat().st_size for file in bench.dcp().iterdir())
    groups = {"dtensors": bench.dtensors, "flat": bench.flat_parameters, "layouts": bench.layouts}
    cases = (case for name, group in groups.items() if args.only in (None, name) for case in group())
    results = [pairs(case, bench.work / "copy") for case in cases]

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    print(f"{size / 1e9:.2f} GB over {args.ranks} ranks; {os.cpu_count()} cores ({cpu_name()}), commit {commit}\n")
    print("| command | wall | user | system | peak anonymous | peak resident | ratio to cp (spread) |")
    print("|---|---|---|---|---|---|---|")
    print(row("`cp -r --reflink=never`", [run for result in results for run in result[3]]))
    for name, runs, ratios, _ in results:
        print(row(name, runs, ratios))
    if not args.keep:
        shutil.rmtree(bench.work)


if __name__ == "__main__":
    main()
