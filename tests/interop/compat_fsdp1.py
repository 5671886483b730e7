"""FSDP1 in any PyTorch release, without dtshard: `compat_fsdp1.py save|load DIR --ranks 2 [--views]`.

`save` trains a step and writes LOCAL_STATE_DICT and optimizer files, `flat_layout.json`, and `truth.pt`, the whole tensors
joined from all ranks. `load` loads the files of this number of ranks into a model with other values, and compares with
`truth.pt`.
"""

import argparse
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed._shard.api import load_with_process_group
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures"))
from flat_layout import flat_layout


class Stream(torch.cpu.Stream):
    """Works around PyTorch 2.1, whose `Stream` takes no arguments although FSDP1 passes some."""

    def __init__(self, *_, **__):
        pass


torch.cpu.Stream = Stream


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.wq, self.wk = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)
        self.inner = nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim))
        self.register_buffer("scale", torch.arange(2.0))


class Model(nn.Module):
    """Units: "", layers.0, layers.0.inner, layers.1, layers.1.inner."""

    def __init__(self, dim=6):
        super().__init__()
        self.emb = nn.Embedding(11, dim)
        self.conv = nn.Conv2d(dim, 4, 2, bias=False).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList([Block(dim), Block(dim)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 11, bias=False)
        self.head.weight = self.emb.weight


def wrapped(views, seed):
    torch.manual_seed(seed)
    module, options = Model(), {"use_orig_params": views, "device_id": torch.device("cpu")}
    for index, block in enumerate(module.layers):
        block.inner = FSDP(block.inner, **options)
        module.layers[index] = FSDP(block, **options)
    module = FSDP(module, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    torch.manual_seed(seed + dist.get_rank())
    for param in module.parameters():
        if param.numel():
            param.grad = torch.randn_like(param)
    optimizer.step()
    return module, optimizer


def paths(directory):
    """Returns the files of this rank."""
    own = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    return [f"{directory}/{series}_{own}" for series in ("model", "optim")]


def local(module):
    FSDP.set_state_dict_type(module, StateDictType.LOCAL_STATE_DICT)
    return module.state_dict()


def whole(module, optimizer):
    """Returns {name: tensor} of model and state: the shards of all ranks, concatenated, in the shapes of the layout."""
    layout, known = flat_layout(module, optimizer), dict(plain_names(module))
    found = {name: t.clone() for name, t in module.named_buffers()}
    for unit in layout["units"]:
        params = [param for param in unit["params"] if "shape" in param]
        key = f"{unit['module']}._flat_param".lstrip(".")
        if layout["use_orig_params"]:
            held = [(param["fqn"], [param], known[param["fqn"]]) for param in params]
        else:
            held = [(key, params, known[key])]
        for _, members, param in held:
            state = optimizer.state[param]
            for name in ("", "exp_avg", "exp_avg_sq"):
                t = (state.get(name, torch.zeros(0)) if name else param.detach()).reshape(-1)
                found.update((f"{fqn}/{name}", value) for fqn, value in cut(joined(t), members))
            for member in members:
                found[f"{member['fqn']}/step"] = torch.tensor(1.0)
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in found.items()}


def plain_names(module):
    return [(name.replace("_fsdp_wrapped_module.", ""), param) for name, param in module.named_parameters()]


def joined(t):
    """Returns the concatenated tensors of all ranks."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, t)
    return torch.cat(everyone)


def cut(t, params):
    at = 0
    for param in params:
        shape = torch.Size(param["shape"])
        stride = param.get("stride", torch.empty(shape, device="meta").stride())
        yield param["fqn"], t[at:at + shape.numel()].as_strided(shape, stride, t.storage_offset() + at).contiguous()
        at += shape.numel()


def save(directory, views):
    module, optimizer = wrapped(views, 0)
    truth, layout = whole(module, optimizer), flat_layout(module, optimizer)
    for path, tree in zip(paths(directory), (local(module), optimizer.state_dict())):
        torch.save(tree, path)
    if dist.get_rank() == 0:
        torch.save(truth, f"{directory}/truth.pt")
        with open(f"{directory}/flat_layout.json", "w") as file:
            json.dump(layout, file)


def load(directory, views):
    module, optimizer = wrapped(views, 1)
    with load_with_process_group(dist.group.WORLD):
        model, optim = [torch.load(path, **weights_only(False)) for path in paths(directory)]
    local(module)
    module.load_state_dict(model, strict=False)
    optimizer.load_state_dict(optim)
    truth, found = torch.load(f"{directory}/truth.pt"), whole(module, optimizer)
    assert set(found) == set(truth), set(found) ^ set(truth)
    wrong = [name for name, t in truth.items() if not torch.equal(t, found[name])]
    assert not wrong, wrong


def weights_only(value):
    return {"weights_only": value}


def run(rank, world_size, work, directory, views, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    {"save": save, "load": load}[work](directory, views)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["save", "load"])
    parser.add_argument("directory")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--views", action="store_true")
    args = parser.parse_args()
    rendezvous = os.path.join(tempfile.mkdtemp(), "rendezvous")
    mp.spawn(run, (args.ranks, args.work, args.directory, args.views, rendezvous), nprocs=args.ranks)
