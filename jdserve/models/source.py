"""A checkpoint as somebody else wrote it, whatever its format: what conversion reads from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jdserve.core.errors import CheckpointError
from jdserve.core.spec import DType

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vocabulary:
    """The text side of a model.

    Attributes:
        tokenizer: content of a ``tokenizer.json`` of the ``tokenizers`` package.
        chat_template: Jinja template of a conversation, None if the model has none.
        bos_token, eos_token: their texts, which chat templates use.
    """

    tokenizer: str
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None


@dataclass(frozen=True)
class Tensors:
    """The weights of a checkpoint under their Hugging Face names.

    Attributes:
        path: of the checkpoint, for messages.
        shapes: of every tensor that is there.
        dtype: of the weights.
        read: gives one tensor; nothing is held in memory before or after.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtype: DType
    read: Callable[[str], np.ndarray]


def check_tensors(tensors: Tensors, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a checkpoint holds the model it claims to be; tensors nobody asked for are logged as a warning.

    Raises:
        CheckpointError: tensors are missing or misshapen; the message names all of them.
    """
    check_held(tensors.path, tensors.shapes, wanted)
    unknown = sorted(name for name in tensors.shapes.keys() - wanted.keys() if not _redundant(name))
    if unknown:
        log.warning("%s holds tensors that the model does not use: %s", tensors.path, ", ".join(unknown))


def check_held(path: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check that the checkpoint at ``path`` holds the wanted tensors.

    Raises:
        CheckpointError: tensors are missing or misshapen; the message names all of them.
    """
    missing = sorted(wanted.keys() - found.keys())
    misshapen = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in sorted(wanted.items())
        if name in found and found[name] != shape
    ]
    if missing or misshapen:
        problems = [f"missing: {', '.join(missing)}"] if missing else []
        problems += [f"wrong shape: {', '.join(misshapen)}"] if misshapen else []
        raise CheckpointError(f"{path} does not hold the model of its configuration; {'; '.join(problems)}")


def _redundant(name: str) -> bool:
    """Whether a tensor only repeats what the configuration says: rotary tables, and the head of a tied embedding."""
    return name.endswith(".rotary_emb.inv_freq") or name == "lm_head.weight"
