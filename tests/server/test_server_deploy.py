"""Flags from a file, and everything under ``deploy/``: it parses, and each flag that it names is one of the CLI's."""

from __future__ import annotations

import argparse
import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from jdserve.core.plan import ColocatedInstance, Plan, PrefillInstance
from jdserve.core.shipped import plans
from jdserve.server.__main__ import add_arguments
from jdserve.server.config import expanded
from jdserve.server.serve import Options
from jdserve.worker import _arguments as worker_arguments

DEPLOY = Path(__file__).parents[2] / "deploy"

VARIABLES = {
    "POD_IP": "10.0.0.1",
    "WORKER": "1",
    "LWS_LEADER_ADDRESS": "10.0.0.1",
    "plan": "plan.json",
    "address": "10.0.0.1",
    "state": "/state",
    "SLURM_NODEID": "0",
}


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(expanded(parser, argv))


def check(argv: list[str]) -> argparse.Namespace:
    """Parse ``... -m jdserve.server|worker FLAGS`` by the flags that there are; unknown ones end the process."""
    at = argv.index("-m")
    assert argv[at - 1].endswith("python")
    module, flags = argv[at + 1], argv[at + 2 :]
    assert "$" not in " ".join(flags)
    if module == "jdserve.worker":
        return worker_arguments(flags)
    assert module == "jdserve.server"
    return parsed(*flags)


def filled(text: str) -> str:
    return re.sub(r"\$\((\w+)\)|\$\{?(\w+)\}?", lambda m: VARIABLES.get(m[1] or m[2], m[0]), text)


# -- flags -----------------------------------------------------------------------------------------------------------


def test_flags_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'port = 9000\nmax-model-len = 64\nserved_model_name = "x"\napi-key = ["a", "b"]\noversubscribe = true\n'
        'in-process = false\ndrain-timeout = 1.5\ncontrol = "10.0.0.1:7000"\n'
    )
    args = parsed("--config", str(file), "--port", "9001", "--api-key", "c")
    assert (args.port, args.max_model_len, args.served_model_name, args.api_key) == (9001, 64, "x", ["a", "b", "c"])
    assert (args.oversubscribe, args.in_process, args.drain_timeout) == (True, False, 1.5)
    assert args.control == ("10.0.0.1", 7000)
    assert parsed(f"--config={file}").port == 9000
    assert parsed().port == 8000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot = 1", "prot is no flag"),
        ("port = 70000", "between 0 and 65535"),
        ("port = true", "port must be a text or a number"),
        ("port = [1, 2]", "port takes one value"),
        ("oversubscribe = 1", "oversubscribe must be true or false"),
        ("config = 'x'", "config is no flag"),
        ("help = true", "help is no flag"),
        ("[server]\nport = 1", "server is no flag"),
        ("port =", "Invalid value"),
        ("log-level = 'loud'", "invalid choice"),
    ],
)
def test_a_wrong_file_is_told(text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        parsed("--config", str(file))
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_an_absent_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--config", str(tmp_path / "absent.toml"))
    assert "absent.toml" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["quickstart", "chunked", "2p1d"])
def test_flags_that_override_the_plan(name: str) -> None:
    path = plans() / f"{name}.json"
    plan = Options(plan=path, max_num_seqs=2, block_size=8, dtype="bfloat16", max_model_len=256).overrides(
        Plan.load(path)
    )
    assert (plan.page_size, plan.dtype, plan.max_model_len) == (8, "bfloat16", 256)
    sizes = [one.max_num_seqs for one in plan.instances if not isinstance(one, PrefillInstance)]
    assert sizes
    assert set(sizes) == {2}
    assert any(isinstance(one, ColocatedInstance | PrefillInstance) for one in plan.instances)


# -- deploy/ ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "cuda", "tpu"])
def test_dockerfiles(kind: str) -> None:
    text = (DEPLOY / "docker" / f"Dockerfile.{kind}").read_text()
    joined = re.sub(r"\\\n", " ", text)
    steps = [line.split(maxsplit=1) for line in joined.splitlines() if line and not line.startswith("#")]
    assert {word for word, _ in steps} <= {
        "FROM", "COPY", "RUN", "USER", "VOLUME", "ENV", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"
    }  # fmt: skip
    last = dict(steps)
    args = check(json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"]))
    assert args.host == "0.0.0.0"
    assert str(args.port) == last["EXPOSE"]
    assert last["USER"] == "jdserve"
    extras = set(tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    (installed,) = re.findall(r"'/src\[(.+)\]'", text)
    assert set(installed.split(",")) <= extras
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((DEPLOY.parent / one).exists() for one in source.split())


def containers(value: Any) -> list[dict[str, Any]]:
    """Every container below ``value``."""
    if isinstance(value, dict):
        own = value.get("containers", [])
        return [*own, *(one for key, inner in value.items() if key != "containers" for one in containers(inner))]
    return [one for inner in value for one in containers(inner)] if isinstance(value, list) else []


def pods(value: Any) -> list[dict[str, Any]]:
    """Every pod specification below ``value``."""
    if isinstance(value, dict):
        own = [value] if "containers" in value else []
        return own + [one for inner in value.values() for one in pods(inner)]
    return [one for inner in value for one in pods(inner)] if isinstance(value, list) else []


@pytest.mark.parametrize(("file", "kinds"), [("deployment", "Deployment"), ("leaderworkerset", "LeaderWorkerSet")])
def test_kubernetes(file: str, kinds: str) -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / f"{file}.yaml").read_text()))
    assert kinds in {document["kind"] for document in documents}
    for document in documents:
        assert set(document) >= {"apiVersion", "kind", "metadata", "spec"}
    found = containers(documents)
    assert found
    for one in found:
        command = one.get("command", ["python", "-m", "jdserve.server"])
        env = {variable["name"] for variable in one.get("env", [])} | {"LWS_LEADER_ADDRESS"}
        assert set(re.findall(r"\$\((\w+)\)", " ".join(one["args"]))) <= env
        args = check([*command, *map(filled, one["args"])])
        ports = {port["name"]: port["containerPort"] for port in one.get("ports", [])}
        if "jdserve.server" in command:
            assert ports["http"] == args.port
            assert args.api_key_file is not None
            probes = [one[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe")]
            assert set(probes) == {"/health"}
            pod = next(pod for pod in pods(documents) if one in pod["containers"])
            assert pod["terminationGracePeriodSeconds"] > args.drain_timeout
        if "control" in ports:
            assert args.control[1] == ports["control"]
            assert args.secret_file is not None
    for pod in pods(documents):
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]}
        assert mounts == volumes
        assert pod["automountServiceAccountToken"] is False


def test_slurm() -> None:
    path = DEPLOY / "slurm" / "jdserve.sbatch"
    text = path.read_text()
    if bash := shutil.which("bash"):
        assert subprocess.run([bash, "-n", str(path)], check=False).returncode == 0
    lines = re.findall(r"python -m jdserve\.\w+ [^;&\n]*", text)
    assert len(lines) == 2
    for line in lines:
        args = check(shlex.split(filled(line)))
        assert str(args.secret_file) == "/state/secret"
    server = check(shlex.split(filled(lines[0])))
    (warned,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", text, re.MULTILINE)
    assert int(warned) > server.drain_timeout
    assert server.control == ("10.0.0.1", 7000)


def test_systemd() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "jdserve.service")
    assert unit.sections() == ["Unit", "Service", "Install"]
    command = shlex.split(unit["Service"]["ExecStart"])
    installed = DEPLOY / "systemd" / "server.toml"
    args = check([str(installed) if word == "/etc/jdserve/server.toml" else word for word in command])
    assert str(args.plan) == "/etc/jdserve/plan.json"
    assert args.api_key_file is not None
    assert int(unit["Service"]["TimeoutStopSec"]) > args.drain_timeout
    assert unit["Service"]["KillMode"] == "mixed", "workers must outlive the drain"
