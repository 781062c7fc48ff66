"""What the front asks of an engine. The runtime's engine satisfies it by shape; tests use a scripted one."""

# The classes' docstrings tell of their properties.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from jdserve.core.plan import Instance, Plan, Worker
from jdserve.core.request import Request
from jdserve.core.spec import ModelSpec
from jdserve.runtime.outputs import EngineStats, TokenOutput
from jdserve.runtime.progress import Progress


class TextEngine(Protocol):
    """Turns requests into tokens.

    Attributes:
        plan: in force.
        spec: of the model; bounds token ids.
        max_model_len: most prompt and generated tokens of one request together.
        started: every step shape is compiled, and requests are taken.
        ready: the instances that live now can serve a request from end to end.
        draining: no new request is taken.
        progress: of the start-up.
    """

    @property
    def plan(self) -> Plan: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def started(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def progress(self) -> Progress: ...

    def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """News of ``request`` until one with ``finish`` set. Closing the generator cancels the request.

        Raises:
            InvalidRequest, Overloaded: at the first iteration.
            RequestFailed: at any later one.
        """
        ...

    def stats(self) -> EngineStats:
        """Numbers for the metrics page."""
        ...

    async def drain_instance(self, name: str) -> None:
        """Empty an instance and end it for good.

        Raises:
            InvalidPlan: there is no such instance, or it is the last one that can play its part.
        """
        ...

    async def add_instance(self, instance: Instance, worker: Worker) -> None:
        """Start one more instance; returns when it takes work.

        Raises:
            InvalidPlan: it does not fit the plan or the machine.
            JdserveError: it could not be started.
        """
        ...

    async def drain(self, timeout_s: float) -> None:
        """Take no new request and wait until the running ones end, at most ``timeout_s``."""
        ...

    async def close(self) -> None:
        """Stop every instance and free what it holds."""
        ...
