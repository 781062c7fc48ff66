"""Converted checkpoints: a folder that any instance restores from, each device reading its own part only.

    jdserve.json             format, name, and how the weights are stored
    source                   what it was made from
    config.json              of the source
    tokenizer.json           tokenizer_config.json
    weights/<group>/         an Orbax checkpoint: name of a parameter -> array

A group is a layer, or one tensor outside the layers, so that conversion holds one layer in memory and a pipeline stage
opens the groups it needs. A folder is made beside its final place and renamed when complete: what is there is whole.
So is each group of one that is being made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jdserve.core.errors import CheckpointError
from jdserve.core.spec import DType, ModelSpec, WeightFormat
from jdserve.models.interface import SCALE
from jdserve.models.progress import Progress, silent
from jdserve.models.registry import read_spec
from jdserve.models.source import Vocabulary

FORMAT = 2
"""Version of the folder's layout and of what conversion computes; older folders are converted anew."""

MANIFEST = "jdserve.json"
_SOURCE = "source"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_CHUNK_BYTES = 8 << 20
"""Largest piece that Orbax reads or writes at once: a device reads little more than its part."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to be loaded.

    Attributes:
        name: for people and API clients.
        folder: the converted checkpoint, or a Hugging Face folder.
        spec: its sizes.
        dtype: of the stored weights, of those that are not in ``weights``.
        chat_template: Jinja template of a conversation, None if the model has none.
        bos_token, eos_token: their texts, which chat templates use.
        weights: how matrices are stored; None for ``dtype``.
        plugin: ``module:Class`` that computes the model, None for what its architecture says.
    """

    name: str
    folder: Path
    spec: ModelSpec
    dtype: DType
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    weights: WeightFormat | None = None
    plugin: str | None = None

    @property
    def tokenizer_path(self) -> Path:
        """The ``tokenizer.json`` of the ``tokenizers`` package."""
        return self.folder / "tokenizer.json"


@dataclass(frozen=True)
class Manifest:
    """What a converted folder says about itself.

    Attributes:
        name: of the model.
        dtype: of the stored weights.
        weights: how matrices are stored; None for ``dtype``.
        format: of the folder.
    """

    name: str
    dtype: DType
    weights: WeightFormat | None
    format: int = FORMAT


def is_converted(folder: Path) -> bool:
    """Whether a folder is a converted checkpoint, of this or another version."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a converted folder.

    Raises:
        CheckpointError: it is missing or damaged, or another version of jdserve wrote it.
    """
    try:
        fields = json.loads((folder / MANIFEST).read_text())
        if fields["format"] != FORMAT:
            raise CheckpointError(
                f"{folder} has format {fields['format']}, this version reads {FORMAT}: convert the source again"
            )
        return Manifest(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is no readable converted checkpoint: {error!r}") from None


def open_converted(folder: Path, plugin: str | None = None) -> LoadedModel:
    """Read what a converted folder says about itself and its model.

    Raises:
        CheckpointError: a file is missing or damaged, or another version of jdserve wrote it.
        InvalidPlan: its ``config.json`` is not valid, or the plug-in cannot be loaded.
    """
    manifest = read_manifest(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        texts = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template, bos, eos = (texts.get(key) for key in ("chat_template", "bos_token", "eos_token"))
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder} is no readable converted checkpoint: {error!r}") from None
    spec = read_spec(config, plugin)
    return LoadedModel(manifest.name, folder, spec, manifest.dtype, template, bos, eos, manifest.weights, plugin)


def made_from(folder: Path) -> str | None:
    """:func:`source_key` of what a folder was or is made from, None for one that is something else."""
    marker = folder / _SOURCE
    return marker.read_text() if marker.is_file() else None


def begin(folder: Path, source: str) -> None:
    """Make a folder for the conversion of ``source``, or keep what an earlier one left of it."""
    if made_from(folder) != source:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / _SOURCE).write_text(source)


def write_description(folder: Path, manifest: Manifest, config: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Write everything but the weights into a folder that is being made."""
    texts = {
        "chat_template": vocabulary.chat_template,
        "bos_token": vocabulary.bos_token,
        "eos_token": vocabulary.eos_token,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(vocabulary.tokenizer, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(texts, indent=1), encoding="utf-8")
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest)))


def source_key(source: Path, weights: WeightFormat | None = None, plugin: str | None = None) -> str:
    """Name of the converted folder of a source, from what identifies its content without reading its weights.

    Args:
        source: a folder or a file.
        weights: as of :class:`LoadedModel`; others give another folder.
        plugin: likewise.

    Raises:
        CheckpointError: the source cannot be read.
    """
    source = source.resolve()
    digest = hashlib.sha256(f"{FORMAT}\n{source}\n{weights}\n{plugin}\n".encode())
    try:
        for file in sorted(source.iterdir()) if source.is_dir() else [source]:
            status = file.stat()
            digest.update(f"{file.name}\n{status.st_size}\n{status.st_mtime_ns}\n".encode())
            if file.suffix == ".json":
                digest.update(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {source}: {error}") from None
    stem = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in model_name(source))
    return f"{stem}-{digest.hexdigest()[:16]}"


def model_name(source: Path) -> str:
    """What a model is called: the name of its folder, or of its file without the ending."""
    return source.name if source.is_dir() else source.stem


def groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of parameters by the group that stores them, in the order of first appearance."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.search(name)
        group = f"layer.{layer[1]}" if layer else name.removesuffix(SCALE)
        grouped.setdefault(group, []).append(name)
    return grouped


def saved_groups(folder: Path, known: Iterable[str]) -> set[str]:
    """Which of the ``known`` groups a folder that is being made has whole; whatever else lies among them is removed.

    Orbax writes a group beside its place and renames it, so what has the plain name of a group is whole.
    """
    weights, whole = folder.resolve() / "weights", set(known)
    found = {path.name for path in weights.iterdir()} if weights.is_dir() else set[str]()
    for name in found - whole:
        shutil.rmtree(weights / name)
    return found & whole


def save_group(folder: Path, group: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write one group of a folder that is being made; all of its tensors together."""
    import orbax.checkpoint as ocp

    chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
    with _checkpointer() as checkpointer:
        checkpointer.save(_group_folder(folder, group), dict(arrays), save_args=chunks)


def restore(folder: Path, wanted: Mapping[str, Any], progress: Progress = silent) -> dict[str, Any]:
    """Read tensors onto devices, each device its part, cast to the wanted dtype.

    Args:
        folder: a converted checkpoint.
        wanted: ``jax.ShapeDtypeStruct`` with a sharding, by name of the parameter; whole groups.
        progress: told after each group.

    Returns:
        A ``jax.Array`` per name.

    Raises:
        CheckpointError: a group is missing or damaged, or does not hold the wanted tensors; the message names it.
    """
    grouped = groups(wanted)
    missing = sorted(group for group in grouped if not _group_folder(folder, group).is_dir())
    if missing:
        raise CheckpointError(f"{folder} lacks weights: {', '.join(missing)}")
    arrays: dict[str, Any] = {}
    with _checkpointer() as checkpointer:
        for done, (group, names) in enumerate(grouped.items()):
            progress("load", done / len(grouped))
            try:
                arrays |= checkpointer.restore(_group_folder(folder, group), {name: wanted[name] for name in names})
            # What Orbax and its storage raise on a damaged file follows no contract.
            except Exception as error:
                raise CheckpointError(f"cannot restore {group} of {folder}: {error}") from error
    progress("load", 1.0)
    return arrays


def _group_folder(folder: Path, group: str) -> Path:
    return folder.resolve() / "weights" / group


@contextmanager
def _checkpointer() -> Iterator[Any]:
    """An Orbax checkpointer that acts for this process alone and does not chat.

    Processes of one ``jax.distributed`` world restore different layers: a barrier between them would never open.
    """
    import jax
    import orbax.checkpoint as ocp

    me = jax.process_index()
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
        with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
            yield checkpointer
    finally:
        logger.setLevel(level)
