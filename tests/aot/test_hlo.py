"""Reading HLO, against programs that XLA compiled for CPU and lines as other compilers write them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jdserve.aot import hlo
from jdserve.aot.ptxas import kernels
from jdserve.sharding.rules import TENSOR_AXIS, instance_mesh


@pytest.fixture(scope="module")
def mesh():
    return instance_mesh(jax.devices()[:4])


def shape_of(mesh, shape, *axes):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def test_collectives_by_kind_size_part_and_place(mesh):
    whole = NamedSharding(mesh, PartitionSpec())

    def program(x, w):
        with jax.named_scope("layers"):
            x = lax.with_sharding_constraint(x @ w, whole)  # contracts over the split axis
        return lax.fori_loop(0, x[0, 0].astype(int), lambda _, y: lax.with_sharding_constraint((y @ w.T) @ w, whole), x)

    given = shape_of(mesh, (8, 64), None, "tp"), shape_of(mesh, (64, 32), "tp", None)
    text = jax.jit(program, out_shardings=whole).lower(*given).compile().as_text()
    found = hlo.collectives(hlo.parse(text), TENSOR_AXIS, 4)
    assert {(one.kind, one.devices, one.where) for one in found} == {
        ("all-reduce", 4, "always"),
        ("all-reduce", 4, "loop"),
    }
    once = next(one for one in found if one.where == "always")
    assert (once.part, once.bytes, once.shape, once.count, once.axis) == ("layers", 8 * 32 * 4, "f32[8,32]", 1, "tp")


def test_gathers_count_what_they_give(mesh):
    gather = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, PartitionSpec()))
    text = gather.lower(shape_of(mesh, (16, 32), "tp", None)).compile().as_text()
    (one,) = hlo.collectives(hlo.parse(text), TENSOR_AXIS, 4)
    assert (one.kind, one.bytes, one.shape) == ("all-gather", 16 * 32 * 4, "f32[4,32]")


def test_what_is_donated_is_aliased_and_what_is_not_is_copied(mesh):
    pool = shape_of(mesh, (2, 65, 64, 64))  # 2.1 MB

    def update(pool, x):
        return pool.at[1, 3].set(x), x.sum()

    texts = [
        jax.jit(update, donate_argnums=donated).lower(pool, shape_of(mesh, (64, 64))).compile().as_text()
        for donated in ((0,), ())
    ]
    assert [hlo.aliased_outputs(text) for text in texts] == [{0}, frozenset()]
    none, (copy,) = (hlo.copies(hlo.parse(text), 65, 65 * 64 * 64 * 4) for text in texts)
    assert none == ()
    assert (copy.shape, copy.pool, copy.where) == ("f32[2,65,64,64]", True, "always")
    (other,) = hlo.copies(hlo.parse(texts[1]), 66, 1)
    assert not other.pool


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}, x", 3),
        ("replica_groups=[2,4]<=[8], x", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", 2),
        ("replica_groups=mesh['tp'=8] {'tp'}, x", 8),
        ("replica_groups=mesh['tp'=8] {'tp':(1)2}, x", 2),
        ("source_target_pairs={{4,0},{5,1}}", 8),
    ],
)
def test_groups_as_every_compiler_writes_them(groups, size):
    assert hlo.group_size(groups, 8) == size


MODULE = """\
HloModule step, input_output_alias={ {0}: (2, {}, may-alias), {1}: (3, {}, may-alias) }, entry_computation_layout={()}

%split (p: bf16[64,64]) -> bf16[64,512] {
  %p = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %g.1 = bf16[64,512]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8]
}

%moved (q: f32[1024,512]) -> f32[512,1024] {
  %q = f32[1024,512]{1,0} parameter(0)
  %inner = f32[1024,512]{0,1} copy(%q)
  ROOT %t = f32[512,1024]{1,0} transpose(%inner), dimensions={1,0}
}

ENTRY %main (a: bf16[64,64], b: f32[1024,512]) -> (f32[512,1024], /*index=1*/f32[8]) {
  %a = bf16[64,64]{1,0} parameter(0)
  %b = f32[1024,512]{1,0} parameter(1)
  %c.1 = bf16[64,512]{1,0} fusion(%a), kind=kCustom, calls=%split
  %c.2 = bf16[64,512]{1,0} fusion(%a), kind=kCustom, calls=%split.clone
  %near = (f32[1024,512]{1,0:T(8,128)S(1)}, f32[1024,512]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%b)
  %m = f32[512,1024]{1,0} fusion(%b), kind=kLoop, calls=%moved
  %s = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%x), channel_id=4, metadata={op_name="jit(step)/sample/add"}
  ROOT %r = (f32[512,1024]{1,0}, f32[8]{0}) tuple(%m, %d)
}

%split.clone (p: bf16[64,64]) -> bf16[64,512] {
  %p.1 = bf16[64,64]{1,0} parameter(0)
  ROOT %g.2 = bf16[64,512]{1,0} all-gather(%p.1), channel_id=3, replica_groups=[1,8]<=[8]
}
"""


def test_pieces_of_one_channel_count_once_and_prefetches_are_no_copies():
    parsed = hlo.parse(MODULE)
    found = {one.kind: (one.count, one.bytes, one.part) for one in hlo.collectives(parsed, "tp", 8)}
    assert found == {"all-gather": (1, 64 * 512 * 2, ""), "all-reduce": (1, 0, "sample")}
    assert [(copy.shape, copy.count) for copy in hlo.copies(parsed, 9, 1)] == [("f32[512,1024]", 1)]
    assert hlo.aliased_outputs(MODULE) == {0, 1}


def test_kernels_as_ptxas_and_the_launches_tell_them():
    told = """\
ptxas info    : Compiling entry function 'softmax' for 'sm_90a'
ptxas info    : Function properties for softmax
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 528 bytes smem
ptxas info    : Compiling entry function 'wide' for 'sm_90a'
    96 bytes stack frame, 96 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""
    launch = "kCustomKernel [prev=001 (1)  | next=003 (1) ] wide grid: [9, 1, 1] threads: [128, 2, 1]"
    launches = f"002: {launch}  shared_memory: 73728 bytes"
    assert [(k.name, k.registers, k.spill_bytes, k.shared_bytes, k.threads) for k in kernels(told, launches)] == [
        ("softmax", 40, 0, 528, None),
        ("wide", 255, 128, 73728, 256),
    ]
