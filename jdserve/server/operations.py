"""What an operator decides about a server besides the plan: who may use it, from where, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from jdserve.server.access import Access, Exchange, log_exchange
from jdserve.server.guard import Guard
from jdserve.server.keys import KeyRing
from jdserve.server.requestlog import RequestLog
from jdserve.server.tracing import Tracing

PREFLIGHT_S = 600
"""How long a browser may remember what it was allowed."""


class Operations(msgspec.Struct, frozen=True, kw_only=True):
    """See the module.

    Attributes:
        ring: keys that open the server.
        origins: web origins whose pages may use it; ``*`` is every one. None without CORS at all.
        admin: the admin routes exist.
        request_log: of the load, None for none.
        tracing: None for none.

    Raises:
        ValueError: admin routes that no key opens.
    """

    ring: KeyRing = msgspec.field(default_factory=KeyRing)
    origins: tuple[str, ...] = ()
    admin: bool = False
    request_log: RequestLog | None = None
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        if self.admin and not self.ring.has_admin:
            raise ValueError(
                "--admin-routes needs an admin's key: jdserve key NAME --admin --file FILE, --api-key-file FILE"
            )

    def install(self, app: FastAPI) -> None:
        """Put the guards before ``app``; the last one that is added is the first to hear of a request."""
        app.add_middleware(Guard, ring=self.ring)
        if self.origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type"],
                max_age=PREFLIGHT_S,
            )
        witnesses: list[Callable[[Exchange], None]] = [log_exchange]
        if self.tracing is not None:
            witnesses.append(self.tracing)
        app.add_middleware(Access, witnesses=witnesses)

    def close(self) -> None:
        """Write and send what is left."""
        if self.request_log is not None:
            self.request_log.close()
        if self.tracing is not None:
            self.tracing.close()
