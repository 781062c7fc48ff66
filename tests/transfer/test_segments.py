"""Segments of shared memory: what is reused, what is not, and what is given back."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdserve.transfer.segments import PAGE, SMALLEST, Mappings, Reading, SegmentPool, State, place, size_class

MIB = 1 << 20


@pytest.fixture
def pool():
    made = SegmentPool(keep_bytes=3 * MIB)
    yield made
    made.close()


@given(st.integers(1, 1 << 40))
def test_size_classes_waste_little(need):
    size = size_class(need)
    assert need <= size <= max(need * 1.25, need + SMALLEST)
    assert size % PAGE == 0
    assert size_class(size) == size


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=20))
def test_parts_lie_apart_behind_the_header(sizes):
    offsets, end = place(sizes)
    assert all(offset % PAGE == 0 for offset in offsets)
    for offset, size, after in zip(offsets, sizes, [*offsets[1:], end], strict=True):
        assert PAGE <= offset <= offset + size <= after


def test_what_is_read_is_not_reused(pool):
    first = pool.take(MIB)
    first.memory()[PAGE] = 7
    first.mark(1, State.READY)
    readers = [Reading(first.address) for _ in range(2)]
    pool.give(first)
    assert (pool.limbo, pool.free_bytes) == (1, 0)
    second = pool.take(MIB)
    assert second is not first
    readers[0].close()
    readers[0].close()
    pool.settle()
    assert pool.limbo == 1
    assert readers[1].header() == (1, State.READY)
    readers[1].close()
    pool.settle()
    assert (pool.limbo, pool.free_bytes) == (0, first.size)
    late = Reading(first.address)
    assert late.header()[0] == 0, "it belongs to no offer any more"
    late.close()
    assert pool.take(MIB) is first
    for segment in (first, second):
        segment.close()


def test_a_mapping_does_not_hold_the_segment(pool):
    segment, mappings = pool.take(MIB), Mappings()
    reading = Reading(segment.address)
    memory = mappings.memory(reading)
    assert mappings.memory(reading) is memory
    reading.close()
    pool.give(segment)
    assert pool.limbo == 0
    mappings.sweep()
    assert len(mappings) == 1


def test_another_segment_at_the_same_address(pool):
    mappings = Mappings()
    old = pool.take(MIB)
    with_old = Reading(old.address)
    memory = mappings.memory(with_old)
    address = old.address
    old.close()
    assert not with_old.alive()
    new = pool.take(2 * MIB)
    assert new.address == address, "the system gives the lowest free number"
    with_new = Reading(address)
    assert mappings.memory(with_new) is not memory
    assert mappings.memory(with_new).nbytes == new.size
    for one in (with_old, with_new, new):
        one.close()
    mappings.sweep()
    assert len(mappings) == 0


def test_free_segments_are_kept_up_to_a_bound(pool):
    segments = [pool.take(MIB) for _ in range(5)]
    addresses = [segment.address for segment in segments]
    for segment in segments:
        pool.give(segment)
    assert pool.free_bytes == 3 * MIB
    assert [os.path.exists(address) for address in addresses] == [False, False, True, True, True]
    pool.close()
    assert not any(os.path.exists(address) for address in addresses)


def test_only_segments_are_opened(tmp_path):
    other = tmp_path / "file"
    other.write_bytes(b"x")
    fd = os.open(other, os.O_RDONLY)
    for address in (
        str(other),
        f"/proc/{os.getpid()}/fd/{fd}",
        f"/proc/{os.getpid()}/fd/999999",
        "/proc/self/fd/0",
        "",
    ):
        with pytest.raises(OSError):
            Reading(address)
    os.close(fd)
