"""One ZeroMQ socket that one thread owns and any thread may post to; encrypted and authenticated by a shared secret.

Both ends derive their CURVE keys from the secret: who does not know it cannot complete the handshake, so no byte of a
stranger reaches a decoder.
"""

from __future__ import annotations

import hashlib
import queue
import secrets
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import zmq
import zmq.auth.thread
import zmq.utils.z85

Frames = Seq[bytes]

LINGER_MS = 1000
"""How long a closing socket tries to deliver what was posted."""


def new_secret() -> str:
    """A secret that nobody guesses."""
    return secrets.token_hex(32)


class Keys:
    """The CURVE key pairs that follow from a shared secret.

    Raises:
        ValueError: the secret is shorter than 16 characters.
    """

    def __init__(self, secret: str) -> None:
        if len(secret) < 16:
            raise ValueError(f"the shared secret must have at least 16 characters, it has {len(secret)}")
        self.server_public, self.server_private = _pair(f"jdserve front door {secret}")
        self.client_public, self.client_private = _pair(f"jdserve worker {secret}")


def _pair(text: str) -> tuple[bytes, bytes]:
    private = zmq.utils.z85.encode(hashlib.sha256(text.encode()).digest())
    return zmq.curve_public(private), private


class _OnlyOurs:
    """Lets in who has the key that follows from the secret."""

    def __init__(self, keys: Keys) -> None:
        self._key = keys.client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class Channel:
    """A socket and the loop around it. Build it with :meth:`listen` or :meth:`connect`.

    Attributes:
        address: that it listens on, or is connected to.
    """

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[bytes], address: str, guard: Any = None) -> None:
        self.address = address
        self._context = context
        self._socket = socket
        self._guard = guard
        self._outbox: queue.SimpleQueue[Frames] = queue.SimpleQueue()
        self._wake_lock = threading.Lock()
        self._awake, self._waker = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        name = f"inproc://wake-{secrets.token_hex(8)}"
        self._awake.bind(name)
        self._waker.connect(name)
        self._closing = threading.Event()

    @classmethod
    def listen(cls, host: str, port: int, keys: Keys) -> Channel:
        """A ROUTER socket: frames are (peer identity, message). Port 0 takes a free one.

        Raises:
            OSError: the address cannot be bound.
        """
        context: zmq.Context[Any] = zmq.Context()
        guard = zmq.auth.thread.ThreadAuthenticator(context)
        guard.start()
        socket = context.socket(zmq.ROUTER)
        _prepare(socket)
        guard.configure_curve_callback(credentials_provider=_OnlyOurs(keys))
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = keys.server_private, keys.server_public
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close(0)
            guard.stop()
            context.term()
            raise OSError(f"cannot listen on {host}:{port} for workers: {error.strerror}") from None
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        return cls(context, socket, address, guard)

    @classmethod
    def connect(cls, address: str, keys: Keys) -> Channel:
        """A DEALER socket to a listener at host:port: frames are (message,). It connects when the listener is there."""
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        _prepare(socket)
        socket.identity = secrets.token_bytes(8)
        socket.curve_serverkey = keys.server_public
        socket.curve_secretkey, socket.curve_publickey = keys.client_private, keys.client_public
        socket.connect(f"tcp://{address}")
        return cls(context, socket, address)

    def post(self, frames: Frames) -> None:
        """Send, from any thread; in the order of the calls. Nothing happens once the channel is closed."""
        self._outbox.put(frames)
        self._wake()

    def _wake(self) -> None:
        with self._wake_lock:
            if not self._closing.is_set():
                try:
                    self._waker.send(b"", zmq.NOBLOCK)
                except zmq.Again:  # there are wake-ups enough
                    return

    def run(self, take: Callable[[Frames], None], tick: Callable[[], None], tick_s: float) -> None:
        """Deliver to ``take`` and send what is posted, until closed; ``tick`` is called about every ``tick_s``."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._awake, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(round(tick_s * 1000)))
            if self._awake in ready:
                self._drain_wakes()
            self._send_all()
            for _ in range(256 if self._socket in ready else 0):
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                take(frames)
            tick()
        self._send_all()
        self._shut()

    def close(self) -> None:
        """End :meth:`run`, from any thread; what was posted before is sent still."""
        with self._wake_lock:
            if not self._closing.is_set():
                self._closing.set()
                self._waker.send(b"")

    def _drain_wakes(self) -> None:
        try:
            while True:
                self._awake.recv(zmq.NOBLOCK)
        except zmq.Again:
            return

    def _send_all(self) -> None:
        while True:
            try:
                frames = self._outbox.get_nowait()
            except queue.Empty:
                return
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError:  # a ROUTER whose peer is gone: the peer's death is noticed elsewhere
                continue

    def _shut(self) -> None:
        for socket in (self._awake, self._waker):
            socket.close(0)
        self._socket.close(LINGER_MS)
        if self._guard is not None:
            self._guard.stop()
        self._context.term()


def _prepare(socket: zmq.Socket[bytes]) -> None:
    socket.linger = LINGER_MS
    socket.sndhwm = socket.rcvhwm = 0  # the scheduler bounds what is open; the channel must not drop any of it
    if socket.type == zmq.ROUTER:
        socket.router_mandatory = True
