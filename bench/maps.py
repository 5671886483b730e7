"""Measure conversions with a weight map side by side with the code of transformers and torchtitan, and with no map.

    maps.py DTSHARD [--work FOLDER] [--rounds N] [--only CASE ...] [--titan-script convert_to_hf.py]

Needs torch, transformers==5.23.0 and, for the case `titan`, torchtitan==0.3.0 with the script `scripts/checkpoint_conversion/convert_to_hf.py`
of its repository, which is in no package. The models have random weights. In each round, the commands of a case run one after the
other on the same files; `dtshard verify --common` compares the results of the first round
(torchtitan's script leaves a tied `lm_head.weight` out). The table has the medians.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import measure, size

HERE = Path(__file__).resolve().parent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtshard", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"), help="folder for all files, in memory for tables of copies")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--titan-script", type=Path)
    args = parser.parse_args()
    args.dtshard = args.dtshard.resolve()
    for name in args.only:
        if name == "titan" and args.titan_script is None:
            continue
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            run(args, name, Path(folder))


def run(args, name, folder):
    source, results = folder / "source", {}
    subprocess.run([sys.executable, __file__.replace("maps.py", "map_models.py"), name, source], check=True)
    commands = CASES[name](args)
    print(f"{name}: SRC has {size(source) / 1e9:.2f} GB", flush=True)
    for turn in range(args.rounds):
        made = []
        for label, argv in commands.items():
            target = folder / f"{len(made)}{'.safetensors' if name == 'conv1d' else ''}"
            made.append(target)
            words = [str({"SRC": source, "DST": target}.get(word, word)) for word in argv]
            results.setdefault(label, []).append(measure(words, tree=True))
        if turn == 0 and name != "conv1d":
            subprocess.run([args.dtshard, "verify", made[0], made[1], "--common", "--quiet"], check=True)
        for target in made:
            shutil.rmtree(target) if target.is_dir() else target.unlink()
    first = next(iter(results.values()))
    print("command | wall | user + system | anonymous memory | wall, as a multiple of the first command")
    for label, runs in results.items():
        middle = lambda value: statistics.median(map(value, runs))
        ratios = [own.wall / other.wall for own, other in zip(runs, first)]
        print(
            f"{label} | {middle(lambda run: run.wall):.2f} s | {middle(lambda run: run.user + run.system):.2f} s | "
            f"{max(run.anonymous for run in runs) / 1e6:.0f} MB | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def dtshard(args, *words):
    return [args.dtshard, "consolidate", "SRC", "DST", *words, "--no-sync", "--threads", "2", "--quiet"]


def peer(name):
    return [sys.executable, HERE / "map_models.py", "SRC", "DST", "--peer", name]


def conv1d(args):
    commands = {}
    for io in ("read", "mmap"):
        for label, words in {"no map": (), "gpt2:conv1d:linear": ("--map", "gpt2:conv1d:linear")}.items():
            commands[f"--io {io}, {label}"] = dtshard(args, *words, "--io", io, "--assets", "none")
    return commands


def mixtral(args):
    return {
        "dtshard, mixtral:hf4:hf5": dtshard(args, "--map", "mixtral:hf4:hf5"),
        "`from_pretrained`, `state_dict`, `save_file`": peer("stack"),
    }


def fp8(args):
    return {
        "dtshard, --dequantize bf16": dtshard(args, "--dequantize", "bf16"),
        "`from_pretrained` with `dequantize=True`, `state_dict`, `save_file`": peer("dequantize"),
    }


def titan(args):
    return {
        "dtshard, qwen3-moe:titan:hf": dtshard(args, "--map", "qwen3-moe:titan:hf", "--assets", "none"),
        "torchtitan's `convert_to_hf.py`": [
            sys.executable, args.titan_script, "SRC", "DST", "--model_name", "qwen3", "--model_flavor", "0.6B", "--hf_assets_path", HERE,
        ],
    }


CASES = {"conv1d": conv1d, "mixtral": mixtral, "fp8": fp8, "titan": titan}

if __name__ == "__main__":
    main()
