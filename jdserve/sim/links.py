"""Moving KV in simulated time: links serve one transfer at a time, in the order in which the pulls were asked for.

First come, first served is what the last byte of a fair share feels when pulls are alike, and it keeps every transfer
a single event. A transfer occupies all links of its route together, from the moment the last of them is free.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jdserve.core.plan import Plan
from jdserve.cost import network as hardware
from jdserve.cost.stepcost import FS


class Route(NamedTuple):
    """How KV gets from one instance to another.

    Attributes:
        links: names of the links that a transfer occupies; routes that share a name wait for each other. Empty where
            nothing is shared.
        latency: femtoseconds that every transfer takes besides, in which it occupies nothing.
        per_token: femtoseconds on the links per token.
    """

    links: tuple[str, ...] = ()
    latency: int = 0
    per_token: int = 0


class Network(Protocol):
    """The routes between the instances of a plan."""

    def route(self, source: str, destination: str) -> Route:
        """From prefill instance ``source`` to decode instance ``destination``."""
        ...


class Instant:
    """A network that takes no time."""

    def route(self, source: str, destination: str) -> Route:
        """See :class:`Network`."""
        return Route()


class Wired:
    """The links of a cluster under the instances of a plan.

    Args:
        plan: says on which devices the instances are.
        network: the links of these devices.
        kv_bytes: KV of one token.
    """

    def __init__(self, plan: Plan, network: hardware.Network, kv_bytes: int) -> None:
        self._plan = plan
        self._network = network
        self._kv_bytes = kv_bytes

    def route(self, source: str, destination: str) -> Route:
        """See :class:`Network`."""
        found = self._network.between(self._plan, source, destination)
        per_token = self._kv_bytes * FS // found.bytes_per_s if found.bytes_per_s else 0
        return Route(found.links, found.latency, per_token)


class Links:
    """The links of a network while it is used.

    Attributes:
        busy: femtoseconds that each link was occupied.
        tokens: tokens that were moved.
    """

    def __init__(self, network: Network) -> None:
        self.busy: dict[str, int] = {}
        self.tokens = 0
        self._network = network
        self._routes: dict[tuple[str, str], Route] = {}
        self._free: dict[str, int] = {}

    def transfer(self, source: str, destination: str, tokens: int, now: int) -> int:
        """When the KV of ``tokens`` tokens, asked for at ``now``, has landed."""
        route = self._routes.get((source, destination))
        if route is None:
            route = self._routes[source, destination] = self._network.route(source, destination)
        self.tokens += tokens
        took = tokens * route.per_token
        end = now + took
        for link in route.links:
            end = max(end, self._free.get(link, 0) + took)
        for link in route.links:
            self._free[link] = end
            self.busy[link] = self.busy.get(link, 0) + took
        return end + route.latency
