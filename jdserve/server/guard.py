"""Who may ask for what: every path needs a key but those listed here, and the admin's paths need the admin's."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jdserve.server.errors import ApiError
from jdserve.server.keys import Key, KeyRing

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/"})
"""Need no key: what probes of a supervisor ask for, and the live page, which holds nothing until it has a key."""

OPEN_FOLDER = "/page/"
"""The files of the live page."""

ADMIN = "/admin"
"""Above the paths that change the server."""

KEY_NAME = "jdserve.key"
"""Where a request's scope names the holder of its key."""


def is_open(path: str) -> bool:
    """Whether ``path`` needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def is_admin(path: str) -> bool:
    """Whether ``path`` needs an admin's key."""
    return path == ADMIN or path.startswith(f"{ADMIN}/")


class Guard:
    """An ASGI application that asks for a key before ``app`` hears of the request.

    Args:
        app: behind it.
        ring: the keys; an empty one opens everything but the admin's paths.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or let it through."""
        if scope["type"] == "http" and (refused := self._refusal(scope)) is not None:
            await refused.response()(scope, receive, send)
            return
        if scope["type"] == "websocket":  # there is none, and none may get past the keys
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path: str = scope["path"]
        if is_open(path) or not (self._ring or is_admin(path)):
            return None
        key = self._key(scope)
        if key is None:
            message = "this server needs an API key: send it as 'Authorization: Bearer KEY'"
            challenge = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=challenge)
        scope[KEY_NAME] = key.name
        if is_admin(path) and key.role != "admin":
            return ApiError(403, f"{path} needs an admin's key", type="permission_error", code="admin_only")
        return None

    def _key(self, scope: Scope) -> Key | None:
        scheme, _, secret = Headers(scope=scope).get("authorization", "").partition(" ")
        return self._ring.find(secret.strip()) if scheme.lower() == "bearer" else None
