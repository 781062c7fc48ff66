"""The LLaMA architecture (LLaMA 2 and 3, SmolLM2), and Mistral, which differs in its window alone.

Pre-norm transformer with RMSNorm, rotary positions, grouped-query attention and a SwiGLU feed-forward (Touvron et al.,
arXiv:2302.13971 and 2307.09288).
"""

from __future__ import annotations

from jdserve.models.decoder import Decoder


class Llama(Decoder):
    """LLaMA; the frame as it is."""
