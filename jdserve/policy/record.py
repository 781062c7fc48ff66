"""The log of a machine, and its replay.

A machine is a pure function of its configuration and its events. So a log that starts with the configuration and then
holds each event with the commands it gave can be fed to a fresh machine: equal commands prove that a live run decided
exactly what the code here decides, and the first difference shows where it did not.

As text a log is JSON lines: a :class:`Header`, then one :class:`Entry` per event.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, TextIO, TypeVar

import msgspec
from msgspec import Meta

from jdserve.core.plan import Instance
from jdserve.policy.base import Machine
from jdserve.policy.build import RouterConfig, machine_of
from jdserve.policy.commands import Command
from jdserve.policy.events import Event

T = TypeVar("T")


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line of a log: what a fresh machine is built from.

    Attributes:
        config: the instance, or the router's arguments.
        page_size: token positions per page.
        version: of this format.
    """

    config: Instance | RouterConfig
    page_size: Annotated[int, Meta(ge=1)]
    version: Literal[1] = 1


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of ``handle``.

    Attributes:
        now: nanoseconds.
        event: what happened.
        commands: what the machine wanted done.
    """

    now: int
    event: Event
    commands: tuple[Command, ...]


class ReplayResult(msgspec.Struct, frozen=True):
    """How a replay went.

    Attributes:
        events: events fed to the fresh machine.
        differs_at: index (from 0) of the first event whose commands differ, None when all are identical. The replay
            stops there, because the two machines are in different states from then on.
        recorded, replayed: the commands of that event in the log and in the replay; empty when all are identical.
    """

    events: int
    differs_at: int | None = None
    recorded: tuple[Command, ...] = ()
    replayed: tuple[Command, ...] = ()

    @property
    def identical(self) -> bool:
        """True when every event gave the recorded commands."""
        return self.differs_at is None


class Recorder:
    """A machine that keeps the log of another one. An event that the machine refuses is not logged.

    Attributes:
        entries: the log so far; empty unless it is kept.

    Args:
        machine: takes the events; fresh, so that the log starts at its beginning.
        header: what ``machine`` was built from.
        file: also gets the log as JSON lines, each one complete when ``handle`` returns.
        keep: keep the log in memory; a server that runs for weeks has its file.
    """

    def __init__(self, machine: Machine, header: Header, file: TextIO | None = None, *, keep: bool = True) -> None:
        self.entries: list[Entry] = []
        self._machine = machine
        self._header = header
        self._file = file
        self._keep = keep
        self._write(header)

    def handle(self, event: Event, now: int) -> list[Command]:
        """What the machine says to ``event`` at ``now`` (nanoseconds)."""
        commands = self._machine.handle(event, now)
        entry = Entry(now, event, tuple(commands))
        if self._keep:
            self.entries.append(entry)
        self._write(entry)
        return commands

    def lines(self) -> list[str]:
        """The log as JSON lines, without line ends."""
        return [_line(self._header), *(_line(entry) for entry in self.entries)]

    def _write(self, value: Header | Entry) -> None:
        if self._file is not None:
            self._file.write(_line(value) + "\n")


def replay(lines: Iterable[str | bytes]) -> ReplayResult:
    """Feed a log to a fresh machine and compare the commands.

    Raises:
        ValueError: the log is empty, or a line is no header or entry (named by its number, from 1).
    """
    machine: Machine | None = None
    events = 0
    for number, line in enumerate(lines, 1):
        if machine is None:
            header = _parse(line, Header, number)
            machine = machine_of(header.config, header.page_size)
            continue
        entry = _parse(line, Entry, number)
        commands = tuple(machine.handle(entry.event, entry.now))
        events += 1
        if commands != entry.commands:
            return ReplayResult(events, events - 1, entry.commands, commands)
    if machine is None:
        raise ValueError("line 1: the log is empty, a header is expected")
    return ReplayResult(events)


def _line(value: Header | Entry) -> str:
    return msgspec.json.encode(value).decode()


def _parse(line: str | bytes, type: type[T], number: int) -> T:
    try:
        return msgspec.json.decode(line, type=type)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"line {number}: no {type.__name__}: {error}") from None
