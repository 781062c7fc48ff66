"""Tools: what clients say of their functions, how a model is held to calling one, and how its calls are read.

Models call a tool as their chat templates teach them: ``<tool_call>``, a JSON object with ``name`` and ``arguments``,
``</tool_call>``. Where a call is required the text is guided to be nothing else.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from jdserve.core.request import Guide
from jdserve.runtime.guides import WHITESPACE
from jdserve.server.words import Body, Text

OPEN, CLOSE = "<tool_call>", "</tool_call>"

MAX_TOOLS = 128
"""Most tools of a request (the bound of OpenAI's API)."""


class Function(Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool. Only functions are taken."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Names a function."""

    name: Text


class ToolChoice(Body):
    """The one function that is to be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    """A call that an earlier turn made; ``arguments`` is JSON text."""

    name: Text
    arguments: Text


class CalledTool(Body):
    """A call of an earlier turn, with the id that its result refers to."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as a chat template reads it: arguments as an object where they are one."""
        try:
            arguments = json.loads(self.function.arguments)
        except ValueError:
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def guide_of(tools: Sequence[Tool], *, several: bool) -> Guide:
    """Has the text be a call of one of ``tools``, or, where ``several``, of one after the other."""
    calls = [_call_schema(tool.function, f"#/anyOf/{index}/properties/arguments") for index, tool in enumerate(tools)]
    more = f' ("\\n{OPEN}\\n" call "\\n{CLOSE}")*' if several else ""
    schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}, "anyOf": calls}
    grammar = f'start: "{OPEN}\\n" call "\\n{CLOSE}"{more}\ncall: %json {json.dumps(schema)}\n'
    return Guide("grammar", grammar)


def _call_schema(function: Function, place: str) -> dict[str, Any]:
    arguments = _moved(function.parameters or {"type": "object"}, place)
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """``schema`` with references that hold after it has become a part of a larger one, at ``place``."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, place) for key, value in schema.items()}
        target = moved.get("$ref")
        if isinstance(target, str) and target.startswith("#"):
            moved["$ref"] = place + target[1:]
        return moved
    return [_moved(value, place) for value in schema] if isinstance(schema, list) else schema


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made."""

    id: str
    name: str
    arguments: str


class ToolParser:
    """Reads the calls out of a text that comes in pieces. What is no call of a known tool stays text.

    Args:
        names: of the tools.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._rest = ""
        self.calls = 0

    def feed(self, piece: str, *, end: bool) -> tuple[str, list[ToolCall]]:
        """Text and calls that ``piece`` completes. What may begin a call is held back, but not at the ``end``."""
        self._rest += piece
        texts: list[str] = []
        calls: list[ToolCall] = []
        for inside, part in self._parts(end):
            call = self._call(part) if inside else None
            if call is not None:
                calls.append(call)
            elif inside:
                texts.append(part)
            elif part.strip() or not (self.calls or calls):
                texts.append(part)  # blanks between calls are no content
        self.calls += len(calls)
        return "".join(texts), calls

    def _parts(self, end: bool) -> Iterator[tuple[bool, str]]:
        """Cut off what is decided: ``(is it marked as a call, text with its marks)``."""
        while self._rest:
            start = self._rest.find(OPEN)
            if start < 0:
                held = 0 if end else _beginning(self._rest)
                part, self._rest = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
                if part:
                    yield False, part
                return
            if start:
                part, self._rest = self._rest[:start], self._rest[start:]
                yield False, part
            stop = self._rest.find(CLOSE)
            if stop < 0 and not end:
                return
            stop = len(self._rest) if stop < 0 else stop + len(CLOSE)
            part, self._rest = self._rest[:stop], self._rest[stop:]
            yield True, part

    def _call(self, part: str) -> ToolCall | None:
        try:
            call = json.loads(part.removeprefix(OPEN).removesuffix(CLOSE))
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or call.get("name") not in self._names or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCall(f"call_{uuid.uuid4().hex[:24]}", call["name"], text)


def _beginning(text: str) -> int:
    """How many of the last characters may begin a call."""
    return next((size for size in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:size])), 0)
