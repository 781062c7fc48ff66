"""What strangers may send to the ports that a live server opens: nothing of it is run, and nobody's request is lost."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from e2e.harness import Api, Server, small_plan, until


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._file}",)


def listeners(server: Server) -> set[tuple[str, int]]:
    """(address, port) of each TCP socket that the server and its workers listen on."""
    server_process = psutil.Process(server.process.pid)
    return {
        (one.laddr.ip, one.laddr.port)
        for process in (server_process, *server_process.children(recursive=True))
        for one in process.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }


def payloads(file: Path) -> list[bytes]:
    bombs = [pickle.dumps(Bomb(file), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    old = f"cos\nsystem\n(S'touch {file}'\ntR.".encode()
    framed = [len(bomb).to_bytes(8, "big") + bomb for bomb in bombs]
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + b"\x00" * 48  # of ZeroMQ
    http = [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(b), b) for b in bombs]
    return [old, *bombs, *framed, *(greeting + bomb for bomb in bombs), *http, os.urandom(4096), b"\x00" * 4096]


def send(address: tuple[str, int], payload: bytes) -> None:
    """Send, and wait for the other side to answer, close or say nothing for a moment."""
    with socket.create_connection(address, timeout=5) as connection:
        connection.settimeout(0.05)
        try:
            connection.sendall(payload)
            connection.recv(1024)
        except OSError:
            return


@pytest.mark.slow
def test_sec_01_pickles_to_every_port(server: Server, api: Api, tmp_path: Path) -> None:
    ports = listeners(server)
    assert len(ports) >= 2, "HTTP and the control channel"
    assert {ip for ip, _ in ports} == {"127.0.0.1"}
    workers = psutil.Process(server.process.pid).children()
    for address in sorted(ports):
        for payload in payloads(tmp_path / "pwned"):
            send(address, payload)
    assert api.complete("fine", max_tokens=4).status_code == 200
    assert not (tmp_path / "pwned").exists()
    assert psutil.Process(server.process.pid).children() == workers, "no process died, none was started"


@pytest.mark.slow
def test_garbage_to_the_transfer_port_costs_no_request(start: Callable[..., Server], tmp_path: Path) -> None:
    """The port of ``pull`` has no authentication: whatever comes of the garbage, requests go on."""
    plan = msgspec.structs.replace(small_plan(), transport="pull", transfer_checksums=False)
    (tmp_path / "pull.json").write_bytes(plan.to_json())
    server = start("--plan", str(tmp_path / "pull.json")).wait_ready()
    api = Api(server.url)
    assert api.complete("fine", max_tokens=4).status_code == 200  # transports are made when they are first needed
    http = int(server.url.rpartition(":")[2])
    ports = listeners(server)
    assert all(ip.startswith("127.") for ip, _ in ports), ports
    front = {c.laddr.port for c in psutil.Process(server.process.pid).net_connections("tcp") if c.status == "LISTEN"}
    transfer = sorted(address for address in ports if address[1] not in front)
    assert http in front
    assert transfer, "the workers offer KV"
    for address in transfer:
        for payload in payloads(tmp_path / "pwned"):
            try:
                send(address, payload)
            except OSError:  # the worker has died of it, and comes back on another port
                break
    until(lambda: api.http.get("/health").status_code == 200, "both instances live", 60)
    for _ in range(3):
        answer = api.complete("fine", max_tokens=8, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
    assert not (tmp_path / "pwned").exists()
    assert api.metric("kv_transfers_total") > 0
