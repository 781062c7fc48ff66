"""The HTTP application: routes, health, metrics, and errors in one shape."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jdserve.server.admin import add_admin
from jdserve.server.answers import Health, Model, ModelList, Tokens, schema_components
from jdserve.server.chat import chat
from jdserve.server.completions import complete
from jdserve.server.described import answer, described, refusals
from jdserve.server.engine_api import TextEngine
from jdserve.server.errors import install_handlers
from jdserve.server.extras import add_extras
from jdserve.server.limits import LimitRequests, Limits
from jdserve.server.livepage import add_page
from jdserve.server.metrics import Metrics, Outcome
from jdserve.server.operations import Operations
from jdserve.server.protocol import ChatBody, CompletionBody, TokenizeBody
from jdserve.server.serving import Front
from jdserve.server.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATING = (COMPLETIONS, CHAT)
"""Paths whose requests are counted by outcome."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    engine: TextEngine,
    tokenizer: Tokenizer,
    served_name: str,
    *,
    drain_timeout_s: float = 30.0,
    limits: Limits | None = None,
    operations: Operations | None = None,
) -> FastAPI:
    """The application that serves ``engine``.

    Args:
        engine: started or starting; closed when the application shuts down.
        tokenizer: of its model.
        served_name: what clients call the model.
        drain_timeout_s: how long a shutdown waits for running requests.
        limits: of one HTTP request.
        operations: what the operator decides; by default everybody of this machine may use all but the admin's routes.
    """
    operations = operations or Operations()
    front = Front(engine, tokenizer, served_name, Metrics(engine, served_name, operations.request_log))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
            await engine.drain(drain_timeout_s)
        finally:
            await engine.close()

    app = FastAPI(title="jdserve", lifespan=lifespan, docs_url=None, redoc_url=None)

    def count(http: HttpRequest, outcome: Outcome) -> None:
        if http.method == "POST" and http.url.path in GENERATING:
            front.metrics.count(outcome)

    install_handlers(app, count)
    _add_generation(app, front)
    _add_models(app, front)
    _add_status(app, front)
    add_extras(app, front)
    app.add_middleware(LimitRequests, limits=limits or Limits())
    add_page(app, front)
    if operations.admin:
        add_admin(app, engine)
    operations.install(app)
    app.openapi = lambda: _openapi(app)
    return app


def _add_generation(app: FastAPI, front: Front) -> None:
    @app.post(COMPLETIONS, responses=_documented("Completion", stream="Completion"))
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        return await complete(front, body, http)

    @app.post(CHAT, responses=_documented("ChatCompletion", stream="ChatChunk"))
    async def chat_completions(body: ChatBody, http: HttpRequest) -> Response:
        return await chat(front, body, http)


def _add_models(app: FastAPI, front: Front) -> None:
    engine = front.engine

    @app.post("/tokenize", responses={200: described("Tokens"), **refusals(400, 404, 413)})
    async def tokenize(body: TokenizeBody) -> Response:
        front.check_model(body.model)
        (ids,) = await front.tokenizer.encode([body.prompt], add_special_tokens=body.add_special_tokens)
        return answer(Tokens(len(ids), engine.max_model_len, list(ids)))

    model = Model(front.served_name, "model", int(time.time()), "jdserve", engine.max_model_len)

    @app.get("/v1/models", responses={200: described("ModelList")})
    async def models() -> Response:
        return answer(ModelList("list", [model]))

    @app.get("/v1/models/{name:path}", responses={200: described("Model"), 404: described("ErrorResponse")})
    async def one_model(name: str) -> Response:
        front.check_model(name)
        return answer(model)


def _add_status(app: FastAPI, front: Front) -> None:
    engine = front.engine

    @app.get("/health", responses={200: described("Health"), 503: described("Health")})
    async def health() -> Response:
        progress = engine.progress
        if engine.draining:
            state = Health("draining")
        elif engine.ready:
            state = Health("ok")
        elif progress.error is not None:
            state = Health("failed", progress.stage, progress.done, progress.error)
        else:
            state = Health("starting", progress.stage, progress.done)
        return answer(state, 200 if state.status == "ok" else 503)

    @app.get("/metrics", responses={200: {"content": {METRICS_TYPE: {"schema": {"type": "string"}}}}})
    async def metrics() -> Response:
        return Response(front.metrics.render(), headers={"Content-Type": METRICS_TYPE})


def _documented(whole: str, *, stream: str) -> dict[int | str, dict[str, Any]]:
    """What a generating endpoint answers, by status."""
    ok = described(whole)
    ok["content"]["text/event-stream"] = {
        "schema": {"type": "string", "description": f"`data:` events: {stream} or ErrorResponse as JSON, then [DONE]"}
    }
    return {200: ok, **refusals(400, 404, 413, 429, 500, 503, 504)}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The description of the API. Bodies that do not fit are answered with 400, not with FastAPI's 422."""
    description = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path in description["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    schemas = description["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas.update(schema_components())
    return description
