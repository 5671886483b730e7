"""The machine that `gpu-check` is on: its libraries, and the environment of programs."""

import os
import platform
from pathlib import Path

from gpu_libraries import (dotted, driver_version, folders, installed, lines, link, loader_path, nccl_version, nvrtc_for,
                           nvrtc_version)

# Of a launcher that this may run under: its tasks are not the ranks here.
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "DTSHARD_")
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MPI_LOCALRANKID")
STAND_INS = 4

# How ranks come to share a GPU: NCCL allows it since 2.30. To those before, and where that fails, each is on a host of its
# own, and all goes over sockets; perhaps over those of this machine alone, with what NCCL itself brings.
APART = {"NCCL_HOSTID": "h{rank}", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
SHARING = {
    "allowed by NCCL": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"},
    "as if on hosts of their own": APART,
    "as if on hosts of their own, by lo": {**APART, "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket",
                                           "NCCL_NET_PLUGIN": "none", "NCCL_CUMEM_HOST_ENABLE": "0"},
}


class Machine:
    """What is here, and the environment in which programs find it. `links` is an empty folder."""

    def __init__(self, folder, links, is_stand_in):
        self.folder, self.is_stand_in = folder, is_stand_in
        # The driver knows how many; NVIDIA's tool counts parts of GPUs, too.
        self.gpus = 0
        self.sharing = None
        self.environment = {key: value for key, value in os.environ.items()
                            if key not in LAUNCHED and not key.startswith(LAUNCHERS)}
        # For the log: it goes to stdout.
        self.environment.setdefault("NCCL_DEBUG", "WARN")
        paths = [links]
        if is_stand_in:
            self.driver = self.nccl = self.nvrtc = (folder / "libgpu_stand_in.so").resolve()
            self.environment.update(GPU_STAND_IN_DEVICES=str(STAND_INS), GPU_STAND_IN_DELAY_US="20")
            link(self.driver, links / "libcuda.so")
        else:
            among = folders()
            drivers = ["libcuda.so.1", *installed("libcuda.so.1", among)]
            self.driver = next(filter(driver_version, drivers), None)
            if isinstance(self.driver, Path):
                link(self.driver, links / "libcuda.so")
                # NCCL looks for more of the driver beside it.
                paths.append(self.driver.parent)
            # Or else what the loader knows.
            self.nccl = next(filter(nccl_version, installed("libnccl.so.2", among)), None)
            self.nvrtc = nvrtc_for(driver_version(self.driver), among)
        self.nccl_version = nccl_version(self.nccl or "libnccl.so.2")
        if self.nccl:
            self.environment["DTSHARD_NCCL_LIB"] = str(self.nccl)
        if self.nvrtc:
            # The name that is looked for first, and what it needs beside it.
            link(self.nvrtc, links / "libnvrtc.so")
            paths.append(self.nvrtc.parent)
        self.environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, [*paths, *loader_path()]))

    def versions(self):
        """What the table is about."""
        yield "driver", f"CUDA {dotted(driver_version(self.driver))}" if self.driver else "none", self.smi("driver_version")
        yield "NCCL", dotted(self.nccl_version), self.nccl or "as the system has it"
        yield "NVRTC", dotted(nvrtc_version(self.nvrtc)) if self.nvrtc else "none", self.nvrtc or ""
        memory = "; ".join(line for line in meminfo() if line.startswith(("MemTotal", "MemAvailable")))
        yield "machine", f"{len(os.sched_getaffinity(0))} CPUs", f"{platform.machine()}, Linux {platform.release()}; {memory}"
        yield "libc, Python", f"{' '.join(platform.libc_ver())}, {platform.python_version()}", ""

    def smi(self, *columns):
        """What NVIDIA's own tool says, of all GPUs."""
        if self.is_stand_in:
            return "a stand-in"
        beside = [self.driver.parent.parent / "bin/nvidia-smi"] if isinstance(self.driver, Path) else []
        for tool in ["nvidia-smi", *beside]:
            said = lines(tool, f"--query-gpu={','.join(columns)}", "--format=csv,noheader")
            if said:
                return "; ".join(said)
        return "nvidia-smi says nothing"

    def sharings(self):
        """How ranks may come to share a GPU, in the order in which it is tried."""
        names = list(SHARING)
        return names if self.nccl_version >= (2, 30) else names[1:] + names[:1]

    def of_rank(self, rank, ranks):
        """The environment of a rank of so many: those that share a GPU set NCCL variables for this."""
        environment = dict(self.environment)
        if ranks > self.gpus:
            how = SHARING[self.sharing or self.sharings()[0]]
            environment.update({name: value.format(rank=rank) for name, value in how.items()}, DTSHARD_SHARE_GPU="1")
        return environment


def meminfo():
    try:
        with open("/proc/meminfo") as file:
            return [" ".join(line.split()) for line in file]
    except OSError:
        return []


def available():
    """Bytes of memory that programs can still have."""
    found = [line.split() for line in meminfo() if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else 0
