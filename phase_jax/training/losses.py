"""Cross-entropy of next tokens, without an array of all logits."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from phase_jax.axes import Hidden, Tokens
from phase_jax.training.sharding import batch_parts, constrained


class TokenLoss(NamedTuple):
    """Means over the counted tokens, f32 scalars: what is minimised, cross-entropy in nats, top-1 accuracy."""

    objective: jax.Array
    cross_entropy: jax.Array
    accuracy: jax.Array


def next_token_loss(
    hidden: Hidden,
    embedding: jax.Array,
    targets: Tokens,
    counted: jax.Array,
    *,
    logit_scale: float = 1.0,
    z_weight: float = 0.0,
    chunk: int = 256,
) -> TokenLoss:
    """The loss of the targets [B, T] given normed hidden states [B, T, D] and tied embeddings [V, D].

    Logits are formed for `chunk` positions at a time, [B, chunk, V] in f32, and their gradient in the same pass, so
    that neither is kept nor computed again. `counted` [B, T] weighs the tokens; where none counts the loss is 0.
    `z_weight` weighs the mean squared log-partition, which keeps logits from drifting (PaLM, Chowdhery et al. 2022).
    Differentiable once, in `hidden` and `embedding`, through `objective` alone.
    """
    weight = counted.astype(jnp.float32)
    weight = weight / jnp.maximum(weight.sum(), 1.0)
    return TokenLoss(*_chunked(logit_scale, z_weight, chunk, hidden, embedding, targets, weight))


def _of_chunk(scale, z_weight, hidden, embedding, targets, weight):
    """Objective, and (cross-entropy, accuracy): sums over a chunk's tokens [B, t], weighted."""
    logits = scale * jnp.einsum("btd,vd->btv", hidden, embedding, preferred_element_type=jnp.float32)
    partition = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    cross_entropy = jnp.sum(weight * (partition - right))
    objective = cross_entropy + z_weight * jnp.sum(weight * jnp.square(partition))
    return objective, (cross_entropy, jnp.sum(weight * (right == logits.max(axis=-1))))


def _in_chunks(chunk, *arrays):
    """[B, T, …] -> [chunks, B, chunk, …], filled up with zeros."""

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    return tuple(split(x) for x in arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunked(scale, z_weight, chunk, hidden, embedding, targets, weight):
    # Where nobody differentiates, the gradients are dead code, which XLA removes.
    return _chunked_fwd(scale, z_weight, chunk, hidden, embedding, targets, weight)[0]


def _chunked_fwd(scale, z_weight, chunk, hidden, embedding, targets, weight):
    """The sums, and the objective's gradients in hidden states and embeddings (added up in the embeddings' dtype).

    Each part of the batch that devices of a mesh hold has sums of its own until all chunks are done: chips exchange
    the embeddings' gradient once.
    """
    parts = batch_parts(jax.sharding.get_abstract_mesh())
    by_part = [x.reshape(parts, -1, *x.shape[1:]) for x in (hidden, targets, weight)]
    # Gathered here and not in every chunk.
    weights = constrained(embedding.astype(hidden.dtype), "vocabulary", None)
    of_part = jax.vmap(partial(_part_fwd, scale, z_weight, chunk, embedding.dtype, weights))
    sums, d_hidden, d_embedding = of_part(*by_part)
    d_embedding = constrained(d_embedding, "batch", "vocabulary", None).sum(axis=0)
    d_embedding = constrained(d_embedding, "vocabulary", "width")
    return tuple(x.sum() for x in sums), (d_hidden.reshape(hidden.shape), d_embedding)


def _part_fwd(scale, z_weight, chunk, dtype, weights, hidden, targets, weight):
    """`_chunked_fwd` of one part of the batch: the sums, the gradients in hidden states and in weights (`dtype`)."""
    of_chunk = jax.value_and_grad(partial(_of_chunk, scale, z_weight), argnums=(0, 1), has_aux=True)

    def add(carry, xs):
        hidden, targets, weight = xs
        (objective, others), (d_hidden, d_weights) = of_chunk(hidden, weights, targets, weight)
        more = (objective, *others), d_weights.astype(dtype)
        return jax.tree.map(jnp.add, carry, more), d_hidden

    chunks = _in_chunks(min(chunk, hidden.shape[1]), hidden, targets, weight)
    zeros = (jnp.zeros(()),) * 3, jnp.zeros(weights.shape, dtype)
    (sums, d_embedding), d_hidden = jax.lax.scan(add, zeros, chunks)
    d_hidden = jnp.moveaxis(d_hidden, 0, 1).reshape(hidden.shape[0], -1, hidden.shape[2])
    return sums, d_hidden[:, : hidden.shape[1]], d_embedding


def _chunked_bwd(scale, z_weight, chunk, gradients, cotangents):
    d_hidden, d_embedding = (g * cotangents[0].astype(g.dtype) for g in gradients)
    return d_hidden, d_embedding, None, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)
