"""Served with the interpreted kernels: the tokens are those of XLA."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import msgspec
import pytest
from tiny import write_tiny_checkpoint

from jdserve.core.errors import InvalidPlan
from jdserve.models.checkpoint import LoadedModel
from jdserve.models.load import resolve
from jdserve.runtime.front import settled
from jdserve.runtime.remote import ClusterOptions
from runtime.harness import decode, plan_of, prefill, prompt, request, serve

PAIR = plan_of(prefill(max_batch=2, tp=2, pages=8), decode(max_num_seqs=2, pages=8), longest=32)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """One layer: every layer is a kernel of its own to compile."""
    return resolve(write_tiny_checkpoint(tmp_path_factory.mktemp("shallow") / "tiny", layers=1))


@pytest.fixture
def quick() -> Iterator[None]:
    """Interpreted kernels take longer to compile than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
def test_interpreted_kernels_give_the_tokens_of_xla(shallow: LoadedModel, quick: None) -> None:
    """Five prompts at once, prefilled over two devices: packed chunks, cut prompts, decode of one and two sequences."""
    requests = [request(f"r{n}", prompt(n, n), max_tokens=8) for n in (1, 15, 16, 19, 24)]
    xla, kernels = (
        serve(shallow, msgspec.structs.replace(PAIR, attention=name), requests) for name in ("xla", "pallas_interpret")
    )
    assert [one.tokens for one in kernels] == [one.tokens for one in xla]
    assert all(len(one.tokens) == 8 for one in kernels)


def test_a_back_end_that_cannot_run_here_is_refused_before_the_start() -> None:
    plan = msgspec.structs.replace(PAIR, attention="pallas_triton")
    with pytest.raises(InvalidPlan, match=r"\$\.attention: pallas_triton runs on gpu, not on cpu"):
        settled(plan, ClusterOptions(secret="0123456789abcdef"))
    with pytest.raises(InvalidPlan, match=r"\$\.attention"):
        msgspec.structs.replace(plan, platform="cpu").check()
