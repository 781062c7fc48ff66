"""What reads the metrics page: ``jdserve top`` and the Grafana dashboard."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
from fake_engine import Service, listening
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from jdserve.server.top import Page, quantile, view

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "jdserve.json"


def shown(now: Page, before: Page | None) -> str:
    console = Console(width=110, record=True, force_terminal=False, file=None, quiet=False, stderr=True)
    with console.capture() as capture:
        console.print(view(now, before))
    return capture.get()


def test_the_view_of_a_scraped_page() -> None:
    service = Service()
    before = Page(service.call("GET", "/metrics").text, 10.0)
    service.complete("hello", max_tokens=8)
    service.engine.running.add("x")
    now = Page(service.call("GET", "/metrics").text, 12.0)
    text = shown(now, before)
    (prefill,) = (line for line in text.splitlines() if " p0 " in line)
    (decode,) = (line for line in text.splitlines() if " d0 " in line)
    assert re.findall(r"\w+%?(?:\.\d)?", prefill)[:8] == ["p0", "prefill", "up", "0", "0", "0", "0", "0%"]
    assert re.findall(r"\w+", decode)[:5] == ["d0", "decode", "down", "0", "1"]
    assert re.search(r"tokens/s +4\.0 +requests/s +0\.5", text)
    assert "100.0% (target 90%)" in text
    assert re.search(r"TTFT .*\d ms", text)
    assert "-" in shown(before, None)
    assert "not ready" not in text


def test_quantiles_between_two_looks() -> None:
    before = [(1.0, 5.0), (2.0, 5.0), (float("inf"), 5.0)]
    now = [(1.0, 7.0), (2.0, 9.0), (float("inf"), 9.0)]
    assert quantile(now, before, 0.5) == 1.0
    assert quantile(now, before, 0.75) == 1.5
    assert quantile(before, before, 0.5) is None
    assert quantile([(1.0, 0.0), (float("inf"), 4.0)], [], 0.9) == 1.0


async def top(*flags: str) -> tuple[int | None, str, str]:
    """Exit code and both outputs of ``jdserve top`` in a process of its own."""
    command = (sys.executable, "-m", "jdserve.cli", "top", *flags)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, said = await process.communicate()
    return process.returncode, out.decode(), said.decode()


def test_top_of_a_server() -> None:
    async def look() -> tuple[int | None, str, str]:
        async with listening(Service()) as url:
            return await top("--once", "--url", url)

    code, out, said = asyncio.run(look())
    assert (code, said) == (0, "")
    assert "attainment" in out
    code, _, said = asyncio.run(top("--once", "--url", "http://127.0.0.1:1"))
    assert code == 1
    assert "127.0.0.1:1" in said
    assert asyncio.run(top("--interval", "0"))[0] == 2


def test_every_metric_of_the_dashboard_exists() -> None:
    service = Service()
    assert isinstance(service.complete("hello", max_tokens=4), httpx.Response)
    page = service.call("GET", "/metrics").text
    there = {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"(?:jdserve|vllm):\w+", expression)}
    assert len(used) > 25
    assert used <= there
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])
