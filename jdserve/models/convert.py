"""Conversion of a source checkpoint, in a process of its own.

Orbax starts jax's back ends, and a front door must not hold an accelerator; so the work is done by
``python -m jdserve.models.convert`` on the CPU back end, which tells its progress in lines of JSON.

The folder is made as ``<target>.partial`` and renamed when complete. What a killed conversion leaves there is only ever
looked at by the next conversion of the same source to the same target, which goes on from the groups that are whole.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jdserve.core.errors import CheckpointError, JdserveError
from jdserve.core.spec import WeightFormat
from jdserve.models.cache import cache_dir, exclusive
from jdserve.models.checkpoint import (
    LoadedModel,
    Manifest,
    begin,
    groups,
    made_from,
    open_converted,
    save_group,
    saved_groups,
    source_key,
    write_description,
)
from jdserve.models.progress import Progress, silent
from jdserve.models.registry import read_spec
from jdserve.models.source import Tensors, Vocabulary, check_tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversion:
    """What is to be converted.

    Attributes:
        source: a Hugging Face folder or a GGUF file.
        name: of the model.
        weights: how matrices are to be stored; None for as they are.
        plugin: ``module:Class`` that computes the model, None for what its architecture says.
        target: folder to make, None for one in the cache.
    """

    source: Path
    name: str
    weights: WeightFormat | None = None
    plugin: str | None = None
    target: Path | None = None

    def key(self) -> str:
        """See :func:`~jdserve.models.checkpoint.source_key`."""
        return source_key(self.source, self.weights, self.plugin)

    def folder(self) -> Path:
        """Where the converted checkpoint is, once it is there."""
        return self.target or cache_dir("checkpoints") / self.key()


def convert(job: Conversion, progress: Progress = silent) -> LoadedModel:
    """Convert a checkpoint, unless that was done before; without starting jax here.

    Raises:
        CheckpointError: the source is not the model it claims to be, cannot be read, or the target not be written.
        InvalidPlan: the model's configuration is not supported.
    """
    target = job.folder()
    if not _done(job, target):
        _convert_apart(job, progress)
    return open_converted(target, job.plugin)


def convert_here(job: Conversion, progress: Progress = silent) -> None:
    """As :func:`convert`, in this process, which starts jax.

    Raises:
        CheckpointError: as :func:`convert`.
        InvalidPlan: as :func:`convert`.
    """
    target = job.folder()
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}") from None
    with exclusive(target):
        if _done(job, target):
            return
        try:
            begin(partial, job.key())
            _write(job, partial, progress)
            os.rename(partial, target)
        # A conversion that is killed or interrupted is gone on with; one that fails would fail again.
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(f"cannot write the converted checkpoint {partial}: {error}") from error
            raise


def _done(job: Conversion, target: Path) -> bool:
    """Whether ``target`` is there.

    Raises:
        CheckpointError: it is something else.
    """
    if not target.exists():
        return False
    if job.target is not None and made_from(target) != job.key():
        raise CheckpointError(f"{target} is there already, and is not this conversion of {job.source}")
    return True


def _write(job: Conversion, folder: Path, progress: Progress) -> None:
    progress("convert", 0.0)
    # Not at the top: finding the weights loads flax, which a front door whose model is converted has no need of.
    from jdserve.models.quantize import quantize, quantized_names
    from jdserve.models.skeleton import checkpoint_parameters

    config, tensors, vocabulary = _read(job.source)
    spec = read_spec(config, job.plugin)
    plain = {weight.name: weight for weight in checkpoint_parameters(spec, plugin=job.plugin)}
    check_tensors(tensors, {name: shape for one in plain.values() for name, shape in one.tensors.items()})
    scaled = quantized_names(checkpoint_parameters(spec, job.weights, job.plugin))
    grouped = groups(plain)
    whole = saved_groups(folder, grouped)
    for done, (group, names) in enumerate(grouped.items()):
        progress("convert", done / len(grouped))
        if group not in whole:
            save_group(folder, group, quantize({name: plain[name].read(tensors.read) for name in names}, scaled))
    write_description(folder, Manifest(job.name, tensors.dtype, job.weights), config, vocabulary)
    progress("convert", 1.0)


def _read(source: Path) -> tuple[dict[str, Any], Tensors, Vocabulary]:
    """Configuration, weights and text side of a source."""
    if source.is_dir():
        from jdserve.models import hf_checkpoint

        return (
            hf_checkpoint.read_config(source),
            hf_checkpoint.read_tensors(source),
            hf_checkpoint.read_vocabulary(source),
        )
    from jdserve.models import gguf_checkpoint, gguf_fields, gguf_vocabulary

    reader = gguf_checkpoint.open_gguf(source)
    config = gguf_fields.read_config(reader, source)
    return (
        config,
        gguf_checkpoint.read_tensors(reader, source, config),
        gguf_vocabulary.read_vocabulary(reader, source),
    )


def _convert_apart(job: Conversion, progress: Progress) -> None:
    command = [sys.executable, "-m", "jdserve.models.convert", msgspec.json.encode(job, enc_hook=str).decode()]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    failure, noise = "", ""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            try:
                message = json.loads(line)
                kind, value = message["kind"], message["value"]
            except (ValueError, TypeError, KeyError):  # what libraries print; of interest after a crash
                noise = (noise + line)[-2000:]
                continue
            if kind == "progress":
                progress("convert", value)
            elif kind == "warning":
                log.warning("%s", value)
            else:
                failure = value
    if failure:
        raise CheckpointError(failure)
    if child.returncode:
        raise CheckpointError(f"conversion of {job.source} died with status {child.returncode}: {noise.strip()}")


class _Teller(logging.Handler):
    """Passes log records on to the parent process."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell("warning", record.getMessage())


def _tell(kind: str, value: str | float | None) -> None:
    print(json.dumps({"kind": kind, "value": value}), flush=True)


def _main() -> int:
    """Convert what ``argv[1]`` says; progress, warnings and a failure that people can act on are lines of JSON."""
    logging.getLogger("jdserve").addHandler(_Teller(logging.WARNING))
    try:
        job = msgspec.json.decode(sys.argv[1], type=Conversion, dec_hook=lambda kind, value: kind(value))
        convert_here(job, lambda _, fraction: _tell("progress", fraction))
    except JdserveError as error:
        _tell("error", str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
