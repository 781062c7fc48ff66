"""The client against a scripted server: open loop, streams cut anywhere, every way to fail."""

import asyncio
import itertools

import pytest
from fake_completions import answer
from hypothesis import given
from hypothesis import strategies as st

from jdserve.loadgen.client import CUT_OFF, OpenLoop, Request, completion_body, sse_data

LIMIT_S = 60  # ends a run that would hang, so that a test fails and does not stall


def requests(count, output_len=3, gap=0.0):
    body = completion_body("tiny", [1, 2], output_len, ignore_eos=True)
    return [Request(at=place * gap, input_len=2, output_len=output_len, body=body) for place in range(count)]


def drive(server, todo, max_seconds=LIMIT_S):
    load = OpenLoop(server.url, todo)
    asyncio.run(load.run(max_seconds))
    return load.records


def test_arrivals_never_wait_for_answers(server):
    count = 150  # more than the connections that HTTP clients allow themselves
    everyone = asyncio.Event()

    async def hold(reply):
        if reply.index == count - 1:
            everyone.set()
        await everyone.wait()
        await answer(reply)

    server.script = hold
    records = drive(server, requests(count, gap=0.001))
    assert [record.error for record in records] == [None] * count
    # No answer began before the last request was sent.
    assert min(record.chunks[0] for record in records) > max(record.sent for record in records)


def test_times_are_in_order(server):
    records = drive(server, requests(5, output_len=4, gap=0.01))
    for place, record in enumerate(records):
        assert record.scheduled == place * 0.01
        assert record.scheduled <= record.sent < record.chunks[0]
        assert record.chunks == sorted(record.chunks)
        assert len(record.chunks) == 4
        assert record.ended == record.chunks[-1]
        assert (record.prompt_tokens, record.output_tokens, record.finish) == (2, 4, "length")


def test_body_asks_for_exact_greedy_streamed_answers(server):
    drive(server, requests(1))
    assert server.requests == [
        {
            "model": "tiny",
            "prompt": [1, 2],
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]
    assert b"ignore_eos" not in completion_body("tiny", [1], 3, ignore_eos=False)


def test_the_end_without_text_is_no_token(server):
    async def script(reply):
        await reply.head()
        await reply.token("")  # a token without text of its own
        await reply.token(" b")
        await reply.token("", finish="length")
        await reply.end(output_tokens=2)

    server.script = script
    (record,) = drive(server, requests(1))
    assert record.error is None
    assert len(record.chunks) == 2
    assert record.ended >= record.chunks[-1]


async def status(reply):
    await reply.head(503)
    await reply.raw(b'{"error": {"message": "no live instance"}}')


async def hang_up(reply):
    pass


async def half(reply):
    await reply.head()
    await reply.token()


async def no_done(reply):
    await reply.head()
    await reply.token(finish="length")


async def no_usage(reply):
    await reply.head()
    await reply.token(finish="length")
    await reply.raw(b"data: [DONE]\n\n")


async def no_token(reply):
    await reply.head()
    await reply.token("", finish="stop")
    await reply.event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 0}})
    await reply.raw(b"data: [DONE]\n\n")


async def aborted(reply):
    await reply.head()
    await reply.token(finish="abort")
    await reply.end()


async def late_error(reply):
    await reply.head()
    await reply.token()
    await reply.event({"error": {"message": "worker died", "code": 500}})


async def garbage(reply):
    await reply.head()
    await reply.raw(b"data: {nonsense\n\n")


FAILURES = [
    (status, 'HTTP 503: {"error": {"message": "no live instance"}}'),
    (hang_up, "RemoteProtocolError: "),
    (half, "the stream ended early"),
    (no_done, "the stream ended early"),
    (no_usage, "no usage in the stream"),
    (no_token, "no token came"),
    (aborted, "finish_reason is abort"),
    (late_error, "error in the stream: worker died"),
    (garbage, "malformed event: "),
]


@pytest.mark.parametrize(("script", "message"), FAILURES, ids=[script.__name__ for script, _ in FAILURES])
def test_every_failure_is_a_record_and_spares_the_others(server, script, message):
    async def second_fails(reply):
        await (script if reply.index == 1 else answer)(reply)

    server.script = second_fails
    records = drive(server, requests(3, gap=0.001))
    failed = [record for record in records if record.error is not None]
    assert len(records) == 3
    assert len(failed) == 1
    assert failed[0].error.startswith(message)


def test_a_refused_connection_is_a_record(server):
    load = OpenLoop("http://127.0.0.1:1", requests(1))
    asyncio.run(load.run(LIMIT_S))
    assert load.records[0].error.startswith("ConnectError: ")


def test_the_time_limit_keeps_what_was_done(server):
    async def hold(reply):
        await asyncio.Event().wait()

    server.script = hold
    records = drive(server, [*requests(2), Request(1e6, 2, 3, b"")], max_seconds=0.2)
    assert [record.error for record in records] == [CUT_OFF, CUT_OFF]  # the third was never sent


def test_cancelling_keeps_what_was_done(server):
    async def scenario():
        load = OpenLoop(server.url, requests(2))
        run = asyncio.create_task(load.run(LIMIT_S))
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def hold(reply):
            loop.call_soon_threadsafe(arrived.set)
            await asyncio.Event().wait()

        server.script = hold
        await arrived.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        return load.records

    assert {record.error for record in asyncio.run(scenario())} == {CUT_OFF}


async def pieces(stream, cuts):
    places = [0, *sorted(cuts), len(stream)]
    for start, end in itertools.pairwise(places):
        yield stream[start:end]


async def gather(stream, cuts=()):
    return [data async for data in sse_data(pieces(stream, cuts))]


EVENTS = (
    'data: {"a": "é\u2028\x85"}\n\n: ping\n\ndata:one\r\n\r\nevent: x\ndata: two\ndata: lines\n\ndata: open'.encode()
)


@given(st.lists(st.integers(0, len(EVENTS))))
def test_events_survive_any_cut(cuts):
    found = asyncio.run(gather(EVENTS, cuts))
    assert found == ['{"a": "é\u2028\x85"}'.encode(), b"one", b"two\nlines"]
