"""What a parked KV cache looks like: the contract that travels with it, because the wire checks nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from jdserve.core.errors import TransferError
from jdserve.core.spec import DTYPE_BYTES, DType

TransportKind = Literal["local", "shm", "pull", "device_put"]

KVDType = DType | Literal["int8"]
"""What KV may be stored as: more than a plan accepts, because the wire moves bytes."""

KV_DTYPE_BYTES: Mapping[str, int] = {**DTYPE_BYTES, "int8": 1}


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one instance stores KV.

    Attributes:
        layers: of the model.
        kv_heads: of the model; an instance with more devices than these repeats them.
        head_dim: of the model.
        page_size: token positions per page.
        dtype: of the stored values.
        tp: devices per stage.
        pp: stages.
        processes: of each device, stage by stage in mesh order: which process of the instance has it, 0 being the one
            that leads; empty where one process has them all.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: KVDType
    tp: int
    pp: int = 1
    processes: tuple[int, ...] = ()

    def process(self, stage: int, rank: int) -> int:
        """Which process of the instance has device ``rank`` of ``stage``."""
        return self.processes[stage * self.tp + rank] if self.processes else 0

    @property
    def stored_kv_heads(self) -> int:
        """KV heads over all devices of a stage, repeated ones counted."""
        return max(self.kv_heads, self.tp)

    def page_bytes(self) -> int:
        """Bytes of keys and values of one page over all layers, repeated heads not counted."""
        return 2 * self.layers * self.kv_heads * self.page_size * self.head_dim * KV_DTYPE_BYTES[self.dtype]

    def check_compatible(self, other: KVLayout) -> None:
        """Check that KV of ``other`` can be laid out as this one.

        Raises:
            TransferError: naming the first field that differs.
        """
        for field in ("layers", "kv_heads", "head_dim", "page_size", "dtype"):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                raise TransferError(f"KV layouts differ in {field}: {theirs} at the source, {ours} at the destination")

    def check_same(self, other: KVLayout) -> None:
        """Check that a copy cut for ``other`` was cut for this layout.

        Raises:
            TransferError: it was not.
        """
        if self != other:
            raise TransferError(f"the KV was cut for another layout: {other}, not {self}")


class KVPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one stage in one process of the source offers to one process of the destination.

    Attributes:
        id: 64 random bits.
        address: of the source process.
        pieces: indices into the plan of pieces.
    """

    id: int
    address: str
    pieces: tuple[int, ...]


class KVHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A claim on one extracted copy of a request's KV.

    Attributes:
        id: 64 random bits; knowing it is the right to pull.
        request_id: of the request.
        source: name of the prefill instance.
        layout: of the source.
        destination: layout that the copy was cut for.
        pages: pages in the copy.
        bytes: of the copy.
        deadline: clock nanoseconds of the source after which the copy is gone.
        transport: that offers it, and that it must be pulled by.
        address: where the other end finds the source's; its form is the transport's own.
        checksums: CRC-32 of each piece, keys then values; empty unless the source was told to compute them.
        parts: cover all pieces; empty where there is only one, under the id of the handle.
    """

    id: int
    request_id: str
    source: str
    layout: KVLayout
    destination: KVLayout
    pages: int
    bytes: int
    deadline: int
    transport: TransportKind
    address: str = ""
    checksums: tuple[int, ...] = ()
    parts: tuple[KVPart, ...] = ()
