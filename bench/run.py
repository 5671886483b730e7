"""Measure dtshard side by side with `cp -r` and PyTorch's own converter on one checkpoint: `run.py`.

Commands run in turn (A B A B ...), after one warm-up each, with the source in the page cache. Prints Markdown: medians
of wall, user and system time, peak anonymous and peak resident memory, and the median ratio to the `cp` run just before.
Needs a Python with torch (tests/interop/requirements.txt) and a release build of dtshard.
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


def pairs(name, command, target, copy, copy_target, count):
    """Runs of a command, each right after a run of cp."""
    runs, ratios, copies = [], [], []
    for index in range(count + 1):
        clear(copy_target)
        reference = measure(copy)
        clear(copy_target)
        clear(target)
        run = measure(command)
        if index > 0:
            runs.append(run)
            copies.append(reference)
            ratios.append(run.wall / reference.wall)
    clear(target)
    return name, runs, ratios, copies


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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/dev/shm/dtshard-bench", help="where to work; tmpfs measures pure work")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--dtshard", default=ROOT / "target/release/dtshard")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint for the next run")
    args = parser.parse_args()

    work = Path(args.directory)
    source = work / f"source-{args.gigabytes:g}GB-{args.ranks}"
    if not source.exists():
        work.mkdir(parents=True, exist_ok=True)
        make = [sys.executable, HERE / "make_checkpoint.py", source]
        subprocess.run([*make, "--gigabytes", str(args.gigabytes), "--ranks", str(args.ranks)], check=True)
    size = sum(file.stat().st_size for file in source.iterdir())
    copy_target, target, whole = work / "copy", work / "target", work / "whole.pt"
    copy = ["cp", "-r", "--reflink=never", source, copy_target]
    dtshard = [args.dtshard]
    quiet = ["--no-sync", "-q"]
    mesh = ["--mesh", f"fsdp={args.ranks}"]
    cases = [
        ("consolidate to safetensors", [*dtshard, "consolidate", source, target, *quiet], target, args.pairs),
        ("reshard S(0) to S(1)", [*dtshard, "reshard", source, target, *mesh, "--placements", "S(1)", *quiet], target, args.pairs),
        ("unshard to torch", [*dtshard, "unshard", source, whole, *quiet], whole, args.pairs),
        (
            "PyTorch dcp_to_torch",
            [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", source, whole],
            whole,
            min(args.pairs, 3),
        ),
    ]
    results = [pairs(name, command, out, copy, copy_target, count) for name, command, out, count in cases]

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    print(f"{size / 1e9:.2f} GB over {args.ranks} ranks; {os.cpu_count()} cores ({cpu_name()}), commit {commit}\n")
    print("| command | wall | user | system | peak anonymous | peak resident | ratio to cp (spread) |")
    print("|---|---|---|---|---|---|---|")
    print(row("`cp -r --reflink=never`", [run for result in results for run in result[3]]))
    for name, runs, ratios, _ in results:
        print(row(name, runs, ratios))
    if not args.keep:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
