"""Which transport KV takes from one instance to another, and the transports of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from jax.sharding import Mesh

from jdserve.core.errors import TransferError
from jdserve.core.plan import DecodeInstance, Instance, Plan, TransportKind
from jdserve.core.spec import ModelSpec
from jdserve.transfer.base import KVCopy, Landed, Transport
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

    def offer(self, request_id: str, source: str, gather: Callable[[], KVCopy], lease_s: float) -> tuple[KVHandle, ...]:
        """Offer KV in every way in which it may be wanted; each transport gets a copy that is its own to free.

        Raises:
            TransferError: see the transports.
        """
        handles: list[KVHandle] = []
        for kind, layouts in self.destinations(source).items():
            copy, transport = gather(), self._transport(kind)
            handles += [transport.offer(request_id, source, copy, layout, lease_s) for layout in layouts]
        return tuple(handles)

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

    def release(self, handle: KVHandle) -> None:
        """Drop an offer."""
        self._transport(handle.transport).release(handle)

    def close(self) -> None:
        """Free every offer."""
        for transport in self._transports.values():
            transport.close()
