"""`dtshard reshard ... --to dcp-hf`: PyTorch's reader loads the files, and they equal those of PyTorch's writer."""

import glob
import json
import os
import struct

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import common
import generate
import ranks

EACH = pytest.mark.parametrize("case,kind", common.SOURCES)


def tensors_of(case, kind):
    return {k: v for k, v in common.expected_by_key(case, kind).items() if isinstance(v, torch.Tensor)}


def reshard(source, folder, target, *options):
    mesh, placements = common.TARGETS[target]
    common.dtshard("reshard", source, folder, "--to", "dcp-hf", "--mesh", ",".join(f"{n}={s}" for n, s in mesh),
                   "--placements", ",".join(placements), *options)


@EACH
@pytest.mark.parametrize("target", common.TARGETS)
def test_loads_into_plain_tensors(tmp_path, case, kind, target):
    folder = str(tmp_path / "shards")
    reshard(common.source(case, kind), folder, target)
    expected = tensors_of(case, kind)
    reader = HuggingFaceStorageReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    assert {name: entry.size for name, entry in entries.items()} == {k: v.shape for k, v in expected.items()}
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    common.assert_equal(state, expected, order=False)
    for name, entry in entries.items():
        chunks = [tuple(c.offsets) for c in entry.chunks]
        assert len(set(chunks)) == len(chunks), f"{name}: a chunk twice: {chunks}"


@pytest.mark.parametrize("case,kind", [("fsdp4", "dcp"), ("fsdp_tp", "dcp"), ("odd4", "ranks")])
def test_loads_into_dtensors(tmp_path, case, kind):
    """2 and 3 processes load the files into DTensors with another layout."""
    folders = []
    for target in ("s0x4", "s0s1"):
        folders.append(str(tmp_path / target))
        reshard(common.source(case, kind), folders[-1], target)
    expected = str(tmp_path / "expected.pt")
    torch.save({k: v.clone() for k, v in tensors_of(case, kind).items()}, expected)
    for world in (2, 3):
        (tmp_path / str(world)).mkdir()
        common.run_ranks(ranks.load_hf_shards, world, tmp_path / str(world), expected, folders)


def parsed(path):
    """Returns the header without `__metadata__`, the decoded sharding info, the rest of `__metadata__`, and the tensor data.
    Only the keys of `__metadata__` are compared without their order."""
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    metadata = dict(header.pop("__metadata__"))
    info = json.loads(metadata.pop("DCP_SHARDING_INFO"))
    return list(header.items()), list(info.items()), metadata, data


def test_files_equal_those_of_pytorchs_writer(tmp_path):
    """`generate.py` saved the expected files with HuggingFaceStorageWriter. The source of dtshard is one torch file with the
    same tensors."""
    truth = common.truth("dcp_hf")[1]
    order = ["model.embed_tokens.weight", "model.up.weight", "model.few.weight", "model.ids", "model.norm.weight",
             "model.scale", "model.steps", "model.mask"]
    assert set(order) == set(truth)
    torch.save({name: truth[name] for name in order}, tmp_path / "whole.pt")
    folder = str(tmp_path / "shards")
    common.dtshard("reshard", tmp_path / "whole.pt", folder, "--to", "dcp-hf", "--mesh", "dp=3",
                   "--placements", "S(0)", "--placements", "model.up.weight=S(1)",
                   "--placements", "model.norm.weight=R", "--placements", "model.mask=R")
    originals = sorted(glob.glob(f"{common.FIXTURES}/dcp_hf/shards/*"))
    assert sorted(os.listdir(folder)) == [os.path.basename(path) for path in originals]
    for path in originals:
        assert parsed(os.path.join(folder, os.path.basename(path))) == parsed(path), path


@pytest.mark.parametrize("target", common.TARGETS)
def test_consolidate_safetensors_files_reads_the_shards(tmp_path, target):
    """PyTorch 2.15 consolidates float tensors of one dim or more, but no integers and no 0-d tensors."""
    tensors = {k: v for k, v in tensors_of("fsdp4", "dcp").items() if v.dtype.is_floating_point and v.dim()}
    chosen = [option for name in tensors for option in ("--include", name)]
    shards, whole = str(tmp_path / "shards"), str(tmp_path / "whole")
    reshard(common.source("fsdp4", "dcp"), shards, target, *chosen)
    os.mkdir(whole)
    consolidate_safetensors_files(shards, whole, dict.fromkeys(tensors, 1))
    found = {}
    for path in glob.glob(f"{whole}/*.safetensors"):
        found.update(load_file(path))
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert generate.same(found[name], tensor), name
