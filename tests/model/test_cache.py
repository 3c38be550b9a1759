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
from tests.model.tiny import IDS, draw_params, tiny_config

# Ids of the same model with another seed would only repeat it.
DISTINCT = [variant for variant in IDS if "_seed" not in variant]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

# One for each way in which caches differ: overlap, a half-empty first window with tied maps, the exact branches, full.
KINDS = {
    "overlap": tiny_config("kvc_w8s6", layers=2),
    "origin": tiny_config("kvc_w8s4_dsv4kernel_1kv_rope16", layers=1),
    "tail": tiny_config("kvc_w4s4_1kv", exact="tail", layers=1),
    "none": tiny_config("kvc_w4s4_1kv", exact="none", layers=1),
    "full": tiny_config("full_attn_4kv", layers=1),
}
kinds = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


def draw_tokens(config: ModelConfig, batch: int, length: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocabulary, (batch, length))


def parallel(model: Transformer, params: dict, tokens) -> np.ndarray:
    """Logits [B, T, V] of every prefix at once."""
    return np.asarray(jax.jit(model.apply)({"params": params}, tokens))


def assert_same_contents(one, other):
    assert int(one.length) == int(other.length)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), one.layers, other.layers)


@pytest.mark.parametrize("variant", DISTINCT)
def test_decoding_equals_the_parallel_pass_at_every_length(variant):
    config = tiny_config(variant, layers=1)
    model, params = Transformer(config), draw_params(config)
    length = 3 * math.lcm(config.window or 8, config.stride or 8) + 20
    tokens = draw_tokens(config, 2, length)
    expected = parallel(model, params, tokens)
    cache = empty_cache(config, 2, length)
    compiled = extend_unchecked._cache_size()
    for t in range(length):
        logits, cache = extend(model, params, cache, tokens[:, t : t + 1])
        np.testing.assert_allclose(logits, expected[:, t], **TOLERANCE, err_msg=f"length {t + 1}")
    assert extend_unchecked._cache_size() - compiled <= 1, "one compilation must serve all lengths"


@kinds
def test_any_chunking_of_the_prompt_gives_the_same_cache(config):
    model, params = Transformer(config), draw_params(config)
    tokens = draw_tokens(config, 2, 41)
    expected = parallel(model, params, tokens)[:, -1]
    logits, whole = prefill(model, params, tokens)
    np.testing.assert_allclose(logits, expected, **TOLERANCE)
    for chunk in (1, 10, 20):  # 41 is a multiple of each and 1 more
        logits, cache = prefill(model, params, tokens, chunk=chunk)
        np.testing.assert_allclose(logits, expected, **TOLERANCE)
        assert_same_contents(cache, whole)


@kinds
def test_a_rolled_back_cache_goes_on_as_if_nothing_had_followed(config):
    model, params, rollback = Transformer(config), draw_params(config), 5
    tokens = draw_tokens(config, 1, 30)
    wrong = (tokens + 1) % config.vocabulary
    expected = parallel(model, params, tokens)
    for kept in (3, 11, 12, 13):  # about the close of a window
        cache = empty_cache(config, 1, 30, rollback)
        for t in range(kept):
            _, cache = extend(model, params, cache, tokens[:, t : t + 1])
        for t in range(kept, kept + rollback):
            _, cache = extend(model, params, cache, wrong[:, t : t + 1])
        cache = roll_back(cache, 2)  # in two goes
        with pytest.raises(UserError, match="prefill again"):
            roll_back(cache, rollback - 1)
        cache = roll_back(cache, rollback - 2)
        for t in range(kept, 30):
            logits, cache = extend(model, params, cache, tokens[:, t : t + 1])
            np.testing.assert_allclose(logits, expected[:, t], **TOLERANCE, err_msg=f"{kept} kept, length {t + 1}")


@kinds
def test_a_shared_prefix_serves_different_suffixes(config):
    model, params = Transformer(config), draw_params(config)
    prefix, suffixes = draw_tokens(config, 1, 18), draw_tokens(config, 3, 9)
    _, shared = prefill(model, params, prefix, capacity=27)
    whole = np.concatenate([prefix.repeat(3, axis=0), suffixes], axis=1)
    expected = parallel(model, params, whole)[:, -1]
    for suffix, logits in zip(suffixes, expected, strict=True):
        np.testing.assert_allclose(extend(model, params, shared, suffix[None])[0][0], logits, **TOLERANCE)


@kinds
def test_a_batch_equals_its_members_alone(config):
    model, params = Transformer(config), draw_params(config)
    tokens = draw_tokens(config, 3, 22)
    together, cache = prefill(model, params, tokens, chunk=1)
    for i, row in enumerate(tokens):
        alone, own = prefill(model, params, row[None], chunk=1)
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
