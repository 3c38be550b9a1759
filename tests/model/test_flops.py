"""Model FLOPs against counting pair by pair, and against arithmetic written out."""

import dataclasses

import pytest

from configs.family import FAMILY, model_config
from phase_jax.model.flops import forward_flops, training_flops, visible_keys


@pytest.mark.parametrize("variant", ["full_attn_1kv", "kvc_w8s4", "kvc_w8s8_1kv_tail_concat", "kvc_w12s12_1kv"])
def test_visible_keys_are_those_that_a_loop_counts(variant):
    config, length = model_config(variant), 50
    seen = 0
    for t in range(length):
        for u in range(t + 1):
            if config.window is None:
                seen += 1
            elif config.exact == "window":
                seen += t - u < config.exact_width
            else:
                last = (t + 1) // config.stride * config.stride  # W = S: where the last closed window ends
                seen += u >= last
        if config.window is not None:
            closes = range(config.window - 1, t + 1, config.stride)
            seen += len(closes)
    assert visible_keys(config, length) == pytest.approx(seen / length)


def test_full_attention_at_paper_scale_by_hand():
    config = model_config("full_attn_8kv", "paper")
    # 596,049,920 parameters, of which norms multiply no matrix and embeddings are looked up, but used for the logits.
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    matrices = 596_049_920 - norms
    attention = 28 * 2 * 16 * 128 * 4097 / 2
    assert forward_flops(config, 4096) == pytest.approx(2 * (matrices + attention))
    assert training_flops(config, 4096) == 3 * forward_flops(config, 4096)


@pytest.mark.parametrize("variant", FAMILY)
def test_compression_adds_its_maps_and_nothing_else(variant):
    """A token goes through one map for every window it is in; W/S of them on average."""
    config, length = model_config(variant, "paper"), 4096
    if config.window is None:
        return
    full = dataclasses.replace(config, window=None, stride=None, origin=0)
    gates = {"scalar": config.kv_heads, "vector": config.kv_heads * 128, "uniform": 0}[config.gate]
    branches = 1 if config.tied_kv else 2
    maps = 28 * branches * 1024 * (config.kv_heads * 128 + gates) * config.window / config.stride
    fewer = 28 * 2 * 16 * 128 * (visible_keys(full, length) - visible_keys(config, length))
    assert forward_flops(config, length) - forward_flops(full, length) == pytest.approx(2 * (maps - fewer))
