"""dtshard for ``torch.distributed.checkpoint``: a storage reader for every format that dtshard reads.

::

    torch.distributed.checkpoint.load(state_dict, storage_reader=dtshard.torch.StorageReader(path))
"""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as _StorageReader
from torch.futures import Future

from . import _dtshard
from ._checkpoint import Checkpoint, torch_dtype
from ._load import Job, fill


class StorageReader(_StorageReader):
    """Reads a checkpoint of any format for ``torch.distributed.checkpoint.load``.

    ``options`` are those of ``dtshard.load_into``. The planner sees each tensor as one chunk, and each rank reads only
    its own boxes. Optimizer state has parameter names as keys, as ``get_optimizer_state_dict`` gives them.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        self._path = path
        self._options = options
        self._opened: Checkpoint | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and checkpoint_id != self._path:
            self._path, self._opened = checkpoint_id, None

    @property
    def _checkpoint(self) -> Checkpoint:
        if self._opened is None:
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            self._opened = Checkpoint(_dtshard.open(self._path, self._options, rank, True))
        return self._opened

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        checkpoint = self._checkpoint
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, tensor in checkpoint.items():
            size = torch.Size(tensor.shape)
            chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=torch_dtype(tensor._long_dtype))
            found[name] = TensorStorageMetadata(properties, size, [chunk])
        for name in checkpoint.objects:
            found[name] = BytesStorageMetadata()
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        checkpoint = self._checkpoint
        targets = []
        jobs: list[Job] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(checkpoint.objects[name], stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
            else:
                target = planner.resolve_tensor(item)
                targets.append((item, target))
                jobs.append((name, (list(item.storage_offsets), list(item.lengths)), target))
        fill(checkpoint._native, jobs)
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.path.exists(checkpoint_id)
