"""Strict, versioned JSON: unknown keys, wrong types and broken bounds are refused with the JSON path."""

from __future__ import annotations

import re
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
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        match = _AT_PATH.match(str(error))
        assert match is not None
        raise InvalidPlan(match["path"] or "$", match["message"]) from None


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
