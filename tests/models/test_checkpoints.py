"""Checkpoints: what is refused and how, conversion that never leaves half a folder, restoring onto a mesh."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import CHAT_TEMPLATE, write_tiny_checkpoint
from tokenizers import Tokenizer

from jdserve.core.errors import CheckpointError, InvalidPlan
from jdserve.core.spec import ModelSpec
from jdserve.models import convert as converting
from jdserve.models.checkpoint import LoadedModel, groups, open_converted, source_key
from jdserve.models.convert import Conversion, convert, convert_here
from jdserve.models.hf_checkpoint import read_config, read_tensors, read_vocabulary
from jdserve.models.load import load_params, resolve
from jdserve.sharding.rules import ShardingRules, instance_mesh

ROOT = Path(__file__).parents[2]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
    return write_tiny_checkpoint(tmp_path / "tiny")


def job(folder: Path, **options) -> Conversion:
    return Conversion(folder, folder.name, **options)


def read_spec(folder: Path) -> ModelSpec:
    return ModelSpec.from_config(read_config(folder))


def made(folder: Path, **options) -> LoadedModel:
    """The converted folder, made in this process, which is quicker."""
    convert_here(job(folder, **options))
    return open_converted(job(folder, **options).folder(), options.get("plugin"))


def edit_json(file: Path, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_shard(file: Path, change):
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


def nothing_converted(cache: Path) -> bool:
    return not [path for path in (cache / "checkpoints").glob("*") if path.is_dir()]


# CKPT-01: files that are not there, or not whole.


def test_absent_shard_is_named(folder, cache):
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"lacks files.*{SECOND}") as caught:
        convert_here(job(folder))
    assert FIRST not in str(caught.value)
    assert nothing_converted(cache)


def test_absent_shard_fails_the_start(folder, cache):
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match=SECOND):
        resolve(str(folder))
    assert nothing_converted(cache)


def test_empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidPlan, match=r"config\.json"):
        convert_here(job(tmp_path / "empty"))


def test_no_weights_names_what_is_there(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors.*pytorch_model\.bin"):
        read_tensors(folder)


@pytest.mark.parametrize("keep", [-1, 4, 0])
def test_truncated_shard_is_named(folder, keep):
    content = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=f"truncated.*{FIRST}"):
        read_tensors(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_bad_index(folder, content):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        read_tensors(folder)


def test_tensor_of_the_index_not_in_its_file(folder):
    edit_shard(folder / FIRST, lambda weights: weights.pop("model.embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        read_tensors(folder)


def test_absent_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        convert_here(job(folder))


@pytest.mark.parametrize("name", ["smollm3", "/nowhere/model", "tokenizer.json"])
def test_no_such_model(name):
    with pytest.raises(CheckpointError, match=f"{name}.*smollm2-135m-instruct"):
        resolve(name)


# CKPT-02: tensors that are not those of the configuration.


def test_missing_layer_is_listed(folder, cache):
    edit_json(folder / "config.json", num_hidden_layers=5)
    with pytest.raises(CheckpointError) as caught:
        convert_here(job(folder))
    for inner in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"):
        assert f"model.layers.4.{inner}.weight" in str(caught.value)
    assert "model.layers.3" not in str(caught.value)
    assert nothing_converted(cache)


def test_missing_and_misshapen_are_listed_together(folder):
    def change(weights):
        del weights["model.norm.weight"]
        weights["lm_head.weight"] = weights["lm_head.weight"][:-1]

    edit_shard(folder / SECOND, change)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_json(folder / "config.json", num_key_value_heads=2)
    with pytest.raises(CheckpointError) as caught:
        convert_here(job(folder))
    assert "missing: model.norm.weight;" in str(caught.value)
    assert "lm_head.weight is [1099, 64], expected [1100, 64]" in str(caught.value)
    for layer in range(4):
        assert f"model.layers.{layer}.self_attn.k_proj.weight is [32, 64], expected [16, 64]" in str(caught.value)


def test_a_misshapen_tensor_alone_is_refused(folder):
    edit_shard(folder / SECOND, lambda weights: weights.update({"model.norm.weight": np.ones((1, 64), np.float32)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[1, 64\], expected \[64\]"):
        convert_here(job(folder))


def test_unknown_tensors_warn(tmp_path, caplog):
    folder = write_tiny_checkpoint(tmp_path / "tiny", shards=1, tied=True)

    def change(weights):
        weights["model.layers.4.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]

    edit_shard(folder / "model.safetensors", change)
    convert(job(folder))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].endswith("does not use: model.layers.4.mlp.up_proj.weight")


def test_other_dtypes_are_refused(folder):
    edit_shard(folder / SECOND, lambda weights: weights.update({"lm_head.weight": np.zeros((1100, 64), np.int8)}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \(I8\)"):
        read_tensors(folder)


# What is read besides weights.


def test_vocabulary_in_its_several_spellings(folder):
    edit_json(
        folder / "tokenizer_config.json",
        bos_token={"content": "<s>", "special": True},
        chat_template=[{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}],
    )
    vocabulary = read_vocabulary(folder)
    assert (vocabulary.bos_token, vocabulary.eos_token, vocabulary.chat_template) == ("<s>", "<|im_end|>", "D")
    (folder / "chat_template.jinja").write_text("J")
    assert read_vocabulary(folder).chat_template == "J"


def test_end_tokens_of_the_generation_config_count(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert read_spec(folder).eos == (2, 0)


# Conversion.


def test_conversion_is_done_once_and_complete(folder, cache, monkeypatch):
    told = []
    model = convert(job(folder), lambda stage, fraction: told.append((stage, fraction)))
    assert model.name == "tiny"
    assert model.spec == read_spec(folder)
    assert (model.dtype, model.bos_token, model.eos_token) == ("float32", "<|im_start|>", "<|im_end|>")
    assert model.chat_template == CHAT_TEMPLATE
    tokenizer = Tokenizer.from_file(str(model.tokenizer_path))
    assert tokenizer.encode("<|im_end|>12").ids[0] == 2
    assert told[0] == ("convert", 0.0)
    assert told[-1] == ("convert", 1.0)
    assert [fraction for _, fraction in told] == sorted(fraction for _, fraction in told)
    told.clear()
    monkeypatch.setattr(sys, "executable", "/nowhere")  # a second start converts nothing
    assert convert(job(folder), lambda *step: told.append(step)) == model
    assert told == []
    assert resolve(str(model.folder)) == model
    assert [path.name for path in (cache / "checkpoints").iterdir() if path.is_dir()] == [model.folder.name]


def test_a_changed_source_is_converted_anew(folder):
    before = source_key(folder)
    assert source_key(folder) == before
    edit_json(folder / "config.json", rope_theta=5e5)
    changed = source_key(folder)
    assert changed != before
    os.utime(folder / FIRST, ns=(0, 0))
    assert source_key(folder) != changed


def test_a_folder_of_another_format_is_refused(folder):
    model = made(folder)
    edit_json(model.folder / "jdserve.json", format=0)
    with pytest.raises(CheckpointError, match="format 0"):
        resolve(str(model.folder))


def run_python(code: str, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache.parent), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


KILLED = """
import os, signal, sys
from pathlib import Path
from jdserve.models import convert as converting, checkpoint
from jdserve.models.convert import Conversion, convert_here
import orbax.checkpoint as ocp

def end(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def end_in_group(*arguments):
    # Orbax writes on threads of its own; this is the last step before a group gets its name.
    from orbax.checkpoint._src.path import atomicity
    atomicity.AtomicRenameTemporaryPath.finalize = end
    checkpoint.save_group(*arguments)

moment, folder = sys.argv[1], Path(sys.argv[2])
done = []
if moment == "within a group":
    real = converting.save_group
    converting.save_group = lambda *all: real(*all) if len(done) < 3 else end_in_group(*all)
if moment == "before the description":
    converting.write_description = end
if moment == "before the rename":
    os.rename = lambda source, target: end() if str(source).endswith(".partial") else os.replace(source, target)
progress = lambda _, share: (done.append(share), end() if moment == "at half" and share > 0.5 else None)
convert_here(Conversion(folder, "tiny"), progress)
"""


@pytest.mark.parametrize(
    "moment",
    [
        "within a group",
        "before the rename",
        pytest.param("at half", marks=pytest.mark.long),
        pytest.param("before the description", marks=pytest.mark.long),
    ],
)
def test_a_killed_conversion_is_not_trusted_and_gone_on_with(moment, folder, cache, monkeypatch):
    child = run_python(KILLED, cache, moment, str(folder))
    out, _ = child.communicate()
    assert child.returncode == -signal.SIGKILL, out
    target = job(folder).folder()
    partial = target.with_name(target.name + ".partial")
    assert [path for path in (cache / "checkpoints").iterdir() if path.is_dir()] == [partial]
    weights = partial / "weights"
    halves = [path.name for path in weights.iterdir() if "tmp" in path.name]
    assert bool(halves) == (moment == "within a group")
    whole = {path.name for path in weights.iterdir()} - set(halves)
    assert whole
    saved = []
    real = converting.save_group
    monkeypatch.setattr(converting, "save_group", lambda *all: (saved.append(all[1]), real(*all)))
    convert_here(job(folder))
    assert [path for path in (cache / "checkpoints").iterdir() if path.is_dir()] == [target]
    assert set(saved) == set(groups(tensor_names(folder))) - whole
    assert_weights(open_converted(target), folder)


def test_what_another_source_left_is_not_gone_on_with(folder, tmp_path):
    target = tmp_path / "out"
    partial = target.with_name("out.partial")
    (partial / "weights" / "layer.0").mkdir(parents=True)
    (partial / "source").write_text("another")
    assert_weights(made(folder, target=target), folder)


def test_a_target_that_is_something_else_is_refused(folder, tmp_path):
    other = write_tiny_checkpoint(tmp_path / "other", seed=1)
    target = tmp_path / "out"
    convert_here(job(folder, target=target))
    convert_here(job(folder, target=target))
    for wrong in (job(other, target=target), job(folder, target=other), job(folder, weights="int8", target=target)):
        with pytest.raises(CheckpointError, match="is there already"):
            convert_here(wrong)


def test_two_conversions_at_once(folder, cache):
    code = (
        "import sys; from pathlib import Path; from jdserve.models.convert import *; "
        "print(convert(Conversion(Path(sys.argv[1]), 'tiny')).folder)"
    )
    children = [run_python(code, cache, str(folder)) for _ in range(2)]
    outs = [child.communicate()[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0], outs
    assert outs[0] == outs[1]
    assert_weights(convert(job(folder)), folder)


def test_a_failing_conversion_leaves_nothing(folder, cache, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(converting, "save_group", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        convert_here(job(folder))
    assert nothing_converted(cache)


def test_a_crash_of_the_conversion_is_told(folder, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(CheckpointError, match="died with status 1"):
        convert(job(folder))


# Restoring.


def place_on(devices: int):
    return partial(ShardingRules().sharding, instance_mesh(jax.devices()[:devices]))


def tensor_names(folder: Path) -> list[str]:
    return list(read_tensors(folder).shapes)


def source_weights(folder: Path) -> dict[str, np.ndarray]:
    tensors = read_tensors(folder)
    return {name: tensors.read(name) for name in tensors.shapes}


def assert_weights(model, folder):
    expected = source_weights(folder)
    structure, leaves = load_params(model, range(4), kv_heads=4, dtype="float32", place=place_on(1))
    assert {parameter.name for parameter in structure.parameters} == set(expected)
    for parameter, leaf in zip(structure.parameters, leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), expected[parameter.name])


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("source") / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("converted")))
        return folder, made(folder)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_restored_in_parts_and_cast(converted, devices, dtype):
    folder, model = converted
    expected, place = source_weights(folder), place_on(devices)
    structure, leaves = load_params(model, range(4), kv_heads=4, dtype=dtype, place=place)
    for parameter, leaf in zip(structure.parameters, leaves, strict=True):
        assert leaf.dtype == jnp.dtype(dtype)
        assert leaf.sharding == place(parameter.axes, parameter.shape)
        np.testing.assert_array_equal(np.asarray(leaf), expected[parameter.name].astype(dtype))
    split = leaves[[parameter.name for parameter in structure.parameters].index("model.layers.0.mlp.up_proj.weight")]
    assert {shard.data.shape for shard in split.addressable_shards} == {(128 // devices, 64)}


def test_a_stage_restores_its_layers(converted):
    folder, model = converted
    expected = source_weights(folder)
    structure, leaves = load_params(model, range(1, 3), kv_heads=4, dtype="float32", place=place_on(1))
    assert len(leaves) == 2 * 9
    for parameter, leaf in zip(structure.parameters, leaves, strict=True):
        assert parameter.name.split(".")[2] in "12"
        np.testing.assert_array_equal(np.asarray(leaf), expected[parameter.name])


# The rows of the second case do not divide by the devices before they are repeated.
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 8), (1, 2)])
@pytest.mark.parametrize("streamed", [False, True])
def test_kv_heads_are_repeated_one_by_one(tmp_path, kv_heads, head_dim, streamed):
    folder = write_tiny_checkpoint(tmp_path / "tiny", kv_heads=kv_heads, head_dim=head_dim)
    model = resolve(str(folder)) if streamed else made(folder)
    expected, place = source_weights(folder), place_on(4)
    structure, leaves = load_params(model, range(4), kv_heads=4, dtype="float32", place=place)
    repeated = 0
    for parameter, leaf in zip(structure.parameters, leaves, strict=True):
        assert leaf.sharding == place(parameter.axes, parameter.shape)
        value = expected[parameter.name]
        if parameter.axes[0] == "kv_heads":
            value = np.repeat(value.reshape(kv_heads, head_dim, 64), 4 // kv_heads, axis=0).reshape(-1, 64)
            repeated += 1
        np.testing.assert_array_equal(np.asarray(leaf), value)
    assert repeated == 8


def test_bfloat16_is_stored_as_it_is(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "tiny", dtype="bfloat16", tied=True)
    model = made(folder)
    assert model.dtype == "bfloat16"
    expected = source_weights(folder)
    structure, leaves = load_params(model, range(4), kv_heads=4, dtype="bfloat16", place=place_on(2))
    for parameter, leaf in zip(structure.parameters, leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), expected[parameter.name])


def copy_of(converted, tmp_path):
    shutil.copytree(converted[1].folder, tmp_path / "copy")
    return resolve(str(tmp_path / "copy"))


def test_a_lost_group_is_named(converted, tmp_path):
    model = copy_of(converted, tmp_path)
    shutil.rmtree(model.folder / "weights" / "layer.2")
    with pytest.raises(CheckpointError, match=r"lacks weights: layer\.2"):
        load_params(model, range(4), kv_heads=4, dtype="float32", place=place_on(1))


DAMAGED = """
import sys
from pathlib import Path
from jax.sharding import SingleDeviceSharding
import jax
from jdserve.core.errors import CheckpointError
from jdserve.models.load import load_params, resolve
place = lambda axes, shape: SingleDeviceSharding(jax.devices()[0])
try:
    load_params(resolve(sys.argv[1]), range(4), kv_heads=4, dtype="float32", place=place)
except CheckpointError as error:
    Path(sys.argv[2]).write_text(str(error))
"""


def test_a_damaged_group_is_named(converted, tmp_path, cache):
    # In a process of its own: reads that were under way when the first one failed end after Orbax has closed its event
    # loop, and their complaints would land in whatever test runs next.
    model = copy_of(converted, tmp_path)
    for file in (model.folder / "weights" / "layer.2").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[:-100])
    said = tmp_path / "said"  # a file, because those complaints are printed too
    child = run_python(DAMAGED, cache, str(model.folder), str(said))
    out, _ = child.communicate()
    assert said.read_text().startswith("cannot restore layer.2 of "), out


def test_progress_of_a_restore(converted):
    told = []
    load_params(
        converted[1], range(4), kv_heads=4, dtype="float32", place=place_on(1), progress=lambda *s: told.append(s)
    )
    assert told[0] == ("load", 0.0)
    assert told[-1] == ("load", 1.0)


def test_resolving_starts_no_back_end(folder, cache):
    code = (
        "import sys; from jdserve.models.load import resolve; resolve(sys.argv[1])\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    child = run_python(code, cache, str(folder))
    out, _ = child.communicate()
    assert child.returncode == 0, out
