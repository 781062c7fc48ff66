"""Read a Hugging Face model folder: ``config.json``, safetensors (one file, or shards with an index), tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from jdserve.core.errors import CheckpointError
from jdserve.core.spec import DType, ModelSpec
from jdserve.models.source import Tensors, Vocabulary

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES: dict[str, DType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_spec(folder: Path) -> ModelSpec:
    """The spec of a folder, with the end tokens that only ``generation_config.json`` lists.

    Raises:
        InvalidPlan: ``config.json`` is absent or asks for something unsupported.
        CheckpointError: ``generation_config.json`` is no JSON object.
    """
    spec = ModelSpec.read(folder)
    eos = _read_json(folder / "generation_config.json", {}).get("eos_token_id")
    more = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return msgspec.structs.replace(spec, eos=tuple(dict.fromkeys((*spec.eos, *more))))


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


def read_tensors(folder: Path) -> Tensors:
    """Open the weights of a folder and read their names and shapes.

    Raises:
        CheckpointError: there are none, files are absent or damaged, or tensors are absent or of a dtype that is not
            read; the message names all of them.
    """
    where = _tensor_files(folder)
    opened = _open_all(folder, sorted(set(where.values())))
    absent = sorted(name for name, file in where.items() if name and name not in set(opened[file].keys()))
    if absent:
        raise CheckpointError(f"{folder / INDEX} lists tensors that are not in their files: {', '.join(absent)}")
    if "" in where:  # a single file has no index: it holds what it holds
        where = dict.fromkeys(opened[SINGLE].keys(), SINGLE)
    slices = {name: opened[file].get_slice(name) for name, file in where.items()}
    kinds = {name: piece.get_dtype() for name, piece in slices.items()}
    refused = sorted(f"{name} ({kind})" for name, kind in kinds.items() if kind not in _DTYPES)
    if refused:
        raise CheckpointError(f"{folder}: only {', '.join(_DTYPES)} are read; refused: {', '.join(refused)}")

    def read(name: str) -> np.ndarray:
        return opened[where[name]].get_tensor(name)

    shapes = {name: tuple(piece.get_shape()) for name, piece in slices.items()}
    # Norms are sometimes kept wider than the rest: the model is what most of its tensors are.
    kind = max(_DTYPES, key=list(kinds.values()).count)
    return Tensors(folder, shapes, _DTYPES[kind], read)


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
