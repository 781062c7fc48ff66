"""One server of the tiny model for the whole session, and what it takes to start more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from tiny import write_tiny_checkpoint

from e2e.harness import Api, Server, running, small_plan


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("e2e") / "tiny"
    return write_tiny_checkpoint(folder, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, context=256)


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands in for the user's cache, in every process of the session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def environment(cache_home: Path, pytestconfig: pytest.Config) -> dict[str, str]:
    """Of a server: compiled programs are shared with the other tests, as they are in this process."""
    compilations = str(pytestconfig.cache.mkdir("compilations"))
    return {
        "XDG_CACHE_HOME": str(cache_home),
        "JAX_COMPILATION_CACHE_DIR": compilations,
    }


@pytest.fixture(scope="session")
def flags(checkpoint: Path) -> list[str]:
    """The plan, the model, a free port."""
    plan = checkpoint.with_name("plan.json")
    plan.write_bytes(small_plan().to_json())
    return [
        "--plan",
        str(plan),
        "--model",
        str(checkpoint),
        "--port",
        "0",
        "--served-model-name",
        "tiny",
        "--oversubscribe",
    ]


Start = Callable[..., Server]


@pytest.fixture
def start(flags: list[str], environment: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Starts servers that end with the test; ``flags`` come after the usual ones and win over them."""
    with ExitStack() as stack:

        def make(*more: str) -> Server:
            log = tmp_path / f"server{len(list(tmp_path.glob('server*')))}.log"
            block: AbstractContextManager[Server] = running([*flags, *more], environment, log)
            return stack.enter_context(block)

        yield make


@pytest.fixture(scope="session")
def server(flags: list[str], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with running(flags, environment, log) as process:
        yield process.wait_ready()
        assert process.process.poll() is None, process.said
        assert "Traceback" not in process.said


@pytest.fixture(scope="session")
def _session_api(server: Server) -> Api:
    return Api(server.url)


@pytest.fixture
def api(_session_api: Api) -> Iterator[Api]:
    """The session's server; whatever a test does, it must become idle again, with nothing compiled."""
    yield _session_api
    _session_api.settle()
    assert _session_api.metric("recompilations_total") == 0
