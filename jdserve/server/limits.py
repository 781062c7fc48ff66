"""What the front door takes of one HTTP request, checked before anything of it is read into memory or parsed."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdserve.server.errors import ApiError


class Limits(msgspec.Struct, frozen=True):
    """Bounds on one HTTP request.

    Attributes:
        body_bytes: longest body. It is parsed on the event loop, which everybody else waits for.
        headers: most header lines.
    """

    body_bytes: int = 4 << 20
    headers: int = 100


class LimitRequests:
    """ASGI middleware that refuses what exceeds ``limits``: 400 for headers, 413 for a body.

    Args:
        app: that answers what does not.
        limits: the bounds.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        if len(headers) > self._limits.headers:
            message = f"the request has {len(headers)} headers; {self._limits.headers} is the limit"
            await self._refuse(ApiError(400, message, code="too_many_headers"), scope, receive, send)
            return
        told = next((value for name, value in headers if name == b"content-length"), b"0")
        if told.isdigit() and int(told[:19]) > self._limits.body_bytes:
            await self._refuse(self._too_large(), scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limits.body_bytes:
                raise HTTPException(413, str(self._too_large()), {"Connection": "close"})
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        message = f"the request body is longer than {self._limits.body_bytes} bytes, which is the limit"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await error.response()(scope, receive, send)
