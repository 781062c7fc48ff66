"""The dry run: what it says of a tiny plan, what it refuses, and what it needs."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import msgspec
import pytest

from jdserve import cli
from jdserve.aot import compare, dryrun, targets
from jdserve.aot.extending import extended
from jdserve.aot.report import Collective, Memory, Program, Report
from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import DecodeInstance, HostedStage, Plan, PrefillInstance, Worker
from jdserve.core.spec import ModelSpec
from jdserve.cost.models import model

SPEC = ModelSpec("LlamaForCausalLM", 3, 64, 128, 8, 4, 8, 256, 256)
PLAN = Plan(
    model="llama-3-8b",
    dtype="bfloat16",
    max_model_len=128,
    instances=(
        PrefillInstance(name="p", tp=2, pages=40, lm_tokens=64, max_batch=4),
        DecodeInstance(name="d", tp=2, pages=40, max_num_seqs=4),
        DecodeInstance(name="e", tp=2, pages=40, max_num_seqs=4),
    ),
    workers=(Worker("w", (HostedStage("p", (0, 1)), HostedStage("d", (2, 3)), HostedStage("e", (4, 5)))),),
)


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_bytes(PLAN.to_json())
    return str(path)


@pytest.mark.slow
def test_a_tiny_plan_for_the_cpu(tmp_path: Path) -> None:
    """Two layers told by one and two are what a compiler tells of three; HLO and JSON are written."""
    spec = msgspec.structs.replace(SPEC, layers=2)
    chosen = {"spec": spec, "buckets": ["decode-4", "insert-2"], "hlo": tmp_path / "hlo"}
    whole = dryrun(PLAN, "cpu", **chosen)  # type: ignore[arg-type]
    assert [(one.instance, one.name, one.layers) for one in whole.programs] == [
        ("d", "decode-4", 2),
        ("d", "insert-2", 2),
    ]
    step, insert = whole.programs
    assert step.pool_aliased
    assert insert.pool_aliased
    assert insert.collectives == ()
    pool = 2 * 2 * 41 * 4 // 2 * 16 * 8 * 2  # keys and values, layers, pages, heads of a device, page, head, bytes
    assert step.memory.aliased >= pool
    layers = [one for one in step.collectives if (one.part, one.shape) == ("layers", "f32[4,64]")]
    assert [(one.count, one.where) for one in layers] == [(4, "always")]
    assert [fit.fits for fit in whole.fits] == [True]
    assert len(list((tmp_path / "hlo").iterdir())) == 2
    whole.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == whole
    both = compare("tensor", "replicated", "cpu", PLAN, extrapolate=True, **{**chosen, "buckets": ["decode-4"]})
    (difference,) = both.differences
    assert both.a.programs[0].extrapolated
    assert difference.collectives["all-reduce"][0] >= 4
    assert both.b.programs[0].collectives == ()
    assert difference.memory[0].arguments == step.memory.arguments
    assert difference.memory[1].arguments > 1.5 * difference.memory[0].arguments


def test_what_a_layer_adds_is_added_for_each() -> None:
    def program(layers: int) -> Program:
        return Program(
            instance="d",
            stage=0,
            name="decode-4",
            layers=layers,
            memory=Memory(arguments=100 + 10 * layers, outputs=7, aliased=5, temporaries=50 - layers, code=layers),
            pool_aliased=True,
            collectives=(
                Collective(
                    kind="all-reduce",
                    axis="tp",
                    devices=2,
                    bytes=8,
                    shape="",
                    part="layers",
                    where="always",
                    count=2 * layers,
                ),
                Collective(kind="all-reduce", axis="tp", devices=2, bytes=8, shape="", part="embed", where="always"),
            ),
            flops=float(layers),
            seconds=1.0,
        )

    (whole,) = extended([program(1), program(2)], {"d": 80})
    assert (whole.layers, whole.extrapolated, whole.flops, whole.bytes_accessed) == (80, True, 80.0, None)
    assert whole.memory == Memory(arguments=900, outputs=7, aliased=5, temporaries=48, code=80)
    assert [one.count for one in whole.collectives] == [160, 1]
    assert whole.wire_bytes == 161 * 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "h1000"], "'h1000' is not known; known: h100, a100"),
        (["--target", "cpu", "--model", "no-such"], "'no-such' is neither a path nor a known model"),
        (
            ["--target", "cpu", "--bucket", "decode-5"],
            "'decode-5' names no program of the plan; its programs: prefill-32x2",
        ),
        (["--target", "cpu", "--json", "/no/such/folder/x"], "--json: /no/such/folder/x must be a file"),
    ],
)
def test_refusals(flags: list[str], message: str, plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dryrun", "--plan", plan_file, *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jdserve dryrun: ")
    assert message in said


def test_layers_that_differ_are_not_extended() -> None:
    with pytest.raises(InvalidPlan, match="the layers of llama-3-8b differ"):
        dryrun(PLAN, "cpu", spec=msgspec.structs.replace(SPEC, window=16), extrapolate=True)


def test_a_plan_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert cli.main(["dryrun", "--plan", str(tmp_path / "plan.json"), "--target", "cpu"]) == 2
    assert "plan.json" in capsys.readouterr().err


@pytest.mark.slow
def test_unknown_rules_are_refused_by_the_process_that_compiles(
    plan_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["dryrun", "--plan", plan_file, "--target", "cpu", "--rules", "decode=diagonal"]) == 2
    assert "'diagonal' is not known; known: tensor, sequence, expert, replicated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "there", "extra"),
    [
        ("h100", (), "jax's CUDA plugin: pip install 'jdserve[aot-cuda]'"),
        ("a100", ("jax_cuda13_plugin",), "ptxas: pip install 'jdserve[aot-cuda]'"),
        ("v5e", (), "libtpu: pip install 'jdserve[aot-tpu]'"),
    ],
)
def test_a_missing_compiler_is_named_with_its_extra(
    target: str,
    there: tuple[str, ...],
    extra: str,
    plan_file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda name: ModuleSpec(name, None) if name in there else None)
    monkeypatch.setattr(targets.os, "get_exec_path", list)
    monkeypatch.setattr(targets, "TOOLKIT", Path("/no/such/toolkit"))
    assert cli.main(["dryrun", "--plan", plan_file, "--target", target]) == 2
    assert extra in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "module", "extra"), [("h100", "jax_cuda13_plugin", "aot-cuda"), ("v6e", "libtpu", "aot-tpu")]
)
@pytest.mark.slow
def test_a_target_that_is_not_here(target: str, module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs the extra {extra}")
    report = dryrun(PLAN, target, spec=msgspec.structs.replace(model("llama-3-8b"), layers=1), buckets=["insert-8"])
    (insert,) = report.programs
    assert insert.pool_aliased
    assert insert.collectives == ()
    assert bool(insert.kernels) == (target == "h100")
    assert insert.spills == ()
