"""Shared memory between the processes of one host, as anonymous files (memfd).

The producer owns the files. Another process opens ``/proc/<pid>/fd/<n>`` of the producer, so nothing has a name in a
file system: when the last process that maps a segment has ended, however it ended, the memory is gone.

A segment is a header page and then data. The header says which offer the data belongs to and whether it is complete.
Segments are recycled, because fresh pages cost more than the copy itself. What keeps a reader's data in place is a
lock: a reader holds the file shared while it reads, and the producer gives the segment to another offer only after it
has held it exclusively. Locks of a dead process vanish with it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import sys
import threading
from collections.abc import Sequence as Seq
from enum import IntEnum

import numpy as np

NAME = "jdserve-kv"
PAGE = 4096
SMALLEST = 16 * PAGE
HEADER = struct.Struct("<QQ")

# MAP_POPULATE: all pages at once, instead of a page fault for each in the middle of a copy.
MAP_FLAGS = mmap.MAP_SHARED | mmap.MAP_POPULATE if sys.platform == "linux" else mmap.MAP_SHARED


class State(IntEnum):
    """Of the data of a segment."""

    WRITING = 0
    READY = 1
    FAILED = 2


def place(sizes: Seq[int]) -> tuple[list[int], int]:
    """Where parts of these bytes begin in a segment, each on a page of its own, and the bytes of the whole."""
    offsets: list[int] = []
    end = PAGE
    for size in sizes:
        offsets.append(end)
        end += -(-size // PAGE) * PAGE
    return offsets, end


def size_class(need: int) -> int:
    """Bytes of the segment that ``need`` bytes go to: four classes per doubling, so at most a quarter is wasted."""
    step = max(1 << max(need.bit_length() - 3, 0), SMALLEST)
    return -(-need // step) * step


class Segment:
    """One segment, at its producer. Whoever holds it uses it alone.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._fd = os.memfd_create(NAME)
        os.ftruncate(self._fd, size)
        self._memory: np.ndarray | None = None

    @property
    def address(self) -> str:
        """Where other processes find it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def mark(self, id: int, state: State) -> None:
        """Write the header."""
        os.pwrite(self._fd, HEADER.pack(id, state), 0)

    def memory(self) -> np.ndarray:
        """All bytes; takes the pages from the system on the first call."""
        if self._memory is None:
            self._memory = np.frombuffer(mmap.mmap(self._fd, self.size, flags=MAP_FLAGS), np.uint8)
        return self._memory

    def retire(self) -> bool:
        """Make late readers find nothing; false, and nothing changes, while somebody reads."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.mark(0, State.FAILED)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Give the memory back, as soon as no reader maps it any more."""
        self._memory = None
        os.close(self._fd)


class SegmentPool:
    """The segments of a producer. Methods may be called from any thread.

    Args:
        keep_bytes: most bytes of free segments that are kept for reuse.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._free: list[Segment] = []
        self._limbo: list[Segment] = []

    @property
    def free_bytes(self) -> int:
        """Of segments that wait for another offer."""
        with self._lock:
            return sum(segment.size for segment in self._free)

    @property
    def limbo(self) -> int:
        """Segments that were given back while somebody read them."""
        with self._lock:
            return len(self._limbo)

    def take(self, need: int) -> Segment:
        """A segment of at least ``need`` bytes that nobody reads."""
        self.settle()
        size = size_class(need)
        with self._lock:
            for index in range(len(self._free) - 1, -1, -1):  # the one used last has the warmest pages
                if self._free[index].size == size:
                    return self._free.pop(index)
        return Segment(size)

    def give(self, segment: Segment) -> None:
        """Take back a segment that nobody writes any more."""
        with self._lock:
            self._limbo.append(segment)
        self.settle()

    def settle(self) -> None:
        """Free the segments whose readers have ended, and close what is beyond the bound, oldest first."""
        with self._lock:
            limbo, self._limbo = self._limbo, []
            for segment in limbo:
                (self._free if segment.retire() else self._limbo).append(segment)
            while sum(segment.size for segment in self._free) > self._keep_bytes:
                self._free.pop(0).close()

    def close(self) -> None:
        """Close all segments in here. Readers keep what they have mapped, and nobody writes to it any more."""
        with self._lock:
            for segment in self._free + self._limbo:
                segment.close()
            self._free, self._limbo = [], []


class Reading:
    """A producer's segment, held so that its data stay in place.

    Args:
        address: of the segment.

    Raises:
        OSError: it is not there, is about to be reused, or belongs to another user.
    """

    def __init__(self, address: str) -> None:
        # A number that another process has taken over may stand for anything, and opening that may block.
        if not re.fullmatch(r"/proc/\d+/fd/\d+", address) or not os.readlink(address).startswith(f"/memfd:{NAME}"):
            raise FileNotFoundError(f"{address} is no segment")
        self.address = address
        self._lock = threading.Lock()
        self._fd = os.open(address, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise
        status = os.fstat(self._fd)
        self.inode, self.size = status.st_ino, status.st_size

    def header(self) -> tuple[int, int]:
        """Id of the offer that the data belong to, and their state."""
        return HEADER.unpack(os.pread(self._fd, HEADER.size, 0))

    def map(self) -> np.ndarray:
        """All bytes, read-only; they may change once this is closed."""
        return np.frombuffer(mmap.mmap(self._fd, self.size, flags=MAP_FLAGS, prot=mmap.PROT_READ), np.uint8)

    def alive(self) -> bool:
        """Whether the producer still has it."""
        return _inode(self.address) == self.inode

    def close(self) -> None:
        """Let go; more than once is fine."""
        with self._lock:
            if self._fd >= 0:
                # Closing would not be enough: a mapping, or a process forked meanwhile, keeps the file open.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                os.close(self._fd)
            self._fd = -1


class Mappings:
    """Segments of other processes that are mapped here, because mapping takes as long as copying."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[str, tuple[int, np.ndarray]] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._mapped)

    def memory(self, reading: Reading) -> np.ndarray:
        """All bytes of the segment, read-only."""
        with self._lock:
            inode, memory = self._mapped.get(reading.address, (0, None))
        if memory is None or inode != reading.inode:
            memory = reading.map()
            with self._lock:
                self._mapped[reading.address] = (reading.inode, memory)
        return memory

    def sweep(self) -> None:
        """Unmap what its producer has closed: a mapping keeps the memory of a dead process."""
        with self._lock:
            for address, (inode, _) in list(self._mapped.items()):
                if _inode(address) != inode:
                    del self._mapped[address]

    def clear(self) -> None:
        """Unmap everything that no array lies in."""
        with self._lock:
            self._mapped.clear()


def _inode(address: str) -> int | None:
    try:
        return os.stat(address).st_ino
    except OSError:
        return None
