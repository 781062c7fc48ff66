"""API keys: made here, kept as digests, compared in constant time.

A file of keys has one per line, ``ROLE NAME sha256:HEX``; empty lines and those that begin with ``#`` are passed over.
A made key is 256 random bits, so a plain digest cannot be turned back into it, and checking one costs a microsecond: a
slow hash, which guards what people think up, would let a flood of wrong keys stop the server.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

Role = Literal["client", "admin"]
"""Who may ask for text; who may change the server as well."""

PREFIX = "jd-"
"""What a made key begins with, so that scanners for leaked secrets find it."""

LEAST = 16
"""Fewest characters of a key that is not made here."""

_LINE = re.compile(r"(?P<role>client|admin)\s+(?P<name>[\w.@-]{1,64})\s+sha256:(?P<digest>[0-9a-f]{64})")


class Key(msgspec.Struct, frozen=True):
    """One key, as it is kept.

    Attributes:
        role: what it opens.
        name: of its holder, for logs.
        digest: SHA-256 of the key.
    """

    role: Role
    name: str
    digest: bytes

    @classmethod
    def of(cls, secret: str, role: Role, name: str) -> Key:
        """The key whose text is ``secret``.

        Raises:
            ValueError: it is short enough to be guessed.
        """
        if len(secret) < LEAST:
            raise ValueError(f"an API key must have at least {LEAST} characters, {name!r} has {len(secret)}")
        return cls(role, name, _digest(secret))

    def line(self) -> str:
        """Its line in a file."""
        return f"{self.role} {self.name} sha256:{self.digest.hex()}\n"


def make_key(role: Role, name: str) -> tuple[str, Key]:
    """A new key: its text, which is kept nowhere, and what is kept.

    Raises:
        ValueError: a file could not hold the name.
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    key = Key.of(secret, role, name)
    if not _LINE.fullmatch(key.line().strip()):
        raise ValueError(f"the name of a key has 1 to 64 letters, digits, '.', '_', '-' or '@', got {name!r}")
    return secret, key


def read_keys(path: Path) -> list[Key]:
    """The keys of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: names the line that is no key.
    """
    keys: list[Key] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            raise ValueError(f"{path}: line {number}: must be 'client|admin NAME sha256:HEX' (see `jdserve key`)")
        role: Role = "admin" if found["role"] == "admin" else "client"
        keys.append(Key(role, found["name"], bytes.fromhex(found["digest"])))
    return keys


class KeyRing:
    """The keys that open the server; without any, nothing is locked.

    Args:
        keys: in any order.
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys: Sequence[Key] = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def has_admin(self) -> bool:
        """Whether one of them opens the admin routes."""
        return any(key.role == "admin" for key in self._keys)

    def find(self, secret: str) -> Key | None:
        """The key whose text is ``secret``. How long that takes tells nothing of the keys: all are looked at."""
        digest, found = _digest(secret), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
