"""Describes where and what was measured: machine, kernel, file systems, commit, versions of the peers."""

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from measure import measure

PEERS = ("torch", "accelerate", "safetensors", "numpy")


def describe(dtshard, root):
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(root),
        "dtshard": output(dtshard, "--version"),
        "cpu": field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": int((field("/proc/meminfo", "MemTotal") or "0").split()[0]) * 1024,
        "kernel": platform.release(),
        "import_seconds": import_seconds(),
        "versions": {"Python": platform.python_version()} | {name: version(name) for name in PEERS},
    }


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def import_seconds():
    """Returns the seconds that every peer in Python needs for imports. Measures twice, because the first run reads files."""
    return [measure([sys.executable, "-c", "import torch.distributed.checkpoint"]).wall for _ in range(2)][1]


def commit(root):
    changed = output("git", "-C", root, "status", "--porcelain", "--untracked-files=no", "--", "src", "Cargo.lock")
    return output("git", "-C", root, "rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def field(path, name):
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return None


def file_system(path):
    return output("stat", "--file-system", "--format=%T", path).replace("ext2/ext3", "ext4")


def free_bytes(path):
    """Returns the free bytes of the file system; for tmpfs, at most the available memory."""
    free = shutil.disk_usage(path).free
    if file_system(path) == "tmpfs":
        free = min(free, int(field("/proc/meminfo", "MemAvailable").split()[0]) * 1024)
    return free
