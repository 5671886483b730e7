"""Values that are not tensors: unpickles them without importing what the checkpoint names.

A pickle may name any function of any package. Only the classes and functions in ``_ALLOWED`` are loaded, and those that
the user has allowed with ``torch.serialization.add_safe_globals``, as in ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ._error import Error

_ALLOWED = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "_codecs": {"encode"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "torch": {"Size", "device", "layout", "memory_format", "strided", "contiguous_format"},
    "torch.torch_version": {"TorchVersion"},
}
"""The classes and functions that are harmless whatever their arguments are."""

_RENAMED = {
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
    "numpy.core": "numpy._core",
    "__builtin__": "builtins",
    "pathlib._local": "pathlib",
}
"""Modules that other versions of Python and numpy name differently."""


class Objects(Mapping[str, Any]):
    """The values of a checkpoint that are not tensors, by their dotted paths. A value is unpickled when it is looked up."""

    def __init__(self, pickles: list[tuple[str, bytes]], tensor: Callable[[str], Any]) -> None:
        self._pickles = dict(pickles)
        self._tensor = tensor

    def __getitem__(self, path: str) -> Any:
        try:
            return _Unpickler(self._pickles[path], self._tensor).load()
        except Refused as refused:
            raise Error(
                {
                    "kind": "unsupported",
                    "message": f"{path}: the value needs {refused}, which is not loaded, because a pickle can run any code",
                    "fqn": path,
                    "hint": f"if you trust the checkpoint, call torch.serialization.add_safe_globals([{refused}]) first",
                }
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._pickles)

    def __len__(self) -> int:
        return len(self._pickles)

    def __contains__(self, path: object) -> bool:
        return path in self._pickles

    def __repr__(self) -> str:
        return f"<{len(self)} objects: {', '.join(list(self)[:5])}{', ...' if len(self) > 5 else ''}>"


class Refused(Exception):
    """A pickle names a class or function that is not loaded."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensor: Callable[[str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensor = tensor

    def persistent_load(self, name: Any) -> Any:
        return self._tensor(name)

    def find_class(self, module: str, name: str) -> Any:
        new = _RENAMED.get(module, module)
        if name in _ALLOWED.get(new, ()):
            return getattr(importlib.import_module(new), name)
        torch = sys.modules.get("torch")
        if torch is not None:
            if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
            for allowed in torch.serialization.get_safe_globals():
                function, full_name = allowed if isinstance(allowed, tuple) else (allowed, None)
                if f"{module}.{name}" == (full_name or f"{function.__module__}.{function.__qualname__}"):
                    return function
        raise Refused(f"{module}.{name}")
