"""The planner's subcommands: answers, messages and exit codes; the PLAN cases of the case list by their numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jdserve import cli
from jdserve.core.plan import ColocatedInstance, HostedStage, Plan, Worker
from jdserve.placement.commands.replan import history
from jdserve.sim.traces import load_trace

LENGTHS = ("--input-len", "300", "--output-len", "20")
SLOS = ("--ttft", "0.06", "--tpot", "0.012")
QUICK = ("--requests", "60", "--workers", "1", "--quiet")


@pytest.fixture
def machines(tmp_path: Path) -> str:
    return cluster(tmp_path)


def cluster(folder: Path, nodes: int = 1, per_node: int = 3, hardware: Any = "h100-80g") -> str:
    file = folder / f"{nodes}x{per_node}.json"
    file.write_text(json.dumps({"hardware": hardware, "nodes": nodes, "devices_per_node": per_node}))
    return str(file)


def trace(folder: Path, rows: list[str], name: str = "trace.csv") -> str:
    (folder / name).write_text("\n".join(["arrival_s,input_len,output_len", *rows]) + "\n")
    return str(folder / name)


def plan(machines: str, *flags: str, model: str = "llama-3-8b") -> int:
    lengths = () if "--trace" in flags else LENGTHS
    slo = () if "--ttft" in flags else SLOS
    return cli.main(["plan", "--model", model, "--cluster", machines, *lengths, *slo, *QUICK, *flags])


def devices(made: Plan) -> int:
    return sum(one.tp * one.pp for one in made.instances)


def refused(code: int | str | None, err: str, *words: str) -> None:
    """Exit code 2 and a message that says why, with no stack trace."""
    assert code == 2
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line and not line.startswith(("usage:", " "))]
    assert len(lines) == 1
    assert lines[0].startswith("jdserve ")
    assert all(word in lines[0] for word in words)


def test_a_plan_is_found_written_and_simulated(
    machines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert plan(machines, "--rate", "5", "-o", str(file), "--log") == 0
    out = capsys.readouterr().out
    assert "found: " in out
    assert "best of its family" in out
    made = Plan.load(file)
    assert made.predicted is not None
    assert made.predicted.rate == 5
    assert made.slo is not None
    figures = tmp_path / "figures.json"
    flags = ("--rate", "5", "--requests", "200", *LENGTHS, "--json", str(figures))
    for more in ((), ("--cluster", machines)):
        assert cli.main(["simulate", "--plan", str(file), *flags, *more]) == 0
        assert "meet TTFT 0.06 s" in capsys.readouterr().out
        seen = json.loads(figures.read_bytes())
        assert seen["requests"] == 200
        assert seen["attainment"]["met"] >= 180
        assert [one["name"] for one in seen["instances"]] == [one.name for one in made.instances]


def test_plan_01_an_slo_that_nothing_meets(machines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert plan(machines, "--ttft", "0.001", "--tpot", "0.0001", "-o", str(file)) == 3
    out, err = capsys.readouterr()
    assert "infeasible: no configuration meets the SLO" in out
    assert "nearest: " in out
    assert "0.0% of the requests" in out
    assert err == ""
    assert not file.exists()


def test_plan_02_a_model_that_fits_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links = {"bytes_per_s": 1e11}
    tiny = {"name": "tiny", "title": "tiny", "bfloat16": 1e14, "float16": 1e14, "float32": 1e14, "inside": links}
    tiny |= {"memory_bytes": 2**30, "bytes_per_s": 1e12, "across": links}
    assert plan(cluster(tmp_path, hardware=tiny), "--rate", "1") == 3
    out, err = capsys.readouterr()
    assert "does not fit: needs" in out
    assert "GiB per device" in out
    assert err == ""


def test_plan_02_nodes_of_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = cluster(tmp_path, nodes=2, per_node=1)
    assert plan(single, "--rate", "1", "--affinity", "low", "--narrow") == 3
    assert "2 nodes of 1 devices" in capsys.readouterr().out
    assert plan(single, "--rate", "1") == 0


@pytest.mark.parametrize("rate", ["-5", "nan", "inf", "five", ""])
def test_plan_03_rates_that_are_none(rate: str, machines: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        plan(machines, f"--rate={rate}")
    refused(exit.value.code, capsys.readouterr().err, "--rate", "finite number of at least 0", repr(rate))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--ttft", "0"),
        ("--tpot", "nan"),
        ("--attainment", "1.5"),
        ("--devices", "0"),
        ("--requests", "-1"),
        ("--cv", "0"),
    ],
)
def test_numbers_have_bounds(flag: str, value: str, machines: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["plan", "--model", "llama-3-8b", "--cluster", machines, *LENGTHS, *SLOS, flag, value])
    refused(exit.value.code, capsys.readouterr().err, flag, "must be a", value)


def test_plan_03_rate_0_gives_the_smallest_plan(
    machines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert plan(machines, "--rate", "0", "-o", str(file)) == 0
    assert "smallest plan" in capsys.readouterr().out
    assert devices(Plan.load(file)) == 1


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "at least 1 row, got 0"),
        (["0,0,5"], "input_len"),
        (["0,10,-1"], "output_len"),
        (["nan,10,5"], "arrival_s must be finite"),
        (["1,10,5", "0.5,10,5"], "at least 1"),
        (["0,10,x"], "output_len"),
    ],
)
def test_plan_03_traces_that_are_refused(
    rows: list[str], why: str, machines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = plan(machines, "--rate", "1", "--trace", trace(tmp_path, rows))
    refused(code, capsys.readouterr().err, "trace.csv", why)


@pytest.mark.parametrize(
    "rows",
    [["0,300,20"], ["0,300,0", "1,200,0"], ["3,300,20", "3,300,20", "3,100,5"]],
    ids=["one request", "no output", "one moment"],
)
def test_plan_03_traces_that_are_odd(rows: list[str], machines: str, tmp_path: Path) -> None:
    assert plan(machines, "--rate", "2", "--trace", trace(tmp_path, rows)) == 0


def test_arrivals_of_one_moment_have_no_rate(machines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = trace(tmp_path, ["3,300,20", "3,300,20"])
    refused(plan(machines, "--trace", file, "--arrivals", "trace"), capsys.readouterr().err, "take no time")


def test_plan_04_a_rate_beyond_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(cluster(tmp_path, per_node=2), "--rate", "1e7", "--narrow") == 3
    out = capsys.readouterr().out
    assert "needs more than 2 devices" in out
    assert "carries" in out


def test_plan_09_degrees_that_divide_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eight = cluster(tmp_path, per_node=8)
    flags = ("--rate", "1", "--log", "--narrow", "--ttft", "0.001", "--tpot", "0.0001")
    assert plan(eight, *flags, model="qwen2.5-7b") == 3
    assert "tp 8: 8 does not fit 28 query heads, 4 KV heads" in capsys.readouterr().out
    instance = ColocatedInstance(name="c0", tp=3, pages=1024, token_budget=512, max_num_seqs=8)
    worker = Worker("w0", (HostedStage("c0", (0, 1, 2)),))
    file = tmp_path / "plan.json"
    file.write_bytes(Plan(model="qwen2.5-7b", max_model_len=1024, instances=(instance,), workers=(worker,)).to_json())
    code = cli.main(["simulate", "--plan", str(file), "--rate", "1", *LENGTHS, "--cluster", eight])
    refused(code, capsys.readouterr().err, "instances[0].tp", "valid: 1, 2, 4")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "llama-9"), ("llama-9", "known")),
        (("--cluster", "nowhere.json"), ("nowhere.json", "h100x16")),
        (("--trace", "nothing"), ("nothing", "azure2023_conv")),
        (("-o", "/nowhere/plan.json"), ("--output", "/nowhere")),
        (("--report", "report.pdf"), ("--report", ".html or .json")),
        (("--latency", "a100"), ("llama-3-8b", "opt-13b")),
        (("--latency", "nowhere.json"), ("nowhere.json",)),
        (("--arrivals", "trace"), ("--trace",)),
        (("--cv", "2"), ("--cv",)),
    ],
)
def test_input_that_is_refused(
    flags: tuple[str, ...], words: tuple[str, ...], machines: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(plan(machines, *flags), capsys.readouterr().err, *words)


def test_a_cluster_file_is_refused_with_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(plan(cluster(tmp_path, per_node=0)), capsys.readouterr().err, "1x0.json: $.devices_per_node")


def test_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hardware"]) == cli.main(["models"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("h100-80g", "tpu-v5e", "h100x16", "llama-3-70b", "opt-175b"))
    assert cli.main(["hardware", "--json"]) == 0
    assert all(row["sources"] for row in json.loads(capsys.readouterr().out))
    assert cli.main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["llama-3-70b"]["layers"] == 80


def test_simulate_says_what_a_plan_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = Path(__file__).parent.parent.parent / "plans" / "quickstart.json"
    flags = ["--plan", str(shipped), *LENGTHS]
    refused(cli.main(["simulate", *flags, "--rate", "1"]), capsys.readouterr().err, "steptime", "p0")
    with pytest.raises(SystemExit) as exit:
        cli.main(["simulate", *flags, "--rate", "0"])
    refused(exit.value.code, capsys.readouterr().err, "--rate", "above 0")


# replan


def log(folder: Path, *stretches: tuple[float, float]) -> str:
    """Even arrivals of (seconds, rate) stretches."""
    rows, start = [], 0.0
    for seconds, rate in stretches:
        rows += [f"{start + n / rate:.4f},300,20" for n in range(round(seconds * rate))]
        start += seconds
    return trace(folder, rows, "requests.csv")


def replan(folder: Path, machines: str, requests: str, *flags: str) -> int:
    command = ["replan", "--from-log", requests, "--plan", str(folder / "plan.json"), "--cluster", machines]
    return cli.main([*command, "--window", "10", *QUICK, *flags])


def test_replan_says_what_would_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machines = cluster(tmp_path, per_node=2)
    assert plan(machines, "--rate", "5", "-o", str(tmp_path / "plan.json")) == 0
    capsys.readouterr()

    assert replan(tmp_path, machines, log(tmp_path, (60, 4))) == 0
    out = capsys.readouterr().out
    assert "no significant shift" in out
    assert "keep it" in out

    new = tmp_path / "new.json"
    assert replan(tmp_path, machines, log(tmp_path, (40, 4), (40, 120)), "-o", str(new)) == 0
    out = capsys.readouterr().out
    assert "rate 4 -> 120" in out
    assert "new:     " in out
    assert devices(Plan.load(new)) > devices(Plan.load(tmp_path / "plan.json"))
    assert "  + " in out

    # back again: the smaller plan is proposed, at the rate it will see
    (tmp_path / "plan.json").write_bytes(new.read_bytes())
    assert replan(tmp_path, machines, log(tmp_path, (40, 120), (40, 4))) == 0
    out = capsys.readouterr().out
    assert "rate 120 -> 4" in out
    assert "  - " in out
    # and silence allows the smallest one
    assert replan(tmp_path, machines, log(tmp_path, (40, 120)), "--until", "100") == 0
    out = capsys.readouterr().out
    assert "0 req/s (at most 0)" in out
    assert "new:     1 devices" in out


@pytest.mark.parametrize(
    ("rows", "words"), [(["5,300,20"], ("take some time",)), ([], ("at least 1 row",)), ([",300,20"], ("arrival_s",))]
)
def test_replan_refuses_a_log_without_a_rate(
    rows: list[str], words: tuple[str, ...], machines: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = Path(__file__).parent.parent.parent / "plans" / "quickstart.json"
    (tmp_path / "plan.json").write_bytes(shipped.read_bytes())
    code = replan(tmp_path, machines, trace(tmp_path, rows), *SLOS)
    refused(code, capsys.readouterr().err, "trace.csv", *words)


def test_history_is_what_came_since_the_last_shift(tmp_path: Path) -> None:
    whole = load_trace(log(tmp_path, (300, 4), (300, 10)))
    found = history(whole, 60)
    assert found.traffic.rate == pytest.approx(10, rel=0.02)
    assert found.traffic.input.value == 300
    assert len(found.shifts) == 1
    assert history(whole, 60, last_s=100).seconds == pytest.approx(100)
    quiet = history(whole, 60, until_s=2000)
    assert (quiet.traffic.rate, len(quiet.trace)) == (0.0, len(whole))


# the process


def test_the_command_loads_no_jax_and_prints_no_trace(machines: str) -> None:
    flags = ["plan", "--model", "llama-3-8b", "--cluster", machines, *LENGTHS, *SLOS, *QUICK, "--rate", "5"]
    script = (
        "import sys\nfrom jdserve import cli\n"
        "assert not {'jax', 'numpy'} & set(sys.modules)\n"
        f"code = cli.main({flags})\n"
        "assert not {'jax', 'jaxlib', 'flax', 'uvicorn', 'fastapi'} & set(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    command = [sys.executable, "-m", "jdserve.cli", "plan", "--model", "llama-3-8b", "--cluster", machines, *LENGTHS]
    done = subprocess.run([*command, "--ttft", "-1", "--tpot", "1"], capture_output=True, text=True, check=False)
    refused(done.returncode, done.stderr, "--ttft")
