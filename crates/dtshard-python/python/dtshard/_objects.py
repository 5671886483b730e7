"""Values that are not tensors. They are Python values when they are looked up.

The library decodes the pickles of a checkpoint as data, and refuses each class and function that is not on its list of
plain data. What it returns is pickled again from that data, so loading it here runs no code that a checkpoint names.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import _dtshard


class Objects(Mapping[str, Any]):
    """The values of a checkpoint that are not tensors, by their dotted paths."""

    def __init__(self, native: _dtshard.Checkpoint, tensor: Callable[[str], Any]) -> None:
        self._native = native
        self._tensor = tensor
        self._pickles: dict[str, bytes | None] = dict(native.objects())
        self._pickles.update(dict.fromkeys(native.unreadable_objects()))

    def __getitem__(self, path: str) -> Any:
        pickled = self._pickles[path]
        if pickled is None:
            # Raises the error that names the class.
            self._native.read([(path, None, 0, bytearray())], None)
            raise AssertionError(path)
        return _Unpickler(pickled, self._tensor).load()

    def __iter__(self) -> Iterator[str]:
        return iter(self._pickles)

    def __len__(self) -> int:
        return len(self._pickles)

    def __contains__(self, path: object) -> bool:
        return path in self._pickles

    def __repr__(self) -> str:
        return f"<{len(self)} objects: {', '.join(list(self)[:5])}{', ...' if len(self) > 5 else ''}>"


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensor: Callable[[str], Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensor = tensor

    def persistent_load(self, name: Any) -> Any:
        """Return a tensor inside a value, such as in a tuple."""
        return self._tensor(name)

    def find_class(self, module: str, name: str) -> Any:
        # Python 3.13 names the module of paths differently.
        return super().find_class("pathlib" if module == "pathlib._local" else module, name)
