"""Functions that run in the process of each rank with plain tensors: they compute gradients before any reduction, and run a
tensor-parallel model."""

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import test_declared_layout


def batch(rank):
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(rank + 1))


def backward(folder):
    """Saves the gradients of this rank alone, and the averaged gradients of DDP for the same data."""
    rank = dist.get_rank()
    own = test_declared_layout.model()
    averaged = DistributedDataParallel(test_declared_layout.model())
    for module in (own, averaged):
        module(batch(rank)).square().mean().backward()
    torch.save({name: tensor.grad for name, tensor in own.named_parameters()}, f"{folder}/ranks/rank_{rank}.pt")
    torch.save({name: tensor.grad for name, tensor in averaged.module.named_parameters()}, f"{folder}/ddp_{rank}.pt")


def infer(folder, expected):
    """Runs the model of test_declared_layout on the shards in this rank's file; the output must equal `expected`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    w = load_file(f"{folder}/rank-{rank:05}.safetensors")
    tokens, wanted = torch.load(expected)
    rows = [None] * world
    dist.all_gather_object(rows, len(w["embed.weight"]))
    own = tokens - sum(rows[:rank])
    inside = (own >= 0) & (own < rows[rank])
    hidden = functional.embedding(own * inside, w["embed.weight"]) * inside[..., None]
    dist.all_reduce(hidden)
    wide = functional.gelu(functional.linear(hidden, w["up.weight"], w["up.bias"]))
    down = functional.linear(wide, w["down.weight"])
    dist.all_reduce(down)
    output = functional.layer_norm(hidden + down + w["down.bias"], (6,), w["norm.weight"], w["norm.bias"])
    torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-13)
