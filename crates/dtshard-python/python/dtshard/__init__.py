"""Read, load, convert and verify sharded PyTorch checkpoints.

>>> import dtshard
>>> checkpoint = dtshard.open("tests/fixtures/llama_tiny/dcp")
>>> checkpoint["model.model.norm.weight"].numpy().shape
(32,)
"""

from __future__ import annotations

import importlib
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from . import _dtshard
from ._checkpoint import Checkpoint, Progress, Tensor
from ._dtshard import __version__
from ._error import Error, check_call

if TYPE_CHECKING:
    from ._load import Loaded

__all__ = ["Checkpoint", "Error", "Progress", "Tensor", "__version__", "convert", "inspect", "load_into", "open", "verify"]

_Path = str | os.PathLike[str]


def open(path: _Path, *, rank: int = 0, **options: Any) -> Checkpoint:
    """Open a checkpoint of any format. Only its metadata is read.

    ``rank`` is the rank whose values are read where the ranks of the job stored values of their own, such as random states.

    ``options`` are those of ``dtshard verify``, with underscores: ``from_="dcp"``, ``include=["**.weight"]``,
    ``map="llama:hf"``, ``src_placements={"**": "S(0)"}``, ``threads=4`` and others.
    """
    check_call(None, rank)
    return Checkpoint(_dtshard.open(path, options, rank, False))


def load_into(
    state_dict: MutableMapping[str, Any],
    path: _Path,
    *,
    strict: bool = True,
    rank: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Loaded:
    """Fill the tensors of ``state_dict`` in place from a checkpoint of any format, and replace its other values.

    Each rank reads its own boxes of DTensors and ShardedTensors; nothing is communicated. Names are dotted paths, as in
    ``torch.distributed.checkpoint``. Objects with ``state_dict`` and ``load_state_dict`` are loaded as ``dcp.load`` does.

    With ``strict``, it is an error if the checkpoint lacks a name, or has a further name in an entry at the top of
    ``state_dict``. ``rank`` is the rank whose own values (such as random states) are loaded; the default is the rank of
    this process. ``options`` are those of ``open``. Returns the names that do not match.
    """
    from ._load import load_into

    check_call(progress, rank)
    return load_into(state_dict, path, strict=strict, rank=rank, progress=progress, **options)


def __getattr__(name: str) -> Any:
    # `dtshard.torch` imports torch, which takes seconds, so only those who use it wait for it.
    if name == "torch":
        return importlib.import_module("dtshard.torch")
    raise AttributeError(f"module 'dtshard' has no attribute {name!r}")


def convert(verb: str, *paths: _Path, progress: Progress | None = None, **options: Any) -> dict[str, Any]:
    """Convert a checkpoint: ``convert("reshard", src, dst, mesh="fsdp=8", placements={"**.wq.weight": "S(0)"})``.

    ``verb`` is ``reshard``, ``unshard``, ``flatten`` or ``consolidate``; ``options`` are those of the command, with
    underscores. The destination appears complete or not at all. One process converts the whole checkpoint, also under
    torchrun: call it on one rank, or give each rank its ``part`` of ``parts``. Returns what the command prints with
    ``--json``.
    """
    check_call(progress)
    return _dtshard.convert(verb, paths, options, progress)


def verify(src: _Path, other: _Path | None = None, *, progress: Progress | None = None, **options: Any) -> dict[str, Any]:
    """Check that a checkpoint is sound, or that two hold the same values. Returns what ``verify --json`` prints."""
    check_call(progress)
    return _dtshard.verify((src,) if other is None else (src, other), options, progress)


def inspect(path: _Path, **options: Any) -> dict[str, Any]:
    """Describe a checkpoint: layout, chunks, series. Returns what ``inspect --json`` prints."""
    return _dtshard.inspect(path, options)
