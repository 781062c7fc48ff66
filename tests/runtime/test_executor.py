"""What the executor leaves on its device before the first request."""

from __future__ import annotations

from typing import Any

import numpy as np

from jdserve.models.checkpoint import LoadedModel
from jdserve.runtime.launch import jax_executors
from jdserve.runtime.progress import Progress
from runtime.harness import decode, plan_of, prefill


def test_padding_rows_ask_for_nothing(model: LoadedModel) -> None:
    """A dummy slot that sampled would have every padded batch draw noise, or sort, for all of its rows."""
    plan = plan_of(prefill(), decode(max_num_seqs=2))
    executor: Any = jax_executors(plan, model, Progress())(plan.instances[1])
    executor.warm_up(lambda share: None)
    dummy = {name: np.asarray(rows)[-1] for name, rows in executor._stages.stages[0]._fixed.sampling._asdict().items()}
    assert dummy["temperature"] == 0
    assert (dummy["top_k"], dummy["top_p"], dummy["min_p"]) == (0, 1, 0)
    assert (dummy["presence"], dummy["frequency"], dummy["repetition"]) == (0, 0, 1)
    assert not dummy["logprobs"]
    assert (dummy["bias_ids"] == model.spec.vocab).all()
    assert not np.asarray(executor._stages.stages[0]._live.tables)[-1].any()
