"""Finds the libraries for GPUs: the driver, NCCL and NVRTC, from the system or from Python packages."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Folders that may have the libraries but are not in the path of the loader.
SYSTEM = ("usr/local/cuda*/lib64", "usr/local/cuda*/targets/*/lib", "usr/local/nvidia/lib64", "usr/local/nvidia/lib",
          "usr/lib/*-linux-gnu", "usr/lib64", "usr/lib/wsl/lib")


def packages():
    """Returns the folders of packages of this Python, and of `python3` and `python` on the path."""
    others = dict.fromkeys(filter(None, map(shutil.which, ("python3", "python"))))
    paths = (lines(other, "-c", "import sys; print(*sys.path, sep='\\n')") for other in others)
    names = [*sys.path, *(name for names in paths for name in names)]
    return [Path(name) for name in dict.fromkeys(filter(None, names))]


def folders():
    """Returns the folders that may have the libraries, the most likely first, without folders of driver stubs."""
    found = loader_path()
    for folder in packages():
        found += sorted(folder.glob("nvidia/*/lib")) + [folder / "torch/lib"]
    found += [Path(os.environ[name]) / "lib64" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for pattern in SYSTEM:
        found += sorted(Path("/").glob(pattern), reverse=True)
    return list(dict.fromkeys(found))


def loader_path():
    """Returns LD_LIBRARY_PATH without folders of driver stubs: a program that loads a stub finds no device."""
    names = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    return [path for path in map(Path, names) if path.name != "stubs"]


def installed(name, among):
    """Returns all files with this name in these folders."""
    found = [(folder / name).resolve() for folder in among if readable(folder / name)]
    return list(dict.fromkeys(found))


def readable(path):
    try:
        return path.is_file()
    except OSError:
        return False


def version(library, function, numbers=1):
    """Returns the numbers that a library's version function gives, or () if the library cannot be loaded."""
    try:
        values = [ctypes.c_int() for _ in range(numbers)]
        code = getattr(ctypes.CDLL(str(library)), function)(*map(ctypes.byref, values))
        return () if code else tuple(value.value for value in values)
    except (OSError, AttributeError):
        return ()


def nccl_version(library):
    return next(((code // 10000, code % 10000 // 100, code % 100) for code in version(library, "ncclGetVersion")), ())


def driver_version(library):
    """Returns the newest version of CUDA that the driver supports."""
    return next(((code // 1000, code % 1000 // 10) for code in version(library, "cuDriverGetVersion")), ())


def nvrtc_version(library):
    return version(library, "nvrtcVersion", 2)


def nvrtc_for(driver, among):
    """Returns the newest NVRTC whose PTX the driver accepts, else the oldest NVRTC, or None if there is none."""
    found = filter(nvrtc_version, installed("libnvrtc.so.13", among) + installed("libnvrtc.so.12", among))
    known = sorted(found, key=nvrtc_version)
    return next((path for path in reversed(known) if nvrtc_version(path) <= driver), (*known, None)[0])


def dotted(numbers):
    return ".".join(map(str, numbers)) or "unknown"


def lines(*command):
    """Returns the output lines of a program, or none if it does not exist or does not end."""
    try:
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def link(target, name):
    name.parent.mkdir(parents=True, exist_ok=True)
    name.unlink(missing_ok=True)
    name.symlink_to(target)
