"""Token ids to text, one token at a time.

However the ids are cut, the pieces joined are the text of all of them. A piece never ends within a character: bytes
that a later token may complete are held back. The work per token does not grow with the length of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from jdserve.server.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """The text of a growing list of tokens."""

    def push(self, token: int) -> str:
        """Text that ``token`` adds; empty while a character is incomplete, and for special tokens."""
        ...

    def flush(self) -> str:
        """Text of what is held back, when no token will follow; an incomplete character becomes U+FFFD."""
        ...


def detokenizer(tokenizer: Tokenizer, context: Sequence[int] = ()) -> Detokenizer:
    """A detokenizer that suits ``tokenizer``.

    Args:
        tokenizer: of the ids.
        context: ids that stand before; the text continues theirs, so that a space at the seam is kept.
    """
    return ByteDetokenizer(tokenizer) if tokenizer.byte_level else WindowDetokenizer(tokenizer, context)


class ByteDetokenizer:
    """For byte-level vocabularies: the text is the concatenation of the tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """As :class:`Detokenizer` says."""
        return "" if self._tokenizer.skips(token) else self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """As :class:`Detokenizer` says."""
        return self._utf8.decode(b"", True)


class WindowDetokenizer:
    """For every other vocabulary: decodes the new tokens behind the last one before them.

    Tokens that stand for single bytes are decoded with the whole run of such tokens, since one bad byte spoils its run.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        plain = (t for t in reversed(context) if not tokenizer.skips(t) and not tokenizer.is_byte(t))
        self._before = [token for token in (next(plain, None),) if token is not None]
        self._run: list[int] = []

    def push(self, token: int) -> str:
        """As :class:`Detokenizer` says."""
        if self._tokenizer.skips(token):
            return ""
        self._run.append(token)
        if self._tokenizer.is_byte(token):
            return ""
        text = self.flush()
        self._before = [token]
        return text

    def flush(self) -> str:
        """As :class:`Detokenizer` says."""
        known = len(self._tokenizer.decode(self._before))
        text = self._tokenizer.decode(self._before + self._run)[known:]
        self._run = []
        return text
