"""Sharded safetensors straight onto devices: each its part, each byte read once, one file open at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_checkpoints import SECOND, assert_weights, edit_json, edit_shard, place_on, source_weights
from tiny import write_tiny_checkpoint

from jdserve.core.errors import CheckpointError
from jdserve.models import streaming
from jdserve.models.load import load_params, resolve
from jdserve.models.streaming import stream
from jdserve.sharding.rules import ShardingRules, instance_mesh

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    return write_tiny_checkpoint(tmp_path / "tiny", shards=3)


class Watched:
    """A shard of which every reading is counted, element by element."""

    def __init__(self, shard, readings):
        self.shard, self.readings = shard, readings

    def get_slice(self, name):
        return WatchedSlice(self.shard.get_slice(name), self.readings.setdefault(name, []))


class WatchedSlice:
    def __init__(self, tensor, readings):
        self.tensor, self.readings = tensor, readings

    def __getitem__(self, index):
        part = self.tensor[index]
        self.readings.append(part.size)
        return part


@pytest.fixture
def watch(monkeypatch):
    """Sizes of the readings of each tensor, and names of files in the order of opening; one is open at a time."""
    readings, opened, open_now = {}, [], []
    real = streaming.open_shard

    @contextmanager
    def open_shard(file):
        assert open_now == []
        opened.append(file.name)
        open_now.append(file)
        with real(file) as shard:
            yield Watched(shard, readings)
        open_now.clear()

    monkeypatch.setattr(streaming, "open_shard", open_shard)
    return readings, opened


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_device_reads_its_part_and_each_byte_is_read_once(folder, watch, devices, dtype):
    readings, opened = watch
    model = resolve(folder)
    expected, place = source_weights(folder), place_on(devices)
    structure, leaves = load_params(model, range(4), kv_heads=4, dtype=dtype, place=place)
    assert opened == sorted(file.name for file in folder.glob("*.safetensors"))
    for parameter, leaf in zip(structure.parameters, leaves, strict=True):
        value = expected[parameter.name]
        assert leaf.sharding == place(parameter.axes, parameter.shape)
        np.testing.assert_array_equal(np.asarray(leaf), value.astype(dtype))
        assert sum(readings[parameter.name]) == value.size, parameter.name
        split = parameter.name.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight"))
        assert len(readings[parameter.name]) == (devices if split else 1), parameter.name
    assert set(readings) == set(expected)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_large_part_is_read_in_pieces(folder, watch, monkeypatch, devices):
    readings, _ = watch
    monkeypatch.setattr(streaming, "_PIECE", 3000)
    model = resolve(folder)
    expected = source_weights(folder)
    structure, leaves = load_params(model, range(4), kv_heads=4, dtype="float32", place=place_on(devices))
    for parameter, leaf in zip(structure.parameters, leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), expected[parameter.name])
        assert sum(readings[parameter.name]) == leaf.size
        assert max(readings[parameter.name]) <= 750


def test_a_stage_reads_its_layers_and_opens_the_files_they_are_in(folder, watch):
    readings, opened = watch
    model = resolve(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    outer = {"model.norm.weight", "lm_head.weight"}
    wanted = outer | {name for name in index if name.startswith("model.layers.3.")}
    _, leaves = load_params(model, range(3, 4), kv_heads=4, dtype="float32", place=place_on(2))
    assert len(leaves) == len(wanted)
    assert set(readings) == wanted
    assert opened == sorted({index[name] for name in wanted})
    assert len(opened) < 3


def test_a_folder_is_served_as_it_is(folder, cache):
    model = resolve(str(folder))
    assert (model.name, model.folder, model.weights) == ("tiny", folder, None)
    assert not (cache / "checkpoints").exists()
    assert_weights(model, folder)


def test_progress(folder):
    told = []
    model = resolve(folder)
    load_params(model, range(4), kv_heads=4, dtype="float32", place=place_on(1), progress=lambda *s: told.append(s))
    assert told[0] == ("load", 0.0)
    assert told[-1] == ("load", 1.0)
    assert [share for _, share in told] == sorted(share for _, share in told)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_stack_is_read_from_several_files(tmp_path, watch, devices):
    readings, _ = watch
    experts = np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float32)
    for file, numbers in (("a.safetensors", (0, 3)), ("b.safetensors", (1, 2))):
        save_file({f"experts.{number}": experts[number] for number in numbers}, tmp_path / file)
    files = {f"experts.{number}": "a.safetensors" if number in (0, 3) else "b.safetensors" for number in range(4)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    mesh = instance_mesh(jax.devices()[:devices])
    for axes in ((None, "mlp", None), ("mlp", None, None)):
        readings.clear()
        wanted = jax.ShapeDtypeStruct(
            experts.shape, np.dtype("float32"), sharding=ShardingRules().sharding(mesh, axes, experts.shape)
        )
        parts = tuple(f"experts.{number}" for number in range(4))
        array = stream(tmp_path, {"experts": wanted}, {"experts": parts})["experts"]
        assert array.sharding == wanted.sharding
        np.testing.assert_array_equal(np.asarray(array), experts)
        assert sum(map(sum, readings.values())) == experts.size


# CKPT-01 and CKPT-02, where nothing is converted.


def test_absent_and_truncated_shards_are_named(folder):
    shards = sorted(folder.glob("*.safetensors"))
    model = resolve(folder)
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"truncated.*{shards[1].name}"):
        resolve(folder)
    with pytest.raises(CheckpointError, match=shards[1].name):
        load_params(model, range(4), kv_heads=4, dtype="float32", place=place_on(1))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks files.*{shards[1].name}"):
        resolve(folder)
    with pytest.raises(CheckpointError, match=shards[1].name):
        load_params(model, range(4), kv_heads=4, dtype="float32", place=place_on(1))


def test_missing_and_misshapen_tensors_are_listed(tmp_path, caplog):
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    model = resolve(folder)
    edit_json(folder / "config.json", num_hidden_layers=5, num_key_value_heads=2)
    with pytest.raises(CheckpointError) as caught:
        resolve(folder)
    assert "model.layers.4.mlp.down_proj.weight" in str(caught.value)
    assert "model.layers.0.self_attn.k_proj.weight is [32, 64], expected [16, 64]" in str(caught.value)
    edit_shard(folder / SECOND, lambda weights: weights.update({"model.norm.weight": np.ones(65, np.float32)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[65\], expected \[64\]"):
        load_params(model, range(4), kv_heads=4, dtype="float32", place=place_on(1))
    assert caplog.text == ""


def test_unknown_tensors_warn(tmp_path, caplog):
    folder = write_tiny_checkpoint(tmp_path / "tiny", shards=1)
    edit_shard(folder / "model.safetensors", lambda weights: weights.update({"surprise": np.zeros(2, np.float32)}))
    resolve(folder)
    assert "does not use: surprise" in caplog.text


def test_a_folder_without_a_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        resolve(folder)


# Memory.

PEAK = """
import json, sys
from functools import partial
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 4)
from jdserve.models.load import load_params, resolve
from jdserve.sharding.rules import ShardingRules, instance_mesh

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

place = partial(ShardingRules().sharding, instance_mesh(jax.devices()))
load = partial(load_params, kv_heads=4, dtype="float32", place=place)
small = resolve(sys.argv[1])
load(small, range(small.spec.layers))  # what a first load takes once
model = resolve(sys.argv[2])
before = status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
_, leaves = load(model, range(model.spec.layers))
held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
print(json.dumps({"peak": status("VmHWM:") - before, "held": held}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_what_devices_hold_and_one_shard(tmp_path, cache):
    small = write_tiny_checkpoint(tmp_path / "small")
    folder = write_tiny_checkpoint(tmp_path / "large", layers=8, hidden=512, ffn=4096, heads=8, head_dim=64, shards=8)
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        # glibc keeps some freed megabytes for itself, which count beside shards as small as these.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 17),
    }
    command = [sys.executable, "-c", PEAK, str(small), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    weights = sum(tensor.nbytes for tensor in source_weights(folder).values())
    assert found["held"] >= weights > 6 * largest
    assert found["peak"] <= found["held"] + 1.3 * largest, (found, largest)
