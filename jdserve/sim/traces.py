"""Traces of real services: those that come with jdserve, and files.

A file has the format of :mod:`jdserve.core.trace`, or that of Mooncake (``.jsonl``): a row
``[timestamp in ms, input length, output length, [ids of the blocks of the prompt]]`` or an object with the keys
``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``. A block has 512 tokens, and equal ids mean equal
prefixes up to and with the block.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from jdserve.core import trace as tables
from jdserve.core.errors import InvalidWorkload

MOONCAKE_BLOCK = 512

TRACES: Mapping[str, str] = {
    "azure2023_conv": "azure2023_conv.csv.gz",
    "azure2023_code": "azure2023_code.csv.gz",
    "mooncake_conversation": "mooncake_conversation.jsonl.gz",
    "mooncake_synthetic": "mooncake_synthetic.jsonl.gz",
    "sharegpt": "sharegpt.csv",
    "humaneval": "humaneval.csv",
    "arxiv_summarization": "arxiv_summarization.csv.gz",
}
"""Traces that come with jdserve, and their files in ``data/``; see ``DATA.md`` there."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a real service; at least one.

    Attributes:
        name: of the trace, or its file.
        inputs: tokens of each prompt.
        outputs: tokens of each answer.
        arrivals_s: seconds from any origin, never decreasing; None where the trace has lengths only.
        blocks: ids of the blocks of each prompt, as in a workload; empty where the trace does not tell.
        block_tokens: tokens of a block.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arrivals_s: tuple[float, ...] | None = None
    blocks: tuple[tuple[int, ...], ...] = ()
    block_tokens: int = MOONCAKE_BLOCK

    def __len__(self) -> int:
        return len(self.inputs)


class _Mooncake(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: tuple[int, ...] = ()


class _MooncakeRow(_Mooncake, frozen=True, array_like=True):
    pass


def load_trace(name: str | Path) -> Trace:
    """The trace that comes with jdserve under ``name``, or the file at that path.

    Raises:
        InvalidWorkload: there is neither, or the file breaks its format (with the line).
    """
    if str(name) in TRACES:
        return _read(str(name), Path(__file__).parent / "data" / TRACES[str(name)])
    path = Path(name)
    if not path.exists():
        raise InvalidWorkload(f"trace: {name} is neither a file nor one of {', '.join(TRACES)}")
    return _read(str(name), path)


def _read(name: str, path: Path) -> Trace:
    rows = _mooncake(path)
    if rows is not None:
        return Trace(
            name=name,
            inputs=tuple(row.input_length for row in rows),
            outputs=tuple(row.output_length for row in rows),
            arrivals_s=tuple(row.timestamp / 1000 for row in rows),
            blocks=tuple(row.hash_ids for row in rows) if any(row.hash_ids for row in rows) else (),
        )
    table = tables.read_rows(path, tables.Row)
    arrivals = tuple(row.arrival_s for row in table if row.arrival_s is not None)
    return Trace(
        name=name,
        inputs=tuple(row.input_len for row in table),
        outputs=tuple(row.output_len for row in table),
        arrivals_s=arrivals or None,
    )


def _mooncake(path: Path) -> list[_Mooncake] | None:
    """The rows of a file in Mooncake's form, None where it is another one."""
    if ".jsonl" not in path.suffixes:
        return None
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = file.read().splitlines()
    except (OSError, EOFError) as error:
        raise InvalidWorkload(f"{path}: cannot be read: {error}") from None
    kind = _kind(lines[0] if lines else b"")
    if kind is None:
        return None
    rows: list[_Mooncake] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError as error:
            raise InvalidWorkload(f"{path}: line {number}: {error}") from None
        if len(rows) > 1 and rows[-1].timestamp < rows[-2].timestamp:
            raise InvalidWorkload(
                f"{path}: line {number}: timestamp must be at least {rows[-2].timestamp}, got {rows[-1].timestamp}"
            )
    return rows


def _kind(line: bytes) -> type[_Mooncake] | None:
    try:
        first: Any = json.loads(line)
    except ValueError:
        return None
    if isinstance(first, list):
        return _MooncakeRow
    return _Mooncake if isinstance(first, dict) and "input_length" in first else None
