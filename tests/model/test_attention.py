"""Models whose attention goes blockwise: the same numbers, and the promise about memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.family import model_config
from phase_jax.model import Transformer
from tests.model.tiny import DISTINCT, draw_params, tiny_config

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


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
