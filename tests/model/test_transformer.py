"""The model against a float64 loop, causality by gradient, and the family's sizes."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.family import FAMILY, model_config
from phase_jax.model import ModelConfig, Transformer
from tests.model import reference
from tests.model.tiny import IDS, draw_params, tiny_config


@pytest.mark.parametrize("variant", IDS)
def test_logits_equal_the_float64_loop(variant):
    config = tiny_config(variant)
    params = draw_params(config)
    tokens = np.random.default_rng(1).integers(0, config.vocabulary, 29)
    got = jax.jit(Transformer(config).apply)({"params": params}, tokens[None])
    expected = reference.forward(config, jax.tree.map(np.float64, params), tokens)
    np.testing.assert_allclose(got[0], expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("exact", ["window", "tail", "none"])
@pytest.mark.parametrize("geometry", [(4, 4, 0), (8, 4, 0), (8, 6, -2), (5, 3, -4)], ids=str)
def test_every_exact_branch_equals_the_float64_loop(geometry, exact):
    window, stride, origin = geometry
    config = tiny_config("kvc_w8s8_2kv", window=window, stride=stride, origin=origin, exact=exact, exact_width=9)
    params = draw_params(config)
    tokens = np.random.default_rng(1).integers(0, config.vocabulary, 26)
    got = Transformer(config).apply({"params": params}, tokens[None])
    expected = reference.forward(config, jax.tree.map(np.float64, params), tokens)
    np.testing.assert_allclose(got[0], expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("variant", IDS)
def test_nothing_depends_on_a_later_token(variant):
    """Gradients of the loss at t with respect to later embeddings are exactly zero; to earlier ones they are not."""
    config = tiny_config(variant)
    model, params, length = Transformer(config), draw_params(config), 27
    tokens = jnp.arange(length)[None] % config.vocabulary

    def logits(nudge):
        # The nudge enters where the embeddings do: one extra row for every position.
        embedding = jnp.concatenate([params["embedding"], params["embedding"][tokens[0]] + nudge])
        wide = dataclasses.replace(config, vocabulary=config.vocabulary + length)
        positions = config.vocabulary + jnp.arange(length)[None]
        return Transformer(wide).apply({"params": {**params, "embedding": embedding}}, positions)[
            0, :, : config.vocabulary
        ]

    jacobian = jax.jit(jax.jacrev(lambda nudge: logits(nudge).sum(axis=-1)))(jnp.zeros((length, config.width)))
    touched = np.abs(np.asarray(jacobian)).max(axis=-1)
    assert (np.triu(touched, 1) == 0).all(), "a logit depends on a later token"
    assert (np.diag(touched) > 0).all()
    assert (touched[-1] > 0).all(), "the last logits must see every earlier token"
    del model


@pytest.mark.parametrize(
    ("variant", "layers"), [("full_attn_1kv", 1), ("kvc_w8s6", 5), ("kvc_w8s8_1kv_tail_concat", 2)]
)
def test_last_only_and_vmap_change_nothing(variant, layers):
    config = tiny_config(variant, layers=layers)
    model, params = Transformer(config), {"params": draw_params(config)}
    tokens = jax.random.randint(jax.random.key(0), (3, 4, 21), 0, config.vocabulary)
    last = partial(model.apply, params, last_only=True)
    together, apply, alone = jax.jit(jax.vmap(last))(tokens), jax.jit(model.apply), jax.jit(last)
    for i in range(3):
        whole = apply(params, tokens[i])
        assert whole.shape == (4, 21, config.vocabulary) and whole.dtype == jnp.float32
        np.testing.assert_allclose(together[i], whole[:, -1], rtol=1e-5, atol=1e-5)
        one_by_one = jnp.concatenate([alone(row[None]) for row in tokens[i]])
        np.testing.assert_allclose(together[i], one_by_one, rtol=1e-5, atol=1e-5)


def parameters(config: ModelConfig) -> int:
    init = Transformer(config).init
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), jnp.zeros((1, 32), jnp.int32)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("scale", ["lab", "paper"])
@pytest.mark.parametrize("variant", IDS)
def test_parameter_counts_by_hand(variant, scale):
    c = model_config(variant, scale)
    query_and_out = 2 * c.width * c.query_heads * c.head_dim
    exact = (1 if c.tied_kv else 2) * c.width * c.kv_heads * c.head_dim
    layer = query_and_out + exact + 3 * c.width * c.mlp_width + 2 * c.width + (2 * c.head_dim if c.qk_norm else 0)
    if c.window is not None:
        maps = {"offset": c.window, "part": -(-c.window // c.stride), "all": 1}[c.map_sharing]
        gate = {"scalar": 1, "vector": c.head_dim, "uniform": 0}[c.gate]
        branch = maps * c.width * c.kv_heads * (c.head_dim + gate)
        branch += c.window * c.kv_heads * gate * c.gate_bias + c.head_dim * c.post_norm
        layer += (1 if c.tied_kv else 2) * branch
    assert parameters(c) == c.vocabulary * c.width + c.layers * layer + c.width


def test_the_largest_full_attention_model_is_qwen3_0_6b():
    assert parameters(model_config("full_attn_8kv", "paper")) == 596_049_920
    assert len(FAMILY) == 27


@pytest.mark.parametrize("variant", ["full_attn_8kv", "kvc_w8s4_dsv4kernel_1kv_rope16"])
def test_remat_and_scan_change_nothing(variant):
    shallow = tiny_config(variant, layers=5)  # more layers than are unrolled
    params = draw_params(shallow)
    tokens = jnp.arange(18)[None]

    def loss(params, config):
        return jnp.square(Transformer(config).apply({"params": params}, tokens)).sum()

    plain, gradient = jax.value_and_grad(loss)(params, shallow)
    again, gradient_again = jax.value_and_grad(loss)(params, dataclasses.replace(shallow, remat=True))
    np.testing.assert_allclose(plain, again, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradient, gradient_again)


def test_bfloat16_activations_stay_near_float32():
    config = tiny_config("kvc_w8s4")
    params = {"params": draw_params(config)}
    tokens = jnp.arange(20)[None]
    exact = Transformer(config).apply(params, tokens)
    rough = Transformer(dataclasses.replace(config, dtype="bfloat16")).apply(params, tokens)
    assert rough.dtype == jnp.float32
    np.testing.assert_allclose(rough, exact, atol=0.05 * float(jnp.abs(exact).max()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_heads": 3, "kv_heads": 2}, "not a multiple"),
        ({"rope_dims": 5}, "must be even"),
        ({"gate": "sharp"}, "choose scalar, vector, uniform"),
        ({"stride": None}, "go together"),
        ({"stride": 9}, "must be between 1 and the width"),
        ({"exact_width": 6}, "at least 7"),
        ({"layers": 0}, "at least 1"),
    ],
)
def test_impossible_models_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(model_config("kvc_w8s8_1kv_baseline"), **change)
