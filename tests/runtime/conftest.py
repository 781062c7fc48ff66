"""The tiny model: 2 layers, 8 query and 4 KV heads, so that it splits over 1, 2 and 4 devices, and 2 stages."""

from __future__ import annotations

import pytest
from tiny import write_tiny_checkpoint

from jdserve.models.checkpoint import LoadedModel
from jdserve.models.load import resolve


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return resolve(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", layers=2))


@pytest.fixture(autouse=True)
def _caches(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """Worker processes share the compiled programs of this one."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(pytestconfig.cache.mkdir("compilations")))
