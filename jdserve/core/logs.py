"""Logs as text or as one JSON object a line, the same for the server and its workers."""

from __future__ import annotations

import datetime
import json
import logging
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")

FIELDS = "jdserve_fields"
"""Attribute of a log record: what it tells besides its message, by name; JSON lines have all of it."""


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, process, message, and the record's fields.

    Args:
        process: name of the process.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, FIELDS, {}), default=str)


def set_up(process: str, form: LogFormat) -> None:
    """Have every logger of this process write to stderr.

    Args:
        process: what lines begin with, or have as their ``process``.
        form: of the lines.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if form == "json" else logging.Formatter(f"{process}: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
