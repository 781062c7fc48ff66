"""Small routes around generation: probes, the version, ids to text, and what is not offered."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from jdserve.core.errors import InvalidRequest
from jdserve.core.version import VERSION
from jdserve.server.answers import Detokenized, Version
from jdserve.server.errors import ApiError, unavailable
from jdserve.server.protocol import DetokenizeBody
from jdserve.server.serving import Front

NOT_OFFERED = ("/v1/embeddings", "/v1/responses", "/v1/moderations", "/v1/images/generations", "/v1/audio/speech")
"""Endpoints of OpenAI's API that a model of text has no answer to."""

MAX_DETOKENIZED = 1 << 20


def add_extras(app: FastAPI, front: Front) -> None:
    """Add the routes to ``app``."""

    @app.get("/ping", responses=_answers("Empty"))
    async def ping() -> Response:
        return Response(b"{}", media_type="application/json")

    @app.get("/ready", responses=_answers("Empty", 503))
    async def ready() -> Response:
        engine = front.engine
        if engine.draining:
            raise unavailable("the server is draining and takes no new request")
        if not (engine.started and engine.ready):
            raise unavailable("the server is not ready yet; /health tells how far it is")
        return Response(b"{}", media_type="application/json")

    @app.get("/version", responses=_answers("Version"))
    async def version() -> Response:
        return Response(msgspec.json.encode(Version(VERSION)), media_type="application/json")

    @app.post("/detokenize", responses=_answers("Detokenized", 400, 404))
    async def detokenize(body: DetokenizeBody) -> Response:
        front.check_model(body.model)
        vocab = front.engine.spec.vocab
        if len(body.tokens) > MAX_DETOKENIZED:
            raise InvalidRequest(f"tokens holds {len(body.tokens)} ids; {MAX_DETOKENIZED} is the limit", param="tokens")
        wrong = next((token for token in body.tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise InvalidRequest(f"tokens holds token id {wrong}, outside 0..{vocab - 1}", param="tokens")
        text = front.tokenizer.decode(body.tokens)
        return Response(msgspec.json.encode(Detokenized(text)), media_type="application/json")

    for path in NOT_OFFERED:
        _refuse(app, front, path)


def _refuse(app: FastAPI, front: Front, path: str) -> None:
    @app.post(path, responses=_answers("Empty", 404), include_in_schema=False)
    async def refused() -> Response:
        message = f"{front.served_name} generates text and does not support {path}"
        raise ApiError(404, message, param="model", code="unsupported_endpoint")


def _answers(whole: str, *refusals: int) -> dict[int | str, dict[str, Any]]:
    def named(name: str) -> dict[str, Any]:
        schema = {"type": "object"} if name == "Empty" else {"$ref": f"#/components/schemas/{name}"}
        return {"description": name, "content": {"application/json": {"schema": schema}}}

    return {200: named(whole), **{status: named("ErrorResponse") for status in refusals}}
