"""The next-token loss in chunks against all logits at once, in f64 by numpy and by differentiation in f32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from phase_jax.data.tokens import TokenBatch
from phase_jax.model import Transformer
from phase_jax.training.losses import next_token_loss
from phase_jax.training.optimizer import OptimizerConfig, make_optimizer
from phase_jax.training.step import init_state, make_train_step, token_loss
from tests.model.tiny import draw_params, tiny_config

B, T, D, V = 3, 22, 8, 50


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    hidden, embedding = rng.normal(size=(B, T, D)), rng.normal(size=(V, D))
    targets, counted = rng.integers(0, V, (B, T)), rng.random((B, T)) < 0.8
    # At some places the right token is the likeliest, so that accuracy is neither 0 nor 1.
    hidden = np.where(rng.random((B, T, 1)) < 0.4, embedding[targets], hidden)
    return tuple(jnp.asarray(x, jnp.float32) for x in (hidden, embedding)) + (
        jnp.asarray(targets),
        jnp.asarray(counted),
    )


def by_hand(hidden, embedding, targets, counted, scale, z_weight):
    """Token by token in f64: objective, cross-entropy, accuracy."""
    hidden, embedding, weight = (np.asarray(x, np.float64) for x in (hidden, embedding, counted))
    objective = cross_entropy = hits = 0.0
    for b, t in np.ndindex(B, T):
        logits = scale * embedding @ hidden[b, t]
        partition = np.log(np.exp(logits).sum())
        loss = partition - logits[targets[b, t]]
        cross_entropy += weight[b, t] * loss
        objective += weight[b, t] * (loss + z_weight * partition**2)
        hits += weight[b, t] * (logits.argmax() == targets[b, t])
    return np.array([objective, cross_entropy, hits]) / weight.sum()


def dense(hidden, embedding, targets, counted, scale, z_weight):
    """The objective from all logits at once."""
    logits = scale * jnp.einsum("btd,vd->btv", hidden, embedding)
    partition = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    weight = counted / counted.sum()
    return jnp.sum(weight * (partition - right + z_weight * partition**2))


@pytest.mark.parametrize(("scale", "z_weight"), [(1.0, 0.0), (0.5, 0.1)])
@pytest.mark.parametrize("chunk", [4, 11, 100])
def test_values_and_gradients_are_those_of_all_logits_at_once(inputs, scale, z_weight, chunk):
    hidden, embedding, targets, counted = inputs

    def objective(hidden, embedding):
        loss = next_token_loss(hidden, embedding, targets, counted, logit_scale=scale, z_weight=z_weight, chunk=chunk)
        return 3.0 * loss.objective, loss

    grads, found = jax.jit(jax.grad(objective, (0, 1), has_aux=True))(hidden, embedding)
    np.testing.assert_allclose(found, by_hand(*inputs, scale, z_weight), rtol=2e-6)
    assert 0.1 < float(found.accuracy) < 0.9
    expected = jax.grad(lambda *x: 3.0 * dense(*x, targets, counted, scale, z_weight), (0, 1))(hidden, embedding)
    for ours, theirs in zip(grads, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_bf16_activations_leave_f32_gradients_of_f32_embeddings(inputs):
    hidden, embedding, targets, counted = inputs
    hidden = hidden.astype(jnp.bfloat16)

    def objective(hidden, embedding):
        return next_token_loss(hidden, embedding, targets, counted, chunk=4).objective

    d_hidden, d_embedding = jax.grad(objective, (0, 1))(hidden, embedding)
    assert (d_hidden.dtype, d_embedding.dtype) == (jnp.bfloat16, jnp.float32)
    exact = jax.grad(dense, (0, 1))(hidden.astype(jnp.float32), embedding, targets, counted, 1.0, 0.0)
    for ours, theirs in zip((d_hidden, d_embedding), exact, strict=True):
        error = jnp.linalg.norm(ours.astype(jnp.float32) - theirs) / jnp.linalg.norm(theirs)
        assert float(error) < 0.02


def test_where_nothing_counts_the_loss_is_zero(inputs):
    hidden, embedding, targets, counted = inputs
    assert tuple(map(float, next_token_loss(hidden, embedding, targets, jnp.zeros_like(counted)))) == (0, 0, 0)


@pytest.fixture(scope="module")
def model():
    config = tiny_config("kvc_w4s4_1kv", layers=1, vocabulary=131)
    return Transformer(config), draw_params(config)


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(1).integers(0, 131, (2, 25))
    return TokenBatch(jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:]), jnp.ones((2, 24), bool))


def test_the_models_loss_is_that_of_its_logits(model, batch):
    model, params = model
    logits = np.float64(model.apply({"params": params}, batch.tokens))
    right = np.take_along_axis(logits, np.asarray(batch.targets)[..., None], -1)[..., 0]
    expected = np.mean(np.log(np.exp(logits).sum(-1)) - right)
    assert float(token_loss(model, params, batch, chunk=7).cross_entropy) == pytest.approx(expected, rel=1e-5)


def test_no_array_of_all_logits_is_in_the_program(model, batch):
    model, params = model
    grad = jax.jit(jax.grad(lambda params: token_loss(model, params, batch, chunk=6).objective))
    text = grad.lower(params).compile().as_text()
    assert "2,6,131]" in text, "the shape is read as it is written"
    assert "24,131]" not in text and "48,131]" not in text


def test_one_batch_of_tokens_is_learnt_by_heart(model, batch):
    model, _ = model
    optimizer = make_optimizer(OptimizerConfig(1e-2, warmup_steps=10), 120)
    state = init_state(model, optimizer, jax.random.key(0))
    step = make_train_step(model, optimizer, z_weight=1e-4, loss_chunk=8)
    for _ in range(120):
        state, metrics = step(state, batch)
    assert metrics["loss"] < 0.05 and metrics["accuracy"] == 1
    assert step._cache_size() == 1
