"""FSDP1's flat parameters: PyTorch loads what dtshard wrote, rank by rank, and trains on."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import common
import fsdp1
import generate

# how the model of a case is wrapped, where it isn't FULL_SHARD in f32
MODELS = {"flat_mixed": {"mixed": True}, "flat_bf16": {"dtype": "bf16"}, "flat_hybrid": {"strategy": "hybrid"},
          "flat_none": {"strategy": "none"}}
RANKS = {"flat2": 2, "flat3": 3, "flat4": 4, "flat_mixed": 2, "flat_bf16": 2, "flat_hybrid": 4, "flat_none": 2}


def resume(tmp_path, folder, case, ranks, views, **more):
    job = {"folder": str(folder), "truth": case, "views": views, **MODELS.get(case, {}), **more}
    common.run_ranks(fsdp1.resume, ranks, tmp_path, job)


@pytest.mark.parametrize("case,folder", [
    *((case, folder) for case in RANKS for folder in ("views", "flat")), ("flat2", "groups"), ("flat2", "one_file")])
def test_pytorch_loads_its_own(tmp_path, case, folder):
    """The harness itself, without dtshard."""
    resume(tmp_path, common.source(case, folder), case, RANKS[case], folder != "flat",
           groups=folder in ("groups", "one_file"), again=str(tmp_path / "again"))
    group = 2 if case == "flat_hybrid" else RANKS[case]
    load = lambda path: fsdp1.load_all(path, RANKS[case], group)
    for again, own in zip(load(tmp_path / "again"), load(common.source(case, folder))):
        fsdp1.assert_same_files(again, own)


def test_pytorch_loads_its_own_sharded(tmp_path):
    common.run_ranks(fsdp1.resume_sharded, 2, tmp_path, {
        "folder": common.source("flat2", "sharded"), "truth": "flat2", "views": True, "by_rows": True})
