"""The tokenizer of a GGUF file, built with the ``tokenizers`` library.

Two kinds are read: ``gpt2``, byte-level BPE with its merges, and ``llama``, SentencePiece's BPE with a score for each
piece. The first differ in how text is split before the merges, for which GGUF has a name only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jdserve.core.errors import CheckpointError
from jdserve.models.gguf_fields import Fields
from jdserve.models.source import Vocabulary

_CONTROL, _USER_DEFINED = 3, 4
"""Token types: those that stand for no text, and texts that are looked for before anything is split."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How LLaMA 3 and Qwen 2 split text; they differ in how many digits go together."""

_DIGITS_APART = ("smollm", "starcoder", "refact")
_PLAIN = ("gpt-2",)
_LLAMA_3 = ("llama-bpe", "llama-v3", "llama3")
_QWEN = ("qwen2",)
"""GGUF names of the ways to split text."""


def read_vocabulary(reader: GGUFReader, file: Path) -> Vocabulary:
    """The tokenizer and chat template of a GGUF file.

    Raises:
        CheckpointError: a field is missing, or the tokenizer is of another kind than the two that are read.
    """
    fields = Fields(reader, file, "tokenizer")
    kind = fields("ggml.model")
    tokens: list[str] = fields("ggml.tokens")
    bos, eos = (fields(f"ggml.{name}_token_id", -1) for name in ("bos", "eos"))
    if kind == "gpt2":
        tokenizer, begins = _byte_level(fields, tokens)
    elif kind == "llama":
        tokenizer, begins = _sentence_piece(fields, tokens), True
    else:
        raise CheckpointError(
            f"{file}: tokenizer {kind!r} is not read; readable: 'gpt2', 'llama'. Give the model as a Hugging Face"
            " folder instead"
        )
    types = fields("ggml.token_type")
    for type, special in ((_CONTROL, True), (_USER_DEFINED, kind == "gpt2")):
        texts = [token for token, its in zip(tokens, types, strict=True) if its == type]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(text, special=special, normalized=False) for text in texts])
    if fields("ggml.add_bos_token", begins) and bos >= 0:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], pair=None, special_tokens=[(tokens[bos], bos)]
        )
    # The package writes its vocabulary in no fixed order; sorted, equal tokenizers are equal files.
    return Vocabulary(
        json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, sort_keys=True),
        fields("chat_template", "") or None,
        None if bos < 0 else tokens[bos],
        None if eos < 0 else tokens[eos],
    )


def _byte_level(fields: Fields, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether its texts begin with BOS where the file does not say."""
    split = fields("ggml.pre", "default")
    merges: Any = [tuple(merge.split(" ")) for merge in fields("ggml.merges")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in _LLAMA_3))
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split in _DIGITS_APART:
        steps = [pre_tokenizers.Digits(individual_digits=True), plain]
    elif split in _PLAIN:
        steps = [plain]
    elif split in _LLAMA_3:
        steps = [pre_tokenizers.Split(Regex(_WORDS.format(digits="{1,3}")), "isolated"), bytes_alone]
    elif split in _QWEN:
        tokenizer.normalizer = normalizers.NFC()
        steps = [pre_tokenizers.Split(Regex(_WORDS.format(digits="")), "isolated"), bytes_alone]
    else:
        readable = ", ".join(map(repr, (*_DIGITS_APART, *_PLAIN, *_LLAMA_3, *_QWEN)))
        raise CheckpointError(
            f"{fields.file}: pre-tokenizer {split!r} is not read; readable: {readable}. Give the model as a Hugging"
            " Face folder instead"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split in _LLAMA_3


def _sentence_piece(fields: Fields, tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece's BPE joins the two neighbours whose union scores highest: a list of merges, best first."""
    vocabulary = {token: id for id, token in enumerate(tokens)}
    scores = fields("ggml.scores")
    unknown = fields("ggml.unknown_token_id", 0)
    merges = _merges(vocabulary, scores)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    # A space is spelt as a lower block; some models want one before the text.
    prefix = fields("ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    found = []
    for token, id in vocabulary.items():
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        found += [(-scores[id], id, vocabulary[left], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(found)]
