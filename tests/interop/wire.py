"""Counts the bytes that ranks receive in PyTorch's DTensor.redistribute, and writes rank files for the same exchange by
dtshard.

Every rank runs alone in a fake process group, on a mesh of device type "meta": with "cpu", PyTorch uses an all-gather in place
of each all-to-all. The counter adds the bytes that a rank receives from others, for the algorithms that move the fewest bytes:
rings for all-gather, reduce-scatter and all-reduce.
"""

import contextlib
import math
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import _mesh_resources, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import generate
from redistribute import NAMES


@contextlib.contextmanager
def group(rank, sizes, device):
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes), store=FakeStore())
    try:
        yield init_device_mesh(device, sizes, mesh_dim_names=NAMES[:len(sizes)])
    finally:
        dist.destroy_process_group()


def distributed(whole, mesh, places):
    local = generate.local_part(whole, mesh.shape, mesh.get_coordinate(), places).to(mesh.device_type)
    return DTensor.from_local(local, mesh, [generate.placement_object(p) for p in places], run_check=False,
                              shape=whole.shape, stride=whole.stride())


def size(group_name):
    return dist.get_world_size(torch._C._distributed_c10d._resolve_process_group(group_name))


def all_reduce(tensor, op, group_name):
    return 2 * (size(group_name) - 1) * tensor.nbytes / size(group_name)


def all_gather(tensor, count, group_name):
    return (count - 1) * tensor.nbytes


def reduce_scatter(tensor, op, count, group_name):
    return (count - 1) * tensor.nbytes / count


def all_to_all(tensor, gather_dim, shard_dim, group_name):
    return (size(group_name) - 1) * tensor.nbytes / size(group_name)


RECEIVED = {
    "_c10d_functional::all_reduce": all_reduce,
    "_c10d_functional::all_gather_into_tensor": all_gather,
    "_c10d_functional::reduce_scatter_tensor": reduce_scatter,
    "_dtensor::shard_dim_alltoall": all_to_all,
}
SILENT = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


class Wire(TorchDispatchMode):
    """Counts the bytes that this rank receives."""

    received = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.split("::")[0] in ("c10d", "_c10d_functional", "_dtensor") and name not in SILENT:
            self.received += RECEIVED[name](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


# PyTorch's cost model of redistributions needs the number of devices per host, which it does not know for "meta".
@mock.patch.object(_mesh_resources, "num_devices_per_host", lambda device_type: 8)
def by_torch(whole, sizes, source, target):
    """Returns the bytes that all ranks together receive."""
    total = 0
    for rank in range(math.prod(sizes)):
        with group(rank, sizes, "meta") as mesh:
            tensor = distributed(whole, mesh, source)
            with Wire() as wire:
                tensor.redistribute(mesh, [generate.placement_object(p) for p in target])
            total += wire.received
    return total


def save(whole, sizes, source, folder):
    """Writes each rank's file to its own folder, like a local disk, and returns the folders."""
    world = math.prod(sizes)
    nodes = [folder / f"node{rank}" for rank in range(world)]
    for rank, node in enumerate(nodes):
        node.mkdir()
        with group(rank, sizes, "cpu") as mesh:
            torch.save({"w": distributed(whole, mesh, source)}, node / f"model_world_size_{world}_rank_{rank}.pt")
    return nodes
