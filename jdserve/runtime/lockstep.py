"""What the processes of one instance say to each other: typed messages, host arrays as raw bytes, never pickle.

The leader tells every follower the same in the same order. A message of a type, size or shape that is not listed here
is refused by the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import msgspec
import numpy as np

from jdserve.ops.sampling import Sampled, SamplingRows, TopLogprobs
from jdserve.runtime.buckets import StepShape
from jdserve.runtime.part import Scores
from jdserve.runtime.state import Admission
from jdserve.runtime.steps import StepOutputs
from jdserve.transfer.layout import KVHandle, KVLayout


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array of the host."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Meet(_Message, frozen=True):
    """Where each process of the instance offers activations, by number; empty where none move."""

    addresses: tuple[str, ...]


class Admit(_Message, frozen=True):
    """See :meth:`~jdserve.runtime.part.Stages.admit`; the leaves of an Admission."""

    row: tuple[Tensor, ...]


class Run(_Message, frozen=True):
    """See :meth:`~jdserve.runtime.part.Stages.run`; whoever samples sends the result where the leader does not.

    Attributes:
        id: of the result.
        shape: of the program.
        inputs: StepInputs without ``allowed``.
        allowed: see there.
        scores: which log-probabilities the result needs.
    """

    id: int
    shape: StepShape
    inputs: tuple[Tensor, Tensor, Tensor]
    allowed: Tensor | None
    scores: Scores


class Gather(_Message, frozen=True):
    """See :meth:`~jdserve.runtime.part.Stages.gather`; keep the copy under ``id``."""

    id: int
    pages: Tensor


class Drop(_Message, frozen=True):
    """Nobody wants the copy ``id``."""

    id: int


class Offer(_Message, frozen=True):
    """Offer your parts of ``handle``, cut out of the copy ``id``.

    Offers of one copy follow each other directly: whatever else comes next ends the copy.
    """

    id: int
    handle: KVHandle
    lease_s: float


class Release(_Message, frozen=True):
    """The offer is over."""

    handle: KVHandle


class Pull(_Message, frozen=True):
    """Pull your parts of ``handle`` and answer to ``id``."""

    id: int
    handle: KVHandle
    timeout_s: float


class Abandon(_Message, frozen=True):
    """Nobody wants what was to be pulled for ``id``."""

    id: int


class Insert(_Message, frozen=True):
    """Insert what has landed for ``id``: see :meth:`~jdserve.runtime.part.Stages.insert`.

    Attributes:
        id: of the pull; 0 while warming up, when nothing was pulled.
        source: layout of what has landed.
        pages: to insert it in.
    """

    id: int
    source: KVLayout
    pages: Tensor


class Check(_Message, frozen=True):
    """Is your part intact? Answer to ``id``."""

    id: int


class Begin(_Message, frozen=True):
    """Everything is warm: what is compiled from now on is a fault."""


class End(_Message, frozen=True):
    """Finish what you were told, and end."""


class Beat(_Message, frozen=True):
    """Sign of life of process ``rank``, whose stages have run for ``busy_s``, summed over them."""

    rank: int
    busy_s: float


class Here(_Message, frozen=True):
    """Process ``rank`` has compiled its programs.

    Attributes:
        rank: number in the instance.
        activations: where it offers them; empty where none move.
        kv: where it offers KV; empty where it offers none.
    """

    rank: int
    activations: str
    kv: str


class Result(_Message, frozen=True):
    """What a step sampled, as asked for: tokens and finite, then log-probabilities."""

    id: int
    sampled: tuple[Tensor, Tensor]
    scores: tuple[Tensor, ...]
    prompt: tuple[Tensor, ...]


class Answer(_Message, frozen=True):
    """Answer of process ``rank`` to ``id``: what is wrong; empty where all is well."""

    id: int
    rank: int
    error: str = ""


class Failed(_Message, frozen=True):
    """The sender can do nothing any more, and why."""

    reason: str


ToFollower = Meet | Admit | Run | Gather | Drop | Offer | Release | Pull | Abandon | Insert | Check | Begin | End
ToLeader = Beat | Here | Result | Answer | Failed

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToFollower | ToLeader) -> bytes:
    """One frame."""
    return _encoder.encode(message)


to_follower = msgspec.msgpack.Decoder(ToFollower)
"""Decodes what reaches a follower; raises ``msgspec.ValidationError`` or ``msgspec.DecodeError``."""

to_leader = msgspec.msgpack.Decoder(ToLeader)
"""Decodes what reaches the leader."""


def pack(array: Any) -> Tensor:
    """A host array, or one of the device that is ready."""
    host = np.asarray(array)
    return Tensor(host.dtype.str, host.shape, host.tobytes())


def unpack(tensor: Tensor) -> np.ndarray:
    """The array, over the memory of the message: nobody else writes to it."""
    return np.frombuffer(tensor.data, np.dtype(tensor.dtype)).reshape(tensor.shape)


def pack_all(arrays: Any) -> tuple[Tensor, ...]:
    """The leaves of a structure of arrays."""
    return tuple(pack(leaf) for leaf in jax.tree.leaves(arrays))


def admission_of(message: Admit) -> Admission:
    """The row."""
    leaves = [unpack(leaf) for leaf in message.row]
    plain = len(Admission._fields) - 1
    return Admission._make([*leaves[:plain], SamplingRows._make(leaves[plain:])])


def result_of(id: int, outputs: StepOutputs, scores: Scores) -> Result:
    """What the leader needs of ``outputs``, which are ready."""
    sampled = outputs.sampled
    return Result(
        id,
        (pack(sampled.tokens), pack(sampled.finite)),
        pack_all(sampled.logprobs) if scores.sampled else (),
        pack_all(outputs.prompt) if scores.prompt else (),
    )


def outputs_of(result: Result) -> StepOutputs:
    """What a step gave; log-probabilities that were not asked for are empty."""
    tokens, finite = (unpack(one) for one in result.sampled)
    return StepOutputs(Sampled(tokens, finite, _top(result.scores)), _top(result.prompt))  # type: ignore[arg-type]


def _top(leaves: Iterable[Tensor]) -> TopLogprobs:
    return TopLogprobs(*([unpack(leaf) for leaf in leaves] or [np.zeros(0)] * len(TopLogprobs._fields)))
