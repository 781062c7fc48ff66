"""The admin's routes: what `jdserve drain` and `jdserve add` do, over HTTP; there only where asked for."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jdserve.core import jsonio
from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import Addition
from jdserve.server.described import answer
from jdserve.server.engine_api import TextEngine
from jdserve.server.errors import ApiError
from jdserve.server.guard import ADMIN


class Changed(msgspec.Struct, frozen=True):
    """The answer: what was done, to which instance."""

    instance: str
    done: str


def add_admin(app: FastAPI, engine: TextEngine) -> None:
    """Add the routes to ``app``."""

    @app.post(f"{ADMIN}/instances/{{name}}/drain", include_in_schema=False)
    async def drain(name: str) -> Response:
        try:
            await engine.drain_instance(name)
        except InvalidPlan as error:
            raise ApiError(409, str(error), param="name", code="refused") from None
        return answer(Changed(name, "drained"))

    @app.post(f"{ADMIN}/instances", include_in_schema=False)
    async def add(http: HttpRequest) -> Response:
        try:
            addition = jsonio.decode(await http.body(), Addition)
            await engine.add_instance(addition.instance, addition.worker)
        except InvalidPlan as error:
            raise ApiError(400, str(error), param=error.path, code="invalid_instance") from None
        return answer(Changed(addition.instance.name, "added"))
