"""Small routes around generation: probes, the version, ids to text, and what is not offered."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from jdserve.core.errors import InvalidRequest
from jdserve.core.version import VERSION
from jdserve.server.answers import Detokenized, Version
from jdserve.server.described import answer, described, refusals
from jdserve.server.errors import ApiError, unavailable
from jdserve.server.protocol import DetokenizeBody
from jdserve.server.serving import Front, check_ids

NOT_OFFERED = ("/v1/embeddings", "/v1/responses", "/v1/moderations", "/v1/images/generations", "/v1/audio/speech")
"""Endpoints of OpenAI's API that a model of text has no answer to."""

MAX_DETOKENIZED = 1 << 20

EMPTY = {"description": "Empty", "content": {"application/json": {"schema": {"type": "object"}}}}


def add_extras(app: FastAPI, front: Front) -> None:
    """Add the routes to ``app``."""

    @app.get("/ping", responses={200: EMPTY})
    async def ping() -> Response:
        return Response(b"{}", media_type="application/json")

    @app.get("/ready", responses={200: EMPTY, **refusals(503)})
    async def ready() -> Response:
        engine = front.engine
        if engine.draining:
            raise unavailable("the server is draining and takes no new request")
        if not (engine.started and engine.ready):
            raise unavailable("the server is not ready yet; /health tells how far it is")
        return Response(b"{}", media_type="application/json")

    @app.get("/version", responses={200: described("Version")})
    async def version() -> Response:
        return answer(Version(VERSION))

    @app.post("/detokenize", responses={200: described("Detokenized"), **refusals(400, 404)})
    async def detokenize(body: DetokenizeBody) -> Response:
        front.check_model(body.model)
        if len(body.tokens) > MAX_DETOKENIZED:
            raise InvalidRequest(f"tokens holds {len(body.tokens)} ids; {MAX_DETOKENIZED} is the limit", param="tokens")
        check_ids(body.tokens, front.engine.spec.vocab, "tokens")
        text = front.tokenizer.decode(body.tokens)
        return answer(Detokenized(text))

    for path in NOT_OFFERED:
        _refuse(app, front, path)


def _refuse(app: FastAPI, front: Front, path: str) -> None:
    @app.post(path, responses={200: EMPTY, **refusals(404)}, include_in_schema=False)
    async def refused() -> Response:
        message = f"{front.served_name} generates text and does not support {path}"
        raise ApiError(404, message, param="model", code="unsupported_endpoint")
