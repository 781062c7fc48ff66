"""Read a Hugging Face model folder: ``config.json``, safetensors (one file, or shards with an index), tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jdserve.core.errors import CheckpointError, InvalidPlan
from jdserve.core.spec import DType
from jdserve.models.source import Tensors, Vocabulary

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES: dict[str, DType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_config(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder, with the end tokens that only ``generation_config.json`` lists.

    Raises:
        InvalidPlan: ``config.json`` is absent.
        CheckpointError: one of the files is no JSON object.
    """
    if not (folder / "config.json").is_file():
        raise InvalidPlan("$", f"{folder} holds no config.json")
    config = _read_json(folder / "config.json", {})
    ends = [*_ids(config), *_ids(_read_json(folder / "generation_config.json", {}))]
    return config | {"eos_token_id": list(dict.fromkeys(ends))}


def _ids(config: Mapping[str, Any]) -> list[Any]:
    eos = config.get("eos_token_id")
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def read_vocabulary(folder: Path) -> Vocabulary:
    """The tokenizer and chat template of a folder.

    Raises:
        CheckpointError: there is no ``tokenizer.json``, or a configuration file is no JSON.
    """
    try:
        tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except OSError:
        raise CheckpointError(f"{folder} holds no tokenizer.json (other tokenizer formats are not read)") from None
    config = _read_json(folder / "tokenizer_config.json", {})
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates; "default" is the one for plain conversations
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        template = separate.read_text(encoding="utf-8")
    return Vocabulary(tokenizer, template, _token(config.get("bos_token")), _token(config.get("eos_token")))


@dataclass(frozen=True)
class Headers:
    """What the safetensors files of a folder say about themselves.

    Attributes:
        shapes: of every tensor.
        dtype: of most of them: norms are sometimes kept wider than the rest.
        files: name of the file of every tensor.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: DType
    files: Mapping[str, str]


def read_headers(folder: Path) -> Headers:
    """Read names, shapes and dtypes of the weights of a folder, and nothing else of its files.

    Raises:
        CheckpointError: there are none, files are absent or damaged, or tensors are absent or of a dtype that is not
            read; the message names all of them.
    """
    files = _tensor_files(folder)
    opened = _open_all(folder, sorted(set(files.values())))
    absent = sorted(name for name, file in files.items() if name and name not in set(opened[file].keys()))
    if absent:
        raise CheckpointError(f"{folder / INDEX} lists tensors that are not in their files: {', '.join(absent)}")
    if "" in files:  # a single file has no index: it holds what it holds
        files = dict.fromkeys(opened[SINGLE].keys(), SINGLE)
    slices = {name: opened[file].get_slice(name) for name, file in files.items()}
    kinds = {name: piece.get_dtype() for name, piece in slices.items()}
    refused = sorted(f"{name} ({kind})" for name, kind in kinds.items() if kind not in _DTYPES)
    if refused:
        raise CheckpointError(f"{folder}: only {', '.join(_DTYPES)} are read; refused: {', '.join(refused)}")
    shapes = {name: tuple(piece.get_shape()) for name, piece in slices.items()}
    return Headers(shapes, _DTYPES[max(_DTYPES, key=list(kinds.values()).count)], files)


def read_tensors(folder: Path) -> Tensors:
    """The weights of a folder; a file is open while one of its tensors is read, since what was read of it stays mapped.

    Raises:
        CheckpointError: as :func:`read_headers`.
    """
    headers = read_headers(folder)

    def read(name: str) -> np.ndarray:
        with open_shard(folder / headers.files[name]) as shard:
            return shard.get_tensor(name)

    return Tensors(folder, headers.shapes, headers.dtype, read)


@contextmanager
def open_shard(file: Path) -> Iterator[Any]:
    """A safetensors file, open for ``get_tensor`` and ``get_slice``.

    Raises:
        CheckpointError: it is absent or damaged.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None


def _tensor_files(folder: Path) -> dict[str, str]:
    """File of each tensor; the single key "" for a folder with one file."""
    if (folder / SINGLE).is_file():
        return {"": SINGLE}
    if not (folder / INDEX).is_file():
        others = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pth"))
        found = f"; it holds {', '.join(others)}" if others else ""
        raise CheckpointError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there{found}")
    weights = _read_json(folder / INDEX, {}).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{folder / INDEX} has no weight_map")
    return weights


def _open_all(folder: Path, files: list[str]) -> dict[str, Any]:
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks files that {INDEX} names: {', '.join(missing)}")
    opened, damaged = {}, []
    for file in files:
        try:
            opened[file] = safe_open(folder / file, framework="numpy")
        except (SafetensorError, OSError) as error:
            damaged.append(f"{file} ({error})")
    if damaged:
        raise CheckpointError(f"{folder} holds damaged or truncated files: {', '.join(damaged)}")
    return opened


def _token(value: Any) -> str | None:
    """Text of a special token, which is written bare or as an object."""
    return value.get("content") if isinstance(value, dict) else value


def _read_json(file: Path, default: dict[str, Any]) -> dict[str, Any]:
    if not file.is_file():
        return default
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return value
