"""Ways to lay a model on the devices of an instance, and one of them per phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jdserve.core.errors import InvalidPlan
from jdserve.core.instances import Role
from jdserve.sharding.rules import TENSOR_AXIS, ShardingRules

_WHOLE = ShardingRules(vocab=None, heads=None, kv_heads=None, mlp=None, experts=None)

PRESETS: Mapping[str, ShardingRules] = MappingProxyType(
    {
        "tensor": ShardingRules(),
        "sequence": ShardingRules(tokens=TENSOR_AXIS),
        "expert": ShardingRules(heads=None, kv_heads=None),
        "replicated": _WHOLE,
    }
)
"""Rules by name; each is a way to run, not only to look at.

- ``tensor``: Megatron-style tensor parallelism (Shoeybi et al., arXiv:1909.08053): two all-reduces per layer.
- ``sequence``: the same weights, and the rows of the residual stream split between them (Korthikanti et al.,
  arXiv:2205.05198): each all-reduce becomes a reduce-scatter and an all-gather, and norms are not repeated.
- ``expert``: experts, or the feed-forward where there are none, are split; attention and KV are whole on every device.
- ``replicated``: everything is whole on every device: no collectives, and all the memory.

Instances that exchange KV need it split by heads, which the first two do.
"""


@dataclass(frozen=True)
class PhaseRules:
    """The rules of instances by their role."""

    prefill: ShardingRules = ShardingRules()  # noqa: RUF009  frozen
    decode: ShardingRules = ShardingRules()  # noqa: RUF009
    colocated: ShardingRules = ShardingRules()  # noqa: RUF009

    def of(self, role: Role) -> ShardingRules:
        """Those of ``role``."""
        return getattr(self, role)


def phase_rules(rules: str | ShardingRules | PhaseRules) -> PhaseRules:
    """Rules of every phase.

    Args:
        rules: of each, or the same for all, or a name of :data:`PRESETS`, or such names by role as in
            ``prefill=sequence,decode=tensor``.

    Raises:
        InvalidPlan: a name is not known.
    """
    if isinstance(rules, PhaseRules):
        return rules
    if isinstance(rules, ShardingRules):
        return PhaseRules(rules, rules, rules)
    if "=" not in rules:
        return phase_rules(_preset(rules))
    chosen: dict[str, ShardingRules] = {}
    for part in rules.split(","):
        role, _, name = part.partition("=")
        if role not in ("prefill", "decode", "colocated"):
            raise InvalidPlan("$.rules", f"{role!r} is no role; prefill, decode and colocated are")
        chosen[role] = _preset(name)
    return PhaseRules(**chosen)


def _preset(name: str) -> ShardingRules:
    if name not in PRESETS:
        raise InvalidPlan("$.rules", f"{name!r} is not known; known: {', '.join(PRESETS)}")
    return PRESETS[name]
