"""Interventions against the float64 loop, and the pass without one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phase_jax.model import Heads, Intervention, Transformer
from tests.model import reference
from tests.model.tiny import draw_params, tiny_config

LENGTH = 21
VARIANTS = ["full_attn_4kv", "kvc_w8s6", "kvc_w8s4_dsv4kernel_1kv_rope16"]


def tokens_of(config, batch=1):
    return np.random.default_rng(1).integers(0, config.vocabulary, (batch, LENGTH))


def drawn_heads(config, batch=1, seed=2):
    """Some outputs of some heads at some positions."""
    rng = np.random.default_rng(seed)
    shape = (config.layers, batch, LENGTH, config.query_heads)
    return Heads(rng.random(shape) < 0.2, rng.normal(size=(*shape, config.head_dim)).astype(np.float32))


def drawn_gates(config, seed=3):
    """Weights of windows that sum to 1 over the tokens that exist."""
    rng, windows = np.random.default_rng(seed), config.windows
    width = config.head_dim if config.gate == "vector" else 1
    gates = rng.random((config.layers, 1, windows.count(LENGTH), windows.width, config.kv_heads, width))
    gates *= (windows.starts(LENGTH)[:, None] + np.arange(windows.width) >= 0)[..., None, None]
    return (gates / gates.sum(axis=3, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_intervention_equals_the_float64_loop(variant):
    config = tiny_config(variant)
    params, tokens = draw_params(config), tokens_of(config)
    heads = drawn_heads(config)
    key_gates = None if config.windows is None else drawn_gates(config, 3)
    value_gates = None if config.windows is None or config.tied_kv else drawn_gates(config, 4)
    also = np.random.default_rng(6).random((config.layers, 1, LENGTH)) < 0.4
    change = Intervention(heads, key_gates, value_gates, also if config.windows else None)
    run = jax.jit(Transformer(config).apply)
    got = run({"params": params}, tokens, change=change)[0]

    layers = range(config.layers)
    outputs = {i: {(t, n): heads.value[i, 0, t, n] for t, n in np.argwhere(heads.where[i, 0]).tolist()} for i in layers}
    given = {"compress_key": key_gates, "compress_value": value_gates}
    gates = {i: {name: gates[i, 0] for name, gates in given.items() if gates is not None} for i in layers}
    more = {i: np.flatnonzero(also[i, 0]).tolist() for i in layers} if config.windows else {}
    expected = reference.forward(config, jax.tree.map(np.float64, params), tokens[0], outputs, gates, more)
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())
    plain = run({"params": params}, tokens)[0]
    assert np.abs(got - plain).max() > 0.01 * np.abs(expected).max(), "the intervention changed nothing"


def test_a_stack_of_interventions_is_vmapped():
    config = tiny_config("kvc_w8s6")
    model, params, tokens = Transformer(config), {"params": draw_params(config)}, tokens_of(config, 2)
    each = [
        Intervention(drawn_heads(config, 2, seed), drawn_gates(config, seed), drawn_gates(config, 9 + seed))
        for seed in range(3)
    ]

    @jax.jit
    def run(change):
        return model.apply(params, tokens, change=change)

    together = jax.jit(jax.vmap(run))(jax.tree.map(lambda *leaves: np.stack(leaves), *each))
    for change, got in zip(each, together, strict=True):
        np.testing.assert_allclose(got, run(change), rtol=1e-5, atol=1e-5)


def test_replacing_nothing_changes_no_bit():
    config = tiny_config("kvc_w8s8_2kv")
    model, params, tokens = Transformer(config), {"params": draw_params(config)}, tokens_of(config, 2)
    nowhere = Heads(np.zeros((config.layers, 1, 1, 1), bool), np.ones((config.layers, 1, 1, 1, 1), np.float32))
    run = jax.jit(model.apply)
    np.testing.assert_array_equal(run(params, tokens, change=Intervention(nowhere)), run(params, tokens))


def test_what_layers_leave_can_be_put_back():
    config = tiny_config("kvc_w8s4_dsv4kernel_1kv_scalar_rope16", tied_kv=False)
    model, params, tokens = Transformer(config), {"params": draw_params(config)}, tokens_of(config, 2)
    logits, left = jax.jit(partial(model.apply, mutable="intermediates"))(params, tokens)
    attention = left["intermediates"]["layers"]["attention"]
    (heads,), (key,), (value,) = (
        attention["heads"],
        attention["compress_key"]["gates"],
        attention["compress_value"]["gates"],
    )
    np.testing.assert_allclose(key.sum(axis=3), 1, rtol=1e-5)
    assert (key[:, :, 0, :4] == 0).all() and (key[:, :, 1:] > 0).all(), "half of the first window is before the start"
    everywhere = Heads(jnp.ones((config.layers, 1, 1, 1), bool), heads)
    again = jax.jit(model.apply)(params, tokens, change=Intervention(everywhere))
    np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-5)
    again = jax.jit(model.apply)(params, tokens, change=Intervention(None, key, value))
    np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-5)
