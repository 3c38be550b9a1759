"""Attention of queries over visible entries and exact tokens in one softmax (SPEC §1)."""

import jax
import jax.numpy as jnp

from phase_jax.axes import Entries, ExactKV, Queries
from phase_jax.geometry import ExactBranch

_MASKED = -1e30


def _scores(equation: str, q: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array:
    scores = jnp.einsum(equation, q, k, preferred_element_type=jnp.float32)
    return jnp.where(seen, scores, _MASKED)


def full_attention(q: Queries, k: ExactKV, v: ExactKV) -> Queries:
    """Causal attention: q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H]."""
    batch, length, heads, head_dim = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, head_dim) * head_dim**-0.5
    seen = jnp.tril(jnp.ones((length, length), bool))[:, None]
    weights = jax.nn.softmax(_scores("btkgh,bukh->bktgu", q, k, seen), axis=-1)
    out = jnp.einsum("bktgu,bukh->bktgh", weights.astype(v.dtype), v)
    return jnp.moveaxis(out, 1, 2).reshape(batch, length, heads, head_dim)


def joint_attention(
    q: Queries, entry_k: Entries, entry_v: Entries, exact_k: ExactKV, exact_v: ExactKV, exact: ExactBranch
) -> Queries:
    """One softmax over [visible entries, exact tokens]: q [B, T, N, H] -> [B, T, N, H].

    Entries are [B, J, K, H], exact keys and values [B, T, K, H]. Queries go in blocks as long as the exact branch
    reaches, so a block's exact tokens lie in itself and the block before: scores are [T, J] and [T, 2·reach], and no
    [T, T] array is formed.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads, reach = exact_k.shape[2], exact.reach
    blocks = -(-length // reach)

    def to_blocks(x):
        padded = jnp.pad(x, [(0, 0), (0, blocks * reach - length), (0, 0), (0, 0)])
        return padded.reshape(batch, blocks, reach, *x.shape[2:])

    def with_previous(x):
        x = to_blocks(x)
        return jnp.concatenate([jnp.pad(x, [(0, 0), (1, 0)] + [(0, 0)] * 3)[:, :-1], x], axis=2)

    q = to_blocks(q * head_dim**-0.5).reshape(batch, blocks, reach, kv_heads, heads // kv_heads, head_dim)
    near_k, near_v = with_previous(exact_k), with_previous(exact_v)

    t = jnp.arange(blocks * reach).reshape(blocks, reach, 1)
    u = (jnp.arange(blocks)[:, None, None] - 1) * reach + jnp.arange(2 * reach)
    near_seen = ((u >= exact.first(t)) & (u <= t) & (u >= 0))[:, :, None]
    entry_seen = exact.windows.visible(t, length)

    near = _scores("bcqkgh,bcukh->bkcqgu", q, near_k, near_seen)
    far = _scores("bcqkgh,bjkh->bkcqgj", q, entry_k, entry_seen)
    top = jnp.max(near, axis=-1, keepdims=True)
    if far.shape[-1]:
        top = jnp.maximum(top, jnp.max(far, axis=-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    near = jnp.where(near_seen, jnp.exp(near - top), 0.0)
    far = jnp.where(entry_seen, jnp.exp(far - top), 0.0)
    mass = near.sum(axis=-1, keepdims=True) + far.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bkcqgu,bcukh->bkcqgh", near.astype(near_v.dtype), near_v)
    out = out + jnp.einsum("bkcqgj,bjkh->bkcqgh", far.astype(entry_v.dtype), entry_v)
    out = jnp.moveaxis(out / mass.astype(out.dtype), 1, 3)
    return out.reshape(batch, blocks * reach, heads, head_dim)[:, :length]
