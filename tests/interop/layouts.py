"""Loads rank files whose tensors each have their own placements, in one gloo process per rank, with any PyTorch from 2.5 on.

`python layouts.py JOB.json`: the job has the folder of the files, the mesh, the placements of each tensor, a torch file of the
whole tensors, and a torch file of the partial values at each coordinate of a Partial mesh dim. The outcome of full_tensor() for
each tensor is written to job["report"].
"""

import json
import math
import os
import sys
import warnings

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "fixtures"))
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.simplefilter("ignore")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import generate
import rank_files


def check_partial_value(found, partial_values, mesh, placements, name):
    """Asserts that the rank has its shard of the partial value at its coordinate, with the spec of PyTorch's DTensors."""
    dim = next(i for i, p in enumerate(placements) if p.startswith("P"))
    whole = partial_values[mesh.get_coordinate()[dim]]
    local = generate.local_part(whole, tuple(mesh.shape), mesh.get_coordinate(), placements)
    other = DTensor.from_local(local, mesh, [generate.placement_object(p) for p in placements], run_check=False,
                               shape=whole.shape, stride=whole.stride())
    assert found._spec == other._spec, f"{name}: {found._spec} is not {other._spec}"
    assert generate.same(found.to_local(), local), f"{name}: other values on rank {dist.get_rank()}"


def outcome(found, whole):
    """Returns the outcome of full_tensor() and redistribute(): the ground truth, another value, or an error."""
    try:
        both = found.full_tensor(), found.redistribute(placements=[Replicate()] * found.device_mesh.ndim).to_local()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, IndexError) as error:
        return "refused: " + str(error).split("\n")[0]
    return "the truth" if all(generate.same(t, whole) for t in both) else "scrambled"


def rank_main(rank, job):
    names, sizes = zip(*job["mesh"])
    world = math.prod(sizes)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job['rendezvous']}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))
    truth = torch.load(job["truth"], weights_only=True)
    partial_values = torch.load(job["partial_values"], weights_only=True) if "partial_values" in job else {}
    path = f"{job['folder']}/model_world_size_{world}_rank_{rank}.pt"
    outcomes = {}
    for weights_only in (False, True):
        if weights_only and not rank_files.loads_with_weights_only(sum(job["tensors"].values(), [])):
            continue
        state = torch.load(path, weights_only=weights_only)
        assert list(state) == list(job["tensors"])
        for name, placements in job["tensors"].items():
            if name in partial_values:
                check_partial_value(state[name], partial_values[name], mesh, placements, name)
            else:
                rank_files.check(state[name], truth[name], mesh, placements, names, name, full=False)
            outcomes[name] = outcome(state[name], truth[name])
    gathered = [None] * world
    dist.all_gather_object(gathered, outcomes)
    if rank == 0:
        with open(job["report"], "w") as f:
            json.dump({name: sorted({outcomes[name] for outcomes in gathered}) for name in outcomes}, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with open(sys.argv[1]) as f:
        job = json.load(f)
    mp.start_processes(rank_main, (job,), nprocs=math.prod(size for _, size in job["mesh"]), start_method="fork")
