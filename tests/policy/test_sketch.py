"""The runtime sketch of the article: six prompts, two prefill instances, and a decode instance with 1 GB of KV."""

from __future__ import annotations

import heapq

from jdserve.core.plan import DecodeInstance, PrefillInstance
from policy.harness import Harness

PROMPTS = (300, 900, 120, 2048, 450, 60)
KV_BYTES_PER_TOKEN = 327_680
DECODE_TOKENS = 1_000_000_000 // KV_BYTES_PER_TOKEN


def _run(balance: str) -> Harness:
    """All prompts arrive at time 0; a prefill takes as long as it has tokens; a pull takes no time; decode hangs."""
    instances = [PrefillInstance(name=name, pages=4000, lm_tokens=512) for name in ("p0", "p1")]
    decode = DecodeInstance(name="d", pages=DECODE_TOKENS, max_num_seqs=64, watermark=0.0)
    harness = Harness([*instances, decode], page_size=1, balance=balance)
    for number, prompt in enumerate(PROMPTS):
        harness.arrive(str(number), prompt, 64)
    ends: list[tuple[int, str]] = []
    timed: dict[str, int] = {}

    def time_steps(now: int) -> None:
        for name in ("p0", "p1"):
            step = harness.sites[name].step
            if step is not None and timed.get(name) != step.step_id:
                timed[name] = step.step_id
                heapq.heappush(ends, (now + step.features().new_tokens, name))

    time_steps(0)
    while ends:
        now, name = heapq.heappop(ends)
        harness.finish_step(name)
        for flight in list(harness.flights):
            harness.end_pull(flight)
        time_steps(now)
    return harness


def test_the_sketch_of_the_article() -> None:
    assert DECODE_TOKENS == 3051
    # p0 gets 0, 2, 4 and p1 gets 1, 3, 5. p0: 0 + 2 (420 <= 512) until 420, 4 until 870. p1: 1 until 900, 3 until
    # 2948, 5 until 3008. Pulled are 300 + 120 + 450 + 900 = 1770 tokens; 2048 more do not fit into 3051, and 5 would
    # fit but stands behind 3.
    harness = _run("requests")
    assert [int(id) for id in harness.pulled] == [0, 2, 4, 1]
    assert {int(id) for id in harness.sites["p1"].parked} == {3, 5}
    assert not harness.sites["p0"].parked
    assert harness.sites["d"].machine.waiting == 2  # type: ignore[attr-defined]
    harness.check_replay()


def test_queues_counted_in_tokens_place_the_prompts_better() -> None:
    # p0 gets 0, 2, 3 and p1 gets 1, 4, 5: the short prompts do not stand behind the long one
    harness = _run("tokens")
    assert [int(id) for id in harness.pulled] == [0, 2, 1, 4, 5]
    assert {int(id) for id in harness.sites["p0"].parked} == {3}
    assert not harness.sites["p1"].parked
    while harness.live():
        for flight in list(harness.flights):
            harness.end_pull(flight)
        harness.finish_step("d")
    harness.check_end()
