"""Strict jax for every test: four CPU devices, no implicit dtype or rank promotion, no cache shared with the user."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("untimed", deadline=None)  # a busy machine is no fault
settings.load_profile("untimed")

# Not the user's cache: a test must not pass because of what an earlier run left there.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Start jax with the devices that the tensor-parallel tests need."""
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("compilations")))
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
