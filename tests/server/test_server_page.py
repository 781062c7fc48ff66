"""The live page in a real browser: the picture is right for three plans, the chat streams, the console stays empty."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, Service, listening, tiny_plan

from jdserve.core.plan import ColocatedInstance, DecodeInstance, HostedStage, Plan, PrefillInstance, Worker, role_of
from jdserve.runtime.outputs import EngineStats, InstanceStats
from jdserve.server.keys import Key, KeyRing
from jdserve.server.livepage import State
from jdserve.server.operations import Operations

playwright = pytest.importorskip("playwright.async_api", reason="the page is tested with playwright (pip install it)")

expect = playwright.expect

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")

KEY = "client-key-0123456789"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def wide_plan() -> Plan:
    """2 prefill instances (TP 2, and PP 2 over two hosts) and 2 decode instances."""
    return Plan(
        model="tiny",
        max_model_len=64,
        slo=tiny_plan().slo,
        transport="pull",
        platform="gpu",
        instances=(
            PrefillInstance(name="p0", tp=2, pages=64, lm_tokens=64),
            PrefillInstance(name="p1", pp=2, pages=64, lm_tokens=64),
            DecodeInstance(name="d0", pages=64, max_num_seqs=4),
            DecodeInstance(name="d1", tp=2, pages=64, max_num_seqs=32),
        ),
        workers=(
            Worker("w0", (HostedStage("p0", (0, 1)), HostedStage("p1", (2,)), HostedStage("d0", (3,))), "10.0.0.1"),
            Worker("w1", (HostedStage("p1", (0,), 1), HostedStage("d1", (4, 5))), "10.0.0.2"),
        ),
    )


def colocated_plan() -> Plan:
    return msgspec.structs.replace(
        tiny_plan(),
        slo=None,
        instances=(ColocatedInstance(name="c0", pages=64, token_budget=64, max_num_seqs=8),),
        workers=(Worker("c0", (HostedStage("c0", (0,)),)),),
    )


class Pictured(FakeEngine):
    """Serves ``plan`` and has numbers for each of its instances; its second look shows KV on its way."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.moved = 0

    def stats(self) -> EngineStats:
        self.moved += 1
        pages = {"pages_total": 64, "pages_owned": 16, "pages_cached": 8, "pages_free": 40}
        instances = []
        for one in self.plan.instances:
            parked = {"parked": 5} if role_of(one) == "prefill" else {}
            moved = {"transfers": self.moved, "pulling": 1} if role_of(one) == "decode" else {}
            instances.append(InstanceStats(one.name, role_of(one), waiting=3, running=2, **pages, **parked, **moved))
        return EngineStats(tuple(instances), dead={"d1": "killed"} if len(instances) > 2 else {})


PLANS = {"1p1d": tiny_plan, "2p2d": wide_plan, "colocated": colocated_plan}


@pytest.mark.parametrize("name", PLANS)
def test_the_state_is_that_of_the_plan(name: str) -> None:
    service = Service(Pictured(PLANS[name]()))
    service.complete("hello", max_tokens=4)
    answer = service.call("GET", "/state")
    state = msgspec.json.decode(answer.content, type=State)
    plan = service.engine.plan
    assert [(one.name, one.role) for one in state.instances] == [(one.name, role_of(one)) for one in plan.instances]
    assert sum(bucket.count for bucket in state.ttft) == sum(bucket.count for bucket in state.tpot) == 1
    assert state.ttft[-1].bound is None
    assert state.tokens == 4
    assert (state.attained is None) == (plan.slo is None)
    if name == "2p2d":
        assert [[(p.host, p.devices) for p in stage] for stage in state.instances[1].stages] == [
            [("10.0.0.1", [2])],
            [("10.0.0.2", [0])],
        ]
        links = [(link.source, link.destination, link.transport) for link in state.links]
        assert links == [("p0", "d0", "local"), ("p0", "d1", "pull"), ("p1", "d0", "pull"), ("p1", "d1", "pull")]


def test_the_files_hold_nothing_from_elsewhere() -> None:
    service = Service(operations=Operations(ring=KeyRing([Key.of(KEY, "client", "alice")])))
    seen, wanted = dict[str, str](), ["/"]
    while wanted:
        path = wanted.pop()
        answer = service.call("GET", path)
        assert answer.status_code == 200, path
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        seen[path] = answer.text
        found = re.findall(r'(?:src|href)="(/[^"]*)"|from "(/[^"]*)"', answer.text)
        wanted += [one for pair in found for one in pair if one and one not in seen]
    assert len(seen) == 8
    for path, text in seen.items():
        urls = [url for url in re.findall(r"https?://[^\s\"']+", text) if "www.w3.org" not in url]
        assert urls == [], path
        assert "innerHTML" not in text, "texts of models and requests are texts"
    assert service.call("GET", "/state").status_code == 401


class Visit:
    """A page of the browser that keeps what goes wrong."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.urls: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.urls.append(request.url))


Open = Callable[..., Awaitable[Visit]]


@asynccontextmanager
async def visiting(service: Service) -> AsyncIterator[tuple[str, Open]]:
    async with listening(service) as url, playwright.async_playwright() as tool:
        chromium = await tool.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:

            async def visit(viewport: dict[str, int] = DESKTOP, scheme: str = "light") -> Visit:
                context = await chromium.new_context(viewport=viewport, color_scheme=scheme)
                made = Visit(await context.new_page())
                await made.page.goto(url)
                return made

            yield url, visit
        finally:
            await chromium.close()


async def settled(visit: Visit, url: str) -> None:
    """Nothing went wrong, nothing was asked of others, nothing sticks out."""
    assert visit.errors == []
    assert all(one.startswith(url) for one in visit.urls)
    assert await visit.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@browser
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_the_picture_is_right(name: str) -> None:
    service = Service(Pictured(PLANS[name]()))
    plan = service.engine.plan

    async def look() -> None:
        async with visiting(service) as (url, visit):
            for viewport, scheme in ((DESKTOP, "light"), (PHONE, "dark")):
                seen = await visit(viewport, scheme)
                page = seen.page
                await page.wait_for_selector(".pill.good >> text=ready")
                cards = {
                    await card.get_attribute("data-instance"): await card.inner_text()
                    for card in await page.locator(".instance").all()
                }
                assert set(cards) == {one.name for one in plan.instances}
                for one in plan.instances:
                    text = cards[one.name]
                    assert role_of(one) in text
                    assert "2 of " in text, "the batch"
                    assert "16 of 64" in text, "the pages"
                    assert (f"TP {one.tp}" in text) == (one.tp > 1)
                    column = "#right" if role_of(one) == "decode" else "#left"
                    assert await page.locator(f'{column} [data-instance="{one.name}"]').count() == 1
                    devices = page.locator(f'[data-instance="{one.name}"] .device')
                    assert await devices.all_inner_texts() == [
                        str(device) for stage in range(one.pp) for _, device in plan.devices(one.name, stage)
                    ]
                assert "down" in cards.get("d1", "down")
                ways = {await path.get_attribute("data-link") for path in await page.locator("#links path").all()}
                sources = [one.name for one in plan.instances if role_of(one) == "prefill"]
                targets = [one.name for one in plan.instances if role_of(one) == "decode"]
                assert ways == {f"{a} {b}" for a in sources for b in targets}
                if targets:
                    await page.wait_for_selector("#links path.busy", state="attached")
                background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (background == "rgb(20, 22, 26)") == (scheme == "dark")
                await settled(seen, url)

    asyncio.run(asyncio.wait_for(look(), 120))


@browser
@pytest.mark.slow
def test_the_chat_streams_and_the_keyboard_is_enough() -> None:
    service = Service(FakeEngine(max_model_len=256))
    engine = service.engine
    said = service.ids("the quick brown fox")
    engine.script = lambda request, i: said[i] if i < len(said) else 1
    engine.hold_at = 2

    async def look() -> None:
        async with visiting(service) as (url, visit):
            seen = await visit(PHONE)
            page = seen.page
            await page.wait_for_selector(".pill.good")
            await page.keyboard.press("Tab")
            assert await page.evaluate("document.activeElement.className") == "skip"
            await page.keyboard.press("Enter")
            for _ in range(10):
                if await page.evaluate("document.activeElement.id") == "text":
                    break
                await page.keyboard.press("Tab")
            await page.keyboard.type("hello")
            await page.keyboard.press("Enter")
            await asyncio.wait_for(engine.holding.wait(), 30)
            begun = service.text(said[:2])
            await expect(page.locator(".turn.assistant span")).to_have_text(begun)
            assert await page.locator("#stop").is_enabled()
            engine.go.set()
            await page.wait_for_selector(".turn.assistant small")
            assert await page.locator(".turn.assistant span").inner_text() == "the quick brown fox"
            assert await page.locator(".turn.user span").inner_text() == "hello"
            await expect(page.locator("#ttft")).to_have_attribute("aria-label", re.compile("^1 requests"))
            await page.keyboard.type("again")
            await page.keyboard.press("Enter")
            await expect(page.locator(".turn.assistant small")).to_have_count(2)
            assert "the quick brown fox" in service.text(list(engine.requests[-1].prompt)), "the turns before go along"
            await settled(seen, url)

    asyncio.run(asyncio.wait_for(look(), 120))


@browser
@pytest.mark.slow
def test_a_locked_server_asks_for_the_key() -> None:
    service = Service(operations=Operations(ring=KeyRing([Key.of(KEY, "client", "alice")])))

    async def look() -> None:
        async with visiting(service) as (_, visit):
            page = (await visit()).page
            await page.fill("#key", KEY)
            await page.keyboard.press("Enter")
            await page.wait_for_selector(".instance")
            assert await page.locator("#key-form").is_hidden()
            assert KEY not in await page.content()

    asyncio.run(asyncio.wait_for(look(), 120))
