"""The tokenizer's files, what single tokens spell, and chat templates."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fake_engine import byte_fallback, byte_level
from tokenizers import decoders

from jdserve.core.errors import InvalidRequest
from jdserve.server.templates import ChatTemplate
from jdserve.server.tokenizer import Tokenizer


def _folder(path: Path, config: dict, **files: str) -> Path:
    backend = byte_level().backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}


def test_reading_a_folder(tmp_path: Path) -> None:
    generation = json.dumps({"eos_token_id": [1, 7]})
    tokenizer = Tokenizer.read(_folder(tmp_path, CONFIG, generation_config__json=generation))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.template) == (0, (1, 7), None)
    ids = asyncio.run(tokenizer.encode(["hello world", "a"], add_special_tokens=False))
    assert ids == [tuple(byte_level().backend.encode(text).ids) for text in ("hello world", "a")], "cut or padded"


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    def rendered(**arguments: Path) -> str:
        template = Tokenizer.read(tmp_path, **arguments).template
        assert template is not None
        return template.render([], False)

    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "config {{ eos_token }}"}]
    _folder(tmp_path, CONFIG | {"chat_template": named})
    assert rendered() == "config </s>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered() == "file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert rendered(chat_template=tmp_path / "mine.jinja") == "mine"


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        Tokenizer.read(tmp_path)
    _folder(tmp_path, CONFIG | {"chat_template": "{% for %}"})
    with pytest.raises(ValueError, match="does not compile"):
        Tokenizer.read(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Tokenizer.read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        Tokenizer.read(tmp_path)


def test_a_decoder_that_is_not_understood() -> None:
    backend = byte_level().backend
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(ValueError, match="ByteLevel must stand alone"):
        Tokenizer(backend)


def test_what_tokens_spell() -> None:
    tokenizer = byte_level()
    ids = tokenizer.backend.encode(" 가\n").ids
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == " 가\n"
    assert tokenizer.token_text(tokenizer.backend.token_to_id("ê")) == r"bytes:\xea"
    assert tokenizer.token_text(1) == "</s>"
    assert tokenizer.token_bytes(99_999) == b""
    fallback = byte_fallback()
    spelt = {piece: fallback.token_bytes(fallback.backend.token_to_id(piece)) for piece in ("▁ab", "<0xE2>", "<s>")}
    assert spelt == {"▁ab": b" ab", "<0xE2>": b"\xe2", "<s>": b"<s>"}


def _render(source: str, **message: object) -> str:
    return ChatTemplate(source, {}).render([{"role": "user", "content": "x"} | message], True)


def test_what_templates_may_use() -> None:
    assert _render("{{ messages[0] | tojson }}", content="<é>") == '{"role": "user", "content": "<é>"}'
    assert _render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert _render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert len(_render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert _render("{% if true %}\n  a\n{% endif %}\n") == "  a\n"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_templates_that_refuse_or_overreach(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template refuses"):
        _render(source)
