"""Strict, versioned JSON: unknown keys, wrong types and broken bounds are refused with the JSON path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jdserve.core.errors import InvalidPlan

T = TypeVar("T")

_AT_PATH = re.compile(r"^(?P<message>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)


def decode(data: bytes | str, type: type[T]) -> T:
    """Parse ``data`` as ``type``.

    Raises:
        InvalidPlan: with the JSON path and what was expected there.
    """
    try:
        return msgspec.json.decode(data, type=type)
    except msgspec.DecodeError as error:
        raise _refused(error) from None


def convert(value: Mapping[str, Any], type: type[T]) -> T:
    """Read an object that is already parsed as ``type``.

    Raises:
        InvalidPlan: as :func:`decode`.
    """
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        raise _refused(error) from None


def _refused(error: msgspec.DecodeError) -> InvalidPlan:
    match = _AT_PATH.match(str(error))
    assert match is not None
    path, message = match["path"] or "$", match["message"]
    cause = error.__cause__
    if isinstance(cause, InvalidPlan):  # a struct checked itself: its path starts where the struct stands
        return InvalidPlan(path + cause.path.removeprefix("$"), message.removeprefix(f"{cause.path}: "))
    return InvalidPlan(path, message)


def encode(value: object) -> bytes:
    """Indented JSON with a final newline, keys in declaration order: equal values give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def schema(type: type[Any]) -> bytes:
    """JSON Schema (draft 2020-12) of ``type``."""
    return encode({"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(type)})


def read(path: str | Path, type: type[T]) -> T:
    """Parse the file at ``path`` as ``type``.

    Raises:
        InvalidPlan: the file cannot be read, or its content is refused.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidPlan("$", f"cannot read {path}: {error.strerror}") from None
    try:
        return decode(data, type)
    except InvalidPlan as error:
        raise InvalidPlan(f"{path}: {error.path}", str(error).removeprefix(f"{error.path}: ")) from None
