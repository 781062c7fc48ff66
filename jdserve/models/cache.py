"""The user's cache directory, shared by every process of theirs."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs


def cache_dir(kind: str) -> Path:
    """The folder of the cache for ``kind`` of things; made when absent."""
    folder = Path(platformdirs.user_cache_dir("jdserve", appauthor=False)) / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Be the only process that makes ``target``; others wait here. The lock of a process that dies is free again."""
    with open(target.with_name(target.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
