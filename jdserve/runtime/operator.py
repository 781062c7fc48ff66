"""How an operator reaches a running server: over its control channel, with its secret."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import platformdirs

from jdserve.core import jsonio
from jdserve.core.errors import InvalidPlan, JdserveError
from jdserve.runtime import wire
from jdserve.runtime.channel import Channel, Frames, Keys


class MeetingPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator on the server's machine needs to know.

    Attributes:
        control: host:port of the control channel.
        secret: shared with it.
        pid: of the server.
    """

    control: str
    secret: str
    pid: int


def meeting_file(port: int) -> Path:
    """Where the server that listens on HTTP ``port`` leaves its :class:`MeetingPoint`; only its user may read it."""
    return Path(platformdirs.user_cache_dir("jdserve")) / "servers" / f"{port}.json"


def publish(path: Path, control: str, secret: str) -> None:
    """Write a meeting point."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(jsonio.encode(MeetingPoint(control, secret, os.getpid())))


def find(port: int) -> MeetingPoint:
    """The meeting point of the server on ``port``.

    Raises:
        JdserveError: there is none.
    """
    try:
        return jsonio.read(meeting_file(port), MeetingPoint)
    except InvalidPlan:
        raise JdserveError(
            f"no server with workers listens on port {port} of this machine (--port; or --control and --secret-file)"
        ) from None


def ask(control: str, secret: str, message: wire.FromOperator, timeout_s: float) -> None:
    """Have something done and wait until it is.

    Raises:
        JdserveError: the server refuses, or does not answer in time.
    """
    channel = Channel.connect(control, Keys(secret))
    answers: list[wire.ToOperator] = []

    def take(frames: Frames) -> None:
        answers.append(wire.to_operator.decode(frames[0]))
        channel.close()

    timer = threading.Timer(timeout_s, channel.close)
    timer.start()
    channel.post((wire.encode(message),))
    channel.run(take, lambda: None, 0.1)
    timer.cancel()
    if not answers:
        raise JdserveError(f"{control} has not answered within {timeout_s:g} s: is it there, and is the secret right?")
    if isinstance(answers[0], wire.Refused):
        raise JdserveError(answers[0].reason)
