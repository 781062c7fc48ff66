"""The places where supported versions of jax differ, and where we lean on names that may move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.monitoring
from jax._src import distributed, xla_bridge

Device: TypeAlias = Any
"""A device of jax, whose class has no public type."""

_config: Any = jax.config  # its flags are attributes that type checkers do not see

_COMPILED = "/jax/core/compile/backend_compile_duration"


def offer_cpu_devices(count: int) -> None:
    """Have the CPU back end come up with at least ``count`` devices; once jax runs this does nothing."""
    if not xla_bridge.backends_are_initialized() and int(_config.jax_num_cpu_devices) < count:
        jax.config.update("jax_num_cpu_devices", count)


def keep_compilations(folder: Path) -> None:
    """Keep compiled programs in ``folder`` across processes, unless the user named a folder already."""
    if _config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def keep_compilations_here() -> None:
    """Have this process of a ``jax.distributed`` world keep its compilations too, once jax's devices are up.

    jax lets the first process do so alone, for the sake of file systems that dislike several writers; but stages of a
    pipeline are different programs, and a process that restarts must not compile all of its own again.
    """
    distributed.global_state.process_id = 0


class CompilationCounter:
    """Counts the programs that jax compiles (or fetches from its cache) while the counter is open."""

    def __init__(self) -> None:
        self.count = 0
        self._listener: Callable[..., None] = self._compiled
        jax.monitoring.register_event_duration_secs_listener(self._listener)

    def _compiled(self, event: str, duration: float, **_: Any) -> None:
        self.count += event == _COMPILED

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listener)
