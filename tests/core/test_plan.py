"""``Plan``: what reads back, and what is refused with its JSON path and the bound."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.shapes import SMOLLM2
from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import ColocatedInstance, DecodeInstance, Plan, PrefillInstance, role_of
from jdserve.core.spec import ModelSpec
from jdserve.core.steptime import StepTime

SPEC = ModelSpec.from_config(SMOLLM2)

BASE: dict[str, Any] = {
    "version": 1,
    "model": "smollm2-135m-instruct",
    "dtype": "bfloat16",
    "page_size": 16,
    "max_model_len": 2048,
    "slo": {"ttft_s": 1.0, "tpot_s": 0.1, "attainment": 0.95},
    "transport": "auto",
    "instances": [
        {"role": "prefill", "name": "p0", "tp": 3, "pages": 256, "lm_tokens": 512, "steptime": {"base": 0.001}},
        {"role": "decode", "name": "d0", "pp": 2, "pages": 512, "max_num_seqs": 32},
        {"role": "colocated", "name": "c0", "pages": 128, "token_budget": 64, "max_num_seqs": 16},
    ],
    "workers": [
        {
            "name": "w0",
            "host": "a",
            "stages": [
                {"instance": "p0", "devices": [0, 1, 3]},
                {"instance": "c0", "devices": [4]},
            ],
        },
        {
            "name": "w1",
            "host": "b",
            "stages": [
                {"instance": "d0", "devices": [2], "stage": 1},
                {"instance": "d0", "devices": [0], "stage": 0},
            ],
        },
    ],
}
"""Every role, two hosts, two instances in a worker, and two stages."""


def put(value: object, *path: str | int) -> bytes:
    """The plan with ``value`` at ``path``."""
    plan, inner = _at(path)
    inner[path[-1]] = value
    return json.dumps(plan).encode()


def drop(*path: str | int) -> bytes:
    """The plan without what is at ``path``."""
    plan, inner = _at(path)
    del inner[path[-1]]
    return json.dumps(plan).encode()


def _at(path: tuple[str | int, ...]) -> tuple[Any, Any]:
    """A copy of the plan, and what holds the end of ``path`` in it."""
    plan: Any = copy.deepcopy(BASE)
    inner = plan
    for key in path[:-1]:
        inner = inner[key]
    return plan, inner


def alone(tp: int = 1, pp: int = 1, tokens: int = 2048) -> Plan:
    """One colocated instance of these degrees, for requests of up to ``tokens``."""
    stages = [
        {"instance": "c0", "stage": stage, "devices": list(range(stage * tp, (stage + 1) * tp))} for stage in range(pp)
    ]
    plan = {
        **BASE,
        "max_model_len": tokens,
        "instances": [{**BASE["instances"][2], "tp": tp, "pp": pp, "pages": 1024}],
        "workers": [{"name": "w0", "stages": stages}],
    }
    return Plan.from_json(json.dumps(plan))


def test_a_plan_reads_back(tmp_path: Path) -> None:
    plan = Plan.from_json(json.dumps(BASE))
    assert Plan.from_json(plan.to_json()) == plan
    file = tmp_path / "plan.json"
    file.write_bytes(plan.to_json())
    assert Plan.load(file) == plan
    plan.check(SPEC)


def test_what_a_plan_says() -> None:
    plan = Plan.from_json(json.dumps(BASE))
    p0, d0, c0 = plan.instances
    assert isinstance(p0, PrefillInstance)
    assert isinstance(d0, DecodeInstance)
    assert isinstance(c0, ColocatedInstance)
    assert [role_of(instance) for instance in plan.instances] == ["prefill", "decode", "colocated"]
    assert p0.steptime == StepTime(base=0.001)
    assert plan.instance("d0") is d0
    assert plan.devices("p0") == (("a", 0), ("a", 1), ("a", 3))
    assert [plan.devices("d0", stage) for stage in (0, 1)] == [(("b", 0),), (("b", 2),)]


def test_equal_plans_are_equal_bytes() -> None:
    shuffled = dict(reversed(BASE.items()))
    assert Plan.from_json(json.dumps(shuffled)).to_json() == Plan.from_json(json.dumps(BASE)).to_json()


TYPES = [
    (b"{", "$", "truncated"),
    (b"[]", "$", "Expected `object`"),
    (b'{"model": "\xff"}', "$", "UTF-8"),
    (put(1, "surprise"), "$", "unknown field `surprise`"),
    (put(1, "instances", 0, "max_num_seqs"), "$.instances[0]", "unknown field `max_num_seqs`"),
    (put(1, "slo", "p99"), "$.slo", "unknown field `p99`"),
    (put(1, "instances", 0, "steptime", "x"), "$.instances[0].steptime", "unknown field `x`"),
    (put(1, "workers", 1, "stages", 0, "x"), "$.workers[1].stages[0]", "unknown field `x`"),
    (put(2, "version"), "$.version", "2"),
    (drop("model"), "$", "missing required field `model`"),
    (drop("instances", 0, "lm_tokens"), "$.instances[0]", "missing required field `lm_tokens`"),
    (drop("instances", 1, "role"), "$.instances[1]", "missing required field `role`"),
    (put("mixed", "instances", 1, "role"), "$.instances[1].role", "mixed"),
    (put("16", "page_size"), "$.page_size", "Expected `int`, got `str`"),
    (put(0, "page_size"), "$.page_size", ">= 1"),
    (put(0, "max_model_len"), "$.max_model_len", ">= 1"),
    (put("int8", "dtype"), "$.dtype", "int8"),
    (put("pigeon", "transport"), "$.transport", "pigeon"),
    (put("abacus", "attention"), "$.attention", "abacus"),
    (put([], "instances"), "$.instances", "length >= 1"),
    (put([], "workers"), "$.workers", "length >= 1"),
    (put([], "workers", 0, "stages"), "$.workers[0].stages", "length >= 1"),
    (put([], "workers", 0, "stages", 0, "devices"), "$.workers[0].stages[0].devices", "length >= 1"),
    (put(-1, "workers", 0, "stages", 0, "devices", 1), "$.workers[0].stages[0].devices[1]", ">= 0"),
    (put("P 0", "instances", 0, "name"), "$.instances[0].name", "regex"),
    (put("", "workers", 0, "name"), "$.workers[0].name", "regex"),
    (put(0, "instances", 0, "tp"), "$.instances[0].tp", ">= 1"),
    (put(0, "instances", 0, "max_batch"), "$.instances[0].max_batch", ">= 1"),
    (put(0, "instances", 0, "lease_s"), "$.instances[0].lease_s", "> 0"),
    (put("all", "instances", 0, "batching"), "$.instances[0].batching", "all"),
    (put(1.0, "instances", 1, "watermark"), "$.instances[1].watermark", "< 1"),
    (put(-0.1, "instances", 2, "watermark"), "$.instances[2].watermark", ">= 0"),
    (put(0.0, "slo", "ttft_s"), "$.slo.ttft_s", "> 0"),
    (put(-1, "slo", "tpot_s"), "$.slo.tpot_s", "> 0"),
    (put(1.5, "slo", "attainment"), "$.slo.attainment", "<= 1"),
    (put(0, "slo", "attainment"), "$.slo.attainment", "> 0"),
]

TOGETHER = [
    (put("d0", "instances", 2, "name"), "$.instances[2].name", "'d0' is used twice"),
    (put("w0", "workers", 1, "name"), "$.workers[1].name", "'w0' is used twice"),
    (drop("instances", 0), "$.instances", "one role is missing"),
    (drop("instances", 1), "$.instances", "one role is missing"),
    (
        put(127, "instances", 2, "pages"),
        "$.instances[2].pages",
        "127 pages of 16 tokens do not hold one request of max_model_len 2048: at least 128 needed",
    ),
    (put(2049, "max_model_len"), "$.instances[2].pages", "at least 129 needed"),
    (put(3, "instances", 1, "in_flight"), "$.instances[1].in_flight", "3 is above pp 2"),
    (put(15, "instances", 2, "token_budget"), "$.instances[2].token_budget", "15 is below max_num_seqs 16"),
    (
        put("x", "workers", 1, "stages", 1, "instance"),
        "$.workers[1].stages[1].instance",
        "no instance is called 'x'",
    ),
    (put(2, "workers", 1, "stages", 0, "stage"), "$.workers[1].stages[0].stage", "d0 has stages 0..1, got 2"),
    (
        put([1], "workers", 0, "stages", 1, "devices"),
        "$.workers[0].stages[1].devices",
        "device 1 of a is already taken by $.workers[0].stages[0]",
    ),
    (put("a", "workers", 1, "host"), "$.workers[1].stages[1].devices", "device 0 of a is already taken"),
    (
        put([0, 0], "workers", 0, "stages", 0, "devices"),
        "$.workers[0].stages[0].devices",
        "device 0 of a is already taken by $.workers[0].stages[0]",
    ),
    (
        put([0], "workers", 0, "stages", 0, "devices"),
        "$.instances[0].tp",
        "stage 0 of p0 needs 3 devices, the workers give it 1",
    ),
    (drop("workers", 1, "stages", 0), "$.instances[1].tp", "stage 1 of d0 needs 1 devices, the workers give it 0"),
    (put([4, 5], "workers", 0, "stages", 1, "devices"), "$.instances[2].tp", "needs 1 devices, the workers give it 2"),
]


@pytest.mark.parametrize(("data", "path", "message"), TYPES + TOGETHER)
def test_a_wrong_plan_is_refused_at_its_path(data: bytes, path: str, message: str) -> None:
    with pytest.raises(InvalidPlan) as error:
        Plan.from_json(data)
    assert error.value.path == path
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_bounds_are_inclusive() -> None:
    Plan.from_json(put(128, "instances", 2, "pages"))
    Plan.from_json(put(16, "instances", 2, "token_budget"))
    Plan.from_json(put(0, "instances", 1, "watermark"))
    Plan.from_json(put(1, "slo", "attainment"))


@pytest.mark.parametrize(
    ("plan", "path", "message"),
    [
        (alone(tokens=8193), "$.max_model_len", "8193 is above the 8192 positions of the model"),
        (alone(tp=2), "$.instances[0].tp", "2 does not fit 9 query heads, 3 KV heads"),
        (alone(pp=4), "$.instances[0].pp", "4 does not divide 30 layers"),
    ],
)
def test_a_plan_is_checked_against_the_model(plan: Plan, path: str, message: str) -> None:
    with pytest.raises(InvalidPlan) as error:
        plan.check(SPEC)
    assert error.value.path == path
    assert message in str(error.value)


def test_the_whole_context_may_be_used() -> None:
    alone(tp=3, pp=2, tokens=8192).check(SPEC)


def test_a_refused_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with pytest.raises(InvalidPlan, match=r"cannot read .*plan\.json: No such file"):
        Plan.load(file)
    file.write_bytes(put(0, "page_size"))
    with pytest.raises(InvalidPlan) as error:
        Plan.load(file)
    assert str(error.value).startswith(f"{file}: $.page_size: ")
    assert error.value.path == f"{file}: $.page_size"


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of everything inside ``value``."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [found for key, inner in items for found in ((*path, key), *places(inner, (*path, key)))]


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-2, 20),
        st.floats(),
        st.text(max_size=4),
        st.sampled_from(["p0", "d0", "c0", "w0", "a", "prefill", "decode", "colocated", "chunked", "float32"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@given(place=st.sampled_from(places(BASE)), value=values, remove=st.booleans())
def test_a_mutated_plan_is_read_or_refused(place: tuple[str | int, ...], value: object, remove: bool) -> None:
    try:
        plan = Plan.from_json(drop(*place) if remove else put(value, *place))
        assert Plan.from_json(plan.to_json()) == plan
        plan.check(SPEC)
    except InvalidPlan as error:
        assert error.path.startswith("$")  # noqa: PT017 - the other outcome is no error


@given(data=st.data())
def test_damaged_bytes_are_read_or_refused(data: st.DataObject) -> None:
    whole = json.dumps(BASE).encode()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 8)))
    damaged = whole[:start] + data.draw(st.binary(max_size=4)) + whole[end:]
    try:
        Plan.from_json(damaged).check(SPEC)
    except InvalidPlan as error:
        assert error.path.startswith("$")  # noqa: PT017 - the other outcome is no error
