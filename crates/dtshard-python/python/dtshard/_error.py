"""The exception of the package, and the receiver of the messages of the library."""

from __future__ import annotations

import logging
from typing import Any

_logger = logging.getLogger("dtshard")


class Error(Exception):
    """An error of dtshard.

    Attributes: ``kind`` (such as ``"malformed"``), ``file``, ``tensor`` (the dotted name), ``expected``, ``found``,
    ``hint`` (what to do next) and ``names``. An attribute that does not apply is ``None``. The hint is also a note of
    the exception, so that Python prints it below the message.
    """

    def __init__(self, fields: dict[str, Any] | str) -> None:
        fields = {"message": fields} if isinstance(fields, str) else fields
        super().__init__(fields["message"])
        self.kind: str | None = fields.get("kind")
        self.file: str | None = fields.get("file")
        self.tensor: str | None = fields.get("fqn")
        self.expected: str | None = fields.get("expected")
        self.found: str | None = fields.get("found")
        self.hint: str | None = fields.get("hint")
        self.names: list[str] | None = fields.get("names")
        if self.hint:
            self.add_note(f"hint: {self.hint}")


def usage(message: str, hint: str) -> Error:
    """Return the error for arguments that are wrong."""
    return Error({"kind": "usage", "message": message, "hint": hint})


def message(level: str, text: str) -> None:
    """Pass a message of the library to the logger ``dtshard``."""
    getattr(_logger, level)("%s", text)


def check_call(progress: Any, rank: int | None = 0) -> None:
    """Check the arguments that are not options."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function of two numbers, found {type(progress).__name__}")
    if rank is not None and not 0 <= rank < 2**32:
        raise usage(f"rank: expected a number from 0 to 2^32 - 1, found {rank}", "give the number of a rank")
