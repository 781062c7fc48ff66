"""Models of a Hugging Face hub, through ``huggingface_hub``: its cache, its token, its settings."""

from __future__ import annotations

import re
from pathlib import Path

from jdserve.core.errors import CheckpointError
from jdserve.models.progress import Progress, silent

WANTED = ("*.safetensors", "*.json", "*.jinja")
"""Files of a model that are of use here; weights in other formats stay where they are."""

_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)


def is_hub_id(model: str) -> bool:
    """Whether ``model`` has the form ``owner/name`` or ``owner/name@revision``."""
    return bool(_ID.fullmatch(model)) and not model.startswith((".", "/", "~"))


def fetch(model: str, progress: Progress = silent) -> Path:
    """The folder of a model in the cache of ``huggingface_hub``, downloaded if need be.

    A revision that is in the cache whole is used also where the hub cannot be reached.

    Raises:
        CheckpointError: the hub cannot be reached or does not give the model.
    """
    from huggingface_hub import constants, snapshot_download

    name, _, revision = model.partition("@")
    progress("download", None)
    try:
        folder = snapshot_download(name, revision=revision or None, allow_patterns=list(WANTED))
    # The library raises its own errors, those of its HTTP client, and those of the file system.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"cannot fetch {model} from {constants.ENDPOINT}: {reason}. Where there is no such hub, give the folder"
            " that holds the model's files"
        ) from error
    progress("download", 1.0)
    return Path(folder)
