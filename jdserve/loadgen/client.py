"""The open-loop client: a request goes out at its time, whatever is still outstanding.

A closed loop (so many users, each waiting for its answer) slows down with the server and so hides the queue that it was
to measure. Here nothing waits for an answer: every request is a task of its own with a connection of its own when no
idle one is left, and the number of connections has no bound but the system's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec

CUT_OFF = "cut off by the end of the run"

# Silence on a stream for this long is a dead server, not a slow one; connecting may wait for a full accept queue.
_TIMEOUT = httpx.Timeout(connect=60.0, read=600.0, write=60.0, pool=None)
_HEADERS = {"content-type": "application/json", "accept": "text/event-stream", "accept-encoding": "identity"}


class Request(msgspec.Struct, frozen=True):
    """One request, ready to send.

    Attributes:
        at: seconds after the start of the run.
        input_len: tokens of the prompt.
        output_len: tokens that are asked for.
        body: JSON of the completions call.
    """

    at: float
    input_len: int
    output_len: int
    body: bytes


class Record(msgspec.Struct):
    """What came of one request. All times are in seconds after the start of the run.

    Attributes:
        scheduled: when it was to be sent.
        input_len: tokens of the prompt, as sent.
        output_len: tokens that were asked for.
        sent: when the client did begin to send it.
        chunks: when each chunk with new text came. A chunk is one token on a server that streams every token.
        ended: when the last token or the reason for the end came, whichever was later.
        prompt_tokens: of the prompt, as the server counts.
        output_tokens: of the answer, as the server counts.
        finish: why the text ended, as the server says.
        error: what went wrong, None for a request that was answered in full.
    """

    scheduled: float
    input_len: int
    output_len: int
    sent: float
    chunks: list[float] = []
    ended: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish: str | None = None
    error: str | None = CUT_OFF  # until the answer, or its failure, is complete


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


def completion_body(model: str, prompt: Sequence[int], output_len: int, *, ignore_eos: bool) -> bytes:
    """JSON of a streamed, greedy completions call.

    Args:
        model: its name on the server.
        prompt: token ids.
        output_len: most tokens to generate.
        ignore_eos: go on past an end-of-sequence token, so that the answer has exactly ``output_len`` tokens. Not in
            OpenAI's own API; vLLM, SGLang and jdserve know it.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body)


class OpenLoop:
    """One run of requests against ``{url}/v1/completions``.

    Attributes:
        records: one per request that was sent, in the order of sending; those of a run that was stopped early stay.
    """

    def __init__(self, url: str, requests: Sequence[Request]) -> None:
        self._url = f"{url}/v1/completions"
        self._requests = requests
        self._start = 0.0
        self.records: list[Record] = []

    async def run(self, max_seconds: float | None = None) -> None:
        """Send every request at its time and read every answer; use once.

        Requests that fail are records with an error, never exceptions. Cancelling the run, or reaching
        ``max_seconds``, drops what is outstanding: those records keep the error ``CUT_OFF``.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        with contextlib.suppress(TimeoutError):
            async with (
                # trust_env off: a proxy between the load and the server would be measured with it.
                httpx.AsyncClient(limits=limits, timeout=_TIMEOUT, trust_env=False, headers=_HEADERS) as http,
                asyncio.timeout(max_seconds),
                asyncio.TaskGroup() as group,
            ):
                self._start = time.perf_counter()
                for request in self._requests:
                    # A late client must still let its tasks run, hence a sleep of 0 and no skipped one.
                    await asyncio.sleep(max(0.0, request.at - self._now()))
                    record = Record(request.at, request.input_len, request.output_len, sent=self._now())
                    self.records.append(record)
                    group.create_task(self._send(http, request, record))

    async def _send(self, http: httpx.AsyncClient, request: Request, record: Record) -> None:
        record.sent = self._now()
        try:
            async with http.stream("POST", self._url, content=request.body) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    record.error = f"HTTP {response.status_code}: {text[:200]}"
                    return
                record.error = await self._read(response.aiter_raw(), record)
        except httpx.HTTPError as error:
            record.error = f"{type(error).__name__}: {error}"

    async def _read(self, pieces: AsyncIterator[bytes], record: Record) -> str | None:
        """Fill the record from the stream; returns what is wrong with the answer, None if nothing."""
        done = False
        async for data in sse_data(pieces):
            if data == b"[DONE]":
                done = True
                continue
            try:
                event = msgspec.json.decode(data, type=_Event)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                return f"malformed event: {error}"
            if event.error is not None:
                message = event.error.get("message") if isinstance(event.error, dict) else event.error
                return f"error in the stream: {message}"
            self._take(event, record)
        if not done:
            return "the stream ended early"
        if record.finish not in ("stop", "length"):
            return f"finish_reason is {record.finish}"
        if record.output_tokens is None:
            return "no usage in the stream"
        if record.output_tokens < 1 or not record.chunks:
            return "no token came"
        return None

    def _take(self, event: _Event, record: Record) -> None:
        if event.usage is not None:
            record.prompt_tokens = event.usage.prompt_tokens
            record.output_tokens = event.usage.completion_tokens
        if not event.choices:
            return
        choice = event.choices[0]
        record.ended = self._now()
        record.finish = choice.finish_reason
        # A token may have no text (half a character), but a last chunk that only tells the reason is no token.
        if choice.text or choice.finish_reason is None or not record.chunks:
            record.chunks.append(record.ended)

    def _now(self) -> float:
        return time.perf_counter() - self._start


async def sse_data(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event in a stream of bytes that may be cut anywhere.

    Lines end at LF or CRLF only: splitting decoded text would also break at characters such as U+2028, which JSON may
    hold as they are.
    """
    rest = b""
    lines: list[bytes] = []
    async for piece in pieces:
        *complete, rest = (rest + piece).split(b"\n")
        for line in (raw.removesuffix(b"\r") for raw in complete):
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                yield b"\n".join(lines)
                lines = []
