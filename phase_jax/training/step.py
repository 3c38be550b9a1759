"""The train step: loss on the queried names alone, one update, the state donated."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from phase_jax.data.recall import RecallBatch
from phase_jax.model import Transformer


class TrainState(NamedTuple):
    """Everything a checkpoint holds; `step` counts the updates made."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState


def recall_loss(model: Transformer, params: dict, batch: RecallBatch) -> tuple[jax.Array, jax.Array]:
    """(mean cross-entropy, accuracy) of the queried names; logits are formed at the queries only."""
    hidden = model.apply({"params": params}, batch.tokens, method="hidden_states")
    logits = model.apply({"params": params}, hidden[:, batch.asked_at], method="logits")
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.answer).mean()
    return loss, (logits.argmax(axis=-1) == batch.answer).mean()


def init_state(model: Transformer, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """A fresh state: a function of the key. Trace it under `jax.eval_shape` for its shapes alone."""
    # Parameter shapes do not depend on the tokens; the length only has to exceed one window.
    tokens = jnp.zeros((1, 2 * (model.cfg.window or 1)), jnp.int32)
    params = model.init(key, tokens)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_train_step(model: Transformer, optimizer: optax.GradientTransformation) -> Callable:
    """A jitted (state, batch) -> (state, metrics); the given state's memory is reused."""

    def train_step(state: TrainState, batch: RecallBatch) -> tuple[TrainState, dict]:
        grad_fn = jax.value_and_grad(lambda params: recall_loss(model, params, batch), has_aux=True)
        (loss, accuracy), grads = grad_fn(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "accuracy": accuracy, "grad_norm": optax.global_norm(grads)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(train_step, donate_argnums=0)
