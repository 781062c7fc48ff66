"""The control channel: order, many posters, strangers and garbage; and what a machine is asked before jax is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from jdserve.core.errors import InvalidPlan, JdserveError
from jdserve.core.plan import HostedStage, Plan, Worker
from jdserve.core.request import Request, SamplingParams
from jdserve.runtime import wire
from jdserve.runtime.channel import Channel, Frames, Keys, new_secret
from jdserve.runtime.hosts import address_of, check_cores, check_hosts, is_here
from jdserve.runtime.operator import ask
from jdserve.runtime.outputs import InstanceStats, Report, TokenOutput
from jdserve.transfer.layout import KVHandle, KVLayout
from runtime.harness import colocated

KEYS = Keys("a secret of tests")


@contextmanager
def running(channel: Channel, take: Callable[[Frames], None]) -> Iterator[Channel]:
    thread = threading.Thread(target=channel.run, args=(take, lambda: None, 0.05))
    thread.start()
    try:
        yield channel
    finally:
        channel.close()
        thread.join(10)
        assert not thread.is_alive()


def test_messages_of_many_threads_arrive_each_in_its_order() -> None:
    got: list[tuple[int, int]] = []
    done = threading.Event()

    def take(frames: Frames) -> None:
        thread, number = frames[1].split(b" ")
        got.append((int(thread), int(number)))
        if len(got) == 2000:
            done.set()

    with (
        running(Channel.listen("127.0.0.1", 0, KEYS), take) as server,
        running(Channel.connect(server.address, KEYS), lambda _: None) as client,
    ):
        posters = [
            threading.Thread(target=lambda t=t: [client.post((b"%d %d" % (t, n),)) for n in range(500)])
            for t in range(4)
        ]
        for poster in posters:
            poster.start()
        assert done.wait(20)
    for thread in range(4):
        assert [number for t, number in got if t == thread] == list(range(500))


def test_a_stranger_is_not_heard_and_garbage_is_refused() -> None:
    got: list[bytes] = []
    heard = threading.Event()

    def take(frames: Frames) -> None:
        got.append(frames[1])
        heard.set()

    with (
        running(Channel.listen("127.0.0.1", 0, KEYS), take) as server,
        running(Channel.connect(server.address, Keys("another secret 123")), lambda _: None) as stranger,
        running(Channel.connect(server.address, KEYS), lambda _: None) as friend,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as plain,
    ):
        plain.linger = 0
        plain.connect(f"tcp://{server.address}")
        plain.send(b"no keys at all", zmq.NOBLOCK)
        stranger.post((b"wrong keys",))
        friend.post((b"hello",))
        assert heard.wait(20)
        assert got == [b"hello"]
    with pytest.raises(msgspec.DecodeError):
        wire.to_front.decode(b"\x80\x04\x95\x1a\x00\x00")
    with pytest.raises(msgspec.ValidationError):
        wire.to_front.decode(msgspec.msgpack.encode({"type": "Stop"}))  # a worker may not tell the front door so


@given(st.binary(max_size=200))
def test_no_bytes_are_taken_for_a_message_by_chance(data: bytes) -> None:
    for decoder in (wire.to_front, wire.to_worker, wire.to_operator):
        try:
            message = decoder.decode(data)
        except msgspec.MsgspecError:
            continue
        assert wire.encode(message)  # only whole messages come out


def test_messages_survive_the_wire() -> None:
    layout = KVLayout(4, 4, 8, 16, "float32", 2, 2)
    handle = KVHandle(
        id=2**64 - 1,
        request_id="r",
        source="p0",
        layout=layout,
        destination=layout,
        pages=3,
        bytes=7,
        deadline=2**62,
        transport="shm",
        address="/proc/1/fd/2",
        checksums=(1, 2**32 - 1),
    )
    request = Request("r~1", (1, 2, 3), SamplingParams(seed=-5, logit_bias={3: 1.5}, stop=("x",)), 1, "salt")
    for message in (
        wire.Submit("p0", request, (b"\x00" * 32,)),
        wire.HandOff("d0", request, "p0", (handle,)),
        wire.PlanChanged(plan_on("10.0.0.1", 3)),
    ):
        assert wire.to_worker.decode(wire.encode(message)) == message
    report = Report("d0", outputs=(TokenOutput("r~1", (5,), finish="stop"),), landed=("r~1",))
    for message in (wire.News(report, InstanceStats("d0", "decode", steps=3)), wire.Beat((), 1, 0.5)):
        assert wire.to_front.decode(wire.encode(message)) == message


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 characters, it has 5"):
        Keys("short")
    assert len(new_secret()) >= 32
    assert new_secret() != new_secret()


def test_an_operator_is_told_when_nobody_answers() -> None:
    with (
        running(Channel.listen("127.0.0.1", 0, KEYS), lambda _: None) as server,
        pytest.raises(JdserveError, match=r"has not answered within 0\.5 s"),
    ):
        ask(server.address, "not the right secret", wire.Drain("d0"), 0.5)


def plan_on(host: str, *cores: int) -> Plan:
    return Plan(
        model="m", max_model_len=64, instances=(colocated(),), workers=(Worker("w", (HostedStage("c0", cores),), host),)
    )


def test_hosts_must_be_known_and_private() -> None:
    assert address_of("localhost") == "127.0.0.1"
    assert is_here("localhost")
    assert not is_here("10.255.1.2")
    check_hosts(plan_on("localhost", 0))
    for host, why in (("0.0.0.0", "no private"), ("8.8.8.8", "no private"), ("no-such-host.invalid", "no known host")):
        with pytest.raises(InvalidPlan, match=why) as refused:
            check_hosts(plan_on(host, 0))
        assert refused.value.path == "$.workers[0].host"


def test_cores_must_be_there() -> None:
    plan = plan_on("localhost", 0, 9999)
    with pytest.raises(InvalidPlan, match=r"worker w wants core 9999.*--oversubscribe"):
        check_cores(plan, plan.workers)
