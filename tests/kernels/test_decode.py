"""Decoding from a cache against a float64 loop, for sequences of different lengths; and models that decode with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels import request
from pallas_kernels.decode import decode_attention
from pallas_kernels.traffic import traffic
from phase_jax.geometry import ExactBranch, Windows
from phase_jax.model import Transformer
from phase_jax.model.cache import empty_cache, extend_unchecked
from tests.kernels.attention_loop import Geometry, attention
from tests.kernels.test_joint_attention import TOLERANCE, any_call, branch_of
from tests.model.tiny import draw_params, tiny_config

FORMS = ("xla", "tpu")


def form_of(form: str):
    """The context in which decoding takes a form, interpreted."""
    return request("xla") if form == "xla" else request("pallas", form, interpret=True)


def draw(geometry, length, heads, kv_heads, head_dim, sink, dtype):
    """(q, far, tokens, positions, sink) of three sequences, the longest of `length` tokens; entries to spare."""
    rng = np.random.default_rng([length, heads, head_dim])

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    positions = np.array([length - 1, rng.integers(length), 0])
    tokens = tuple(array(3, length, kv_heads, head_dim) for _ in range(2))
    entries = tokens
    if geometry.width:
        entries = tuple(array(3, len(geometry.closes(length)) + 3, kv_heads, head_dim) for _ in range(2))
    return array(3, heads, head_dim), entries, tokens, positions, array(heads) if sink else None


def last_of(tokens, positions, reach):
    """The `reach` tokens that end at each sequence's position; garbage before the first."""
    rows = [
        np.take(x, range(p - reach + 1, p + 1), axis=0, mode="clip") for x, p in zip(tokens, positions, strict=True)
    ]
    return np.stack(rows)


def assert_equals_the_loop(form, geometry, shape):
    q, far, tokens, positions, sink = draw(geometry, *shape)
    exact = branch_of(geometry)
    near = tuple(last_of(x, positions, exact.reach) for x in tokens) if geometry.width else None
    with form_of(form):
        out = jax.jit(lambda *arrays: decode_attention(*arrays[:3], exact, *arrays[3:]))(q, far, near, positions, sink)
    for b, position in enumerate(positions):
        entries = tuple(x[b : b + 1] for x in far) if geometry.width else None
        mine = tuple(x[b : b + 1] for x in tokens)
        expected, _ = attention(geometry, q[b : b + 1, None], entries, mine, sink, start=position)
        error = np.abs(np.asarray(out[b], np.float64) - expected[0, 0]).max()
        assert error < TOLERANCE[shape[-1]] * max(1, np.abs(expected).max())


# geometry, T, N, K, H, sink, dtype
CASES = {
    "several blocks": (Geometry(4, 2, -1, "window", 16), 2_300, 6, 2, 16, True, "float32"),
    "tail": (Geometry(12, 12, 0, "tail"), 100, 4, 1, 8, False, "bfloat16"),
    "none": (Geometry(5, 3, 0, "none"), 40, 3, 3, 8, True, "float32"),
    "full": (Geometry(None), 1_300, 4, 1, 16, True, "float32"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_loop(form, case):
    geometry, *shape = CASES[case]
    assert_equals_the_loop(form, geometry, shape)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(any_call())
def test_equals_the_loop_whatever_the_call(call):
    assert_equals_the_loop("tpu", *call)


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_without_room_for_an_entry(form):
    geometry = Geometry(8, 8)
    q, far, tokens, _, sink = draw(geometry, 5, 2, 1, 8, False, "float32")
    near = tuple(last_of(x, np.array([4, 4, 4]), 16) for x in tokens)
    with form_of(form):
        out = decode_attention(q, tuple(x[:, :0] for x in far), near, branch_of(geometry), jnp.asarray(4))
    expected, _ = attention(geometry, q[:, None], None, tokens, sink, start=4)
    np.testing.assert_allclose(out, expected[:, 0], atol=1e-5)


# The Pallas forms for GPUs take these alone; their interpreter knows no array that ends within a block.
GPU_CASES = {
    "entries": (Geometry(4, 2, -1, "window", 9), 379, 4, 2, 64, True, "bfloat16"),
    "full": (Geometry(None), 192, 2, 1, 128, False, "bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", GPU_CASES)
def test_the_form_for_gpus_equals_the_loop(case):
    geometry, *shape = GPU_CASES[case]
    assert_equals_the_loop("gpu", geometry, shape)


@pytest.mark.parametrize(
    ("form", "case"),
    [("tpu", CASES["several blocks"]), ("tpu", CASES["full"]), *[("gpu", case) for case in GPU_CASES.values()]],
    ids=str,
)
def test_lowers_for(form, case):
    geometry, *shape = case
    q, far, tokens, positions, sink = draw(geometry, *shape)
    exact = branch_of(geometry)
    near = tuple(last_of(x, positions, exact.reach) for x in tokens) if geometry.width else None

    def decode(q, far, near, positions, sink):
        with request("pallas", platform=form):
            return decode_attention(q, far, near, exact, positions, sink)

    platform, call = {"tpu": ("tpu", "tpu_custom_call"), "gpu": ("cuda", "mosaic_gpu_v2")}[form]
    text = jax.jit(decode).trace(q, far, near, positions, sink).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"custom_call @{call}") == 1


def test_what_gpus_cannot_serve_says_why():
    q, far, _, positions, _ = draw(Geometry(None), 9, 65, 1, 64, False, "bfloat16")
    with request("pallas", "gpu"):
        for query, reason in ((q, "65 query heads"), (q[:, :8], "room for 9"), (q[:, :8].astype("float32"), "float32")):
            with pytest.raises(NotImplementedError, match=reason):
                decode_attention(query, far, None, ExactBranch(None), positions)


def test_a_model_decodes_as_its_parallel_pass_computes_with_kernels_in_both():
    config = tiny_config("kvc_w8s6")
    model, params = Transformer(config), draw_params(config)
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (2, 13))
    expected = jax.jit(model.apply)({"params": params}, tokens)
    with request("pallas", interpret=True):
        parallel = jax.jit(model.apply)({"params": params}, tokens)
        cache = empty_cache(config, 2, 13)
        for t in range(13):
            logits, cache = extend_unchecked(model, params, cache, tokens[:, t : t + 1])
            np.testing.assert_allclose(logits, expected[:, t], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(parallel, expected, rtol=1e-4, atol=1e-4)


def test_entries_beyond_a_sequences_length_are_not_fetched():
    exact, (heads, kv_heads, head_dim), room = ExactBranch(Windows(8, 8)), (4, 1, 128), 4096
    positions = np.array([8 * 625 - 1, 8 * 1024 - 1, 8 * 1025 - 1, 3])
    q = jax.ShapeDtypeStruct((4, heads, head_dim), jnp.bfloat16)
    far = (jax.ShapeDtypeStruct((4, room, kv_heads, head_dim), jnp.bfloat16),) * 2
    near = (jax.ShapeDtypeStruct((4, exact.reach, kv_heads, head_dim), jnp.bfloat16),) * 2
    with request("pallas", "tpu"):
        (call,) = traffic(lambda *arrays: decode_attention(*arrays[:3], exact, arrays[3]), q, far, near, positions)
        with pytest.raises(NotImplementedError, match="not given"):
            traffic(
                lambda *arrays: decode_attention(*arrays[:3], exact, arrays[3]),
                q,
                far,
                near,
                jax.ShapeDtypeStruct((4,), jnp.int32),
            )
    # Blocks of 1,024 entries: 625, 1,024 and 1,025 of them are seen, and one block is there for whoever sees none.
    entries = (1 + 1 + 2 + 1) * 1024 * 2
    scalars = 2 * 4 * 4
    assert call.read == 2 * head_dim * (4 * heads + entries + 4 * 2 * exact.reach) + scalars
    assert call.written == 2 * head_dim * 4 * heads
