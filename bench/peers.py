"""Peers that have no command line of their own: `peers.py merge SRC DST`. dtshard is compared with them.

Each function does a conversion as users of PyTorch do it today and as the documentation describes it.
"""

import argparse
import os
import re
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, empty


def merge(args):
    """Merges rank files of DTensors into one model, cast to bf16, with a loop in the style of verl's model merger.

    It loads every rank file whole, concatenates the shards by their placements, and writes the model at the end.
    """
    names = [name for name in os.listdir(args.source) if re.fullmatch(r"model_world_size_\d+_rank_\d+\.pt", name)]
    names.sort(key=lambda name: int(re.findall(r"\d+", name)[-1]))
    ranks = [torch.load(f"{args.source}/{name}", map_location="cpu", weights_only=False) for name in names]
    merged = {}
    for name in list(ranks[0]):
        parts = [rank.pop(name) for rank in ranks]
        (placement,) = parts[0].placements
        locals_ = [part._local_tensor.bfloat16() for part in parts]
        merged[name] = torch.cat(locals_, dim=placement.dim).contiguous() if placement.is_shard() else locals_[0]
    os.makedirs(args.target)
    save_file(merged, f"{args.target}/model.safetensors", metadata={"format": "pt"})


def consolidate(args):
    """Merges shards of DCP's Hugging Face storage into one safetensors file, with PyTorch's own function."""
    from safetensors import safe_open

    names = set()
    for file in os.listdir(args.source):
        if file.endswith(".safetensors"):
            with safe_open(f"{args.source}/{file}", framework="pt") as shard:
                names.update(shard.keys())
    os.makedirs(args.target)
    consolidate_safetensors_files(args.source, args.target, dict.fromkeys(sorted(names), 1), num_threads=os.cpu_count())


def reshard(args):
    """Calls `dcp.load` into DTensors of the new layout and `dcp.save`, in one process per target rank."""
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(reshard_rank, (args, f"file://{meeting}/rendezvous"), nprocs=args.ranks)


def reshard_rank(rank, args, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=args.ranks)
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("fsdp",))
    state = {}
    for name, stored in dcp.FileSystemReader(args.source).read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), name
        dim = min(args.dim, len(stored.size) - 1)
        state[name] = empty(*stored.size, dtype=stored.properties.dtype, device_mesh=mesh, placements=[Shard(dim)])
    dcp.load(state, checkpoint_id=args.source)
    dcp.save(state, checkpoint_id=args.target)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["merge", "consolidate", "reshard"])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--dim", type=int, default=0, help="that is sharded; the last one of tensors of fewer dims")
    args = parser.parse_args()
    {"merge": merge, "consolidate": consolidate, "reshard": reshard}[args.peer](args)


if __name__ == "__main__":
    main()
