"""Joint attention in plain jax.numpy: the specification of the kernel, and the path that CPUs run.

Two forms of the same numbers. Dense: all scores at once, fastest at lab sizes. Blockwise: queries and keys in blocks
with an online softmax, memory linear in T; it also serves the cache, whose queries begin at any position.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.online_softmax import Softmax, masked_scores
from phase_jax.axes import ExactKV, KeysAndValues, Queries
from phase_jax.geometry import ExactBranch

LONG, PARTS = 256, 4  # full attention over so many tokens goes in parts


def full_attention(q: Queries, k: ExactKV, v: ExactKV, sink: jax.Array | None = None) -> Queries:
    """Causal attention: q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H].

    Queries of long sequences go in parts, each of which meets the keys up to its end: of the scores that no query sees
    three quarters are not formed.
    """
    length = q.shape[1]
    rows = -(-length // PARTS) if length >= LONG else length
    ends = [min(first + rows, length) for first in range(0, length, rows)]
    parts = [
        _last_queries(q[:, first:end], k[:, :end], v[:, :end], sink)
        for first, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    return jnp.concatenate(parts, axis=1)


def _last_queries(q, k, v, sink):
    """Causal attention of the last queries: q [B, t, N, H], k and v [B, T, K, H] -> [B, t, N, H]."""
    batch, rows, heads, head_dim = q.shape
    q = q.reshape(batch, rows, k.shape[2], -1, head_dim) * head_dim**-0.5
    seen = jnp.tril(jnp.ones((rows, k.shape[1]), bool), k.shape[1] - rows)[:, None]
    scores = masked_scores("btkgh,bukh->bktgu", q, k, seen)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sink is not None:
        sink = sink.astype(jnp.float32).reshape(q.shape[2:4])[:, None, :, None]
        top = jnp.maximum(top, sink)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top)
    mass = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        mass = mass + jnp.exp(sink - top)
    out = jnp.einsum("bktgu,bukh->bktgh", weights.astype(v.dtype), v) / mass.astype(v.dtype)
    return jnp.moveaxis(out, 1, 2).reshape(batch, rows, heads, head_dim)


def dense_attention(
    q: Queries, entries: KeysAndValues, tokens: KeysAndValues, exact: ExactBranch, sink: jax.Array | None = None
) -> Queries:
    """One softmax over [visible entries, exact tokens]: q [B, T, N, H] -> [B, T, N, H].

    Entries are [B, J, K, H], exact keys and values [B, T, K, H]. Queries go in blocks as long as the exact branch
    reaches, so a block's exact tokens lie in itself and the block before: scores are [T, J] and [T, 2·reach], and no
    [T, T] array is formed.
    """
    batch, length, heads, head_dim = q.shape
    (entry_k, entry_v), kv_heads, reach = entries, tokens[0].shape[2], exact.reach
    blocks = -(-length // reach)

    def to_blocks(x):
        padded = jnp.pad(x, [(0, 0), (0, blocks * reach - length), (0, 0), (0, 0)])
        return padded.reshape(batch, blocks, reach, *x.shape[2:])

    def with_previous(x):
        x = to_blocks(x)
        return jnp.concatenate([jnp.pad(x, [(0, 0), (1, 0)] + [(0, 0)] * 3)[:, :-1], x], axis=2)

    q = to_blocks(q * head_dim**-0.5).reshape(batch, blocks, reach, kv_heads, heads // kv_heads, head_dim)
    near_k, near_v = (with_previous(x) for x in tokens)

    t = jnp.arange(blocks * reach).reshape(blocks, reach, 1)
    u = (jnp.arange(blocks)[:, None, None] - 1) * reach + jnp.arange(2 * reach)
    near_seen = ((u >= exact.first(t)) & (u <= t) & (u >= 0))[:, :, None]
    entry_seen = exact.windows.visible(t, length)

    near = masked_scores("bcqkgh,bcukh->bkcqgu", q, near_k, near_seen)
    far = masked_scores("bcqkgh,bjkh->bkcqgj", q, entry_k, entry_seen)
    top = jnp.max(near, axis=-1, keepdims=True)
    if far.shape[-1]:
        top = jnp.maximum(top, jnp.max(far, axis=-1, keepdims=True))
    if sink is not None:
        sink = sink.astype(jnp.float32).reshape(kv_heads, 1, 1, -1, 1)
        top = jnp.maximum(top, sink)
    top = jax.lax.stop_gradient(top)
    near = jnp.where(near_seen, jnp.exp(near - top), 0.0)
    far = jnp.where(entry_seen, jnp.exp(far - top), 0.0)
    mass = near.sum(axis=-1, keepdims=True) + far.sum(axis=-1, keepdims=True)
    if sink is not None:
        mass = mass + jnp.exp(sink - top)
    out = jnp.einsum("bkcqgu,bcukh->bkcqgh", near.astype(near_v.dtype), near_v)
    out = out + jnp.einsum("bkcqgj,bjkh->bkcqgh", far.astype(entry_v.dtype), entry_v)
    out = jnp.moveaxis(out / mass.astype(out.dtype), 1, 3)
    return out.reshape(batch, blocks * reach, heads, head_dim)[:, :length]


def blockwise_attention(
    q: Queries,
    far: KeysAndValues,
    near: KeysAndValues | None,
    exact: ExactBranch,
    start: int | jax.Array = 0,
    block: int | None = None,
    sink: jax.Array | None = None,
) -> Queries:
    """Attention of queries [B, T, N, H] at positions start … start + T − 1, in memory linear in T: [B, T, N, H].

    `far` are the entries [B, J, K, H], of which a query sees those that have closed; in full attention they are the
    tokens from position 0 on, of which it sees those up to itself. `near` are the exact tokens from position
    start − reach + 1 on, [B, reach − 1 + T, K, H]; None in full attention. There may be more of either than any query
    sees. No more than block² scores a head exist at once (all of them where `block` is None), and in the backward pass
    they are computed again.
    """
    batch, length, heads, head_dim = q.shape
    count, kv_heads = far[0].shape[1:3]
    rows = min(block or length, length)
    columns = max(1, min(block * block // rows if block else count, count))
    firsts = jnp.arange(0, length, rows)
    q = _blocks(q * head_dim**-0.5, rows)
    q = q.reshape(-1, batch, kv_heads, heads // kv_heads, rows, head_dim)
    sink = None if sink is None else sink.reshape(kv_heads, -1)
    far = tuple(_blocks(x, columns) for x in far)
    if near is not None:
        behind = exact.reach - 1
        reached = firsts[:, None] + jnp.arange(behind + rows)
        near = tuple(jnp.transpose(jnp.take(x, reached, axis=1, mode="clip"), (1, 0, 3, 2, 4)) for x in near)

    def one_block(rows_block):
        first, q, near = rows_block
        # Rows beyond the last query repeat its position, so that none of them sees nothing.
        t = start + jnp.minimum(first + jnp.arange(rows), length - 1)
        state = Softmax.of_nothing(q.shape, sink)
        if near is not None:
            u = start + first - behind + jnp.arange(behind + rows)
            state = state.absorb(q, *near, (u >= exact.first(t)[:, None]) & (u <= t[:, None]) & (u >= 0))
        seen = exact.windows.closed(t) if exact.windows else t + 1

        def absorb_far(state, columns_block):
            first, k, v = columns_block

            def absorb(state):
                return state.absorb(q, k, v, first + jnp.arange(columns) < seen[:, None])

            return jax.lax.cond(first < seen[-1], absorb, lambda state: state, state), None

        absorb_far = jax.checkpoint(absorb_far, prevent_cse=False)
        state, _ = jax.lax.scan(absorb_far, state, (jnp.arange(0, count, columns), *far))
        return state.result().astype(far[1].dtype)

    out = jax.lax.map(jax.checkpoint(one_block, prevent_cse=False), (firsts, q, near))
    out = jnp.transpose(out, (1, 0, 4, 2, 3, 5))  # [c, B, K, G, q, H] -> [B, c, q, K, G, H]
    return out.reshape(batch, -1, heads, head_dim)[:, :length]


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """[B, T, heads, H] -> [c, B, heads, size, H], filled up with zeros."""
    batch, length, *rest = x.shape
    x = jnp.pad(x, [(0, 0), (0, -length % size), (0, 0), (0, 0)])
    return jnp.transpose(x.reshape(batch, -1, size, *rest), (1, 0, 3, 2, 4))
