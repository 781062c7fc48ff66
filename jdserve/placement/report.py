"""A study as one HTML page that needs nothing else: no script, no font, no request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files

from jdserve.placement.result import Entry
from jdserve.placement.study import Distribution, Study, System
from jdserve.placement.svg import Axis, Chip, Line, Mark, chart, nice, node, parts_bar

COLOURS = ("blue", "orange", "green", "violet")

FAMILY = {
    "high": "prefill and decode anywhere (Algorithm 1)",
    "low": "prefill and decode side by side (Algorithm 2)",
    "mixed": "mixed numbers inside a node",
    "colocated": "colocated",
}

BARS = 8
"""Candidates of a group that get a bar; all are in the table."""

LINKS = 8
"""Links that get one."""

WIDEST = 48
"""Nodes that are drawn."""


def html(study: Study) -> str:
    """The page."""
    style = files("jdserve.placement").joinpath("data/report.css").read_text()
    title = f"{study.model} on {study.nodes} x {study.devices_per_node} {study.hardware}"
    body = "".join(_body(study))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: plan</title><style>\n{style}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def _body(study: Study) -> Iterator[str]:
    result = study.result
    yield _job(study)
    yield _verdict(study)
    if result.plan is not None:
        yield _facts(study)
        yield _cluster(study)
        yield '<div class="pair">' + _by_rate(study) + _by_scale(study) + "</div>"
        yield '<div class="pair">' + _latency(study, "TTFT") + _latency(study, "TPOT") + "</div>"
        yield '<div class="pair">' + _spent(study) + _bottleneck(study) + "</div>"
        yield '<div class="pair">' + _instances(study) + _links(study) + "</div>"
        yield _options(study)
    yield _candidates(study)
    yield (
        f"<footer>Step times: {escape(result.latency)}. {result.runs} simulations in the search. Attainment is joint: "
        "TTFT and TPOT of the same request; shaded: 95 % confidence.</footer>"
    )


def _card(title: str, sub: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2><p class="sub">{escape(sub)}</p>{body}</section>'


def _job(study: Study) -> str:
    slo = study.slo
    asked = "the highest goodput" if study.asked is None else f"{study.asked:g} requests per second"
    return (
        f'<p class="soft">{escape(study.workload)}: {study.mean_input:.0f} tokens in and {study.mean_output:.0f} out'
        f" on average. {slo.attainment:.4g} of the requests within TTFT {slo.ttft_s:g} s and TPOT {slo.tpot_s:g} s."
        f" Wanted: {asked}. {escape(study.dtype)}.</p>"
    )


def _verdict(study: Study) -> str:
    result = study.result
    lines = [f"<p><b>{'Found' if result.feasible else 'Cannot be done'}.</b> {escape(result.reason)}.</p>"]
    near = result.nearest
    if near is not None:
        scale = "" if near.slo_scale is None else f" Enough would within {near.slo_scale:.3g} times the SLO."
        lines.append(
            f"<p>Nearest: {escape(near.label)}, where {near.attainment.share:.1%} of the requests meet the SLO at "
            f"{near.rate:.3g} req/s.{scale} Without load its median TTFT is {near.ttft_s:.3g} s and its median TPOT "
            f"{near.tpot_s:.3g} s.</p>"
        )
    affinity = result.affinity
    lines.append(f'<p class="soft">KV between nodes: {affinity.level} affinity; {escape(affinity.reason)}.</p>')
    lines += [f'<p class="soft">Note: {escape(warning)}.</p>' for warning in result.warnings]
    return f'<section class="card verdict{"" if result.feasible else " no"}">{"".join(lines)}</section>'


def _facts(study: Study) -> str:
    option = study.result.option
    assert option is not None
    seen = option.attainment
    facts = [
        (f"{option.devices}", f"devices of {len(study.seats)}"),
        (f"{seen.share:.1%}", f"attainment at {option.rate:.3g} req/s ({seen.low:.1%} to {seen.high:.1%})"),
    ]
    if option.goodput is not None:
        facts.append((f"{option.goodput:.3g} req/s", "goodput"))
        facts.append((f"{option.goodput / option.devices:.3g} req/s", "goodput per device"))
    if study.systems and study.systems[0].tightest is not None:
        facts.append((f"{study.systems[0].tightest:.2f} x", "tightest SLO that still holds"))
    drawn = "".join(f'<div class="fact"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in facts)
    return f'<div class="facts">{drawn}</div>'


def _cluster(study: Study) -> str:
    plan = study.result.plan
    assert plan is not None
    stages = {instance.name: instance.pp for instance in plan.instances}
    hosts: dict[str, list[Chip]] = {}
    for seat in study.seats:
        if seat.instance:
            stage = f"stage {seat.stage}" if stages[seat.instance] > 1 else seat.role
            title = f"device {seat.device}: {seat.instance} ({seat.role}), stage {seat.stage}, worker {seat.worker}"
            chip = Chip(seat.instance, stage, seat.role, title)
        else:
            chip = Chip("", "free", "free", f"device {seat.device}: free")
        hosts.setdefault(seat.host, []).append(chip)
    drawn = "".join(node(host, chips) for host, chips in list(hosts.items())[:WIDEST])
    more = f'<p class="soft">and {len(hosts) - WIDEST} more nodes</p>' if len(hosts) > WIDEST else ""
    told = "; ".join(f"{worker.name} hosts {', '.join(worker.instances)}" for worker in plan.workers[:8]) + (
        "; ..." if len(plan.workers) > 8 else ""
    )
    sub = f"Each box is a device with the instance that it belongs to. Workers (they fail as one): {told}."
    return _card("The cluster", sub, f'<div class="nodes">{drawn}</div>{more}')


def _legend(items: Iterable[tuple[str, str]]) -> str:
    """(classes, text) of each line or box."""
    drawn = "".join(f'<li><span class="key {css}"></span>{escape(text)}</li>' for css, text in items)
    return f'<ul class="legend">{drawn}</ul>'


def _percent(value: float) -> str:
    return f"{value * 100:.3g}%"


def _name(system: System) -> str:
    return f"{system.label} ({system.devices} devices)"


def _by_rate(study: Study) -> str:
    lines: list[Line] = []
    keys: list[tuple[str, str]] = []
    for system, colour in zip(study.systems, COLOURS, strict=False):
        points = system.by_rate
        band = [(p.per_device, p.low, p.high) for p in points]
        lines.append(Line(_name(system), colour, [(p.per_device, p.joint) for p in points], band, dots=True))
        keys.append((colour, _name(system)))
    best = study.systems[0]
    lines.append(Line("TTFT alone", "blue dashed", [(p.per_device, p.ttft) for p in best.by_rate]))
    lines.append(Line("TPOT alone", "blue dotted", [(p.per_device, p.tpot) for p in best.by_rate]))
    keys[1:1] = [("blue dashed", "its TTFT alone"), ("blue dotted", "its TPOT alone")]
    top = max(p.per_device for system in study.systems for p in system.by_rate)
    marks = [Mark(study.slo.attainment, f"{_percent(study.slo.attainment)} wanted", vertical=False)]
    if study.asked:
        marks.append(Mark(study.asked / best.devices, f"{study.asked:g} req/s in all"))
    drawn = chart(
        "attainment against the rate per device",
        Axis(0, top, "requests per second and device", "{:.3g}".format),
        Axis(0, 1, "attainment", _percent),
        lines,
        marks,
    )
    return _card("Attainment against rate", "Share of requests that meet the SLO.", drawn + _legend(keys))


def _by_scale(study: Study) -> str:
    lines = [
        Line(_name(system), colour, [(p.scale, p.joint) for p in system.by_scale])
        for system, colour in zip(study.systems, COLOURS, strict=False)
    ]
    marks = [
        Mark(study.slo.attainment, f"{_percent(study.slo.attainment)} wanted", vertical=False),
        Mark(1.0, "SLO as asked"),
    ]
    scales = [p.scale for p in study.systems[0].by_scale]
    drawn = chart(
        "attainment against the SLO scale",
        Axis(scales[0], scales[-1], "SLO scale: factor for both latencies"),
        Axis(0, 1, "attainment", _percent),
        lines,
        marks,
    )
    keys = [
        (colour, f"{_name(system)} at {system.scale_rate:.3g} req/s")
        for system, colour in zip(study.systems, COLOURS, strict=False)
    ]
    return _card(
        "Attainment against SLO scale", "How far both latencies can shrink at one rate.", drawn + _legend(keys)
    )


def _latency(study: Study, what: str) -> str:
    found = study.ttft if what == "TTFT" else study.tpot
    assert found is not None
    bound = study.slo.ttft_s if what == "TTFT" else study.slo.tpot_s
    points = [(s, p / 100) for p, s in zip(found.percent, found.seconds, strict=True) if s is not None]
    seen = [at for at, _ in points if at > 0] or [bound]
    low, high = min(seen[0], bound) * 0.9, max(seen[-1], bound) * 1.1
    log = high / low > 12
    axis = Axis(low if log else 0.0, high if log else _round_up(high), f"{what} in seconds", "{:.3g}".format, log)
    line = Line(what, "blue", [(max(at, axis.low), share) for at, share in points])
    drawn = chart(
        f"distribution of {what}",
        axis,
        Axis(0, 1, "share of requests", _percent),
        [line],
        [Mark(bound, f"SLO {bound:g} s")],
    )
    return _card(f"{what} at {study.rate:.3g} req/s", _percentiles(found), drawn)


def _round_up(value: float) -> float:
    step = nice(value / 5)
    return math.ceil(value / step) * step


def _percentiles(found: Distribution) -> str:
    told = (f"p{percent} {'never' if (at := found.at(percent)) is None else _seconds(at)}" for percent in (50, 90, 99))
    return ", ".join(told) + "."


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _spent(study: Study) -> str:
    spent = study.spent
    assert spent is not None
    parts = [
        ("waits for prefill", "blue", spent.queue),
        ("prefill", "violet", spent.prefill),
        ("KV waits for decode", "orange", spent.wait),
        ("KV moves", "gray", spent.transfer),
        ("decode", "green", spent.decode),
    ]
    total = sum(size for _, _, size in parts) or 1.0
    bar = parts_bar("mean time of a request", [(f"{label}: {_seconds(size)}", css, size) for label, css, size in parts])
    rows = "".join(
        f'<tr><td><span class="key box {css}" style="display:inline-block"></span> {label}</td>'
        f'<td class="n">{_seconds(size)}</td><td class="n">{size / total:.1%}</td></tr>'
        for label, css, size in parts
    )
    sub = f"Mean over the requests at {study.rate:.3g} req/s, {_seconds(total)} in all."
    return _card("Where the time goes", sub, f"{bar}<table>{rows}</table>")


def _bottleneck(study: Study) -> str:
    found = study.bottleneck
    assert found is not None
    busy = "".join(_gauge(f"{role} (busiest instance)", share) for role, share in found.busy.items())
    return _card(
        f"The next bottleneck: {found.what}",
        f"What gives way first beyond the goodput, looked at with {found.rate:.3g} req/s.",
        f"<p>{escape(found.reason)}.</p>"
        + _gauge("requests that miss the TTFT", found.miss_ttft)
        + _gauge("requests that miss the TPOT", found.miss_tpot)
        + busy,
    )


def _gauge(name: str, share: float, told: str = "") -> str:
    told = escape(told) or f"{share:.1%}"
    return (
        f'<div class="bar"><div class="name"><span>{escape(name)}</span><span>{told}</span></div>'
        f'<div class="track"><div class="fill best" style="width:{min(share, 1) * 100:.1f}%"></div></div></div>'
    )


def _instances(study: Study) -> str:
    gauges = "".join(
        _gauge(f"{one.name}: {one.role} tp{one.tp} pp{one.pp}, {one.tokens_per_s:,.0f} tokens/s", one.busy)
        for one in study.instances
    )
    sub = (
        f"Share of the time in which they work, at {study.rate:.3g} req/s. Decode works while any sequence runs, so a "
        "high share there says little by itself."
    )
    return _card("Instances", sub, gauges)


def _links(study: Study) -> str:
    loads = study.result.links
    if not loads:
        return _card("Links", "KV traffic between instances.", "<p>No KV moves over a link.</p>")
    shown = "".join(
        _gauge(load.link, load.utilisation, f"{load.bytes_per_s / 1e9:.3g} of {load.capacity / 1e9:.3g} GB/s")
        for load in loads[:LINKS]
    )
    more = f'<p class="soft">and {len(loads) - LINKS} links with no more traffic</p>' if len(loads) > LINKS else ""
    return _card("Links", f"KV traffic at {study.rate:.3g} req/s, the busiest first.", shown + more)


def _options(study: Study) -> str:
    rows = "".join(
        f"<tr><td>{option.family}</td><td>{escape(option.label)}</td><td class='n'>{option.devices}</td>"
        f"<td class='n'>{option.rate:.3g}</td><td class='n'>{option.before.share:.1%}</td>"
        f"<td class='n'>{f'{option.added:+d}' if option.added else '0'}</td>"
        f"<td class='n'>{option.attainment.share:.1%}</td>"
        f"<td class='n'>{'' if option.goodput is None else f'{option.goodput:.3g}'}</td>"
        f"<td>{escape(', '.join(f'{name} {rate:.3g}' for name, rate in option.phases.items()))}</td></tr>"
        for option in study.result.options
    )
    head = (
        "<tr><th>search</th><th>instances</th><th class='n'>devices</th><th class='n'>req/s</th>"
        "<th class='n'>attainment before</th><th class='n'>added</th><th class='n'>attainment</th>"
        "<th class='n'>goodput</th><th>req/s of its parts alone</th></tr>"
    )
    sub = (
        "The best plan of each search, the winner first. Phases that meet the target apart may miss it together: "
        "before is the attainment of the plan that they suggest, added what the joint target then asked for."
    )
    return _card("The alternatives", sub, f"<div class='wide'><table>{head}{rows}</table></div>")


def _candidates(study: Study) -> str:
    log = study.result.log
    groups: dict[str, list[Entry]] = {}
    for entry in log:
        if (entry.goodput or entry.bound) and entry.devices:
            groups.setdefault(_group(entry), []).append(entry)
    bars = "".join(f"<h3>{name}</h3>{_bars(groups[name])}" for name in GROUPS if name in groups)
    counts = {verdict: sum(entry.verdict == verdict for entry in log) for verdict in ("best", "lost", "skipped")}
    sub = (
        f"{len(log)} candidates: {counts['best']} best of a search, {counts['lost']} lost, {counts['skipped']} never "
        "simulated. Full bars are measured goodput per device, hatched ones bounds that it cannot exceed."
    )
    rows = "".join(
        f"<tr><td>{entry.family}</td><td>{escape(entry.label)}</td><td class='n'>{entry.devices or ''}</td>"
        f"<td class='n'>{'' if entry.per_device is None else f'{entry.per_device:.3g}'}</td>"
        f"<td>{entry.verdict}</td><td>{escape(entry.reason)}</td></tr>"
        for entry in log
    )
    table = (
        "<details><summary>All candidates, and why each one lost</summary><div class='wide'><table><tr><th>search</th>"
        "<th>candidate</th><th class='n'>devices</th><th class='n'>req/s per device</th><th>verdict</th><th>reason</th>"
        f"</tr>{rows}</table></div></details>"
    )
    families = ", ".join(f"{name}: {text}" for name, text in FAMILY.items() if any(e.family == name for e in log))
    return _card("Candidates", sub, f"{bars}{table}<p class='sub last'>{escape(families)}.</p>")


GROUPS = ("Units that serve requests", "Prefill instances alone", "Decode instances alone")


def _group(entry: Entry) -> str:
    """Which candidates it was compared with: those of one phase have no goodput of whole requests."""
    if entry.family != "high" or "+" in entry.label:
        return GROUPS[0]
    return GROUPS[1] if "prefill" in entry.label else GROUPS[2]


def _size(entry: Entry) -> float:
    """Goodput per device, measured or bounded."""
    return (entry.goodput or entry.bound or 0.0) / entry.devices


def _bars(entries: list[Entry]) -> str:
    entries = sorted(entries, key=lambda entry: (entry.verdict != "best", entry.goodput is None, -_size(entry)))
    measured = [_size(entry) for entry in entries if entry.goodput]
    most = 1.15 * max(measured or [_size(entry) for entry in entries])
    drawn = "".join(_candidate(entry, most) for entry in entries[:BARS])
    return drawn + (f"<p class='sub'>and {len(entries) - BARS} more</p>" if len(entries) > BARS else "")


def _candidate(entry: Entry, most: float) -> str:
    size = _size(entry)
    css = "best" if entry.verdict == "best" else "" if entry.goodput else "most"
    value = f"{size:.3g} req/s per device" if entry.goodput else f"at most {size:.3g}"
    return (
        f'<div class="bar"><div class="name"><span>{escape(entry.label)}</span><span>{value}</span></div>'
        f'<div class="track"><div class="fill {css}" style="width:{min(100 * size / most, 100):.1f}%"></div></div>'
        f"<small>{entry.family}: {escape(entry.reason)}</small></div>"
    )
