"""Start-up, serving and shutdown of the HTTP server.

The order of things: the plan is read and the port is bound, so that what is wrong there is told at once; the socket
answers 503 while the model is fetched, converted, loaded and compiled; then the real application takes over. The first
SIGINT or SIGTERM drains (new requests get 503, open ones end), a second SIGINT stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn
from fastapi import FastAPI

from jdserve.core.backends import Attention
from jdserve.core.errors import InvalidPlan, JdserveError
from jdserve.core.logs import LogFormat, set_up
from jdserve.core.plan import Instance, Plan, PrefillInstance
from jdserve.core.spec import DType, WeightFormat
from jdserve.models.load import resolve
from jdserve.runtime.channel import Keys, new_secret
from jdserve.runtime.engine import Engine
from jdserve.runtime.front import make_worker_engine, settled
from jdserve.runtime.launch import jax_executors, make_engine
from jdserve.runtime.operator import meeting_file
from jdserve.runtime.progress import Progress
from jdserve.runtime.remote import ClusterOptions
from jdserve.server.app import create_app
from jdserve.server.display import StartDisplay
from jdserve.server.gate import Gate
from jdserve.server.keys import Key, KeyRing, read_keys
from jdserve.server.operations import Operations
from jdserve.server.requestlog import RequestLog
from jdserve.server.tokenizer import Tokenizer
from jdserve.server.tracing import otlp_tracing

logger = logging.getLogger(__name__)

STOPPED_WHILE_STARTING = 130
"""Exit code after a signal that came before the server was ready."""


@dataclass(frozen=True)
class Options:
    """What the command line decides.

    Attributes:
        plan: path of the plan.
        model, weights, model_plugin, attention: override the plan's, None to keep them.
        host, port: to listen on; port 0 takes a free one.
        served_name: what clients call the model, None for its own name.
        api_keys: that clients must send, as they are.
        api_key_file: file of keys.
        admin_routes, allow_origins: see :class:`~jdserve.server.operations.Operations`.
        chat_template: file with a jinja template that replaces the model's, None to keep it.
        drain_timeout_s: how long a shutdown waits for open requests.
        log_level, log_format: of everything that is written to stderr; ``info`` has a line per request.
        request_log: file for a line per request, None for none.
        otlp_endpoint: where traces go, None for nowhere.
        record: folder for event logs, None for none.
        max_model_len, max_num_seqs, block_size, dtype: override the plan's (``block_size`` its ``page_size``), None to
            keep them.
        in_process: run all instances in this process instead of workers.
        oversubscribe, control, secret_file, join_timeout_s, heartbeat_timeout_s: of the workers; see
            :class:`~jdserve.runtime.remote.ClusterOptions`.
    """

    plan: Path
    model: str | None = None
    weights: WeightFormat | None = None
    model_plugin: str | None = None
    attention: Attention | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    admin_routes: bool = False
    allow_origins: tuple[str, ...] = ()
    chat_template: Path | None = None
    drain_timeout_s: float = 30.0
    log_level: str = "warning"
    log_format: LogFormat = "text"
    request_log: Path | None = None
    otlp_endpoint: str | None = None
    record: Path | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    dtype: DType | None = None
    in_process: bool = False
    oversubscribe: bool = False
    control: tuple[str, int] = ("127.0.0.1", 0)
    secret_file: Path | None = None
    join_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 10.0

    def overrides(self, plan: Plan) -> Plan:
        """The plan with what the command line says otherwise.

        Raises:
            InvalidPlan: it is refused.
        """
        given = {
            "model": self.model,
            "weights": self.weights,
            "model_plugin": self.model_plugin,
            "attention": self.attention,
            "max_model_len": self.max_model_len,
            "page_size": self.block_size,
            "dtype": self.dtype,
            "instances": None if self.max_num_seqs is None else self._batches(plan, self.max_num_seqs),
        }
        plan = msgspec.structs.replace(plan, **{name: value for name, value in given.items() if value is not None})
        return Plan.from_json(plan.to_json())

    @staticmethod
    def _batches(plan: Plan, largest: int) -> tuple[Instance, ...]:
        return tuple(
            instance
            if isinstance(instance, PrefillInstance)
            else msgspec.structs.replace(instance, max_num_seqs=largest)
            for instance in plan.instances
        )

    def operations(self) -> Operations:
        """What the operator decides about the server.

        Raises:
            ValueError: a key is too short, a line of the file is none, there is no admin's key for the admin routes,
                the log's name has a wrong ending, or OpenTelemetry is not there.
            OSError: a file cannot be read or written.
        """
        keys = [Key.of(secret, "client", f"api-key-{index}") for index, secret in enumerate(self.api_keys)]
        if self.api_key_file is not None:
            keys += read_keys(self.api_key_file)
            if not keys:
                raise ValueError(f"{self.api_key_file} has no key: make one with jdserve key NAME --file FILE")
        return Operations(
            ring=KeyRing(keys),
            origins=self.allow_origins,
            admin=self.admin_routes,
            request_log=None if self.request_log is None else RequestLog(self.request_log),
            tracing=None if self.otlp_endpoint is None else otlp_tracing(self.otlp_endpoint),
        )

    def cluster(self) -> ClusterOptions:
        """How the workers are run.

        Raises:
            ValueError: workers of other hosts may join, but no secret was given, or a short one.
            OSError: the secret cannot be read.
        """
        host, port = self.control
        if self.secret_file is None and not host.startswith("127."):
            raise ValueError(f"--control {host}:{port} is open to other hosts: give --secret-file")
        secret = new_secret() if self.secret_file is None else self.secret_file.read_text().strip()
        Keys(secret)
        return ClusterOptions(
            host=host,
            port=port,
            secret=secret,
            oversubscribe=self.oversubscribe,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            join_timeout_s=self.join_timeout_s,
            log_format=self.log_format,
            record=str(self.record.absolute()) if self.record is not None else None,
        )


def serve(options: Options) -> int:
    """Run the server until it is told to stop; returns the exit code (0, 1 for a failed start, 2 for bad input)."""
    set_up("jdserve", options.log_format)
    logging.getLogger("jdserve").setLevel(options.log_level.upper())
    logger.setLevel(logging.INFO)  # what the server says of its own life is always told
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every write to a client that has gone
    try:
        plan = options.overrides(Plan.load(options.plan))
        if options.chat_template is not None:
            options.chat_template.read_text()  # what is wrong with the file is told now, not after the start
        operations = options.operations()
        cluster = None if options.in_process else options.cluster()
        if cluster is not None:
            plan = settled(plan, cluster)
        listener = _bind(options.host, options.port)
    except (InvalidPlan, OSError, ValueError) as error:
        logger.error("%s", error)
        return 2
    with listener:
        return asyncio.run(_serve(options, operations, plan, cluster, listener))


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port} (--host, --port): {error.strerror}") from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn with our own answer to signals: uvicorn's would close the streams that a drain waits for."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._interrupts = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ask for a drain; a second SIGINT leaves at once (supervisors repeat SIGTERM and mean nothing by it)."""
        self._interrupts += sig == signal.SIGINT
        if self._interrupts > 1:
            logger.warning("stopped without waiting for open requests")
            os._exit(128 + sig)
        self._loop.call_soon_threadsafe(self.stop.set)


async def _serve(
    options: Options, operations: Operations, plan: Plan, cluster: ClusterOptions | None, listener: socket.socket
) -> int:
    if not operations.ring and not is_loopback(options.host):
        logger.warning("%s is open to other machines and no API key is asked for", options.host)
    port = listener.getsockname()[1]
    url = f"http://{_shown(options.host)}:{port}"
    display = StartDisplay(sys.stderr, url, logger.info if options.log_format == "json" else None)
    progress = Progress(display.show)
    gate = Gate(progress)
    config = uvicorn.Config(
        gate,
        lifespan="off",
        log_config=None,
        log_level=options.log_level,
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(_start(options, operations, plan, cluster, port, progress))
    stopping = asyncio.create_task(server.stop.wait())
    await asyncio.wait({starting, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
    display.close()
    if not starting.done():
        logger.warning("stopped during start-up (%s)", progress.stage)
        # Threads that load and compile cannot be interrupted, and nothing of theirs is worth waiting for.
        os._exit(STOPPED_WHILE_STARTING)
    if (error := starting.exception()) is not None:
        logger.error("%s", _told(error))
        server.should_exit = True
        await serving
        return 1
    engine, app, name = starting.result()
    gate.open(app)
    display.ready(name)
    await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
    open_requests = engine.open_requests
    if open_requests:
        logger.info("draining, %d open requests", open_requests)
    await engine.drain(options.drain_timeout_s)
    server.should_exit = True
    await serving
    await engine.close()
    operations.close()
    return 0


async def _start(
    options: Options,
    operations: Operations,
    plan: Plan,
    cluster: ClusterOptions | None,
    port: int,
    progress: Progress,
) -> tuple[Engine, FastAPI, str]:
    model = await asyncio.to_thread(resolve, plan.model, progress, weights=plan.weights, plugin=plan.model_plugin)
    plan.check(model.spec)
    tokenizer = Tokenizer.read(model.folder, options.chat_template)
    if cluster is None:
        executors = jax_executors(plan, model, progress)
        engine = make_engine(plan, model.spec, executors, progress, options.record, model.folder)
    else:
        engine = make_worker_engine(plan, model.spec, cluster, progress, meeting_file(port))
    await engine.start()
    name = options.served_name or model.name
    return engine, create_app(engine, tokenizer, name, operations=operations), name


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _told(error: BaseException) -> str:
    """One line for what is the user's to mend, the type as well for what is not."""
    if isinstance(error, JdserveError | ValueError | OSError):
        return str(error)
    return f"start failed: {type(error).__name__}: {error}"


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
