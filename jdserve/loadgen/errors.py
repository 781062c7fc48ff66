"""The one error of the load generator."""

from __future__ import annotations

from jdserve.core.errors import JdserveError


class BenchError(JdserveError):
    """A run that cannot be made as asked; the message names the flag or field, the bound and the value."""
