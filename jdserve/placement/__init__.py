"""Where instances go: from a model, machines, a workload and an SLO to ``plan.json``. No jax.

:func:`search` is the way in.
"""

from jdserve.placement.result import Affinity, Entry, Nearest, Option, SearchResult
from jdserve.placement.search import search

__all__ = ["Affinity", "Entry", "Nearest", "Option", "SearchResult", "search"]
