"""The machine that `gpu-check` is on: its libraries, the environment of programs, and programs that run together."""

import ctypes
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Of a launcher that this may run under: its tasks are not the ranks here.
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "DTSHARD_")
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STAND_INS = 4


class Failed(Exception):
    """What did not do what it should: why, and what it wrote to stdout before."""

    def __init__(self, why, out=""):
        super().__init__(why)
        self.out = out


class Machine:
    """What is here, and the environment in which programs find it."""

    def __init__(self, folder, is_stand_in):
        self.folder, self.is_stand_in = folder, is_stand_in
        self.environment = {key: value for key, value in os.environ.items()
                            if key not in LAUNCHED and not key.startswith(LAUNCHERS)}
        paths = []
        if is_stand_in:
            self.nccl, self.gpus = folder / "libgpu_stand_in.so", STAND_INS
            self.environment["GPU_STAND_IN_DEVICES"] = str(self.gpus)
            self.environment["GPU_STAND_IN_DELAY_US"] = "20"
            (folder / "stand-in").mkdir(exist_ok=True)
            for name in ("libcuda.so", "libnvrtc.so"):
                link(self.nccl.resolve(), folder / "stand-in" / name)
            paths.append(folder / "stand-in")
        else:
            self.nccl, self.gpus = installed("libnccl.so.2"), len(lines("nvidia-smi", "-L"))
        self.nccl_version = nccl_version(self.nccl)
        if self.nccl:
            self.environment["DTSHARD_NCCL_LIB"] = str(self.nccl)
        if is_stand_in:
            self.nvrtc = folder / "stand-in/libnvrtc.so"
        else:
            self.nvrtc = installed("libnvrtc.so.13") or installed("libnvrtc.so.12")
        if self.nvrtc:
            paths.append(self.nvrtc.parent)
        paths += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
        self.environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, paths))

    def versions(self):
        """What the table is about."""
        smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        gpus = ["stand-ins, no GPU"] * self.gpus if self.is_stand_in else lines(*smi)
        yield "GPUs", f"{len(gpus)}", "; ".join(sorted(set(gpus)))
        yield "NVRTC", version(self.nvrtc, "nvrtcVersion", 2), self.nvrtc or ""
        yield "machine", f"{os.cpu_count()} CPUs", f"{platform.machine()}, Linux {platform.release()}"

    def of_rank(self, rank, ranks):
        """The environment of a rank of so many: those that share a GPU tell NCCL that they do."""
        environment = dict(self.environment)
        if ranks > self.gpus:
            environment["DTSHARD_SHARE_GPU"] = "1"
            if self.nccl_version >= (2, 30):
                environment.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MAX_CTAS="2")
            else:
                environment.update(NCCL_HOSTID=f"h{rank}", NCCL_IB_DISABLE="1", NCCL_MNNVL_ENABLE="0")
        return environment


def installed(name):
    """A library that pip installed, where this Python looks for packages."""
    for folder in map(Path, sys.path):
        for pattern in (f"nvidia/*/lib/{name}", f"torch/lib/{name}"):
            found = sorted(folder.glob(pattern))
            if found:
                return found[-1].resolve()
    return None


def version(library, function, numbers):
    """What a library calls itself: `13.2`, or why not."""
    if library is None:
        return "none"
    try:
        values = [ctypes.c_int() for _ in range(numbers)]
        getattr(ctypes.CDLL(str(library)), function)(*map(ctypes.byref, values))
        return ".".join(str(value.value) for value in values)
    except (OSError, AttributeError) as error:
        return f"none: {error}"


def nccl_version(library):
    code = version(library, "ncclGetVersion", 1)
    code = int(code) if code.isdigit() else 0
    return (code // 10000, code % 10000 // 100)


def lines(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def link(target, name):
    if name.is_symlink():
        name.unlink()
    name.symlink_to(target)


def together(commands, environments, limit):
    """Run commands at the same time; seconds until the last has ended, and what each wrote to stdout."""
    begun = time.monotonic()
    files = [(tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")) for _ in commands]
    started = [subprocess.Popen(list(map(str, command)), env=environment, stdout=out, stderr=err, start_new_session=True)
               for command, environment, (out, err) in zip(commands, environments, files)]
    is_late = False
    try:
        for process in started:
            process.wait(max(0.1, begun + limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begun
    said = []
    for pair in files:
        for file in pair:
            file.seek(0)
        said.append([file.read() for file in pair])
    wrong = [(nth, process.returncode) for nth, process in enumerate(started) if process.returncode]
    if wrong:
        nth, code = wrong[0]
        told = " / ".join((said[nth][1].strip() or said[nth][0].strip()).splitlines()[-3:])
        why = f"still running after {limit:.0f} s" if is_late else f"process {nth} ended with {code}"
        raise Failed(f"{why}: {told or 'it said nothing'}", said[nth][0])
    return seconds, [out for out, _ in said]
