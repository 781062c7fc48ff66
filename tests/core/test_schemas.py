"""The committed schemas are those of the types, and every plan that is shipped obeys them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from core.shapes import SMOLLM2
from jdserve.core import jsonio
from jdserve.core.plan import Plan
from jdserve.core.profile import Profile
from jdserve.core.spec import ModelSpec

ROOT = Path(__file__).parent.parent.parent
SCHEMAS = {"plan": Plan, "profile": Profile}
PLANS = sorted((ROOT / "plans").glob("*.json"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_committed_schema_is_that_of_the_type(name: str) -> None:
    file = ROOT / "schemas" / f"{name}.schema.json"
    assert file.read_bytes() == jsonio.schema(SCHEMAS[name]), f"run: jdserve schema {name} > schemas/{file.name}"


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_is_one(name: str) -> None:
    schema = json.loads((ROOT / "schemas" / f"{name}.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)


def test_the_plans_of_the_documentation_are_there() -> None:
    assert {plan.name for plan in PLANS} >= {"quickstart.json", "colocated.json", "chunked.json", "2p1d.json"}


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_a_shipped_plan_is_valid(file: Path) -> None:
    schema = json.loads((ROOT / "schemas" / "plan.schema.json").read_bytes())
    jsonschema.validate(json.loads(file.read_bytes()), schema, jsonschema.Draft202012Validator)
    plan = Plan.load(file)
    plan.check(ModelSpec.from_config(SMOLLM2))
    assert Plan.from_json(plan.to_json()) == plan


def test_the_schema_refuses_what_the_type_refuses() -> None:
    schema = json.loads((ROOT / "schemas" / "plan.schema.json").read_bytes())
    document = json.loads((ROOT / "plans" / "quickstart.json").read_bytes())
    for change in ({"page_size": 0}, {"version": 2}, {"surprise": 1}, {"instances": []}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, **change}, schema, jsonschema.Draft202012Validator)
