"""What a client says its text must look like, and the check of it before anything is queued.

A guide is compiled off the event loop, on threads that nothing else uses, a few at a time; the engine compiles it again
where it samples.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jdserve.core.errors import InvalidRequest, Overloaded
from jdserve.core.request import MAX_GUIDE, Guide, GuideKind
from jdserve.runtime import guides
from jdserve.server.words import Body, Text

MAX_CHOICES_TO_PICK = 1000
COMPILE_TIMEOUT_S = 5.0
COMPILE_THREADS = 2
MAX_WAITING = 64
"""Guides that may wait to be checked."""

Choices = Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES_TO_PICK)]


class NamedSchema(Body):
    """A JSON schema as OpenAI's ``response_format`` carries it; ``strict`` changes nothing: it always is."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    name: Text
    description: Text | None = None
    body: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """vLLM's spelling of the same; one of them is set."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None


class GuidedBody(BaseModel):
    """The parameters that guide a text."""

    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def guide(self) -> tuple[Guide, str] | None:
        """The guide and the parameter that asks for it.

        Raises:
            InvalidRequest: there are two, or one is incomplete.
        """
        outputs = self.structured_outputs or StructuredOutputs.model_validate({})
        asked = (
            *_of_format(self.response_format),
            *_of_one("guided_json", "json_schema", self.guided_json),
            *_of_one("guided_regex", "regex", self.guided_regex),
            *_of_one("guided_choice", "choice", self.guided_choice),
            *_of_one("guided_grammar", "grammar", self.guided_grammar),
            *_of_one("structured_outputs", "json_schema", outputs.json_),
            *_of_one("structured_outputs", "json_object", "" if outputs.json_object else None),
            *_of_one("structured_outputs", "regex", outputs.regex),
            *_of_one("structured_outputs", "choice", outputs.choice),
            *_of_one("structured_outputs", "grammar", outputs.grammar),
        )
        if len(asked) > 1:
            raise InvalidRequest(f"{asked[0][1]} and {asked[1][1]} both guide the text; give one", param=asked[1][1])
        return asked[0] if asked else None


def _of_format(asked: ResponseFormat | None) -> tuple[tuple[Guide, str], ...]:
    if asked is None or asked.type == "text":
        return ()
    if asked.type == "json_object":
        return _of_one("response_format", "json_object", "")
    if asked.json_schema is None or asked.json_schema.body is None:
        message = "response_format of type json_schema needs json_schema.schema"
        raise InvalidRequest(message, param="response_format", code="missing_required_parameter")
    return _of_one("response_format", "json_schema", asked.json_schema.body)


def _of_one(param: str, kind: GuideKind, value: Any) -> tuple[tuple[Guide, str], ...]:
    if value is None:
        return ()
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_GUIDE:
        raise InvalidRequest(f"{param} has {len(text)} characters; {MAX_GUIDE} is the limit", param=param)
    return ((Guide(kind, text), param),)


class GuideChecks:
    """Checks guides, a few at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="guide-check")
        self._waiting = 0

    async def check(self, guide: Guide, param: str) -> None:
        """Compile ``guide``.

        Raises:
            InvalidRequest: it does not compile, or not in time; names ``param``.
            Overloaded: too many wait.
        """
        if self._waiting >= MAX_WAITING:
            raise Overloaded("too many guides of texts wait to be checked")
        self._waiting += 1
        try:
            checking = asyncio.get_running_loop().run_in_executor(self._pool, guides.check, guide)
            await asyncio.wait_for(checking, COMPILE_TIMEOUT_S)
        except TimeoutError:
            message = f"{param} was not compiled within {COMPILE_TIMEOUT_S:.0f} s"
            raise InvalidRequest(message, param=param) from None
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param=param) from None
        finally:
            self._waiting -= 1
