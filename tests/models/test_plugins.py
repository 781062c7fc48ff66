"""A model from outside the package: named by an entry point or by ``--model-plugin``, here and in every worker."""

from __future__ import annotations

import argparse
import json
import os
from importlib import invalidate_caches
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from runtime import workers
from runtime.harness import colocated, prompt, request, serve
from runtime.harness import plan_of as local_plan
from test_checkpoints import edit_json, made, place_on
from test_llama import dense_attend
from tiny import write_tiny_checkpoint

from jdserve import LLM, SamplingParams
from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import Plan
from jdserve.models.load import load_params, resolve
from jdserve.models.registry import model_class
from jdserve.runtime.engine import Engine
from jdserve.server.__main__ import add_arguments, default_plan
from jdserve.server.serve import Options

PLUGIN = "outside:ScaledLlama"
SCALE = -1.0
"""Turns the order of the logits around: what is generated tells whether the class was used."""


@pytest.fixture
def folder(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    edit_json(folder / "config.json", architectures=["ScaledLlamaForCausalLM"], logit_scale=SCALE)
    return folder


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The entry point of a package that is installed."""
    info = tmp_path / "site" / "scaled_llama-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scaled-llama\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[jdserve.models]\nScaledLlamaForCausalLM = {PLUGIN}\n")
    monkeypatch.syspath_prepend(str(info.parent))
    invalidate_caches()
    return info.parent


def logits(model):
    structure, leaves = load_params(model, range(4), kv_heads=4, dtype="float32", place=place_on(1))
    module = structure.merge(leaves)
    x, _ = module.layers(module.embed(jnp.arange(5)), jnp.arange(5), dense_attend, ())
    return np.asarray(module.logits(x))


def test_by_entry_point(folder, installed, tmp_path):
    model = resolve(folder)
    assert (model.spec.architecture, model.spec.logit_scale) == ("ScaledLlamaForCausalLM", SCALE)
    plain = resolve(write_tiny_checkpoint(tmp_path / "plain"))
    np.testing.assert_array_equal(logits(model), SCALE * logits(plain))


def test_by_name_also_converted_and_as_int8(folder, tmp_path):
    expected = logits(resolve(folder, plugin=PLUGIN))
    np.testing.assert_array_equal(logits(resolve(write_tiny_checkpoint(tmp_path / "plain"))), SCALE * expected)
    model = made(folder, plugin=PLUGIN)
    assert resolve(model.folder, plugin=PLUGIN) == model
    np.testing.assert_array_equal(logits(model), expected)
    near = logits(made(folder, plugin=PLUGIN, weights="int8"))
    assert 0 < np.abs(near - expected).max() < 0.1 * np.abs(expected).max()


def test_a_name_goes_before_our_own(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    edit_json(folder / "config.json", logit_scale=2.0)
    np.testing.assert_array_equal(logits(resolve(folder, plugin=PLUGIN)), 2 * logits(resolve(folder)))
    assert model_class("LlamaForCausalLM", PLUGIN).__name__ == "ScaledLlama"


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (None, r"ScaledLlamaForCausalLM is not supported.*LlamaForCausalLM.*--model-plugin"),
        ("nowhere:Model", "ModuleNotFoundError"),
        ("outside:Nothing", "outside:Nothing.*AttributeError"),
        ("outside:__doc__", "is no class"),
        ("jdserve.models.llama:Llama", "has no read_config"),
    ],
)
def test_what_is_wrong_is_told(folder, plugin, said):
    with pytest.raises(InvalidPlan, match=said):
        resolve(folder, plugin=plugin)
    if plugin is None:
        with pytest.raises(InvalidPlan, match="is not supported"):
            model_class("ScaledLlamaForCausalLM")


@pytest.mark.parametrize("plugin", ["outside", "outside:", "a b:C"])
def test_a_plan_refuses_what_is_no_name(plugin):
    plan = json.loads(local_plan(colocated()).to_json()) | {"model_plugin": plugin}
    with pytest.raises(InvalidPlan, match="model_plugin"):
        Plan.from_json(json.dumps(plan))


SMALL = colocated(token_budget=16, max_num_seqs=1, pages=3)
"""An instance with few step programs."""


def texts(model) -> list[tuple[int, ...]]:
    asked = [request(f"r{i}", prompt(5, i), max_tokens=6) for i in range(2)]
    return [answer.tokens for answer in serve(model, local_plan(SMALL, longest=32), asked)]


@pytest.mark.slow
def test_every_worker_loads_it(folder, monkeypatch, tmp_path):
    model = resolve(folder, plugin=PLUGIN)
    expected = texts(model)
    assert expected != texts(resolve(write_tiny_checkpoint(tmp_path / "plain")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(__file__).parent), str(Path(__file__).parents[2]))))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    plan = workers.plan_of(model, SMALL, model_plugin=PLUGIN, max_model_len=32)
    asked = [request(f"r{i}", prompt(5, i), max_tokens=6) for i in range(2)]

    async def body(engine: Engine) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in await workers.ask(engine, asked)]

    assert workers.run(workers.engine_for(model, plan), body) == expected


def test_the_command_line_overrides_the_plan(tmp_path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--model-plugin", PLUGIN, "--weights", "int8", "--model", "m"])
    options = Options(default_plan(), args.model, weights=args.weights, model_plugin=args.model_plugin)
    plan = options.overrides(Plan.load(default_plan()))
    assert (plan.model, plan.weights, plan.model_plugin) == ("m", "int8", PLUGIN)
    assert Options(default_plan()).overrides(plan) == plan
    with pytest.raises(InvalidPlan, match="model_plugin"):
        Options(default_plan(), model_plugin="outside").overrides(plan)


@pytest.mark.slow
def test_a_plan_with_a_plugin_in_python(folder):
    plan = msgspec.structs.replace(local_plan(SMALL, longest=32), model=str(folder), model_plugin=PLUGIN)
    with LLM(plan) as llm:
        asked = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        answers = llm.generate([prompt(5, i) for i in range(2)], asked)
    found = [tuple(token.token for token in answer.tokens) for answer in answers]
    assert found == texts(resolve(folder, plugin=PLUGIN))
