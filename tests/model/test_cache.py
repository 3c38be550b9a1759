"""Decoding from the cache against the parallel forward pass, which the float64 loop vouches for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.family import model_config
from phase_jax.errors import UserError
from phase_jax.geometry import cached_numbers
from phase_jax.model import ModelConfig, Transformer
from phase_jax.model.cache import cache_bytes, empty_cache, extend, extend_unchecked, prefill, roll_back
from tests.model.tiny import DISTINCT, draw_params, tiny_config

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

# One for each way in which caches differ: overlap, a half-empty first window with tied maps, the exact branches, full.
KINDS = {
    "overlap": tiny_config("kvc_w8s6", layers=2),
    "origin": tiny_config("kvc_w8s4_dsv4kernel_1kv_rope16", layers=1),
    "tail": tiny_config("kvc_w4s4_1kv", exact="tail", layers=1),
    "none": tiny_config("kvc_w4s4_1kv", exact="none", layers=1),
    "full": tiny_config("full_attn_4kv", layers=1),
}
# All tests of a kind have these in common, so that they share compilations, which are what takes time here.
BATCH, LENGTH, ROLLBACK = 2, 41, 5
SIZES = {"capacity": LENGTH, "rollback": ROLLBACK}


@pytest.fixture(params=KINDS, scope="module")
def kind(request):
    """(model, parameters, tokens [B, T], logits [B, T, V] of every prefix from one parallel pass)."""
    config = KINDS[request.param]
    model, params = Transformer(config), draw_params(config)
    tokens = draw_tokens(config, BATCH, LENGTH)
    return model, params, tokens, parallel(model, params, tokens)


def draw_tokens(config: ModelConfig, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, config.vocabulary, (batch, length))


def parallel(model: Transformer, params: dict, tokens) -> np.ndarray:
    return np.asarray(jax.jit(model.apply)({"params": params}, tokens))


def read(model: Transformer, params: dict, cache, tokens, expected=None):
    """The cache after tokens [B, T], read one by one; their logits are held against [B, T, V]."""
    for t in range(tokens.shape[1]):
        logits, cache = extend(model, params, cache, tokens[:, t : t + 1])
        if expected is not None:
            np.testing.assert_allclose(logits, expected[:, t], **TOLERANCE, err_msg=f"token {t}")
    return cache


@pytest.mark.parametrize("variant", DISTINCT)
def test_decoding_equals_the_parallel_pass_at_every_length(variant):
    config = tiny_config(variant, layers=1)
    model, params = Transformer(config), draw_params(config)
    length = 3 * math.lcm(config.window or 8, config.stride or 8) + 20
    tokens = draw_tokens(config, 2, length)
    compiled = extend_unchecked._cache_size()
    read(model, params, empty_cache(config, 2, length), tokens, parallel(model, params, tokens))
    assert extend_unchecked._cache_size() - compiled <= 1, "one compilation must serve all lengths"


def test_any_chunking_of_the_prompt_gives_the_same_cache(kind):
    model, params, tokens, expected = kind
    caches = []
    for chunk in (LENGTH, 20, 1):  # 20 leaves a last chunk of one
        logits, cache = prefill(model, params, tokens, chunk=chunk, **SIZES)
        np.testing.assert_allclose(logits, expected[:, -1], **TOLERANCE)
        caches.append(cache)
    for cache in caches[1:]:
        assert int(cache.length) == LENGTH
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), cache.layers, caches[0].layers)


def test_a_rolled_back_cache_goes_on_as_if_nothing_had_followed(kind):
    model, params, tokens, expected = kind
    wrong = (tokens + 1) % model.cfg.vocabulary
    for kept in (3, 11, 12, 13):  # about the close of a window
        cache = read(model, params, empty_cache(model.cfg, BATCH, **SIZES), tokens[:, :kept])
        cache = roll_back(read(model, params, cache, wrong[:, :ROLLBACK]), 2)
        with pytest.raises(UserError, match=f"cannot roll back {ROLLBACK - 1} tokens.*prefill again"):
            roll_back(cache, ROLLBACK - 1)
        read(model, params, roll_back(cache, ROLLBACK - 2), tokens[:, kept:], expected[:, kept:])


def test_a_shared_prefix_serves_different_suffixes(kind):
    model, params, tokens, expected = kind
    shared = read(model, params, empty_cache(model.cfg, BATCH, **SIZES), tokens[:, :18])
    read(model, params, shared, tokens[:, :22])
    read(model, params, shared, tokens[:, 18:], expected[:, 18:])


def test_a_batch_equals_its_members_alone(kind):
    model, params, tokens, _ = kind
    together, cache = prefill(model, params, tokens, chunk=1, **SIZES)
    for i, row in enumerate(tokens):
        alone, own = prefill(model, params, row[None], chunk=1, **SIZES)
        np.testing.assert_allclose(alone[0], together[i], **TOLERANCE)
        mine = jax.tree.map(lambda leaf, i=i: leaf[:, i : i + 1], cache.layers)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), own.layers, mine)


def test_blockwise_prefill_equals_the_parallel_pass():
    config = tiny_config("kvc_w8s6", attention_block=8)
    model, params = Transformer(config), draw_params(config)
    tokens = draw_tokens(config, 2, 50)
    expected = parallel(Transformer(tiny_config("kvc_w8s6")), params, tokens)
    logits, _ = prefill(model, params, tokens, capacity=61, chunk=29)
    np.testing.assert_allclose(logits, expected[:, -1], **TOLERANCE)


@pytest.mark.parametrize("length", [7, 1000])
@pytest.mark.parametrize("variant", DISTINCT)
def test_a_cache_takes_the_bytes_of_its_geometry(variant, length):
    c = model_config(variant, "lab")
    entries, exact = cached_numbers(c.windows, c.exact_branch, length)
    partial = 0 if c.windows is None else min(length, c.window - 1) * c.width
    numbers = (entries + exact) * (1 if c.tied_kv else 2) * c.kv_heads * c.head_dim + partial
    assert cache_bytes(empty_cache(c, 3, length)) == 3 * 4 * c.layers * numbers


def test_at_128k_the_compressed_cache_is_an_eighth():
    full, compressed = (
        cache_bytes(empty_cache(model_config(variant, "lab"), 1, 128_000))
        for variant in ("full_attn_1kv", "kvc_w8s8_1kv_baseline")
    )
    assert full / compressed >= 7.9


def test_rollback_keeps_exactly_that_much_more():
    c = model_config("kvc_w8s8_1kv_baseline", "lab")
    more = cache_bytes(empty_cache(c, 1, 1000, 10)) - cache_bytes(empty_cache(c, 1, 1000))
    assert more == 10 * 4 * c.layers * (2 * c.kv_heads * c.head_dim + c.width)


def test_bad_input_is_one_clear_line():
    config = tiny_config("kvc_w8s8_2kv", layers=1)
    model, params = Transformer(config), draw_params(config)
    tokens = draw_tokens(config, 1, 10)
    _, cache = prefill(model, params, tokens, capacity=12)
    with pytest.raises(UserError, match="capacity of 12 tokens and holds 10: 3 more do not fit"):
        extend(model, params, cache, tokens[:, :3])
    with pytest.raises(UserError, match="another model or batch"):
        extend(model, params, cache, draw_tokens(config, 2, 1))
    for other in ("kvc_w8s8_1kv_kvshare", "full_attn_4kv"):
        with pytest.raises(UserError, match="another model or batch"):
            extend(Transformer(tiny_config(other, layers=1)), params, cache, tokens[:, :1])
    with pytest.raises(UserError, match="at least one"):
        extend(model, params, cache, tokens[:, :0])
    with pytest.raises(UserError, match="prompt is empty"):
        prefill(model, params, jnp.zeros((1, 0), jnp.int32))
    with pytest.raises(UserError, match="chunk of 11 tokens: choose from 1 to 10"):
        prefill(model, params, tokens, chunk=11)
    with pytest.raises(UserError, match="capacity 0"):
        empty_cache(config, 1, 0)
    with pytest.raises(UserError, match="cannot roll back 1 tokens"):
        roll_back(cache, 1)
