"""Who may ask for what, and what a foreign program or path can reach: nothing."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from fake_engine import Service

from jdserve.cli import main
from jdserve.core.errors import InvalidRequest
from jdserve.server.guard import is_open
from jdserve.server.keys import Key, KeyRing, make_key, read_keys
from jdserve.server.operations import Operations
from jdserve.server.serve import Options
from jdserve.server.templates import ChatTemplate

CLIENT, ADMIN = "client-key-0123456789", "admin-key-0123456789"
RING = KeyRing([Key.of(CLIENT, "client", "alice"), Key.of(ADMIN, "admin", "root")])
LOCKED = Service(operations=Operations(ring=RING, admin=True))
ADDITION = {
    "instance": {"role": "decode", "name": "d1", "pages": 64, "max_num_seqs": 4},
    "worker": {"name": "d1", "stages": [{"instance": "d1", "devices": [2]}]},
}


def bearer(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {key}"}


def every_call() -> list[tuple[str, str]]:
    """(method, path) of each route, whoever registered it."""
    calls = []
    for route in LOCKED.app.routes:
        path = getattr(route, "path", "")
        calls += [(method, path) for method in sorted(getattr(route, "methods", None) or {"GET"})]
    assert ("POST", "/v1/completions") in calls
    assert ("POST", "/admin/instances") in calls
    assert ("GET", "/metrics") in calls
    return calls


@pytest.mark.parametrize(("method", "path"), every_call())
def test_sec_02_every_route_needs_a_key(method: str, path: str) -> None:
    before = len(LOCKED.engine.requests)
    for headers in ({}, bearer("x" * 40), bearer(CLIENT[:-1]), bearer(CLIENT, "Basic"), {"Authorization": CLIENT}):
        answer = LOCKED.call(method, path, headers=headers, json={"model": "tiny", "prompt": "a"})
        assert (answer.status_code == 401) != is_open(path), answer.text
        if answer.status_code == 401 and method != "HEAD":
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert len(LOCKED.engine.requests) == before
    assert LOCKED.engine.calls == []


def test_sec_02_what_is_not_there_and_what_looks_open_need_a_key_too() -> None:
    for path in (
        "/nowhere",
        "/health/",
        "/health%2f..%2fmetrics",
        "/Health",
        "/admin",
        "/page",
        "/v1/health",
    ):
        assert LOCKED.call("GET", path).status_code == 401, path
    assert LOCKED.call("GET", "/health").status_code == 200
    assert {path for _, path in every_call() if is_open(path)} <= {"/", "/health", "/ping", "/ready", "/page/{name}"}


def test_a_key_opens_and_an_admin_key_opens_more() -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    for key in (CLIENT, ADMIN):
        assert LOCKED.call("POST", "/v1/completions", json=body, headers=bearer(key, "bearer")).status_code == 200
    drain = "/admin/instances/p0/drain"
    assert LOCKED.call("POST", drain, headers=bearer(CLIENT)).status_code == 403
    assert LOCKED.call("POST", drain, headers=bearer(ADMIN)).json() == {"instance": "p0", "done": "drained"}
    assert LOCKED.call("POST", "/admin/instances/no/drain", headers=bearer(ADMIN)).status_code == 409
    assert LOCKED.call("POST", "/admin/instances", headers=bearer(ADMIN), json=ADDITION).status_code == 200
    wrong = LOCKED.call("POST", "/admin/instances", headers=bearer(ADMIN), json=ADDITION | {"more": 1})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_instance")
    assert LOCKED.engine.calls == ["drain p0", "add d1 on d1"]
    LOCKED.engine.calls.clear()


def test_admin_routes_are_off_by_default() -> None:
    assert Service().call("POST", "/admin/instances/p0/drain").status_code == 401, "no key opens them"
    service = Service(operations=Operations(ring=RING))
    assert service.call("POST", "/admin/instances/p0/drain", headers=bearer(ADMIN)).status_code == 404
    with pytest.raises(ValueError, match="--admin-routes needs an admin's key"):
        Operations(ring=KeyRing([Key.of(CLIENT, "client", "alice")]), admin=True)


def test_no_other_origin_unless_allowed() -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for origins, allowed in (
        ((), None),
        (("https://chat.example",), None),
        (("https://evil.example",), asked["Origin"]),
    ):
        service = Service(operations=Operations(ring=RING, origins=origins))
        for method in ("GET", "OPTIONS"):
            answer = service.call(method, "/health", headers=asked)
            assert answer.headers.get("access-control-allow-origin") == allowed
        assert service.call("GET", "/metrics", headers=asked).status_code == 401


def test_keys_are_kept_as_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    assert main(["key", "alice", "--file", str(file)]) == 0
    assert main(["key", "root", "--admin", "--file", str(file)]) == 0
    alice, root = capsys.readouterr().out.split()
    assert alice.startswith("jd-")
    assert alice != root
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    assert alice not in text
    assert root not in text
    file.write_text("# ours\n\n" + text)
    ring = Options(plan=tmp_path, api_key_file=file, api_keys=("another-key-012345",)).operations().ring
    assert [getattr(ring.find(key), "role", None) for key in (alice, root, "another-key-012345", alice + "x", "")] == [
        "client",
        "admin",
        "client",
        None,
        None,
    ]
    assert main(["key", "alice", "--file", str(file)]) == 2, "a name is taken once"
    assert main(["key", "two words", "--file", str(file)]) == 2


def test_bad_keys_are_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for text in ("client alice\n", "client alice sha256:12\n", "root alice sha256:" + "0" * 64 + "\n", "x" * 5000):
        file.write_text("# first\n" + text)
        with pytest.raises(ValueError, match="line 2"):
            read_keys(file)
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="has no key"):
        Options(plan=tmp_path, api_key_file=file).operations()
    with pytest.raises(ValueError, match="at least 16 characters"):
        Options(plan=tmp_path, api_keys=("short",)).operations()
    with pytest.raises(ValueError, match="name of a key"):
        make_key("client", "a b")


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{% set x = messages.append(1) %}",
    "{{ ('%s' % messages).format.__self__.__class__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('id') }}",
    "{{ lipsum.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing(source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], True)
    except InvalidRequest:
        return
    assert text == "", "what is unsafe reads as undefined"


PATHS = ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "....//etc/passwd", "%00", "C:\\windows", "~root"]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_from_a_request_reaches_no_file(path: str) -> None:
    service = Service()
    for base in ("/v1/models/", "/page/", "/", "/admin/instances/"):
        answer = service.call("GET", base + path)
        assert answer.status_code in (401, 404, 405), (base, answer.text)
        assert "root:" not in answer.text
    refused = service.call("POST", "/v1/completions", content=json.dumps({"model": path, "prompt": path}).encode())
    assert refused.status_code in (400, 404)
