"""DeepSpeed checkpoints without a conversion: `open`, `load_into` and `StorageReader` give the tensors of the live engines, and training
goes on as in DeepSpeed.
"""

import functools
import os
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dtshard
import jobs

FIXTURES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "fixtures")
sys.path.insert(0, FIXTURES)

import resume_deepspeed
from resume_deepspeed import FOLDER
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


@pytest.mark.parametrize("case", ["zero1_fp32", "zero1_bf16", "zero2_fp16", "zero3_fp32", "zero3_bf16", "v0.18.9/zero3_mics"])
def test_tensors_equal_those_of_the_live_engine(case):
    checkpoint = dtshard.open(f"{FOLDER}/{case}")
    for name, value in load_file(f"{FOLDER}/{case}.truth.safetensors").items():
        found = checkpoint[name].torch()
        assert found.dtype == value.dtype and torch.equal(found, value), name


def load_into(rank, case, flatten):
    """Loads the nested or the flat state dict of an optimizer."""
    ways = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer, _ = resume_deepspeed.job(case)
    weights, moments = get_state_dict(model, optimizer, options=ways)
    state = {"model": weights, "optimizer": moments}
    dtshard.load_into(state, f"{FOLDER}/{case}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"], options=ways)
    found = resume_deepspeed.whole_tensors(model, optimizer)
    expected = load_file(f"{FOLDER}/{case}.truth.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("case", ["zero1_fp32", "zero3_fp32"])
def test_optimizer_state_by_name_is_loaded_nested_and_flat(case, flatten):
    jobs.run(load_into, 2, case, flatten)


def go_on(rank, case, way):
    source = f"{FOLDER}/{case}"
    if way == "load_into":
        load = functools.partial(dtshard.load_into, path=source)
    else:
        load = functools.partial(dcp.load, storage_reader=dtshard.torch.StorageReader(source))
    resume_deepspeed.resume(case, load)


@pytest.mark.parametrize("way", ["load_into", "StorageReader"])
@pytest.mark.parametrize("case, ranks", [("zero1_fp32", 2), ("zero2_fp32", 2), ("zero3_fp32", 2), ("zero3_fp32", 1)])
def test_training_goes_on_as_in_deepspeed(case, ranks, way):
    jobs.run(go_on, ranks, case, way)
