"""The file format of workloads: how long prompts and answers are, and, for a trace, when the requests came.

A file is either of (a name that ends in ``.gz`` is read through gzip):

- CSV (``.csv``) with a header line that names the columns ``input_len``, ``output_len`` and, where the trace has
  arrivals, ``arrival_s``;
- JSON lines (``.jsonl``), one object with those keys a line.

Lengths are whole numbers of tokens, ``input_len`` at least 1 and ``output_len`` at least 0; ``arrival_s`` is in seconds
from any origin, never decreasing, and given on all rows or on none. Other columns are passed over.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Annotated, TextIO, TypeVar

import msgspec

from jdserve.core.errors import InvalidWorkload


class Row(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        input_len: tokens of the prompt, at least 1.
        output_len: tokens of the answer, at least 0.
        arrival_s: when it came, in seconds; None where the trace has lengths only.
    """

    input_len: Annotated[int, msgspec.Meta(ge=1)]
    output_len: Annotated[int, msgspec.Meta(ge=0)]
    arrival_s: float | None = None


R = TypeVar("R", bound=Row)


def read_rows(path: str | Path, kind: type[R], count: int | None = None) -> tuple[R, ...]:
    """The first ``count`` rows of a file, or all of them; at least one.

    Args:
        path: of the file.
        kind: of the rows: :class:`Row`, or one with narrower bounds.
        count: rows to read, None for all.

    Raises:
        InvalidWorkload: the file cannot be read, has no row, has fewer than ``count`` rows, or a row breaks the format.
    """
    path = Path(path)
    try:
        rows = tuple(itertools.islice(_rows(path, kind), count))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidWorkload(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise InvalidWorkload(f"{path}: must have at least 1 row, got 0")
    if count is not None and len(rows) < count:
        raise InvalidWorkload(f"{path}: has {len(rows)} rows, {count} were asked for")
    _check_arrivals(path, rows)
    return rows


def _rows(path: Path, row: type[R]) -> Iterator[R]:
    form = (path.suffixes or [""])[-2 if path.suffix == ".gz" else -1 :][0]
    if form not in (".csv", ".jsonl"):
        raise InvalidWorkload(f"{path}: must end in .csv, .jsonl, .csv.gz or .jsonl.gz")
    with _open(path) as file:
        # Line numbers are those of an editor; the header of a CSV is line 1.
        if form == ".csv":
            reader = csv.DictReader(file)
            for fields in reader:
                given = {name: value for name, value in fields.items() if name in row.__struct_fields__ and value != ""}
                try:
                    yield msgspec.convert(given, row, strict=False)
                except msgspec.ValidationError as error:
                    raise InvalidWorkload(f"{path}: line {reader.line_num}: {error}") from None
            return
        for number, line in enumerate(file, start=1):
            try:
                yield msgspec.json.decode(line, type=row)
            except msgspec.DecodeError as error:
                raise InvalidWorkload(f"{path}: line {number}: {error}") from None


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _check_arrivals(path: Path, rows: Seq[Row]) -> None:
    previous = rows[0].arrival_s
    for number, row in enumerate(rows, start=1):
        at = row.arrival_s
        if (at is None) != (previous is None):
            raise InvalidWorkload(f"{path}: row {number}: arrival_s must be on all rows or on none")
        if at is None or previous is None:
            continue
        if not math.isfinite(at) or at < previous:
            raise InvalidWorkload(f"{path}: row {number}: arrival_s must be finite and at least {previous}, got {at}")
        previous = at
