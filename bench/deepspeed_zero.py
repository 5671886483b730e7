"""Measure `consolidate` of a DeepSpeed checkpoint side by side with DeepSpeed's `zero_to_fp32.py` and with `cp`.

    deepspeed_zero.py DTSHARD [--work FOLDER] [--gigabytes N] [--rounds N] [--ranks N] [--stage 2|3]
    deepspeed_zero.py DTSHARD --inspect RANKS

Needs deepspeed==0.19.8 (installed with DS_BUILD_OPS=0), safetensors and huggingface_hub. The files are made with torch.save in the form of
DeepSpeed: f32 master weights, two moments, and at stage 2 the bf16 module. In each round, `cp` of the result, dtshard and
`zero_to_fp32.py` run one after the other, with the start of the process; the results of the first round are compared.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

os.environ.update(DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")

import torch

from measure import measure, size

LAYER = {"wq": (4096, 4096), "wk": (1024, 4096), "wv": (1024, 4096), "wo": (4096, 4096), "w1": (14336, 4096)}


def shapes(gigabytes):
    number = max(1, round(gigabytes * 1e9 / 4 / sum(a * b for a, b in LAYER.values())))
    return OrderedDict((f"layers.{i}.{name}.weight", torch.Size(shape)) for i in range(number) for name, shape in LAYER.items())


def write(folder, params, ranks, stage):
    """Writes a checkpoint as ZeRO does with bf16."""
    import deepspeed
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    tag = folder / "global_step2"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step2")
    about = {"ds_config": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}, "ds_version": deepspeed.__version__}
    total = sum(shape.numel() for shape in params.values())
    if stage == 3:
        length = sum(-(-shape.numel() // ranks) for shape in params.values())
    else:
        length = 2 * -(-total // (2 * ranks))
    model = {
        "module": OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in params), "buffer_names": [], "optimizer": None,
        "param_shapes": [params], "frozen_param_shapes": OrderedDict(), "shared_params": {},
        "frozen_param_fragments": OrderedDict(), "lr_scheduler": None, "global_steps": 2, "skipped_steps": 0,
        "global_samples": 2 * ranks, "dp_world_size": ranks, "mp_world_size": 1, **about}
    if stage != 3:
        flat = torch.zeros(length * ranks, dtype=torch.bfloat16)
        at = 0
        for name, shape in params.items():
            model["module"][name] = flat[at:at + shape.numel()].view(shape)
            at += shape.numel()
        torch.save(model, tag / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        master = torch.arange(length, dtype=torch.int32).add_(rank * length).view(torch.float32)
        filled = length if stage == 3 else max(0, min(length, total - rank * length))
        master[filled:] = 0
        state = {"step": torch.tensor(2.0), "exp_avg": torch.zeros(length), "exp_avg_sq": torch.zeros(length)}
        group = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
        own = {"state": {0: state}, "param_groups": [group]}
        zero = {"loss_scaler": LossScaler(1.0), "dynamic_loss_scale": False, "overflow": False, "zero_stage": ZeroStageEnum(stage)}
        if stage == 3:
            zero.update(partition_count=ranks, optimizer_state_dict=own, fp32_flat_groups=[master])
            torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        else:
            zero.update(partition_count=[ranks], base_optimizer_state=own, single_partition_of_fp32_groups=[master[:filled]],
                        group_paddings=[length - filled], clip_grad=0.0, param_slice_mappings=[OrderedDict()],
                        ds_version=deepspeed.__version__)
        torch.save({"optimizer_state_dict": zero, **about}, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def compare(args, stage, folder):
    import deepspeed.utils

    source, ours, theirs, copy = (folder / name for name in ("source", "ours", "theirs", "copy"))
    params = shapes(args.gigabytes)
    write(source, params, args.ranks, stage)
    script = source / "zero_to_fp32.py"  # DeepSpeed copies it there
    shutil.copy(Path(deepspeed.utils.__file__).parent / script.name, script)
    commands = {
        "`cp` of the result": ["cp", "--reflink=never", ours / "model.safetensors", copy],
        "`dtshard consolidate`": [args.dtshard, "consolidate", source, ours, "--assets", "none", "--no-sync", "--quiet"],
        "`zero_to_fp32.py --safe_serialization`": [sys.executable, script, source, theirs, "--safe_serialization"],
    }
    masters = 4 * sum(shape.numel() for shape in params.values())
    print(f"ZeRO {stage}, {args.ranks} ranks: {masters / 1e9:.2f} GB of masters, {size(source) / 1e9:.2f} GB in all", flush=True)
    run = lambda label: measure([str(word) for word in commands[label]], tree=label.startswith("`zero"))
    results = {label: [] for label in commands}
    run("`dtshard consolidate`")
    run("`zero_to_fp32.py --safe_serialization`")
    subprocess.run([args.dtshard, "verify", ours, theirs, "--quiet"], check=True)
    shutil.rmtree(theirs)
    for turn in range(args.rounds):
        results["`cp` of the result"].append(run("`cp` of the result"))
        copy.unlink()
        shutil.rmtree(ours)
        results["`dtshard consolidate`"].append(run("`dtshard consolidate`"))
        if turn < args.peer_rounds:
            results["`zero_to_fp32.py --safe_serialization`"].append(run("`zero_to_fp32.py --safe_serialization`"))
            shutil.rmtree(theirs)
    print("command | wall | user | system | anonymous memory | wall, as a multiple of dtshard's | CPU time, the same")
    first = results["`dtshard consolidate`"]
    for label, runs in results.items():
        middle = lambda value: statistics.median(map(value, runs))
        walls = [own.wall / other.wall for own, other in zip(runs, first)]
        cpus = [(own.user + own.system) / (other.user + other.system) for own, other in zip(runs, first)]
        print(f"{label} | {middle(lambda r: r.wall):.2f} s | {middle(lambda r: r.user):.2f} s | {middle(lambda r: r.system):.2f} s | "
              f"{max(r.anonymous for r in runs) / 1e6:.0f} MB | {statistics.median(walls):.2f} ({min(walls):.2f} to {max(walls):.2f}) | "
              f"{statistics.median(cpus):.2f} ({min(cpus):.2f} to {max(cpus):.2f})", flush=True)


def inspect(args, folder):
    """Times `inspect` of a ZeRO 3 checkpoint of many ranks, whose tensors are small: only metadata is read."""
    params = OrderedDict((f"layers.{i}.{name}.weight", torch.Size((64, 64))) for i in range(58) for name in LAYER)
    write(folder / "source", params, args.inspect, 3)
    command = f'"{args.dtshard}" inspect "{folder}/source" --brief >/dev/null 2>&1 && grep rchar /proc/$$/io'
    runs = []
    for _ in range(args.rounds):
        runs.append(measure([str(args.dtshard), "inspect", str(folder / "source"), "--brief"]))
    read = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True).stdout.split()[-1]
    none = subprocess.run(["sh", "-c", "true && grep rchar /proc/$$/io"], check=True, capture_output=True, text=True).stdout.split()[-1]
    print(f"inspect, ZeRO 3, {args.inspect} ranks, {len(params)} parameters, {size(folder / 'source') / 1e6:.1f} MB: "
          f"{statistics.median(run.wall for run in runs):.3f} s, {max(run.anonymous for run in runs) / 1e6:.0f} MB of memory, "
          f"{(int(read) - int(none)) / 1e6:.2f} MB read")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtshard", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"), help="folder for all files, in memory for tables of copies")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer-rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stage", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--inspect", type=int, metavar="RANKS")
    args = parser.parse_args()
    args.dtshard = args.dtshard.resolve()
    for stage in [3] if args.inspect else args.stage:
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            inspect(args, Path(folder)) if args.inspect else compare(args, stage, Path(folder))


if __name__ == "__main__":
    main()
