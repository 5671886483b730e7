"""Runs every command of docs/tutorial.md, in the order of the page: the output of dtshard matches the page, and the weights are
those of training and editing."""

import os
import re
import subprocess
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import common

PAGE = os.path.join(common.REPOSITORY, "docs", "tutorial.md")
# The environment has all packages, so nothing is installed.
SKIPPED = ("python3 -m venv", "pip install")


def blocks(text):
    """Returns (language, lines, preceding paragraph) of each fenced block of a page."""
    return [(language, body.splitlines(), before) for before, language, body in
            re.findall(r"(?:((?:[^\n]+\n)+)\n)?```(\w+)\n(.*?)\n```\n", text, re.DOTALL)]


def commands(body):
    """Returns (command, expected lines) of a console block."""
    found = []
    for line in body:
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def masked(line):
    line = re.sub(r"in \d+\.\d s( \([\d.]+ [kMG]?B/s\))?", "in _ s", line)
    # The last bits of trained weights depend on the processor.
    return re.sub(r"max abs difference [\d.]+", "max abs difference _", line).rstrip()


def matches(found, expected):
    """Returns whether the lines equal the expected lines, where `...` stands for any number of lines."""
    if not expected:
        return not found
    if expected[0].strip() == "...":
        return any(matches(found[i:], expected[1:]) for i in range(len(found) + 1))
    return bool(found) and found[0] == expected[0] and matches(found[1:], expected[1:])


def run(command, folder):
    # PET_STANDALONE: torchrun chooses a free port.
    environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PET_STANDALONE="1")
    environment["PATH"] = os.pathsep.join([str(folder / "programs"), os.path.dirname(sys.executable), environment["PATH"]])
    done = subprocess.run(["sh", "-c", f"exec 2>&1; {command}"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout.splitlines()


def dcp_values(folder):
    """Returns name -> whole tensor of a DCP directory, read by PyTorch."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)
             for name, entry in metadata.items() if hasattr(entry, "chunks")}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_tutorial_commands_match_the_page_and_keep_the_weights(tmp_path):
    # A link, because the folder of the binary can have another Python.
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "dtshard").symlink_to(common.binary())
    compared, wrong = 0, []
    for language, body, before in blocks(open(PAGE).read()):
        if language == "python":
            name = re.search(r"Save this as `([\w.]+)`", before)[1]
            (tmp_path / name).write_text("\n".join(body) + "\n")
        elif language == "console":
            for command, expected in commands(body):
                found = run(command, tmp_path)
                if command.startswith("dtshard "):
                    found, expected = [[masked(line) for line in lines] for lines in (found, expected)]
                    wrong += [] if matches(found, expected) else [f"$ {command}", *found]
                    compared += 1
                else:
                    shown = [line for line in expected if line.startswith("loss ")]
                    assert len([line for line in found if line.startswith("loss ")]) == len(shown) > 0, command
        else:
            assert all(any(skip in line for skip in SKIPPED) for line in body), body
    assert compared >= 8 and not wrong, "what these commands print now:\n" + "\n".join(wrong)

    trained, start, resumed = (dcp_values(tmp_path / folder) for folder in ("run/step-3", "start", "run2/step-6"))
    shipped, edited = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "hf-edited"))
    weights = {name.removeprefix("model."): value for name, value in trained.items() if name.startswith("model.")}
    assert weights.keys() == shipped.keys() == edited.keys()
    for name, value in weights.items():
        assert torch.equal(value, shipped[name]), name
        changed = value * 0.5 if name == "model.norm.weight" else value
        assert torch.equal(changed, edited[name]), name
        assert torch.equal(edited[name], start[f"model.{name}"]), name
    assert start.keys() == trained.keys() == resumed.keys()
    for name, value in trained.items():
        if name.startswith("optim."):
            assert torch.equal(value, start[name]), name
    steps = {float(value) for name, value in resumed.items() if name.endswith(".step")}
    assert steps == {6.0}
