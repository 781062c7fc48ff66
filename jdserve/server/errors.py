"""Errors as the OpenAI API spells them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jdserve.core.errors import Busy, DeadlineExceeded, InvalidRequest, JdserveError, Overloaded
from jdserve.server.metrics import Outcome

MAX_MESSAGE = 2000
"""Most characters of an error message: a client's own input must not come back megabytes long."""

RETRY_AFTER_S = 5
"""Seconds that a refused client is asked to wait."""

BODY_MESSAGES = {
    "json_invalid": "the request body is not valid JSON",
    "missing": "the request body is missing",
}
"""What is said of a fault that lies in no field."""


class ErrorBody(msgspec.Struct, frozen=True):
    """The inner object of an error answer; ``type`` is the kind, ``code`` the reason for machines."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """An error answer, or the error event of a stream."""

    error: ErrorBody


class ApiError(Exception):
    """An error with its HTTP status.

    Attributes:
        status: HTTP status code.
        body: what the client reads.
        headers: extra answer headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message=_clip(message), type=type, param=_clip(param) if param else None, code=code)
        self.headers = dict(headers or {})

    def encode(self) -> bytes:
        """The JSON text of the answer."""
        return msgspec.json.encode(ErrorResponse(self.body))

    def response(self) -> Response:
        """The answer."""
        return Response(self.encode(), status_code=self.status, headers=self.headers, media_type="application/json")


def from_exception(error: Exception) -> ApiError:
    """What a client is told about an exception of the engine or of the checks before it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, str(error), type="timeout", param="timeout", code="deadline_exceeded")
    if isinstance(error, Busy):
        headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
        return ApiError(429, str(error), type="rate_limit_error", code="server_busy", headers=headers)
    if isinstance(error, Overloaded):
        return unavailable(str(error))
    # The text of a foreign exception may tell of the inside of the service; its kind is enough, the log has the rest.
    message = str(error) if isinstance(error, JdserveError) else f"internal error: {type(error).__name__}"
    return ApiError(500, message, type="server_error", code="request_failed")


def unavailable(message: str) -> ApiError:
    """The answer to a request that comes too early, too late or when there is no room."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(503, message, type="service_unavailable", code="unavailable", headers=headers)


def from_validation(errors: Sequence[Any]) -> ApiError:
    """What a client is told about a body that does not fit the schema: the first offending field.

    Args:
        errors: pydantic's list; each has ``loc`` (from "body" on), ``type`` and ``msg``.
    """
    first = errors[0]
    path = list(first["loc"])[1:]
    if first["type"] == "json_invalid" or not path:
        message = BODY_MESSAGES.get(first["type"], "the request body must be a JSON object")
        return ApiError(400, f"{message} (with content type application/json)", code="invalid_body")
    param = str(path[0])
    if first["type"] == "missing":
        return ApiError(400, f"{_dotted(path)} is required", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{_dotted(path)} is not a known parameter", param=param, code="unknown_parameter")
    # A field that takes several shapes reports each shape that did not fit.
    reasons = [e["msg"] for e in errors if list(e["loc"])[1:2] == path[:1]]
    return ApiError(400, f"{param}: {'; '.join(dict.fromkeys(reasons))}", param=param, code="invalid_value")


def _dotted(path: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _clip(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def install_handlers(app: FastAPI, count: Callable[[HttpRequest, Outcome], None]) -> None:
    """Make every error answer of ``app`` OpenAI-shaped.

    Args:
        app: to change.
        count: told of each request that is refused, or that breaks this code; what fails later is counted already.
    """

    def refuse(http: HttpRequest, error: ApiError) -> Response:
        if error.status not in (500, 504):
            count(http, "rejected")
        return error.response()

    async def on_ours(http: HttpRequest, error: Exception) -> Response:
        return refuse(http, from_exception(error))

    async def on_validation(http: HttpRequest, error: Exception) -> Response:
        return refuse(http, from_validation(cast(RequestValidationError, error).errors()))

    async def on_http(http: HttpRequest, error: Exception) -> Response:
        error = cast(HTTPException, error)
        texts = {404: f"there is no {http.url.path}", 405: f"{http.method} is not allowed here"}
        message = texts.get(error.status_code, str(error.detail))
        return refuse(http, ApiError(error.status_code, message, code=error.status_code, headers=error.headers))

    async def on_bug(http: HttpRequest, error: Exception) -> Response:
        count(http, "failed")
        return from_exception(error).response()

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ApiError, on_ours)
    app.add_exception_handler(JdserveError, on_ours)
    app.add_exception_handler(Exception, on_bug)
