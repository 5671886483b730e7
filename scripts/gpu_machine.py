"""The machine on which `gpu-check` runs: its libraries, and the environment for programs."""

import os
import platform
from pathlib import Path

from gpu_libraries import (dotted, driver_version, folders, installed, lines, link, loader_path, nccl_version, nvrtc_for,
                           nvrtc_version)

# Variables of a launcher. They are removed, because its tasks are not the ranks here.
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "DTSHARD_")
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MPI_LOCALRANKID")
STAND_INS = 4

# Ways in which ranks can share a GPU. NCCL 2.30 and later allow it. For earlier versions, and if it fails, each rank gets its
# own host ID, so NCCL sends all data over sockets; the last way uses only the loopback interface and NCCL's own socket
# transport.
APART = {"NCCL_HOSTID": "h{rank}", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
SHARING = {
    "allowed by NCCL": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"},
    "as if on hosts of their own": APART,
    "as if on hosts of their own, by lo": {**APART, "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket",
                                           "NCCL_NET_PLUGIN": "none", "NCCL_CUMEM_HOST_ENABLE": "0"},
}


class Machine:
    """The libraries of this machine, and the environment in which programs find them. `links` is an empty folder."""

    def __init__(self, folder, links, is_stand_in):
        self.folder, self.is_stand_in = folder, is_stand_in
        # The number of GPUs, set later from the driver: nvidia-smi also counts parts of GPUs.
        self.gpus = 0
        self.sharing = None
        self.environment = {key: value for key, value in os.environ.items()
                            if key not in LAUNCHED and not key.startswith(LAUNCHERS)}
        # Warnings for the log; NCCL prints them to stdout.
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
                # NCCL looks for other libraries of the driver in the same folder.
                paths.append(self.driver.parent)
            # If none is found, the loader may still find one.
            self.nccl = next(filter(nccl_version, installed("libnccl.so.2", among)), None)
            self.nvrtc = nvrtc_for(driver_version(self.driver), among)
        self.nccl_version = nccl_version(self.nccl or "libnccl.so.2")
        if self.nccl:
            self.environment["DTSHARD_NCCL_LIB"] = str(self.nccl)
        if self.nvrtc:
            # dtshard looks for this name first. NVRTC needs other libraries of its folder.
            link(self.nvrtc, links / "libnvrtc.so")
            paths.append(self.nvrtc.parent)
        self.environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, [*paths, *loader_path()]))

    def versions(self):
        """Yields the rows about the machine."""
        yield "driver", f"CUDA {dotted(driver_version(self.driver))}" if self.driver else "none", self.smi("driver_version")
        yield "NCCL", dotted(self.nccl_version), self.nccl or "as the system has it"
        yield "NVRTC", dotted(nvrtc_version(self.nvrtc)) if self.nvrtc else "none", self.nvrtc or ""
        memory = "; ".join(line for line in meminfo() if line.startswith(("MemTotal", "MemAvailable")))
        yield "machine", f"{len(os.sched_getaffinity(0))} CPUs", f"{platform.machine()}, Linux {platform.release()}; {memory}"
        yield "libc, Python", f"{' '.join(platform.libc_ver())}, {platform.python_version()}", ""

    def smi(self, *columns):
        """Returns these columns of nvidia-smi for all GPUs."""
        if self.is_stand_in:
            return "a stand-in"
        beside = [self.driver.parent.parent / "bin/nvidia-smi"] if isinstance(self.driver, Path) else []
        for tool in ["nvidia-smi", *beside]:
            said = lines(tool, f"--query-gpu={','.join(columns)}", "--format=csv,noheader")
            if said:
                return "; ".join(said)
        return "nvidia-smi says nothing"

    def sharings(self):
        """Returns the ways in which ranks may share a GPU, in the order in which they are tried."""
        names = list(SHARING)
        return names if self.nccl_version >= (2, 30) else names[1:] + names[:1]

    def of_rank(self, rank, ranks):
        """Returns the environment of a rank. If ranks share GPUs, it has the NCCL variables for this."""
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
    """Returns the bytes of memory that are available to programs."""
    found = [line.split() for line in meminfo() if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else 0
