"""Trains with DeepSpeed, or resumes from Universal checkpoints, in the processes of `test_deepspeed_universal.py`. Also runs with
other releases of DeepSpeed: 0.14.4 to 0.19.8.
"""

import json
import os
import sys
import warnings

os.environ["DS_BUILD_OPS"] = "0"
os.environ["DS_ACCELERATOR"] = "cpu"
warnings.filterwarnings("ignore")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures"))

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import generate_deepspeed

BATCH = 4


def groups(net, number):
    trained = [p for p in net.parameters() if p.requires_grad]
    if number == 1:
        return [{"params": trained}]
    return [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02}]


def start(net, stage, dtype, number, universal, scheduled=True):
    import deepspeed
    zero = {"sub_group_size": 40} if dtype == "bf16" and stage == 3 else {}
    kind = dtype.split("_")[0]
    config = generate_deepspeed.config(stage, kind, "fp32" if dtype == "bf16_wrapper" else None, zero)
    config["train_micro_batch_size_per_gpu"] = BATCH // dist.get_world_size()
    config["gradient_clipping"] = 0.0  # the default is 1.0 in 0.19.8, and 0.0 in earlier releases
    config["checkpoint"] = {"load_universal": universal}
    client = torch.optim.AdamW(groups(net, number), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(client, step_size=1, gamma=0.9) if scheduled else None
    engine, _, _, _ = deepspeed.initialize(model=net, optimizer=client, lr_scheduler=scheduler, config=config)
    return engine


def losses(step_of, steps):
    """Trains on the same global batches, whatever the number of ranks. `step_of` makes a step of the loss of this rank."""
    found, rank, world = [], dist.get_rank(), dist.get_world_size()
    for step in steps:
        tokens = torch.randint(0, 9, (BATCH, 4), generator=torch.Generator().manual_seed(100 + step))
        loss = step_of(tokens[rank * BATCH // world:(rank + 1) * BATCH // world])
        dist.all_reduce(loss)
        found.append((loss / world).item())
    return found


def step_of_engine(engine):
    def step(tokens):
        loss = torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        return loss.detach().clone()
    return step


def write(out, name, value):
    if dist.get_rank() == 0:
        with open(os.path.join(out, name), "w") as f:
            json.dump(value, f)


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def keys(engine):
    return ["exp_avg", "exp_avg_sq"]


def save(out, stage, dtype, number):
    """Trains for two steps, saves a checkpoint and the whole tensors, and trains on."""
    engine = start(generate_deepspeed.model(False), stage, dtype, number, False)
    losses(step_of_engine(engine), range(2))
    engine.save_checkpoint(os.path.join(out, "saved"), client_state={"epoch": 3})
    tensors = {}
    generate_deepspeed.gather(engine, stage, dtype.split("_")[0], keys(engine), tensors)
    if dist.get_rank() == 0:
        save_file({name: t.contiguous() for name, t in tensors.items()}, os.path.join(out, "truth.safetensors"))
    noted = {"lr": rates(engine.optimizer), "global_steps": engine.global_steps}
    write(out, "went_on.json", {"losses": losses(step_of_engine(engine), range(2, 5)), **noted})


def save_dcp(out):
    """Trains with FSDP2 for two steps, saves a DCP directory, and trains on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    net = generate_deepspeed.model(False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(groups(net, 2), lr=0.01)

    def step(tokens):
        loss = torch.nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    losses(step, range(2))
    weights, moments = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=os.path.join(out, "saved"))
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    tensors = {f"model.{name}": whole(t).clone() for name, t in weights.items()}
    for name, own in moments["state"].items():
        tensors.update((f"optimizer.state.{name}.{key}", whole(t).clone()) for key, t in own.items())
    if dist.get_rank() == 0:
        save_file({name: t.contiguous() for name, t in tensors.items()}, os.path.join(out, "truth.safetensors"))
    noted = {"lr": rates(optimizer), "global_steps": 2}
    write(out, "went_on.json", {"losses": losses(step, range(2, 5)), **noted})


def mend_mapping(optimizer):
    """Makes `safe_get_full_fp32_param` return master weights. After loading a Universal checkpoint, releases up to 0.18.9
    return a moment, although the optimizer has the right master weights.
    """
    wrapped = hasattr(optimizer, "fp32_groups_flat_partition")
    masters = optimizer.fp32_groups_flat_partition if wrapped else optimizer.single_partition_of_fp32_groups
    for master, params in zip(masters, optimizer.bf16_groups if wrapped else optimizer.bit16_groups):
        for param in params:
            mapping = param._hp_mapping
            if mapping is not None:
                address = mapping.get_hp_fragment_address()
                mapping.hp_fragment = master.narrow(0, address.start, address.numel)


def resume(out, stage, dtype, number, folder, truth, scheduled):
    """Loads a Universal checkpoint into a model of other values, compares it with the truth, and trains on."""
    import deepspeed
    net = generate_deepspeed.model(False)
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.add_(1)
    with open(os.path.join(folder, "latest_universal")) as f:
        tag = f.read()
    # DeepSpeed loads neither buffers nor frozen parameters of a Universal checkpoint.
    module = torch.load(os.path.join(folder, tag, "mp_rank_00_model_states.pt"), weights_only=False)["module"]
    net.load_state_dict(module, strict=False)
    engine = start(net, stage, dtype, number, True, scheduled)
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    if stage == 3:
        # DeepSpeed gives all groups the same options, and all sub-groups the same tensor, to which each of them adds 1.
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()
        saved = torch.load(os.path.join(folder, tag, "zero", "optimizer_state.pt"), weights_only=False)["param_groups"]
        for group, own in zip(engine.optimizer.param_groups, saved):
            group.update((key, value) for key, value in own.items() if key != "params")
    tensors = {}
    if stage < 3:
        mend_mapping(engine.optimizer)
    generate_deepspeed.gather(engine, stage, dtype.split("_")[0], keys(engine), tensors)
    expected = load_file(truth)
    for name in expected.keys() | tensors.keys():
        found = tensors[name]
        assert found.shape == expected[name].shape, name
        # Frozen parameters have the dtype of the job.
        assert torch.equal(found, expected[name].to(found.dtype)), (name, found, expected[name])
    noted = {"lr": rates(engine.optimizer), "global_steps": engine.global_steps, "client": client.get("epoch")}
    write(out, "resumed.json", {"losses": losses(step_of_engine(engine), range(2, 5)), **noted})


def release():
    import deepspeed
    print("release", deepspeed.__version__)


if __name__ == "__main__":
    kind, *arguments = json.loads(sys.argv[1])
    if kind == "release":
        release()
    else:
        torch.set_num_threads(1)
        if kind == "save_dcp":
            dist.init_process_group("gloo")
        else:
            import deepspeed
            for op in deepspeed.ops.__compatible_ops__:
                deepspeed.ops.__compatible_ops__[op] = False  # compile nothing
            deepspeed.init_distributed("gloo")
        {"save": save, "save_dcp": save_dcp, "resume": resume}[kind](*arguments)
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)
