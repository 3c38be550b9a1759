"""The compressor against a loop in float64 that follows SPEC §2 word for word."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phase_jax.compressors import GATE_WIDTHS, branch_shapes, compress
from phase_jax.geometry import Windows

D, K, H, EPS = 6, 2, 4, 1e-6
GEOMETRIES = [(4, 4), (8, 4), (8, 6), (8, 8), (12, 12), (5, 3)]


jitted = jax.jit(compress, static_argnums=(2, 3))


def draw_params(rng, windows, sharing, gate, bias, post_norm):
    shapes = branch_shapes(windows, sharing, D, K, H, GATE_WIDTHS[gate](H), bias, post_norm)
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def slow_compress(params, hidden, windows, sharing):
    """entries [B, J, K, H], one window, head and offset at a time."""
    batch, length, _ = hidden.shape
    entries = np.zeros((batch, windows.count(length), K, H))
    which = {"offset": lambda i: i, "part": lambda i: i // windows.stride, "all": lambda i: 0, "payload": lambda i: i}
    gate_of = which[sharing]
    payload_of = which["all" if sharing == "payload" else sharing]
    for b, (j, start), head in itertools.product(range(batch), enumerate(windows.starts(length)), range(K)):
        logits, payloads = [], []
        for i in range(windows.width):
            if start + i < 0:
                continue
            h = hidden[b, start + i]
            payload = h @ params["payload"][payload_of(i)][:, head]
            if "norm" in params:
                payload = payload / np.sqrt(np.mean(payload**2) + EPS) * params["norm"]
            logit = np.zeros(1)
            if "gate" in params:
                logit = h @ params["gate"][gate_of(i)][:, head]
            if "bias" in params:
                logit = logit + params["bias"][i, head]
            logits.append(logit)
            payloads.append(payload)
        weights = np.exp(np.array(logits) - np.max(logits, axis=0))
        weights /= weights.sum(axis=0)
        entries[b, j, head] = (weights * np.array(payloads)).sum(axis=0)
    return entries


def assert_agrees(windows, length, sharing, gate, bias, post_norm, seed=0):
    rng = np.random.default_rng(seed)
    params = draw_params(rng, windows, sharing, gate, bias, post_norm)
    hidden = rng.normal(size=(2, length, D))
    got = jitted(jax.tree.map(jnp.float32, params), jnp.float32(hidden), windows, EPS)
    np.testing.assert_allclose(got, slow_compress(params, hidden, windows, sharing), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("sharing", ["offset", "part", "all"])
@pytest.mark.parametrize("gate", ["scalar", "vector", "uniform"])
def test_every_option_equals_the_loop(geometry, sharing, gate):
    width, stride = geometry
    for bias, post_norm, origin in itertools.product([True, False], [True, False], [0, stride - width]):
        assert_agrees(Windows(width, stride, origin), 2 * width + 3, sharing, gate, bias, post_norm)


@pytest.mark.parametrize("geometry", [(8, 6), (8, 8)], ids=str)
def test_one_payload_map_beside_a_gate_map_an_offset_equals_the_loop(geometry):
    assert_agrees(Windows(*geometry, -1), 27, "payload", "scalar", True, False)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_every_origin_equals_the_loop(geometry):
    width, stride = geometry
    for origin in range(-(width - 1), 1):
        assert_agrees(Windows(width, stride, origin), 2 * width + 1, "offset", "vector", True, False)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_every_length_equals_the_loop(geometry):
    width, stride = geometry
    for length in range(1, 3 * width + 1):
        assert_agrees(Windows(width, stride, stride - width), length, "offset", "scalar", True, False)


def test_offsets_before_the_first_token_weigh_exactly_nothing():
    windows = Windows(8, 4, -4)
    params = draw_params(np.random.default_rng(0), windows, "offset", "vector", True, False)
    params = jax.tree.map(jnp.float32, params)
    hidden = jnp.ones((1, 8, D))

    def first_entry(payload):
        return compress({**params, "payload": payload}, hidden, windows, EPS)[0, 0].sum()

    gradient = jax.grad(first_entry)(params["payload"])
    assert (gradient[:4] == 0).all() and (gradient[4:] != 0).all()


def test_no_window_no_entry():
    windows = Windows(8, 8)
    params = jax.tree.map(jnp.float32, draw_params(np.random.default_rng(0), windows, "offset", "scalar", True, False))
    assert compress(params, jnp.ones((3, 7, D)), windows, EPS).shape == (3, 0, K, H)
