"""Answers of one JSON object, and how the description of the API tells of them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from jdserve.server.errors import RETRY_AFTER_S


def answer(value: msgspec.Struct, status: int = 200) -> Response:
    """``value`` as JSON; a 503 says when to come again."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def described(name: str) -> dict[str, Any]:
    """An answer of the type ``name``."""
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": name, "content": {"application/json": {"schema": schema}}}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Errors that an endpoint answers, by status."""
    return {status: described("ErrorResponse") for status in statuses}
