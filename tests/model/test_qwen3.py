"""Qwen3 folders: against transformers' own Qwen3, and round trips in every form."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from phase_jax.data.tokens import TokenBatch
from phase_jax.errors import UserError
from phase_jax.model import ModelConfig, Transformer, qwen3
from phase_jax.training.step import token_loss
from tests.model.tiny import draw_params, tiny_config

BASE = ModelConfig(
    layers=2, width=24, query_heads=8, kv_heads=2, head_dim=8, mlp_width=40, vocabulary=60, rope_theta=1e4
)


def make(**changes):
    cfg = dataclasses.replace(BASE, **changes)
    return cfg, jax.tree.map(np.asarray, draw_params(cfg))


def assert_equal_trees(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def theirs(cfg, params, folder):
    """transformers' model, read by transformers from the folder we write."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    qwen3.write(folder, cfg, params, "float32", shard_bytes=9000)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return torch, model


@pytest.mark.slow
@pytest.mark.parametrize(("kv_heads", "tied"), [(1, True), (2, False), (4, True), (8, False)])
def test_logits_and_gradients_equal_transformers(kv_heads, tied, tmp_path):
    cfg, params = make(kv_heads=kv_heads, tied_embeddings=tied)
    torch, peer = theirs(cfg, params, tmp_path / "qwen3")
    rng = np.random.default_rng(kv_heads)
    model, length = Transformer(cfg), 600 if kv_heads == 2 else 33
    tokens = rng.integers(0, cfg.vocabulary, (2, length))
    apply = jax.jit(model.apply)
    for t in (1, length):
        with torch.no_grad():
            wanted = peer(torch.tensor(tokens[:, :t])).logits.numpy()
        np.testing.assert_allclose(apply({"params": params}, tokens[:, :t]), wanted, atol=1e-4, rtol=1e-4)

    @jax.jit
    @jax.grad
    def gradient(params):
        logits = jax.nn.log_softmax(model.apply({"params": params}, tokens[:, :-1]))
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()

    peer(torch.tensor(tokens), labels=torch.tensor(tokens)).loss.backward()
    ours = dict(qwen3._theirs(cfg, gradient(params), np.float32))
    peers = {name: weight.grad.numpy() for name, weight in peer.named_parameters()}
    assert ours.keys() == peers.keys()
    for name, wanted in peers.items():
        np.testing.assert_allclose(ours[name], wanted, atol=1e-5 * max(1, np.abs(wanted).max()), err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_writes_is_read(tied, tmp_path):
    cfg, params = make(tied_embeddings=tied)
    torch, peer = theirs(cfg, params, tmp_path / "qwen3")
    for dtype, shard_size in (("float32", "9KB"), ("bfloat16", "1GB")):
        peer.to(getattr(torch, dtype)).save_pretrained(tmp_path / dtype, max_shard_size=shard_size)
        assert (len(list((tmp_path / dtype).glob("*.safetensors"))) > 1) == (dtype == "float32")
        rounded = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)).astype(np.float32), params)  # noqa: B023
        assert_equal_trees(rounded, qwen3.read(tmp_path / dtype)[1])
        assert qwen3.read_config(tmp_path / dtype) == cfg


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 9000])
def test_f32_folders_come_back_bit_for_bit_however_they_are_split(tied, shard_bytes, tmp_path):
    cfg, params = make(tied_embeddings=tied)
    qwen3.write(tmp_path / "qwen3", cfg, params, "float32", shard_bytes)
    files = sorted(file.name for file in (tmp_path / "qwen3").glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard_bytes == 1 << 30)
    assert all(file.stat().st_size < 16_000 for file in (tmp_path / "qwen3").iterdir()) or len(files) == 1
    assert_equal_trees(params, qwen3.read(tmp_path / "qwen3")[1])
    assert qwen3.read_config(tmp_path / "qwen3") == cfg


def test_bf16_folders_hold_rounded_numbers(tmp_path):
    cfg, params = make()
    qwen3.write(tmp_path / "qwen3", cfg, params)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), params)
    assert_equal_trees(rounded, qwen3.read(tmp_path / "qwen3")[1])


def test_untied_logits_use_the_unembedding_in_evaluation_and_training():
    cfg, params = make(tied_embeddings=False)
    tokens = np.arange(14).reshape(2, 7)
    model = Transformer(cfg)
    tied = Transformer(dataclasses.replace(cfg, tied_embeddings=True))
    swapped = {name: value for name, value in params.items() if name != "unembedding"}
    untied_logits = model.apply({"params": params}, tokens)
    assert not np.allclose(untied_logits, tied.apply({"params": swapped}, tokens))
    ones = {**params, "unembedding": params["embedding"]}
    np.testing.assert_array_equal(model.apply({"params": ones}, tokens), tied.apply({"params": swapped}, tokens))
    logits = jax.nn.log_softmax(untied_logits[:, :-1])
    wanted = -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()
    batch = TokenBatch(tokens[:, :-1], tokens[:, 1:], jnp.ones((2, 6)))
    np.testing.assert_allclose(token_loss(model, params, batch).cross_entropy, wanted, rtol=1e-5)


def test_what_is_no_qwen3_is_one_clear_line(tmp_path):
    cfg, params = make()
    folder = tmp_path / "qwen3"

    def refused(message, action=lambda: qwen3.read(folder)):
        with pytest.raises(UserError, match=message) as caught:
            action()
        assert "\n" not in str(caught.value)

    refused("config.json is missing", lambda: qwen3.read(tmp_path))
    qwen3.write(folder, cfg, params, "float32")
    refused("exists", lambda: qwen3.write(folder, cfg, params))
    before = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())

    def altered(tensors=None, **settings):
        save_file(before if tensors is None else tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | settings))

    name = "model.layers.1.self_attn.k_proj.weight"
    altered({key: value for key, value in before.items() if key != name})
    refused(f"lacks the tensor {name}")
    altered(before | {name: before[name][:, :-1]})
    refused(r"k_proj.weight has shape \(16, 23\)")
    altered(before | {"model.layers.2.mlp.up_proj.weight": before["model.layers.1.mlp.up_proj.weight"]})
    refused("1 tensors are none of this model's, such as model.layers.2")
    altered(vocab_size=61)
    refused(r"embed_tokens.weight has shape \(60, 24\)")
    altered(model_type="llama")
    refused("model_type is 'llama'")
    altered(use_sliding_window=True)
    refused("use_sliding_window is True")
    altered(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    refused("the type of RoPE is 'yarn'")
    altered()
    (folder / "model.safetensors").write_bytes(b"not what it says")
    refused("cannot be read as safetensors")
    (folder / "model.safetensors").unlink()
    refused("holds no checkpoint")
    refused(
        "compressed attention \\(W8/S8\\)",
        lambda: qwen3.write(tmp_path / "new", tiny_config("kvc_w8s8_1kv_baseline"), {}),
    )
    refused("rotated 4", lambda: qwen3.write(tmp_path / "new", dataclasses.replace(cfg, rope_dims=4), params))
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_up_leaves_no_folder(tmp_path, monkeypatch):
    cfg, params = make()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(qwen3, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        qwen3.write(tmp_path / "qwen3", cfg, params)
    assert list(tmp_path.iterdir()) == []
