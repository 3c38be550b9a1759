"""The plain forms of windowed gating, and the Pallas forms interpreted, against a loop in float64; and that these lower
for their chips."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import request
from pallas_kernels.traffic import total_bytes, traffic
from pallas_kernels.windowed_gating import by_offset, reference, windowed_gating
from phase_jax.geometry import Windows


def slow_gating(payload, logits, bias, windows, out_bar):
    """(entries, gradients of payload, logits and bias) in float64, one window, head and sequence at a time."""
    payload, logits, bias, out_bar = (np.asarray(a, np.float64) for a in (payload, logits, bias, out_bar))
    batch, length, streams, kv_heads, _ = payload.shape
    out = np.zeros(out_bar.shape)
    bars = tuple(np.zeros(a.shape) for a in (payload, logits, bias))
    for b, (j, start), k in itertools.product(range(batch), enumerate(windows.starts(length)), range(kv_heads)):
        at = [
            ((b, start + i, min(i // windows.stride, streams - 1), k), (i, k))
            for i in range(windows.width)
            if start + i >= 0
        ]
        scores = np.array([logits[token] + bias[offset] for token, offset in at])
        weights = np.exp(scores - scores.max(axis=0))
        weights /= weights.sum(axis=0)
        out[b, j, k] = sum(w * payload[token] for w, (token, _) in zip(weights, at, strict=True))
        for w, (token, offset) in zip(weights, at, strict=True):
            bars[0][token] += w * out_bar[b, j, k]
            through = w * out_bar[b, j, k] * (payload[token] - out[b, j, k])
            if logits.shape[-1] == 1:
                through = through.sum(keepdims=True)
            bars[1][token] += through
            bars[2][offset] += through
    return out, *bars


def draw(windows, length, streams, gate, dtype, kv_heads=2, head_dim=8, batch=2, seed=0):
    """(payload, logits, bias), and a cotangent of the entries."""
    rng = np.random.default_rng(seed)
    width = head_dim if gate == "vector" else 1
    shapes = [(batch, length, streams, kv_heads, n) for n in (head_dim, width)] + [(windows.width, kv_heads, width)]
    shapes.append((batch, windows.count(length), kv_heads, head_dim))
    payload, logits, bias, out_bar = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return (payload, logits, bias.astype(jnp.float32)), out_bar


@functools.partial(jax.jit, static_argnums=(3,))
def with_gradients(payload, logits, bias, windows, out_bar):
    out, pull = jax.vjp(lambda *a: windowed_gating(*a, windows), payload, logits, bias)
    return out, *pull(out_bar)


def assert_agrees(windows, length, streams, gate, dtype, implementation="pallas", platform="tpu", **size):
    arguments, out_bar = draw(windows, length, streams, gate, dtype, **size)
    with request(implementation, platform, interpret=implementation == "pallas"):
        got = with_gradients(*arguments, windows, out_bar)
    # Inside all is f32; bf16 results are rounded once, and the backward pass reads rounded entries.
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    for mine, theirs in zip(got, slow_gating(*arguments, windows, out_bar), strict=True):
        assert np.isfinite(np.float32(mine)).all()
        np.testing.assert_allclose(
            np.float32(mine), theirs, rtol=tolerance, atol=tolerance * (1 + np.abs(theirs).max())
        )


# Lengths are multiples of nothing.
CASES = [
    (Windows(4, 4), 139, 1, "vector", "float32"),
    (Windows(4, 4), 139, 1, "scalar", "bfloat16"),
    (Windows(8, 4), 141, 1, "vector", "bfloat16"),
    (Windows(8, 4, -4), 141, 2, "vector", "float32"),
    (Windows(8, 4, -4), 141, 2, "scalar", "float32"),
    (Windows(8, 4, -7), 67, 1, "scalar", "float32"),
    (Windows(8, 6), 211, 2, "vector", "float32"),
    (Windows(8, 6, -5), 211, 1, "scalar", "bfloat16"),
    (Windows(8, 8), 101, 1, "vector", "bfloat16"),
    (Windows(12, 12), 149, 1, "scalar", "float32"),
    (Windows(5, 3), 103, 1, "vector", "float32"),
    (Windows(5, 3, -2), 103, 2, "scalar", "float32"),
    (Windows(16, 8, -3), 151, 2, "vector", "float32"),
    (Windows(128, 128), 395, 1, "vector", "float32"),
    (Windows(128, 128, -100), 395, 1, "scalar", "float32"),
]


@pytest.mark.parametrize(("windows", "length", "streams", "gate", "dtype"), CASES, ids=str)
def test_the_tpu_form_equals_the_loop(windows, length, streams, gate, dtype):
    assert_agrees(windows, length, streams, gate, dtype)


@pytest.mark.parametrize(
    ("windows", "length", "streams", "gate", "dtype"),
    [
        (Windows(8, 4, -4), 61, 2, "vector", "float32"),
        (Windows(5, 3), 37, 1, "vector", "bfloat16"),
        (Windows(8, 6, -1), 43, 1, "scalar", "float32"),
        (Windows(8, 4), 45, 2, "scalar", "bfloat16"),
    ],
    ids=str,
)
def test_the_gpu_form_equals_the_loop(windows, length, streams, gate, dtype):
    assert_agrees(windows, length, streams, gate, dtype, platform="gpu", kv_heads=1, head_dim=128, batch=1)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(("windows", "length", "streams", "gate", "dtype"), CASES, ids=str)
def test_the_plain_forms_equal_the_loop(windows, length, streams, gate, dtype, platform):
    assert_agrees(windows, length, streams, gate, dtype, "xla", platform)


@st.composite
def calls(draw):
    width = draw(st.integers(1, 12))
    stride = draw(st.integers(1, width))
    windows = Windows(width, stride, -draw(st.integers(0, width - 1)))
    length = draw(st.integers(width, 60))
    streams = draw(st.sampled_from([1, windows.streams]))
    return windows, length, streams, draw(st.sampled_from(["vector", "scalar"]))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(calls(), st.sampled_from(["float32", "bfloat16"]))
def test_any_call_equals_the_loop(call, dtype):
    for implementation, platform in (("pallas", "tpu"), ("xla", "cpu"), ("xla", "tpu")):
        assert_agrees(*call, dtype, implementation, platform, batch=1, head_dim=4)


def test_no_bias_and_no_window():
    windows = Windows(8, 4)
    (payload, logits, _), out_bar = draw(windows, 21, 1, "vector", "float32")
    no_bias, ones = np.zeros((8, 2, 8)), np.ones(out_bar.shape)
    want = slow_gating(payload, logits, no_bias, windows, out_bar)[0]
    for asked in (request("pallas", interpret=True), request("xla"), request("xla", "tpu")):
        with asked:
            np.testing.assert_allclose(windowed_gating(payload, logits, None, windows), want, atol=1e-5)
            gradient = jax.grad(lambda x: windowed_gating(payload, x, None, windows).sum())(logits)
            np.testing.assert_allclose(gradient, slow_gating(payload, logits, no_bias, windows, ones)[2], atol=1e-5)
            assert windowed_gating(payload[:, :7], logits[:, :7], None, windows).shape == (2, 0, 2, 8)


def test_many_more_blocks_than_fit_at_once(monkeypatch):
    from pallas_kernels.windowed_gating import tpu

    monkeypatch.setattr(tpu, "_VMEM", 2**19)  # blocks of 16 windows
    assert_agrees(Windows(8, 4, -4), 299, 1, "vector", "float32", head_dim=16)


@pytest.mark.parametrize("gate", ["vector", "scalar"])
def test_vmap_scan_remat(gate):
    windows = Windows(8, 4)
    (payload, logits, bias), out_bar = draw(windows, 61, 2, gate, "float32")

    def loss(payload, logits, bias, out_bar):
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def layer(scale, _):
            out = windowed_gating(payload * scale, logits, bias, windows)
            return scale + 0.1 * (out * out_bar).mean(), None

        return jax.lax.scan(layer, jnp.ones(()), length=2)[0]

    def gradients():
        one_each = jax.vmap(jax.grad(loss, (0, 1, 2)), (1, 1, None, 1))
        return jax.jit(one_each)(
            *(a[:, :, None] if a.ndim == 4 else a[:, None] for a in (payload, logits)), bias, out_bar[:, None]
        )

    want = gradients()
    with request("pallas", interpret=True):
        got = gradients()
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_calls_that_cannot_be_say_why():
    windows = Windows(8, 4)
    (payload, logits, bias), _ = draw(windows, 21, 2, "vector", "float32")
    with request(platform="tpu"):
        with pytest.raises(NotImplementedError, match="16 channels of all KV heads: a multiple of 128"):
            windowed_gating(payload, logits, bias, windows, "pallas")
        with pytest.raises(NotImplementedError, match="payloads are float16"):
            windowed_gating(payload.astype("float16"), logits, bias, windows, "pallas")
        with pytest.raises(NotImplementedError, match=r"vector gates \(2, 21, 1, 2, 8\) float32 differ"):
            windowed_gating(payload, logits[:, :, :1], bias, windows, "pallas")


def shapes(windows, length, streams, gate, dtype, kv_heads=8, head_dim=128):
    width = head_dim if gate == "vector" else 1
    return (
        jax.ShapeDtypeStruct((1, length, streams, kv_heads, head_dim), dtype),
        jax.ShapeDtypeStruct((1, length, streams, kv_heads, width), dtype),
        jax.ShapeDtypeStruct((windows.width, kv_heads, width), "float32"),
        jax.ShapeDtypeStruct((1, windows.count(length), kv_heads, head_dim), dtype),
    )


def forward(windows):
    return lambda *a: windowed_gating(*a, windows, "pallas")


def forward_and_backward(windows):
    def run(*a):
        out, pull = jax.vjp(forward(windows), *a[:3])
        return out, pull(a[3])

    return run


@pytest.mark.parametrize(("windows", "length", "streams", "gate", "dtype"), CASES, ids=str)
def test_it_lowers_for_tpus(windows, length, streams, gate, dtype):
    with request(platform="tpu"):
        traced = jax.jit(forward_and_backward(windows)).trace(*shapes(windows, length, streams, gate, dtype))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2


@pytest.mark.parametrize(("windows", "length", "streams", "gate", "dtype"), CASES[1:4] + CASES[10:14:3], ids=str)
def test_it_lowers_for_gpus(windows, length, streams, gate, dtype):
    with request(platform="gpu"):
        traced = jax.jit(forward_and_backward(windows)).trace(*shapes(windows, length, streams, gate, dtype))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 2


@pytest.mark.parametrize(("width", "stride", "streams"), [(8, 4, 1), (8, 4, 2), (16, 16, 1)])
def test_the_blocks_move_little_more_than_the_least(width, stride, streams):
    windows, length, channels = Windows(width, stride), 8192, 1024
    call = shapes(windows, length, streams, "vector", "bfloat16")
    # Payloads and logits of every stream, and entries; then these with their gradients, and f32 log-denominators.
    least = length * channels * 2 * (2 * streams + 1 / stride)
    least_grad = least + length * channels * (2 * 4 * streams + (2 * 2 + 4) / stride)
    with request(platform="tpu"):
        assert least <= total_bytes(traffic(forward(windows), *call[:3])) <= 1.05 * least
        assert least_grad <= total_bytes(traffic(forward_and_backward(windows), *call)) <= 1.15 * least_grad


@pytest.mark.parametrize(
    ("platform", "width", "form"),
    [("cpu", 16, by_offset), ("gpu", 16, by_offset), ("tpu", 16, reference), ("cpu", 17, reference)],
)
def test_the_plain_form_of_a_platform(platform, width, form):
    windows = Windows(width, 8)
    arguments, _ = draw(windows, 41, windows.streams, "scalar", "float32")
    with request(platform=platform):
        traced = [
            str(jax.make_jaxpr(lambda *a, f=f: f(*a, windows))(*arguments))
            for f in (windowed_gating, form.windowed_gating)
        ]
    assert re.sub("0x[0-9a-f]+", "", traced[0]) == re.sub("0x[0-9a-f]+", "", traced[1])
    assert ("concatenate" in traced[0]) == (form is reference)
