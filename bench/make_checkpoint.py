"""Make a checkpoint with real PyTorch: `make_checkpoint.py DIR --gigabytes 2 --ranks 8 --format dcp`.

One gloo process per rank runs on the CPU. The model is a Llama whose parameters are DTensors sharded on dim 0, as with FSDP2;
with `--adamw`, the state of AdamW is saved, too. `--format` chooses a DCP directory, one `torch.save` file per rank, or shards
of DCP's Hugging Face storage. bf16 values are random bits, so no file system can compress or deduplicate them; f32 values are
normally distributed, so that they can be cast. `DIR.flat_layout.json` describes how FSDP1 would flatten the model with one unit
per layer. `--small N` instead makes a DCP directory of N tensors of 1 KiB.
"""

import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

HIDDEN, FFN, VOCAB, KV = 2048, 5632, 32000, 512
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def shapes(layers):
    """Yields the names and shapes of a Llama with this number of layers."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", (KV, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", (KV, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{layer}.mlp.gate_proj.weight", (FFN, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (FFN, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, FFN)
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def flat_layout(layers, args):
    """Returns a flat layout with a unit for each layer, and the root unit."""
    modules = [""] + [f"model.layers.{i}" for i in range(layers)]
    units = {module: {"module": module, "dtype": args.dtype, "params": []} for module in modules}
    for name, shape in shapes(layers):
        module = ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else ""
        units[module]["params"].append({"fqn": name, "shape": shape})
    return {"version": 1, "world_size": args.ranks, "use_orig_params": False, "units": list(units.values())}


def layers_for(args):
    """Returns the largest number of layers (at least 1) whose size is at most `--gigabytes`."""
    each = DTYPES[args.dtype].itemsize * (3 if args.adamw else 1)
    size = lambda layers: sum(each * torch.Size(shape).numel() for _, shape in shapes(layers))
    layers = 1
    while size(layers + 1) <= args.gigabytes * 1e9:
        layers += 1
    return layers


def values(shape, dtype, generator):
    if dtype == torch.float32:
        return torch.randn(shape, generator=generator)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(dtype)


def save(rank, args, layers, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.ranks)
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("fsdp",))
    generator = torch.Generator().manual_seed(rank)

    def sharded(shape):
        rows = torch.empty(shape[0], dtype=torch.int8).chunk(args.ranks)
        local_shape = (len(rows[rank]) if rank < len(rows) else 0, *shape[1:])
        local = values(local_shape, DTYPES[args.dtype], generator)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    model = {name: sharded(shape) for name, shape in shapes(layers)}
    if args.format == "ranks":
        torch.save(model, f"{args.directory}/model_world_size_{args.ranks}_rank_{rank}.pt")
    elif args.format == "hf":
        dcp.save(model, storage_writer=dcp.HuggingFaceStorageWriter(args.directory, save_distributed=True))
    else:
        state = {"model": model}
        if args.adamw:
            moments = {name: {"step": torch.tensor(7.0), "exp_avg": sharded(shape), "exp_avg_sq": sharded(shape)}
                       for name, shape in shapes(layers)}
            state["optim"] = {"state": moments, "param_groups": [{"lr": 1e-4, "params": list(moments)}]}
        dcp.save(state, checkpoint_id=args.directory)
    dist.barrier()
    dist.destroy_process_group()


def save_small(args):
    generator = torch.Generator().manual_seed(0)
    name = "layers.{}.experts.{}.weight"
    model = {name.format(*divmod(i, 100)): values((16, 32), torch.bfloat16, generator) for i in range(args.small)}
    dcp.save({"model": model}, checkpoint_id=args.directory, no_dist=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--format", choices=["dcp", "ranks", "hf"], default="dcp")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--adamw", action="store_true", help="with the state of an optimizer; for dcp")
    parser.add_argument("--small", type=int, metavar="N", help="N tensors of 1 KiB, saved by one rank")
    args = parser.parse_args()
    os.makedirs(args.directory, exist_ok=True)
    if args.small:
        return save_small(args)
    with tempfile.TemporaryDirectory() as meeting:
        layers = layers_for(args)
        mp.spawn(save, (args, layers, os.path.join(meeting, "rendezvous")), nprocs=args.ranks)
    with open(f"{args.directory}.flat_layout.json", "w") as file:
        json.dump(flat_layout(layers, args), file)


if __name__ == "__main__":
    main()
