"""Prompts of exact token lengths, cut out of real text.

A text is tokenised once, with the tokenizer of the model that is served; prompts are slices of its token ids and are
sent as ids, so a prompt has precisely the length that was asked for and no server adds or merges a token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from jdserve.loadgen.errors import BenchError

# Tokens that keep their order when a text is used again: a phrase, yet less than the page that a prefix cache shares.
_BLOCK = 8


def read_text(path: str | Path | None = None) -> str:
    """The text at ``path``, by default the one that comes with the package (about 8 KB of English prose).

    Raises:
        BenchError: the file cannot be read, is not UTF-8, or is blank.
    """
    if path is None:
        return resources.files("jdserve.loadgen").joinpath("corpus.txt").read_text(encoding="utf-8")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--text: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BenchError(f"--text: {path} must be UTF-8: {error}") from None
    if not text.strip():
        raise BenchError(f"--text: {path} must hold text, it is blank")
    return text


def encode(path: str | Path, text: str) -> list[int]:
    """Token ids of ``text``, no special tokens added.

    Args:
        path: a ``tokenizer.json``, or the folder of a model that holds one.
        text: what to encode.

    Raises:
        BenchError: there is no such file, or it is no tokenizer.
    """
    from tokenizers import Tokenizer

    path = Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise BenchError(f"--tokenizer: there is no file {path}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BenchError(f"--tokenizer: {path} is no tokenizer.json: {error}") from None
    return tokenizer.encode(text, add_special_tokens=False).ids


def cut(text: Sequence[int], lengths: Sequence[int], seed: int) -> Iterator[list[int]]:
    """One prompt per length: a slice of the text from a place of its own, running on from the end to the beginning.

    No two of the first ``len(text)`` prompts start at the same token, so they share no prefix beyond what the text
    itself repeats. After that many, blocks of the text are put in another order and the places are drawn again.

    Args:
        text: token ids, at least one.
        lengths: tokens of each prompt, at least 1.
        seed: equal seeds give equal prompts.

    Raises:
        BenchError: ``text`` is empty.
    """
    if not text:
        raise BenchError("--text: must give at least 1 token, got 0")
    for lap, first in enumerate(range(0, len(lengths), len(text))):
        source = random.Random(f"prompts {seed} {lap}")
        blocks = [text[start : start + _BLOCK] for start in range(0, len(text), _BLOCK)]
        if lap:
            source.shuffle(blocks)
        ring = [token for block in blocks for token in block]
        starts = source.sample(range(len(ring)), len(ring))
        for start, length in zip(starts, lengths[first : first + len(ring)], strict=False):
            turned = ring[start:] + ring[:start]
            yield (turned * -(-length // len(ring)))[:length]
