"""Which transport KV takes from one instance to another, and the transports of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from jax.sharding import Mesh

from jdserve.core.errors import TransferError
from jdserve.core.plan import DecodeInstance, Instance, Plan, TransportKind
from jdserve.core.spec import ModelSpec
from jdserve.transfer.base import KVPages, Landed, Transport
from jdserve.transfer.layout import KVHandle, KVLayout

Route = Callable[[Plan, str, str], TransportKind]
"""``route(plan, source, destination)``: how KV moves between two instances."""


def layout_of(plan: Plan, instance: Instance, spec: ModelSpec) -> KVLayout:
    """How ``instance`` stores KV."""
    return KVLayout(
        spec.layers,
        spec.kv_heads,
        spec.head_dim,
        plan.page_size,
        plan.dtype,
        instance.tp,
        instance.pp,
        plan.processes(instance.name),
    )


def local_route(plan: Plan, source: str, destination: str) -> TransportKind:
    """Every instance of the plan lives in this process."""
    return "local"


class Leaving(KVPages, Protocol):
    """Pages whose copy can be launched before anybody needs it."""

    def gather(self) -> None:
        """Launch the copy."""
        ...

    def drop(self) -> None:
        """Forget a copy that nobody asked for."""
        ...


@dataclass
class Offering:
    """The KV of one prompt on its way out.

    Attributes:
        request_id, source, lease_s: what the offers say.
        handles: of the offers so far.
        copies: what is copied for offers that are still to be made, with the layouts that it is wanted in.
    """

    request_id: str
    source: str
    lease_s: float
    handles: list[KVHandle] = field(default_factory=list)
    copies: list[tuple[Transport, Leaving, Seq[KVLayout]]] = field(default_factory=list)


class Links:
    """Offers and pulls by the transport that leads to the other side; any thread may call it.

    Args:
        plan: in force; may be replaced when instances come or go.
        spec: of the model.
        make: makes the transport of a kind, when it is first needed.
        route: see :data:`Route`.
    """

    def __init__(self, plan: Plan, spec: ModelSpec, make: Callable[[TransportKind], Transport], route: Route) -> None:
        self.plan = plan
        self._spec = spec
        self._make = make
        self._route = route
        self._lock = threading.Lock()
        self._transports: dict[TransportKind, Transport] = {}

    def _transport(self, kind: TransportKind) -> Transport:
        with self._lock:
            if kind not in self._transports:
                self._transports[kind] = self._make(kind)
            return self._transports[kind]

    def destinations(self, source: str) -> Mapping[TransportKind, Seq[KVLayout]]:
        """Every way in which KV of ``source`` may be wanted: the layouts of decode instances, by transport."""
        wanted: dict[TransportKind, list[KVLayout]] = {}
        for instance in self.plan.instances:
            if isinstance(instance, DecodeInstance):
                layout = layout_of(self.plan, instance, self._spec)
                layouts = wanted.setdefault(self._route(self.plan, source, instance.name), [])
                if layout not in layouts:
                    layouts.append(layout)
        return wanted

    def begin(self, request_id: str, source: str, leaving: Callable[[], Leaving], lease_s: float) -> Offering:
        """Have KV copied in every way in which it may be wanted, as soon as it is computed.

        Called when the step that ends the prompt has been launched: a transport that reads the pools gets its offer at
        once, and its pieces leave stage by stage; for the others copies are launched behind the step. Each transport
        gets one that is its own to free.

        Raises:
            TransferError: see the transports.
        """
        offering = Offering(request_id, source, lease_s)
        try:
            for kind, layouts in self.destinations(source).items():
                pages, transport = leaving(), self._transport(kind)
                if transport.reads:
                    _offer(offering, transport, pages, layouts)
                else:
                    pages.gather()
                    offering.copies.append((transport, pages, layouts))
        except BaseException:
            self.drop(offering)
            raise
        return offering

    def complete(self, offering: Offering) -> None:
        """Make the offers that are left: the KV is computed, and parked.

        Raises:
            TransferError: see the transports.
        """
        copies, offering.copies = offering.copies, []
        for transport, pages, layouts in copies:
            _offer(offering, transport, pages, layouts)

    def drop(self, offering: Offering) -> None:
        """End all offers, and forget what was copied for more."""
        for handle in offering.handles:
            self._transport(handle.transport).release(handle)
        for _, pages, _ in offering.copies:
            pages.drop()

    def pick(self, handles: Seq[KVHandle], source: str, destination: str, layout: KVLayout) -> KVHandle:
        """The offer that was made for ``destination``.

        Raises:
            TransferError: there is none, for example because the instance is newer than the offer.
        """
        kind = self._route(self.plan, source, destination)
        for handle in handles:
            if handle.transport == kind and handle.destination == layout:
                return handle
        raise TransferError(f"{source} has offered no KV by {kind} that is laid out for {destination}")

    def pull(
        self, handle: KVHandle, layout: KVLayout, meshes: Seq[Mesh], timeout_s: float, abandoned: Callable[[], bool]
    ) -> Landed:
        """Pull what ``handle`` stands for; see :meth:`~jdserve.transfer.base.Transport.pull`."""
        return self._transport(handle.transport).pull(handle, layout, meshes, timeout_s, abandoned)

    def close(self) -> None:
        """Free every offer."""
        for transport in self._transports.values():
            transport.close()


def _offer(offering: Offering, transport: Transport, pages: Leaving, layouts: Seq[KVLayout]) -> None:
    for layout in layouts:
        handle = transport.offer(offering.request_id, offering.source, pages, layout, offering.lease_s)
        offering.handles.append(handle)
