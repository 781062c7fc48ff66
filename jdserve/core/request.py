"""Requests, their sampling parameters and SLOs, and the one state machine of a sequence."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from jdserve.core.errors import IllegalTransition, InvalidRequest

MAX_LOGPROBS = 20
"""Most alternatives that a request may ask for per token (the bound of OpenAI's chat API)."""

MAX_LOGIT_BIAS = 300
"""Most entries of ``logit_bias`` (the bound of OpenAI's API)."""

MAX_SEED = 2**63 - 1

MAX_GUIDE = 1 << 16
"""Most characters of a guide: what they compile to is bounded besides, but reading them is not free."""

FinishReason = Literal["stop", "length", "abort", "error"]


class SLO(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latency objective of one request: it is met when TTFT *and* TPOT are within their bounds.

    Attributes:
        ttft_s: seconds from arrival to the first token.
        tpot_s: mean seconds per output token after the first.
        attainment: share of requests that must meet both, in (0, 1].
    """

    ttft_s: Annotated[float, Meta(gt=0)]
    tpot_s: Annotated[float, Meta(gt=0)]
    attainment: Annotated[float, Meta(gt=0, le=1)] = 0.9

    def met(self, ttft_s: float, tpot_s: float) -> bool:
        """True when a request with these latencies meets the objective jointly."""
        return ttft_s <= self.ttft_s and tpot_s <= self.tpot_s


GuideKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


class Guide(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a generated text must look like, as the client said it. Whoever samples compiles it.

    Attributes:
        kind: how ``text`` is read.
        text: a JSON schema, a regular expression, a JSON list of strings, or a grammar in llguidance's Lark; empty for
            ``json_object``.
    """

    kind: GuideKind
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are chosen and when to stop. Names and meaning follow the OpenAI API and vLLM.

    Attributes:
        max_tokens: most tokens to generate; 0 only scores the prompt.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p.
        min_p: drop tokens below min_p times the probability of the likeliest.
        presence_penalty, frequency_penalty: subtracted from the logits of generated tokens (once; per occurrence).
        repetition_penalty: divides (multiplies, if negative) the logits of tokens in prompt or output.
        logit_bias: token id -> value added to its logit.
        seed: with ``fold_in(seed, position)`` the key of each token; None lets the front door draw one.
        stop: strings that end the text; not part of it unless ``include_stop_str_in_output``.
        stop_token_ids: token ids that end the text besides the model's end-of-sequence tokens.
        ignore_eos: generate past the end-of-sequence tokens.
        min_tokens: tokens to generate before an end-of-sequence or stop token may be chosen.
        logprobs: alternatives per generated token, None for no log-probabilities at all.
        prompt_logprobs: alternatives per prompt token, None for none.
        guide: what the text must look like; None for anything.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict[int, float])
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None

    def validate(self, vocab_size: int) -> None:
        """Check every field against its bound.

        Raises:
            InvalidRequest: names the field and the bound.
        """
        _bounded("max_tokens", self.max_tokens, 0, None)
        _bounded("temperature", self.temperature, 0.0, 2.0)
        _bounded("top_k", self.top_k, 0, None)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, got {self.top_p}", param="top_p")
        _bounded("min_p", self.min_p, 0.0, 1.0)
        _bounded("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _bounded("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= 10.0:
            raise InvalidRequest(
                f"repetition_penalty must be above 0 and at most 10, got {self.repetition_penalty}",
                param="repetition_penalty",
            )
        if self.seed is not None:
            _bounded("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _bounded("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _bounded(name, value, 0, MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}", param="logit_bias"
            )
        for token, value in self.logit_bias.items():
            _token("logit_bias", token, vocab_size)
            _bounded("logit_bias", value, -100.0, 100.0)
        for token in self.stop_token_ids:
            _token("stop_token_ids", token, vocab_size)
        if any(not text for text in self.stop):
            raise InvalidRequest("stop must not hold an empty string", param="stop")
        if self.guide is not None:
            self._check_guide(self.guide)

    def _check_guide(self, guide: Guide) -> None:
        if len(guide.text) > MAX_GUIDE:
            message = f"a {guide.kind} of {len(guide.text)} characters is above the limit of {MAX_GUIDE}"
            raise InvalidRequest(message, param=guide.kind)
        # Both could leave a position without any token that may stand there.
        for name, given in (("ignore_eos", self.ignore_eos), ("min_tokens", self.min_tokens)):
            if given:
                message = f"{name} does not go together with a {guide.kind}, which decides where the text ends"
                raise InvalidRequest(message, param=name)


def _bounded(name: str, value: float, low: float | None, high: float | None) -> None:
    wrong = isinstance(value, float) and not math.isfinite(value)  # an int may be too large for a float
    wrong = wrong or (low is not None and value < low) or (high is not None and value > high)
    if wrong:
        bound = f"between {low} and {high}" if high is not None else f"at least {low}"
        raise InvalidRequest(f"{name} must be {bound}, got {value}", param=name)


def _token(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{name} holds token id {token}, outside 0..{vocab_size - 1}", param=name)


class Request(msgspec.Struct, frozen=True):
    """One sequence to serve: ``n`` samples of one prompt are ``n`` requests.

    Attributes:
        id: unique in the life of the front door.
        prompt: token ids, at least one. After a preemption or a failover, the tokens generated so far are part of it.
        params: sampling parameters with ``seed`` filled in.
        generated: how many trailing tokens of ``prompt`` were generated by an earlier run of this request.
        cache_salt: isolates the prefix cache of users who must not share pages.
        priority: requests with a smaller one are prefilled first; among equals the order of arrival holds.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    generated: int = 0
    cache_salt: str = ""
    priority: int = 0

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.params.max_tokens - self.generated


class State(str, enum.Enum):  # noqa: UP042 - a StrEnum would print as its value
    """Life of a sequence. PREFILLED means that its KV is parked on the prefill mesh.

    Strings, because these hash in no time, and every move looks one up.
    """

    QUEUED = "queued"
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    PULLING = "pulling"
    DECODING = "decoding"
    FINISHED = "finished"


# on Python 3.11 a name of a module is found several times as fast as a member of an enum
QUEUED, PREFILLING, PREFILLED, PULLING, DECODING, FINISHED = State

TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.PREFILLING, State.FINISHED}),
    # to DECODING where one instance does both phases, back to QUEUED when it is preempted
    State.PREFILLING: frozenset({State.PREFILLED, State.DECODING, State.QUEUED, State.FINISHED}),
    # back to QUEUED when the parked KV is lost and must be recomputed
    State.PREFILLED: frozenset({State.PULLING, State.QUEUED, State.FINISHED}),
    # back to PREFILLED when a pull failed and the KV is still parked
    State.PULLING: frozenset({State.DECODING, State.PREFILLED, State.QUEUED, State.FINISHED}),
    # back to QUEUED when it is preempted or its instance died
    State.DECODING: frozenset({State.QUEUED, State.FINISHED}),
    State.FINISHED: frozenset(),
}
"""Every legal move; cancel and fail (to FINISHED) are legal from each live state."""


class Sequence:
    """A request inside one state machine: its state and how many of its tokens have KV.

    Attributes:
        id: request id.
        state: moved only by :meth:`move`.
        prompt_tokens: tokens to prefill, generated ones of an earlier run included.
        max_new_tokens: tokens that may be generated from here on.
        computed: leading tokens whose KV is in the pool.
        generated: tokens generated here.
    """

    __slots__ = ("computed", "generated", "id", "max_new_tokens", "prompt_tokens", "state")

    def __init__(self, id: str, prompt_tokens: int, max_new_tokens: int, state: State = State.QUEUED) -> None:
        self.id = id
        self.state = state
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.computed = 0
        self.generated = 0

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.generated

    def move(self, to: State) -> None:
        """Go to state ``to``.

        Raises:
            IllegalTransition: the table has no such move.
        """
        if to not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"request {self.id}: {self.state.value} -> {to.value} is not a legal move")
        self.state = to

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id!r}, {self.state.value}, prompt={self.prompt_tokens}, generated={self.generated},"
            f" computed={self.computed})"
        )
