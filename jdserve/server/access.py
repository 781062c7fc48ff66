"""One line per HTTP request, with its ids and where its time went; and its spans, where traces are kept."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdserve.core.logs import FIELDS
from jdserve.server.guard import KEY_NAME, is_open
from jdserve.server.watch import SERVED, Served

logger = logging.getLogger("jdserve.access")

ID_HEADER = "x-request-id"

CLIENT_GONE = 499
"""Told of a request that got no answer, because nobody waited for one."""

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Exchange(msgspec.Struct, frozen=True):
    """One HTTP request, after its end. Times are seconds of the monotonic clock.

    Attributes:
        id: the client's own, or made.
        method, path, status: of the request and its answer.
        key: name of the API key, None without one.
        client: address that it came from.
        traceparent: of the trace that it belongs to (W3C), None without one.
        begin, end: from the first byte to the last.
        served: the samples that it was answered with.
    """

    id: str
    method: str
    path: str
    status: int
    key: str | None
    client: str | None
    traceparent: str | None
    begin: float
    end: float
    served: tuple[Served, ...]


class Access:
    """An ASGI application that watches ``app`` answer.

    Args:
        app: behind it.
        witnesses: told of each request after its end.
    """

    def __init__(self, app: ASGIApp, witnesses: Sequence[Callable[[Exchange], None]]) -> None:
        self._app = app
        self._witnesses = witnesses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, begin, status = Headers(scope=scope), time.monotonic(), CLIENT_GONE
        given = headers.get(ID_HEADER, "")
        id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        served: list[Served] = []
        scope[SERVED] = served

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = id
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = 500
            raise
        finally:
            client = scope.get("client")
            exchange = Exchange(
                id=id,
                method=scope["method"],
                path=scope["path"],
                status=status,
                key=scope.get(KEY_NAME),
                client=client[0] if client else None,
                traceparent=headers.get("traceparent"),
                begin=begin,
                end=time.monotonic(),
                served=tuple(served),
            )
            for witness in self._witnesses:
                witness(exchange)


def log_exchange(exchange: Exchange) -> None:
    """Write the line, at level INFO; at DEBUG where a probe asked."""
    level = logging.DEBUG if is_open(exchange.path) else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "%s", _text(exchange), extra={FIELDS: _fields(exchange)})


def _text(exchange: Exchange) -> str:
    # A path is the client's: it must not forge a line.
    head = (
        f"{exchange.method} {exchange.path!r} {exchange.status} {exchange.end - exchange.begin:.3f}s id={exchange.id}"
    )
    if exchange.key is not None:
        head += f" key={exchange.key}"
    return " | ".join([head, *(_sample_text(one) for one in exchange.served)])


def _sample_text(one: Served) -> str:
    times = " ".join(f"{name}={end - begin:.4f}" for name, (begin, end) in one.times().items())
    return f"{one.id} {one.finish} tokens={one.prompt_tokens}+{one.output_tokens} {times}".rstrip()


def _fields(exchange: Exchange) -> dict[str, Any]:
    return {
        "request_id": exchange.id,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status,
        "seconds": round(exchange.end - exchange.begin, 6),
        "key": exchange.key,
        "client": exchange.client,
        "samples": [_sample(one) for one in exchange.served],
    }


def _sample(one: Served) -> dict[str, Any]:
    phases = one.phases
    return {
        "id": one.id,
        "finish": one.finish,
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "output_tokens": one.output_tokens,
        "ttft_s": one.ttft_s,
        "tpot_s": one.tpot_s,
        "prefill": phases.prefill if phases else None,
        "decode": (phases.decode or phases.prefill) if phases else None,
        "runs": phases.runs if phases else 0,
        **{f"{name}_s": round(end - begin, 6) for name, (begin, end) in one.times().items()},
    }
