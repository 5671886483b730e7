"""An open checkpoint, and handles of its tensors that read only what is asked for."""

from __future__ import annotations

import copy
import difflib
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _dtshard
from ._error import usage
from ._objects import Objects

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int], object]
"""A function that receives the number of bytes that are done, and of all bytes. It is called a few times a second."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype for the name of a torch dtype, such as ``bfloat16``."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise usage(f"numpy has no dtype {name}", "install the package ml_dtypes, or read with .torch()") from None
    if not hasattr(ml_dtypes, name):
        raise usage(f"neither numpy nor ml_dtypes has a dtype {name}", "read the tensor with .torch()")
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name."""
    import torch

    if not hasattr(torch, name):
        raise usage(f"torch {torch.__version__} has no dtype {name}", "install a newer torch")
    found: torch.dtype = getattr(torch, name)
    return found


def _mapped(name: str, run: tuple[int, int], dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Map a run of bytes: the descriptor of an open file, and an offset."""
    descriptor, offset = run
    with os.fdopen(descriptor, "rb") as file:
        try:
            return np.memmap(file, dtype, "r", offset, shape)
        except (OSError, ValueError) as error:
            raise usage(f"{name}: the file cannot be mapped: {error}", "read the tensor without mmap") from None


class Checkpoint(Mapping[str, "Tensor"]):
    """An open checkpoint: a mapping from names to lazy handles of tensors. Nothing but metadata has been read."""

    def __init__(self, native: _dtshard.Checkpoint) -> None:
        self._native = native

    @cached_property
    def _rows(self) -> dict[str, Tensor]:
        rows = self._native.tensors()
        return {row[0]: Tensor(self, *row) for row in rows}

    @property
    def format(self) -> str:
        """The format, such as ``dcp``, as ``--from`` names it."""
        return self._native.format

    @property
    def path(self) -> str:
        """The file or folder that is the checkpoint."""
        return os.fspath(self._native.path)

    @property
    def series(self) -> list[str]:
        """The series of rank files that were found, such as ``model`` and ``optim``."""
        return self._native.series

    @cached_property
    def mesh(self) -> str | None:
        """The device mesh of the tensors, such as ``dp=2,tp=4``; ``None`` if the files record no mesh, or several."""
        meshes = {tensor.mesh for tensor in self.values() if tensor.mesh is not None}
        return meshes.pop() if len(meshes) == 1 else None

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """The values that are not tensors, by their dotted paths."""
        return Objects(self._native, self._tensor_of_object)

    def _tensor_of_object(self, name: str) -> torch.Tensor:
        if name not in self:
            # An object that cannot be read, inside a tuple or a set: raises the error that names its class.
            self._native.read([(name, None, 0, bytearray())], None)
        return self[name].torch()

    def __getitem__(self, name: str) -> Tensor:
        found = self._rows.get(name)
        if found is None:
            nearest = difflib.get_close_matches(name, self._rows, 3)
            raise KeyError(f"{name}: no tensor has this name" + (f"; the nearest are {', '.join(nearest)}" if nearest else ""))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<dtshard.Checkpoint {self.path!r}: {self.format}, {len(self)} tensors>"

    def __str__(self) -> str:
        return self._native.summary()

    def _repr_html_(self) -> str:
        """Show the report of ``dtshard inspect --html`` in a notebook."""
        return self._native.report()


class Tensor:
    """A tensor of a checkpoint, or a box of it. Values are read by ``numpy()``, ``torch()`` and ``np.asarray``."""

    __slots__ = ("_checkpoint", "_dims", "_long_dtype", "_offsets", "_sizes", "chunks", "dtype", "mesh", "name", "placements")

    name: str
    """The dotted path of the tensor in the state dict."""
    dtype: str
    """The dtype, such as ``bf16``."""
    placements: str | None
    """The placements, such as ``S(0),R``; ``None`` for a plain tensor, and if the files do not record them."""
    mesh: str | None
    """The device mesh, such as ``dp=2,tp=4``; ``None`` as for the placements."""
    chunks: int
    """The number of stored chunks of the tensor, including replicas."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        dtype: str,
        long_dtype: str,
        shape: list[int],
        placements: str | None,
        mesh: str | None,
        chunks: int,
    ) -> None:
        self._checkpoint = checkpoint
        self.name, self.dtype, self._long_dtype = name, dtype, long_dtype
        self.placements, self.mesh, self.chunks = placements, mesh, chunks
        self._offsets, self._sizes = [0] * len(shape), list(shape)
        # The dimensions of the tensor that the handle has: an integer index removes one.
        self._dims = list(range(len(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape; for a slice, the shape of the slice."""
        return tuple(self._sizes[dim] for dim in self._dims)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._dims)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self._sizes)

    @property
    def boxes(self) -> list[tuple[list[int], list[int]]]:
        """The boxes of the stored chunks of the whole tensor: offsets and sizes."""
        return self._checkpoint._native.boxes(self.name)

    def __getitem__(self, index: Any) -> Tensor:
        """Return a handle of a part: integers, slices of step 1 and ``...``, as numpy has them. Nothing is read."""
        index = index if isinstance(index, tuple) else (index,)
        ellipses = [place for place, item in enumerate(index) if item is Ellipsis]
        if len(ellipses) > 1:
            raise IndexError(f"{self.name}: an index can have only one ellipsis")
        if len(index) - len(ellipses) > self.ndim:
            raise IndexError(f"{self.name}: {len(index)} indices for {self.ndim} dimensions")
        at = ellipses[0] if ellipses else len(index)
        missing = self.ndim - len(index) + len(ellipses)
        index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
        part = copy.copy(self)
        part._offsets, part._sizes, part._dims = list(self._offsets), list(self._sizes), []
        for dim, item in zip(self._dims, index, strict=True):
            size = self._sizes[dim]
            if isinstance(item, bool):
                raise IndexError(f"{self.name}: an index is an integer, a slice or ..., found {item}")
            if isinstance(item, slice):
                start, stop, step = item.indices(size)
                if step != 1:
                    raise IndexError(f"{self.name}: a slice must have step 1, found {step}; use the step after reading")
                part._sizes[dim] = max(0, stop - start)
                part._dims.append(dim)
            else:
                start = operator.index(item)
                if not -size <= start < size:
                    raise IndexError(f"{self.name}: index {start} is out of bounds for a dimension of size {size}")
                start %= size
                part._sizes[dim] = 1
            part._offsets[dim] += start
        return part

    def __len__(self) -> int:
        if not self._dims:
            raise TypeError(f"{self.name}: a tensor without dimensions has no length")
        return self.shape[0]

    def numpy(self, *, mmap: bool = False) -> np.ndarray[Any, Any]:
        """Read the values into a new array. bf16 and 8-bit floats need the package ``ml_dtypes``.

        With ``mmap=True``, the result is a read-only view of the file where one run of bytes holds the values, and a
        new array otherwise. If another process truncates a mapped file, the operating system ends this process.
        """
        dtype = numpy_dtype(self._long_dtype)
        if mmap and self.size:
            run = self._checkpoint._native.stored_run(self.name, self._part)
            if run is not None:
                return _mapped(self.name, run, dtype, self.shape)
        array = np.empty(self.shape, dtype)
        self._read_into(array.reshape(-1).view(np.uint8))
        return array

    def torch(self) -> torch.Tensor:
        """Read the values into a new tensor on the CPU."""
        import torch

        tensor = torch.empty(self.shape, dtype=torch_dtype(self._long_dtype))
        self._read_into(tensor.reshape(-1).view(torch.uint8).numpy())
        return tensor

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(f"{self.name}: the values must be read, so the array is always a copy")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    @property
    def _part(self) -> tuple[list[int], list[int]]:
        return (self._offsets, self._sizes)

    def _read_into(self, buffer: np.ndarray[Any, Any]) -> None:
        self._checkpoint._native.read([(self.name, self._part, 0, buffer)], None)

    def __repr__(self) -> str:
        layout = f", {self.placements} on {self.mesh}" if self.placements else ""
        return f"<dtshard.Tensor {self.name!r}: {self.dtype} {list(self.shape)}{layout}>"
