"""From blocks of a workload to hashes of pages."""

from __future__ import annotations

from jdserve.sim.workload import Workload


class Prefixes:
    """The page hashes of each prompt of a workload.

    Blocks with equal ids hold equal tokens behind equal prefixes, so a page is named by its block and its place in it.
    Where the page size does not divide that of a block, a page that reaches into the next block is named by both.
    """

    def __init__(self, workload: Workload, page_size: int) -> None:
        self._workload = workload
        self._page = page_size
        self._known: dict[tuple[int, int, int], bytes] = {}

    def of(self, index: int) -> tuple[bytes, ...]:
        """Hashes of the full pages of the prompt that its blocks cover; empty where nothing is shared."""
        work = self._workload
        if not work.blocks:
            return ()
        ids, block, page = work.blocks[index], work.block_tokens, self._page
        covered = min(work.inputs[index], len(ids) * block)
        hashes: list[bytes] = []
        for start in range(0, covered - page + 1, page):
            key = (ids[start // block], ids[(start + page - 1) // block], start)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = b"%d %d %d" % key
            hashes.append(known)
        return tuple(hashes)
