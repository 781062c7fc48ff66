"""From an engine's token outputs to the text that a caller sees: detokenized, cut at stop strings, counted.

Text that may turn out to be the beginning of a stop string is held back until it is decided. A token is handed out
together with the text it ends, so the texts of the tokens joined are the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from jdserve.core.request import FinishReason, SamplingParams
from jdserve.runtime.outputs import TokenLogprobs, TokenOutput
from jdserve.server.detokenizer import detokenizer
from jdserve.server.tokenizer import Tokenizer


class TokenText(msgspec.Struct, frozen=True):
    """A token and its share of the text.

    Attributes:
        token: its id.
        text: what it adds to the text. A character spread over tokens belongs to the one that completes it.
        offset: where ``text`` begins, in characters of the whole text.
        logprobs: None where the request asked for none.
    """

    token: int
    text: str
    offset: int
    logprobs: TokenLogprobs | None = None


class TextDelta(msgspec.Struct, frozen=True):
    """What one output adds.

    Attributes:
        text: new text.
        tokens: the tokens whose text is out with this delta.
        finish: why the text ends, None while it goes on.
        produced: tokens produced up to here, those included whose text is not out yet.
    """

    text: str
    tokens: tuple[TokenText, ...] = ()
    finish: FinishReason | None = None
    produced: int = 0


def join(deltas: Iterable[TextDelta]) -> TextDelta:
    """All of ``deltas`` as one."""
    deltas = list(deltas)
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        finish=deltas[-1].finish if deltas else None,
        produced=deltas[-1].produced if deltas else 0,
    )


def prompt_texts(tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[TokenText]:
    """The tokens of a prompt with their texts, which joined are the decoded prompt.

    Args:
        tokenizer: of the ids.
        prompt: token ids.
        logprobs: of every token but the first; empty for none.
    """
    texts = detokenizer(tokenizer)
    tokens: list[TokenText] = []
    offset = 0
    for index, token in enumerate(prompt):
        text = texts.push(token) + (texts.flush() if index == len(prompt) - 1 else "")
        tokens.append(TokenText(token, text, offset, logprobs[index - 1] if logprobs and index else None))
        offset += len(text)
    return tokens


class StopMatcher:
    """Finds the first of several strings to be completed in a text that arrives in pieces (Knuth, Morris and Pratt).

    Attributes:
        held: how many of the last characters begin one of the strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        self.held = 0

    def feed(self, piece: str) -> tuple[int, int] | None:
        """Take the next piece.

        Returns:
            Length of the string that ended first (the longest, where several end together) and how many characters of
            ``piece`` follow it; None when there is none.
        """
        if not self._stops:
            return None
        for index, char in enumerate(piece):
            found = 0
            for which, (stop, borders) in enumerate(self._stops):
                matched = self._matched[which]
                while matched and stop[matched] != char:
                    matched = borders[matched - 1]
                matched += stop[matched] == char
                if matched == len(stop):
                    found = max(found, matched)
                    matched = borders[-1]
                self._matched[which] = matched
            if found:
                return found, len(piece) - index - 1
        self.held = max(self._matched)
        return None


def _borders(stop: str) -> list[int]:
    """For each prefix of ``stop``, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return borders


class TextStream:
    """The text of one request. When a delta has ``finish`` set, the caller closes the engine's generator.

    Attributes:
        cached_tokens: prompt tokens that came out of the prefix cache.
        prompt_logprobs: of every prompt token but the first, once they are known; empty before.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, *, context: Sequence[int] = (), offset: int = 0
    ) -> None:
        """Begin a text.

        Args:
            tokenizer: of the ids.
            params: its stop strings, ``include_stop_str_in_output`` and ``min_tokens`` are read.
            context: ids that the text continues, see :func:`detokenizer`.
            offset: length of a text that stands before this one, for the tokens' offsets.
        """
        self._texts = detokenizer(tokenizer, context)
        self._params = params
        self._stops = StopMatcher(params.stop)
        self._offset = offset
        self._length = 0  # of the text so far
        self._held = ""  # its end, which is not out yet
        self._tokens: deque[TokenText] = deque()  # not out yet; offsets count from the start of this text
        self._produced = 0  # tokens
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def feed(self, output: TokenOutput) -> TextDelta:
        """Take the next output of the engine and give what it adds to the text."""
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        for index, token in enumerate(output.tokens):
            last = output.finish if index == len(output.tokens) - 1 else None
            text = self._text_of(token, last)
            logprobs = output.logprobs[index] if output.logprobs else None
            self._tokens.append(TokenText(token, text, self._length, logprobs))
            self._produced += 1
            if self._add(text):
                return self._release(len(self._held), "stop")
        if output.finish is None:
            return self._release(len(self._held) - self._stops.held, None)
        if not output.tokens and self._add(self._texts.flush()):
            return self._release(len(self._held), "stop")
        return self._release(len(self._held), output.finish)

    def _text_of(self, token: int, finish: FinishReason | None) -> str:
        # A token that ends the text is not part of it, as a stop string is not.
        hidden = finish == "stop" and not self._params.include_stop_str_in_output
        text = "" if hidden else self._texts.push(token)
        return text + (self._texts.flush() if finish is not None else "")

    def _add(self, text: str) -> bool:
        """Append ``text``; True when a stop string ends in it, and then the text is cut there."""
        self._held += text
        self._length += len(text)
        if self._produced <= self._params.min_tokens:
            return False
        found = self._stops.feed(text)
        if found is None:
            return False
        stop, rest = found
        cut = rest if self._params.include_stop_str_in_output else rest + stop
        self._held = self._held[: len(self._held) - cut]
        self._length -= cut
        return True

    def _release(self, count: int, finish: FinishReason | None) -> TextDelta:
        """Hand out ``count`` held characters and the tokens that end in them; every token when the text ends."""
        text, self._held = self._held[:count], self._held[count:]
        out = self._length - len(self._held)
        tokens: list[TokenText] = []
        while self._tokens and (finish is not None or self._tokens[0].offset + len(self._tokens[0].text) <= out):
            token = self._tokens.popleft()
            start = min(token.offset, out)
            share = token.text[: out - start]
            tokens.append(TokenText(token.token, share, self._offset + start, token.logprobs))
        return TextDelta(text, tuple(tokens), finish, self._produced)
