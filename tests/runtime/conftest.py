"""The tiny model: 4 layers, 8 query and 4 KV heads, so that it splits over 1, 2 and 4 devices."""

from __future__ import annotations

import pytest
from tiny import write_tiny_checkpoint

from jdserve.models.checkpoint import LoadedModel
from jdserve.models.load import resolve


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return resolve(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny"))
