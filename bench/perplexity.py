"""What the dtypes cost: perplexity of a text in float32, in bfloat16, and with int8 weights.

    python bench/perplexity.py [--quick] [--check] [--model MODEL] [--text FILE]

The mean over the first 1,024 tokens (256 where it must be quick) of a text, of exp of the negative log-likelihood of
each token after the first, given all before. The default is the built-in model on the text of the GPL, version 3, for
which ``transformers`` gives 19.29 in float32 over the same weights. int8 must stay within 1 % of float32, and so must
bfloat16; both are of the model as it is served, with the weights that a start would load.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conclusion import HOLDS, conclude, save, show_checks
from machine import describe
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from jdserve.core.plan import WeightFormat
from jdserve.core.spec import DType
from jdserve.models.load import load_params, resolve
from jdserve.models.packaged import SMOLLM2
from jdserve.sharding.rules import ShardingRules, instance_mesh

RESULTS = Path(__file__).parent / "results" / "perplexity.json"
GPL = Path("/usr/share/common-licenses/GPL-3")
"""Where Debian and its kin have it."""

REFERENCE = 19.29
"""Of the built-in model on 1,024 tokens of it, by transformers in float32 over weights rounded to bfloat16."""
WITHIN = 0.01
TOKENS, QUICK = 1024, 256
ROWS = 128
"""Tokens whose logits are computed at a time."""

CASES: tuple[tuple[WeightFormat | None, DType], ...] = (
    (None, "float32"),
    (None, "bfloat16"),
    ("int8", "float32"),
    ("int8", "bfloat16"),
)


@dataclass(frozen=True)
class Found:
    """One way to store and compute.

    Attributes:
        weights, dtype: as of a plan.
        perplexity: of the text.
        bytes: of the weights on the device.
        seconds: of the run, after compilation.
    """

    weights: WeightFormat | None
    dtype: DType
    perplexity: float
    bytes: int
    seconds: float

    @property
    def name(self) -> str:
        """For tables and messages."""
        return f"{self.weights or self.dtype} weights, {self.dtype} activations"


def attend(_: int, q: jax.Array, k: jax.Array, v: jax.Array, kv: Any, window: int | None = None) -> tuple[Any, Any]:
    """Causal attention of a whole text to itself."""
    behind = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=behind), kv


def measure(model: str, weights: WeightFormat | None, dtype: DType, text: str, count: int) -> Found:
    """Perplexity of the first ``count`` tokens of a text."""
    loaded = resolve(model, weights=weights)
    tokenizer = Tokenizer.from_file(str(loaded.tokenizer_path))
    ids = tokenizer.encode(text).ids[:count]
    if len(ids) < count:
        raise SystemExit(f"the text has {len(ids)} tokens, {count} are wanted")
    place = partial(ShardingRules().sharding, instance_mesh(jax.devices()[:1]))
    spec = loaded.spec
    structure, leaves = load_params(loaded, range(spec.layers), kv_heads=spec.kv_heads, dtype=dtype, place=place)

    @jax.jit
    def loss(leaves: Any, tokens: jax.Array) -> jax.Array:
        module = structure.merge(leaves)
        x, _ = module.layers(module.embed(tokens), jnp.arange(count), attend, ())
        following = jnp.append(tokens[1:], 0)

        def block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            rows, wanted = part
            chances = jax.nn.log_softmax(module.logits(rows), axis=-1)
            return -jnp.take_along_axis(chances, wanted[:, None], axis=-1)[:, 0]

        blocks = (x.reshape(-1, ROWS, x.shape[-1]), following.reshape(-1, ROWS))
        return jax.lax.map(block, blocks).reshape(-1)[:-1].mean()

    tokens = jnp.asarray(ids, jnp.int32)
    loss(leaves, tokens).block_until_ready()
    started = time.perf_counter()
    value = float(loss(leaves, tokens))
    took = time.perf_counter() - started
    return Found(weights, dtype, float(np.exp(value)), sum(leaf.nbytes for leaf in leaves), took)


def checks(found: Sequence[Found], model: str, count: int) -> dict[str, str]:
    """What must hold."""
    base, *others = found
    said = {}
    if model == SMOLLM2.name and count == TOKENS:
        off = base.perplexity - REFERENCE
        said["transformers"] = HOLDS if abs(off) < 0.005 else f"{base.perplexity:.3f}, transformers gives {REFERENCE}"
    for one in others:
        off = one.perplexity / base.perplexity - 1
        said[one.name] = HOLDS if abs(off) < WITHIN else f"{off:+.2%} from float32, allowed is {WITHIN:.0%}"
    return said


def show(found: Sequence[Found], model: str, console: Console) -> None:
    """Print the table."""
    table = Table(title=f"perplexity of {model}")
    for column in ("weights", "activations", "perplexity", "from float32", "MB on the device", "s"):
        table.add_column(column, justify="right")
    for one in found:
        off = f"{one.perplexity / found[0].perplexity - 1:+.2%}"
        cells = (one.weights or one.dtype, one.dtype, f"{one.perplexity:.3f}", off, f"{one.bytes / 1e6:.1f}")
        table.add_row(*cells, f"{one.seconds:.1f}")
    console.print(table)


def main() -> int:
    """Run the bench; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} tokens")
    parser.add_argument("--check", action="store_true", help="exit 1 naming what does not hold")
    parser.add_argument("--model", default=SMOLLM2.name, help="as of the server (default: %(default)s)")
    parser.add_argument("--text", type=Path, default=GPL, help="default: %(default)s")
    args = parser.parse_args()
    if not args.text.is_file():
        parser.error(f"{args.text} is not there: give --text")
    console = Console(stderr=True)
    count = QUICK if args.quick else TOKENS
    text = args.text.read_text(encoding="utf-8")
    found = [measure(args.model, weights, dtype, text, count) for weights, dtype in CASES]
    show(found, args.model, console)
    report = {
        "machine": describe(),
        "jax": jax.__version__,
        "model": args.model,
        "text": args.text.name,
        "tokens": count,
        "cases": [asdict(one) for one in found],
        "checks": checks(found, args.model, count),
    }
    show_checks(report["checks"], console)
    file = RESULTS if args.model == SMOLLM2.name else RESULTS.with_stem(f"perplexity_{Path(args.model).name}")
    save(report, file, args.quick)
    return conclude(report, args.check)


if __name__ == "__main__":
    sys.exit(main())
