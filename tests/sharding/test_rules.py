"""Logical axes on the mesh of one stage."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdserve.sharding.rules import TENSOR_AXIS, ShardingRules, instance_mesh


@pytest.fixture(scope="module")
def mesh():
    return instance_mesh(jax.devices()[:4])


def test_mesh_keeps_the_order_of_its_devices():
    devices = [jax.devices()[index] for index in (2, 0, 3)]
    mesh = instance_mesh(devices)
    assert mesh.axis_names == (TENSOR_AXIS,)
    assert list(mesh.devices.flat) == devices


@pytest.mark.parametrize(
    ("axes", "shape", "spec"),
    [
        (("vocab", "embed"), (32, 6), PartitionSpec("tp", None)),
        (("heads", "embed"), (8, 6), PartitionSpec("tp", None)),
        (("embed", "mlp"), (6, 12), PartitionSpec(None, "tp")),
        ((None, None, "kv_heads", None, None), (2, 5, 4, 16, 8), PartitionSpec(None, None, "tp", None, None)),
        (("embed",), (7,), PartitionSpec(None)),
        (("experts", "expert_mlp", "embed"), (8, 12, 6), PartitionSpec("tp", None, None)),
        (("router", "embed"), (8, 6), PartitionSpec(None, None)),
        (("head_dim",), (8,), PartitionSpec(None)),
        (("positions", "embed"), (8, 6), PartitionSpec(None, None)),
        (("embed", "word_embed"), (8, 6), PartitionSpec(None, None)),
        ((), (), PartitionSpec()),
    ],
)
def test_default_rules(mesh, axes, shape, spec):
    sharding = ShardingRules().sharding(mesh, axes, shape)
    assert sharding.mesh == mesh
    assert sharding.spec == spec


def test_each_device_holds_its_slice(mesh):
    array = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    placed = jax.device_put(array, ShardingRules().sharding(mesh, ("heads", "embed"), array.shape))
    held = {shard.device: np.asarray(shard.data) for shard in placed.addressable_shards}
    for rank, device in enumerate(mesh.devices.flat):
        assert np.array_equal(held[device], array[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize(("vocab", "axis"), [(4, "tp"), (5, None), (3, None), (32_000, "tp"), (50_257, None)])
def test_vocabulary_that_does_not_divide_is_replicated(mesh, vocab, axis):
    assert ShardingRules().sharding(mesh, ("vocab", "embed"), (vocab, 6)).spec == PartitionSpec(axis, None)


@pytest.mark.parametrize("axis", ["heads", "kv_heads", "mlp", "experts"])
def test_other_axes_must_divide(mesh, axis):
    with pytest.raises(ValueError, match=f"'{axis}' of size 6 does not divide by 4"):
        ShardingRules().sharding(mesh, (axis, "embed"), (6, 8))


def test_every_dimension_needs_a_name(mesh):
    with pytest.raises(ValueError, match="longer"):
        ShardingRules().sharding(mesh, ("heads",), (4, 4))


def test_rules_can_be_changed(mesh):
    rules = ShardingRules(mlp=None, embed=TENSOR_AXIS)
    assert rules.sharding(mesh, ("embed", "mlp"), (8, 7)).spec == PartitionSpec("tp", None)


def test_one_device_takes_any_size():
    mesh = instance_mesh(jax.devices()[:1])
    for axis in ("vocab", "heads", "kv_heads", "mlp"):
        assert ShardingRules().sharding(mesh, (axis, "embed"), (7, 5)).is_fully_replicated


def test_replicated_gives_all_to_every_device(mesh):
    array = np.arange(6, dtype=np.int32)
    placed = jax.device_put(array, ShardingRules().replicated(mesh))
    assert len(placed.addressable_shards) == 4
    assert all(np.array_equal(np.asarray(shard.data), array) for shard in placed.addressable_shards)
