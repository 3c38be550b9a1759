"""The train step: a task's loss, one update, the state donated."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from phase_jax.data.recall import RecallBatch
from phase_jax.data.tokens import TokenBatch
from phase_jax.layers import rms_norm
from phase_jax.model import Transformer
from phase_jax.training.losses import TokenLoss, next_token_loss
from phase_jax.training.sharding import on_mesh, state_shardings


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


def token_loss(
    model: Transformer, params: dict, batch: TokenBatch, z_weight: float = 0.0, chunk: int = 256
) -> TokenLoss:
    """The next-token loss of packed sequences; see `next_token_loss`."""
    hidden = model.apply({"params": params}, batch.tokens, method="hidden_states")
    return next_token_loss(
        rms_norm(hidden, params["final_norm"], model.cfg.norm_eps),
        params.get("unembedding", params["embedding"]),
        batch.targets,
        batch.counted,
        logit_scale=model.cfg.logit_scale,
        z_weight=z_weight,
        chunk=chunk,
    )


def first_layer_loss(model: Transformer, params: dict, tokens: jax.Array) -> jax.Array:
    """Cross-entropy of naming, from what the first layer leaves, each token and the one before it, half and half.

    An induction circuit needs a first layer that writes the previous token beside the token itself; with one KV head
    and a loss on the answers alone that layer may not form in thousands of steps. Asking for both in equal parts forms
    it within a hundred, and leaves neither drowned by the other. Deep supervision: Lee et al. 2015.
    """
    first = Transformer(dataclasses.replace(model.cfg, layers=1))
    params = {**params, "layers": jax.tree.map(lambda leaf: leaf[:1], params["layers"])}
    logits = first.apply({"params": params}, tokens)[:, 1:]
    losses = [
        optax.softmax_cross_entropy_with_integer_labels(logits, target) for target in (tokens[:, 1:], tokens[:, :-1])
    ]
    return sum(losses).mean() / 2


def init_state(model: Transformer, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """A fresh state: a function of the key. Trace it under `jax.eval_shape` for its shapes alone."""
    # Parameter shapes do not depend on the tokens; the length only has to exceed one window.
    tokens = jnp.zeros((1, 2 * (model.cfg.window or 1)), jnp.int32)
    params = model.init(key, tokens)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def state_shapes(model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of a state on a mesh."""
    shapes = jax.eval_shape(lambda key: init_state(model, optimizer, key), jax.random.key(0))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        state_shardings(mesh, shapes),
    )


def make_train_step(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    first_layer_weight: float = 0.0,
    z_weight: float = 0.0,
    loss_chunk: int = 256,
    mesh: Mesh | None = None,
) -> Callable:
    """A jitted (state, batch) -> (state, metrics); the given state's memory is reused.

    On a RecallBatch the loss is `recall_loss`, on a TokenBatch `token_loss`, plus `first_layer_weight` times
    `first_layer_loss`; the metrics are of the task alone. On a mesh the state keeps `sharding.state_shardings`.
    """

    def objective(params: dict, batch: RecallBatch | TokenBatch) -> tuple[jax.Array, dict]:
        if isinstance(batch, TokenBatch):
            total, loss, accuracy = token_loss(model, params, batch, z_weight, loss_chunk)
        else:
            loss, accuracy = recall_loss(model, params, batch)
            total = loss
        if first_layer_weight:
            total = total + first_layer_weight * first_layer_loss(model, params, batch.tokens)
        return total, {"loss": loss, "accuracy": accuracy}

    def train_step(state: TrainState, batch: RecallBatch | TokenBatch) -> tuple[TrainState, dict]:
        with on_mesh(mesh):
            grads, metrics = jax.grad(objective, has_aux=True)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["grad_norm"] = optax.global_norm(grads)
        state = TrainState(state.step + 1, params, opt_state)
        if mesh is not None:
            state = jax.lax.with_sharding_constraint(state, state_shardings(mesh, state))
        return state, metrics

    return jax.jit(train_step, donate_argnums=0)
