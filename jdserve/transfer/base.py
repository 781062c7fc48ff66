"""The seam that every transport implements."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jax import Array
from jax.sharding import Mesh

from jdserve.transfer.layout import KVHandle, KVLayout, TransportKind


def never() -> bool:
    """An ``abandoned`` that is never true."""
    return False


def nothing() -> None:
    """A ``done`` with nothing to give back."""


@dataclass(frozen=True)
class KVCopy:
    """Pages gathered out of a pool: never the pool itself.

    Attributes:
        layout: of the instance.
        stages: keys and values of each stage, ``[layers, pages, stored KV heads, page size, head dim]``, sharded as the
            pool is; nothing for a stage in other processes.
        pages: pages in the copy, padding counted.
        id: by which the other processes of the instance know their part of it; 0 where there are none.
    """

    layout: KVLayout
    stages: Seq[tuple[Array, ...]]
    pages: int
    id: int = 0


Shards = Seq[tuple[np.ndarray, np.ndarray]]
"""Keys and values of a stage's pool on each of its devices, in mesh order, as they lie in the memory of the host."""

Take = Callable[[int, Shards, Seq[int]], None]
"""``take(stage, shards, pages)``: reads ``pages`` of what the shards hold, padding among them."""


class KVPages(Protocol):
    """Pages of a pool that hold the KV of one prompt, and the two ways to copy them out.

    Attributes:
        layout: of the instance.
        pages: how many, padding counted.
    """

    layout: KVLayout
    pages: int

    def copy(self) -> KVCopy:
        """A copy on the devices, always the same one: computed behind what was launched before."""
        ...

    def read(self, take: Take, failed: Callable[[], None]) -> None:
        """Have every stage of this process call ``take``, on its own thread, once its pool is computed.

        Nothing launched later writes the pool while ``take`` reads it. Where a stage cannot come to that, or ``take``
        raises, ``failed`` is called.
        """
        ...


@dataclass(frozen=True)
class Landed:
    """Pieces of one KV cache that have arrived on the devices of the destination.

    Attributes:
        pieces: keys and values of each piece of :func:`~jdserve.transfer.reshard.plan_pieces`, in its order; each
            ``[layers, pages, heads, page size, head dim]`` on the piece's destination device.
        pages: pages in them, padding counted.
        bytes: that moved.
        done: to be called once, when the program that reads the pieces has *completed*: until then they may lie in
            memory of the source, which is free to reuse it afterwards.
        id: by which the other processes of the instance know what has landed there; 0 where there are none.
    """

    pieces: Seq[tuple[Array, Array]]
    pages: int
    bytes: int
    done: Callable[[], None] = nothing
    id: int = 0


class Transport(Protocol):
    """Moves KV between instances. One object serves all instances of a process; its methods may be called from any
    thread, and each wait has a deadline.

    Attributes:
        kind: what the handles of this transport say.
        reads: it copies pages out of the pools by itself, so that an offer may be made while they are still computed.
    """

    kind: TransportKind
    reads: bool

    def offer(self, request_id: str, source: str, pages: KVPages, destination: KVLayout, lease_s: float) -> KVHandle:
        """Make an extracted copy available to one pull; called on the launcher thread of the source.

        Waits for nothing on the device, except where checksums are computed. From now on the copy belongs to the
        transport, which may delete its arrays when the last offer of it has ended. Several offers of the same pages are
        fine; offers of the same pages by two transports are not.

        Raises:
            TransferError: the layouts do not fit.
        """
        ...

    def pull(
        self,
        handle: KVHandle,
        layout: KVLayout,
        meshes: Seq[Mesh],
        timeout_s: float,
        abandoned: Callable[[], bool] = never,
    ) -> Landed:
        """Fetch what ``handle`` stands for onto the devices of ``meshes`` (one per stage) and wait until it is there.

        Args:
            handle: of an offer.
            layout: of the destination.
            meshes: of the destination's stages.
            timeout_s: longest wait.
            abandoned: asked while waiting; true ends the pull within milliseconds.

        Raises:
            TransferError: unknown handle, mismatched layout, a peer that is gone, the deadline passed, a checksum that
                differs, or nobody wants the KV any more.
        """
        ...

    def release(self, handle: KVHandle) -> None:
        """Drop the copy; unknown handles are ignored (the lease may have ended)."""
        ...

    def expire(self) -> None:
        """Free what offers hold whose lease has ended; every other call does this too."""
        ...

    def close(self) -> None:
        """Free everything; nothing can be offered or pulled afterwards."""
        ...

    @property
    def offers(self) -> int:
        """Copies that wait for their pull or their release."""
        ...
