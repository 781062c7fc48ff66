"""``PagePool`` against a model that knows only who owns which page and which prefixes are remembered."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from jdserve.core.errors import OutOfPages
from jdserve.core.pages import NULL_PAGE, BlockTable, PagePool, block_hashes, pages_for

PAGE = 2
TOTAL = 4


def state_of(pool: PagePool) -> tuple[object, ...]:
    """Everything in a pool, comparable."""
    return (
        list(pool._free),
        dict(pool._references),
        list(pool._cached),
        dict(pool._page_of_hash),
        dict(pool._hash_of_page),
    )


class PoolMachine(RuleBasedStateMachine):
    """Reserve, grow, publish and release at random; the model below predicts shares, evictions and counts."""

    tables: Bundle[tuple[BlockTable, tuple[bytes, ...]]] = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(TOTAL, PAGE)
        self.owners: Counter[int] = Counter()
        self.content: dict[int, bytes] = {}
        self.cached: list[int] = []  # oldest first

    @property
    def unused(self) -> int:
        return TOTAL - len(self.owners) - len(self.cached)

    def take(self, pages: tuple[int, ...]) -> None:
        """Fresh pages: the empty ones first, then the oldest of the cached ones."""
        empty = self.unused
        assert len(set(pages)) == len(pages)
        for place, page in enumerate(pages):
            if place < empty:
                assert page not in self.owners
                assert page not in self.cached
            else:
                assert page == self.cached.pop(0)
                del self.content[page]
            self.owners[page] = 1

    # Two tokens only, so that prefixes meet often.
    @rule(target=tables, tokens=st.lists(st.integers(0, 1), max_size=PAGE * 3), extra=st.integers(0, 2))
    def reserve(self, tokens: list[int], extra: int) -> tuple[BlockTable, tuple[bytes, ...]] | MultipleResults[Any]:
        hashes = block_hashes(tokens, PAGE)
        count = len(hashes) + extra
        page_of = {value: page for page, value in self.content.items()}
        reused: list[int] = []
        for value in hashes:
            if value not in page_of:
                break
            reused.append(page_of[value])
        fits = count - len(reused) <= self.unused + len(set(self.cached) - set(reused))
        before = state_of(self.pool)
        try:
            table = self.pool.reserve(count, hashes)
        except OutOfPages:
            assert not fits
            assert state_of(self.pool) == before
            return multiple()
        assert fits
        assert len(table) == count
        assert table.shared == len(reused)
        assert table.pages[: table.shared] == tuple(reused)
        for page in reused:
            self.owners[page] += 1
            if page in self.cached:
                self.cached.remove(page)
        self.take(table.pages[table.shared :])
        return table, hashes

    @rule(entry=tables, count=st.integers(1, 3))
    def grow(self, entry: tuple[BlockTable, tuple[bytes, ...]], count: int) -> None:
        table, _ = entry
        before, pages = state_of(self.pool), table.pages
        try:
            self.pool.grow(table, count)
        except OutOfPages:
            assert count > self.unused + len(self.cached)
            assert (state_of(self.pool), table.pages) == (before, pages)
            return
        assert table.pages[: len(pages)] == pages
        assert len(table) == len(pages) + count
        self.take(table.pages[len(pages) :])

    @rule(entry=tables)
    def publish(self, entry: tuple[BlockTable, tuple[bytes, ...]]) -> None:
        table, hashes = entry
        self.pool.publish(table, hashes)
        for page, value in zip(table.pages, hashes, strict=False):
            if page not in self.content and value not in self.content.values():
                self.content[page] = value

    @rule(entry=consumes(tables))
    def release(self, entry: tuple[BlockTable, tuple[bytes, ...]]) -> None:
        table, _ = entry
        pages = table.pages
        self.pool.release(table)
        assert (table.pages, table.shared) == ((), 0)
        for page in reversed(pages):
            self.owners[page] -= 1
            if not self.owners[page]:
                del self.owners[page]
                if page in self.content:
                    self.cached.append(page)

    @precondition(lambda self: len(self.owners) < TOTAL)
    @rule(data=st.data())
    def release_what_nobody_owns(self, data: st.DataObject) -> None:
        stranger = data.draw(st.sampled_from(sorted(set(range(TOTAL + 1)) - set(self.owners))))
        before = state_of(self.pool)
        with pytest.raises(ValueError, match=rf"\[{stranger}\] are not owned"):
            self.pool.release(BlockTable((*self.owners, stranger)))
        assert state_of(self.pool) == before

    @invariant()
    def conserved(self) -> None:
        pool = self.pool
        pool.check()
        assert pool._references == self.owners
        assert list(pool._cached) == self.cached
        assert (pool.free, pool.owned, pool.cached) == (self.unused, len(self.owners), len(self.cached))
        assert pool.available == pool.free + pool.cached
        assert pool._hash_of_page == self.content
        assert NULL_PAGE not in pool._free


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_second_release_is_refused() -> None:
    pool = PagePool(4, PAGE)
    table = pool.reserve(2)
    copy = BlockTable(table.pages)
    pool.release(table)
    before = state_of(pool)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(copy)
    assert state_of(pool) == before
    pool.release(table)  # it is empty by now
    assert pool.free == 4


def test_a_prefix_is_shared_and_outlives_its_owner() -> None:
    pool = PagePool(4, PAGE)
    hashes = block_hashes([1, 2, 3, 4], PAGE)
    first = pool.reserve(3, hashes)
    assert first.shared == 0
    pool.publish(first, hashes)
    second = pool.reserve(3, hashes)
    assert second.shared == 2
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert (pool.free, pool.owned) == (0, 4)
    kept = first.pages[:2]
    pool.release(first)
    pool.release(second)
    assert (pool.free, pool.owned, pool.cached) == (2, 0, 2)
    third = pool.reserve(2, hashes)
    assert (third.pages, third.shared, pool.cached) == (kept, 2, 0)


def test_no_more_is_shared_than_was_asked_for() -> None:
    pool = PagePool(4, PAGE)
    hashes = block_hashes([1, 2, 3, 4], PAGE)
    table = pool.reserve(2, hashes)
    pool.publish(table, hashes)
    assert pool.reserve(1, hashes).pages == table.pages[:1]


def test_cached_pages_that_are_revived_do_not_count_as_available() -> None:
    pool = PagePool(2, PAGE)
    hashes = block_hashes([1, 2], PAGE)
    table = pool.reserve(1, hashes)
    pool.publish(table, hashes)
    pool.release(table)
    before = state_of(pool)
    with pytest.raises(OutOfPages, match="2 pages needed, 1 of 2 available"):
        pool.reserve(3, hashes)
    assert state_of(pool) == before


def test_the_oldest_prefix_is_forgotten_first_and_its_tail_before_its_head() -> None:
    pool = PagePool(4, PAGE)
    old, new = block_hashes([1, 2, 3, 4], PAGE), block_hashes([5, 6, 7, 8], PAGE)
    for hashes in (old, new):
        table = pool.reserve(2)
        pool.publish(table, hashes)
        pool.release(table)
    matches = []
    table = BlockTable(())
    for _ in range(4):
        pool.grow(table, 1)
        matches.append((pool.match(old), pool.match(new)))
    assert matches == [(1, 2), (0, 2), (0, 1), (0, 0)]


def test_a_second_copy_of_a_prefix_stays_private() -> None:
    pool = PagePool(2, PAGE)
    hashes = block_hashes([1, 2], PAGE)
    first, second = pool.reserve(1), pool.reserve(1)
    pool.publish(first, hashes)
    pool.publish(second, hashes)
    pool.release(second)
    assert (pool.free, pool.cached) == (1, 0)
    assert pool.reserve(1, hashes).pages == first.pages


@pytest.mark.parametrize(("total", "page_size"), [(0, 1), (1, 0), (-1, 16)])
def test_an_empty_pool_is_refused(total: int, page_size: int) -> None:
    with pytest.raises(ValueError, match=f"total >= 1 and page_size >= 1, got {total} and {page_size}"):
        PagePool(total, page_size)


def test_check_finds_a_lost_page() -> None:
    pool = PagePool(2, PAGE)
    pool._free.pop()
    with pytest.raises(AssertionError, match=r"free 1 \+ owned 0 \+ cached 0 != total 2"):
        pool.check()


@given(tokens=st.integers(0, 10_000), page_size=st.integers(1, 256))
def test_pages_for_is_the_least_number_that_holds_the_tokens(tokens: int, page_size: int) -> None:
    pages = pages_for(tokens, page_size)
    assert (pages - 1) * page_size < tokens <= pages * page_size


token_lists = st.lists(st.integers(0, 2), max_size=12)


@given(left=token_lists, right=token_lists, page_size=st.integers(1, 4))
def test_block_hashes_are_equal_exactly_where_the_prefixes_are(
    left: list[int], right: list[int], page_size: int
) -> None:
    a, b = block_hashes(left, page_size), block_hashes(right, page_size)
    assert len(a) == len(left) // page_size
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        end = (index + 1) * page_size
        assert (one == other) == (left[:end] == right[:end])


def test_block_hashes_chain_so_that_a_hash_stands_for_its_whole_prefix() -> None:
    # The second pages are equal, their prefixes are not.
    assert block_hashes([1, 2, 9, 9], PAGE)[1] != block_hashes([3, 4, 9, 9], PAGE)[1]
    assert block_hashes([1, 2, 3], PAGE) == block_hashes([1, 2], PAGE)


def test_salts_do_not_share() -> None:
    tokens = [1, 2, 3, 4]
    salts = [b"", b"a", b"b"]
    assert len({value for salt in salts for value in block_hashes(tokens, PAGE, salt)}) == 6
    assert block_hashes(tokens, PAGE, b"a") == block_hashes(tokens, PAGE, b"a")
