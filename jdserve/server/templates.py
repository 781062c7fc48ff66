"""Chat templates: jinja programs that come with a model and turn messages into one prompt text."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jdserve.core.errors import InvalidRequest


class ChatTemplate:
    """A compiled template. It runs in a sandbox: it comes with the weights, from whoever made them.

    Attributes:
        takes_tools: it reads the tools that a conversation may use.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile ``source``.

        Args:
            source: the jinja text.
            variables: names that the template may read besides the messages, such as ``bos_token``.

        Raises:
            ValueError: the text is not a jinja template.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from None
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt text of ``messages``.

        Args:
            messages: each with ``role`` and ``content``.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: that the model may call, as OpenAI's API spells them.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) or None,
                **self._variables,
            )
        except Exception as error:  # a foreign program may raise anything, and only its input is ours
            message = f"the chat template refuses the messages: {error}"
            raise InvalidRequest(message, param="messages") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
