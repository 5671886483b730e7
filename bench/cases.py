"""The works that are measured, dtshard's command for each, and the peers (other tools) that do the same work.

`SRC` and `DST` in a command stand for paths. Every work except those of the group `scale` also has a `cp` of its source; times
are compared with the time of this `cp`.
"""

import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

PEERS = Path(__file__).resolve().parent / "peers.py"


class Kind(StrEnum):
    COPY = "copy"
    DTSHARD = "dtshard"
    PEER = "peer"


class Table(StrEnum):
    TMPFS = "tmpfs"
    DISK = "disk"
    COLD = "cold"


@dataclass(frozen=True)
class Command:
    """One way to do a work. `source` is set if it is not the source of the work."""

    kind: Kind
    name: str
    argv: tuple
    source: str | None = None


@dataclass(frozen=True)
class Case:
    """A work, and the commands that do it. The others are compared with the first command."""

    group: str
    work: str
    source: str
    commands: tuple
    check: tuple = ()  # options of `verify SRC DST`
    file: str = ""  # name of DST if DST is one file
    tables: tuple = (Table.TMPFS, Table.DISK)

    def sources(self):
        return dict.fromkeys(command.source or self.source for command in self.commands)


@dataclass(frozen=True)
class Source:
    """A checkpoint to convert: options of make_checkpoint.py, or a command that makes it from another source (`base`)."""

    options: tuple = ()
    scale: float = 1
    argv: tuple = ()
    base: str | None = None
    file: str = ""


COPY = Command(Kind.COPY, "cp", ("cp", "-r", "--reflink=never", "SRC", "DST"))
TORCH = (sys.executable, "-m", "torch.distributed.checkpoint.format_utils")


def dtshard(*words, name="dtshard", source=None):
    return Command(Kind.DTSHARD, name, ("dtshard", words[0], "SRC", "DST", *words[1:], "--quiet"), source)


def peer(name, *argv):
    return Command(Kind.PEER, name, (*argv, "SRC", "DST"))


def script(name, *argv):
    return Command(Kind.PEER, name, (sys.executable, PEERS, argv[0], "SRC", "DST", *argv[1:]))


DCP_TO_TORCH = peer("`dcp_to_torch`", *TORCH, "dcp_to_torch")
TORCH_TO_DCP = peer("`torch_save_to_dcp`", *TORCH, "torch_to_dcp")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.accelerate_cli")
MERGE_WEIGHTS = peer("`accelerate merge-weights`", *ACCELERATE, "merge-weights")
MERGE_RANKS = script("merging loop over rank files", "merge")
CONSOLIDATE = script("`consolidate_safetensors_files`", "consolidate")


def load_and_save(ranks, dim):
    return script(f"`dcp.load` and `dcp.save`, {ranks} processes", "reshard", "--ranks", str(ranks), "--dim", str(dim))


def sources(ranks, small):
    """Returns the sources by name. A source comes after the source from which it is made."""
    half = f"fsdp={ranks // 2}"
    of_dcp = {"base": "dcp"}
    flatten = ("dtshard", "flatten", "BASE", "SRC", "--flat-layout", "BASE.flat_layout.json", "--no-sync", "--quiet")
    local = ("dtshard", "reshard", "BASE", "SRC", "--no-sync", "--quiet")
    plan = (*local, "--to", "local", "--mesh", f"dp={ranks // 2},tp=2", "--plan", "llama")
    summed = (*local, "--to", "torch-ranks", "--mesh", f"dp=2,tp={ranks // 2}", "--placements", "P(sum),S(0)")
    return {
        "dcp": Source(),
        "torch": Source(argv=(*TORCH, "dcp_to_torch", "BASE", "SRC"), file="model.pt", **of_dcp),
        "flat": Source(argv=flatten, **of_dcp),
        "views": Source(argv=(*flatten, "--use-orig-params"), **of_dcp),
        "local": Source(argv=plan, **of_dcp),
        "summed": Source(argv=summed, scale=2, **of_dcp),
        "ranks": Source(("--format", "ranks")),
        "hf": Source(("--format", "hf")),
        "dcp-f32": Source(("--dtype", "f32")),
        "ranks-f32": Source(("--format", "ranks", "--dtype", "f32")),
        "adamw": Source(("--adamw",)),
        "views-adamw": Source(argv=(*flatten, "--use-orig-params"), base="adamw"),
        "half": Source(scale=0.5),
        "double": Source(scale=2),
        "small": Source(("--small", str(small)), scale=small * 2e-6),
    }


def cases(ranks, small):
    """Returns all works. Works with the same source follow each other, so that few sources exist at a time."""
    fewer, model = ranks * 3 // 4, ("--root", "model")
    mesh, mesh_fewer = ("--mesh", f"fsdp={ranks}"), ("--mesh", f"fsdp={fewer}")
    flatten = dtshard("flatten", "--flat-layout", "SRC.flat_layout.json")
    flatten_fewer = dtshard("flatten", "--world-size", str(fewer))

    def case(group, work, source, command, *peers, **more):
        return Case(group, work, source, (COPY, command, *peers), **more)

    def io(*words):
        return (dtshard(*words, "--io", how, name=f"dtshard --io {how}") for how in ("mmap", "read", "direct"))

    cold, tmpfs = {"tables": (Table.COLD,)}, {"tables": (Table.TMPFS,)}
    to_s0, to_s1 = ("reshard", *mesh_fewer, "--placements", "S(0)"), ("reshard", *mesh, "--placements", "S(1)")
    names = {"consolidate": "consolidate dcp to safetensors", "unshard": "unshard dcp to torch",
             "s0": f"reshard S(0) x {ranks} to S(0) x {fewer}", "s1": f"reshard S(0) x {ranks} to S(1) x {ranks}"}
    whole, to_bf16 = {"file": "model.pt"}, ("consolidate", "--dtype", "bf16")
    return [
        case("consolidate", names["consolidate"], "dcp", dtshard("consolidate"), MERGE_WEIGHTS, check=model),
        case("unshard", names["unshard"], "dcp", dtshard("unshard"), DCP_TO_TORCH, **whole),
        case("reshard", names["s0"], "dcp", dtshard(*to_s0), load_and_save(fewer, 0)),
        case("reshard", names["s1"], "dcp", dtshard(*to_s1), load_and_save(ranks, 1)),
        case("flat", "flatten dcp", "dcp", flatten),
        case("layouts", "reshard dcp by plan llama", "dcp",
             dtshard("reshard", "--mesh", f"dp={ranks // 2},tp=2", "--plan", "llama"), **tmpfs),
        case("consolidate", names["consolidate"], "dcp", dtshard("consolidate"), *io("consolidate"), MERGE_WEIGHTS,
             check=model, **cold),
        case("unshard", names["unshard"], "dcp", dtshard("unshard"), *io("unshard"), DCP_TO_TORCH, **whole, **cold),
        case("reshard", names["s1"], "dcp", dtshard(*to_s1), *io(*to_s1), **cold),
        case("dcp", f"reshard torch to dcp x {ranks}", "torch", dtshard("reshard", "--to", "dcp", *mesh), TORCH_TO_DCP),
        case("flat", "unshard flat to torch", "flat", dtshard("unshard"), **whole),
        case("flat", f"flatten flat x {ranks} to flat x {fewer}", "flat", flatten_fewer, **tmpfs),
        case("flat", "unshard views to torch", "views", dtshard("unshard"), **whole, **tmpfs),
        case("flat", f"flatten views and AdamW x {ranks} to x {fewer}", "views-adamw", flatten_fewer, **tmpfs),
        case("layouts", "consolidate local to safetensors", "local", dtshard("consolidate"), check=model, **tmpfs),
        case("layouts", "consolidate P(sum) tensors, 2 partial values for each, to safetensors", "summed",
             dtshard("consolidate"), check=model, **tmpfs),
        case("consolidate", "consolidate torch-ranks to safetensors", "ranks", dtshard("consolidate"), MERGE_RANKS),
        case("consolidate", "consolidate dcp-hf to safetensors", "hf", dtshard("consolidate"), CONSOLIDATE),
        case("cast", "consolidate dcp to safetensors, f32 to bf16", "dcp-f32", dtshard(*to_bf16),
             check=(*model, *to_bf16[1:])),
        case("cast", "consolidate torch-ranks to safetensors, f32 to bf16", "ranks-f32",
             dtshard(*to_bf16), MERGE_RANKS, check=to_bf16[1:]),
        case("small", f"consolidate {small:,} tensors of 1 KiB to safetensors", "small", dtshard("consolidate"),
             MERGE_WEIGHTS, check=model),
        Case("scale", names["consolidate"], "half", scaled("consolidate"), check=model, **tmpfs),
        Case("scale", names["s1"], "half", scaled(*to_s1), **tmpfs),
    ]


def scaled(*words):
    """Returns two commands that do the same on a checkpoint of half the size and on one of twice the size."""
    return dtshard(*words, name="half", source="half"), dtshard(*words, name="double", source="double")
