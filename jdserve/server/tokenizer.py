"""The tokenizer of a model: text to ids and back, what each single token spells, and the chat template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jdserve.server.templates import ChatTemplate

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Entries of ``tokenizer_config.json`` that a chat template may read."""


class Tokenizer:
    """Wraps a ``tokenizers`` tokenizer.

    Attributes:
        backend: the wrapped tokenizer; never changed after construction, so that threads may share it.
        byte_level: every token is a string of bytes, and text is their concatenation.
        byte_fallback: tokens such as ``<0xE2>`` stand for single bytes.
        bos_id: beginning-of-sequence token, None where there is none.
        eos_ids: every token that ends a text.
        template: the chat template, None where there is none.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """Wrap ``backend``.

        Args:
            backend: the tokenizer; its truncation and padding are switched off.
            special: ``bos_token``, ``eos_token`` and the like, by name.
            eos_ids: tokens that end a text besides ``eos_token``.
            chat_template: jinja text.

        Raises:
            ValueError: the template does not compile, or the decoder mixes byte-level with other rules.
        """
        special = dict(special or {})
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        rules = _decoder_rules(backend)
        self.byte_level = "ByteLevel" in rules
        self.byte_fallback = "ByteFallback" in rules
        if self.byte_level and set(rules) - {"ByteLevel", "Fuse"}:
            raise ValueError(f"a decoder of {', '.join(rules)} is not supported: ByteLevel must stand alone")
        self.bos_id = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
        eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        self.eos_ids = tuple(dict.fromkeys(([] if eos is None else [eos]) + list(eos_ids)))
        self.template = None if chat_template is None else ChatTemplate(chat_template, special)
        self._special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def read(cls, folder: str | Path, chat_template: str | Path | None = None) -> Tokenizer:
        """Read ``tokenizer.json`` and, where present, its companions of a Hugging Face model folder.

        Args:
            folder: of the model.
            chat_template: a jinja file that replaces the model's own template.

        Raises:
            ValueError: ``tokenizer.json`` is absent or broken, or as the constructor.
            OSError: a file cannot be read.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} does not exist; the server needs the model's tokenizer.json")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        config = _read_json(folder / "tokenizer_config.json")
        special = {name: _content(config[name]) for name in SPECIAL_NAMES if config.get(name)}
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        eos_ids = [eos] if isinstance(eos, int) else list(eos or ())
        if chat_template is not None:
            template = Path(chat_template).read_text()
        elif (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text()
        else:
            template = _own_template(config)
        return cls(backend, special=special, eos_ids=eos_ids, chat_template=template)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        """Token ids of each text, computed off the event loop.

        Args:
            texts: to encode.
            add_special_tokens: add what the tokenizer's post-processor adds, such as BOS.
        """
        batch = await asyncio.to_thread(
            self.backend.encode_batch_fast, list(texts), add_special_tokens=add_special_tokens
        )
        return [tuple(encoding.ids) for encoding in batch]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def skips(self, token: int) -> bool:
        """True when :meth:`decode` drops the token: it is special, or the tokenizer does not have it."""
        return token in self._special or self.backend.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """True when the token is one of those that stand for a single byte."""
        return self.byte_fallback and _fallback_byte(self.backend.id_to_token(token)) is not None

    def token_bytes(self, token: int) -> bytes:
        """What the token spells in the middle of a text, special or not; empty for ids the tokenizer lacks."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def token_text(self, token: int) -> str:
        r"""A readable name of the token: what it spells, or ``bytes:\xe2\x96`` where that is no whole text."""
        spelt = self.token_bytes(token)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)

    def _spell(self, token: int) -> bytes:
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        if self.byte_level:
            values = [BYTE_OF_CHAR.get(char) for char in piece]
            # An added token may hold characters that stand for no byte; then it spells itself.
            return piece.encode() if None in values else bytes(value for value in values if value is not None)
        if token in self._special:
            return piece.encode()
        byte = _fallback_byte(piece) if self.byte_fallback else None
        if byte is not None:
            return bytes([byte])
        # Decoders treat the first token of a text apart (a leading space goes), so look at the second of two.
        return self.decode([token, token])[len(self.decode([token])) :].encode()


def _byte_of_char() -> dict[str, int]:
    """Byte-level vocabularies spell bytes as printable characters: themselves, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF_CHAR: Mapping[str, int] = _byte_of_char()
"""The byte that each character of a byte-level vocabulary stands for."""


def _fallback_byte(piece: str | None) -> int | None:
    if piece is None or len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _decoder_rules(backend: Backend) -> tuple[str, ...]:
    def names(rule: Mapping[str, Any]) -> Iterator[str]:
        if rule["type"] == "Sequence":
            for inner in rule["decoders"]:
                yield from names(inner)
        else:
            yield rule["type"]

    return () if backend.decoder is None else tuple(names(json.loads(backend.decoder.__getstate__())))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _own_template(config: Mapping[str, Any]) -> str | None:
    """``chat_template`` of the configuration: a text, or several by name of which ``default`` is ours."""
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
