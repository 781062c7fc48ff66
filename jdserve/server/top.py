"""``jdserve top``: a live view of a server in the terminal, read from its metrics page."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

PERCENTILES = (0.5, 0.9, 0.99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file that holds a key of the server, as it is, and nothing else",
    )
    add("--interval", type=_positive, default=1.0, metavar="SECONDS", help="between two looks (default: %(default)s)")
    add("--once", action="store_true", help="print one view and end")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"between 0.05 and 3600 seconds, got {text!r}")
    return value


class Page:
    """What a metrics page says.

    Args:
        text: of the page.
        at: monotonic seconds of the look.
    """

    def __init__(self, text: str, at: float) -> None:
        self.at = at
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    def value(self, name: str, **labels: str) -> float | None:
        """Sum of the samples of ``jdserve:name`` that have ``labels``; None where there is none."""
        found = [value for has, value in self._samples[f"jdserve:{name}"] if labels.items() <= has.items()]
        return sum(found) if found else None

    def instances(self) -> list[tuple[str, str]]:
        """(name, role) of each."""
        return [(has["instance"], has["role"]) for has, _ in self._samples["jdserve:instance_up"]]

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """(upper bound, samples up to it) of a histogram, ascending."""
        found = self._samples[f"jdserve:{name}_bucket"]
        return sorted((float(labels["le"]), value) for labels, value in found)


def quantile(now: list[tuple[float, float]], before: list[tuple[float, float]], share: float) -> float | None:
    """A quantile of what came between two looks at a histogram, within the width of its bucket; None without any."""
    old = dict(before)
    upto = [(bound, count - old.get(bound, 0.0)) for bound, count in now]
    if not upto or upto[-1][1] <= 0:
        return None
    wanted, low, below = share * upto[-1][1], 0.0, 0.0
    for bound, count in upto:
        if count >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return None


def view(now: Page, before: Page | None) -> Group:
    """The picture of one look.

    Args:
        now: the page.
        before: an earlier one for rates, None for those since the start of the server.
    """

    def rate(name: str, **labels: str) -> str:
        old = None if before is None else before.value(name, **labels)
        new = now.value(name, **labels)
        if before is None or new is None or old is None or now.at <= before.at:
            return "-"
        return f"{max(new - old, 0.0) / (now.at - before.at):.1f}"

    def count(name: str, **labels: str) -> str:
        value = now.value(name, **labels)
        return "-" if value is None else f"{value:.0f}"

    table = Table(title="instances", title_justify="left", expand=True)
    for column in ("instance", "role", "state", "waiting", "batch", "parked", "pulling", "pages", "steps/s"):
        table.add_column(column, justify="left" if column in ("instance", "role", "state") else "right")
    for name, role in now.instances():
        up = now.value("instance_up", instance=name) == 1.0
        total = now.value("pages_total", instance=name) or 0.0
        held = (now.value("pages_owned", instance=name) or 0.0) / total if total else 0.0
        table.add_row(
            Text(name),
            role,
            Text("up", "green") if up else Text("down", "bold red"),
            *(count(f"requests_{what}", instance=name) for what in ("waiting", "running", "parked", "pulling")),
            f"{held:.0%}",
            rate("steps_total", instance=name),
        )
    facts = Table.grid(padding=(0, 3))
    ready = now.value("ready") == 1.0
    facts.add_row(Text("ready" if ready else "not ready", "green" if ready else "bold red"))
    facts.add_row("tokens/s", rate("generation_tokens_total"), "requests/s", rate("requests_total"))
    facts.add_row("KV moves/s", rate("kv_transfers_total"), "KV MB/s", _megabytes(rate("kv_transfer_bytes_total")))
    facts.add_row("KV queue", count("kv_transfer_queue"), "recompilations", count("recompilations_total"))
    facts.add_row("pages lost", count("pages_lost"), "retries", count("retries_total"))
    facts.add_row("attainment", _attained(now), "of requests", count("slo_requests"))
    return Group(facts, table, _latencies(now, before))


def _megabytes(rate: str) -> str:
    return rate if rate == "-" else f"{float(rate) / 1e6:.1f}"


def _attained(now: Page) -> str:
    share, target = now.value("slo_attainment", objective="both"), now.value("slo_target")
    if target is None:
        return "no objective"
    return f"- (target {target:.0%})" if share is None else f"{share:.1%} (target {target:.0%})"


def _latencies(now: Page, before: Page | None) -> Table:
    table = Table(title="latencies", title_justify="left", expand=True)
    for column in ("", *(f"p{share * 100:g}" for share in PERCENTILES)):
        table.add_column(column, justify="right" if column else "left")
    names = {"TTFT": "time_to_first_token_seconds", "TPOT": "time_per_output_token_seconds"}
    names |= {"queue": "request_queue_time_seconds", "transfer": "request_transfer_time_seconds"}
    for title, name in names.items():
        old = [] if before is None else before.buckets(name)
        found = [quantile(now.buckets(name), old, share) for share in PERCENTILES]
        table.add_row(title, *("-" if one is None else f"{one * 1e3:.1f} ms" for one in found))
    return table


def run(args: argparse.Namespace) -> int:
    """Look until Ctrl-C; exit code 1 when the server does not answer."""
    console = Console()
    try:
        headers = (
            {} if args.api_key_file is None else {"Authorization": f"Bearer {args.api_key_file.read_text().strip()}"}
        )
        with httpx.Client(base_url=args.url, headers=headers, timeout=10) as client:
            before = _look(client)
            if args.once:
                console.print(view(before, None))
                return 0
            with Live(view(before, None), console=console, screen=True) as live:
                while True:
                    time.sleep(args.interval)
                    now = _look(client)
                    live.update(view(now, before), refresh=True)
                    before = now
    except KeyboardInterrupt:
        return 0
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        print(f"jdserve: {args.url}: {error}", file=sys.stderr)
        return 1


def _look(client: httpx.Client) -> Page:
    answer = client.get("/metrics")
    answer.raise_for_status()
    return Page(answer.text, time.monotonic())
