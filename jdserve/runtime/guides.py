"""Guided decoding: from what a client wants a text to look like to the tokens that may come next.

The matcher lives beside the sampler, since the tokens that may come next depend on the one that was chosen last. It is
made from the request alone: whichever instance goes on with a text feeds it the tokens so far, so that a hand-off, a
preemption or a failover changes nothing.

A guide may be hostile. Its compilation and every step have bounded work, and it has a budget of processor time, past
which its request, and no other, fails.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jdserve.core.errors import InvalidRequest
from jdserve.core.request import Guide, Request
from jdserve.core.spec import ModelSpec

MAX_COMPILED = 64
"""Guides that are kept compiled, those used last."""

BUDGET_S = 0.2
BUDGET_PER_TOKEN_S = 0.004
"""Processor time that the guide of one request may use; a JSON schema needs a hundredth of that."""

WHITESPACE = r"[ \n\r\t]{0,24}"
"""Between the words of JSON: without a bound a model may write blanks for ever."""

MAX_ERROR = 300
"""Most characters of a compiler's error that are passed on."""


def limits() -> LLParserLimits:
    """Bounds on the work of compiling a guide, and of one step: far above what schemas of people need."""
    return LLParserLimits(
        max_items_in_row=500,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=5_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def grammar_of(guide: Guide) -> str:
    """The grammar in llguidance's language.

    Raises:
        InvalidRequest: a JSON text in it is none, or not of the shape that its kind needs.
    """
    if guide.kind == "regex":
        return LLMatcher.grammar_from_regex(guide.text)
    if guide.kind == "grammar":
        return LLMatcher.grammar_from_lark(guide.text)
    if guide.kind == "choice":
        choices = json.loads(guide.text)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in choices))
    schema = guide.text if guide.kind == "json_schema" else '{"type": "object"}'
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise _refused(guide, str(error)) from None


def check(guide: Guide) -> None:
    """Compile ``guide`` for any tokenizer. May take a good part of a second, during which other threads go on.

    Raises:
        InvalidRequest: it does not compile, or needs too much.
    """
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar_of(guide), limits=limits())
    if failed:
        raise _refused(guide, messages[0])


def _refused(guide: Guide, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the {guide.kind} cannot be used: {_brief(reason)}", param=guide.kind)


def _brief(reason: str) -> str:
    return reason.removesuffix("<non-verbose/>").strip()[:MAX_ERROR]


class Guided:
    """The guide of one request, as far as its text has come.

    Attributes:
        allowed: ``uint32[ceil(V / 32)]`` tokens that may come next, a bit each.
        error: why the guide can say nothing any more; empty while it can.

    Args:
        matcher: fresh, for this request alone.
        words: of ``allowed``.
        eos: end-of-sequence tokens.
        tokens: generated so far.
    """

    def __init__(self, matcher: LLMatcher, words: int, eos: Seq[int], tokens: Seq[int]) -> None:
        self.allowed = np.zeros(words, np.uint32)
        self.error = ""
        self._matcher = matcher
        self._eos = frozenset(eos)
        self._left_s = BUDGET_S
        self.take(tokens)

    def take(self, tokens: Seq[int]) -> None:
        """Go on with ``tokens``, and find what may follow."""
        if self.error or (tokens and tokens[-1] in self._eos):
            return  # nothing follows
        started = time.thread_time()
        self._matcher.consume_tokens(list(tokens))
        # A buffer of its own each time: the one before may still be on its way to the device.
        self.allowed = np.zeros_like(self.allowed)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self.allowed.ctypes.data, self.allowed.nbytes)
        self._left_s += BUDGET_PER_TOKEN_S * len(tokens) - (time.thread_time() - started)
        if self._matcher.is_error():
            self.error = f"the guide of the text failed: {_brief(self._matcher.get_error())}"
        elif self._left_s < 0:
            self.error = "the guide of the text needs too much time"


class Guides:
    """Compiles the guides of one model. Any thread may use it, and none that others wait for should.

    Args:
        folder: of the model, with its ``tokenizer.json``.
        spec: of the model.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._vocab = spec.vocab
        self._eos = spec.eos
        self._path = folder / "tokenizer.json"
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()  # used by the thread of the pool
        self._tokenizer: Future[LLTokenizer] = self._pool.submit(self._read)

    def _read(self) -> LLTokenizer:
        if not self._path.is_file() or not self._eos:
            raise InvalidRequest("guided decoding needs the model's tokenizer.json and an end-of-sequence token")
        return LLTokenizer(self._path.read_text(), self._vocab, list(self._eos))

    def wait(self) -> None:
        """Wait until the tokenizer is read: that keeps other Python threads from running."""
        self._tokenizer.exception()

    def begin(self, request: Request) -> Future[Guided]:
        """Compile the guide of ``request`` and feed it what was generated so far.

        The future raises InvalidRequest where the guide or the model will not do.
        """
        return self._pool.submit(self._begin, request)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, request: Request) -> Guided:
        guide = request.params.guide
        assert guide is not None
        matcher = self._compiled.pop(guide, None)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer.result(), grammar_of(guide), log_level=0, limits=limits())
            if matcher.is_error():
                raise _refused(guide, matcher.get_error())
        self._compiled[guide] = matcher
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        generated = request.prompt[len(request.prompt) - request.generated :]
        guided = Guided(matcher.deep_copy(), -(-self._vocab // 32), self._eos, generated)
        if guided.error:
            raise _refused(guide, guided.error)
        return guided
