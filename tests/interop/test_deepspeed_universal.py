"""`reshard --to deepspeed-universal`: DeepSpeed loads the folder at ZeRO stages 1, 2 and 3, in 1, 2 and 4 gloo processes. Master
weights, moments, steps and learning rates of the live engines equal those of the job that saved SRC, and the next three steps have
its losses. Also reads what `ds_to_universal.py` of the release writes. The processes run `deepspeed_universal.py`.

DTSHARD_DEEPSPEED_PYTHONS lists interpreters with DeepSpeed; without it, that of the tests is used if it has DeepSpeed.
"""

import glob
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import common
import generate

PYTHONS = [p for p in os.environ.get("DTSHARD_DEEPSPEED_PYTHONS", "").split(":") if p]
if not PYTHONS and importlib.util.find_spec("deepspeed"):
    PYTHONS = [sys.executable]
pytestmark = pytest.mark.skipif(not PYTHONS, reason="DeepSpeed is not installed")
SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "deepspeed_universal.py")


def launch(python, world, *arguments):
    """Runs a function of the script on every rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common_env = {"WORLD_SIZE": str(world), "LOCAL_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                  "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [python, SCRIPT, json.dumps([str(a) if isinstance(a, os.PathLike) else a for a in arguments])]
    ranks = [subprocess.Popen(command, env={**os.environ, **common_env, "RANK": str(r), "LOCAL_RANK": str(r)}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for r in range(world)]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    for rank, text in zip(ranks, said):
        assert rank.returncode == 0, text[-3000:]
    return said[0]


RELEASES = {}


def release(python):
    if python not in RELEASES:
        RELEASES[python] = tuple(map(int, re.search(r"release (\d+)\.(\d+)\.(\d+)", launch(python, 1, "release")).groups()))
    return RELEASES[python]


def for_stage(python, stage, universal, sub_groups=1):
    """Stage 3 of earlier releases needs other files: runs the lines that the how-to page gives for it, on a copy."""
    if stage < 3 or release(python) >= (0, 19, 4):
        return universal
    if release(python) < (0, 14, 5):
        pytest.skip("this release loads no Universal checkpoints at stage 3")
    if release(python) < (0, 18, 0) and sub_groups > 1:
        pytest.skip("stage 3 of this release loads a single sub-group")
    changed = universal.with_name("changed")
    shutil.copytree(universal, changed, dirs_exist_ok=True)
    with open(os.path.join(common.REPOSITORY, "docs", "how-to", "deepspeed.md")) as f:
        lines = f.read().split("### Stage 3 of earlier releases")[1].split("```python\n")[1].split("```")[0]
    exec(lines, {"folder": changed / (changed / "latest_universal").read_text()})
    return changed


def read(folder, name):
    with open(folder / name) as f:
        return json.load(f)


def check(folder, tolerance):
    """Compares the resumed job with the job that went on."""
    expected, found = read(folder, "went_on.json"), read(folder, "resumed.json")
    assert (found["lr"], found["global_steps"]) == (expected["lr"], expected["global_steps"])
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=0) if tolerance else found["losses"] == \
        expected["losses"]


def convert(source, folder, *options):
    common.dtshard("reshard", source, folder / "universal", "--to", "deepspeed-universal", "--verify", *options)
    return folder / "universal"


@pytest.mark.parametrize("stage,dtype,groups", [
    (1, "fp32", 2), (1, "bf16", 1), (1, "bf16_wrapper", 1), (2, "fp32", 1), (3, "fp32", 2), (3, "bf16", 1)])
@pytest.mark.parametrize("python", PYTHONS)
def test_zero_job_goes_on_bit_for_bit(tmp_path, python, stage, dtype, groups):
    launch(python, 2, "save", tmp_path, stage, dtype, groups)
    universal = convert(tmp_path / "saved", tmp_path)
    # `start` gives bf16 small sub-groups at stage 3.
    universal = for_stage(python, stage, universal, 2 if dtype == "bf16" else groups)
    launch(python, 2, "resume", tmp_path, stage, dtype, groups, universal, tmp_path / "truth.safetensors", True)
    assert read(tmp_path, "resumed.json")["client"] == 3
    check(tmp_path, 0)


@pytest.mark.parametrize("stage,world", [(1, 4), (2, 1), (3, 4)])
@pytest.mark.parametrize("python", PYTHONS)
def test_zero_job_goes_on_at_another_stage_and_size(tmp_path, python, stage, world):
    launch(python, 2, "save", tmp_path, 2 if stage == 3 else 3, "fp32", 1)
    universal = convert(tmp_path / "saved", tmp_path)
    launch(python, world, "resume", tmp_path, stage, "fp32", 1, for_stage(python, stage, universal), tmp_path / "truth.safetensors", True)
    check(tmp_path, 1e-6)


@pytest.fixture(scope="module")
def dcp_job(tmp_path_factory):
    """A job with FSDP2 that saved a DCP directory, in which no file is of DeepSpeed."""
    folder = tmp_path_factory.mktemp("dcp_job")
    launch(sys.executable, 2, "save_dcp", folder)
    convert(folder / "saved", folder)
    return folder


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("python", PYTHONS)
def test_deepspeed_resumes_from_dcp(dcp_job, python, stage, world, dtype):
    launch(python, world, "resume", dcp_job, stage, dtype, 2, for_stage(python, stage, dcp_job / "universal", 2), dcp_job / "truth.safetensors", False)
    # In bf16, the losses are those of other numbers.
    check(dcp_job, 1e-6 if dtype == "fp32" else 0.02)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("python", PYTHONS)
def test_deepspeed_starts_from_a_model(dcp_job, tmp_path, python, stage):
    universal = convert(dcp_job / "saved", tmp_path, "--exclude", "optimizer.**")
    tensors = load_file(dcp_job / "truth.safetensors")
    zeros = {name: t if name.startswith("model.") else torch.zeros_like(t) for name, t in tensors.items()}
    save_file(zeros, tmp_path / "truth.safetensors")
    launch(python, 2, "resume", tmp_path, stage, "fp32", 2, for_stage(python, stage, universal, 2), tmp_path / "truth.safetensors", False)
    assert read(tmp_path, "resumed.json")["lr"] == [0.01, 0.02]


@pytest.mark.parametrize("stage,dtype", [(1, "fp32"), (1, "bf16"), (3, "fp32"), (3, "bf16")])
@pytest.mark.parametrize("python", PYTHONS)
def test_files_of_ds_to_universal_are_read(tmp_path, python, stage, dtype):
    if stage == 3 and release(python) < (0, 14, 5):
        pytest.skip("this release has no Universal checkpoints of stage 3")
    if stage == 3 and dtype == "bf16" and release(python) < (0, 18, 0):
        pytest.skip("`ds_to_universal.py` of this release converts a single sub-group")
    launch(python, 2, "save", tmp_path, stage, dtype, 1)
    tag = tmp_path / "saved" / "global_step2"
    made = tmp_path / "made" / "global_step2_universal"
    options = ["--inject_missing_state"] if release(python) >= (0, 14, 5) else []
    if not options:
        # This release has no such option, and needs the key.
        for path in glob.glob(f"{tag}/*model_states.pt"):
            state = torch.load(path, weights_only=False)
            torch.save({**state, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}, path)
    command = [python, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", tag, "--output_folder", made,
               "--num_extract_workers", "1", "--num_merge_workers", "1", *options]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    common.dtshard("unshard", tmp_path / "made", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    found = {f"model.{name}": t for name, t in whole["model"].items()}
    for name, own in whole["optimizer"]["state"].items():
        found.update((f"optimizer.state.{name}.{key}", t) for key, t in own.items())
    expected = load_file(tmp_path / "truth.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert generate.same(found[name], value), name
    assert (whole["global_steps"], whole["epoch"]) == (2, 3)
