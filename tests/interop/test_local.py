"""`dtshard reshard --to local`: each rank's file equals DTensor.to_local(), and from_local gives the whole tensors."""

import glob
import json
import os
import re

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import common
import generate
import parts
import rank_files
import ranks
import test_declared_layout


def own_part(tensor):
    """Returns the local tensor of a rank."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if type(tensor).__name__ == "ShardedTensor":
        shards = tensor.local_shards()
        return shards[0].tensor if shards else None
    return tensor


@pytest.mark.parametrize("case", ["fsdp3", "fsdp4", "fsdp_tp", "fsdp_tp6", "fsdp1_sharded", "hsdp", "llama_tiny", "tp2"])
def test_local_files_equal_to_local(tmp_path, case):
    common.dtshard("reshard", common.source(case, "ranks"), tmp_path / "local", "--to", "local")
    paths = sorted(glob.glob(f"{common.source(case, 'ranks')}/*_rank_*.pt"))
    world = int(re.search(r"_world_size_(\d+)_", paths[0])[1])
    for rank in range(world):
        found = load_file(tmp_path / "local" / f"rank-{rank:05}.safetensors")
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            for path in (p for p in paths if p.endswith(f"_rank_{rank}.pt")):
                kind = os.path.basename(path).split("_world_size")[0]
                for name, tensor in generate.leaves(torch.load(path, weights_only=False)):
                    own, other = own_part(tensor), found.pop(f"{kind}.{name}")
                    if own is None:
                        assert other.numel() == 0, name
                    else:
                        assert generate.same(own.detach(), other), f"{kind}.{name} on rank {rank}"
        finally:
            dist.destroy_process_group()
        assert not found, sorted(found)


TARGETS = [
    ("dp=3", "S(0)"), ("dp=2,tp=2", "S(0),S(1)"), ("dp=2,tp=3", "_S(0,3),S(0)"), ("rep=2,dp=2", "R,S(-1)"),
]


@pytest.mark.parametrize("mesh,placements", TARGETS)
@pytest.mark.parametrize("case", ["fsdp4", "fsdp_tp"])
def test_from_local_gives_the_whole_tensors(tmp_path, case, mesh, placements):
    folder = tmp_path / "local"
    common.dtshard("reshard", common.source(case, "ranks"), folder, "--to", "local", "--mesh", mesh, "--placements",
                   placements)
    document = json.loads((folder / "layout.json").read_text())
    common.run_ranks(ranks.load_local_files, document["world_size"], tmp_path, str(folder), case)


def test_rank_files_converted_to_local_and_back_load_equally(tmp_path):
    """DTensors are converted to local tensors and back: torch.load gives the same as for rank files of a direct conversion."""
    source = common.source("fsdp4", "ranks")
    mesh = ("--mesh", "fsdp=3")
    common.dtshard("reshard", source, tmp_path / "local", "--to", "local", *mesh)
    common.dtshard("reshard", tmp_path / "local", tmp_path / "back", "--to", "torch-ranks")
    common.dtshard("reshard", source, tmp_path / "direct", *mesh)
    for rank in range(3):
        dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
        try:
            for name in (f"model_world_size_3_rank_{rank}.pt", f"optim_world_size_3_rank_{rank}.pt"):
                trees = [torch.load(tmp_path / folder / name, weights_only=False) for folder in ("back", "direct")]
                found, expected = (dict(generate.leaves(tree)) for tree in trees)
                assert list(found) == list(expected)
                for key, tensor in found.items():
                    assert generate.same(own_part(tensor), own_part(expected[key])), key
                    if isinstance(tensor, DTensor):
                        assert tensor._spec == expected[key]._spec, key
                plain = [generate.encode(rank_files.plain(tree)) for tree in trees]
                assert plain[0] == plain[1]
        finally:
            dist.destroy_process_group()


STYLES = """
[styles]
embed = "rowwise-embedding"
up = "colwise"
down = "rowwise"
norm = "sequence"
"""


@pytest.mark.parametrize("world", [2, 3])
def test_tensor_parallel_engine_gives_the_same_outputs(tmp_path, world):
    """A whole safetensors file is sharded by a layout file with styles. A hand-written tensor-parallel model loads the files
    and gives the outputs of the whole model."""
    model = test_declared_layout.model(torch.float64)
    tokens = parts.batch(0)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save((tokens, model(tokens).detach()), tmp_path / "expected.pt")
    (tmp_path / "styles.toml").write_text(STYLES)
    common.dtshard("reshard", tmp_path / "model.safetensors", tmp_path / "local", "--to", "local", "--mesh", f"tp={world}",
                   "--plan", tmp_path / "styles.toml")
    common.run_ranks(parts.infer, world, tmp_path, str(tmp_path / "local"), str(tmp_path / "expected.pt"))
