"""The seam that every transport implements, and the device programs that all of them share."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from jax import Array
from jax.sharding import Mesh

from jdserve.transfer.layout import KVHandle, KVLayout


@dataclass(frozen=True)
class Landed:
    """Pieces of one KV cache that have arrived on the devices of the destination.

    Attributes:
        pieces: keys and values of each piece of :func:`~jdserve.transfer.reshard.plan_pieces`, in its order; each
            ``[layers, pages, heads, page size, head dim]`` on the piece's destination device.
        pages: pages in them, padding counted.
        bytes: that moved.
    """

    pieces: Seq[tuple[Array, Array]]
    pages: int
    bytes: int


class Transport(Protocol):
    """Moves KV between instances. One object serves all instances of a process; its methods may be called from any
    thread, and each wait has a deadline.
    """

    def offer(self, request_id: str, source: str, copy: KVCopy, destination: KVLayout, lease_s: float) -> KVHandle:
        """Make an extracted copy available to one pull; called on the launcher thread of the source.

        Raises:
            TransferError: the layouts do not fit.
        """
        ...

    def pull(self, handle: KVHandle, layout: KVLayout, meshes: Seq[Mesh], timeout_s: float) -> Landed:
        """Fetch what ``handle`` stands for onto the devices of ``meshes`` (one per stage) and wait until it is there.

        Raises:
            TransferError: unknown handle, mismatched layout, a peer that is gone, or the deadline passed.
        """
        ...

    def release(self, handle: KVHandle) -> None:
        """Drop the copy; unknown handles are ignored (the lease may have ended)."""
        ...


@dataclass(frozen=True)
class KVCopy:
    """Pages gathered out of a pool: never the pool itself.

    Attributes:
        layout: of the instance.
        stages: keys and values of each stage, ``[layers, pages, stored KV heads, page size, head dim]``, sharded as the
            pool is.
        pages: pages in the copy, padding counted.
    """

    layout: KVLayout
    stages: Seq[tuple[Array, Array]]
    pages: int
