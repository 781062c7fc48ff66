"""Names of the attention back ends, and which platform runs which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from jdserve.core.errors import InvalidPlan

Attention = Literal["auto", "xla", "pallas_triton", "pallas_interpret", "tpu"]

_DEFAULTS: Mapping[str, Attention] = {"cpu": "xla", "gpu": "pallas_triton", "tpu": "tpu"}

_PLATFORMS: Mapping[Attention, tuple[str, ...]] = {
    "xla": ("cpu", "gpu", "tpu"),
    "pallas_triton": ("gpu",),
    "pallas_interpret": ("cpu",),
    "tpu": ("tpu",),
}


def attention_for(platform: str, name: Attention = "auto") -> Attention:
    """The back end that ``name`` means on ``platform``.

    Raises:
        InvalidPlan: the platform is unknown, or cannot run it.
    """
    if platform not in _DEFAULTS:
        raise InvalidPlan("$.platform", f"no attention for {platform!r}; there is some for {', '.join(_DEFAULTS)}")
    chosen = _DEFAULTS[platform] if name == "auto" else name
    if platform not in _PLATFORMS[chosen]:
        able = [other for other, platforms in _PLATFORMS.items() if platform in platforms]
        raise InvalidPlan(
            "$.attention",
            f"{chosen} runs on {' and '.join(_PLATFORMS[chosen])}, not on {platform}; there: {', '.join(able)}",
        )
    return chosen
