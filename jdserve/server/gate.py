"""What answers while the server starts: the socket is open from the first second, and says how far things are."""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jdserve.runtime.progress import Progress
from jdserve.server.answers import Health
from jdserve.server.errors import RETRY_AFTER_S, unavailable


class Gate:
    """An ASGI application that answers 503 until :meth:`open` gives it the real one.

    Args:
        progress: of the start, told by ``/health``.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        """Let ``app`` answer from now on."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if self._app is not None:
            await self._app(scope, receive, send)
            return
        progress = self._progress
        if scope.get("path") == "/health":
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            health = Health("starting", progress.stage, progress.done)
            answer = Response(msgspec.json.encode(health), 503, headers, "application/json")
        else:
            answer = unavailable(f"the server is starting ({progress.stage})").response()
        await answer(scope, receive, send)
