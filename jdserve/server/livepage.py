"""The live page at ``/``: its files, which hold nothing, and ``/state``, which it asks for every second."""

from __future__ import annotations

import math
import time
from importlib.resources import files

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from jdserve.core.plan import ColocatedInstance, DecodeInstance, Instance, Plan, PrefillInstance, role_of
from jdserve.core.request import SLO
from jdserve.core.version import VERSION
from jdserve.runtime.outputs import InstanceStats, TransferStats
from jdserve.server.attainment import Attained
from jdserve.server.errors import ApiError
from jdserve.server.serving import Front

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    # Nothing from elsewhere, nothing inline, in no other site's frame.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Place(msgspec.Struct, frozen=True):
    """Devices of one pipeline stage: ids on their hosts."""

    host: str
    devices: list[int]


class InstanceState(msgspec.Struct, frozen=True):
    """An instance now.

    Attributes:
        role, tp, pp: of the plan.
        largest: most sequences in a batch.
        up: it takes work.
        stages: where it runs.
        stats: its numbers.
    """

    name: str
    role: str
    tp: int
    pp: int
    largest: int
    up: bool
    stages: list[list[Place]]
    stats: InstanceStats


class LinkState(msgspec.Struct, frozen=True):
    """A way that KV may take."""

    source: str
    destination: str
    transport: str


class Bucket(msgspec.Struct, frozen=True):
    """A bar of a histogram: how many lie up to ``bound`` seconds; None is without bound."""

    bound: float | None
    count: int


class State(msgspec.Struct, frozen=True):
    """Answer of ``/state``: everything that the live page shows.

    Attributes:
        at: monotonic seconds, for rates.
        tokens: generated so far.
        attained: of the last minute's requests, None without any.
    """

    model: str
    version: str
    at: float
    ready: bool
    draining: bool
    tokens: int
    recompilations: int
    slo: SLO | None
    attained: Attained | None
    transfers: TransferStats
    instances: list[InstanceState]
    links: list[LinkState]
    ttft: list[Bucket]
    tpot: list[Bucket]


def state(front: Front) -> State:
    """What the page shows now."""
    engine, metrics = front.engine, front.metrics
    plan, stats = engine.plan, engine.stats()
    known = {one.name: one for one in stats.instances}
    instances = [
        InstanceState(
            name=one.name,
            role=role_of(one),
            tp=one.tp,
            pp=one.pp,
            largest=_largest(one),
            up=one.name in known and one.name not in stats.dead,
            stages=_stages(plan, one),
            stats=known.get(one.name, InstanceStats(one.name, role_of(one))),
        )
        for one in plan.instances
    ]
    return State(
        model=front.served_name,
        version=VERSION,
        at=time.monotonic(),
        ready=engine.ready,
        draining=engine.draining,
        tokens=metrics.tokens(),
        recompilations=stats.recompilations,
        slo=plan.slo,
        attained=None if metrics.window is None else metrics.window.now(),
        transfers=stats.transfers,
        instances=instances,
        links=_links(plan),
        ttft=_buckets(metrics.histogram("ttft")),
        tpot=_buckets(metrics.histogram("tpot")),
    )


def _largest(instance: Instance) -> int:
    match instance:
        case PrefillInstance():
            return instance.max_batch
        case DecodeInstance() | ColocatedInstance():
            return instance.max_num_seqs


def _stages(plan: Plan, instance: Instance) -> list[list[Place]]:
    stages: list[list[Place]] = []
    for stage in range(instance.pp):
        places: dict[str, list[int]] = {}
        for host, device in plan.devices(instance.name, stage):
            places.setdefault(host, []).append(device)
        stages.append([Place(host, devices) for host, devices in places.items()])
    return stages


def _links(plan: Plan) -> list[LinkState]:
    sources = [one.name for one in plan.instances if isinstance(one, PrefillInstance)]
    destinations = [one.name for one in plan.instances if isinstance(one, DecodeInstance)]
    return [LinkState(s, d, plan.transport_between(s, d)) for s in sources for d in destinations]


def _buckets(counts: list[tuple[float, int]]) -> list[Bucket]:
    return [Bucket(None if math.isinf(bound) else bound, count) for bound, count in counts]


def add_page(app: FastAPI, front: Front) -> None:
    """Add the page and what it asks for to ``app``. The files are read now; no request names one that is not here."""
    folder = files("jdserve.server") / "page"
    page = {file.name: file.read_bytes() for file in folder.iterdir() if file.name[file.name.rfind(".") :] in TYPES}

    def answer(name: str) -> Response:
        content = page.get(name)
        if content is None:
            raise ApiError(404, f"the page has no file {name!r}", code="not_found")
        return Response(content, headers=HEADERS, media_type=TYPES[name[name.rfind(".") :]])

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return answer("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def one(name: str) -> Response:
        return answer(name)

    @app.get("/state", include_in_schema=False)
    async def now() -> Response:
        body = msgspec.json.encode(state(front))
        return Response(body, headers={"Cache-Control": "no-store"}, media_type="application/json")
