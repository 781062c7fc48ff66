"""What every transport keeps: each bit lands, nothing waits for a producer but its own pull, and what goes wrong is an
error in bounded time that leaves nothing behind.

Both ends in one process; ``device_put`` can only land between two, see ``test_processes.py``, but refuses the same.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import msgspec
import numpy as np
import pytest

from jdserve.core.errors import TransferError
from jdserve.ops.host import host_memory
from jdserve.transfer.device_put import DevicePutTransport, join_world
from jdserve.transfer.local import LocalTransport
from jdserve.transfer.pull import PullTransport
from jdserve.transfer.segments import HEADER, Reading, State, place
from jdserve.transfer.shm import ShmTransport
from transfer.cases import (
    DEGREES,
    HOST,
    PAGES,
    WAIT_S,
    Gate,
    assert_landed,
    eventually,
    gather,
    landed_bits,
    layout,
    make_pools,
    meshes,
    random_model,
    small_copy,
    stored,
)

MAKERS = {
    "local": LocalTransport,
    "shm": ShmTransport,
    "pull": lambda **options: PullTransport(HOST, jax.local_devices()[0], **options),
    "device_put": lambda **options: DevicePutTransport(HOST, **options),
}
LANDING = ["local", "shm", "pull"]
NOT_THERE = "is gone|did not arrive|lost|does not listen"


class Ends:
    """A producer and a consumer of one kind, and the producer's clock."""

    def __init__(self, kind, **options):
        self.kind = kind
        self.now = 1_000
        self.producer = MAKERS[kind](clock=lambda: self.now, **options)
        self.consumer = self.producer if kind == "local" else MAKERS[kind](**options)

    def offer(self, copy, destination, lease_s=WAIT_S, name="r"):
        return self.producer.offer(name, "p0", copy, destination, lease_s)

    def pull(self, handle, first=1, **options):
        options = {"layout": handle.destination, "timeout_s": WAIT_S} | options
        return self.consumer.pull(handle, meshes=meshes(options["layout"], first), **options)

    def lands(self, handle, seed=0, first=1):
        assert_landed(
            self.pull(handle, first), handle.layout, handle.destination, meshes(handle.destination, first), seed
        )

    def close(self):
        self.producer.close()
        self.consumer.close()


@pytest.fixture
def make():
    made = []

    def ends(kind, **options):
        made.append(Ends(kind, **options))
        return made[-1]

    yield ends
    for one in made:
        one.close()


@pytest.fixture(params=LANDING)
def ends(request, make):
    return make(request.param)


@pytest.fixture(params=MAKERS)
def any_ends(request, make):
    return make(request.param)


@pytest.fixture
def gate():
    held = Gate()
    yield held
    held.event.set()


PAIRS = [
    *((4, "float32", source, destination) for source in DEGREES for destination in DEGREES),
    (2, "float32", (1, 1), (4, 1)),  # heads repeated at the destination
    (2, "float32", (4, 1), (1, 1)),  # and at the source
    (2, "float32", (4, 1), (4, 1)),
    (1, "float32", (2, 1), (2, 1)),
    (2, "float32", (2, 2), (1, 4)),
    *(
        (kv_heads, dtype, source, destination)
        for dtype in ("bfloat16", "float16", "int8")
        for kv_heads, source, destination in [
            (4, (1, 1), (1, 1)),
            (4, (4, 1), (2, 1)),
            (4, (2, 1), (1, 2)),
            (2, (1, 2), (4, 1)),
        ]
    ),
]


@pytest.mark.parametrize(("kv_heads", "dtype", "source", "destination"), PAIRS)
def test_every_bit_lands(ends, kv_heads, dtype, source, destination):
    source, destination = (layout(*degrees, kv_heads, dtype) for degrees in (source, destination))
    handle = ends.offer(small_copy(source), destination)
    assert (handle.pages, handle.layout, handle.destination) == (len(PAGES), source, destination)
    assert handle.transport == ends.producer.kind == ends.kind
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=type(handle)) == handle
    repeats = destination.stored_kv_heads // destination.kv_heads
    here = meshes(destination, 2)
    landed = ends.pull(handle, first=2)
    assert handle.bytes == landed.bytes == source.page_bytes() * len(PAGES) * repeats
    assert_landed(landed, source, destination, here)
    ends.producer.release(handle)
    assert ends.producer.offers == 0


def test_onto_the_device_that_it_came_from(ends):
    ends.lands(ends.offer(small_copy(layout()), layout()), first=0)


def test_one_copy_serves_several_layouts(ends):
    """Two of them take whole shards, so what ends with one offer must not be what the other needs."""
    copy = small_copy(layout(tp=2))
    handles = [ends.offer(copy, destination) for destination in (layout(tp=1), layout(tp=2), layout(tp=4))]
    assert len({handle.id for handle in handles}) == ends.producer.offers == 3
    for handle in handles:
        ends.lands(handle)
        ends.producer.release(handle)
    assert ends.producer.offers == 0


def test_a_donated_pool_does_not_change_what_lands(ends):
    source = layout(tp=2)
    on = meshes(source, 0)
    (pool,) = make_pools(source, random_model(source), on)
    handle = ends.offer(gather(source, [pool], on), layout())
    overwrite = jax.jit(lambda pool: jax.tree.map(lambda array: array.at[:].set(0), pool), donate_argnums=0)
    jax.block_until_ready(overwrite(pool))
    assert pool.keys.is_deleted()
    ends.lands(handle, first=2)


def test_released_before_its_pull(any_ends):
    ends = any_ends
    handle = ends.offer(small_copy(layout()), layout(), name="r7")
    ends.producer.release(handle)
    ends.producer.release(handle)
    ends.consumer.release(handle)
    assert ends.producer.offers == 0
    with pytest.raises(TransferError, match=f"r7.*p0.*({NOT_THERE})"):
        ends.pull(handle)


def test_released_during_its_pull(ends, gate):
    handle = ends.offer(gate.copy(layout()), layout())
    with ThreadPoolExecutor(1) as threads:
        waits = threading.Event()
        pulling = threads.submit(ends.pull, handle, abandoned=lambda: bool(waits.set()))
        assert waits.wait(WAIT_S)
        ends.producer.release(handle)
        gate.event.set()
        try:
            landed = pulling.result(WAIT_S)
        except TransferError:
            pass
        else:
            assert_landed(landed, layout(), layout(), meshes(layout(), 1))
    assert ends.producer.offers == 0
    ends.lands(ends.offer(small_copy(layout(), seed=1), layout()), seed=1)


def test_released_after_its_pull_while_it_is_read(ends):
    """What has landed stays as it is until it is done, whatever the producer offers next."""
    handle = ends.offer(small_copy(layout(tp=2)), layout(tp=2))
    landed = ends.pull(handle)
    ends.producer.release(handle)
    for seed in (1, 2, 3):
        ends.lands(ends.offer(small_copy(layout(tp=2), seed), layout(tp=2)), seed)
    assert_landed(landed, layout(tp=2), layout(tp=2), meshes(layout(tp=2), 1))
    landed.done()


def test_an_id_that_was_never_offered(any_ends):
    ends = any_ends
    handle = ends.offer(small_copy(layout()), layout())
    with pytest.raises(TransferError, match=f"request r: .*({NOT_THERE})"):
        ends.pull(msgspec.structs.replace(handle, id=handle.id ^ 2), timeout_s=0.2)
    if ends.kind != "device_put":
        ends.lands(handle)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_lease_ends(make, kind):
    ends = make(kind)
    copy = small_copy(layout())
    parts = [weakref.ref(array) for array in copy.stages[0]]
    handle = ends.offer(copy, layout(), lease_s=2.0)
    assert handle.deadline == ends.now + 2_000_000_000
    del copy
    ends.now = handle.deadline - 1
    ends.producer.expire()
    assert ends.producer.offers == 1
    ends.now = handle.deadline
    ends.producer.expire()
    assert ends.producer.offers == 0

    def freed():
        gc.collect()
        return all((array := part()) is None or array.is_deleted() for part in parts)

    eventually(freed)
    with pytest.raises(TransferError, match=NOT_THERE):
        ends.pull(handle, timeout_s=0.2)


@pytest.mark.parametrize("call", ["offer", "pull", "release", "expire"])
def test_every_call_sweeps(any_ends, call):
    ends = any_ends
    copy = small_copy(layout())
    expired = [ends.offer(small_copy(layout()), layout(), lease_s=1.0) for _ in range(2)]
    kept = ends.offer(copy, layout(), lease_s=3.0)
    ends.now += 2_000_000_000
    assert ends.producer.offers == 3
    if call == "offer":
        kept = ends.offer(copy, layout(tp=2))
    elif call == "pull":
        with pytest.raises(TransferError):
            ends.producer.pull(kept, layout(tp=2), meshes(layout(tp=2), 1), WAIT_S)
    elif call == "release":
        ends.producer.release(expired[0])
    else:
        ends.producer.expire()
    assert ends.producer.offers == (2 if call == "offer" else 1)


def test_another_destination_than_the_copy_was_cut_for(any_ends):
    handle = any_ends.offer(small_copy(layout()), layout(tp=2))
    with pytest.raises(TransferError, match="cut for another layout"):
        any_ends.pull(handle, layout=layout(tp=1))


def test_a_handle_that_contradicts_itself(any_ends):
    handle = any_ends.offer(small_copy(layout()), layout())
    handle = msgspec.structs.replace(handle, layout=layout(dtype="int8"))
    with pytest.raises(TransferError, match="differ in dtype"):
        any_ends.pull(handle)


def test_a_handle_of_another_transport(any_ends):
    handle = any_ends.offer(small_copy(layout()), layout())
    other = "shm" if any_ends.kind == "local" else "local"
    with pytest.raises(TransferError, match=f"offered by {other}, not by {any_ends.kind}"):
        any_ends.pull(msgspec.structs.replace(handle, transport=other))


def test_an_offer_to_another_model_is_refused(any_ends):
    with pytest.raises(TransferError, match="page_size"):
        any_ends.offer(small_copy(layout()), layout(page_size=32))
    assert any_ends.producer.offers == 0


def test_an_abandoned_pull_ends_while_the_producer_computes(any_ends, gate):
    ends = any_ends
    handle = ends.offer(gate.copy(layout()), layout())
    looked = []

    def abandoned():
        looked.append(1)
        return len(looked) > 3

    with pytest.raises(TransferError, match="request r: the pull was abandoned"):
        ends.pull(handle, abandoned=abandoned)
    assert len(looked) == 4, "it ends the first time that it is true"
    assert not gate.event.is_set()
    gate.event.set()
    ends.producer.release(handle)
    if ends.kind != "device_put":
        ends.lands(ends.offer(small_copy(layout(), seed=1), layout()), seed=1)
    if ends.kind == "shm":
        assert ends.producer.segments.limbo == 0, "it reads no longer"


def test_a_pull_has_a_deadline(any_ends, gate):
    handle = any_ends.offer(gate.copy(layout()), layout(), name="slow")
    with pytest.raises(TransferError, match=r"slow: KV did not arrive within 0\.01 s"):
        any_ends.pull(handle, timeout_s=0.01)
    assert not gate.event.is_set()


def test_nothing_waits_for_the_producer_but_its_own_pull(ends, gate):
    on = meshes(layout(), 1)
    free = gather(layout(), make_pools(layout(), random_model(layout(), 1), on), on)
    jax.block_until_ready(free.stages)
    slow = ends.offer(gate.copy(layout()), layout())
    with ThreadPoolExecutor(1) as threads:
        pulling = threads.submit(ends.pull, slow, first=2)
        ends.lands(ends.offer(free, layout()), seed=1, first=3)
        assert not pulling.done()
        assert not gate.event.is_set()
        gate.event.set()
        assert_landed(pulling.result(WAIT_S), layout(), layout(), meshes(layout(), 2))


def test_the_other_process_of_a_world_answers_while_a_producer_computes(make, gate):
    ends = make("device_put")
    slow = ends.offer(gate.copy(layout()), layout())
    with pytest.raises(TransferError, match="did not arrive"):
        ends.pull(slow, timeout_s=0.05)
    with pytest.raises(TransferError, match="is gone"):
        ends.pull(msgspec.structs.replace(slow, id=slow.id ^ 2), timeout_s=WAIT_S / 4)
    assert not gate.event.is_set()


@pytest.mark.parametrize(
    ("kind", "timeout_s", "error"),
    [("shm", WAIT_S, "is gone"), ("pull", WAIT_S, "does not listen"), ("device_put", 0.2, "did not arrive")],
)
def test_a_source_that_nobody_has_talked_to_and_is_gone(make, kind, timeout_s, error):
    ends = make(kind)
    handle = ends.offer(small_copy(layout()), layout())
    ends.producer.close()
    with pytest.raises(TransferError, match=f"request r: .*{error}"):
        ends.pull(handle, timeout_s=timeout_s)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_producer_that_fails(ends, gate):
    handle = ends.offer(gate.copy(layout(), error=RuntimeError("no numbers today")), layout())
    gate.event.set()
    with pytest.raises(TransferError, match=r"request r: .*p0"):
        ends.pull(handle)
    ends.producer.release(handle)
    ends.lands(ends.offer(small_copy(layout(), seed=1), layout()), seed=1)


def flip(ends, handle, copy):
    """Change the last piece's values after the offer and before the pull, wherever this transport has them then."""
    if ends.kind == "shm":
        fd = os.open(handle.address, os.O_RDWR)
        eventually(lambda: HEADER.unpack(os.pread(fd, HEADER.size, 0)) == (handle.id, State.READY))
        at = place([handle.bytes // 4] * 4)[0][3]
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
        os.close(fd)
    elif ends.kind == "pull" and ends.producer.reads:
        sent = ends.producer._offers.find(handle.id).__self__.sent
        eventually(lambda: len(sent) == 4)  # keys and values of both pieces
        ctypes.c_ubyte.from_address(sent[-1].unsafe_buffer_pointer()).value ^= 1
    else:
        values = copy.stages[0][1].addressable_shards[1].data
        ctypes.c_ubyte.from_address(values.unsafe_buffer_pointer()).value ^= 1


@pytest.mark.parametrize("kind", LANDING)
def test_checksums_find_a_flipped_bit(make, kind):
    ends = make(kind, checksums=True)
    good = ends.offer(small_copy(layout(tp=2)), layout())
    assert len(good.checksums) == (0 if kind == "shm" else 2), "those of shm lie in the segment"
    ends.lands(good)
    copy = small_copy(layout(tp=2), seed=1)
    bad = ends.offer(copy, layout())
    flip(ends, bad, copy)
    with pytest.raises(TransferError, match="piece 1 of 2 from p0 changed on its way"):
        ends.pull(bad)
    ends = make(kind)
    unchecked = small_copy(layout(tp=2), seed=1)
    handle = ends.offer(unchecked, layout())
    flip(ends, handle, unchecked)
    landed = ends.pull(handle)
    (keys, values), *_ = landed_bits(landed, layout(tp=2), layout(), meshes(layout(), 1))
    right = [stored(layout(), bits, 0)[:, list(PAGES)] for bits in random_model(layout(tp=2), 1)]
    assert np.array_equal(keys, right[0])
    assert np.sum(values != right[1]) == 1, "the helper above flips what it should"
    landed.done()


class ByHand:
    """Pages whose stages are read when the test says so."""

    def __init__(self, of):
        self._held = small_copy(of)
        self.layout, self.pages = of, self._held.pages

    def read(self, take, failed):
        self._take, self.failed = take, failed

    def stage(self, index):
        shards = [
            tuple(host_memory(shard.data) for shard in pair)
            for pair in zip(*(array.addressable_shards for array in self._held.stages[index]), strict=True)
        ]
        self._take(index, shards, range(self.pages))


def in_segment(handle, array):
    """Whether the bytes of ``array`` are somewhere in the segment of an offer already."""
    reading = Reading(handle.address)
    try:
        return np.asarray(array).tobytes() in reading.map().tobytes()
    finally:
        reading.close()


def state(handle):
    reading = Reading(handle.address)
    try:
        assert reading.header()[0] == handle.id
        return reading.header()[1]
    finally:
        reading.close()


def test_early_stages_leave_while_later_ones_compute(make):
    ends = make("shm")
    pages = ByHand(layout(pp=2))
    handle = ends.offer(pages, layout())
    first, second = (stage[0] for stage in pages._held.stages)
    assert not in_segment(handle, first)
    pages.stage(0)
    assert (in_segment(handle, first), in_segment(handle, second)) == (True, False)
    assert state(handle) == State.WRITING
    pages.stage(1)
    assert state(handle) == State.READY
    ends.lands(handle)


@pytest.mark.parametrize("kind", ["shm", "pull"])
@pytest.mark.parametrize("early", [True, False])
def test_a_stage_that_is_lost_takes_its_offer_with_it(make, kind, early):
    ends = make(kind)
    pages = ByHand(layout(pp=2))
    handle = ends.offer(pages, layout())
    if early:
        pages.stage(0)
    pages.failed()
    if not early:
        pages.stage(0)
    with pytest.raises(TransferError, match=r"is gone|was lost"):
        ends.pull(handle)
    ends.producer.release(handle)
    assert ends.producer.offers == 0
    if kind == "shm" and not early:
        assert ends.producer.segments.limbo == 0
        assert ends.producer.segments.free_bytes > 0


def test_a_pulled_stage_is_on_its_way_before_the_next_has_computed(make):
    ends = make("pull")
    pages = ByHand(layout(pp=2))
    handle = ends.offer(pages, layout(pp=2))
    alone = msgspec.structs.replace(handle, parts=handle.parts[:1])
    assert len(handle.parts) == 2
    with pytest.raises(TransferError, match="did not arrive"):
        ends.pull(alone, timeout_s=0.1)
    handle = ends.offer(pages, layout(pp=2))
    alone = msgspec.structs.replace(handle, parts=handle.parts[:1])
    pages.stage(0)
    (keys, _), *more = ends.pull(alone).pieces
    assert not more
    assert np.array_equal(np.asarray(keys), np.asarray(pages._held.stages[0][0]), equal_nan=True)


def test_a_pull_that_waits_when_its_offer_ends_gets_an_error_and_no_bits(make):
    ends = make("pull")
    pages = ByHand(layout())
    handle = ends.offer(pages, layout())
    with ThreadPoolExecutor(1) as threads:
        waits = threading.Event()
        pulling = threads.submit(ends.pull, handle, abandoned=lambda: bool(waits.set()))
        assert waits.wait(WAIT_S)
        ends.producer.release(handle)
        with pytest.raises(TransferError, match="was lost"):
            pulling.result(WAIT_S)
    pages.stage(0)
    with pytest.raises(TransferError, match=r"was lost|did not arrive"):
        ends.pull(handle, timeout_s=0.2)


def test_a_segment_is_not_reused_while_a_stage_still_writes(make):
    ends = make("shm")
    pages = ByHand(layout(pp=2))
    handle = ends.offer(pages, layout())
    pages.stage(0)
    ends.producer.release(handle)
    assert ends.offer(small_copy(layout()), layout()).address != handle.address
    pages.stage(1)
    assert ends.offer(small_copy(layout()), layout()).address == handle.address


def test_closed_with_offers_and_readers(ends, gate):
    handles = [ends.offer(small_copy(layout(tp=2)), layout()), ends.offer(gate.copy(layout()), layout())]
    landed = ends.pull(handles[0])
    ends.producer.close()
    assert ends.producer.offers == 0
    assert_landed(landed, layout(tp=2), layout(), meshes(layout(), 1))


@pytest.mark.parametrize("kind", ["pull", "device_put"])
@pytest.mark.parametrize("host", ["0.0.0.0", "8.8.8.8", "224.0.0.1", "localhost", "::1", ""])
def test_a_port_is_open_to_one_private_address_only(kind, host):
    maker = {"pull": lambda: PullTransport(host, jax.devices()[0]), "device_put": lambda: DevicePutTransport(host)}
    with pytest.raises(ValueError, match="host: "):
        maker[kind]()


@pytest.mark.parametrize("transfer", ["127.0.0.1:0", "127.0.0.1", "0.0.0.0:7000", "127.0.0.1:x"])
def test_a_world_needs_a_fixed_port_on_one_private_address(transfer):
    with pytest.raises(ValueError, match=r"transfer: needs a fixed port|host: "):
        join_world("127.0.0.1:7001", 0, transfer)
