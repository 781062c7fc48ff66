"""Ids of a Hugging Face hub: what is asked for, and what is said where there is no hub."""

from __future__ import annotations

import huggingface_hub
import pytest
from tiny import write_tiny_checkpoint

from jdserve.core.errors import CheckpointError
from jdserve.models.hub import is_hub_id
from jdserve.models.load import resolve


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("owner/name-1.5_b", True),
        ("owner/name@v1.0", True),
        ("owner/name@refs/pr/1", True),
        ("name", False),
        ("a/b/c", False),
        ("./a/b", False),
        ("../b", False),
        ("/a", False),
        ("~/a", False),
        ("owner/na me", False),
    ],
)
def test_what_an_id_is(model, expected):
    assert is_hub_id(model) == expected


def test_a_model_of_the_hub_is_its_folder(tmp_path, monkeypatch):
    folder = write_tiny_checkpoint(tmp_path / "snapshot")
    asked = []

    def download(name, **options):
        asked.append((name, options["revision"], sorted(options["allow_patterns"])))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    told = []
    model = resolve("owner/tiny@v2", lambda *step: told.append(step))
    assert (model.name, model.folder) == ("owner/tiny@v2", folder)
    assert asked == [("owner/tiny", "v2", ["*.jinja", "*.json", "*.safetensors"])]
    assert told == [("download", None), ("download", 1.0)]
    resolve("owner/tiny")
    assert asked[1][1] is None


def test_a_folder_goes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_checkpoint(tmp_path / "owner" / "tiny")
    assert resolve("owner/tiny").name == "tiny"


def test_no_hub_is_told_with_its_address_and_what_to_do(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("nobody\nanswers")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"owner/tiny from https://huggingface\.co: nobody answers\. .*folder"):
        resolve("owner/tiny")
