"""GGUF files, and the built-in model that comes as one."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import jinja2
import ml_dtypes
import numpy as np
import pytest
from test_checkpoints import read_spec
from test_llama import dense_attend
from tiny import CHAT_TEMPLATE, tiny_tokenizer, write_tiny_checkpoint
from tokenizers import Tokenizer

from jdserve.core.errors import CheckpointError
from jdserve.models import gguf_checkpoint
from jdserve.models.convert import Conversion, convert_here
from jdserve.models.hf_checkpoint import read_tensors
from jdserve.models.load import load_params, resolve
from jdserve.sharding.rules import ShardingRules, instance_mesh

FIXTURES = Path(__file__).parents[1] / "fixtures"

TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{TO_GGUF[inner]}.weight"
    return f"{TO_GGUF[stem]}.weight"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp wants them: the halves of each head interleaved."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def write_gguf(folder: Path, file: Path, *, architecture="llama", pre="smollm", extra=(), leave_out=()) -> Path:
    """The tiny checkpoint of ``folder`` as a GGUF file: matrices in Q8_0, which fits rows of 64 and 128."""
    spec, tensors = read_spec(folder), read_tensors(folder)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    tokenizer = json.loads(tiny_tokenizer(spec.vocab).to_str())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if id < 3 else 1 for id in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name in tensors.shapes:
        weight = tensors.read(name)
        if "q_proj" in name or "k_proj" in name:
            weight = permuted(weight, spec.heads if "q_proj" in name else spec.kv_heads)
        kind = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
        if name not in leave_out:
            writer.add_tensor(gguf_name(name), gguf.quantize(weight, kind), raw_dtype=kind)
    for name in extra:
        writer.add_tensor(name, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def folder(tmp_path):
    return write_tiny_checkpoint(tmp_path / "tiny")


def convert_gguf(file: Path) -> None:
    convert_here(Conversion(file, file.stem))


def place(axes, shape):
    return ShardingRules().sharding(instance_mesh(jax.devices()[:1]), axes, shape)


def test_a_gguf_file_is_the_checkpoint_it_was_made_from(folder, tmp_path):
    model = resolve(str(write_gguf(folder, tmp_path / "model.gguf")))
    assert model.spec == read_spec(folder)
    assert (model.name, model.dtype, model.chat_template) == ("model", "bfloat16", CHAT_TEMPLATE)
    assert (model.bos_token, model.eos_token) == ("<|im_start|>", "<|im_end|>")
    source = read_tensors(folder)
    structure, leaves = load_params(model, range(4), kv_heads=4, dtype="float32", place=place)
    assert {parameter.name for parameter in structure.parameters} == set(source.shapes)
    for parameter, leaf in zip(structure.parameters, leaves, strict=True):
        weight = source.read(parameter.name)
        if weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            weight = gguf.dequantize(gguf.quantize(weight, kind), kind)
        np.testing.assert_array_equal(np.asarray(leaf), weight.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_the_tokenizer_is_the_same(folder, tmp_path):
    model = resolve(str(write_gguf(folder, tmp_path / "model.gguf")))
    ours, theirs = Tokenizer.from_file(str(model.tokenizer_path)), Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ours.pre_tokenizer.pre_tokenize_str("in 2024") == theirs.pre_tokenizer.pre_tokenize_str("in 2024")
    for text in ("The year 2024.", " two  spaces\n\n", "서울 🎉", "<|im_start|>user\nHi<|im_end|>", "it's <|im_end|>x"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_unpermute_undoes_the_interleaving():
    weight = np.arange(24 * 2).reshape(24, 2)
    np.testing.assert_array_equal(gguf_checkpoint.unpermute(permuted(weight, 3), 3), weight)


def test_other_files_are_refused(folder, tmp_path, caplog):
    with pytest.raises(CheckpointError, match=r"architecture 'llama'.*'mamba'"):
        convert_gguf(write_gguf(folder, tmp_path / "a.gguf", architecture="mamba"))
    with pytest.raises(CheckpointError, match="pre-tokenizer 'tekken'"):
        convert_gguf(write_gguf(folder, tmp_path / "b.gguf", pre="tekken"))
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight$"):
        convert_gguf(write_gguf(folder, tmp_path / "d.gguf", leave_out=("model.norm.weight",)))
    convert_gguf(write_gguf(folder, tmp_path / "e.gguf", extra=("blk.0.surprise.weight",)))
    assert "blk.0.surprise.weight" in caplog.text


@pytest.mark.parametrize("keep", [0, 3, 40, 20_000, -100])
def test_a_truncated_file_is_refused(folder, tmp_path, keep):
    file = write_gguf(folder, tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.gguf is not a complete GGUF file"):
        convert_gguf(file)


# The built-in model itself.


@pytest.fixture(scope="module")
def smollm2():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XDG_CACHE_HOME", raising=False)  # the user's own: the file is large and checked by its hash
        return resolve("smollm2-135m-instruct")


def cases() -> list[dict]:
    return [
        case for file in ("expected.json", "smollm2_greedy.json") for case in json.loads((FIXTURES / file).read_text())
    ]


@pytest.mark.slow
def test_smollm2_tokenizer(smollm2):
    tokenizer = Tokenizer.from_file(str(smollm2.tokenizer_path))
    seen = 0
    for case in cases():
        text = case.get("prompt")
        if "chat" in case:
            messages = [{"role": "user", "content": case["chat"]}]
            template = jinja2.Environment().from_string(smollm2.chat_template)
            text = template.render(messages=messages, add_generation_prompt=True)
        if text is not None:
            assert tokenizer.encode(text, add_special_tokens=False).ids == case["prompt_ids"], text
            seen += 1
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]
    assert seen > 20


@pytest.mark.slow
def test_smollm2_logits(smollm2):
    structure, leaves = load_params(smollm2, range(30), kv_heads=3, dtype="float32", place=place)

    @jax.jit
    def last_logits(leaves, tokens):
        model = structure.merge(leaves)
        x, _ = model.layers(model.embed(tokens), jnp.arange(len(tokens)), dense_attend, ())
        return model.logits(x[-1:])[0]

    greedy = json.loads((FIXTURES / "smollm2_greedy.json").read_text())
    logits = np.load(FIXTURES / "smollm2_logits.npz")
    assert len(logits.files) >= 4
    for index in logits.files:
        case = greedy[int(index)]
        ours = np.asarray(last_logits(leaves, jnp.asarray(case["prompt_ids"], jnp.int32)))
        theirs = logits[index]
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max(), index
        assert int(ours.argmax()) == case["ids"][0]
