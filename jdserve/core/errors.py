"""Errors that cross package borders.

Each one names what is wrong, where, and the bound that was broken, so that an operator or a client can act on the
message alone. Nothing in here imports anything.
"""

from __future__ import annotations


class JdserveError(Exception):
    """Base of every error that jdserve raises on purpose."""


class InvalidRequest(JdserveError):
    """A request that can never be served as sent.

    Attributes:
        param: name of the offending request field, as the client spells it, or None.
        code: a short machine-readable reason in the style of OpenAI's error codes.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(JdserveError):
    """The request was fine, but the service takes no work right now (draining, not ready, no live instance)."""


class Busy(Overloaded):
    """The request was fine and there is no room for it now, because of other requests.

    Attributes:
        retry_after_s: when another try may succeed.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(JdserveError):
    """The request was not answered within the time that it gave."""


class RequestFailed(JdserveError):
    """The request was accepted and then failed inside the service; the message says where."""


class InvalidPlan(JdserveError, ValueError):
    """A plan, profile or model configuration that is refused.

    A ValueError too, so that msgspec adds the place to one that is raised inside a larger document.

    Attributes:
        path: JSON path of the offending value, for example ``$.instances[0].tp``.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class InvalidWorkload(JdserveError, ValueError):
    """A workload, a trace or a rate that is refused; the message names the field or file, the bound and the value."""


class CheckpointError(JdserveError):
    """A checkpoint that cannot be loaded as the model it claims to be; the message lists the tensors or files."""


class OutOfPages(JdserveError):
    """A reservation asked for more pages than the pool has free."""


class IllegalTransition(JdserveError):
    """A sequence was moved between two states that the table of transitions does not connect."""


class TransferError(JdserveError):
    """A KV transfer that did not land: unknown handle, mismatched layout, dead peer, or deadline passed."""
