"""How far a start has come, for whoever looks: a terminal, a health check, a notebook."""

from __future__ import annotations

from collections.abc import Callable

STAGES = ("start", "download", "convert", "load", "compile", "ready")


class Progress:
    """The present stage of a start. Call it with a stage and a share to move it; any thread may.

    Args:
        listener: told of every move, on the thread that makes it.

    Attributes:
        stage: one of :data:`STAGES`.
        done: share of the stage in [0, 1], None if unknown.
        error: what broke the start, None if nothing did.
    """

    def __init__(self, listener: Callable[[str, float | None], None] | None = None) -> None:
        self.stage = "start"
        self.done: float | None = None
        self.error: str | None = None
        self._listener = listener

    def __call__(self, stage: str, done: float | None) -> None:
        """Move to ``done`` of ``stage``."""
        self.stage, self.done = stage, done
        if self._listener is not None:
            self._listener(stage, done)
