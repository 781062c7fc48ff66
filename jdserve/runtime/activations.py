"""Activations from one pipeline stage to the next where the stages are in different processes.

They move by ``jax.experimental.transfer``: every process offers what its stages give, and every process pulls what its
stages take. All processes launch the same work in the same order, so both sides count the launches and agree on the id
of each transfer without a message; a pull that comes before its offer waits for it. It is the way between CPU
processes; collectives in the world of the instance, which a GPU or TPU would do faster, are not used.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import jax
from jax import Array
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from jdserve.transfer.layout import KVLayout
from jdserve.transfer.offers import check_host


class Activations:
    """One process's end; see the module. :meth:`give` and :meth:`take` may be called from different threads.

    Attributes:
        address: that it listens on.

    Args:
        host: IPv4 address of the private interface to listen on; the system chooses the port.
        layout: of an instance that spans processes.

    Raises:
        ValueError: ``host`` is not one private address.
    """

    def __init__(self, host: str, layout: KVLayout) -> None:
        check_host(host)
        self._me = jax.process_index()
        self._size = max(layout.processes) + 1
        self._holders = [
            sorted({layout.process(stage, rank) for rank in range(layout.tp)}) for stage in range(layout.pp)
        ]
        # With no address for data, the source of the first pull would abort.
        self._server: Any = transfer.start_transfer_server(
            jax.local_devices()[0].client, f"{host}:0", [f"{host}:0"] * 2
        )
        self.address: str = self._server.address()
        self._peers: Seq[Any] = ()

    def meet(self, addresses: Seq[str]) -> None:
        """Connect to the other processes, by their numbers in the instance."""
        self._peers = [
            None if process == self._me else self._server.connect(address) for process, address in enumerate(addresses)
        ]

    def give(self, launch: int, stage: int, hidden: Array) -> None:
        """Offer what ``stage`` gave to the processes of the next one that take it from here."""
        for taker in self._holders[stage + 1]:
            if taker != self._me and self._giver(stage, taker) == self._me:
                self._server.await_pull(self._id(launch, stage, taker), [hidden.addressable_shards[0].data])

    def take(self, launch: int, stage: int, before: Array | None, wanted: jax.ShapeDtypeStruct) -> Array:
        """What the stage before gave, on the devices of ``stage`` in this process.

        Args:
            launch: counted from the start of the instance.
            stage: that takes it.
            before: what the stage before gave, where that one is in this process too, at least in part.
            wanted: shape, dtype, and the replicated sharding of the stage.
        """
        sharding = wanted.sharding
        assert sharding is not None
        if before is not None and before.sharding == sharding:
            return before
        devices = [device for device in sharding.device_set if device.process_index == self._me]
        giver = self._giver(stage - 1, self._me)
        if giver == self._me:
            assert before is not None
            one = before.addressable_shards[0].data
        else:
            here = jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=SingleDeviceSharding(devices[0]))
            (one,) = self._peers[giver].pull(self._id(launch, stage - 1, self._me), [here])
        copies = [jax.device_put(one, device) for device in devices]
        return jax.make_array_from_single_device_arrays(wanted.shape, sharding, copies)

    def _giver(self, stage: int, taker: int) -> int:
        """Which process of ``stage`` gives to process ``taker`` of the next one."""
        givers, takers = self._holders[stage], self._holders[stage + 1]
        return taker if taker in givers else givers[takers.index(taker) % len(givers)]

    def _id(self, launch: int, stage: int, taker: int) -> int:
        return (launch * len(self._holders) + stage) * self._size + taker
