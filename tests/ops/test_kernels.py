"""The kernels, interpreted, against float64: NaN wherever nothing may be read, garbage past every block table.

In float32 they are as exact as float32 allows; in 16 bits they are no worse than the XLA functions. The suite is tested
itself, by kernels with a planted fault, each of which must fail it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdserve.ops import attention, flash, tpu_decode, triton_decode, triton_prefill
from jdserve.ops.attention import KVPool
from jdserve.ops.backends import attention_ops
from ops.poison import LAYER, expected_decode, expected_prefill, packed, poisoned_cache, rounded

LONG = 2 * triton_decode.SPLIT_TOKENS + 77
QUICK = {"xla_backend_optimization_level": 0}  # interpretation takes longer to compile than to run


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        return "-".join(str(part) for part in vars(self).values() if part is not None)


def tolerance(case, expected, values, reference):
    """The largest error that a kernel may have: see the module."""
    if case.dtype == "float32":
        return 5e-6 * max(np.abs(part).max(initial=0) for part in values)
    ulp = float(jnp.finfo(case.dtype).eps) * np.abs(expected).max()
    return 1.5 * np.abs(reference - expected).max() + ulp


def wide(array):
    return np.asarray(array.astype(jnp.float32)).astype(np.float64)


def garbage(tables):
    """Block tables with page ids past the end that are no pages."""
    ids = np.resize(np.array([2**31 - 1, -1, 10**6, -(2**31)], np.int32), tables.shape)
    return np.where(tables == 0, ids, tables)


def interpreted(function, case, **options):
    """A kernel of some module, compiled."""
    given = {"window": case.window, "softcap": case.softcap, "interpret": True, **options}
    return jax.jit(functools.partial(function, layer=LAYER, **given), compiler_options=QUICK)


def decode_error(case, contexts=None, splits=None, kernels=triton_decode):
    """Error of the decode kernel, as a multiple of what it may be."""
    size = case.page_size
    contexts = contexts or [0, 1, size - 1, size, size + 1, LONG, 0]
    rng = np.random.default_rng(1)
    cache = poisoned_cache(rng, contexts, case.kv_heads, size, case.dtype, head_dim=case.head_dim)
    q = rounded(rng, (len(contexts), case.heads, case.head_dim), case.dtype)
    context = np.array(contexts, np.int32)
    kernel = interpreted(kernels.decode_attention, case, splits=splits)
    actual = kernel(q, cache.pool, tables=garbage(cache.tables), context=context)
    assert actual.dtype == jnp.dtype(case.dtype)
    expected = expected_decode(q, cache, case.window, case.softcap)
    reference = attention.decode_attention(jnp.asarray(q), cache.pool, LAYER, cache.tables, context, case.window)
    limit = tolerance(case, expected, [values for _, values in cache.live], wide(reference))
    return np.abs(wide(actual) - expected).max() / limit


def prefill_error(case, prefixes=None, lengths=None, kernels=triton_prefill):
    """Error of the prefill kernel, as a multiple of what it may be."""
    size = case.page_size
    prefixes = prefixes or [0, 1, size - 1, size + 1, 150, 0, 20]
    lengths = lengths or [5, 1, 70, size, 3, 0, 9]
    padding = 3
    rng = np.random.default_rng(2)
    cache = poisoned_cache(rng, prefixes, case.kv_heads, size, case.dtype, head_dim=case.head_dim)
    segments = packed(lengths, padding)
    shapes = ((len(segments), heads, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads))
    q, k, v = (rounded(rng, shape, case.dtype).copy() for shape in shapes)
    q[-padding:] = k[-padding:] = v[-padding:] = np.nan
    prefix = np.array(prefixes, np.int32)
    kernel = interpreted(kernels.prefill_attention, case)
    actual = kernel(q, k, v, cache.pool, segments=segments, tables=garbage(cache.tables), prefix=prefix)
    assert actual.dtype == jnp.dtype(case.dtype)
    expected = expected_prefill(q, k, v, cache, lengths, case.window, case.softcap)
    rows = slice(0, len(segments) - padding)
    clean = (jnp.nan_to_num(jnp.asarray(array)) for array in (q, k, v))
    given = (*clean, cache.pool, LAYER, segments, cache.tables, prefix, case.window)
    reference = jax.jit(attention.prefill_attention, static_argnums=(4, 8))(*given)
    values = [*(part for _, part in cache.live), np.abs(v[rows].astype(np.float64))]
    limit = tolerance(case, expected[rows], values, wide(reference)[rows])
    return np.abs(wide(actual) - expected).max() / limit


CASES = [
    Case(8, 2, 64, 16, "bfloat16"),
    Case(7, 1, 80, 32, "float32", softcap=3.0),
    Case(4, 2, 96, 16, "float32", window=100),
]
FURTHER = [
    Case(16, 1, 128, 64, "float16"),
    Case(2, 2, 256, 128, "bfloat16", window=17),
    Case(40, 2, 64, 16, "float32", window=1),
    Case(3, 1, 128, 16, "bfloat16", window=300),
    Case(6, 3, 96, 32, "float16", window=65),
]
cases = pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in FURTHER)], ids=str
)


@cases
def test_decode(case):
    assert decode_error(case) <= 1


@cases
def test_prefill(case):
    assert prefill_error(case) <= 1


WINDOW = Case(4, 2, 16, 16, "float32", window=70)
ALL = Case(4, 2, 16, 16, "float32")


def small_decode(case, kernels=triton_decode):
    """Two splits, several blocks, ragged tails."""
    return decode_error(case, [triton_decode.SPLIT_TOKENS + 70, 37], splits=2, kernels=kernels)


def small_prefill(case, kernels=triton_prefill):
    """Chunks that begin inside a block of rows, behind prefixes shorter and longer than the window."""
    return prefill_error(case, [0, 90, 17], [20, 33, 5], kernels=kernels)


@pytest.mark.parametrize("small", [small_decode, small_prefill])
@pytest.mark.parametrize("case", [WINDOW, ALL], ids=str)
def test_what_the_mutants_are_given(small, case):
    assert small(case) <= 1


MUTANTS = {
    "off by one at the end": ("flash", "tokens < high", "tokens <= high", small_decode, ALL),
    "unread tail": ("flash", "jnp.maximum(high - low, 0) + (tile.keys - 1)", "high - low", small_decode, ALL),
    "dead values not zeroed": ("flash", "_wide(alive, columns) & inside", "inside", small_decode, ALL),
    "earlier blocks do not decay": ("flash", "self.weighted * decay[:, None]", "self.weighted", small_decode, ALL),
    "partials merged unweighted": ("triton_decode", "partial * weights[..., None]", "partial", small_decode, ALL),
    "a row does not see itself": ("triton_prefill", "<= place[:, None]", "< place[:, None]", small_prefill, ALL),
}
FURTHER_MUTANTS = {
    "another layer": ("flash", "at = (tile.layer,", "at = (0,", small_decode, ALL),
    "splits ignore the window": ("triton_decode", "low = begin + split", "low = split", small_decode, WINDOW),
    "a window past the start": (
        "triton_decode",
        "jnp.maximum(context - tile.window, 0)",
        "context - tile.window",
        small_decode,
        WINDOW,
    ),
    "heads of the first group": ("triton_decode", "head * tile.group + member", "member", small_decode, ALL),
    "window off by one": ("triton_prefill", "< tile.window", "<= tile.window", small_prefill, WINDOW),
    "prefix read too late": (
        "triton_prefill",
        "before - tile.window + 1",
        "before - tile.window + 2",
        small_prefill,
        WINDOW,
    ),
    "last chunk of a block lost": (
        "triton_prefill",
        "segments[stop - 1] + 1",
        "segments[stop - 1]",
        small_prefill,
        ALL,
    ),
    "one place too many of the prefix": (
        "triton_prefill",
        "last > first, before, 0",
        "last > first, before + 1, 0",
        small_prefill,
        ALL,
    ),
    "places counted from the chunk": (
        "triton_prefill",
        "tokens - begin + before, alive",
        "tokens - begin, alive",
        small_prefill,
        WINDOW,
    ),
}
mutants = pytest.mark.parametrize(
    ("module", "right", "wrong", "small", "case"),
    [
        *(pytest.param(*mutant, id=name) for name, mutant in MUTANTS.items()),
        *(pytest.param(*mutant, id=name, marks=pytest.mark.long) for name, mutant in FURTHER_MUTANTS.items()),
    ],
)


@mutants
def test_a_mutant_is_caught(module, right, wrong, small, case, monkeypatch):
    """The kernels with one piece of their source replaced."""
    made = {}
    for name, original in (("flash", flash), ("triton_decode", triton_decode), ("triton_prefill", triton_prefill)):
        source = inspect.getsource(original)
        if name == module:
            assert source.count(right) == 1 or right.startswith("_wide"), f"{right!r} is not in {name}"
            source = source.replace(right, wrong)
        made[name] = types.ModuleType(original.__name__)
        monkeypatch.setitem(sys.modules, original.__name__, made[name])  # for those that import it
        exec(compile(source, original.__file__, "exec"), vars(made[name]))
    error = small(case, made["triton_decode" if small is small_decode else "triton_prefill"])
    assert not error <= 1  # nor is NaN


def test_kernels_refuse_heads_that_do_not_fit():
    with pytest.raises(ValueError, match="head_dim of at most 256, got 512"):
        decode_error(Case(2, 1, 512, 16, "float32"), [3])


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_sharded_kernels_equal_those_of_one_device(kv_heads):
    """Over two devices, a share of the heads each; four stored KV heads may be two, repeated."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tp",))
    sharded, alone = attention_ops("cpu", "pallas_interpret", mesh, "tp"), attention_ops("cpu", "pallas_interpret")
    rng = np.random.default_rng(3)
    contexts = [20, 0, 33]
    cache = poisoned_cache(rng, contexts, kv_heads, 16, "float32")
    segments = packed([4, 0, 3], 1)
    q, k, v = (rounded(rng, (8, heads, 8), "float32") for heads in (8, kv_heads, kv_heads))
    context = np.array(contexts, np.int32)

    def both(ops, q, k, v, pool):
        decoded = ops.decode(q[:3], pool, LAYER, cache.tables, context, None)
        return decoded, ops.prefill(q, k, v, pool, LAYER, segments, cache.tables, context, None)

    heads, pages = NamedSharding(mesh, P(None, "tp")), NamedSharding(mesh, P(None, None, "tp"))
    split = jax.jit(
        functools.partial(both, sharded),
        in_shardings=(heads, heads, heads, KVPool(pages, pages)),
        out_shardings=heads,
        compiler_options=QUICK,
    )
    compiled = split.lower(q, k, v, cache.pool).compile()
    assert "all-gather" not in compiled.as_text()
    whole = jax.jit(functools.partial(both, alone), compiler_options=QUICK)(q, k, v, cache.pool)
    for one, other in zip(
        compiled(*(jax.device_put(x, heads) for x in (q, k, v)), jax.device_put(cache.pool, pages)), whole, strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


TPU_CASES = [
    Case(6, 2, 64, 64, "bfloat16", window=70),
    pytest.param(Case(8, 1, 128, 128, "float32"), marks=pytest.mark.long),
    pytest.param(Case(3, 3, 80, 16, "float32"), marks=pytest.mark.long),
]


@pytest.mark.parametrize("case", TPU_CASES, ids=str)
def test_decode_on_tpu(case):
    """On a pool whose last axis is padded, in two blocks of pages."""

    def padded(q, pool, **given):
        missing = [(0, 0)] * 4 + [(0, -case.head_dim % tpu_decode.LANES)]
        pool = KVPool(*(jnp.pad(part, missing) for part in pool))
        at = (LAYER, given["tables"], given["context"], case.window)
        return tpu_decode.decode_attention(q, pool, *at, interpret=True)

    size = case.page_size
    contexts = [0, 1, size - 1, size, size + 1, tpu_decode.BLOCK_TOKENS + size + 3, 0]
    assert decode_error(case, contexts, kernels=types.SimpleNamespace(decode_attention=padded)) <= 1
