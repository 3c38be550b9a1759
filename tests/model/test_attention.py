"""Blockwise attention against the dense form, values and gradients, and against its promise about memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.family import model_config
from phase_jax.geometry import ExactBranch, Windows
from phase_jax.model import Transformer
from phase_jax.model.attention import blockwise_attention, full_attention, joint_attention
from tests.model.tiny import IDS, draw_params, tiny_config

# Ids of the same model with another seed would only repeat it.
DISTINCT = [variant for variant in IDS if "_seed" not in variant]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def assert_same(one, other, *arrays):
    """Same values, and same gradients of a random projection of them."""
    weight = draw(*arrays[0].shape, seed=9)

    def values_and_gradients(form):
        out, back = jax.vjp(form, *arrays)
        return out, back(weight)

    (out, gradients), (out_too, gradients_too) = jax.jit(lambda: [values_and_gradients(f) for f in (one, other)])()
    np.testing.assert_allclose(out, out_too, **TOLERANCE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradients, gradients_too)


@pytest.mark.parametrize("exact", ["window", "tail", "none"])
@pytest.mark.parametrize(("length", "block"), [(23, 5), (3, 2)])
def test_blockwise_equals_dense_for_every_exact_branch(exact, length, block):
    branch = ExactBranch(Windows(8, 6, -2), exact, 9)
    count = branch.windows.count(length)
    q, k, v = draw(2, length, 4, 3), draw(2, length, 2, 3), draw(2, length, 2, 3, seed=1)
    entry_k, entry_v = draw(2, count, 2, 3, seed=2), draw(2, count, 2, 3, seed=3)

    def blockwise(q, entry_k, entry_v, k, v):
        near = tuple(jnp.pad(x, [(0, 0), (branch.reach - 1, 0), (0, 0), (0, 0)]) for x in (k, v))
        return blockwise_attention(q, (entry_k, entry_v), near, branch, 0, block)

    def dense(q, entry_k, entry_v, k, v):
        return joint_attention(q, entry_k, entry_v, k, v, branch)

    assert_same(blockwise, dense, q, entry_k, entry_v, k, v)


@pytest.mark.parametrize("block", [1, 7, 64])
def test_blockwise_equals_dense_in_full_attention(block):
    q, k, v = draw(2, 23, 4, 3), draw(2, 23, 2, 3), draw(2, 23, 2, 3, seed=1)
    branch = ExactBranch(None)
    assert_same(lambda q, k, v: blockwise_attention(q, (k, v), None, branch, 0, block), full_attention, q, k, v)


def test_scores_of_any_size_neither_overflow_nor_vanish():
    q, k, v = 1e4 * draw(1, 23, 2, 4), 1e2 * draw(1, 23, 1, 4), draw(1, 23, 1, 4, seed=1)
    out = blockwise_attention(q, (k, v), None, ExactBranch(None), 0, 4)
    np.testing.assert_allclose(out, full_attention(q, k, v), **TOLERANCE)


def both_forms(variant):
    """A tiny model's function of (params, tokens) -> logits under either form, and arguments for it."""
    config = tiny_config(variant, layers=1)

    def logits(params, tokens, block):
        return Transformer(dataclasses.replace(config, attention_block=block)).apply({"params": params}, tokens)

    return logits, draw_params(config), jnp.arange(2 * 21).reshape(2, 21) % config.vocabulary


@pytest.mark.parametrize("variant", DISTINCT)
def test_every_model_has_the_same_logits_blockwise(variant):
    logits, params, tokens = both_forms(variant)
    dense, blockwise = jax.jit(lambda params: [logits(params, tokens, block) for block in (None, 6)])(params)
    np.testing.assert_allclose(blockwise, dense, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["full_attn_1kv", "kvc_w8s6", "kvc_w8s4_dsv4kernel_1kv_rope16"])
def test_parameters_have_the_same_gradients_blockwise(variant):
    logits, params, tokens = both_forms(variant)

    def gradient(params, block):
        return jax.grad(lambda params: jnp.square(logits(params, tokens, block)).mean())(params)

    dense, blockwise = jax.jit(lambda params: [gradient(params, block) for block in (None, 6)])(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), blockwise, dense)


@pytest.mark.parametrize("variant", ["kvc_w8s8_1kv_baseline", "full_attn_1kv"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_grows_with_length_and_not_with_its_square(variant, backward):
    """What the compiler plans to hold, at two lengths; nothing is run."""
    config = dataclasses.replace(model_config(variant, "lab"), layers=1, attention_block=64)
    model = Transformer(config)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32), jnp.int32))

    def last_logits(params, tokens):
        return model.apply(params, tokens, last_only=True).sum()

    def planned(length):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        run = jax.jit(jax.grad(last_logits) if backward else last_logits)
        return run.lower(params, tokens).compile().memory_analysis().temp_size_in_bytes

    assert planned(16_384) < 2.2 * planned(8_192)


def test_a_block_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"model\.attention_block is 0"):
        tiny_config("kvc_w8s4", attention_block=0)
