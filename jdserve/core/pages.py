"""The only allocator of KV pages.

A page is a fixed number of token positions in an instance's KV pool. Page 0 of every pool is the *null page*: padding
rows read and write it, so it is never handed out. Every other page is in exactly one of three places:

- *free*: nobody refers to it and its content means nothing;
- *owned*: one or more block tables refer to it (a reference count, above one only for a shared prefix);
- *cached*: no block table refers to it, but it still holds the KV of a known prefix and can be shared again.

``free + owned + cached == total`` at every moment. Content is identified by a chained hash of the tokens (see
:func:`block_hashes`), so equal prefixes are found without comparing tokens.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence as Seq

from jdserve.core.errors import OutOfPages

NULL_PAGE = 0
"""Page that padding reads and writes; never allocated."""


def pages_for(tokens: int, page_size: int) -> int:
    """Number of pages of ``page_size`` token positions that hold ``tokens`` tokens."""
    return -(-tokens // page_size)


def block_hashes(tokens: Seq[int], page_size: int, salt: bytes = b"") -> tuple[bytes, ...]:
    """Chained SHA-256 of each *full* page of ``tokens``.

    Hash i covers tokens ``[0, (i + 1) * page_size)`` through its parent, so two sequences share hash i exactly when
    they share the whole prefix (up to a collision of SHA-256 truncated to 128 bits). ``salt`` isolates users that must
    not share pages.
    """
    hashes: list[bytes] = []
    parent = hashlib.sha256(b"jdserve" + salt).digest()
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + page_size])
        parent = hashlib.sha256(parent + page).digest()
        hashes.append(parent[:16])
    return tuple(hashes)


class BlockTable:
    """The pages of one sequence, in token order. ``pages[i]`` holds tokens ``[i * page_size, (i + 1) * page_size)``."""

    __slots__ = ("pages", "shared")

    def __init__(self, pages: Seq[int], shared: int = 0) -> None:
        self.pages = pages
        self.shared = shared
        """How many leading pages came out of the prefix cache, already filled."""

    def __len__(self) -> int:
        return len(self.pages)

    def __repr__(self) -> str:
        return f"BlockTable(pages={self.pages}, shared={self.shared})"


class PagePool:
    """Allocator of ``total`` pages of ``page_size`` token positions, with page ids ``1..total``.

    Args:
        total: pages that can be handed out (the null page is not counted).
        page_size: token positions per page.

    Raises:
        ValueError: ``total`` or ``page_size`` is below 1.
    """

    def __init__(self, total: int, page_size: int) -> None:
        if total < 1 or page_size < 1:
            raise ValueError(f"a page pool needs total >= 1 and page_size >= 1, got {total} and {page_size}")
        self.total = total
        self.page_size = page_size
        self._free = list(range(total, 0, -1))
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._page_of_hash: dict[bytes, int] = {}
        self._hash_of_page: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Pages with no owner and no content."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """Pages that at least one block table refers to."""
        return len(self._references)

    @property
    def cached(self) -> int:
        """Pages without an owner that still hold a known prefix."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that a reservation can get: the free ones, and the cached ones by forgetting their content."""
        return len(self._free) + len(self._cached)

    def check(self) -> None:
        """Raise AssertionError unless every page is in exactly one place."""
        places = [*self._free, *self._references, *self._cached]
        if len(places) != self.total or set(places) != set(range(1, self.total + 1)):
            raise AssertionError(
                f"page conservation broken: free {self.free} + owned {self.owned} + cached {self.cached}"
                f" != total {self.total}"
            )
        if any(count < 1 for count in self._references.values()):
            raise AssertionError("an owned page has no reference")

    def match(self, hashes: Seq[bytes]) -> int:
        """Number of leading ``hashes`` whose pages are resident (owned or cached)."""
        count = 0
        for value in hashes:
            if value not in self._page_of_hash:
                break
            count += 1
        return count

    def reserve(self, count: int, prefix: Seq[bytes] = ()) -> BlockTable:
        """Reserve ``count`` pages, all or nothing; the leading ones shared where ``prefix`` is resident.

        Args:
            count: pages needed in all.
            prefix: chained hashes of the leading full pages, as many as may be shared.

        Raises:
            OutOfPages: fewer than the needed pages are available; the pool is unchanged.
        """
        shared = self.match(prefix[:count])
        reused = [self._page_of_hash[value] for value in prefix[:shared]]
        revived = sum(1 for page in reused if page in self._cached)
        fresh = count - shared
        if fresh > self.available - revived:
            raise OutOfPages(f"{fresh} pages needed, {self.available - revived} of {self.total} available")
        for page in reused:
            self._cached.pop(page, None)
            self._references[page] = self._references.get(page, 0) + 1
        return BlockTable((*reused, *(self._take() for _ in range(fresh))), shared)

    def grow(self, table: BlockTable, count: int) -> None:
        """Append ``count`` fresh pages to ``table``, all or nothing.

        Raises:
            OutOfPages: fewer than ``count`` pages are available; table and pool are unchanged.
        """
        if count > self.available:
            raise OutOfPages(f"{count} pages needed, {self.available} of {self.total} available")
        table.pages = (*table.pages, *(self._take() for _ in range(count)))

    def publish(self, table: BlockTable, hashes: Seq[bytes]) -> None:
        """Say that the leading ``len(hashes)`` pages of ``table`` now hold the prefixes with those hashes.

        A prefix that some other page already holds keeps that page: the second copy stays private.
        """
        for page, value in zip(table.pages, hashes, strict=False):
            if value not in self._page_of_hash and page not in self._hash_of_page:
                self._page_of_hash[value] = page
                self._hash_of_page[page] = value

    def release(self, table: BlockTable) -> None:
        """Give up every page of ``table`` and empty it.

        Pages nobody else refers to become cached when their content is known, free otherwise. The tail of a prefix is
        forgotten before its head, because a head can be shared without its tail and not the other way round.

        Raises:
            ValueError: a page of the table is not owned (a double release); the pool is unchanged.
        """
        missing = [page for page in table.pages if page not in self._references]
        if missing:
            raise ValueError(f"pages {missing} are not owned: released twice?")
        for page in reversed(table.pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            if page in self._hash_of_page:
                self._cached[page] = None
            else:
                self._free.append(page)
        table.pages = ()
        table.shared = 0

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of_hash[self._hash_of_page.pop(page)]
        self._references[page] = 1
        return page


class PageCount(PagePool):
    """An allocator that counts pages and gives them no ids: for a simulator, to which their content means nothing.

    Its tables hold the numbers 0, 1, and so on. Nothing is shared or cached. Counts are those of a :class:`PagePool`.
    """

    def __init__(self, total: int, page_size: int) -> None:
        super().__init__(1, page_size)
        if total < 1:
            raise ValueError(f"a page pool needs total >= 1 and page_size >= 1, got {total} and {page_size}")
        self.total = total
        self._owned = 0

    @property
    def free(self) -> int:
        """Pages with no owner."""
        return self.total - self._owned

    @property
    def owned(self) -> int:
        """Pages that a table holds."""
        return self._owned

    @property
    def available(self) -> int:
        """Pages that a reservation can get."""
        return self.total - self._owned

    def check(self) -> None:
        """Raise AssertionError unless the count is possible."""
        if not 0 <= self._owned <= self.total:
            raise AssertionError(f"page conservation broken: {self._owned} of {self.total} are owned")

    def match(self, hashes: Seq[bytes]) -> int:
        """0: nothing is shared."""
        return 0

    def reserve(self, count: int, prefix: Seq[bytes] = ()) -> BlockTable:
        """As :meth:`PagePool.reserve`, nothing shared."""
        if count > self.total - self._owned:
            raise OutOfPages(f"{count} pages needed, {self.available} of {self.total} available")
        self._owned += count
        return BlockTable(range(count))

    def grow(self, table: BlockTable, count: int) -> None:
        """As :meth:`PagePool.grow`."""
        if count > self.total - self._owned:
            raise OutOfPages(f"{count} pages needed, {self.available} of {self.total} available")
        self._owned += count
        table.pages = range(len(table.pages) + count)

    def take(self, count: int) -> None:
        """Hand out ``count`` pages to tables that will be told later (see ``policy/held.py``)."""
        if count > self.total - self._owned:
            raise OutOfPages(f"{count} pages needed, {self.available} of {self.total} available")
        self._owned += count

    def publish(self, table: BlockTable, hashes: Seq[bytes]) -> None:
        """Nothing: pages have no content."""

    def release(self, table: BlockTable) -> None:
        """As :meth:`PagePool.release`."""
        self._owned -= len(table.pages)
        table.pages = ()
