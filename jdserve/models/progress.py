"""How long work on a checkpoint tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float | None], None]
"""Called with a stage (``download``, ``convert`` or ``load``) and the fraction of it that is done, None if unknown."""


def silent(stage: str, fraction: float | None) -> None:
    """A :data:`Progress` that tells nobody."""
