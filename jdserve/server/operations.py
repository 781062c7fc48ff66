"""What an operator decides about a server besides the plan: who may use it, and from where."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from jdserve.server.guard import Guard
from jdserve.server.keys import KeyRing

PREFLIGHT_S = 600
"""How long a browser may remember what it was allowed."""


class Operations(msgspec.Struct, frozen=True, kw_only=True):
    """See the module.

    Attributes:
        ring: keys that open the server.
        origins: web origins whose pages may use it; ``*`` is every one. None without CORS at all.
        admin: the admin routes exist.

    Raises:
        ValueError: admin routes that no key opens.
    """

    ring: KeyRing = msgspec.field(default_factory=KeyRing)
    origins: tuple[str, ...] = ()
    admin: bool = False

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
