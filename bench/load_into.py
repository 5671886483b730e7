#!/usr/bin/env python3
"""Measures `dtshard.load_into` beside `torch.distributed.checkpoint.load`, in alternating pairs on the same gloo ranks.

    python bench/load_into.py [--ranks N] [--gigabytes N] [--rounds N] [--folder /dev/shm]
    python bench/load_into.py --chunks 1000

The first form loads a DCP directory that the ranks saved, and then rank files, safetensors and FSDP1 files, each beside converting
it to DCP first and loading that. The second form loads one rank's part of 1,000 tensors that N ranks saved. Needs torch and the
wheel of dtshard. Times are the medians over rounds, of the slowest rank; memory is the highest anonymous memory of a rank beyond
what it had before.
"""

import argparse
import io
import os
import pathlib
import pickle
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor, Shard

import dtshard

LLAMA = {"wq": (4096, 4096), "wk": (1024, 4096), "wv": (1024, 4096), "wo": (4096, 4096), "w1": (14336, 4096)}


class Peak:
    """The highest anonymous memory of this process inside a `with` block, in bytes beyond that at its begin."""

    def __enter__(self):
        self.before = self.highest = self.now()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def now(self):
        line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    def watch(self):
        while not self.done.wait(0.02):
            self.highest = max(self.highest, self.now())

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.highest = max(self.highest, self.now())

    @property
    def bytes(self):
        return self.highest - self.before


def shapes(gigabytes):
    number = max(1, round(gigabytes * 1e9 / 2 / sum(a * b for a, b in LLAMA.values())))
    return {f"layers.{layer}.{name}.weight": shape for layer in range(number) for name, shape in LLAMA.items()}


def local_state(mesh, wanted, fill=0):
    """Returns bf16 DTensors that are sharded over a mesh."""
    state = {}
    for name, shape in wanted.items():
        start = dist.get_rank() * -(-shape[0] // dist.get_world_size())
        rows = max(0, min(shape[0] - start, -(-shape[0] // dist.get_world_size())))
        local = torch.full((rows, *shape[1:]), fill, dtype=torch.bfloat16)
        if fill:
            local.copy_(torch.arange(local.numel(), dtype=torch.int16).view(local.shape).view(torch.bfloat16))
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    return state


def timed(action):
    dist.barrier()
    with Peak() as peak:
        start = time.perf_counter()
        action()
        seconds = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    most = torch.tensor([float(peak.bytes)])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return seconds.item(), most.item()


def job(rank, ranks, port, options):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    wanted = shapes(options.gigabytes)
    folder = options.folder
    saved = local_state(mesh, wanted, 1)
    dcp.save(saved, checkpoint_id=f"{folder}/dcp")
    os.makedirs(f"{folder}/ranks", exist_ok=True)
    torch.save(saved, f"{folder}/ranks/model_world_size_{ranks}_rank_{rank}.pt")
    expected = {name: value.to_local() for name, value in saved.items()}
    dist.barrier()
    if rank == 0:
        dtshard.convert("consolidate", f"{folder}/dcp", f"{folder}/hf")
        dtshard.convert("flatten", f"{folder}/ranks", f"{folder}/flat", world_size=ranks, wrap="layers.*")
    dist.barrier()
    state = local_state(mesh, wanted)

    def clear():
        for value in state.values():
            value.to_local().zero_()

    def check():
        assert all(torch.equal(value.to_local().view(torch.int16), expected[name].view(torch.int16))
                   for name, value in state.items())

    def converted_first(source):
        if rank == 0:
            shutil.rmtree(f"{folder}/converted", ignore_errors=True)
            dtshard.convert("reshard", source, f"{folder}/converted", to="dcp", mesh=f"fsdp={ranks}", no_sync=True)
        dist.barrier()
        dcp.load(state, checkpoint_id=f"{folder}/converted")

    def report(label, one, other):
        seconds = [statistics.median(pair[0] for pair in side) for side in (one, other)]
        ratio = statistics.median(b[0] / a[0] for a, b in zip(one, other))
        memory = [max(pair[1] for pair in side) / 1e6 for side in (one, other)]
        if rank == 0:
            print(f"{label:42} {seconds[0]:7.2f} s {seconds[1]:7.2f} s  ratio {ratio:5.2f}   memory {memory[0]:7.0f} MB "
                  f"{memory[1]:7.0f} MB", flush=True)

    if rank == 0:
        print(f"{'':42} {'PyTorch':>9} {'dtshard':>9}", flush=True)
    cases = [("DCP directory", f"{folder}/dcp", lambda: dcp.load(state, checkpoint_id=f"{folder}/dcp"))]
    cases += [(f"{name}, converted first or not", f"{folder}/{name}", lambda name=name: converted_first(f"{folder}/{name}"))
              for name in ("ranks", "hf", "flat")]
    for label, source, peer in cases:
        one, other = [], []
        for _ in range(options.rounds):
            clear()
            one.append(timed(peer))
            check()
            clear()
            other.append(timed(lambda source=source: dtshard.load_into(state, source)))
            check()
        report(label, one, other)
    dist.barrier()
    dist.destroy_process_group()


def many_chunks(ranks, folder, rounds):
    """Loads the part of rank 0 from 1,000 tensors, each of a chunk from every rank, with a process group that is not real."""
    tensors, width = 1000, 8
    archive = io.BytesIO()
    torch.save(torch.ones(1, width), archive)
    length = len(archive.getvalue())
    found, storage = {}, {}
    for index in range(tensors):
        chunks = [ChunkStorageMetadata(torch.Size([rank, 0]), torch.Size([1, width])) for rank in range(ranks)]
        for rank, chunk in enumerate(chunks):
            place = _StorageInfo(f"__{rank}_0.distcp", index * length, length)
            storage[MetadataIndex(f"w{index}", chunk.offsets, rank)] = place
        found[f"w{index}"] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([ranks, width]), chunks)
    with open(f"{folder}/.metadata", "wb") as file:
        pickle.dump(Metadata(found, {name: (name,) for name in found}, storage), file)
    for rank in range(ranks):
        # Only the file of rank 0 is read; the others have the right length.
        with open(f"{folder}/__{rank}_0.distcp", "wb") as file:
            file.write(archive.getvalue() * tensors if rank == 0 else b"")
            file.truncate(tensors * length)
    for way in ("dtshard", "PyTorch"):
        code = f"""
import sys, time, torch, torch.distributed as dist, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
from torch.testing._internal.distributed.fake_pg import FakeStore
import load_into, dtshard
import torch.distributed.checkpoint as dcp
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size={ranks})
mesh = dist.device_mesh.init_device_mesh("cpu", ({ranks},))
state = load_into.local_state(mesh, {{f"w{{i}}": ({ranks}, {width}) for i in range({tensors})}})
state = {{name: value.to(torch.float32) for name, value in state.items()}}
with load_into.Peak() as peak:
    start = time.perf_counter()
    if {way!r} == "dtshard":
        dtshard.load_into(state, {folder!r})
        assert all(value.to_local().eq(1).all() for value in state.values())
    else:
        reader, planner = dcp.FileSystemReader({folder!r}), dcp.DefaultLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, True)
        plan = planner.create_local_plan()
        assert len(plan.items) == {tensors}
    seconds = time.perf_counter() - start
print(f"{way:9} {{seconds:6.2f}} s {{peak.bytes / 1e6:7.0f}} MB")
"""
        for _ in range(rounds):
            subprocess.run([sys.executable, "-c", code], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--chunks", type=int, metavar="RANKS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.chunks:
            many_chunks(options.chunks, folder, options.rounds)
            return
        options.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(job, (options.ranks, port, options), options.ranks)


if __name__ == "__main__":
    main()
