"""Conversion of a source checkpoint into the cache, in a process of its own.

Orbax starts jax's back ends, and a front door must not hold an accelerator; so the work is done by
``python -m jdserve.models.convert`` on the CPU back end, which tells its progress in lines of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

from jdserve.core.errors import CheckpointError, JdserveError
from jdserve.core.spec import ModelSpec
from jdserve.models.cache import cache_dir, exclusive
from jdserve.models.checkpoint import (
    LoadedModel,
    groups,
    model_name,
    open_converted,
    save_group,
    source_key,
    write_description,
)
from jdserve.models.progress import Progress, silent
from jdserve.models.source import Tensors, Vocabulary, check_tensors

log = logging.getLogger(__name__)


def convert(source: Path, progress: Progress = silent) -> LoadedModel:
    """Convert a Hugging Face folder or a GGUF file, unless that was done before; without starting jax here.

    Raises:
        CheckpointError: the source is not the model it claims to be, cannot be read, or the cache not be written.
    """
    target = _target(source)
    if not target.is_dir():
        _convert_apart(source, progress)
    return open_converted(target)


def convert_here(source: Path, progress: Progress = silent) -> None:
    """As :func:`convert`, in this process, which starts jax.

    Raises:
        CheckpointError: as :func:`convert`.
        InvalidPlan: the model's configuration is not supported.
    """
    target = _target(source)
    partial = target.with_name(target.name + ".partial")
    with exclusive(target):
        if target.is_dir():
            return
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: nobody else is in here
        try:
            partial.mkdir()
            _write(source, partial, progress)
            os.rename(partial, target)
        except OSError as error:
            raise CheckpointError(f"cannot write the converted checkpoint {partial}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _target(source: Path) -> Path:
    return cache_dir("checkpoints") / source_key(source)


def _write(source: Path, folder: Path, progress: Progress) -> None:
    progress("convert", 0.0)
    # Not at the top: finding the weights loads flax, which a front door whose model is converted has no need of.
    from jdserve.models.skeleton import checkpoint_parameters

    spec, tensors, vocabulary = _read(source)
    weights = {weight.name: weight for weight in checkpoint_parameters(spec)}
    check_tensors(tensors, {name: shape for one in weights.values() for name, shape in one.tensors.items()})
    grouped = groups(weights)
    for done, (group, names) in enumerate(grouped.items()):
        progress("convert", done / len(grouped))
        save_group(folder, group, {name: weights[name].read(tensors.read) for name in names})
    write_description(folder, model_name(source.resolve()), spec, tensors.dtype, vocabulary)
    progress("convert", 1.0)


def _read(source: Path) -> tuple[ModelSpec, Tensors, Vocabulary]:
    if source.is_dir():
        from jdserve.models import hf_checkpoint

        spec = hf_checkpoint.read_spec(source)
        return spec, hf_checkpoint.read_tensors(source), hf_checkpoint.read_vocabulary(source)
    from jdserve.models import gguf_checkpoint

    reader = gguf_checkpoint.open_gguf(source)
    spec = gguf_checkpoint.read_spec(reader, source)
    tensors = gguf_checkpoint.read_tensors(reader, source, spec)
    return spec, tensors, gguf_checkpoint.read_vocabulary(reader, source)


def _convert_apart(source: Path, progress: Progress) -> None:
    command = [sys.executable, "-m", "jdserve.models.convert", str(source)]
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
        raise CheckpointError(f"conversion of {source} died with status {child.returncode}: {noise.strip()}")


class _Teller(logging.Handler):
    """Passes log records on to the parent process."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell("warning", record.getMessage())


def _tell(kind: str, value: str | float | None) -> None:
    print(json.dumps({"kind": kind, "value": value}), flush=True)


def _main() -> int:
    """Convert ``argv[1]``; progress, warnings and a failure that people can act on are lines of JSON."""
    logging.getLogger("jdserve").addHandler(_Teller(logging.WARNING))
    try:
        convert_here(Path(sys.argv[1]), lambda _, fraction: _tell("progress", fraction))
    except JdserveError as error:
        _tell("error", str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
