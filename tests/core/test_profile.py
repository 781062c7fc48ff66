"""``Profile``: what reads back, and what is refused with its JSON path."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.shapes import SMOLLM2
from jdserve.core.errors import InvalidPlan
from jdserve.core.profile import Profile
from jdserve.core.spec import ModelSpec

SPEC = ModelSpec.from_config(SMOLLM2)

BASE: dict[str, Any] = {
    "version": 1,
    "device": "cpu",
    "model": msgspec.to_builtins(SPEC),
    "dtype": "float32",
    "rows": [
        {"role": "prefill", "tp": 1, "pp": 1, "batch": 2, "tokens": 64, "context": 0, "seconds": 0.25},
        {"role": "decode", "tp": 3, "pp": 2, "batch": 4, "tokens": 0, "context": 800, "seconds": 0.0625},
        {"role": "mixed", "tp": 1, "pp": 30, "batch": 4, "tokens": 1, "context": 800, "seconds": 0.125},
    ],
    "transfer_bytes_per_s": 1e9,
}


def put(value: object, *path: str | int) -> bytes:
    """The profile with ``value`` at ``path``."""
    profile: Any = copy.deepcopy(BASE)
    inner = profile
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(profile).encode()


def test_a_profile_reads_back(tmp_path: Path) -> None:
    profile = Profile.from_json(json.dumps(BASE))
    assert profile.model == SPEC
    assert [row.seconds for row in profile.rows] == [0.25, 0.0625, 0.125]
    file = tmp_path / "profile.json"
    file.write_bytes(profile.to_json())
    assert Profile.load(file) == Profile.from_json(profile.to_json()) == profile


def test_a_second_device_is_optional() -> None:
    assert Profile.from_json(put(None, "transfer_bytes_per_s")).transfer_bytes_per_s is None


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        (b"", "$", "truncated"),
        (put(2, "version"), "$.version", "2"),
        (put(1, "x"), "$", "unknown field `x`"),
        (put(1, "model", "x"), "$.model", "unknown field `x`"),
        (put(1, "rows", 1, "x"), "$.rows[1]", "unknown field `x`"),
        (put([], "rows"), "$.rows", "length >= 1"),
        (put("int4", "dtype"), "$.dtype", "int4"),
        (put("idle", "rows", 0, "role"), "$.rows[0].role", "idle"),
        (put(0, "rows", 0, "tp"), "$.rows[0].tp", ">= 1"),
        (put(0, "rows", 0, "batch"), "$.rows[0].batch", ">= 1"),
        (put(-1, "rows", 0, "context"), "$.rows[0].context", ">= 0"),
        (put(0, "rows", 2, "seconds"), "$.rows[2].seconds", "> 0"),
        (put(0, "transfer_bytes_per_s"), "$.transfer_bytes_per_s", "> 0"),
        (put("30", "model", "layers"), "$.model.layers", "Expected `int`, got `str`"),
        # refused by ModelSpec itself, at its place in the profile
        (put(0, "model", "layers"), "$.model.layers", "must be at least 1, got 0"),
        (put(2, "model", "kv_heads"), "$.model.kv_heads", "2 KV heads do not divide 9 query heads"),
        # refused together
        (put(2, "rows", 0, "tp"), "$.rows[0].tp", "2 does not fit 9 query heads, 3 KV heads"),
        (put(4, "rows", 1, "pp"), "$.rows[1].pp", "4 does not divide 30 layers"),
        (put(0, "rows", 0, "tokens"), "$.rows[0].tokens", "a prefill step has at least 1 new token, got 0"),
        (put(0, "rows", 2, "tokens"), "$.rows[2].tokens", "a mixed step has at least 1 new token, got 0"),
    ],
)
def test_a_wrong_profile_is_refused_at_its_path(data: bytes, path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan) as error:
        Profile.from_json(data)
    assert error.value.path == path
    assert str(error.value).startswith(f"{path}: ")
    assert str(error.value).count(path) == 1
    assert message in str(error.value)


def test_a_refused_file_is_named_with_the_path_inside(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_bytes(put(0, "model", "layers"))
    with pytest.raises(InvalidPlan) as error:
        Profile.load(file)
    assert str(error.value) == f"{file}: $.model.layers: must be at least 1, got 0"


@given(
    key=st.sampled_from(sorted(BASE["model"])),
    value=st.one_of(st.none(), st.integers(-2, 99), st.floats(), st.text(max_size=3)),
)
def test_a_mutated_model_is_read_or_refused(key: str, value: object) -> None:
    try:
        profile = Profile.from_json(put(value, "model", key))
    except InvalidPlan:
        return
    assert Profile.from_json(profile.to_json()) == profile
