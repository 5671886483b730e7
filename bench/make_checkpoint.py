"""Make a Llama-shaped bf16 DCP checkpoint with real PyTorch: `make_checkpoint.py DIR --gigabytes 2 --ranks 8`.

One gloo process a rank on the CPU; every parameter is a DTensor sharded on dim 0, as FSDP2 leaves it, and with
`--adamw` its state, too. Values are random bits, so nothing compresses or deduplicates. `DIR.flat_layout.json` tells how
FSDP1 would flatten the model with a unit a layer.
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


def shapes(layers):
    """Names and shapes of a Llama of so many layers."""
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


def flat_layout(layers, ranks):
    """The root unit, and one a layer."""
    modules = [""] + [f"model.layers.{i}" for i in range(layers)]
    units = {module: {"module": module, "dtype": "bf16", "params": []} for module in modules}
    for name, shape in shapes(layers):
        module = ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else ""
        units[module]["params"].append({"fqn": name, "shape": shape})
    return {"version": 1, "world_size": ranks, "use_orig_params": False, "units": list(units.values())}


def layers_for(gigabytes, copies):
    """The number of layers that comes closest from below, with so many tensors a parameter."""
    size = lambda layers: sum(2 * copies * torch.Size(shape).numel() for _, shape in shapes(layers))
    layers = 1
    while size(layers + 1) <= gigabytes * 1e9:
        layers += 1
    return layers


def save(rank, world_size, directory, layers, adamw, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    generator = torch.Generator().manual_seed(rank)

    def sharded(shape):
        rows = torch.empty(shape[0], dtype=torch.int8).chunk(world_size)
        local_shape = (len(rows[rank]) if rank < len(rows) else 0, *shape[1:])
        local = torch.randint(-(2**15), 2**15, local_shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    state = {"model": {name: sharded(shape) for name, shape in shapes(layers)}}
    if adamw:
        moments = {name: {"step": torch.tensor(7.0), "exp_avg": sharded(shape), "exp_avg_sq": sharded(shape)}
                   for name, shape in shapes(layers)}
        state["optim"] = {"state": moments, "param_groups": [{"lr": 1e-4, "params": list(moments)}]}
    dcp.save(state, checkpoint_id=directory)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--adamw", action="store_true", help="with the state of an optimizer")
    args = parser.parse_args()
    rendezvous = os.path.join(tempfile.mkdtemp(), "rendezvous")
    layers = layers_for(args.gigabytes, 3 if args.adamw else 1)
    mp.spawn(save, (args.ranks, args.directory, layers, args.adamw, rendezvous), nprocs=args.ranks)
    with open(f"{args.directory}.flat_layout.json", "w") as file:
        json.dump(flat_layout(layers, args.ranks), file)
    print(f"{args.directory}: {layers} layers over {args.ranks} ranks")


if __name__ == "__main__":
    main()
